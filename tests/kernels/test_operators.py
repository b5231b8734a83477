"""The operators of the compiled C keep their results in `torch.compile`, without a graph break."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

from poecaps import CapsuleExperts, squash
from poecaps import functional as F
from poecaps.kernels.cpu import routing
from tests.kernels.problems import OPTIONS, needs_simd, problem

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = [needs_simd, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(autouse=True)
def simd(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let small problems run in C, and nothing by the reference."""
    monkeypatch.setattr(routing, "MIN_MULTIPLICATIONS", 0)
    torch.compiler.reset()


@pytest.fixture
def no_votes(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Tensor) -> Tensor:
        raise AssertionError("the reference computed votes")

    monkeypatch.setattr(F, "votes", refuse)


def make(generator: torch.Generator, **given: Any) -> tuple[CapsuleExperts, Tensor]:
    layer = CapsuleExperts(13, 8, 5, 16, sharpness=5.0, **given)
    layer.reset_parameters(std=1.0, generator=generator)
    return layer, squash(torch.randn(18, 13, 8, generator=generator)).to(layer.weight.dtype)


def compiled(function: Callable[..., Any], **given: Any) -> Callable[..., Any]:
    found: Callable[..., Any] = torch.compile(
        function, backend="aot_eager", fullgraph=True, **given
    )
    return found


@pytest.mark.parametrize("sizes", [(5, 13, 8, 3, 16), (5, 3, 8, 9, 16)])
@pytest.mark.parametrize(("normalize", "agreement"), OPTIONS)
def test_opcheck(
    sizes: tuple[int, ...], normalize: str, agreement: str, generator: torch.Generator
) -> None:
    """Schema, shapes and strides of the fake kernels, and registration of the gradient."""
    from poecaps.kernels.cpu import operators

    x, weight = (each.requires_grad_() for each in problem(sizes, generator))
    torch.library.opcheck(operators.route, (x, weight, 3, 2.0, normalize, agreement))
    torch.library.opcheck(operators.route, (x, weight.detach(), 1, 2.0, normalize, agreement))


@pytest.mark.usefixtures("no_votes")
@pytest.mark.parametrize("winners", [None, 2])
@pytest.mark.parametrize("method", ["forward", "free_energy"])
def test_compiled_layers(method: str, winners: int | None, generator: torch.Generator) -> None:
    layer, x = make(generator, winners=winners)
    found: list[tuple[Tensor | None, ...]] = []
    for function in (getattr(layer, method), compiled(getattr(layer, method))):
        layer.zero_grad()
        leaf = x.clone().requires_grad_()
        value = function(leaf)
        value.square().sum().backward()
        found.append((value.detach(), leaf.grad, layer.weight.grad))
    for eager, traced in zip(*found, strict=True):
        torch.testing.assert_close(traced, eager)


@pytest.mark.usefixtures("no_votes")
def test_a_frozen_layer_and_capsules_with_a_gradient(generator: torch.Generator) -> None:
    """As a sampler differentiates an energy."""
    layer, x = make(generator)
    layer.requires_grad_(False)
    slopes = []
    for function in (layer.free_energy, compiled(layer.free_energy)):
        leaf = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(function(leaf).sum(), leaf)
        slopes.append(slope)
    torch.testing.assert_close(slopes[1], slopes[0])


@pytest.mark.usefixtures("no_votes")
def test_dynamic_shapes_half_precision_and_autocast(generator: torch.Generator) -> None:
    layer, x = make(generator)
    layer.requires_grad_(False)
    function = compiled(layer, dynamic=True)
    for count in (8, 5, 18):
        torch.testing.assert_close(function(x[:count]), layer(x[:count]))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(compiled(layer)(x), layer(x))
    half, y = make(generator, dtype=torch.bfloat16)
    half.requires_grad_(False)
    torch.testing.assert_close(compiled(half)(y), half(y))


def test_functional_transforms_are_left_to_the_reference(generator: torch.Generator) -> None:
    layer, x = make(generator)
    layer.requires_grad_(False)

    def slope_of_each(x: Tensor) -> Tensor:
        slope = torch.func.grad(lambda image: layer.free_energy(image[None]).sum())
        slopes: Tensor = torch.func.vmap(slope)(x)
        return slopes

    torch.testing.assert_close(compiled(slope_of_each)(x), slope_of_each(x))


def test_an_exported_program_does_not_need_the_operators(generator: torch.Generator) -> None:
    layer, x = make(generator)
    program = torch.export.export(layer.requires_grad_(False), (x,))
    assert "poecaps" not in str(program.graph)
    torch.testing.assert_close(program.module()(x), layer(x), rtol=1e-4, atol=1e-5)
