"""The soak of `make soak`."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

import pytest

from tools import soak

if TYPE_CHECKING:
    from pathlib import Path


class Clock:
    """Stands for the module `time`; every look at it takes some seconds."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.now, self.seconds = 0.0, seconds

    def monotonic(self) -> float:
        self.now += self.seconds
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    monkeypatch.setattr(soak, "_can_isolate", lambda: False)
    monkeypatch.setattr(soak, "time", clock := Clock())
    return clock


@pytest.mark.parametrize(
    ("minutes", "faults", "same", "status"),
    [(1, 1, True, 0), (1, 0, True, 1), (0, 1, True, 1), (1, 1, False, 1)],
)
def test_a_soak_succeeds_only_if_faults_were_injected_and_changed_nothing(
    minutes: float,
    faults: int,
    same: bool,
    status: int,
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The undisturbed run may take longer than the given time, which begins after it."""
    disturbed_runs = 0

    def train(self: soak.Soak, folder: Path, *, disturbed: bool) -> None:
        nonlocal disturbed_runs
        clock.now += 50.0 if disturbed else 1e4
        disturbed_runs += disturbed
        self.faults.update(["kill"] * faults * disturbed)
        folder.mkdir()
        (folder / "run.json").write_text('{"starts": []}')

    monkeypatch.setattr(soak.Soak, "train", train)
    monkeypatch.setattr(soak, "_is_same", lambda *_: same)
    assert soak.main(minutes=minutes, seed=1) == status
    assert disturbed_runs == 2 * minutes


@pytest.mark.parametrize("makes_progress", [False, True])
def test_a_run_without_end_is_given_up_whatever_torchrun_does(
    makes_progress: bool,
    clock: Clock,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every call of torchrun ends at once, and is followed by another one."""
    starts = 0

    def start(*_: Any, **__: Any) -> subprocess.Popen[bytes]:
        nonlocal starts
        starts += 1
        clock.now += 100
        assert starts < 100
        return subprocess.Popen([sys.executable, "-c", ""], start_new_session=True)

    monkeypatch.setattr(soak.Soak, "start", start)
    monkeypatch.setattr(soak, "_progress", lambda _: starts if makes_progress else 0)
    tested = soak.Soak(tmp_path, random.Random(0), isolated=False)
    tested.deadline = 1000.0
    message = "not finished in time" if makes_progress else "no progress for 300 s"
    with pytest.raises(RuntimeError, match=message):
        tested.train(tmp_path / "run", disturbed=True)


def test_faults_wait_for_progress_so_that_a_slow_start_is_no_hang(
    clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Faults come every 3 to 10 s, and there is progress after 60 s without one."""
    faults, last, checkpoints = list[float](), 0.0, 0

    def inject(*_: Any) -> None:
        nonlocal last
        faults.append(clock.now)
        last = clock.now

    def progress(_: Path) -> int:
        nonlocal last, checkpoints
        if clock.now - last > 60:
            last, checkpoints = clock.now, checkpoints + 1
        return checkpoints

    class Process:
        def poll(self) -> int | None:
            return 0 if checkpoints == 3 else None

    clock.seconds = 0.2
    monkeypatch.setattr(soak, "_progress", progress)
    monkeypatch.setattr(soak, "_workers", lambda _: [1])
    monkeypatch.setattr(soak.Soak, "_inject", inject)
    tested = soak.Soak(tmp_path, random.Random(0), isolated=False)
    process: Any = Process()
    tested._disturb_until_end(process, soak._Clock(tmp_path, 1e6), disturbed=True)
    assert 3 * soak.MAX_FAULTS <= len(faults) <= 3 * soak.MAX_FAULTS + 1


def test_sigterm_ends_what_was_started(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []

    def start(*_: Any, **__: Any) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", "import time; time.sleep(600)"]
        started.append(subprocess.Popen(command, start_new_session=True))
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
        return started[0]

    monkeypatch.setattr(soak, "_can_isolate", lambda: False)
    monkeypatch.setattr(soak.Soak, "start", start)
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with pytest.raises(SystemExit, match="143"):
            soak.main(minutes=1, seed=1)
        assert signal.getsignal(signal.SIGTERM) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGTERM, before)
        for each in started:
            was_running = each.poll() is None
            each.kill()
            each.wait()
    assert started
    assert not was_running
