"""The GPU kernels, in the ordinary test run: by Triton's interpreter where there is no GPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from poecaps import CapsuleExperts, kernels
from tests.kernels.facts import assert_facts, needs_triton

FACTS = Path(__file__).with_name("flash_facts.py")


@needs_triton
def test_the_kernels_in_a_process_of_their_own() -> None:
    assert_facts(FACTS)


def test_triton_is_imported_only_when_it_is_used() -> None:
    code = "import sys, poecaps; sys.exit('triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there it can run")
def test_a_forced_backend_that_cannot_run_says_why() -> None:
    layer = CapsuleExperts(4, 3, 2, 2, backend="triton")
    remedy = "CUDA device|pip install triton"
    with pytest.raises(ValueError, match=remedy), torch.no_grad():
        layer(torch.zeros(1, 4, 3))
    layer = CapsuleExperts(4, 3, 2, 2, backend="cpu", dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="backend='reference'"), torch.no_grad():
        layer(torch.zeros(1, 4, 3, dtype=torch.bfloat16))


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(ValueError, match="did you mean 'triton'"):
        CapsuleExperts(4, 3, 2, 2, backend="tritn")  # type: ignore[arg-type]
    layer = CapsuleExperts(4, 3, 2, 2)
    with pytest.raises(ValueError, match="backend must be one of"):
        layer.backend = "gpu"  # type: ignore[assignment]


def test_the_choice_by_device_and_dtype() -> None:
    x, weight = torch.zeros(1, 4, 3), torch.zeros(4, 2, 2, 3)
    assert kernels.choose(x, weight) == "cpu"
    assert kernels.choose(x, weight, "reference") == "reference"
    assert kernels.choose(x.half(), weight.half()) == "reference"
    assert kernels.choose(x.to("meta"), weight.to("meta")) == "reference"
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert kernels.choose(x, weight) == "reference"
    assert kernels.describe("cpu").startswith("cpu")
