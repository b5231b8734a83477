from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from poecaps.training import train
from tests.training.runs import config_for

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="package")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "bars.npy"
    random = np.random.default_rng(0)
    images = np.zeros((96, 20, 19), np.uint8)
    for image in images:
        row, column = random.integers(2, 12, 2)
        image[row : row + 6, column : column + 2 + 3 * random.integers(2)] = 255
    np.save(path, images)
    return path


@pytest.fixture(scope="package")
def finished(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "whole"
    train(config_for(data), folder)
    return folder
