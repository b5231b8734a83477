"""Starting, resuming and refusing runs."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from poecaps import ModelError
from poecaps.data import DataError, ImageSet
from poecaps.training import (
    Progress,
    TrainingError,
    TrainingResult,
    resume,
    resume_training,
    run_training,
    train,
)
from poecaps.training import record as run_record
from poecaps.training.checkpoint import CHECKPOINT
from poecaps.training.metrics import METRICS
from tests.training.runs import Stop, assert_same_weights, config_for, metrics, weights


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
    (tmp_path / "run" / f".{CHECKPOINT}-x7").write_bytes(b"half")
    train(config_for(data), tmp_path / "run")
    assert_same_weights(tmp_path / "run", finished)


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
