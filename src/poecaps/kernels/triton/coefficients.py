# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Routing coefficients that are stored implicitly, and recomputed wherever a kernel needs them.

No kernel writes a vote. A block of votes u_ij = W_ij x_i is computed in registers and used there.
The logits after any number of iterations follow from one vector per image and expert, because
agreement is linear in the vector that an expert contributes: with h_j = Σ_s a(z_j^(s)) over the
iterations s so far, where the agreement vector a(z) is direction(z) for the cosine and squash(z)
for the inner product,

    b_ij = β ⟨u_ij, h_j⟩, divided by ‖u_ij‖ for the cosine,        c_ij = exp(b_ij − lse)

with lse the log-sum-exp of the softmax: one number per (j, b) if it runs over the inputs, per
(i, b) if it runs over the outputs. `h` and `lse` have these names in every kernel.
"""

from dataclasses import dataclass, field
from enum import IntEnum
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from poecaps.functional import RoutingOptions
from poecaps.kernels.triton.blocks import (
    agreement,
    load_capsules,
    load_logits,
    load_maps,
    load_scaled_h,
    load_softmax_statistic,
    padded_batch,
    votes,
)
from poecaps.kernels.triton.jit import kernel
from poecaps.kernels.triton.launch import LaunchConfig
from poecaps.kernels.triton.tiling import TileConfig, expert_tiling, many_to_few


class Source(IntEnum):
    """Where a kernel takes the coefficients from: its constant SOURCE."""

    UNIFORM = 0  # all are equal
    LOGITS = 1  # from logits in memory and the lse
    RECOMPUTE = 2  # from x, h and the lse
    ONLINE = 3  # from x and h, by an online softmax over the inputs


# The same for kernels, which read only constants of Triton's own type.
UNIFORM = tl.constexpr(Source.UNIFORM.value)
LOGITS = tl.constexpr(Source.LOGITS.value)
RECOMPUTE = tl.constexpr(Source.RECOMPUTE.value)
ONLINE = tl.constexpr(Source.ONLINE.value)

# A softmax over logits within ±60 needs no maximum: e^60 times any number of inputs is far from the
# largest float32, e^88.
MAX_BOUNDED_LOGIT = 60.0

# Sums over the experts: the best of a sweep on an H200.
EXPERT_SUM_CONFIG = TileConfig(
    block_n=32, programs_per_sm=4, launch=LaunchConfig(num_warps=4, num_stages=1)
)


# --------------------------------------------------------------------------------------------------
# Device functions


@triton.jit
def expert_coefficients(
    x, maps, h_ptr, lse_ptr, logits_ptr, beta, offs_b, i, j0, B, uniform,
    I, J: tl.constexpr, D: tl.constexpr,
    SOURCE: tl.constexpr, NORMALIZE_INPUTS: tl.constexpr, COSINE: tl.constexpr,
    TF32X3: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """c_ij of one input and BLOCK_J experts: (BLOCK_B, BLOCK_J).

    x is the block of capsules (BLOCK_B, BLOCK_K), `uniform` the coefficient of UNIFORM.
    """
    if SOURCE == UNIFORM:
        c = tl.zeros([offs_b.shape[0], BLOCK_J], tl.float32) + uniform
    else:
        if SOURCE == LOGITS:
            logit = load_logits(logits_ptr, offs_b, i, j0, B, I, J, BLOCK_J)
        else:
            u = votes(x, maps, BLOCK_J, BLOCK_D, TF32X3)
            h = load_scaled_h(h_ptr, beta, offs_b, j0, B, J, D, BLOCK_J, BLOCK_D)
            logit = agreement(u, h, COSINE)
        lse = load_softmax_statistic(lse_ptr, offs_b, i, j0, B, J, BLOCK_J, NORMALIZE_INPUTS)
        c = tl.exp2(logit - lse)
    return c


@triton.jit
def input_coefficients(
    logits_ptr, lse_ptr, uniform, offs_b, i0, j, B, I,
    BLOCK_I: tl.constexpr, SOURCE: tl.constexpr, NORMALIZE_INPUTS: tl.constexpr,
):  # fmt: skip
    """c_ij of BLOCK_I inputs and one expert, from logits or UNIFORM: (BLOCK_I, BLOCK_B)."""
    if SOURCE == UNIFORM:
        c = tl.zeros([BLOCK_I, offs_b.shape[0]], tl.float32) + uniform
    else:
        P = padded_batch(B)
        offs_i = i0 + tl.arange(0, BLOCK_I)
        mask = (offs_i < I)[:, None] & (offs_b < P)[None, :]
        pointers = logits_ptr + ((j * I + offs_i) * P)[:, None] + offs_b[None, :]
        logit = tl.load(pointers, mask=mask, other=float("-inf"))
        if NORMALIZE_INPUTS:
            lse = tl.load(lse_ptr + j * P + offs_b, mask=offs_b < P, other=0.0)[None, :]
        else:
            lse = tl.load(lse_ptr + (offs_i * P)[:, None] + offs_b[None, :], mask=mask, other=0.0)
        c = tl.exp2(logit - lse)
    return c


# --------------------------------------------------------------------------------------------------
# Kernel and launcher


@kernel
def _coefficients_kernel(
    x_ptr, w_ptr, h_ptr, lse_ptr, logits_ptr, out_ptr, beta, uniform, B,
    I, J: tl.constexpr, D: tl.constexpr, K: tl.constexpr,
    SOURCE: tl.constexpr, NORMALIZE_INPUTS: tl.constexpr, COSINE: tl.constexpr,
    TF32X3: tl.constexpr,
    BLOCK_B: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Write the coefficients: → out (B, I, J)."""
    BLOCK_J: tl.constexpr = BLOCK_N // BLOCK_D
    i = tl.program_id(0)
    offs_b = tl.program_id(1) * BLOCK_B + tl.arange(0, BLOCK_B)
    x = load_capsules(x_ptr, offs_b, i, B, I, K, BLOCK_K)
    for j0 in range(0, J, BLOCK_J):
        maps = load_maps(w_ptr, i, j0, J, D, K, BLOCK_N, BLOCK_D, BLOCK_K)
        c = expert_coefficients(
            x, maps, h_ptr, lse_ptr, logits_ptr, beta, offs_b, i, j0, B, uniform, I, J, D,
            SOURCE, NORMALIZE_INPUTS, COSINE, TF32X3, BLOCK_J, BLOCK_D,
        )  # fmt: skip
        offs_j = j0 + tl.arange(0, BLOCK_J)
        offsets = (offs_b.to(tl.int64) * I + i)[:, None] * J + offs_j[None, :]
        tl.store(out_ptr + offsets, c, mask=(offs_b < B)[:, None] & (offs_j < J)[None, :])


class Traits(NamedTuple):
    """Options of the routing, as kernels take them.

    Attributes
    ----------
    beta
        Sharpness β, always a float: kernels are compiled for the type of a number.
    normalize_inputs
        Whether the softmax runs over the inputs.
    cosine
        Whether the agreement is the cosine.
    bounded
        Whether the logits are so small that the softmax needs no maximum.
    flags
        The constants of a kernel that uses the coefficients, for each source of them.
    """

    beta: float
    normalize_inputs: bool
    cosine: bool
    bounded: bool
    flags: dict[Source, dict[str, Any]]


@lru_cache(maxsize=64)
def _traits(routing: RoutingOptions) -> Traits:
    beta, cosine = float(routing.sharpness), routing.agreement == "cosine"
    normalize_inputs = routing.normalize == "inputs"
    bounded = cosine and beta * (routing.iterations - 1) <= MAX_BOUNDED_LOGIT
    flags = {
        source: {
            "SOURCE": source.value,
            "NORMALIZE_INPUTS": normalize_inputs,
            "COSINE": cosine,
        }
        for source in Source
    }
    return Traits(beta, normalize_inputs, cosine, bounded, flags)


@dataclass(frozen=True, eq=False)
class Coefficients:
    """Routing coefficients c_ij, stored implicitly.

    Stored are the inputs and the log-sum-exp, from which the coefficients are recomputed: memory
    for capsules, not for pairs of capsules.

    Attributes
    ----------
    x : (B, I, K)
        The capsules that were routed.
    routing
        Options of the routing.
    h : (B, J, D)
        Sum of the agreement vectors before the last iteration; not used after a single iteration.
    lse : (J, P) or (I, P)
        Log-sum-exp of the softmax over the inputs or the outputs, times log₂ e; not used after a
        single iteration.
    logits : (J, I, P), optional
        The logits times log₂ e, if they are kept. P is B padded to a multiple of 16.
    source
        Where kernels take the coefficients from: UNIFORM, LOGITS or RECOMPUTE.
    traits
        The options of the routing, as kernels take them.
    """

    x: Tensor
    routing: RoutingOptions
    h: Tensor
    lse: Tensor
    logits: Tensor | None = None
    source: Source = field(init=False)
    traits: Traits = field(init=False)

    def __post_init__(self) -> None:
        source = Source.RECOMPUTE if self.logits is None else Source.LOGITS
        if self.routing.iterations == 1:
            source = Source.UNIFORM
        object.__setattr__(self, "source", source)
        object.__setattr__(self, "traits", _traits(self.routing))

    @property
    def logits_or_any(self) -> Tensor:
        """The logits, or any tensor for a kernel that does not read them."""
        return self.x if self.logits is None else self.logits

    def by_inputs(self, weight: Tensor) -> bool:
        """Return whether kernels compute several inputs and one expert at a time.

        They need coefficients that are at hand: kept, or all equal.
        """
        return self.source != Source.RECOMPUTE and many_to_few(weight)

    @property
    def input_flags(self) -> dict[str, Any]:
        """The constants of a kernel that calls `input_coefficients`."""
        return {"SOURCE": self.source.value, "NORMALIZE_INPUTS": self.traits.normalize_inputs}

    @property
    def flags(self) -> dict[str, Any]:
        """The constants of a kernel that takes the coefficients from `source`."""
        return self.traits.flags[self.source]

    def uniform(self, weight: Tensor) -> float:
        """Return the coefficient of the first iteration, 1/I or 1/J, for a weight (I, J, D, K)."""
        return 1 / weight.shape[0 if self.traits.normalize_inputs else 1]

    def tensor(self, weight: Tensor) -> Tensor:
        """Compute the coefficients: weight (I, J, D, K) → (B, I, J), float32."""
        weight = weight.detach().contiguous()
        tiling = expert_tiling(weight, EXPERT_SUM_CONFIG)
        batch, inputs, _ = self.x.shape
        out = self.x.new_empty(batch, inputs, tiling.outputs, dtype=torch.float32)
        pointers = (self.x, weight, self.h, self.lse, self.logits_or_any, out)
        tiling.launch(
            _coefficients_kernel,
            batch,
            (inputs, tiling.image_blocks(batch)),
            (*pointers, self.traits.beta, self.uniform(weight), batch),
            self.flags,
        )
        return out
