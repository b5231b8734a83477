"""Whether images that a model generates have a frame that the photographs do not have.

`python -m benchmarks.frame --json FILE --pictures FOLDER` trains each variant below on crops of
the two sample photographs of scikit-learn, and prints a table. Rows that FILE already contains are
not trained again; `--only "margin 4;margin 8"` selects variants.

A crop is at a random place, and twice as large as the images of `--side` pixels to which it is
reduced. Variants with one halving are for `--side 64`. The table has, of the flattest 30 % of
the images, the mean absolute difference between the mean colour of all pixels at a distance from
the border and that of the centre. With a frame, it is large at a small distance. An image is flat
if its standard deviation is small among the pixels that are 4 or more from the border.
Reconstructions and draws of the same model are measured as the photographs are. `lost` is the share
of the variance of the training images that reconstructions lose. The time of a CPU is that of all
threads of the training.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from benchmarks import machine
from benchmarks.report import markdown_table
from benchmarks.variants import Variant, preset_with
from poecaps import plotting
from poecaps.data import ImageSet
from poecaps.training import train

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from poecaps import CapsuleNetwork

fast_with = partial(preset_with, "fast")

VARIANTS: dict[str, Variant] = {
    "margin 4, even overlap": fast_with(model__margin=4, model__even_overlap=True),
    "margin 4": fast_with(model__margin=4, model__even_overlap=False),
    "margin 8, even overlap": fast_with(model__margin=8, model__even_overlap=True),
    "margin 8": fast_with(model__margin=8, model__even_overlap=False),
    "no margin": fast_with(model__margin=0, model__even_overlap=False),
    "one halving, margin 8, even overlap": fast_with(
        model__halvings=1, model__margin=8, model__even_overlap=True
    ),
    "one halving, margin 4": fast_with(
        model__halvings=1, model__margin=4, model__even_overlap=False
    ),
}
SIDE, CROPS, IMAGES = 32, 1500, 600
DISTANCES = (0, 1, 2, 4, 6)  # pixels to the border
FLATTEST = 0.3  # share of the images
INNER = 4  # pixels to the border from which an image is flat or not
DRAWS = 40  # of a picture
KINDS = {
    "photographs": "photographs",
    "reconstructions": "reconstructions",
    "joint": "draws, all experts",
    "learned": "draws, one expert",
}


def crops(count: int, side: int = SIDE) -> ImageSet:
    """Cut squares of twice this side out of the two photographs, and halve them."""
    from sklearn.datasets import load_sample_images

    photographs, random = load_sample_images().images, np.random.default_rng(0)
    images = np.empty((count, side, side, 3), np.uint8)
    for number in range(count):
        photograph = photographs[number % 2]
        row, column = (random.integers(0, length - 2 * side) for length in photograph.shape[:2])
        crop = photograph[row : row + 2 * side, column : column + 2 * side]
        images[number] = crop.reshape(side, 2, side, 2, 3).mean((1, 3)).round()
    return ImageSet(images)


def differences(images: Tensor) -> list[float]:
    """Compare the border of flat images with their centre: (B, C, H, W) → one of each distance."""
    height, width = images.shape[2:]
    sides = (torch.arange(length) for length in (height, width))
    rows, columns = (torch.minimum(side, side.flip(0)) for side in sides)
    distance = torch.minimum(rows.unsqueeze(1), columns)
    spread = images[..., distance >= INNER].std(-1).mean(1)
    flat = images[spread.argsort()[: max(1, round(FLATTEST * len(images)))]]
    centre = flat[..., distance >= 0.3 * min(height, width)].mean(-1)
    return [
        (flat[..., distance == each].mean(-1) - centre).abs().mean().item() for each in DISTANCES
    ]


@torch.no_grad()
def measure(network: CapsuleNetwork, images: Tensor) -> tuple[dict[str, Any], Tensor]:
    """Measure the frame of photographs, reconstructions and draws; return some draws as well."""
    back = network.reconstruct(images)
    lost = (back - images).square().sum() / (images - images.mean(0)).square().sum()
    kinds = {"photographs": images, "reconstructions": back}
    for domain in ("joint", "learned"):
        generator = torch.Generator().manual_seed(0)
        kinds[domain] = network.generate(len(images), domain, generator=generator)
    row: dict[str, Any] = {name: differences(each) for name, each in kinds.items()}
    draws = [kinds[domain][:DRAWS] for domain in ("joint", "learned")]
    return row | {"lost": lost.item()}, torch.cat(draws)


def table(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """Format rows as a Markdown table, the photographs first."""
    lines: list[list[str]] = []
    for name, row in rows.items():
        for kind, title in KINDS.items():
            if kind == "photographs" and lines:
                continue
            numbers = [f"{each:.3f}" for each in row[kind]]
            is_model = kind == "reconstructions"
            ends = [f"{row['lost']:.3f}", f"{row['seconds']:.0f} s"] if is_model else ["", ""]
            lines.append(["" if kind == "photographs" else name, title, *numbers, *ends])
    distances = ["border", *(f"{each} px" for each in DISTANCES[1:])]
    head = ["model", "images", *distances, "lost", "CPU time"]
    return markdown_table(head, lines, texts=2)


def main(arguments: Sequence[str] | None = None) -> None:
    """Train and measure the variants, print the table, and write the numbers."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", help="names of variants, separated by semicolons")
    parser.add_argument("--side", type=int, default=SIDE, help=f"of an image (default: {SIDE})")
    parser.add_argument("--crops", type=int, default=CROPS, help=f"(default: {CROPS})")
    parser.add_argument("--json", type=Path, help="file to write the numbers to")
    parser.add_argument("--pictures", type=Path, help="folder for a picture of draws of each")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args(arguments)
    data, rows = crops(options.crops, options.side), {}
    if options.json is not None and options.json.exists():
        known = json.loads(options.json.read_text())
        if known["side"] != options.side:
            parser.error(f"{options.json} has images of {known['side']} pixels; use another --json")
        rows = known["results"]
    usual = [name for name in VARIANTS if name.startswith("one halving") == (options.side > SIDE)]
    names = options.only.split(";") if options.only else usual
    if unknown := set(names) - VARIANTS.keys():
        parser.error(f"there are no variants {', '.join(sorted(unknown))}")
    for name in names:
        if name in rows:
            continue
        started = time.process_time()
        with tempfile.TemporaryDirectory() as folder:
            network = train(VARIANTS[name].config(device=options.device), folder, data=data)
        seconds = time.process_time() - started
        row, draws = measure(network.cpu(), data.batch(range(min(IMAGES, len(data)))))
        rows[name] = row | {"seconds": seconds}
        if options.pictures is not None:
            options.pictures.mkdir(parents=True, exist_ok=True)
            picture = options.pictures / f"frame-{name.replace(', ', '-').replace(' ', '-')}.png"
            plotting.image_grid(draws, picture, columns=20, raw=False)
        machine.write({"side": options.side, "results": rows}, options.json)
    print(table({name: rows[name] for name in VARIANTS if name in rows}))


if __name__ == "__main__":
    main()
