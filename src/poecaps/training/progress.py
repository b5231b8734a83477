"""How far a run is, and how that is shown: a live line on a terminal, plain lines elsewhere, curves in TensorBoard."""

from __future__ import annotations

import shutil
import sys
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

SHOWN = (
    ("reconstruction_error", "error", 3),
    ("firing", "firing", 2),
    ("effective_rank", "rank", 1),
)
REFRESH = 0.1  # seconds between two drawings of the live line
BAR = 16


@dataclass(frozen=True)
class Progress:
    """Where a run stands after a step; given to `report` after each."""

    stage: str
    """What is being trained: autoencoder, encoder 1, …, decoder 1, …"""
    number: int
    """Which stage it is, counted from 1."""
    stages: int
    """How many there are."""
    step: int
    """Steps of the stage that are done; 0 while its data are prepared."""
    steps: int
    """Steps of the stage in all."""
    epoch: float
    """Passes over the images that are done."""
    epochs: int
    """Passes in all."""
    total_step: int
    """Steps done since the run began, of all stages."""
    images_per_second: float
    """Since the stage was started or resumed."""
    seconds_left: float
    """Until the end of the stage, at that pace."""
    numbers: Mapping[str, float] = field(default_factory=dict)
    """What was measured last: loss, learning rate, reconstruction error, …; empty before the first time."""
    measured: bool = False
    """Whether these numbers are new."""

    def summary(self, room: int = 1000) -> str:
        """Say it in one line, but for the name of the stage; where there is little room, leave out some numbers."""
        if not self.images_per_second:  # no step was taken yet, here or since the run was resumed
            return f"goes on from epoch {self.epoch:.1f}" if self.step else "starts"
        begin = [f"epoch {self.epoch:.1f}/{self.epochs}", f"{self.images_per_second:,.0f} images/s"]
        numbers = [
            f"{short} {self.numbers[name]:.{digits}f}"
            for name, short, digits in SHOWN
            if name in self.numbers
        ]
        left = f"{_clock(self.seconds_left)} left"
        while numbers and len("  ".join([*begin, *numbers, left])) > room:
            numbers.pop()
        return "  ".join([*begin, *numbers, left])


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return (
        f"{minutes // 60}:{minutes % 60:02}:{rest:02}" if minutes >= 60 else f"{minutes}:{rest:02}"
    )


class PlainLines:
    """One line for each epoch, for output that is no terminal."""

    def __init__(self, out: TextIO) -> None:
        self.out = out
        self.shown: tuple[str, int] | None = None

    def __call__(self, progress: Progress) -> None:
        """Print a line if an epoch has ended."""
        whole = int(progress.epoch + 1e-9)
        now = (progress.stage, whole)
        if not progress.images_per_second or (
            progress.measured and whole > 0 and now != self.shown
        ):
            print(f"{_name(progress)}  {progress.summary()}", file=self.out, flush=True)
            self.shown = now

    def close(self) -> None:
        """Do nothing: every line is complete."""


class LiveLine:
    """One line for each stage, drawn again and again while it is trained."""

    def __init__(self, out: TextIO) -> None:
        self.out = out
        self.done, self.rest = "━─" if _can_draw("━─", out) else "#."
        self.stage, self.drawn = "", 0.0

    def __call__(self, progress: Progress) -> None:
        """Draw the line anew, now and then."""
        ended = progress.step == progress.steps
        if progress.stage != self.stage and self.stage:
            self._end()
        now = time.monotonic()
        if progress.stage == self.stage and not ended and now - self.drawn < REFRESH:
            return
        self.stage, self.drawn = progress.stage, now
        share = progress.step / max(progress.steps, 1)
        bar = (self.done * round(BAR * share)).ljust(BAR, self.rest) + " "
        room = shutil.get_terminal_size().columns - 1
        begin, end = f"{_name(progress)}  ", f"{share:4.0%}  "
        if len(begin + bar + end + progress.summary()) > room:
            bar = ""
        line = f"{begin}{bar}{end}{progress.summary(room - len(begin + bar + end))}"
        print(f"\r\x1b[K{line[:room]}", end="", file=self.out, flush=True)
        if ended:
            self._end()

    def close(self) -> None:
        """Leave the cursor on a line of its own."""
        if self.stage:
            self._end()

    def _end(self) -> None:
        print(file=self.out, flush=True)
        self.stage = ""


def _name(progress: Progress) -> str:
    return f"{progress.number}/{progress.stages} {progress.stage:11}"


def _can_draw(letters: str, out: TextIO) -> bool:
    """Tell whether the terminal's encoding has these letters."""
    try:
        letters.encode(out.encoding or "ascii")
    except (LookupError, UnicodeEncodeError):
        return False
    return True


def display(out: TextIO | None = None) -> LiveLine | PlainLines:
    """Choose how progress is shown on this output, which is standard error if none is given."""
    out = out or sys.stderr
    return LiveLine(out) if out.isatty() else PlainLines(out)


class TensorBoard:
    """Curves for TensorBoard, in the folder `tensorboard` of a run."""

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ValueError(
                "TensorBoard is not installed; pip install 'poecaps[tensorboard]'"
            ) from error
        self.folder = folder / "tensorboard"
        self.open: type[Any] = SummaryWriter
        self.writer: Any = None

    def __call__(self, progress: Progress) -> None:
        """Add a point to each curve when there are new numbers."""
        if self.writer is None:  # what a broken run wrote after this step will be written again
            self.writer = self.open(str(self.folder), purge_step=progress.total_step + 1)
        if progress.measured:
            for name, value in progress.numbers.items():
                self.writer.add_scalar(f"{progress.stage}/{name}", value, progress.total_step)
            self.writer.flush()

    def close(self) -> None:
        """Write what is left."""
        if self.writer is not None:
            self.writer.close()
