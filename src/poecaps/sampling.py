"""Markov chains that leave a density exactly invariant, and diagnostics of them.

All samplers work in the coordinates u of the base measure, see `poecaps.energy`, and on a family
of densities between the base measure (t = 0) and the model (t = 1)::

    P_t(u) ∝ base(u) e^(−t F(u))

t is the inverse temperature of the energy; the base measure is not tempered.

References
----------
R. Neal, "MCMC using Hamiltonian dynamics", 2011.
S. Syed, A. Bouchard-Côté, G. Deligiannidis, A. Doucet, "Non-reversible parallel tempering", 2022.
A. Vehtari, A. Gelman, D. Simpson, B. Carpenter, P.-C. Bürkner, "Rank-normalization, folding, and
localization: an improved R̂", 2021.
"""

from __future__ import annotations

import copy
import itertools
import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args

import torch

from poecaps import _checks as checks
from poecaps import functional as F
from poecaps._graphs import Graphed, pays_off
from poecaps.energy import BallBase, CapsuleDensity, GaussianBase, energy_and_gradient

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

Sampler = Literal["hmc", "langevin", "gibbs"]
"""Name of a sampler, see `sample`."""
SAMPLERS: tuple[Sampler, ...] = get_args(Sampler)
"""All samplers."""

__all__ = [
    "SAMPLERS",
    "Chains",
    "DensityTarget",
    "Sampler",
    "Samples",
    "StepSize",
    "Target",
    "autocorrelation",
    "autocorrelation_time",
    "draw",
    "effective_sample_size",
    "hmc_step",
    "sample",
    "split_rhat",
    "start_chains",
    "swap_replicas",
    "tempering_ladder",
]

# Share of the steps of a chain from noise in which it is annealed from the base measure.
ANNEALED_SHARE = 2 / 3
INITIAL_STEP_SIZE = 0.1
TARGET_ACCEPTANCE = 0.8  # near the optimum of HMC in many dimensions (Neal 2011: 0.65 to 0.9)
ADAPTATION_RATE = 0.1  # of the logarithm of the step size, for each step
# Draws by parallel tempering: steps of a chain and levels of the ladder, the most states that one
# chain gives, and as many chains at least.
DRAW_STEPS, LEVELS, MAX_STATES, MIN_CHAINS = 1500, 32, 16, 16
SAME = 1e-4  # difference of two energies that may be due to rounding
LEADING = 10  # coordinates that are recorded for diagnostics


# --------------------------------------------------------------------------------------------------
# Targets


class Target(Protocol):
    """A density between a base measure and a model, in unbounded coordinates u (B, N)."""

    def base(self, u: Tensor) -> tuple[Tensor, Tensor]:
        """Compute minus the log-density of the base measure and its gradient: (B,), (B, N)."""

    def energy(self, u: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the energy that multiplies t, and its gradient: (B,), (B, N)."""


class DensityTarget:
    """A `CapsuleDensity` in the coordinates u of its base measure.

    Parameters
    ----------
    density
        Its weights are read now, and must not change while chains run on this target.
    on : (B, J), optional
        Which experts are on. The energy is then E(x, a), and the target P(x | a).
    evidence
        Differentiable function of x, (B, I, K) → (B,), that is added to the energy: minus the
        log-likelihood of an observation. The target is then the posterior of x.
    reduced
        Whether to leave out the directions of u on which no expert depends, if there are any. With
        even mixing and a Gaussian base, z = Mᵀu depends on u in the range of M only, and in all
        other directions u is independent N(0, 1). Chains in the coordinates y = Qᵀu, with the
        columns of Q an orthonormal basis of this range, need not move in these directions, and are
        much faster if there are many of them. Q holds the principal directions of the base measure
        if the experts depend on no other, or comes from the QR decomposition M = QR. It cannot be
        combined with `evidence`.
    """

    def __init__(
        self,
        density: CapsuleDensity,
        on: Tensor | None = None,
        evidence: Callable[[Tensor], Tensor] | None = None,
        *,
        reduced: bool = False,
    ) -> None:
        if on is not None:
            _check_states(on, None, density.out_capsules)
        self.density, self.on, self.evidence = density, on, evidence
        self.strength = density.strength.detach()
        self._matrix: Tensor | None = None
        self._directions: Tensor | None = None  # Q
        if density.is_even and isinstance(density.base, GaussianBase):
            self._multiply_maps(density.base, reduced=reduced and evidence is None)

    def _multiply_maps(self, base: GaussianBase, *, reduced: bool) -> None:
        """Compute the matrix of z = Wᵀ Σ^½ u, in which both maps are linear."""
        weight = self.density.even_matrix().detach()  # (N, J·D)
        few = base.directions.shape[1] < min(weight.shape)
        if reduced and few and self.density.reads_components_alone():
            self._directions = base.directions  # Σ^½ V = V diag(√λ)
            self._matrix = base.std.unsqueeze(-1) * (base.directions.T @ weight)
            return
        self._matrix = base.times_root(weight.T).T.contiguous()
        if reduced and weight.shape[1] < weight.shape[0]:
            self._directions, self._matrix = torch.linalg.qr(self._matrix)

    def leading(self, coordinates: Tensor) -> Tensor:
        """Return the coordinates along the leading principal directions of a Gaussian base measure.

        If it has none, or chains move in the range of few experts, these are the first coordinates.

        Parameters
        ----------
        coordinates : (B, N)
            In which chains move.

        Returns
        -------
        (B, C)
            C is at most `LEADING`.
        """
        base = self.density.base
        if self._directions is None and isinstance(base, GaussianBase) and len(base.std):
            return coordinates @ base.directions[:, :LEADING]
        return coordinates[:, :LEADING].clone()

    @property
    def size(self) -> int:
        """Number N of coordinates in which chains move."""
        if self._directions is not None:
            return self._directions.shape[1]
        return self.density.in_capsules * self.density.in_dim

    @property
    def is_capturable(self) -> bool:
        """Whether steps on this target can be captured in a CUDA graph."""
        return self.evidence is None and self.density.is_capturable

    def coordinates(self, u: Tensor) -> Tensor:
        """Return the coordinates in which chains move: y = Qᵀu, or u itself if none are left out.

        Parameters
        ----------
        u : (B, I·K)

        Returns
        -------
        (B, N)
        """
        return u if self._directions is None else u @ self._directions

    def positions(self, coordinates: Tensor, noise: Tensor) -> Tensor:
        """Return u at coordinates (B, N), with the other directions from noise (B, I·K)."""
        if self._directions is None:
            return coordinates
        return noise + (coordinates - noise @ self._directions) @ self._directions.T

    def at(self, inverse_temperature: Tensor, on: Tensor | None = None) -> DensityTarget:
        """Return the target P_t, or P_t(x | a) of given states: a density with strengths t α_j.

        Parameters
        ----------
        inverse_temperature : (B,)
            t of each chain.
        on : (B, J), optional
            a, the experts that are on.
        """
        checks.require_tensor("inverse_temperature", inverse_temperature)
        remedy = "give a number for each chain"
        checks.require_shape("inverse_temperature", inverse_temperature, "B", (None,), remedy)
        if on is not None:
            _check_states(on, len(inverse_temperature), self.density.out_capsules)
        target: DensityTarget = copy.copy(self)
        target.on, evidence = on, self.evidence
        target.strength = inverse_temperature.unsqueeze(-1) * self.strength
        if evidence is not None:
            target.evidence = lambda x: inverse_temperature * evidence(x)
        return target

    def base(self, u: Tensor) -> tuple[Tensor, Tensor]:
        """Compute minus the log-density of the base measure and its gradient: (B,), (B, N)."""
        return self.density.base.potential(u)

    def energy(self, u: Tensor) -> tuple[Tensor, Tensor]:
        """Compute F, or E for given states, and its gradient in u: (B,), (B, N)."""
        density, base = self.density, self.density.base
        self._check_count(len(u))
        if self._matrix is None:
            x = base.from_white(u)
            value, gradient = density._free_energy_and_gradient(x, self.on, self.strength)
            gradient = base.pull_back(u, gradient)
        else:
            value, gradient = energy_and_gradient(self._experts(u), self.strength, self.on)
            gradient = gradient.flatten(1) @ self._matrix.T
        if self.evidence is None:
            return value, gradient
        with torch.enable_grad():
            x = base.from_white(u.detach()).requires_grad_()
            observed = self.evidence(x)
            (slope,) = torch.autograd.grad(observed.sum(), x)
        return value + observed.detach(), gradient + base.pull_back(u, slope)

    def on_probability(self, u: Tensor) -> Tensor:
        """Compute P(a_j = 1 | u): (B, N) → (B, J)."""
        self._check_count(len(u))
        return F._firing_probability(self._experts(u), self.strength)

    def sample_base(self, count: int, generator: torch.Generator | None = None) -> Tensor:
        """Draw from the base measure, in the coordinates of `energy`: (count, N)."""
        return self.coordinates(self.sample_positions(count, generator))

    def sample_positions(self, count: int, generator: torch.Generator | None = None) -> Tensor:
        """Draw u from the base measure: (count, I·K)."""
        weight = self.density.weight
        shape = (count, self.density.in_capsules * self.density.in_dim)
        noise = torch.randn(shape, generator=generator, device=weight.device, dtype=weight.dtype)
        return self.density.base.from_noise(noise)

    def _check_count(self, count: int) -> None:
        """Raise ValueError if states or temperatures are those of another number of chains."""
        given = [("on", self.on)] if self.on is not None else []
        given += [("inverse_temperature", self.strength)] if self.strength.ndim > 1 else []
        for name, tensor in given:
            if len(tensor) != count:
                raise ValueError(
                    f"there are {count} chains, but {name} of their target was given for "
                    f"{len(tensor)}; give it for each chain"
                )

    def _experts(self, u: Tensor) -> Tensor:
        density = self.density
        if self._matrix is None:
            return density._preactivation(density.base.from_white(u), density.weight)
        z = (u @ self._matrix).view(-1, density.out_capsules, density.out_dim)
        return F.forward_side(z, density.linear_dims, density.origin)


# --------------------------------------------------------------------------------------------------
# One step


@dataclass(frozen=True)
class Chains:
    """States of B chains, with what the next step needs of them.

    Attributes
    ----------
    position : (B, N)
        u.
    energy : (B,)
        F(u).
    gradient : (B, N)
        ∇F(u).
    inverse_temperature : (B,)
        t.
    """

    position: Tensor
    energy: Tensor
    gradient: Tensor
    inverse_temperature: Tensor

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Position, energy, gradient and inverse temperature."""
        return self.position, self.energy, self.gradient, self.inverse_temperature

    def at(self, inverse_temperature: Tensor) -> Chains:
        """Return the same states at other inverse temperatures (B,)."""
        return replace(self, inverse_temperature=inverse_temperature)

    def select(self, index: Tensor) -> Chains:
        """Return the chains with these numbers (B,)."""
        return Chains(*(each[index] for each in self.tensors))


def start_chains(target: Target, position: Tensor, inverse_temperature: Tensor) -> Chains:
    """Start chains at positions (B, N) and inverse temperatures (B,)."""
    if isinstance(target, DensityTarget):
        remedy = "give the coordinates in which chains on this target move"
        checks.require_shape("position", position, "BN", (None, target.size), remedy)
    if inverse_temperature.shape != position.shape[:1]:
        raise ValueError(
            f"inverse_temperature must hold a number for each of {len(position)} chains, "
            f"but has shape {tuple(inverse_temperature.shape)}"
        )
    # These tests read values, which is cheap on the CPU; elsewhere, they are left out.
    checks.check_nonnegative_on_cpu(inverse_temperature, "inverse_temperature")
    checks.check_finite_on_cpu(position, "position")
    energy, gradient = target.energy(position)
    return Chains(position, energy, gradient, inverse_temperature)


def check_start(chains: Chains, *, given: bool = False) -> None:
    """Raise ValueError if new chains have no log-density, an infinite one, or one of −∞.

    The last is an error only if the states were `given`: there, an expert that is on is silent,
    which can happen to draws of the base measure as well. The test reads values, and therefore
    waits for the device. A step of a sampler rejects states without a log-density and stays where
    it is, so that chains on weights that are not numbers would look valid.
    """
    energy = chains.energy
    bad = energy.isnan() | (energy == -math.inf)
    if bool(bad.any()):
        kind = "not a number (NaN)" if bool(energy.isnan().any()) else "−∞"
        raise ValueError(
            f"the energy of the chains is {kind} where they start; look for NaN or infinity in the "
            "weights, as after a training that diverged, and in the evidence if there is any"
        )
    if given and bool((energy == math.inf).any()):
        number = int((energy == math.inf).nonzero()[0])
        raise ValueError(
            f"start must have a finite log-density, but that of chain {number} is −∞: there, an "
            "expert that is on is silent, or the evidence is infinite; start at other states"
        )


def hmc_step(
    target: Target,
    chains: Chains,
    momentum: Tensor,
    uniform: Tensor,
    *,
    step_size: Tensor | float,
    leapfrog_steps: int,
) -> tuple[Chains, Tensor]:
    """Move chains by Hamiltonian Monte Carlo, which leaves P_t exactly invariant.

    A leapfrog trajectory of H(u, p) = U(u) + ½‖p‖², with U = −log P_t, is reversible and keeps
    volumes. It is accepted with probability min(1, e^(H before − H after)). One leapfrog step is
    Langevin dynamics with a Metropolis test (MALA). Chains that start where P_t is 0 follow the
    base measure until they leave that region, to which they never return.

    Parameters
    ----------
    target
        The density.
    chains
        States of B chains.
    momentum : (B, N)
        p, standard normal random numbers.
    uniform : (B,)
        Uniform random numbers from 0 to 1, which decide the Metropolis test.
    step_size : float, () or (B,)
        Length of a leapfrog step.
    leapfrog_steps
        Leapfrog steps of a trajectory.

    Returns
    -------
    chains
        The new states.
    accepted : (B,) of bool
    """
    checks.require_int("leapfrog_steps", leapfrog_steps, 1)
    t = chains.inverse_temperature
    step_size = torch.as_tensor(step_size, dtype=t.dtype)
    checks.check_positive_on_cpu(step_size, "step_size")
    shape = tuple(chains.position.shape)
    for name, tensor in (("energy", chains.energy), ("inverse_temperature", t)):
        if tuple(tensor.shape) != shape[:1]:
            raise ValueError(
                f"chains.{name} must hold a number for each of {shape[0]} chains, but has shape "
                f"{tuple(tensor.shape)}"
            )
    if step_size.numel() not in (1, shape[0]):
        raise ValueError(
            f"step_size must be one number or one for each of {shape[0]} chains, but has shape "
            f"{tuple(step_size.shape)}"
        )
    if tuple(momentum.shape) != shape or tuple(uniform.shape) != shape[:1]:
        raise ValueError(
            f"momentum must have shape {shape} and uniform {shape[:1]}, as the chains have, but "
            f"they have {tuple(momentum.shape)} and {tuple(uniform.shape)}"
        )
    scale, step = t.unsqueeze(-1), step_size.to(t).view(-1, 1)
    u, energy, gradient = chains.position, chains.energy, chains.gradient
    base, base_gradient = target.base(u)
    before = base + t * energy + momentum.square().sum(-1) / 2
    before_base = base + momentum.square().sum(-1) / 2
    p = momentum - step / 2 * (base_gradient + scale * gradient)
    for i in range(leapfrog_steps):
        u = u + step * p
        energy, gradient = target.energy(u)
        base, base_gradient = target.base(u)
        last = i == leapfrog_steps - 1
        p = p - (step / 2 if last else step) * (base_gradient + scale * gradient)
    after = base + t * energy + p.square().sum(-1) / 2
    after_base = base + p.square().sum(-1) / 2
    difference = before - after
    silent = chains.energy == math.inf  # P_t is 0, as where an expert that is on is silent
    difference = torch.where(silent & (energy == math.inf), before_base - after_base, difference)
    difference = torch.where(silent & (energy < math.inf), math.inf, difference)  # also at t = 0
    accepted = uniform.log() < difference  # false for NaN
    moved = accepted.unsqueeze(-1)
    return (
        Chains(
            torch.where(moved, u, chains.position),
            torch.where(accepted, energy, chains.energy),
            torch.where(moved, gradient, chains.gradient),
            t,
        ),
        accepted,
    )


def captured(
    move: Callable[..., tuple[Chains, Tensor]],
    target: Target,
    steps: int,
    generator: torch.Generator | None,
) -> Callable[..., tuple[Chains, Tensor]]:
    """Return a step of chains that is captured as a CUDA graph where that is possible and pays off.

    Parameters
    ----------
    move
        Maps the tensors of `Chains` and the step size () to the new chains and whether each of them
        was accepted. The next call overwrites these results.
    target
        The density on which the chains run.
    steps
        Number of calls.
    generator
        Source of the random numbers of `move`.
    """
    if not isinstance(target, DensityTarget) or not target.is_capturable:
        return move
    device = target.density.weight.device
    return Graphed(move, device, generator) if pays_off(steps, device) else move


def systematic(log_weights: Tensor, uniform: Tensor) -> Tensor:
    """Choose chains in proportion to their weights, by systematic resampling.

    On a line on which every chain has its share of the weight, evenly spaced points choose chains.

    Parameters
    ----------
    log_weights : (…, B)
    uniform : (…)
        Uniform random numbers from 0 to 1, the place of the first point.

    Returns
    -------
    index : (…, B)
        Numbers of the chains that go on, in rising order.
    """
    count = log_weights.shape[-1]
    ends = log_weights.softmax(-1).cumsum(-1)
    points = torch.arange(count, device=ends.device) + uniform.to(ends).unsqueeze(-1)
    return torch.searchsorted(ends, points / count).clamp(max=count - 1)


class ImportanceWeights:
    """Weights of chains while t changes, with resampling (sequential Monte Carlo).

    Chains that are moved from t to t + Δt are weighted by e^(−Δt F), so that weighted chains
    represent P_t also where chains do not cross from one mode to another. If a few chains have most
    of the weight, the chains that go on are drawn in proportion to their weights, and all have the
    mean weight after that. The mean weight is an unbiased estimate of Z_t/Z_0.

    P. Del Moral, A. Doucet, A. Jasra, "Sequential Monte Carlo samplers", 2006.

    Parameters
    ----------
    chains
        The chains, whose weights are 1.
    generator
        Source of random numbers.

    Attributes
    ----------
    log_weights : (B,)
        Logarithms of the weights, float64.
    origins : (B,)
        The first chain from which each chain descends.
    """

    def __init__(self, chains: Chains, generator: torch.Generator | None) -> None:
        energy = chains.energy
        self.generator = generator
        self.log_weights = torch.zeros_like(energy, dtype=torch.float64)
        self.origins = self._numbers = torch.arange(len(energy), device=energy.device)
        self._resampled = self.log_weights.new_zeros(())  # how often

    def update(self, log_ratio: Tensor, chains: Chains) -> Chains:
        """Multiply the weights by e^log_ratio (B,), and resample if fewer than half are effective.

        Returns
        -------
        chains
            Those that go on.
        """
        self.log_weights += log_ratio.double()
        share = self.log_weights.softmax(0)
        return self._resample(chains, len(share) * share.square().sum() > 2)

    def resample(self, chains: Chains) -> Chains:
        """Resample, so that all chains have the same weight: → the chains that go on."""
        return self._resample(chains, torch.ones_like(self.origins[0], dtype=torch.bool))

    def _resample(self, chains: Chains, needed: Tensor) -> Chains:
        """Resample if `needed` () is true; it is not read on the host."""
        count = len(self.log_weights)
        uniform = torch.rand(
            (), generator=self.generator, device=self.origins.device, dtype=torch.float64
        )
        index = torch.where(needed, systematic(self.log_weights, uniform), self._numbers)
        mean = torch.logsumexp(self.log_weights, 0) - math.log(count)
        self.log_weights = torch.where(needed, mean, self.log_weights)
        self.origins = self.origins[index]
        self._resampled += needed
        return chains.select(index)

    def effective_sample_size(self) -> float:
        """Return (Σ w)²/Σ w², with w the weight of all descendants of a first chain."""
        return 1 / self._by_origin().square().sum().item()

    def log_mean(self) -> tuple[float, float]:
        """Return the logarithm of the mean weight, and its standard error.

        The variance is that of A. Lee and N. Whiteley, "Variance estimation in the particle
        filter", 2018. Without resampling, it is that of the mean of independent weights.
        """
        count = len(self.log_weights)
        value = torch.logsumexp(self.log_weights, 0) - math.log(count)
        factor = (count / (count - 1)) ** (self._resampled.item() + 1)
        variance = 1 - factor * (1 - self._by_origin().square().sum().item())
        return value.item(), math.sqrt(max(variance, 0.0))

    def _by_origin(self) -> Tensor:
        """Return the share of the descendants of each first chain in the weight: (B,)."""
        share = self.log_weights.softmax(0)
        return torch.zeros_like(share).index_add_(0, self.origins, share)


def swap_replicas(
    chains: Chains, ladder: Tensor, uniform: Tensor, *, odd: bool
) -> tuple[Chains, Tensor]:
    """Exchange states between neighbouring temperatures of a ladder (parallel tempering).

    Replicas at t_l and t_(l+1) are exchanged with probability
    min(1, e^((t_l − t_(l+1)) (F_l − F_(l+1)))). Called with `odd` false and true in turn, states
    travel along the ladder instead of diffusing (Syed et al. 2022).

    Parameters
    ----------
    chains
        L·C chains: for every level of the ladder, C chains.
    ladder : (L,)
        Inverse temperatures.
    uniform : (L − 1, C)
        Uniform random numbers from 0 to 1.
    odd
        Whether the pairs are (1, 2), (3, 4), … instead of (0, 1), (2, 3), ….

    Returns
    -------
    chains
        With the states exchanged.
    swapped : (L − 1, C) of bool
        Where pair (l, l + 1) was exchanged.
    """
    levels, count = len(ladder), len(chains.energy) // len(ladder)
    if len(chains.energy) != levels * count or tuple(uniform.shape) != (levels - 1, count):
        raise ValueError(
            f"a ladder of {levels} levels needs as many chains at each of them, and uniform of "
            f"shape (L − 1, C) = ({levels - 1}, {count}), but there are {len(chains.energy)} "
            f"chains, and uniform has shape {tuple(uniform.shape)}"
        )
    checks.check_falling_on_cpu(ladder, "ladder")
    energy = chains.energy.view(levels, count)
    ratio = (ladder[:-1] - ladder[1:]).unsqueeze(-1) * (energy[:-1] - energy[1:])
    in_turn = (torch.arange(levels - 1, device=ladder.device) % 2 == int(odd)).unsqueeze(-1)
    swapped = (uniform.log() < ratio) & in_turn
    source = torch.arange(levels, device=ladder.device).unsqueeze(-1).repeat(1, count)
    source[:-1] += swapped.long()
    source[1:] -= swapped.long()
    index = (source * count + torch.arange(count, device=ladder.device)).flatten()
    return (
        Chains(
            chains.position[index],
            chains.energy[index],
            chains.gradient[index],
            chains.inverse_temperature,
        ),
        swapped,
    )


def tempering_ladder(levels: int) -> tuple[float, ...]:
    """Return inverse temperatures (1 − l/(levels − 1))^1.5 of the levels l, from 1 to 0.

    With this power, replicas of a density that was learned from images are exchanged about as often
    between any two neighbouring levels, except for the lowest ones, between which it is easy.
    """
    checks.require_int("levels", levels, 2)
    return tuple((1 - level / (levels - 1)) ** 1.5 for level in range(levels))


class StepSize:
    """A step size that is adapted towards a mean acceptance, and then frozen.

    Parameters
    ----------
    value : ()
        Initial step size.
    target_acceptance
        Acceptance to reach.
    """

    def __init__(self, value: Tensor, target_acceptance: float = TARGET_ACCEPTANCE) -> None:
        self.value, self.target_acceptance = value.clone(), target_acceptance
        self.frozen = False

    def update(self, acceptance: Tensor) -> None:
        """Grow after more acceptance () than wanted, shrink after less."""
        if not self.frozen:
            error = acceptance.to(self.value) - self.target_acceptance
            self.value.mul_(torch.exp(ADAPTATION_RATE * error))


# --------------------------------------------------------------------------------------------------
# Sampling


@dataclass(frozen=True)
class Samples:
    """Result of `sample`.

    Attributes
    ----------
    capsules : (B, I, K)
        Final states of the chains, in the coordinates x of the density.
    free_energy : (T, B)
        Free energy after each step at t = 1.
    acceptance
        Share of accepted proposals at t = 1.
    step_size
        Frozen step size.
    swap_rates : tuple of float
        With a ladder: the share of accepted exchanges of each pair of neighbouring levels.
    leading : (T, B, C)
        At most ten of the coordinates in which the chains move, after each step at t = 1; see
        `DensityTarget.leading`.
    strip : tuple of (B, I, K)
        States on the way, if `keep_every` was given: the first is the start.
    """

    capsules: Tensor
    free_energy: Tensor
    acceptance: float
    step_size: float
    swap_rates: tuple[float, ...]
    leading: Tensor
    strip: tuple[Tensor, ...] = field(default=(), repr=False)

    @property
    def effective_sample_size(self) -> float:
        """Effective sample size of the free energy at t = 1; NaN with fewer than 4 steps.

        It does not tell whether chains cross between modes whose free energies are alike, see
        `leading_rhat`.
        """
        return effective_sample_size(self.free_energy)

    @property
    def split_rhat(self) -> float:
        """Split-R̂ of the free energy at t = 1; NaN with fewer than 4 steps.

        It does not tell whether chains cross between modes whose free energies are alike, see
        `leading_rhat`.
        """
        return split_rhat(self.free_energy)

    @property
    def leading_rhat(self) -> float:
        """Largest split-R̂ of the leading coordinates at t = 1; NaN with fewer than 4 steps.

        Chains that stay in different modes have different coordinates, even if their free energies
        are alike. Coordinates that are constant, such as those of clamped capsules, are left out.
        """
        found = map(split_rhat, self.leading.unbind(-1))
        return max((each for each in found if not math.isnan(each)), default=math.nan)

    @property
    def autocorrelation_time(self) -> float:
        """Integrated autocorrelation time of the free energy at t = 1, in steps.

        NaN with fewer than 4 steps.
        """
        return autocorrelation_time(self.free_energy)


@torch.no_grad()
def sample(
    density: CapsuleDensity,
    count: int,
    *,
    steps: int = 500,
    anneal: int = 1000,
    sampler: Sampler = "hmc",
    leapfrog_steps: int = 5,
    step_size: float | None = None,
    ladder: Sequence[float] | None = None,
    start: Tensor | None = None,
    on: Tensor | None = None,
    evidence: Callable[[Tensor], Tensor] | None = None,
    clamped: Tensor | None = None,
    temperature: float = 1.0,
    resample: bool = False,
    keep_every: int | None = None,
    generator: torch.Generator | None = None,
    report: Callable[[int, int], None] | None = None,
) -> Samples:
    """Draw from a density by Markov chains.

    Parameters
    ----------
    density
        The density.
    count
        Number of chains, each of which gives one draw.
    steps
        Steps at t = 1, with a frozen step size. They leave P exactly invariant.
    anneal
        Steps before these, in which t grows from 0 to 1 and the step size is adapted. If chains
        begin at `start`, all of them are at t = 1.
    sampler
        ``"hmc"``; ``"langevin"``, the same with one leapfrog step; or ``"gibbs"``, which draws
        which experts are on given x, and moves x given these states by HMC.
    leapfrog_steps
        Leapfrog steps of a trajectory.
    step_size
        Initial step size; by default 0.1.
    ladder
        Inverse temperatures for parallel tempering, falling from 1. Every chain is then accompanied
        by one chain at each lower level, with which it exchanges states.
    start : (count, I, K), optional
        Capsules at which the chains begin; by default they are drawn from the base measure.
    on : (J,) or (count, J), optional
        States of the experts, the same for all chains or for each: draw from P(x | a) instead of
        P(x).
    evidence
        Differentiable function of x, (count, I, K) → (count,): minus the log-likelihood of an
        observation, given x. Draw from the posterior of x. It is annealed together with the energy.
    clamped : (I,) of bool, optional
        Capsules that keep the values of `start`: draw the others given these.
    temperature
        Draw from P_(1/temperature) in place of P; above 1 is closer to the base measure.
    resample
        Weight the chains while they are annealed, and resample them (`ImportanceWeights`). The
        modes of P are then drawn as often as they are probable, up to the noise of `count` chains;
        otherwise as often as the annealing finds them. All chains must have the same target, so
        that `on` must be (J,), and `evidence` the same function of x for every chain.
    keep_every
        Keep the states of every so many steps in `Samples.strip`.
    generator
        Source of random numbers, on the device of the density.
    report
        Called with the number of finished steps and that of all steps.
    """
    checks.require_int("count", count, 1)
    checks.require_int("steps", steps, 1)
    checks.require_int("anneal", anneal, 0)
    checks.require_choice("sampler", sampler, SAMPLERS)
    checks.require_int("leapfrog_steps", leapfrog_steps, 1)
    checks.require_positive("temperature", temperature)
    if step_size is not None:
        checks.require_positive("step_size", step_size)
    if keep_every is not None:
        checks.require_int("keep_every", keep_every, 1)
    levels = _check_ladder(ladder)
    if resample and (len(levels) > 1 or start is not None or not anneal or count == 1):
        raise ValueError(
            "resample=True needs several chains that are annealed from the base measure: "
            "leave start and ladder out, with anneal of at least 1 and count of at least 2"
        )
    if resample and on is not None and getattr(on, "ndim", 1) > 1:
        raise ValueError(
            f"resample=True copies a chain in place of another, so that all need the same states: "
            f"on must have shape (J={density.out_capsules},), but has shape {tuple(on.shape)}; "
            "call sample for each row of it, or use resample=False"
        )
    if sampler == "langevin":
        leapfrog_steps = 1
    weight, total = density.weight, anneal + steps
    like: dict[str, Any] = {"device": weight.device, "dtype": weight.dtype}
    states = None
    if on is not None:
        checks.require_tensor("on", on)
        sizes = (count, density.out_capsules)[-max(1, on.ndim) :]
        checks.require_shape("on", on, "BJ"[-len(sizes) :], sizes, "say which experts are on")
        checks.check_states_on_cpu(on, "on")
        if sampler == "gibbs":
            raise ValueError("sampler='gibbs' draws the states itself; leave on=None, or use 'hmc'")
        states = on.to(weight).expand(count, -1).repeat(len(levels), 1)
    observed = None if evidence is None else _for_levels(_checked(evidence), count)
    target = DensityTarget(density, states, observed, reduced=clamped is None)
    noise = u = target.sample_positions(count, generator)
    if start is not None:
        density._check(start, ball=isinstance(density.base, BallBase), name="start")
        if len(start) != count:
            raise ValueError(f"start must hold {count} states, but holds {len(start)}")
        u = density.base.to_white(start)
    project = _projection(density, clamped, start)
    ladder_t = torch.tensor(levels, **like) / temperature
    # The first step uses the gradient of the start, which must not move clamped capsules either.
    held: Target = target if project is None else _Held(target, project)
    position = target.coordinates(u).repeat(len(levels), 1)
    chains = start_chains(held, position, ladder_t.repeat_interleave(count))
    check_start(chains, given=start is not None and clamped is None)
    if evidence is not None and states is None and bool((chains.energy == math.inf).all()):
        raise ValueError(
            "evidence is infinite wherever the chains start, so that none of them has a "
            "log-density; return finite numbers, or start at states that the observation allows"
        )
    if resample and evidence is not None:
        _check_shared(evidence, density.base.from_white(u))
    size = StepSize(torch.tensor(INITIAL_STEP_SIZE if step_size is None else step_size, **like))
    accepted_count, trace, leading = torch.zeros((), **like), [], []
    swaps, tries = torch.zeros(2, len(levels) - 1, **like)
    strip = [density.base.from_white(u)] if keep_every else []

    def capsules() -> Tensor:
        return density.base.from_white(target.positions(chains.position[:count], noise))

    move = captured(
        lambda *state: _move(
            target, Chains(*state[:-1]), sampler, state[-1], leapfrog_steps, project, generator
        ),
        target,
        total,
        generator,
    )
    weights = ImportanceWeights(chains, generator) if resample else None
    for step in range(total):
        if step < anneal:
            share = 1.0 if start is not None else (step + 1) / anneal
            chains = chains.at((ladder_t * share).repeat_interleave(count))
            if weights is not None:
                chains = weights.update(-ladder_t / anneal * chains.energy, chains)
        else:
            size.frozen = True
            if weights is not None and step == anneal:
                chains = weights.resample(chains)
        chains, accepted = move(*chains.tensors, size.value)
        size.update(accepted.to(**like).mean())
        if step >= anneal:
            accepted_count += accepted[:count].to(**like).mean()
            if len(levels) > 1:
                uniform = torch.rand(len(levels) - 1, count, generator=generator, **like)
                chains, swapped = swap_replicas(chains, ladder_t, uniform, odd=step % 2 == 1)
                swaps += swapped.to(**like).mean(1)
                tries[step % 2 :: 2] += 1
            trace.append(chains.energy[:count].clone())
            leading.append(target.leading(chains.position[:count]))
        if keep_every and (step + 1) % keep_every == 0:
            strip.append(capsules())
        if report is not None:
            report(step + 1, total)
    return Samples(
        capsules(),
        torch.stack(trace),
        (accepted_count / steps).item(),
        size.value.item(),
        tuple((swaps / tries.clamp(min=1)).tolist()),
        torch.stack(leading),
        tuple(strip),
    )


def draw(
    density: CapsuleDensity,
    count: int,
    *,
    steps: int = DRAW_STEPS,
    levels: int = LEVELS,
    generator: torch.Generator | None = None,
    report: Callable[[int, int], None] | None = None,
) -> Samples:
    """Draw from a density by parallel tempering.

    Chains that are annealed from noise end in the modes that the annealing finds, whatever their
    probability. Here, chains at several temperatures, down to the base measure, exchange their
    states, so that they cross between the modes: with many steps, a mode is drawn as often as it is
    probable.

    A chain is annealed to its temperature in the first fifth of its steps. It forgets how it began
    in the next two fifths, and gives up to sixteen states in the last two, at equal distances.
    States of the same chain share the directions of x on which no expert depends.

    Parameters
    ----------
    density
        The density.
    count
        Number of draws.
    steps
        Steps of a chain, rounded down to a multiple of the distance between two of its draws.
    levels
        Number of temperatures, see `tempering_ladder`. If `Samples.swap_rates` are below about 0.2,
        there are too few of them.
    generator, report
        See `sample`.

    Returns
    -------
    Samples
        `Samples.capsules` holds the draws, those of one time after those of another. The other
        attributes are those of the chains.
    """
    checks.require_int("count", count, 1)
    chains = min(count, max(MIN_CHAINS, -(-count // MAX_STATES)))
    states = -(-count // chains)
    checks.require_int("steps", steps, max(5, states))
    keep_every = steps if states == 1 else max(1, 2 * steps // (5 * states))
    total = steps - steps % keep_every
    samples = sample(
        density,
        chains,
        steps=total - total // 5,
        anneal=total // 5,
        ladder=tempering_ladder(levels),
        keep_every=keep_every,
        generator=generator,
        report=report,
    )
    return replace(samples, capsules=torch.cat(samples.strip[-states:])[:count], strip=())


def _move(
    target: DensityTarget,
    chains: Chains,
    sampler: Sampler,
    step_size: Tensor,
    leapfrog_steps: int,
    project: Callable[[Tensor], Tensor] | None,
    generator: torch.Generator | None,
) -> tuple[Chains, Tensor]:
    """Move all chains by one step of a sampler."""
    u = chains.position
    momentum = torch.randn(u.shape, generator=generator, device=u.device, dtype=u.dtype)
    uniform = torch.rand(len(u), generator=generator, device=u.device, dtype=u.dtype)
    moving: Target = target
    if project is not None:
        moving, momentum = _Held(target, project), project(momentum)
    options: dict[str, Any] = {"step_size": step_size, "leapfrog_steps": leapfrog_steps}
    if sampler != "gibbs":
        return hmc_step(moving, chains, momentum, uniform, **options)
    # P_t, and not only P, must stay invariant: its states have probabilities of their own.
    t = chains.inverse_temperature
    probability = target.at(t).on_probability(u)
    draws = torch.rand(probability.shape, generator=generator, device=u.device, dtype=u.dtype)
    given = target.at(t, (draws < probability).to(u))
    moving = given if project is None else _Held(given, project)
    start = start_chains(moving, u, torch.ones_like(t))
    conditional, accepted = hmc_step(moving, start, momentum, uniform, **options)
    return start_chains(target, conditional.position, t), accepted


class _Held:
    """A target on a subspace: gradients are projected onto its directions."""

    def __init__(self, target: DensityTarget, project: Callable[[Tensor], Tensor]) -> None:
        self.target, self.project = target, project

    def base(self, u: Tensor) -> tuple[Tensor, Tensor]:
        value, gradient = self.target.base(u)
        return value, self.project(gradient)

    def energy(self, u: Tensor) -> tuple[Tensor, Tensor]:
        value, gradient = self.target.energy(u)
        return value, self.project(gradient)


def _projection(
    density: CapsuleDensity, clamped: Tensor | None, start: Tensor | None
) -> Callable[[Tensor], Tensor] | None:
    """Return the projection of u (B, I·K) onto the directions that leave clamped capsules fixed.

    On this subspace, P(u) is proportional to the density of the other capsules given these.
    """
    if clamped is None:
        return None
    if start is None:
        raise ValueError("clamped needs start, which holds the values of the clamped capsules")
    checks.require_tensor("clamped", clamped)
    checks.require_shape(
        "clamped", clamped, "I", (density.in_capsules,), "say for each capsule whether it is fixed"
    )
    if clamped.dtype != torch.bool:
        raise TypeError(
            f"clamped must be a boolean mask, but its dtype is {clamped.dtype}; "
            "make one by a comparison, such as clamped > 0"
        )
    fixed = clamped.to(start.device).repeat_interleave(density.in_dim)
    base = density.base
    if not isinstance(base, GaussianBase) or not len(base.std):
        return lambda u: u * ~fixed
    # Capsules are linear in u: Σ^½ u. The directions in which none of the fixed ones changes are
    # orthogonal to the rows of Σ^½ that belong to them.
    identity = torch.eye(len(fixed), dtype=start.dtype, device=start.device)[fixed]
    rows = torch.linalg.qr(base.times_root(identity).T)[0]
    return lambda u: u - (u @ rows) @ rows.T


def _check_states(on: Tensor, count: int | None, experts: int) -> None:
    """Raise an error unless states of experts are (count, J)."""
    checks.require_tensor("on", on)
    remedy = "say for each chain which experts are on"
    checks.require_shape("on", on, "BJ", (count, experts), remedy)


def _for_levels(evidence: Callable[[Tensor], Tensor], count: int) -> Callable[[Tensor], Tensor]:
    """Apply the evidence of `count` chains to each level of a ladder: (L·count, I, K) → (L·count,).

    Every level has a chain for each observation.
    """
    return lambda x: torch.cat([evidence(level) for level in x.split(count)])


def _checked(evidence: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Return the evidence with a check of the shape of its results."""

    def checked(x: Tensor) -> Tensor:
        value = evidence(x)
        checks.require_tensor("the result of evidence", value)
        remedy = "return one number for each chain"
        checks.require_shape("the result of evidence", value, "B", (len(x),), remedy)
        if not value.requires_grad:
            raise ValueError(
                "evidence must be a differentiable function of x, but its result does not require "
                "a gradient; compute it from x by operations of PyTorch, outside torch.no_grad"
            )
        return value

    return checked


def _check_shared(evidence: Callable[[Tensor], Tensor], x: Tensor) -> None:
    """Raise ValueError if the evidence of a state (B, I, K) depends on which chain it is of."""
    value, moved = evidence(x), evidence(x.roll(1, 0)).roll(-1, 0)
    if not torch.allclose(value, moved, rtol=SAME, atol=SAME, equal_nan=True):
        raise ValueError(
            "resample=True copies a chain in place of another, so that all need the same "
            "observation, but evidence gives other numbers for the same states in another order; "
            "call sample for each observation, or use resample=False"
        )


def _check_ladder(ladder: Sequence[float] | None) -> tuple[float, ...]:
    if ladder is None:
        return (1.0,)
    try:
        levels = tuple(float(t) for t in ladder)
    except (TypeError, ValueError):
        raise TypeError(f"ladder must be a sequence of numbers, but is {ladder!r}") from None
    if len(levels) < 2 or levels[0] != 1 or levels[-1] < 0:
        raise ValueError(
            f"ladder must be two or more inverse temperatures from 1 down to at least 0, "
            f"but is {levels}"
        )
    if not all(high > low for high, low in itertools.pairwise(levels)):
        raise ValueError(f"ladder must fall from level to level, but is {levels}")
    return levels


# --------------------------------------------------------------------------------------------------
# Diagnostics of a scalar that was recorded along chains, such as the free energy


def autocorrelation(trace: Tensor) -> Tensor:
    """Compute the autocorrelation at every lag, averaged over chains: (T, B) → (T,)."""
    checks.require_tensor("trace", trace)
    checks.require_shape("trace", trace, "TB", (None, None), "give a row for each step")
    checks.require_int("the number of steps", len(trace), 1)
    covariance = _autocovariance(trace.double()).mean(1)
    return covariance / covariance[0]


def effective_sample_size(trace: Tensor) -> float:
    """Estimate of how many independent draws the chains are worth (Vehtari et al. 2021).

    The variance within chains is compared with that between chains, and autocorrelations are added
    until the sum of two consecutive ones is no longer positive (Geyer 1992).

    Parameters
    ----------
    trace : (T, B)
        A number for each step of each chain.

    Returns
    -------
    float
        NaN with fewer than 4 steps, or if the numbers do not vary.
    """
    split = _split(trace)
    if split is None:
        return float("nan")
    steps, chains = split.shape
    within, pooled = _variances(split)
    if pooled == 0:
        return float("nan")
    correlation = 1 - (within - _autocovariance(split).mean(1) * steps / (steps - 1)) / pooled
    time = _integrated(correlation).clamp(min=1 / torch.tensor(steps * chains).log10().item())
    return (steps * chains / time).item()


def autocorrelation_time(trace: Tensor) -> float:
    """Estimate the integrated autocorrelation time of a chain, 1 + 2 Σ_lag ρ_lag, in steps.

    A chain of T steps is worth T divided by this time independent draws of the modes that it
    visits. ρ is `autocorrelation`, with the sum cut off as in `effective_sample_size`, which also
    counts how far chains disagree. The estimate is too small if the chains are not many times
    longer than it.

    Parameters
    ----------
    trace : (T, B)
        A number for each step of each chain.

    Returns
    -------
    float
        NaN with fewer than 4 steps, or if the numbers do not vary.
    """
    correlation = autocorrelation(trace)
    return _integrated(correlation).item() if len(trace) >= 4 else float("nan")


def split_rhat(trace: Tensor) -> float:
    """Compute split-R̂: near 1 if all halves of all chains have the same distribution.

    Parameters
    ----------
    trace : (T, B)
        A number for each step of each chain.

    Returns
    -------
    float
        NaN with fewer than 4 steps, or if the numbers do not vary.
    """
    split = _split(trace)
    if split is None:
        return float("nan")
    within, pooled = _variances(split)
    return (pooled / within).sqrt().item() if within > 0 else float("nan")


def _integrated(correlation: Tensor) -> Tensor:
    """Compute 1 + 2 Σ ρ, up to where the sum of two consecutive ρ is not positive: (T,) → ()."""
    pairs = correlation[: len(correlation) // 2 * 2].view(-1, 2).sum(1)
    positive = torch.cumprod((pairs > 0).double(), 0)
    monotone = torch.cummin(pairs, 0).values * positive
    return 2 * monotone.sum() - 1


def _split(trace: Tensor) -> Tensor | None:
    """Cut every chain into two halves: (T, B) → (T/2, 2B), float64."""
    checks.require_tensor("trace", trace)
    checks.require_shape("trace", trace, "TB", (None, None), "give a row for each step")
    half = len(trace) // 2
    if half < 2:
        return None
    return torch.cat((trace[:half], trace[-half:]), dim=1).double()


def _variances(split: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean variance within chains, and the estimate pooled with that between them."""
    steps = len(split)
    within = split.var(0).mean()
    return within, (steps - 1) / steps * within + split.mean(0).var()


def _autocovariance(trace: Tensor) -> Tensor:
    """Compute Σ_s (x_s − x̄)(x_(s+lag) − x̄)/T for every lag: (T, B) → (T, B)."""
    steps = len(trace)
    centred = trace - trace.mean(0)
    spectrum = torch.fft.rfft(centred, n=2 * steps, dim=0)
    covariance: Tensor = torch.fft.irfft(spectrum.abs().square(), n=2 * steps, dim=0)
    return covariance[:steps] / steps
