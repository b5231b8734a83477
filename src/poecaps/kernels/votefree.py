"""Routing without the votes: the functions of `poecaps.functional`, in less time and memory.

The reference makes all votes u_ij = W_ij x_i, B×I×J×D numbers. None of them is needed. With x_k (I×B) for component k
of all inputs, and W_jk (D×I) for what expert j makes of it,

    z_j = Σ_k W_jk (c_j ⊙ x_k)      ⟨u_ij, v_j⟩ = Σ_k x_ik (W_jkᵀ v_j)_i      ‖u_ij‖² = x_iᵀ (W_ijᵀ W_ij) x_i

so one k at a time is enough, for all experts and a block of images whose J×I×B numbers stay in the cache. The batch
comes last here: capsules lie as (K, I, B), experts as (J, D, B), coefficients as (J, I, B), weights as (J, D, K, I). No
gradient flows through the routing; `preactivation` has the gradient in the weight that learning needs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch.autograd.function import once_differentiable

from poecaps import functional as F
from poecaps.kernels.common import Options, with_slope

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from poecaps.kernels.common import Held


@torch.no_grad()
def routing_by_agreement(
    x: Tensor, weight: Tensor, *, iterations: int, sharpness: float, normalize: F.Axis, agreement: F.Agreement
) -> F.Routing:
    """Compute what `functional.routing_by_agreement` does, without a gradient."""
    options = Options(iterations, sharpness, normalize, agreement)
    maps = _maps(weight, options, len(x))
    experts, out_dim, _, inputs = maps.lying.shape
    c, z = x.new_empty(experts, inputs, len(x)), x.new_empty(experts, out_dim, len(x))
    for part in _blocks(x):
        capsules = _lying(x[part])
        c[..., part], z[..., part] = _route(capsules, maps, options, _room(capsules, experts))
    return F.Routing(c.permute(2, 1, 0), z.permute(2, 0, 1))


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
    w, x = _lying_weight(weight), y.new_empty(len(y), inputs, dim)
    for part in _blocks(y):
        down = _down(y[part].permute(1, 2, 0), coefficients[part].permute(2, 1, 0), w)
        x[part] = F.squash(down.permute(2, 1, 0).contiguous())
    return x


def free_energy_gap(weight: Tensor, data: Held, model: Held) -> Tensor:
    """Compute mean F(x) − mean F(x̃) for what is held, with a gradient in the weight alone: → ()."""
    slope = _start(weight)
    with torch.no_grad():
        here, there = (F.free_energy(at.z, at.on).mean() for at in (data, model))
        for at, sign in ((data, -1), (model, 1)):
            pull = _pull(at.z.permute(1, 2, 0), at.on, sign / len(at.x))
            _collect(pull, cast("Tensor", at.coefficients), at.x, slope)
    return with_slope(weight, here - there, _standing(slope))


def contrastive_divergence(
    x: Tensor, weight: Tensor, k: int, options: Options, may_fire: Callable[[Tensor], Tensor | None]
) -> tuple[Tensor, Tensor | None]:
    """Compute what `kernels.contrastive_divergence` does, a block of images all the way before the next begins.

    Nothing is kept of a block but its part of the gradient.
    """
    maps, slope = _maps(weight.detach(), options, len(x)), _start(weight)
    gaps: list[Tensor] = []
    allowed: list[Tensor] = []
    with torch.no_grad():
        for part in _blocks(x):
            capsules = _lying(x[part])
            room = _room(capsules, len(maps.lying))
            c, z = _route(capsules, maps, options, room)
            on = may_fire(z.permute(2, 0, 1))
            here = F.free_energy(z.permute(2, 0, 1), on)
            _collect_block(_pull(z, on, -1 / len(x)), c, capsules, slope, room[0])
            for _ in range(k):
                capsules = _squash(_down(_only(on, F.squash(z, 1)), c, maps.lying))
                _mix(c, capsules, maps.lying, room[0], out=z)
            gaps.append(here - F.free_energy(z.permute(2, 0, 1), on))
            _collect_block(_pull(z, on, 1 / len(x)), c, capsules, slope, room[0])
            allowed += [] if on is None else [on]
        gap = torch.cat(gaps).mean()
    return with_slope(weight, gap, _standing(slope)), torch.cat(allowed) if allowed else None


class _Preactivation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, coefficients: Tensor) -> Tensor:
        ctx.shape = weight.shape
        ctx.save_for_backward(x, coefficients)
        w = _lying_weight(weight)
        z = x.new_empty(*w.shape[:2], len(x))
        for part in _blocks(x):
            c = coefficients[part].permute(2, 1, 0).contiguous()
            mixed = x.new_empty(*w.shape[:2], c.shape[2])
            _mix(c, _lying(x[part]), w, torch.empty_like(c), out=mixed)
            z[..., part] = mixed
        return z.permute(2, 0, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor, None]:
        x, coefficients = ctx.saved_tensors
        inputs, experts, out_dim, dim = ctx.shape
        slope = x.new_zeros(dim, experts, out_dim, inputs)
        _collect(gradient.permute(1, 2, 0), coefficients, x, slope)
        return None, slope.permute(3, 1, 2, 0).contiguous(), None


# ---------------------------------------------------------------------------------------------------------
# Of one block, whose axes lie as said above

SHORT = 0.01  # of a vote's greatest possible square: below this it is not got from the Gram matrix
FEW = 2**16  # votes made at once, at most, where that is
MANY = 2**19  # numbers made at once, at most, on the way to the norms of votes
BLOCK = 128  # images at a time on a CPU


class _Maps(NamedTuple):
    """The weight as the equations want it."""

    weight: Tensor  # (I, J, D, K)
    lying: Tensor  # (J, D, K, I)
    gram: Tensor | None  # (I, J, K(K+1)/2), see `_gram`; None where votes cost less


def _maps(weight: Tensor, options: Options, images: int) -> _Maps:
    lying = _lying_weight(weight)
    pays = options.cosine and options.iterations > 1 and min(weight.shape[2], images) >= weight.shape[3]
    return _Maps(weight, lying, _gram(lying) if pays else None)


def _blocks(x: Tensor) -> list[slice]:
    block = BLOCK if x.device.type == "cpu" else max(1, len(x))
    return [slice(start, start + block) for start in range(0, len(x), block)]


def _room(capsules: Tensor, experts: int) -> Tensor:
    """Room for four numbers of each input and expert, taken at once and used again: new memory is slow."""
    return capsules.new_empty(4, experts, *capsules.shape[1:])


def _lying(x: Tensor) -> Tensor:
    """(B, I, K) → (K, I, B)."""
    return x.permute(2, 1, 0).contiguous()


def _lying_weight(weight: Tensor) -> Tensor:
    """(I, J, D, K) → (J, D, K, I)."""
    return weight.permute(1, 2, 3, 0).contiguous()


def _route(capsules: Tensor, maps: _Maps, options: Options, room: Tensor) -> tuple[Tensor, Tensor]:
    """Route: (K, I, B) → coefficients (J, I, B), in the room, and preactivations (J, D, B)."""
    rows, b, c, size = room
    axis = 1 if options.inputs else 0
    even = 1 / c.shape[axis]
    z = even * _mix_evenly(capsules, maps.lying)
    if options.iterations == 1:
        return c.fill_(even), z
    if options.cosine:
        _inverse_vote_norms(capsules, maps, b, out=size)
    heard = torch.zeros_like(z)
    for _ in range(options.iterations - 1):
        heard += F.direction(z, 1) if options.cosine else F.squash(z, 1)
        _inner(capsules, maps.lying, options.sharpness * heard, rows, out=b)
        torch.softmax(b.mul_(size) if options.cosine else b, dim=axis, out=c)
        _mix(c, capsules, maps.lying, rows, out=z)
    return c, z


def _mix_evenly(capsules: Tensor, w: Tensor) -> Tensor:
    """Σ_i W_ij x_i, for all k in one product: (K, I, B), (J, D, K, I) → (J, D, B)."""
    return torch.mm(w.flatten(2).flatten(0, 1), capsules.flatten(0, 1)).view(*w.shape[:2], -1)


def _mix(c: Tensor, capsules: Tensor, w: Tensor, rows: Tensor, out: Tensor) -> None:
    """z_j = Σ_k W_jk (c_j ⊙ x_k): (J, I, B), (K, I, B), (J, D, K, I) → (J, D, B), by way of `rows`."""
    for k, component in enumerate(capsules):
        torch.mul(c, component, out=rows)
        torch.baddbmm(out, w[:, :, k], rows, beta=min(k, 1), out=out)


def _inner(capsules: Tensor, w: Tensor, v: Tensor, rows: Tensor, out: Tensor) -> None:
    """⟨u_ij, v_j⟩ = Σ_k x_ik (W_jkᵀ v_j)_i: (K, I, B), (J, D, K, I), (J, D, B) → (J, I, B), by way of `rows`."""
    for k, component in enumerate(capsules):
        torch.bmm(w[:, :, k].mT, v, out=rows)
        torch.addcmul(out, rows, component, out=out) if k else torch.mul(rows, component, out=out)


def _down(y: Tensor, c: Tensor, w: Tensor) -> Tensor:
    """Σ_j c_ij W_ijᵀ y_j: (J, D, B), (J, I, B), (J, D, K, I) → (K, I, B)."""
    _, _, dim, inputs = w.shape
    total = y.new_zeros(dim, inputs, y.shape[2])
    back = torch.empty_like(total)
    for j in range(len(w)):
        torch.mm(w[j].flatten(1).T, y[j], out=back.view(dim * inputs, -1))
        total.addcmul_(back, c[j])
    return total


def _squash(x: Tensor) -> Tensor:
    """x_i ‖x_i‖/(1+‖x_i‖²), in place; rounding may bring a norm to 1, which `functional.squash` prevents: (K, I, B)."""
    square = x.square().sum(0)
    return x.mul_(square.sqrt().div_(1 + square))


def _only(on: Tensor | None, z: Tensor) -> Tensor:
    """Silence experts (J, D, B) that may not fire (B, J)."""
    return z if on is None else z * on.T.unsqueeze(1)


def _pull(z: Tensor, on: Tensor | None, share: float) -> Tensor:
    """2 share g(z_j) = 2 share z_j/(1+‖z_j‖²), of experts that may fire: (J, D, B), (B, J) → (J, D, B)."""
    return _only(on, z * (2 * share / (1 + z.square().sum(1, keepdim=True))))


def _standing(slope: Tensor | None) -> Tensor | None:
    """(K, J, D, I) → (I, J, D, K)."""
    return None if slope is None else slope.permute(3, 1, 2, 0)


def _start(weight: Tensor) -> Tensor | None:
    """Start a gradient to be added to, (K, J, D, I), if one is asked for."""
    inputs, experts, out_dim, dim = weight.shape
    asked = torch.is_grad_enabled() and weight.requires_grad
    return weight.new_zeros(dim, experts, out_dim, inputs) if asked else None


def _collect(pull: Tensor, coefficients: Tensor, x: Tensor, slope: Tensor | None) -> None:
    """Add Σ c_ij p_j x_iᵀ over all images to (K, J, D, I): pull (J, D, B), coefficients (B, I, J), x (B, I, K)."""
    for part in _blocks(x):
        c = coefficients[part].permute(2, 1, 0).contiguous()
        _collect_block(pull[..., part], c, _lying(x[part]), slope, torch.empty_like(c))


def _collect_block(pull: Tensor, c: Tensor, capsules: Tensor, slope: Tensor | None, rows: Tensor) -> None:
    """Add Σ_b p_j (c_j ⊙ x_k)ᵀ to (K, J, D, I), by way of `rows`."""
    if slope is None:
        return
    for k, component in enumerate(capsules):
        slope[k].baddbmm_(pull, torch.mul(c, component, out=rows).mT)


def _gram(w: Tensor) -> Tensor:
    """W_ijᵀ W_ij, its upper half with what is off the diagonal doubled: (J, D, K, I) → (I, J, K(K+1)/2)."""
    experts, _, dim, inputs = w.shape
    gram = w.new_zeros(experts, dim, dim, inputs)
    for row in w.unbind(1):
        gram.addcmul_(row.unsqueeze(2), row.unsqueeze(1))
    k, m = torch.triu_indices(dim, dim, device=w.device)
    return (gram[:, k, m] * torch.where(k == m, 1, 2).unsqueeze(1)).permute(2, 0, 1).contiguous()


def _inverse_vote_norms(capsules: Tensor, maps: _Maps, squares: Tensor, out: Tensor) -> None:
    """1/‖W_ij x_i‖, and 0 for a zero vote: (K, I, B) → (J, I, B), by way of `squares`.

    xᵀ(WᵀW)x takes a third of the work of the votes, but where a vote is short for its map and its capsule that sum
    cancels. There, and where votes are so few or so short that they cost less, the votes are made.
    """
    _, inputs, batch = capsules.shape
    _, experts, out_dim, _ = maps.weight.shape
    squares = squares.view(inputs, experts, batch)
    step = max(1, MANY // ((experts * out_dim if maps.gram is None else maps.gram.shape[2]) * batch))
    for some in (slice(first, first + step) for first in range(0, inputs, step)):
        x, weight = capsules[:, some].transpose(0, 1), maps.weight[some]  # (I', K, B), (I', J, D, K)
        if maps.gram is None:
            votes = (weight.flatten(1, 2) @ x).unflatten(1, (experts, out_dim))
            torch.sum(votes.square_(), 2, out=squares[some])
        else:
            _squares(x, weight, maps.gram[some], out=squares[some])
    out.copy_(squares.rsqrt_().nan_to_num_(0, posinf=0).transpose(0, 1))


def _squares(x: Tensor, weight: Tensor, gram: Tensor, out: Tensor) -> None:
    """‖W_ij x_i‖²: (I, K, B), (I, J, D, K), (I, J, K(K+1)/2) → (I, J, B)."""
    inputs, dim, batch = x.shape
    pairs, diagonal, first = x.new_empty(inputs, gram.shape[2], batch), [], 0
    for k in range(dim):
        torch.mul(x[:, k : k + 1], x[:, k:], out=pairs[:, first : first + dim - k])
        diagonal.append(first)
        first += dim - k
    torch.bmm(gram, pairs, out=out)
    widest, longest = SHORT * gram[..., diagonal].sum(2, keepdim=True), pairs[:, diagonal].sum(1, keepdim=True)
    if torch.addcmul(out, widest, longest, value=-1).amin() <= 0:
        most = widest * longest
        for some in ((out <= most) & (most > 0)).nonzero().split(FEW):
            i, j, b = some.unbind(1)
            out[i, j, b] = (weight[i, j] @ x[i, :, b].unsqueeze(2)).square_().sum((1, 2))
