"""The Triton convolutions in the ordinary test run, and the choice between them and PyTorch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from poecaps.autoencoder import ConvAutoencoder
from poecaps.kernels import convolution
from poecaps.kernels.triton import support
from tests.kernels.facts import assert_facts, needs_triton

FACTS = Path(__file__).with_name("triton_convolution_facts.py")


@needs_triton
def test_the_kernels_in_a_process_of_their_own() -> None:
    assert_facts(FACTS)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels can run here")
def test_a_cpu_is_left_to_pytorch() -> None:
    parameters = ConvAutoencoder(features=16)._conv_parameters()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        reason = convolution.why_not(torch.rand(2, 1, 28, 28), parameters, (28, 28))
    assert reason is not None
    assert "CUDA device" in reason or "pip install triton" in reason


@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels can run here")
def test_the_choice_does_not_import_triton() -> None:
    code = (
        "import sys, torch; from poecaps.autoencoder import ConvAutoencoder\n"
        "with torch.autocast('cpu', dtype=torch.bfloat16):\n"
        "    ConvAutoencoder(features=16)(torch.rand(2, 1, 28, 28))\n"
        "sys.exit('triton' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_the_choice_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    assert convolution.describe(torch.device("cpu")).startswith("torch")
    for installed, capability, begin, why in [
        (True, 9, "triton", "without im2col"),
        (True, 8, "torch", "compute capability"),
        (False, 9, "torch", "Triton is not installed"),
    ]:
        monkeypatch.setattr(support, "installed", lambda installed=installed: installed)
        monkeypatch.setattr(
            convolution, "_major_capability", lambda _, capability=capability: capability
        )
        described = convolution.describe(torch.device("cuda"))
        assert described.startswith(begin)
        assert why in described
