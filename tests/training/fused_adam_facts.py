"""Facts about FusedAdam and its kernel, on a GPU or in Triton's interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from poecaps.training import optim

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def assert_steps_of_torch(
    device: str, weight_decay: float, size: float, generator: torch.Generator
) -> None:
    """Take five steps with gradients of a size; at 1e-8, Adam's epsilon matters."""
    start = [
        torch.randn(6, 3, 2, 2, generator=generator).to(memory_format=torch.channels_last),
        torch.ones(1500),
    ]
    gradients = [
        [size * torch.randn(each.shape, generator=generator) for each in start] for _ in range(5)
    ]
    ours, theirs = (
        [torch.nn.Parameter(each.to(device, copy=True)) for each in start] for _ in range(2)
    )
    groups, exact_groups = (
        [
            {"params": [first], "factor": 1.0},
            {"params": [second], "factor": 3.0},
        ]
        for first, second in (ours, theirs)
    )
    fused = optim.FusedAdam(groups, 0.01, (0.8, 0.999), weight_decay)
    exact = torch.optim.Adam(exact_groups, lr=0.01, betas=(0.8, 0.999), weight_decay=weight_decay)
    for step, gradient in enumerate(gradients):
        fused.zero_grad()
        assert all(parameter.grad is None for parameter in ours)
        for optimizer in (fused, exact):
            optim.set_learning_rate(optimizer, 0.01 / (step + 1))
        for parameters in (ours, theirs):
            for parameter, each in zip(parameters, gradient, strict=True):
                # Not always in the memory layout of the parameter.
                parameter.grad = each.to(device, copy=True)
        fused.step()
        exact.step()
        for our, their in zip(ours, theirs, strict=True):
            torch.testing.assert_close(our, their)
    for our, their in zip(ours, theirs, strict=True):
        for name, value in exact.state[their].items():
            # PyTorch computes 1 − β₂ in float32.
            difference = fused.state[our][name] - value.to(device)
            assert difference.norm() <= 3e-5 * value.norm()


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("size", [1.0, 1e-8])
def test_the_kernel_takes_the_steps_of_torch(
    weight_decay: float, size: float, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    from poecaps.kernels.triton import adam
    from poecaps.kernels.triton.launch import launch

    launched: list[Any] = []

    def recorded(kernel: Any, *rest: Any) -> None:
        launched.append(kernel)
        launch(kernel, *rest)

    monkeypatch.setattr(adam, "launch", recorded)
    monkeypatch.setattr(optim, "LARGE", 50)
    assert_steps_of_torch(DEVICE, weight_decay, size, generator)
    assert launched == [adam.adam_kernel] * 10
