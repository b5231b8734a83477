"""Digits in a frame of 40×40 pixels: placed at random to train on, transformed to test on.

`python -m benchmarks.affine_digits --path FOLDER --out affine-digits.npz` writes a file that
`poecaps train --data affine-digits.npz` and `poecaps evaluate` read; `benchmarks.transformations`
makes the same images in memory. The same seed always gives the same images.

The training images are those of MNIST, each at a random place of the frame (with `--copies N`, at N
places), and nothing else is changed. This is the protocol of Sabour, Frosst and Hinton, "Dynamic
routing between capsules", 2017 (arXiv 1710.09829), section 5.2. The test images are affine
transformations of the test images of MNIST, in the manner of affNIST (Tieleman,
https://www.cs.toronto.edu/~tijmen/affNIST/):

rotation    −20° to 20°
shear       −0.2 to 0.2: pixels of the frame to the side, for each pixel of height
scale       width and height by separate factors from 0.8 to 1.2
shift       any at which the whole digit is in the frame

affNIST itself has 32 transformed versions of every digit, is a download of its own, and
interpolates in another way; here every test digit is transformed once. Numbers on these images are
therefore close to, but not, numbers on affNIST.
"""

from __future__ import annotations

import argparse
import math
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

SIDE = 40  # pixels of the frame
ROTATION, SHEAR, SCALE = 20.0, 0.2, (0.8, 1.2)
SEED = 0
BATCH = 1000  # images that are transformed together

# A transformation is a row of these numbers; 0 changes nothing.
NAMES = ("rotation", "shear", "size", "aspect", "shift x", "shift y", "thickness")
"""Degrees clockwise; fraction of the height; logarithms of √(width · height) and √(width / height);
pixels to the right and down; share of a dilation by one pixel, not below 0."""


def draw_shapes(count: int, generator: torch.Generator) -> Tensor:
    """Draw rotation, shear, size and aspect, without shift or thickness: (count, len(NAMES))."""
    uniform = torch.rand(count, 4, generator=generator)
    low, high = SCALE
    width, height = (low + (high - low) * uniform[:, 2:]).log().unbind(1)
    numbers = torch.zeros(count, len(NAMES))
    numbers[:, 0] = ROTATION * (2 * uniform[:, 0] - 1)
    numbers[:, 1] = SHEAR * (2 * uniform[:, 1] - 1)
    numbers[:, 2], numbers[:, 3] = (width + height) / 2, (width - height) / 2
    return numbers


def matrices(numbers: Tensor) -> Tensor:
    """Compute the maps of positions of transformations, without their shifts: (N, ·) → (N, 2, 2).

    Positions are pixels to the right and down from the centre of the image::

        A = rotation · [[1, −shear], [0, 1]] · diag(e^(size + aspect), e^(size − aspect))
    """
    angle = numbers[:, 0] * (math.pi / 180)
    cosine, sine, one, zero = angle.cos(), angle.sin(), angle * 0 + 1, angle * 0
    rotation = torch.stack((cosine, -sine, sine, cosine), dim=1).view(-1, 2, 2)
    shear = torch.stack((one, -numbers[:, 1], zero, one), dim=1).view(-1, 2, 2)
    scale = torch.stack((numbers[:, 2] + numbers[:, 3], numbers[:, 2] - numbers[:, 3]), dim=1).exp()
    return rotation @ shear @ torch.diag_embed(scale)


def render(images: Tensor, numbers: Tensor, side: int = SIDE) -> Tensor:
    """Transform images into a black frame, by bilinear interpolation.

    Parameters
    ----------
    images : (N, C, H, W)
    numbers : (N, len(NAMES))
        A transformation of each.
    side
        Height and width of the frame.

    Returns
    -------
    (N, C, side, side)
    """
    height, width = images.shape[2:]
    inverse = torch.linalg.inv(matrices(numbers))
    offset = -(inverse @ numbers[:, 4:6].unsqueeze(2))
    # From positions in the frame to those in the image, in units of half of each.
    to_image = torch.cat((inverse * (side / 2), offset), dim=2)
    to_image = to_image / torch.tensor([width / 2, height / 2]).to(images).view(1, 2, 1)
    grid = nn.functional.affine_grid(
        to_image, [len(images), images.shape[1], side, side], align_corners=False
    )
    thick = thicken(images, numbers[:, 6])
    return nn.functional.grid_sample(thick, grid, align_corners=False)


def thicken(images: Tensor, amount: Tensor) -> Tensor:
    """Mix images with their dilation by one pixel.

    Parameters
    ----------
    images : (N, C, H, W)
    amount : (N,)
        Share of the dilation, from 0 to 1.
    """
    dilated = nn.functional.max_pool2d(images, 3, stride=1, padding=1)
    return torch.lerp(images, dilated, amount.view(-1, 1, 1, 1))


def free_shifts(images: Tensor, numbers: Tensor, side: int = SIDE) -> tuple[Tensor, Tensor]:
    """Compute the smallest and the largest shift at which an image is in the frame: (N, 2) each.

    Every pixel that is not black counts. If there is no such shift, both are the shift at which
    equally much is cut off on either side.
    """
    height, width = images.shape[2:]
    rows, columns = torch.meshgrid(
        torch.arange(height) - (height - 1) / 2,
        torch.arange(width) - (width - 1) / 2,
        indexing="ij",
    )
    pixels = torch.stack((columns.flatten(), rows.flatten())).to(images)  # (2, H·W)
    positions = matrices(numbers) @ pixels  # (N, 2, H·W)
    black = (images.amax(1) == 0).flatten(1).unsqueeze(1)
    lowest = positions.masked_fill(black, math.inf).amin(2)
    highest = positions.masked_fill(black, -math.inf).amax(2)
    limit = (side - 1) / 2 - 1  # a pixel has neighbours that interpolation makes grey
    low, high = -limit - lowest, limit - highest
    middle = (low + high) / 2
    return torch.minimum(low, middle), torch.maximum(high, middle)


def placements(count: int, room: int, generator: torch.Generator) -> Tensor:
    """Draw transformations that only shift, by whole pixels up to `room` in all: (count, ·)."""
    numbers = torch.zeros(count, len(NAMES))
    corner = torch.randint(0, room + 1, (count, 2), generator=generator)
    numbers[:, 4:6] = corner - room / 2
    return numbers


def placed_digits(
    data: ImageSet, seed: int = SEED, side: int = SIDE, *, copies: int = 1
) -> ImageSet:
    """Put every image at a random place of the frame, or several copies of it."""
    generator = torch.Generator().manual_seed(seed)
    if copies > 1:
        labels = None if data.labels is None else np.repeat(data.labels, copies)
        data = replace(data, images=np.repeat(data.images, copies, axis=0), labels=labels)
    numbers = placements(len(data), side - max(data.shape[1:]), generator)
    return transformed(data, numbers, side)


def affine_digits(data: ImageSet, seed: int = SEED, side: int = SIDE) -> ImageSet:
    """Transform every image at random, within the frame."""
    generator = torch.Generator().manual_seed(seed)
    numbers = draw_shapes(len(data), generator)
    uniform = torch.rand(len(data), 2, generator=generator)
    for start in range(0, len(data), BATCH):
        part = slice(start, start + BATCH)
        low, high = free_shifts(data.batch(part), numbers[part], side)
        numbers[part, 4:6] = low + (high - low) * uniform[part]
    return transformed(data, numbers, side)


def transformed(data: ImageSet, numbers: Tensor, side: int = SIDE) -> ImageSet:
    """Return the images after the transformations (N, len(NAMES)), as bytes."""
    images = np.empty((len(data), side, side, data.shape[0]), np.uint8)
    for start in range(0, len(data), BATCH):
        part = slice(start, start + BATCH)
        pixels = render(data.batch(part), numbers[part], side).mul(255).round().clamp(0, 255)
        images[part] = pixels.permute(0, 2, 3, 1).numpy().astype(np.uint8)
    return replace(data, images=images, files=())


def _labels(data: ImageSet) -> np.ndarray[Any, Any]:
    if data.labels is None:
        raise ValueError(f"--data must have labels, but {data.source} has none")
    return data.labels


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the images to a file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", default="mnist", help="images (default: mnist)")
    parser.add_argument("--path", help="folder of the dataset")
    parser.add_argument("--seed", type=int, default=SEED, help=f"(default: {SEED})")
    parser.add_argument(
        "--copies", type=int, default=1, help="places of each training digit (default: 1)"
    )
    parser.add_argument("--out", type=Path, required=True, help=".npz file to write")
    options = parser.parse_args(arguments)
    original = load(options.data, path=options.path)
    training = placed_digits(original, options.seed, copies=options.copies)
    test = affine_digits(load(options.data, split="test", path=options.path), options.seed)
    np.savez(
        options.out,
        x_train=training.images,
        y_train=_labels(training),
        x_test=test.images,
        y_test=_labels(test),
    )
    print(options.out)


if __name__ == "__main__":
    main()
