"""Views of an image: copies under small random transformations.

The docstring of each field of `ViewOptions` is also its help text on the command line.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn import functional as nn

from poecaps import _checks as checks

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["NUMBERS", "ViewOptions", "make_copies", "make_views", "transform"]

MAX_VIEWS = 1000
NUMBERS = 7  # random numbers that determine a transformation


@dataclass(frozen=True)
class ViewOptions:
    """Number of views of an image, and the range of the transformations.

    The transformations should change how an object looks, and not what it is: digits must not be
    mirrored or turned upside down, but shoes may be mirrored.
    """

    count: int = 1
    """Views of each image, the first of which is the image itself; 1: there are no others."""
    rotation: float = 15.0
    """Largest rotation to either side, in degrees."""
    shift: float = 0.07
    """Largest shift in either direction, as a fraction of the width and the height."""
    scale: float = 0.12
    """Largest change of the size: by a factor from exp(-scale) to exp(scale)."""
    aspect: float = 0.06
    """Largest change of width against height: both by a factor from exp(-aspect) to exp(aspect)."""
    shear: float = 0.15
    """Largest horizontal shear, as a fraction of the height."""
    mirror: bool = False
    """Whether half of the views are mirrored, left to right."""

    def validate(self, prefix: str = "") -> None:
        """Raise ValueError or TypeError if an option is invalid; its name begins with `prefix`."""
        checks.require_int(f"{prefix}count", self.count, 1, MAX_VIEWS)
        for name in ("rotation", "shift", "scale", "aspect", "shear"):
            checks.require_nonnegative(f"{prefix}{name}", getattr(self, name))
        if self.rotation > 180:
            raise ValueError(f"{prefix}rotation must be at most 180, but is {self.rotation}")
        for name in ("shift", "scale", "aspect", "shear"):
            if getattr(self, name) > 1:
                raise ValueError(f"{prefix}{name} must be at most 1, but is {getattr(self, name)}")
        if not isinstance(self.mirror, bool):
            raise TypeError(f"{prefix}mirror must be True or False, but is {self.mirror!r}")

    def check_width(self, width: int, prefix: str = "") -> None:
        """Raise ValueError if images of this width cannot be mirrored, but views are to be."""
        if self.count > 1 and self.mirror and width == 1:
            raise ValueError(
                f"{prefix}mirror must be False for images that are one pixel wide: they are their "
                "own mirror images"
            )


def make_views(images: Tensor, uniform: Tensor, options: ViewOptions) -> Tensor:
    """Put the views of every image after it.

    Parameters
    ----------
    images : (B, C, H, W)
    uniform : (B, count − 1, NUMBERS)
        Random numbers from 0 to 1.
    options
        Number and range of the transformations.

    Returns
    -------
    (B·count, C, H, W)
        Every image, followed by its transformed copies.
    """
    copies = make_copies(images, uniform, options).unflatten(0, (len(images), -1))
    return torch.cat((images.unsqueeze(1), copies), dim=1).flatten(0, 1)


def make_copies(images: Tensor, uniform: Tensor, options: ViewOptions) -> Tensor:
    """Return the views of every image without the image itself.

    Parameters
    ----------
    images : (B, C, H, W)
    uniform : (B, count − 1, NUMBERS)
        Random numbers from 0 to 1.
    options
        Number and range of the transformations.

    Returns
    -------
    (B·(count − 1), C, H, W)
        The transformed copies of every image.
    """
    copied = images.repeat_interleave(options.count - 1, dim=0)
    return transform(copied, uniform.flatten(0, 1), options)


def transform(images: Tensor, uniform: Tensor, options: ViewOptions) -> Tensor:
    """Transform images, each in its own way, by bilinear interpolation.

    A pixel of the result at a position p, in pixels from the centre of the image, is that of the
    image at A p + b, with a shift b and::

        A = s · (rotation by θ + shear) · diag(±r, 1/r)

    Pixels outside of the image have the value of the nearest pixel inside.

    Parameters
    ----------
    images : (B, C, H, W)
    uniform : (B, NUMBERS)
        Random numbers from 0 to 1 that determine the transformations; at 0.5, nothing changes.
    options
        Range of the transformations.

    Returns
    -------
    (B, C, H, W)
    """
    height, width = images.shape[2:]
    signed = 2 * uniform.to(images.dtype) - 1
    angle = signed[:, 0] * math.radians(options.rotation)
    size, ratio = (signed[:, 1] * options.scale).exp(), (signed[:, 2] * options.aspect).exp()
    shear = signed[:, 3] * options.shear
    # In units of half the width and half the height, as `affine_grid` counts them.
    shift_x, shift_y = 2 * options.shift * signed[:, 4], 2 * options.shift * signed[:, 5]
    across = size * ratio
    if options.mirror:
        across = torch.where(signed[:, 6] > 0, -across, across)
    along = size / ratio
    cosine, sine = angle.cos(), angle.sin()
    x_row = torch.stack((cosine * across, (shear - sine) * along * height / width, shift_x), dim=1)
    y_row = torch.stack((sine * across * width / height, cosine * along, shift_y), dim=1)
    grid = nn.affine_grid(
        torch.stack((x_row, y_row), dim=1), list(images.shape), align_corners=False
    )
    if not pads_border(images.device):
        return nn.grid_sample(images, within_border(grid, height, width), align_corners=False)
    return nn.grid_sample(images, grid, padding_mode="border", align_corners=False)


def pads_border(device: torch.device) -> bool:
    """Return whether `grid_sample` has ``padding_mode="border"``; MPS has not before torch 2.13."""
    return device.type != "mps"


def within_border(grid: Tensor, height: int, width: int) -> Tensor:
    """Move positions (B, H, W, 2) of `grid_sample` outside of an image to its nearest pixel.

    The centres of the outermost pixels are at ±(1 − 1/width) and ±(1 − 1/height). Samples at the
    result are those with ``padding_mode="border"``, but for rounding.
    """
    last = 1 - 1 / grid.new_tensor([width, height])
    return torch.minimum(torch.maximum(grid, -last), last)
