# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""The first convolution, with few channels and stride 1, as implicit GEMMs.

With v images (B, C, H1+S−1, W1+S−1), x a hidden grid (B, H1, W1, F) and w the filters (F, S, S, C):

    convolution              x[b, y, x, o] = Σ_{r,s,c} v[b, c, y+r, x+s] w[o, r, s, c]
    transposed convolution   v[b, c, i, j] = Σ_{r,s,o} x[b, i−r, j−s, o] w[o, r, s, c]
    weight gradient          w[o, r, s, c] = Σ_{b,y,x} x[b, y, x, o] v[b, c, y+r, x+s]

`poecaps.kernels.triton.conv_common` explains the letters.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from poecaps.kernels.triton.conv_common import (
    BLOCK_SUM,
    ELEMENTWISE,
    Epilogue,
    GemmConfig,
    ProblemSize,
    apply_epilogue,
    dot,
    store_column_sums,
    sum_splits,
)
from poecaps.kernels.triton.jit import kernel
from poecaps.kernels.triton.launch import LaunchConfig, cdiv, launch, padded, split_k

# The best block sizes and launch options of a sweep on an H200. Kernels that gather patches were
# fastest without software pipelining.
UNPIPELINED = LaunchConfig(num_warps=4, num_stages=1, maxnreg=None)
CONV = GemmConfig(block_k=32, launch=UNPIPELINED)
WEIGHT_GRAD = GemmConfig(launch=UNPIPELINED)
CONV_TRANSPOSE = GemmConfig(launch=LaunchConfig(num_warps=8, num_stages=2, maxnreg=128))

# Pixels that one program of `col2im_kernel` computes.
BLOCK_PIXELS = 128

# Splits that `conv1_weight_grad_reduce_kernel` adds at a time.
BLOCK_SPLITS = 32


@triton.jit
def _im2col(
    images_ptr, offs_m, offs_k, M,
    H1: tl.constexpr, W1: tl.constexpr, S: tl.constexpr, C: tl.constexpr, ONES: tl.constexpr,
):  # fmt: skip
    """Gather a block of the im2col matrix (M, S·S·C): (BLOCK_M, BLOCK_K), bfloat16.

    With ONES, the matrix has one more column, of ones.
    """
    WIDTH: tl.constexpr = W1 + S - 1
    PIXELS: tl.constexpr = (H1 + S - 1) * WIDTH
    corner = offs_m // (H1 * W1) * (C * PIXELS) + offs_m // W1 % H1 * WIDTH + offs_m % W1
    within = offs_k % C * PIXELS + offs_k // (S * C) * WIDTH + offs_k // C % S
    mask = (offs_m < M)[:, None] & (offs_k < S * S * C)[None, :]
    block = tl.load(images_ptr + corner[:, None] + within[None, :], mask=mask, other=0.0)
    if ONES:
        block = tl.where((offs_m < M)[:, None] & (offs_k == S * S * C)[None, :], 1.0, block)
    return block.to(tl.bfloat16)


# --------------------------------------------------------------------------------------------------
# Convolution


@kernel
def conv1_kernel(
    images_ptr, w_ptr, bias_ptr, activation_ptr, out_ptr, column_sums_ptr, B,
    H1: tl.constexpr, W1: tl.constexpr, S: tl.constexpr, C: tl.constexpr, F: tl.constexpr,
    HAS_BIAS: tl.constexpr, LEAKY_RELU: tl.constexpr, LEAKY_RELU_GRAD: tl.constexpr,
    NEGATIVE_SLOPE: tl.constexpr, HAS_SUMS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute the product (B·H1·W1, S·S·C) × (S·S·C, F): → out (B, H1, W1, F).

    With HAS_SUMS, also → column_sums (programs, F).
    """
    K: tl.constexpr = S * S * C
    M = B * (H1 * W1)
    offs_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in tl.static_range(0, K, BLOCK_K):
        offs_k = start + tl.arange(0, BLOCK_K)
        w_mask = (offs_n < F)[:, None] & (offs_k < K)[None, :]
        w_block = tl.load(w_ptr + (offs_n * K)[:, None] + offs_k[None, :], mask=w_mask, other=0.0)
        patches = _im2col(images_ptr, offs_m, offs_k, M, H1, W1, S, C, False)
        acc = dot(patches, tl.trans(w_block.to(tl.bfloat16)), acc)
    mask = (offs_m < M)[:, None] & (offs_n < F)[None, :]
    offs = offs_m[:, None] * F + offs_n[None, :]
    acc = apply_epilogue(
        acc, offs, mask, offs_n, bias_ptr, activation_ptr,
        HAS_BIAS, LEAKY_RELU, LEAKY_RELU_GRAD, NEGATIVE_SLOPE, F,
    )  # fmt: skip
    tl.store(out_ptr + offs, acc, mask=mask)
    if HAS_SUMS:
        store_column_sums(acc, mask, offs_n, column_sums_ptr, F)


def conv1(
    images: Tensor,
    weight: Tensor,
    size: ProblemSize,
    epilogue: Epilogue,
    dtype: torch.dtype,
    *,
    sum_columns: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Convolve images with stride 1.

    Parameters
    ----------
    images : (B, C, H1+S−1, W1+S−1)
    weight : (F, C, S, S), channels-last
    size
        Sizes of the problem.
    epilogue
        Elementwise operations on the result, without dropout.
    dtype
        Of the result.
    sum_columns
        Whether to sum the result over images and positions: the gradient in a bias.

    Returns
    -------
    out : (B, H1, W1, F)
    column_sums : (F,) or None
    """
    batch, features = len(images), size.features
    rows = batch * size.hidden[0] * size.hidden[1]
    block_m, block_n = min(CONV.block_m, padded(rows, 16)), size.block_features(CONV.block_n)
    grid = (cdiv(rows, block_m), cdiv(features, block_n))
    out = images.new_empty(batch, *size.hidden, features, dtype=dtype)
    sums = images.new_empty(grid[0] if sum_columns else 1, features, dtype=torch.float32)
    constants = {
        **size.conv1_constants,
        "F": features,
        **epilogue.constants,
        "HAS_SUMS": sum_columns,
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        "BLOCK_K": CONV.block_k,
    }
    arguments = (images, weight, *epilogue.tensors(out), out, sums, batch)
    launch(conv1_kernel, grid, arguments, constants, CONV.launch)
    return out, sum_splits(sums) if sum_columns else None


# --------------------------------------------------------------------------------------------------
# Transposed convolution


@kernel
def conv1_transpose_kernel(
    x_ptr, w_ptr, columns_ptr, B,
    H1: tl.constexpr, W1: tl.constexpr, S: tl.constexpr, C: tl.constexpr, F: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute the product (S·S·C, F) × (F, B·H1·W1): → columns (B, S·S·C, H1·W1)."""
    K: tl.constexpr = S * S * C
    M = B * (H1 * W1)
    offs_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for start in tl.static_range(0, F, BLOCK_K):
        offs_k = start + tl.arange(0, BLOCK_K)
        w_mask = (offs_k < F)[:, None] & (offs_n < K)[None, :]
        w_block = tl.load(w_ptr + (offs_k * K)[:, None] + offs_n[None, :], mask=w_mask, other=0.0)
        x_mask = (offs_m < M)[:, None] & (offs_k < F)[None, :]
        x_block = tl.load(x_ptr + offs_m[:, None] * F + offs_k[None, :], mask=x_mask, other=0.0)
        acc = dot(tl.trans(w_block.to(tl.bfloat16)), tl.trans(x_block), acc)
    position = offs_m // (H1 * W1) * (K * H1 * W1) + offs_m % (H1 * W1)
    offs = position[None, :] + (offs_n * (H1 * W1))[:, None]
    tl.store(columns_ptr + offs, acc, mask=(offs_n < K)[:, None] & (offs_m < M)[None, :])


@kernel
def col2im_kernel(
    columns_ptr, bias_ptr, out_ptr,
    H1: tl.constexpr, W1: tl.constexpr, S: tl.constexpr, C: tl.constexpr,
    HAS_BIAS: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Add columns (B, S·S·C, H1·W1) at their pixels: → out (B, C, H1+S−1, W1+S−1)."""
    WIDTH: tl.constexpr = W1 + S - 1
    PIXELS: tl.constexpr = (H1 + S - 1) * WIDTH
    b = tl.program_id(0) // C
    c = tl.program_id(0) % C
    offs_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    y = offs_n // WIDTH
    x = offs_n % WIDTH
    ptrs = columns_ptr + (b * (S * S * C) + c) * (H1 * W1) + y * W1 + x
    acc = tl.zeros([BLOCK_N], tl.float32)
    for r in range(S):
        for s in tl.static_range(S):
            inside = (y >= r) & (y < r + H1) & (x >= s) & (x < s + W1)
            offset = (r * S + s) * (C * H1 * W1) - r * W1 - s
            acc += tl.load(ptrs + offset, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        acc += tl.load(bias_ptr + c).to(tl.float32)
    tl.store(out_ptr + tl.program_id(0) * PIXELS + offs_n, acc, mask=offs_n < PIXELS)


def conv1_transpose(x: Tensor, weight: Tensor, bias: Tensor | None, size: ProblemSize) -> Tensor:
    """Apply the transposed convolution to a hidden grid.

    Parameters
    ----------
    x : (B, H1, W1, F)
    weight : (F, C, S, S), channels-last
    bias : (C,), optional
    size
        Sizes of the problem.

    Returns
    -------
    (B, C, H1+S−1, W1+S−1)
        float32.
    """
    config, batch, (h1, w1) = CONV_TRANSPOSE, len(x), size.hidden
    rows = batch * h1 * w1
    columns = x.new_empty(batch, size.patch, h1 * w1)
    block_m = min(config.block_m, padded(rows, 16))
    block_n = min(config.block_n, padded(size.patch, 16))
    constants = {
        **size.conv1_constants,
        "F": size.features,
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        "BLOCK_K": min(config.block_k, padded(size.features, 16)),
    }
    grid = (cdiv(rows, block_m), cdiv(size.patch, block_n))
    launch(conv1_transpose_kernel, grid, (x, weight, columns, batch), constants, config.launch)

    height, width = h1 + size.kernel_size - 1, w1 + size.kernel_size - 1
    out = x.new_empty(batch, size.channels, height, width, dtype=torch.float32)
    fold_constants = {
        **size.conv1_constants,
        "HAS_BIAS": bias is not None,
        "BLOCK_N": BLOCK_PIXELS,
    }
    grid = (batch * size.channels, cdiv(height * width, BLOCK_PIXELS))
    arguments = (columns, out if bias is None else bias, out)
    launch(col2im_kernel, grid, arguments, fold_constants, ELEMENTWISE)
    return out


# --------------------------------------------------------------------------------------------------
# Weight gradient


@kernel
def conv1_weight_grad_kernel(
    images_ptr, x_ptr, partial_ptr, B, steps_per_split,
    H1: tl.constexpr, W1: tl.constexpr, S: tl.constexpr, C: tl.constexpr, F: tl.constexpr,
    ONES: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute one split of (F, B·H1·W1) × (B·H1·W1, S·S·C+1): → partial (splits, F, S·S·C+1).

    The last column is the sum of x with ONES, else 0.
    """
    N: tl.constexpr = S * S * C
    K = B * (H1 * W1)
    offs_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(2)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    start = split * steps_per_split
    for step in range(start, tl.minimum(start + steps_per_split, (K + BLOCK_K - 1) // BLOCK_K)):
        offs_k = step * BLOCK_K + tl.arange(0, BLOCK_K)
        x_mask = (offs_k < K)[:, None] & (offs_m < F)[None, :]
        x_block = tl.load(x_ptr + offs_k[:, None] * F + offs_m[None, :], mask=x_mask, other=0.0)
        patches = _im2col(images_ptr, offs_k, offs_n, K, H1, W1, S, C, ONES)
        acc = dot(tl.trans(x_block), patches, acc)
    offs = (split * F + offs_m)[:, None] * (N + 1) + offs_n[None, :]
    tl.store(partial_ptr + offs, acc, mask=(offs_m < F)[:, None] & (offs_n <= N)[None, :])


@kernel
def conv1_weight_grad_reduce_kernel(
    partial_ptr, grad_weight_ptr, grad_bias_ptr, splits,
    F: tl.constexpr, N: tl.constexpr, HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Sum partial (splits, F, N+1): → grad_weight (F, N), and its last column → grad_bias (F,)."""
    offs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, splits, BLOCK_M):
        split = start + tl.arange(0, BLOCK_M)
        mask = (split < splits)[:, None] & (offs < F * (N + 1))[None, :]
        part = partial_ptr + split[:, None] * (F * (N + 1)) + offs[None, :]
        acc += tl.load(part, mask=mask, other=0.0)
    total = tl.sum(acc, 0)
    m = offs // (N + 1)
    n = offs % (N + 1)
    tl.store(grad_weight_ptr + m * N + n, total, mask=(m < F) & (n < N))
    if HAS_BIAS:
        tl.store(grad_bias_ptr + m, total, mask=(m < F) & (n == N))


def conv1_weight_grad_buffer(x: Tensor, size: ProblemSize, uses: int) -> Tensor:
    """Allocate the partial results of `conv1_weight_grad`, for some uses of the filters.

    Parameters
    ----------
    x : (B, H1, W1, F)
    size
        Sizes of the problem.
    uses
        How often the filters were used: one call of `conv1_weight_grad` for each.

    Returns
    -------
    (uses, splits, F, S·S·C+1)
    """
    block_m, block_n = _weight_grad_blocks(size)
    programs = cdiv(size.features, block_m) * cdiv(size.patch + 1, block_n)
    steps = cdiv(x.numel() // size.features, WEIGHT_GRAD.block_k)
    splits, _ = split_k(programs, steps, WEIGHT_GRAD.program_slots(x.device))
    return x.new_empty(uses, splits, size.features, size.patch + 1, dtype=torch.float32)


def conv1_weight_grad(
    images: Tensor, x: Tensor, size: ProblemSize, *, sum_x: bool, out: Tensor
) -> None:
    """Compute the weight gradient of one use of the filters, not yet summed over the splits.

    Parameters
    ----------
    images : (B, C, H1+S−1, W1+S−1)
    x : (B, H1, W1, F)
        Either of `images` and `x` is an input or output of the convolution, and the other the
        gradient in its output or input.
    size
        Sizes of the problem.
    sum_x
        Whether to sum `x` over images and positions as well: the gradient in a bias.
    out : (splits, F, S·S·C+1)
        One use of the buffer of `conv1_weight_grad_buffer`.
    """
    block_m, block_n = _weight_grad_blocks(size)
    grid = (cdiv(size.features, block_m), cdiv(size.patch + 1, block_n), len(out))
    steps_per_split = cdiv(x.numel(), size.features * WEIGHT_GRAD.block_k * len(out))
    constants = {
        **size.conv1_constants,
        "F": size.features,
        "ONES": sum_x,
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        "BLOCK_K": WEIGHT_GRAD.block_k,
    }
    arguments = (images, x, out, len(images), steps_per_split)
    launch(conv1_weight_grad_kernel, grid, arguments, constants, WEIGHT_GRAD.launch)


def sum_conv1_weight_grad(
    buffer: Tensor, size: ProblemSize, *, has_bias: bool
) -> tuple[Tensor, Tensor | None]:
    """Sum the results of `conv1_weight_grad` over all uses and splits.

    Parameters
    ----------
    buffer : (uses, splits, F, S·S·C+1)
    size
        Sizes of the problem.
    has_bias
        Whether one of the uses had `sum_x`.

    Returns
    -------
    grad_weight : (F, C, S, S)
    grad_bias : (F,) or None
    """
    partial = buffer.flatten(0, 1)
    grad_weight = partial.new_empty(
        size.features, size.kernel_size, size.kernel_size, size.channels
    )
    grad_bias = partial.new_empty(size.features)
    block_n = BLOCK_SUM // BLOCK_SPLITS
    constants = {
        "F": size.features,
        "N": size.patch,
        "HAS_BIAS": has_bias,
        "BLOCK_M": BLOCK_SPLITS,
        "BLOCK_N": block_n,
    }
    grid = (cdiv(partial[0].numel(), block_n),)
    arguments = (partial, grad_weight, grad_bias, len(partial))
    launch(conv1_weight_grad_reduce_kernel, grid, arguments, constants, ELEMENTWISE)
    return grad_weight.permute(0, 3, 1, 2), grad_bias if has_bias else None


def _weight_grad_blocks(size: ProblemSize) -> tuple[int, int]:
    block_m = size.block_features(WEIGHT_GRAD.block_m)
    return block_m, min(WEIGHT_GRAD.block_n, padded(size.patch + 1, 16))
