"""`poecaps info`."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

import torch

from poecaps import models
from poecaps.cli.main import main
from poecaps.training import record

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


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


def test_output_in_an_encoding_without_some_characters(run: Path) -> None:
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    arguments = [sys.executable, "-m", "poecaps", "info", str(run)]
    done = subprocess.run(arguments, env=environment, capture_output=True, text=True, check=True)
    assert "28?28, grey" in done.stdout


def test_a_record_that_is_older_than_an_option_is_read(
    capsys: pytest.CaptureFixture[str],
) -> None:
    about = json.loads((models.find("mnist") / "run.json").read_text(encoding="utf-8"))
    assert "density" not in about["config"]  # the bundled models are older
    assert main(["info", "mnist"]) == 0
    assert "poecaps train" in capsys.readouterr().out
