"""The help, the version, and how errors are reported."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from PIL import Image

import poecaps
from poecaps.cli import run
from poecaps.cli.main import main, run_program
from tests.systems import needs_fork, needs_unix

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.mark.parametrize(
    "arguments",
    [["--preset", "paper"], ["--preset=paper"], ["--preset", "default", "--preset", "paper"]],
)
def test_help_shows_the_values_of_the_preset(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as leave:
        main(["train", *arguments, "--help"])
    assert leave.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "Initial learning rate. (default: 100.0)" in text


def test_the_preset_energy_has_help(capsys: pytest.CaptureFixture[str]) -> None:
    helps = []
    for preset in ("energy", "default"):
        with pytest.raises(SystemExit) as leave:
            main(["train", "--help", "--preset", preset])
        assert leave.value.code == 0
        words = capsys.readouterr().out.replace("│", " ").split()
        helps.append(" ".join(words))
    assert "density. (default: 600 8)" in helps[0]
    assert "density. (default: 600 8)" not in helps[1]
    assert "or energy" in helps[0]


def test_help_shows_optional_values_plainly(capsys: pytest.CaptureFixture[str]) -> None:
    for command in (
        *("train", "generate", "reconstruct", "traverse", "encode", "evaluate", "info"),
        *("sample", "likelihood", "cluster"),
    ):
        with pytest.raises(SystemExit):
            main([command, "--help"])
        text = capsys.readouterr().out
        assert "{None}" not in text
        if command != "train":
            assert "None" not in text, "an option that is left out has a default in words"


COMMANDS = (
    *("train", "generate", "reconstruct", "traverse", "encode", "cluster", "evaluate"),
    *("sample", "likelihood", "explore", "info", "completion"),
)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_is_wrapped_at_80_columns(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as leave:
        main([command, "--help"])
    assert leave.value.code == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    assert not any(each in text for each in ("{None}", "[[", "(default: )"))
    assert "show this help message" in text


@pytest.mark.parametrize("width", [50, 60, 80])
def test_the_overview_has_a_line_about_each_command_and_every_option(
    width: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= width
    for name in (*COMMANDS, "-h, --help", "--version"):
        assert f"\n  {name:13} " in text
    assert main([]) == 0
    assert capsys.readouterr().out == text


def test_a_misspelt_command_is_corrected(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["genrate", "mnist"]) == 2
    error = capsys.readouterr().err
    assert error == "poecaps: there is no command genrate; did you mean generate?\n"
    assert main(["xyzzy"]) == 2
    assert "poecaps --help lists the commands" in capsys.readouterr().err


@needs_unix
def test_a_reader_that_leaves_ends_the_command_quietly() -> None:
    command = [sys.executable, "-m", "poecaps", "completion", "bash"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait() == 141


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"poecaps {poecaps.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([], "usage: poecaps"),
        (["tran"], "train"),
        (["train", "--enncoder.learning-rate", "1"], "--encoder.learning-rate"),
        (["train", "--model.expert", "1"], "--model.experts"),
        (["train", "--encoder.epochs", "many"], "--encoder.epochs"),
        (["train", "--encoder.mixing", "sometimes"], "bernoulli"),
        (["train", "--preset", "papper"], "paper"),
        (
            ["train", "--encoder.epochs", "-2"],
            "encoder.epochs must be a whole number from 0 to 1000000, but is -2",
        ),
        (["train", "--batch-size", "0"], "batch_size must be"),
        (["train", "--device", "cuda:99"], "device must be"),
        (["train", "--device", "hpu"], "device must be"),
        (["train", "--model.joint-components", "0"], "model.joint_components must be"),
        (["train", "--model.experts"], "model.experts must be"),
        (["train", "--model.scale", "0"], "model.scale must be above 0"),
        (["train", "--model.kernel-size", "40"], "images must be at least 79×79"),
        (["train", "--model.image-shape", "1", "9", "9"], "Unrecognized options"),
        (["train", "--model.capsule-dim", "7"], "features must be a multiple of capsule_dim"),
        (
            ["train", "--size", "9", "9"],
            "the options size and channels apply only to folders of images, but mnist-",
        ),
        (
            ["train", "--data-path", "x"],
            "poecaps: a data path applies only to the full datasets, but mnist-sample is part of",
        ),
        (["train", "--resume", "x", "--seed", "3"], "--resume uses the options of the run"),
        (["generate"], "RUN"),
        (["completion", "csh"], "fish"),
        (["generate", "{run}", "--domain", "joined"], "joint"),
        (
            ["generate", "{run}", "--domain", "learned", "--expert", "3"],
            "expert must be a whole number from 0 to 2",
        ),
        (["generate", "{run}", "--expert", "1"], "add --domain learned"),
        (["generate", "{run}", "--rows", "0"], "rows must be"),
        (["generate", "{run}", "--seed", "-1"], "seed must be"),
        (["generate", "{run}", "--seed", "99999999999999999999"], "seed must be"),
        (["generate", "{run}", "--domain", "all", "--expert", "1"], "leave out one"),
        (["generate", "{run}", "--out", "drawn.jpg"], "let it end in .png"),
        (["generate", "{run}", "--domain", "all", "--out", "x.png"], "leave out one of them"),
        (["reconstruct", "{run}", "--count", "0"], "count must be"),
        (["reconstruct", "{run}", "--out", "drawn.jpg"], "let it end in .png"),
        (["traverse", "{run}", "--expert", "-1"], "expert must be"),
        (["traverse", "{run}", "--steps", "1"], "steps must be"),
        (["traverse", "{run}", "--image", "999"], "image must be a whole number from 0 to 19"),
        (["traverse", "{run}", "--data", "mnist"], "select the data of --image"),
        (["encode", "{run}", "--out", "codes.txt"], "--out must name an .npz file"),
        (["evaluate", "{run}", "--out", "x.txt"], "--out must name a .json file"),
        (["evaluate", "{run}", "--samples", "1"], "samples must be"),
    ],
)
def test_misuse_has_status_2_and_names_the_remedy(
    arguments: list[str], named: str, run: Path, tmp_path: Path
) -> None:
    check_error(arguments, named, 2 if arguments else 0, run, tmp_path)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["train", "--data", "nowhere"], "there is no file or folder nowhere"),
        (["train", "--data", "mnsit-sample"], "did you mean 'mnist-sample'?"),
        (
            ["train", "--data", "text.txt"],
            "unknown format; give a folder of PNG, JPEG or WebP images, or an",
        ),
        (
            ["train", "--out", "{run}"],
            "is not empty; choose a new folder, or resume its run with: ",
        ),
        (
            ["train", "--data", "pictures"],
            "pictures/0.png has 28×28; set the option size (height, width), such as --size ",
        ),
        (
            ["train", "--data", "mnist", "--data-path", "empty"],
            "give the data path of the folder that contains them,",
        ),
        (["train", "--resume", "nowhere"], "nowhere"),
        pytest.param(
            ["train", "--out", "/proc/none/run"],
            "cannot write to /proc/none/run",
            marks=needs_unix,
        ),
        (
            ["generate", "nowhere"],
            "there is no folder nowhere, and no model of that name comes with poecaps",
        ),
        (["generate", "empty"], "empty does not contain a trained model"),
        (["generate", "{broken}"], "model.safetensors"),
        (["reconstruct", "{run}", "--data", "wide.npy"], "the model expects grey images of 28×28"),
        (["encode", "{run}", "--data", "text.npz"], "text.npz"),
        pytest.param(
            ["encode", "{run}", "--out", "/proc/none/x.npz"], "/proc/none", marks=needs_unix
        ),
        (["train", "--model.features", "100000"], "not enough memory"),
        (["generate", "{run}", "--rows", "1000000000000"], "not enough memory"),
        (
            ["info", "nowhere"],
            "there is no folder nowhere, and no model of that name comes with poecaps",
        ),
        (["info", "empty"], "empty does not contain a run: it has neither"),
    ],
)
def test_failure_has_status_1_and_says_what_is_wrong(
    arguments: list[str], named: str, run: Path, tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(run, broken)
    (broken / "model.safetensors").write_bytes(b"nonsense")
    np.save(tmp_path / "wide.npy", np.zeros((4, 28, 30), np.uint8))
    (tmp_path / "text.npz").write_text("no arrays")
    (tmp_path / "text.txt").write_text("no images")
    (tmp_path / "empty").mkdir()
    (tmp_path / "pictures").mkdir()
    for index, side in enumerate((28, 30)):
        Image.new("L", (side, side)).save(tmp_path / "pictures" / f"{index}.png")
    check_error(
        [argument.replace("{broken}", str(broken)) for argument in arguments],
        named,
        1,
        run,
        tmp_path,
    )


def check_error(arguments: list[str], named: str, status: int, run: Path, folder: Path) -> None:
    """Run a command in this process, from a folder, and check its output."""
    out, err, here = io.StringIO(), io.StringIO(), Path.cwd()
    before = {file: file.read_bytes() for file in run.rglob("*") if file.is_file()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.stdout", out)
        patch.setattr("sys.stderr", err)
        patch.chdir(folder)
        try:
            found = main([argument.replace("{run}", str(run)) for argument in arguments])
        except SystemExit as leave:
            found = leave.code  # type: ignore[assignment]
    assert Path.cwd() == here
    assert found == status, err.getvalue()
    said = " ".join((err.getvalue() if status else out.getvalue()).replace("│", " ").split())
    assert named in said
    assert "Traceback" not in said
    assert {file: file.read_bytes() for file in run.rglob("*") if file.is_file()} == before
    assert not (folder / "runs").exists()


def test_without_a_record_images_must_be_given(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    poecaps.load(run).save(tmp_path / "bare")
    assert main(["reconstruct", str(tmp_path / "bare")]) == 2
    assert "are unknown; give images with --data" in capsys.readouterr().err
    assert main(["info", str(tmp_path / "bare")]) == 0


def status_of_program(prepare: Callable[[], object], *arguments: str) -> int:
    """Run the program in a forked process, in which something is done before; return its status."""
    child = os.fork()
    if child == 0:
        status = 70
        try:
            prepare()
            sys.argv = ["poecaps", *arguments]
            run_program()
        except SystemExit as leave:
            status = int(leave.code or 0)
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@needs_fork
def test_a_command_may_be_started_without_standard_streams() -> None:
    def close() -> None:
        os.closerange(0, 3)
        for name in ("stdin", "stdout", "stderr"):
            setattr(sys, name, None)

    assert status_of_program(close, "--version") == 0
    assert status_of_program(close, "info", "nowhere") == 1


@needs_fork
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_log_on_a_full_disk_does_not_change_how_a_command_ends(run: Path, tmp_path: Path) -> None:
    def fill() -> None:
        os.dup2(os.open("/dev/full", os.O_WRONLY), 2)
        sys.stderr = open(2, "w", buffering=1, encoding="utf-8")  # noqa: SIM115

    assert status_of_program(fill, "info", "nowhere") == 1
    out = tmp_path / "codes.npz"
    assert status_of_program(fill, "encode", str(run), "--out", str(out)) == 0
    assert out.exists()


def test_an_interrupt_while_the_commands_are_imported_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Interrupted:
        def find_spec(self, name: str, *_: object) -> None:
            if name == "poecaps.cli.main":
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "poecaps.cli.main")
    monkeypatch.setattr(sys, "meta_path", [Interrupted(), *sys.meta_path])
    with pytest.raises(SystemExit) as ended:
        run()
    assert ended.value.code == 130
    assert capsys.readouterr().err == "poecaps: interrupted\n"
