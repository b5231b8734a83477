"""NumPy's `.npy` and `.npz`, memory-mapped where they are not compressed; never unpickled."""

from __future__ import annotations

import math
import struct
import zipfile
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np
from numpy.lib import format as npy

from poecaps.data._storage import DataError, read_stream

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
    return _map(path, start, size - start, shape, fortran, dtype, str(path))


def read_npz(path: str | os.PathLike[str], wanted: Sequence[Sequence[str]]) -> list[Array | None]:
    """Read one array for each list of names in `wanted`, the first name that the file has, or None.

    Members stored without compression (`np.savez`) are memory-mapped.

    Raises
    ------
    DataError
        If the file is no `.npz`, damaged, or has none of the first list's names.
    """
    path = Path(path)
    with path.open("rb") as file:
        try:
            with zipfile.ZipFile(file) as archive:
                names = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
                found = [
                    next((names[name] for name in choices if name in names), None)
                    for choices in wanted
                ]
                if found[0] is None:
                    raise DataError(
                        f"{path} holds the arrays {', '.join(sorted(names)) or '(none)'}, but none called "
                        f"{' or '.join(wanted[0])}; save it with np.savez(path, {wanted[0][-1]}=…)"
                    )
                return [
                    None if info is None else _read_member(path, archive, info) for info in found
                ]
        except DataError:
            raise
        except Exception as error:  # a damaged archive makes zipfile raise almost anything
            raise DataError(
                f"{path} is a damaged or foreign .npz file ({error}); save it anew"
            ) from error


def _read_member(path: Path, archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> Array:
    what = f"{path} ({info.filename})"
    with archive.open(info) as member:
        shape, fortran, dtype = _read_header(member, what)
        if info.compress_type != zipfile.ZIP_STORED:
            flat = read_stream(member, shape[::-1] if fortran else shape, dtype, what)
            return flat.T if fortran else flat
        header = member.tell()
    with path.open(
        "rb"
    ) as file:  # the local header is 30 bytes and two names, their lengths at bytes 26 and 28
        file.seek(info.header_offset + 26)
        start = info.header_offset + 30 + sum(struct.unpack("<HH", file.read(4)))
    available = min(info.file_size, info.compress_size, path.stat().st_size - start)
    return _map(path, start + header, available - header, shape, fortran, dtype, what)


def _read_header(file: IO[bytes], what: str) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    try:
        read = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}[
            npy.read_magic(file)
        ]
        shape, fortran, dtype = read(file)
    except Exception as error:  # a damaged header makes NumPy's parser raise almost anything
        raise DataError(
            f"{what} is no NumPy array file ({error}); save it anew with np.save or np.savez"
        ) from error
    if dtype.hasobject:
        raise DataError(
            f"{what} holds Python objects, which could run code when opened; save a plain numeric array"
        )
    if not all(type(side) is int and side > 0 for side in shape) or not dtype.itemsize:
        raise DataError(f"{what} is empty: its shape is {shape}")
    return shape, fortran, dtype


def _map(
    path: Path,
    start: int,
    available: int,
    shape: tuple[int, ...],
    fortran: bool,
    dtype: np.dtype[Any],
    what: str,
) -> Array:
    length = math.prod(shape) * dtype.itemsize
    if available != length:
        fault = "is cut short" if available < length else "is too long"
        raise DataError(
            f"{what} {fault}: its header promises {length} bytes of data, {available} are there"
        )
    order: Any = "F" if fortran else "C"
    return np.memmap(path, dtype, mode="r", offset=start, shape=shape, order=order)
