"""The tables of the documentation agree with the numbers in docs/results."""

from __future__ import annotations

import json
import re
from statistics import fmean
from typing import TYPE_CHECKING, Any

import pytest

from benchmarks import criteria, report
from benchmarks.internals import command_for
from benchmarks.report import (
    BASELINES,
    DATASETS,
    baseline_evaluations,
    default_evaluations,
    fill,
    main,
    markdown_table,
    numbers,
    targets,
)
from benchmarks.routing import ORDERS
from benchmarks.study import STUDY
from benchmarks.variants import Job, lookup

if TYPE_CHECKING:
    from pathlib import Path

SPEED = report.NUMBERS.parent / "benchmarks.md"


def test_the_tables_agree_with_the_numbers() -> None:
    asked = set()
    for page in report.pages():
        text = page.read_text(encoding="utf-8")
        asked |= {mark[1].split()[0] for mark in report.MARK.findall(text)}
        assert fill(text) == text, "run: make report"
    assert asked == set(report.TABLES)
    assert {"README.md", "results.md", "benchmarks.md"} <= {page.name for page in report.pages()}


@pytest.mark.parametrize("data", DATASETS)
def test_every_row_has_the_current_command_of_its_variant(data: str) -> None:
    rows = numbers(data, "study")
    for row in rows:
        config = STUDY[row["variant"]].config(data=data, seed=row["seed"])
        assert row["command"] == command_for(config), row["variant"]
        assert row["evaluation"]["samples"] == 10_000
        assert row["evaluation"]["training_images"] == 60_000
    assert len({(row["variant"], row["seed"]) for row in rows}) == len(rows)
    assert [row["seed"] for row in rows if row["variant"] == "default"] == [0, 1, 2]
    if data == "mnist":
        assert {row["variant"] for row in rows} == set(STUDY)
    assert {each["run"] for each in numbers(data, "claims")} <= set(STUDY)


def leaves(tree: Any) -> dict[str, float]:
    """Return the numbers of nested dictionaries by their paths."""
    if not isinstance(tree, dict):
        return {"": tree}
    return {
        f"{name}.{path}": value
        for name, each in tree.items()
        for path, value in leaves(each).items()
    }


SMALL_CRITERIA = {  # name of the file: data, options that differ, and held-out images
    "mnist-fast": ("mnist", ["--filters", "32", "--restarts", "2"], 10_000),
    "mnist-sample": ("mnist-sample", ["--filters", "32", "--restarts", "4"], 2000),
    "fashion-mnist-sample": ("fashion-mnist-sample", ["--filters", "32", "--restarts", "4"], 2000),
}


@pytest.mark.parametrize("name", [*DATASETS, *SMALL_CRITERIA])
def test_every_row_of_the_criteria_has_the_current_command_and_all_encoders(name: str) -> None:
    data, arguments, held_out = SMALL_CRITERIA.get(name, (name, [], criteria.HELD_OUT))
    options = criteria.make_parser().parse_args(arguments)
    rows = numbers(name, "criteria")
    for row in rows:
        options.data = data
        config = criteria.config_of(Job(row["variant"], row["seed"], options))
        assert row["command"] == command_for(config), row["variant"]
        assert row["held_out"] == held_out
        summary = criteria.summarise(row["scores"], row["starts"])
        assert leaves(row["summary"]) == pytest.approx(leaves(summary))
        compared = [*row.get("halvings", []), {"starts": row.get("numbers", row["starts"])}]
        assert len(compared[0]["starts"]) == (
            config.encoder.recombinations or config.encoder.restarts
        )
        assert len(compared[-1]["starts"]) == len(row["starts"])
    assert len({(row["variant"], row["seed"]) for row in rows}) == len(rows)


@pytest.mark.parametrize("data", DATASETS)
def test_every_baseline_has_three_seeds(data: str) -> None:
    for name in BASELINES:
        seeds = [each["seed"] for each in baseline_evaluations(data, name)]
        assert seeds == ([0] if name == "pixels" else [0, 1, 2])


@pytest.mark.parametrize("data", DATASETS)
def test_the_targets_that_are_on_equal_terms_are_met(data: str) -> None:
    def values(results: list[Any], path: str) -> list[float]:
        found = [lookup(each, path) for each in results]
        assert None not in found
        return [each for each in found if each is not None]

    def mean(path: str) -> float:
        return fmean(values(list(default_evaluations(data)), path))

    mnist = data == "mnist"
    assert mean("probe.test_accuracy") >= (0.96 if mnist else 0.85)
    assert mean("domains.joint.recognisability.share") >= (0.8 if mnist else 0.65)
    assert mean("experts.recognisability.share") >= (0.8 if mnist else 0.6)
    assert mean("specialisation.normalised") >= 0.45
    assert mean("domains.restricted.negatives.share") == 0


def test_the_distance_of_samples_stands_beside_those_on_equal_terms() -> None:
    """Without the pixel decoder, which the baselines do not have, the VAE is closer."""
    for data in DATASETS:
        (row,) = (line for line in targets(data).splitlines() if "Fréchet" in line)
        *_, without, vae = (cell.split(" ± ")[0].strip() for cell in row.strip("| ").split("|"))
        assert float(vae) < float(without)
        assert "not on equal terms" in row


def test_the_tables_of_a_page_are_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def evaluation(share: float) -> dict[str, Any]:
        spread = dict.fromkeys(("thickness", "slant", "width", "height"), share)
        return {
            "experts": {"purity": {"mean": share}, "variety": {"mean": 0.5}, "variation": spread}
        }

    rows = [{"variant": "default", "evaluation": evaluation(share)} for share in (0.6, 0.8)]
    for data in DATASETS:
        (tmp_path / f"{data}-study.json").write_text(json.dumps(rows))
    monkeypatch.setattr(report, "NUMBERS", tmp_path)
    page = tmp_path / "page.md"
    page.write_text("before\n\n<!-- table: experts -->\n| old |\n| --- |\n\nafter\n")
    main([str(page)])
    before, table, after = page.read_text().split("\n\n")
    assert (before, after) == ("before", "after\n")
    mark, head, _, *lines = table.split("\n")
    assert mark == "<!-- table: experts -->"
    assert head == "| dataset | purity | variety | thickness | slant | width | height |"
    assert lines[0] == (
        "| MNIST | 70.0 % ± 14.1 % | 50.0 % ± 0.0 % "
        "| 70 % ± 14 % | 70 % ± 14 % | 70 % ± 14 % | 70 % ± 14 % |"
    )
    assert len(lines) == 2
    with pytest.raises(KeyError, match="nothing"):
        fill("<!-- table: nothing -->\n")


def test_every_table_of_the_speed_page_has_numbers() -> None:
    marks = report.MARK.finditer(SPEED.read_text(encoding="utf-8"))
    missing = [
        mark[2] for mark in marks if not report.TABLES[mark[2].split()[0]](*mark[2].split()[1:])
    ]
    assert missing == [], "measure it, and run: make report"
    for picture in re.findall(r"\]\((images/[^)]+)\)", SPEED.read_text(encoding="utf-8")):
        assert (SPEED.parent / picture).is_file(), picture


def step(seconds: float, ratio: float, **more: Any) -> dict[str, Any]:
    spread = {"median_s": seconds, "min_s": seconds / 2, "max_s": 2 * seconds, "rounds": 3}
    return {
        "order": None,
        "times_poecaps": ratio,
        "extra_bytes": 10**7,
        "flop_per_s": 1e12,
        **spread,
        **more,
    }


@pytest.fixture
def measured_elsepath(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write numbers of speed in the format of the benchmarks."""
    machine = {
        "device": "a GPU",
        "python": "3",
        "torch": "2",
        "cuda": "13",
        "triton": "3",
        "poecaps": "0",
    }
    common = {"machine": machine, "command": "python -m benchmarks"}
    rates = {"copy_bytes_per_s": 4e12, "float32_flop_per_s": 5e13, "bfloat16_flop_per_s": 8e14}
    versions = {
        "poecaps, Triton": step(1e-4, 1.0, bytes_per_s=1e12),
        "poecaps, Triton, CUDA graph": step(5e-5, 1.0, extra_bytes=None),
        "einsum, eager": step(2e-3, 20.0, order="votes once", extra_bytes=4 * 10**8),
        "einsum, eager, CUDA graph": step(1e-3, 20.0, order="votes once", extra_bytes=None),
        "einsum, compiled": step(5e-4, 5.0, order="no votes"),
        "einsum, compiled, CUDA graph": {
            "order": "no votes",
            "failed": "not while a stream is captured",
        },
    }
    orders = {order: step(1e-3, 10.0) for order in ORDERS}
    rung = {"seconds": 0.5, "peak_bytes": 2**30, "finite": True}
    routing = {
        **common,
        "ceilings": rates | {"tf32_flop_per_s": 4e14},
        "steps": {"256": versions, "1024": versions},
        "orders": {"256": {"eager": orders, "compiled": orders}},
        "decoder": {"256": {"poecaps, Triton": step(1e-4, 1.0), "reference": step(1e-3, 10.0)}},
    }
    sizes = {
        **common,
        "growth": {"batch": {"64": versions, "256": versions}},
    }
    largest = {
        "poecaps, Triton, SGD": {"10000": rung, "1000000": rung},
        "poecaps, Triton, Adam": {"10000": rung, "1000000": None},
    }
    samplers = {
        "poecaps": step(2e-3, 2.0, difference=1e-8),
        "poecaps, replayed": step(1e-3, 1.0, difference=1e-8),
        "einsum and autograd": step(7e-3, 7.0, difference=0.0),
    }
    replays = {
        "poecaps, Triton, CUDA graph": step(1e-3, 1.0),
        "einsum, compiled, CUDA graph": step(7e-3, 7.0, order="votes"),
        "einsum, compiled, no votes, CUDA graph": {"failed": "not while a stream is captured"},
    }
    of_batch = step(1e-3, 1.0, precision="bfloat16", images_per_s=128e3, flop_per_image=6e8) | {
        "flop_per_s": 4e14
    }
    parts = {"reading files": step(0.1, 1.0), "total": step(9.0, 1.0)}
    quality = dict.fromkeys((path for path, *_ in report.TARGETS.values()), 0.5)
    rounds = [{"seed": seed, "total_s": 9.0, "parts": {}, "quality": quality} for seed in (0, 1)]
    setup = {"interpreter and imports": None, "GPU context": 1.25}
    files = {
        "routing-cuda": routing,
        "routing-sizes-cuda": sizes,
        "largest-cuda": {**common, "largest": largest},
        "sampler-cuda": {**common, "cases": {"20×16": samplers}},
        "passes-cuda": {**common, "threads": {"16": {"forward and backward": replays}}},
        "autoencoder-cuda": {**common, "ceilings": rates, "batches": {"128": of_batch}},
        "pipeline-cuda": {**common, "setup": setup, "rounds": [], "summary": parts},
        "pipeline-quality-cuda": {**common, "rounds": rounds},
        "libraries-cuda": {
            **common,
            "optimizer": {"a step": {"ours": step(1e-3, 1.0)}},
            "launch": {},
            "directions": {"directions": {"streaming": step(1e-3, 1.0, memory_bytes=10**6)}},
            "eigenvectors": {"eigenvectors": {"iteration": step(1e-3, 1.0, captured=0.5)}},
        },
        "mnist-study": numbers("mnist", "study"),
    }
    for name, content in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    monkeypatch.setattr(report, "NUMBERS", tmp_path)


@pytest.mark.usefixtures("measured_elsepath")
def test_speed_tables_contain_the_measured_numbers() -> None:
    page = fill(SPEED.read_text(encoding="utf-8"))
    replayed = "eager einsum, H200, B 256, both CUDA graphs"
    assert f"| {replayed} | ≥ 14 × poecaps | 20 × poecaps | met |" in page
    compiled = "compiled einsum, H200, B 256, both launched"
    assert f"| {compiled} | ≥ 4 × poecaps | 5 × poecaps | met |" in page
    assert "| learning step, H200, B 256, launched | ≤ 350 µs | 100 µs | met |" in page
    passed = "compiled einsum, H200, B 256, forward and backward, both CUDA graphs"
    assert f"| {passed} | ≥ 6 × poecaps | 7 × poecaps | met |" in page
    assert "| forward and backward | einsum, compiled, CUDA graph (votes) | 7 |" in page
    assert (
        "compiled einsum, H200, B 256, both CUDA graphs" not in page
    )  # it failed, and another table has the reason
    assert "| failed | not while a stream is captured |" in page
    assert (
        "| extra memory, H200, B 1024 | ≤ 1/20 of eager einsum's | 1/40 of eager einsum's | met |"
        in page
    )
    assert (
        "| largest I that trains, H200, J 64, B 256, Adam | ≥ 100,000 | 10,000 | **missed** |"
        in page
    )
    assert "| autoencoder, H200, batch size 128 | ≥ 200 TFLOP/s | 400 TFLOP/s | met |" in page
    assert "| image files to Figure 2, H200, median | ≤ 5 s | 9 s | **missed** |" in page
    assert "| 256 | poecaps, Triton | 0.1 | 0.05–0.2 | 1.00 | 10 | 2 % | 0.25 % | 25 % |" in page
    assert "| 1,000,000 | 0.5 s, 1 GiB | out of memory |" in page
    assert "| 128 | bfloat16 | 1 | 0.5–2 | 128,000 | 400 | 50 % |" in page
    assert "| **total** | **9** | **4.5–18** |" in page
    assert "| *once per process:* GPU context | 1.25 |  |" in page
    sampler = "the least of all sizes, against launched einsum and autograd"
    assert (
        f"| sampler step, H200, CUDA graph, {sampler} | ≥ 4 × poecaps | 7 × poecaps | met |" in page
    )
    launched = "≥ 4 × poecaps | 3.5 × poecaps | **missed** |"
    assert f"| sampler step, H200, launched, {sampler} | {launched}" in page
    assert "| 20×16 | einsum and autograd | 7 | 3.5–14 | 7.00 | 0 |" in page
    assert "| a step: ours | 1 | 0.5–2 |  |  |" in page
    assert "| directions: streaming | 1 | 0.5–2 | 1 |  |" in page
    assert "| eigenvectors: iteration | 1 | 0.5–2 |  | 0.5000 |" in page
    assert (
        "Machine: a GPU; Python 3, torch 2, CUDA 13, triton 3, poecaps 0.\n"
        "Command: `python -m benchmarks`.\n" in page
    )
    assert "two CPU cores" not in page  # nothing was measured on a CPU
    for mark in report.MARK.finditer(page):
        lines = mark[0].splitlines()[1:]
        assert bool(lines) == (not mark[2].endswith(" cpu")), mark[2]
        if lines and lines[0].startswith("|"):
            assert len({line.count("|") for line in lines}) == 1, mark[2]


def test_text_columns_are_left_aligned_and_number_columns_right() -> None:
    assert (
        markdown_table(["", "a", "b"], [["x", "1", "2"]], texts=2)
        == "|  | a | b |\n| --- | --- | ---: |\n| x | 1 | 2 |"
    )
