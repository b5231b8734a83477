"""Routing without the votes: the functions of `poecaps.functional`, in less time and memory.

The reference makes all votes u_ij = W_ij x_i, B×I×J×D numbers. None of them is needed. With the weights of expert j
as one matrix W_j of shape (K·I, D),

    z_j = (c_·j ⊙ x) W_j          ⟨u_ij, v_j⟩ = Σ_k x_ik (W_j v_j)_ik          ‖u_ij‖² = x_iᵀ (W_ijᵀ W_ij) x_i

so one expert at a time is enough, for a block of images whose B×K×I numbers stay in the cache. Capsules lie here as
(B, K, I), so that every inner loop runs along I. No gradient flows through the routing; `preactivation` has the
gradient in the weight that learning needs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import once_differentiable

from poecaps import functional as F

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from poecaps.kernels.flash import Held


@torch.no_grad()
def routing_by_agreement(
    x: Tensor, weight: Tensor, *, iterations: int, sharpness: float, normalize: F.Axis, agreement: F.Agreement
) -> F.Routing:
    """Compute what `functional.routing_by_agreement` does, without a gradient."""
    (batch, inputs, _), (_, experts, out_dim, _) = x.shape, weight.shape
    w = _by_expert(weight)
    cosine = agreement == "cosine" and iterations > 1
    gram = _gram(weight) if cosine and out_dim >= x.shape[2] else None
    c, z = x.new_empty(experts, batch, inputs), x.new_empty(experts, batch, out_dim)
    axis, even = (2, 1 / inputs) if normalize == "inputs" else (0, 1 / experts)
    scratch = _scratch(x)
    work = x.new_empty(2, experts, len(scratch), inputs)
    for part in _blocks(x):
        capsules = _lying(x[part])
        rows = scratch[: len(capsules)]
        b, share = work[:, :, : len(capsules)]
        z[:, part] = even * _mix_evenly(capsules, w)
        if iterations == 1:
            c[:, part] = even
            continue
        size = _inverse_vote_norms(x[part], weight, gram) if cosine else None
        b.zero_()
        for _ in range(iterations - 1):
            speaking = F.direction(z[:, part]) if agreement == "cosine" else F.squash(z[:, part])
            _inner(capsules, w, speaking, rows, out=share)
            b.add_(share if size is None else share.mul_(size), alpha=sharpness)
            torch.softmax(b, dim=axis, out=share)
            _mix(share, capsules, w, rows, out=z[:, part])
        c[:, part] = share
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
    c, w = coefficients.permute(2, 0, 1), _by_expert(weight)
    total = y.new_zeros(len(y), dim, inputs)
    scratch = _scratch(total)
    for part in _blocks(y):
        rows = scratch[: len(y[part])]
        for j in range(len(w)):
            torch.mm(y[part, j], w[j].T, out=rows)
            total[part].addcmul_(rows.view_as(total[part]), c[j, part].unsqueeze(1))
    return F.squash(total.transpose(1, 2).contiguous())


class _Preactivation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, coefficients: Tensor) -> Tensor:
        ctx.shape = weight.shape
        ctx.save_for_backward(x, coefficients)
        c, w = coefficients.permute(2, 0, 1), _by_expert(weight)
        z, scratch = x.new_empty(len(w), len(x), w.shape[2]), _scratch(x)
        for part in _blocks(x):
            capsules = _lying(x[part])
            _mix(c[:, part], capsules, w, scratch[: len(capsules)], out=z[:, part])
        return z.transpose(0, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor, None]:
        x, coefficients = ctx.saved_tensors
        return None, _collected([(gradient, x, coefficients)], ctx.shape), None


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
        pulls = []
        for held, x, sign in zip(ctx.held, ctx.saved_tensors, (-2, 2), strict=True):
            pull = held.z * (sign * gradient / (len(x) * (1 + held.z.square().sum(-1, keepdim=True))))
            pulls.append((pull if held.on is None else pull * held.on.unsqueeze(-1), x, held.coefficients))
        return _collected(pulls, ctx.shape), None, None


SHORT = 0.01  # of a vote's greatest possible square: below this it is not got from the Gram matrix
MANY = 2**16  # votes made at once, at most, where that is
BLOCK = 128  # images at a time on a CPU, so that what one expert makes of them stays in the cache


def _block(x: Tensor) -> int:
    return min(BLOCK, len(x)) if x.device.type == "cpu" else len(x)


def _blocks(x: Tensor) -> list[slice]:
    return [slice(start, start + _block(x)) for start in range(0, len(x), max(1, _block(x)))]


def _scratch(x: Tensor) -> Tensor:
    """Room for what one expert makes of one block, used again and again: new memory is slow. (B', K·I)."""
    return x.new_empty(_block(x), x.shape[1] * x.shape[2])


def _collected(pulls: Sequence[tuple[Tensor, Tensor, Tensor]], shape: torch.Size) -> Tensor:
    """Σ c_ij p_j x_iᵀ over all images: pulls p (B, J, D), x (B, I, K), c (B, I, J) → (I, J, D, K)."""
    inputs, experts, out_dim, dim = shape
    total = pulls[0][0].new_zeros(experts, out_dim, dim * inputs)
    for pull, x, coefficients in pulls:
        c, scratch = coefficients.permute(2, 0, 1), _scratch(x)
        for part in _blocks(x):
            capsules = _lying(x[part])
            rows = scratch[: len(capsules)]
            for j in range(experts):
                torch.mul(c[j, part].unsqueeze(1), capsules, out=rows.view_as(capsules))
                total[j].addmm_(pull[part, j].T, rows)
    return total.view(experts, out_dim, dim, inputs).permute(3, 0, 1, 2).contiguous()


def _lying(x: Tensor) -> Tensor:
    """(B, I, K) → (B, K, I)."""
    return x.transpose(1, 2).contiguous()


def _by_expert(weight: Tensor) -> Tensor:
    """W_j as one matrix each: (I, J, D, K) → (J, K·I, D)."""
    return weight.permute(1, 3, 0, 2).flatten(1, 2).contiguous()


def _mix_evenly(capsules: Tensor, w: Tensor) -> Tensor:
    """Σ_i W_ij x_i, for all experts in one product: (B, K, I), (J, K·I, D) → (J, B, D)."""
    return torch.matmul(capsules.flatten(1), w)


def _mix(c: Tensor, capsules: Tensor, w: Tensor, rows: Tensor, out: Tensor) -> None:
    """z_j = (c_·j ⊙ x) W_j: (J, B, I), (B, K, I), (J, K·I, D) → (J, B, D), by way of `rows`."""
    for j in range(len(w)):
        torch.mul(c[j].unsqueeze(1), capsules, out=rows.view_as(capsules))
        torch.mm(rows, w[j], out=out[j])


def _inner(capsules: Tensor, w: Tensor, v: Tensor, rows: Tensor, out: Tensor) -> None:
    """⟨W_ij x_i, v_j⟩: (B, K, I), (J, K·I, D), (J, B, D) → (J, B, I), by way of `rows`."""
    for j in range(len(w)):
        torch.mm(v[j], w[j].T, out=rows)
        torch.sum(rows.view_as(capsules).mul_(capsules), dim=1, out=out[j])


def _gram(weight: Tensor) -> Tensor:
    """W_ijᵀ W_ij, its upper half with what is off the diagonal doubled: (I, J, D, K) → (I, J, K(K+1)/2)."""
    k, m = torch.triu_indices(weight.shape[3], weight.shape[3], device=weight.device)
    return (weight.transpose(2, 3) @ weight)[..., k, m] * torch.where(k == m, 1, 2)


def _inverse_vote_norms(x: Tensor, weight: Tensor, gram: Tensor | None) -> Tensor:
    """1/‖W_ij x_i‖, and 0 for a zero vote: (B, I, K), (I, J, D, K), (I, J, K(K+1)/2) → (J, B, I).

    xᵀ(WᵀW)x takes a third of the work of the votes, but where a vote is short for its map and its capsule that sum
    cancels. There, and where votes have so few components that they cost less (gram is None), the votes are made.
    """
    lying = x.permute(1, 2, 0).contiguous()  # (I, K, B)
    inputs, experts, out_dim, dim = weight.shape
    if gram is None:
        votes = weight.reshape(inputs, experts * out_dim, dim) @ lying
        square = votes.view(inputs, experts, out_dim, -1).square_().sum(2)  # (I, J, B)
    else:
        products, first = lying.new_empty(inputs, gram.shape[2], lying.shape[2]), 0
        for k in range(dim):
            pairs = dim - k
            torch.mul(lying[:, k : k + 1], lying[:, k:], out=products[:, first : first + pairs])
            first += pairs
        square = torch.bmm(gram, products)
        most = SHORT * weight.square().sum((2, 3)).unsqueeze(2) * lying.square().sum(1, keepdim=True)
        for some in ((square <= most) & (most > 0)).nonzero().split(MANY):
            i, j, b = some.unbind(1)
            square[i, j, b] = (weight[i, j] @ x[b, i].unsqueeze(2)).square_().sum((1, 2))
    silent = square <= 0
    return square.rsqrt_().masked_fill_(silent, 0).permute(1, 2, 0).contiguous()
