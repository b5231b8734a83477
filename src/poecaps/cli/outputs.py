"""Where the commands write their results."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from poecaps import card, models
from poecaps._files import printable

if TYPE_CHECKING:
    from poecaps.network import CapsuleNetwork

FIGURES = "figures"
REFRESH_SECONDS = 0.2  # between two updates of a line on a terminal
REPORT_SECONDS = 15.0  # between two lines of an output that is not a terminal


def say(*words: object, file: TextIO | None = None) -> None:
    """Print a line, with the control characters of names in it escaped; to standard output."""
    print(printable(" ".join(map(str, words))), file=file, flush=True)


class StepCounter:
    """A line on standard error that says how many steps of a long computation are done.

    Parameters
    ----------
    label
        What is computed.
    """

    def __init__(self, label: str) -> None:
        self.label, self.started, self.shown = label, time.monotonic(), 0.0
        self.live = sys.stderr.isatty()

    def __call__(self, done: int, total: int) -> None:
        """Report that `done` of `total` steps are done."""
        now = time.monotonic()
        ended = done == total
        if not ended and now - self.shown < (REFRESH_SECONDS if self.live else REPORT_SECONDS):
            return
        if not ended and not self.live and now - self.started < REPORT_SECONDS:
            return
        self.shown = now
        left = (now - self.started) / done * (total - done)
        text = f"{self.label}  {done:,}/{total:,} steps  {_clock(left)} left"
        if self.live:
            print(f"\r\x1b[K{text}", end="\n" if ended else "", file=sys.stderr, flush=True)
        elif not ended:
            print(text, file=sys.stderr, flush=True)


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def default_output(run: str, *parts: str) -> Path:
    """Return the default path of a result.

    It is in the folder of the run; for a model of the package it is in the current folder.
    """
    return Path(f"{run}-{parts[-1]}") if models.is_shipped(run) else Path(run, *parts)


def require_png(path: Path) -> None:
    """Raise ValueError unless the path of a picture ends in ``.png``."""
    if path.suffix.lower() != ".png":
        raise ValueError(f"--out must name a PNG, but is {path}; let it end in .png")


def write_card(network: CapsuleNetwork, folder: Path, *, draw: bool) -> None:
    """Write the model card of a run, unless it was edited."""
    if not card.write(folder, network, draw=draw):
        say(f"{folder / card.CARD} was edited, so it is not overwritten", file=sys.stderr)
