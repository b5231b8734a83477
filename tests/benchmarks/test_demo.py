"""The numbers of README.md and docs/training.md about `make demo`."""

from __future__ import annotations

import json
import re
import shlex
from typing import TYPE_CHECKING, Any

import pytest

from benchmarks import demo
from tests.cli.conftest import SMALL

if TYPE_CHECKING:
    from pathlib import Path

PAGES = (demo.README, demo.TRAINING)


def page(name: str) -> str:
    return (demo.ROOT / name).read_text(encoding="utf-8")


def shares(complete: float, restricted: float, joint: float, real: float) -> dict[str, Any]:
    def samples(share: float) -> dict[str, Any]:
        return {"recognisability": {"share": share}}

    domains = {"complete": complete, "restricted": restricted, "joint": joint}
    return {
        "domains": {name: samples(share) for name, share in domains.items()},
        "training_samples": samples(real),
    }


REPORT: dict[str, Any] = {
    "output": ["1/4 autoencoder    epoch 3.0/3", "trained in 299 s; the model is in runs/demo"],
    "peak_bytes": 7_654_321_000,
    "machine": {"torch": "9.8.7+cpu"},
    "evaluation": shares(0.111, 0.222, 0.333, 0.444),
}


@pytest.mark.parametrize("name", PAGES)
def test_the_pages_have_the_numbers_of_the_run(name: str) -> None:
    report = json.loads(demo.REPORT.read_text(encoding="utf-8"))
    assert demo.fill(name, page(name), report) == page(name)
    (train,) = demo.recipe("demo", demo.FOLDER)
    assert report["commands"][0] == shlex.join(["poecaps", *train])
    assert report["evaluation"]["samples"] == demo.SAMPLES


def test_another_run_changes_every_number_and_nothing_else() -> None:
    readme, training = (demo.fill(name, page(name), REPORT) for name in PAGES)
    for text in (
        "digits in 299 s on two cores of a CPU with AVX-512",
        "```text\n1/4 autoencoder    epoch 3.0/3\ntrained in 299 s; the model is in runs/demo\n```",
        "torch 9.8.7,\nat most 7.7 GB of memory",
        "certain of 33.3 % of such draws,\nand of 44.4 % of real digits",
    ):
        assert text in readme
    for text in (
        "1 and 3) in 299 s on two cores (a server CPU with AVX-512 and bfloat16, torch 9.8.7).",
        "`make demo` took 7.7 GB.",
        "Of 2,000 draws, 11.1 % and 22.2 % are recognisable",
    ):
        assert text in training
    assert demo.fill(demo.README, readme, REPORT) == readme
    for name, filled in zip(PAGES, (readme, training), strict=True):
        ours, theirs = (re.split(r"\n\n+", text) for text in (page(name), filled))
        assert len(ours) == len(theirs)
        assert sum(a != b for a, b in zip(ours, theirs, strict=True)) <= len(demo.PARTS)


def test_a_page_without_a_part_raises_an_error() -> None:
    with pytest.raises(ValueError, match=r"must have .* once, but has it 0 times"):
        demo.fill(demo.README, "nothing", REPORT)


def test_only_the_end_of_each_stage_is_shown() -> None:
    lines = ["found images", "1/2 a  starts", "1/2 a  epoch 1", "2/2 b  starts", "2/2 b  epoch 3"]
    assert demo.shown([*lines, "trained in 3 s", "more"]) == [
        "1/2 a  epoch 1",
        "2/2 b  epoch 3",
        "trained in 3 s",
        "more",
    ]


def test_a_small_run_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("resource")
    monkeypatch.setattr(demo, "SAMPLES", 20)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(demo, "PICTURES", ("joint",))
    report = demo.measure([*SMALL, "--images", "100"], tmp_path)
    assert report["output"][0].startswith("1/4 autoencoder    epoch 1.0/1  ")
    assert report["output"][4].startswith("trained in ")
    assert report["output"][-1].endswith("poecaps explore runs/demo")
    assert report["peak_bytes"] > 1e8
    assert report["config"]["autoencoder"]["epochs"] == 1
    assert (tmp_path / "joint.png").is_file()
    for name in PAGES:
        assert demo.fill(name, page(name), report) != page(name)
