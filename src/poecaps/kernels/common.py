"""What the versions of the kernels share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import once_differentiable

if TYPE_CHECKING:
    from torch import Tensor

    from poecaps import functional as F
    from poecaps.kernels.flash import Coefficients

# A softmax of logits within ±60 needs no maximum taken out: e^60 times any number of inputs is far from overflow.
SAFE_LOGIT = 60.0


@dataclass(frozen=True)
class Options:
    """Options of `functional.routing_by_agreement`."""

    iterations: int = 1
    sharpness: float = 0.0
    normalize: F.Axis = "inputs"
    agreement: F.Agreement = "cosine"

    @property
    def inputs(self) -> bool:
        """Whether the inputs share, Σ_i c_ij = 1."""
        return self.normalize == "inputs"

    @property
    def cosine(self) -> bool:
        """Whether agreement is the cosine."""
        return self.agreement == "cosine"

    @property
    def bounded(self) -> bool:
        """Whether the softmax needs no maximum taken out."""
        return self.cosine and self.sharpness * (self.iterations - 1) <= SAFE_LOGIT


@dataclass(frozen=True)
class Held:
    """Capsules with what is held fixed while they are mixed: their coefficients and who may fire."""

    x: Tensor  # (B, I, K)
    z: Tensor  # (B, J, D), the preactivation of x
    coefficients: Tensor | Coefficients  # (B, I, J)
    on: Tensor | None  # (B, J) of bool; None: all may fire


def with_slope(weight: Tensor, value: Tensor, slope: Tensor | None) -> Tensor:
    """Give a value () the gradient in the weight that is known, in the shape of the weight; None: no gradient."""
    known: Tensor = value if slope is None else _WithSlope.apply(value, weight, slope)  # type: ignore[no-untyped-call]
    return known


class _WithSlope(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, weight: Tensor, slope: Tensor) -> Tensor:
        ctx.slope, ctx.dtype = slope, weight.dtype
        return value.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor, None]:
        scaled = torch.mul(ctx.slope, gradient, out=ctx.slope.new_empty(ctx.slope.shape))
        return None, scaled.to(ctx.dtype), None
