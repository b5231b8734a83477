"""The running metrics of a training run, one JSON object per line in `metrics.jsonl`."""

from __future__ import annotations

import json
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np

from poecaps._files import (
    MAX_JSON,
    append_line,
    atomic_write,
    open_regular,
    parse_json,
    read_bytes,
    read_errors,
)
from poecaps._json import is_number

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from poecaps.training.progress import Progress

    Array = np.ndarray[Any, Any]

METRICS = "metrics.jsonl"
# Numbers of a line that have no curve.
NOT_METRICS = ("step", "epoch", "images_per_second", "seconds")
# Bounds for a file from elsewhere; a run has at most 203 stages, each with about 10 metrics.
MAX_LINE = 2**16  # bytes
MAX_STAGES, MAX_NAMES, MAX_NAME = 300, 30, 100  # stages, metrics of a stage, characters of a name


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
        If a line is not a JSON object with a stage and an epoch, if there are no metrics, or if
        there are more stages or metrics than a run has, or more than 64 MiB.
    """
    if path.stat().st_size > MAX_JSON:
        raise ValueError(f"{path} is too large to draw curves: it may have {MAX_JSON:,} bytes")
    curves: dict[str, dict[str, dict[float, float]]] = {}
    for stage, epoch, values in _entries(path):
        for name, value in values.items():
            curves.setdefault(stage, {}).setdefault(name, {})[epoch] = value
    return {
        stage: {name: np.array(sorted(points.items()), float) for name, points in metrics.items()}
        for stage, metrics in curves.items()
    }


def last_values(path: Path) -> dict[str, dict[str, float]]:
    """Read the last value of each metric of each stage; none from a missing or empty file.

    Raises
    ------
    ValueError
        As `read_metrics`, but the file may have any size.
    """
    if not path.is_file() or not path.stat().st_size:
        return {}
    found: dict[str, dict[str, tuple[float, float]]] = {}
    for stage, epoch, values in _entries(path):
        last = found.setdefault(stage, {})
        for name, value in values.items():
            if name not in last or epoch >= last[name][0]:
                last[name] = (epoch, value)
    return {
        stage: {name: float(value) for name, (_, value) in last.items()}
        for stage, last in found.items()
    }


def _entries(path: Path) -> Iterator[tuple[str, float, dict[str, float]]]:
    """Yield stage, epoch and metrics of each line that has metrics; see `read_metrics`."""
    names: dict[str, set[str]] = {}
    with read_errors(path), open_regular(path) as file:
        for number in count(1):
            line = file.readline(MAX_LINE + 1)
            if not line:
                break
            if len(line) <= MAX_LINE and not line.strip():
                continue
            try:
                entry = parse_json(line) if len(line) <= MAX_LINE else None
            except ValueError:
                if not line.endswith(b"\n"):  # the process crashed while it wrote this line
                    break
                entry = None
            if (
                not isinstance(entry, dict)
                or not isinstance(entry.get("stage"), str)
                or not is_number(entry.get("epoch"))
            ):
                raise ValueError(
                    f"{path}, line {number}, must be a JSON object with a stage and an epoch, but "
                    f"is {line[:80].rstrip().decode(errors='replace')!r}; correct or delete the "
                    "line"
                )
            stage = entry["stage"]
            values = {
                name: value
                for name, value in entry.items()
                if name not in NOT_METRICS and is_number(value)
            }
            if not values:
                continue
            known = names.setdefault(stage, set())
            known.update(values)
            if (
                len(names) > MAX_STAGES
                or len(known) > MAX_NAMES
                or max(map(len, (stage, *values))) > MAX_NAME
            ):
                raise ValueError(
                    f"{path}, line {number}, is not from a run: there may be {MAX_STAGES} stages "
                    f"and {MAX_NAMES} metrics of a stage, and a name may have {MAX_NAME} "
                    "characters; delete the line"
                )
            yield stage, entry["epoch"], values
    if not names:
        raise ValueError(
            f"{path} contains no metrics; use the {METRICS} of a run that has taken a step"
        )
