"""NumPy's `.npy` and `.npz` files: memory-mapped unless compressed, and never unpickled."""

from __future__ import annotations

import math
import struct
import zipfile
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np
from numpy.lib import format as npy

from poecaps.data.buffers import read_stream
from poecaps.data.errors import DataError

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

Array = np.ndarray[Any, Any]


def read_npy(path: str | os.PathLike[str]) -> Array:
    """Memory-map a `.npy` file."""
    path = Path(path)
    with path.open("rb") as file:
        shape, fortran, dtype = _read_header(file, str(path))
        start = file.tell()
    size = path.stat().st_size
    return _memory_map(path, start, size - start, shape, fortran, dtype, str(path))


def read_npz(path: str | os.PathLike[str], wanted: Sequence[Sequence[str]]) -> list[Array | None]:
    """Read several arrays of a `.npz` file, each under one of several names.

    Arrays that are stored without compression (`np.savez`) are memory-mapped.

    Parameters
    ----------
    path
        The file.
    wanted
        For each array the names that it may have; the first name that the file contains is read.
        The first array must be in the file, the others may be missing.

    Returns
    -------
    list
        For each array of `wanted` the array, or None if it is missing.

    Raises
    ------
    DataError
        If the file is not a valid `.npz` file, or does not contain the first array.
    """
    path = Path(path)
    with path.open("rb") as file:
        try:
            with zipfile.ZipFile(file) as archive:
                members = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
                found = [
                    next((members[name] for name in names if name in members), None)
                    for names in wanted
                ]
                if found[0] is None:
                    raise DataError(
                        f"{path} contains the arrays {', '.join(sorted(members)) or '(none)'}, but "
                        f"no array named {' or '.join(wanted[0])}; save it with "
                        f"np.savez(path, {wanted[0][-1]}=…)"
                    )
                return [
                    None if info is None else _read_member(path, archive, info) for info in found
                ]
        except DataError:
            raise
        except Exception as error:  # a damaged archive makes zipfile raise almost anything
            raise DataError(
                f"cannot read {path}: not a valid .npz file ({error}); save it again with np.savez"
            ) from error


def _read_member(path: Path, archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> Array:
    name = f"{path} ({info.filename})"
    with archive.open(info) as member:
        shape, fortran, dtype = _read_header(member, name)
        if info.compress_type != zipfile.ZIP_STORED:
            flat = read_stream(member, shape[::-1] if fortran else shape, dtype, name)
            return flat.T if fortran else flat
        header = member.tell()
    # The local header of a member has 30 bytes, then two strings. The lengths of the strings are
    # two 16-bit numbers at byte 26.
    with path.open("rb") as file:
        file.seek(info.header_offset + 26)
        start = info.header_offset + 30 + sum(struct.unpack("<HH", file.read(4)))
    available = min(info.file_size, info.compress_size, path.stat().st_size - start)
    return _memory_map(path, start + header, available - header, shape, fortran, dtype, name)


def _read_header(file: IO[bytes], name: str) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Read the shape, whether the order is Fortran's, and the dtype of a `.npy` file."""
    try:
        read = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}[
            npy.read_magic(file)
        ]
        shape, fortran, dtype = read(file)
    except Exception as error:  # a damaged header makes NumPy's parser raise almost anything
        raise DataError(
            f"cannot read {name}: not a valid NumPy file ({error}); save it again with np.save or "
            "np.savez"
        ) from error
    if dtype.hasobject:
        raise DataError(
            f"{name} contains Python objects, which could run code when they are loaded; save a "
            "numeric array"
        )
    if not all(type(side) is int and side > 0 for side in shape) or not dtype.itemsize:
        raise DataError(f"{name} is empty: its shape is {shape}")
    return shape, fortran, dtype


def _memory_map(
    path: Path,
    start: int,
    available: int,
    shape: tuple[int, ...],
    fortran: bool,
    dtype: np.dtype[Any],
    name: str,
) -> Array:
    """Memory-map an array that begins at byte `start`, once its size is that of the file."""
    length = math.prod(shape) * dtype.itemsize
    if available != length:
        problem = "is truncated" if available < length else "is too long"
        raise DataError(
            f"{name} {problem}: its header announces {length} bytes of data, but it contains "
            f"{available}"
        )
    order: Any = "F" if fortran else "C"
    return np.memmap(path, dtype, mode="r", offset=start, shape=shape, order=order)
