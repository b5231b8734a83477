"""The progress of long computations: how it is reported, and the line on which it is shown.

A function that takes long has a parameter `report`, which it calls with the number of finished
steps and that of all steps. `Counter` shows these calls to a user.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch import Tensor

Report = Callable[[int, int], None]
"""Called with the number of finished steps, and that of all steps."""

BAR_WIDTH = 14
LIVE_DELAY, LIVE_PAUSE = 0.5, 0.1  # seconds before the first text on a terminal, and between two
# Seconds before the first line of an output that is not a terminal. The pauses double up to a
# minute, so that a long computation does not fill a file.
PLAIN_DELAY, PLAIN_PAUSE_LIMIT = 4.0, 60.0


class StatusLine:
    """A line about a computation: overwritten on a terminal, else one of several plain lines.

    Parameters
    ----------
    out
        The output; by default, standard error.
    """

    def __init__(self, out: TextIO | None = None) -> None:
        self.out = sys.stderr if out is None else out
        self.is_live, self.is_shown = self.out.isatty(), False
        self.pause = LIVE_DELAY if self.is_live else PLAIN_DELAY
        self.shown = time.monotonic()
        self.filled, self.empty = "━─" if _can_encode("━─", self.out) else "#."

    def is_due(self) -> bool:
        """Return whether it is time for a new text."""
        return time.monotonic() - self.shown >= self.pause

    def width(self) -> int:
        """Return the number of characters that fit on the line."""
        return shutil.get_terminal_size().columns - 1 if self.is_live else 1000

    def bar(self, share: float) -> str:
        """Return a bar of which this share is filled, with a space after it."""
        return (self.filled * round(BAR_WIDTH * share)).ljust(BAR_WIDTH, self.empty) + " "

    def write(self, text: str) -> None:
        """Show a text."""
        self.shown = time.monotonic()
        if self.is_live:
            self.pause, self.is_shown = LIVE_PAUSE, True
            self._print(f"\r\x1b[K{text[: self.width()]}", end="")
        else:
            self.pause = min(2 * self.pause, PLAIN_PAUSE_LIMIT)
            self._print(text)

    def end(self) -> None:
        """Keep the last text, and move the cursor to a new line."""
        if self.is_shown:
            self._print("")
        self.is_shown = False

    def clear(self) -> None:
        """Remove the last text from a terminal."""
        if self.is_shown:
            self._print("\r\x1b[K", end="")
        self.is_shown = False

    def _print(self, text: str, end: str = "\n") -> None:
        """Print a text, unless the terminal is gone or the disk of the log is full."""
        with suppress(OSError):
            print(text, end=end, file=self.out, flush=True)


class Counter:
    """A `Report` that shows how much of a computation is done, and the time that is left.

    Nothing is shown of a computation that takes less than a moment.

    Parameters
    ----------
    label
        What is done, such as ``"encoding"``.
    unit
        What is counted; None: only the percentage is shown.
    out
        The output; by default, standard error.
    """

    def __init__(self, label: str, unit: str | None = "images", out: TextIO | None = None) -> None:
        self.label, self.unit, self.line = label, unit, StatusLine(out)
        self.started = time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        """Report that `done` of `total` are done; with 0 done, the time is counted from now."""
        if done == 0:
            self.started = self.line.shown = time.monotonic()
        if done >= total:
            self.line.clear()
        elif done > 0 and self.line.is_due():
            left = (time.monotonic() - self.started) / done * (total - done)
            share = done / total
            count = "" if self.unit is None else f"  {done:,}/{total:,} {self.unit}"
            text = f"{share:4.0%}{count}  {format_seconds(left)} left"
            bar = self.line.bar(share) if self.line.is_live else ""
            if len(self.label + bar + text) + 2 > self.line.width():
                bar = ""
            self.line.write(f"{self.label}  {bar}{text}")


def counted(batches: Iterable[Tensor], total: int, report: Report | None) -> Iterator[Tensor]:
    """Iterate over batches (B, ...), and report how many of `total` rows have been used."""
    done = 0
    for batch in batches:
        yield batch
        done += len(batch)
        if report is not None:
            report(done, total)


def format_seconds(seconds: float) -> str:
    """Format a duration as minutes and seconds, or hours, minutes and seconds."""
    minutes, rest = divmod(round(seconds), 60)
    if minutes >= 60:
        return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"
    return f"{minutes}:{rest:02}"


def _can_encode(characters: str, out: TextIO) -> bool:
    """Return whether the encoding of an output has these characters."""
    try:
        characters.encode(out.encoding or "ascii")
    except (LookupError, UnicodeEncodeError):
        return False
    return True
