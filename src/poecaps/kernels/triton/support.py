"""Whether the Triton backend can run a call. This module does not import Triton."""

from __future__ import annotations

import importlib.util
import os
from functools import cache
from typing import TYPE_CHECKING

import torch

from poecaps.kernels.triton.launch import padded

if TYPE_CHECKING:
    from torch import Tensor

DTYPES = (torch.float16, torch.bfloat16, torch.float32)

# A program holds blocks of whole capsules in its registers, so the dimension is limited.
MAX_CAPSULE_DIM = 64

# Numbers of all experts together, J·D with D padded to a power of two. Blocks of experts, of 32
# numbers or more, lie on the second axis of a grid, which CUDA limits to 65,535 programs.
MAX_EXPERT_COLUMNS = 2**20


@cache
def installed() -> bool:
    """Return whether Triton is installed, without importing it."""
    return importlib.util.find_spec("triton") is not None


def why_not(x: Tensor, weight: Tensor, *, needs_grad: bool) -> str | None:  # noqa: ARG001 (either)
    """Return why the backend cannot run a call, with the remedy; None if it can.

    Parameters
    ----------
    x : (B, I, K)
    weight : (I, J, D, K)
    needs_grad
        Whether a gradient through the routing is required. The backend computes it.
    """
    _, experts, out_dim, in_dim = weight.shape
    return why_not_sizes(x.device.type, x.dtype, experts, out_dim, in_dim)


def why_not_sizes(
    device: str, dtype: torch.dtype, experts: int, out_dim: int, in_dim: int
) -> str | None:
    """Return `why_not` of tensors of this kind of device, dtype, J, D and K."""
    if not installed():
        return "Triton is not installed; install it with pip install triton"
    if device != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return f"the tensors are on {device!r}; move layer and data to a CUDA device"
    if dtype not in DTYPES:
        return f"the dtype is {dtype}; use torch.float32, torch.bfloat16 or torch.float16"
    if max(out_dim, in_dim) > MAX_CAPSULE_DIM:
        return (
            f"capsules have {max(out_dim, in_dim)} dimensions; "
            f"use capsules of at most {MAX_CAPSULE_DIM} dimensions"
        )
    if experts * padded(out_dim, 1) > MAX_EXPERT_COLUMNS:
        return (
            f"there are {experts:,} experts of {out_dim} dimensions; "
            f"use experts with at most {MAX_EXPERT_COLUMNS:,} numbers altogether"
        )
    return None
