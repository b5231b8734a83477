"""Ctrl-C and SIGTERM: remembered while a step is taken, so that a run stops between two steps."""

from __future__ import annotations

import signal
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from poecaps.training.workers import expected

if TYPE_CHECKING:
    from collections.abc import Iterator

CAUGHT = (signal.SIGINT, signal.SIGTERM)


class Interrupts:
    """Whether the user wants the run to stop. While no step is taken, or asked twice, it stops at once."""

    def __init__(self) -> None:
        self.asked = self.stepping = False

    def note(self, number: int, frame: Any) -> None:  # noqa: ARG002 (the signature of a signal handler)
        """Remember the signal, or act on it."""
        twice = (
            self.asked and expected().size == 1
        )  # torchrun passes on a signal that its processes have had already
        if twice or not self.stepping:
            raise KeyboardInterrupt
        self.asked = True

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Catch the signals while a run goes, where Python allows it: in the main thread."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.getsignal(number) for number in CAUGHT}
        for number, handler in before.items():
            if handler is not signal.SIG_IGN:
                signal.signal(number, self.note)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
