"""Models small enough that their likelihood can be computed exactly.

With one routing iteration the coefficients are constant, so e^(−F(x)) = Π_j (1 + ‖z_j‖²) is a
polynomial of degree 2J in each input capsule, and a Gauss quadrature rule over the unit ball
integrates it exactly. Log-likelihoods are with respect to Lebesgue measure on the product of the I
open unit balls.

`python -m benchmarks.zoo` measures the effect of contrastive divergence on the exact likelihood.

`python -m benchmarks.zoo --routed` does the same for models with three routing iterations. Their
coefficients depend on x and W, so e^(−F) is no polynomial; likelihoods are measured by a finer
quadrature rule, and `quadrature_error` is the change of log Z with one that is finer still. Each
rule of learning is measured with the whole gradient, and with the gradient for held coefficients as
in Algorithm 1. With `--json FILE`, models that are in FILE already are skipped.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from benchmarks import machine
from poecaps import CapsuleExperts
from poecaps import functional as F

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from poecaps.functional import Axis


@dataclass(frozen=True)
class Species:
    """Sizes of a tiny model: I capsules of dimension K, J experts of dimension D, and routing."""

    in_capsules: int
    in_dim: int
    out_capsules: int
    out_dim: int
    normalize: Axis = "inputs"
    iterations: int = 1
    sharpness: float = 1.0

    def __str__(self) -> str:
        sizes = f"{self.in_capsules}×{self.in_dim} → {self.out_capsules}×{self.out_dim}"
        routing = f", β {self.sharpness:g}" if self.iterations > 1 else ""
        return f"{sizes}, over {self.normalize}{routing}"

    def layer(self, generator: torch.Generator, std: float) -> CapsuleExperts:
        """Create a layer of these sizes in float64, with weights drawn from N(0, std²)."""
        layer = CapsuleExperts(
            self.in_capsules,
            self.in_dim,
            self.out_capsules,
            self.out_dim,
            iterations=self.iterations,
            sharpness=self.sharpness,
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
ROUTED = (
    Species(2, 1, 2, 2, "inputs", 3),
    Species(2, 1, 2, 2, "inputs", 3, 5.0),
    Species(2, 1, 2, 2, "outputs", 3),
    Species(2, 2, 1, 2, "inputs", 3),
    Species(2, 2, 2, 2, "outputs", 3),
)
# Degree of the rule for models with several routing iterations, by the number of input dimensions:
# of the rule that learning uses, and of the two finer ones that measure and estimate their error.
ROUTED_DEGREES = {2: (24, 60, 80), 4: (8, 14, 18)}


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
    radius, radius_weights = (nodes + 1) / 2, weights / 2 * ((nodes + 1) / 2) ** (dim - 1)
    angle = 2 * np.pi * np.arange(degree + 1) / (degree + 1)
    angle_weights = np.full(degree + 1, 2 * np.pi / (degree + 1))
    circle = np.stack([np.cos(angle), np.sin(angle)], axis=1)
    if dim == 1:  # both sides of 0, where the cosine of a routed vote jumps
        directions, direction_weights = np.array([[-1.0], [1.0]]), np.ones(2)
    elif dim == 2:
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


def quadrature(species: Species, extra_degree: int = 0, *, fineness: int = 0) -> Quadrature:
    """Return a rule that is exact for e^(−F) and its derivatives in W.

    It is also exact for their products with polynomials up to `extra_degree`. With several routing
    iterations nothing is a polynomial, and the rule is an approximation; `fineness` is from 0 to 2.
    """
    degree = 2 * species.out_capsules
    if species.iterations > 1:
        degree = ROUTED_DEGREES[species.in_capsules * species.in_dim][fineness]
    points, weights = ball_rule(species.in_dim, degree + extra_degree)
    chosen = np.array(list(itertools.product(range(len(points)), repeat=species.in_capsules)))
    return Quadrature(
        torch.from_numpy(points[chosen]), torch.from_numpy(np.log(weights)[chosen].sum(axis=1))
    )


def free_energy(layer: CapsuleExperts, x: Tensor) -> Tensor:
    """Compute F(x) by the reference, the fastest at these sizes: (B, I, K) → (B,)."""
    routed = F.routing_by_agreement(x, layer.weight, **asdict(layer.routing))
    return F.free_energy(routed.preactivation)


def log_partition(layer: CapsuleExperts, rule: Quadrature) -> Tensor:
    """Compute log Z = log ∫ e^(−F(x)) dx."""
    return torch.logsumexp(rule.log_weights - free_energy(layer, rule.points), dim=0)


def log_likelihood(layer: CapsuleExperts, x: Tensor, rule: Quadrature) -> Tensor:
    """Compute the exact mean of log P(x) = −F(x) − log Z."""
    return -free_energy(layer, x).mean() - log_partition(layer, rule)


def sample(layer: CapsuleExperts, count: int, generator: torch.Generator) -> Tensor:
    """Draw exact samples: (count, I, K), by rejection with a bound of ‖z_j‖.

    ‖z_j‖ ≤ Σ_i c_ij ‖W_ij‖. With several routing iterations, c may be anything: over inputs, it has
    the sum 1, and over outputs at most 1 in every place.
    """
    with torch.no_grad():
        shape = (1, layer.in_capsules, layer.in_dim)
        norm = torch.linalg.matrix_norm(layer.weight, ord=2)
        if layer.routing.iterations == 1:
            c = layer.route(torch.zeros(shape, dtype=torch.float64)).coefficients[0]
            max_norm = (c * norm).sum(0)
        else:
            max_norm = norm.amax(0) if layer.routing.normalize == "inputs" else norm.sum(0)
        bound = torch.log1p(max_norm.square()).sum()
        accepted: list[Tensor] = []
        while sum(map(len, accepted)) < count:
            x = torch.rand(4096, *shape[1:], dtype=torch.float64, generator=generator) * 2 - 1
            x = x[(x.norm(dim=-1) < 1).all(-1)]
            accept = torch.rand(len(x), dtype=torch.float64, generator=generator).log() < (
                -free_energy(layer, x) - bound
            )
            accepted.append(x[accept])
        return torch.cat(accepted)[:count]


# --------------------------------------------------------------------------------------------------
# Rules of learning: losses whose gradient in W a step follows


def held_free_energy(layer: CapsuleExperts, x: Tensor) -> Tensor:
    """Compute F(x) with coefficients through which no gradient flows: (B, I, K) → (B,)."""
    with torch.no_grad():
        c = F.routing_by_agreement(x, layer.weight, **asdict(layer.routing)).coefficients
    return F.free_energy(F.preactivation(x, layer.weight, c))


def exact_ascent(layer: CapsuleExperts, data: Tensor, rule: Quadrature) -> Tensor:
    """Compute −log P: the gradient of the likelihood."""
    return -log_likelihood(layer, data, rule)


def held_ascent(layer: CapsuleExperts, data: Tensor, rule: Quadrature) -> Tensor:
    """Compute mean F(x) − E_model[F], all with held coefficients and a held model."""
    with torch.no_grad():
        model = torch.softmax(rule.log_weights - free_energy(layer, rule.points), 0)
    return held_free_energy(layer, data).mean() - model @ held_free_energy(layer, rule.points)


def full_divergence(layer: CapsuleExperts, data: Tensor) -> Tensor:
    """Compute mean F(x) − mean F(x̃) with x̃ of Algorithm 1, and with the gradient through c."""
    with torch.no_grad():
        routed = F.routing_by_agreement(data, layer.weight, **asdict(layer.routing))
        y = F.squash(routed.preactivation)
        mixed = F.reconstruction(y, layer.weight, routed.coefficients)
    return free_energy(layer, data).mean() - free_energy(layer, mixed).mean()


METHODS: dict[str, Callable[[CapsuleExperts, Tensor, Quadrature, torch.Generator], Tensor]] = {
    "exact": lambda layer, data, rule, _: exact_ascent(layer, data, rule),
    "exact, held": lambda layer, data, rule, _: held_ascent(layer, data, rule),
    "deterministic": lambda layer, data, *_: layer.contrastive_divergence(data),
    "full": lambda layer, data, *_: full_divergence(layer, data),
    "bernoulli": lambda layer, data, _, generator: layer.contrastive_divergence(
        data, mixing="bernoulli", generator=generator
    ),
}
TABLE = {  # method: heading
    "truth": "truth",
    "exact": "exact ascent",
    "deterministic": "CD-1 deterministic",
    "bernoulli": "CD-1 Bernoulli",
}
ROUTED_TABLE = {
    "truth": "truth",
    "exact": "exact ascent, whole gradient",
    "exact, held": "exact ascent, held coefficients",
    "deterministic": "CD-1, held coefficients",
    "full": "CD-1, whole gradient",
}


def dropped_share(layer: CapsuleExperts, data: Tensor) -> float:
    """Compute the share of ‖∂ mean F/∂W‖ that holding the coefficients drops."""
    whole, held = (
        torch.autograd.grad(energy.mean(), layer.weight)[0]
        for energy in (free_energy(layer, data), held_free_energy(layer, data))
    )
    return ((whole - held).norm() / whole.norm()).item()


def measure(
    species: Species,
    seed: int,
    *,
    images: int,
    steps: int,
    learning_rate: float,
    methods: Sequence[str] = tuple(TABLE)[1:],
) -> dict[str, float]:
    """Compute the exact mean log-likelihood of data from a known model for each learning method."""
    generator = torch.Generator().manual_seed(seed)
    truth = species.layer(generator, std=3.0)
    data = sample(truth, images, generator)
    rule, fine = quadrature(species), quadrature(species, fineness=1)
    start = species.layer(generator, std=0.5)
    with torch.no_grad():
        results = {
            "start": log_likelihood(start, data, fine).item(),
            "truth": log_likelihood(truth, data, fine).item(),
        }
    if species.iterations > 1:
        finest = quadrature(species, fineness=2)
        errors = [
            abs(log_partition(each, finest) - log_partition(each, fine)).item()
            for each in (start, truth)
        ]
        results["quadrature_error"] = max(errors)
        results["dropped_at_start"] = dropped_share(start, data)
        results["dropped_at_truth"] = dropped_share(truth, data)
    for method in methods:
        layer = species.layer(generator, std=0.5)
        layer.load_state_dict(start.state_dict())
        optimizer = torch.optim.SGD(layer.parameters(), lr=learning_rate)
        for _ in range(steps):
            loss = METHODS[method](layer, data, rule, generator)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            results[method] = log_likelihood(layer, data, fine).item()
    return results


def gains(runs: Sequence[Mapping[str, float]], method: str) -> list[float]:
    """Return the gains of a method over the start, in nats per image."""
    return [run[method] - run["start"] for run in runs]


def gain_cell(runs: Sequence[Mapping[str, float]], method: str) -> str:
    """Format the median of the gains, the lowest and the highest."""
    values = gains(runs, method)
    return f"{statistics.median(values):+.3f} ({min(values):+.3f} … {max(values):+.3f})"


def routed_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Format the rows of `--routed` as a Markdown table."""
    lines = [f"| model | dropped | {' | '.join(ROUTED_TABLE.values())} |", "| --- " * 7 + "|"]
    for row in rows:
        runs = row["runs"]
        start, truth = (
            statistics.median(run[f"dropped_at_{at}"] for run in runs) for at in ("start", "truth")
        )
        cells = [gain_cell(runs, method) for method in ROUTED_TABLE]
        lines.append(f"| {row['model']} | {start:.0%}, {truth:.0%} | {' | '.join(cells)} |")
    return "\n".join(lines).replace("%", " %")


def main(arguments: Sequence[str] | None = None) -> None:
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
    parser.add_argument("--routed", action="store_true", help="three routing iterations")
    parser.add_argument("--json", type=Path, help="file to write the numbers to")
    options = parser.parse_args(arguments)
    table = ROUTED_TABLE if options.routed else TABLE
    rows: list[dict[str, Any]] = []
    if options.json is not None and options.json.is_file():
        rows = json.loads(options.json.read_text())
    done = {row["model"] for row in rows}
    for species in ROUTED if options.routed else ZOO:
        if str(species) in done:
            continue
        runs = [
            measure(
                species,
                seed,
                images=options.images,
                steps=options.steps,
                learning_rate=options.rate,
                methods=tuple(table)[1:],
            )
            for seed in range(options.seeds)
        ]
        about = {"steps": options.steps, "images": options.images, "rate": options.rate}
        rows.append({"model": str(species), "species": asdict(species), **about, "runs": runs})
        print(" | ".join([str(species), *(gain_cell(runs, each) for each in table)]), flush=True)
        machine.write(rows, options.json)
    if options.routed:
        print(f"\n{routed_table(rows)}")


if __name__ == "__main__":
    main()
