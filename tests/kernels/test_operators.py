"""Operators keep the results of the compiled C in `torch.compile`, without a graph break."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

from poecaps import CapsuleExperts, squash
from poecaps import functional as F
from poecaps.kernels import operators
from poecaps.kernels.cpu import routing
from poecaps.layer import CapsuleDecoder
from tests.kernels.operator_calls import SIZES, operator_calls
from tests.kernels.problems import needs_simd, problem

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


@pytest.mark.parametrize(
    ("sizes", "normalize", "agreement"),
    [(SIZES[0], "inputs", "cosine"), (SIZES[1], "outputs", "inner")],
)
def test_opcheck(
    sizes: tuple[int, ...], normalize: str, agreement: str, generator: torch.Generator
) -> None:
    """Schema, shapes and strides of the fake kernels, and registration of the gradient."""
    for operator, arguments in operator_calls(sizes, normalize, agreement, generator):
        torch.library.opcheck(operator, arguments)


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
@pytest.mark.parametrize("winners", [None, 2])
@pytest.mark.parametrize("mixing", F.MIXINGS)
@pytest.mark.parametrize("chained", [False, True])
def test_compiled_learning(
    chained: bool, mixing: F.Mixing, winners: int | None, generator: torch.Generator
) -> None:
    """Loss, gradient, chain and balance."""
    layer, x = make(generator, winners=winners)
    start = squash(torch.randn(7, 13, 8, generator=generator))
    uniform = torch.rand(2, 7 if chained else 18, 5, generator=generator)
    found = []
    for is_compiled in (False, True):
        layer.zero_grad()
        layer.balance.zero_()
        chain = start.clone() if chained else None

        def loss(x: Tensor, chain: Tensor | None) -> Tensor:
            return layer.contrastive_divergence(x, 2, mixing=mixing, chain=chain, uniform=uniform)

        value = (compiled(loss) if is_compiled else loss)(x, chain)
        (3 * value).backward()
        found.append((value.detach(), layer.weight.grad, layer.balance.clone(), chain))
    for eager, traced in zip(*found, strict=True):
        torch.testing.assert_close(traced, eager)
    with torch.no_grad():
        torch.testing.assert_close(compiled(layer.contrastive_divergence)(x).requires_grad, False)


@pytest.mark.usefixtures("no_votes")
def test_compiled_decoders(generator: torch.Generator) -> None:
    decoder = CapsuleDecoder(5, 16, 13, 8, generator=generator)
    decoder.reset_parameters(std=1.0, generator=generator)
    y, x = (squash(torch.randn(18, *each, generator=generator)) for each in ((5, 16), (13, 8)))
    found = []
    for function in (decoder.contrastive_divergence, compiled(decoder.contrastive_divergence)):
        decoder.zero_grad()
        value = function(y, x)
        value.backward()
        found.append((value.detach(), decoder.weight.grad))
    for eager, traced in zip(*found, strict=True):
        torch.testing.assert_close(traced, eager)


@pytest.mark.usefixtures("no_votes")
@pytest.mark.parametrize("winners", [None, 2])
def test_compiled_reconstructions(winners: int | None, generator: torch.Generator) -> None:
    layer, x = make(generator, winners=winners)
    with torch.no_grad():
        torch.testing.assert_close(compiled(layer.reconstruct)(x), layer.reconstruct(x))
    found = []
    for function in (layer.reconstruct, compiled(layer.reconstruct)):
        layer.zero_grad()
        leaf = x.clone().requires_grad_()
        function(leaf).square().sum().backward()
        found.append((leaf.grad, layer.weight.grad))
    for eager, traced in zip(*found, strict=True):
        torch.testing.assert_close(traced, eager)


def test_the_held_preactivation(generator: torch.Generator) -> None:
    decoder = CapsuleDecoder(5, 16, 13, 8, generator=generator)
    y = squash(torch.randn(18, 5, 16, generator=generator))
    found = []
    for function in (decoder.held_preactivation, compiled(decoder.held_preactivation)):
        decoder.zero_grad()
        function(y).square().sum().backward()
        found.append(decoder.weight.grad)
    torch.testing.assert_close(found[1], found[0])


def test_wrong_arguments_of_an_operator() -> None:
    """An error, real and fake alike, and never a read beyond the end of a tensor."""
    x, weight = torch.zeros(2, 13, 8), torch.zeros(13, 5, 16, 8)
    options = (3, 1.0, "inputs", "cosine", False)
    wrong: list[tuple[Tensor, Tensor, type[Exception], str]] = [
        (x[:, :12], weight, ValueError, r"x must have shape \(B, I=13, K=8\)"),
        (x[..., :7], weight, ValueError, r"x must have shape \(B, I=13, K=8\)"),
        (x, weight[0], ValueError, r"weight must have shape \(I, J, D, K\)"),
        (x.double(), weight, TypeError, r"x is torch\.float64 but weight is torch\.float32"),
        (x.int(), weight, TypeError, "x must be a floating-point tensor"),
        (x.double(), weight.double(), ValueError, "they compute in torch.float32, but x is"),
        (x.to("meta"), weight.to("meta"), ValueError, "run on cpu and cuda, but x is on meta"),
        (x.half(), weight.half(), ValueError, "they compute in torch.float32, but x is"),
    ]
    for given, maps, error, message in wrong:
        with pytest.raises(error, match=message):
            operators.route(given, maps, *options)
    z, _, h, lse = operators.route(x, weight, *options)
    short, needs = (z[1:], h, lse, None, None), (True, True)
    with pytest.raises(ValueError, match=r"z must have shape \(R=3, B=2, J=5, D=16\)"):
        operators.route_backward(x, weight, *short, *options[:4], *needs)
    with pytest.raises(ValueError, match=r"grad_z must have shape \(B=2, J=5, D=16\)"):
        operators.route_backward(x, weight, z, h, lse, z[0, :1], None, *options[:4], *needs)
    with pytest.raises(ValueError, match="needs uniform"):
        operators._contrastive_divergence(
            x, weight, *options[:4], 1, "bernoulli", None, None, None, None, 1, False
        )


@pytest.mark.skipif(
    not hasattr(torch.library, "register_autocast"), reason="this PyTorch has no rules of autocast"
)
def test_operators_under_autocast(generator: torch.Generator) -> None:
    """They compute in float32, whatever is given to them: results and gradients."""
    x, weight = problem((4, 13, 8, 5, 16), generator)
    options = (3, 1.0, "inputs", "cosine", False)
    x, weight = x.bfloat16(), weight.bfloat16().float()
    exact = operators.route(x.float(), weight, *options)[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for given in (weight, weight.bfloat16()):
            assert torch.equal(operators.route(x, given, *options)[0], exact)
    routing, needs = options[:-1], (True, True)
    grad_z, grad_x = torch.ones(4, 5, 16), torch.ones(4, 13, 8)

    def gradients(x: Tensor, weight: Tensor) -> list[Tensor]:
        z, _, h, lse = operators.route(x, weight, *options)
        record = (z, h, lse, grad_z.to(x.dtype), None)
        up = operators.route_backward(x, weight, *record, *routing, *needs)
        down = operators._reconstruct_backward(
            x, weight, grad_x.to(x.dtype), *routing, None, None, *needs
        )
        return [*up, *down]

    expected = gradients(x.float(), weight)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = gradients(x, weight.bfloat16())
    assert all(torch.equal(ours, true) for ours, true in zip(found, expected, strict=True))


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


@pytest.mark.usefixtures("no_votes")
@pytest.mark.parametrize("needs_grad", [False, True])
def test_mapped_layers_are_compiled(needs_grad: bool, generator: torch.Generator) -> None:
    layer, x = make(generator)
    layer.requires_grad_(needs_grad)
    parts = x.unflatten(0, (6, 3)).transpose(0, 1)  # three elements of six images

    def outputs(x: Tensor) -> tuple[Tensor, Tensor]:
        return layer(x), layer.reconstruct(x)

    mapped = torch.func.vmap(outputs, in_dims=1, out_dims=1)
    found = []
    for function, given in ((compiled(mapped), parts.transpose(0, 1)), (outputs, x)):
        results = [each.flatten(0, 1) if each.dim() == 4 else each for each in function(given)]
        found.append([each.detach() for each in results])
        if needs_grad:
            layer.zero_grad()
            sum(each.square().sum() for each in results).backward()  # type: ignore[union-attr]
            assert layer.weight.grad is not None
            found[-1].append(layer.weight.grad)
    for traced, expected in zip(*found, strict=True):
        torch.testing.assert_close(traced, expected)


@pytest.mark.usefixtures("no_votes")
def test_mapped_operators(generator: torch.Generator) -> None:
    """Over capsules, and over weights."""
    x, weight = problem((6, 13, 8, 5, 16), generator)
    weights = torch.stack((weight, 2 * weight, weight.flip(0)))
    balance, options = torch.randn(5, generator=generator), (3, 2.0, "inputs", "inner")

    def results(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        z, c, _, _ = operators.route(x, weight, *options, True)
        return z, c, operators._reconstruct(x, weight, *options, 2, balance)

    for in_dims, given in (((0, None), (x.unsqueeze(1), weight)), ((None, 0), (x, weights))):
        found = torch.func.vmap(results, in_dims)(*given)
        pairs = [(each, weight) for each in given[0]] if in_dims[1] is None else []
        pairs = pairs or [(x, each) for each in weights]
        expected = zip(*(results(*pair) for pair in pairs), strict=True)
        for ours, each in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, torch.stack(each))


def test_functional_transforms_are_left_to_the_reference(
    generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, x = make(generator)
    layer.requires_grad_(False)

    def slope_of_each(x: Tensor) -> Tensor:
        slope = torch.func.grad(lambda image: layer.free_energy(image[None]).sum())
        slopes: Tensor = torch.func.vmap(slope)(x)
        return slopes

    monkeypatch.setattr(operators, "_has_warned", [])
    with pytest.warns(UserWarning, match=r"computed by poecaps\.functional"):
        traced = compiled(slope_of_each)(x)
    torch.testing.assert_close(traced, slope_of_each(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_program_has_operators_only_if_asked_for(
    strict: bool, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By default it does not need poecaps, as one warning says; a backend has its speed."""
    monkeypatch.setattr(operators, "_has_warned_of_export", [])
    layer, x = make(generator)
    layer.requires_grad_(False)
    dynamic: dict[str, Any] = {
        "dynamic_shapes": ({0: torch.export.Dim("batch")},),
        "strict": strict,
    }
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            program = torch.export.export(layer, (x,), **dynamic)
        layer.backend = "reference"
        torch.export.export(layer, (x,), **dynamic)
    (message,) = (str(each.message) for each in caught if "poecaps" in str(each.message))
    assert "set layer.backend = 'simd'" in message
    assert "poecaps" not in str(program.graph)
    torch.testing.assert_close(program.module()(x[:7]), layer(x[:7]), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(program.module()(x), layer(x), rtol=1e-4, atol=1e-5)
    layer.backend = "simd"
    program = torch.export.export(layer, (x,), **dynamic)
    assert "poecaps.route" in str(program.graph)
    for count in (18, 7):
        torch.testing.assert_close(program.module()(x[:count]), layer(x[:count]))
