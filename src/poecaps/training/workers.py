"""The processes that train one model together: which of them this is, and what they exchange.

Started by `torchrun`, every process runs the same program. Each sees its share of every batch; gradients are averaged;
the first process writes. Random numbers are drawn for the whole batch and then shared out like the images, so that the
number of processes changes nothing but the order of sums.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from poecaps.training.errors import TrainingError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor


@dataclass(frozen=True)
class Workers:
    """One of `size` processes."""

    rank: int = 0
    size: int = 1

    @property
    def first(self) -> bool:
        """Whether this is the process that writes and reports."""
        return self.rank == 0

    def share(self, batch: Tensor) -> Tensor:
        """Choose the part of a batch that this process sees; all parts are equally long: (B, …) → (B/size, …)."""
        each = len(batch) // self.size
        return batch[self.rank * each : (self.rank + 1) * each]

    def uniform(self, like: Tensor, generator: torch.Generator) -> Tensor:
        """Draw numbers from 0 to 1 in the shape of `like`, this process's part of those of the whole batch."""
        each = len(like)
        drawn = torch.rand(
            self.size * each, *like.shape[1:], generator=generator, device=like.device
        )
        return drawn[self.rank * each : (self.rank + 1) * each]

    def average(self, tensors: Sequence[Tensor]) -> None:
        """Replace tensors, in place, by their mean over all processes."""
        if self.size == 1:
            return
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        with _in_touch():
            dist.all_reduce(flat)
        flat /= self.size
        for tensor, part in zip(
            tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True
        ):
            tensor.copy_(part.view_as(tensor))

    def gather(self, part: Tensor) -> Tensor:
        """Join the parts of all processes, which must be equally long, along the first axis."""
        if self.size == 1:
            return part
        parts = [torch.empty_like(part) for _ in range(self.size)]
        with _in_touch():
            dist.all_gather(parts, part.contiguous())
        return torch.cat(parts)

    def follow_first(self, tensors: Sequence[Tensor]) -> None:
        """Replace tensors, in place, by those of the first process."""
        if self.size > 1:
            with _in_touch():
                for tensor in tensors:
                    dist.broadcast(tensor, src=0)

    def any(self, answer: bool, device: torch.device) -> bool:
        """Tell whether one of the processes says yes."""
        if self.size == 1:
            return answer
        vote = torch.tensor([float(answer)], device=device)
        with _in_touch():
            dist.all_reduce(vote)
        return bool(vote.item() > 0)


@contextmanager
def _in_touch() -> Iterator[None]:
    """Say it in one line when another process has gone away."""
    try:
        yield
    except RuntimeError as error:
        raise TrainingError(
            f"another process has stopped ({str(error).splitlines()[0]})"
        ) from error


def expected() -> Workers:
    """Tell how many processes `torchrun` has started, and which of them this is."""
    return Workers(int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1)))


def attempt() -> int:
    """Tell how often `torchrun` has started all processes anew because one failed."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))


def launch() -> str:
    """Name the call of `torchrun` that has started this process."""
    return os.environ.get("TORCHELASTIC_RUN_ID", "")


def local_rank() -> int:
    """Tell which of the processes on this machine this is."""
    return int(os.environ.get("LOCAL_RANK", 0))


@contextmanager
def joined(device: torch.device) -> Iterator[Workers]:
    """Meet the other processes, where there are any, and part from them in the end."""
    if dist.is_available() and dist.is_initialized():  # the caller has done it, and will undo it
        yield Workers(dist.get_rank(), dist.get_world_size())
        return
    workers = expected()
    if workers.size == 1:
        yield workers
        return
    store, rank, size = next(iter(rendezvous("env://")))
    # torchrun keeps its store when it starts processes anew; the addresses of those that failed are still in it.
    store = PrefixStore(f"attempt {attempt()}", store)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", store=store, rank=rank, world_size=size, device_id=device)
    else:
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    try:
        yield workers
        with _in_touch():
            dist.barrier()
    finally:
        dist.destroy_process_group()
