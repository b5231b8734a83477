"""The soak of `make soak`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from typing import Any

import pytest

from tools import soak


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
