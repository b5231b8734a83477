"""Models small enough that their likelihood can be computed exactly.

With one routing iteration the coefficients are constant, so e^(−F(x)) = Π_j (1 + ‖z_j‖²) is a
polynomial of degree 2J in each input capsule, and a Gauss quadrature rule over the unit ball
integrates it exactly. Log-likelihoods are with respect to Lebesgue measure on the product of the I
open unit balls.

`python -m benchmarks.zoo` measures the effect of contrastive divergence on the exact likelihood.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from poecaps import CapsuleExperts

if TYPE_CHECKING:
    from torch import Tensor

    from poecaps.functional import Axis


@dataclass(frozen=True)
class Species:
    """Sizes of a tiny model: I capsules of dimension K, J experts of dimension D, routing axis."""

    in_capsules: int
    in_dim: int
    out_capsules: int
    out_dim: int
    normalize: Axis = "inputs"

    def __str__(self) -> str:
        sizes = f"{self.in_capsules}×{self.in_dim} → {self.out_capsules}×{self.out_dim}"
        return f"{sizes}, over {self.normalize}"

    def layer(self, generator: torch.Generator, std: float) -> CapsuleExperts:
        """Create a layer of these sizes in float64, with weights drawn from N(0, std²)."""
        layer = CapsuleExperts(
            self.in_capsules,
            self.in_dim,
            self.out_capsules,
            self.out_dim,
            iterations=1,
            normalize=self.normalize,
            dtype=torch.float64,
        )
        layer.reset_parameters(std=std, generator=generator)
        return layer


ZOO = (
    Species(1, 1, 1, 1),
    Species(1, 2, 1, 2),
    Species(1, 3, 2, 1),
    Species(1, 2, 2, 3, "outputs"),
    Species(2, 1, 2, 2),
    Species(2, 2, 1, 2),
    Species(2, 2, 2, 2, "outputs"),
    Species(2, 3, 2, 3),
)


@dataclass(frozen=True)
class Quadrature:
    """Points (Q, I, K) and log-weights (Q,) of a quadrature rule over a product of unit balls."""

    points: Tensor
    log_weights: Tensor


def ball_rule(dim: int, degree: int) -> tuple[np.ndarray, np.ndarray]:
    """Return a quadrature rule over the unit ball: points (Q, dim), weights (Q,).

    The rule is exact for polynomials up to `degree`.
    """
    nodes, weights = np.polynomial.legendre.leggauss((degree + dim) // 2 + 1)
    if dim == 1:
        return nodes[:, None], weights
    radius, radius_weights = (nodes + 1) / 2, weights / 2 * ((nodes + 1) / 2) ** (dim - 1)
    angle = 2 * np.pi * np.arange(degree + 1) / (degree + 1)
    angle_weights = np.full(degree + 1, 2 * np.pi / (degree + 1))
    circle = np.stack([np.cos(angle), np.sin(angle)], axis=1)
    if dim == 2:
        directions, direction_weights = circle, angle_weights
    elif dim == 3:
        sine = np.sqrt(1 - nodes**2)
        rings = [
            np.c_[s * circle, np.full(len(circle), c)] for s, c in zip(sine, nodes, strict=True)
        ]
        directions, direction_weights = (
            np.concatenate(rings),
            np.outer(weights, angle_weights).ravel(),
        )
    else:
        raise ValueError(f"dim must be 1, 2 or 3, but is {dim}")
    points = (radius[:, None, None] * directions).reshape(-1, dim)
    return points, np.outer(radius_weights, direction_weights).ravel()


def quadrature(species: Species, extra_degree: int = 0) -> Quadrature:
    """Return a rule that is exact for e^(−F) and its derivatives in W.

    It is also exact for their products with polynomials up to `extra_degree`.
    """
    points, weights = ball_rule(species.in_dim, 2 * species.out_capsules + extra_degree)
    chosen = np.array(list(itertools.product(range(len(points)), repeat=species.in_capsules)))
    return Quadrature(
        torch.from_numpy(points[chosen]), torch.from_numpy(np.log(weights)[chosen].sum(axis=1))
    )


def log_partition(layer: CapsuleExperts, rule: Quadrature) -> Tensor:
    """Compute log Z = log ∫ e^(−F(x)) dx."""
    return torch.logsumexp(rule.log_weights - layer.free_energy(rule.points), dim=0)


def log_likelihood(layer: CapsuleExperts, x: Tensor, rule: Quadrature) -> Tensor:
    """Compute the exact mean of log P(x) = −F(x) − log Z."""
    return -layer.free_energy(x).mean() - log_partition(layer, rule)


def sample(layer: CapsuleExperts, count: int, generator: torch.Generator) -> Tensor:
    """Draw exact samples: (count, I, K), by rejection with the bound ‖z_j‖ ≤ Σ_i c_ij ‖W_ij‖."""
    with torch.no_grad():
        shape = (1, layer.in_capsules, layer.in_dim)
        c = layer.route(torch.zeros(shape, dtype=torch.float64)).coefficients[0]
        max_norm = (c * torch.linalg.matrix_norm(layer.weight, ord=2)).sum(0)
        bound = torch.log1p(max_norm.square()).sum()
        accepted: list[Tensor] = []
        while sum(map(len, accepted)) < count:
            x = torch.rand(4096, *shape[1:], dtype=torch.float64, generator=generator) * 2 - 1
            x = x[(x.norm(dim=-1) < 1).all(-1)]
            accept = torch.rand(len(x), dtype=torch.float64, generator=generator).log() < (
                -layer.free_energy(x) - bound
            )
            accepted.append(x[accept])
        return torch.cat(accepted)[:count]


def measure(
    species: Species, seed: int, *, images: int, steps: int, learning_rate: float
) -> dict[str, float]:
    """Compute the exact mean log-likelihood of data from a known model for each learning method."""
    generator = torch.Generator().manual_seed(seed)
    truth = species.layer(generator, std=3.0)
    data = sample(truth, images, generator)
    rule = quadrature(species)
    start = species.layer(generator, std=0.5)
    results = {
        "start": log_likelihood(start, data, rule).item(),
        "truth": log_likelihood(truth, data, rule).item(),
    }
    for method in ("exact", "deterministic", "bernoulli"):
        layer = species.layer(generator, std=0.5)
        layer.load_state_dict(start.state_dict())
        optimizer = torch.optim.SGD(layer.parameters(), lr=learning_rate)
        for _ in range(steps):
            if method == "exact":
                loss = -log_likelihood(layer, data, rule)
            else:
                loss = layer.contrastive_divergence(data, mixing=method, generator=generator)  # type: ignore[arg-type]
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        results[method] = log_likelihood(layer, data, rule).item()
    return results


def main() -> None:
    """Print a table of gains in exact log-likelihood, in nats per image."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--seeds", type=int, default=5, help="number of seeds for each model (default: 5)"
    )
    parser.add_argument(
        "--images", type=int, default=2000, help="images drawn from the true model (default: 2000)"
    )
    parser.add_argument(
        "--steps", type=int, default=500, help="full-batch gradient steps (default: 500)"
    )
    parser.add_argument("--rate", type=float, default=0.2, help="learning rate (default: 0.2)")
    options = parser.parse_args()
    print(
        "| model | truth | exact ascent | CD-1 deterministic | CD-1 Bernoulli |\n"
        + "| --- " * 5
        + "|"
    )
    for species in ZOO:
        runs = [
            measure(
                species,
                seed,
                images=options.images,
                steps=options.steps,
                learning_rate=options.rate,
            )
            for seed in range(options.seeds)
        ]
        cells = []
        for method in ("truth", "exact", "deterministic", "bernoulli"):
            gains = [run[method] - run["start"] for run in runs]
            cells.append(f"{statistics.median(gains):+.3f} ({min(gains):+.3f} … {max(gains):+.3f})")
        print(f"| {species} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
