"""Commands that show what was never trained say so."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

import poecaps
from poecaps.cli.main import main
from poecaps.training import PRESETS, origin, record

if TYPE_CHECKING:
    from pathlib import Path

CODES = (["encode"], ["cluster"])
IMAGES = (["generate"], ["generate", "--domain", "all"], ["reconstruct"], ["traverse"])
DENSITY = (
    ["generate", "--domain", "model", "--steps", "3", "--temper", "0"],
    ["sample", "--steps", "3", "--chains", "2"],
)
EXPERTS = "note: the experts were not trained (encoder.epochs 0): their codes mean nothing"
DECODER = "note: the decoder was not trained (decoder.epochs 0): its images mean nothing"


def notes(command: list[str], run: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Run a command on a model, and return its lines with a note."""
    assert main([command[0], str(run), *command[1:]]) == 0
    return [line for line in capsys.readouterr().err.splitlines() if line.startswith("note:")]


def made(dense: Path, noise: Path, folder: Path, **epochs: int) -> Path:
    """Return a copy of a model whose record says that its stages had so many epochs."""
    config = replace(PRESETS["energy"](), data=str(noise))
    stages = {name: replace(getattr(config, name), epochs=count) for name, count in epochs.items()}
    shutil.copytree(dense, folder)
    about = record.describe_data(poecaps.data.load(str(noise)))
    options = replace(config, **stages)
    mark = {origin.MARK: origin.mark(options)}
    record.write(folder, record.new_record(options, about) | mark)
    return folder


@pytest.mark.parametrize("command", [*CODES, *IMAGES, *DENSITY], ids=" ".join)
def test_untrained_experts_are_noted_where_they_are_used(
    command: list[str], dense: Path, noise: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = made(dense, noise, tmp_path / "run", encoder=0, decoder=0, pixel_decoder=0)
    remedy = f"; for draws of its density: poecaps generate {run} --domain model"
    expected = [] if command in DENSITY else [EXPERTS + remedy]
    assert notes(command, run, capsys) == expected


@pytest.mark.parametrize(
    ("command", "epochs", "expected"),
    [
        (["encode"], {"decoder": 0, "pixel_decoder": 0}, ""),
        (["generate"], {"decoder": 0, "pixel_decoder": 0}, DECODER),
        (["generate"], {"decoder": 0}, ""),  # the stage of the pixel decoder trains it as well
        (["generate"], {}, ""),
    ],
)
def test_an_untrained_decoder_is_noted_with_its_images(
    command: list[str],
    epochs: dict[str, int],
    expected: str,
    dense: Path,
    noise: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = notes(command, made(dense, noise, tmp_path / "run", **epochs), capsys)
    assert [note.split(";")[0] for note in found] == ([expected] if expected else [])


def test_the_explorer_shows_the_note(
    dense: Path, noise: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = made(dense, noise, tmp_path / "run", encoder=0)
    page = tmp_path / "page"
    (note,) = notes(["explore", "--static", str(page)], run, capsys)
    (about,) = (json.loads(file.read_text()) for file in (page / "models").glob("*.json"))
    assert note.startswith(f"note: {about['note']};")


def test_nothing_is_said_of_a_model_without_a_valid_record(
    dense: Path, noise: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = made(dense, noise, tmp_path / "run", encoder=0)
    assert notes(["generate"], run, capsys)
    (run / record.RECORD).write_text("{}")
    assert notes(["generate"], run, capsys) == []
    (run / record.RECORD).unlink()
    assert notes(["generate"], run, capsys) == []
