"""Routing without the votes: the functions of `poecaps.functional`, in less time and memory.

The reference makes all votes u_ij = W_ij x_i, B×I×J×D numbers. None of them is needed. With the weights of expert j
as one matrix W_j of shape (K·I, D),

    z_j = (c_·j ⊙ x) W_j          ⟨u_ij, v_j⟩ = Σ_k x_ik (W_j v_j)_ik          ‖u_ij‖² = x_iᵀ (W_ijᵀ W_ij) x_i

so one expert at a time, with B×K×I numbers that stay in the cache, is enough. Capsules lie here as (B, K, I), so that
every inner loop runs along I. No gradient flows through the routing; `preactivation` has the gradient in the weight
that learning needs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import once_differentiable

from poecaps import functional as F

if TYPE_CHECKING:
    from torch import Tensor

    from poecaps.kernels.flash import Held


@torch.no_grad()
def routing_by_agreement(
    x: Tensor, weight: Tensor, *, iterations: int, sharpness: float, normalize: F.Axis, agreement: F.Agreement
) -> F.Routing:
    """Compute what `functional.routing_by_agreement` does, without a gradient."""
    w, capsules = _by_expert(weight), _lying(x)
    b = x.new_zeros(weight.shape[1], x.shape[0], x.shape[1])  # (J, B, I)
    axis = 2 if normalize == "inputs" else 0
    c = torch.softmax(b, dim=axis)
    z = _mix(c, capsules, w)
    if iterations > 1:
        size = _inverse_vote_norms(x, weight) if agreement == "cosine" else None
        speak = F.direction if agreement == "cosine" else F.squash
        for _ in range(iterations - 1):
            b += sharpness * _inner(capsules, w, speak(z), size)
            c = torch.softmax(b, dim=axis)
            z = _mix(c, capsules, w)
    return F.Routing(c.permute(1, 2, 0), z.transpose(0, 1))


def preactivation(x: Tensor, weight: Tensor, coefficients: Tensor) -> Tensor:
    """Compute z_j = Σ_i c_ij W_ij x_i, with a gradient in the weight alone.

    Parameters
    ----------
    x : (B, I, K)
    weight : (I, J, D, K)
    coefficients : (B, I, J)

    Returns
    -------
    (B, J, D)
    """
    z: Tensor = _Preactivation.apply(x, weight, coefficients)  # type: ignore[no-untyped-call]
    return z


def free_energy_gap(weight: Tensor, data: Held, model: Held) -> Tensor:
    """Compute mean F(x) − mean F(x̃) for what is held, with a gradient in the weight alone: → ()."""
    gap: Tensor = _FreeEnergyGap.apply(weight, data, model)  # type: ignore[no-untyped-call]
    return gap


@torch.no_grad()
def reconstruction(y: Tensor, weight: Tensor, coefficients: Tensor) -> Tensor:
    """Compute x̃_i = squash(Σ_j c_ij W_ijᵀ y_j), without a gradient.

    Parameters
    ----------
    y : (B, J, D)
    weight : (I, J, D, K)
    coefficients : (B, I, J)

    Returns
    -------
    (B, I, K)
    """
    inputs, _, _, dim = weight.shape
    total = y.new_zeros(len(y), dim, inputs)
    c = coefficients.permute(2, 0, 1).contiguous()
    for j, w in enumerate(_by_expert(weight)):
        total.addcmul_((y[:, j] @ w.T).view_as(total), c[j].unsqueeze(1))
    return F.squash(total.transpose(1, 2).contiguous())


class _Preactivation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, coefficients: Tensor) -> Tensor:
        capsules, c = _lying(x), coefficients.permute(2, 0, 1).contiguous()
        ctx.save_for_backward(capsules, c)
        return _mix(c, capsules, _by_expert(weight)).transpose(0, 1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor, None]:
        capsules, c = ctx.saved_tensors
        batch, dim, inputs = capsules.shape
        _, experts, out_dim = gradient.shape
        result = gradient.new_empty(experts, out_dim, dim, inputs)
        for j in range(experts):
            routed = (c[j].unsqueeze(1) * capsules).view(batch, -1)
            torch.mm(gradient[:, j].T, routed, out=result[j].view(out_dim, -1))
        return None, result.permute(3, 0, 1, 2).contiguous(), None


class _FreeEnergyGap(torch.autograd.Function):
    """Preactivations are known, so the loss costs nothing; its gradient is Σ c_ij g(z_j) x_iᵀ in closed form."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, data: Held, model: Held) -> Tensor:
        ctx.held, ctx.shape = (data, model), weight.shape
        # The capsules are saved as well, so that autograd notices if they are overwritten before the way back.
        ctx.save_for_backward(data.x, model.x)
        here, there = (F.free_energy(held.z, held.on).mean() for held in (data, model))
        return here - there

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        inputs, experts, out_dim, dim = ctx.shape
        total = gradient.new_zeros(experts, out_dim, dim * inputs)
        for held, x, sign in zip(ctx.held, ctx.saved_tensors, (-2, 2), strict=True):
            pull = held.z * (sign * gradient / (len(x) * (1 + held.z.square().sum(-1, keepdim=True))))
            pull = pull if held.on is None else pull * held.on.unsqueeze(-1)
            capsules, c = _lying(x), held.coefficients.permute(2, 0, 1).contiguous()
            for j in range(experts):
                total[j].addmm_(pull[:, j].T, (c[j].unsqueeze(1) * capsules).flatten(1))
        return total.view(experts, out_dim, dim, inputs).permute(3, 0, 1, 2).contiguous(), None, None


def _lying(x: Tensor) -> Tensor:
    """(B, I, K) → (B, K, I)."""
    return x.transpose(1, 2).contiguous()


def _by_expert(weight: Tensor) -> Tensor:
    """W_j as one matrix each: (I, J, D, K) → (J, K·I, D)."""
    return weight.permute(1, 3, 0, 2).flatten(1, 2).contiguous()


def _mix(c: Tensor, capsules: Tensor, w: Tensor) -> Tensor:
    """z_j = (c_·j ⊙ x) W_j: (J, B, I), (B, K, I), (J, K·I, D) → (J, B, D)."""
    z = capsules.new_empty(len(w), len(capsules), w.shape[2])
    for j in range(len(w)):
        torch.mm((c[j].unsqueeze(1) * capsules).flatten(1), w[j], out=z[j])
    return z


def _inner(capsules: Tensor, w: Tensor, v: Tensor, size: Tensor | None) -> Tensor:
    """⟨W_ij x_i, v_j⟩, times `size`: (B, K, I), (J, K·I, D), (J, B, D), (J, B, I) → (J, B, I)."""
    inner = capsules.new_empty(len(w), len(capsules), capsules.shape[2])
    for j in range(len(w)):
        torch.sum((v[j] @ w[j].T).view_as(capsules) * capsules, dim=1, out=inner[j])
    return inner if size is None else inner.mul_(size)


def _inverse_vote_norms(x: Tensor, weight: Tensor) -> Tensor:
    """1/‖W_ij x_i‖, and 0 for a zero vote: (B, I, K), (I, J, D, K) → (J, B, I)."""
    k, m = torch.triu_indices(x.shape[2], x.shape[2], device=x.device)
    gram = (weight.transpose(2, 3) @ weight)[..., k, m] * torch.where(k == m, 1, 2)  # (I, J, K(K+1)/2)
    products = x.transpose(0, 1)  # (I, B, K)
    square = torch.bmm(products[..., k] * products[..., m], gram.mT)  # (I, B, J)
    return torch.where(square > 0, square.rsqrt(), 0).permute(2, 1, 0).contiguous()
