"""Starting, resuming and refusing runs."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
from dataclasses import replace
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from poecaps import CapsuleNetwork, ModelError, _files
from poecaps.data import DataError, ImageSet
from poecaps.serialization import read_tensors, write_tensors
from poecaps.training import (
    Progress,
    Stage,
    TrainingError,
    TrainingResult,
    resume,
    resume_training,
    run_training,
    train,
)
from poecaps.training import record as run_record
from poecaps.training.checkpoint import CHECKPOINT, PREVIOUS, CheckpointWarning
from poecaps.training.metrics import METRICS
from tests.faults import status_of_child
from tests.systems import needs_flock, needs_fork, needs_unix
from tests.test_serialization import as_version_2
from tests.training.runs import (
    Stop,
    assert_same_weights,
    config_for,
    metrics,
    weights,
    without_epochs,
)


def assert_is_finished_run(result: TrainingResult, folder: Path) -> None:
    assert result.folder == folder
    assert result.record == run_record.read(folder)
    assert result.record["finished"]
    last = {line["stage"]: line for line in metrics(folder)}
    assert list(result.metrics) == list(last)
    for stage, values in result.metrics.items():
        assert values.items() <= last[stage].items()
        assert {"loss", "learning_rate", "reconstruction_error"} <= values.keys()
    state = result.network.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in weights(folder).items())


def test_the_result_of_a_run_has_its_data_metrics_and_record(data: Path, tmp_path: Path) -> None:
    config = config_for(data)
    result = run_training(config, tmp_path / "run")
    assert_is_finished_run(result, tmp_path / "run")
    assert result.data is not None
    assert np.array_equal(result.data.images[..., 0], np.load(data))
    assert result.config == config
    assert result.seconds > 0
    assert not result.resumed_finished


def test_the_result_of_a_finished_run_is_read_from_its_folder(data: Path, finished: Path) -> None:
    result = resume_training(finished)
    assert_is_finished_run(result, finished)
    assert result.data is None
    assert result.config == config_for(data)
    assert result.resumed_finished


def test_a_folder_without_a_valid_checkpoint_cannot_be_resumed(
    data: Path, finished: Path, tmp_path: Path
) -> None:
    with pytest.raises(FileExistsError, match="is not empty; resume the run in it"):
        train(config_for(data), finished)
    with pytest.raises(
        FileNotFoundError, match=f"cannot resume the run in .*: it contains no {CHECKPOINT}"
    ):
        resume(tmp_path)
    (tmp_path / CHECKPOINT).write_bytes((finished / CHECKPOINT).read_bytes()[:1000])
    with pytest.raises(ModelError, match="damaged"):
        resume(tmp_path)
    (tmp_path / CHECKPOINT).write_bytes((finished / "model.safetensors").read_bytes())
    with pytest.raises(ModelError, match="is not the checkpoint of a run"):
        resume(tmp_path)


def test_a_finished_run_is_only_loaded(finished: Path) -> None:
    def never(progress: Progress) -> None:
        raise Stop

    files = {file: file.stat().st_mtime_ns for file in finished.iterdir()}
    network = resume(finished, report=never)
    assert {file: file.stat().st_mtime_ns for file in finished.iterdir()} == files
    assert all(
        torch.equal(value, weights(finished)[name]) for name, value in network.state_dict().items()
    )


@needs_flock
def test_temporary_files_of_killed_processes_in_a_finished_run_are_deleted(
    finished: Path, tmp_path: Path
) -> None:
    """Those of living ones stay, and so does all while another process owns the folder."""
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    names = {file.name for file in folder.iterdir()}
    (folder / "figures").mkdir(exist_ok=True)
    killed = [folder / f".{name}-0123456789abcdef.part" for name in ("model.safetensors", "a.npz")]
    killed.append(folder / "figures" / ".joint.png-0123456789abcdef.part")
    for file in killed:
        file.touch()
    with _files.lock(folder / ".lock"):
        resume(folder)
    assert all(file.exists() for file in killed)
    with _files.atomic_write(folder / "codes.npz"):
        resume(folder)
        assert not any(file.exists() for file in killed)
        assert len(list(folder.glob(".codes.npz-*.part"))) == 1
    assert {file.name for file in folder.iterdir()} == names | {"codes.npz", "figures"}


def test_a_finished_run_that_is_read_only_is_loaded(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although a temporary file was left there."""
    shutil.copytree(finished, tmp_path / "run")
    (tmp_path / "run" / ".a.npz-0123456789abcdef.part").touch()
    tried = []

    def refuse(path: Path) -> None:
        tried.append(path)
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(_files, "_acquire", refuse)
    resume(tmp_path / "run")
    assert tried == [tmp_path / "run" / ".lock"]


def test_a_finished_run_whose_model_is_lost_writes_it_again(finished: Path, tmp_path: Path) -> None:
    shutil.copytree(finished, tmp_path / "run")
    (tmp_path / "run" / "model.safetensors").unlink()
    resume(tmp_path / "run")
    assert_same_weights(tmp_path / "run", finished)


def test_data_that_have_changed_are_an_error(data: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine.npy"
    np.save(mine, np.load(data))

    def stop(progress: Progress) -> None:
        if progress.step == 10:
            raise Stop

    with pytest.raises(Stop):
        train(config_for(mine, checkpoint_every=0), tmp_path / "run", report=stop)
    np.save(mine, 255 - np.load(data))
    with pytest.raises(DataError, match=r"differ from those with which the run in .* was started"):
        resume(tmp_path / "run")


@pytest.mark.parametrize(
    ("count", "message"), [(1, "it contains only one image"), (20, "it contains 20 equal images")]
)
def test_images_without_any_difference_are_an_error(
    count: int, message: str, tmp_path: Path
) -> None:
    np.save(tmp_path / "same.npy", np.full((count, 20, 19), 7, np.uint8))
    with pytest.raises(DataError, match=message):
        train(config_for(tmp_path / "same.npy"), tmp_path / "run")


def test_a_run_can_be_resumed_from_another_folder_and_with_damaged_metrics(
    data: Path, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(progress: Progress) -> None:
        if progress.stage == "encoder 1" and progress.step == 9:
            raise Stop

    monkeypatch.chdir(data.parent)
    with pytest.raises(Stop):
        train(config_for(Path(data.name), checkpoint_every=0), tmp_path / "run", report=stop)
    monkeypatch.chdir(tmp_path)
    with (tmp_path / "run" / METRICS).open("ab") as file:
        file.write(b'\xff\xfe{"stage": "encoder 1", "st')
    resume(tmp_path / "run")
    assert_same_weights(tmp_path / "run", finished)
    assert metrics(tmp_path / "run") == metrics(finished)


def test_a_folder_with_the_remains_of_a_killed_start_counts_as_empty(
    data: Path, finished: Path, tmp_path: Path
) -> None:
    (tmp_path / "run").mkdir()
    left = tmp_path / "run" / f".{CHECKPOINT}-0123456789abcdef.part"
    left.write_bytes(b"half")
    (tmp_path / "run" / ".lock").write_text("{}")  # of a process that is gone
    train(config_for(data), tmp_path / "run")
    assert not left.exists()
    assert_same_weights(tmp_path / "run", finished)


@needs_unix
def test_a_folder_that_cannot_be_written_is_one_clear_error(data: Path) -> None:
    with pytest.raises(TrainingError, match="cannot write to /proc/none"):
        train(config_for(data), "/proc/none")


def test_images_in_memory_give_the_result_of_a_file(
    data: Path, finished: Path, tmp_path: Path
) -> None:
    images = ImageSet(np.load(data))
    config = config_for(Path("not looked at"), checkpoint_every=0)

    def interrupt(progress: Progress) -> None:
        if progress.total_step == 20:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(config, tmp_path / "run", data=images, report=interrupt)
    with pytest.raises(FileNotFoundError, match="an array"):
        resume(tmp_path / "run")
    resume(tmp_path / "run", data=images)
    assert_same_weights(tmp_path / "run", finished)


# --------------------------------------------------------------------------------------------------
# One run, one owner


def test_a_second_process_is_told_who_owns_the_folder(data: Path, tmp_path: Path) -> None:
    """Both to start and to resume; before the images are loaded, and nothing is written."""
    folder, told = tmp_path / "run", []

    def intrude(progress: Progress) -> None:
        if progress.total_step == 5:
            before = {file.name: file.read_bytes() for file in folder.iterdir()}
            with pytest.raises(TrainingError) as caught:
                train(config_for(Path("no such file")), folder)
            told.append(str(caught.value))
            with pytest.raises(TrainingError) as caught:
                resume(folder)
            told.append(str(caught.value))
            assert {file.name: file.read_bytes() for file in folder.iterdir()} == before
            raise Stop

    with pytest.raises(Stop):
        train(config_for(data), folder, report=intrude)
    owner = rf"is in use by process {os.getpid()} on {socket.gethostname()}, since 20\d\d-.*; wait"
    assert len(told) == 2
    assert all(re.search(owner, message) for message in told)
    assert not (folder / ".lock").exists()


@needs_fork
def test_a_killed_process_leaves_no_lock(data: Path, finished: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"

    def kill(progress: Progress) -> None:
        if progress.total_step == 3:
            os.kill(os.getpid(), signal.SIGKILL)

    child = status_of_child(lambda: train(config_for(data), folder, report=kill))
    assert child == -signal.SIGKILL
    assert (folder / ".lock").is_file()
    resume(folder)
    assert_same_weights(folder, finished)
    assert not (folder / ".lock").exists()


@pytest.mark.skipif(os.name == "nt", reason="Windows has no modes of files")
def test_nobody_else_can_lock_a_folder(tmp_path: Path) -> None:
    """A file that may be read may also be locked, for ever."""
    with _files.lock(tmp_path / ".lock"):
        assert stat.S_IMODE((tmp_path / ".lock").stat().st_mode) == 0o600


def test_a_lock_that_its_owner_deletes_meanwhile_is_no_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A third process would create and lock another file of the same name."""
    path, lock_handle = tmp_path / ".lock", _files._lock_handle
    times: list[int] = []

    def lock_late(handle: int) -> None:
        times.append(handle)
        if len(times) == 1:
            path.unlink()
        lock_handle(handle)

    monkeypatch.setattr(_files, "_lock_handle", lock_late)
    with _files.lock(path):
        assert path.exists()
        with pytest.raises(_files.LockedError), _files.lock(path):
            pass
    assert len(times) == 3


def test_an_owner_may_write_its_name_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second process waits for it, and does not read that of a killed one."""
    path = tmp_path / ".lock"
    path.write_text('{"process": 1, "host": "killed", "since": "long ago"}')
    pauses = []
    owned = _files.lock(path)
    handle = _files._acquire(path)

    def write_name(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 3:
            os.write(handle, b'{"process": 7, "host": "here", "since": "now"}')

    monkeypatch.setattr("poecaps._files.sleep", write_name)
    with pytest.raises(_files.LockedError, match="in use by process 7 on here, since now"), owned:
        pass
    assert len(pauses) == 3
    os.ftruncate(handle, 0)
    with pytest.raises(_files.LockedError, match=r"in use by another process$"), _files.lock(path):
        pass
    os.close(handle)


def test_a_failed_start_leaves_no_folder(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        train(config_for(tmp_path / "no.npy"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@needs_flock
def test_a_file_system_without_locks_is_said(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(handle: int, how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", flock)
    with pytest.warns(RuntimeWarning, match="the file system has no locks"):
        train(without_epochs(data), tmp_path / "run")


@pytest.fixture
def _without_identifier(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process of torchrun, of a call without --standalone and --rdzv-id."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")


@pytest.mark.usefixtures("_without_identifier")
@pytest.mark.parametrize("is_finished", [True, False])
def test_a_restart_without_an_identifier_does_not_continue_another_run(
    is_finished: bool, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    given = without_epochs(data, autoencoder=Stage(epochs=1))
    train(given, folder)
    if not is_finished:
        (folder / "model.safetensors").unlink()
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    for config in (replace(given, seed=5), replace(given, batch_size=8)):
        with pytest.raises(FileExistsError, match="is not empty; resume the run in it, or"):
            train(config, folder)
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before


@pytest.mark.usefixtures("_without_identifier")
def test_a_restart_without_an_identifier_continues_a_run_of_the_same_options(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if some of them were chosen for the images."""
    config = without_epochs(data, autoencoder=Stage(epochs=4), batch_size=None, checkpoint_every=0)
    config = replace(config, model=replace(config.model, margin=None))
    train(config, tmp_path / "whole")
    with pytest.raises(Stop):
        train(config, tmp_path / "run", report=stop_at_3)
    about = read_tensors(tmp_path / "run" / CHECKPOINT)[1]
    assert None not in (about["config"]["batch_size"], about["config"]["model"]["margin"])
    steps: list[int] = []
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    train(config, tmp_path / "run", report=lambda progress: steps.append(progress.step))
    assert steps[0] == 2  # of the last checkpoint
    assert_same_weights(tmp_path / "run", tmp_path / "whole")


def stop_at_3(progress: Progress) -> None:
    if progress.step == 3:
        raise Stop


# --------------------------------------------------------------------------------------------------
# Two checkpoints


def stop_at_10(progress: Progress) -> None:
    if progress.step == 10:
        raise Stop


def test_a_damaged_checkpoint_falls_back_to_the_one_before(
    data: Path, finished: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    with pytest.raises(Stop):
        train(config_for(data, checkpoint_every=0), folder, report=stop_at_10)
    steps = [read_tensors(folder / name)[1]["step"] for name in (CHECKPOINT, PREVIOUS)]
    assert steps == [9, 8]
    content = bytearray((folder / CHECKPOINT).read_bytes())
    content[len(content) // 2] ^= 4
    (folder / CHECKPOINT).write_bytes(content)
    with pytest.warns(CheckpointWarning, match=rf"{CHECKPOINT} is damaged.*{PREVIOUS}$"):
        resume(folder)
    assert_same_weights(folder, finished)
    assert metrics(folder) == metrics(finished)
    for name in (CHECKPOINT, PREVIOUS):
        (folder / name).write_bytes(content)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=f"{PREVIOUS} is damaged"):
        resume(folder)


def damage(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(content)


def test_a_second_fault_one_checkpoint_after_a_fallback_loses_nothing(
    data: Path, finished: Path, tmp_path: Path
) -> None:
    """What was found damaged never takes the place of the checkpoint before it."""
    folder, steps = tmp_path / "run", 0

    def stop_after_a_checkpoint(_: Progress) -> None:
        nonlocal steps
        steps += 1
        if steps == 3:  # the first report is that of the start
            raise Stop

    with pytest.raises(Stop):
        train(config_for(data, checkpoint_every=0), folder, report=stop_at_10)
    damage(folder / CHECKPOINT)
    with pytest.warns(CheckpointWarning), pytest.raises(Stop):
        resume(folder, report=stop_after_a_checkpoint)
    found = [read_tensors(folder / name)[1]["step"] for name in (CHECKPOINT, PREVIOUS)]
    assert found == [9, 8]
    damage(folder / CHECKPOINT)
    with pytest.warns(CheckpointWarning, match=rf"{CHECKPOINT} is damaged.*{PREVIOUS}$"):
        resume(folder)
    assert_same_weights(folder, finished)
    assert metrics(folder) == metrics(finished)


def break_reads(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Let the disk be unable to read files of these names."""

    class Broken(FileIO):
        def __init__(self, handle: int, mode: str) -> None:
            super().__init__(handle, mode)
            status = os.fstat(handle)
            self.identity = (status.st_dev, status.st_ino)

        def readall(self) -> bytes:
            self.check()
            return super().readall()

        def readinto(self, buffer: Any, /) -> int:
            self.check()
            return super().readinto(buffer)

        def check(self) -> None:
            if self.identity in broken:
                raise OSError(errno.EIO, "Input/output error")

    found = [Path(name).stat() for name in names]
    broken = {(status.st_dev, status.st_ino) for status in found}
    monkeypatch.setattr(_files, "FileIO", Broken)


def test_a_checkpoint_that_the_disk_cannot_read_falls_back_to_the_one_before(
    data: Path, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    with pytest.raises(Stop):
        train(config_for(data, checkpoint_every=0), folder, report=stop_at_10)
    newest, previous = folder / CHECKPOINT, folder / PREVIOUS
    with monkeypatch.context() as patch:
        break_reads(patch, str(newest), str(previous))
        with pytest.raises(ModelError, match=rf"{PREVIOUS} cannot be read \(Input/output error\)"):
            resume(folder)
    with monkeypatch.context() as patch:
        break_reads(patch, str(newest))
        said = rf"{re.escape(str(newest))} cannot be read \(Input/output error\); .*{PREVIOUS}$"
        with pytest.warns(CheckpointWarning, match=said):
            resume(folder)
    assert_same_weights(folder, finished)
    assert metrics(folder) == metrics(finished)


def test_a_checkpoint_of_a_later_version_is_not_passed_over(data: Path, tmp_path: Path) -> None:
    with pytest.raises(Stop):
        train(config_for(data), tmp_path / "run", report=stop_at_10)
    tensors, about = read_tensors(tmp_path / "run" / CHECKPOINT)
    write_tensors(tmp_path / "run" / CHECKPOINT, tensors, about | {"version": 99})
    with pytest.raises(ModelError, match="upgrade poecaps"):
        resume(tmp_path / "run")


def test_a_checkpoint_must_be_from_the_run_of_the_record(data: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with pytest.raises(Stop):
        train(config_for(data, checkpoint_every=0), folder, report=stop_at_10)
    tensors, about = read_tensors(folder / CHECKPOINT)
    about["config"]["encoder"]["learning_rate"] = 0.3
    write_tensors(folder / CHECKPOINT, tensors, about)
    with pytest.raises(ModelError, match=r"run\.json: they differ in .* encoder\.learning_rate"):
        resume(folder)


def test_a_run_of_format_version_2_is_resumed(data: Path, finished: Path, tmp_path: Path) -> None:
    """One checkpoint whose tensors have a checksum, and a record without one."""
    folder = tmp_path / "run"
    with pytest.raises(Stop):
        train(config_for(data, checkpoint_every=0), folder, report=stop_at_10)
    as_version_2(folder / CHECKPOINT)
    (folder / PREVIOUS).unlink()
    (folder / "run.json").write_text(json.dumps(run_record.read(folder)))
    resume(folder)
    assert_same_weights(folder, finished)


def test_an_altered_record_is_an_error(finished: Path, tmp_path: Path) -> None:
    shutil.copytree(finished, tmp_path / "run")
    path = tmp_path / "run" / "run.json"
    path.write_text(path.read_text().replace('"learning_rate": 0.05', '"learning_rate": 0.04'))
    with pytest.raises(ModelError, match=r"run\.json is damaged: it does not match its checksum"):
        resume(tmp_path / "run")


@pytest.mark.parametrize("problem", ["damaged", "unreadable"])
def test_a_run_goes_on_without_its_record_as_the_error_says(
    problem: str, data: Path, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    with pytest.raises(Stop):
        train(config_for(data, checkpoint_every=0), folder, report=stop_at_10)
    shutil.copytree(finished, tmp_path / "finished")
    for run in (folder, tmp_path / "finished"):
        with monkeypatch.context() as patch:
            if problem == "damaged":
                (run / "run.json").write_bytes((run / "run.json").read_bytes()[:-9])
            else:
                break_reads(patch, str(run / "run.json"))
            with pytest.raises(
                ModelError, match=r"run\.json .*; or delete it, and the run is resu"
            ):
                resume(run)
        (run / "run.json").unlink()
        resume(run)
        assert_same_weights(run, finished)
        assert metrics(run) == metrics(finished)


@pytest.mark.parametrize(("side", "filters"), [(8, 2), (16, 5), (17, 9)])
def test_small_images_get_filters_that_fit(side: int, filters: int, tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    np.save(tmp_path / "x.npy", random.integers(0, 256, (40, side, side + 1), np.uint8))
    config = config_for(tmp_path / "x.npy")
    network = train(config, tmp_path / "run")
    assert network.architecture.kernel_size == filters
    assert network.generate(2).shape == (2, 1, side, side + 1)
    assert resume(tmp_path / "run").architecture == network.architecture
    about = run_record.read(tmp_path / "run")
    assert about["config"]["model"]["kernel_size"] == filters


def test_filters_that_were_chosen_are_not_changed(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.random.default_rng(0).integers(0, 256, (9, 8, 8), np.uint8))
    config = config_for(tmp_path / "x.npy")
    config = replace(config, model=replace(config.model, kernel_size=5))
    with pytest.raises(ValueError, match="images must be at least 9×9 for filters of 5×5"):
        train(config, tmp_path / "run")


@pytest.mark.parametrize(
    ("black", "given", "expected"), [(0, None, 4), (1, None, 0), (0, 1, 1), (0, 0, 0)]
)
def test_images_whose_border_varies_get_a_margin(
    black: int, given: int | None, expected: int, tmp_path: Path
) -> None:
    images = np.random.default_rng(0).integers(0, 256, (30, 18, 18), np.uint8)
    images[:, :black] = images[:, 18 - black :] = 0
    images[:, :, :black] = images[:, :, 18 - black :] = 0
    np.save(tmp_path / "x.npy", images)
    config = without_epochs(tmp_path / "x.npy")
    config = replace(config, model=replace(config.model, margin=given))
    network = train(config, tmp_path / "run")
    assert network.architecture.margin == expected
    assert run_record.read(tmp_path / "run")["config"]["model"]["margin"] == expected


@pytest.mark.parametrize(("side", "halvings", "expected"), [(64, 1, 8), (96, 2, 16)])
def test_half_a_filter_of_the_margin_is_left_after_halvings(
    side: int, halvings: int, expected: int, tmp_path: Path
) -> None:
    """Otherwise larger images would have no even overlap, and draws a frame."""
    images = np.random.default_rng(0).integers(0, 256, (9, side, side), np.uint8)
    np.save(tmp_path / "x.npy", images)
    config = without_epochs(tmp_path / "x.npy")
    model = replace(config.model, kernel_size=9, margin=None, halvings=halvings, even_overlap=None)
    architecture = train(replace(config, model=model), tmp_path / "run").architecture
    assert architecture.margin == expected
    assert architecture.even_overlap


@pytest.mark.parametrize(("side", "expected"), [(8, 1), (18, 0)])
def test_a_row_at_the_border_of_small_images_is_enough_for_a_margin(
    side: int, expected: int, tmp_path: Path
) -> None:
    images = np.random.default_rng(0).integers(0, 256, (30, side, side), np.uint8)
    images[:, 0] = images[:, :, 0] = images[:, :, -1] = 0
    np.save(tmp_path / "x.npy", images)
    config = without_epochs(tmp_path / "x.npy")
    config = replace(config, model=replace(config.model, margin=None))
    assert train(config, tmp_path / "run").architecture.margin == expected


@pytest.mark.parametrize(
    ("margin", "halvings", "given", "expected"),
    [
        (4, 0, None, True),
        (1, 0, None, False),
        (0, 0, None, False),
        (4, 0, False, False),
        (1, 0, True, True),
        (8, 1, None, True),
        (5, 1, None, False),
    ],
)
def test_a_margin_of_half_a_filter_evens_out_the_overlap(
    margin: int, halvings: int, given: bool | None, expected: bool, tmp_path: Path
) -> None:
    np.save(tmp_path / "x.npy", np.random.default_rng(0).integers(0, 256, (30, 26, 26), np.uint8))
    config = without_epochs(tmp_path / "x.npy")
    model = replace(
        config.model, kernel_size=9, margin=margin, halvings=halvings, even_overlap=given
    )
    network = train(replace(config, model=model), tmp_path / "run")
    assert network.architecture.even_overlap is expected
    assert network.autoencoder.even_overlap is expected
    assert run_record.read(tmp_path / "run")["config"]["model"]["even_overlap"] is expected


def test_the_batch_size_that_was_chosen_is_recorded_and_resumed(data: Path, tmp_path: Path) -> None:
    given, chosen = tmp_path / "given", tmp_path / "chosen"
    config = config_for(data, batch_size=None)  # 96 images
    train(replace(config, batch_size=16), given)

    def stop(progress: Progress) -> None:
        if progress.stage == "encoder 1" and progress.step == 4:
            raise Stop

    with pytest.raises(Stop):
        train(replace(config, checkpoint_every=0), chosen, report=stop)
    assert run_record.read(chosen)["config"]["batch_size"] == 16
    resume(chosen)
    assert_same_weights(given, chosen)


def test_larger_colour_images_are_learned_with_all_options(tmp_path: Path) -> None:
    """Saved, loaded and resumed; the colours are those of the images."""
    images = np.random.default_rng(0).integers(100, 200, (32, 40, 40, 3), np.uint8)
    np.save(tmp_path / "x.npy", images)
    config = config_for(tmp_path / "x.npy", multi_scale=1.0)
    options: dict[str, Any] = {
        "halvings": 1,
        "margin": 2,
        "colour_whitening": True,
        "experts": ((3, 4),),
    }
    config = replace(config, model=replace(config.model, **options))
    stages = ("autoencoder", "encoder", "decoder", "pixel_decoder")
    config = replace(config, **{name: replace(getattr(config, name), epochs=1) for name in stages})
    network = train(config, tmp_path / "run")
    mean = torch.from_numpy(images / 255).mean((0, 1, 2)).float()
    torch.testing.assert_close(network.autoencoder.stem.colour_mean, mean, rtol=0, atol=1e-3)
    loaded = CapsuleNetwork.load(tmp_path / "run")
    batch = torch.from_numpy(images[:2] / 255).float().permute(0, 3, 1, 2)
    assert torch.equal(loaded.reconstruct(batch), network.reconstruct(batch))
    assert loaded.generate(2).shape == (2, 3, 40, 40)


CUT = """
import os, sys
import numpy as np
from poecaps.data import buffers, images, load
from poecaps.training import features, record, run, train
from tests.faults import config

moment, path = sys.argv[1:]
buffers.MAX_IN_MEMORY, require_uncut, calls = 10, buffers.require_uncut, 0

def cut_at_second_call(*arguments):
    global calls
    calls += 1
    if calls == 2:
        os.truncate(path, 200)
    require_uncut(*arguments)

if moment == "while it is loaded":
    images.require_uncut = cut_at_second_call
found = load(path)
if moment == "while it is copied":
    images.require_uncut = cut_at_second_call
    found.subset(slice(None))
if moment == "while it is compared":
    run.require_uncut = cut_at_second_call
if moment == "before the training":
    os.truncate(path, 200)
if moment in ("while it is compared", "before the training"):
    train(config(path), path + "-run", data=found)
"""


@needs_unix  # Windows does not cut files that are in use
@pytest.mark.parametrize(
    "moment",
    ["while it is loaded", "while it is copied", "while it is compared", "before the training"],
)
def test_a_file_that_is_cut_ends_a_training_by_an_error(moment: str, tmp_path: Path) -> None:
    """In another process, since SIGBUS would end it; a large file is read part by part."""
    random = np.random.default_rng(0)
    dtype: type = np.float32 if "loaded" in moment else np.uint8
    np.save(tmp_path / "x.npy", random.integers(0, 2, (3000, 12, 12)).astype(dtype))
    command = [sys.executable, "-c", CUT, moment, str(tmp_path / "x.npy")]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert "DataError" in done.stderr.splitlines()[-1]
    assert "was cut while it was in use: it had" in done.stderr.splitlines()[-1]
