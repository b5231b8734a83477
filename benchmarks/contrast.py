"""What a change of contrast alone does to each measure of samples.

`python -m benchmarks.contrast mnist --path FOLDER` draws from a trained network, multiplies the
logits of all pixels by several gains, and measures the draws each time. A measure that changes by
more than the half-width of its 95 % interval over draws is marked with *: a model can improve it by
contrast alone, so it must not be compared between models with different pixel losses.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import poecaps
from benchmarks import machine
from benchmarks.baselines import SingleDomainSampler, limit
from benchmarks.report import markdown_table
from benchmarks.variants import lookup
from poecaps.data import load
from poecaps.evaluation import (
    CLASSIFIERS,
    NetworkEncoder,
    change_contrast,
    evaluate,
    load_classifier,
)
from poecaps.evaluation.fidelity import Z_95

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

GAINS = (0.5, 1.0, 2.0, 4.0)
MEASURES = {  # name: path in the metrics of samples, format
    "Fréchet distance": ("frechet.distance", ".1f"),
    "recognisable": ("recognisability.share", ".1%"),
    "Fréchet distance, contrast matched": ("matched_frechet.distance", ".1f"),
    "Fréchet distance, random features": ("random_frechet.distance", ".4f"),
    "precision": ("neighbourhoods.precision", ".1%"),
    "recall": ("neighbourhoods.recall", ".1%"),
    "density": ("neighbourhoods.density", ".3f"),
    "coverage": ("neighbourhoods.coverage", ".1%"),
    "nearer to training images": ("nearest.nearer", ".1%"),
}
# Pixels of exactly 0 or 1 have no logit; a decoder's sigmoid gives none in exact arithmetic.
SMALLEST = 1e-6


class ChangedContrast(SingleDomainSampler):
    """A network whose draws from all experts together have another contrast."""

    def __init__(self, encoder: NetworkEncoder, gain: float) -> None:
        self.name, self.encoder, self.gain = f"gain {gain:g}", encoder, gain

    def encode(self, images: Tensor) -> Tensor:
        """Encode images: (B, C, H, W) → (B, S)."""
        return self.encoder.encode(images)

    def draw(self, count: int, generator: torch.Generator) -> Tensor:
        """Draw images and multiply their logits."""
        drawn = self.encoder.sample(count, "joint", generator).clamp(SMALLEST, 1 - SMALLEST)
        return change_contrast(drawn, self.gain)


def table(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Format the metrics of samples for each gain as a Markdown table."""
    plain = results["1"]
    rows = []
    for name, (path, form) in MEASURES.items():
        usual = lookup(plain, path)
        if usual is None:
            continue
        half_width = Z_95 * plain["errors"][path]
        cells = [name]
        for metrics in results.values():
            value = lookup(metrics, path)
            assert value is not None  # noqa: S101 (measured for every gain)
            mark = " *" if abs(value - usual) > half_width else ""
            cells.append(format(value, form).replace("%", " %") + mark)
        rows.append([*cells, f"± {format(half_width, form)}".replace("%", " %")])
    return markdown_table(["measure", *(f"gain {gain}" for gain in results), "interval"], rows)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the table, and write the numbers."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("network", help="name of a bundled model, or folder of a trained one")
    parser.add_argument("--data", help="dataset of the model (default: its name)")
    parser.add_argument("--path", help="folder of the dataset")
    parser.add_argument("--samples", type=int, default=10_000, help="(default: 10000)")
    parser.add_argument("--limit", type=int, help="maximum number of training, and of test images")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, help="file to write the numbers to")
    options = parser.parse_args(arguments)
    data = options.data or options.network
    train, test = (
        limit(load(data, split=split, path=options.path), options.limit)
        for split in ("train", "test")
    )
    has_classifier = data.removesuffix("-sample") in CLASSIFIERS
    classifier = load_classifier(data, options.device) if has_classifier else None
    encoder = NetworkEncoder(poecaps.load(options.network, options.device))
    results = {}
    for gain in GAINS:
        result = evaluate(
            ChangedContrast(encoder, gain),
            train,
            test,
            classifier,
            samples=options.samples,
            device=options.device,
        )
        results[f"{gain:g}"] = json.loads(result.to_json())["domains"]["joint"]
    print(table(results))
    machine.write(results, options.json)


if __name__ == "__main__":
    main()
