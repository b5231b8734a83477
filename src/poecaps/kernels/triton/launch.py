"""Launch of Triton kernels, and the division of long sums among programs.

This module does not import Triton.
"""

from __future__ import annotations

import importlib.metadata
import threading
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch

# Whether a compiled kernel is launched directly (see `_launch_reusing`) instead of by Triton, whose
# search for the compiled kernel takes about ten times as long.
REUSE_COMPILED = True

# Releases of Triton whose compiled kernels `_launch_reusing` can call.
REUSABLE_VERSIONS = ((3, 6), (3, 9))


@dataclass(frozen=True)
class LaunchConfig:
    """Launch options of Triton.

    Attributes
    ----------
    num_warps
        Warps of 32 threads in a program.
    num_stages
        Iterations of a loop whose loads are in flight at the same time.
    maxnreg
        Maximal number of registers of a thread; None: the compiler decides.
    """

    num_warps: int = 4
    num_stages: int = 2
    maxnreg: int | None = None


DEFAULT = LaunchConfig()


class Constants:
    """Constants that many launches share, and their launch options.

    Instances are compared by identity, because they are looked up at every launch.

    Parameters
    ----------
    values
        Parameters of kernels, by name.
    config
        Launch options.
    """

    __slots__ = ("config", "values")

    def __init__(self, values: dict[str, Any], config: LaunchConfig = DEFAULT) -> None:
        self.values, self.config = values, config


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    arguments: tuple[Any, ...],
    constants: dict[str, Any],
    shared: Constants | LaunchConfig = DEFAULT,
) -> None:
    """Launch a kernel on the device of its first argument.

    Parameters
    ----------
    kernel
        A function with the decorator `poecaps.kernels.triton.jit.kernel`.
    grid
        Number of programs along each of at most three axes. Without any program, nothing is done.
    arguments
        The first parameters of the kernel: tensors, and then numbers. A parameter must always have
        the same Python type, int or float.
    constants
        All other parameters, by name, in the same order in every launch of the kernel.
    shared
        Further constants, which `constants` may overwrite, with their launch options; or launch
        options alone.
    """
    if 0 in grid:
        return
    index = arguments[0].get_device()
    if index < 0 or not reuses_compiled():
        _launch_by_triton(kernel, grid, arguments, constants, shared)
    elif index == torch._C._cuda_getDevice():
        _launch_reusing(kernel, grid, arguments, constants, shared, index)
    else:
        with torch.cuda.device(index):
            launch(kernel, grid, arguments, constants, shared)


def _launch_by_triton(
    kernel: Any,
    grid: tuple[int, ...],
    arguments: tuple[Any, ...],
    constants: dict[str, Any],
    shared: Constants | LaunchConfig,
) -> Any:
    """Launch by Triton's public interface: → the compiled kernel, None if it is interpreted."""
    if _recordings:
        _recordings.pop().is_complete = False
    if _constant_names.setdefault(id(kernel), tuple(constants)) != tuple(constants):
        raise TypeError(f"all launches of {kernel} must give its constants in the same order")
    config = shared.config if isinstance(shared, Constants) else shared
    return kernel[grid](
        *arguments,
        **_all_constants(constants, shared),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        maxnreg=config.maxnreg,
    )


def _all_constants(constants: dict[str, Any], shared: Constants | LaunchConfig) -> dict[str, Any]:
    return shared.values | constants if isinstance(shared, Constants) else constants


class _Compiled(NamedTuple):
    """A compiled kernel: what its method `run` needs besides grid, stream and arguments."""

    run: Any
    function: Any
    metadata: Any
    constants: tuple[Any, ...]


# Compiled kernels by everything they were compiled for.
_compiled: dict[tuple[Any, ...], _Compiled] = {}

# The constants of each kernel by name, in the order in which all its launches must give them: the
# keys of `_compiled` have their values alone, because longer keys take longer to hash.
_constant_names: dict[int, tuple[str, ...]] = {}


def _launch_reusing(
    kernel: Any,
    grid: tuple[int, ...],
    arguments: tuple[Any, ...],
    constants: dict[str, Any],
    shared: Constants | LaunchConfig,
    index: int,
) -> None:
    """Launch a compiled kernel directly, after Triton has compiled and launched it once.

    This goes around Triton's public interface. A compiled kernel has a method `run`, which
    ``kernel[grid](…)`` calls after it found the kernel; it is called here without Triton's hooks
    and with the stream from torch. Its parameters are those of `REUSABLE_VERSIONS`.

    Triton compiles a kernel for its constants, the dtypes of its tensors, and for pointers that are
    multiples of 16. Tensors with other addresses are rare, and are left to Triton.
    """
    # A JIT function is identified by its id: it lives as long as its module, and its own hash is
    # slow.
    key: list[Any] = [id(kernel), shared, index]
    key += constants.values()
    values: list[Any] = []
    addresses = 0
    for argument in arguments:
        if type(argument) in _NUMBERS:
            values += arguments[len(values) :]
            break
        key.append(argument.dtype)
        address = argument.data_ptr()
        addresses |= address
        values.append(address)
    if addresses & 15:
        _launch_by_triton(kernel, grid, arguments, constants, shared)
        return
    where = tuple(key)
    found = _compiled.get(where)
    if found is None:
        compiled = _launch_by_triton(kernel, grid, arguments, constants, shared)
        _check_numbers(kernel, arguments)
        given = _all_constants(constants, shared)
        rest = tuple(given[name] for name in kernel.arg_names[len(arguments) :])
        _compiled[where] = _Compiled(
            compiled.run, compiled.function, compiled.packed_metadata, rest
        )
        return
    run, function, metadata, rest = found
    x, y, z = grid if len(grid) == 3 else (*grid, 1, 1)[:3]
    stream = torch._C._cuda_getCurrentRawStream(index)
    run(x, y, z, stream, function, metadata, None, None, None, *values, *rest)
    if _recordings:
        _recordings[-1].add(found, (x, y, z), arguments)


_NUMBERS = (int, float)


class Launched(NamedTuple):
    """One launch that was recorded."""

    compiled: _Compiled
    grid: tuple[int, ...]
    tensors: tuple[torch.Tensor, ...]
    numbers: tuple[int | float, ...]


class Recording:
    """The launches of this thread inside of a ``with`` block.

    Attributes
    ----------
    launches
        What was launched. The tensors are kept alive, so that each has an address of its own.
    is_complete
        False if Triton launched a kernel, for example for the first time.
    """

    def __init__(self) -> None:
        self.launches: list[Launched] = []
        self.is_complete = True
        self._thread = threading.get_ident()

    def __enter__(self) -> Recording:
        _recordings.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        if self in _recordings:
            _recordings.remove(self)

    def add(self, compiled: _Compiled, grid: tuple[int, ...], arguments: tuple[Any, ...]) -> None:
        """Add a launch, unless it is one of another thread."""
        if threading.get_ident() == self._thread:
            tensors = tuple(each for each in arguments if isinstance(each, torch.Tensor))
            self.launches.append(Launched(compiled, grid, tensors, arguments[len(tensors) :]))


# At most one.
_recordings: list[Recording] = []


def _check_numbers(kernel: Any, arguments: tuple[Any, ...]) -> None:
    """Raise TypeError if Triton compiled a kernel for the value of an int among its arguments."""
    for parameter, argument in zip(kernel.params, arguments, strict=False):
        if isinstance(argument, int) and not parameter.do_not_specialize:
            raise TypeError(
                f"the kernel is compiled for the value of {parameter.name!r}; "
                "list it in do_not_specialize, or use poecaps.kernels.triton.jit.kernel"
            )


def reuses_compiled() -> bool:
    """Return whether compiled kernels are launched directly, on a GPU."""
    return REUSE_COMPILED and _can_reuse()


@cache
def _can_reuse() -> bool:
    """Return whether the installed Triton is one of `REUSABLE_VERSIONS`."""
    major, minor = importlib.metadata.version("triton").split(".")[:2]
    lowest, highest = REUSABLE_VERSIONS
    return lowest <= (int(major), int(minor)) <= highest


# --------------------------------------------------------------------------------------------------
# Sizes


@cache
def padded(size: int, least: int) -> int:
    """Return the next power of two, at least `least`."""
    return max(least, 1 << (size - 1).bit_length())


def cdiv(size: int, block: int) -> int:
    """Return the number of blocks that cover `size`."""
    return -(-size // block)


@cache
def multiprocessors(device: torch.device) -> int:
    """Return the number of multiprocessors of a GPU.

    Triton's interpreter has none; 2 are enough that sums are divided in its tests as well.
    """
    if device.type != "cuda":
        return 2
    return torch.cuda.get_device_properties(device).multi_processor_count


@cache
def split_k(programs: int, steps: int, slots: int, reduce_cost: int = 0) -> tuple[int, int]:
    """Divide a sum among more programs, so that all multiprocessors are busy ("split-K").

    Parameters
    ----------
    programs
        Programs without a division.
    steps
        Terms of the sum that each program computes, one after the other.
    slots
        Programs that the device runs at the same time.
    reduce_cost
        Steps that it costs to write partial sums and to add them.

    Returns
    -------
    splits, steps_per_split
    """

    # Programs run in waves that fill the device. A program takes its steps, and the time of about
    # two more for its prologue and epilogue.
    def cost(splits: int) -> int:
        waves = cdiv(programs * splits, slots)
        return waves * (cdiv(steps, splits) + 2 + reduce_cost * (splits > 1))

    # More than four waves leave nothing to gain.
    most = min(steps, max(1, 4 * slots // max(1, programs)))
    best = min(range(1, most + 1), key=cost)
    steps_per_split = cdiv(steps, best)
    return cdiv(steps, steps_per_split), steps_per_split
