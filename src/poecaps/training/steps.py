"""One training step, and its capture as a CUDA graph."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from poecaps.training.distributed import Distributed, RandomNumbers

if TYPE_CHECKING:
    from torch import Tensor

    from poecaps.training.optim import Optimizer
    from poecaps.training.stages import StageTrainer

# Steps before the capture, in which libraries initialize and the optimizer allocates its state.
WARMUP_STEPS = 3

# Replays for which a capture pays off.
MIN_REPLAYS = 50


class TrainingStep:
    """One step of a stage's optimizer on one batch.

    Parameters
    ----------
    stage
        Stage to train.
    optimizer
        Optimizer of the stage's parameters.
    distributed
        Processes that train together, each on its shard of the batch.
    generator
        Source of the step's random numbers, on the stage's device.
    """

    def __init__(
        self,
        stage: StageTrainer,
        optimizer: Optimizer,
        distributed: Distributed,
        generator: torch.Generator,
    ) -> None:
        self.stage, self.optimizer, self.distributed = stage, optimizer, distributed
        self.random = RandomNumbers(generator, distributed)
        self.parameters = list(stage.module.parameters())
        self.buffers = list(stage.module.buffers())

    def __call__(self, indices: Tensor) -> Tensor:
        """Train on the images with these indices: (B,) → loss () of all of them."""
        self.optimizer.zero_grad()
        loss = self.stage.loss(self.distributed.shard(indices), self.random)
        loss.backward()
        loss = loss.detach()
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        self.distributed.all_reduce_mean([*gradients, *self.buffers, loss])
        self.optimizer.step()
        return loss


class GraphedStep:
    """A training step that is captured once as a CUDA graph and then replayed.

    The host needs more time to launch the many small kernels of a step than the GPU needs to run
    them. A replay is a single launch, with the same results.

    Parameters
    ----------
    step
        Step to capture. Its data and the state of its optimizer must be on the GPU.
    generator
        Source of the step's random numbers, on the GPU; it may be seeded before each step.
    """

    def __init__(self, step: TrainingStep, generator: torch.Generator) -> None:
        self.step, self.generator = step, generator
        self.stream = torch.cuda.Stream(generator.device)
        self.steps_taken = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._indices = self._loss = torch.empty(0)  # input and output of the graph

    def __call__(self, indices: Tensor) -> Tensor:
        """Train on the images with these indices (B,), with the same B each time: → loss ()."""
        if self.steps_taken == WARMUP_STEPS:
            self._capture(indices)
        self.steps_taken += 1
        if self._graph is None:
            return self._warm_up(indices)
        self._indices.copy_(indices)
        self._graph.replay()
        return self._loss

    def _warm_up(self, indices: Tensor) -> Tensor:
        """Take a step on the stream of the capture."""
        current = torch.cuda.current_stream(self.generator.device)
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            loss = self.step(indices)
        current.wait_stream(self.stream)
        return loss

    def _capture(self, indices: Tensor) -> None:
        self._indices = indices.clone()
        self._graph = torch.cuda.CUDAGraph()
        self._graph.register_generator_state(self.generator)
        torch.cuda.synchronize(self.generator.device)
        with torch.cuda.graph(self._graph, stream=self.stream):
            self._loss = self.step(self._indices)
