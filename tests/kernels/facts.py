"""Runs files of facts about Triton kernels in separate processes."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
import torch

from tests.kernels import shards

if TYPE_CHECKING:
    from pathlib import Path

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed"
)


def assert_facts(file: Path, processes: int = 2) -> None:
    """Run the facts in processes of their own, side by side.

    Triton decides when it is imported whether to interpret, so facts cannot share the process of
    other tests. The interpreter is slow, but several of them run in parallel.
    """
    environment = dict(os.environ)
    if not torch.cuda.is_available():
        environment["TRITON_INTERPRET"] = "1"
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    command += ["-p", shards.__name__, str(file)]
    started = [
        subprocess.Popen(
            command,
            env=environment | {shards.VARIABLE: f"{shard}/{processes}"},
            cwd=file.parents[2],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for shard in range(processes)
    ]
    output = [process.communicate()[0] for process in started]
    for process, text in zip(started, output, strict=True):
        assert process.returncode == 0, text
