"""Facts about Adam's kernel, on a GPU or in Triton's interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from poecaps.kernels.launch import run
from poecaps.training import adam

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def assert_steps_of_torch(device: str, l2: float, size: float, generator: torch.Generator) -> None:
    """Take five steps along gradients of a size, of which those near 1e-8 tell what is added to the divisor."""
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
    fused = adam.FusedAdam(ours, 0.01, (0.8, 0.999), l2)
    exact = torch.optim.Adam(theirs, lr=0.01, betas=(0.8, 0.999), weight_decay=l2)
    for step, gradient in enumerate(gradients):
        fused.zero_grad()
        assert all(parameter.grad is None for parameter in ours)
        fused.param_groups[0]["lr"].fill_(0.01 / (step + 1))
        exact.param_groups[0]["lr"] = 0.01 / (step + 1)
        for parameters in (ours, theirs):
            for parameter, each in zip(parameters, gradient, strict=True):
                parameter.grad = each.to(
                    device, copy=True
                )  # not always laid out as the parameter is
        fused.step()
        exact.step()
        for our, their in zip(ours, theirs, strict=True):
            torch.testing.assert_close(our, their)
    for our, their in zip(ours, theirs, strict=True):
        for name, value in exact.state[their].items():
            kept = fused.state[our][name]
            assert (
                kept - value.to(device)
            ).norm() <= 3e-5 * value.norm()  # torch's own takes 1 − β₂ in float32


@pytest.mark.parametrize("l2", [0.0, 0.1])
@pytest.mark.parametrize("size", [1.0, 1e-8])
def test_the_kernel_takes_the_steps_that_torch_takes(
    l2: float, size: float, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    def noted(name: str, *rest: Any) -> None:
        calls.append(name)
        run(name, *rest)

    monkeypatch.setattr(adam, "run", noted)
    monkeypatch.setattr(adam, "LARGE", 50)
    assert_steps_of_torch(DEVICE, l2, size, generator)
    assert calls == ["adam_step"] * 10
