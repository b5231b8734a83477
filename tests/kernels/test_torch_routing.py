"""Both algorithms of vote-free routing give the reference's results, to 1e-5 of float64."""

from __future__ import annotations

from typing import Any, Protocol

import pytest
import torch
from torch import Tensor

from poecaps import functional as F
from poecaps import squash
from poecaps.kernels import torch_routing
from poecaps.kernels.torch_routing import few_to_many, many_to_few
from poecaps.kernels.torch_routing.gradient import GradientTerm
from tests.kernels.problems import (
    OPTIONS,
    assert_learned,
    gradient,
    learned,
    options,
    problem,
    relative_error,
    routed,
)

SIZES = [
    (1, 1, 1, 1, 1),
    (2, 7, 3, 5, 4),
    (9, 21, 4, 7, 5),
    (3, 40, 8, 6, 16),
    (5, 13, 2, 1, 9),
    (4, 3, 6, 11, 2),
    (5, 40, 8, 3, 1),
]


class Algorithm(Protocol):
    """The functions that both algorithms have, as a module; each is correct for any sizes."""

    @property
    def routing_by_agreement(self) -> Any: ...
    @property
    def preactivation(self) -> Any: ...
    @property
    def reconstruction(self) -> Any: ...
    @property
    def free_energy_gradient(self) -> Any: ...
    @property
    def weight_gradient(self) -> Any: ...


many: Algorithm = many_to_few
few: Algorithm = few_to_many
ALGORITHMS = [pytest.param(many, id="many to few"), pytest.param(few, id="few to many")]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let most problems here have several blocks of images and of inputs, the last one smaller."""
    monkeypatch.setattr(many_to_few, "BLOCK", 2)
    monkeypatch.setattr(many_to_few, "MAX_NUMBERS", 512)


def assert_routed_by(
    algorithm: Algorithm, x: Tensor, weight: Tensor, routing: F.RoutingOptions
) -> None:
    exact = routed(F, x.double(), weight.double(), routing)
    ours = algorithm.routing_by_agreement(x, weight, routing)
    assert relative_error(ours.coefficients, exact.coefficients) < 1e-5
    assert relative_error(ours.preactivation, exact.preactivation) < 1e-5


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("iterations", [1, 2, 3, 8])
@pytest.mark.parametrize(("normalize", "agreement"), OPTIONS)
def test_routing(
    algorithm: Algorithm,
    sizes: tuple[int, ...],
    iterations: int,
    normalize: F.Axis,
    agreement: F.Agreement,
    generator: torch.Generator,
) -> None:
    x, weight = problem(sizes, generator)
    assert_routed_by(algorithm, x, weight, options(iterations, normalize, agreement))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("sizes", SIZES)
def test_forward_and_backward_with_held_coefficients(
    algorithm: Algorithm, sizes: tuple[int, ...], generator: torch.Generator
) -> None:
    x, weight = problem(sizes, generator)
    batch, inputs, _, experts, out_dim = sizes
    c = torch.rand(batch, inputs, experts, generator=generator)
    y = squash(torch.randn(batch, experts, out_dim, generator=generator))
    exact_weight = weight.double().requires_grad_()
    exact_z = F.preactivation(x.double(), exact_weight, c.double())
    exact_x = F.reconstruction(y.double(), weight.double(), c.double())
    assert relative_error(algorithm.preactivation(x, weight, c), exact_z) < 1e-5
    assert relative_error(algorithm.reconstruction(y, weight, c), exact_x) < 1e-5
    grad_z = torch.randn(batch, experts, out_dim, generator=generator)
    exact_z.backward(grad_z.double())
    assert exact_weight.grad is not None
    ours = algorithm.weight_gradient([GradientTerm(grad_z, c, x)])
    assert relative_error(ours, exact_weight.grad) < 1e-5
    twice = algorithm.weight_gradient([GradientTerm(grad_z, c, x), GradientTerm(grad_z, c, x)])
    assert relative_error(twice, 2 * exact_weight.grad) < 1e-5


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("competing", [False, True])
def test_gradient_of_the_free_energy(
    algorithm: Algorithm, competing: bool, generator: torch.Generator
) -> None:
    z = torch.randn(5, 3, 7, generator=generator)
    on = torch.rand(5, 3, generator=generator) < 0.5 if competing else None
    leaf = z.double().requires_grad_()
    (0.25 * F.free_energy(leaf, on).sum()).backward()
    assert leaf.grad is not None
    assert relative_error(algorithm.free_energy_gradient(z, on, -0.25), leaf.grad) < 1e-6


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize(("normalize", "agreement"), OPTIONS)
def test_zero_capsules_and_zero_weights(
    algorithm: Algorithm, normalize: F.Axis, agreement: F.Agreement, generator: torch.Generator
) -> None:
    x, weight = problem((2, 7, 3, 5, 4), generator)
    x[:, 2] = 0
    weight[:, 1] = 0
    assert_routed_by(algorithm, x, weight, F.RoutingOptions(3, 5.0, normalize, agreement))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("normalize", F.AXES)
def test_maps_of_rank_one(
    algorithm: Algorithm,
    normalize: F.Axis,
    generator: torch.Generator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Their votes are often much shorter than the norms of capsule and map allow."""
    monkeypatch.setattr(many_to_few, "MAX_VOTES", 7)
    x, weight = problem((9, 40, 8, 6, 16), generator)
    weight = weight[:, :, :1] * torch.randn(40, 6, 16, 1, generator=generator)
    assert_routed_by(algorithm, x, weight, options(3, normalize, "cosine"))


@pytest.mark.parametrize("winners", [None, 2])
@pytest.mark.parametrize("experts", [5, 9])
def test_the_learning_rule(experts: int, winners: int | None, generator: torch.Generator) -> None:
    x, weight = problem((5, 7, 3, experts, 4), generator)
    balance = torch.zeros(experts)
    routing = options(3, "inputs", "cosine")
    assert_learned(torch_routing, x, weight, routing, k=2, winners=winners, balance=balance)


@pytest.mark.parametrize("sizes", [(9, 13, 3, 5, 4), (1, 40, 8, 6, 16), (5, 13, 8, 1, 2)])
@pytest.mark.parametrize("iterations", [1, 3, 8])
@pytest.mark.parametrize(("normalize", "agreement"), OPTIONS)
def test_the_learning_rule_with_every_kind_of_routing(
    sizes: tuple[int, ...],
    iterations: int,
    normalize: F.Axis,
    agreement: F.Agreement,
    generator: torch.Generator,
) -> None:
    x, weight = problem(sizes, generator)
    x[:, 2] = 0
    routing = F.RoutingOptions(iterations, 1.0, normalize, agreement)
    assert_learned(torch_routing, x, weight, routing)


@pytest.mark.parametrize("sizes", [(5, 13, 3, 5, 4), (5, 4, 3, 9, 4)])
def test_float64(sizes: tuple[int, ...], generator: torch.Generator) -> None:
    x, weight = (each.double() for each in problem(sizes, generator))
    exact, ours = (
        learned(backend, x, weight, options(3, "inputs", "cosine"))
        for backend in (F, torch_routing)
    )
    torch.testing.assert_close(gradient(ours), gradient(exact), rtol=1e-10, atol=1e-14)
    torch.testing.assert_close(ours.loss, exact.loss, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("experts", [5, 9])
def test_no_votes_of_the_reference_are_computed(
    experts: int, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_votes(*_: Tensor) -> Tensor:
        raise AssertionError("the reference computed votes")

    monkeypatch.setattr(F, "votes", no_votes)
    x, weight = problem((2, 7, 3, experts, 4), generator)
    routing = options(3, "inputs", "cosine")
    chain = {"mixing": "bernoulli", "chain": x.clone()}
    for given in ({}, chain):
        learned(torch_routing, x, weight, routing, winners=2, **given)
    torch_routing.reconstruct(x, weight, routing, winners=2, balance=None)


def test_calls_that_it_cannot_serve(generator: torch.Generator) -> None:
    x, weight = problem((2, 7, 3, 5, 4), generator)
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        assert torch_routing.why_not(x.to(dtype), weight.to(dtype)) is None
    reasons = {
        "'meta'": torch_routing.why_not(x.to("meta"), weight.to("meta")),
        "weight on 'meta'": torch_routing.why_not(x, weight.to("meta")),
    }
    for part, reason in reasons.items():
        assert reason is not None
        assert part in reason
        assert reason.endswith("use backend='reference'")
