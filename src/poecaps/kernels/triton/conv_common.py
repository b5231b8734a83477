# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Parts that the kernels of both convolutions share: sizes, split-K, epilogue and reductions.

The convolutions are implicit GEMMs. The patches of an image (its im2col matrix) are gathered block
by block from the image while the product is computed; the matrix itself is never written to memory.

Letters, in this module, in `conv1` and in `conv2`:

    B       images
    C       channels of an image (1 or 3)
    F       features, the filters of each convolution
    S       side of the filters, S×S
    H1, W1  hidden grid, the output of the first convolution
    H2, W2  feature grid, the output of the second convolution

An image has (H1+S−1)×(W1+S−1) pixels. A *tap* is one of the S×S positions of a filter. Images are
(B, C, height, width). Hidden grids (B, H1, W1, F), feature grids (B, H2, W2, F) and filters (F, S,
S, C) and (F, S, S, F) have their channels last in memory. Grids are bfloat16; sums are float32.
"""

import os
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from poecaps.kernels.triton.jit import kernel
from poecaps.kernels.triton.launch import LaunchConfig, cdiv, launch, multiprocessors, padded

# Triton's interpreter cannot multiply bfloat16 blocks.
INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")

# Steps along K that writing a partial sum and reading it again costs, measured on an H200.
SPLIT_K_COST = 8

# Rows that one program of a reduction with epilogue takes.
BLOCK_REDUCE = 8

# Numbers that one program of a plain reduction holds, splits × columns.
BLOCK_SUM = 2048

# Splits above which `torch.sum` is faster than `sum_splits_kernel`.
MAX_SPLITS = 1024

# Launch options of kernels with a matrix product, unless a sweep found better ones, and without
# one.
GEMM = LaunchConfig(num_warps=4, num_stages=3, maxnreg=None)
ELEMENTWISE = LaunchConfig(num_warps=4, num_stages=2, maxnreg=None)


# --------------------------------------------------------------------------------------------------
# Sizes


@dataclass(frozen=True)
class GemmConfig:
    """Block sizes and launch options of a matrix product."""

    block_m: int = 128
    block_n: int = 128
    block_k: int = 64
    programs_per_sm: int = 2  # that a multiprocessor runs at the same time
    launch: LaunchConfig = GEMM

    def program_slots(self, device: torch.device) -> int:
        """Return the number of programs that a device runs at the same time."""
        return self.programs_per_sm * multiprocessors(device)


@dataclass(frozen=True)
class ProblemSize:
    """Sizes of the images' channels, the filters and both grids."""

    channels: int  # C
    features: int  # F
    kernel_size: int  # S
    hidden: tuple[int, int]  # H1, W1
    grid: tuple[int, int]  # H2, W2

    @property
    def conv1_constants(self) -> dict[str, int]:
        """Constants of the kernels of the first convolution."""
        h1, w1 = self.hidden
        return {"H1": h1, "W1": w1, "S": self.kernel_size, "C": self.channels}

    @property
    def conv2_constants(self) -> dict[str, int]:
        """Constants of the kernels of the second convolution."""
        (h1, w1), (h2, w2) = self.hidden, self.grid
        return {"H1": h1, "W1": w1, "H2": h2, "W2": w2, "S": self.kernel_size, "F": self.features}

    @property
    def patch(self) -> int:
        """Numbers in a patch of an image, S·S·C."""
        return self.kernel_size**2 * self.channels

    def block_features(self, block: int) -> int:
        """Return the features per block: at most `block`, at least 16, the least of `tl.dot`."""
        return min(block, padded(self.features, 16))

    def block_k(self, config: GemmConfig) -> int:
        """Return the features per step along K: the largest block that divides F."""
        return next(size for size in (config.block_k, 32, 16) if self.features % size == 0)


def problem_size(conv1_weight: Tensor, size: tuple[int, int]) -> ProblemSize:
    """Return the sizes for filters (F, C, S, S) and images of this height and width."""
    features, channels, kernel_size, _ = conv1_weight.shape
    h1, w1 = (side - kernel_size + 1 for side in size)
    grid = ((h1 - kernel_size) // 2 + 1, (w1 - kernel_size) // 2 + 1)
    return ProblemSize(channels, features, kernel_size, (h1, w1), grid)


# --------------------------------------------------------------------------------------------------
# Pieces of kernels


@triton.jit
def dot(a, b, acc):
    """Add the product of two bfloat16 blocks to an accumulator."""
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc)
    return tl.dot(a, b, acc)


@triton.jit
def apply_epilogue(
    acc, offs, mask, offs_n, bias_ptr, activation_ptr,
    HAS_BIAS: tl.constexpr, LEAKY_RELU: tl.constexpr, LEAKY_RELU_GRAD: tl.constexpr,
    NEGATIVE_SLOPE: tl.constexpr, F: tl.constexpr,
):  # fmt: skip
    """Apply an `Epilogue` without dropout to a block that is stored at `offs` of the output."""
    if HAS_BIAS:
        acc += tl.load(bias_ptr + offs_n, mask=offs_n < F, other=0.0).to(tl.float32)[None, :]
    if LEAKY_RELU:
        acc = tl.where(acc > 0, acc, NEGATIVE_SLOPE * acc)
    if LEAKY_RELU_GRAD:
        positive = tl.load(activation_ptr + offs, mask=mask, other=0.0).to(tl.float32) > 0
        acc = tl.where(positive, acc, NEGATIVE_SLOPE * acc)
    return acc


@triton.jit
def store_column_sums(acc, mask, offs_n, column_sums_ptr, F: tl.constexpr):
    """Sum a block over its rows: → column_sums (programs, F)."""
    total = tl.sum(tl.where(mask, acc, 0.0), 0)
    tl.store(column_sums_ptr + tl.program_id(0) * F + offs_n, total, mask=offs_n < F)


@dataclass(frozen=True)
class Epilogue:
    """Elementwise operations on the sums of a convolution, before they are stored.

    In order: add `bias`, apply the leaky ReLU, multiply by the derivative of the leaky ReLU whose
    output was `activation`, and drop elements whose `uniform` number is below `dropout`.
    """

    negative_slope: float
    bias: Tensor | None = None  # (F,)
    leaky_relu: bool = False
    activation: Tensor | None = None  # shape of the output
    uniform: Tensor | None = None  # (B, F, H2, W2), not channels-last; None: no dropout
    dropout: float = 0.0

    @property
    def constants(self) -> dict[str, Any]:
        """Constants of the kernels."""
        return {
            "HAS_BIAS": self.bias is not None,
            "LEAKY_RELU": self.leaky_relu,
            "LEAKY_RELU_GRAD": self.activation is not None,
            "NEGATIVE_SLOPE": self.negative_slope,
        }

    def tensors(self, placeholder: Tensor) -> tuple[Tensor, Tensor]:
        """Return bias and activation; a missing one is `placeholder`, which kernels never read."""
        bias = placeholder if self.bias is None else self.bias
        return bias, placeholder if self.activation is None else self.activation


# --------------------------------------------------------------------------------------------------
# Sums over splits


@kernel
def sum_splits_kernel(
    partial_ptr, out_ptr, columns, splits, BLOCK_SPLITS: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Sum partial (splits, columns) over the splits, BLOCK_SPLITS at a time: → out (columns,)."""
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = tl.zeros([BLOCK_SPLITS, BLOCK_N], tl.float32)
    for start in range(0, splits, BLOCK_SPLITS):
        offs_split = start + tl.arange(0, BLOCK_SPLITS)
        offs = offs_split.to(tl.int64)[:, None] * columns + offs_n[None, :]
        mask = (offs_split < splits)[:, None] & (offs_n < columns)[None, :]
        acc += tl.load(partial_ptr + offs, mask=mask, other=0.0)
    tl.store(out_ptr + offs_n, tl.sum(acc, 0), mask=offs_n < columns)


def sum_splits(partial: Tensor) -> Tensor:
    """Sum partial results over the first axis: (splits, …) → (…)."""
    if len(partial) == 1:
        return partial[0]
    if len(partial) > MAX_SPLITS:
        return partial.sum(0)
    out = torch.empty_like(partial[0])
    columns, splits = out.numel(), len(partial)
    block_splits = min(128, padded(splits, 1))
    block_n = BLOCK_SUM // block_splits
    blocks = {"BLOCK_SPLITS": block_splits, "BLOCK_N": block_n}
    arguments = (partial, out, columns, splits)
    launch(sum_splits_kernel, (cdiv(columns, block_n),), arguments, blocks, ELEMENTWISE)
    return out
