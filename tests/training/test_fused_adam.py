"""FusedAdam takes the steps of torch.optim.Adam."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.training.fused_adam_facts import assert_steps_of_torch

if TYPE_CHECKING:
    import torch


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("size", [1.0, 1e-8])
def test_it_takes_the_steps_of_torch(
    weight_decay: float, size: float, generator: torch.Generator
) -> None:
    assert_steps_of_torch("cpu", weight_decay, size, generator)
