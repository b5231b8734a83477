"""How near draws and reconstructions of test images are to training images.

`python -m benchmarks.copying mnist --path FOLDER --json FILE` compares the distance of an image to
its nearest training image with that of a test image, as `poecaps evaluate` does (*nearer*), for
draws from all experts together and for reconstructions of test images. Nobody can have copied
these, so what they have above 50 % is due to encoding and decoding alone. Both are also measured
with other contrasts.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import poecaps
from benchmarks import machine
from benchmarks.baselines import limit
from benchmarks.intervals import Interval
from poecaps._modules import in_batches
from poecaps.data import load
from poecaps.evaluation import change_contrast
from poecaps.evaluation.fidelity import (
    Z_95,
    distances_to_nearest,
    match_contrast,
    nearest_images,
    pixel_levels,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

DRAWS, RECONSTRUCTIONS = "draws", "reconstructions of test images"
CONTRASTS = {  # name: gain of the logits; None: the contrast of training images
    "as they are": 1.0,
    "logits × 0.5": 0.5,
    "logits × 4": 4.0,
    "contrast matched": None,
}
SMALLEST = 1e-6  # pixels of exactly 0 or 1 have no logit
Result = dict[str, dict[str, dict[str, float]]]
"""For each kind of image and each contrast: the share, its standard error, and the medians."""


def measure(kinds: Mapping[str, Tensor], test: Tensor, training: Callable[[], Any]) -> Result:
    """Compare images of several kinds (N, C, H, W) with test images, by `nearest_images`.

    `training` returns an iterable of the training images in batches.
    """
    of_test = distances_to_nearest(test, training())
    levels = pixel_levels(training())
    result: Result = {}
    for kind, images in kinds.items():
        result[kind] = {}
        for name, gain in CONTRASTS.items():
            changed = images
            if gain is None:
                changed = match_contrast(images, levels)
            elif gain != 1:
                changed = change_contrast(images.clamp(SMALLEST, 1 - SMALLEST), gain)
            found = nearest_images(distances_to_nearest(changed, training()), of_test)
            result[kind][name] = {
                "nearer": found.nearer,
                "nearer_error": found.nearer_error,
                "median": found.median,
                "test_median": found.test_median,
            }
    return result


def share(result: Mapping[str, Any], kind: str, contrast: str = "as they are") -> Interval:
    """Return the share of comparisons in which images are nearer, with its 95 % interval."""
    found = result[kind][contrast]
    return Interval(found["nearer"], Z_95 * found["nearer_error"])


def table(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Format the results of several datasets, by their names, as a Markdown table."""
    from benchmarks.report import markdown_table

    rows = [
        [data, kind, *(share(result, kind, contrast).text(".1%") for contrast in CONTRASTS)]
        for data, result in results.items()
        for kind in result
    ]
    return markdown_table(["dataset", "images", *CONTRASTS], rows, texts=2)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the table, and write the numbers."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("network", help="name of a bundled model, or folder of a trained one")
    parser.add_argument("--data", help="dataset of the model (default: its name)")
    parser.add_argument("--path", help="folder of the dataset")
    parser.add_argument(
        "--samples", type=int, default=1000, help="draws, and test images (default: 1000)"
    )
    parser.add_argument("--limit", type=int, help="maximum number of training, and of test images")
    parser.add_argument("--json", type=Path, help="file to write the numbers to")
    options = parser.parse_args(arguments)
    data = options.data or options.network
    training, images = (
        limit(load(data, split=split, path=options.path), options.limit)
        for split in ("train", "test")
    )
    test = images.batch(slice(0, options.samples))
    network = poecaps.load(options.network, "cpu").eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        kinds = {
            DRAWS: in_batches(
                lambda part: network.generate(len(part), "joint", generator=generator), test, 250
            ),
            RECONSTRUCTIONS: in_batches(network.reconstruct, test, 250),
        }
    result = measure(kinds, test, lambda: training.batches(5000))
    print(table({data: result}))
    machine.write(result, options.json)


if __name__ == "__main__":
    main()
