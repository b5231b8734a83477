"""Models, runs and images from elsewhere: nothing is overwritten, obeyed or waited for."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from poecaps import CapsuleNetwork
from poecaps.cli.main import main
from poecaps.data import DataError
from poecaps.options import Architecture
from poecaps.serialization import read_tensors, write_tensors
from poecaps.training import origin, record, resume
from poecaps.training.checkpoint import CHECKPOINT, PREVIOUS
from poecaps.training.metrics import METRICS
from poecaps.training.progress import TensorBoard
from tests.cli.conftest import SMALL
from tests.systems import needs_fifo, needs_links, needs_unix


@pytest.fixture
def model(run: Path, tmp_path: Path) -> Path:
    """A copy of a run that a test may alter."""
    shutil.copytree(run, tmp_path / "model")
    return tmp_path / "model"


def alter(model: Path, tensors: dict[str, torch.Tensor] | None = None, **options: Any) -> None:
    """Write other tensors and options into a model, with a valid checksum."""
    found, about = read_tensors(model / "model.safetensors")
    about["architecture"] |= options
    write_tensors(model / "model.safetensors", found | (tensors or {}), about)
    (model / "config.json").unlink()


@needs_links
@pytest.mark.parametrize("link", ["codes-train.npz", ".codes-train.npz.part.npz", METRICS])
def test_nothing_is_written_through_a_link(link: str, model: Path, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("precious")
    (model / link).unlink(missing_ok=True)
    (model / link).symlink_to(precious)
    assert main(["encode", str(model)]) == 0
    record.write(model, record.read(model) | {"finished": None})
    main(["train", "--resume", str(model), "--quiet", "--no-figures"])
    assert precious.read_text() == "precious"


@needs_links
@pytest.mark.parametrize("command", ["generate", "train"])
def test_nothing_is_written_into_a_folder_behind_a_link(
    command: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "joint.png").write_text("precious")
    shutil.rmtree(model / "figures")
    (model / "figures").symlink_to(tmp_path / "precious")
    resume = ["train", "--resume", str(model), "--quiet"]
    assert main(resume if command == "train" else [command, str(model)]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert f"{model / 'figures'} is a symbolic link, so nothing is written there" in error
    assert [file.read_text() for file in (tmp_path / "precious").iterdir()] == ["precious"]


@needs_links
def test_curves_for_tensorboard_are_not_written_into_a_folder_behind_a_link(
    model: Path, tmp_path: Path
) -> None:
    (tmp_path / "precious").mkdir()
    (model / "tensorboard").symlink_to(tmp_path / "precious")
    with pytest.raises(OSError, match="is a symbolic link"):
        TensorBoard(model)


@needs_links
def test_a_run_does_not_append_to_a_link(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not even to one that leads nowhere."""
    train = ["train", "--data", str(source), "--quiet", "--no-figures", *SMALL]
    assert main([*train, "--out", str(tmp_path / "run"), "--checkpoint-every", "0"]) == 0
    (tmp_path / "run" / METRICS).unlink()
    (tmp_path / "run" / METRICS).symlink_to(tmp_path / "nowhere")
    (tmp_path / "run" / CHECKPOINT).unlink()
    (tmp_path / "run" / PREVIOUS).replace(tmp_path / "run" / CHECKPOINT)
    record.write(tmp_path / "run", record.read(tmp_path / "run") | {"finished": None})
    assert main(["train", "--resume", str(tmp_path / "run"), "--quiet", "--no-figures"]) == 1
    assert "cannot write to" in capsys.readouterr().err
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize(
    ("altered", "message"),
    [
        ({"iterations": 10**9}, "iterations must be a whole number from 1 to 100"),
        ({"experts": [[3, 5]] * 1000}, "at most 100"),
        ({"features": 2**40}, "features must be a whole number from 1 to 1048576"),
        ({"image_shape": [1, 10**6, 10**6]}, "every number of image_shape"),
        ({"sharpness": 1e38}, "sharpness must be at most 1e"),
        ({"image_shape": [1, 16384, 16384]}, "must have at most 33,554,432 numbers with the"),
        ({"image_shape": [16384, 100, 100]}, "must have at most 33,554,432 numbers with the"),
        ({"margin": 16384}, "must have at most 33,554,432 numbers with the margin"),
        (
            {"image_shape": [1, 5000, 5000], "features": 16},
            "or use more halvings or fewer features",
        ),
        ({"image_shape": [1, 4096, 4096], "features": 256, "halvings": 3}, "or use more halvings"),
    ],
)
def test_sizes_have_upper_bounds(
    altered: dict[str, Any], message: str, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    alter(model, **altered)
    assert main(["generate", str(model)]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert message in error


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere, memory is not limited this way")
def test_a_small_file_does_not_ask_for_large_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten kilobytes of filters, each of which halves the sides of 268 million pixels."""
    for bound in ("MAX_PIXELS", "MAX_NUMBERS"):
        monkeypatch.setattr(f"poecaps.options.{bound}", 2**40, raising=False)
    network = CapsuleNetwork(
        Architecture(
            features=2,
            kernel_size=3,
            capsule_dim=2,
            experts=((2, 2),),
            halvings=10,
            image_shape=(1, 2**14, 2**14),
            joint_components=2,
            expert_components=2,
        )
    )
    network.save(tmp_path / "model")
    assert (tmp_path / "model" / "model.safetensors").stat().st_size < 20_000
    command = 'ulimit -v 4000000; exec "$0" -m poecaps generate model --rows 1'
    done = subprocess.run(
        ["sh", "-c", command, sys.executable],
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "at most 33,554,432 numbers with the margin, but has 268,435,456" in done.stderr


@pytest.mark.parametrize("name", ["per_expert.weights", "joint.mixture.weights"])
@pytest.mark.parametrize("value", [-1.0, 0.0])
def test_the_shares_of_a_mixture_are_checked(
    name: str, value: float, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = read_tensors(model / "model.safetensors")[0][f"code_density.{name}"]
    alter(model, {f"code_density.{name}": torch.full_like(weights, value)})
    assert main(["generate", str(model), "--domain", "joint"]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "has an invalid code density: the weights of a mixture must be at least 0" in error


@pytest.mark.parametrize("value", [1e38, 1e300])
def test_a_rate_beyond_float32_is_one_line(
    value: float, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--data", str(source), "--out", str(tmp_path / "run"), *SMALL]
    assert main(["train", *options, "--encoder.learning-rate", str(value)]) == 2
    assert "poecaps: encoder.learning_rate must be at most 1e+30" in capsys.readouterr().err


def test_a_record_without_a_checksum_of_its_data_is_described(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    about = record.read(model)
    about["data"]["sha256"] = None
    record.write(model, about)
    assert main(["info", str(model)]) == 0
    assert "48 images" in capsys.readouterr().out


@pytest.mark.parametrize("images", [0, -1, True, 48.0, "48", None])
def test_a_record_of_an_impossible_number_of_images_is_one_line(
    images: Any, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    about = record.read(model)
    about["data"]["images"] = images
    record.write(model, about)
    for command in (["info", str(model)], ["train", "--no-figures", "--resume", str(model)]):
        assert main(command) == 1
        assert capsys.readouterr().err == (
            f"poecaps: {model / 'run.json'} is not the record of a run: data.images must be a "
            "whole number of at least 1\n"
        )


@pytest.mark.parametrize(
    "altered",
    [
        {},
        {"samples": None},
        {"data": 3},
        {"test_images": "many"},
        {"probe": {"test_accuracy": "high"}},
        {"effective_rank": 10**400},
        {"domains": {"joint": {"frechet": {"distance": []}}}},
    ],
)
def test_an_evaluation_that_is_none_is_one_line(
    altered: dict[str, Any], model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both where it is shown and where the model card is written."""
    valid = {"data": "mnist", "test_images": 5, "samples": 5, "seed": 0, "probe": None}
    path = model / "evaluation.json"
    path.write_text(json.dumps(valid))
    assert main(["info", str(model)]) == 0
    path.write_text(json.dumps(valid | altered if altered else {}))
    capsys.readouterr()
    for command in (["info", str(model)], ["train", "--resume", str(model), "--quiet"]):
        assert main([*command, "--no-figures"] if "train" in command else command) == 1
        error = capsys.readouterr().err
        assert error == (
            f"poecaps: {path} is not an evaluation; delete it, or evaluate the model again\n"
        )


@pytest.mark.parametrize(
    "selection",
    [
        5,
        {"encoder 1": None},
        {"encoder 1": {"kept": 3}},
        {"encoder 1": {"criterion": "energy"}},
        {"encoder 1": {"scores": {"margin": [1.0]}}},
        {"encoder 1": {"scores": {"margin": [1.0, "high"]}}},
        {"encoder 1": {"starts": [1, 1]}},
        {"encoder 1": {"halvings": [{"starts": 4}]}},
    ],
)
def test_a_selection_that_is_none_is_one_line(
    selection: Any, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    valid = {"criterion": "margin", "kept": 1, "starts": [1, 2], "scores": {"margin": [2.0, 1.0]}}
    valid |= {"halvings": [{"starts": [1, 2, 3, 4]}]}
    resume = ["train", "--resume", str(model), "--no-figures"]
    record.write(model, record.read(model) | {"selection": {"encoder 1": valid}})
    assert main(resume) == 0
    shown = "encoder 1: start 1 of 4 kept, margin 2 (the other 1); 2 dropped before the end"
    assert shown in capsys.readouterr().out
    if isinstance(selection, dict) and selection["encoder 1"] is not None:
        selection = {"encoder 1": valid | selection["encoder 1"]}
    record.write(model, record.read(model) | {"selection": selection})
    assert main(resume) == 1
    assert capsys.readouterr().err == (
        f"poecaps: {model / 'run.json'} is not the record of a run: selection is invalid\n"
    )


def test_a_line_is_cut_however_long_an_entry_is(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    about = record.read(model)
    record.write(model, about | {"finished": "x" * 10**6})
    assert main(["info", str(model)]) == 0
    about["config"]["precision"] = "x" * 10**6
    record.write(model, about)
    assert main(["info", str(model)]) == 1
    shown = capsys.readouterr()
    for text in (shown.out, shown.err):
        assert "x… (1,000," in text
        assert len(text) < 20_000


ESCAPE = "\x1b]0;owned\x07\x9b31m\u202e"


HUB = "hf:somebody/pictures"


def name_dataset_of_the_hub(model: Path, *, finished: bool = True) -> None:
    """Let the record and the checkpoint of a run say that it learns from a dataset of the Hub."""
    about = record.read(model)
    about["config"]["data"] = HUB
    record.write(model, about if finished else about | {"finished": None})
    tensors, about = read_tensors(model / CHECKPOINT)
    about["config"]["data"] = HUB
    write_tensors(model / CHECKPOINT, tensors, about)


@pytest.mark.parametrize(
    ("command", "finished"),
    [
        (["evaluate"], True),
        (["encode"], True),
        (["train", "--resume"], True),
        (["train", "--resume"], False),
    ],
)
def test_a_record_does_not_choose_what_is_downloaded(
    command: list[str],
    finished: bool,
    model: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name_dataset_of_the_hub(model, finished=finished)
    monkeypatch.setattr("poecaps.data.read_hub_dataset", pytest.fail)
    assert main([*command, str(model)]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert "not downloaded unless you ask for it; give --data hf:som" in error


def pictures_of(folder: Path) -> Path:
    """Private pictures of a user, of the size that the model expects."""
    (folder / "Pictures").mkdir()
    for number in range(12):
        pixels = np.random.default_rng(number).integers(0, 256, (28, 28), np.uint8)
        Image.fromarray(pixels).save(folder / "Pictures" / f"private-{number}.png")
    return folder / "Pictures"


@pytest.mark.parametrize(
    "command", ["encode", "evaluate", "cluster", "reconstruct", "train --resume"]
)
@pytest.mark.parametrize("mark", ["none", "of other data", "invalid"])
def test_a_record_does_not_choose_which_files_are_read(
    command: str,
    mark: str,
    model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Neither their contents nor their names end in the folder of the model."""
    pictures, about = pictures_of(tmp_path), record.read(model)
    about["config"]["data"] = str(pictures)
    if mark == "none":
        del about["origin"]
    elif mark == "invalid":
        about["origin"] = ["\ud800"]
    record.write(model, about)
    before = {file: file.stat().st_mtime_ns for file in model.rglob("*")}
    with monkeypatch.context() as patch:
        patch.setattr("poecaps.data.load", pytest.fail)
        assert main([*command.split(), str(model)]) == 2
    shown = capsys.readouterr().err.splitlines()
    (error,) = (line for line in shown if not line.startswith("warning: few steps"))
    assert "are not read unless you ask for them" in error
    assert f"give --data {pictures}" in error
    assert {file: file.stat().st_mtime_ns for file in model.rglob("*")} == before
    if command == "encode":
        assert main([command, str(model), "--data", str(pictures)]) == 0


def test_the_images_of_a_finished_run_are_named_once_for_all_commands(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also by a relative path, and of a run of an earlier version, which has no mark."""
    pictures, about = pictures_of(tmp_path), record.read(model)
    about["config"]["data"] = str(pictures)
    del about["origin"]
    record.write(model, about)
    assert main(["encode", str(model)]) == 2
    assert f"poecaps train --resume {model} --data {pictures}" in capsys.readouterr().err
    monkeypatch.chdir(tmp_path)
    named = ["--data", pictures.name, "--no-figures", "--quiet"]
    assert main(["train", "--resume", str(model), *named]) == 0
    assert main(["encode", str(model)]) == 0


def test_a_record_does_not_choose_the_folder_of_a_dataset(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    about = record.read(model)
    about["config"] |= {"data": "mnist", "data_path": str(tmp_path)}
    record.write(model, about)
    assert main(["encode", str(model)]) == 2
    assert f"give --data mnist --data-path {tmp_path}\n" in capsys.readouterr().err


def test_the_images_of_a_run_of_this_user_are_read_also_after_it_was_moved(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["encode", str(model.rename(tmp_path / "moved"))]) == 0
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "of another user"))
    assert main(["encode", str(tmp_path / "moved")]) == 2


@needs_unix
def test_a_key_that_others_can_read_is_not_used(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    config, key = record.options_of(model, record.read(model)), tmp_path / "poecaps" / "key"
    mark = origin.mark(config)
    assert mark is not None
    assert mark == origin.mark(config)
    assert [file.name for file in key.parent.iterdir()] == ["key"]
    assert key.stat().st_mode & 0o777 == 0o600
    assert origin.is_ours({"origin": mark}, config)
    key.chmod(0o644)
    assert origin.mark(config) is None
    assert not origin.is_ours({"origin": mark}, config)


def test_resuming_the_run_of_another_user_does_not_make_its_path_ours(
    model: Path, source: Path
) -> None:
    """Also without run.json, which is then written anew."""
    (model / record.RECORD).unlink()
    assert main(["train", "--resume", str(model), "--no-figures", "--quiet"]) == 0
    assert "origin" not in record.read(model)
    assert main(["encode", str(model)]) == 2
    (model / record.RECORD).unlink()
    resume(model, data=str(source))
    assert main(["encode", str(model)]) == 0


def test_a_published_record_has_no_mark(model: Path) -> None:
    assert "origin" in record.read(model)
    assert "origin" not in record.without_machine(record.read(model))


@pytest.mark.parametrize("finished", [True, False])
def test_a_run_is_resumed_with_the_dataset_that_is_named(
    finished: bool,
    model: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name_dataset_of_the_hub(model, finished=finished)
    asked = []

    def read(name: str, *_: Any, **__: Any) -> None:
        asked.append(name)
        raise DataError("no connection")

    monkeypatch.setattr("poecaps.data.read_hub_dataset", read)
    assert main(["train", "--resume", str(model), "--data", "hf:another"]) == 2
    assert "cannot continue with hf:another" in capsys.readouterr().err
    assert asked == []
    assert main(["train", "--resume", str(model), "--data", HUB]) == 1
    assert "no connection" in capsys.readouterr().err
    assert len(asked) == 1


def test_a_finished_run_needs_no_images_without_figures(model: Path) -> None:
    name_dataset_of_the_hub(model)
    assert main(["train", "--resume", str(model), "--no-figures", "--quiet"]) == 0


def test_the_command_that_resumes_a_run_names_its_dataset_of_the_hub(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("poecaps.cli.train.run_training", interrupt)
    assert main(["train", "--data", HUB, "--out", str(model)]) == 130
    assert f"resume with: poecaps train --resume {model} --data {HUB}\n" in capsys.readouterr().err


def test_escape_sequences_of_a_record_are_shown_and_not_obeyed(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    about = record.read(model)
    about["data"]["source"] = about["finished"] = about["config"]["data"] = ESCAPE
    about["starts"][0] |= {"command": ESCAPE, "device": ESCAPE}
    record.write(model, about)
    assert main(["info", str(model)]) == 0
    assert main(["encode", str(model)]) == 2
    assert main(["info", str(model / ESCAPE)]) == 1
    shown = capsys.readouterr()
    for text in (shown.out, shown.err):
        assert r"\x1b]0;owned\x07\x9b31m\u202e" in text
        assert not set(ESCAPE) - set("]0;owned31m") & set(text)


@needs_fifo
def test_escape_sequences_of_file_names_are_shown_and_not_obeyed(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / f"images{ESCAPE}"
    folder.mkdir()
    image = Image.fromarray(np.eye(28, dtype=np.uint8) * 255)
    for name in ("a", "b", ESCAPE):
        image.save(folder / f"{name}.png")
    (folder / f"{ESCAPE}.txt").write_text("x")
    os.mkfifo(folder / f"{ESCAPE}-fifo.png")
    options = ["--data", str(folder), "--out", str(tmp_path / "codes.npz")]
    assert main(["encode", str(model), *options]) == 0
    (folder / f"{ESCAPE}.png").write_bytes(b"no image")
    (folder / "a.png").unlink()
    (folder / "b.png").unlink()
    assert main(["encode", str(model), *options]) == 1
    shown = capsys.readouterr()
    for text in (shown.out, shown.err):
        assert r"\x1b]0;owned" in text
        assert "\x1b" not in text
        assert "\x9b" not in text


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere, names of files are Unicode")
def test_names_of_files_may_be_any_bytes(model: Path, tmp_path: Path) -> None:
    """Of other encodings, for example; Python represents such bytes by lone surrogates."""
    folder = Path(os.fsdecode(bytes(tmp_path) + b"/im\xfeges"))
    folder.mkdir()
    random = np.random.default_rng(0)
    for number in range(20):
        image = Image.fromarray(random.integers(0, 256, (28, 28), np.uint8))
        image.save(folder / os.fsdecode(b"%d\xff.png" % number))
    train = ["train", "--data", str(folder), "--out", str(tmp_path / "run"), *SMALL, "--no-figures"]
    assert main([*train, "--batch-size", "8"]) == 0
    assert main(["info", str(tmp_path / "run")]) == 0
    out = tmp_path / "clusters.csv"
    assert main(["cluster", str(model), "--data", str(folder), "--out", str(out)]) == 0
    assert r"7\udcff.png" in out.read_text("utf-8")


@pytest.mark.filterwarnings("default")
def test_a_damaged_checkpoint_is_one_line(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    train = ["train", "--data", str(source), "--quiet", "--no-figures", *SMALL]
    assert main([*train, "--out", str(folder), "--checkpoint-every", "0"]) == 0
    record.write(folder, record.read(folder) | {"finished": None})
    (folder / CHECKPOINT).write_bytes((folder / CHECKPOINT).read_bytes()[:-1])
    capsys.readouterr()
    assert main(["train", "--resume", str(folder), "--quiet", "--no-figures"]) == 0
    error = capsys.readouterr().err
    assert error == (
        f"warning: {folder / CHECKPOINT} is damaged; "
        f"resuming from the checkpoint before it, {PREVIOUS}\n"
    )


def test_the_age_of_the_checkpoint_is_said_after_an_interrupt(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """A second Ctrl-C ends a step without a new checkpoint, so nothing is said to be saved."""
    folder = tmp_path / "run"

    def interrupted(*_: Any, **__: Any) -> None:
        os.utime(folder / CHECKPOINT, (0, os.stat(folder / CHECKPOINT).st_mtime - 50))  # noqa: PTH116
        raise KeyboardInterrupt

    monkeypatch.setattr("poecaps.training.trainer.Trainer._fit_stage", interrupted)
    assert main(["train", "--data", str(source), "--out", str(folder), *SMALL]) == 130
    error = capsys.readouterr().err
    assert "the last checkpoint is 5" in error
    assert " s old; resume with: poecaps train --resume" in error


def test_the_record_of_a_run_is_json_with_a_checksum(run: Path) -> None:
    about = json.loads((run / record.RECORD).read_text())
    assert len(about.pop("checksum")) == 64
    assert about == record.read(run)
