"""A folder of PNG, JPEG or WebP images, decoded once into uint8."""

from __future__ import annotations

import inspect
import itertools
import math
import os
import warnings
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from poecaps import _checks as checks
from poecaps._files import open_regular
from poecaps.data.buffers import allocate
from poecaps.data.errors import DataError
from poecaps.data.images import ImageSet

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from concurrent.futures import Future

    from PIL.Image import Image

    from poecaps._progress import Report

MAX_SIDE = 16384  # pixels; a larger `size` is most likely a typing error
SMALL_SIDE = 32  # pixels of the images for which the default options are meant
SUFFIXES = (".png", ".jpg", ".jpeg", ".webp")
FORMATS = ("PNG", "JPEG", "WEBP")  # the only decoders used, regardless of a file's suffix
# Why a file is skipped. Opening a FIFO, a socket or a device may never return.
OTHER_FORMAT, UNREADABLE = "not PNG, JPEG or WebP", "unreadable"
NO_FILE = "not a regular file"
GREY_TOLERANCE = 3  # largest difference of the channels of a grey pixel, of 255; JPEG rounds them
THREADS = min(8, os.cpu_count() or 1)  # that decode files
AHEAD = 4 * THREADS  # files that the threads may be ahead of the caller
# Pixels of the pictures that are decoded at the same time, or wait for the caller: as many as the
# largest picture may have. Of a WebP file, each takes about 30 bytes meanwhile.
PIXELS_AHEAD = 89_478_485
LARGE_FOLDER = 2**30  # bytes of all pictures, decoded, about which there is a warning
ROWS = 256  # of a picture whose channels are compared at once
GREY_MODES = ("1", "L", "LA", "I", "I;16", "I;16B", "I;16L")

Result = TypeVar("Result")


class SkippedFilesWarning(UserWarning):
    """Some files of a folder were skipped."""


class LargePicturesWarning(UserWarning):
    """The pictures of a folder take much space, because they are not scaled."""


def read_folder(
    path: str | os.PathLike[str],
    *,
    size: int | tuple[int, int] | None = None,
    channels: int | None = None,
    label_names: Sequence[str] | None = None,
    smallest: int = 1,
    report: Report | None = None,
) -> ImageSet:
    """Read all PNG, JPEG and WebP images below a folder, sorted by path.

    Other files, images that cannot be decoded and images that are too small are skipped. A warning
    states how many; the attribute `skipped` of the result lists them with the reasons.

    If every image is in a subfolder, and there are at least two subfolders, the first-level
    subfolder of an image is its label. Otherwise the images have no labels.

    Parameters
    ----------
    path
        The folder.
    size : (height, width), optional
        Scale each image to cover this size and crop its centre; one number means a square. Without
        it, all images must have the same size.
    channels
        1 for grey, 3 for RGB; by default grey if all images are grey, also if they are stored as
        RGB. Transparent images are composited on black.
    label_names
        All possible subfolders, in the order of their labels; by default the existing subfolders,
        sorted.
    smallest
        Skip images with a side of fewer pixels, measured before scaling, unless all images are
        that small.
    report
        Called with the number of files that were read, and that of all files. Files are read
        twice: first their sizes, which counts as a half.

    Raises
    ------
    DataError
        If no image can be decoded, or the images have different sizes and `size` is not given.
    """
    root = Path(path)
    if not root.is_dir():
        raise NotADirectoryError(
            f"{root} is not a folder; give the folder that contains the images"
        )
    data = _read_files(root, sorted(_files_below(root)), size, channels, smallest, report)
    labels, names = _labels(root, [root / file for file in data.files], label_names)
    data = replace(data, labels=labels, label_names=names)
    if data.skipped:
        warnings.warn(
            f"found {data.describe()}", SkippedFilesWarning, stacklevel=_stacklevel_of_caller()
        )
    return data


def is_picture(path: Path) -> bool:
    """Return whether a path is that of a single PNG, JPEG or WebP image."""
    return path.suffix.lower() in SUFFIXES and not path.is_dir()


def read_picture(
    path: Path,
    *,
    size: int | tuple[int, int] | None = None,
    channels: int | None = None,
    smallest: int = 1,
) -> ImageSet:
    """Read a single image, with the parameters of `read_folder`."""
    data = _read_files(path.parent, [path], size, channels, smallest, None)
    return replace(data, source=str(path))


def _read_files(
    root: Path,
    files: list[Path],
    size: int | tuple[int, int] | None,
    channels: int | None,
    smallest: int,
    report: Report | None,
) -> ImageSet:
    """Read files below a folder, without labels; see `read_folder`."""
    from PIL import Image

    # Threads share the filters of warnings, so they are set once, for all of them.
    with ThreadPoolExecutor(THREADS) as pool, warnings.catch_warnings():
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        return _read_by(pool, root, files, size, channels, smallest, report)


def _read_by(
    pool: ThreadPoolExecutor,
    root: Path,
    files: list[Path],
    size: int | tuple[int, int] | None,
    channels: int | None,
    smallest: int,
    report: Report | None,
) -> ImageSet:
    """Read files as `_read_files` does, by the threads of a pool."""
    size, channels = as_size(size), as_channels(channels)
    checks.require_int("smallest", smallest, 1)
    skipped = {str(file): OTHER_FORMAT for file in files if file.suffix.lower() not in SUFFIXES}
    skipped |= {str(file): NO_FILE for file in files if not file.is_file()}
    pictures = [file for file in files if str(file) not in skipped]
    if not pictures:
        found = ", ".join(file.name for file in files[:3]) + (", …" if len(files) > 3 else "")
        raise DataError(
            f"{root} {f'contains only {found}' if files else 'is empty'}; give a folder of PNG, "
            "JPEG or WebP images"
        )
    problems: list[str] = []
    headers: dict[Path, tuple[str, tuple[int, int]]] = {}
    for number, (file, header) in enumerate(_in_parallel(pool, _read_mode_and_size, pictures)):
        if report is not None:
            report(number // 2, len(pictures))
        if isinstance(header, DataError):
            skipped[str(file)] = UNREADABLE
            problems.append(str(header))
        else:
            headers[file] = header
    if all(min(sides) < smallest for _, sides in headers.values()):
        smallest = 1
    candidates = [file for file, (_, sides) in headers.items() if min(sides) >= smallest]
    too_small = f"smaller than {smallest}×{smallest}"
    skipped |= {str(file): too_small for file in headers.keys() - set(candidates)}
    all_grey = all(headers[file][0] in GREY_MODES for file in candidates)
    decoded_channels = channels or (1 if all_grey else 3)

    kept: list[Path] = []
    images = np.empty(0, np.uint8)
    decode = partial(_decode, size=size, channels=decoded_channels)
    pixels = [math.prod(headers[file][1]) for file in candidates]
    if size is None:
        _warn_of_large_pictures([headers[file][1] for file in candidates], decoded_channels)
    for number, (file, image) in enumerate(_in_parallel(pool, decode, candidates, pixels)):
        if report is not None:
            report(len(pictures) - (len(candidates) - number + 1) // 2, len(pictures))
        if isinstance(image, DataError):
            skipped[str(file)] = UNREADABLE
            problems.append(str(image))
            continue
        if not kept:
            images = allocate((len(candidates), *image.shape), np.dtype(np.uint8))
        if image.shape != images.shape[1:]:
            side = min(SMALL_SIDE, *image.shape[:2], *images.shape[1:3])
            raise DataError(
                f"the images have different sizes: {file} has {_format_size(image.shape)} pixels, "
                f"but {kept[0]} has {_format_size(images.shape[1:])}; set the option size "
                f"(height, width), such as --size {side} {side}, to scale all of them to one size"
            )
        images[len(kept)] = image
        kept.append(file)
    if report is not None:
        report(len(pictures), len(pictures))
    if not kept:
        which = "its only image" if len(problems) == 1 else f"the first of {len(problems)} problems"
        raise DataError(f"{root} contains no usable image; {which}: {problems[0]}")

    images = images[: len(kept)]
    if channels is None and decoded_channels == 3:
        images = drop_equal_channels(images)
    grey_as_rgb = images.shape[-1] < decoded_channels
    return ImageSet(
        images,
        source=str(root),
        skipped=skipped,
        files=tuple(str(file.relative_to(root)) for file in kept),
        grey_as_rgb=grey_as_rgb,
    )


@contextmanager
def suppress_skipped_warnings() -> Iterator[None]:
    """Suppress the warning about skipped files, for callers that report these files themselves."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SkippedFilesWarning)
        yield


def _stacklevel_of_caller() -> int:
    """Return the `stacklevel` at which a warning points to the line that called the package."""
    frame = inspect.currentframe()
    for level in itertools.count():
        if frame is None or frame.f_globals.get("__name__", "").split(".")[0] not in (
            "poecaps",
            "contextlib",
        ):
            return level
        frame = frame.f_back
    raise AssertionError


def _warn_of_large_pictures(sizes: Sequence[tuple[int, int]], channels: int) -> None:
    """Warn if pictures that are not scaled take much space; they all have the size of the first."""
    needed = len(sizes) * math.prod(sizes[0]) * channels if sizes else 0
    if needed > LARGE_FOLDER and len(set(sizes)) == 1:
        height, width = sizes[0]
        warnings.warn(
            f"{len(sizes)} pictures of {height}×{width} take {needed / 2**30:.1f} GiB, in a "
            f"temporary file; set the option size, such as --size {SMALL_SIDE} {SMALL_SIDE}, to "
            "scale them down",
            LargePicturesWarning,
            stacklevel=_stacklevel_of_caller(),
        )


def _in_parallel(
    pool: ThreadPoolExecutor,
    function: Callable[[Path], Result],
    files: Sequence[Path],
    pixels: Sequence[int] | None = None,
) -> Iterator[tuple[Path, Result | DataError]]:
    """Yield each file, in order, with the result of a function or the `DataError` that it raised.

    Pillow decodes and scales in C, so threads share the work. They run ahead of the caller by a few
    files only, and by `PIXELS_AHEAD` if `pixels` has those of each file. This bounds the memory.
    """

    def result(file: Path) -> Result | DataError:
        try:
            return function(file)
        except DataError as error:
            return error

    sizes = [0] * len(files) if pixels is None else pixels
    waiting: deque[Future[Result | DataError]] = deque()
    submitted = ahead = 0
    for file, size in zip(files, sizes, strict=True):
        while submitted < len(files) and len(waiting) <= AHEAD:
            if waiting and ahead + sizes[submitted] > PIXELS_AHEAD:
                break
            waiting.append(pool.submit(result, files[submitted]))
            ahead += sizes[submitted]
            submitted += 1
        yield file, waiting.popleft().result()
        ahead -= size


@contextmanager
def _opened(file: Path) -> Iterator[Image]:
    """Open an image; any error that Pillow raises for an invalid image becomes a `DataError`."""
    from PIL import Image

    try:
        with open_regular(file) as opened, Image.open(opened, formats=FORMATS) as image:
            yield image
    except (MemoryError, PermissionError):
        raise
    except Exception as error:  # Pillow raises many kinds of errors for damaged files
        raise DataError(
            f"cannot read {file}: not a valid image ({error}); repair or remove it"
        ) from error


def _read_mode_and_size(file: Path) -> tuple[str, tuple[int, int]]:
    """Read Pillow's mode of an image, and its height and width, from its header."""
    with _opened(file) as image:
        return image.mode, (image.height, image.width)


def _decode(file: Path, size: tuple[int, int] | None, channels: int) -> np.ndarray[Any, Any]:
    """Decode one image to (H, W, C), uint8."""
    with _opened(file) as stored:
        return fit(stored, size, channels)


def fit(stored: Image, size: tuple[int, int] | None, channels: int) -> np.ndarray[Any, Any]:
    """Convert an image to (H, W, C), uint8, and scale and crop it if a size is given."""
    from PIL import Image, ImageOps

    image = to_grey_or_rgb(stored, channels)
    if size is not None:
        image = ImageOps.fit(image, size[::-1], Image.Resampling.LANCZOS)
    return np.asarray(image).reshape(*image.size[::-1], channels)


def drop_equal_channels(images: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Keep one channel of images (N, H, W, C) if all three are equal everywhere, but for rounding.

    They then are grey images that were stored as RGB.
    """
    is_grey = all(
        np.ptp(image[row : row + ROWS].astype(np.int16), axis=-1).max() <= GREY_TOLERANCE
        for image in images
        for row in range(0, len(image), ROWS)
    )
    return np.ascontiguousarray(images[..., :1]) if is_grey else images


def to_grey_or_rgb(stored: Image, channels: int) -> Image:
    """Convert an image to 8-bit grey (1 channel) or RGB (3 channels).

    The image is rotated according to its EXIF orientation and composited on black if transparent.
    """
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


def label_folders(root: Path) -> set[str]:
    """Return the names of the first-level subfolders that contain images."""
    parents = {
        file.relative_to(root).parts[0]
        for file in _files_below(root)
        if file.suffix.lower() in SUFFIXES
    }
    return {name for name in parents if (root / name).is_dir()}


def _files_below(root: Path) -> Iterator[Path]:
    """Yield all files below a folder except hidden ones.

    Raises `OSError` for a subfolder that cannot be read, which `os.walk` would skip silently.
    """

    def reraise(error: OSError) -> None:
        raise error

    for folder, _, files in os.walk(root, onerror=reraise):
        yield from (Path(folder) / file for file in files if not file.startswith("."))


def as_channels(channels: int | None) -> int | None:
    """Return a number of channels, or None; raise ValueError if it is neither 1 nor 3."""
    if channels is not None and (type(channels) is not int or channels not in (1, 3)):
        raise ValueError(f"channels must be 1 (grey) or 3 (RGB), but is {channels!r}")
    return channels


def as_size(size: int | tuple[int, int] | None) -> tuple[int, int] | None:
    """Return height and width, or None; one number means a square."""
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
    """Return the label of each image and the names of all labels; None and () without labels."""
    parents = [file.relative_to(root).parts[:-1] for file in pictures]
    names = (
        sorted({parts[0] for parts in parents if parts})
        if label_names is None
        else list(label_names)
    )
    if len(names) < 2 or not all(parents):
        return None, ()
    numbers = {name: number for number, name in enumerate(names)}
    return np.array([numbers[parts[0]] for parts in parents]), tuple(names)


def _format_size(shape: tuple[int, ...]) -> str:
    return f"{shape[0]}×{shape[1]}"
