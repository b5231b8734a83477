"""The line that counts the steps of a long computation."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from poecaps.cli import outputs
from poecaps.cli.outputs import REFRESH_SECONDS, REPORT_SECONDS, StepCounter

if TYPE_CHECKING:
    from collections.abc import Callable

START = 1000.0  # of the clock, in seconds


class Clock:
    """A clock that stands still until a test moves it."""

    def __init__(self) -> None:
        self.now = START

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(outputs, "time", SimpleNamespace(monotonic=clock.monotonic))
    return clock


@pytest.fixture
def counter(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[[bool], StepCounter]:
    capsys.readouterr()

    def make(terminal: bool) -> StepCounter:
        monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
        return StepCounter("sampling")

    return make


def test_a_terminal_shows_one_line_that_is_overwritten(
    clock: Clock, counter: Callable[[bool], StepCounter], capsys: pytest.CaptureFixture[str]
) -> None:
    count = counter(True)
    clock.now = START + 90
    count(500, 2000)
    assert capsys.readouterr().err == "\r\x1b[Ksampling  500/2,000 steps  4:30 left"
    clock.now += REFRESH_SECONDS / 2
    count(501, 2000)
    assert capsys.readouterr().err == "", "it is not written more often than can be read"
    clock.now = START + 180
    count(1000, 2000)
    assert capsys.readouterr().err == "\r\x1b[Ksampling  1,000/2,000 steps  3:00 left"
    count(2000, 2000)
    assert capsys.readouterr().err == "\r\x1b[Ksampling  2,000/2,000 steps  0:00 left\n"


def test_a_file_gets_a_line_only_now_and_then(
    clock: Clock, counter: Callable[[bool], StepCounter], capsys: pytest.CaptureFixture[str]
) -> None:
    count = counter(False)
    for done in range(1, 41):
        clock.now = START + done * REPORT_SECONDS / 10
        count(done, 41)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.splitlines() == [
        "sampling  10/41 steps  0:46 left",
        "sampling  20/41 steps  0:31 left",
        "sampling  30/41 steps  0:16 left",
        "sampling  40/41 steps  0:01 left",
    ]
    count(41, 41)
    assert capsys.readouterr().err == ""


def test_a_short_computation_writes_nothing_to_a_file(
    clock: Clock, counter: Callable[[bool], StepCounter], capsys: pytest.CaptureFixture[str]
) -> None:
    count = counter(False)
    for done in range(1, 11):
        clock.now = START + done * REPORT_SECONDS / 11
        count(done, 10)
    assert capsys.readouterr().err == ""
