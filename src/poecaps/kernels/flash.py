"""Routing on a GPU in tiles that never leave the chip: the functions of `poecaps.functional`, by Triton kernels.

Votes are made again in every pass instead of being kept, the softmax over the inputs is taken while they pass by, and
coefficients are told by what they follow from (`Coefficients`), so that a learning step at I inputs and J experts needs
memory for capsules, not for pairs of them. `poecaps.kernels.tiles` says how; this module launches it.

float16, bfloat16 and float32 are covered; sums and softmaxes are float32, and products are exact to about that.
"""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import once_differentiable

from poecaps import functional as F
from poecaps.kernels.common import Options, with_slope
from poecaps.kernels.launch import (
    padded,
    pitch,
    rows_in_block,
    rows_of,
    run,
    run_rows,
    stripped,
    tiled,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from poecaps.kernels.common import Held
    from poecaps.kernels.launch import Plan

LARGEST_DIM = 64
MOST_COLUMNS = 2**20  # what the experts have altogether; more programs side by side than CUDA allows would be needed
DTYPES = (torch.float16, torch.bfloat16, torch.float32)

# Logits below this many bytes are kept between the passes of a learning step: it saves making votes for them again.
KEEP_BYTES = 64 * 2**20

# Logits of the images that go through a learning step together, and the fewest images for which that pays.
BLOCK_BYTES, LEAST_BLOCK = 24 * 2**20, 64

# Components of inputs that an even mixture multiplies at once; side of the squares that are turned at once; inputs and
# images that levels are taken of at once.
DEPTH, TURN, LEVELS = 32, 64, (4, 128)


@dataclass(frozen=True, eq=False)
class Coefficients:
    """Routing coefficients c_ij, told by what they follow from.

    Attributes
    ----------
    x : (B, I, K)
        The capsules that were routed.
    options
        How they were routed.
    history : (B, J, D)
        What the experts sent before the last iteration, summed; not used after a single iteration.
    level : (J, P) or (I, P)
        Logarithm of the softmax's sum, over the inputs or the outputs; not used after a single iteration.
    logits : (J, I, P), optional
        Kept where they are small; P is B, padded.
    """

    x: Tensor
    options: Options
    history: Tensor
    level: Tensor
    logits: Tensor | None = None

    def tensor(self, weight: Tensor) -> Tensor:
        """Write them down: (B, I, J), float32."""
        weight = weight.detach().contiguous()
        plan = tiled(weight, "down")
        batch, inputs, _ = self.x.shape
        out = self.x.new_empty(batch, inputs, plan.outputs, dtype=torch.float32)
        source = _source(self, self.x)
        plan.launch(
            "coefficients",
            batch,
            (inputs, plan.image_blocks(batch)),
            (source.x, weight, source.h, source.level, source.c, out, source.beta, _uniform(plan, self.options), batch),
            source.flags,
        )
        return out


class FlashRouting(F.Routing):
    """A `functional.Routing` whose coefficients are written down only when they are asked for."""

    def __init__(self, held: Coefficients, x: Tensor, weight: Tensor, preactivation: Tensor) -> None:
        for name, value in {"held": held, "_x": x, "_weight": weight, "preactivation": preactivation}.items():
            object.__setattr__(self, name, value)

    held: Coefficients
    _x: Tensor
    _weight: Tensor

    @property
    def coefficients(self) -> Tensor:
        """c_ij: (B, I, J), float32; with a gradient, by the reference, where the preactivation has one."""
        if "_coefficients" not in self.__dict__:
            if self.preactivation.requires_grad:
                options = self.held.options
                written = F.routing_by_agreement(
                    self._x,
                    self._weight,
                    iterations=options.iterations,
                    sharpness=options.sharpness,
                    normalize=options.normalize,
                    agreement=options.agreement,
                ).coefficients
            else:
                written = self.held.tensor(self._weight)
            object.__setattr__(self, "_coefficients", written)
        coefficients: Tensor = self.__dict__["_coefficients"]
        return coefficients


# ---------------------------------------------------------------------------------------------------------
# What can run


@cache
def installed() -> bool:
    """Tell whether Triton is there, without importing it."""
    return importlib.util.find_spec("triton") is not None


def obstacle(x: Tensor, weight: Tensor) -> str | None:
    """Say why these kernels cannot take a call, and what would help; None if they can."""
    dims = max(weight.shape[2], weight.shape[3])
    if not installed():
        return "Triton is not installed; install it with pip install triton"
    if x.device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return f"the tensors are on {x.device.type!r}; move layer and data to a CUDA device"
    if x.dtype not in DTYPES:
        return f"the dtype is {x.dtype}; use torch.float32, torch.bfloat16 or torch.float16"
    if dims > LARGEST_DIM:
        return f"capsules have {dims} dimensions; at most {LARGEST_DIM} are covered"
    if weight.shape[1] * padded(weight.shape[2], 1) > MOST_COLUMNS:
        return (
            f"there are {weight.shape[1]:,} experts of {weight.shape[2]}; at most {MOST_COLUMNS:,} numbers are covered"
        )
    return None


# ---------------------------------------------------------------------------------------------------------
# The functions of the reference


def routing_by_agreement(x: Tensor, weight: Tensor, options: Options, *, keep: bool = False) -> FlashRouting:
    """Compute what `functional.routing_by_agreement` does, differentiable in `x` and `weight`.

    Parameters
    ----------
    x : (B, I, K)
    weight : (I, J, D, K)
    options
        How to route.
    keep
        Whether the logits may be kept for calls that follow, where they are small.
    """
    # What autograd runs with gradients off hands the held coefficients out through this list.
    held: list[Coefficients] = []
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        z: Tensor = _Route.apply(x, weight, options, held)  # type: ignore[no-untyped-call]
    else:
        z = _forward(x, weight, options, held, keep)
    return FlashRouting(held[0], x, weight, z)


def preactivation(x: Tensor, weight: Tensor, coefficients: Tensor | Coefficients) -> Tensor:
    """Compute z_j = Σ_i c_ij W_ij x_i, with a gradient in the weight alone: → (B, J, D)."""
    if not torch.is_grad_enabled():
        x = x.contiguous()
        return _up(x, weight.detach().contiguous(), _source(coefficients, x)).to(x.dtype)
    z: Tensor = _Preactivation.apply(x, weight, coefficients)  # type: ignore[no-untyped-call]
    return z


def pulled(weight: Tensor, coefficients: Tensor | Coefficients, terms: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Compute Σ ⟨p, `preactivation`(v)⟩ over one or two terms (p, v), with a gradient in the weight alone: → ()."""
    with torch.no_grad():
        maps = weight.contiguous()
        slope = torch.empty_like(maps, dtype=torch.float32)
        _learn(slope, maps, coefficients, list(terms))
        value = (maps * slope).sum()  # it is linear in the weight, so its gradient tells its value
    return with_slope(weight, value, slope)


@torch.no_grad()
def reconstruction(y: Tensor, weight: Tensor, coefficients: Tensor | Coefficients) -> Tensor:
    """Compute x̃_i = squash(Σ_j c_ij W_ijᵀ y_j), without a gradient: → (B, I, K)."""
    y, weight = y.contiguous(), weight.contiguous()
    plan, batch = tiled(weight, "down"), y.shape[0]
    blocks = plan.image_blocks(batch)
    splits, each = plan.split(plan.inputs * blocks, plan.expert_blocks, y.device)
    out = y.new_empty(batch, plan.inputs, plan.in_dim)
    part = out if splits == 1 else y.new_empty(splits, *out.shape, dtype=torch.float32)
    source = _source(coefficients, y)
    if source.kind == LOGITS and plan.in_strips:
        strip = stripped(weight, "down")
        strip.launch(
            "strip_down",
            batch,
            (strip.input_blocks, strip.image_blocks(batch)),
            (y, weight, source.level, source.c, out, batch),
            {"INPUTS": source.options.inputs, "LARGEST": F._largest_norm(y.dtype)},
        )
        return out
    scalars = (_uniform(plan, source.options), batch, each * plan.experts)
    plan.launch(
        "down",
        batch,
        (plan.inputs, blocks, splits),
        (source.x, y, weight, source.h, source.level, source.c, part, source.beta, *scalars),
        {**source.flags, "WHOLE": splits == 1, "LARGEST": F._largest_norm(y.dtype)},
    )
    if splits > 1:
        _speak(part, None, out)
    return out


@torch.no_grad()
def squash(z: Tensor, on: Tensor | None = None) -> Tensor:
    """Compute squash(z_j), 0 where `on` is False, without a gradient: (B, J, D), (B, J) → (B, J, D)."""
    z = z.contiguous()
    out = torch.empty_like(z)
    _speak(z.unsqueeze(0), on, out)
    return out


def contrastive_divergence(
    x: Tensor, weight: Tensor, k: int, options: Options, may_fire: Callable[[Tensor], Tensor | None], block: int
) -> tuple[Tensor, Tensor | None]:
    """Compute what `kernels.contrastive_divergence` does, a block of images all the way before the next begins.

    Nothing is kept of a block but its part of the gradient.
    """
    asked = torch.is_grad_enabled() and weight.requires_grad
    gaps: list[Tensor] = []
    allowed: list[Tensor] = []
    with torch.no_grad():
        x, maps = x.contiguous(), weight.contiguous()
        slope = torch.empty_like(maps, dtype=torch.float32) if asked else None
        for part in x.split(block):
            gap, on = _learn_block(part, maps, k, options, may_fire, slope, len(x), add=bool(gaps))
            gaps.append(gap)
            allowed += [] if on is None else [on]
        loss = gaps[0] if len(gaps) == 1 else torch.stack(gaps).sum()
    return with_slope(weight, loss, slope), torch.cat(allowed) if allowed else None


def _learn_block(
    x: Tensor,
    weight: Tensor,
    k: int,
    options: Options,
    may_fire: Callable[[Tensor], Tensor | None],
    slope: Tensor | None,
    count: int,
    *,
    add: bool,
) -> tuple[Tensor, Tensor | None]:
    """Return a block's part of the loss of `count` images and who may fire; put or add its gradient to the slope."""
    routing = routing_by_agreement(x, weight, options, keep=True)
    c, z = routing.held, routing.preactivation
    on = may_fire(z)
    v, model = x, z
    for _ in range(k):
        v = reconstruction(squash(model, on), weight, c)
        model = preactivation(v, weight, c)
    gap, toward, away = _free_energies((z, model), (on, on), (count, count))
    if slope is not None:
        terms = [(toward, x), (away, v)]
        del routing, z, model, v, toward, away  # so that each is freed when it is not needed any more
        _learn(slope, weight, c, terms, add=add)
    return gap, on


def block(images: int, weight: Tensor) -> int | None:
    """Return how many images go all the way together, so that their logits are small; None: too few to be quick."""
    most = BLOCK_BYTES // (4 * weight.shape[0] * weight.shape[1])
    if most < LEAST_BLOCK:
        return None
    blocks = max(1, -(-images // most))
    return -(-images // (blocks * LEAST_BLOCK)) * LEAST_BLOCK


def free_energy_gap(weight: Tensor, data: Held, model: Held) -> Tensor:
    """Compute mean F(x) − mean F(x̃) for what is held, with a gradient in the weight alone: → ()."""
    gap: Tensor = _FreeEnergyGap.apply(weight, data, model)  # type: ignore[no-untyped-call]
    return gap


# ---------------------------------------------------------------------------------------------------------
# Gradients


class _Route(torch.autograd.Function):
    """Routing, with the gradient through its iterations; what is kept has the size of the experts, per iteration."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, options: Options, held: list[Coefficients]) -> Tensor:
        x, weight = x.contiguous(), weight.contiguous()
        trail = _route(x, weight, options, keep=False, record=True)
        held.append(Coefficients(x, options, trail.h[-1], trail.level[-1]))
        ctx.options = options
        ctx.save_for_backward(x, weight, trail.z, trail.h, trail.level)
        return trail.z[-1].to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x, weight, z, h, level = ctx.saved_tensors
        options: Options = ctx.options
        plan, batch, last = tiled(weight, "reverse"), len(x), options.iterations - 1
        blocks = plan.image_blocks(batch)
        g = torch.empty_like(z)  # ∂L/∂z of every iteration
        g[last] = gradient
        a = torch.empty_like(level)  # Σ c⟨g, u⟩ over the axis of the softmax
        spare = a[0] if options.inputs else g.new_empty(plan.outputs, pitch(batch))
        if options.inputs:
            a[last, :, :batch] = (g[last] * z[last]).sum(-1).T
        splits, each = plan.split(blocks * plan.expert_blocks, plan.inputs, x.device)
        part, total = g.new_empty(splits, *g.shape[1:]), torch.empty_like(g[0])
        cosine = {"COSINE": options.cosine}
        flags = {**cosine, "INPUTS": options.inputs}
        for r in range(last, 0, -1):
            found = (x, weight, h[r], level[r], g[r])
            if not options.inputs:
                plan.launch("averages", batch, (plan.inputs, blocks), (*found, a[r], options.sharpness, batch), cosine)
            plan.launch(
                "up_gradient",
                batch,
                (blocks, plan.expert_blocks, splits),
                (*found, a[r], part, options.sharpness, batch, each),
                flags,
            )
            run_rows(
                "speak_gradient",
                (part, z[r - 1], total, g[r - 1], a[r - 1] if options.inputs else spare),
                (batch * plan.outputs, splits),
                plan.out_dim,
                {**cosine, "J": plan.outputs, "ADD": r < last},
            )
        x_gradient = weight_gradient = None
        scalars = (options.sharpness, _uniform(plan, options), batch, options.iterations)
        if ctx.needs_input_grad[0]:
            x_gradient = torch.empty_like(x)
            arguments = (x, weight, h, level, g, a, x_gradient, *scalars)
            plan.launch("route_input_gradient", batch, (plan.inputs, blocks), arguments, flags)
        if ctx.needs_input_grad[1]:
            weight_gradient = torch.empty_like(weight)
            arguments = (x, weight, h, level, g, a, weight_gradient, *scalars)
            plan.launch("route_weight_gradient", batch, (plan.inputs * plan.expert_blocks,), arguments, flags)
        return x_gradient, weight_gradient, None, None


class _Preactivation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, coefficients: Tensor | Coefficients) -> Tensor:
        x, weight = x.contiguous(), weight.contiguous()
        ctx.coefficients = coefficients
        ctx.save_for_backward(x, weight)
        z = _up(x, weight, _source(coefficients, x))
        return z.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor, None]:
        x, weight = ctx.saved_tensors
        result = torch.empty_like(weight)
        _learn(result, weight, ctx.coefficients, [(gradient.contiguous(), x)])
        return None, result, None


class _FreeEnergyGap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, data: Held, model: Held) -> Tensor:
        weight = weight.contiguous()
        gap, *pulls = _free_energies((data.z, model.z), (data.on, model.on), (len(data.x), len(model.x)))
        ctx.data, ctx.model = data, model
        # The capsules are saved as well, so that autograd notices if they are overwritten before the way back.
        ctx.save_for_backward(weight, *pulls, data.x, model.x)
        return gap

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        weight, toward, away, *_ = ctx.saved_tensors
        data, model = ctx.data, ctx.model
        result = torch.empty_like(weight)
        if model.coefficients is data.coefficients:
            _learn(result, weight, data.coefficients, [(toward, data.x), (away, model.x)], gradient)
        else:
            _learn(result, weight, data.coefficients, [(toward, data.x)], gradient)
            _learn(result, weight, model.coefficients, [(away, model.x)], gradient, add=True)
        return result, None, None


# ---------------------------------------------------------------------------------------------------------
# Passes


@dataclass(frozen=True)
class _Trail:
    """What routing leaves behind: z, h (R, B, J, D) and level (R, J, P) or (R, I, P), or the last of each alone."""

    z: Tensor
    h: Tensor
    level: Tensor
    logits: Tensor | None


def _forward(x: Tensor, weight: Tensor, options: Options, held: list[Coefficients], keep: bool) -> Tensor:
    x, weight = x.detach().contiguous(), weight.detach().contiguous()
    trail = _route(x, weight, options, keep=keep, record=False)
    held.append(Coefficients(x, options, trail.h[0], trail.level[0], trail.logits))
    return trail.z[0].to(x.dtype)


def _route(x: Tensor, weight: Tensor, options: Options, *, keep: bool, record: bool) -> _Trail:
    plan, batch = tiled(weight, "up"), x.shape[0]
    stack = options.iterations if record else 1
    z = x.new_empty(stack, batch, plan.outputs, plan.out_dim, dtype=torch.float32)
    h = torch.empty_like(z)
    fresh = z.new_empty if pitch(batch) == batch else z.new_zeros  # what pads a row must be finite
    level = fresh(stack, plan.outputs if options.inputs else plan.inputs, pitch(batch))
    room = options.iterations > 1 and keep and batch * plan.inputs * plan.outputs * 4 <= KEEP_BYTES
    logits = z.new_empty(plan.outputs, plan.inputs, pitch(batch)) if room else None
    zs, hs, levels = z.unbind(), h.unbind(), level.unbind()
    for r in range(options.iterations):
        here, after = (r, r + 1) if record else (0, 0)
        first, last = r == 0, r == options.iterations - 1
        coefficients = Coefficients(x, options, hs[here], levels[here], logits)
        if first:
            source = _source(coefficients, x, UNIFORM)
        elif options.inputs:
            source = _source(coefficients, x, ONLINE, store=last and room)
        else:
            source = _source(coefficients, x)
            _level(x, weight, source)
        sent = None if last else (hs[here], hs[after])
        _up(x, weight, source, z=zs[here], level=levels[here], h=sent, first=first)
    return _Trail(z, h, level, logits)


def _level(x: Tensor, weight: Tensor, source: _Source) -> None:
    """Take the level of the softmax over the outputs, and the logits where there is room for them."""
    batch, cosine = len(x), {"COSINE": source.options.cosine}
    if source.kind == LOGITS:
        plan = tiled(weight, "up")
        blocks = plan.image_blocks(batch)
        splits, each = plan.split(blocks * plan.expert_blocks, plan.inputs, x.device)
        written = (x, weight, source.h, source.c, source.beta, batch, each)
        plan.launch("agree", batch, (blocks, plan.expert_blocks, splits), written, cosine)
        grid = (-(-plan.inputs // LEVELS[0]), -(-pitch(batch) // LEVELS[1]))
        block = {"J": plan.outputs, "BB": LEVELS[1], "IB": LEVELS[0]}
        run("strip_levels", grid, (source.c, source.level, batch, plan.inputs), block)
    else:
        plan = tiled(weight, "levels")
        taken = (x, weight, source.h, source.level, source.beta, batch)
        plan.launch("levels", batch, (plan.inputs, plan.image_blocks(batch)), taken, cosine)


def _up(
    v: Tensor,
    weight: Tensor,
    source: _Source,
    *,
    z: Tensor | None = None,
    level: Tensor | None = None,
    h: tuple[Tensor, Tensor] | None = None,
    first: bool = True,
) -> Tensor:
    """Sum c_ij W_ij v_i into `z`, write the softmax's level, add what the experts send to h: → (B, J, D), float32."""
    plan, batch, options = tiled(weight, "up"), v.shape[0], source.options
    if z is None:
        z = v.new_empty(batch, plan.outputs, plan.out_dim, dtype=torch.float32)
    online, softmax = source.kind == ONLINE, {"BOUNDED": options.bounded}
    if source.kind == LOGITS and plan.in_strips:
        strip = stripped(weight, "up")
        blocks = strip.image_blocks(batch)
        splits, each = strip.split(blocks * plan.outputs, strip.input_blocks, v.device)
        part = largest = total = z.new_empty(splits, *z.shape)
        arguments = (v, weight, source.level, source.c, part, batch, each * strip.row)
        strip.launch("strip_up", batch, (blocks, plan.outputs, splits), arguments, {"INPUTS": options.inputs})
    elif source.kind == UNIFORM:
        plan = tiled(weight, "even")
        blocks, few = plan.image_blocks(batch), max(1, DEPTH // plan.in_dim)  # inputs in a step
        splits, each = plan.split(blocks * plan.expert_blocks, -(-plan.inputs // few), v.device)
        part = largest = total = z.new_empty(splits, *z.shape)
        grid = (blocks, plan.expert_blocks, splits)
        plan.launch("even", batch, grid, (v, weight, part, batch, each * few), {"KP": DEPTH})
    else:
        blocks = plan.image_blocks(batch)
        splits, each = plan.split(blocks * plan.expert_blocks, plan.inputs, v.device)
        part = z.new_empty(splits, *z.shape)
        largest, total = z.new_empty(2, splits, batch, plan.outputs).unbind() if online else (part, part)
        held = (source.x, v, weight, source.h, source.level, source.c, part, largest, total, source.beta)
        flags = {**source.flags, **softmax, "SAME": source.x is v, "STORE": source.store}
        plan.launch("up", batch, (blocks, plan.expert_blocks, splits), (*held, batch, each), flags)
    h_old, h_new = (z, z) if h is None else h
    factor = _uniform(plan, options) if source.kind == UNIFORM else 1.0
    ends = {"SOFTMAX": online, "FIRST": first, "LAST": h is None, "COSINE": options.cosine}
    run_rows(
        "gather",
        (part, largest, total, z, z if level is None else level, h_old, h_new),
        (batch * plan.outputs, splits, factor),
        plan.out_dim,
        {**ends, **softmax, "J": plan.outputs, "LARGEST": F._largest_norm(v.dtype)},
    )
    return z


def _learn(
    result: Tensor,
    weight: Tensor,
    coefficients: Tensor | Coefficients,
    terms: list[tuple[Tensor, Tensor]],
    scale: Tensor | None = None,
    *,
    add: bool = False,
) -> None:
    """Sum c_ij q_j v_iᵀ over the batch and the terms (q, v); of two, the first has the capsules that were routed.

    The list is emptied on the way, so that what nobody else holds is freed as soon as it was turned.
    """
    plan, batch = tiled(weight, "learn"), terms[0][0].shape[0]
    source = _source(coefficients, terms[0][1])
    pair = len(terms) == 2
    flags = {"PAIR": pair, "ADD": add, "SCALED": scale is not None}
    if source.kind == LOGITS and plan.in_strips:
        strip = stripped(weight, "learn")
        turned = [_turned(*terms.pop()) for _ in range(len(terms))]
        (q, v), (p, x) = turned[0], turned[-1]
        strip.launch(
            "strip_learn",
            batch,
            (strip.input_blocks * plan.outputs,),
            (x, v, p, q, source.level, source.c, p if scale is None else scale, result, batch),
            {**flags, "INPUTS": source.options.inputs},
        )
        return
    (p, x), (q, v) = ((first.contiguous(), second.contiguous()) for first, second in (terms[0], terms[-1]))
    source = _source(coefficients, x)
    rest = (p if scale is None else scale, result, source.beta, _uniform(plan, source.options), batch)
    plan.launch(
        "weight_gradient",
        batch,
        (plan.inputs * plan.expert_blocks,),
        (x if pair else source.x, v, p, q, weight, source.h, source.level, source.c, *rest),
        {**source.flags, **flags},
    )


def _free_energies(
    z: tuple[Tensor, Tensor], on: tuple[Tensor | None, Tensor | None], count: tuple[int, int]
) -> tuple[Tensor, Tensor, Tensor]:
    """Sum F/count of data and −F/count of the model: z (B, J, D), on (B, J) → (), and its derivatives in z."""
    z = z[0].contiguous(), z[1].contiguous()
    spoken = [value if each is None else each.contiguous() for value, each in zip(z, on, strict=True)]
    pulls = [torch.empty_like(value, dtype=torch.float32) for value in z]
    rows, dim = [value.shape[0] * value.shape[1] for value in z], z[0].shape[2]
    part = pulls[0].new_empty(2, -(-max(rows) // rows_in_block(dim)))
    run(
        "free_energy_gap",
        (part.shape[1], 2),
        (*z, *spoken, *pulls, part, *rows, 1 / count[0], -1 / count[1]),
        {**rows_of(dim), "HAS_ON": on[0] is not None, "HAS_ON_MODEL": on[1] is not None},
    )
    return part.sum(), *pulls  # type: ignore[return-value]


def _turned(p: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Turn experts (B, J, D) and capsules (B, I, K) so that images are last: → (J·D, P), (I·K, P)."""
    (batch, outputs, out_dim), (_, inputs, in_dim) = p.shape, v.shape
    experts = p.new_empty(outputs * out_dim, pitch(batch))
    capsules = v.new_empty(inputs * in_dim, pitch(batch))
    grid = (-(-max(len(experts), len(capsules)) // TURN), -(-pitch(batch) // TURN), 2)
    sizes = {"J": outputs, "D": out_dim, "K": in_dim, "BB": TURN, "C": TURN}
    run("strip_turn", grid, (v.contiguous(), p.contiguous(), capsules, experts, batch, inputs), sizes)
    return experts, capsules


def _speak(part: Tensor, on: Tensor | None, out: Tensor) -> None:
    """Join parts and squash them, 0 where `on` is False: (S, B, J, D), (B, J) → out (B, J, D)."""
    flags = {"HAS_ON": on is not None, "LARGEST": F._largest_norm(out.dtype)}
    pointers = (part, part if on is None else on.contiguous(), out)
    run_rows("speak", pointers, (out.shape[0] * out.shape[1], part.shape[0]), out.shape[2], flags)


# ---------------------------------------------------------------------------------------------------------
# Where coefficients come from

# The codes of `poecaps.kernels.tiles`.
UNIFORM, GIVEN, LOGITS, HISTORY, ONLINE = range(5)


@dataclass(frozen=True)
class _Source:
    """Coefficients as a kernel takes them; a pointer that is not used may point anywhere."""

    kind: int
    options: Options
    x: Tensor
    h: Tensor
    level: Tensor
    c: Tensor
    store: bool = False

    @property
    def beta(self) -> float:
        return float(self.options.sharpness)

    @property
    def flags(self) -> dict[str, Any]:
        return {"SOURCE": self.kind, "INPUTS": self.options.inputs, "COSINE": self.options.cosine}


def _source(
    coefficients: Tensor | Coefficients, spare: Tensor, kind: int | None = None, *, store: bool = False
) -> _Source:
    """Find the pointers of coefficients, of the kind given or of the one that is fastest."""
    if not isinstance(coefficients, Coefficients):
        return _Source(GIVEN, Options(), spare, spare, spare, coefficients.contiguous())
    found = coefficients
    if kind is None:
        kind = UNIFORM if found.options.iterations == 1 else HISTORY if found.logits is None else LOGITS
    c = spare if found.logits is None else found.logits
    return _Source(kind, found.options, found.x, found.history, found.level, c, store)


def _uniform(plan: Plan, options: Options) -> float:
    """Return the coefficient that all have before the first agreement."""
    return 1 / (plan.inputs if options.inputs else plan.outputs)
