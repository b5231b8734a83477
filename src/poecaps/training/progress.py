"""The progress of a run, and its display: a live line on a terminal, plain lines, TensorBoard."""

from __future__ import annotations

import math
import sys
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TextIO

from poecaps._files import own_folder
from poecaps._progress import StatusLine, format_seconds

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

# Metrics in a summary: name, label and decimal places.
SUMMARY_METRICS = (
    ("reconstruction_error", "error", 3),
    ("firing", "firing", 2),
    ("effective_rank", "rank", 1),
    ("nats", "nats", 1),
    ("acceptance", "acceptance", 2),
)
STAGE_WIDTH = len("pixel decoder")  # the longest name of a stage


@dataclass(frozen=True)
class Progress:
    """The state of a run after a step, the argument of `report`."""

    stage: str
    """Name of the stage: autoencoder, encoder 1, …, decoder 1, …, pixel decoder."""
    number: int
    """Number of the stage, counted from 1."""
    stages: int
    """Number of all stages."""
    step: int
    """Steps of the stage that are done; 0 while its inputs are computed."""
    steps: int
    """All steps of the stage."""
    epoch: float
    """Epochs of the stage that are done."""
    epochs: int
    """All epochs of the stage."""
    total_step: int
    """Steps done since the start of the run, in all stages."""
    images_per_second: float
    """Speed since the stage was started or resumed; 0 before the first step."""
    seconds_left: float
    """Time to the end of the stage at that speed."""
    run_seconds_left: float
    """Time to the end of the run, with a rough estimate for the stages that follow."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Last metrics: loss, learning rate, reconstruction error, …; empty before the first ones."""
    measured: bool = False
    """Whether the metrics are new."""

    def summary(self, width: int = 1000) -> str:
        """Return one line without the name of the stage; metrics are omitted if it is too long."""
        if not self.images_per_second:  # no step since the start or the restart
            return f"resumes at epoch {self.epoch:.1f}" if self.step else "starts"
        position = [
            f"epoch {self.epoch:.1f}/{self.epochs}",
            f"{self.images_per_second:,.0f} images/s",
        ]
        metrics = [
            f"{label} {self.metrics[name]:.{digits}f}"
            for name, label, digits in SUMMARY_METRICS
            if name in self.metrics
        ]
        left = []
        if self.step < self.steps:
            later = f" (run: {format_seconds(self.run_seconds_left)})"
            last = self.number == self.stages
            left = [f"{format_seconds(self.seconds_left)} left" + ("" if last else later)]
        while metrics and len("  ".join([*position, *metrics, *left])) > width:
            metrics.pop()
        return "  ".join([*position, *metrics, *left])


class ProgressMeter:
    """Computes the progress of one stage.

    Parameters
    ----------
    epochs
        Names of all stages of the run and their numbers of epochs, in order.
    stage
        Name of the stage.
    first_step
        Steps of the stage that were done before it was resumed.
    steps_per_epoch
        Steps of an epoch of each stage.
    batch_size
        Images per step of the stage.
    work
        Relative durations of a step of each stage.
    expected
        Seconds of a step of later stages where earlier stages like them were measured; for the
        others, this stage is the measure.
    """

    def __init__(
        self,
        epochs: Mapping[str, int],
        stage: str,
        *,
        first_step: int,
        steps_per_epoch: Mapping[str, int],
        batch_size: int,
        work: Mapping[str, float],
        expected: Mapping[str, float] | None = None,
    ) -> None:
        expected = expected or {}
        self.stage, self.index, self.stages = stage, list(epochs).index(stage), len(epochs)
        self.epochs, self.first_step = epochs[stage], first_step
        self.steps_per_epoch, self.batch_size = steps_per_epoch[stage], batch_size
        steps = {name: count * steps_per_epoch[name] for name, count in epochs.items()}
        self.steps = steps[stage]
        self.steps_before = sum(list(steps.values())[: self.index])
        later = list(epochs)[self.index + 1 :]
        # The steps of this stage that take as long as all later stages, but for the expected ones.
        others = [name for name in later if name not in expected]
        self.later_steps = sum(work[name] * steps[name] for name in others) / work[stage]
        self.later_seconds = sum(expected[name] * steps[name] for name in later if name in expected)
        self.seconds_per_step: float | None = None
        self.metrics: Mapping[str, float] = {}
        self.start_timer()

    def start_timer(self) -> None:
        """Start the measurement of the speed."""
        self.started = time.perf_counter()

    def update(self, step: int, metrics: Mapping[str, float] | None = None) -> Progress:
        """Return the progress when so many steps are done, with new metrics if there are any."""
        seconds = max(time.perf_counter() - self.started, 1e-9)
        steps_per_second = (step - self.first_step) / seconds
        seconds_per_step = 1 / steps_per_second if steps_per_second else math.inf
        steps_left = self.steps - step
        if step > self.first_step:
            self.seconds_per_step = seconds_per_step
        self.metrics = metrics or self.metrics
        return Progress(
            stage=self.stage,
            number=self.index + 1,
            stages=self.stages,
            step=step,
            steps=self.steps,
            epoch=step / self.steps_per_epoch,
            epochs=self.epochs,
            total_step=self.steps_before + step,
            images_per_second=steps_per_second * self.batch_size,
            seconds_left=steps_left * seconds_per_step if steps_left else 0.0,
            run_seconds_left=self.later_seconds
            + (
                (steps_left + self.later_steps) * seconds_per_step
                if steps_left or self.later_steps
                else 0.0
            ),
            metrics=self.metrics,
            measured=bool(metrics),
        )


class PlainLines:
    """Display of plain lines, for an output that is not a terminal.

    There is a line at the start of a stage and at the end of an epoch, and further lines while an
    epoch takes long.
    """

    def __init__(self, out: TextIO) -> None:
        self.line = StatusLine(out)
        self.shown: tuple[str, int] | None = None

    def __call__(self, progress: Progress) -> None:
        """Print a line if there is one to print."""
        epoch = int(progress.epoch + 1e-9)
        current = (progress.stage, epoch)
        is_new_epoch = progress.measured and epoch > 0 and current != self.shown
        if not progress.images_per_second or is_new_epoch or self.line.is_due():
            self.line.write(f"{_stage_label(progress)}  {progress.summary()}")
            self.shown = current

    def close(self) -> None:
        """Do nothing: every line is complete."""


class LiveLine:
    """Display of one line per stage on a terminal, updated during the stage."""

    def __init__(self, out: TextIO) -> None:
        self.line, self.stage = StatusLine(out), ""

    def __call__(self, progress: Progress) -> None:
        """Update the line, but not too often."""
        is_end = progress.step == progress.steps
        if progress.stage != self.stage:
            self.line.end()
        elif not is_end and not self.line.is_due():
            return
        self.stage = progress.stage
        share = progress.step / max(progress.steps, 1)
        bar, width = self.line.bar(share), self.line.width()
        label, percentage = f"{_stage_label(progress)}  ", f"{share:4.0%}  "
        if len(label + bar + percentage + progress.summary()) > width:
            bar = ""
        start = label + bar + percentage
        self.line.write(start + progress.summary(width - len(start)))
        if is_end:
            self.close()

    def close(self) -> None:
        """Move the cursor to a new line."""
        self.line.end()


def _stage_label(progress: Progress) -> str:
    return f"{progress.number}/{progress.stages} {progress.stage:{STAGE_WIDTH}}"


def display(out: TextIO | None = None) -> LiveLine | PlainLines:
    """Return the display for an output: a live line on a terminal, else plain lines.

    Parameters
    ----------
    out
        The output; by default, standard error.
    """
    out = out or sys.stderr
    return LiveLine(out) if out.isatty() else PlainLines(out)


class TensorBoard:
    """Curves for TensorBoard, in the folder `tensorboard` of a run.

    Raises
    ------
    ValueError
        If TensorBoard is not installed.
    """

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ValueError(
                "TensorBoard is not installed; pip install 'poecaps[tensorboard]'"
            ) from error
        self.folder = own_folder(folder / "tensorboard")
        self.writer_class: type[Any] = SummaryWriter
        self.writer: Any = None

    def __call__(self, progress: Progress) -> None:
        """Add a point to each curve if there are new metrics."""
        if self.writer is None:
            # A resumed run writes the points after its checkpoint again, so the old ones are
            # purged.
            self.writer = self.writer_class(str(self.folder), purge_step=progress.total_step + 1)
        if progress.measured:
            for name, value in progress.metrics.items():
                self.writer.add_scalar(f"{progress.stage}/{name}", value, progress.total_step)
            self.writer.flush()

    def close(self) -> None:
        """Write everything to disk."""
        if self.writer is not None:
            self.writer.close()
