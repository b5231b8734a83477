"""The functions of `poecaps.functional` that learning spends its time in, in the fastest version that fits the call."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from poecaps import functional as F
from poecaps.kernels import fanout, votefree

if TYPE_CHECKING:
    from torch import Tensor


def routing_by_agreement(
    x: Tensor, weight: Tensor, *, iterations: int, sharpness: float, normalize: F.Axis, agreement: F.Agreement
) -> F.Routing:
    """Compute `functional.routing_by_agreement`, by a faster version where no gradient is asked for."""
    route = F.routing_by_agreement
    if _fits(x, weight) and not torch.is_grad_enabled():
        route = (fanout if _fans_out(weight) else votefree).routing_by_agreement
    return route(x, weight, iterations=iterations, sharpness=sharpness, normalize=normalize, agreement=agreement)


def preactivation(x: Tensor, weight: Tensor, coefficients: Tensor) -> Tensor:
    """Compute `functional.preactivation`, of data and held coefficients that need no gradient."""
    up = F.preactivation
    if _fits(x, weight):
        up = (fanout if _fans_out(weight) else votefree).preactivation
    return up(x, weight, coefficients)


def reconstruction(y: Tensor, weight: Tensor, coefficients: Tensor) -> Tensor:
    """Compute `functional.reconstruction`, by a faster version where no gradient is asked for."""
    down = F.reconstruction
    if _fits(y, weight) and not torch.is_grad_enabled():
        down = (fanout if _fans_out(weight) else votefree).reconstruction
    return down(y, weight, coefficients)


def _fans_out(weight: Tensor) -> bool:
    """Whether there are more outputs than inputs."""
    return weight.shape[1] > weight.shape[0]


def _fits(x: Tensor, weight: Tensor) -> bool:
    """Whether the faster versions were written for this call: plain float32 or float64 on the CPU."""
    plain = not torch.compiler.is_compiling() and not torch.is_autocast_enabled("cpu")
    precise = x.dtype == weight.dtype and x.dtype in (torch.float32, torch.float64)
    return plain and precise and x.device.type == weight.device.type == "cpu"
