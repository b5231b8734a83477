"""Arrays for decompressed data: in memory if small, in a memory-mapped temporary file if large."""

from __future__ import annotations

import math
import os
import tempfile
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from poecaps.data.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_IN_MEMORY = 256 * 2**20  # bytes; larger arrays are kept in a temporary file


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
    stream: SupportsRead, shape: Sequence[int], dtype: np.dtype[Any], name: str
) -> np.ndarray[Any, Any]:
    """Read exactly one array of the given shape from a stream of unknown length.

    Parameters
    ----------
    stream, shape, dtype
        The stream, and the shape and type of the array that it contains.
    name
        Name of the file for error messages.

    Raises
    ------
    DataError
        If the stream is shorter or longer than the array.
    """
    array = allocate(shape, dtype)
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
    if stream.read(1):
        raise DataError(
            f"{name} is too long: it contains more than the {len(target)} bytes of data that its "
            "header announces"
        )
    return array
