"""How the defaults for tables of columns are chosen."""

from __future__ import annotations

import json
from statistics import fmean
from typing import TYPE_CHECKING

import numpy as np
import pytest

from benchmarks import table_defaults
from benchmarks.internals import table_constants
from benchmarks.intervals import difference_of_pairs
from benchmarks.report import NUMBERS
from benchmarks.table_defaults import (
    BETTER,
    CONSTANTS,
    DEFAULTS,
    START,
    accuracy,
    candidates,
    control,
    main,
    overall,
    table,
)
from benchmarks.tables import FOLDS
from poecaps import _table
from poecaps.sklearn import CapsuleExpertsTransformer

if TYPE_CHECKING:
    from pathlib import Path


def test_each_candidate_has_the_changes_of_its_name() -> None:
    options = CapsuleExpertsTransformer().get_params()
    assert set(DEFAULTS) == {*CONSTANTS, *(options.keys() & DEFAULTS.keys())}
    for name, changes in candidates().items():
        assert all(value != DEFAULTS[each] for each, value in changes.items())
        assert all(f"{each} {value}" in name for each, value in changes.items())
    assert candidates()[START] == {}
    assert {"shrinkage": 0.1, "scale": 2.0} in candidates().values()
    assert {key: value for each in BETTER for key, value in each.items()} in candidates().values()


def test_the_defaults_are_those_of_the_library_and_no_better_ones_were_confirmed() -> None:
    constants = {"shrinkage": _table.SHRINKAGE, "scale": _table.SCALE}
    usual = CapsuleExpertsTransformer().get_params() | {"winners": None}  # auto: all, for tables
    assert {**{name: usual.get(name) for name in DEFAULTS}, **constants} == DEFAULTS
    found = json.loads((NUMBERS / "table-defaults.json").read_text())
    first = overall(found["accuracies"][START])
    gains = {
        name: difference_of_pairs(overall(each), first)
        for name, each in found["accuracies"].items()
    }
    best = max(gains.values(), key=lambda gain: gain.value)
    near = [
        name
        for name, gain in gains.items()
        if gain.value + gain.half_width >= best.value - best.half_width
    ]
    assert min(near, key=lambda name: len(candidates()[name])) == table_defaults.CHOSEN
    confirmed = difference_of_pairs(
        *(overall(found["untouched"][name]) for name in (table_defaults.CHOSEN, START))
    )
    assert confirmed.value - confirmed.half_width <= 0


def test_a_candidate_uses_its_constants_and_options(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    class Observed(CapsuleExpertsTransformer):
        def fit(self, X: object, y: object = None) -> CapsuleExpertsTransformer:
            seen.append((_table.SHRINKAGE, _table.SCALE, self.n_iter, self.random_state))
            return super().fit(X, y)

    monkeypatch.setattr(table_defaults, "CapsuleExpertsTransformer", Observed)
    rows = np.random.default_rng(0).normal(size=(20, 3))
    before = _table.SHRINKAGE, _table.SCALE
    found = accuracy({"shrinkage": 7.0, "n_iter": 1}, (rows, np.arange(20) % 2), 3)
    assert 0 <= found <= 1
    assert seen == [(7.0, DEFAULTS["scale"], 1, 3)] * FOLDS
    with table_constants(scale=5.0):
        assert (before[0], 5.0) == (_table.SHRINKAGE, _table.SCALE)
    assert before == (_table.SHRINKAGE, _table.SCALE)


def test_the_best_candidate_is_first_and_its_gain_is_that_of_pairs() -> None:
    measured = {
        START: {"a": [0.5, 0.6], "b": [0.7, 0.8]},
        "n_iter 3": {"a": [0.6, 0.7], "b": [0.8, 0.9]},
    }
    first, second = table(measured).splitlines()[2:]
    assert first == "| `n_iter 3` | 0.650 | 0.850 | 0.750 | +0.100 ± 0.000 |"
    assert second == "| defaults | 0.550 | 0.750 | 0.650 | – |"


def test_the_command_writes_every_accuracy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = np.random.default_rng(0).normal(size=(20, 3))
    monkeypatch.setattr(table_defaults, "TABLES", {"noise": lambda: (rows, np.arange(20) % 2)})
    monkeypatch.setattr(table_defaults, "OPTIONS", {"n_iter": (1,)})
    monkeypatch.setattr(table_defaults, "BETTER", ())
    monkeypatch.setattr(table_defaults, "CHOSEN", "n_iter 1")
    labels = rows[:, 0] > 0
    monkeypatch.setattr(table_defaults, "UNTOUCHED", {"signs": lambda: (rows, labels)})
    main(["--seeds", "2", "--json", str(tmp_path / "x.json")])
    written = json.loads((tmp_path / "x.json").read_text())
    assert {len(found["noise"]) for found in written["accuracies"].values()} == {2}
    assert set(written["untouched"]) == {START, "n_iter 1"}
    said = capsys.readouterr().out
    assert table(written["accuracies"]) in said
    assert control(written["untouched"]) in said
    (_, _, line) = control(written["untouched"]).splitlines()
    first, other = (fmean(written["untouched"][name]["signs"]) for name in (START, "n_iter 1"))
    assert line.startswith(f"| signs | {first:.3f} | {other:.3f} | {other - first:+.3f} ± ")
    assert written["command"] == "python -m benchmarks.table_defaults --seeds 2"
    assert fmean(written["accuracies"]["n_iter 1"]["noise"]) < 1
    monkeypatch.setattr(table_defaults, "accuracy", None)
    main(["--seeds", "2", "--json", str(tmp_path / "x.json")])  # nothing is measured again
    assert json.loads((tmp_path / "x.json").read_text()) == written
    with pytest.raises(SystemExit):
        main(["--seeds", "1"])
    assert "--seeds must be at least 2" in capsys.readouterr().err
