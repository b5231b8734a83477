"""One step of learning after the other; on a GPU, one is recorded and the rest are replays of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from poecaps.training.optim import Optimizer
    from poecaps.training.stages import Task
    from poecaps.training.workers import Workers

PLAIN = 3  # steps before the recording, in which libraries settle and the optimiser gets its memory
FEWEST = 50  # replays for which a recording pays


class Steps:
    """Takes the steps of a task.

    On a GPU the host needs longer to launch the many small kernels of a step than the GPU to run them. So, where one
    process trains with Adam on data that lie in the GPU's memory, a step is recorded as a CUDA graph and replayed: same
    numbers, no waiting for the host.

    Parameters
    ----------
    task
        What learns.
    optimizer
        Its optimiser; for a recording, one that keeps all its numbers on the device.
    workers
        Processes that learn together.
    draws
        Source of random numbers, on the task's device; it may be seeded before each step.
    recorded
        Whether to record.
    """

    def __init__(
        self,
        task: Task,
        optimizer: Optimizer,
        workers: Workers,
        draws: torch.Generator,
        *,
        recorded: bool,
    ) -> None:
        self.task, self.optimizer, self.workers, self.draws = task, optimizer, workers, draws
        self.parameters, self.buffers = list(task.part.parameters()), list(task.part.buffers())
        self.stream = torch.cuda.Stream(draws.device) if recorded else None
        self.taken = 0
        self.replay: Callable[[Tensor], Tensor] | None = None

    def take(self, indices: Tensor) -> Tensor:
        """Learn from the images with these indices (B,), always as many, and return the loss."""
        if self.stream is None:
            return self._step(indices)
        if self.taken == PLAIN:
            self.replay = self._record(indices, self.stream)
        self.taken += 1
        return self._step_on(self.stream, indices) if self.replay is None else self.replay(indices)

    def _step(self, indices: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        loss = self.task.loss(
            self.workers.share(indices), lambda like: self.workers.uniform(like, self.draws)
        )
        loss.backward()
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        self.workers.average([*gradients, *self.buffers])
        self.optimizer.step()
        return loss.detach()

    def _step_on(self, stream: torch.cuda.Stream, indices: Tensor) -> Tensor:
        """Take a plain step on the stream that the recording will be made on."""
        current = torch.cuda.current_stream(self.draws.device)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            loss = self._step(indices)
        current.wait_stream(stream)
        return loss

    def _record(self, indices: Tensor, stream: torch.cuda.Stream) -> Callable[[Tensor], Tensor]:
        place = indices.clone()
        graph = torch.cuda.CUDAGraph()
        graph.register_generator_state(self.draws)
        torch.cuda.synchronize(self.draws.device)
        with torch.cuda.graph(graph, stream=stream):
            loss = self._step(place)

        def replay(indices: Tensor) -> Tensor:
            place.copy_(indices)
            graph.replay()
            return loss

        return replay
