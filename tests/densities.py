"""Tiny densities in float64 whose integrals are known by quadrature, and exact draws of them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from poecaps.energy import CapsuleDensity, GaussianBase
from poecaps.sampling import DensityTarget

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

# I, K, J and D, and options: even mixing and three iterations, both base measures.
ZOO: dict[str, tuple[tuple[int, int, int, int], dict[str, Any]]] = {
    "even": ((2, 1, 2, 2), {}),
    "even, linear": ((1, 2, 2, 3), {"linear_dims": 2}),
    "even, three capsules": ((3, 1, 2, 2), {"base_components": 2}),
    "routed over outputs": (
        (1, 2, 3, 2),
        {"iterations": 3, "sharpness": 3.0, "linear_dims": 1, "base_components": 1},
    ),
    "routed over inputs": (
        (2, 1, 2, 2),
        {"iterations": 3, "sharpness": 2.0, "normalize": "inputs", "agreement": "inner"},
    ),
    "ball": ((2, 1, 2, 2), {"base": "ball", "linear_dims": 1}),
    "ball, routed": ((1, 2, 3, 2), {"base": "ball", "iterations": 3, "sharpness": 3.0}),
}
REACH = 8.0  # of the quadrature, in the coordinates u of a Gaussian base measure
NODES = {1: 400, 2: 160, 3: 40}  # for each of this many numbers


def make_density(
    generator: torch.Generator, *sizes: int, std: float = 0.8, **options: Any
) -> CapsuleDensity:
    """Return a density in float64 with random weights, strengths, origins and covariance."""
    in_capsules, in_dim, out_capsules, out_dim = sizes
    density = CapsuleDensity(
        in_capsules, in_dim, out_capsules, out_dim, dtype=torch.float64, **options
    )
    density.reset_parameters(std=std, generator=generator)

    def normal(like: Tensor) -> Tensor:
        return torch.randn(like.shape, dtype=torch.float64, generator=generator)

    with torch.no_grad():
        if density.is_even:
            density.weight.div_(math.sqrt(in_capsules))
        density.log_strength.add_(0.3 * normal(density.log_strength) + 0.2)
        density.origin.add_(0.5 * normal(density.origin))
        if isinstance(density.base, GaussianBase) and len(density.base.std):
            density.base.directions.copy_(torch.linalg.qr(normal(density.base.directions))[0])
            density.base.std.mul_(torch.exp(0.3 * normal(density.base.std)))
            density.base.rest_std.fill_(0.8)
    return density


def from_zoo(name: str, generator: torch.Generator, **changes: Any) -> CapsuleDensity:
    sizes, options = ZOO[name]
    return make_density(generator, *sizes, **options | changes)


@dataclass(frozen=True)
class Known:
    """A density P_t, P(x | a), P(x | clamped capsules) or P(x | evidence) with known moments.

    With `clamped` (I,), those capsules have the values `fixed` (I, K).
    """

    density: CapsuleDensity
    t: float = 1.0
    on: Tensor | None = None
    clamped: Tensor | None = None
    fixed: Tensor | None = None
    evidence: Callable[[Tensor], Tensor] | None = None

    def energy(self, x: Tensor) -> Tensor:
        if self.on is None:
            energy = self.density.free_energy(x).detach()
        else:
            energy = self.density.energy(x, self.on.expand(len(x), -1)).detach()
        return energy if self.evidence is None else energy + self.evidence(x)

    def statistics(self, x: Tensor) -> Tensor:
        """Numbers, their products and the energy: (B, I, K) → (B, M)."""
        flat = x.flatten(1)
        if self.clamped is not None:
            flat = x[:, ~self.clamped].flatten(1)
        row, column = torch.triu_indices(flat.shape[1], flat.shape[1])
        energy = self.energy(x).unsqueeze(-1)
        return torch.cat((flat, flat[:, row] * flat[:, column], energy), dim=1)

    @cached_property
    def expectation(self) -> Tensor:
        """Mean of the statistics, by quadrature: (M,)."""
        points, log_weight = base_quadrature(self.density, self.clamped, self.fixed)
        weight = torch.softmax(log_weight - self.t * self.energy(points), 0)
        present = weight > 0  # energies may be infinite elsewhere
        mean: Tensor = weight[present] @ self.statistics(points[present])
        return mean

    def deviations(self, x: Tensor) -> Tensor:
        """Distances of independent draws from the mean, in standard errors: (B, I, K) → (M,)."""
        statistics = self.statistics(x)
        error = statistics.std(0) / math.sqrt(len(x))
        return (statistics.mean(0) - self.expectation) / error

    @torch.no_grad()
    def draws(self, count: int, generator: torch.Generator) -> Tensor:
        """Draw independently: (count, I, K), by rejection of points of a wider base measure."""
        base, target = self.density.base, DensityTarget(self.density)
        spread = 1.5 if isinstance(base, GaussianBase) else 1.0

        def log_ratio(u: Tensor) -> Tensor:
            """Density at spread · u relative to that of u: (B, N) → (B,)."""
            wide = spread * u
            energy = self.t * self.energy(base.from_white(wide))
            return base.potential(u)[0] - base.potential(wide)[0] - energy

        highest = log_ratio(target.sample_base(20_000, generator)).max()
        accepted: list[Tensor] = []
        while sum(map(len, accepted)) < count:
            u = target.sample_base(10_000, generator)
            ratio = log_ratio(u) - highest - 0.5
            assert ratio.max() < 0  # the bound holds
            uniform = torch.rand(len(u), dtype=torch.float64, generator=generator)
            accepted.append(spread * u[uniform.log() < ratio])
        return base.from_white(torch.cat(accepted)[:count])

    def assert_are_draws(self, x: Tensor) -> None:
        deviations = self.deviations(x)
        assert bool((deviations.abs() < 4).all()), deviations


def base_quadrature(
    density: CapsuleDensity, clamped: Tensor | None = None, fixed: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Points (Q, I, K), and log-weights (Q,) that sum e^… times a function to its integral over
    the base measure.
    """
    free = torch.arange(density.in_capsules)
    if clamped is not None:
        free = free[~clamped]
    size, dim = len(free) * density.in_dim, density.in_dim
    if isinstance(density.base, GaussianBase):
        # The nodes lie beside 0, where a routing coefficient may jump.
        reach = REACH * max(1.0, *density.base.std.tolist(), 0.0)
        step = 2 * reach / NODES[size]
        nodes = (torch.arange(NODES[size], dtype=torch.float64) + 0.5) * step - reach
        chosen = torch.cartesian_prod(*[nodes] * size).view(-1, len(free), dim)
        log_weight = torch.full((len(chosen),), size * math.log(step), dtype=torch.float64)
    else:
        chosen, log_weight = ball_nodes(dim, NODES[size])
        assert dim == 1 or len(free) == 1
        if dim == 1:
            chosen = torch.cartesian_prod(*[chosen.flatten()] * size).view(-1, len(free), 1)
            log_weight = size * log_weight[0].expand(len(chosen))
        else:
            chosen = chosen.unsqueeze(1)
    points = chosen
    if fixed is not None:
        points = fixed.repeat(len(chosen), 1, 1)
        points[:, free] = chosen
    return points, log_weight + density.base.log_prob(points)


def ball_nodes(dim: int, count: int) -> tuple[Tensor, Tensor]:
    """Midpoints (Q, K) and log-weights (Q,) in the unit ball of one or two dimensions."""
    middle = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    if dim == 1:
        return (2 * middle - 1).unsqueeze(-1), torch.full_like(middle, math.log(2 / count))
    radius, angle = torch.cartesian_prod(middle, 2 * math.pi * middle).unbind(1)
    points = radius.unsqueeze(-1) * torch.stack((angle.cos(), angle.sin()), dim=1)
    return points, (radius * 2 * math.pi / count**2).log()


def two_modes(strengths: tuple[float, float]) -> CapsuleDensity:
    """A density of one number with two experts, which recognise positive and negative numbers."""
    density = CapsuleDensity(1, 1, 2, 1, linear_dims=1, dtype=torch.float64)
    with torch.no_grad():
        density.weight.copy_(torch.tensor([1.0, -1.0]).view(1, 2, 1, 1))
        density.log_strength.copy_(torch.tensor(strengths).log())
    return density
