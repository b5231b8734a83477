# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Routing by agreement, forward: z_j = Σ_i c_ij W_ij x_i, once or iterated.

`poecaps.kernels.triton.coefficients` says how the coefficients follow from x, h and lse. The
softmax over the inputs is computed online, in the same pass as z, as in flash attention: m_i is the
running maximum of the logits, l_i the running denominator and acc the running sum.

A sum over the inputs is divided among several programs where one per block would leave
multiprocessors idle. `_combine_splits_kernel` adds the partial sums.

Where the logits are kept in memory and the inputs are many, z needs no vote: with W_j the maps to
expert j as one (I·K, D) matrix, z_j = (c_·j ⊙ x) W_j (`_preactivation_from_logits_kernel`).
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from poecaps import functional as F
from poecaps.kernels.triton.blocks import (
    agreement,
    dot,
    load_capsules,
    load_input_capsules,
    load_input_maps,
    load_logits,
    load_maps,
    load_scaled_h,
    load_softmax_statistic,
    padded_batch,
    polar,
    squash_rows,
    statistic_offsets,
    store_experts,
    store_logits,
    votes,
)
from poecaps.kernels.triton.coefficients import (
    LOGITS,
    ONLINE,
    RECOMPUTE,
    Coefficients,
    Source,
    input_coefficients,
)
from poecaps.kernels.triton.jit import kernel
from poecaps.kernels.triton.launch import LaunchConfig, cdiv, launch
from poecaps.kernels.triton.tiling import (
    TileConfig,
    expert_tiling,
    input_tiling,
    launch_rows,
    many_to_few,
    max_norm,
    padded_batch_size,
)

# Logits of a batch up to this size are kept between the passes of a learning step, which saves
# computing the votes again.
KEEP_LOGITS_BYTES = 64 * 2**20

# The best of a sweep on an H200: sums over the inputs, with votes, with equal coefficients, and
# with kept logits; log-sum-exps over the outputs.
PREACTIVATION_CONFIG = TileConfig(
    programs_per_sm=3, launch=LaunchConfig(num_warps=4, num_stages=3, maxnreg=168)
)
UNIFORM_CONFIG = TileConfig(block_b=128, launch=LaunchConfig(num_warps=8, num_stages=3))
FROM_LOGITS_CONFIG = TileConfig(
    block_b=32, block_n=32, programs_per_sm=12, launch=LaunchConfig(num_warps=1, num_stages=3)
)
OUTPUT_LSE_CONFIG = TileConfig(launch=LaunchConfig(num_warps=4, num_stages=1))

# Numbers of the inputs in one step of a sum with equal coefficients: four capsules of dimension 8.
UNIFORM_BLOCK_K = 32

# Inputs and images whose log-sum-exp one program computes from kept logits: 4 numbers per thread,
# and a warp reads 128 neighbouring images.
LSE_BLOCK_I, LSE_BLOCK_B = 4, 128


# --------------------------------------------------------------------------------------------------
# Kernels: sums over the inputs


@kernel
def _preactivation_kernel(
    x_ptr, v_ptr, w_ptr, h_ptr, lse_ptr, logits_ptr, part_ptr, m_ptr, l_ptr,
    beta, B, inputs_per_split,
    I, J: tl.constexpr, D: tl.constexpr, K: tl.constexpr,
    SOURCE: tl.constexpr, NORMALIZE_INPUTS: tl.constexpr, COSINE: tl.constexpr,
    V_IS_X: tl.constexpr, STORE_LOGITS: tl.constexpr, BOUNDED: tl.constexpr, TF32X3: tl.constexpr,
    BLOCK_B: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Sum c_ij W_ij v_i over the inputs of a split, with c of x: → part (S, B, J, D).

    ONLINE: the sums are not normalized. The maximum of the logits and the denominator are written
    to m and l (S, B, J); if BOUNDED, only the denominator is, without a maximum. STORE_LOGITS also
    writes the logits. V_IS_X: v is x.
    """
    BLOCK_J: tl.constexpr = BLOCK_N // BLOCK_D
    offs_b = tl.program_id(0) * BLOCK_B + tl.arange(0, BLOCK_B)
    j0 = tl.program_id(1) * BLOCK_J
    split = tl.program_id(2)
    offs_j = j0 + tl.arange(0, BLOCK_J)
    low = split * inputs_per_split
    high = tl.minimum(low + inputs_per_split, I)
    acc = tl.zeros([BLOCK_B, BLOCK_J, BLOCK_D], tl.float32)
    if SOURCE == ONLINE:
        h = load_scaled_h(h_ptr, beta, offs_b, j0, B, J, D, BLOCK_J, BLOCK_D)
        m_i = tl.full([BLOCK_B, BLOCK_J], float("-inf"), tl.float32)
        l_i = tl.zeros([BLOCK_B, BLOCK_J], tl.float32)
        for i in range(low, high):
            x = load_capsules(x_ptr, offs_b, i, B, I, K, BLOCK_K)
            maps = load_maps(w_ptr, i, j0, J, D, K, BLOCK_N, BLOCK_D, BLOCK_K)
            u = votes(x, maps, BLOCK_J, BLOCK_D, TF32X3)
            logit = agreement(u, h, COSINE)
            if STORE_LOGITS:
                store_logits(logits_ptr, logit, offs_b, i, j0, B, I, J, BLOCK_J)
            if BOUNDED:
                p = tl.exp2(logit)
                l_i += p
                acc += p[:, :, None] * u
            else:
                m_new = tl.maximum(m_i, logit)
                alpha = tl.exp2(m_i - m_new)
                p = tl.exp2(logit - m_new)
                l_i = l_i * alpha + p
                acc = acc * alpha[:, :, None] + p[:, :, None] * u
                m_i = m_new
        offsets = ((split * B + offs_b).to(tl.int64) * J)[:, None] + offs_j[None, :]
        mask = (offs_b < B)[:, None] & (offs_j < J)[None, :]
        tl.store(l_ptr + offsets, l_i, mask=mask)
        if not BOUNDED:
            tl.store(m_ptr + offsets, m_i, mask=mask)
    else:
        if SOURCE == RECOMPUTE:
            h = load_scaled_h(h_ptr, beta, offs_b, j0, B, J, D, BLOCK_J, BLOCK_D)
        for i in range(low, high):
            maps = load_maps(w_ptr, i, j0, J, D, K, BLOCK_N, BLOCK_D, BLOCK_K)
            v = load_capsules(v_ptr, offs_b, i, B, I, K, BLOCK_K)
            v_votes = votes(v, maps, BLOCK_J, BLOCK_D, TF32X3)
            if SOURCE == LOGITS:
                logit = load_logits(logits_ptr, offs_b, i, j0, B, I, J, BLOCK_J)
            else:
                if V_IS_X:
                    u = v_votes
                else:
                    x = load_capsules(x_ptr, offs_b, i, B, I, K, BLOCK_K)
                    u = votes(x, maps, BLOCK_J, BLOCK_D, TF32X3)
                logit = agreement(u, h, COSINE)
            lse = load_softmax_statistic(lse_ptr, offs_b, i, j0, B, J, BLOCK_J, NORMALIZE_INPUTS)
            acc += tl.exp2(logit - lse)[:, :, None] * v_votes
    part_ptr += split.to(tl.int64) * B * J * D
    store_experts(part_ptr, acc, offs_b, j0, B, J, D, BLOCK_J, BLOCK_D)


@kernel
def _uniform_preactivation_kernel(
    v_ptr, w_ptr, part_ptr, B, inputs_per_split,
    I, J: tl.constexpr, D: tl.constexpr, K: tl.constexpr, TF32X3: tl.constexpr,
    BLOCK_B: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Sum W_ij v_i over the inputs of a split: → part (S, B, J, D), without the equal coefficient.

    The numbers of all inputs are one axis here, BLOCK_K of them in a step, so that none is padding.
    """
    BLOCK_J: tl.constexpr = BLOCK_N // BLOCK_D
    offs_b = tl.program_id(0) * BLOCK_B + tl.arange(0, BLOCK_B)
    split = tl.program_id(2)
    offs_n = tl.arange(0, BLOCK_N)
    offs_j = tl.program_id(1) * BLOCK_J + offs_n // BLOCK_D
    offs_d = offs_n % BLOCK_D
    high = tl.minimum((split + 1) * inputs_per_split, I) * K
    acc = tl.zeros([BLOCK_B, BLOCK_N], tl.float32)
    for start in range(split * inputs_per_split * K, high, BLOCK_K):
        offs_ik = start + tl.arange(0, BLOCK_K)
        offs_i = offs_ik // K
        offs_k = offs_ik % K
        is_input = (offs_ik < high)[None, :]
        v = tl.load(
            v_ptr + (offs_b.to(tl.int64)[:, None] * I + offs_i[None, :]) * K + offs_k[None, :],
            mask=(offs_b < B)[:, None] & is_input,
            other=0.0,
        ).to(tl.float32)
        maps = tl.load(
            w_ptr
            + ((offs_i.to(tl.int64) * J)[None, :] + offs_j[:, None]) * (D * K)
            + (offs_d * K)[:, None]
            + offs_k[None, :],
            mask=((offs_j < J) & (offs_d < D))[:, None] & is_input,
            other=0.0,
        ).to(tl.float32)
        acc += dot(v, tl.trans(maps), TF32X3)
    row = (split * B + offs_b).to(tl.int64) * J
    offsets = row[:, None] * D + (offs_j * D + offs_d)[None, :]
    mask = (offs_b < B)[:, None] & ((offs_j < J) & (offs_d < D))[None, :]
    tl.store(part_ptr + offsets, acc, mask=mask)


@kernel
def _preactivation_from_logits_kernel(
    v_ptr, w_ptr, lse_ptr, logits_ptr, part_ptr, B, inputs_per_split,
    I, J: tl.constexpr, D: tl.constexpr, K: tl.constexpr,
    NORMALIZE_INPUTS: tl.constexpr, TF32X3: tl.constexpr,
    BLOCK_B: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Sum c_ij W_ij v_i over the inputs of a split, a multiple of BLOCK_I: → part (S, B, J, D)."""
    BLOCK_I: tl.constexpr = BLOCK_N // BLOCK_K
    offs_b = tl.program_id(0) * BLOCK_B + tl.arange(0, BLOCK_B)
    j = tl.program_id(1)
    split = tl.program_id(2)
    low = split * inputs_per_split
    acc = tl.zeros([BLOCK_B, BLOCK_D], tl.float32)
    for i0 in range(low, tl.minimum(low + inputs_per_split, I), BLOCK_I):
        c = input_coefficients(
            logits_ptr, lse_ptr, 0.0, offs_b, i0, j, B, I, BLOCK_I, LOGITS, NORMALIZE_INPUTS
        )
        c = tl.trans(c)[:, :, None]
        v = load_input_capsules(v_ptr, offs_b, i0, B, I, K, BLOCK_N, BLOCK_K)
        cv = tl.reshape(c * tl.reshape(v, [BLOCK_B, BLOCK_I, BLOCK_K]), [BLOCK_B, BLOCK_N])
        maps = load_input_maps(w_ptr, i0, j, I, J, D, K, BLOCK_N, BLOCK_D, BLOCK_K)
        acc += dot(cv, tl.trans(maps), TF32X3)
    offs_d = tl.arange(0, BLOCK_D)
    row = (split * B + offs_b).to(tl.int64) * J + j
    mask = (offs_b < B)[:, None] & (offs_d < D)[None, :]
    tl.store(part_ptr + row[:, None] * D + offs_d[None, :], acc, mask=mask)


@kernel
def _combine_splits_kernel(
    part_ptr, m_ptr, l_ptr, z_ptr, lse_ptr, h_ptr, h_next_ptr, rows, splits, factor,
    J: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    SOFTMAX: tl.constexpr, BOUNDED: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr,
    COSINE: tl.constexpr, MAX_NORM: tl.constexpr,
):  # fmt: skip
    """Add the partial sums of z (rows = B·J), and the agreement vector of z to h unless LAST.

    SOFTMAX: normalize the sums and write the log-sum-exp; otherwise multiply them by `factor`.
    """
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    offs_d = tl.arange(0, BLOCK_D)
    is_row = row < rows
    offsets = row.to(tl.int64)[:, None] * D + offs_d[None, :]
    mask = is_row[:, None] & (offs_d < D)[None, :]
    acc = tl.zeros([BLOCK_ROWS, BLOCK_D], tl.float32)
    l_i = tl.zeros([BLOCK_ROWS], tl.float32)
    m_i = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
    for split in range(splits):
        start = rows.to(tl.int64) * split
        part = tl.load(part_ptr + start * D + offsets, mask=mask, other=0.0)
        if SOFTMAX:
            l_part = tl.load(l_ptr + start + row, mask=is_row, other=1.0)
            if BOUNDED:
                l_i += l_part
                acc += part
            else:
                m_part = tl.load(m_ptr + start + row, mask=is_row, other=0.0)
                m_new = tl.maximum(m_i, m_part)
                alpha = tl.exp2(m_i - m_new)
                alpha_part = tl.exp2(m_part - m_new)
                l_i = l_i * alpha + l_part * alpha_part
                acc = acc * alpha[:, None] + part * alpha_part[:, None]
                m_i = m_new
        else:
            acc += part
    if SOFTMAX:
        acc = acc / l_i[:, None]
        lse = tl.log2(l_i) if BOUNDED else m_i + tl.log2(l_i)
        tl.store(lse_ptr + statistic_offsets(row, rows, J), lse, mask=is_row)
    else:
        acc = acc * factor
    tl.store(z_ptr + offsets, acc, mask=mask)
    if not LAST:
        h = polar(acc)[1] if COSINE else squash_rows(acc, MAX_NORM)
        if not FIRST:
            h += tl.load(h_ptr + offsets, mask=mask, other=0.0)
        tl.store(h_next_ptr + offsets, h, mask=mask)


# --------------------------------------------------------------------------------------------------
# Kernels: log-sum-exp of the softmax over the outputs


@kernel
def _output_lse_kernel(
    x_ptr, w_ptr, h_ptr, lse_ptr, beta, B,
    I, J: tl.constexpr, D: tl.constexpr, K: tl.constexpr,
    COSINE: tl.constexpr, TF32X3: tl.constexpr,
    BLOCK_B: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute log Σ_j exp b_ij for every image and input: → lse (I, P)."""
    BLOCK_J: tl.constexpr = BLOCK_N // BLOCK_D
    i = tl.program_id(0)
    offs_b = tl.program_id(1) * BLOCK_B + tl.arange(0, BLOCK_B)
    x = load_capsules(x_ptr, offs_b, i, B, I, K, BLOCK_K)
    m_i = tl.full([BLOCK_B], float("-inf"), tl.float32)
    l_i = tl.zeros([BLOCK_B], tl.float32)
    for j0 in range(0, J, BLOCK_J):
        maps = load_maps(w_ptr, i, j0, J, D, K, BLOCK_N, BLOCK_D, BLOCK_K)
        u = votes(x, maps, BLOCK_J, BLOCK_D, TF32X3)
        h = load_scaled_h(h_ptr, beta, offs_b, j0, B, J, D, BLOCK_J, BLOCK_D)
        logit = agreement(u, h, COSINE)
        logit = tl.where((j0 + tl.arange(0, BLOCK_J) < J)[None, :], logit, float("-inf"))
        m_new = tl.maximum(m_i, tl.max(logit, 1))
        l_i = l_i * tl.exp2(m_i - m_new) + tl.sum(tl.exp2(logit - m_new[:, None]), 1)
        m_i = m_new
    P = padded_batch(B)
    tl.store(lse_ptr + i * P + offs_b, m_i + tl.log2(l_i), mask=offs_b < P)


@kernel
def _logits_kernel(
    x_ptr, w_ptr, h_ptr, logits_ptr, beta, B, inputs_per_split,
    I, J: tl.constexpr, D: tl.constexpr, K: tl.constexpr,
    COSINE: tl.constexpr, TF32X3: tl.constexpr,
    BLOCK_B: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Write the logits of the inputs of a split: → logits (J, I, P)."""
    BLOCK_J: tl.constexpr = BLOCK_N // BLOCK_D
    offs_b = tl.program_id(0) * BLOCK_B + tl.arange(0, BLOCK_B)
    j0 = tl.program_id(1) * BLOCK_J
    low = tl.program_id(2) * inputs_per_split
    h = load_scaled_h(h_ptr, beta, offs_b, j0, B, J, D, BLOCK_J, BLOCK_D)
    for i in range(low, tl.minimum(low + inputs_per_split, I)):
        x = load_capsules(x_ptr, offs_b, i, B, I, K, BLOCK_K)
        maps = load_maps(w_ptr, i, j0, J, D, K, BLOCK_N, BLOCK_D, BLOCK_K)
        u = votes(x, maps, BLOCK_J, BLOCK_D, TF32X3)
        store_logits(logits_ptr, agreement(u, h, COSINE), offs_b, i, j0, B, I, J, BLOCK_J)


@kernel
def _output_lse_from_logits_kernel(
    logits_ptr, lse_ptr, B, I, J: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_I: tl.constexpr
):
    """Compute log Σ_j exp b_ij from logits (J, I, P): → lse (I, P)."""
    P = padded_batch(B)
    offs_i = tl.program_id(0) * BLOCK_I + tl.arange(0, BLOCK_I)
    offs_b = tl.program_id(1) * BLOCK_B + tl.arange(0, BLOCK_B)
    mask = (offs_i < I)[:, None] & (offs_b < P)[None, :]
    offsets = (offs_i * P)[:, None] + offs_b[None, :]
    m_i = tl.full([BLOCK_I, BLOCK_B], float("-inf"), tl.float32)
    l_i = tl.zeros([BLOCK_I, BLOCK_B], tl.float32)
    for j in range(J):
        logit = tl.load(logits_ptr + j * I * P + offsets, mask=mask, other=0.0)
        m_new = tl.maximum(m_i, logit)
        l_i = l_i * tl.exp2(m_i - m_new) + tl.exp2(logit - m_new)
        m_i = m_new
    tl.store(lse_ptr + offsets, m_i + tl.log2(l_i), mask=mask)


# --------------------------------------------------------------------------------------------------
# Launchers


@dataclass(frozen=True)
class ForwardPass:
    """Result of `route`, for all R iterations or for the last one alone (R = 1 below).

    Attributes
    ----------
    x : (B, I, K)
    routing
        Options of the routing.
    z, h : (R, B, J, D)
        Preactivation of each iteration, and the sum of the agreement vectors before it; float32.
    lse : (R, J, P) or (R, I, P)
        Log-sum-exp of each iteration, see `Coefficients`.
    coefficients
        Coefficients of the last iteration.
    """

    x: Tensor
    routing: F.RoutingOptions
    z: Tensor
    h: Tensor
    lse: Tensor
    coefficients: Coefficients

    @property
    def preactivation(self) -> Tensor:
        """Preactivation of the last iteration: (B, J, D), of the dtype of x."""
        return self.z[-1].to(self.x.dtype)


def recorded_pass(
    x: Tensor, routing: F.RoutingOptions, z: Tensor, h: Tensor, lse: Tensor
) -> ForwardPass:
    """Return the forward pass of which x, z, h and lse were recorded."""
    return ForwardPass(x, routing, z, h, lse, Coefficients(x, routing, h[-1], lse[-1]))


def route(
    x: Tensor,
    weight: Tensor,
    routing: F.RoutingOptions,
    *,
    keep_logits: bool = False,
    record: bool = False,
) -> ForwardPass:
    """Route by agreement, without a gradient.

    Parameters
    ----------
    x : (B, I, K)
    weight : (I, J, D, K)
    routing
        Options of the routing.
    keep_logits
        Whether to keep the logits for later passes, if they take at most `KEEP_LOGITS_BYTES`.
    record
        Whether to return z, h and lse of all iterations, for the gradient through the iterations.
    """
    x, weight = x.detach().contiguous(), weight.detach().contiguous()
    batch, (inputs, outputs, out_dim, _) = x.shape[0], weight.shape
    recorded = routing.iterations if record else 1
    over_inputs = routing.normalize == "inputs"
    z = x.new_empty(recorded, batch, outputs, out_dim, dtype=torch.float32)
    h = torch.empty_like(z)
    row = padded_batch_size(batch)
    # The padding is read as well, and must be finite.
    new = z.new_empty if row == batch else z.new_zeros
    lse = new(recorded, outputs if over_inputs else inputs, row)
    logits = None
    fits = batch * inputs * outputs * 4 <= KEEP_LOGITS_BYTES
    if keep_logits and fits and routing.iterations > 1:
        logits = z.new_empty(outputs, inputs, row)
    all_z, all_h, all_lse = z.unbind(), h.unbind(), lse.unbind()
    c = Coefficients(x, routing, all_h[0], all_lse[0], logits)
    for r in range(routing.iterations):
        now, following = (r, r + 1) if record else (0, 0)
        last = r == routing.iterations - 1
        if now > 0:
            c = Coefficients(x, routing, all_h[now], all_lse[now], logits)
        source, write_logits = c.source, False
        if r == 0:
            source = Source.UNIFORM
        elif over_inputs:
            source, write_logits = Source.ONLINE, last and logits is not None
        else:
            _output_lse(weight, c)
        _combine_splits(
            _partial_sums(x, weight, c, source, write_logits=write_logits),
            all_z[now],
            c,
            h_next=None if last else all_h[following],
            first=r == 0,
        )
    return ForwardPass(x, routing, z, h, lse, c)


def preactivation(v: Tensor, weight: Tensor, c: Coefficients) -> Tensor:
    """Compute z_j = Σ_i c_ij W_ij v_i: (B, I, K), (I, J, D, K) → (B, J, D)."""
    v, weight = v.detach().contiguous(), weight.detach().contiguous()
    _, outputs, out_dim, _ = weight.shape
    z = v.new_empty(v.shape[0], outputs, out_dim, dtype=torch.float32)
    _combine_splits(_partial_sums(v, weight, c, c.source), z, c)
    return z.to(v.dtype)


class _PartialSums(NamedTuple):
    """Partial sums of z, still to be added and normalized.

    Attributes
    ----------
    part : (S, B, J, D)
    factor
        Factor of the sum, without an online softmax.
    online
        Statistics m and l of the online softmax, (S, B, J) each; None without one.
    """

    part: Tensor
    factor: float = 1.0
    online: tuple[Tensor, Tensor] | None = None


def _partial_sums(
    v: Tensor, weight: Tensor, c: Coefficients, source: Source, *, write_logits: bool = False
) -> _PartialSums:
    """Sum c_ij W_ij v_i over the inputs of each split, with coefficients from `source`."""
    if source == Source.UNIFORM:
        return _PartialSums(_uniform_sums(v, weight), factor=c.uniform(weight))
    if source == Source.LOGITS and many_to_few(weight):
        return _PartialSums(_sums_from_logits(v, weight, c))
    tiling, batch = expert_tiling(weight, PREACTIVATION_CONFIG), v.shape[0]
    blocks = tiling.image_blocks(batch)
    programs = blocks * tiling.expert_blocks
    splits, inputs_per_split = tiling.split(programs, tiling.inputs, v.device)
    part = v.new_empty(splits, batch, tiling.outputs, tiling.out_dim, dtype=torch.float32)
    m = l = part  # in place of tensors that are not written
    if source == Source.ONLINE:
        l = part.new_empty(splits, batch, tiling.outputs)
        m = l if c.traits.bounded else torch.empty_like(l)
    pointers = (c.x, v, weight, c.h, c.lse, c.logits_or_any, part, m, l)
    tiling.launch(
        _preactivation_kernel,
        batch,
        (blocks, tiling.expert_blocks, splits),
        (*pointers, c.traits.beta, batch, inputs_per_split),
        {
            **c.traits.flags[source],
            "V_IS_X": c.x is v,
            "STORE_LOGITS": write_logits,
            "BOUNDED": c.traits.bounded,
        },
    )
    return _PartialSums(part, online=(m, l) if source == Source.ONLINE else None)


def _uniform_sums(v: Tensor, weight: Tensor) -> Tensor:
    tiling, batch = expert_tiling(weight, UNIFORM_CONFIG), v.shape[0]
    blocks, inputs_per_step = tiling.image_blocks(batch), max(1, UNIFORM_BLOCK_K // tiling.in_dim)
    programs, steps = blocks * tiling.expert_blocks, cdiv(tiling.inputs, inputs_per_step)
    splits, steps_per_split = tiling.split(programs, steps, v.device)
    part = v.new_empty(splits, batch, tiling.outputs, tiling.out_dim, dtype=torch.float32)
    tiling.launch(
        _uniform_preactivation_kernel,
        batch,
        (blocks, tiling.expert_blocks, splits),
        (v, weight, part, batch, steps_per_split * inputs_per_step),
        {"BLOCK_K": UNIFORM_BLOCK_K},
    )
    return part


def _sums_from_logits(v: Tensor, weight: Tensor, c: Coefficients) -> Tensor:
    tiling, batch = input_tiling(weight, FROM_LOGITS_CONFIG), v.shape[0]
    blocks = tiling.image_blocks(batch)
    programs = blocks * tiling.outputs
    splits, steps_per_split = tiling.split(programs, tiling.input_blocks, v.device)
    part = v.new_empty(splits, batch, tiling.outputs, tiling.out_dim, dtype=torch.float32)
    tiling.launch(
        _preactivation_from_logits_kernel,
        batch,
        (blocks, tiling.outputs, splits),
        (v, weight, c.lse, c.logits_or_any, part, batch, steps_per_split * tiling.block_i),
        {"NORMALIZE_INPUTS": c.traits.normalize_inputs},
    )
    return part


def _combine_splits(
    sums: _PartialSums,
    z: Tensor,
    c: Coefficients,
    *,
    h_next: Tensor | None = None,
    first: bool = True,
) -> None:
    """Add partial sums to z (B, J, D), and the agreement vectors to h; write the log-sum-exp."""
    softmax = sums.online is not None
    m, l = sums.online or (z, z)
    batch, outputs, out_dim = z.shape
    flags: dict[str, Any] = {
        "SOFTMAX": softmax,
        "FIRST": first,
        "LAST": h_next is None,
        "COSINE": c.traits.cosine,
        "BOUNDED": c.traits.bounded,
        "J": outputs,
        "MAX_NORM": max_norm(c.x.dtype),
    }
    launch_rows(
        _combine_splits_kernel,
        (sums.part, m, l, z, c.lse if softmax else z, c.h, z if h_next is None else h_next),
        (batch * outputs, sums.part.shape[0], sums.factor),
        out_dim,
        flags,
    )


def _output_lse(weight: Tensor, c: Coefficients) -> None:
    """Compute the log-sum-exp over the outputs, and the logits if they are kept."""
    batch, flags = c.x.shape[0], {"COSINE": c.traits.cosine}
    if c.logits is None:
        tiling = expert_tiling(weight, OUTPUT_LSE_CONFIG)
        grid = (tiling.inputs, tiling.image_blocks(batch))
        arguments = (c.x, weight, c.h, c.lse, c.traits.beta, batch)
        tiling.launch(_output_lse_kernel, batch, grid, arguments, flags)
        return
    tiling = expert_tiling(weight, PREACTIVATION_CONFIG)
    blocks = tiling.image_blocks(batch)
    programs = blocks * tiling.expert_blocks
    splits, inputs_per_split = tiling.split(programs, tiling.inputs, c.x.device)
    tiling.launch(
        _logits_kernel,
        batch,
        (blocks, tiling.expert_blocks, splits),
        (c.x, weight, c.h, c.logits, c.traits.beta, batch, inputs_per_split),
        flags,
    )
    launch(
        _output_lse_from_logits_kernel,
        (cdiv(tiling.inputs, LSE_BLOCK_I), cdiv(padded_batch_size(batch), LSE_BLOCK_B)),
        (c.logits, c.lse, batch, tiling.inputs),
        {"J": tiling.outputs, "BLOCK_B": LSE_BLOCK_B, "BLOCK_I": LSE_BLOCK_I},
    )
