"""A training run from start to end, and what may go wrong on the way."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from poecaps import Architecture, CapsuleNetwork, ModelError
from poecaps.training import Config, EncoderStage, Stage, TrainingError, resume, train
from poecaps.training.loop import CHECKPOINT, METRICS, effective_rank


def config_for(data: Path, **changes: Any) -> Config:
    """A run of seconds: 96 bars of 20×19 pixels, 8 features, 2 layers of experts."""
    model = Architecture(features=8, capsule_dim=4, experts=((4, 5), (3, 4)), components=4, dropout=0.2, whiten=True)
    tiny = Config(
        data=str(data),
        model=model,
        autoencoder=Stage(epochs=6, rate=5e-3),
        encoder=EncoderStage(epochs=4, rate=0.05, mixing="bernoulli"),
        decoder=Stage(epochs=6, rate=0.03),
        batch_size=16,
        device="cpu",
        checkpoint_every=7,
    )
    return replace(tiny, **changes)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "bars.npy"
    random = np.random.default_rng(0)
    images = np.zeros((96, 20, 19), np.uint8)
    for image in images:
        row, column = random.integers(2, 12, 2)
        image[row : row + 6, column : column + 2 + 3 * random.integers(2)] = 255
    np.save(path, images)
    return path


@pytest.fixture(scope="module")
def finished(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "whole"
    train(config_for(data), folder)
    return folder


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return dict(CapsuleNetwork.load(folder).state_dict())


def assert_same_weights(first: Path, second: Path) -> None:
    ours, theirs = weights(first), weights(second)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / METRICS).read_text().splitlines()]


def test_a_trained_network_beats_the_mean_image(data: Path, tmp_path: Path) -> None:
    tiny = config_for(data)
    model = replace(tiny.model, experts=((4, 8),))
    longer = replace(
        tiny,
        model=model,
        autoencoder=Stage(epochs=60, rate=5e-3),
        encoder=EncoderStage(epochs=20, rate=0.05),
        decoder=Stage(epochs=30, rate=0.03),
    )
    network = train(longer, tmp_path / "run")
    images = torch.from_numpy(np.load(data) / 255).float().unsqueeze(1)
    with torch.no_grad():
        error = (network.reconstruct(images) - images).square().mean()
        assert error < 0.8 * (images - images.mean(0)).square().mean()

        def negatives(domain: Any) -> float:
            drawn = network.generate(200, domain, generator=torch.Generator().manual_seed(0))
            return (drawn.mean((1, 2, 3)) > 0.5).float().mean().item()

        assert negatives("restricted") <= negatives("complete")


def test_the_metrics_tell_each_stage_from_start_to_end(finished: Path) -> None:
    lines = metrics(finished)
    stages = list(dict.fromkeys(line["stage"] for line in lines))
    assert stages == ["autoencoder", "encoder 1", "encoder 2", "decoder 1", "decoder 2"]
    for stage, epochs in zip(stages, (6, 4, 4, 6, 6), strict=True):
        steps = [line["step"] for line in lines if line["stage"] == stage]
        assert steps == sorted(set(steps))
        assert steps[-1] == epochs * 6
        numbers = {"loss", "learning_rate", "reconstruction_error"}
        if stage.startswith("encoder"):
            numbers |= {"firing", "effective_rank"}
        assert all(numbers <= line.keys() for line in lines if line["stage"] == stage)


def test_later_stages_leave_earlier_parts_alone(data: Path, finished: Path, tmp_path: Path) -> None:
    """A run whose later stages have no epochs has the same earlier parts, bit for bit."""
    train(config_for(data, decoder=Stage(epochs=0)), tmp_path / "a")
    train(config_for(data, encoder=EncoderStage(epochs=0), decoder=Stage(epochs=0)), tmp_path / "b")
    whole, no_decoder, no_capsules = weights(finished), weights(tmp_path / "a"), weights(tmp_path / "b")
    for name in whole:
        if name.startswith(("autoencoder.", "scaling.")):
            assert torch.equal(whole[name], no_capsules[name])
        if name.startswith(("autoencoder.", "scaling.", "encoders.")):
            assert torch.equal(whole[name], no_decoder[name])
        if name == "decoders.0.weight":
            assert not torch.equal(whole[name], no_decoder[name])


class Stop(Exception):  # noqa: N818
    pass


@pytest.mark.parametrize("at", [("autoencoder", 12), ("encoder 1", 9), ("encoder 2", 24), ("decoder 1", 20)])
def test_a_broken_run_goes_on_to_bit_identical_weights(
    at: tuple[str, int], data: Path, finished: Path, tmp_path: Path
) -> None:
    def stop(line: dict[str, Any]) -> None:
        if line["stage"] == at[0] and line["step"] >= at[1]:
            raise Stop

    with pytest.raises(Stop):
        train(config_for(data), tmp_path / "run", report=stop)
    resume(tmp_path / "run")
    assert_same_weights(tmp_path / "run", finished)
    assert metrics(tmp_path / "run") == metrics(finished)


def test_a_killed_process_goes_on_to_bit_identical_weights(data: Path, finished: Path, tmp_path: Path) -> None:
    """kill -9 at some moment, twice, and resume each time."""
    folder = tmp_path / "run"
    module = Path(__file__)
    start = f"""
import sys; sys.path.insert(0, {str(module.parent)!r})
from pathlib import Path
from test_loop import config_for
from poecaps.training import resume, train
folder = Path({str(folder)!r})
resume(folder) if (folder / {CHECKPOINT!r}).exists() else train(config_for(Path({str(data)!r})), folder)
"""
    for lines in (8, 30):
        process = subprocess.Popen([sys.executable, "-c", start])
        while process.poll() is None and not (
            (folder / METRICS).exists() and (folder / METRICS).read_text().count("\n") >= lines
        ):
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
        process.wait()
    subprocess.run([sys.executable, "-c", start], check=True)
    assert_same_weights(folder, finished)
    assert metrics(folder) == metrics(finished)


def test_divergence_names_stage_step_and_rate_and_keeps_the_checkpoint(data: Path, tmp_path: Path) -> None:
    wild = config_for(data, encoder=EncoderStage(epochs=4, optimizer="sgd", rate=1e30))
    with pytest.raises(TrainingError, match=r"encoder 1 diverged at step \d+ with a learning rate of \d\S*; lower"):
        train(wild, tmp_path / "run")
    before = (tmp_path / "run" / CHECKPOINT).read_bytes()
    with pytest.raises(TrainingError, match="the last checkpoint is kept in"):
        resume(tmp_path / "run")
    assert (tmp_path / "run" / CHECKPOINT).read_bytes() == before


def test_a_full_disk_stops_the_run_and_leaves_the_last_checkpoint_whole(
    data: Path, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = 0
    fsync = os.fsync

    def full(handle: int) -> None:
        nonlocal written
        written += 1
        if written == 5:
            raise OSError(28, "No space left on device")
        fsync(handle)

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(TrainingError, match=r"cannot write into .*No space left on device.*resume"):
        train(config_for(data), tmp_path / "run")
    resume(tmp_path / "run")
    assert_same_weights(tmp_path / "run", finished)


def test_what_is_no_run_is_refused(data: Path, finished: Path, tmp_path: Path) -> None:
    with pytest.raises(FileExistsError, match="is not empty; name a new folder"):
        train(config_for(data), finished)
    with pytest.raises(FileNotFoundError, match="holds no run to go on with"):
        resume(tmp_path)
    (tmp_path / CHECKPOINT).write_bytes((finished / CHECKPOINT).read_bytes()[:1000])
    with pytest.raises(ModelError, match="damaged"):
        resume(tmp_path)
    (tmp_path / CHECKPOINT).write_bytes((finished / "model.safetensors").read_bytes())
    with pytest.raises(ModelError, match="is no checkpoint of a run"):
        resume(tmp_path)


def test_effective_rank_counts_directions(generator: torch.Generator) -> None:
    basis = torch.linalg.qr(torch.randn(20, 20, generator=generator)).Q[:, :5]
    code = torch.randn(4000, 5, generator=generator) @ basis.T + 3
    assert effective_rank(code) == pytest.approx(5, rel=0.02)
    assert effective_rank(torch.ones(10, 4)) == 0
