"""Where unpacked images are kept: in memory while they are few, in a memory-mapped temporary file when many."""

from __future__ import annotations

import math
import os
import tempfile
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

SPILL = 256 * 2**20  # bytes above which an array goes to disk


class SupportsRead(Protocol):
    """Anything that bytes can be read from."""

    def read(self, size: int = ..., /) -> bytes:
        """Return at most `size` bytes."""


class DataError(ValueError):
    """A file or folder does not hold what its name or header promises."""

    __module__ = "poecaps.data"


def allocate(shape: Sequence[int], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """Return an array to be filled; a large one lives in a temporary file that vanishes with it."""
    size = math.prod(shape) * dtype.itemsize
    if size <= SPILL:
        return np.empty(shape, dtype)
    try:
        with tempfile.TemporaryFile(prefix="poecaps-") as file:
            if hasattr(
                os, "posix_fallocate"
            ):  # so that a full disk is an error here and no crash later
                os.posix_fallocate(file.fileno(), 0, size)
            else:
                file.truncate(size)
            return np.memmap(file, dtype, mode="r+", shape=tuple(shape))
    except (OSError, OverflowError) as error:
        raise DataError(
            f"unpacking needs {size / 2**20:,.0f} MiB in {tempfile.gettempdir()}, which has no room for them "
            f"({error}); free some, or point TMPDIR to a larger disk"
        ) from error


def read_stream(
    stream: SupportsRead, shape: Sequence[int], dtype: np.dtype[Any], what: str
) -> np.ndarray[Any, Any]:
    """Read exactly one array of this shape from a stream of unknown length.

    Raises
    ------
    DataError
        If the stream ends too early or goes on too long.
    """
    array = allocate(shape, dtype)
    target = array.reshape(-1).view(np.uint8)
    filled = 0
    while filled < len(target):
        chunk = stream.read(min(len(target) - filled, 2**20))
        if not chunk:
            raise DataError(
                f"{what} is cut short: its header promises {len(target)} bytes of data, {filled} are there"
            )
        target[filled : filled + len(chunk)] = np.frombuffer(chunk, np.uint8)
        filled += len(chunk)
    if stream.read(1):
        raise DataError(
            f"{what} is too long: more data follow the {len(target)} bytes its header promises"
        )
    return array
