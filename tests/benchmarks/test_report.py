"""The page of results: its tables are those of the numbers beside it, and these belong to commands of today."""

from __future__ import annotations

import json
from statistics import fmean
from typing import TYPE_CHECKING, Any

import pytest

from benchmarks import report
from benchmarks.report import PEERS, SETS, defaults, fill, lay_out, main, numbers, peers_named
from benchmarks.study import STUDY, find
from poecaps.training.config import command

if TYPE_CHECKING:
    from pathlib import Path

PAGES = (report.NUMBERS.parents[1] / "README.md", report.NUMBERS.parent / "results.md")


def test_the_tables_of_the_pages_are_those_of_the_numbers() -> None:
    asked = set()
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        asked |= {mark[1].split()[0] for mark in report.MARK.findall(text)}
        assert fill(text) == text, "run: python -m benchmarks.report README.md docs/results.md"
    assert asked == set(report.TABLES)


@pytest.mark.parametrize("data", SETS)
def test_every_row_says_the_command_that_makes_it_today(data: str) -> None:
    rows = numbers(data, "study")
    for row in rows:
        config = STUDY[row["variant"]].config(data=data, seed=row["seed"])
        assert row["command"] == command(config), row["variant"]
        assert row["evaluation"]["samples"] == 10_000
        assert row["evaluation"]["training_images"] == 60_000
    assert len({(row["variant"], row["seed"]) for row in rows}) == len(rows)
    assert [row["seed"] for row in rows if row["variant"] == "default"] == [0, 1, 2]
    if data == "mnist":
        assert {row["variant"] for row in rows} == set(STUDY)
    assert {each["run"] for each in numbers(data, "claims")} <= set(STUDY)


@pytest.mark.parametrize("data", SETS)
def test_every_peer_has_three_seeds(data: str) -> None:
    for name in PEERS:
        seeds = [each["seed"] for each in peers_named(data, name)]
        assert seeds == ([0] if name == "pixels" else [0, 1, 2])


@pytest.mark.parametrize("data", SETS)
def test_the_targets_are_met(data: str) -> None:
    def values(results: list[Any], where: str) -> list[float]:
        found = [find(each, where) for each in results]
        assert None not in found
        return [each for each in found if each is not None]

    def mean(where: str) -> float:
        return fmean(values(list(defaults(data)), where))

    mnist = data == "mnist"
    assert mean("probe.test_accuracy") >= (0.96 if mnist else 0.85)
    assert mean("domains.joint.recognisability.share") >= (0.8 if mnist else 0.65)
    assert mean("experts.recognisability.share") >= (0.8 if mnist else 0.6)
    assert mean("specialisation.normalised") >= 0.45
    assert mean("effective_rank") >= 15
    assert mean("domains.restricted.negatives.share") == 0
    for name in ("bernoulli-rbm", "gaussian-rbm", "vae"):
        for domain in PEERS[name][1]:
            theirs = fmean(values(list(peers_named(data, name)), f"domains.{domain}.frechet.distance"))
            assert mean("domains.joint.frechet.distance") < theirs


def test_a_page_is_filled_between_its_marks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def evaluation(share: float) -> dict[str, Any]:
        spread = dict.fromkeys(("thickness", "slant", "width", "height"), share)
        return {"experts": {"purity": {"mean": share}, "variety": {"mean": 0.5}, "variation": spread}}

    rows = [{"variant": "default", "evaluation": evaluation(share)} for share in (0.6, 0.8)]
    for data in SETS:
        (tmp_path / f"{data}-study.json").write_text(json.dumps(rows))
    monkeypatch.setattr(report, "NUMBERS", tmp_path)
    page = tmp_path / "page.md"
    page.write_text("before\n\n<!-- table: experts -->\n| old |\n| --- |\n\nafter\n")
    main([str(page)])
    before, table, after = page.read_text().split("\n\n")
    assert (before, after) == ("before", "after\n")
    mark, head, _, *lines = table.split("\n")
    assert mark == "<!-- table: experts -->"
    assert head == "|  | purity | variety | thickness | slant | width | height |"
    assert lines[0] == (
        "| MNIST | 70.0 % ± 14.1 % | 50.0 % ± 0.0 % | 70 % ± 14 % | 70 % ± 14 % | 70 % ± 14 % | 70 % ± 14 % |"
    )
    assert len(lines) == 2
    with pytest.raises(KeyError, match="nothing"):
        fill("<!-- table: nothing -->\n")


def test_tables_have_texts_to_the_left_and_numbers_to_the_right() -> None:
    assert lay_out(["", "a", "b"], [["x", "1", "2"]], texts=2) == "|  | a | b |\n| --- | --- | ---: |\n| x | 1 | 2 |"
