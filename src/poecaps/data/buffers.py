"""Arrays from files: in memory if small, memory-mapped if large."""

from __future__ import annotations

import math
import mmap
import os
import tempfile
from typing import IO, TYPE_CHECKING, Any, Protocol

import numpy as np

from poecaps.data.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_IN_MEMORY = 256 * 2**20  # bytes; larger arrays are memory-mapped
MAX_DEFLATE_RATIO = 1032  # the highest compression ratio of gzip and of a zip file


class SupportsRead(Protocol):
    """Any stream of bytes."""

    def read(self, size: int = ..., /) -> bytes:
        """Return at most `size` bytes."""


def allocate(shape: Sequence[int], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """Return an uninitialized array.

    An array of more than `MAX_IN_MEMORY` bytes is backed by a temporary file, which is deleted
    together with the array.

    Raises
    ------
    DataError
        If the temporary file does not fit on the disk.
    """
    size = math.prod(shape) * dtype.itemsize
    if size <= MAX_IN_MEMORY:
        return np.empty(shape, dtype)
    try:
        with tempfile.TemporaryFile(prefix="poecaps-") as file:
            if hasattr(os, "posix_fallocate"):
                # Reserves the space now: on a full disk, writing to a sparse memory-mapped file
                # would kill the process with SIGBUS.
                os.posix_fallocate(file.fileno(), 0, size)
            else:
                file.truncate(size)
            return np.memmap(file, dtype, mode="r+", shape=tuple(shape))
    except (OSError, OverflowError) as error:
        raise DataError(
            f"not enough disk space in {tempfile.gettempdir()}: decompressing needs "
            f"{size / 2**20:,.0f} MiB ({error}); free some space, or set TMPDIR to a folder on a "
            "larger disk"
        ) from error


def read_stream(
    stream: SupportsRead, shape: Sequence[int], dtype: np.dtype[Any], size: int, name: str
) -> np.ndarray[Any, Any]:
    """Read exactly one array of the given shape from a compressed stream.

    Parameters
    ----------
    stream, shape, dtype
        The stream, and the shape and type of the array that it contains.
    size
        Compressed bytes of the stream, to which the size of the array is compared before memory or
        disk space is reserved.
    name
        Name of the file for error messages.

    Raises
    ------
    DataError
        If the stream is shorter or longer than the array.
    """
    if math.prod(shape) * dtype.itemsize > size * MAX_DEFLATE_RATIO:
        raise DataError(
            f"{name} is truncated: its header announces {math.prod(shape) * dtype.itemsize} bytes "
            f"of data, more than {size} compressed bytes can hold"
        )
    array = allocate(shape, dtype)
    _fill(array, stream, name)
    if stream.read(1):
        raise DataError(
            f"{name} is too long: it contains more than the {array.nbytes} bytes of data that its "
            "header announces"
        )
    return array


def read_plain(
    file: IO[bytes], shape: Sequence[int], dtype: np.dtype[Any], available: int, name: str
) -> np.ndarray[Any, Any]:
    """Read an array that is stored without compression, or map it if it is large.

    Parameters
    ----------
    file
        A file at the first byte of the array.
    shape, dtype
        Of the array.
    available
        Bytes of data in the file.
    name
        Name of the file for error messages.

    Raises
    ------
    DataError
        If the file contains more or fewer bytes than the array.
    """
    length = math.prod(shape) * dtype.itemsize
    if available != length:
        problem = "is truncated" if available < length else "is too long"
        raise DataError(
            f"{name} {problem}: its header announces {length} bytes of data, but it contains "
            f"{available}"
        )
    if length > MAX_IN_MEMORY:
        return np.memmap(file, dtype, mode="r", offset=file.tell(), shape=tuple(shape))
    array = np.empty(shape, dtype)
    _fill(array, file, name)
    return array


def _fill(array: np.ndarray[Any, Any], stream: SupportsRead, name: str) -> None:
    """Read the bytes of an array."""
    target = array.reshape(-1).view(np.uint8)
    filled = 0
    while filled < len(target):
        chunk = stream.read(min(len(target) - filled, 2**20))
        if not chunk:
            raise DataError(
                f"{name} is truncated: its header announces {len(target)} bytes of data, but it "
                f"contains {filled}"
            )
        target[filled : filled + len(chunk)] = np.frombuffer(chunk, np.uint8)
        filled += len(chunk)


def require_uncut(array: np.ndarray[Any, Any], name: str) -> None:
    """Raise DataError if an array is mapped to a file that has become shorter.

    Reading beyond the end of such a file would kill the process with SIGBUS.
    """
    while isinstance(array.base, np.ndarray):
        array = array.base
    if isinstance(array, np.memmap) and isinstance(array.base, mmap.mmap):
        needed, found = array.offset + array.nbytes, array.base.size()
        if found < needed:
            raise DataError(
                f"{name} was cut while it was in use: it had {needed} bytes, and has {found} now"
            )
