"""Likelihoods: the partition function Z of a density, by annealed importance sampling.

References
----------
R. Neal, "Annealed importance sampling", 2001.
R. Grosse, Z. Ghahramani, R. Adams, "Sandwiching the marginal likelihood using bidirectional Monte
Carlo", 2015.
"""

from __future__ import annotations

import itertools
import math
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from poecaps import _checks as checks
from poecaps.energy import CapsuleDensity, GaussianBase
from poecaps.sampling import (
    INITIAL_STEP_SIZE,
    Chains,
    DensityTarget,
    StepSize,
    Target,
    captured,
    hmc_step,
    sample,
    start_chains,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

__all__ = [
    "AnnealedTarget",
    "LogPartition",
    "bracket_log_partition",
    "estimate_log_partition",
    "exact_log_partition",
    "fit_log_partition",
]

WIDE_BRACKET = 10.0  # nats between the two estimates above which a warning is given
MAX_QUADRATURE_DIMS = 4
PILOT_CHAINS = 32  # chains that find the step size at each temperature


class AnnealedTarget(Target, Protocol):
    """A target whose base measure can be sampled, see `poecaps.sampling.Target`."""

    def sample_base(self, count: int, generator: torch.Generator | None = None) -> Tensor:
        """Draw from the base measure: (count, N)."""


@dataclass(frozen=True)
class LogPartition:
    """Two estimates of log Z, the logarithm of the mean of e^(−F) over the base measure.

    Attributes
    ----------
    forward
        From the base measure to the model; its expectation is at most log Z.
    reverse
        From draws of the model to the base measure; its expectation is at least log Z if the draws
        are exact.
    forward_error, reverse_error
        Standard errors of the two.
    effective_sample_size
        (Σ w)²/Σ w² of the forward weights; few if the estimate rests on a few chains.
    chains, steps
        Number of chains and of temperatures.
    """

    forward: float
    reverse: float
    forward_error: float
    reverse_error: float
    effective_sample_size: float
    chains: int
    steps: int

    @property
    def bracket(self) -> float:
        """Difference of the two estimates, in nats."""
        return self.reverse - self.forward


@torch.no_grad()
def estimate_log_partition(
    density: CapsuleDensity,
    *,
    chains: int = 128,
    steps: int = 1000,
    leapfrog_steps: int = 5,
    start: Tensor | None = None,
    generator: torch.Generator | None = None,
    report: Callable[[int, int], None] | None = None,
) -> LogPartition:
    """Estimate log Z by annealed importance sampling, in both directions.

    Chains move from the base measure (t = 0) to the model (t = 1) by one step of Hamiltonian Monte
    Carlo at each of `steps` values of t, and log w = −Σ Δt F. The mean of w is an unbiased
    estimate of Z, so that of log w is at most log Z in expectation. In reverse, chains that start
    at draws of the model give an upper estimate. Step sizes are chosen by a pilot run of other
    chains and then fixed.

    Parameters
    ----------
    density
        The density.
    chains
        Number of chains in each direction.
    steps
        Number of temperatures.
    leapfrog_steps
        Leapfrog steps of a trajectory.
    start : (chains, I, K), optional
        Draws of the model for the reverse direction; by default those of `poecaps.sampling.sample`
        with `steps` steps of annealing and as many at t = 1.
    generator
        Source of random numbers, on the device of the density.
    report
        Called with the number of finished steps and that of all steps.

    Warns
    -----
    UserWarning
        If the two estimates differ by more than 10 nats, in either direction.
    """
    checks.require_int("chains", chains, 2)
    checks.require_int("steps", steps, 1)
    if start is not None:
        density._check(start, ball=False, name="start")
        if len(start) != chains:
            raise ValueError(f"start must hold {chains} states, but holds {len(start)}")
    stages = 3 if start is not None else 5
    done = 0

    def tick(*_: int) -> None:
        nonlocal done
        done += 1
        if report is not None:
            report(done, stages * steps)

    target = DensityTarget(density, reduced=True)

    def draw(count: int) -> Tensor:
        capsules = start
        if capsules is None:
            capsules = sample(
                density,
                count,
                steps=steps,
                anneal=steps,
                leapfrog_steps=leapfrog_steps,
                generator=generator,
                report=tick,
            ).capsules
        return target.coordinates(density.base.to_white(capsules))

    return bracket_log_partition(
        target,
        draw,
        chains=chains,
        steps=steps,
        leapfrog_steps=leapfrog_steps,
        generator=generator,
        report=tick,
    )


@torch.no_grad()
def bracket_log_partition(
    target: AnnealedTarget,
    draw: Callable[[int], Tensor],
    *,
    chains: int = 128,
    steps: int = 1000,
    leapfrog_steps: int = 5,
    generator: torch.Generator | None = None,
    report: Callable[[int, int], None] | None = None,
) -> LogPartition:
    """Estimate log Z of any energy over a base measure, as `estimate_log_partition` does.

    Parameters
    ----------
    target
        The energy and its base measure.
    draw
        Returns a number of draws of the model in the coordinates of the target, (count, N).
    chains, steps, leapfrog_steps, generator, report
        See `estimate_log_partition`.
    """
    done = 0

    def tick() -> None:
        nonlocal done
        done += 1
        if report is not None:
            report(done, 3 * steps)

    options: dict[str, Any] = {
        "leapfrog_steps": leapfrog_steps,
        "generator": generator,
        "tick": tick,
    }
    u = target.sample_base(PILOT_CHAINS, generator)
    sizes = _anneal(target, u, steps, step_sizes=None, **options)[1]
    u = target.sample_base(chains, generator)
    forward = _anneal(target, u, steps, step_sizes=sizes, **options)[0]
    backward = _anneal(target, draw(chains), steps, step_sizes=sizes, reverse=True, **options)[0]
    low, low_error = _log_mean_exp(forward)
    high, high_error = _log_mean_exp(backward)
    weights = (forward - forward.max()).double().exp()
    result = LogPartition(
        low,
        -high,
        low_error,
        high_error,
        (weights.sum().square() / weights.square().sum()).item(),
        chains,
        steps,
    )
    if not abs(result.bracket) <= WIDE_BRACKET:
        warnings.warn(
            f"log Z is uncertain: the two estimates are {result.forward:.1f} and "
            f"{result.reverse:.1f}; use more than {steps} steps",
            stacklevel=2,
        )
    return result


def fit_log_partition(density: CapsuleDensity, result: LogPartition) -> None:
    """Store two estimates of log Z in a density; `density.log_partition` is their mean."""
    density.partition.copy_(density.partition.new_tensor([result.forward, result.reverse, 1.0]))


@torch.no_grad()
def exact_log_partition(density: CapsuleDensity, points: int = 64) -> float:
    """Compute log Z by Gauss–Hermite quadrature, for a Gaussian base of at most 4 numbers.

    With one routing iteration, no linear coordinates and whole strengths, e^(−F) is a polynomial
    and the result is exact once 2·points exceeds its degree. Otherwise, increase `points` until it
    no longer changes.
    """
    size = density.in_capsules * density.in_dim
    if not isinstance(density.base, GaussianBase) or size > MAX_QUADRATURE_DIMS:
        raise ValueError(
            f"quadrature needs base='gaussian' and I·K of at most {MAX_QUADRATURE_DIMS}, "
            f"but I·K is {size}; use estimate_log_partition"
        )
    nodes, weights = np.polynomial.hermite_e.hermegauss(points)
    grid = torch.tensor(list(itertools.product(nodes, repeat=size))).to(density.weight)
    log_weights = np.log(weights / math.sqrt(2 * math.pi))
    log_weight = torch.tensor([sum(each) for each in itertools.product(log_weights, repeat=size)])
    values = [-density.free_energy(density.base.from_white(part)) for part in grid.split(65536)]
    return torch.logsumexp(torch.cat(values).double().cpu() + log_weight, 0).item()


def _anneal(
    target: Target,
    u: Tensor,
    steps: int,
    *,
    step_sizes: Tensor | None,
    leapfrog_steps: int,
    generator: torch.Generator | None,
    tick: Callable[[], None],
    reverse: bool = False,
) -> tuple[Tensor, Tensor]:
    """Move chains along t, and add up their log-weights.

    Returns
    -------
    log_weights : (B,)
        Of Z, or in reverse of 1/Z.
    step_sizes : (steps,)
        Step size at each t: those given, or adapted ones if None is given.
    """
    t = torch.linspace(0, 1, steps + 1, device=u.device, dtype=u.dtype)
    size = StepSize(u.new_tensor(INITIAL_STEP_SIZE))
    found = u.new_empty(steps) if step_sizes is None else step_sizes
    order = range(steps, 0, -1) if reverse else range(1, steps + 1)
    chains = start_chains(target, u, t[-1 if reverse else 0].expand(len(u)))
    log_weights = torch.zeros(len(u), dtype=torch.float64, device=u.device)

    def step(*state: Tensor) -> tuple[Chains, Tensor]:
        momentum = torch.randn(u.shape, generator=generator, device=u.device, dtype=u.dtype)
        uniform = torch.rand(len(u), generator=generator, device=u.device, dtype=u.dtype)
        return hmc_step(
            target,
            Chains(*state[:-1]),
            momentum,
            uniform,
            step_size=state[-1],
            leapfrog_steps=leapfrog_steps,
        )

    move = captured(step, target, steps, generator)
    for index in order:
        if not reverse:  # the weight of a state does not depend on the step that follows it
            log_weights -= ((t[index] - t[index - 1]) * chains.energy).double()
        if step_sizes is not None:
            size.value.copy_(step_sizes[index - 1])
        chains, accepted = move(*chains.at(t[index].expand(len(u))).tensors, size.value)
        if step_sizes is None:
            size.update(accepted.to(u).mean())
            found[index - 1] = size.value
        if reverse:
            log_weights += ((t[index] - t[index - 1]) * chains.energy).double()
        tick()
    return log_weights, found


def _log_mean_exp(values: Tensor) -> tuple[float, float]:
    """Return the logarithm of the mean of e^values (B,), and its standard error."""
    highest = values.max()
    weights = (values - highest).exp()
    mean = weights.mean()
    error = weights.std() / mean / math.sqrt(len(values))
    return (highest + mean.log()).item(), error.item()
