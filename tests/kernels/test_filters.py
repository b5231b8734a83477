"""The kernels of the autoencoder, in the ordinary test run: by Triton's interpreter where there is no GPU."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from poecaps.autoencoder import ConvAutoencoder
from poecaps.kernels import filters

FACTS = Path(__file__).with_name("filter_facts.py")


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_the_kernels_in_a_process_of_their_own() -> None:
    """Triton decides when it is imported whether to interpret, so the facts cannot share this process."""
    environment = dict(os.environ)
    if not torch.cuda.is_available():
        environment["TRITON_INTERPRET"] = "1"
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(FACTS)]
    done = subprocess.run(command, env=environment, cwd=FACTS.parents[2], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="there it can run")
def test_a_cpu_is_left_to_pytorch() -> None:
    model, images = ConvAutoencoder(features=16), torch.rand(2, 1, 28, 28)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not filters.fits(images, model.first, model.second, (28, 28))


def test_what_convolves_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    assert filters.describe(torch.device("cpu")).startswith("torch")
    for installed, large, begin, why in [
        (True, True, "triton", "no patches"),
        (True, False, "torch", "compute capability"),
        (False, True, "torch", "Triton is not installed"),
    ]:
        monkeypatch.setattr(filters, "installed", lambda installed=installed: installed)
        monkeypatch.setattr(filters, "_is_large", lambda _, large=large: large)
        said = filters.describe(torch.device("cuda"))
        assert said.startswith(begin)
        assert why in said
