"""The facts about the Triton kernels, in Triton's interpreter if there is no GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch

from tests.kernels import shards
from tests.kernels.problems import needs_triton

ROOT = Path(__file__).parents[2]
FILES = (
    "tests/kernels/triton_routing_facts.py",
    "tests/kernels/triton_operator_facts.py",
    "tests/kernels/triton_plan_facts.py",
    "tests/kernels/triton_pixel_facts.py",
    "tests/kernels/triton_convolution_facts.py",
    "tests/training/fused_adam_facts.py",
)
PROCESSES = 2


@needs_triton
def test_the_facts_in_processes_of_their_own() -> None:
    """Triton decides when it is imported whether to interpret, so facts cannot share the process
    of other tests. The interpreter is slow, but several of them run in parallel.
    """
    environment = dict(os.environ)
    if not torch.cuda.is_available():
        environment["TRITON_INTERPRET"] = "1"
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    command += ["-p", shards.__name__, *FILES]
    started = [
        subprocess.Popen(
            command,
            env=environment | {shards.VARIABLE: f"{shard}/{PROCESSES}"},
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for shard in range(PROCESSES)
    ]
    output = [process.communicate()[0] for process in started]
    for process, text in zip(started, output, strict=True):
        assert process.returncode == 0, text
