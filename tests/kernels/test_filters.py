"""The kernels of the autoencoder, in the ordinary test run: by Triton's interpreter where there is no GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from poecaps.autoencoder import ConvAutoencoder
from poecaps.kernels import filters
from tests.kernels.facts import assert_facts, needs_triton

FACTS = Path(__file__).with_name("filter_facts.py")


@needs_triton
def test_the_kernels_in_a_process_of_their_own() -> None:
    assert_facts(FACTS)


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
