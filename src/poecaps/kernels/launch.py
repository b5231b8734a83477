"""Sizes of tiles and strips, and how kernels are launched."""

from __future__ import annotations

import importlib
import importlib.metadata
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, eq=False)
class Tile:
    """What one program holds, images × columns of experts, and how it is run."""

    images: int = 64
    columns: int = 64
    warps: int = 4
    stages: int = 2
    resident: int = 2  # programs that a multiprocessor has room for
    registers: int | None = None  # that a thread may use at most, for small capsules


PLAIN = Tile()

# By kind of kernel, sums over inputs, those with equal coefficients, levels of the softmax over experts, sums over
# experts, over images, and the gradient through routing: the best of a sweep on an H200.
TILES = {
    "up": Tile(stages=3, resident=3, registers=168),
    "even": Tile(images=128, warps=8, stages=3),
    "levels": Tile(stages=1),
    "down": Tile(columns=32, stages=1, resident=4),
    "learn": Tile(stages=1),
    "reverse": Tile(),
}

# The same for kernels that work in strips, columns being those of the inputs.
STRIPS = {
    "up": Tile(images=32, columns=32, warps=1, stages=3, resident=12),
    "down": Tile(columns=32, warps=2, registers=168),
    "learn": Tile(images=32, columns=32, warps=2),
}

# Capsules of more components than this need all registers that there are.
SMALL = 16


@dataclass(frozen=True, eq=False)
class Plan:
    """Sizes of a layer, and of what one kind of kernel cuts it into."""

    inputs: int
    outputs: int
    out_dim: int
    in_dim: int
    exact: bool  # whether numbers have more bits than the matrix units take
    tile: Tile

    def images(self, batch: int) -> int:
        """Images in a block."""
        return min(self.tile.images, padded(batch, 16))

    def image_blocks(self, batch: int) -> int:
        """Blocks of images."""
        return -(-batch // self.images(batch))

    @cached_property
    def in_strips(self) -> bool:
        """Whether work in strips pays: rows of inputs are long, experts are few."""
        return self.inputs >= self.outputs

    def split(self, programs: int, steps: int, device: torch.device) -> tuple[int, int]:
        """Into how many parts to split a sum of `steps`, and how many steps each has, so that the device is busy."""
        return _split(programs, steps, self.tile.resident * _multiprocessors(device))

    @cached_property
    def sizes(self) -> dict[str, Any]:
        """What every kernel is told."""
        sizes = {"I": self.inputs, "J": self.outputs, "D": self.out_dim, "K": self.in_dim}
        return {**sizes, "EXACT": self.exact, **self.blocks}

    @property
    def blocks(self) -> dict[str, int]:
        """Constants of a tile."""
        raise NotImplementedError

    def launch(
        self, name: str, batch: int, grid: tuple[int, ...], arguments: tuple[Any, ...], flags: dict[str, Any]
    ) -> None:
        """Launch a kernel over blocks of images."""
        run(name, grid, arguments, {**self.sizes, **flags, "BB": self.images(batch)}, self.tile)


class TilePlan(Plan):
    """A layer cut into tiles of one input and some experts."""

    @cached_property
    def out_pad(self) -> int:
        """D, padded."""
        return padded(self.out_dim, 1)

    @cached_property
    def columns(self) -> int:
        """Columns of a tile: no wider than all experts together; at least 16, the least that the matrix units take."""
        return max(16, self.out_pad, min(self.tile.columns, padded(self.outputs, 1) * self.out_pad))

    @cached_property
    def experts(self) -> int:
        """Experts in a tile."""
        return self.columns // self.out_pad

    @cached_property
    def expert_blocks(self) -> int:
        """Tiles for all experts."""
        return -(-self.outputs // self.experts)

    @property
    def blocks(self) -> dict[str, int]:
        """Constants of a tile."""
        return {"N": self.columns, "DP": self.out_pad, "KP": padded(self.in_dim, 16)}


class StripPlan(Plan):
    """A layer cut into strips of some inputs and one expert."""

    @cached_property
    def in_pad(self) -> int:
        """K, padded."""
        return padded(self.in_dim, 1)

    @cached_property
    def columns(self) -> int:
        """Columns of a strip: no wider than all inputs together; at least 16."""
        return max(16, self.in_pad, min(self.tile.columns, padded(self.inputs, 1) * self.in_pad))

    @cached_property
    def row(self) -> int:
        """Inputs in a strip."""
        return self.columns // self.in_pad

    @cached_property
    def input_blocks(self) -> int:
        """Strips for all inputs."""
        return -(-self.inputs // self.row)

    @property
    def blocks(self) -> dict[str, int]:
        """Constants of a strip."""
        return {"C": self.columns, "DP": padded(self.out_dim, 16), "KP": self.in_pad}


def tiled(weight: Tensor, kind: str) -> TilePlan:
    """Plan tiles for a weight (I, J, D, K)."""
    plan: TilePlan = _planned(TilePlan, weight.shape, weight.dtype == torch.float32, TILES[kind])
    return plan


def stripped(weight: Tensor, kind: str) -> StripPlan:
    """Plan strips for a weight (I, J, D, K)."""
    plan: StripPlan = _planned(StripPlan, weight.shape, weight.dtype == torch.float32, STRIPS[kind])
    return plan


@cache
def _planned(plan: Any, shape: tuple[int, int, int, int], exact: bool, tile: Tile) -> Any:
    return plan(*shape, exact, tile if max(shape[2:]) <= SMALL else replace(tile, registers=None))


@cache
def _split(programs: int, steps: int, room: int, extra: int = 0) -> tuple[int, int]:
    # Programs run in waves that fill the device; each has its steps and about two more for what comes before and after,
    # and `extra` where parts must be joined.
    def cost(parts: int) -> int:
        return -(-programs * parts // room) * (-(-steps // parts) + 2 + extra * (parts > 1))

    parts = min(range(1, min(steps, max(1, 4 * room // programs)) + 1), key=cost)
    each = -(-steps // parts)
    return -(-steps // each), each


def run_rows(
    name: str, pointers: tuple[Tensor, ...], scalars: tuple[Any, ...], dim: int, flags: dict[str, Any]
) -> None:
    """Launch a kernel over rows of `dim` numbers; their count is the first scalar."""
    run(name, (-(-scalars[0] // rows_in_block(dim)),), pointers + scalars, {**rows_of(dim), **flags})


def rows_of(dim: int) -> dict[str, int]:
    """Return what a kernel over rows of `dim` numbers is told."""
    return {"D": dim, "DP": padded(dim, 1), "ROWS": rows_in_block(dim)}


def rows_in_block(dim: int) -> int:
    """Rows that one program of `run_rows` has."""
    return max(1, 512 // padded(dim, 1))


# Kernels that were compiled, by what they were compiled for. Triton finds them as well, but takes ten times as long.
_compiled: dict[tuple[Any, ...] | None, tuple[Any, tuple[Any, ...]]] = {}


def run(
    name: str, grid: tuple[int, ...], arguments: tuple[Any, ...], constants: dict[str, Any], tile: Tile = PLAIN
) -> None:
    """Launch a kernel by its name, compiled for these constants and the arguments' dtypes."""
    device = arguments[0].device
    key: list[Any] = [name, tile, device.index, *constants.values()]
    values, aligned = [], 0
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            key.append(argument.dtype)
            address = argument.data_ptr()
            aligned |= address
            values.append(address)
        else:
            values.append(argument)
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            return run(name, grid, arguments, constants, tile)
    # Kernels are compiled for addresses that are multiples of 16, where they are.
    where = tuple(key) if aligned % 16 == 0 else None
    found = _compiled.get(where)
    if found is not None:
        kernel, rest = found
        # What `kernel[grid](…)` does, without hooks and without looking for the stream in Python.
        stream, code = torch._C._cuda_getCurrentRawStream(device.index), kernel.function
        kernel.run(*(*grid, 1, 1)[:3], stream, code, kernel.packed_metadata, None, None, None, *values, *rest)
        return None
    function = getattr(_module(name), name)
    options = {"num_warps": tile.warps, "num_stages": tile.stages, "maxnreg": tile.registers}
    kernel = function[grid](*arguments, **constants, **options)
    if where is not None and kernel is not None and _can_reuse():
        _compiled[where] = (kernel, tuple(constants[name] for name in function.arg_names[len(arguments) :]))
    return None


@cache
def _can_reuse() -> bool:
    """Tell whether this Triton launches a compiled kernel in the way that `run` knows."""
    version = importlib.metadata.version("triton").split(".")
    return (3, 6) <= (int(version[0]), int(version[1])) <= (3, 9)


@cache
def _module(name: str) -> Any:
    """Import the kernels, and Triton with them, on first use."""
    place = {"strip": "strips", "window": "windows", "adam": "adam"}.get(name.partition("_")[0], "tiles")
    return importlib.import_module(f"poecaps.kernels.{place}")


@cache
def _multiprocessors(device: torch.device) -> int:
    # Without a GPU the kernels are interpreted, for tests: few, but enough that sums are split.
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def pitch(batch: int) -> int:
    """Return the length of a row that has a number for each image, which the kernels compute as well."""
    return -(-batch // 16) * 16


def padded(size: int, least: int) -> int:
    """Return the next power of two, at least `least`."""
    return max(least, 1 << (size - 1).bit_length())
