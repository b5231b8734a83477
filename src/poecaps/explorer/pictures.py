"""Image files from and to arrays of pixels (H, W, C), uint8, without ever touching a disk."""

from __future__ import annotations

import io
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image, ImageOps

from poecaps.data.folder import FORMATS, to_grey_or_rgb

if TYPE_CHECKING:
    Array = np.ndarray[Any, Any]

LARGEST = 40_000_000  # pixels of a picture that is read; a telephone makes 12 to 50 million, most of them 12
BOX = 20 / 28  # share of the side that MNIST's digits fill
FAINT = 0.15  # of the brightest pixel: less is background when a drawing is centred


class PictureError(ValueError):
    """Bytes that are no picture we read."""


def read(
    data: bytes, shape: tuple[int, int, int], *, centre: bool = False, invert: bool = False
) -> Array:
    """Read a PNG, JPEG or WebP and bring it to (C, H, W): scaled to cover the size, the rest of it cut off.

    Parameters
    ----------
    data
        The file.
    shape : (C, H, W)
        What the model sees.
    centre
        Whether to find what is bright instead, scale it to 20/28 of the size and put its centre of mass into the
        middle, as the digits of MNIST were.
    invert
        Whether dark is to be bright: for ink on paper.

    Returns
    -------
    (H, W, C)
        uint8.

    Raises
    ------
    PictureError
        If it is no sound picture, or too large a one.
    """
    channels, height, width = shape
    image = _open(data, channels)
    if invert:
        image = ImageOps.invert(image)
    image = (
        _centred(image, (width, height))
        if centre
        else ImageOps.fit(image, (width, height), Image.Resampling.LANCZOS)
    )
    return np.asarray(image).reshape(height, width, channels)


def _open(data: bytes, channels: int) -> Image.Image:
    if not data:
        raise PictureError("the file is empty; give a PNG, JPEG or WebP")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore"
            )  # Pillow's remarks about odd files; size is looked at below
            with Image.open(io.BytesIO(data), formats=FORMATS) as stored:
                width, height = stored.size
                if width * height > LARGEST:
                    raise PictureError(
                        f"the picture has {width}×{height} pixels; at most {LARGEST:,} are read"
                    )
                return to_grey_or_rgb(stored, channels)
    except (MemoryError, PictureError):
        raise
    except Exception as error:  # Pillow has many ways to say that a file is damaged
        raise PictureError("this is no sound PNG, JPEG or WebP picture") from error


def _centred(image: Image.Image, size: tuple[int, int]) -> Image.Image:
    """Scale what is bright to the box of MNIST's digits, with its centre of mass in the middle."""
    grey = image.convert("L")
    threshold = FAINT * float(np.asarray(grey).max())
    found = grey.point(lambda value: 255 if value > threshold else 0).getbbox()
    page = Image.new(image.mode, size)
    if found is None:  # nothing is drawn
        return page
    part = image.crop(found)
    scale = BOX * min(size) / max(part.size)
    part = part.resize(
        (max(1, round(part.width * scale)), max(1, round(part.height * scale))),
        Image.Resampling.LANCZOS,
    )
    mass = np.asarray(part.convert("L"), dtype=np.float64) + 1e-9
    x = (mass.sum(0) @ np.arange(part.width) + mass.sum() / 2) / mass.sum()
    y = (mass.sum(1) @ np.arange(part.height) + mass.sum() / 2) / mass.sum()
    left = min(max(round(size[0] / 2 - x), 0), size[0] - part.width)
    top = min(max(round(size[1] / 2 - y), 0), size[1] - part.height)
    page.paste(part, (left, top))
    return page


def write(pixels: Array, scale: int = 1) -> bytes:
    """Write (H, W, C) as PNG, each pixel a square of scale×scale."""
    large = pixels.repeat(scale, 0).repeat(scale, 1)
    file = io.BytesIO()
    Image.fromarray(large.squeeze(-1) if large.shape[-1] == 1 else large).save(file, "PNG")
    return file.getvalue()


def sheet(pixels: Array, scale: int = 1, line: int = 1) -> bytes:
    """Write (rows, columns, H, W, C) as one PNG, with grey lines between the pictures."""
    rows, columns, height, width, channels = pixels.shape
    page = np.full(
        (rows * (height + line) - line, columns * (width + line) - line, channels), 128, np.uint8
    )
    for row in range(rows):
        for column in range(columns):
            top, left = row * (height + line), column * (width + line)
            page[top : top + height, left : left + width] = pixels[row, column]
    return write(page, scale)
