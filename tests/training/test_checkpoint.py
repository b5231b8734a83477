"""Runs that stop, for whatever reason, and continue from their checkpoint."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from poecaps import ModelError
from poecaps.likelihood import LogPartition, estimate_log_partition
from poecaps.serialization import read_tensors, write_tensors
from poecaps.training import PRESETS, Config, Progress, TrainingError, resume, train
from poecaps.training.checkpoint import CHECKPOINT, read_checkpoint
from poecaps.training.config import stage_options
from poecaps.training.metrics import METRICS
from tests.faults import status_of_child
from tests.systems import needs_fork
from tests.training.runs import OPTIONS, Stop, assert_same_weights, config_for, metrics

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.processes import Commands, Process


@pytest.mark.parametrize(
    "at",
    [
        ("autoencoder", 12),
        ("encoder 1", 9),
        ("encoder 2", 18),
        ("decoder 1", 14),
        ("pixel decoder", 10),
    ],
)
def test_a_resumed_run_has_bit_identical_weights(
    at: tuple[str, int], data: Path, finished: Path, tmp_path: Path
) -> None:
    def stop(progress: Progress) -> None:
        if progress.stage == at[0] and progress.step >= at[1]:
            raise Stop

    with pytest.raises(Stop):
        train(config_for(data, checkpoint_every=0), tmp_path / "run", report=stop)
    resume(tmp_path / "run")
    assert_same_weights(tmp_path / "run", finished)
    assert metrics(tmp_path / "run") == metrics(finished)


def wait_for_lines(process: Process, folder: Path, lines: int) -> None:
    """Wait until a run has written so many lines of metrics."""
    while process.poll() is None:
        if (folder / METRICS).exists() and (folder / METRICS).read_text().count("\n") >= lines:
            return
        time.sleep(0.002)
    raise AssertionError("the run ended too early")


def test_a_run_killed_twice_has_bit_identical_weights(
    commands: Commands, data: Path, finished: Path, tmp_path: Path
) -> None:
    """kill -9 at some moment, twice, and `poecaps train --resume` each time."""
    folder = tmp_path / "run"
    silent = ("--quiet", "--no-figures")
    start: tuple[str | Path, ...] = (
        *("train", "--data", data, "--out", folder),
        *(*silent, *OPTIONS),
    )
    go_on: tuple[str | Path, ...] = ("train", "--resume", folder, *silent)
    for arguments, lines in ((start, 4), (go_on, 16)):
        process = commands.start(*arguments)
        wait_for_lines(process, folder, lines)
        process.kill()
        assert process.wait() == -signal.SIGKILL
    assert commands.start(*go_on).wait() == 0
    assert_same_weights(folder, finished)
    assert metrics(folder) == metrics(finished)
    starts = [
        (start["stage"], start["step"])
        for start in json.loads((folder / "run.json").read_text())["starts"]
    ]
    assert len(starts) == 3
    assert starts[0] == ("autoencoder", 0)
    assert starts[2][0].startswith(("encoder", "decoder"))


def small_energy(data: Path, **chains: int) -> Config:
    """The preset `energy` with few experts, chains and epochs."""
    usual, energy = config_for(data), PRESETS["energy"]()
    density = replace(
        energy.model.density, experts=(4, 3), linear_dims=1, base_components=6, strength=2.0
    )
    sizes: dict[str, Any] = {
        "features": 8,
        "capsule_dim": 4,
        "joint_components": 4,
        "equalized_components": 4,
    }
    options: dict[str, Any] = {"chains": 16, "partition_chains": 8, "partition_steps": 20}
    return replace(
        energy,
        data=usual.data,
        model=replace(energy.model, **sizes, experts=((3, 5),), margin=0, density=density),
        autoencoder=replace(energy.autoencoder, epochs=1),
        density=replace(energy.density, epochs=2, **options | chains),
        encoder=replace(energy.encoder, epochs=1),
        decoder=replace(energy.decoder, epochs=0),
        pixel_decoder=replace(energy.pixel_decoder, epochs=0),
        batch_size=16,
        device="cpu",
        checkpoint_every=0,
    )


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@needs_fork
@pytest.mark.parametrize(
    "chains", [{"levels": 4, "lifetime": 0}, {"levels": 0, "lifetime": 6}], ids=str
)
def test_a_density_killed_three_times_has_bit_identical_weights(
    chains: dict[str, int], data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it learns, while its partition function is estimated, and in the stage after it.

    Each time in a process of its own, which has the checkpoint of the step before.
    """
    config, folder = small_energy(data, **chains), tmp_path / "run"
    train(config, tmp_path / "whole")

    def kill_at(stage: str, step: int) -> Callable[[Progress], None]:
        return lambda progress: kill() if (progress.stage, progress.step) == (stage, step) else None

    def estimate_and_die(*arguments: Any, **options: Any) -> LogPartition:
        def die(done: int, total: int) -> None:
            if done == total // 2:
                kill()

        return estimate_log_partition(*arguments, **options, report=die)

    def die_of_the_estimate() -> None:
        monkeypatch.setattr("poecaps.training.density.estimate_log_partition", estimate_and_die)
        resume(folder)

    for die, expected in (
        (lambda: train(config, folder, report=kill_at("density", 7)), ("density", 6)),
        (die_of_the_estimate, ("density", 11)),
        (lambda: resume(folder, report=kill_at("encoder 1", 4)), ("encoder 1", 3)),
    ):
        assert status_of_child(die) == -signal.SIGKILL
        stopped = read_checkpoint(folder)
        assert (list(stage_options(config))[stopped.stage], stopped.step) == expected
    network = resume(folder)
    assert network.require_density().log_partition > 0
    assert_same_weights(folder, tmp_path / "whole")
    assert metrics(folder) == metrics(tmp_path / "whole")


def test_a_run_killed_before_its_first_step_can_be_resumed(
    data: Path, finished: Path, tmp_path: Path
) -> None:
    def stop(progress: Progress) -> None:
        raise Stop

    with pytest.raises(Stop):
        train(config_for(data), tmp_path / "run", report=stop)
    resume(tmp_path / "run")
    assert_same_weights(tmp_path / "run", finished)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_saves_and_prints_the_command_to_resume(
    number: signal.Signals, commands: Commands, data: Path, finished: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "a run"
    process = commands.start(
        "train", "--data", data, "--out", folder, *OPTIONS, "--checkpoint-every", "100000"
    )
    wait_for_lines(process, folder, 16)
    process.send_signal(number)
    _, err = process.communicate()
    assert process.returncode == 130
    said = err.splitlines()
    assert said.count(f"checkpoint saved; resume with: poecaps train --resume '{folder}'") == 1
    assert said[-1] == "poecaps: interrupted"
    assert "Traceback" not in err
    _, about = read_tensors(folder / CHECKPOINT)
    assert about["stage"] >= 1
    assert about["stage"] > 1 or about["step"] > 0  # not only between stages
    resume(folder)
    assert_same_weights(folder, finished)


def test_a_second_command_is_told_who_trains(
    commands: Commands, data: Path, tmp_path: Path
) -> None:
    folder, often = tmp_path / "run", ("--autoencoder.epochs", "1000000")
    start: tuple[str | Path, ...] = (
        *("train", "--data", data, "--out", folder, "--quiet"),
        *(*OPTIONS, *often),
    )
    process = commands.start(*start)
    try:
        wait_for_lines(process, folder, 2)
        again: tuple[str | Path, ...] = ("train", "--resume", folder, "--quiet")
        for second in (start, again):
            told = commands.start(*second)
            _, err = told.communicate()
            assert told.returncode == 1
            assert err.count("\n") == 1
            assert f"{folder} is in use by process {process.pid} on " in err
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    ("what", "stage", "broken"),
    [
        ("poecaps.training.features.FeatureCache.compute_codes", 2, KeyboardInterrupt),
        ("poecaps.training.features.FeatureCache.fit_preprocessing", 1, KeyboardInterrupt),
        ("poecaps.training.features.FeatureCache._compute_for_all", 1, KeyboardInterrupt),
        ("poecaps.training.features.FeatureCache._compute_for_all", 1, MemoryError),
        ("poecaps.training.stages._reset_parameters", 1, KeyboardInterrupt),
        ("poecaps.training.trainer.Trainer._fit_code_density", 6, KeyboardInterrupt),
        ("poecaps.network.CapsuleNetwork.save", 6, KeyboardInterrupt),
        ("poecaps.network.CapsuleNetwork.save", 6, MemoryError),
    ],
)
def test_an_error_between_two_stages_loses_no_step(
    what: str,
    stage: int,
    broken: type[BaseException],
    data: Path,
    finished: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise broken

    with monkeypatch.context() as patched:
        patched.setattr(what, interrupted)
        with pytest.raises(broken):
            train(config_for(data, checkpoint_every=1e9), tmp_path / "run")
    _, about = read_tensors(tmp_path / "run" / CHECKPOINT)
    assert (about["stage"], about["step"]) == (stage, 0)
    resume(tmp_path / "run")
    assert_same_weights(tmp_path / "run", finished)


class Clock:
    """The clock of the checkpoints; others in this process use that of the system."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        time = SimpleNamespace(monotonic=lambda: self.now)
        monkeypatch.setattr("poecaps.training.checkpoint.time", time)


def test_checkpoints_are_written_at_the_given_interval(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step takes ten seconds here; a checkpoint is due after half a minute."""
    kept, clock = [], Clock(monkeypatch)

    def tick(progress: Progress) -> None:
        clock.now += 10
        kept.append(read_tensors(tmp_path / "run" / CHECKPOINT)[1]["step"])
        if progress.total_step == 10:
            raise Stop

    with pytest.raises(Stop):
        train(config_for(data, checkpoint_every=30), tmp_path / "run", report=tick)
    assert kept == [0, 0, 0, 2, 2, 2, 5, 5, 5, 8, 8]


def test_a_checkpoint_due_at_the_end_of_a_stage_begins_the_next(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, clock = {}, Clock(monkeypatch)

    def tick(progress: Progress) -> None:
        clock.now += (
            60 if progress.stage == "autoencoder" and progress.step == progress.steps else 0
        )
        if progress.stage != "autoencoder":
            found.update(read_tensors(tmp_path / "run" / CHECKPOINT)[1])
            raise Stop

    with pytest.raises(Stop):
        train(config_for(data, checkpoint_every=30), tmp_path / "run", report=tick)
    assert (found["stage"], found["step"]) == (1, 0)


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
    with pytest.raises(TrainingError, match=r"cannot write to .*No space left on device.*resume"):
        train(config_for(data, checkpoint_every=0), tmp_path / "run")
    resume(tmp_path / "run")
    assert_same_weights(tmp_path / "run", finished)


class Hostile:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> Any:
        return (Path.touch, (self.target,))


def test_reading_an_untrusted_checkpoint_runs_no_code(tmp_path: Path) -> None:
    touched = tmp_path / "touched"
    (tmp_path / CHECKPOINT).write_bytes(pickle.dumps({"model": Hostile(touched)}))
    with pytest.raises(ModelError, match="not a safetensors file"):
        resume(tmp_path)
    torch.save({"model": Hostile(touched)}, tmp_path / CHECKPOINT)
    with pytest.raises(ModelError, match="not a safetensors file"):
        resume(tmp_path)
    assert not touched.exists()
    pickle.loads(pickle.dumps(Hostile(touched)))  # what a program would do that unpickles
    assert touched.exists()


@pytest.fixture(scope="module")
def stopped(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has stopped at its tenth step."""

    def stop(progress: Progress) -> None:
        if progress.step == 10:
            raise Stop

    folder = tmp_path_factory.mktemp("stopped") / "run"
    with pytest.raises(Stop):
        train(config_for(data, checkpoint_every=0), folder, report=stop)
    return folder


@pytest.mark.parametrize(
    ("about", "state", "message"),
    [
        ({"version": 99}, {}, "upgrade"),
        ({"stage": 77}, {}, "is damaged: there is no step"),
        ({"step": -1}, {}, "is damaged: there is no step"),
        ({"config": {"data": 5}}, {}, "is not the checkpoint of a run"),
        ({"step": 10**9}, {}, "is damaged: there is no step"),
        ({"step": float("inf")}, {}, "is not the checkpoint of a run"),
        ({"stage": None}, {}, "is not the checkpoint of a run"),
        (
            {},
            {"optimizer.99.exp_avg": torch.zeros(2)},
            "optimizer.99.exp_avg is not a state of this optimizer",
        ),
        (
            {},
            {"optimizer.0.lambda": torch.zeros(2)},
            "optimizer.0.lambda is not a state of this optimizer",
        ),
        (
            {},
            {"optimizer.0.exp_avg": torch.zeros(2)},
            "optimizer.0.exp_avg is not a state of this optimizer",
        ),
        ({}, {"optimizer.0.exp_avg": None}, "optimizer.0.exp_avg is not a state of this optimizer"),
        (
            {},
            {"optimizer.0.step": torch.tensor(torch.nan)},
            "optimizer.0.step must hold finite floating-point numbers",
        ),
        (
            {},
            {"optimizer.0.step": torch.tensor(-1.0)},
            "optimizer.0.step must not hold negative numbers",
        ),
        ({}, {"model.more": torch.zeros(2)}, "does not match its architecture: more"),
        (
            {},
            {"model.autoencoder.conv1_bias": torch.zeros(8, dtype=torch.float64)},
            "conv1_bias is .* of float64",
        ),
        (
            {},
            {"model.autoencoder.conv1_bias": torch.full((8,), torch.nan)},
            "autoencoder.conv1_bias is not finite",
        ),
    ],
)
def test_an_altered_checkpoint_is_one_clear_error(
    about: dict[str, Any],
    state: dict[str, torch.Tensor | None],
    message: str,
    stopped: Path,
    tmp_path: Path,
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(stopped, folder)
    tensors, before = read_tensors(folder / CHECKPOINT)
    changed = {name: value for name, value in (tensors | state).items() if value is not None}
    write_tensors(folder / CHECKPOINT, changed, before | about)
    with pytest.raises(ModelError, match=message):
        resume(folder)
