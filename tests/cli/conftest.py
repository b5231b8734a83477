"""A small run that all tests of the command line share."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

import poecaps
from poecaps.cli.main import main
from poecaps.evaluation import judge
from tests.networks import TINY_DENSITY, untrained_with_density

if TYPE_CHECKING:
    from pathlib import Path

SMALL = shlex.split("""
    --model.features 8 --model.capsule-dim 4 --model.experts 3 5 --model.joint-components 4
    --autoencoder.epochs 1 --encoder.epochs 1 --decoder.epochs 1 --pixel-decoder.epochs 1
    --batch-size 16 --device cpu
""")


@pytest.fixture(autouse=True)
def _short_training_of_judges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge, "MAX_EPOCHS", 1)


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "digits.npz"
    train, test = poecaps.data.load("mnist-sample"), poecaps.data.load("mnist-sample", split="test")
    assert train.labels is not None
    np.savez(path, x_train=train.images[:48], y_train=train.labels[:48], x_test=test.images[:20])
    return path


@pytest.fixture(scope="session")
def run(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run; tests write their results elsewhere."""
    folder = tmp_path_factory.mktemp("runs") / "small"
    assert main(["train", "--data", str(source), "--out", str(folder), "--quiet", *SMALL]) == 0
    return folder


@pytest.fixture(scope="session")
def noise(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Training and test images for the model of `dense`, with a black margin."""
    path = tmp_path_factory.mktemp("data") / "noise.npz"
    random = np.random.default_rng(0)
    train, test = (random.integers(0, 256, (count, 20, 19), np.uint8) for count in (60, 12))
    train[:, 17:], test[:, 17:] = 0, 0
    np.savez(path, x_train=train, y_train=np.arange(60) % 2, x_test=test, y_test=np.arange(12) % 2)
    return path


@pytest.fixture(scope="session")
def dense(noise: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a model with a density and a pixel decoder; neither was trained."""
    folder = tmp_path_factory.mktemp("runs") / "dense"
    images = poecaps.data.load(str(noise)).batch(slice(None))
    generator = torch.Generator().manual_seed(7)
    untrained_with_density(TINY_DENSITY, images, generator).save(folder)
    return folder


def arrays(path: Path) -> dict[str, Any]:
    """Return the arrays of an .npz file."""
    with np.load(path) as file:
        return dict(file)
