"""NumPy's `.npy` and `.npz` files, which are never unpickled."""

from __future__ import annotations

import io
import struct
import zipfile
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np
from numpy.lib import format as npy

from poecaps._files import open_regular
from poecaps.data.buffers import read_plain, read_stream
from poecaps.data.errors import DataError, MissingSplitError

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

Array = np.ndarray[Any, Any]

MAX_HEADER = 10_000  # bytes, the limit of NumPy


def read_npy(path: str | os.PathLike[str]) -> Array:
    """Read a `.npy` file, or memory-map it if it is large."""
    path = Path(path)
    with open_regular(path) as file:
        shape, fortran, dtype = _read_header(file, str(path))
        available = path.stat().st_size - file.tell()
        flat = read_plain(file, shape[::-1] if fortran else shape, dtype, available, str(path))
    return flat.T if fortran else flat


def read_npz(path: str | os.PathLike[str], wanted: Sequence[Sequence[str]]) -> list[Array | None]:
    """Read several arrays of a `.npz` file, each under one of several names.

    Large arrays that are stored without compression (`np.savez`) are memory-mapped.

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
        If the file is not a valid `.npz` file.
    MissingSplitError
        If it does not contain the first array.
    """
    path = Path(path)
    with open_regular(path) as file:
        try:
            with zipfile.ZipFile(file) as archive:
                members = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
                found = [
                    next((members[name] for name in names if name in members), None)
                    for names in wanted
                ]
                if found[0] is None:
                    raise MissingSplitError(
                        f"{path} contains the arrays {', '.join(sorted(members)) or '(none)'}, but "
                        f"no array named {' or '.join(wanted[0])}; save it with "
                        f"np.savez(path, {wanted[0][-1]}=…)"
                    )
                return [
                    None if info is None else _read_member(file, path, archive, info)
                    for info in found
                ]
        except DataError:
            raise
        except Exception as error:  # a damaged archive makes zipfile raise almost anything
            raise DataError(
                f"cannot read {path}: not a valid .npz file ({error}); save it again with np.savez"
            ) from error


def _read_member(
    file: IO[bytes], path: Path, archive: zipfile.ZipFile, info: zipfile.ZipInfo
) -> Array:
    name, size = f"{path} ({info.filename})", path.stat().st_size
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise DataError(f"cannot read {name}: unknown compression; save it again with np.savez")
    with archive.open(info) as member:
        shape, fortran, dtype = _read_header(member, name)
        sides = shape[::-1] if fortran else shape
        if info.compress_type == zipfile.ZIP_DEFLATED:
            flat = read_stream(member, sides, dtype, min(info.compress_size, size), name)
            return flat.T if fortran else flat
        header = member.tell()
    # The local header of a member has 30 bytes, then two strings. The lengths of the strings are
    # two 16-bit numbers at byte 26.
    file.seek(info.header_offset + 26)
    start = info.header_offset + 30 + sum(struct.unpack("<HH", file.read(4)))
    available = min(info.file_size, info.compress_size, size - start)
    file.seek(start + header)
    flat = read_plain(file, sides, dtype, available - header, name)
    return flat.T if fortran else flat


def _read_header(file: IO[bytes], name: str) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Read the shape, whether the order is Fortran's, and the dtype of a `.npy` file."""
    try:
        version = npy.read_magic(file)
        read, length = {
            (1, 0): (npy.read_array_header_1_0, struct.Struct("<H")),
            (2, 0): (npy.read_array_header_2_0, struct.Struct("<I")),
        }[version]
        size = file.read(length.size)
        if length.unpack(size)[0] > MAX_HEADER:  # NumPy reads the header before it checks this
            raise ValueError(f"its header is longer than {MAX_HEADER:,} bytes")
        header = file.read(length.unpack(size)[0])
        shape, fortran, dtype = read(io.BytesIO(size + header))
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
