"""A folder of PNG, JPEG or WebP images, decoded once into uint8."""

from __future__ import annotations

import warnings
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from poecaps.data._storage import DataError, allocate
from poecaps.data.images import ImageSet

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator

    from PIL.Image import Image

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp")
GREY_MODES = ("1", "L", "LA", "I", "I;16", "I;16B", "I;16L")


def read_folder(
    path: str | os.PathLike[str], *, size: tuple[int, int] | None = None, channels: int | None = None
) -> ImageSet:
    """Read all PNG, JPEG and WebP images below a folder, in the order of their paths.

    Where the images lie in two or more subfolders, and only there, the first-level subfolder is the label.

    Parameters
    ----------
    path
        The folder.
    size : (height, width), optional
        Scale each image to cover this size and crop its centre. Without it all images must have one size.
    channels
        1 for grey, 3 for RGB; by default grey if all images are grey. Transparency is laid on black.

    Raises
    ------
    DataError
        If there is no image, one cannot be decoded, or sizes differ and no `size` is given.
    """
    root = Path(path)
    files = sorted(file for file in root.rglob("*") if file.is_file() and not file.name.startswith("."))
    pictures = [file for file in files if file.suffix.lower() in SUFFIXES]
    if not pictures:
        there = ", ".join(file.name for file in files[:3]) + (", …" if len(files) > 3 else "")
        raise DataError(
            f"{root} holds no image ({', '.join(SUFFIXES)}); found {there or 'nothing'}. Name a folder with images"
        )
    if channels is None:
        channels = 1 if all(map(_is_grey, pictures)) else 3

    first = _decode(pictures[0], size, channels)
    images = allocate((len(pictures), *first.shape), np.dtype(np.uint8))
    for index, file in enumerate(pictures):
        image = _decode(file, size, channels)
        if image.shape != first.shape:
            raise DataError(
                f"{file} has {_pixels(image)} pixels, but {pictures[0]} has {_pixels(first)}; "
                "give a size=(height, width) to bring all images to"
            )
        images[index] = image

    labels, names = _labels(root, pictures)
    skipped = tuple(str(file) for file in files if file.suffix.lower() not in SUFFIXES)
    return ImageSet(images, labels, label_names=names, source=str(root), skipped=skipped)


@contextmanager
def _opened(file: Path) -> Iterator[Image]:
    """Open an image, and turn whatever a bad one makes Pillow raise into one clear error."""
    from PIL import Image

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(file) as image:
                yield image
    except Exception as error:  # Pillow has many ways to say that a file is damaged
        raise DataError(f"{file} is no sound image ({error}); mend or remove it") from error


def _is_grey(file: Path) -> bool:
    with _opened(file) as image:
        return image.mode in GREY_MODES


def _decode(file: Path, size: tuple[int, int] | None, channels: int) -> np.ndarray[Any, Any]:
    """Decode one image to (H, W, C) uint8."""
    from PIL import Image, ImageOps

    with _opened(file) as stored:
        image = ImageOps.exif_transpose(stored)
        if image.mode.startswith("I"):  # 16 bits: Pillow's own conversion would clip, not scale
            image = Image.fromarray((np.asarray(image).astype(np.int64).clip(0, 65535) // 257).astype(np.uint8))
        if "A" in image.getbands() or "transparency" in image.info:
            rgba = image.convert("RGBA")
            image = Image.alpha_composite(Image.new("RGBA", rgba.size, "black"), rgba)
        image = image.convert("L" if channels == 1 else "RGB")
        if size is not None:
            image = ImageOps.fit(image, size[::-1], Image.Resampling.LANCZOS)
        return np.asarray(image).reshape(*image.size[::-1], channels)


def _labels(root: Path, pictures: list[Path]) -> tuple[np.ndarray[Any, Any] | None, tuple[str, ...]]:
    parents = [file.relative_to(root).parts[:-1] for file in pictures]
    names = sorted({parts[0] for parts in parents if parts})
    if len(names) < 2 or not all(parents):
        return None, ()
    return np.array([names.index(parts[0]) for parts in parents]), tuple(names)


def _pixels(image: np.ndarray[Any, Any]) -> str:
    return f"{image.shape[0]}×{image.shape[1]}"
