"""Accuracies on tables of columns."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np
import pytest
from sklearn.datasets import load_iris

from benchmarks import tables
from benchmarks.report import NUMBERS

if TYPE_CHECKING:
    from pathlib import Path


def test_labels_that_are_a_column_are_found_in_every_fold() -> None:
    random = np.random.default_rng(0)
    labels = np.arange(60) % 2
    rows = np.stack([10.0 * labels, random.normal(size=60), random.normal(size=60)], 1)
    assert tables.accuracies((rows, labels), ("columns", "PCA")) == {
        "columns": [1.0] * 5,
        "PCA": [1.0] * 5,
    }
    shuffled = tables.accuracies((rows, random.permutation(labels)), ("columns",))
    assert np.mean(shuffled["columns"]) < 0.8


def test_half_of_the_patients_are_above_the_median() -> None:
    _, above = tables.diabetes()
    assert abs(above.mean() - 0.5) < 0.01


def test_the_command_writes_what_the_page_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tables, "TABLES", {"`load_iris`": lambda: load_iris(return_X_y=True)})
    names = ("columns", "codes")
    chosen = {name: tables.REPRESENTATIONS[name] for name in names}
    monkeypatch.setattr(tables, "REPRESENTATIONS", chosen)
    monkeypatch.setattr(tables.accuracies, "__defaults__", (names,))
    tables.main(["--json", str(tmp_path / "tables.json")])
    written = json.loads((tmp_path / "tables.json").read_text())
    assert tables.table(written["accuracies"]) in capsys.readouterr().out
    assert written["command"] == "python -m benchmarks.tables"
    # The numbers of the documentation come from the same code and, here, from one small table.
    documented = json.loads((NUMBERS / "tables.json").read_text())
    for name in names:
        ours = written["accuracies"]["`load_iris`"][name]
        theirs = documented["accuracies"]["`load_iris`"][name]
        assert np.mean(ours) == pytest.approx(np.mean(theirs), abs=0.03)
