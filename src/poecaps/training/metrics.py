"""The running metrics of a training run, one JSON object per line in `metrics.jsonl`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np

from poecaps._files import append_line, atomic_write, parse_json, read_bytes
from poecaps._json import is_number

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from poecaps.training.progress import Progress

    Array = np.ndarray[Any, Any]

METRICS = "metrics.jsonl"
# Numbers of a line that have no curve.
NOT_METRICS = ("step", "epoch", "images_per_second", "seconds")


class MetricsLog:
    """The file `metrics.jsonl` in the folder of a run."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / METRICS

    def append(self, progress: Progress) -> None:
        """Write a line with the metrics of a progress report."""
        line = {
            "stage": progress.stage,
            "step": progress.step,
            "epoch": progress.epoch,
            **progress.metrics,
            "images_per_second": round(progress.images_per_second, 1),
        }
        append_line(self.path, json.dumps(line))

    def truncate_after(self, stage: int, step: int, stages: Sequence[str]) -> None:
        """Remove the lines after a step, which a resumed run writes again, and incomplete lines.

        Parameters
        ----------
        stage, step
            Index of the stage, and last step to keep.
        stages
            Names of all stages, in order.
        """
        if not self.path.exists():
            return
        text = read_bytes(self.path).decode("utf-8", errors="replace")
        kept = [line for line in text.splitlines() if _is_until(line, stage, step, stages)]
        with atomic_write(self.path) as file:
            file.write("".join(f"{line}\n" for line in kept).encode())


def _is_until(line: str, stage: int, step: int, stages: Sequence[str]) -> bool:
    try:
        entry = parse_json(line)
        return bool((stages.index(entry["stage"]), entry["step"]) <= (stage, step))
    except (ValueError, TypeError, KeyError):  # cut off by a crash
        return False


def read_metrics(path: Path) -> dict[str, dict[str, Array]]:
    """Read the curves of a run.

    A last line that is cut off, as after a crash, is ignored.

    Parameters
    ----------
    path
        The `metrics.jsonl` of a run.

    Returns
    -------
    dict
        For each stage and each metric, both in the order of the file, the points (epoch, value) of
        a curve: (P, 2), sorted by epoch.

    Raises
    ------
    ValueError
        If a line is not a JSON object with a stage and an epoch, or if there are no metrics.
    """
    curves: dict[str, dict[str, dict[float, float]]] = {}
    lines = read_bytes(path).split(b"\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            entry = parse_json(line)
        except ValueError:
            if number == len(lines):  # no newline: the process crashed while it wrote this line
                break
            entry = None
        if (
            not isinstance(entry, dict)
            or not isinstance(entry.get("stage"), str)
            or not is_number(entry.get("epoch"))
        ):
            raise ValueError(
                f"{path}, line {number}, must be a JSON object with a stage and an epoch, but is "
                f"{line[:80].decode(errors='replace')!r}; correct or delete the line"
            )
        for name, value in entry.items():
            if name not in NOT_METRICS and is_number(value):
                points = curves.setdefault(entry["stage"], {}).setdefault(name, {})
                points[entry["epoch"]] = value
    if not curves:
        raise ValueError(
            f"{path} contains no metrics; use the {METRICS} of a run that has taken a step"
        )
    return {
        stage: {name: np.array(sorted(points.items()), float) for name, points in metrics.items()}
        for stage, metrics in curves.items()
    }


def last_values(path: Path) -> dict[str, dict[str, float]]:
    """Read the last value of each metric of each stage; none from a missing or empty file.

    Raises
    ------
    ValueError
        As `read_metrics`.
    """
    if not path.is_file() or not path.stat().st_size:
        return {}
    return {
        stage: {name: float(points[-1, 1]) for name, points in curves.items()}
        for stage, curves in read_metrics(path).items()
    }
