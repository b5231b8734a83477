"""The line that shows how far a long computation is."""

from __future__ import annotations

import errno
import io
from types import SimpleNamespace

import pytest
import torch

from poecaps import _progress
from poecaps._progress import (
    LIVE_PAUSE,
    PLAIN_DELAY,
    Counter,
    StatusLine,
    counted,
    format_seconds,
)

START = 1000.0  # of the clock, in seconds


class Clock:
    """A clock that stands still until a test moves it."""

    def __init__(self) -> None:
        self.now = START

    def monotonic(self) -> float:
        return self.now


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True

    def taken(self) -> str:
        """Return what was written since the last call."""
        text = self.getvalue()
        self.seek(0)
        self.truncate()
        return text


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(_progress, "time", SimpleNamespace(monotonic=clock.monotonic))
    monkeypatch.setenv("COLUMNS", "80")
    return clock


def test_a_terminal_shows_one_line_that_is_overwritten_and_at_last_removed(clock: Clock) -> None:
    out = Terminal()
    count = Counter("sampling", "steps", out)
    clock.now = START + 90
    count(500, 2000)
    bar = "━" * 4 + "─" * 10
    assert out.taken() == f"\r\x1b[Ksampling  {bar}  25%  500/2,000 steps  4:30 left"
    clock.now += LIVE_PAUSE / 2
    count(501, 2000)
    assert out.taken() == "", "it is not written more often than can be read"
    clock.now = START + 180
    count(1000, 2000)
    assert out.taken().endswith(" 50%  1,000/2,000 steps  3:00 left")
    count(2000, 2000)
    assert out.taken() == "\r\x1b[K"


def test_a_narrow_terminal_has_no_bar(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "46")
    out = Terminal()
    count = Counter("evaluating", None, out)
    clock.now = START + 60
    count(1, 4)
    assert "━" in out.taken()
    count = Counter("annealed sampling", None, out)
    clock.now += 60
    count(1, 4)
    assert out.taken() == "\r\x1b[Kannealed sampling   25%  3:00 left"


def test_a_file_gets_a_line_soon_and_then_at_growing_pauses(clock: Clock) -> None:
    out = io.StringIO()
    count = Counter("encoding", out=out)
    for done in range(1, 201):
        clock.now = START + done
        count(done, 200)
    lines = out.getvalue().splitlines()
    assert lines[0] == f"encoding    2%  {PLAIN_DELAY:.0f}/200 images  3:16 left"
    seconds = [int(line.split("%  ")[1].split("/")[0]) for line in lines]
    assert seconds == [4, 12, 28, 60, 120, 180]


def test_what_is_before_the_first_step_does_not_count_for_the_time_that_is_left(
    clock: Clock,
) -> None:
    out = io.StringIO()
    count = Counter("reading", "files", out)
    for _ in range(2):  # the training images of a folder, and its test images
        clock.now += 100  # the folder is listed
        count(0, 200)
        clock.now += 10
        count(1, 200)
        assert out.getvalue().splitlines()[-1] == "reading    0%  1/200 files  33:10 left"


def test_a_short_computation_shows_nothing(clock: Clock) -> None:
    for out in (io.StringIO(), Terminal()):
        count = Counter("encoding", out=out)
        for done in range(1, 11):
            clock.now += 0.04
            count(done, 10)
        assert out.getvalue() == ""


def test_batches_are_counted_once_they_have_been_used() -> None:
    seen: list[tuple[int, int]] = []
    rows = torch.arange(5)
    for batch in counted(rows.split(2), len(rows), lambda *report: seen.append(report)):
        assert len(seen) == batch[0].item() // 2
    assert seen == [(2, 5), (4, 5), (5, 5)]


def test_durations_have_hours_only_if_there_are_any() -> None:
    assert [format_seconds(each) for each in (0.4, 59.6, 3725)] == ["0:00", "1:00", "1:02:05"]


class Gone(Terminal):
    """A terminal that was closed, or a file on a full disk."""

    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_computation_goes_on_without_its_terminal(
    is_terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Gone, "isatty", lambda _: is_terminal)
    line = StatusLine(Gone())
    line.write("1 %")
    line.clear()
    line.write("2 %")
    line.end()


@pytest.mark.parametrize("out", [Terminal(), io.StringIO()], ids=["terminal", "file"])
def test_a_counter_that_is_used_again_says_nothing_of_a_moment(
    out: io.StringIO, clock: Clock
) -> None:
    count = Counter("encoding", out=out)
    clock.now += 60
    for done in range(0, 11, 5):
        count(done, 10)
    assert out.getvalue() == ""
    clock.now += 60
    count(0, 10)
    clock.now += PLAIN_DELAY
    count(5, 10)
    assert " 50%  5/10 images" in out.getvalue()
