"""Maximum likelihood for densities: one learning step, and the training of a density by itself."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import torch

from poecaps import _checks as checks
from poecaps._files import ModelError
from poecaps.likelihood import estimate_log_partition, fit_log_partition
from poecaps.training.chains import make_chains
from poecaps.training.config import DensityStage
from poecaps.training.distributed import Distributed, RandomNumbers
from poecaps.training.errors import TrainingError
from poecaps.training.optim import make_optimizer, set_learning_rate
from poecaps.training.seeds import Stream, derive_seed, make_generator

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from torch import Tensor

    from poecaps.energy import CapsuleDensity

FIT_BATCH = 1000  # capsules to which the base measure is fitted together


class DensityLearner:
    """Learning of a density by maximum likelihood.

    The gradient of log P(x) is −∂F(x)/∂W on data minus the same on draws of the density, which
    Markov chains provide (`poecaps.training.chains`). The result is a running average of the
    weights: how probable the density makes its modes oscillates while it learns, because the
    chains follow it with a delay, and the average does not. log Z, which belongs to other weights,
    is forgotten at the start; `finish` estimates that of the result.

    Parameters
    ----------
    density
        The density that learns.
    options
        Options of the chains and of the average.
    distributed
        Processes that learn together.
    """

    def __init__(
        self, density: CapsuleDensity, options: DensityStage, distributed: Distributed
    ) -> None:
        self.density, self.options, self.distributed = density, options, distributed
        density.forget_log_partition()
        self.chains = make_chains(density, options, distributed)
        self.average = [each.detach().clone() for each in density.parameters()]

    def loss(self, x: Tensor, random: RandomNumbers) -> Tensor:
        """Compute the mean of F over data minus that over draws: (B, I, K) → ()."""
        self._update_average()
        x_model, weight = self.chains.advance(random)
        energy = self.density.free_energy(torch.cat((x, x_model)))
        data, model = energy.split((len(x), len(x_model)))
        loss: Tensor = data.mean() - (weight * model).sum()
        return loss

    def learning_rate_factors(self) -> list[float]:
        """Return the factor of the learning rate of each parameter."""
        weight = self.density.weight
        return [
            1.0 if parameter is weight else self.options.strength_rate
            for parameter in self.density.parameters()
        ]

    @torch.no_grad()
    def finish(self, seed: int) -> None:
        """Replace the weights by their average, and estimate the partition function if asked to."""
        self._update_average()
        for parameter, average in zip(self.density.parameters(), self.average, strict=True):
            parameter.copy_(average)
        if not self.options.partition_steps or not self.distributed.is_main:
            return
        device = self.density.weight.device
        generator = torch.Generator(device).manual_seed(derive_seed(seed, Stream.PARTITION))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # `poecaps likelihood` shows how far the estimates are
            estimate = estimate_log_partition(
                self.density,
                chains=self.options.partition_chains,
                steps=self.options.partition_steps,
                leapfrog_steps=self.options.leapfrog_steps,
                generator=generator,
            )
        fit_log_partition(self.density, estimate)

    def state(self) -> dict[str, Tensor]:
        """Return the chains, and the average of the weights."""
        averages = {f"average.{number}": each for number, each in enumerate(self.average)}
        return {**self.chains.state(), **averages}

    def load_state(self, state: Mapping[str, Tensor], source: Path) -> None:
        """Restore the chains, and the average of the weights."""
        self.chains.load_state(state, source)
        averages = {f"average.{number}": each for number, each in enumerate(self.average)}
        load_weights(averages, state, source)

    @torch.no_grad()
    def _update_average(self) -> None:
        """Add the current weights to the average, whose memory grows with the steps at first."""
        step = self.chains.step
        decay = torch.clamp((1 + step) / (10 + step), max=self.options.average)
        for parameter, average in zip(self.density.parameters(), self.average, strict=True):
            average.lerp_(parameter.detach(), (1 - decay).to(average.dtype))


def load_weights(
    weights: Mapping[str, Tensor],
    state: Mapping[str, Tensor],
    source: Path,
    owner: str = "a density",
) -> None:
    """Copy weights of `owner` from a state; raise ModelError if they do not belong to it."""
    for name, tensor in weights.items():
        found = state.get(name)
        if found is None or found.shape != tensor.shape or not found.isfinite().all():
            raise ModelError(f"{source} is damaged: {name} is not that of {owner}")
        tensor.copy_(found)


def fit_density(
    density: CapsuleDensity,
    x: Tensor,
    *,
    steps: int = 2000,
    batch_size: int = 128,
    options: DensityStage | None = None,
    seed: int = 0,
    report: Callable[[int, int, float], None] | None = None,
) -> None:
    """Train a density on capsules by maximum likelihood, and estimate its partition function.

    The weights are learned from where they are; a new density has random ones. With even mixing
    and `base_components`, the experts learn to read the principal components of the base measure,
    and nothing else (`CapsuleDensity.restrict`): Adam, which scales the gradient of every weight by
    its size, then learns weak components as fast as strong ones.

    Parameters
    ----------
    density
        The density, trained in place.
    x : (N, I, K)
        Capsules, with mean 0 for a Gaussian base measure, on the device of the density. The base
        measure is fitted to them.
    steps
        Learning steps.
    batch_size
        Capsules in a step.
    options
        Chains, optimizer and learning rate; the number of epochs is not used.
    seed
        Seed of all random numbers.
    report
        Called after every step with the number of finished steps, that of all steps, and the loss.

    Raises
    ------
    TrainingError
        If the loss is no longer finite.
    """
    density._check(x, ball=False)
    checks.require_images("x", x)
    checks.require_int("steps", steps, 1)
    checks.require_int("batch_size", batch_size, 1)
    options = options or DensityStage(learning_rate=2e-3, final_learning_rate_ratio=0.05)
    options.validate("options")
    if not all(parameter.requires_grad for parameter in density.parameters()):
        raise ValueError(
            "the parameters of density must require gradients, but those of a loaded network do "
            "not; call density.requires_grad_() first"
        )
    density.forget_log_partition()  # also if the training ends with an error
    density.base.fit(x.split(FIT_BATCH))
    distributed, device = Distributed(), density.weight.device
    learned = density
    if density.has_components:
        learned, x = density.restrict(), density.components(x)
    learner = DensityLearner(learned, options, distributed)
    learner.chains.start(make_generator(seed, Stream.STAGE))
    factors = learner.learning_rate_factors()
    optimizer = make_optimizer(options, list(learned.parameters()), factors)
    generator = torch.Generator(device).manual_seed(derive_seed(seed, Stream.STEP))
    random = RandomNumbers(generator, distributed)
    for step in range(steps):
        set_learning_rate(optimizer, options.learning_rate_at(step / steps))
        batch = x[torch.randint(len(x), (batch_size,), generator=generator, device=device)]
        optimizer.zero_grad()
        loss = learner.loss(batch, random)
        loss.backward()
        optimizer.step()
        value = loss.item()
        if not value - value == 0:  # NaN or infinite
            raise TrainingError(f"the density diverged at step {step + 1}; lower the learning rate")
        if report is not None:
            report(step + 1, steps, value)
    learner.finish(seed)
    if learned is not density:
        density.extend(learned)
