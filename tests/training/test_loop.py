"""A training run from start to end, and what may go wrong on the way."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from poecaps import Architecture, CapsuleNetwork, ModelError, squash
from poecaps._files import read_tensors, write_tensors
from poecaps.data import DataError
from poecaps.training import PRESETS, DecoderStage, EncoderStage, Progress, Stage, TrainingError, resume, train
from poecaps.training.loop import CHECKPOINT, METRICS
from poecaps.training.stages import DecoderTask, effective_rank
from tests.training.runs import OPTIONS, assert_same_weights, config_for, metrics, weights


def test_a_trained_network_beats_the_mean_image(data: Path, tmp_path: Path) -> None:
    tiny = config_for(data)
    model = replace(tiny.model, experts=((4, 8),))
    longer = replace(
        tiny,
        model=model,
        autoencoder=Stage(epochs=60, rate=5e-3),
        encoder=EncoderStage(epochs=20, rate=0.05),
        decoder=DecoderStage(epochs=30, rate=0.03),
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
    train(config_for(data, decoder=DecoderStage(epochs=0)), tmp_path / "a")
    train(config_for(data, encoder=EncoderStage(epochs=0), decoder=DecoderStage(epochs=0)), tmp_path / "b")
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


def test_a_killed_process_goes_on_to_bit_identical_weights(data: Path, finished: Path, tmp_path: Path) -> None:
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
    starts = [(start["stage"], start["step"]) for start in json.loads((folder / "run.json").read_text())["starts"]]
    assert len(starts) == 3
    assert starts[0] == ("autoencoder", 0)
    assert starts[2][0].startswith(("encoder", "decoder"))


def test_a_run_killed_before_its_first_step_can_go_on(data: Path, finished: Path, tmp_path: Path) -> None:
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
    arguments = command("train", "--data", data, "--out", folder, *OPTIONS, "--checkpoint-every", "100000")
    process = subprocess.Popen(arguments, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    wait_for_lines(process, folder, 15)
    process.send_signal(number)
    _, err = process.communicate()
    assert process.returncode == 130
    assert f"go on with: poecaps train --resume '{folder}'" in err
    assert "Traceback" not in err
    _, about = read_tensors(folder / CHECKPOINT)
    assert about["task"] >= 1
    assert about["task"] > 1 or about["step"] > 0  # not only between stages
    resume(folder)
    assert_same_weights(folder, finished)


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
        ({}, {"optimizer.99.exp_avg": torch.zeros(2)}, "which is no state of this optimiser"),
        ({}, {"optimizer.0.lambda": torch.zeros(2)}, "which is no state of this optimiser"),
        ({}, {"optimizer.0.exp_avg": torch.zeros(2)}, r"optimizer.0.exp_avg has the shape \(2,\)"),
        ({}, {"model.more": torch.zeros(2)}, "does not fit its architecture: more"),
    ],
)
def test_an_altered_checkpoint_is_one_clear_error(
    about: dict[str, Any], state: dict[str, torch.Tensor], message: str, data: Path, tmp_path: Path
) -> None:
    def stop(progress: Progress) -> None:
        if progress.step == 10:
            raise Stop

    with pytest.raises(Stop):
        train(config_for(data), tmp_path / "run", report=stop)
    tensors, before = read_tensors(tmp_path / "run" / CHECKPOINT)
    write_tensors(tmp_path / "run" / CHECKPOINT, tensors | state, before | about)
    with pytest.raises(ModelError, match=message):
        resume(tmp_path / "run")


def test_a_finished_run_is_only_opened(finished: Path) -> None:
    def never(progress: Progress) -> None:
        raise Stop

    files = {file: file.stat().st_mtime_ns for file in finished.iterdir()}
    network = resume(finished, report=never)
    assert {file: file.stat().st_mtime_ns for file in finished.iterdir()} == files
    assert all(torch.equal(value, weights(finished)[name]) for name, value in network.state_dict().items())


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


def test_a_folder_that_cannot_be_written_is_one_clear_error(data: Path) -> None:
    with pytest.raises(TrainingError, match="cannot write into /proc/none"):
        train(config_for(data), "/proc/none")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_size": 0}, "batch_size must be a whole number of at least 1, but is 0"),
        ({"seed": -1}, "seed must be a whole number of at least 0"),
        ({"checkpoint_every": 0}, "checkpoint_every must be"),
        ({"precision": "float16"}, "precision must be one of"),
        ({"device": "cudda"}, "device must be auto, cpu, or an accelerator that this machine has, but is 'cudda'"),
        ({"autoencoder": Stage(epochs=-1)}, r"autoencoder.epochs must be"),
        ({"encoder": EncoderStage(rate=float("nan"))}, r"encoder.rate must be a finite number"),
        ({"encoder": EncoderStage(k=0)}, r"encoder.k must be"),
        ({"decoder": DecoderStage(momentum=1.0)}, r"decoder.momentum must be below 1"),
        ({"decoder": DecoderStage(alone=1.1)}, r"decoder.alone must be at most 1"),
        ({"encoder": EncoderStage(winners=4)}, r"encoder.winners must be at most 3, the number of experts, but is 4"),
        ({"model": Architecture(image_shape=(1, 9, 9))}, "image_shape follows from the data"),
    ],
)
def test_options_that_cannot_be_meant_are_refused(
    changes: dict[str, Any], message: str, data: Path, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        train(config_for(data, **changes), tmp_path / "run")
    assert not (tmp_path / "run").exists()


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
    monkeypatch.setattr("poecaps.data._storage.SPILL", 0)
    mapped: dict[str, tuple[int, int]] = {}

    def look(progress: Progress) -> None:
        maps = Path("/proc/self/maps").read_text().splitlines()
        temporary = [line for line in maps if tempfile.gettempdir() in line and line.endswith("(deleted)")]
        mapped[progress.stage] = sum(line.endswith(str(data)) for line in maps), len(temporary)

    train(config_for(data), tmp_path / "run", report=look)
    assert mapped == {  # the images; their features, then the experts of one layer, then those of the other
        "autoencoder": (1, 0),
        "encoder 1": (1, 1),
        "encoder 2": (1, 2),
        "decoder 1": (1, 2),
        "decoder 2": (1, 3),
    }
    assert_same_weights(tmp_path / "run", finished)


def test_effective_rank_counts_directions(generator: torch.Generator) -> None:
    basis = torch.linalg.qr(torch.randn(20, 20, generator=generator)).Q[:, :5]
    code = torch.randn(4000, 5, generator=generator) @ basis.T + 3
    assert effective_rank(code) == pytest.approx(5, rel=0.02)
    assert effective_rank(torch.ones(10, 4)) == 0


def test_weights_that_run_away_stop_the_run_before_they_are_saved(data: Path, tmp_path: Path) -> None:
    """Finite all along, but no model any more."""
    wild = config_for(data, decoder=DecoderStage(epochs=6, optimizer="sgd", rate=1e8, momentum=0.0))
    with pytest.raises(TrainingError, match=r"decoder 1 diverged at step \d+ with a learning rate of"):
        train(wild, tmp_path / "run")
    tensors, about = read_tensors(tmp_path / "run" / CHECKPOINT)
    assert all(tensor.isfinite().all() and tensor.float().abs().mean() < 1e3 for tensor in tensors.values())
    assert about["task"] <= 3


def test_the_paper_preset_trains(data: Path, tmp_path: Path) -> None:
    config = PRESETS["paper"]()
    stages = {name: replace(getattr(config, name), epochs=2) for name in ("autoencoder", "encoder", "decoder")}
    model = replace(config.model, features=8)
    network = train(
        replace(config, data=str(data), batch_size=16, device="cpu", model=model, **stages), tmp_path / "run"
    )
    assert network.autoencoder.up_1 is None
    assert not network.scaling.mean.any()
    assert torch.equal(network.scaling.matrix, torch.eye(8).expand(4, 8, 8))


def test_experts_compete_while_they_learn_and_all_speak_afterwards(data: Path, finished: Path) -> None:
    """In the finished run two experts won at a time; now all fire, and the winner is the one that fires most."""
    network = CapsuleNetwork.load(finished)
    images = torch.from_numpy(np.load(data) / 255).float().unsqueeze(1)
    with torch.no_grad():
        code = network.encode(images)
    assert bool((code.norm(dim=-1) > 0).all())
    assert all(not layer.balance.any() and layer.winners is None for layer in network.encoders)  # type: ignore[operator]


def test_some_images_are_drawn_from_their_strongest_expert_alone(generator: torch.Generator) -> None:
    network = CapsuleNetwork(Architecture(image_shape=(1, 20, 19), features=8, experts=((3, 5),)), generator=generator)
    y, x = (squash(torch.randn(4, *shape, generator=generator)) for shape in ((3, 5), (4, 8)))
    material = SimpleNamespace(network=network, codes=lambda layer, indices: y, inputs=lambda layer, indices: x)
    task = DecoderTask(0, DecoderStage(alone=0.5), material)  # type: ignore[arg-type]
    drawn = torch.tensor([0.1, 0.6, 0.4999, 0.5]).view(4, 1, 1)
    loss = task.loss(torch.arange(4), lambda like: drawn.expand_as(like))
    for image in (0, 2):
        for expert in set(range(3)) - {int(y[image].norm(dim=-1).argmax())}:
            y[image, expert] = 0
    torch.testing.assert_close(loss, network.decoders[0].decoding_loss(y, x))  # type: ignore[operator]
