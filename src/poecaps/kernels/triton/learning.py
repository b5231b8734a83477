# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Both learning rules: contrastive divergence, and the rule of the decoder.

Gradients are computed at once, not by autograd. They are accumulated in float32.
"""

import threading
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from poecaps import functional as F
from poecaps.kernels.triton.coefficients import Coefficients
from poecaps.kernels.triton.jit import kernel
from poecaps.kernels.triton.launch import Recording, cdiv, launch, reuses_compiled
from poecaps.kernels.triton.plan import Plan, Replay
from poecaps.kernels.triton.reconstruction import reconstruction, squash
from poecaps.kernels.triton.routing_forward import preactivation, route
from poecaps.kernels.triton.tiling import BATCH_MULTIPLE, row_constants, rows_per_block
from poecaps.kernels.triton.weight_gradient import gradient_term, weight_gradient

# Largest size of the logits of the images that go through a learning step together. They fit into
# the L2 cache of an H200 (50 MB), and the capsules of these images beside them.
BLOCK_LOGITS_BYTES = 24 * 2**20

# Fewest images that are worth a step of their own, one block of the kernels. Layers whose logits
# would allow fewer images take the whole batch at once.
MIN_BLOCK_IMAGES = 64

# Whether the launches of a learning step are recorded and repeated, see `plan`.
PLAN_STEPS = True

# Plans that are kept: those of a few layers and batch sizes. Each one is some kilobytes, but a
# sharpness that changes in every step would need a new one every time.
MAX_PLANS = 64

# Whether a plan becomes a CUDA graph after so many repetitions with a weight at the same address.
# On an H200, a step of 256 images that the host launches takes three quarters of the time.
REPLAY_STEPS = True
REPLAY_AFTER = 8

# Most memory of one graph. The kernels of larger steps take longer than their launches.
MAX_REPLAY_BYTES = 48 * 2**20

# Graphs that are kept. Further layers repeat their plans, until a graph was not used for so many
# replays of the others.
MAX_REPLAYS = 4
REPLAY_LIFE = 1000


# --------------------------------------------------------------------------------------------------
# Free energies


@kernel
def _free_energy_gap_kernel(
    z_ptr, z_model_ptr, on_ptr, on_model_ptr, grad_z_ptr, grad_z_model_ptr, part_ptr,
    rows, rows_model, scale, scale_model,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    HAS_ON: tl.constexpr, HAS_ON_MODEL: tl.constexpr,
):  # fmt: skip
    """Sum −scale·log(1+‖z_j‖²) of data and model over blocks of rows, and write the derivatives.

    z, grad_z (rows, D), on (rows), and the same of the model → part (2, blocks).
    """
    if tl.program_id(1) == 0:
        term = _free_energy(z_ptr, on_ptr, grad_z_ptr, rows, scale, D, BLOCK_D, BLOCK_ROWS, HAS_ON)
    else:
        term = _free_energy(
            z_model_ptr, on_model_ptr, grad_z_model_ptr, rows_model, scale_model,
            D, BLOCK_D, BLOCK_ROWS, HAS_ON_MODEL,
        )  # fmt: skip
    tl.store(part_ptr + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0), term)


@triton.jit
def _free_energy(
    z_ptr, on_ptr, grad_z_ptr, rows, scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_ROWS: tl.constexpr, HAS_ON: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    offs_d = tl.arange(0, BLOCK_D)
    is_row = row < rows
    offsets = row.to(tl.int64)[:, None] * D + offs_d[None, :]
    mask = is_row[:, None] & (offs_d < D)[None, :]
    z = tl.load(z_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    square = tl.sum(z * z, 1)
    # log1p: the part of s that rounding loses in 1 + s is added in first order.
    one = 1.0 + square
    term = tl.log(one) + (square - (one - 1.0)) / one
    grad_z = -2.0 * scale * z / one[:, None]
    if HAS_ON:
        on = tl.load(on_ptr + row, mask=is_row, other=0) != 0
        term = tl.where(on, term, 0.0)
        grad_z = tl.where(on[:, None], grad_z, 0.0)
    tl.store(grad_z_ptr + offsets, grad_z, mask=mask)
    return -scale * tl.sum(tl.where(is_row, term, 0.0), 0)


def free_energy_gap_parts(
    z: Tensor,
    z_model: Tensor,
    on: Tensor | None,
    on_model: Tensor | None,
    images: tuple[int, int],
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute Σ F(x)/n − Σ F(x̃)/m in parts, and its derivatives with respect to z and z̃.

    Parameters
    ----------
    z, z_model : (B, J, D)
        Preactivations of data and model; the batch sizes may differ.
    on, on_model : (B, J), optional
        Experts that may fire.
    images
        n and m, the images over which the means are taken; z may be a part of them.

    Returns
    -------
    (2, blocks), (B, J, D), (B, J, D)
        float32. The difference is the sum of the parts.
    """
    z, z_model = z.contiguous(), z_model.contiguous()
    grad_z, grad_z_model = (torch.empty_like(each, dtype=torch.float32) for each in (z, z_model))
    (batch, outputs, dim), batch_model = z.shape, len(z_model)
    rows, rows_model = batch * outputs, batch_model * outputs
    blocks = cdiv(max(rows, rows_model), rows_per_block(dim))
    part = grad_z.new_empty(2, blocks)
    on_pointers = (
        z if on is None else on.contiguous(),
        z_model if on_model is None else on_model.contiguous(),
    )
    launch(
        _free_energy_gap_kernel,
        (blocks, 2),
        (
            *(z, z_model, *on_pointers, grad_z, grad_z_model, part),
            *(rows, rows_model, 1 / images[0], -1 / images[1]),
        ),
        {"HAS_ON": on is not None, "HAS_ON_MODEL": on_model is not None},
        row_constants(dim),
    )
    return part, grad_z, grad_z_model


# --------------------------------------------------------------------------------------------------
# Contrastive divergence


@dataclass(frozen=True)
class _Mixing:
    """Options of contrastive divergence; the weight is contiguous and has no gradient."""

    weight: Tensor
    routing: F.RoutingOptions
    k: int
    mixing: F.Mixing
    uniform: Tensor | None
    winners: int | None
    balance: Tensor | None

    def start(self, x: Tensor, views: int = 1) -> tuple[Coefficients, Tensor, Tensor | None]:
        """Route x (B, I, K): → coefficients, preactivations (B, J, D) and winners (B, J)."""
        forward = route(x, self.weight, self.routing, keep_logits=True)
        z = forward.preactivation
        on = F.winning_experts(z, self.winners, self.balance, views=views)
        return forward.coefficients, z, on

    def mix(self, c: Coefficients, z: Tensor, on: Tensor | None) -> tuple[Tensor, Tensor]:
        """Go down and up k times: → x̃ (B, I, K) and z̃ (B, J, D)."""
        x = c.x
        for step in range(self.k):
            if self.mixing == "deterministic":
                y = squash(z, on)
            else:
                uniform = None if self.uniform is None else self.uniform[step]
                y = F.expert_states(z, on, self.mixing, uniform)
            x = reconstruction(y, self.weight, c)
            del y
            z = preactivation(x, self.weight, c)
        return x, z


def contrastive_divergence(
    x: Tensor,
    weight: Tensor,
    routing: F.RoutingOptions,
    *,
    k: int = 1,
    mixing: F.Mixing = "deterministic",
    uniform: Tensor | None = None,
    chain: Tensor | None = None,
    winners: int | None = None,
    balance: Tensor | None = None,
    views: int = 1,
) -> F.LearningStep:
    """Compute `functional.contrastive_divergence`.

    Without a chain and without random numbers, a block of images goes through the whole step before
    the next one starts, so that its logits stay in the cache and only its gradient is kept.

    Parameters
    ----------
    x : (B, I, K)
    weight : (I, J, D, K)
    routing
        Options of the routing.
    k, mixing, uniform, chain, winners, balance, views : see `functional.contrastive_divergence`

    Returns
    -------
    LearningStep
        With a float32 gradient; None unless gradients are enabled and the weight requires one.
    """
    needs_grad = torch.is_grad_enabled() and weight.requires_grad
    with torch.no_grad():
        x, weight = x.detach().contiguous(), weight.detach().contiguous()
        grad_weight = torch.empty_like(weight, dtype=torch.float32) if needs_grad else None
        options = _Mixing(weight, routing, k, mixing, uniform, winners, balance)
        if chain is not None:
            chain = chain.detach().contiguous()
            return _step_with_chain(x, chain, options, grad_weight, views)
        size = images_per_block(len(x), weight) if mixing == "deterministic" else len(x)
        size = cdiv(size, views) * views  # all views of an image are in the same block
        losses: list[Tensor] = []
        winning: list[Tensor] = []
        for block in x.split(size):
            part, on = _planned_step(
                block, options, grad_weight, views, images=len(x), accumulate=bool(losses)
            )
            losses.append(part.sum())
            del part  # it may be a part of the memory of this step, which the next one can use
            winning += [] if on is None else [on]
        if len(losses) == 1:
            return F.LearningStep(losses[0], grad_weight, on)
        on = torch.cat(winning) if winning else None
        return F.LearningStep(torch.stack(losses).sum(), grad_weight, on)


# Plans of steps by everything that their launches depend on; None after the first of such steps.
_plans: dict[tuple[Any, ...], Plan | None] = {}


def _planned_step(
    x: Tensor,
    options: _Mixing,
    grad_weight: Tensor | None,
    views: int,
    *,
    images: int,
    accumulate: bool,
) -> tuple[Tensor, Tensor | None]:
    """Compute `_step_of_block`.

    The first step of its kind compiles kernels, the second one is recorded, and all others repeat
    its launches.
    """

    def compute() -> tuple[Tensor, Tensor | None]:
        return _step_of_block(x, options, grad_weight, views, images=images, accumulate=accumulate)

    if not (PLAN_STEPS and _can_be_planned(x, options)):
        return compute()
    weight, needs_grad = options.weight, grad_weight is not None
    key = (
        *(x.shape, weight.shape, x.get_device(), options.routing, options.k),
        *(images, accumulate, needs_grad),
    )
    if key not in _plans:
        if len(_plans) >= MAX_PLANS:
            _plans.clear()
        _plans[key] = None
        return compute()
    plan = _plans[key]
    arguments = (x, weight) if grad_weight is None else (x, weight, grad_weight)
    if plan is not None:
        part = None
        if REPLAY_STEPS and grad_weight is not None and images == len(x):
            part = _replayed(key, plan, x, weight, grad_weight)
        if part is None:
            part = plan.repeat(*arguments)
        return compute() if part is None else (part, None)
    with Recording() as recording:
        part, on = compute()
    if recording.is_complete:
        _plans[key] = Plan(recording.launches, arguments, part)
    return part, on


# Graphs of plans by all that they depend on, the least recently used first; and the repetitions of
# plans that have none.
_replays: dict[tuple[Any, ...], Replay] = {}
_repetitions: dict[tuple[Any, ...], int] = {}


def _replayed(
    key: tuple[Any, ...], plan: Plan, x: Tensor, weight: Tensor, grad_weight: Tensor
) -> Tensor | None:
    """Repeat a plan as a CUDA graph: → its result; None if it is not a graph."""
    if plan.bytes + x.nbytes + grad_weight.nbytes > MAX_REPLAY_BYTES:
        return None
    if torch.cuda.is_current_stream_capturing():
        return None
    stream = torch._C._cuda_getCurrentRawStream(x.get_device())
    where = (key, weight.data_ptr(), stream, threading.get_ident())
    replay = _replays.pop(where, None)
    if replay is None:
        if not (_is_frequent(where) and _has_room_for_a_graph()):
            return None
        replay = Replay(plan, x, [weight], grad_weight)
    _replays[where] = replay
    return replay.repeat(x, grad_weight)


def _is_frequent(where: tuple[Any, ...]) -> bool:
    """Count a repetition of a plan, and return whether there were enough for a graph."""
    if len(_repetitions) >= MAX_PLANS and where not in _repetitions:
        _repetitions.clear()
    _repetitions[where] = count = _repetitions.get(where, 0) + 1
    return count > REPLAY_AFTER


def _has_room_for_a_graph() -> bool:
    """Return whether a further graph may be kept, in place of one that is no longer used."""
    if len(_replays) < MAX_REPLAYS:
        return True
    oldest = next(iter(_replays))
    if Replay.replays - _replays[oldest].last_replay <= REPLAY_LIFE:
        return False
    del _replays[oldest]
    return True


def _can_be_planned(x: Tensor, options: _Mixing) -> bool:
    """Return whether a step launches kernels alone, without operations of torch in between.

    Competition selects the winners by torch, half precision is converted by it, and the padding of
    a batch is filled with zeros.
    """
    return (
        reuses_compiled()
        and x.is_cuda
        and x.dtype == torch.float32
        and options.winners is None
        and options.mixing == "deterministic"
        and x.shape[0] % BATCH_MULTIPLE == 0
        and x.shape[0] > 0
    )


def _step_of_block(
    x: Tensor,
    options: _Mixing,
    grad_weight: Tensor | None,
    views: int,
    *,
    images: int,
    accumulate: bool,
) -> tuple[Tensor, Tensor | None]:
    """Compute the part of a block x in the loss of `images` images, and the winners (B, J).

    The loss is still in parts, see `free_energy_gap_parts`.
    Its gradient is written or added to `grad_weight`. Tensors are deleted as soon as they are not
    needed, so that the next allocation can reuse their memory.
    """
    weight = options.weight
    c, z, on = options.start(x, views)
    x_model, z_model = options.mix(c, z, on)
    part, grad_z, grad_z_model = free_energy_gap_parts(z, z_model, on, on, (images, images))
    if grad_weight is not None:
        del z, z_model
        model = gradient_term(grad_z_model, x_model, weight, c)
        del grad_z_model, x_model
        data = gradient_term(grad_z, x, weight, c)
        del grad_z
        weight_gradient(weight, c, model, data, out=grad_weight, accumulate=accumulate)
    return part, on


def _step_with_chain(
    x: Tensor, chain: Tensor, options: _Mixing, grad_weight: Tensor | None, views: int
) -> F.LearningStep:
    """Compute a step whose mixing starts at the chain, with the coefficients of the chain."""
    weight = options.weight
    c, z, on = options.start(x, views)
    c_model, z_model, on_model = options.start(chain)
    x_model, z_model = options.mix(c_model, z_model, on_model)
    sizes = len(x), len(chain)
    part, grad_z, grad_z_model = free_energy_gap_parts(z, z_model, on, on_model, sizes)
    if grad_weight is not None:
        del z, z_model
        data = gradient_term(grad_z, x, weight, c)
        del grad_z
        weight_gradient(weight, c, data, out=grad_weight)
        del data, c
        model = gradient_term(grad_z_model, x_model, weight, c_model)
        weight_gradient(weight, c_model, model, out=grad_weight, accumulate=True)
    return F.LearningStep(part.sum(), grad_weight, on, x_model)


def images_per_block(images: int, weight: Tensor) -> int:
    """Return the number of images that go through a learning step together.

    Blocks are equally large, up to a multiple of `MIN_BLOCK_IMAGES`.

    Parameters
    ----------
    images
        Size of the batch.
    weight : (I, J, D, K)
    """
    most = BLOCK_LOGITS_BYTES // (4 * weight.shape[0] * weight.shape[1])
    if most < MIN_BLOCK_IMAGES:
        return images
    blocks = max(1, cdiv(images, most))
    return cdiv(images, blocks * MIN_BLOCK_IMAGES) * MIN_BLOCK_IMAGES


# --------------------------------------------------------------------------------------------------
# The rule of the decoder


def decoder_contrastive_divergence(
    y: Tensor, x: Tensor, weight: Tensor, routing: F.RoutingOptions
) -> F.LearningStep:
    """Compute `functional.decoder_contrastive_divergence`.

    Parameters
    ----------
    y : (B, J, D)
        Experts above, the inputs of the decoder.
    x : (B, I, K)
        Squashed capsules below, the targets.
    weight : (J, I, K, D)
    routing
        Options of the routing.

    Returns
    -------
    LearningStep
        With a float32 gradient; None unless gradients are enabled and the weight requires one.
    """
    needs_grad = torch.is_grad_enabled() and weight.requires_grad
    with torch.no_grad():
        y, weight = y.detach().contiguous(), weight.detach().contiguous()
        forward = route(y, weight, routing)
        e, z_model = forward.coefficients, forward.preactivation
        y_model = reconstruction(squash(z_model), weight, e)
        scale = 2 / len(y)
        data = gradient_term(F.g_of_squashed(x.float()) * -scale, y, weight, e)
        model = gradient_term(F.g(z_model) * scale, y_model, weight, e)
        grad_weight = torch.empty_like(weight, dtype=torch.float32)
        weight_gradient(weight, e, model, data, out=grad_weight)
        loss = (weight * grad_weight).sum()
    return F.LearningStep(loss, grad_weight if needs_grad else None)
