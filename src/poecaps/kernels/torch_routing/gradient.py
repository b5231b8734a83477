"""The factors of a gradient with respect to the weight."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor


class GradientTerm(NamedTuple):
    """One term Σ_b c_ij ∂L/∂z_j x_iᵀ of the gradient of a loss L with respect to W_ij."""

    grad_z: Tensor  # (B, J, D)
    coefficients: Tensor  # (B, I, J)
    x: Tensor  # (B, I, K)
