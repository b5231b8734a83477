"""Training with several views of every image."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from poecaps import CapsuleNetwork
from poecaps.data import load
from poecaps.training import Config, Progress, resume, train
from poecaps.training.checkpoint import read_checkpoint
from poecaps.training.config import EncoderStage, Stage
from poecaps.training.distributed import Distributed
from poecaps.training.features import FeatureCache
from poecaps.training.stages import EncoderTrainer
from poecaps.views import NUMBERS, ViewOptions, make_views
from tests.faults import status_of_child
from tests.systems import needs_fork
from tests.training.runs import Stop, assert_same_weights, metrics, weights, without_epochs

if TYPE_CHECKING:
    from collections.abc import Callable
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


@pytest.fixture(scope="module")
def coloured(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same images, each in a colour of its own."""
    path = tmp_path_factory.mktemp("coloured") / "bars.npy"
    images = np.load(data)
    colours = np.random.default_rng(0).uniform(0.2, 1, (len(images), 1, 1, 3))
    np.save(path, (images[..., np.newaxis] * colours).astype(np.uint8))
    return path


@needs_fork
def test_a_run_on_coloured_images_with_views_is_killed_twice(
    coloured: Path, tmp_path: Path
) -> None:
    """kill -9 within a step of each layer; the resumed run is bit-identical."""
    config = replace(config_with(coloured), checkpoint_every=0)
    train(config, tmp_path / "whole")

    def kill_at(stage: str, step: int) -> Callable[[Progress], None]:
        def kill(progress: Progress) -> None:
            if (progress.stage, progress.step) == (stage, step):
                os.kill(os.getpid(), signal.SIGKILL)

        return kill

    folder, killed = tmp_path / "run", -signal.SIGKILL
    start = status_of_child(lambda: train(config, folder, report=kill_at("encoder 1", 5)))
    again = status_of_child(lambda: resume(folder, report=kill_at("encoder 2", 3)))
    assert start == again == killed
    resume(folder)
    assert_same_weights(folder, tmp_path / "whole")
    assert metrics(folder) == metrics(tmp_path / "whole")
    network = CapsuleNetwork.load(folder)
    assert network.architecture.image_shape == (3, 20, 19)
    train(config_with(coloured, ViewOptions()), tmp_path / "one")
    assert not torch.equal(
        weights(folder)["encoders.0.weight"], weights(tmp_path / "one")["encoders.0.weight"]
    )


@pytest.mark.parametrize("layer", [0, 1])
def test_the_first_view_has_the_features_of_the_image(
    layer: int, data: Path, whole: Path, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are in the cache: only those of the copies are computed."""
    network = CapsuleNetwork.load(whole)
    cache = FeatureCache(
        load(str(data)), network, torch.device("cpu"), Distributed(), bfloat16=False
    )
    trainer = EncoderTrainer(layer, config_with(data).encoder, 0, cache)
    cache.compute_inputs(layer)
    indices = torch.tensor([3, 17, 90, 4])
    uniform = torch.rand(len(indices), VIEWS.count - 1, NUMBERS, generator=generator)
    expected = cache.inputs_of(layer, make_views(cache.images(indices), uniform, VIEWS))
    computed: list[int] = []

    def inputs_of(layer: int, images: torch.Tensor) -> torch.Tensor:
        computed.append(len(images))
        return FeatureCache.inputs_of(cache, layer, images)

    monkeypatch.setattr(cache, "inputs_of", inputs_of)
    found = trainer._views(indices, uniform)
    torch.testing.assert_close(found, expected)
    assert torch.equal(found[:: VIEWS.count], cache.inputs(layer, indices))
    assert computed == [len(indices) * (VIEWS.count - 1)]
    # Inputs that are in the memory of the host are not copied to a GPU: those of all are computed.
    monkeypatch.setattr(cache, "has_inputs_on_device", lambda layer: False)
    assert torch.equal(trainer._views(indices, uniform), expected)


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
