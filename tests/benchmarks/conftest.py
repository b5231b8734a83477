"""Fixtures of the benchmark tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def bars(tmp_path: Path) -> Path:
    """Write a file of 64 bars of several sizes, in two classes."""
    images, labels = np.zeros((64, 20, 19), np.uint8), np.arange(64) % 2
    for number, image in enumerate(images):
        image[4 : 8 + number % 9, 3 : 5 + number % 7] = 255
    np.savez(tmp_path / "bars.npz", x_train=images, y_train=labels, x_test=images, y_test=labels)
    return tmp_path / "bars.npz"
