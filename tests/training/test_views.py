"""Training with several views of every image."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from poecaps.training import Config, Progress, resume, train
from poecaps.training.checkpoint import read_checkpoint
from poecaps.training.config import EncoderStage, Stage
from poecaps.views import ViewOptions
from tests.training.runs import Stop, assert_same_weights, metrics, weights, without_epochs

if TYPE_CHECKING:
    from pathlib import Path

VIEWS = ViewOptions(count=3, rotation=30.0, mirror=True)


def config_with(data: Path, views: ViewOptions = VIEWS) -> Config:
    """A short run of the autoencoder and of two layers of experts."""
    encoder = EncoderStage(
        epochs=2, learning_rate=0.05, mixing="bernoulli", winners=1, target_firing=0.5, views=views
    )
    return without_epochs(data, autoencoder=Stage(epochs=1, learning_rate=5e-3), encoder=encoder)


@pytest.fixture(scope="module")
def whole(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("views") / "run"
    train(config_with(data), folder)
    return folder


@pytest.mark.parametrize("at", [("encoder 1", 5), ("encoder 2", 1), ("encoder 2", 7)])
def test_a_resumed_run_with_views_is_bit_identical(
    at: tuple[str, int], data: Path, whole: Path, tmp_path: Path
) -> None:
    def stop(progress: Progress) -> None:
        if (progress.stage, progress.step) == at:
            raise Stop

    config = replace(config_with(data), checkpoint_every=0)
    with pytest.raises(Stop):
        train(config, tmp_path / "run", report=stop)
    assert read_checkpoint(tmp_path / "run").config == config
    resume(tmp_path / "run")
    assert_same_weights(tmp_path / "run", whole)
    assert metrics(tmp_path / "run") == metrics(whole)


def test_views_change_the_experts_and_nothing_else(data: Path, whole: Path, tmp_path: Path) -> None:
    """With one view, the range of the transformations has no effect."""
    train(config_with(data, ViewOptions()), tmp_path / "one")
    train(config_with(data, replace(VIEWS, count=1)), tmp_path / "unused")
    assert_same_weights(tmp_path / "one", tmp_path / "unused")
    one, several = weights(tmp_path / "one"), weights(whole)
    same = {name for name in one if torch.equal(one[name], several[name])}
    assert {name for name in one if name.startswith(("autoencoder.", "preprocessing."))} <= same
    assert not {"encoders.0.weight", "encoders.1.weight"} & same


def test_invalid_views_are_an_error(data: Path, tmp_path: Path) -> None:
    config = config_with(data, ViewOptions(count=0))
    with pytest.raises(ValueError, match=r"encoder\.views\.count must be a whole number from 1"):
        train(config, tmp_path / "run")
    broken = replace(config, encoder=replace(config.encoder, views=4))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"encoder\.views must be ViewOptions, but is 4"):
        train(broken, tmp_path / "run")
    lines = tmp_path / "lines.npy"
    np.save(lines, np.arange(36, dtype=np.uint8).reshape(4, 9, 1))
    config = config_with(lines)
    narrow = replace(config, batch_size=2, model=replace(config.model, kernel_size=1))
    with pytest.raises(ValueError, match=r"encoder\.views\.mirror must be False for images"):
        train(narrow, tmp_path / "run")
