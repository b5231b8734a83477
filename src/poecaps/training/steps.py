"""One training step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from poecaps.training.distributed import Distributed, RandomNumbers

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from poecaps.training.optim import Optimizer
    from poecaps.training.stages import StageTrainer


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
