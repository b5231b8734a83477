"""Our Adam is that of torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.kernels.facts import assert_facts, needs_triton
from tests.training.adam_facts import assert_steps_of_torch

if TYPE_CHECKING:
    import torch

FACTS = Path(__file__).with_name("adam_facts.py")


@pytest.mark.parametrize("l2", [0.0, 0.1])
@pytest.mark.parametrize("size", [1.0, 1e-8])
def test_it_takes_the_steps_that_torch_takes(
    l2: float, size: float, generator: torch.Generator
) -> None:
    assert_steps_of_torch("cpu", l2, size, generator)


@needs_triton
def test_the_kernel_in_a_process_of_its_own() -> None:
    assert_facts(FACTS)
