"""Helpers that write files as other programs do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

CODES = {"u1": 0x08, "i1": 0x09, "i2": 0x0B, "i4": 0x0C, "f4": 0x0D, "f8": 0x0E}


def idx_bytes(array: np.ndarray[Any, Any]) -> bytes:
    """An IDX file, straight from the description of the format."""
    header = (
        bytes([0, 0, CODES[array.dtype.str[1:]], array.ndim])
        + np.array(array.shape, ">i4").tobytes()
    )
    return header + array.astype(array.dtype.newbyteorder(">")).tobytes()


@pytest.fixture(name="idx_bytes", scope="session")
def idx_bytes_fixture() -> Callable[[np.ndarray[Any, Any]], bytes]:
    return idx_bytes


@pytest.fixture
def digits() -> np.ndarray[Any, Any]:
    return np.random.default_rng(0).integers(0, 256, (6, 5, 4), dtype=np.uint8)
