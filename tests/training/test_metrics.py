"""The file of running metrics."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from poecaps._files import MAX_JSON
from poecaps.training import Progress
from poecaps.training.metrics import METRICS, MetricsLog, last_values, read_metrics

if TYPE_CHECKING:
    from pathlib import Path

STAGES = ("autoencoder", "encoder 1", "decoder 1")


def at(stage: str, step: int, **metrics: float) -> Progress:
    return Progress(
        stage=stage,
        number=STAGES.index(stage) + 1,
        stages=len(STAGES),
        step=step,
        steps=20,
        epoch=step / 10,
        epochs=2,
        total_step=step,
        images_per_second=1234.56,
        seconds_left=1.0,
        run_seconds_left=2.0,
        metrics=metrics,
        measured=True,
    )


def write(path: Path, *entries: dict[str, Any], end: str = "\n") -> Path:
    path.write_text("\n".join(map(json.dumps, entries)) + end, encoding="utf-8")
    return path


def test_metrics_are_read_back_as_curves(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path)
    log.append(at("autoencoder", 5, loss=0.5, reconstruction_error=0.9))
    log.append(at("autoencoder", 10, loss=0.25, reconstruction_error=0.8))
    log.append(at("encoder 1", 5, loss=-1.0, firing=0.5))
    line = json.loads((tmp_path / METRICS).read_text().splitlines()[0])
    assert line == {
        "stage": "autoencoder",
        "step": 5,
        "epoch": 0.5,
        "loss": 0.5,
        "reconstruction_error": 0.9,
        "images_per_second": 1234.6,
    }
    curves = read_metrics(tmp_path / METRICS)
    assert {stage: list(curves[stage]) for stage in curves} == {
        "autoencoder": ["loss", "reconstruction_error"],
        "encoder 1": ["loss", "firing"],
    }
    assert np.array_equal(curves["autoencoder"]["loss"], [[0.5, 0.5], [1.0, 0.25]])
    assert last_values(tmp_path / METRICS) == {
        "autoencoder": {"loss": 0.25, "reconstruction_error": 0.8},
        "encoder 1": {"loss": -1.0, "firing": 0.5},
    }


def test_lines_after_the_checkpoint_are_removed(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path)
    for stage in STAGES:
        for step in (5, 10, 15):
            log.append(at(stage, step, loss=1.0))
    with log.path.open("ab") as file:
        file.write(b'\xff\xfe{"stage": "autoencoder", "st')
    log.truncate_after(1, 10, STAGES)
    lines = [json.loads(line) for line in log.path.read_text().splitlines()]
    assert [(line["stage"], line["step"]) for line in lines] == [
        ("autoencoder", 5),
        ("autoencoder", 10),
        ("autoencoder", 15),
        ("encoder 1", 5),
        ("encoder 1", 10),
    ]


def test_a_run_without_metrics_has_nothing_to_truncate_and_no_values(tmp_path: Path) -> None:
    MetricsLog(tmp_path).truncate_after(0, 0, STAGES)
    assert not (tmp_path / METRICS).exists()
    assert last_values(tmp_path / METRICS) == {}
    (tmp_path / METRICS).touch()
    assert last_values(tmp_path / METRICS) == {}


def test_curves_are_sorted_by_epoch_and_the_last_line_of_an_epoch_counts(tmp_path: Path) -> None:
    entries = [
        {"stage": "encoder 1", "epoch": epoch, "loss": loss}
        for epoch, loss in ((1.0, 4), (2, 3), (1, 2), (0.5, 1))
    ]
    curves = read_metrics(write(tmp_path / METRICS, *entries))
    assert curves["encoder 1"]["loss"].tolist() == [[0.5, 1], [1, 2], [2, 3]]


def test_a_last_line_that_a_crash_has_cut_is_ignored(tmp_path: Path) -> None:
    whole = {"stage": "encoder 1", "epoch": 1, "loss": 2.0}
    path = write(tmp_path / METRICS, whole)
    expected = read_metrics(path)["encoder 1"]["loss"]
    path.write_text(path.read_text() + '{"stage": "enc')
    assert np.array_equal(read_metrics(path)["encoder 1"]["loss"], expected)
    assert np.array_equal(read_metrics(write(path, whole, end=""))["encoder 1"]["loss"], expected)


@pytest.mark.parametrize(
    "line",
    ["no JSON", "[1, 2]", '{"epoch": 1}', '{"stage": "encoder 1"}', '{"stage": 1, "epoch": 1}',
     '{"stage": "encoder 1", "epoch": true}', f'{{"stage": "encoder 1", "epoch": 1{"0" * 400}}}',
     "[" * 60 + "]" * 60, "[" * 5000],
)  # fmt: skip
def test_an_invalid_line_is_named(line: str, tmp_path: Path) -> None:
    path, good = tmp_path / METRICS, '{"stage": "encoder 1", "epoch": 1, "loss": 1}'
    path.write_text(f"{good}\n\n{line}\n{good}\n", encoding="utf-8")
    message = (
        f"{path}, line 3, must be a JSON object with a stage and an epoch, but is {line[:80]!r}"
    )
    with pytest.raises(ValueError, match=re.escape(message) + "; correct or delete the line"):
        read_metrics(path)


@pytest.mark.parametrize("text", ["", "\n", '{"stage": "encoder 1", "epoch": 1, "step": 3}\n'])
def test_a_file_without_metrics_is_an_error(text: str, tmp_path: Path) -> None:
    (tmp_path / METRICS).write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=r"contains no metrics; use the metrics.jsonl of a run"):
        read_metrics(tmp_path / METRICS)


def test_a_number_that_no_float_can_hold_is_no_metric(tmp_path: Path) -> None:
    path = write(tmp_path / METRICS, {"stage": "encoder 1", "epoch": 1, "loss": 2, "x": 10**400})
    assert last_values(path) == {"encoder 1": {"loss": 2.0}}


def test_a_line_that_is_nested_too_deeply_is_removed(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path)
    log.append(at("autoencoder", 1, loss=1.0))
    good = log.path.read_text()
    log.path.write_text("[" * 5000 + "\n" + good)
    log.truncate_after(1, 1, STAGES)
    assert log.path.read_text() == good


@pytest.mark.parametrize(
    "entries",
    [
        [{"stage": f"encoder {number}", "epoch": 1, "loss": 1} for number in range(400)],
        [{"stage": "autoencoder", "epoch": 1, f"loss {number}": 1} for number in range(40)],
        [{"stage": "autoencoder", "epoch": 1, "x" * 200: 1}],
        [{"stage": "x" * 200, "epoch": 1, "loss": 1}],
    ],
)
def test_more_metrics_than_a_run_has_are_refused(
    entries: list[dict[str, Any]], tmp_path: Path
) -> None:
    path = write(tmp_path / METRICS, *entries)
    for read in (read_metrics, last_values):
        with pytest.raises(
            ValueError, match=r"is not from a run: there may be 300 stages and 30 m"
        ):
            read(path)


def test_a_line_without_an_end_and_a_file_without_an_end_are_refused(tmp_path: Path) -> None:
    line = json.dumps({"stage": "autoencoder", "epoch": 1, "loss": 1}).encode() + b"\n"
    path = tmp_path / METRICS
    path.write_bytes(line + b" " * 10**5 + line)
    for read in (read_metrics, last_values):
        with pytest.raises(ValueError, match=r"line 2, must be a JSON object with a stage"):
            read(path)
    with path.open("ab") as file:
        file.truncate(MAX_JSON + 1)
    with pytest.raises(ValueError, match=r"too large to draw curves: it may have 67,108,864 bytes"):
        read_metrics(path)
