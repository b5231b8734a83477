"""A training run from start to end, and what may go wrong on the way."""

from __future__ import annotations

import json
import math
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from poecaps import Architecture, CapsuleNetwork, ModelError, kernels, squash, unsquash
from poecaps import functional as F
from poecaps._files import read_tensors, write_tensors
from poecaps.data import DataError, ImageSet
from poecaps.kernels import lanes
from poecaps.layer import MIXINGS, Mixing
from poecaps.network import ModelOptions
from poecaps.training import (
    PRESETS,
    Config,
    DecoderStage,
    EncoderStage,
    PixelDecoderStage,
    Progress,
    Stage,
    TrainingError,
    resume,
    train,
)
from poecaps.training.loop import CHECKPOINT, METRICS, _wants_bfloat16
from poecaps.training.stages import AutoencoderTask, DecoderTask, effective_rank, factor_for_firing
from tests.training.runs import OPTIONS, assert_same_weights, config_for, metrics, weights


def test_a_trained_network_beats_the_mean_image(data: Path, tmp_path: Path) -> None:
    tiny = config_for(data)
    model = replace(tiny.model, experts=((4, 8),))
    longer = replace(
        tiny,
        model=model,
        autoencoder=Stage(epochs=60, learning_rate=5e-3),
        encoder=EncoderStage(epochs=20, learning_rate=0.05),
        decoder=DecoderStage(epochs=30, learning_rate=0.03),
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


@pytest.mark.parametrize("mixing", MIXINGS)
@pytest.mark.parametrize("version", ["plain", "compiled"])
@pytest.mark.parametrize("normalize", F.AXES)
def test_fast_versions_learn_what_the_reference_learns(
    normalize: F.Axis,
    version: str,
    mixing: Mixing,
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if version == "compiled" and lanes.obstacle() is not None:
        pytest.skip(f"nothing can be compiled: {lanes.obstacle()}")
    config = config_for(data)
    encoder = replace(config.encoder, mixing=mixing)
    config = replace(config, model=replace(config.model, normalize=normalize), encoder=encoder)
    monkeypatch.setattr(lanes, "SMALLEST", 0 if version == "compiled" else math.inf)
    lanes.forget()
    train(config, tmp_path / "fast")
    assert len(lanes._spare) == (version == "compiled")  # it leaves its room
    monkeypatch.setattr(kernels, "choose", lambda *_: "reference")
    train(config, tmp_path / "reference")
    for ours, theirs in zip(
        metrics(tmp_path / "fast"), metrics(tmp_path / "reference"), strict=True
    ):
        assert ours.pop("stage") == theirs.pop("stage")
        assert ours == pytest.approx(theirs, rel=1e-3, abs=1e-5)


def test_the_metrics_tell_each_stage_from_start_to_end(finished: Path) -> None:
    lines = metrics(finished)
    stages = list(dict.fromkeys(line["stage"] for line in lines))
    assert stages == [
        "autoencoder",
        "encoder 1",
        "encoder 2",
        "decoder 1",
        "decoder 2",
        "pixel_decoder",
    ]
    for stage, epochs in zip(stages, (6, 4, 4, 6, 6, 3), strict=True):
        steps = [line["step"] for line in lines if line["stage"] == stage]
        assert steps == sorted(set(steps))
        assert steps[-1] == epochs * 6
        numbers = {"loss", "learning_rate", "reconstruction_error"}
        if stage.startswith("encoder"):
            numbers |= {"firing", "effective_rank"}
        assert all(numbers <= line.keys() for line in lines if line["stage"] == stage)


def test_later_stages_leave_earlier_parts_alone(data: Path, finished: Path, tmp_path: Path) -> None:
    """A run whose later stages have no epochs has the same earlier parts, bit for bit."""
    train(config_for(data, decoder=DecoderStage(epochs=0)), tmp_path / "a")
    train(
        config_for(data, encoder=EncoderStage(epochs=0), decoder=DecoderStage(epochs=0)),
        tmp_path / "b",
    )
    whole, no_decoder, no_capsules = (
        weights(finished),
        weights(tmp_path / "a"),
        weights(tmp_path / "b"),
    )
    for name in whole:
        if name.startswith(("autoencoder.", "scaling.")):
            assert torch.equal(whole[name], no_capsules[name])
        if name.startswith(("autoencoder.", "scaling.", "encoders.")):
            assert torch.equal(whole[name], no_decoder[name])
        if name == "decoders.0.weight":
            assert not torch.equal(whole[name], no_decoder[name])


def test_the_painter_and_the_decoder_below_learn_to_draw_sharply(
    data: Path, tmp_path: Path
) -> None:
    """The loss is the mean absolute difference of pixels with a little cross-entropy, from codes as they are."""
    stage = PixelDecoderStage(
        epochs=1,
        optimizer="sgd",
        learning_rate=0.0,
        momentum=0.0,
        single_expert_share=0.0,
        cross_entropy=0.2,
    )
    config = config_for(data, pixel_decoder=stage, batch_size=96, precision="float32")
    network = train(config, tmp_path / "run")
    images = torch.from_numpy(np.load(data) / 255).float().unsqueeze(1)
    with torch.no_grad():
        drawn = network.reconstruct(images)
        entropy = torch.nn.functional.binary_cross_entropy(drawn, images)
        expected = (drawn - images).abs().mean() + 0.2 * entropy
        relative = (drawn - images).square().sum() / (images - images.mean(0)).square().sum()
    line = next(line for line in metrics(tmp_path / "run") if line["stage"] == "pixel_decoder")
    assert line["loss"] == pytest.approx(expected.item(), rel=1e-3)
    assert line["reconstruction_error"] == pytest.approx(relative.item(), rel=1e-3)
    tuned = train(
        replace(config, pixel_decoder=replace(stage, epochs=20, rate=0.3)), tmp_path / "tuned"
    )
    with torch.no_grad():
        assert (tuned.reconstruct(images) - images).abs().mean() < 0.97 * (
            drawn - images
        ).abs().mean()
    ours, theirs = weights(tmp_path / "tuned"), weights(tmp_path / "run")
    moved = {
        name.split(".weight")[0].split(".first")[0]
        for name in ours
        if not torch.equal(ours[name], theirs[name])
    }
    assert {"pixel_decoder", "decoders.0"} <= moved
    assert not any(
        name.startswith(("autoencoder", "encoders", "scaling", "decoders.1")) for name in moved
    )


def test_the_painter_draws_its_share_from_the_strongest_expert_alone(
    data: Path, tmp_path: Path
) -> None:
    stage = PixelDecoderStage(
        epochs=1,
        optimizer="sgd",
        learning_rate=0.0,
        momentum=0.0,
        single_expert_share=1.0,
        cross_entropy=0.0,
    )
    strong = DecoderStage(epochs=0, init_std=1.0)  # so that what is drawn depends on the code
    network = train(
        config_for(data, decoder=strong, pixel_decoder=stage, batch_size=96, precision="float32"),
        tmp_path / "run",
    )
    images = torch.from_numpy(np.load(data) / 255).float().unsqueeze(1)
    with torch.no_grad():
        code = network.encode(images)
        norm = code.norm(dim=-1, keepdim=True)
        alone, together = (
            (network.decode(y) - images).abs().mean().item()
            for y in (code * (norm == norm.amax(1, keepdim=True)), code)
        )
    (line,) = [line for line in metrics(tmp_path / "run") if line["stage"] == "pixel_decoder"]
    assert line["loss"] == pytest.approx(alone, rel=1e-3)
    assert alone != pytest.approx(together, rel=3e-3)


class Stop(Exception):  # noqa: N818
    pass


@pytest.mark.parametrize(
    "at",
    [
        ("autoencoder", 12),
        ("encoder 1", 9),
        ("encoder 2", 24),
        ("decoder 1", 20),
        ("pixel_decoder", 10),
    ],
)
def test_a_broken_run_goes_on_to_bit_identical_weights(
    at: tuple[str, int], data: Path, finished: Path, tmp_path: Path
) -> None:
    def stop(progress: Progress) -> None:
        if progress.stage == at[0] and progress.step >= at[1]:
            raise Stop

    with pytest.raises(Stop):
        train(config_for(data), tmp_path / "run", report=stop)
    resume(tmp_path / "run")
    assert_same_weights(tmp_path / "run", finished)
    assert metrics(tmp_path / "run") == metrics(finished)


def command(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "poecaps", *map(str, arguments)]


def wait_for_lines(process: subprocess.Popen[Any], folder: Path, lines: int) -> None:
    """Wait until a run has written so many lines of metrics."""
    while process.poll() is None:
        if (folder / METRICS).exists() and (folder / METRICS).read_text().count("\n") >= lines:
            return
        time.sleep(0.002)
    raise AssertionError("the run ended too early")


def test_a_killed_process_goes_on_to_bit_identical_weights(
    data: Path, finished: Path, tmp_path: Path
) -> None:
    """kill -9 at some moment, twice, and `poecaps train --resume` each time."""
    folder = tmp_path / "run"
    start = command("train", "--data", data, "--out", folder, "--quiet", "--no-figures", *OPTIONS)
    go_on = command("train", "--resume", folder, "--quiet", "--no-figures")
    for arguments, lines in ((start, 4), (go_on, 25)):
        process = subprocess.Popen(arguments)
        wait_for_lines(process, folder, lines)
        process.send_signal(signal.SIGKILL)
        process.wait()
    subprocess.run(go_on, check=True)
    assert_same_weights(folder, finished)
    assert metrics(folder) == metrics(finished)
    starts = [
        (start["stage"], start["step"])
        for start in json.loads((folder / "run.json").read_text())["starts"]
    ]
    assert len(starts) == 3
    assert starts[0] == ("autoencoder", 0)
    assert starts[2][0].startswith(("encoder", "decoder"))


def test_a_run_killed_before_its_first_step_can_go_on(
    data: Path, finished: Path, tmp_path: Path
) -> None:
    def stop(progress: Progress) -> None:
        raise Stop

    with pytest.raises(Stop):
        train(config_for(data), tmp_path / "run", report=stop)
    resume(tmp_path / "run")
    assert_same_weights(tmp_path / "run", finished)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_saves_and_prints_the_command_to_go_on_with(
    number: signal.Signals, data: Path, finished: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "a run"
    arguments = command(
        "train", "--data", data, "--out", folder, *OPTIONS, "--checkpoint-every", "100000"
    )
    process = subprocess.Popen(
        arguments,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(
            signal.SIGINT, signal.default_int_handler
        ),  # even if the tests ignore it
    )
    wait_for_lines(process, folder, 15)
    process.send_signal(number)
    _, err = process.communicate()
    assert process.returncode == 130
    assert f"resume with: poecaps train --resume '{folder}'" in err
    assert "Traceback" not in err
    _, about = read_tensors(folder / CHECKPOINT)
    assert about["task"] >= 1
    assert about["task"] > 1 or about["step"] > 0  # not only between stages
    resume(folder)
    assert_same_weights(folder, finished)


@pytest.mark.parametrize("broken", [KeyboardInterrupt, MemoryError])
@pytest.mark.parametrize(
    ("what", "task"),
    [
        ("poecaps.training.stages.Material.make_codes", 2),
        ("poecaps.training.stages.Material.fit_scaling", 1),
        ("poecaps.training.stages.Material._for_all", 1),
        ("poecaps.training.stages.EncoderTask._reset", 1),
        ("poecaps.training.loop._Run._fit_density", 6),
        ("poecaps.network.CapsuleNetwork.save", 6),
    ],
)
def test_a_break_between_two_stages_loses_no_step(
    what: str,
    task: int,
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
    assert (about["task"], about["step"]) == (task, 0)
    resume(tmp_path / "run")
    assert_same_weights(tmp_path / "run", finished)


class Clock:
    """The clock of a run alone: others in this process wait by that of the system."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        time = SimpleNamespace(monotonic=lambda: self.now, perf_counter=perf_counter)
        monkeypatch.setattr("poecaps.training.loop.time", time)


def test_a_checkpoint_is_as_old_as_was_allowed(
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
    assert (found["task"], found["step"]) == (1, 0)


def test_divergence_names_stage_step_and_rate_and_keeps_the_checkpoint(
    data: Path, tmp_path: Path
) -> None:
    wild = config_for(data, encoder=EncoderStage(epochs=4, optimizer="sgd", learning_rate=1e30))
    with pytest.raises(
        TrainingError, match=r"encoder 1 diverged at step \d+ with a learning rate of \d\S*; lower"
    ):
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
    with pytest.raises(FileExistsError, match="is not empty; resume the run in it"):
        train(config_for(data), finished)
    with pytest.raises(FileNotFoundError, match="holds no run to go on with"):
        resume(tmp_path)
    (tmp_path / CHECKPOINT).write_bytes((finished / CHECKPOINT).read_bytes()[:1000])
    with pytest.raises(ModelError, match="damaged"):
        resume(tmp_path)
    (tmp_path / CHECKPOINT).write_bytes((finished / "model.safetensors").read_bytes())
    with pytest.raises(ModelError, match="is no checkpoint of a run"):
        resume(tmp_path)


class Hostile:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> Any:
        return (Path.touch, (self.target,))


def test_opening_a_strangers_checkpoint_runs_no_code(tmp_path: Path) -> None:
    touched = tmp_path / "touched"
    (tmp_path / CHECKPOINT).write_bytes(pickle.dumps({"model": Hostile(touched)}))
    with pytest.raises(ModelError, match="no safetensors file"):
        resume(tmp_path)
    torch.save({"model": Hostile(touched)}, tmp_path / CHECKPOINT)
    with pytest.raises(ModelError, match="no safetensors file"):
        resume(tmp_path)
    assert not touched.exists()
    pickle.loads(pickle.dumps(Hostile(touched)))  # what a program would do that unpickles
    assert touched.exists()


@pytest.mark.parametrize(
    ("about", "state", "message"),
    [
        ({"version": 99}, {}, "upgrade"),
        ({"task": 77}, {}, "is damaged: it stands at step"),
        ({"step": -1}, {}, "is damaged: it stands at step"),
        ({"config": {"data": 5}}, {}, "is no checkpoint of a run"),
        ({"step": 10**9}, {}, "is damaged: it stands at step"),
        ({"step": float("inf")}, {}, "is no checkpoint of a run"),
        ({"task": None}, {}, "is no checkpoint of a run"),
        (
            {},
            {"optimizer.99.exp_avg": torch.zeros(2)},
            "optimizer.99.exp_avg is no state of this optimiser",
        ),
        (
            {},
            {"optimizer.0.lambda": torch.zeros(2)},
            "optimizer.0.lambda is no state of this optimiser",
        ),
        (
            {},
            {"optimizer.0.exp_avg": torch.zeros(2)},
            "optimizer.0.exp_avg is no state of this optimiser",
        ),
        ({}, {"optimizer.0.exp_avg": None}, "optimizer.0.exp_avg is no state of this optimiser"),
        (
            {},
            {"optimizer.0.step": torch.tensor(torch.nan)},
            "a number is no state of this optimiser",
        ),
        ({}, {"model.more": torch.zeros(2)}, "does not fit its architecture: more"),
        (
            {},
            {"model.autoencoder.up_1": torch.zeros(8, dtype=torch.float64)},
            "up_1 is .* of float64",
        ),
        (
            {},
            {"model.autoencoder.up_1": torch.full((8,), torch.nan)},
            "autoencoder.up_1 is not finite",
        ),
    ],
)
def test_an_altered_checkpoint_is_one_clear_error(
    about: dict[str, Any],
    state: dict[str, torch.Tensor | None],
    message: str,
    data: Path,
    tmp_path: Path,
) -> None:
    def stop(progress: Progress) -> None:
        if progress.step == 10:
            raise Stop

    with pytest.raises(Stop):
        train(config_for(data), tmp_path / "run", report=stop)
    tensors, before = read_tensors(tmp_path / "run" / CHECKPOINT)
    changed = {name: value for name, value in (tensors | state).items() if value is not None}
    write_tensors(tmp_path / "run" / CHECKPOINT, changed, before | about)
    with pytest.raises(ModelError, match=message):
        resume(tmp_path / "run")


def test_a_finished_run_is_only_opened(finished: Path) -> None:
    def never(progress: Progress) -> None:
        raise Stop

    files = {file: file.stat().st_mtime_ns for file in finished.iterdir()}
    network = resume(finished, report=never)
    assert {file: file.stat().st_mtime_ns for file in finished.iterdir()} == files
    assert all(
        torch.equal(value, weights(finished)[name]) for name, value in network.state_dict().items()
    )


def test_other_data_than_the_run_began_with_are_refused(data: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine.npy"
    np.save(mine, np.load(data))

    def stop(progress: Progress) -> None:
        if progress.step == 10:
            raise Stop

    with pytest.raises(Stop):
        train(config_for(mine), tmp_path / "run", report=stop)
    np.save(mine, 255 - np.load(data))
    with pytest.raises(DataError, match=r"are not those that the run in .* began with"):
        resume(tmp_path / "run")


@pytest.mark.parametrize(
    ("count", "message"), [(1, "there is only one image"), (20, "all 20 images are the same")]
)
def test_images_from_which_nothing_can_be_learned_are_refused(
    count: int, message: str, tmp_path: Path
) -> None:
    np.save(tmp_path / "same.npy", np.full((count, 20, 19), 7, np.uint8))
    with pytest.raises(DataError, match=message):
        train(config_for(tmp_path / "same.npy"), tmp_path / "run")


def test_a_run_may_go_on_from_another_folder_and_with_spoilt_metrics(
    data: Path, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(progress: Progress) -> None:
        if progress.stage == "encoder 1" and progress.step == 9:
            raise Stop

    monkeypatch.chdir(data.parent)
    with pytest.raises(Stop):
        train(config_for(Path(data.name)), tmp_path / "run", report=stop)
    monkeypatch.chdir(tmp_path)
    with (tmp_path / "run" / METRICS).open("ab") as file:
        file.write(b'\xff\xfe{"stage": "encoder 1", "st')
    resume(tmp_path / "run")
    assert_same_weights(tmp_path / "run", finished)
    assert metrics(tmp_path / "run") == metrics(finished)


def test_a_finished_run_whose_model_is_lost_makes_it_anew(finished: Path, tmp_path: Path) -> None:
    shutil.copytree(finished, tmp_path / "run")
    (tmp_path / "run" / "model.safetensors").unlink()
    resume(tmp_path / "run")
    assert_same_weights(tmp_path / "run", finished)


def test_what_a_run_left_that_never_began_is_in_nobodys_way(
    data: Path, finished: Path, tmp_path: Path
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / f".{CHECKPOINT}-x7").write_bytes(b"half")
    train(config_for(data), tmp_path / "run")
    assert_same_weights(tmp_path / "run", finished)


def test_a_folder_that_cannot_be_written_is_one_clear_error(data: Path) -> None:
    with pytest.raises(TrainingError, match="cannot write into /proc/none"):
        train(config_for(data), "/proc/none")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_size": 0}, "batch_size must be a whole number of at least 1, but is 0"),
        ({"seed": -1}, "seed must be a whole number from 0"),
        ({"checkpoint_every": -1.0}, "checkpoint_every must be"),
        ({"precision": "float16"}, "precision must be one of"),
        ({"device": "meta"}, "device must be auto, cpu, or a GPU"),
        ({"device": "cudda"}, "device must be auto, cpu, or a GPU such as cuda:0, but is 'cudda'"),
        ({"autoencoder": Stage(epochs=-1)}, r"autoencoder.epochs must be"),
        ({"encoder": EncoderStage(rate=float("nan"))}, r"encoder.rate must be a finite number"),
        ({"encoder": EncoderStage(k=0)}, r"encoder.k must be"),
        ({"decoder": DecoderStage(momentum=1.0)}, r"decoder.momentum must be below 1"),
        ({"encoder": EncoderStage(target_firing=1.0)}, r"encoder.firing must be between 0 and 1"),
        ({"decoder": DecoderStage(single_expert_share=1.1)}, r"decoder.alone must be at most 1"),
        (
            {"encoder": EncoderStage(winners=4)},
            r"encoder.winners must be at most 3, the number of experts, but is 4",
        ),
        (
            {"model": ModelOptions(joint_components=0)},
            r"model.components must be a whole number of at least 1",
        ),
        ({"model": ModelOptions(capsule_dim=0)}, r"model.capsule_dim must be"),
        ({"model": ModelOptions(experts=())}, r"model.experts must be one pair or more"),
        ({"model": ModelOptions(scale=0.0)}, r"model.scale must be above 0"),
        ({"model": ModelOptions(scale=float("nan"))}, r"model.scale must be a finite number"),
    ],
)
def test_options_that_cannot_be_meant_are_refused(
    changes: dict[str, Any], message: str, data: Path, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        train(config_for(data, **changes), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_stage_of_the_wrong_kind_is_refused(data: Path, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="decoder must be a DecoderStage, but is a Stage"):
        train(config_for(data, decoder=Stage()), tmp_path / "run")


def test_training_leaves_the_random_numbers_of_the_caller_alone(data: Path, tmp_path: Path) -> None:
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    train(config_for(data, encoder=EncoderStage(epochs=1, mixing="bernoulli")), tmp_path / "run")
    assert torch.equal(torch.rand(3), expected)


def test_what_does_not_fit_into_memory_lies_in_mapped_files(
    data: Path, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Images, features and codes; and what is learned does not depend on where they lie."""
    monkeypatch.setattr("poecaps.data.buffers.MAX_IN_MEMORY", 0)
    mapped: dict[str, tuple[int, int]] = {}

    def temporary() -> set[str]:
        maps = Path("/proc/self/maps").read_text().splitlines()
        return {
            line for line in maps if tempfile.gettempdir() in line and line.endswith("(deleted)")
        }

    before = temporary()  # what others in this process left

    def look(progress: Progress) -> None:
        maps = Path("/proc/self/maps").read_text().splitlines()
        mapped[progress.stage] = (
            sum(line.endswith(str(data)) for line in maps),
            len(temporary() - before),
        )

    train(config_for(data), tmp_path / "run", report=look)
    assert (
        mapped
        == {  # the images; their features, then the experts of one layer, then those of the other
            "autoencoder": (1, 0),
            "encoder 1": (1, 1),
            "encoder 2": (1, 2),
            "decoder 1": (1, 2),
            "decoder 2": (1, 3),
            "pixel_decoder": (1, 3),
        }
    )
    assert_same_weights(tmp_path / "run", finished)


def test_effective_rank_counts_directions(generator: torch.Generator) -> None:
    basis = torch.linalg.qr(torch.randn(20, 20, generator=generator)).Q[:, :5]
    code = torch.randn(4000, 5, generator=generator) @ basis.T + 3
    assert effective_rank(code) == pytest.approx(5, rel=0.02)
    assert effective_rank(torch.ones(10, 4)) == 0


def test_weights_that_run_away_stop_the_run_before_they_are_saved(
    data: Path, tmp_path: Path
) -> None:
    """Finite all along, but no model any more."""
    wild = config_for(
        data, decoder=DecoderStage(epochs=6, optimizer="sgd", learning_rate=1e8, momentum=0.0)
    )
    with pytest.raises(
        TrainingError, match=r"decoder 1 diverged at step \d+ with a learning rate of"
    ):
        train(wild, tmp_path / "run")
    tensors, about = read_tensors(tmp_path / "run" / CHECKPOINT)
    assert all(
        tensor.isfinite().all() and tensor.float().abs().mean() < 1e3 for tensor in tensors.values()
    )
    assert about["task"] <= 3


def test_the_paper_preset_trains(data: Path, tmp_path: Path) -> None:
    config = PRESETS["paper"]()
    stages = {
        name: replace(getattr(config, name), epochs=2)
        for name in ("autoencoder", "encoder", "decoder")
    }
    model = replace(config.model, features=8)
    network = train(
        replace(config, data=str(data), batch_size=16, device="cpu", model=model, **stages),
        tmp_path / "run",
    )
    assert network.autoencoder.up_1 is None
    assert not network.preprocessing.mean.any()
    assert torch.equal(network.preprocessing.matrix, torch.eye(8).expand(4, 8, 8))


def test_experts_compete_while_they_learn_and_all_speak_afterwards(
    data: Path, finished: Path
) -> None:
    """In the finished run two experts won at a time; now all fire, and the winner is the one that fires most."""
    network = CapsuleNetwork.load(finished)
    images = torch.from_numpy(np.load(data) / 255).float().unsqueeze(1)
    with torch.no_grad():
        code = network.encode(images)
    assert bool((code.norm(dim=-1) > 0).all())
    assert all(not layer.balance.any() and layer.winners is None for layer in network.encoders)  # type: ignore[operator]


def test_the_strongest_expert_fires_as_much_as_was_asked_for(
    data: Path, finished: Path, tmp_path: Path
) -> None:
    encoder = EncoderStage(
        epochs=4, learning_rate=0.05, mixing="bernoulli", winners=2, target_firing=0.4
    )
    model = replace(config_for(data).model, experts=((4, 5),))
    plain = train(
        config_for(data, model=model, encoder=replace(encoder, target_firing=None)),
        tmp_path / "plain",
    )
    tempered = train(config_for(data, model=model, encoder=encoder), tmp_path / "tempered")
    images = torch.from_numpy(np.load(data) / 255).float().unsqueeze(1)
    with torch.no_grad():
        before, after = (network.encode(images).norm(dim=-1) for network in (plain, tempered))
    assert after.amax(1).mean().item() == pytest.approx(0.4, abs=0.02)
    assert before.amax(1).mean().item() != pytest.approx(0.4, abs=0.05)
    assert torch.equal(before.argsort(1), after.argsort(1))


@pytest.mark.parametrize("target", [0.01, 0.5, 0.99])
def test_the_factor_for_a_firing_probability_is_found(
    target: float, generator: torch.Generator
) -> None:
    norm = torch.rand(100, generator=generator) * 50
    square = (norm * factor_for_firing(norm, target)).square()
    assert (square / (1 + square)).mean().item() == pytest.approx(target, rel=1e-4)
    assert factor_for_firing(torch.zeros(5), target) == 1


def test_some_images_are_drawn_from_their_strongest_expert_alone(
    generator: torch.Generator,
) -> None:
    network = CapsuleNetwork(
        Architecture(image_shape=(1, 20, 19), features=8, experts=((3, 5),)), generator=generator
    )
    y, x = (squash(torch.randn(4, *shape, generator=generator)) for shape in ((3, 5), (4, 8)))
    material = SimpleNamespace(
        network=network, codes=lambda layer, indices: y, inputs=lambda layer, indices: x
    )
    task = DecoderTask(0, DecoderStage(single_expert_share=0.5), material)  # type: ignore[arg-type]
    drawn = torch.tensor([0.1, 0.6, 0.4999, 0.5]).view(4, 1, 1)
    loss = task.loss(torch.arange(4), lambda like: drawn.expand_as(like))
    for image in (0, 2):
        for expert in set(range(3)) - {int(y[image].norm(dim=-1).argmax())}:
            y[image, expert] = 0
    torch.testing.assert_close(loss, network.decoders[0].contrastive_divergence(y, x))  # type: ignore[operator]


# ---------------------------------------------------------------------------------------------------------
# Options do what they say


def no_epochs(data: Path, **changes: Any) -> Config:
    """A run that takes only the steps that are asked for."""
    stages = {
        "autoencoder": Stage(epochs=0),
        "encoder": EncoderStage(epochs=0),
        "decoder": DecoderStage(epochs=0),
        "pixel_decoder": PixelDecoderStage(epochs=0),
    }
    return config_for(data, **stages | changes)


def test_the_network_is_ready_for_use(data: Path, finished: Path, tmp_path: Path) -> None:
    network = train(config_for(data), tmp_path / "run")
    assert not any(part.training for part in network.modules())
    assert all(parameter.is_contiguous() for parameter in network.parameters())
    assert_same_weights(tmp_path / "run", finished)
    network = train(config_for(data, precision="float32"), tmp_path / "exact")
    images = torch.from_numpy(np.load(data) / 255).float().unsqueeze(1)
    with torch.no_grad():
        z = unsquash(network.encode(images))
    strongest = z.norm(dim=-1).argmax(1)
    own = next(j for j in range(3) if (strongest == j).sum() > 4)  # the density has seen all images
    torch.testing.assert_close(
        network.code_density.mean[own], z[strongest == own, own].mean(0), rtol=0.1, atol=0.02
    )


def test_each_seed_has_its_own_weights_orders_and_draws(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    loss = AutoencoderTask.loss

    def watched(self: AutoencoderTask, indices: torch.Tensor, draw: Any) -> torch.Tensor:
        def watched_draw(like: torch.Tensor) -> torch.Tensor:
            drawn: torch.Tensor = draw(like)
            seen.append((indices, drawn))
            return drawn

        return loss(self, indices, watched_draw)

    monkeypatch.setattr(AutoencoderTask, "loss", watched)
    first = []
    for seed in (0, 1):
        network = train(
            no_epochs(data, seed=seed, autoencoder=Stage(epochs=2, learning_rate=0.0)),
            tmp_path / str(seed),
        )
        first.append(network.autoencoder.conv1_weight.detach())  # at a rate of 0 still as it was drawn
    assert not torch.equal(*first)
    orders = [
        torch.cat([indices for indices, _ in seen[start : start + 6]]) for start in (0, 6, 12, 18)
    ]
    assert all(torch.equal(order.sort().values, torch.arange(96)) for order in orders)
    assert len({tuple(order.tolist()) for order in orders}) == 4  # two epochs of two seeds
    assert len({float(drawn.sum()) for _, drawn in seen}) == 24


def test_layers_start_from_different_weights_of_the_given_size(data: Path, tmp_path: Path) -> None:
    config = no_epochs(
        data,
        encoder=EncoderStage(epochs=0, init_std=0.3),
        decoder=DecoderStage(epochs=0, init_std=0.05),
    )
    network: Any = train(config, tmp_path / "run")
    up, down = network.encoders[0].weight.detach(), network.decoders[0].weight.detach()
    assert up.std().item() == pytest.approx(0.3, rel=0.1)
    assert down.std().item() == pytest.approx(0.05, rel=0.1)
    assert not torch.allclose(up.flatten()[:50] / 0.3, down.flatten()[:50] / 0.05)


def decoder_after(data: Path, folder: Path, **options: Any) -> torch.Tensor:
    """Weights of the upper decoder after steps of SGD on all images at once."""
    plain: dict[str, Any] = {"optimizer": "sgd", "rate": 1.0, "momentum": 0.0, "final_rate": 1.0}
    stage = DecoderStage(**plain | options)
    network: Any = train(no_epochs(data, decoder=stage, batch_size=96, precision="float32"), folder)
    weight: torch.Tensor = network.decoders[1].weight.detach()
    return weight


def test_sgd_has_momentum_decay_and_l2(data: Path, tmp_path: Path) -> None:
    def after(name: str, **options: Any) -> torch.Tensor:
        return decoder_after(data, tmp_path / name, **options)

    start, one, two = after("0", epochs=0), after("1", epochs=1), after("2", epochs=2)
    shrunk = after("l2", epochs=1, l2=0.25)
    torch.testing.assert_close(shrunk, one - 0.25 * start)  # w − rate · (gradient + l2 · w)
    pushed = after("momentum", epochs=2, momentum=0.5)
    torch.testing.assert_close(
        pushed, two + 0.5 * (one - start)
    )  # the second step repeats half of the first
    slowed = after(
        "decay", epochs=2, final_rate=0.0
    )  # the cosine is 1 at the first of two steps, 1/2 at the second
    torch.testing.assert_close(slowed, one + 0.5 * (two - one))


def test_precision_is_bfloat16_where_wanted_or_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    for fast in (False, True):
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda fast=fast: fast)
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
        assert _wants_bfloat16("auto", cpu) is fast
        assert _wants_bfloat16("bfloat16", cpu)
        assert not _wants_bfloat16("float32", cpu)


def test_images_in_memory_are_learned_like_those_of_a_file(
    data: Path, finished: Path, tmp_path: Path
) -> None:
    images = ImageSet(np.load(data))
    config = config_for(Path("not looked at"))

    def interrupt(progress: Progress) -> None:
        if progress.total_step == 20:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(config, tmp_path / "run", data=images, report=interrupt)
    with pytest.raises(FileNotFoundError, match="an array"):
        resume(tmp_path / "run")
    resume(tmp_path / "run", data=images)
    assert_same_weights(tmp_path / "run", finished)
