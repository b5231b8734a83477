"""Smaller versions of the bundled images."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

import poecaps
from poecaps.data import datasets
from poecaps.data.idx import PREFIX

if TYPE_CHECKING:
    from pathlib import Path


def some_of_the_bundled(folder: Path, counts: dict[str, int]) -> Path:
    """Make a folder like that of the bundled sets, with so many images of each split."""
    for name in datasets.PUBLIC_DATASETS:
        (folder / name).mkdir()
        for split, count in counts.items():
            data = poecaps.data.load(f"{name}-sample", split=split)  # type: ignore[arg-type]
            assert data.labels is not None
            for kind, array in (
                ("images-idx3", data.images[:count, :, :, 0]),
                ("labels-idx1", data.labels[:count]),
            ):
                head = np.array([0x800 + array.ndim, *array.shape], ">u4").tobytes()
                file = folder / name / f"{PREFIX[split]}-{kind}-ubyte"  # type: ignore[index]
                file.write_bytes(head + array.astype(np.uint8).tobytes())
    return folder
