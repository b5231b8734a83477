"""Runs files of facts about Triton kernels, each in a process of its own."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
import torch

if TYPE_CHECKING:
    from pathlib import Path

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed"
)


def assert_facts(file: Path) -> None:
    """Triton decides when it is imported whether to interpret, so facts cannot share the process of
    other tests.
    """
    environment = dict(os.environ)
    if not torch.cuda.is_available():
        environment["TRITON_INTERPRET"] = "1"
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(file)]
    done = subprocess.run(
        command, env=environment, cwd=file.parents[2], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
