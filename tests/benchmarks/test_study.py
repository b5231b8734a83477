"""The study: every variant is valid and has a command, and rows form a table."""

from __future__ import annotations

import itertools
import json
import re
from argparse import Namespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from benchmarks import study, variants
from benchmarks.internals import changed_options, command_for
from benchmarks.study import CLASSES, READINGS, STUDY, default_with, main, table
from benchmarks.variants import Job, Variant
from poecaps.training import PRESETS, TrainingError

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("name", [*STUDY, *CLASSES, *READINGS])
def test_a_variant_is_valid_and_changes_only_its_options(name: str) -> None:
    variant = {**STUDY, **CLASSES, **READINGS}[name]
    config = variant.config(data="mnist", seed=3)
    config.validate()
    assert changed_options(config, variant.preset) == {
        "data": "mnist",
        "seed": 3,
        **variant.changes,
    }


@pytest.mark.parametrize("variants_of", [STUDY, CLASSES, READINGS])
def test_no_two_variants_are_the_same(variants_of: dict[str, Variant]) -> None:
    commands = [command_for(variant.config()) for variant in variants_of.values()]
    assert len(set(commands)) == len(commands)


def test_no_two_lists_have_a_name_in_common() -> None:
    """Except for a variant that is the same in both."""
    for first, second in itertools.combinations((STUDY, CLASSES, READINGS), 2):
        for name in first.keys() & second.keys():
            assert first[name] == second[name]


def small_with(**changes: Any) -> Variant:
    """Return a small network with one epoch in every stage."""
    stages = ("autoencoder", "encoder", "decoder", "pixel_decoder")
    return default_with(
        model__features=8,
        model__capsule_dim=4,
        model__experts=((3, 5),),
        batch_size=16,
        **{f"{stage}__epochs": 1 for stage in stages},
        **changes,
    )


@pytest.mark.usefixtures("same_process")
def test_a_variant_is_trained_and_evaluated_once(
    bars: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(STUDY, "small", small_with(model__equalized_components=2))
    rows = tmp_path / "rows.json"
    data = ["--data", str(bars), "--device", "cpu", "--samples", "20"]

    main(
        [
            *data,
            "--only",
            "small",
            "--seeds",
            "0,1",
            "--json",
            str(rows),
            "--keep",
            str(tmp_path / "runs"),
        ]
    )
    found = json.loads(rows.read_text())
    assert [row["seed"] for row in found] == [0, 1]
    assert all(row["evaluation"]["probe"]["test_accuracy"] <= 1 for row in found)
    assert found[0]["seconds"].keys() == {"autoencoder", "encoder 1", "decoder 1", "pixel decoder"}
    assert "--model.equalized-components 2" in found[0]["command"]
    assert (tmp_path / "runs" / "small-1" / "evaluation.json").is_file()
    capsys.readouterr()
    main([*data, "--only", "small", "--json", str(rows)])
    assert json.loads(rows.read_text()) == found
    main(["--table", str(rows)])
    assert "| small | 2 |" in capsys.readouterr().out


def job(bars: Path) -> Job:
    options = Namespace(
        data=str(bars),
        path=None,
        device="cpu",
        samples=20,
        keep=None,
        held_out=0,
        on=None,
        filters=None,
    )
    return Job("small", 0, options)


def test_diverged_training_is_a_result(bars: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = {
        "model__features": 8,
        "model__capsule_dim": 4,
        "model__experts": ((3, 5),),
        "model__equalized_components": 2,
    }
    monkeypatch.setitem(
        STUDY, "small", default_with(**small, autoencoder__learning_rate=1e30, batch_size=16)
    )
    row = study.run(job(bars))
    assert re.fullmatch(
        r"autoencoder diverged at step \d+ with a learning rate of \S+", row["failed"]
    )
    assert "evaluation" not in row


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("CUDA error: unspecified launch failure"),
        TrainingError("cannot write into runs (no space left on device)"),
        TrainingError("another process has stopped (connection closed)"),
    ],
    ids=str,
)
def test_other_errors_are_raised(
    error: RuntimeError, bars: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setitem(STUDY, "small", Variant())
    monkeypatch.setattr(variants, "train", fail)
    with pytest.raises(type(error), match=re.escape(str(error))):
        study.run(job(bars))


@pytest.mark.usefixtures("same_process")
def test_rows_of_classes_have_measures_of_clusterings(
    bars: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = small_with(encoder__views__count=2, encoder__restarts=2)
    monkeypatch.setitem(CLASSES, "small", small)
    rows = tmp_path / "rows.json"
    data = ["--data", str(bars), "--device", "cpu", "--samples", "20"]
    main([*data, "--classes", "--only", "small", "--json", str(rows)])
    (row,) = json.loads(rows.read_text())
    accuracy = row["evaluation"]["specialisation"]["accuracy"]
    assert 0 < accuracy <= 1
    assert len(row["selection"]["encoder 1"]["scores"]["agreement"]) == 2
    assert f"| small | 1 | {accuracy:.3f} |" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main([*data, "--only", "small"])  # it is not in the list of the recipe


def test_a_table_has_mean_and_standard_deviation(monkeypatch: pytest.MonkeyPatch) -> None:
    def row(name: str, seed: int, probe: float) -> dict[str, object]:
        return {
            "variant": name,
            "seed": seed,
            "evaluation": {"probe": {"test_accuracy": probe}, "experts": None},
        }

    monkeypatch.setitem(STUDY, "broken", Variant())
    rows = [row("default", 0, 0.9), row("default", 1, 0.8), row("equalized components 0", 0, 0.5)]
    lines = table(
        [*rows, {"variant": "broken", "seed": 0, "failed": "encoder 1 diverged"}]
    ).splitlines()
    assert lines[2].startswith("| default (preset, unchanged) | 2 | 0.8500 ± 0.0707 | – |")
    assert lines[3].startswith("| equalized components 0 | 1 | 0.5000 | – |")
    assert lines[4].startswith("| broken | 1 | encoder 1 diverged |")
    assert len({line.count("|") for line in lines}) == 1


def test_unknown_variants_are_rejected(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--only", "equalized components 99"])
    assert "equalized components 99" in capsys.readouterr().err


def test_the_study_starts_from_the_presets() -> None:
    assert STUDY["default"].config() == PRESETS["default"]()
    assert STUDY["paper"].config() == PRESETS["paper"]()
