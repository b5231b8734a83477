"""The faster versions give what the reference gives, in float32 to 1e-5 of the float64 reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from poecaps import CapsuleExperts
from poecaps import functional as F
from poecaps.kernels import votefree
from tests.kernels.problems import OPTIONS, problem, relative_error


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let most problems here have several blocks of images and of inputs, and the last be a smaller one."""
    monkeypatch.setattr(votefree, "BLOCK", 2)
    monkeypatch.setattr(votefree, "MANY", 512)


@pytest.mark.parametrize("winners", [None, 2])
@pytest.mark.parametrize("outputs", [5, 9])
def test_the_learning_rule(outputs: int, winners: int | None, generator: torch.Generator) -> None:
    layer = CapsuleExperts(7, 3, outputs, 4, winners=winners, sharpness=5.0, generator=generator)
    exact = CapsuleExperts(7, 3, outputs, 4, winners=winners, sharpness=5.0, backend="reference", dtype=torch.float64)
    layer.reset_parameters(std=1.0, generator=generator)
    exact.load_state_dict(layer.state_dict())
    x, _ = problem((5, 7, 3, 1, 1), generator)
    loss = layer.contrastive_divergence(x, 2)
    (3 * loss).backward()
    expected = exact.contrastive_divergence(x.double(), 2)
    (3 * expected).backward()
    assert layer.weight.grad is not None
    assert exact.weight.grad is not None
    assert loss.item() == pytest.approx(expected.item(), rel=1e-4, abs=1e-6)
    assert relative_error(layer.weight.grad, exact.weight.grad) < 1e-5


@pytest.mark.parametrize("sizes", [(9, 13, 3, 5, 4), (1, 40, 8, 6, 16), (5, 13, 8, 1, 2)])
@pytest.mark.parametrize("iterations", [1, 3, 8])
@pytest.mark.parametrize(("normalize", "agreement"), OPTIONS)
def test_the_learning_rule_with_every_kind_of_routing(
    sizes: tuple[int, ...], iterations: int, normalize: F.Axis, agreement: F.Agreement, generator: torch.Generator
) -> None:
    x, weight = problem(sizes, generator)
    x[:, 2] = 0
    _, i, k, j, d = sizes
    options: dict[str, Any] = {"iterations": iterations, "normalize": normalize, "agreement": agreement}
    layer = CapsuleExperts(i, k, j, d, backend="cpu", **options)
    exact = CapsuleExperts(i, k, j, d, backend="reference", dtype=torch.float64, **options)
    for each in (layer, exact):
        each.load_state_dict({"weight": weight, "balance": torch.zeros(j)})
        each.contrastive_divergence(x.to(each.weight.dtype)).backward()
    assert layer.weight.grad is not None
    assert exact.weight.grad is not None
    assert relative_error(layer.weight.grad, exact.weight.grad) < 1e-5
    with torch.no_grad():
        loss = layer.contrastive_divergence(x)
    assert loss.item() == pytest.approx(exact.contrastive_divergence(x.double()).item(), rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("outputs", [5, 9])
@torch.no_grad()
def test_no_images_at_all(outputs: int) -> None:
    layer = CapsuleExperts(7, 3, outputs, 4)
    x = torch.zeros(0, 7, 3)
    assert layer(x).shape == (0, outputs, 4)
    assert layer.reconstruct(x).shape == (0, 7, 3)
    assert layer.free_energy(x).shape == (0,)


@pytest.mark.parametrize("outputs", [5, 9])
def test_learning_takes_the_faster_versions_on_the_cpu(
    outputs: int, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A training step and an encoding without gradients never ask the reference; a forward with gradients does."""

    def no_votes(*_: Tensor) -> Tensor:
        raise AssertionError("votes were made")

    layer = CapsuleExperts(7, 3, outputs, 4, winners=2, generator=generator).eval()
    x, _ = problem((2, 7, 3, 5, 4), generator)
    expected = layer(x).detach()
    monkeypatch.setattr(F, "votes", no_votes)
    layer.contrastive_divergence(x, 2, mixing="bernoulli", chain=x.clone(), generator=generator).backward()
    with torch.no_grad():
        torch.testing.assert_close(layer(x), expected)
    with pytest.raises(AssertionError, match="votes were made"):
        layer(x)
