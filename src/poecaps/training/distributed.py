"""Data-parallel training in several processes.

Started by `torchrun`, every process runs the same program. Each process computes the gradient of
its shard of every batch, the gradients are averaged, and the main process writes all files. Random
numbers are drawn for the whole batch and then sharded like the images, so that the number of
processes changes only the order of summation.
"""

from __future__ import annotations

import math
import os
import re
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from poecaps.training.errors import TrainingError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor


NO_ID = "none"  # of all calls of `torchrun` without --standalone and --rdzv-id


@dataclass(frozen=True)
class Distributed:
    """One of `size` processes that train together; by default the only one."""

    rank: int = 0
    size: int = 1
    timeout: float = math.inf
    """Seconds after which an exchange with the other processes fails."""

    @classmethod
    def from_environment(cls) -> Distributed:
        """Return the rank of this process among those that `torchrun` has started."""
        return cls(int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1)))

    @property
    def is_main(self) -> bool:
        """Whether this is the process that writes files and reports progress."""
        return self.rank == 0

    def shard(self, batch: Tensor, dim: int = 0) -> Tensor:
        """Return this process's shard along axis `dim`: (..., B, ...) → (..., B/size, ...)."""
        length = batch.shape[dim] // self.size
        return batch.narrow(dim, self.rank * length, length)

    def all_reduce_mean(self, tensors: Sequence[Tensor]) -> None:
        """Replace tensors, in place, by their mean over all processes."""
        if self.size == 1:
            return
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        with self._errors():
            dist.all_reduce(flat)
        flat /= self.size
        sizes = [tensor.numel() for tensor in tensors]
        for tensor, mean in zip(tensors, flat.split(sizes), strict=True):
            tensor.copy_(mean.view_as(tensor))

    def all_gather(self, shard: Tensor) -> Tensor:
        """Join the shards of all processes, which have equal length: (B/size, ...) → (B, ...)."""
        if self.size == 1:
            return shard
        shards = [torch.empty_like(shard) for _ in range(self.size)]
        with self._errors():
            dist.all_gather(shards, shard.contiguous())
        return torch.cat(shards)

    def broadcast_from_main(self, tensors: Sequence[Tensor]) -> None:
        """Replace tensors, in place, by those of the main process."""
        if self.size > 1:
            with self._errors():
                for tensor in tensors:
                    dist.broadcast(tensor, src=0)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Raise TrainingError, with one line, if an exchange with the other processes fails."""
        try:
            yield
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            if re.search("timed? ?out", reason, re.IGNORECASE):
                raise TrainingError(
                    f"another process did not answer for {self.timeout:g} seconds; it is stopped, "
                    "hung or unreachable, and if it is only slow, increase --process-timeout"
                ) from error
            raise TrainingError(f"another process has ended ({reason})") from error

    def any(self, value: bool, device: torch.device) -> bool:
        """Return whether `value` is true in any process."""
        if self.size == 1:
            return value
        count = torch.tensor([float(value)], device=device)
        with self._errors():
            dist.all_reduce(count)
        return bool(count.item() > 0)


@dataclass(frozen=True)
class RandomNumbers:
    """Random numbers of the images in this process's shard of a batch.

    Every process draws the numbers of the whole batch from the same generator and keeps its shard.
    """

    generator: torch.Generator
    """Source of the numbers, on the device of the computation."""
    distributed: Distributed
    """The processes that share the batch."""

    def uniform(self, *shape: int, dim: int = 0) -> Tensor:
        """Draw uniform numbers from 0 to 1.

        Parameters
        ----------
        shape
            Shape of the result, in which axis `dim` is this process's shard of the batch.
        """
        numbers = torch.rand(
            self._whole(shape, dim), generator=self.generator, device=self.generator.device
        )
        return self.distributed.shard(numbers, dim)

    def normal(self, *shape: int, dim: int = 0) -> Tensor:
        """Draw standard normal numbers, with the parameters of `uniform`."""
        numbers = torch.randn(
            self._whole(shape, dim), generator=self.generator, device=self.generator.device
        )
        return self.distributed.shard(numbers, dim)

    def _whole(self, shape: tuple[int, ...], dim: int) -> list[int]:
        """Return the shape of the numbers for the whole batch."""
        return [size * self.distributed.size if i == dim else size for i, size in enumerate(shape)]


def restart_count() -> int:
    """Return how often `torchrun` has restarted all processes because one failed."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))


def launch_id() -> str:
    """Return the identifier of the `torchrun` call that started this process, or ""."""
    found = os.environ.get("TORCHELASTIC_RUN_ID", "")
    return "" if found == NO_ID else found


def is_main_process() -> bool:
    """Return whether this process writes the files of the run, before `process_group` or in it."""
    if dist.is_available() and dist.is_initialized():
        return bool(dist.get_rank() == 0)
    return Distributed.from_environment().is_main


@contextmanager
def process_group(device: torch.device, timeout: float) -> Iterator[Distributed]:
    """Connect to the other processes, if there are any, and disconnect at the end.

    A default process group that the caller has initialized is used as it is.

    Parameters
    ----------
    device
        Device of this process.
    timeout
        Seconds after which an exchange with the other processes fails. With gloo it raises
        `TrainingError`; with NCCL, whose exchanges are asynchronous, its watchdog ends the process.
    """
    if dist.is_available() and dist.is_initialized():
        yield Distributed(dist.get_rank(), dist.get_world_size())
        return
    distributed = replace(Distributed.from_environment(), timeout=timeout)
    if distributed.size == 1:
        yield distributed
        return
    with distributed._errors():
        limit = timedelta(seconds=timeout)
        store, rank, size = next(iter(rendezvous("env://", timeout=limit)))
        # torchrun keeps its store when it restarts processes, with the addresses of those that
        # failed.
        store = PrefixStore(f"attempt {restart_count()}", store)
        backend = "gloo"
        if device.type == "cuda":
            torch.cuda.set_device(device)
            backend = "nccl"
        dist.init_process_group(
            backend,
            store=store,
            rank=rank,
            world_size=size,
            timeout=limit,
            device_id=device if backend == "nccl" else None,
        )
    try:
        yield distributed
        with distributed._errors():
            dist.barrier()
    finally:
        dist.destroy_process_group()
