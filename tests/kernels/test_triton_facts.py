"""The facts about the Triton kernels, in Triton's interpreter if there is no GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch

from tests.kernels import interpreter
from tests.kernels.problems import needs_triton

ROOT = Path(__file__).parents[2]
FILES = (
    "tests/kernels/triton_routing_facts.py",
    "tests/kernels/triton_agreement_facts.py",
    "tests/kernels/triton_operator_facts.py",
    "tests/kernels/triton_plan_facts.py",
    "tests/kernels/triton_pixel_facts.py",
    "tests/kernels/triton_convolution_facts.py",
    "tests/training/fused_adam_facts.py",
)


@needs_triton
def test_the_facts_in_a_process_of_their_own() -> None:
    """Triton decides when it is imported whether to interpret, so facts cannot share the process
    of other tests.
    """
    environment = dict(os.environ)
    if not torch.cuda.is_available():
        environment["TRITON_INTERPRET"] = "1"
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    command += ["-p", interpreter.__name__, *FILES]
    done = subprocess.run(
        command,
        env=environment,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
