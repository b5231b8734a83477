"""IDX, the format of MNIST: two zero bytes, a type, a rank, the sizes (big-endian), then the numbers."""

from __future__ import annotations

import gzip
import math
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from poecaps.data._storage import DataError, SupportsRead, read_stream

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator

Split = Literal["train", "test"]

TYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
MAX_RANK = 8
MAX_DEFLATE_RATIO = 1032  # no gzip stream expands further
PREFIX: dict[Split, str] = {"train": "train", "test": "t10k"}


def read_idx(path: str | os.PathLike[str]) -> np.ndarray[Any, Any]:
    """Read an IDX file, gzipped or plain (told apart by content, not by name).

    A plain file is memory-mapped. A gzipped one is unpacked into memory, or into a temporary file where it is large.

    Returns
    -------
    np.ndarray
        Read-only where memory-mapped, of the shape and type in the header.

    Raises
    ------
    DataError
        If the file is no IDX file, cut short or too long.
    """
    path = Path(path)
    with path.open("rb") as file:
        packed = file.read(2) == b"\x1f\x8b"
        file.seek(0)
        size = path.stat().st_size
        if not packed:
            shape, dtype = _read_header(file, path)
            start, length = file.tell(), math.prod(shape) * dtype.itemsize
            if size != start + length:
                fault = "is cut short" if size < start + length else "is too long"
                raise DataError(
                    f"{path} {fault}: its header promises {length} bytes of data, {size - start} are there"
                )
            return np.memmap(path, dtype, mode="r", offset=start, shape=shape)
        try:
            with gzip.GzipFile(fileobj=file) as stream:
                shape, dtype = _read_header(stream, path)
                length = math.prod(shape) * dtype.itemsize
                if length > size * MAX_DEFLATE_RATIO:
                    raise DataError(
                        f"{path} is cut short: its header promises {length} bytes of data, "
                        f"more than {size} gzipped bytes can hold"
                    )
                return read_stream(stream, shape, dtype, str(path))
        except (OSError, EOFError, zlib.error) as error:
            raise DataError(f"{path} is a damaged gzip file ({error}); get it anew") from error


def find_images(folder: Path, split: Split) -> Path | None:
    """Find the images of a split in a folder, under any of their customary names."""
    return _first_file(folder, f"{PREFIX[split]}-images-idx3-ubyte")


def find_labels(images: Path) -> Path | None:
    """Find the file beside an images file that holds its labels, by its name."""
    name = images.name.removesuffix(".gz").replace("images", "labels").replace("idx3", "idx1")
    return None if name == images.name.removesuffix(".gz") else _first_file(images.parent, name)


def _first_file(folder: Path, name: str) -> Path | None:
    """Find a file plain or gzipped, as published (`-idx3`) or as some copies are named (`.idx3`)."""
    spellings = (name, name.replace(".idx", "-idx"), name.replace("-idx", ".idx"))
    candidates: Iterator[Path] = (
        folder / f"{each}{end}" for each in spellings for end in ("", ".gz")
    )
    return next((file for file in candidates if file.is_file()), None)


def may_be_idx(path: Path) -> bool:
    """Tell whether a file is named as MNIST's are, or begins as IDX or gzip does."""
    with path.open("rb") as file:
        return "idx" in path.name or file.read(2) in (b"\0\0", b"\x1f\x8b")


def _read_header(file: SupportsRead, path: Path) -> tuple[tuple[int, ...], np.dtype[Any]]:
    magic = file.read(4)
    if (
        len(magic) < 4
        or magic[:2] != b"\0\0"
        or magic[2] not in TYPES
        or not 1 <= magic[3] <= MAX_RANK
    ):
        hint = ""
        if magic.lstrip()[:1] == b"<":
            hint = "; it looks like a web page saved under this name, so download it again"
        raise DataError(
            f"{path} is no IDX file: it begins with the bytes {magic.hex(' ') or '(none)'}, where "
            f"00 00, a type and a rank from 1 to {MAX_RANK} are due{hint}"
        )
    sizes = file.read(4 * magic[3])
    if len(sizes) < 4 * magic[3]:
        raise DataError(f"{path} is cut short: it ends within its header")
    shape = tuple(int(size) for size in np.frombuffer(sizes, ">u4"))
    if 0 in shape:
        raise DataError(f"{path} is empty: its header gives the shape {shape}")
    return shape, np.dtype(TYPES[magic[2]])
