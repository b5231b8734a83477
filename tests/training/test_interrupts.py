"""When a signal takes effect."""

from __future__ import annotations

import signal
import threading
from typing import TYPE_CHECKING

import pytest

from poecaps.training.interrupts import SIGNALS, Interrupts

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def heeded() -> Iterator[None]:
    """Heed all signals: background jobs of a shell may ignore Ctrl-C, and those of nohup SIGHUP."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in SIGNALS}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_signal_waits_for_the_end_of_a_step_but_a_second_does_not() -> None:
    interrupts = Interrupts()
    with interrupts.installed():
        interrupts.deferred = True
        signal.raise_signal(signal.SIGINT)
        assert interrupts.requested
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("number", SIGNALS)
def test_between_steps_a_signal_acts_at_once(number: signal.Signals) -> None:
    interrupts = Interrupts()
    with interrupts.installed(), pytest.raises(KeyboardInterrupt):
        signal.raise_signal(number)


def test_torchrun_may_pass_on_a_signal_that_a_process_has_had(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    interrupts = Interrupts()
    with interrupts.installed():
        interrupts.deferred = True
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)
    assert interrupts.requested


def test_handlers_are_put_back_and_ignored_signals_stay_ignored() -> None:
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        ours = signal.getsignal(signal.SIGINT)
        interrupts = Interrupts()
        with interrupts.installed():
            assert signal.getsignal(signal.SIGINT) == interrupts.handle
            signal.raise_signal(signal.SIGTERM)
        assert not interrupts.requested
        assert signal.getsignal(signal.SIGINT) == ours
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)


def test_another_thread_may_train() -> None:
    entered = []

    def watch() -> None:
        with Interrupts().installed():
            entered.append(True)

    thread = threading.Thread(target=watch)
    thread.start()
    thread.join()
    assert entered


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="Windows has no SIGHUP")
def test_a_terminal_that_is_closed_stops_a_run_between_two_steps() -> None:
    interrupts = Interrupts()
    with interrupts.installed():
        interrupts.deferred = True
        signal.raise_signal(signal.SIGHUP)
    assert interrupts.requested
