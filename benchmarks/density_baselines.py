"""Densities that `benchmarks.pixels` compares with poecaps: factor analysers and a Gaussian RBM."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import nn

from poecaps.code_density import kmeans, leading_eigenvectors
from poecaps.sampling import INITIAL_STEP_SIZE, StepSize, hmc_step, start_chains
from poecaps.training import TrainingError
from poecaps.training.optim import make_optimizer, set_learning_rate

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

    from poecaps.sampling import Target
    from poecaps.training import DensityStage

SMALLEST_NOISE = 1e-3  # of a factor analyser, for points with variances of about 1


# --------------------------------------------------------------------------------------------------
# Mixture of factor analysers


class FactorAnalysers:
    """A mixture of M factor analysers with R factors each, for points of S numbers.

    ::

        P(x) = Σ_m π_m N(x; μ_m, A_m A_mᵀ + diag ψ_m)

    Fitted by expectation maximization (Ghahramani and Hinton 1996), from the clusters of k-means
    and their principal components. `poecaps.code_density.GaussianMixtures` stops there; it has no
    noise ψ, so that its draws lie on planes and it has no density.

    Parameters
    ----------
    points : (N, S)
    analysers, factors
        M and R.
    iterations
        Of expectation maximization.
    generator
        Source of the initial cluster centres.

    Attributes
    ----------
    weights : (M,)
        π.
    means : (M, S)
    factors : (M, S, R)
    noise : (M, S)
        ψ.
    """

    def __init__(
        self,
        points: Tensor,
        analysers: int,
        factors: int,
        *,
        iterations: int,
        generator: torch.Generator | None = None,
    ) -> None:
        size = points.shape[1]
        self.weights = points.new_empty(analysers)
        self.means = points.new_empty(analysers, size)
        self.factors = points.new_empty(analysers, size, factors)
        self.noise = points.new_empty(analysers, size)
        nearest = kmeans(points, analysers, generator)
        share = nn.functional.one_hot(nearest, analysers).to(points)
        self.weights.copy_(share.mean(0))
        for m in range(analysers):
            self._start(m, points, share[:, m])
        self.history = []  # mean log-likelihood before each iteration
        for _ in range(iterations):
            joint = self._joint(points)
            total = torch.logsumexp(joint, 1)
            self.history.append(total.mean().item())
            share = (joint - total.unsqueeze(1)).exp()
            self.weights.copy_(share.mean(0))
            for m in range(analysers):
                self._maximize(m, points, share[:, m])

    def log_prob(self, points: Tensor) -> Tensor:
        """Compute log P(x): (B, S) → (B,)."""
        return torch.logsumexp(self._joint(points), 1)

    def posterior(self, points: Tensor) -> Tensor:
        """Compute P(m | x): (B, S) → (B, M)."""
        return torch.softmax(self._joint(points), 1)

    def sample_means(self, count: int, generator: torch.Generator) -> Tensor:
        """Draw an analyser and its factors, and return E[x] given these: (count, S)."""
        part = torch.multinomial(self.weights, count, replacement=True, generator=generator)
        shape = (count, self.factors.shape[2], 1)
        noise = torch.randn(shape, generator=generator, device=self.means.device)
        return self.means[part] + (self.factors[part] @ noise).squeeze(-1)

    def _joint(self, points: Tensor) -> Tensor:
        """Compute log π_m + log N(x; …) of every analyser: (B, S) → (B, M)."""
        each = [self._log_normal(m, points) for m in range(len(self.weights))]
        return torch.stack(each, 1) + self.weights.log()

    def _log_normal(self, m: int, points: Tensor) -> Tensor:
        """Compute log N(x; μ, A Aᵀ + diag ψ) by the matrix inversion lemma: (B, S) → (B,)."""
        scaled, root = self._posterior(m)
        centred = points - self.means[m]
        explained = torch.linalg.solve_triangular(root, (centred @ scaled).T, upper=False)
        square = (centred.square() / self.noise[m]).sum(1) - explained.square().sum(0)
        log_det = self.noise[m].log().sum() + 2 * root.diagonal().log().sum()
        return -(square + log_det + points.shape[1] * math.log(2 * math.pi)) / 2

    def _posterior(self, m: int) -> tuple[Tensor, Tensor]:
        """Return ψ⁻¹A (S, R), and L with L Lᵀ = 1 + Aᵀψ⁻¹A (R, R), the precision of the factors."""
        factors = self.factors[m]
        scaled = factors / self.noise[m].unsqueeze(1)
        identity = torch.eye(factors.shape[1], device=factors.device, dtype=factors.dtype)
        return scaled, torch.linalg.cholesky(identity + factors.T @ scaled)

    def _start(self, m: int, points: Tensor, share: Tensor) -> None:
        """Take the mean and the principal components of a cluster."""
        count = share.sum().clamp(min=1)
        self.means[m] = share @ points / count
        centred = (points - self.means[m]) * share.unsqueeze(1)
        covariance = centred.T @ centred / count
        values, vectors = leading_eigenvectors(
            covariance.double().unsqueeze(0), self.factors.shape[2]
        )
        variance = covariance.diagonal()
        rest = (variance.sum() - values.sum()) / max(1, len(variance) - values.shape[1])
        spread = (values[0] - rest).clamp(min=SMALLEST_NOISE).sqrt()
        self.factors[m] = (vectors[0] * spread).to(points)
        noise = variance - self.factors[m].square().sum(1)
        self.noise[m] = noise.clamp(min=SMALLEST_NOISE)

    def _maximize(self, m: int, points: Tensor, share: Tensor) -> None:
        """Maximize the expected log-likelihood in μ, and then in A and ψ."""
        count = share.sum().clamp(min=1)
        scaled, root = self._posterior(m)
        covariance = torch.cholesky_inverse(root)  # of the factors, given a point
        factors = (points - self.means[m]) @ scaled @ covariance  # their means
        self.means[m] = share @ (points - factors @ self.factors[m].T) / count
        centred = points - self.means[m]
        weighted = factors * share.unsqueeze(1)
        cross = centred.T @ weighted / count
        second = covariance * (share.sum() / count) + factors.T @ weighted / count
        self.factors[m] = torch.linalg.solve(second, cross.T).T
        noise = share @ centred.square() / count - (self.factors[m] * cross).sum(1)
        self.noise[m] = noise.clamp(min=SMALLEST_NOISE)


# --------------------------------------------------------------------------------------------------
# Gaussian RBM


class GaussianRBM(nn.Module):
    """A Gaussian–Bernoulli RBM over N numbers u, as an energy over the base measure N(0, 1).

    ::

        P(u) = N(u; 0, 1) e^(−F(u)) / Z
        F(u) = −a·u + ½ Σ_k (e^(ρ_k) − 1) u_k² − Σ_j log(1 + e^(w_j·u + b_j))

    Given the hidden units h, u is Gaussian with precision e^ρ and mean e^(−ρ) (a + Σ_j h_j w_j):
    bias and variance of the visible units are learned as usual. There are two hidden units for each
    number, which start as the two sides of it, w = ±scale.

    Parameters
    ----------
    size
        N.
    scale, bias
        Initial weight and bias of the hidden units.
    device
        As for any `torch.nn` layer.
    """

    def __init__(
        self, size: int, *, scale: float, bias: float, device: torch.device | None = None
    ) -> None:
        super().__init__()
        side = scale * torch.eye(size, device=device)
        self.weight = nn.Parameter(torch.cat((side, -side)))
        self.hidden = nn.Parameter(torch.full((2 * size,), bias, device=device))
        self.visible = nn.Parameter(torch.zeros(size, device=device))
        self.log_precision = nn.Parameter(torch.zeros(size, device=device))

    def free_energy(self, u: Tensor) -> Tensor:
        """Compute F(u): (B, N) → (B,)."""
        square = u.square() @ torch.expm1(self.log_precision) / 2
        units = nn.functional.softplus(u @ self.weight.T + self.hidden).sum(1)
        return square - u @ self.visible - units

    def base(self, u: Tensor) -> tuple[Tensor, Tensor]:
        """Compute ½‖u‖² and its gradient: (B,), (B, N)."""
        return u.square().sum(1) / 2, u

    def hidden_probability(self, u: Tensor) -> Tensor:
        """Compute P(h = 1 | u): (B, N) → (B, 2N)."""
        return torch.sigmoid(u @ self.weight.T + self.hidden)

    def visible_mean(self, h: Tensor) -> Tensor:
        """Compute E[u | h] = e^(−ρ) (a + Σ_j h_j w_j): (B, 2N) → (B, N)."""
        return (-self.log_precision).exp() * (self.visible + h @ self.weight)

    @torch.no_grad()
    def energy(self, u: Tensor) -> tuple[Tensor, Tensor]:
        """Compute F and its gradient: (B,), (B, N)."""
        on = self.hidden_probability(u)
        gradient = torch.expm1(self.log_precision) * u - self.visible - on @ self.weight
        return self.free_energy(u), gradient

    def sample_base(self, count: int, generator: torch.Generator | None = None) -> Tensor:
        """Draw from N(0, 1): (count, N)."""
        shape = (count, len(self.visible))
        return torch.randn(shape, generator=generator, device=self.visible.device)


def fit_rbm(
    rbm: GaussianRBM,
    u: Tensor,
    *,
    schedule: Iterable[float],
    batch_size: int,
    options: DensityStage,
    generator: torch.Generator,
) -> None:
    """Learn by maximum likelihood, as `poecaps.training.fit_density` does with persistent chains.

    Parameters
    ----------
    rbm
        Trained in place; the result is a running average of its parameters.
    u : (N, S)
        Data.
    schedule
        The progress of the learning, from 0 to 1, at each of its steps.
    batch_size
        Points in a step.
    options
        Chains, sampler, optimizer and average. `strength_rate` is the factor of the learning rate
        of all parameters but the weights.
    generator
        Source of random numbers, on the device of the RBM.

    Raises
    ------
    TrainingError
        If a parameter is no longer finite.
    """
    parameters = list(rbm.parameters())
    factors = [1.0 if each is rbm.weight else options.strength_rate for each in parameters]
    optimizer = make_optimizer(options, parameters, factors)
    average = [each.detach().clone() for each in parameters]
    position = rbm.sample_base(options.chains, generator)
    size = StepSize(u.new_tensor(INITIAL_STEP_SIZE), options.target_acceptance)
    for step, progress in enumerate(schedule):
        set_learning_rate(optimizer, options.learning_rate_at(progress))
        position = move(rbm, position, 1.0, size, options.leapfrog_steps, generator)
        chosen = torch.randint(len(u), (batch_size,), generator=generator, device=u.device)
        optimizer.zero_grad()
        (rbm.free_energy(u[chosen]).mean() - rbm.free_energy(position).mean()).backward()
        optimizer.step()
        decay = min(options.average, (1 + step) / (10 + step))
        for mean, parameter in zip(average, parameters, strict=True):
            mean.lerp_(parameter.detach(), 1 - decay)
    with torch.no_grad():
        for mean, parameter in zip(average, parameters, strict=True):
            parameter.copy_(mean)
    if not all(parameter.isfinite().all() for parameter in parameters):
        raise TrainingError("the RBM diverged; lower the learning rate")


def even_schedule(steps: int) -> Iterable[float]:
    """Return the progress at each of so many steps."""
    return (step / steps for step in range(steps))


@torch.no_grad()
def move(
    target: Target,
    position: Tensor,
    t: float,
    size: StepSize,
    leapfrog_steps: int,
    generator: torch.Generator,
) -> Tensor:
    """Move chains at (B, N) by one step of Hamiltonian Monte Carlo, and adapt the step size."""
    device = position.device
    chains, accepted = hmc_step(
        target,
        start_chains(target, position, position.new_full((len(position),), t)),
        torch.randn(position.shape, generator=generator, device=device),
        torch.rand(len(position), generator=generator, device=device),
        step_size=size.value,
        leapfrog_steps=leapfrog_steps,
    )
    size.update(accepted.float().mean())
    return chains.position
