"""The functions of `poecaps.functional` that learning spends its time in, in the fastest version that fits the call."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from poecaps import functional as F
from poecaps.kernels import votefree

if TYPE_CHECKING:
    from torch import Tensor


def routing_by_agreement(
    x: Tensor, weight: Tensor, *, iterations: int, sharpness: float, normalize: F.Axis, agreement: F.Agreement
) -> F.Routing:
    """Compute `functional.routing_by_agreement`, without the votes where no gradient is asked for."""
    without_votes = _fits(x, weight) and not torch.is_grad_enabled()
    route = votefree.routing_by_agreement if without_votes else F.routing_by_agreement
    return route(x, weight, iterations=iterations, sharpness=sharpness, normalize=normalize, agreement=agreement)


def preactivation(x: Tensor, weight: Tensor, coefficients: Tensor) -> Tensor:
    """Compute `functional.preactivation`, of data and held coefficients that need no gradient."""
    up = votefree.preactivation if _fits(x, weight) else F.preactivation
    return up(x, weight, coefficients)


def reconstruction(y: Tensor, weight: Tensor, coefficients: Tensor) -> Tensor:
    """Compute `functional.reconstruction`, without the votes where no gradient is asked for."""
    without_votes = _fits(y, weight) and not torch.is_grad_enabled()
    down = votefree.reconstruction if without_votes else F.reconstruction
    return down(y, weight, coefficients)


def _fits(x: Tensor, weight: Tensor) -> bool:
    """Whether the version without votes was written for this call: plain float32 or float64 on the CPU."""
    plain = not torch.compiler.is_compiling() and not torch.is_autocast_enabled("cpu")
    precise = x.dtype == weight.dtype and x.dtype in (torch.float32, torch.float64)
    return plain and precise and x.device.type == weight.device.type == "cpu"
