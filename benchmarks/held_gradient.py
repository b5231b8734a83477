"""The share of the gradient that held coefficients drop, with trained weights.

Contrastive divergence, as Algorithm 1 has it, holds the routing coefficients c fixed in ∂F/∂W,
although they depend on W. `python -m benchmarks.held_gradient --json FILE` measures
‖∂F/∂W − ∂F/∂W with held c‖ / ‖∂F/∂W‖ on test images with the weights of the bundled models: with
their own routing, and with its axis and its sharpness changed and the weights left as they are.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast, get_args

import torch

import poecaps
from benchmarks import machine
from poecaps import functional
from poecaps.data import load

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from poecaps import CapsuleExperts

ITERATIONS = 3
SHARPNESS = (1.0, 20.0)
PARTS = 5  # groups of images, for the spread


def dropped(x: Tensor, weight: Tensor, **routing: Any) -> float:
    """Return the share of the norm of the gradient that holding the coefficients drops.

    Parameters
    ----------
    x : (B, I, K)
    weight : (I, J, D, K)
    **routing
        Options of `functional.routing_by_agreement`.
    """
    whole = weight.detach().clone().requires_grad_()
    found = functional.routing_by_agreement(x, whole, **routing)
    functional.free_energy(found.preactivation).mean().backward()
    held = weight.detach().clone().requires_grad_()
    preactivation = functional.preactivation(x, held, found.coefficients.detach())
    functional.free_energy(preactivation).mean().backward()
    assert whole.grad is not None  # noqa: S101 (after backward)
    assert held.grad is not None  # noqa: S101
    return float((whole.grad - held.grad).norm() / whole.grad.norm())


def measure(layer: CapsuleExperts, x: Tensor) -> list[dict[str, Any]]:
    """Measure every axis and sharpness on groups of images with capsules x (B, I, K)."""
    rows = []
    for axis, sharpness in itertools.product(get_args(functional.Axis), SHARPNESS):
        options = {"iterations": ITERATIONS, "sharpness": sharpness, "normalize": axis}
        rows.append(
            {
                "normalize": axis,
                "sharpness": sharpness,
                "own": (axis, sharpness, ITERATIONS)
                == (layer.normalize, layer.sharpness, layer.iterations),
                "dropped": [
                    dropped(part, layer.weight, agreement=layer.agreement, **options)
                    for part in x.chunk(PARTS)
                ],
            }
        )
    return rows


def table(results: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """Format the rows of several models, by their names, as a Markdown table."""
    from benchmarks.report import markdown_table

    names = list(results)
    rows = []
    for same in zip(*results.values(), strict=True):
        first = same[0]
        label = f"over {first['normalize']}, β {first['sharpness']:g}"
        label += " (that of the models)" if first["own"] else ""
        cells = [f"{statistics.mean(each['dropped']):.0%}".replace("%", " %") for each in same]
        rows.append([label, *cells])
    return markdown_table(["routing", *names], rows)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the table, and write the numbers."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--networks", default="mnist,fashion-mnist", help="bundled models")
    parser.add_argument("--images", type=int, default=300, help="test images (default: 300)")
    parser.add_argument("--json", type=Path, help="file to write the numbers to")
    options = parser.parse_args(arguments)
    results = {}
    for name in options.networks.split(","):
        network = poecaps.load(name, "cpu").eval()
        images = load(f"{name}-sample", split="test").batch(slice(0, options.images))
        with torch.no_grad():
            x = network.capsules(images)
        results[name] = measure(cast("CapsuleExperts", network.encoders[0]), x)
    print(table(results))
    machine.write(results, options.json)


if __name__ == "__main__":
    main()
