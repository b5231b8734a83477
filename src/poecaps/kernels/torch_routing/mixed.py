"""The way down, x̃_i = squash(Σ_j c_ij W_ijᵀ y_j), with a gradient and without stored votes.

The sum p_i = Σ_j c_ij W_ijᵀ y_j mixes experts as routing mixes capsules, in the other direction. So
do its gradients, with g_i = ∂L/∂p_i of a loss L::

    ∂L/∂y_j  = Σ_i c_ij W_ij g_i
    ∂L/∂c_ij = ⟨W_ij g_i, y_j⟩
    ∂L/∂W_ij = Σ_images c_ij y_j g_iᵀ
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from poecaps import functional as F
from poecaps.kernels.torch_routing import closed_form, few_to_many, many_to_few
from poecaps.kernels.torch_routing.closed_form import ClosedForm
from poecaps.kernels.torch_routing.gradient import GradientTerm

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from poecaps.kernels.torch_routing.closed_form import Gradients


def reconstruction(y: Tensor, weight: Tensor, coefficients: Tensor) -> Tensor:
    """Compute `functional.reconstruction`, differentiable in all arguments.

    Parameters
    ----------
    y : (B, J, D)
    weight : (I, J, D, K)
    coefficients : (B, I, J)

    Returns
    -------
    (B, I, K)
    """
    (mixed,) = closed_form.apply(_FORM, y, weight, coefficients)
    return F.squash(mixed)


def _compute(y: Tensor, weight: Tensor, coefficients: Tensor) -> tuple[Tensor]:
    return (mixed_back(y, weight, coefficients),)


def _gradients(
    arguments: Sequence[Tensor], _: Sequence[Tensor], grads: Gradients, needs: Any
) -> Gradients:
    (grad,) = grads
    assert grad is not None  # noqa: S101 (it is that of the only result)
    return gradients(arguments, grad, needs)


def mixed_back(y: Tensor, weight: Tensor, coefficients: Tensor) -> Tensor:
    """Compute Σ_j c_ij W_ijᵀ y_j: (B, J, D), (I, J, D, K), (B, I, J) → (B, I, K)."""
    found: Tensor = _algorithm(weight).mixed_back(y, weight, coefficients)
    return found


def gradients(
    arguments: Sequence[Tensor], grad: Tensor, needs: tuple[bool, bool, bool]
) -> Gradients:
    """Compute the gradients in the arguments of `mixed_back` from that in its result (B, I, K)."""
    y, weight, coefficients = arguments
    algorithm = _algorithm(weight)
    needs_y, needs_weight, needs_coefficients = needs
    return (
        algorithm.preactivation(grad, weight, coefficients) if needs_y else None,
        algorithm.weight_gradient((GradientTerm(y, coefficients, grad),)) if needs_weight else None,
        algorithm.products_with_votes(grad, weight, y) if needs_coefficients else None,
    )


def _reference(y: Tensor, weight: Tensor, coefficients: Tensor) -> tuple[Tensor]:
    back = torch.einsum("bjd,ijdk->bijk", y, weight)
    return (torch.einsum("bij,bijk->bik", coefficients, back),)


def _algorithm(weight: Tensor) -> Any:
    """Return the module for these numbers of inputs and experts."""
    inputs, experts, _, _ = weight.shape
    return few_to_many if inputs < experts else many_to_few


_FORM = ClosedForm(_compute, _gradients, _reference, argument_axes=(0, None, 0), result_axes=(0,))
