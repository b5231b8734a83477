"""Routing from many input capsules to few experts (I ≥ J), as in the encoder, without the votes.

The reference computes all votes u_ij = W_ij x_i, B×I×J×D numbers. None of them has to be stored.
With x_k (I×B) for component k of all inputs, and W_jk (D×I) for the weights of expert j on it,

    z_j = Σ_k W_jk (c_j ⊙ x_k)
    ⟨u_ij, v_j⟩ = Σ_k x_ik (W_jkᵀ v_j)_i
    ‖u_ij‖² = x_iᵀ (W_ijᵀ W_ij) x_i

so one k at a time suffices, for all experts and a block of images whose J×I×B numbers stay in the
cache. Inside this module the batch is the last axis: capsules have shape (K, I, B), experts
(J, D, B), coefficients (J, I, B) and weights (J, D, K, I).
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import torch

from poecaps import functional as F
from poecaps.kernels.torch_routing.recorded import RecordedRouting

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from poecaps.kernels.torch_routing.gradient import GradientTerm

BLOCK = 128  # images in a block on a CPU, where J×I×B numbers stay in the cache
CANCELLATION = 0.01  # of the largest possible ‖u‖²: below it, xᵀ(WᵀW)x has lost too many digits
MAX_VOTES = 2**16  # votes computed at a time where xᵀ(WᵀW)x cancels: bounds their memory
MAX_NUMBERS = 2**19  # numbers computed at a time for the norms of votes: 2 MiB stay in the cache


def routing_by_agreement(x: Tensor, weight: Tensor, routing: F.RoutingOptions) -> RecordedRouting:
    """Compute `functional.routing_by_agreement`: (B, I, K), (I, J, D, K) → c and z."""
    maps = layouts(weight, routing, len(x))
    experts, out_dim, _, inputs = maps.inputs_last.shape
    c = x.new_empty(experts, inputs, len(x))
    z = x.new_empty(routing.iterations, experts, out_dim, len(x))
    for block in blocks(x):
        capsules = batch_last(x[block])
        workspace = new_workspace(capsules, experts)
        c[..., block], z[..., block] = _route(capsules, maps, routing, workspace)
    return RecordedRouting(c.permute(2, 1, 0), z.permute(0, 3, 1, 2))


def preactivation(x: Tensor, weight: Tensor, coefficients: Tensor) -> Tensor:
    """Compute z_j = Σ_i c_ij W_ij x_i: (B, I, K), (I, J, D, K), (B, I, J) → (B, J, D)."""
    w = _inputs_last(weight)
    z = x.new_empty(*w.shape[:2], len(x))
    for block in blocks(x):
        c = batch_last(coefficients[block])
        z_block = x.new_empty(*w.shape[:2], c.shape[2])
        mix_forward(c, batch_last(x[block]), w, torch.empty_like(c), out=z_block)
        z[..., block] = z_block
    return z.permute(2, 0, 1)


def reconstruction(y: Tensor, weight: Tensor, coefficients: Tensor) -> Tensor:
    """Compute x̃_i = squash(Σ_j c_ij W_ijᵀ y_j): (B, J, D), (I, J, D, K), (B, I, J) → (B, I, K)."""
    inputs, _, _, dim = weight.shape
    w, x = _inputs_last(weight), y.new_empty(len(y), inputs, dim)
    for block in blocks(y):
        x[block] = F.squash(_mixed_back(y[block], w, coefficients[block]))
    return x


def mixed_back(y: Tensor, weight: Tensor, coefficients: Tensor) -> Tensor:
    """Compute Σ_j c_ij W_ijᵀ y_j: (B, J, D), (I, J, D, K), (B, I, J) → (B, I, K)."""
    inputs, _, _, dim = weight.shape
    w, x = _inputs_last(weight), y.new_empty(len(y), inputs, dim)
    for block in blocks(y):
        x[block] = _mixed_back(y[block], w, coefficients[block])
    return x


def products_with_votes(x: Tensor, weight: Tensor, y: Tensor) -> Tensor:
    """Compute ⟨W_ij x_i, y_j⟩: (B, I, K), (I, J, D, K), (B, J, D) → (B, I, J)."""
    inputs, experts, _, _ = weight.shape
    w, products = _inputs_last(weight), x.new_empty(experts, inputs, len(x))
    for block in blocks(x):
        capsules, experts_last = batch_last(x[block]), y[block].permute(1, 2, 0).contiguous()
        found = torch.empty_like(products[..., block], memory_format=torch.contiguous_format)
        vote_products(capsules, w, experts_last, torch.empty_like(found), out=found)
        products[..., block] = found
    return products.permute(2, 1, 0)


def free_energy_gradient(z: Tensor, on: Tensor | None, scale: float) -> Tensor:
    """Compute the gradient of −scale · F(z) = scale · Σ_j log(1 + ‖z_j‖²).

    Parameters
    ----------
    z : (B, J, D)
    on : (B, J), optional
        Where False, expert j may not fire and its gradient is 0.
    scale
        −1/B for the data and 1/B for the mixed capsules in a loss mean F(x) − mean F(x̃).

    Returns
    -------
    (B, J, D)
        2 scale g(z_j) = 2 scale z_j/(1+‖z_j‖²).
    """
    return _free_energy_gradient(z.permute(1, 2, 0), on, scale).permute(2, 0, 1)


def weight_gradient(terms: Sequence[GradientTerm]) -> Tensor:
    """Compute Σ_b c_ij ∂L/∂z_j x_iᵀ, added over the terms: → (I, J, D, K)."""
    _, inputs, dim = terms[0].x.shape
    _, experts, out_dim = terms[0].grad_z.shape
    gradient = terms[0].x.new_zeros(dim, experts, out_dim, inputs)
    for term in terms:
        grad_z = term.grad_z.permute(1, 2, 0)
        for block in blocks(term.x):
            c, x = batch_last(term.coefficients[block]), batch_last(term.x[block])
            _add_weight_gradient(gradient, grad_z[..., block], c, x, torch.empty_like(c))
    return _inputs_first(gradient)


def contrastive_divergence(
    x: Tensor,
    weight: Tensor,
    routing: F.RoutingOptions,
    *,
    k: int,
    winners: int | None,
    balance: Tensor | None,
    views: int,
) -> F.LearningStep:
    """Compute `functional.contrastive_divergence` with deterministic mixing and without a chain.

    All steps are computed for one block of images before the next block. Only the contribution of
    a block to loss and gradient is kept.

    Parameters
    ----------
    x : (B, I, K)
    weight : (I, J, D, K)
    """
    inputs, experts, out_dim, dim = weight.shape
    needs_gradient = torch.is_grad_enabled() and weight.requires_grad
    gaps: list[Tensor] = []
    winning: list[Tensor] = []
    with torch.no_grad():
        maps = layouts(weight, routing, len(x))
        gradient = weight.new_zeros(dim, experts, out_dim, inputs) if needs_gradient else None
        for block in blocks(x, views):
            capsules = batch_last(x[block])
            workspace = new_workspace(capsules, experts)
            c, preactivations = _route(capsules, maps, routing, workspace)
            z = preactivations[-1]
            on = F.winning_experts(z.permute(2, 0, 1), winners, balance, views=views)
            free_energy = F.free_energy(z.permute(2, 0, 1), on)
            if gradient is not None:
                grad_z = _free_energy_gradient(z, on, -1 / len(x))
                _add_weight_gradient(gradient, grad_z, c, capsules, workspace[0])
            for _ in range(k):
                y = _only(on, F.squash(z, 1))
                capsules = _squash_(_mix_backward(y, c, maps.inputs_last))
                mix_forward(c, capsules, maps.inputs_last, workspace[0], out=z)
            gaps.append(free_energy - F.free_energy(z.permute(2, 0, 1), on))
            if gradient is not None:
                grad_z = _free_energy_gradient(z, on, 1 / len(x))
                _add_weight_gradient(gradient, grad_z, c, capsules, workspace[0])
            winning += [] if on is None else [on]
        loss = torch.cat(gaps).mean()
        grad_weight = None if gradient is None else _inputs_first(gradient)
    return F.LearningStep(loss, grad_weight, torch.cat(winning) if winning else None)


# ------------------------------------------------------------------------------------------------
# Of one block of images, with the axes in the order of the module's docstring


class Layouts(NamedTuple):
    """The weight in the layouts that the equations need."""

    weight: Tensor  # (I, J, D, K)
    inputs_last: Tensor  # (J, D, K, I)
    gram: Tensor | None  # (I, J, K(K+1)/2), see `_gram`; None where votes are cheaper


def layouts(weight: Tensor, routing: F.RoutingOptions, images: int) -> Layouts:
    """Bring a weight (I, J, D, K) into the layouts for routing this number of images."""
    inputs_last = _inputs_last(weight)
    needs_norms = routing.agreement == "cosine" and routing.iterations > 1
    gram_is_cheaper = min(weight.shape[2], images) >= weight.shape[3]
    return Layouts(
        weight, inputs_last, _gram(inputs_last) if needs_norms and gram_is_cheaper else None
    )


def blocks(x: Tensor, views: int = 1) -> list[slice]:
    """Split images into blocks; all views of an image are in the same block."""
    block = BLOCK if x.device.type == "cpu" else max(1, len(x))
    block = max(views, block - block % views)
    return [slice(start, start + block) for start in range(0, len(x), block)]


def new_workspace(capsules: Tensor, experts: int) -> Tensor:
    """Four numbers for each expert, input and image, allocated once: allocation is slow."""
    return capsules.new_empty(4, experts, *capsules.shape[1:])


def batch_last(x: Tensor) -> Tensor:
    """(B, I, K) → (K, I, B), or (B, I, J) → (J, I, B)."""
    return x.permute(2, 1, 0).contiguous()


def _inputs_last(weight: Tensor) -> Tensor:
    """(I, J, D, K) → (J, D, K, I)."""
    return weight.permute(1, 2, 3, 0).contiguous()


def _inputs_first(gradient: Tensor) -> Tensor:
    """(K, J, D, I) → (I, J, D, K)."""
    return gradient.permute(3, 1, 2, 0).contiguous()


def _route(
    capsules: Tensor, maps: Layouts, routing: F.RoutingOptions, workspace: Tensor
) -> tuple[Tensor, Tensor]:
    """Route: (K, I, B) → coefficients (J, I, B), in the workspace, and z of all (R, J, D, B).

    The logits are b_ij = ⟨u_ij, h_j⟩, over ‖u_ij‖ for the cosine: the sum of the agreements of all
    iterations is the agreement with the sum h of the agreement vectors, direction or squash of z.
    """
    buffer, b, c, inverse_norms = workspace
    axis = 1 if routing.normalize == "inputs" else 0
    cosine = routing.agreement == "cosine"
    uniform = 1 / c.shape[axis]
    experts, out_dim, _, _ = maps.inputs_last.shape
    z = capsules.new_empty(routing.iterations, experts, out_dim, capsules.shape[2])
    torch.mul(_sum_votes(capsules, maps.inputs_last), uniform, out=z[0])
    if routing.iterations == 1:
        return c.fill_(uniform), z
    if cosine:
        inverse_vote_norms(capsules, maps, b, out=inverse_norms)
    agreement_sum = torch.zeros_like(z[0])
    for before, after in pairwise(z):
        agreement_sum += F.direction(before, 1) if cosine else F.squash(before, 1)
        vote_products(capsules, maps.inputs_last, routing.sharpness * agreement_sum, buffer, out=b)
        torch.softmax(b.mul_(inverse_norms) if cosine else b, dim=axis, out=c)
        mix_forward(c, capsules, maps.inputs_last, buffer, out=after)
    return c, z


def _sum_votes(capsules: Tensor, w: Tensor) -> Tensor:
    """Σ_i W_ij x_i, for all k in one product: (K, I, B), (J, D, K, I) → (J, D, B)."""
    return torch.mm(w.flatten(2).flatten(0, 1), capsules.flatten(0, 1)).view(*w.shape[:2], -1)


def mix_forward(c: Tensor, capsules: Tensor, w: Tensor, buffer: Tensor, out: Tensor) -> None:
    """z_j = Σ_k W_jk (c_j ⊙ x_k): (J, I, B), (K, I, B), (J, D, K, I) → (J, D, B)."""
    for k, component in enumerate(capsules):
        torch.mul(c, component, out=buffer)
        torch.baddbmm(out, w[:, :, k], buffer, beta=min(k, 1), out=out)


def vote_products(capsules: Tensor, w: Tensor, v: Tensor, buffer: Tensor, out: Tensor) -> None:
    """⟨u_ij, v_j⟩ = Σ_k x_ik (W_jkᵀ v_j)_i: (K, I, B), (J, D, K, I), (J, D, B) → (J, I, B)."""
    for k, component in enumerate(capsules):
        torch.bmm(w[:, :, k].mT, v, out=buffer)
        if k == 0:
            torch.mul(buffer, component, out=out)
        else:
            torch.addcmul(out, buffer, component, out=out)


def _mixed_back(y: Tensor, w: Tensor, coefficients: Tensor) -> Tensor:
    """Σ_j c_ij W_ijᵀ y_j of a block: (B, J, D), (J, D, K, I), (B, I, J) → (B, I, K)."""
    z = _mix_backward(y.permute(1, 2, 0), coefficients.permute(2, 1, 0), w)
    return z.permute(2, 1, 0).contiguous()


def _mix_backward(y: Tensor, c: Tensor, w: Tensor) -> Tensor:
    """Σ_j c_ij W_ijᵀ y_j: (J, D, B), (J, I, B), (J, D, K, I) → (K, I, B)."""
    _, _, dim, inputs = w.shape
    total = y.new_zeros(dim, inputs, y.shape[2])
    product = torch.empty_like(total)
    for j in range(len(w)):
        torch.mm(w[j].flatten(1).T, y[j], out=product.view(dim * inputs, -1))
        total.addcmul_(product, c[j])
    return total


def _squash_(x: Tensor) -> Tensor:
    """x_i ‖x_i‖/(1+‖x_i‖²), in place: (K, I, B).

    Rounding may increase a norm to 1, which `functional.squash` prevents at a higher cost.
    """
    square = x.square().sum(0)
    return x.mul_(square.sqrt().div_(1 + square))


def _free_energy_gradient(z: Tensor, on: Tensor | None, scale: float) -> Tensor:
    """2 scale z_j/(1+‖z_j‖²), 0 where an expert may not fire: (J, D, B), (B, J) → (J, D, B)."""
    return _only(on, z * (2 * scale / (1 + z.square().sum(1, keepdim=True))))


def _only(on: Tensor | None, y: Tensor) -> Tensor:
    """Set the experts (J, D, B) that may not fire (B, J) to 0."""
    return y if on is None else y * on.T.unsqueeze(1)


def _add_weight_gradient(
    gradient: Tensor, grad_z: Tensor, c: Tensor, capsules: Tensor, buffer: Tensor
) -> None:
    """Add Σ_b ∂L/∂z_j (c_j ⊙ x_k)ᵀ to the gradient (K, J, D, I)."""
    for k, component in enumerate(capsules):
        gradient[k].baddbmm_(grad_z, torch.mul(c, component, out=buffer).mT)


def _gram(w: Tensor) -> Tensor:
    """W_ijᵀ W_ij: (J, D, K, I) → (I, J, K(K+1)/2).

    Only the upper triangle is stored, with the entries off the diagonal doubled.
    """
    experts, _, dim, inputs = w.shape
    gram = w.new_zeros(experts, dim, dim, inputs)
    for row in w.unbind(1):
        gram.addcmul_(row.unsqueeze(2), row.unsqueeze(1))
    k, m = torch.triu_indices(dim, dim, device=w.device)
    doubled = gram[:, k, m] * torch.where(k == m, 1, 2).unsqueeze(1)
    return doubled.permute(2, 0, 1).contiguous()


def inverse_vote_norms(capsules: Tensor, maps: Layouts, squares: Tensor, out: Tensor) -> None:
    """1/‖W_ij x_i‖, and 0 for a zero vote: (K, I, B) → (J, I, B); `squares` is a buffer.

    xᵀ(WᵀW)x takes a third of the operations of the votes, but the sum cancels if a vote is short
    for its map and its capsule. There, and where votes are few or short enough to be cheaper, the
    votes are computed.
    """
    _, inputs, batch = capsules.shape
    _, experts, out_dim, _ = maps.weight.shape
    squares = squares.view(inputs, experts, batch)
    numbers = (experts * out_dim if maps.gram is None else maps.gram.shape[2]) * batch
    step = max(1, MAX_NUMBERS // numbers)
    for some in (slice(first, first + step) for first in range(0, inputs, step)):
        x = capsules[:, some].transpose(0, 1)  # (I', K, B) of the inputs I' of this step
        weight = maps.weight[some]  # (I', J, D, K)
        if maps.gram is None:
            votes = (weight.flatten(1, 2) @ x).unflatten(1, (experts, out_dim))
            torch.sum(votes.square_(), 2, out=squares[some])
        else:
            _vote_squares(x, weight, maps.gram[some], out=squares[some])
    out.copy_(squares.rsqrt_().nan_to_num_(0, posinf=0).transpose(0, 1))


def _vote_squares(x: Tensor, weight: Tensor, gram: Tensor, out: Tensor) -> None:
    """‖W_ij x_i‖²: (I, K, B), (I, J, D, K), (I, J, K(K+1)/2) → (I, J, B)."""
    inputs, dim, batch = x.shape
    pairs = x.new_empty(inputs, gram.shape[2], batch)  # x_k x_m for k ≤ m
    diagonal: list[int] = []
    first = 0
    for k in range(dim):
        torch.mul(x[:, k : k + 1], x[:, k:], out=pairs[:, first : first + dim - k])
        diagonal.append(first)
        first += dim - k
    torch.bmm(gram, pairs, out=out)
    # ‖W‖² ‖x‖² with the Frobenius norm of W is the largest possible ‖W x‖².
    weight_bound = CANCELLATION * gram[..., diagonal].sum(2, keepdim=True)
    capsule_square = pairs[:, diagonal].sum(1, keepdim=True)
    if torch.addcmul(out, weight_bound, capsule_square, value=-1).amin() <= 0:
        bound = weight_bound * capsule_square
        for some in ((out <= bound) & (bound > 0)).nonzero().split(MAX_VOTES):
            i, j, b = some.unbind(1)
            out[i, j, b] = (weight[i, j] @ x[i, :, b].unsqueeze(2)).square_().sum((1, 2))
