"""The faster versions give what the reference gives, in float32 to 1e-5 of the float64 reference."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

from poecaps import CapsuleExperts, squash
from poecaps import functional as F
from poecaps.kernels import fanout, votefree
from tests.kernels.problems import OPTIONS, problem, relative_error

if TYPE_CHECKING:
    from types import ModuleType

SIZES = [
    (1, 1, 1, 1, 1),
    (2, 7, 3, 5, 4),
    (9, 21, 4, 7, 5),
    (3, 40, 8, 6, 16),
    (5, 13, 2, 1, 9),
    (4, 3, 6, 11, 2),
    (5, 40, 8, 3, 1),
]
VERSIONS = [votefree, fanout]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let most problems here have several blocks of images and of inputs, and the last be a smaller one."""
    monkeypatch.setattr(votefree, "BLOCK", 2)
    monkeypatch.setattr(votefree, "MANY", 512)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("iterations", [1, 2, 3, 8])
@pytest.mark.parametrize(("normalize", "agreement"), OPTIONS)
def test_routing(
    version: ModuleType,
    sizes: tuple[int, ...],
    iterations: int,
    normalize: F.Axis,
    agreement: F.Agreement,
    generator: torch.Generator,
) -> None:
    x, weight = problem(sizes, generator)
    # Inner products are unbounded: sharper, and eight iterations would magnify rounding beyond any fixed bound.
    options = {
        "iterations": iterations,
        "sharpness": 5.0 if agreement == "cosine" else 1.0,
        "normalize": normalize,
        "agreement": agreement,
    }
    exact = F.routing_by_agreement(x.double(), weight.double(), **options)  # type: ignore[arg-type]
    ours = version.routing_by_agreement(x, weight, **options)
    assert relative_error(ours.coefficients, exact.coefficients) < 1e-5
    assert relative_error(ours.preactivation, exact.preactivation) < 1e-5


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("sizes", SIZES)
def test_up_and_down_with_held_coefficients(
    version: ModuleType, sizes: tuple[int, ...], generator: torch.Generator
) -> None:
    x, weight = problem(sizes, generator)
    c = torch.rand(sizes[0], sizes[1], sizes[3], generator=generator)
    y = squash(torch.randn(sizes[0], sizes[3], sizes[4], generator=generator))
    exact = (x.double(), weight.double().requires_grad_(), c.double())
    weight.requires_grad_()
    for function in ("preactivation", "reconstruction"):
        first = x if function == "preactivation" else y
        ours = getattr(version, function)(first, weight, c)
        reference = getattr(F, function)(first.double(), *exact[1:])
        assert relative_error(ours, reference) < 1e-5
    pull = torch.randn(sizes[0], sizes[3], sizes[4], generator=generator)
    (version.preactivation(x, weight, c) * pull).sum().backward()
    (F.preactivation(*exact) * pull).sum().backward()
    assert weight.grad is not None
    assert exact[1].grad is not None
    assert relative_error(weight.grad, exact[1].grad) < 1e-5


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(("normalize", "agreement"), OPTIONS)
def test_zero_capsules_and_zero_weights(
    version: ModuleType, normalize: F.Axis, agreement: F.Agreement, generator: torch.Generator
) -> None:
    x, weight = problem((2, 7, 3, 5, 4), generator)
    x[:, 2] = 0
    weight[:, 1] = 0
    options = {"iterations": 3, "sharpness": 5.0, "normalize": normalize, "agreement": agreement}
    ours = version.routing_by_agreement(x, weight, **options)
    exact = F.routing_by_agreement(x.double(), weight.double(), **options)  # type: ignore[arg-type]
    assert relative_error(ours.coefficients, exact.coefficients) < 1e-5
    assert relative_error(ours.preactivation, exact.preactivation) < 1e-5


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("normalize", F.AXES)
def test_maps_that_forget_almost_everything(
    version: ModuleType, normalize: F.Axis, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Maps of rank 1, whose votes are often much shorter than capsule and map could make them."""
    monkeypatch.setattr(votefree, "FEW", 7)
    x, weight = problem((9, 40, 8, 6, 16), generator)
    weight = weight[:, :, :1] * torch.randn(40, 6, 16, 1, generator=generator)
    options = {"iterations": 3, "sharpness": 5.0, "normalize": normalize, "agreement": "cosine"}
    ours = version.routing_by_agreement(x, weight, **options)
    exact = F.routing_by_agreement(x.double(), weight.double(), **options)  # type: ignore[arg-type]
    assert relative_error(ours.coefficients, exact.coefficients) < 1e-5
    assert relative_error(ours.preactivation, exact.preactivation) < 1e-5


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
