"""Image files from and to arrays of pixels (H, W, C), uint8, entirely in memory."""

from __future__ import annotations

import io
import warnings
from typing import Any, NamedTuple

import numpy as np
from PIL import Image, ImageOps

from poecaps.data.folder import FORMATS, to_grey_or_rgb

Array = np.ndarray[Any, Any]

MAX_PIXELS = 40_000_000  # of a picture that is read; phone cameras make 12 to 50 million, mostly 12
DIGIT_BOX = 20 / 28  # share of the side that the digits of MNIST fill
BACKGROUND = 0.15  # pixels up to this share of the brightest are background when centring
FRAME_SIDE, FRAME_WIDTH = 64, 3  # the frame of a picture, in a copy of 64×64 pixels
# A background is plain if this share of the frame is within so many of 255 levels of its median.
PLAIN_SHARE, PLAIN_LEVELS = 0.7, 48
INK, PAPER = 0.5, 10.0  # percentiles of the brightness of a picture, and of its frame


class PictureError(ValueError):
    """A file is not a picture that can be read."""


class Picture(NamedTuple):
    """A picture as the input of a model."""

    pixels: Array
    """(H, W, C), uint8."""
    inverted: bool
    """Whether its brightness was inverted."""


def read(
    data: bytes,
    shape: tuple[int, int, int],
    *,
    centre: bool = False,
    invert: bool | None = False,
    background: float | None = None,
) -> Picture:
    """Read a PNG, JPEG or WebP file, scale it to cover the size of the model's input and crop it.

    Parameters
    ----------
    data
        The content of the file.
    shape : (C, H, W)
        The shape of the model's input.
    centre
        Whether to preprocess the picture like the digits of MNIST instead: scale its bright part to
        20/28 of the size, and move the centre of mass to the centre. If `background` is light, the
        same with its dark part.
    invert
        Whether to invert the brightness, for dark strokes on light paper. In a grey picture, the
        paper becomes black and the ink white, even if they are not white and black in a photo.
        None: if the background of the picture is plain and the opposite of `background`.
    background
        Brightness of the background of the model's images, from 0 to 1, or None if they have none.

    Raises
    ------
    PictureError
        If the file is not a valid picture, or has too many pixels.
    """
    channels, height, width = shape
    image = _open(data, channels)
    if invert is None:
        own = plain_background(np.asarray(image.convert("L")))
        invert = own is not None and background is not None and is_opposite(own, background)
    if invert:
        image = _negative(image)
    if not centre:
        image = ImageOps.fit(image, (width, height), Image.Resampling.LANCZOS)
    elif is_light(background):
        image = ImageOps.invert(_centred(ImageOps.invert(image), (width, height)))
    else:
        image = _centred(image, (width, height))
    return Picture(np.asarray(image).reshape(height, width, channels), invert)


def plain_background(grey: Array) -> float | None:
    """Return the brightness of the background, from 0 to 1, or None if there is no plain one.

    Parameters
    ----------
    grey : (..., H, W)
        Pictures of any size, uint8; their background is the median along their four sides.
    """
    small = [
        np.asarray(
            Image.fromarray(each).resize((FRAME_SIDE, FRAME_SIDE), Image.Resampling.BOX), np.float64
        )
        for each in grey.reshape(-1, *grey.shape[-2:])
    ]
    frame = _frame(np.stack(small))
    median = float(np.median(frame))
    is_plain = (np.abs(frame - median) <= PLAIN_LEVELS).mean() >= PLAIN_SHARE
    return median / 255 if is_plain else None


def is_opposite(background: float, other: float) -> bool:
    """Return whether a background is clearly nearer to another one once it is inverted."""
    return abs(background - other) > abs(1 - background - other) + 0.1


def is_light(background: float | None) -> bool:
    """Return whether a background is plain, and nearer to white than to black."""
    return background is not None and background > 0.5


def _frame(pixels: Array) -> Array:
    """Return the pixels along the four sides: (..., H, W) → (P,)."""
    inner = np.s_[..., FRAME_WIDTH:-FRAME_WIDTH, FRAME_WIDTH:-FRAME_WIDTH]
    is_frame = np.ones(pixels.shape, bool)
    is_frame[inner] = False
    return pixels[is_frame]


def _negative(image: Image.Image) -> Image.Image:
    """Invert the brightness; of a grey picture, from that of the paper to that of the ink."""
    if image.mode != "L":
        return ImageOps.invert(image)
    size = (min(image.width, 512), min(image.height, 512))
    grey = np.asarray(image.resize(size, Image.Resampling.BOX), np.float64)
    enough = min(grey.shape) > 2 * FRAME_WIDTH
    paper = float(np.percentile(_frame(grey) if enough else grey, PAPER))
    ink = float(np.percentile(grey, INK))
    if paper - ink < PLAIN_LEVELS:  # hardly any ink, or no paper
        return ImageOps.invert(image)
    return image.point(lambda level: round(255 * min(max((paper - level) / (paper - ink), 0), 1)))


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
