"""Write the bundled samples: every 6th training and 5th test image of MNIST and Fashion-MNIST.

The images are evenly spaced because MNIST's test set is ordered: its first half is easier than its
second half.

Usage: POECAPS_DATA=FOLDER_OF_THE_FULL_DATASETS python tools/make_sample.py
"""

import gzip
from pathlib import Path

import numpy as np

from poecaps.data import load
from poecaps.data.datasets import BUNDLED, PUBLIC_DATASETS
from poecaps.data.idx import PREFIX, Split

STEP: dict[Split, int] = {"train": 6, "test": 5}


def write_idx(path: Path, array: np.ndarray) -> None:
    """Write unsigned bytes as gzipped IDX; the output is reproducible byte for byte."""
    header = bytes([0, 0, 0x08, array.ndim]) + np.array(array.shape, ">u4").tobytes()
    path.write_bytes(
        gzip.compress(header + array.astype(np.uint8).tobytes(), compresslevel=9, mtime=0)
    )


for name in PUBLIC_DATASETS:
    (BUNDLED / name).mkdir(parents=True, exist_ok=True)
    for split, step in STEP.items():
        full = load(name, split=split, download=False)
        assert full.labels is not None  # noqa: S101
        write_idx(
            BUNDLED / name / f"{PREFIX[split]}-images-idx3-ubyte.gz", full.images[::step, :, :, 0]
        )
        write_idx(BUNDLED / name / f"{PREFIX[split]}-labels-idx1-ubyte.gz", full.labels[::step])
