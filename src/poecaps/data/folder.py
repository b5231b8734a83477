"""A folder of PNG, JPEG or WebP images, decoded once into uint8."""

from __future__ import annotations

import inspect
import itertools
import os
import warnings
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import numpy as np

from poecaps import _checks as checks
from poecaps.data._storage import DataError, allocate
from poecaps.data.images import ImageSet

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from PIL.Image import Image

P = ParamSpec("P")
T = TypeVar("T")
MAX_SIDE = 16384  # pixels; more is a slip of the keyboard
SUFFIXES = (".png", ".jpg", ".jpeg", ".webp")
FORMATS = ("PNG", "JPEG", "WEBP")  # and no other decoder, whatever a file is called
OTHER, UNREADABLE = "no PNG, JPEG or WebP", "cannot be read"  # why a file is skipped
GREY_MODES = ("1", "L", "LA", "I", "I;16", "I;16B", "I;16L")


class SkippedWarning(UserWarning):
    """Some files of a folder were passed over."""


def read_folder(
    path: str | os.PathLike[str],
    *,
    size: int | tuple[int, int] | None = None,
    channels: int | None = None,
    label_names: Sequence[str] | None = None,
    smallest: int = 1,
) -> ImageSet:
    """Read all PNG, JPEG and WebP images below a folder, in the order of their paths.

    Other files, images that cannot be decoded and those that are too small are passed over; a warning says how many,
    and the attribute `skipped` of the result names each, and why.

    Where all images lie in subfolders, two or more, the first-level subfolder is the label. One image outside them, and
    there are no labels.

    Parameters
    ----------
    path
        The folder.
    size : (height, width), optional
        Scale each image to cover this size and crop its centre; one number for a square. Without it all images must
        have one size.
    channels
        1 for grey, 3 for RGB; by default grey if all images are grey. Transparency is laid on black.
    label_names
        The subfolders that there may be, in the order of their labels; by default those that there are, sorted.
    smallest
        Pass over images with a side of fewer pixels, before they are scaled.

    Raises
    ------
    DataError
        If there is no image that can be decoded, or sizes differ and no `size` is given.
    """
    root = Path(path)
    if not root.is_dir():
        raise NotADirectoryError(f"{root} is no folder; name the folder that holds the images")
    size = _as_size(size)
    if channels is not None and (type(channels) is not int or channels not in (1, 3)):
        raise ValueError(f"channels must be 1 (grey) or 3 (RGB), but is {channels!r}")
    checks.require_int("smallest", smallest, 1)
    files = sorted(_walk(root))
    skipped = {str(file): OTHER for file in files if file.suffix.lower() not in SUFFIXES}
    pictures = [file for file in files if str(file) not in skipped]
    if not pictures:
        there = ", ".join(file.name for file in files[:3]) + (", …" if len(files) > 3 else "")
        raise DataError(
            f"{root} holds no image ({', '.join(SUFFIXES)}), but {there or 'nothing'}; name a folder with images"
        )
    faults, grey, likely = [], True, []
    for file in pictures:
        seen = _attempt(_look, file)
        if isinstance(seen, DataError):
            skipped[str(file)] = UNREADABLE
            faults.append(str(seen))
        elif min(seen[1]) < smallest:
            skipped[str(file)] = f"smaller than {smallest}×{smallest}"
            faults.append(f"{file} has {_pixels(seen[1])} pixels; give larger images")
        else:
            grey = grey and seen[0] in GREY_MODES
            likely.append(file)
    channels = channels or (1 if grey else 3)

    kept: list[Path] = []
    images = np.empty(0, np.uint8)
    for file in likely:
        image = _attempt(_decode, file, size, channels)
        if isinstance(image, DataError):
            skipped[str(file)] = UNREADABLE
            faults.append(str(image))
            continue
        if not kept:
            images = allocate((len(likely), *image.shape), np.dtype(np.uint8))
        if image.shape != images.shape[1:]:
            raise DataError(
                f"{file} has {_pixels(image.shape)} pixels, but {kept[0]} has {_pixels(images.shape[1:])}; "
                "give a size=(height, width) to bring all images to"
            )
        images[len(kept)] = image
        kept.append(file)
    if not kept:
        of = "its only image" if len(faults) == 1 else f"the first of {len(faults)}"
        raise DataError(f"{root} holds no image to learn from; {of}: {faults[0]}")

    labels, names = _labels(root, kept, label_names)
    found = ImageSet(
        images[: len(kept)], labels, label_names=names, source=str(root), skipped=skipped
    )
    if skipped:
        warnings.warn(f"found {found.describe()}", SkippedWarning, stacklevel=_level_of_caller())
    return found


@contextmanager
def without_warning() -> Iterator[None]:
    """Say nothing of files that are passed over, where the caller does."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SkippedWarning)
        yield


def _level_of_caller() -> int:
    """Count the calls from the function that asks up to the line that called poecaps, as a warning counts them."""
    frame = inspect.currentframe()
    for level in itertools.count():
        if frame is None or frame.f_globals.get("__name__", "").split(".")[0] not in (
            "poecaps",
            "contextlib",
        ):
            return level
        frame = frame.f_back
    raise AssertionError


@contextmanager
def _opened(file: Path) -> Iterator[Image]:
    """Open an image, and turn whatever a bad one makes Pillow raise into one clear error."""
    from PIL import Image

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(file, formats=FORMATS) as image:
                yield image
    except (MemoryError, PermissionError):
        raise
    except Exception as error:  # Pillow has many ways to say that a file is damaged
        raise DataError(f"{file} is no sound image ({error}); mend or remove it") from error


def _attempt(read: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | DataError:
    """Call a function, and return the fault of the data where it finds one."""
    try:
        return read(*args, **kwargs)
    except DataError as error:
        return error


def _look(file: Path) -> tuple[str, tuple[int, int]]:
    """Read the mode of an image, and its height and width, from its header."""
    with _opened(file) as image:
        return image.mode, (image.height, image.width)


def _decode(file: Path, size: tuple[int, int] | None, channels: int) -> np.ndarray[Any, Any]:
    """Decode one image to (H, W, C) uint8."""
    from PIL import Image, ImageOps

    with _opened(file) as stored:
        image = flatten(stored, channels)
        if size is not None:
            image = ImageOps.fit(image, size[::-1], Image.Resampling.LANCZOS)
        return np.asarray(image).reshape(*image.size[::-1], channels)


def flatten(stored: Image, channels: int) -> Image:
    """Bring an image to 8 bits of grey (1) or RGB (3), the right way up, on black where it is transparent."""
    from PIL import Image, ImageOps

    image = ImageOps.exif_transpose(stored)
    if image.mode.startswith("I"):  # 16 bits: Pillow's own conversion would clip, not scale
        image = Image.fromarray(
            (np.asarray(image).astype(np.int64).clip(0, 65535) // 257).astype(np.uint8)
        )
    if "A" in image.getbands() or "transparency" in image.info:
        rgba = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", rgba.size, "black"), rgba)
    return image.convert("L" if channels == 1 else "RGB")


def subfolders(root: Path) -> set[str]:
    """Names of the first-level folders in which there are images."""
    parents = {
        file.relative_to(root).parts[0] for file in _walk(root) if file.suffix.lower() in SUFFIXES
    }
    return {name for name in parents if (root / name).is_dir()}


def _walk(root: Path) -> Iterator[Path]:
    """Yield all files below a folder, but hidden ones; a folder that cannot be read is an error, not a gap."""

    def refuse(error: OSError) -> None:
        raise error

    for folder, _, files in os.walk(root, onerror=refuse):
        yield from (Path(folder) / file for file in files if not file.startswith("."))


def _as_size(size: int | tuple[int, int] | None) -> tuple[int, int] | None:
    if size is None:
        return None
    sides = tuple(size) if isinstance(size, (tuple, list)) else (size, size)
    if len(sides) != 2:
        raise ValueError(f"size must be one number, or height and width, but is {size!r}")
    for side in sides:
        checks.require_int("size", side, 1, MAX_SIDE)
    return int(sides[0]), int(sides[1])


def _labels(
    root: Path, pictures: list[Path], label_names: Sequence[str] | None
) -> tuple[np.ndarray[Any, Any] | None, tuple[str, ...]]:
    parents = [file.relative_to(root).parts[:-1] for file in pictures]
    names = (
        sorted({parts[0] for parts in parents if parts})
        if label_names is None
        else list(label_names)
    )
    if len(names) < 2 or not all(parents):
        return None, ()
    return np.array([names.index(parts[0]) for parts in parents]), tuple(names)


def _pixels(shape: tuple[int, ...]) -> str:
    return f"{shape[0]}×{shape[1]}"
