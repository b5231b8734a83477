# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Routing backward with held coefficients, x̃_i = squash(Σ_j c_ij W_ijᵀ y_j), and squash itself.

Where the logits are kept in memory, or all coefficients are equal, and the inputs are many, a
program computes several inputs and goes through the experts one by one
(`_reconstruction_by_inputs_kernel`). Otherwise it computes one input and goes through blocks of
experts (`_reconstruction_kernel`).
"""

import torch
import triton.language as tl
from torch import Tensor

from poecaps.kernels.triton.blocks import (
    dot,
    load_capsules,
    load_expert,
    load_experts,
    load_input_maps,
    load_maps,
    squash_rows,
    squashed_norm,
)
from poecaps.kernels.triton.coefficients import (
    EXPERT_SUM_CONFIG,
    Coefficients,
    expert_coefficients,
    input_coefficients,
)
from poecaps.kernels.triton.jit import kernel
from poecaps.kernels.triton.launch import LaunchConfig
from poecaps.kernels.triton.tiling import (
    TileConfig,
    expert_tiling,
    input_tiling,
    launch_rows,
    max_norm,
)

# The best of a sweep on an H200.
BY_INPUTS_CONFIG = TileConfig(
    block_n=32, launch=LaunchConfig(num_warps=2, num_stages=2, maxnreg=168)
)


# --------------------------------------------------------------------------------------------------
# Kernels


@kernel
def _reconstruction_kernel(
    x_ptr, y_ptr, w_ptr, h_ptr, lse_ptr, logits_ptr, out_ptr, beta, uniform, B, experts_per_split,
    I, J: tl.constexpr, D: tl.constexpr, K: tl.constexpr,
    SOURCE: tl.constexpr, NORMALIZE_INPUTS: tl.constexpr, COSINE: tl.constexpr,
    SQUASH: tl.constexpr, MAX_NORM: tl.constexpr, TF32X3: tl.constexpr,
    BLOCK_B: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Sum c_ij W_ijᵀ y_j over the experts of a split: → out (S, B, I, K).

    SQUASH: there is a single split, and its sum is squashed.
    """
    BLOCK_J: tl.constexpr = BLOCK_N // BLOCK_D
    i = tl.program_id(0)
    offs_b = tl.program_id(1) * BLOCK_B + tl.arange(0, BLOCK_B)
    split = tl.program_id(2)
    low = split * experts_per_split
    high = tl.minimum(low + experts_per_split, J)
    x = load_capsules(x_ptr, offs_b, i, B, I, K, BLOCK_K)
    acc = tl.zeros([BLOCK_B, BLOCK_K], tl.float32)
    for j0 in range(low, high, BLOCK_J):
        maps = load_maps(w_ptr, i, j0, J, D, K, BLOCK_N, BLOCK_D, BLOCK_K)
        c = expert_coefficients(
            x, maps, h_ptr, lse_ptr, logits_ptr, beta, offs_b, i, j0, B, uniform, I, J, D,
            SOURCE, NORMALIZE_INPUTS, COSINE, TF32X3, BLOCK_J, BLOCK_D,
        )  # fmt: skip
        y = load_experts(y_ptr, offs_b, j0, B, J, D, BLOCK_J, BLOCK_D)
        acc += dot(tl.reshape(c[:, :, None] * y, [BLOCK_B, BLOCK_N]), maps, TF32X3)
    if SQUASH:
        acc = squash_rows(acc, MAX_NORM)
    offs_k = tl.arange(0, BLOCK_K)
    row = (split * B + offs_b).to(tl.int64) * I + i
    offsets = row[:, None] * K + offs_k[None, :]
    tl.store(out_ptr + offsets, acc, mask=(offs_b < B)[:, None] & (offs_k < K)[None, :])


@kernel
def _reconstruction_by_inputs_kernel(
    y_ptr, w_ptr, lse_ptr, logits_ptr, out_ptr, uniform, B,
    I, J: tl.constexpr, D: tl.constexpr, K: tl.constexpr,
    SOURCE: tl.constexpr, NORMALIZE_INPUTS: tl.constexpr, MAX_NORM: tl.constexpr,
    TF32X3: tl.constexpr,
    BLOCK_B: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute squash(Σ_j c_ij W_ijᵀ y_j): → out (B, I, K)."""
    BLOCK_I: tl.constexpr = BLOCK_N // BLOCK_K
    i0 = tl.program_id(0) * BLOCK_I
    offs_b = tl.program_id(1) * BLOCK_B + tl.arange(0, BLOCK_B)
    acc = tl.zeros([BLOCK_B, BLOCK_I, BLOCK_K], tl.float32)
    c_next = input_coefficients(
        logits_ptr, lse_ptr, uniform, offs_b, i0, 0, B, I, BLOCK_I, SOURCE, NORMALIZE_INPUTS
    )
    for j in range(J):
        # Prefetch: the coefficients of the next expert are loaded while this one is computed.
        c = c_next
        j_next = tl.minimum(j + 1, J - 1)
        c_next = input_coefficients(
            logits_ptr, lse_ptr, uniform, offs_b, i0, j_next, B, I,
            BLOCK_I, SOURCE, NORMALIZE_INPUTS,
        )  # fmt: skip
        y = load_expert(y_ptr, offs_b, j, B, J, D, BLOCK_D)
        maps = load_input_maps(w_ptr, i0, j, I, J, D, K, BLOCK_N, BLOCK_D, BLOCK_K)
        back = dot(y, maps, TF32X3)
        acc += tl.trans(c)[:, :, None] * tl.reshape(back, [BLOCK_B, BLOCK_I, BLOCK_K])
    # As `squash_rows`, for three axes.
    scale = tl.max(tl.abs(acc), 2)
    scale = tl.where(scale > 0, scale, 1.0)[:, :, None]
    unit = acc / scale
    norm = tl.sqrt(tl.sum(unit * unit, 2))[:, :, None]
    unit = unit / tl.where(norm > 0, norm, 1.0)
    out = tl.reshape(squashed_norm(scale * norm, MAX_NORM) * unit, [BLOCK_B, BLOCK_N])
    offs_n = tl.arange(0, BLOCK_N)
    offs_i = i0 + offs_n // BLOCK_K
    offs_k = offs_n % BLOCK_K
    offsets = (offs_b.to(tl.int64) * I)[:, None] * K + (offs_i * K + offs_k)[None, :]
    mask = (offs_b < B)[:, None] & ((offs_i < I) & (offs_k < K))[None, :]
    tl.store(out_ptr + offsets, out, mask=mask)


@kernel
def _squash_kernel(
    part_ptr, on_ptr, out_ptr, rows, splits,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    HAS_ON: tl.constexpr, MAX_NORM: tl.constexpr,
):  # fmt: skip
    """Squash the sum of parts (splits, rows, D), 0 where `on` (rows) is False: → out (rows, D)."""
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    offs_d = tl.arange(0, BLOCK_D)
    is_row = row < rows
    offsets = row.to(tl.int64)[:, None] * D + offs_d[None, :]
    mask = is_row[:, None] & (offs_d < D)[None, :]
    acc = tl.zeros([BLOCK_ROWS, BLOCK_D], tl.float32)
    for split in range(splits):
        start = rows.to(tl.int64) * split * D
        acc += tl.load(part_ptr + start + offsets, mask=mask, other=0.0).to(tl.float32)
    acc = squash_rows(acc, MAX_NORM)
    if HAS_ON:
        acc = tl.where((tl.load(on_ptr + row, mask=is_row, other=0) != 0)[:, None], acc, 0.0)
    tl.store(out_ptr + offsets, acc, mask=mask)


# --------------------------------------------------------------------------------------------------
# Launchers


def reconstruction(y: Tensor, weight: Tensor, c: Coefficients) -> Tensor:
    """Compute x̃_i = squash(Σ_j c_ij W_ijᵀ y_j), without a gradient.

    Parameters
    ----------
    y : (B, J, D)
        Squashed experts.
    weight : (I, J, D, K)
    c
        Coefficients of the routing.

    Returns
    -------
    (B, I, K)
    """
    y, weight = y.detach().contiguous(), weight.detach().contiguous()
    if c.by_inputs(weight):
        return _reconstruction_by_inputs(y, weight, c)
    tiling, batch = expert_tiling(weight, EXPERT_SUM_CONFIG), len(y)
    image_blocks = tiling.image_blocks(batch)
    splits, blocks_per_split = tiling.split(
        tiling.inputs * image_blocks, tiling.expert_blocks, y.device
    )
    out = y.new_empty(batch, tiling.inputs, tiling.in_dim)
    part = out if splits == 1 else y.new_empty(splits, *out.shape, dtype=torch.float32)
    pointers = (c.x, y, weight, c.h, c.lse, c.logits_or_any, part)
    numbers = (c.traits.beta, c.uniform(weight), batch, blocks_per_split * tiling.block_j)
    tiling.launch(
        _reconstruction_kernel,
        batch,
        (tiling.inputs, image_blocks, splits),
        (*pointers, *numbers),
        {**c.flags, "SQUASH": splits == 1, "MAX_NORM": max_norm(y.dtype)},
    )
    if splits > 1:
        _squash_sum(part, None, out)
    return out


def _reconstruction_by_inputs(y: Tensor, weight: Tensor, c: Coefficients) -> Tensor:
    tiling, batch = input_tiling(weight, BY_INPUTS_CONFIG), len(y)
    out = y.new_empty(batch, tiling.inputs, tiling.in_dim)
    tiling.launch(
        _reconstruction_by_inputs_kernel,
        batch,
        (tiling.input_blocks, tiling.image_blocks(batch)),
        (y, weight, c.lse, c.logits_or_any, out, c.uniform(weight), batch),
        {**c.input_flags, "MAX_NORM": max_norm(y.dtype)},
    )
    return out


def squash(z: Tensor, on: Tensor | None = None) -> Tensor:
    """Compute squash(z_j), 0 where `on` is False, without a gradient.

    Parameters
    ----------
    z : (B, J, D)
    on : (B, J), optional

    Returns
    -------
    (B, J, D)
    """
    z = z.detach().contiguous()
    out = torch.empty_like(z)
    _squash_sum(z.unsqueeze(0), on, out)
    return out


def _squash_sum(part: Tensor, on: Tensor | None, out: Tensor) -> None:
    """Add parts (S, B, J, D) and squash the sums, 0 where `on` (B, J) is False: → out (B, J, D)."""
    launch_rows(
        _squash_kernel,
        (part, part if on is None else on.contiguous(), out),
        (out.shape[0] * out.shape[1], len(part)),
        out.shape[2],
        {"HAS_ON": on is not None, "MAX_NORM": max_norm(out.dtype)},
    )
