"""The Markov chains with which a density learns."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from poecaps._files import ModelError
from poecaps.sampling import (
    ANNEALED_SHARE,
    INITIAL_STEP_SIZE,
    Chains,
    DensityTarget,
    StepSize,
    hmc_step,
    start_chains,
    systematic,
)

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import Tensor

    from poecaps.energy import CapsuleDensity
    from poecaps.training.config import DensityStage
    from poecaps.training.distributed import Distributed, RandomNumbers

GOLDEN_RATIO = (math.sqrt(5) - 1) / 2


class LearningChains:
    """Chains of Hamiltonian Monte Carlo that follow a density while it learns.

    A chain lives for a number of learning steps and makes one step of the sampler in each of them.
    It starts from the base measure (t = 0), is annealed to the model (t = 1) in the first two
    thirds of its life and stays there in the last. The chains at t = 1 are draws of the model,
    obtained as a user obtains them. As the age of the chains is spread evenly, a third of all
    chains are at t = 1 at any time. Persistent chains, which never start anew, keep the numbers of
    draws in modes between which they do not cross, and cannot teach the density how probable the
    modes are.

    While a chain is annealed, it adds up its weight in annealed importance sampling, so that the
    chains also give a running estimate of log Z.

    Annealing does not find the modes of a density as often as they are probable. With
    `options.groups`, all chains of a group have the same age. They are resampled in proportion to
    their weights when fewer than half of them are effective, and when they arrive at t = 1
    (`poecaps.sampling.ImportanceWeights`), so that the draws have the modes in their proportions.

    Parameters
    ----------
    density
        The density that learns.
    options
        Number of chains, their lifetime and the options of the sampler.
    distributed
        Processes that learn together; each has its share of the chains.
    """

    def __init__(
        self, density: CapsuleDensity, options: DensityStage, distributed: Distributed
    ) -> None:
        self.density, self.options, self.distributed = density, options, distributed
        if options.chains % distributed.size:
            raise ValueError(
                f"density.chains must be a multiple of the number of processes, "
                f"{distributed.size}, but is {options.chains}"
            )
        if options.groups % distributed.size:
            raise ValueError(
                f"density.groups must be a multiple of the number of processes, "
                f"{distributed.size}, but is {options.groups}"
            )
        count, device = options.chains // distributed.size, density.weight.device
        size = density.in_capsules * density.in_dim
        # Any part of the multiples of the golden ratio is spread evenly, also that of one process.
        # None of them is 0: a chain that starts anew at a whole age could miss it by rounding.
        if options.groups:
            numbers = torch.arange(options.groups, dtype=torch.float64)
            offsets = ((numbers + GOLDEN_RATIO) / options.groups).repeat_interleave(
                options.chains // options.groups
            )
        else:
            numbers = torch.arange(1, options.chains + 1, dtype=torch.float64)
            offsets = (numbers * GOLDEN_RATIO) % 1
        self.all_offsets = offsets.to(device)
        self.offsets = distributed.shard(self.all_offsets)
        self.position = torch.zeros(count, size, device=device)
        self.log_weight = torch.zeros(count, device=device)
        self.log_z = torch.zeros(count, device=device)
        self.has_arrived = torch.zeros(count, device=device)
        self.step_size = StepSize(
            torch.full((), INITIAL_STEP_SIZE, device=device), options.target_acceptance
        )
        self.acceptance = torch.zeros((), device=device)
        self.step = torch.zeros((), dtype=torch.float64, device=device)

    def start(self, generator: torch.Generator) -> None:
        """Draw all chains from the base measure, on the CPU: the same for every device."""
        noise = torch.randn(self.options.chains, self.position.shape[1], generator=generator)
        shard = self.distributed.shard(noise).to(self.position.device)
        self.position.copy_(self.density.base.from_noise(shard))

    @torch.no_grad()
    def advance(self, random: RandomNumbers) -> tuple[Tensor, Tensor]:
        """Make one step with all chains.

        Returns
        -------
        capsules : (C, I, K)
            States of all chains of this process.
        weight : (C,)
            Of each chain in the mean over the draws of the model: 0 while it is annealed.
        """
        t, before, is_new = self._inverse_temperature(self.offsets, self.step)
        noise = random.normal(*self.position.shape)
        fresh = self.density.base.from_noise(noise)
        position = torch.where(is_new.unsqueeze(-1), fresh, self.position)
        target = DensityTarget(self.density)
        chains = start_chains(target, position, t)
        self._add_weights(chains.energy, t, before, is_new)
        if self.options.groups:
            chains = self._resample(chains, before, random)
        chains, accepted = hmc_step(
            target,
            chains,
            random.normal(*self.position.shape),
            random.uniform(len(position)),
            step_size=self.step_size.value,
            leapfrog_steps=self.options.leapfrog_steps,
        )
        self.position.copy_(chains.position)
        at_model = self._inverse_temperature(self.all_offsets, self.step)[0] >= 1
        weight = (t >= 1).to(t) * self.distributed.size / at_model.sum().clamp(min=1)
        self._adapt((accepted * weight).sum())
        self.step += 1
        return self.density.base.from_white(self.position), weight

    def at_model(self) -> Tensor:
        """Return which chains of this process were at t = 1 in the last step: (C,) of bool."""
        return self._inverse_temperature(self.offsets, self.step - 1)[0] >= 1

    def log_partition(self) -> float:
        """Estimate log Z from the chains of this process that have arrived; NaN without any."""
        arrived = self.has_arrived > 0
        if not bool(arrived.any()):
            return math.nan
        weights = self.log_z[arrived].double()
        return (torch.logsumexp(weights, 0) - math.log(len(weights))).item()

    def state(self) -> dict[str, Tensor]:
        """Return the state of the chains of all processes, by name."""
        return {name: self._gathered(name) for name in self._names()}

    def load_state(self, state: Mapping[str, Tensor], source: Path) -> None:
        """Restore the chains; raise ModelError if the state does not belong to them."""
        for name, tensor in self._names().items():
            found = state.get(name)
            shape = tuple(tensor.shape)
            if tensor.ndim:
                shape = (shape[0] * self.distributed.size, *shape[1:])
            if found is None or tuple(found.shape) != shape or not found.isfinite().all():
                raise ModelError(f"{source} is damaged: {name} is not a state of these chains")
            found = found.to(tensor)
            tensor.copy_(self.distributed.shard(found) if tensor.ndim else found)

    def _names(self) -> dict[str, Tensor]:
        return {
            "position": self.position,
            "log_weight": self.log_weight,
            "log_z": self.log_z,
            "has_arrived": self.has_arrived,
            "step_size": self.step_size.value,
            "acceptance": self.acceptance,
            "chain_step": self.step,
        }

    def _gathered(self, name: str) -> Tensor:
        tensor = self._names()[name]
        return self.distributed.all_gather(tensor) if tensor.ndim else tensor

    def _inverse_temperature(self, offsets: Tensor, step: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return t of chains at a step and the step before, and whether they start anew."""
        if self.options.lifetime == 0:
            one = torch.ones_like(offsets, dtype=self.position.dtype)
            return one, one, torch.zeros_like(offsets, dtype=torch.bool)
        rate = 1 / self.options.lifetime
        age = offsets + step * rate
        is_new = (age % 1) < rate
        t = (age % 1 / ANNEALED_SHARE).clamp(max=1).to(self.position.dtype)
        earlier = ((age % 1 - rate) / ANNEALED_SHARE).clamp(min=0, max=1)
        earlier = earlier * (step > 0)  # at first, all chains are draws of the base measure
        return t, earlier.to(self.position.dtype), is_new

    def _add_weights(self, energy: Tensor, t: Tensor, before: Tensor, is_new: Tensor) -> None:
        """Add −Δt F to the weights, and keep those of chains that arrive at t = 1."""
        weight = torch.where(is_new, torch.zeros_like(energy), self.log_weight)
        weight = weight - (t - before) * energy
        arrives = (t >= 1) & (before < 1)
        self.log_z.copy_(torch.where(arrives, weight, self.log_z))
        self.has_arrived.copy_(torch.where(arrives, torch.ones_like(weight), self.has_arrived))
        self.log_weight.copy_(weight)

    def _resample(self, chains: Chains, before: Tensor, random: RandomNumbers) -> Chains:
        """Resample the groups in which few chains have most of the weight, or which arrive."""
        groups = self.options.groups // self.distributed.size
        log_weights, t, before = (
            each.view(groups, -1) for each in (self.log_weight, chains.inverse_temperature, before)
        )
        size = log_weights.shape[1]
        share = log_weights.softmax(1)
        few = size * share.square().sum(1) > 2
        needed = torch.where(t[:, 0] < 1, few, before[:, 0] < 1).unsqueeze(1)
        numbers = torch.arange(size, device=t.device)
        index = torch.where(needed, systematic(log_weights, random.uniform(groups)), numbers)
        mean = torch.logsumexp(log_weights, 1, keepdim=True) - math.log(size)
        self.log_weight.copy_(torch.where(needed, mean, log_weights).flatten())
        first = size * torch.arange(groups, device=t.device).unsqueeze(1)
        return chains.select((first + index).flatten())

    def _adapt(self, acceptance: Tensor) -> None:
        """Adapt the step size to the mean acceptance at t = 1."""
        mean = acceptance.reshape(1)
        self.distributed.all_reduce_mean([mean])
        self.acceptance.copy_(mean[0])
        self.step_size.update(self.acceptance)
