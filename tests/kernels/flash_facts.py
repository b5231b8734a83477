"""The Triton kernels give what the reference gives: on a GPU, or in Triton's interpreter, started by `test_flash`."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from poecaps import CapsuleExperts, kernels, squash
from poecaps import functional as F
from poecaps.kernels import flash
from poecaps.layer import CapsuleDecoder

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
OPTIONS = [(axis, agreement) for axis in F.AXES for agreement in F.AGREEMENTS]
ODD = (2, 7, 3, 5, 4)
SIZES = [(1, 1, 1, 1, 1), (18, 3, 3, 6, 9), (3, 9, 8, 3, 16), (4, 3, 6, 11, 2), (2, 3, 33, 2, 40)]


def problem(sizes: tuple[int, ...], generator: torch.Generator) -> tuple[Tensor, Tensor]:
    b, i, k, j, d = sizes
    x = squash(torch.randn(b, i, k, generator=generator))
    return x.to(DEVICE), torch.randn(i, j, d, k, generator=generator).to(DEVICE)


def routing_options(axis: F.Axis, agreement: F.Agreement, iterations: int) -> dict[str, Any]:
    # Inner products are unbounded: sharper, and eight iterations would magnify rounding beyond any fixed bound.
    sharpness = 4.0 if agreement == "cosine" else 0.5
    return {"iterations": iterations, "sharpness": sharpness, "normalize": axis, "agreement": agreement}


def assert_close(ours: Tensor | None, exact: Tensor | None, bound: float = 1e-5) -> None:
    assert ours is not None
    assert exact is not None
    assert ours.shape == exact.shape
    assert ((ours.double() - exact).norm() / exact.norm()).item() < bound


def assert_routes_alike(x: Tensor, weight: Tensor, options: dict[str, Any]) -> None:
    """Values, and gradients through the iterations, against float64."""
    generator = torch.Generator().manual_seed(0)
    exact_x, exact_weight = x.double().requires_grad_(), weight.double().requires_grad_()
    exact = F.routing_by_agreement(exact_x, exact_weight, **options)
    with torch.no_grad():
        bare = kernels.routing_by_agreement(x, weight, **options, backend="triton")
    assert_close(bare.preactivation, exact.preactivation)
    assert_close(bare.coefficients, exact.coefficients)
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    ours = kernels.routing_by_agreement(x, weight, **options, backend="triton")
    assert_close(ours.preactivation, exact.preactivation)
    pull = torch.randn(exact.preactivation.shape, generator=generator).to(x.device)
    (ours.preactivation * pull).sum().backward()
    (exact.preactivation * pull).sum().backward()
    assert_close(x.grad, exact_x.grad)
    assert_close(weight.grad, exact_weight.grad)


@pytest.mark.parametrize("iterations", [1, 2, 3, 8])
@pytest.mark.parametrize(("normalize", "agreement"), OPTIONS)
def test_routing_and_its_gradient(
    normalize: F.Axis, agreement: F.Agreement, iterations: int, generator: torch.Generator
) -> None:
    sizes = ODD if iterations < 8 else (2, 3, 2, 3, 2)  # the interpreter is slow
    assert_routes_alike(*problem(sizes, generator), routing_options(normalize, agreement, iterations))


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("normalize", F.AXES)
def test_any_size(sizes: tuple[int, ...], normalize: F.Axis, generator: torch.Generator) -> None:
    assert_routes_alike(*problem(sizes, generator), routing_options(normalize, "cosine", 3))


@pytest.mark.parametrize(("normalize", "agreement"), OPTIONS)
def test_zero_capsules_and_zero_weights(normalize: F.Axis, agreement: F.Agreement, generator: torch.Generator) -> None:
    x, weight = problem(ODD, generator)
    x[:, 2] = 0
    x[1] = 0
    weight[:, 1] = 0
    assert_routes_alike(x, weight, routing_options(normalize, agreement, 3))


def test_logits_too_large_for_a_plain_exponential(generator: torch.Generator) -> None:
    """e^(2·200) overflows float32: the softmax must take its maximum out."""
    x, weight = problem(ODD, generator)
    options = {"iterations": 3, "sharpness": 200.0, "normalize": "inputs", "agreement": "cosine"}
    with torch.no_grad():
        ours = kernels.routing_by_agreement(x, weight, **options, backend="triton")  # type: ignore[arg-type]
    exact = F.routing_by_agreement(x.double(), weight.double(), **options)  # type: ignore[arg-type]
    assert_close(ours.preactivation, exact.preactivation, 1e-4)  # what rounding a logit of 400 costs


@pytest.mark.parametrize("given", [True, False], ids=["given", "told by history"])
@pytest.mark.parametrize("sizes", [ODD, (4, 3, 6, 11, 2), (3, 2, 4, 70, 4)])
def test_up_and_down_with_held_coefficients(sizes: tuple[int, ...], given: bool, generator: torch.Generator) -> None:
    x, weight = problem(sizes, generator)
    options = routing_options("inputs", "cosine", 3)
    with torch.no_grad():
        routing = kernels.routing_by_agreement(x, weight, **options, backend="triton")
    c = routing.coefficients if given else kernels.held(routing)
    exact_c = F.routing_by_agreement(x.double(), weight.double(), **options).coefficients
    v = squash(torch.randn(x.shape, generator=generator)).to(DEVICE)
    y = squash(torch.randn(routing.preactivation.shape, generator=generator)).to(DEVICE)
    with torch.no_grad():
        assert_close(
            kernels.reconstruction(y, weight, c, backend="triton"),
            F.reconstruction(y.double(), weight.double(), exact_c),
        )
    exact_weight = weight.double().requires_grad_()
    weight = weight.requires_grad_()
    ours = kernels.preactivation(v, weight, c, backend="triton")
    exact = F.preactivation(v.double(), exact_weight, exact_c)
    assert_close(ours, exact)
    (ours * y).sum().backward()
    (exact * y).sum().backward()
    assert_close(weight.grad, exact_weight.grad)


@pytest.mark.parametrize("way", ["logits kept", "logits made again", "in blocks"])
@pytest.mark.parametrize(
    ("normalize", "agreement", "options"),
    [
        ("inputs", "cosine", {}),
        ("inputs", "cosine", {"sizes": (18, 3, 5, 4, 3)}),  # more experts than inputs: in tiles throughout
        ("outputs", "cosine", {"sizes": (2, 20, 3, 2, 18)}),
        ("inputs", "inner", {"chained": True}),
        ("outputs", "cosine", {"winners": 2, "chained": True, "mixing": "bernoulli"}),
        ("outputs", "inner", {"winners": 1, "k": 2}),
        ("inputs", "cosine", {"iterations": 1, "mixing": "bernoulli"}),
        ("inputs", "cosine", {"mixing": "bernoulli", "sizes": (40, 3, 3, 5, 4)}),
        ("inputs", "cosine", {"sizes": (40, 5, 3, 4, 4)}),
    ],
)
def test_contrastive_divergence(
    normalize: F.Axis,
    agreement: F.Agreement,
    options: dict[str, Any],
    way: str,
    generator: torch.Generator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if way == "logits made again":
        monkeypatch.setattr(flash, "KEEP_BYTES", 0)
    if way == "in blocks":
        monkeypatch.setattr(flash, "LEAST_BLOCK", 1)
        monkeypatch.setattr(flash, "BLOCK_BYTES", 4 * math.prod(options.get("sizes", ODD)[1::2]))
    _, i, k, j, d = sizes = options.get("sizes", ODD)
    x, weight = problem(sizes, generator)
    chain, _ = problem((3, i, k, j, d), generator)
    routing = routing_options(normalize, agreement, options.get("iterations", 3))
    results = []
    for backend, dtype in (("triton", torch.float32), ("reference", torch.float64)):
        layer = CapsuleExperts(i, k, j, d, **routing, winners=options.get("winners"), backend=backend)  # type: ignore[arg-type]
        layer.to(DEVICE, dtype)
        with torch.no_grad():
            layer.weight.copy_(weight)
        walk = chain.to(dtype, copy=True)
        loss = layer.contrastive_divergence(
            x.to(dtype).transpose(0, 1).contiguous().transpose(0, 1),
            options.get("k", 1),
            mixing=options.get("mixing", "deterministic"),
            chain=walk if "chained" in options else None,
            generator=torch.Generator(DEVICE).manual_seed(3),
        )
        (3 * loss).backward()
        results.append((loss.detach().unsqueeze(0), layer.weight.grad, walk, layer.balance + 1))
    for ours, exact in zip(*results, strict=True):
        assert_close(ours, exact)


def test_the_energy_of_small_preactivations(generator: torch.Generator) -> None:
    """log(1 + s) for an s that 1 + s forgets."""
    data, model = (3e-5 * torch.randn(7, 3, 5, generator=generator).to(DEVICE) for _ in range(2))
    gap, *_ = flash._free_energies((data, 2 * model), (None, None), (7, 7))
    exact = F.free_energy(data.double()).mean() - F.free_energy(2 * model.double()).mean()
    assert_close(gap, exact)


def test_the_decoder_learns_alike(generator: torch.Generator) -> None:
    x, _ = problem((3, 12, 4, 1, 1), generator)
    y = squash(torch.randn(3, 4, 5, generator=generator)).to(DEVICE)
    decoder = CapsuleDecoder(4, 5, 12, 4, sharpness=3.0).to(DEVICE)
    decoder.reset_parameters(1.0, generator if DEVICE == "cpu" else None)
    exact = CapsuleDecoder(4, 5, 12, 4, sharpness=3.0, dtype=torch.float64).to(DEVICE)
    exact.load_state_dict(decoder.state_dict())
    decoder.backend, exact.backend = "triton", "reference"
    loss, exact_loss = decoder.contrastive_divergence(y, x), exact.contrastive_divergence(y.double(), x.double())
    (3 * loss).backward()
    (3 * exact_loss).backward()
    assert_close(loss.detach(), exact_loss.detach())
    assert_close(decoder.weight.grad, exact.weight.grad)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision(dtype: torch.dtype, generator: torch.Generator) -> None:
    x, weight = (value.to(dtype) for value in problem((3, 20, 8, 3, 16), generator))
    results = []
    for backend, wide in (("triton", dtype), ("reference", torch.float64)):
        layer = CapsuleExperts(20, 8, 3, 16, sharpness=4.0, backend=backend, dtype=wide).to(DEVICE)  # type: ignore[arg-type]
        with torch.no_grad():
            layer.weight.copy_(weight)
        layer.contrastive_divergence(x.to(wide)).backward()
        results.append((layer(x.to(wide)), layer.weight.grad))
    assert results[0][0].dtype == dtype
    for ours, exact in zip(*results, strict=True):
        assert_close(ours, exact, 1e-2)


def test_a_scaled_loss_saves_small_gradients_in_half_precision(generator: torch.Generator) -> None:
    x, weight = problem(ODD, generator)
    gradients = []
    for backend, dtype in (("triton", torch.float16), ("reference", torch.float64)):
        layer = CapsuleExperts(7, 3, 5, 4, backend=backend).to(DEVICE, dtype)  # type: ignore[arg-type]
        with torch.no_grad():
            layer.weight.copy_(1e-3 * weight)
        loss = layer.contrastive_divergence(x.to(dtype))
        (2**16 * loss).backward()
        gradients.append(layer.weight.grad)
    assert_close(gradients[0], gradients[1], 1e-2)


def test_no_votes_and_no_coefficients_are_written(generator: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Learning, encoding and differentiating an encoding never ask for them."""

    def never(*_: Any) -> Tensor:
        raise AssertionError("written down")

    monkeypatch.setattr(F, "votes", never)
    monkeypatch.setattr(flash.Coefficients, "tensor", never)
    monkeypatch.setattr(flash, "KEEP_BYTES", 0)
    x, _ = problem(ODD, generator)
    layer = CapsuleExperts(7, 3, 5, 4, backend="triton").to(DEVICE)
    layer.contrastive_divergence(x, mixing="bernoulli", chain=x.clone()).backward()
    layer(x).sum().backward()
    with torch.no_grad():
        layer.reconstruct(x)
    with pytest.raises(AssertionError, match="written down"):
        layer.route(x).coefficients  # noqa: B018


def test_capsules_overwritten_before_the_way_back_are_noticed(generator: torch.Generator) -> None:
    x, _ = problem(ODD, generator)
    layer = CapsuleExperts(7, 3, 5, 4, backend="triton").to(DEVICE)
    loss = layer.contrastive_divergence(x, mixing="bernoulli")
    x.mul_(0.5)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_coefficients_have_a_gradient_where_one_is_asked_for(generator: torch.Generator) -> None:
    x, weight = problem(ODD, generator)
    layer = CapsuleExperts(7, 3, 5, 4, sharpness=4.0, backend="triton").to(DEVICE)
    exact = CapsuleExperts(7, 3, 5, 4, sharpness=4.0, backend="reference", dtype=torch.float64).to(DEVICE)
    with torch.no_grad():
        layer.weight.copy_(weight)
        exact.weight.copy_(weight)
    layer.reconstruct(x).square().sum().backward()
    exact.reconstruct(x.double()).square().sum().backward()
    assert_close(layer.weight.grad, exact.weight.grad)
