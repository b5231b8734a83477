# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""The second convolution, with F channels and stride 2, as implicit GEMMs.

With x a hidden grid (B, H1, W1, F), f a feature grid (B, H2, W2, F) and w the filters (F, S, S, F):

    convolution              f[b, p, q, o] = Σ_{r,s,c} x[b, 2p+r, 2q+s, c] w[o, r, s, c]
    transposed convolution   x[b, y, x, c] = Σ_{p,q,o} f[b, p, q, o] w[o, y−2p, x−2q, c]
    weight gradient          w[o, r, s, c] = Σ_{b,p,q} f[b, p, q, o] x[b, 2p+r, 2q+s, c]

The first two are each other's gradient in the input, and the third is the weight gradient of both.
`poecaps.kernels.triton.conv_common` explains the letters.
"""

from functools import cache

import torch
import triton.language as tl
from torch import Tensor

from poecaps.kernels.triton.conv_common import (
    BLOCK_REDUCE,
    ELEMENTWISE,
    SPLIT_K_COST,
    Epilogue,
    GemmConfig,
    ProblemSize,
    apply_epilogue,
    dot,
    store_column_sums,
    sum_splits,
)
from poecaps.kernels.triton.jit import kernel
from poecaps.kernels.triton.launch import cdiv, launch, padded, split_k

# The best block sizes of a sweep on an H200.
CONV = GemmConfig()
CONV_TRANSPOSE = GemmConfig()
WEIGHT_GRAD = GemmConfig()

# Taps of one program of the transposed convolution. Positions with more taps are divided between
# two programs if there are fewer than `MIN_WAVES` waves of programs. Also from the sweep.
MAX_TAPS, MIN_WAVES = 13, 4


# --------------------------------------------------------------------------------------------------
# Convolution


@kernel
def conv2_kernel(
    x_ptr, w_ptr, partial_ptr, B, steps_per_split,
    H1: tl.constexpr, W1: tl.constexpr, H2: tl.constexpr, W2: tl.constexpr,
    S: tl.constexpr, F: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute one split of the product (B·H2·W2, S·S·F) × (S·S·F, F): → partial (splits, M, F).

    A step along K is BLOCK_K channels of one tap.
    """
    STEPS_PER_TAP: tl.constexpr = F // BLOCK_K
    offs_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(2)
    offs_k = tl.arange(0, BLOCK_K)
    M = B * (H2 * W2)
    # Loads are clamped, not masked; rows and columns beyond the end are masked when stored.
    m = tl.minimum(offs_m, M - 1)
    corner = ((m // (H2 * W2) * H1 + m // W2 % H2 * 2) * W1 + m % W2 * 2) * F
    x_ptrs = x_ptr + corner[:, None] + offs_k[None, :]
    w_ptrs = w_ptr + (tl.minimum(offs_n, F - 1) * (S * S * F))[:, None] + offs_k[None, :]
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    start = split * steps_per_split
    for step in range(start, tl.minimum(start + steps_per_split, S * S * STEPS_PER_TAP)):
        tap = step // STEPS_PER_TAP
        offset = (tap // S * W1 + tap % S) * F + step % STEPS_PER_TAP * BLOCK_K
        a = tl.load(x_ptrs + offset)
        b = tl.load(w_ptrs + step * BLOCK_K)
        acc = dot(a, tl.trans(b), acc)
    offs = (split * M + offs_m).to(tl.int64)[:, None] * F + offs_n[None, :]
    tl.store(partial_ptr + offs, acc, mask=(offs_m < M)[:, None] & (offs_n < F)[None, :])


@kernel
def conv2_reduce_kernel(
    partial_ptr, bias_ptr, activation_ptr, uniform_ptr, out_ptr, column_sums_ptr, M, splits,
    F: tl.constexpr, AREA: tl.constexpr,
    HAS_BIAS: tl.constexpr, LEAKY_RELU: tl.constexpr, LEAKY_RELU_GRAD: tl.constexpr,
    NEGATIVE_SLOPE: tl.constexpr,
    HAS_DROPOUT: tl.constexpr, DROPOUT: tl.constexpr, HAS_SUMS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Sum partial (splits, M, F) over the splits and apply the epilogue: → out (M, F).

    AREA is H2·W2. With HAS_SUMS, also → column_sums (programs, F).
    """
    offs_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = (offs_m < M)[:, None] & (offs_n < F)[None, :]
    offs = offs_m[:, None] * F + offs_n[None, :]
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for split in range(splits):
        part = partial_ptr + M.to(tl.int64) * (split * F) + offs
        acc += tl.load(part, mask=mask, other=0.0).to(tl.float32)
    acc = apply_epilogue(
        acc, offs, mask, offs_n, bias_ptr, activation_ptr,
        HAS_BIAS, LEAKY_RELU, LEAKY_RELU_GRAD, NEGATIVE_SLOPE, F,
    )  # fmt: skip
    if HAS_DROPOUT:
        # The random numbers are (B, F, H2, W2), as PyTorch draws them.
        rows = offs_m // AREA * (F * AREA) + offs_m % AREA
        drawn = uniform_ptr + rows[:, None] + (offs_n * AREA)[None, :]
        kept = tl.load(drawn, mask=mask, other=0.0) >= DROPOUT
        acc = tl.where(kept, acc * (1 / (1 - DROPOUT)), 0.0)
    tl.store(out_ptr + offs, acc, mask=mask)
    if HAS_SUMS:
        store_column_sums(acc, mask, offs_n, column_sums_ptr, F)


def conv2(
    x: Tensor,
    weight: Tensor,
    size: ProblemSize,
    epilogue: Epilogue,
    dtype: torch.dtype,
    *,
    sum_columns: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Convolve a hidden grid with stride 2.

    Parameters
    ----------
    x : (B, H1, W1, F)
    weight : (F, F, S, S), channels-last
    size
        Sizes of the problem.
    epilogue
        Elementwise operations on the result.
    dtype
        Of the result.
    sum_columns
        Whether to sum the result over images and positions: the gradient in a bias.

    Returns
    -------
    out : (B, H2, W2, F)
    column_sums : (F,) or None
    """
    batch, features, area = len(x), size.features, size.grid[0] * size.grid[1]
    rows = batch * area
    block_m, block_n = min(CONV.block_m, padded(rows, 16)), size.block_features(CONV.block_n)
    block_k = size.block_k(CONV)
    grid = (cdiv(rows, block_m), cdiv(features, block_n))
    steps, slots = size.kernel_size**2 * features // block_k, CONV.program_slots(x.device)
    splits, steps_per_split = split_k(grid[0] * grid[1], steps, slots, SPLIT_K_COST)
    partial = x.new_empty(splits, rows, features, dtype=torch.float32)
    constants = {
        **size.conv2_constants,
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        "BLOCK_K": block_k,
    }
    arguments = (x, weight, partial, batch, steps_per_split)
    launch(conv2_kernel, (*grid, splits), arguments, constants, CONV.launch)

    out = x.new_empty(batch, *size.grid, features, dtype=dtype)
    grid = (cdiv(rows, BLOCK_REDUCE), cdiv(features, block_n))
    sums = partial.new_empty(grid[0] if sum_columns else 1, features)
    reduce_constants = {
        "F": features,
        "AREA": area,
        **epilogue.constants,
        "HAS_DROPOUT": epilogue.uniform is not None,
        "DROPOUT": epilogue.dropout,
        "HAS_SUMS": sum_columns,
        "BLOCK_M": BLOCK_REDUCE,
        "BLOCK_N": block_n,
    }
    uniform = out if epilogue.uniform is None else epilogue.uniform
    reduce_arguments = (partial, *epilogue.tensors(out), uniform, out, sums, rows, splits)
    launch(conv2_reduce_kernel, grid, reduce_arguments, reduce_constants, ELEMENTWISE)
    return out, sum_splits(sums) if sum_columns else None


# --------------------------------------------------------------------------------------------------
# Transposed convolution


@kernel
def conv2_transpose_kernel(
    f_ptr, w_ptr, work_items_ptr, bias_ptr, activation_ptr, out_ptr, partial_ptr, B, batch_blocks,
    H1: tl.constexpr, W1: tl.constexpr, H2: tl.constexpr, W2: tl.constexpr,
    S: tl.constexpr, F: tl.constexpr,
    HAS_BIAS: tl.constexpr, LEAKY_RELU: tl.constexpr, LEAKY_RELU_GRAD: tl.constexpr,
    NEGATIVE_SLOPE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute one position of the hidden grid for BLOCK_M images: → out (B, H1, W1, F).

    Only the features that reach the position are multiplied: with stride 2, about a quarter of the
    S×S taps. A work item is (position, first tap, taps, pair). If two work items divide the taps of
    a position, each stores its half for `conv2_transpose_reduce_kernel`: → partial (pairs, 2, B,
    F).
    """
    STEPS_PER_TAP: tl.constexpr = F // BLOCK_K
    item = work_items_ptr + tl.program_id(0) // batch_blocks * 4
    block = tl.program_id(0) % batch_blocks
    position = tl.load(item)
    first_tap = tl.load(item + 1)
    taps = tl.load(item + 2)
    pair = tl.load(item + 3)
    y = position // W1
    x = position % W1
    # First row and column of the features that reach (y, x), and the number of their columns.
    p_first = tl.maximum(y - S + 2, 0) // 2
    q_first = tl.maximum(x - S + 2, 0) // 2
    q_count = tl.minimum(x // 2, W2 - 1) - q_first + 1
    offs_b = block * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    f_ptrs = f_ptr + (tl.minimum(offs_b, B - 1) * (H2 * W2 * F))[:, None] + offs_k[None, :]
    columns = tl.max_contiguous(tl.multiple_of(offs_n % F, 8), 8)
    w_ptrs = w_ptr + (offs_k * (S * S * F))[:, None] + columns[None, :]
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for step in range(first_tap * STEPS_PER_TAP, (first_tap + taps) * STEPS_PER_TAP):
        tap = step // STEPS_PER_TAP
        p = p_first + tap // q_count
        q = q_first + tap % q_count
        k = step % STEPS_PER_TAP * BLOCK_K
        a = tl.load(f_ptrs + ((p * W2 + q) * F + k))
        b = tl.load(w_ptrs + ((y - 2 * p) * S + x - 2 * q) * F + k * (S * S * F))
        acc = dot(a, b, acc)
    offs = ((offs_b * H1 + y) * W1 + x)[:, None] * F + offs_n[None, :]
    mask = (offs_b < B)[:, None] & (offs_n < F)[None, :]
    if pair >= 0:
        half = (pair * 2 + tl.where(first_tap > 0, 1, 0)) * B + offs_b
        tl.store(partial_ptr + half[:, None] * F + offs_n[None, :], acc, mask=mask)
    else:
        acc = apply_epilogue(
            acc, offs, mask, offs_n, bias_ptr, activation_ptr,
            HAS_BIAS, LEAKY_RELU, LEAKY_RELU_GRAD, NEGATIVE_SLOPE, F,
        )  # fmt: skip
        tl.store(out_ptr + offs, acc, mask=mask)


@kernel
def conv2_transpose_reduce_kernel(
    partial_ptr, positions_ptr, bias_ptr, activation_ptr, out_ptr, B,
    H1: tl.constexpr, W1: tl.constexpr, F: tl.constexpr,
    HAS_BIAS: tl.constexpr, LEAKY_RELU: tl.constexpr, LEAKY_RELU_GRAD: tl.constexpr,
    NEGATIVE_SLOPE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Add the halves (pairs, 2, B, F) of divided positions: → out (B, H1, W1, F)."""
    pair = tl.program_id(0)
    offs_b = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = tl.program_id(2) * BLOCK_N + tl.arange(0, BLOCK_N)
    position = tl.load(positions_ptr + pair)
    half = partial_ptr + (pair * 2 * B + offs_b)[:, None] * F + offs_n[None, :]
    offs = (offs_b * (H1 * W1) + position)[:, None] * F + offs_n[None, :]
    mask = (offs_b < B)[:, None] & (offs_n < F)[None, :]
    acc = tl.load(half, mask=mask, other=0.0) + tl.load(half + B * F, mask=mask, other=0.0)
    acc = apply_epilogue(
        acc, offs, mask, offs_n, bias_ptr, activation_ptr,
        HAS_BIAS, LEAKY_RELU, LEAKY_RELU_GRAD, NEGATIVE_SLOPE, F,
    )  # fmt: skip
    tl.store(out_ptr + offs, acc, mask=mask)


def conv2_transpose(
    f: Tensor, weight: Tensor, size: ProblemSize, epilogue: Epilogue, dtype: torch.dtype
) -> Tensor:
    """Apply the transposed convolution to a feature grid.

    Parameters
    ----------
    f : (B, H2, W2, F)
    weight : (F, F, S, S), channels-last
    size
        Sizes of the problem.
    epilogue
        Elementwise operations on the result, without dropout.
    dtype
        Of the result.

    Returns
    -------
    (B, H1, W1, F)
    """
    config, batch, features = CONV_TRANSPOSE, len(f), size.features
    block_m, block_n = min(config.block_m, padded(batch, 16)), size.block_features(config.block_n)
    batch_blocks, feature_blocks = cdiv(batch, block_m), cdiv(features, block_n)
    programs = size.hidden[0] * size.hidden[1] * batch_blocks * feature_blocks
    few = programs < MIN_WAVES * config.program_slots(f.device)
    work_items, positions = _work_items(size, MAX_TAPS if few else size.kernel_size**2, f.device)
    out = f.new_empty(batch, *size.hidden, features, dtype=dtype)
    partial = f.new_empty(len(positions) or 1, 2, batch, features, dtype=torch.float32)
    constants = {
        **size.conv2_constants,
        **epilogue.constants,
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        "BLOCK_K": size.block_k(config),
    }
    grid = (len(work_items) * batch_blocks, feature_blocks)
    bias, activation = epilogue.tensors(out)
    arguments = (f, weight, work_items, bias, activation, out, partial, batch, batch_blocks)
    launch(conv2_transpose_kernel, grid, arguments, constants, config.launch)
    if len(positions) > 0:
        reduce_constants = {
            "H1": size.hidden[0],
            "W1": size.hidden[1],
            "F": features,
            **epilogue.constants,
            "BLOCK_M": BLOCK_REDUCE,
            "BLOCK_N": block_n,
        }
        reduce_grid = (len(positions), cdiv(batch, BLOCK_REDUCE), feature_blocks)
        reduce_arguments = (partial, positions, bias, activation, out, batch)
        launch(
            conv2_transpose_reduce_kernel,
            reduce_grid,
            reduce_arguments,
            reduce_constants,
            ELEMENTWISE,
        )
    return out


@cache
def _work_items(size: ProblemSize, max_taps: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """List the work of `conv2_transpose_kernel`, the longest items first.

    Returns
    -------
    work_items : (N, 4)
        Position, first tap, number of taps, and the pair, or −1 if the position is not divided.
    positions : (pairs,)
        The divided positions.
    """

    def taps(index: int, count: int) -> int:
        """Return the number of rows (or columns) of features that reach a row (or column)."""
        first, last = max(index - size.kernel_size + 2, 0) // 2, min(index // 2, count - 1)
        return max(0, last - first + 1)

    (h1, w1), (h2, w2) = size.hidden, size.grid
    items: list[tuple[int, int, int, int]] = []
    divided: list[int] = []
    for y in range(h1):
        for x in range(w1):
            position, count = y * w1 + x, taps(y, h2) * taps(x, w2)
            if count > max_taps:
                half, pair = count - count // 2, len(divided)
                items += [(position, 0, half, pair), (position, half, count - half, pair)]
                divided.append(position)
            else:
                items.append((position, 0, count, -1))
    items.sort(key=lambda item: -item[2])
    positions = torch.tensor(divided, dtype=torch.int32, device=device)
    return torch.tensor(items, dtype=torch.int32, device=device), positions


# --------------------------------------------------------------------------------------------------
# Weight gradient


@kernel
def conv2_weight_grad_kernel(
    f_ptr, x_ptr, other_f_ptr, other_x_ptr, partial_ptr, B, steps_per_split, splits,
    H1: tl.constexpr, W1: tl.constexpr, H2: tl.constexpr, W2: tl.constexpr,
    S: tl.constexpr, F: tl.constexpr, PAIRS: tl.constexpr, EVEN_B: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute one split of fᵀx for one tap: → partial (PAIRS·splits, F, S, S, F).

    A step along K is BLOCK_K images at one position. With two PAIRS, the later splits sum over
    other_f and other_x. EVEN_B: B is a multiple of BLOCK_K.
    """
    CHANNEL_BLOCKS: tl.constexpr = (F + BLOCK_N - 1) // BLOCK_N
    split = tl.program_id(2)
    if PAIRS == 2:
        start = split % splits * steps_per_split
        if split >= splits:
            f_ptr = other_f_ptr
            x_ptr = other_x_ptr
    else:
        start = split * steps_per_split
    offs_m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    tap = tl.program_id(0) // CHANNEL_BLOCKS
    offs_n = tl.program_id(0) % CHANNEL_BLOCKS * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    rows = tl.max_contiguous(tl.multiple_of(offs_m % F, 8), 8)
    f_ptrs = f_ptr + (offs_k * (H2 * W2 * F))[:, None] + rows[None, :]
    columns = tl.max_contiguous(tl.multiple_of(offs_n % F, 8), 8)
    x_ptrs = (
        x_ptr + (tap // S * W1 + tap % S) * F + (offs_k * (H1 * W1 * F))[:, None] + columns[None, :]
    )
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    steps = (B + BLOCK_K - 1) // BLOCK_K * (H2 * W2)
    for step in range(start, tl.minimum(start + steps_per_split, steps)):
        block = step // (H2 * W2) * BLOCK_K
        p = step // W2 % H2
        q = step % W2
        f_offset = (block * (H2 * W2) + p * W2 + q) * F
        x_offset = ((block * H1 + 2 * p) * W1 + 2 * q) * F
        if EVEN_B:
            a = tl.load(f_ptrs + f_offset)
            b = tl.load(x_ptrs + x_offset)
        else:
            inside = (block + offs_k < B)[:, None]
            a = tl.load(f_ptrs + f_offset, mask=inside & (offs_m >= 0)[None, :], other=0.0)
            b = tl.load(x_ptrs + x_offset, mask=inside & (offs_n >= 0)[None, :], other=0.0)
        acc = dot(tl.trans(a), b, acc)
    offs = (split * F + offs_m).to(tl.int64)[:, None] * (S * S * F) + (tap * F + offs_n)[None, :]
    tl.store(partial_ptr + offs, acc, mask=(offs_m < F)[:, None] & (offs_n < F)[None, :])


def conv2_weight_grad(pairs: list[tuple[Tensor, Tensor]], size: ProblemSize) -> Tensor:
    """Compute the gradient in the filters, summed over one or two uses of them.

    Parameters
    ----------
    pairs : of (B, H2, W2, F) and (B, H1, W1, F)
        Feature grid and hidden grid of each use: one is an input or output of the convolution, the
        other the gradient in its output or input.
    size
        Sizes of the problem.

    Returns
    -------
    (F, F, S, S)
    """
    (f, x), (other_f, other_x) = pairs[0], pairs[-1]
    config, batch, features = WEIGHT_GRAD, len(f), size.features
    block_m, block_n = size.block_features(config.block_m), size.block_features(config.block_n)
    block_k = min(config.block_k, padded(batch, 16))
    grid = (size.kernel_size**2 * cdiv(features, block_n), cdiv(features, block_m))
    steps = cdiv(batch, block_k) * size.grid[0] * size.grid[1]
    programs, slots = grid[0] * grid[1] * len(pairs), config.program_slots(f.device)
    splits, steps_per_split = split_k(programs, steps, slots, SPLIT_K_COST)
    shape = (splits * len(pairs), features, size.kernel_size, size.kernel_size, features)
    partial = f.new_empty(shape, dtype=torch.float32)
    constants = {
        **size.conv2_constants,
        "PAIRS": len(pairs),
        "EVEN_B": batch % block_k == 0,
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        "BLOCK_K": block_k,
    }
    arguments = (f, x, other_f, other_x, partial, batch, steps_per_split, splits)
    launch(conv2_weight_grad_kernel, (*grid, len(partial)), arguments, constants, config.launch)
    return sum_splits(partial).permute(0, 3, 1, 2)
