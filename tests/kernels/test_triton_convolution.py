"""The choice between the Triton convolutions and those of PyTorch."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from poecaps.autoencoder import ConvAutoencoder
from poecaps.kernels import convolution
from poecaps.kernels.triton import support


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
