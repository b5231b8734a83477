"""Stand-in for `run_training` and `resume_training` of `poecaps.training`.

To be deleted once `poecaps.training` has them: `train` then imports them from there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from poecaps.plotting import read_metrics
from poecaps.training import resume, train
from poecaps.training.loop import METRICS

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from poecaps.data import ImageSet
    from poecaps.network import CapsuleNetwork
    from poecaps.training import Config, Progress

    Report = Callable[[Progress], None]
    Found = Callable[[ImageSet], None]


@dataclass(frozen=True, eq=False)
class TrainingResult:
    """The result of a run; `data` is None if a finished run was only opened."""

    network: CapsuleNetwork
    folder: Path
    data: ImageSet | None
    metrics: dict[str, dict[str, float]]


def run_training(config: Config, folder: Path, *, report: Report, found: Found) -> TrainingResult:
    """Train a network."""
    images: list[ImageSet] = []
    network = train(config, folder, report=report, found=lambda each: _note(each, images, found))
    return _result(network, folder, images)


def resume_training(
    folder: Path, *, device: str | None, report: Report, found: Found
) -> TrainingResult:
    """Resume a run."""
    images: list[ImageSet] = []
    network = resume(
        folder, device=device, report=report, found=lambda each: _note(each, images, found)
    )
    return _result(network, folder, images)


def _note(each: ImageSet, images: list[ImageSet], found: Found) -> None:
    images.append(each)
    found(each)


def _result(network: CapsuleNetwork, folder: Path, images: list[ImageSet]) -> TrainingResult:
    path = folder / METRICS
    stages = read_metrics(path) if path.is_file() and path.stat().st_size else {}
    metrics = {
        stage: {name: float(points[-1, 1]) for name, points in curves.items()}
        for stage, curves in stages.items()
    }
    return TrainingResult(network, folder, images[0] if images else None, metrics)
