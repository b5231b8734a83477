"""Image files from and to arrays of pixels (H, W, C), uint8, entirely in memory."""

from __future__ import annotations

import io
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image, ImageOps

from poecaps.data.folder import FORMATS, to_grey_or_rgb

if TYPE_CHECKING:
    Array = np.ndarray[Any, Any]

MAX_PIXELS = 40_000_000  # of a picture that is read; phone cameras make 12 to 50 million, mostly 12
DIGIT_BOX = 20 / 28  # share of the side that the digits of MNIST fill
BACKGROUND = 0.15  # pixels up to this share of the brightest are background when centring


class PictureError(ValueError):
    """A file is not a picture that can be read."""


def read(
    data: bytes, shape: tuple[int, int, int], *, centre: bool = False, invert: bool = False
) -> Array:
    """Read a PNG, JPEG or WebP file, scale it to cover the size of the model's input and crop it.

    Parameters
    ----------
    data
        The content of the file.
    shape : (C, H, W)
        The shape of the model's input.
    centre
        Whether to preprocess the picture like the digits of MNIST instead: scale its bright part to
        20/28 of the size, and move the centre of mass to the centre.
    invert
        Whether to invert the brightness, for dark strokes on light paper.

    Returns
    -------
    (H, W, C)
        uint8.

    Raises
    ------
    PictureError
        If the file is not a valid picture, or has too many pixels.
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
        raise PictureError("the file is empty; send a PNG, JPEG or WebP picture")
    try:
        with warnings.catch_warnings():
            # Pillow warns of unusual files; the number of pixels is checked below.
            warnings.simplefilter("ignore")
            with Image.open(io.BytesIO(data), formats=FORMATS) as stored:
                width, height = stored.size
                if width * height > MAX_PIXELS:
                    raise PictureError(
                        f"the picture has {width}×{height} pixels, but at most {MAX_PIXELS:,} are "
                        "accepted"
                    )
                return to_grey_or_rgb(stored, channels)
    except (MemoryError, PictureError):
        raise
    except Exception as error:  # Pillow raises many kinds of errors for damaged files
        raise PictureError("this is not a valid PNG, JPEG or WebP picture") from error


def _centred(image: Image.Image, size: tuple[int, int]) -> Image.Image:
    """Scale the bright part to the box of MNIST's digits, with its centre of mass in the centre."""
    grey = image.convert("L")
    threshold = BACKGROUND * float(np.asarray(grey).max())
    box = grey.point(lambda value: 255 if value > threshold else 0).getbbox()
    page = Image.new(image.mode, size)
    if box is None:  # the picture is black
        return page
    part = image.crop(box)
    scale = DIGIT_BOX * min(size) / max(part.size)
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
    """Write (H, W, C) as PNG, each pixel as a square of scale×scale."""
    large = pixels.repeat(scale, 0).repeat(scale, 1)
    file = io.BytesIO()
    Image.fromarray(large.squeeze(-1) if large.shape[-1] == 1 else large).save(file, "PNG")
    return file.getvalue()


def write_grid(pixels: Array, scale: int = 1, line: int = 1) -> bytes:
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
