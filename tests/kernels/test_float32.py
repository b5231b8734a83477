"""Half precision and autocast on a CPU: as exact as the dtype of the result, without votes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

from poecaps import CapsuleExperts, squash
from poecaps import functional as F
from poecaps.layer import CapsuleDecoder
from tests.kernels.problems import needs_simd, relative_error

if TYPE_CHECKING:
    from poecaps.kernels.dispatch import Backend

BACKENDS = [None, "torch", pytest.param("simd", marks=needs_simd)]
HALF = [torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def no_votes(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(x: Tensor, weight: Tensor) -> Tensor:
        if x.dtype == torch.float64:
            return torch.einsum("bik,ijdk->bijd", x, weight)
        raise AssertionError("the reference computed votes")

    monkeypatch.setattr(F, "votes", refuse)


def layers(
    backend: Backend | None, dtype: torch.dtype, generator: torch.Generator, **given: Any
) -> tuple[CapsuleExperts, CapsuleExperts, Tensor]:
    """Return a layer, the reference in float64 with the same weights, and capsules."""
    given = {"sharpness": 5.0, **given}
    layer = CapsuleExperts(13, 8, 5, 16, backend=backend, dtype=dtype, **given)
    exact = CapsuleExperts(13, 8, 5, 16, backend="reference", dtype=torch.float64, **given)
    layer.reset_parameters(std=1.0, generator=generator)
    exact.load_state_dict(layer.state_dict())
    x = squash(torch.randn(18, 13, 8, generator=generator)).to(dtype)
    return layer, exact, x


def error_of(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("winners", [None, 2])
def test_half_precision(
    backend: Backend | None,
    dtype: torch.dtype,
    winners: int | None,
    generator: torch.Generator,
) -> None:
    """Only the result is rounded; norms stay below 1."""
    layer, exact, x = layers(backend, dtype, generator, winners=winners)
    layer.requires_grad_(False)
    for method in ("forward", "reconstruct"):
        ours, true = (getattr(each, method)(x.to(each.weight.dtype)) for each in (layer, exact))
        assert ours.dtype == dtype
        assert relative_error(ours, true) < 2 * error_of(dtype)
        assert ours.double().norm(dim=-1).max() < 1
    routed = layer.route(x)
    assert routed.preactivation.dtype == dtype
    assert routed.coefficients.dtype == torch.float32


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_norms_that_would_be_rounded_to_one(dtype: torch.dtype, generator: torch.Generator) -> None:
    layer, _, x = layers(None, dtype, generator)
    with torch.no_grad():
        layer.weight.mul_(100)
        assert layer(x).double().norm(dim=-1).max() < 1


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_gradients_in_half_precision(
    backend: Backend | None, dtype: torch.dtype, generator: torch.Generator
) -> None:
    layer, exact, x = layers(backend, dtype, generator)
    for each in (layer, exact):
        leaf = x.detach().clone().to(each.weight.dtype).requires_grad_()
        each(leaf).square().sum().backward()
        each.slope = leaf.grad  # type: ignore[assignment]
    for ours, true in ((layer.slope, exact.slope), (layer.weight.grad, exact.weight.grad)):
        assert isinstance(ours, Tensor)
        assert isinstance(true, Tensor)
        assert ours.dtype == dtype
        assert relative_error(ours, true) < 4 * error_of(dtype)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("chained", [False, True])
def test_learning_in_half_precision(
    backend: Backend | None, dtype: torch.dtype, chained: bool, generator: torch.Generator
) -> None:
    layer, exact, x = layers(backend, dtype, generator, winners=2)
    chain = x.flip(0).clone() if chained else None
    found = []
    for each in (layer, exact):
        to = each.weight.dtype
        own = None if chain is None else chain.to(to, copy=True)
        loss = each.contrastive_divergence(x.to(to), chain=own)
        assert loss.dtype in (torch.float32, torch.float64)
        loss.backward()
        assert each.weight.grad is not None
        assert each.weight.grad.dtype == to
        found.append((each.weight.grad, own))
    assert relative_error(found[0][0], found[1][0]) < 2 * error_of(dtype)
    if found[0][1] is not None and found[1][1] is not None:
        assert relative_error(found[0][1], found[1][1]) < 2 * error_of(dtype)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("of_x", [torch.float32, torch.bfloat16], ids=str)
def test_autocast(backend: Backend | None, of_x: torch.dtype, generator: torch.Generator) -> None:
    """Backward inside of autocast is as exact as outside."""
    layer, exact, x = layers(backend, torch.float32, generator)
    x = x.to(of_x)
    exact(x.double()).square().sum().backward()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        code = layer(x)
        assert code.dtype == torch.bfloat16
        assert relative_error(code.detach(), exact(x.double()).detach()) < 2 * 2**-8
        layer.requires_grad_(True)
        layer.free_energy(x).sum().backward()
    expected = CapsuleExperts(13, 8, 5, 16, sharpness=5.0, backend="reference", dtype=torch.float64)
    expected.load_state_dict(exact.state_dict())
    expected.free_energy(x.double()).sum().backward()
    assert layer.weight.grad is not None
    assert layer.weight.grad.dtype == torch.float32
    assert expected.weight.grad is not None
    assert relative_error(layer.weight.grad, expected.weight.grad) < 2**-7


def test_a_decoder_in_half_precision(generator: torch.Generator) -> None:
    decoder = CapsuleDecoder(5, 16, 13, 8, dtype=torch.bfloat16, generator=generator)
    exact = CapsuleDecoder(5, 16, 13, 8, dtype=torch.float64, backend="reference")
    decoder.reset_parameters(std=1.0, generator=generator)
    exact.load_state_dict(decoder.state_dict())
    y = squash(torch.randn(9, 5, 16, generator=generator)).bfloat16()
    x = squash(torch.randn(9, 13, 8, generator=generator)).bfloat16()
    for each in (decoder, exact):
        to = each.weight.dtype
        each.contrastive_divergence(y.to(to), x.to(to)).backward()
    assert decoder.weight.grad is not None
    assert exact.weight.grad is not None
    assert relative_error(decoder.weight.grad, exact.weight.grad) < 2**-7
    with torch.no_grad():
        held = decoder.held_preactivation(y)
        assert held.dtype == torch.bfloat16
        assert relative_error(held, exact.held_preactivation(y.double())) < 2**-7
