"""`poecaps train`."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from PIL import Image

import poecaps
from benchmarks.demo import recipe
from poecaps._json import dataclass_from_json
from poecaps.cli.main import main
from poecaps.cli.train import TrainingReporter, _warn_of_failure
from poecaps.code_density import DOMAIN_INFO, DOMAINS
from poecaps.serialization import read_tensors
from poecaps.training import PRESETS, Progress, record
from poecaps.training.checkpoint import CHECKPOINT, PREVIOUS
from poecaps.training.config import Config
from tests.cli.conftest import SMALL, arrays
from tests.networks import shorten_draws
from tests.systems import needs_unix

if TYPE_CHECKING:
    from poecaps.training import Progress


def test_training_leaves_a_model_its_record_and_pictures(run: Path) -> None:
    names = {str(file.relative_to(run)) for file in run.rglob("*") if file.is_file()}
    pictures = {*DOMAINS, "reconstructions", "curves"}
    assert names == {
        *(
            "config.json",
            "model.safetensors",
            "checkpoint.safetensors",
            "run.json",
            "metrics.jsonl",
        ),
        *("README.md", "samples.png"),
        *(f"figures/{name}{suffix}" for name in pictures for suffix in (".png", ".npz")),
    }
    assert poecaps.load(run).architecture.experts == ((3, 5),)


def test_all_domains_are_grids_of_figure_2(run: Path) -> None:
    for domain in DOMAINS:
        images = arrays(run / "figures" / f"{domain}.npz")["images"]
        whole_code = DOMAIN_INFO[domain].whole_code
        assert images.shape == ((80, 1, 28, 28) if whole_code else (4, 3, 1, 28, 28))
        with Image.open(run / "figures" / f"{domain}.png") as picture:
            assert picture.size[0] > 3 * 28


def test_every_field_can_be_set_and_nothing_else_changes(source: Path, tmp_path: Path) -> None:
    changes = ["--encoder.k", "2", "--encoder.optimizer", "adam", "--encoder.learning-rate", "0.1"]
    where = ["--data", str(source), "--out", str(tmp_path / "run"), "--quiet", "--no-figures"]
    assert (
        main(
            ["train", "--preset", "paper", *where, *SMALL, "--pixel-decoder.epochs", "0", *changes]
        )
        == 0
    )
    used = dataclass_from_json(
        Config, json.loads((tmp_path / "run" / "run.json").read_text())["config"]
    )
    paper = PRESETS["paper"]()
    assert (
        used.encoder.k,
        used.encoder.optimizer,
        used.encoder.learning_rate,
        used.encoder.epochs,
    ) == (2, "adam", 0.1, 1)
    assert (used.encoder.weight_decay, used.decoder.learning_rate, used.decoder.optimizer) == (
        1e-7,
        paper.decoder.learning_rate,
        "sgd",
    )
    assert (used.model.bias, used.model.centre, used.model.scale, used.model.sharpness) == (
        False,
        False,
        None,
        1.0,
    )
    assert (used.model.experts, paper.model.experts) == (((3, 5),), ((20, 16),))


def test_progress_is_plain_lines_where_there_is_no_terminal(
    source: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = ["train", "--data", str(source), *SMALL]
    assert main(arguments) == 0
    done = capsys.readouterr()
    lines = [line for line in done.err.splitlines() if not line.startswith("warning")]
    assert re.search(
        r"^warning: few steps: the autoencoder had 3 \(error \S+\) and the pixel "
        r"decoder had 3 \(error \S+\); for 10 times as many: --autoencoder.epochs 10 "
        r"--encoder.epochs 10 --decoder.epochs 10 --pixel-decoder.epochs 10, and --preset fast",
        done.err,
        re.MULTILINE,
    )
    assert lines[0] == f"found 48 grey images of 28×28 in {source}, 10 classes"
    assert lines[1] == "training in runs/digits"
    stages = ["autoencoder", "encoder", "decoder", "pixel"]
    assert [line.split()[1] for line in lines[2:]] == [stage for stage in stages for _ in range(2)]
    assert all(line.isprintable() for line in lines)
    assert "runs/digits/figures/joint.png" in done.out
    assert done.out.splitlines()[-1].endswith(": poecaps explore runs/digits")
    assert main([*arguments, "--no-figures"]) == 0
    assert "the model is in runs/digits-2" in capsys.readouterr().out


def test_progress_is_one_live_line_for_each_stage_on_a_terminal(
    source: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    options = ["--data", str(source), "--out", str(tmp_path / "run"), "--no-figures"]
    assert main(["train", *options, *SMALL]) == 0
    lines = [line for line in capsys.readouterr().err.split("\n") if line]
    lines = [line for line in lines if not line.startswith("warning")]
    assert len(lines) == 6  # what was found, where it trains, and four stages
    assert all("\r\x1b[K" in line and "100%" in line for line in lines[2:])


def on_a_terminal(arguments: list[str], folder: Path) -> str:
    """Run a command with its standard error on a terminal, and return the output there."""
    import pty

    ours, theirs = pty.openpty()
    process = subprocess.Popen(arguments, stderr=theirs, stdout=subprocess.DEVNULL, cwd=folder)
    os.close(theirs)
    seen = b""
    while True:
        try:
            chunk = os.read(ours, 4096)
        except OSError:  # how the end looks on Linux
            break
        if not chunk:
            break
        seen += chunk
    os.close(ours)
    assert process.wait() == 0, seen.decode()
    return seen.decode()


@needs_unix
def test_a_run_is_resumed_on_a_terminal(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle of a stage, when the speed is not known yet."""

    def interrupt(self: TrainingReporter, progress: Progress) -> None:
        if progress.step == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(TrainingReporter, "report", interrupt)
        options = ["--data", str(source), "--out", str(tmp_path / "run"), "--checkpoint-every", "0"]
        assert main(["train", "--quiet", *options, *SMALL]) == 130
    assert read_tensors(tmp_path / "run" / CHECKPOINT)[1]["step"] > 0
    resume = [sys.executable, "-m", "poecaps", "train", "--no-figures", "--resume", "run"]
    seen = on_a_terminal(resume, tmp_path)
    assert "resumes at epoch" in seen
    assert "\r\x1b[K" in seen
    assert "Traceback" not in seen
    assert json.loads((tmp_path / "run" / "run.json").read_text())["finished"]


@pytest.mark.parametrize("signals", [1, 2])
def test_only_an_interrupt_that_saved_says_so(
    signals: int,
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A second Ctrl-C does not wait for the end of the step."""

    def interrupt(_: TrainingReporter, progress: Progress) -> None:
        if progress.step == 2:
            for _number in range(signals):
                signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(TrainingReporter, "report", interrupt)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        options = ["--data", str(source), "--out", str(tmp_path / "run"), *SMALL]
        status = main(["train", *options, "--autoencoder.epochs", "10", "--quiet"])
    finally:
        signal.signal(signal.SIGINT, before)
    assert status == 130
    said = capsys.readouterr().err
    saved = read_tensors(tmp_path / "run" / CHECKPOINT)[1]["step"]
    assert saved == (2 if signals == 1 else 0)
    assert ("checkpoint saved; resume with: poecaps" in said) == (signals == 1)
    assert ("the last checkpoint is" in said) == (signals == 2)
    assert f"with: poecaps train --resume {tmp_path / 'run'}" in said


def test_a_folder_with_a_run_is_refused_with_the_command_that_resumes_it(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "my run"
    folder.mkdir()
    shutil.copy(run / "config.json", folder)
    assert main(["train", "--out", str(folder), "--quiet"]) == 1
    assert "--resume" not in capsys.readouterr().err
    shutil.copy(run / CHECKPOINT, folder)
    assert main(["train", "--out", str(folder), "--quiet"]) == 1
    command = f"poecaps train --resume {shlex.quote(str(folder))}"
    assert capsys.readouterr().err.endswith(
        f"{folder} is not empty; choose a new folder, or resume its run with: {command}\n"
    )


def test_one_line_resumes_a_run_or_starts_it(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a machine that is taken away now and then would do at every boot."""
    folder, how = tmp_path / "run", ["--quiet", "--no-figures"]
    start = ["train", "--data", str(source), "--out", str(folder), *SMALL, *how]

    def boot() -> int:
        return main(["train", "--resume", str(folder), *how]) and main(start)

    def starts() -> int:
        return len(record.read(folder)["starts"])

    def weights() -> dict[str, torch.Tensor]:
        return read_tensors(folder / "model.safetensors")[0]

    def is_same(found: dict[str, torch.Tensor]) -> bool:
        return all(torch.equal(each, finished[name]) for name, each in found.items())

    assert boot() == 0
    assert starts() == 1
    finished = weights()
    assert boot() == 0
    assert starts() == 1  # it was finished
    (folder / "model.safetensors").unlink()
    assert boot() == 0
    assert starts() == 2
    assert is_same(weights())
    for name in (CHECKPOINT, PREVIOUS):
        (folder / name).write_bytes(b"damaged")
    (folder / "model.safetensors").unlink()
    left = {file: file.read_bytes() for file in folder.iterdir()}
    capsys.readouterr()
    assert boot() == 1
    assert f"{PREVIOUS} is damaged" in capsys.readouterr().err
    assert {file: file.read_bytes() for file in folder.iterdir()} == left
    for file in left:
        file.unlink()
    (folder / ".lock").touch()  # killed before the first checkpoint
    assert boot() == 0
    assert is_same(weights())


def test_a_run_may_be_resumed_on_another_device(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    (copy / "model.safetensors").unlink()
    assert main(["train", "--resume", str(copy), "--device", "cuda:77", "--quiet"]) == 2
    assert main(["train", "--resume", str(copy), "--device", "cpu", "--quiet"]) == 0
    assert "cuda:77" in capsys.readouterr().err


def test_no_set_of_images_is_loaded_twice(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither where there are test images, nor where the figures show the training images."""
    loaded: list[tuple[str, str]] = []
    load = poecaps.data.load

    def note(source: str, **options: Any) -> poecaps.data.ImageSet:
        images = load(source, **options)
        loaded.append((Path(source).name, options.get("split", "train")))
        return images

    monkeypatch.setattr("poecaps.data.load", note)
    monkeypatch.setattr("poecaps.training.run.load", note)
    unsplit = tmp_path / "unsplit.npz"
    np.savez(unsplit, images=arrays(source)["x_train"])
    for number, data in enumerate((source, unsplit)):
        folder = str(tmp_path / str(number))
        assert main(["train", "--data", str(data), "--out", folder, "--quiet", *SMALL]) == 0
    assert loaded == [("digits.npz", "train"), ("digits.npz", "test"), ("unsplit.npz", "train")]
    drawn = arrays(tmp_path / "1" / "figures" / "reconstructions.npz")["originals"]
    assert len(drawn) == 40
    np.testing.assert_array_equal(drawn[[0, -1]], load(unsplit).batch([0, 47]).numpy())
    shutil.rmtree(tmp_path / "1" / "figures")
    assert main(["train", "--resume", str(tmp_path / "1"), "--quiet"]) == 0
    again = arrays(tmp_path / "1" / "figures" / "reconstructions.npz")["originals"]
    np.testing.assert_array_equal(again, drawn)


def test_a_run_without_epochs_still_leaves_a_model(source: Path, tmp_path: Path) -> None:
    none = [
        "--autoencoder.epochs",
        "0",
        "--encoder.epochs",
        "0",
        "--decoder.epochs",
        "0",
        "--pixel-decoder.epochs",
        "0",
    ]
    folder = tmp_path / "run"
    assert (
        main(["train", "--data", str(source), "--out", str(folder), "--quiet", *SMALL, *none]) == 0
    )
    assert (folder / "figures" / "joint.png").exists()
    assert main(["info", str(folder)]) == 0


def test_the_flag_for_tensorboard_writes_its_events(source: Path, tmp_path: Path) -> None:
    arguments = [
        "--data",
        str(source),
        "--out",
        str(tmp_path / "run"),
        "--quiet",
        "--no-figures",
        "--tensorboard",
    ]
    assert main(["train", *arguments, *SMALL]) == 0
    assert list((tmp_path / "run" / "tensorboard").glob("events.out.tfevents.*"))


def test_several_processes_need_a_folder(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["train"]) == 2
    assert "give it as folder, or with --out" in capsys.readouterr().err


def test_the_demo_of_the_makefile_trains_the_default_on_the_bundled_digits(
    source: Path, tmp_path: Path
) -> None:
    """Its command, with few images and a small model in place of minutes."""
    (words,) = recipe("demo", str(tmp_path / "demo"))
    assert "--data" not in words
    assert main([*words, "--quiet", "--data", str(source), *SMALL]) == 0
    options = json.loads((tmp_path / "demo" / "run.json").read_text())["config"]
    assert options["encoder"]["learning_rate"] == PRESETS["default"]().encoder.learning_rate
    made = {file.stem for file in (tmp_path / "demo" / "figures").glob("*.png")}
    assert made == {*DOMAINS, "reconstructions", "curves"}


def test_the_demo_of_the_density_draws_from_it(source: Path, tmp_path: Path) -> None:
    train, generate = recipe("demo-energy", str(tmp_path / "energy"))
    assert "--data" not in train
    small = """--model.density.experts 3 4 --model.density.linear-dims 2 --density.epochs 1
        --model.density.base-components 4 --density.chains 8 --density.levels 4
        --density.partition-steps 5"""
    assert main([*train, "--quiet", "--data", str(source), *SMALL, *small.split()]) == 0
    options = json.loads((tmp_path / "energy" / "run.json").read_text())["config"]
    assert options["density"]["learning_rate"] == PRESETS["energy"]().density.learning_rate
    assert main([*generate, "--steps", "6"]) == 0
    assert len(list((tmp_path / "energy").rglob("model*.png"))) == 1


def test_a_full_disk_while_drawing_says_that_the_model_is_safe(
    source: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("numpy.savez", full)
    assert main(["train", "--data", str(source), "--out", str(tmp_path / "run"), *SMALL]) == 1
    err = capsys.readouterr().err
    assert f"the model in {tmp_path / 'run'} is complete" in err
    assert "reconstructions.png" in err
    assert main(["encode", str(tmp_path / "run")]) == 1
    assert "codes-train.npz" in capsys.readouterr().err


@pytest.mark.parametrize("restarts", [2, 3])
def test_the_encoder_that_is_kept_is_reported(
    restarts: int, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = ["--out", str(tmp_path / "run"), "--no-figures", "--encoder.restarts", str(restarts)]
    assert main(["train", "--data", str(source), *SMALL, *out]) == 0
    number = r"\d+(\.\d+)?"
    others = f"the other {number}" if restarts == 2 else f"others {number} to {number}"
    shown = capsys.readouterr().out
    assert re.search(
        rf"^encoder 1: start [1-{restarts}] of {restarts} kept, margin {number} \({others}\)$",
        shown,
        re.M,
    ), shown


def test_the_number_of_dropped_encoders_is_reported(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = ["--out", str(tmp_path / "run"), "--no-figures"]
    options = ["--encoder.restarts", "2", "--encoder.halvings", "1"]
    assert main(["train", "--data", str(source), *SMALL, *out, *options]) == 0
    shown = capsys.readouterr().out
    line = r"^encoder 1: start [12] of 2 kept, margin \d\.\d+; 1 dropped before the end$"
    assert re.search(line, shown, re.M), shown


def test_the_recombination_that_is_kept_is_reported(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = ["--out", str(tmp_path / "run"), "--no-figures", "--encoder.views.count", "2"]
    options = ["--encoder.restarts", "3", "--encoder.recombinations", "2"]
    assert main(["train", "--data", str(source), *SMALL, *out, *options]) == 0
    shown = capsys.readouterr().out
    number = r"\d+(\.\d+)?"
    line = rf"^encoder 1: recombination [12] of 2 kept, margin {number} \(the other {number}\)$"
    assert re.search(line, shown, re.M), shown


def test_quiet_is_quiet(source: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["train", "--data", str(source), "--out", str(tmp_path / "run"), "--quiet", *SMALL])
        == 0
    )
    assert capfd.readouterr() == ("", "")


def test_a_finished_run_can_be_resumed_and_a_broken_disk_is_not_a_traceback(
    run: Path,
    source: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    assert main(["train", "--resume", str(copy), "--no-figures"]) == 0

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    assert main(["train", "--data", str(source), "--out", str(tmp_path / "full"), *SMALL]) == 1
    assert "cannot write to" in capsys.readouterr().err


@pytest.mark.parametrize("shape", [(32, 32, 3), (28, 20)])
def test_images_of_any_kind_train_and_generate(shape: tuple[int, ...], tmp_path: Path) -> None:
    images = np.random.default_rng(0).integers(0, 256, (32, *shape), dtype=np.uint8)
    np.save(tmp_path / "x.npy", images)
    folder, out = str(tmp_path / "run"), str(tmp_path / "drawn.png")
    options = ["--data", str(tmp_path / "x.npy"), "--out", folder, "--quiet", "--no-figures"]
    assert main(["train", *options, *SMALL]) == 0
    assert main(["generate", folder, "--domain", "learned", "--out", out]) == 0
    channels = 3 if len(shape) == 3 else 1
    assert arrays(tmp_path / "drawn.npz")["images"].shape == (4, 3, channels, *shape[:2])


def test_a_folder_of_pictures_trains_and_is_reconstructed(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    for name, size in (("a", (40, 30)), ("b", (24, 36)), ("c", (30, 30)), ("d", (64, 20))):
        (tmp_path / "pictures").mkdir(exist_ok=True)
        picture = Image.fromarray(random.integers(0, 256, (*size, 3), dtype=np.uint8))
        picture.save(tmp_path / "pictures" / f"{name}.png")
    data = ["--data", str(tmp_path / "pictures"), "--size", "20", "18", "--channels", "3"]
    assert main(["train", *data, "--out", str(tmp_path / "run"), "--quiet", *SMALL]) == 0
    assert arrays(tmp_path / "run" / "figures" / "reconstructions.npz")["originals"].shape == (
        4,
        3,
        20,
        18,
    )


@pytest.mark.parametrize("chosen", [False, True])
def test_large_pictures_get_a_warning_unless_their_size_was_chosen(
    chosen: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    random = np.random.default_rng(0)
    (tmp_path / "pictures").mkdir()
    for number in range(4):
        pixels = random.integers(0, 256, (70, 66), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / "pictures" / f"{number}.png")
    options = ["--data", str(tmp_path / "pictures"), "--held-out", "0", "--no-figures"]
    options += ["--size", "70", "66"] if chosen else []
    assert main(["train", *options, "--out", str(tmp_path / "run"), *SMALL]) == 0
    warning = "images of 70×66 take much time and memory; --size 32 32 scales them down"
    assert (f"warning: {warning}" in capsys.readouterr().err) == (not chosen)


def test_one_line_says_what_was_found_and_what_was_skipped_and_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    random = np.random.default_rng(0)
    for name, side in (("ant/a", 30), ("ant/b", 24), ("bee/c", 30), ("bee/tiny", 16)):
        file = tmp_path / "pictures" / f"{name}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(random.integers(0, 256, (side, side, 3), dtype=np.uint8)).save(file)
    whole = (tmp_path / "pictures" / "ant" / "a.png").read_bytes()
    (tmp_path / "pictures" / "ant" / "cut.png").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "pictures" / "bee" / "empty.png").write_bytes(b"")
    (tmp_path / "pictures" / "notes.txt").write_text("taken in May")
    data = ["--data", str(tmp_path / "pictures"), "--size", "20", "18"]
    assert main(["train", *data, "--out", str(tmp_path / "run"), *SMALL]) == 0
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "skipped" in line]
    assert line == (
        f"found 3 RGB images of 20×18 in {tmp_path / 'pictures'}, 2 classes (ant, bee); "
        "4 files skipped: 1 not PNG, JPEG or WebP (notes.txt), 2 unreadable (empty.png, …), "
        "1 smaller than 17×17 (tiny.png)"
    )
    assert arrays(tmp_path / "run" / "figures" / "reconstructions.npz")["originals"].shape == (
        3,
        3,
        20,
        18,
    )

    assert main(["reconstruct", str(tmp_path / "run"), "--device", "cpu"]) == 0
    assert [each for each in capsys.readouterr().err.splitlines() if "skipped" in each] == [line]

    config = dataclass_from_json(
        Config, json.loads((tmp_path / "run" / "run.json").read_text())["config"]
    )
    with pytest.warns(UserWarning, match="4 files skipped") as told:
        poecaps.train(config, tmp_path / "again")
    assert [(str(each.message), each.filename) for each in told] == [(line, __file__)]

    seen: list[str] = []
    poecaps.train(
        config, tmp_path / "told", found=lambda images: seen.append(f"found {images.describe()}")
    )
    assert seen == [line]


def test_missing_matplotlib_is_reported_and_stops_nothing(
    source: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["train", "--data", str(source), "--out", str(tmp_path / "run"), *SMALL]) == 0
    assert "pip install 'poecaps[plots]'" in capsys.readouterr().out
    assert (tmp_path / "run" / "figures" / "joint.png").exists()
    assert (tmp_path / "run" / CHECKPOINT).exists()


ENERGY = shlex.split("""
    --preset energy --model.features 8 --model.capsule-dim 4 --model.experts 3 5
    --model.joint-components 4 --model.equalized-components 4 --model.density.experts 3 4
    --model.density.linear-dims 2 --model.density.base-components 4
    --autoencoder.epochs 1 --encoder.epochs 1 --decoder.epochs 1 --pixel-decoder.epochs 1
    --density.epochs 1 --density.chains 8 --density.levels 4 --density.partition-chains 4
    --density.partition-steps 3 --batch-size 16 --device cpu
""")


def test_the_preset_energy_trains_a_density_and_draws_from_it(
    source: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    shorten_draws(monkeypatch, 6)
    for pause in ("LIVE_DELAY", "LIVE_PAUSE"):
        monkeypatch.setattr(f"poecaps._progress.{pause}", 0.0)
    where = ["--data", str(source), "--out", str(tmp_path / "run")]
    assert main(["train", *where, *ENERGY, "--quiet"]) == 0
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("", "")
    network = poecaps.load(tmp_path / "run")
    assert np.isfinite(network.require_density().log_partition)
    drawn = arrays(tmp_path / "run" / "figures" / "model.npz")["images"]
    expected = network.generate_from_density(
        80, steps=6, generator=torch.Generator().manual_seed(0)
    )
    np.testing.assert_allclose(drawn, expected, atol=1e-3)
    card = (tmp_path / "run" / "README.md").read_text(encoding="utf-8")
    assert "| preset | energy, with the changes below |" in card
    shutil.rmtree(tmp_path / "run" / "figures")
    assert main(["train", "--resume", str(tmp_path / "run")]) == 0
    shown = capsys.readouterr()
    picture = tmp_path / "run" / "figures" / "model.png"
    assert f"draws from the energy, by chains from noise: {picture}\n" in shown.out
    assert picture.is_file()
    assert "5/6 steps" in shown.err


@pytest.mark.parametrize(("error", "warned"), [(38.0, True), (1.2, False)])
def test_an_encoder_that_makes_its_inputs_larger_is_named(
    error: float, warned: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """As after an autoencoder that has learned little; above 1, an encoder may still be useful."""
    result = SimpleNamespace(
        config=PRESETS["default"](),
        record={"data": {"images": 5000}},
        metrics={"encoder 1": {"reconstruction_error": error}},
    )
    _warn_of_failure(result)  # type: ignore[arg-type]
    said = capsys.readouterr().err
    assert ("warning: the reconstructions of encoder 1 are far from its inputs" in said) is warned
    assert bool(said) is warned
