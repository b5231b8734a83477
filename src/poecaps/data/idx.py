"""IDX, the file format of MNIST.

A file consists of two zero bytes, a type, the number of axes, the length of each axis (big-endian)
and the values.
"""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from poecaps._files import open_regular
from poecaps.data.buffers import SupportsRead, read_plain, read_stream
from poecaps.data.errors import DataError

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator

Split = Literal["train", "test"]

DTYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
MAX_AXES = 8  # images have 3 or 4; a larger number means that the file is not IDX
PREFIX: dict[Split, str] = {"train": "train", "test": "t10k"}  # of MNIST's file names


def read_idx(path: str | os.PathLike[str]) -> np.ndarray[Any, Any]:
    """Read an IDX file, gzipped or plain; which of both is detected from its content.

    A file of up to 256 MiB is read into memory. A larger one is memory-mapped or, if it is gzipped,
    decompressed into a temporary file.

    Returns
    -------
    np.ndarray
        The array, with the shape and type given in the header. Read-only if memory-mapped.

    Raises
    ------
    DataError
        If the file is not an IDX file, is truncated or too long.
    """
    path = Path(path)
    with open_regular(path) as file:
        gzipped = file.read(2) == b"\x1f\x8b"
        file.seek(0)
        size = path.stat().st_size
        if not gzipped:
            shape, dtype = _read_header(file, path)
            return read_plain(file, shape, dtype, size - file.tell(), str(path))
        try:
            with gzip.GzipFile(fileobj=file) as stream:
                shape, dtype = _read_header(stream, path)
                return read_stream(stream, shape, dtype, size, str(path))
        except (OSError, EOFError, zlib.error) as error:
            raise DataError(
                f"cannot read {path}: damaged gzip file ({error}); download it again"
            ) from error


def find_images(folder: Path, split: Split) -> Path | None:
    """Return the file of a split's images in a folder, or None if there is no such file."""
    return _first_file(folder, f"{PREFIX[split]}-images-idx3-ubyte")


def find_labels(images: Path) -> Path | None:
    """Return the file of the labels in the same folder as a file of images, or None."""
    name = images.name.removesuffix(".gz").replace("images", "labels").replace("idx3", "idx1")
    return None if name == images.name.removesuffix(".gz") else _first_file(images.parent, name)


def _first_file(folder: Path, name: str) -> Path | None:
    """Find a file, plain or gzipped, named as published (`-idx3`) or as in copies (`.idx3`)."""
    spellings = (name, name.replace(".idx", "-idx"), name.replace("-idx", ".idx"))
    candidates: Iterator[Path] = (
        folder / f"{each}{end}" for each in spellings for end in ("", ".gz")
    )
    return next((file for file in candidates if file.is_file()), None)


def looks_like_idx(path: Path) -> bool:
    """Return whether a file is named like MNIST's files, or starts like an IDX or gzip file."""
    with open_regular(path) as file:
        return "idx" in path.name or file.read(2) in (b"\0\0", b"\x1f\x8b")


def _read_header(file: SupportsRead, path: Path) -> tuple[tuple[int, ...], np.dtype[Any]]:
    magic = file.read(4)
    if (
        len(magic) < 4
        or magic[:2] != b"\0\0"
        or magic[2] not in DTYPES
        or not 1 <= magic[3] <= MAX_AXES
    ):
        hint = ""
        if magic.lstrip()[:1] == b"<":
            hint = "; it looks like a web page saved under this name, so download it again"
        raise DataError(
            f"cannot read {path}: not an IDX file. It starts with the bytes "
            f"{magic.hex(' ') or '(none)'} instead of 00 00, a type and a number of axes from 1 to "
            f"{MAX_AXES}{hint}"
        )
    sizes = file.read(4 * magic[3])
    if len(sizes) < 4 * magic[3]:
        raise DataError(f"{path} is truncated: it ends within its header")
    shape = tuple(int(size) for size in np.frombuffer(sizes, ">u4"))
    if 0 in shape:
        raise DataError(f"{path} is empty: the shape in its header is {shape}")
    return shape, np.dtype(DTYPES[magic[2]])
