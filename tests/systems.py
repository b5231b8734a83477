"""Marks of tests that need a feature of Unix, and are skipped on systems without it.

poecaps is developed on Linux. On Windows, a process cannot be forked or sent a signal, so commands
are tested in the process of the tests only.
"""

from __future__ import annotations

import os
import signal
import tempfile
from importlib.util import find_spec
from pathlib import Path

import pytest


def _has_links() -> bool:
    """Return whether this user may create symbolic links, which Windows allows only to some."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            (Path(folder) / "link").symlink_to(folder)
        except (OSError, NotImplementedError):
            return False
    return True


HAS_FORK = hasattr(os, "fork")
WITHOUT_FORK = "the system has no os.fork"
needs_fork = pytest.mark.skipif(not HAS_FORK, reason=WITHOUT_FORK)
needs_unix = pytest.mark.skipif(os.name == "nt", reason="needs the paths and programs of Unix")
needs_links = pytest.mark.skipif(not _has_links(), reason="this user cannot create symbolic links")
needs_fifo = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="the system has no os.mkfifo")
needs_flock = pytest.mark.skipif(
    find_spec("fcntl") is None, reason="the system has no module fcntl"
)
needs_timer = pytest.mark.skipif(
    not hasattr(signal, "setitimer"), reason="the system has no signal.setitimer"
)
needs_signals = pytest.mark.skipif(
    not hasattr(signal, "SIGKILL"), reason="the system cannot send signals to other processes"
)
needs_limits = pytest.mark.skipif(
    find_spec("resource") is None, reason="the system has no module resource"
)
needs_proc = pytest.mark.skipif(
    not Path("/proc/self/task").exists(), reason="the system has no /proc"
)
