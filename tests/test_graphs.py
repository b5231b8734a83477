"""The replay of a step off the GPU; `test_cuda` has the facts on one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from poecaps import graphed


@pytest.mark.parametrize("device", ["cpu", torch.device("cpu"), "meta"])
def test_without_a_gpu_a_step_is_called_as_it_is(device: torch.device | str) -> None:
    def step(x: Tensor) -> Tensor:
        return 2 * x

    assert graphed(step, device) is step
