"""Routing from few input capsules to many experts (I < J), as in the capsule decoder.

The votes of one input are one matrix product, u_i = x_i W_i with W_i of shape (K, D·J), and are
computed once. They are stored as (I, B, D, J), so that every inner loop runs along the experts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from poecaps import functional as F
from poecaps.kernels.torch_routing.recorded import RecordedRouting

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from poecaps.kernels.torch_routing.gradient import GradientTerm


def routing_by_agreement(x: Tensor, weight: Tensor, routing: F.RoutingOptions) -> RecordedRouting:
    """Compute `functional.routing_by_agreement`: (B, I, K), (I, J, D, K) → c and z."""
    u = _votes(x, weight)  # (I, B, D, J)
    b = x.new_zeros(u.shape[0], u.shape[1], u.shape[3])  # (I, B, J)
    axis = 0 if routing.normalize == "inputs" else 2
    cosine = routing.agreement == "cosine"
    c = torch.softmax(b, dim=axis)
    z = [_mix_votes(c, u)]
    inverse_norms = _inverse_norms(u) if cosine and routing.iterations > 1 else None
    for _ in range(routing.iterations - 1):
        agreement_vector = F.direction(z[-1], 1) if cosine else F.squash(z[-1], 1)
        products = torch.stack([(u_i * agreement_vector).sum(1) for u_i in u])
        b += routing.sharpness * (products if inverse_norms is None else products * inverse_norms)
        c = torch.softmax(b, dim=axis)
        z.append(_mix_votes(c, u))
    return RecordedRouting(c.transpose(0, 1), torch.stack(z).transpose(2, 3))


def preactivation(x: Tensor, weight: Tensor, coefficients: Tensor) -> Tensor:
    """Compute z_j = Σ_i c_ij W_ij x_i: (B, I, K), (I, J, D, K), (B, I, J) → (B, J, D)."""
    return _mix_votes(coefficients.transpose(0, 1), _votes(x, weight)).transpose(1, 2)


def reconstruction(y: Tensor, weight: Tensor, coefficients: Tensor) -> Tensor:
    """Compute x̃_i = squash(Σ_j c_ij W_ijᵀ y_j): (B, J, D), (I, J, D, K), (B, I, J) → (B, I, K)."""
    return F.squash(mixed_back(y, weight, coefficients))


def mixed_back(y: Tensor, weight: Tensor, coefficients: Tensor) -> Tensor:
    """Compute Σ_j c_ij W_ijᵀ y_j: (B, J, D), (I, J, D, K), (B, I, J) → (B, I, K)."""
    y = y.transpose(1, 2).contiguous()  # (B, D, J)
    c = coefficients.transpose(0, 1)
    z = [(y * c[i].unsqueeze(1)).flatten(1) @ w.T for i, w in enumerate(_matrices(weight))]
    return torch.stack(z, dim=1)


def products_with_votes(x: Tensor, weight: Tensor, y: Tensor) -> Tensor:
    """Compute ⟨W_ij x_i, y_j⟩: (B, I, K), (I, J, D, K), (B, J, D) → (B, I, J)."""
    y = y.transpose(1, 2)  # (B, D, J)
    votes = ((x[:, i] @ w).view(y.shape) for i, w in enumerate(_matrices(weight)))
    return torch.stack([(u * y).sum(1) for u in votes], dim=1)


def free_energy_gradient(z: Tensor, on: Tensor | None, scale: float) -> Tensor:
    """Compute the gradient of −scale · F(z), as in `many_to_few`: (B, J, D), (B, J) → (B, J, D)."""
    square = z.square().sum(-1, keepdim=True)
    # A tensor, because torch divides a number by multiplying with the reciprocal, rounding twice.
    grad_z = z * (torch.full_like(square, 2 * scale) / (1 + square))
    return grad_z if on is None else grad_z * on.unsqueeze(-1)


def weight_gradient(terms: Sequence[GradientTerm]) -> Tensor:
    """Compute Σ_b c_ij ∂L/∂z_j x_iᵀ, added over the terms: → (I, J, D, K)."""
    _, inputs, dim = terms[0].x.shape
    _, experts, out_dim = terms[0].grad_z.shape
    gradient = terms[0].x.new_zeros(inputs, dim, out_dim * experts)
    for term in terms:
        grad_z = term.grad_z.transpose(1, 2).contiguous()  # (B, D, J)
        for i in range(inputs):
            weighted = (grad_z * term.coefficients[:, i].unsqueeze(1)).flatten(1)
            gradient[i].addmm_(term.x[:, i].T, weighted)
    return gradient.view(inputs, dim, out_dim, experts).permute(0, 3, 2, 1).contiguous()


def _matrices(weight: Tensor) -> Tensor:
    """W_i as one matrix each: (I, J, D, K) → (I, K, D·J)."""
    return weight.permute(0, 3, 2, 1).flatten(2).contiguous()


def _votes(x: Tensor, weight: Tensor) -> Tensor:
    """u_ij = W_ij x_i: (B, I, K), (I, J, D, K) → (I, B, D, J)."""
    _, experts, out_dim, _ = weight.shape
    u = torch.bmm(x.transpose(0, 1).contiguous(), _matrices(weight))
    return u.view(*u.shape[:2], out_dim, experts)


def _inverse_norms(u: Tensor) -> Tensor:
    """1/‖u_ij‖, and 0 for a zero vote: (I, B, D, J) → (I, B, J)."""
    square = u.square().sum(2)
    return torch.where(square > 0, square.rsqrt(), 0)


def _mix_votes(c: Tensor, u: Tensor) -> Tensor:
    """z_j = Σ_i c_ij u_ij: (I, B, J), (I, B, D, J) → (B, D, J)."""
    z = torch.zeros_like(u[0])
    for i in range(len(u)):
        z.addcmul_(c[i].unsqueeze(1), u[i])
    return z
