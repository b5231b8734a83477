"""The study of criteria: every encoder is measured, and the scores are compared with accuracies."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import pytest

from benchmarks import criteria
from benchmarks.criteria import (
    HELD_OUT_ENERGY,
    RESTARTS,
    STUDY,
    config_of,
    early,
    effects,
    main,
    make_parser,
    many,
    mean_energies,
    part_gain,
    rank_correlation,
    restarts_with,
    summarise,
    table,
)
from benchmarks.internals import changed_options
from benchmarks.variants import Job
from poecaps import Architecture, CapsuleNetwork
from poecaps.data import load
from poecaps.options import ModelOptions
from poecaps.training import recombination
from poecaps.training.config import CRITERIA

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Generator

    from benchmarks.variants import Variant
    from poecaps import CapsuleExperts


@pytest.mark.parametrize("name", STUDY)
def test_a_variant_is_valid_and_changes_only_its_options(name: str) -> None:
    config = STUDY[name].config(data="mnist", seed=3)
    config.validate()
    assert changed_options(config, "default") == {"data": "mnist", "seed": 3, **STUDY[name].changes}


def small_with(**epochs: int) -> Variant:
    """Return three small encoders with views."""
    return restarts_with(
        model__features=8,
        model__capsule_dim=4,
        model__experts=((3, 5),),
        model__equalized_components=2,
        encoder__restarts=3,
        encoder__views__count=2,
        batch_size=16,
        **epochs,
    )


@pytest.mark.usefixtures("same_process")
def test_every_encoder_is_measured(
    bars: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = small_with(autoencoder__epochs=1, encoder__epochs=1)
    monkeypatch.setitem(STUDY, "small", small)
    rows = tmp_path / "rows.json"
    arguments = ["--data", str(bars), "--device", "cpu", "--only", "small", "--held-out", "20"]
    arguments += ["--keep", str(tmp_path / "runs"), "--json", str(rows)]
    main(arguments)
    (row,) = json.loads(rows.read_text())
    assert set(row["scores"]) == {*CRITERIA, HELD_OUT_ENERGY}
    assert len(row["starts"]) == len(row["scores"]["margin"]) == 3
    accuracy = [start["accuracy"] for start in row["starts"]]
    assert all(each * 20 == pytest.approx(round(each * 20)) for each in accuracy)
    record = json.loads((tmp_path / "runs" / "small-0" / "run.json").read_text())
    assert record["data"]["images"] == 44
    kept = record["selection"]["encoder 1"]["kept"] - 1
    for name, summary in row["summary"].items():
        assert summary["by"]["margin"] == row["starts"][kept][name]
    assert "| small | 1 |" in capsys.readouterr().out


@pytest.mark.usefixtures("same_process")
def test_recombined_encoders_are_measured_on_test_and_held_out_images(
    bars: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    small = small_with(autoencoder__epochs=0, encoder__epochs=1, encoder__recombinations=2)
    small = replace(small, changes={**small.changes, "encoder.criterion": "agreement"})
    monkeypatch.setitem(STUDY, "small", small)
    rows = tmp_path / "rows.json"
    arguments = ["--data", str(bars), "--device", "cpu", "--only", "small", "--held-out", "20"]
    main([*arguments, "--on", "test", "--json", str(rows)])
    (row,) = json.loads(rows.read_text())
    assert row["on"] == "test"
    assert row["numbers"] == [4, 5] == [each["number"] for each in row["recombinations"]]
    for part, count in {"": 20, "test_": 64}.items():
        for start in row[f"{part}starts"]:
            assert start["accuracy"] * count == pytest.approx(round(start["accuracy"] * count))
            assert start["ari"] <= 1
        assert len(row[f"{part}starts"]) == 2
        assert row[f"{part}summary"] == summarise(row["scores"], row[f"{part}starts"])
    assert "| small, 2 recombinations | 1 |" in capsys.readouterr().out
    old = {**row, "variant": "small", "test_summary": {"accuracy": row["test_summary"]["accuracy"]}}
    (_, _, line) = many([old]).splitlines()
    *_, accuracy, nmi, ari, purity, _ = line.split("|")
    assert accuracy.strip() == f"{row['test_summary']['accuracy']['by']['agreement']:.4f}"
    assert [nmi.strip(), ari.strip(), purity.strip()] == ["–"] * 3  # rows of earlier versions


@pytest.mark.usefixtures("same_process")
def test_the_balance_of_recombined_encoders_has_the_rate_of_the_option(
    bars: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = small_with(autoencoder__epochs=0, encoder__epochs=1, encoder__recombinations=2)
    monkeypatch.setitem(STUDY, "small", small)
    rates = []

    def observed(network: object, starts: list[CapsuleExperts], images: object) -> list[object]:
        rates.append([each.balance_rate for each in starts])
        return [{"accuracy": 0.5, "nmi": 0.5, "ari": 0.5, "purity": 0.5} for _ in starts]

    monkeypatch.setattr(criteria, "agreement_with_labels", observed)
    rows = tmp_path / "rows.json"
    arguments = ["--data", str(bars), "--device", "cpu", "--only", "small", "--held-out", "20"]
    main([*arguments, "--balance-rate", "0.25", "--json", str(rows)])
    main([*arguments, "--json", str(tmp_path / "usual.json")])
    assert rates == [[0.25] * 2, [recombination.BALANCE_RATE] * 2]
    (row,) = json.loads(rows.read_text())
    assert row["balance_rate"] == 0.25


@pytest.mark.usefixtures("same_process")
def test_an_early_comparison_is_compared_with_the_end(
    bars: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With `--compare`, all encoders are compared on the way, and learn to the end."""
    small = small_with(autoencoder__epochs=0, encoder__epochs=2)
    halved = replace(small, changes={**small.changes, "encoder.halvings": 1})
    monkeypatch.setitem(STUDY, "small", small)
    monkeypatch.setitem(STUDY, "halved", halved)
    rows = []
    for name, compare in {"small": "1", "halved": "0"}.items():
        arguments = ["--data", str(bars), "--device", "cpu", "--only", name, "--held-out", "20"]
        main([*arguments, "--compare", compare, "--json", str(tmp_path / name)])
        rows += json.loads((tmp_path / name).read_text())
    every, half = rows
    assert every["halvings"] == half["halvings"]
    assert every["numbers"] == [1, 2, 3] == every["halvings"][0]["starts"]
    assert len(half["numbers"]) == len(half["starts"]) == 2
    for name, scores in half["scores"].items():
        assert scores == [every["scores"][name][number - 1] for number in half["numbers"]]
    (_, _, line) = early(rows).splitlines()  # of the encoders of which none was dropped
    assert line.startswith("| small | 0 | 2 | ")
    assert line in capsys.readouterr().out


def test_early_ranks_are_those_of_the_scores_and_accuracies_at_the_end() -> None:
    def scores(*values: float) -> dict[str, list[float]]:
        return {name: list(values) for name in CRITERIA}

    row = {
        "variant": "10 experts of 32, 4 views",
        "seed": 0,
        "numbers": [1, 2, 3],
        "starts": [{"accuracy": each} for each in (0.9, 0.5, 0.7)],
        "scores": scores(1, 2, 3),
        "halvings": [{"step": 5, "starts": [1, 2, 3], "scores": scores(3, 4, 5)}],
    }
    (_, _, line) = early([row]).splitlines()
    assert line == "| 10 experts of 32, 4 views | 0 | 5 |" + " 1.00, -0.50 |" * len(CRITERIA)


def test_a_summary_has_the_choice_of_each_criterion() -> None:
    starts = [{"accuracy": each, "nmi": 1 - each} for each in (0.5, 0.9, 0.7)]
    summary = summarise({"margin": [1.0, 3.0, 2.0], "energy": [7.0, 5.0, 6.0]}, starts)
    assert summary["nmi"]["by"] == {"margin": pytest.approx(0.1), "energy": 0.5}
    found = summary["accuracy"]
    assert found["all"] == pytest.approx(0.7)
    assert found["best"] == 0.9
    assert found["by"] == {"margin": 0.9, "energy": 0.5}
    assert found["rank"] == {"margin": pytest.approx(1), "energy": pytest.approx(-1)}


def test_held_out_energy_is_that_of_the_capsules_of_each_encoder(generator: Generator) -> None:
    model = ModelOptions(features=8, capsule_dim=4, experts=((3, 5),))
    images = load("mnist-sample").subset(range(7))
    network = CapsuleNetwork(Architecture.of(model, images.shape), generator=generator).eval()
    starts = [cast("CapsuleExperts", copy.deepcopy(network.encoders[0])) for _ in range(2)]
    starts[1].reset_parameters(std=1.0, generator=generator)
    found = mean_energies(network, starts, images)
    x = network.capsules(images.batch(slice(None)))
    expected = [-each.free_energy(x).mean().item() for each in starts]
    assert found == pytest.approx(expected)
    assert found[0] != pytest.approx(found[1])


def test_a_row_can_have_other_filters_and_encoders() -> None:
    options = make_parser().parse_args(["--filters", "32", "--restarts", "2"])
    config = config_of(Job("10 experts of 32, 4 views", 3, options))
    assert (config.model.features, config.encoder.restarts, config.seed) == (32, 2, 3)
    usual = config_of(Job("10 experts of 32, 4 views", 3, make_parser().parse_args([])))
    assert (usual.model.features, usual.encoder.restarts) == (128, RESTARTS)


def test_scores_that_no_row_has_get_no_column() -> None:
    starts = [{"accuracy": 0.25, "nmi": 0.5, "purity": 0.75}]
    row = {"variant": "10 experts of 32", "seed": 0}
    old, new = (
        table([row | {"summary": summarise({name: [1.0] for name in names}, starts)}])
        for names in (CRITERIA, (*CRITERIA, HELD_OUT_ENERGY))
    )
    assert "by energy" in old
    assert HELD_OUT_ENERGY not in old
    assert f"by {HELD_OUT_ENERGY}" in new
    assert f"rank {HELD_OUT_ENERGY}" in new


def test_ranks_do_not_depend_on_sizes() -> None:
    assert rank_correlation([1, 2, 3, 4], [1, 10, 100, 1000]) == pytest.approx(1)
    assert rank_correlation([1, 2, 3, 4], [2, 1, 4, 3]) == pytest.approx(0.6)
    assert rank_correlation([1, 1, 2], [5, 5, 9]) == pytest.approx(1)
    assert rank_correlation([1, 1, 1], [1, 2, 3]) == 0


def test_encoders_with_more_experts_than_classes_are_compared_by_purity() -> None:
    starts = [{"accuracy": 0.25, "nmi": 0.5, "purity": 0.75}]
    summary = summarise({name: [1.0] for name in CRITERIA}, starts)
    names = ("10 experts of 32", "20 experts of 16")
    text = table([{"variant": name, "seed": 0, "summary": summary} for name in names])
    ten, twenty = text.split("\n\n")
    assert "encoder, accuracy" in ten
    assert "| 10 experts of 32 | 1 | 0.250 |" in ten
    assert "encoder, purity" in twenty
    assert "| 20 experts of 16 | 1 | 0.750 |" in twenty


def test_the_gain_of_a_part_is_the_mean_difference_between_equal_seeds() -> None:
    def row(name: str, seed: int, accuracy: float) -> dict[str, object]:
        starts = [
            {"accuracy": accuracy - 0.1, "nmi": 0.5},
            {"accuracy": accuracy + 0.1, "nmi": 0.5},
        ]
        summary = summarise({name: [1.0, 2.0] for name in CRITERIA}, starts)
        return {"variant": name, "seed": seed, "summary": summary, "starts": starts}

    whole = "10 experts of 32, 4 views"
    rows = [row(whole, seed, accuracy) for seed, accuracy in enumerate((0.8, 0.7, 0.9))]
    rows += [row(f"{whole}, no routing", seed, accuracy) for seed, accuracy in ((0, 0.6), (1, 0.6))]
    _, _, *lines = effects(rows, "4 views").splitlines()
    cells = {line.split(" | ")[0].removeprefix("| "): line.split(" | ")[1:5] for line in lines}
    assert cells["routing"] == ["2", "0.600", "0.750", "+0.150 ± 0.100"]
    assert cells["best of several encoders"] == ["3", "0.800", "0.900", "+0.100 ± 0.000"]
    assert "views" not in cells  # not measured


def test_the_gain_of_a_part_with_one_seed_has_the_error_of_independent_encoders() -> None:
    def row(name: str, *accuracies: float) -> dict[str, object]:
        starts = [{"accuracy": each, "nmi": each / 2} for each in accuracies]
        ranked = [float(number) for number in range(len(starts))]
        summary = summarise(dict.fromkeys(CRITERIA, ranked), starts)
        return {"variant": name, "seed": 0, "summary": summary, "starts": starts}

    whole = "10 experts of 32, 4 views"
    rows = [row(whole, 0.7, 0.8, 0.9), row(f"{whole}, no routing", 0.5, 0.5, 0.6, 0.6)]
    _, _, *lines = effects(rows, "4 views").splitlines()
    cells = {line.split(" | ")[0].removeprefix("| "): line.split(" | ")[1:] for line in lines}
    # The variances are 0.01 and 0.01/3: 2 √(0.01/3 + 0.01/12) = 0.1291.
    assert cells["routing"][:4] == ["1", "0.550", "0.800", "+0.250 ± 0.129"]
    assert cells["routing"][6] == "+0.125 ± 0.065 |"
    assert cells["best of several encoders"][3] == "+0.100"  # a choice has no error
    assert part_gain(rows, "4 views", "routing", "accuracy") == "+0.250 ± 0.129"
