"""`poecaps evaluate`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from poecaps.cli.evaluate import _judge
from poecaps.cli.loading import Parts
from poecaps.cli.main import main
from poecaps.code_density import DOMAINS
from poecaps.data import ImageSet

if TYPE_CHECKING:
    from pathlib import Path


def test_a_model_is_measured_as_a_table_and_as_json(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On the data of the run, for which there is no classifier."""
    out = tmp_path / "of run.json"
    assert main(["evaluate", str(run), "--samples", "20", "--out", str(out)]) == 0
    measured = json.loads(out.read_text())
    assert measured["test_images"] == 20
    assert measured["domains"].keys() == set(DOMAINS)
    assert measured["classifier"] is None
    assert measured["domains"]["joint"]["frechet"] is None
    assert measured["domains"]["joint"]["random_frechet"]["distance"] > 0
    text = capsys.readouterr().out
    assert f"written to {out}" in text
    assert "effective rank" in text


@pytest.mark.parametrize(("first", "last"), [(-1, 1), (0, 10**9), (0, 3)])
def test_labels_that_are_no_classes_are_no_error(first: int, last: int) -> None:
    """Such as −1 for unknown, years, or a class of test images only."""
    pixels = np.zeros((4, 8, 8), np.uint8)
    train = ImageSet(pixels, np.array([0, 1, 2, first if last == 3 else last]))
    test = ImageSet(pixels, np.array([first, 1, 2, last]))
    judge = _judge("mine", Parts(train, test), 0, torch.device("cpu"))
    assert judge.classifier is None
    assert "no classifier judges the samples" in judge.note
