"""Ctrl-C, SIGTERM and SIGHUP: deferred during a step, so that a run stops between two steps."""

from __future__ import annotations

import signal
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from poecaps.training.distributed import Distributed

if TYPE_CHECKING:
    from collections.abc import Iterator

# Not all systems have SIGHUP, which a terminal sends when it is closed.
NAMES = ("SIGINT", "SIGTERM", "SIGHUP")
SIGNALS = [getattr(signal, name) for name in NAMES if hasattr(signal, name)]


class Interrupts:
    """Handler of the signals that stop a run.

    Attributes
    ----------
    deferred
        Whether a signal is only recorded. Otherwise it raises `KeyboardInterrupt` immediately, and
        so does a second signal.
    requested
        Whether a deferred signal has arrived.
    """

    def __init__(self) -> None:
        self.deferred = self.requested = False

    def handle(self, number: int, frame: Any) -> None:  # noqa: ARG002 (the signature of a signal handler)
        """Record a signal, or raise `KeyboardInterrupt`."""
        # With several processes, the second signal may be the first one, forwarded by torchrun.
        repeated = self.requested and Distributed.from_environment().size == 1
        if repeated or not self.deferred:
            raise KeyboardInterrupt
        self.requested = True

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Handle the signals in this context; Python allows it in the main thread only.

        Signals that the program ignores stay ignored.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        previous = {number: signal.getsignal(number) for number in SIGNALS}
        for number, handler in previous.items():
            if handler is not signal.SIG_IGN:
                signal.signal(number, self.handle)
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
