"""The Markov chains with which a density learns."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from poecaps._files import ModelError
from poecaps.likelihood import bennett_ratio, thermodynamic_integral
from poecaps.sampling import (
    ANNEALED_SHARE,
    INITIAL_STEP_SIZE,
    Chains,
    DensityTarget,
    StepSize,
    hmc_step,
    start_chains,
    swap_replicas,
    tempering_ladder,
)

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import Tensor

    from poecaps.energy import CapsuleDensity
    from poecaps.training.config import DensityStage
    from poecaps.training.distributed import Distributed, RandomNumbers

GOLDEN_RATIO = (math.sqrt(5) - 1) / 2
SETTLING_STEPS = 10  # after which an estimate of log Z is within a few percent while weights grow


def make_chains(
    density: CapsuleDensity, options: DensityStage, distributed: Distributed
) -> LearningChains:
    """Return the chains that the options ask for."""
    kind = TemperedChains if options.levels else LearningChains
    return kind(density, options, distributed)


class LearningChains:
    """Chains of Hamiltonian Monte Carlo that follow a density while it learns.

    A chain lives for a number of learning steps and makes one step of the sampler in each of them.
    It starts from the base measure (t = 0), is annealed to the model (t = 1) in the first two
    thirds of its life and stays there in the last. The chains at t = 1 are draws of the model,
    obtained as a user obtains them. As the age of the chains is spread evenly, a third of all
    chains are at t = 1 at any time. Persistent chains, which never start anew, keep the numbers of
    draws in modes between which they do not cross, and cannot teach the density how probable the
    modes are.

    The draws are not weighted: the density learns how often annealing finds a mode, and not how
    probable the mode is. `TemperedChains` are draws of P itself.

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
        count, device = options.chains // distributed.size, density.weight.device
        size = density.in_capsules * density.in_dim
        # Any part of the multiples of the golden ratio is spread evenly, also that of one process.
        # None of them is 0: a chain that starts anew at a whole age could miss it by rounding.
        numbers = torch.arange(1, options.chains + 1, dtype=torch.float64)
        offsets = (numbers * GOLDEN_RATIO) % 1
        self.all_offsets = offsets.to(device)
        self.offsets = distributed.shard(self.all_offsets)
        self.position = torch.zeros(count, size, device=device)
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
            Of each chain in the mean over the draws of the model: 0 while it is annealed. The mean
            over the processes of the sum of their weights is 1.
        """
        t, is_new = self._inverse_temperature(self.offsets, self.step)
        noise = random.normal(*self.position.shape)
        fresh = self.density.base.from_noise(noise)
        position = torch.where(is_new.unsqueeze(-1), fresh, self.position)
        target = DensityTarget(self.density)
        chains, accepted = hmc_step(
            target,
            start_chains(target, position, t),
            random.normal(*self.position.shape),
            random.uniform(len(position)),
            step_size=self.step_size.value,
            leapfrog_steps=self.options.leapfrog_steps,
        )
        self.position.copy_(chains.position)
        weight = self._weights(t)
        self._adapt((accepted * weight).sum())
        self.step += 1
        return self.density.base.from_white(self.position), weight

    def at_model(self) -> Tensor:
        """Return which chains of this process were at t = 1 in the last step: (C,) of bool."""
        return self._inverse_temperature(self.offsets, self.step - 1)[0] >= 1

    @torch.no_grad()
    def log_partition(self) -> float:
        """Estimate log Z from the chains of this process, by `thermodynamic_integral`.

        The ages of the chains are spread evenly, and so are the inverse temperatures of those that
        are annealed.

        Returns
        -------
        float
            NaN for persistent chains, all of which are at t = 1: draws of the model alone give no
            useful estimate. NaN also if no chain, or every chain, is at t = 1.
        """
        at_model = self.at_model()
        if self.options.lifetime == 0 or not at_model.any() or at_model.all():
            return math.nan
        t = self._inverse_temperature(self.offsets, self.step - 1)[0]
        return thermodynamic_integral(t, self._settled_energy(t))

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
            "step_size": self.step_size.value,
            "acceptance": self.acceptance,
            "chain_step": self.step,
        }

    def _gathered(self, name: str) -> Tensor:
        tensor = self._names()[name]
        return self.distributed.all_gather(tensor) if tensor.ndim else tensor

    def _inverse_temperature(self, offsets: Tensor, step: Tensor) -> tuple[Tensor, Tensor]:
        """Return t of chains at a step, and whether they start anew."""
        if self.options.lifetime == 0:
            one = torch.ones_like(offsets, dtype=self.position.dtype)
            return one, torch.zeros_like(offsets, dtype=torch.bool)
        rate = 1 / self.options.lifetime
        age = offsets + step * rate
        is_new = (age % 1) < rate
        t = (age % 1 / ANNEALED_SHARE).clamp(max=1).to(self.position.dtype)
        return t, is_new

    def _settled_energy(self, t: Tensor) -> Tensor:
        """Compute F of copies of the chains after more steps at their t: (C,) → (C,).

        Chains are a little behind a density that learns, and behind their t while they are
        annealed. For that, log Z would be too low. The random numbers depend on the number of the
        learning step alone, so that this changes nothing in the training.
        """
        device, shape = self.position.device, self.position.shape
        generator = torch.Generator(device).manual_seed(int(self.step.item()))
        target = DensityTarget(self.density)
        chains = start_chains(target, self.position, t)
        for _ in range(SETTLING_STEPS):
            chains, _ = hmc_step(
                target,
                chains,
                torch.randn(shape, generator=generator, device=device),
                torch.rand(shape[0], generator=generator, device=device),
                step_size=self.step_size.value,
                leapfrog_steps=self.options.leapfrog_steps,
            )
        return chains.energy

    def _weights(self, t: Tensor) -> Tensor:
        """Return the weights of chains at t in the mean over the draws of the model: (C,)."""
        at_model = self._inverse_temperature(self.all_offsets, self.step)[0] >= 1
        return (t >= 1).to(t) * self.distributed.size / at_model.sum().clamp(min=1)

    def _adapt(self, acceptance: Tensor) -> None:
        """Adapt the step size to the mean acceptance at t = 1."""
        mean = acceptance.reshape(1)
        self.distributed.all_reduce_mean([mean])
        self.acceptance.copy_(mean[0])
        self.step_size.update(self.acceptance)


class TemperedChains(LearningChains):
    """Persistent chains of parallel tempering, which cross between the modes of a density.

    Every chain at the model (t = 1) is accompanied by one at each of `options.levels` − 1 lower
    inverse temperatures, down to the base measure (t = 0), from which it is drawn anew in every
    step. After each step of the sampler, neighbours are exchanged (`poecaps.sampling.
    swap_replicas`), so that new states travel from the base measure to the model. All of this
    leaves P invariant: while the density changes slowly, the chains at t = 1 are draws of P itself,
    and each mode has as many of them as it is probable.

    References
    ----------
    G. Desjardins, A. Courville, Y. Bengio, P. Vincent, O. Delalleau, "Tempered Markov chain Monte
    Carlo for training of Restricted Boltzmann Machines", 2010.

    Parameters
    ----------
    density, options, distributed
        See `LearningChains`. The number of chains counts those at all levels.
    """

    def __init__(
        self, density: CapsuleDensity, options: DensityStage, distributed: Distributed
    ) -> None:
        if options.chains % (options.levels * distributed.size):
            raise ValueError(
                f"density.chains must be a multiple of density.levels times the number of "
                f"processes, {options.levels}·{distributed.size}, but is {options.chains}"
            )
        super().__init__(density, options, distributed)
        self.ladder = self.position.new_tensor(tempering_ladder(options.levels))

    @torch.no_grad()
    def advance(self, random: RandomNumbers) -> tuple[Tensor, Tensor]:
        """Make one step with all chains, and exchange neighbours; see `LearningChains.advance`."""
        t = self._levels().flatten()
        fresh = self.density.base.from_noise(random.normal(*self.position.shape))
        position = torch.where((t == 0).unsqueeze(-1), fresh, self.position)
        target = DensityTarget(self.density)
        chains, accepted = hmc_step(
            target,
            start_chains(target, position, t),
            random.normal(*self.position.shape),
            random.uniform(len(position)),
            step_size=self.step_size.value,
            leapfrog_steps=self.options.leapfrog_steps,
        )
        for odd in (False, True):
            chains = self._exchange(chains, random, odd=odd)
        self.position.copy_(chains.position)
        at_model = (t >= 1).to(t)
        weight = at_model / at_model.sum()
        self._adapt((accepted * weight).sum())
        self.step += 1
        return self.density.base.from_white(self.position), weight

    def at_model(self) -> Tensor:
        """Return which chains of this process are at t = 1: (C,) of bool."""
        return self._levels().flatten() >= 1

    @torch.no_grad()
    def log_partition(self) -> float:
        """Estimate log Z from the chains of this process, by `bennett_ratio` between neighbours."""
        energy = self._settled_energy(self._levels().flatten()).view(-1, self.options.levels)
        step = self.ladder[:-1] - self.ladder[1:]
        return bennett_ratio(step * energy[:, 1:], step * energy[:, :-1]).sum().item()

    def _levels(self) -> Tensor:
        """Return t of all chains, of which those that exchange states are neighbours: (·, L)."""
        return self.ladder.expand(len(self.position) // self.options.levels, -1)

    def _exchange(self, chains: Chains, random: RandomNumbers, *, odd: bool) -> Chains:
        """Exchange the states of every second pair of neighbours."""
        levels = self.options.levels
        order = torch.arange(len(chains.energy), device=self.ladder.device).view(-1, levels)
        by_level = order.T.flatten()
        uniform = random.uniform(len(order), levels - 1).T
        swapped, _ = swap_replicas(chains.select(by_level), self.ladder, uniform, odd=odd)
        return swapped.select(by_level.argsort())
