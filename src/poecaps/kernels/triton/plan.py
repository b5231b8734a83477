"""Sequences of launches that are recorded once and then repeated, in less time on the host.

A learning step of given sizes always launches the same kernels with the same numbers. Only the
addresses of its tensors change: those of its arguments, and those of intermediate tensors, which a
plan places in one workspace. A repetition computes no grids, looks up no compiled kernels and
allocates one tensor.

In contrast to a CUDA graph, it reads and writes the tensors of the caller, and keeps no memory. A
`Replay` is a CUDA graph of a plan: a single launch and two copies, for which it keeps memory.

This module does not import Triton.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import torch

from poecaps.kernels.triton import launch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

ALIGNMENT = 512  # of tensors in the workspace, in bytes, as that of torch's allocator


@dataclass
class _Slot:
    """Memory of an intermediate tensor: its bytes, and the launches from the first to the last."""

    size: int
    first: int
    last: int
    offset: int = 0


class Plan:
    """The launches of a function of tensors on one GPU.

    Parameters
    ----------
    launches
        The launches of one call, see `launch.recorded`. Apart from them, the call must not have
        written to a tensor that it passed to a kernel.
    arguments
        The contiguous tensors of that call that a repetition replaces by its own.
    result
        Intermediate tensor of float32 that a repetition returns.

    Attributes
    ----------
    bytes
        Size of the workspace.
    """

    def __init__(
        self, launches: Sequence[launch.Launched], arguments: Sequence[Tensor], result: Tensor
    ) -> None:
        given = {_storage(each): place for place, each in enumerate(arguments)}
        slots: dict[int, _Slot] = {}
        for index, each in enumerate(launches):
            for tensor in each.tensors:
                where = _storage(tensor)
                if where not in given:
                    size = tensor.untyped_storage().nbytes()
                    slots.setdefault(where, _Slot(size, index, index)).last = index
        slots[_storage(result)].last = len(launches)
        self.bytes = _place(list(slots.values()))

        # Every address: the argument whose address it is relative to, or the workspace, after them.
        relative: dict[tuple[int, int], int] = {}

        def place_of(tensor: Tensor) -> int:
            where = _storage(tensor)
            if where in given:
                base, start = given[where], arguments[given[where]].data_ptr()
                address = (base, tensor.data_ptr() - start)
            else:
                address = (len(arguments), slots[where].offset + tensor.data_ptr() - where)
            return relative.setdefault(address, len(relative))

        self._launches: list[tuple[Any, ...]] = []
        for each in launches:
            places = [place_of(tensor) for tensor in each.tensors]
            addresses: Callable[[list[int]], tuple[int, ...]] = itemgetter(*places, places[0])
            run, function, metadata, constants = each.compiled
            fixed = (function, metadata, None, None, None)
            self._launches.append((run, each.grid, fixed, addresses, (*each.numbers, *constants)))
        place_of(result)
        self._relative = list(relative)
        self._result = (result.shape, result.stride(), self._relative[place_of(result)][1] // 4)

    def repeat(self, *arguments: Tensor) -> Tensor | None:
        """Launch all kernels with other arguments: → the result, None if that is not possible.

        It is possible on the current device, with addresses that the kernels were compiled for.
        """
        index = arguments[0].get_device()
        starts = [each.data_ptr() for each in arguments]
        if index != torch._C._cuda_getDevice() or any(start & 15 for start in starts):
            return None
        workspace = arguments[0].new_empty(self.bytes // 4, dtype=torch.float32)
        starts.append(workspace.data_ptr())
        addresses = [starts[base] + offset for base, offset in self._relative]
        stream = torch._C._cuda_getCurrentRawStream(index)
        for run, grid, fixed, pointers_of, rest in self._launches:
            # The last of the pointers is there so that there are always several.
            run(*grid, stream, *fixed, *pointers_of(addresses)[:-1], *rest)
        shape, stride, offset = self._result
        return workspace.as_strided(shape, stride, offset)


class Replay:
    """A plan as a CUDA graph, with memory of its own for what it reads and writes.

    Only for one stream and one thread: steps of others would use this memory at the same time.

    Parameters
    ----------
    plan
        Of a function of x, constants and a result that it writes.
    x
        Tensor like those that the replays read.
    constants
        Tensors at the addresses that every replay reads.
    written
        Tensor like those that the replays write.

    Attributes
    ----------
    replays
        Number of replays of all graphs.
    last_replay
        Number of the last one of this graph.
    """

    replays = 0

    def __init__(self, plan: Plan, x: Tensor, constants: Sequence[Tensor], written: Tensor) -> None:
        own = self._x, self._written = x.clone(), torch.empty_like(written)

        def repeat() -> Tensor:
            result = plan.repeat(own[0], *constants, own[1])
            assert result is not None  # noqa: S101 (addresses of torch's allocator are aligned)
            return result

        self._result, self._replay = captured(repeat, x.device)
        self.last_replay = Replay.replays

    def repeat(self, x: Tensor, written: Tensor) -> Tensor:
        """Launch the graph: → the result, which the next call overwrites."""
        Replay.replays = self.last_replay = Replay.replays + 1
        self._x.copy_(x)
        self._replay()
        written.copy_(self._written)
        return self._result


def captured(
    function: Callable[[], Tensor], device: torch.device
) -> tuple[Tensor, Callable[[], None]]:
    """Capture a function as a CUDA graph: → its result, and a function that replays the graph."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            result = function()
        finally:
            graph.capture_end()
    torch.cuda.current_stream(device).wait_stream(stream)
    return result, graph.replay


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _place(slots: list[_Slot]) -> int:
    """Choose offsets such that slots in use at the same time do not overlap: → bytes in all."""
    placed: list[_Slot] = []
    for slot in slots:
        slot.size = launch.cdiv(slot.size, ALIGNMENT) * ALIGNMENT
        others = [each for each in placed if each.last >= slot.first and slot.last >= each.first]
        for each in sorted(others, key=lambda other: other.offset):
            if slot.offset + slot.size <= each.offset:
                break
            slot.offset = max(slot.offset, each.offset + each.size)
        placed.append(slot)
    return max(each.offset + each.size for each in placed)
