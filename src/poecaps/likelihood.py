"""Likelihoods: the partition function Z of a density, by annealed importance sampling.

References
----------
R. Neal, "Annealed importance sampling", 2001.
R. Grosse, Z. Ghahramani, R. Adams, "Sandwiching the marginal likelihood using bidirectional Monte
Carlo", 2015.
C. Bennett, "Efficient estimation of free energy differences from Monte Carlo data", 1976.
A. Gelman, X.-L. Meng, "Simulating normalizing constants: from importance sampling to bridge
sampling to path sampling", 1998.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from poecaps import _checks as checks
from poecaps.energy import BallBase, CapsuleDensity
from poecaps.sampling import (
    INITIAL_STEP_SIZE,
    Chains,
    DensityTarget,
    ImportanceWeights,
    StepSize,
    Target,
    captured,
    check_start,
    hmc_step,
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
FEW_CHAINS = 16.0  # effective ones below which `poecaps likelihood` prints a warning
MAX_QUADRATURE_DIMS = 4
PILOT_CHAINS = 32  # chains that find the step size at each temperature
BISECTIONS = 60  # of an interval, until it is as short as the precision of float64


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
        Number of independent forward chains on which the estimate rests, see
        `poecaps.sampling.ImportanceWeights`.
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
    estimate of Z, so that its logarithm is at most log Z in expectation. In reverse, chains that
    start at draws of the model give an upper estimate. In both directions, chains are resampled if
    a few have most of the weight (`poecaps.sampling.ImportanceWeights`). Step sizes are chosen by a
    pilot run of other chains and then fixed.

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
        Draws of the model for the reverse direction; by default the ends of the forward chains,
        resampled by their weights.
    generator
        Source of random numbers, on the device of the density.
    report
        Called with the number of finished steps and that of all steps.

    Warns
    -----
    UserWarning
        If the two estimates differ by more than 10 nats, in either direction.
    """
    target = DensityTarget(density, reduced=True)
    if start is not None:
        density._check(start, ball=isinstance(density.base, BallBase), name="start")
        start = target.coordinates(density.base.to_white(start))
    return bracket_log_partition(
        target,
        chains=chains,
        steps=steps,
        leapfrog_steps=leapfrog_steps,
        start=start,
        generator=generator,
        report=report,
    )


@torch.no_grad()
def bracket_log_partition(
    target: AnnealedTarget,
    *,
    chains: int = 128,
    steps: int = 1000,
    leapfrog_steps: int = 5,
    start: Tensor | None = None,
    generator: torch.Generator | None = None,
    report: Callable[[int, int], None] | None = None,
) -> LogPartition:
    """Estimate log Z of any energy over a base measure, as `estimate_log_partition` does.

    Parameters
    ----------
    target
        The energy and its base measure.
    start : (chains, N), optional
        Draws of the model in the coordinates of the target.
    chains, steps, leapfrog_steps, generator, report
        See `estimate_log_partition`.
    """
    checks.require_int("chains", chains, 2)
    checks.require_int("steps", steps, 1)
    checks.require_int("leapfrog_steps", leapfrog_steps, 1)
    if start is not None and len(start) != chains:
        raise ValueError(f"start must hold {chains} states, but holds {len(start)}")
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
    if start is not None:
        remedy = "give draws in the coordinates of the target"
        checks.require_shape("start", start, "BN", (chains, u.shape[1]), remedy)
    _, _, sizes = _anneal(target, u, steps, step_sizes=None, **options)
    u = target.sample_base(chains, generator)
    ends, forward, _ = _anneal(target, u, steps, step_sizes=sizes, **options)
    (low, low_error), effective = forward.log_mean(), forward.effective_sample_size()
    if start is None:
        start = forward.resample(ends).position
    _, backward, _ = _anneal(target, start, steps, step_sizes=sizes, reverse=True, **options)
    high, high_error = backward.log_mean()
    result = LogPartition(low, -high, low_error, high_error, effective, chains, steps)
    if not abs(result.bracket) <= WIDE_BRACKET:
        warnings.warn(
            f"log Z is uncertain: the two estimates are {result.forward:.1f} and "
            f"{result.reverse:.1f}; use more than {steps} steps",
            stacklevel=2,
        )
    return result


def fit_log_partition(density: CapsuleDensity, result: LogPartition) -> None:
    """Store two estimates of log Z in a density; `density.log_partition` is their mean.

    Raises
    ------
    ValueError
        If an estimate is not a finite number.
    """
    if not (math.isfinite(result.forward) and math.isfinite(result.reverse)):
        raise ValueError(
            f"both estimates of log Z must be finite, but they are {result.forward} and "
            f"{result.reverse}; look for weights of the density that are not finite"
        )
    density.partition.copy_(density.partition.new_tensor([result.forward, result.reverse, 1.0]))


@torch.no_grad()
def exact_log_partition(density: CapsuleDensity, points: int = 64) -> float:
    """Compute log Z by quadrature, for at most 4 numbers.

    With nodes and weights of the base measure::

        Z = ∫ base(x) e^(−F(x)) dx ≈ Σ_q w_q e^(−F(x_q))

    The nodes are those of Gauss–Hermite quadrature for each number u of a Gaussian base, and of
    Gauss–Legendre quadrature for each capsule of one dimension in the ball. For a capsule of two::

        ∫ f(x) dx/π = ∫_0^1 ds ∫_0^(2π) dφ/2π f(√s (cos φ, sin φ))

    with Gauss–Legendre nodes s and evenly spaced angles φ.

    With one routing iteration, no linear coordinates and whole strengths, e^(−F) is a polynomial
    and the result is exact once `points` exceeds its degree. Otherwise, increase `points` until it
    no longer changes.

    Parameters
    ----------
    density
        The density, with I·K of at most 4, and K of at most 2 for base="ball".
    points
        Number of nodes for each number.

    Raises
    ------
    ValueError
        If there are too many numbers, or the result is not finite.
    """
    checks.require_int("points", points, 1)
    size, dim = density.in_capsules * density.in_dim, density.in_dim
    is_ball = isinstance(density.base, BallBase)
    if size > MAX_QUADRATURE_DIMS or (is_ball and dim > 2):
        raise ValueError(
            f"quadrature needs I·K of at most {MAX_QUADRATURE_DIMS}, and K of at most 2 with "
            f"base='ball', but I·K is {size} and K is {dim}; use estimate_log_partition"
        )
    nodes, log_weight = ball_nodes(dim, points) if is_ball else hermite_nodes(points)
    nodes, factors = nodes.to(density.weight), size // nodes.shape[1]
    base = torch.tensor([len(nodes) ** factor for factor in range(factors)])
    parts = []
    for numbers in torch.arange(len(nodes) ** factors).split(65536):
        digits = numbers.unsqueeze(1) // base % len(nodes)  # the node of each factor
        u = nodes[digits.to(nodes.device)].flatten(1)
        x = u.view(-1, density.in_capsules, dim) if is_ball else density.base.from_white(u)
        value = -density.free_energy(x).double().cpu() + log_weight[digits].sum(1)
        parts.append(torch.logsumexp(value, 0))
    result = torch.logsumexp(torch.stack(parts), 0).item()
    if not math.isfinite(result):
        raise ValueError(
            f"log Z must be finite, but is {result}; look for weights and strengths of the "
            "density that are not finite, as after a training that diverged"
        )
    return result


def hermite_nodes(points: int) -> tuple[Tensor, Tensor]:
    """Return nodes (Q, 1) and log-weights (Q,), float64, of the mean over N(0, 1)."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(points)
    log_weight = np.log(weights / math.sqrt(2 * math.pi))
    return torch.tensor(nodes).unsqueeze(1), torch.tensor(log_weight)


def ball_nodes(dim: int, points: int) -> tuple[Tensor, Tensor]:
    """Return nodes (Q, K) and log-weights (Q,), float64, of the mean over the unit ball, K ≤ 2."""
    nodes, weights = map(torch.tensor, np.polynomial.legendre.leggauss(points))
    log_weight = (weights / 2).log()
    if dim == 1:
        return nodes.unsqueeze(1), log_weight
    radius = ((1 + nodes) / 2).sqrt()
    angle = 2 * math.pi * (torch.arange(points, dtype=torch.float64) + 0.5) / points
    circle = torch.stack((angle.cos(), angle.sin()), dim=1)
    disc = radius.view(-1, 1, 1) * circle
    return disc.view(-1, 2), (log_weight - math.log(points)).repeat_interleave(points)


def thermodynamic_integral(t: Tensor, energy: Tensor) -> float:
    """Estimate log Z from chains at many inverse temperatures, by the trapezoidal rule.

    ::

        d log Z_t / dt = E_t[−F],       log Z = ∫_0^1 E_t[−F] dt

    with E_t the mean over P_t. One chain at each t suffices, because the integral is a mean over
    all of them. As F ≤ 0, the estimate is never negative.

    Parameters
    ----------
    t : (B,)
        Inverse temperatures of the chains, some of them 1. The least one stands for those below.
    energy : (B,)
        F of the chains.
    """
    order = t.argsort()
    t, slope = t[order].double(), -energy[order].double()
    below = t < 1
    zero, one = t.new_zeros(1), t.new_ones(1)
    nodes = torch.cat((zero, t[below], one))
    values = torch.cat((slope[:1], slope[below], slope[~below].mean().view(1)))
    return torch.trapezoid(values, nodes).item()


def bennett_ratio(lower: Tensor, upper: Tensor) -> Tensor:
    """Estimate c = log Z_u/Z_l of two densities from as many draws of both (Bennett 1976).

    With W = −log of the unnormalized density u relative to l, here Δt F, and σ(a) = 1/(1 + e^(−a)),
    c solves::

        Σ_lower σ(−W − c) = Σ_upper σ(W + c)

    An average of e^(−W) over draws of one density rests on those few that are typical of the other
    as well, and errs in one direction. The root, which is found by bisection, uses both equally.

    Parameters
    ----------
    lower, upper : (C, …)
        W of the draws of l, and of those of u.

    Returns
    -------
    (…)
        c, between the least and the largest −W.
    """
    lower, upper = lower.double(), upper.double()
    both = torch.cat((lower, upper))
    low, high = -both.amax(0), -both.amin(0)
    for _ in range(BISECTIONS):
        c = (low + high) / 2
        too_high = torch.sigmoid(upper + c).sum(0) > torch.sigmoid(-lower - c).sum(0)
        low, high = torch.where(too_high, low, c), torch.where(too_high, c, high)
    return (low + high) / 2


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
) -> tuple[Chains, ImportanceWeights, Tensor]:
    """Move chains along t, and weight them.

    Returns
    -------
    chains
        The ends of the chains.
    weights
        Of Z, or in reverse of 1/Z.
    step_sizes : (steps,)
        Step size at each t: those given, or adapted ones if None is given.
    """
    t = torch.linspace(0, 1, steps + 1, device=u.device, dtype=u.dtype)
    size = StepSize(u.new_tensor(INITIAL_STEP_SIZE))
    found = u.new_empty(steps) if step_sizes is None else step_sizes
    order = range(steps, 0, -1) if reverse else range(1, steps + 1)
    chains = start_chains(target, u, t[-1 if reverse else 0].expand(len(u)))
    check_start(chains, given=reverse)
    weights = ImportanceWeights(chains, generator)

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
        difference = t[index] - t[index - 1]
        if not reverse:  # the weight of a state does not depend on the step that follows it
            chains = weights.update(-difference * chains.energy, chains)
        if step_sizes is not None:
            size.value.copy_(step_sizes[index - 1])
        chains, accepted = move(*chains.at(t[index].expand(len(u))).tensors, size.value)
        if step_sizes is None:
            size.update(accepted.to(u).mean())
            found[index - 1] = size.value
        if reverse:
            chains = weights.update(difference * chains.energy, chains)
        tick()
    return chains, weights, found
