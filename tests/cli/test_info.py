"""`poecaps info`."""

from __future__ import annotations

import io
import json
import shutil
import sys
from typing import TYPE_CHECKING

import pytest
import torch

from poecaps import models
from poecaps.cli.main import main, run_program
from poecaps.training import record

if TYPE_CHECKING:
    from pathlib import Path


def test_info_describes_a_run(run: Path, source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", str(run)]) == 0
    text = capsys.readouterr().out
    for fact in (
        "28×28, grey",
        "72 of dimension 4",
        "3 of dimension 5",
        f"{source} (48 images",
        "effective rank",
    ):
        assert fact in text
    assert "model.features = 8" in text
    assert "model.whiten" not in text  # as in the preset
    assert main(["info"]) == 0
    assert f"torch        {torch.__version__}" in capsys.readouterr().out


def test_info_has_the_measures_of_the_model_card(capsys: pytest.CaptureFixture[str]) -> None:
    folder = models.find("mnist")
    measured = json.loads((folder / "evaluation.json").read_text(encoding="utf-8"))
    assert main(["info", "mnist"]) == 0
    text = capsys.readouterr().out
    card = (folder / "README.md").read_text(encoding="utf-8")
    for name, value in (
        ("linear probe on codes, test accuracy", measured["probe"]["test_accuracy"]),
        (
            "recognisable draws from all experts together",
            measured["domains"]["joint"]["recognisability"]["share"],
        ),
    ):
        (line,) = [line for line in text.splitlines() if name in line]
        number = line.split()[-1]
        assert float(number.rstrip("%")) / 100 == pytest.approx(value, abs=1e-3)
        assert f"| {name} | {number} |" in card


def test_info_has_the_command_that_resumes_a_run(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    record.write(copy, record.read(copy) | {"finished": None})
    (copy / "model.safetensors").unlink()
    assert main(["info", str(copy)]) == 0
    assert f"not yet; resume with: poecaps train --resume {copy}" in capsys.readouterr().out
    assert main(["generate", str(copy)]) == 1
    assert (
        f"is not finished; resume it with: poecaps train --resume {copy}" in capsys.readouterr().err
    )


def test_output_in_an_encoding_without_some_characters(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = io.BytesIO()
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, io.TextIOWrapper(written, encoding="ascii"))
    monkeypatch.setattr(sys, "argv", ["poecaps", "info", str(run)])
    with pytest.raises(SystemExit, match="0"):
        run_program()
    sys.stdout.flush()
    assert b"28?28, grey" in written.getvalue()


def test_a_record_that_is_older_than_an_option_is_read(
    capsys: pytest.CaptureFixture[str],
) -> None:
    about = json.loads((models.find("mnist") / "run.json").read_text(encoding="utf-8"))
    assert "density" not in about["config"]  # the bundled models are older
    assert main(["info", "mnist"]) == 0
    assert "poecaps train" in capsys.readouterr().out
