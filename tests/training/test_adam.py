"""Our Adam is that of torch."""

from __future__ import annotations

import pytest
import torch

from poecaps.training.adam import FusedAdam


@pytest.mark.parametrize("l2", [0.0, 0.1])
def test_it_takes_the_steps_that_torch_takes(l2: float, generator: torch.Generator) -> None:
    start = [torch.randn(6, 3, 2, 2, generator=generator).to(memory_format=torch.channels_last), torch.ones(5)]
    gradients = [[torch.randn(each.shape, generator=generator) for each in start] for _ in range(5)]
    ours, theirs = ([torch.nn.Parameter(each.clone()) for each in start] for _ in range(2))
    adam = FusedAdam(ours, 0.01, (0.8, 0.999), l2)
    exact = torch.optim.Adam(theirs, lr=0.01, betas=(0.8, 0.999), weight_decay=l2)
    for step, gradient in enumerate(gradients):
        adam.zero_grad()
        assert all(parameter.grad is None for parameter in ours)
        adam.param_groups[0]["lr"].fill_(0.01 / (step + 1))
        exact.param_groups[0]["lr"] = 0.01 / (step + 1)
        for parameters in (ours, theirs):
            for parameter, each in zip(parameters, gradient, strict=True):
                parameter.grad = torch.empty_like(parameter).copy_(each)
        adam.step()
        exact.step()
        for our, their in zip(ours, theirs, strict=True):
            torch.testing.assert_close(our, their)
    for our, their in zip(ours, theirs, strict=True):
        for name, value in exact.state[their].items():
            torch.testing.assert_close(adam.state[our][name], value)
