"""Each backend computes the functions of the reference, to 1e-5 of float64."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from poecaps import functional as F
from poecaps import squash
from tests.kernels.problems import (
    BACKENDS,
    OPTIONS,
    assert_learned,
    assert_routed,
    gradient,
    learned,
    options,
    problem,
    relative_error,
    routed,
)

if TYPE_CHECKING:
    from poecaps.kernels.protocol import RoutingBackend

# B, I, K, J, D: fewer experts than inputs, as many, and more.
SIZES = [(18, 23, 5, 6, 17), (5, 7, 8, 7, 4), (20, 6, 16, 30, 8)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize(("normalize", "agreement"), OPTIONS)
def test_routing(
    backend: RoutingBackend,
    sizes: tuple[int, ...],
    normalize: F.Axis,
    agreement: F.Agreement,
    generator: torch.Generator,
) -> None:
    assert_routed(backend, *problem(sizes, generator), options(3, normalize, agreement))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("normalize", F.AXES)
def test_held_preactivation(
    backend: RoutingBackend, sizes: tuple[int, ...], normalize: F.Axis, generator: torch.Generator
) -> None:
    """Its gradient reaches the weight, not the capsules."""
    x, weight = problem(sizes, generator)
    routing = options(3, normalize, "cosine")
    grad_z = torch.randn(sizes[0], sizes[3], sizes[4], generator=generator)
    exact_weight = weight.double().requires_grad_()
    exact = F.held_preactivation(x.double(), exact_weight, routing)
    exact.backward(grad_z.double())
    x.requires_grad_()
    weight.requires_grad_()
    ours = backend.held_preactivation(x, weight, routing)
    ours.backward(grad_z)
    assert x.grad is None
    assert weight.grad is not None
    assert exact_weight.grad is not None
    assert relative_error(ours, exact) < 1e-5
    assert relative_error(weight.grad, exact_weight.grad) < 1e-5
    with torch.no_grad():
        assert torch.equal(backend.held_preactivation(x, weight, routing), ours)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("normalize", F.AXES)
@pytest.mark.parametrize("winners", [None, 2])
def test_encode_and_reconstruct(
    backend: RoutingBackend,
    sizes: tuple[int, ...],
    normalize: F.Axis,
    winners: int | None,
    generator: torch.Generator,
) -> None:
    x, weight = problem(sizes, generator)
    balance = torch.randn(sizes[3], generator=generator)
    routing = options(3, normalize, "cosine")
    exact = F.reconstruct(x.double(), weight.double(), routing, winners=winners, balance=balance)
    exact_code = F.encode(x.double(), weight.double(), routing, winners=winners, balance=balance)
    ours = backend.reconstruct(x, weight, routing, winners=winners, balance=balance)
    code = backend.encode(x, weight, routing, winners=winners, balance=balance)
    assert relative_error(ours, exact) < 1e-5
    assert relative_error(code, exact_code) < 1e-5


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("mixing", F.MIXINGS)
@pytest.mark.parametrize("chained", [False, True])
@pytest.mark.parametrize("winners", [None, 2])
@pytest.mark.parametrize("normalize", F.AXES)
def test_contrastive_divergence(
    backend: RoutingBackend,
    sizes: tuple[int, ...],
    mixing: F.Mixing,
    chained: bool,
    winners: int | None,
    normalize: F.Axis,
    generator: torch.Generator,
) -> None:
    """The chain may have another number of capsules than the batch, and is read only."""
    x, weight = problem(sizes, generator)
    batch, inputs, dim, experts, _ = sizes
    mixed = batch + 3 if chained else batch
    chain = squash(torch.randn(mixed, inputs, dim, generator=generator)) if chained else None
    before = None if chain is None else chain.clone()
    assert_learned(
        backend,
        x,
        weight,
        options(3, normalize, "cosine"),
        k=2,
        mixing=mixing,
        uniform=None
        if mixing == "deterministic"
        else torch.rand(2, mixed, experts, generator=generator),
        chain=chain,
        winners=winners,
        balance=torch.randn(experts, generator=generator),
    )
    if chain is not None and before is not None:
        assert torch.equal(chain, before)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("views", [3, 7])
@pytest.mark.parametrize("chained", [False, True])
def test_views_of_an_image_win_together_in_any_block(
    backend: RoutingBackend, views: int, chained: bool, generator: torch.Generator
) -> None:
    """A block has 128 images, which is no multiple of the views."""
    x, weight = problem((60 * views, 5, 8, 4, 6), generator)
    chain = squash(torch.randn(9, 5, 8, generator=generator)) if chained else None
    given = {"winners": 1, "balance": torch.randn(4, generator=generator), "views": views}
    routing = options(3, "outputs", "cosine")
    assert_learned(backend, x, weight, routing, chain=chain, **given)
    on = learned(backend, x, weight, routing, chain=chain, **given).on
    assert on is not None
    images = on.view(60, views, 4)
    assert torch.equal(images, images[:, :1].expand_as(images))
    alone = learned(backend, x, weight, routing, chain=chain, **given | {"views": 1}).on
    assert not torch.equal(alone, on)  # type: ignore[arg-type]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize(("normalize", "agreement"), OPTIONS)
def test_decoder_contrastive_divergence(
    backend: RoutingBackend,
    sizes: tuple[int, ...],
    normalize: F.Axis,
    agreement: F.Agreement,
    generator: torch.Generator,
) -> None:
    y, weight = problem(sizes, generator)
    x = squash(torch.randn(sizes[0], sizes[3], sizes[4], generator=generator))
    x[0, 0] = 0
    routing = options(3, normalize, agreement)
    exact = F.decoder_contrastive_divergence(y.double(), x.double(), weight.double(), routing)
    ours = backend.decoder_contrastive_divergence(y, x, weight.requires_grad_(), routing)
    assert not ours.loss.requires_grad
    assert ours.loss.dtype == torch.float32
    assert ours.loss.item() == pytest.approx(exact.loss.item(), rel=1e-4, abs=1e-5)
    assert gradient(ours).is_contiguous()
    assert relative_error(gradient(ours), gradient(exact)) < 1e-5


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("mixing", F.MIXINGS)
def test_a_gradient_is_computed_only_if_required(
    backend: RoutingBackend, sizes: tuple[int, ...], mixing: F.Mixing, generator: torch.Generator
) -> None:
    x, weight = problem(sizes, generator)
    routing = options(3, "inputs", "cosine")
    given: dict[str, Any] = {
        "k": 1,
        "mixing": mixing,
        "uniform": torch.rand(1, sizes[0], sizes[3], generator=generator),
        "chain": None,
        "winners": None,
        "balance": None,
        "views": 1,
    }
    target = torch.zeros(sizes[0], sizes[3], sizes[4])
    with_gradient = learned(backend, x, weight, routing, **given)
    decoded = backend.decoder_contrastive_divergence(x, target, weight, routing)
    assert decoded.grad_weight is None
    frozen = backend.contrastive_divergence(x, weight, routing, **given)
    assert frozen.grad_weight is None
    weight.requires_grad_()
    with torch.no_grad():
        disabled = backend.contrastive_divergence(x, weight, routing, **given)
        assert (
            backend.decoder_contrastive_divergence(x, target, weight, routing).grad_weight is None
        )
    assert disabled.grad_weight is None
    assert torch.equal(frozen.loss, with_gradient.loss)
    assert torch.equal(disabled.loss, with_gradient.loss)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("normalize", F.AXES)
def test_an_empty_batch(backend: RoutingBackend, sizes: tuple[int, ...], normalize: F.Axis) -> None:
    _, inputs, dim, experts, out_dim = sizes
    x, weight = torch.zeros(0, inputs, dim), torch.zeros(inputs, experts, out_dim, dim)
    routing = options(3, normalize, "cosine")
    result = routed(backend, x, weight, routing)
    assert result.coefficients.shape == (0, inputs, experts)
    assert result.preactivation.shape == (0, experts, out_dim)
    assert backend.held_preactivation(x, weight, routing).shape == (0, experts, out_dim)
    restored = backend.reconstruct(x, weight, routing, winners=None, balance=None)
    assert restored.shape == (0, inputs, dim)
