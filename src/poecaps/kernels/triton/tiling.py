"""Division of a layer into blocks, one block for each program of a routing kernel.

There are two divisions:

`ExpertTiling`
    A program holds BLOCK_B images × one input capsule × BLOCK_J experts. Votes need nothing else,
    so this division serves every kernel.
`InputTiling`
    A program holds BLOCK_B images × BLOCK_I input capsules × one expert. It is faster where the
    logits are kept in memory and no vote is needed, if the inputs are many and the experts are few.

This module does not import Triton.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

import torch

from poecaps import functional as F
from poecaps.kernels.triton.launch import (
    DEFAULT,
    Constants,
    LaunchConfig,
    cdiv,
    launch,
    multiprocessors,
    padded,
    split_k,
)

if TYPE_CHECKING:
    from torch import Tensor

# Capsules of more dimensions than this need all registers, so a limit of them would cause spills.
MAX_DIM_WITH_REGISTER_LIMIT = 16

# `tl.dot` multiplies blocks of at least 16 × 16.
MIN_DOT = 16

# Numbers with one row per input or expert and the images last, such as log-sum-exps and kept
# logits, have rows of B numbers, padded to a multiple of this: then all rows are aligned alike.
BATCH_MULTIPLE = 16

# Numbers that one program of an elementwise kernel holds: 4 for each thread of 4 warps.
ROW_BLOCK_NUMBERS = 512


@dataclass(frozen=True, eq=False)
class TileConfig:
    """Block sizes and launch options of a kernel.

    Instances are constants of modules and are compared by identity, because they are looked up at
    every launch.

    Attributes
    ----------
    block_b
        Images in a block.
    block_n
        Columns in a block: BLOCK_J experts × D, or BLOCK_I inputs × K.
    programs_per_sm
        Programs that a multiprocessor runs at the same time.
    launch
        Launch options.
    """

    block_b: int = 64
    block_n: int = 64
    programs_per_sm: int = 2
    launch: LaunchConfig = DEFAULT


@dataclass(frozen=True, eq=False)
class Tiling:
    """Sizes of a layer, and its division into blocks for one kernel."""

    inputs: int  # I
    outputs: int  # J
    out_dim: int  # D
    in_dim: int  # K
    tf32x3: bool
    config: TileConfig

    def block_b(self, batch: int) -> int:
        """Return the number of images in a block."""
        return min(self.config.block_b, padded(batch, MIN_DOT))

    def image_blocks(self, batch: int) -> int:
        """Return the number of blocks of images."""
        return cdiv(batch, self.block_b(batch))

    def split(self, programs: int, steps: int, device: torch.device) -> tuple[int, int]:
        """Divide a sum of `steps` terms, see `split_k`: → splits, steps_per_split."""
        return split_k(programs, steps, self.config.programs_per_sm * multiprocessors(device))

    @cached_property
    def _constants(self) -> dict[int, Constants]:
        """Constants of every kernel, by BLOCK_B."""
        return {}

    def constants(self, block_b: int) -> Constants:
        """Return the constants of every kernel for blocks of so many images."""
        found = self._constants.get(block_b)
        if found is None:
            sizes = {"I": self.inputs, "J": self.outputs, "D": self.out_dim, "K": self.in_dim}
            values = {**sizes, "TF32X3": self.tf32x3, **self.blocks, "BLOCK_B": block_b}
            found = self._constants[block_b] = Constants(values, self.config.launch)
        return found

    @property
    def blocks(self) -> dict[str, int]:
        """Block sizes BLOCK_N, BLOCK_D and BLOCK_K."""
        raise NotImplementedError

    def launch(
        self,
        kernel: Any,
        batch: int,
        grid: tuple[int, ...],
        arguments: tuple[Any, ...],
        flags: dict[str, Any],
    ) -> None:
        """Launch a kernel with the constants of this division and `flags`."""
        launch(kernel, grid, arguments, flags, self.constants(self.block_b(batch)))


class ExpertTiling(Tiling):
    """Division into blocks of one input capsule and BLOCK_J = BLOCK_N / BLOCK_D experts."""

    @cached_property
    def block_d(self) -> int:
        """D, padded to a power of two."""
        return padded(self.out_dim, 1)

    @cached_property
    def block_n(self) -> int:
        """Columns of a block: no more than all experts together have, but enough for `tl.dot`."""
        columns = min(self.config.block_n, padded(self.outputs, 1) * self.block_d)
        return max(MIN_DOT, self.block_d, columns)

    @cached_property
    def block_j(self) -> int:
        """Experts in a block."""
        return self.block_n // self.block_d

    @cached_property
    def expert_blocks(self) -> int:
        """Number of blocks of experts."""
        return cdiv(self.outputs, self.block_j)

    @property
    def blocks(self) -> dict[str, int]:
        """Block sizes BLOCK_N, BLOCK_D and BLOCK_K."""
        block_k = padded(self.in_dim, MIN_DOT)
        return {"BLOCK_N": self.block_n, "BLOCK_D": self.block_d, "BLOCK_K": block_k}


class InputTiling(Tiling):
    """Division into blocks of BLOCK_I = BLOCK_N / BLOCK_K input capsules and one expert."""

    @cached_property
    def block_k(self) -> int:
        """K, padded to a power of two."""
        return padded(self.in_dim, 1)

    @cached_property
    def block_n(self) -> int:
        """Columns of a block: no more than all inputs together have, but enough for `tl.dot`."""
        columns = min(self.config.block_n, padded(self.inputs, 1) * self.block_k)
        return max(MIN_DOT, self.block_k, columns)

    @cached_property
    def block_i(self) -> int:
        """Inputs in a block."""
        return self.block_n // self.block_k

    @cached_property
    def input_blocks(self) -> int:
        """Number of blocks of inputs."""
        return cdiv(self.inputs, self.block_i)

    @property
    def blocks(self) -> dict[str, int]:
        """Block sizes BLOCK_N, BLOCK_D and BLOCK_K."""
        block_d = padded(self.out_dim, MIN_DOT)
        return {"BLOCK_N": self.block_n, "BLOCK_D": block_d, "BLOCK_K": self.block_k}


def expert_tiling(weight: Tensor, config: TileConfig) -> ExpertTiling:
    """Divide a layer with weight (I, J, D, K) into blocks of one input and several experts."""
    tiling: ExpertTiling = _tiling(ExpertTiling, weight.shape, weight.dtype, config)
    return tiling


def input_tiling(weight: Tensor, config: TileConfig) -> InputTiling:
    """Divide a layer with weight (I, J, D, K) into blocks of several inputs and one expert."""
    tiling: InputTiling = _tiling(InputTiling, weight.shape, weight.dtype, config)
    return tiling


@cache
def _tiling(
    kind: Any, shape: tuple[int, int, int, int], dtype: torch.dtype, config: TileConfig
) -> Any:
    if max(shape[2:]) > MAX_DIM_WITH_REGISTER_LIMIT:
        config = replace(config, launch=replace(config.launch, maxnreg=None))
    # Half precision has no more bits than TF32, so a single product is exact.
    return kind(*shape, dtype == torch.float32, config)


def many_to_few(weight: Tensor) -> bool:
    """Return whether inputs are no fewer than experts, so that `InputTiling` is faster."""
    return weight.shape[0] >= weight.shape[1]


@cache
def max_norm(dtype: torch.dtype) -> float:
    """Return the largest norm of a squashed vector, see `functional.squash`."""
    return F._largest_norm(dtype)


def padded_batch_size(batch: int) -> int:
    """Return P, the length of a row with a number for each image, as `blocks.padded_batch`."""
    return cdiv(batch, BATCH_MULTIPLE) * BATCH_MULTIPLE


# --------------------------------------------------------------------------------------------------
# Elementwise kernels, over rows such as the vector of one expert for one image


def launch_rows(
    kernel: Any,
    pointers: tuple[Tensor, ...],
    numbers: tuple[Any, ...],
    dim: int,
    flags: dict[str, Any],
) -> None:
    """Launch a kernel over rows of `dim` numbers; the count of rows is the first of `numbers`."""
    grid = (cdiv(numbers[0], rows_per_block(dim)),)
    launch(kernel, grid, pointers + numbers, flags, row_constants(dim))


@cache
def row_constants(dim: int) -> Constants:
    """Return the constants of a kernel over rows of `dim` numbers."""
    block_rows = rows_per_block(dim)
    return Constants({"D": dim, "BLOCK_D": padded(dim, 1), "BLOCK_ROWS": block_rows})


@cache
def rows_per_block(dim: int) -> int:
    """Return the number of rows of `dim` numbers that one program holds."""
    return max(1, ROW_BLOCK_NUMBERS // padded(dim, 1))
