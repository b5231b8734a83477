"""Digits in random colours on grounds of increasing difficulty: images with three channels.

`python -m benchmarks.coloured_digits --ground plain --path FOLDER --out plain-digits.npz` writes a
file that `poecaps train --data plain-digits.npz` and `poecaps evaluate` read; `benchmarks.colour`
makes the same images in memory. The same seed always gives the same images. The grounds are:

black         black
plates        one random colour, with the digit in black or white, as on the plates of cars
plain         one random colour
gradient      nine random colours on a grid, interpolated
photograph    a random part of a random photograph, half of them mirrored

Photographs are given by `--photographs`: a folder or an `.npz` file, of the size of the digits or
larger. Those of its training part are behind training digits and those of its test part behind test
digits. Ganin et al., "Domain-adversarial training of neural networks", 2016 (arXiv 1505.07818),
blend digits with photographs as well (MNIST-M), as the difference of the two. Here a digit has one
colour instead: that of `CANDIDATES` random colours (on plates: of black and white) which differs
most from the mean of the ground below the digit, so that every digit can be read, and is darker
than its ground as well as lighter.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from poecaps.data import ImageSet, load

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from poecaps.data.idx import Split

GROUNDS = ("black", "plates", "plain", "gradient", "photograph")
CANDIDATES = 8
GRID = 3  # colours of a gradient along each side
SEED = 0
SPLITS: tuple[Split, ...] = ("train", "test")
BATCH = 1000  # images that are made together


def coloured_digits(
    data: ImageSet, ground: str, seed: int = SEED, *, photographs: ImageSet | None = None
) -> ImageSet:
    """Give every image a colour and a ground.

    Parameters
    ----------
    data
        Grey images, light on black.
    ground
        One of `GROUNDS`.
    seed
        Seed of the colours and grounds.
    photographs
        Images with three channels, for the ground ``"photograph"``.
    """
    generator = torch.Generator().manual_seed(seed)
    height, width = data.shape[1:]
    images = np.empty((len(data), height, width, 3), np.uint8)
    for start in range(0, len(data), BATCH):
        part = slice(start, start + BATCH)
        ink = data.batch(part)
        below = draw_grounds(ground, (len(ink), height, width), generator, photographs)
        candidates = candidate_colours(ground, len(ink), generator)
        coloured = torch.lerp(below, farthest_colours(ink, below, candidates), ink)
        pixels = coloured.mul(255).round().permute(0, 2, 3, 1)
        images[part] = pixels.numpy().astype(np.uint8)
    return replace(data, images=images, files=(), source=f"{data.source} on {ground}")


def draw_grounds(
    ground: str,
    size: tuple[int, int, int],
    generator: torch.Generator,
    photographs: ImageSet | None = None,
) -> Tensor:
    """Draw grounds: (B, 3, H, W) for the size B, H, W."""
    count, height, width = size
    if ground == "black":
        return torch.zeros(count, 3, height, width)
    if ground in ("plates", "plain"):
        colours = torch.rand(count, 3, 1, 1, generator=generator)
        return colours.expand(count, 3, height, width)
    if ground == "gradient":
        colours = torch.rand(count, 3, GRID, GRID, generator=generator)
        return nn.functional.interpolate(
            colours, (height, width), mode="bilinear", align_corners=True
        )
    if ground != "photograph":
        raise ValueError(f"ground must be one of {', '.join(GROUNDS)}, but is {ground!r}")
    if photographs is None:
        raise ValueError("the ground photograph needs photographs")
    return crops(photographs, size, generator)


def crops(photographs: ImageSet, size: tuple[int, int, int], generator: torch.Generator) -> Tensor:
    """Draw random parts of random photographs, half of them mirrored: (B, 3, H, W)."""
    count, height, width = size
    channels, *sides = photographs.shape
    if channels != 3 or sides[0] < height or sides[1] < width:
        raise ValueError(
            f"photographs must have three channels and be at least {height}×{width}, "
            f"but have the shape {photographs.shape}"
        )
    chosen = torch.randint(len(photographs), (count,), generator=generator)
    top, left = (
        torch.randint(side - length + 1, (count, 1), generator=generator)
        for side, length in zip(sides, (height, width), strict=True)
    )
    mirrored = torch.rand(count, 1, generator=generator) < 0.5
    rows, columns = top + torch.arange(height), left + torch.arange(width)
    columns = torch.where(mirrored, columns.flip(1), columns)
    whole = photographs.batch(chosen).permute(0, 2, 3, 1)
    image = torch.arange(count).view(-1, 1, 1)
    return whole[image, rows.unsqueeze(2), columns.unsqueeze(1)].permute(0, 3, 1, 2)


def candidate_colours(ground: str, count: int, generator: torch.Generator) -> Tensor:
    """Return the colours that digits may have on a ground: (B, candidates, 3)."""
    if ground == "plates":
        return torch.tensor([0.0, 1.0]).view(1, 2, 1).expand(count, 2, 3)
    return torch.rand(count, CANDIDATES, 3, generator=generator)


def farthest_colours(ink: Tensor, ground: Tensor, candidates: Tensor) -> Tensor:
    """Return the colour for each digit that differs most from its ground.

    Parameters
    ----------
    ink : (B, 1, H, W)
        The digits, from 0 to 1.
    ground : (B, 3, H, W)
    candidates : (B, N, 3)

    Returns
    -------
    (B, 3, 1, 1)
    """
    amount = ink.sum((2, 3)).clamp(min=1e-6)
    mean = (ink * ground).sum((2, 3)) / amount  # (B, 3)
    farthest = (candidates - mean.unsqueeze(1)).square().sum(2).argmax(1)
    return candidates[torch.arange(len(ink)), farthest].view(-1, 3, 1, 1)


def _labels(data: ImageSet) -> np.ndarray[Any, Any]:
    if data.labels is None:
        raise ValueError(f"--data must have labels, but {data.source} has none")
    return data.labels


def add_photographs(parser: argparse.ArgumentParser) -> None:
    """Add the option of the photographs."""
    parser.add_argument(
        "--photographs", help="folder or .npz file with a training and a test part, in colour"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the images to a file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", default="mnist", help="grey images (default: mnist)")
    parser.add_argument("--path", help="folder of the dataset")
    parser.add_argument("--ground", choices=GROUNDS, default="plain", help="(default: plain)")
    add_photographs(parser)
    parser.add_argument("--seed", type=int, default=SEED, help=f"(default: {SEED})")
    parser.add_argument("--out", type=Path, required=True, help=".npz file to write")
    options = parser.parse_args(arguments)
    if options.ground == "photograph" and options.photographs is None:
        parser.error("--ground photograph needs --photographs")
    parts: dict[str, np.ndarray[Any, Any]] = {}
    for number, split in enumerate(SPLITS):
        grey = load(options.data, split=split, path=options.path)
        photographs = load(options.photographs, split=split) if options.photographs else None
        images = coloured_digits(
            grey, options.ground, options.seed + number, photographs=photographs
        )
        parts |= {f"x_{split}": images.images, f"y_{split}": _labels(images)}
    np.savez(options.out, **parts)  # type: ignore[arg-type]  # no name is that of an option
    print(options.out)


if __name__ == "__main__":
    main()
