"""Problems and comparisons that the tests of the backends share."""

from __future__ import annotations

import importlib.util
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

from poecaps import functional as F
from poecaps import squash
from poecaps.kernels import cpu, dispatch, torch_routing

if TYPE_CHECKING:
    from poecaps.kernels.protocol import RoutingBackend

# Routing that the backends implement.
OPTIONS = [
    (axis, agreement)
    for axis in dispatch.IMPLEMENTED_AXES
    for agreement in dispatch.IMPLEMENTED_AGREEMENTS
]

# B, I, K, J, D: more inputs than experts, and fewer; none, one or several of the vectors, tiles,
# chunks and pairs of experts of the compiled code are full.
PARTLY_FULL_SIZES = [
    (1, 1, 1, 1, 1),
    (5, 13, 5, 3, 17),
    (16, 16, 8, 4, 16),
    (37, 101, 8, 5, 16),
    (17, 9, 16, 30, 5),
]

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed"
)

needs_simd = pytest.mark.skipif(
    cpu.why_not_compiled() is not None, reason=f"no simd backend: {cpu.why_not_compiled()}"
)


BACKENDS = [
    pytest.param(torch_routing, id="torch"),
    pytest.param(cpu, id="simd", marks=needs_simd),
]


def problem(sizes: tuple[int, ...], generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw capsules (B, I, K) and a weight (I, J, D, K) for sizes B, I, K, J, D."""
    b, i, k, j, d = sizes
    x = squash(torch.randn(b, i, k, generator=generator))
    return x, torch.randn(i, j, d, k, generator=generator)


def options(iterations: int, normalize: F.Axis, agreement: F.Agreement) -> F.RoutingOptions:
    """Return sharp routing that float32 can still follow.

    Inner products are unbounded: with a higher sharpness, eight iterations would amplify rounding
    errors beyond any fixed bound.
    """
    sharpness = 5.0 if agreement == "cosine" else 1.0
    return F.RoutingOptions(iterations, sharpness, normalize, agreement)


def relative_error(ours: Tensor, exact: Tensor) -> float:
    return ((ours.double() - exact).norm() / exact.norm().clamp(min=1e-300)).item()


def routed(
    backend: RoutingBackend, x: Tensor, weight: Tensor, routing: F.RoutingOptions
) -> F.Routing:
    routing_: F.Routing = backend.routing_by_agreement(x, weight, **asdict(routing))
    return routing_


def learned(
    backend: RoutingBackend, x: Tensor, weight: Tensor, routing: F.RoutingOptions, **given: Any
) -> F.LearningStep:
    """Learn with a weight that requires a gradient; options default to one deterministic mixing."""
    arguments: dict[str, Any] = {
        "k": 1,
        "mixing": "deterministic",
        "uniform": None,
        "chain": None,
        "winners": None,
        "balance": None,
        "views": 1,
    }
    weight = weight.detach().clone().requires_grad_()
    # The reference has the closed form where autograd has no gradient.
    with torch.set_grad_enabled(backend is not F):
        step: F.LearningStep = backend.contrastive_divergence(
            x, weight, routing, **arguments | given
        )
    return step


def gradient(step: F.LearningStep) -> Tensor:
    assert step.grad_weight is not None
    return step.grad_weight


def assert_routed(
    backend: RoutingBackend,
    x: Tensor,
    weight: Tensor,
    routing: F.RoutingOptions,
    bound: float = 1e-5,
) -> None:
    """Compare with the reference in float64."""
    exact = routed(F, x.double(), weight.double(), routing)
    ours = routed(backend, x, weight, routing)
    assert relative_error(ours.coefficients, exact.coefficients) < bound
    assert relative_error(ours.preactivation, exact.preactivation) < bound


def assert_learned(
    backend: RoutingBackend, x: Tensor, weight: Tensor, routing: F.RoutingOptions, **given: Any
) -> None:
    """Compare loss, gradient, winners and chain with the reference in float64."""
    chain = given.get("chain")
    exact_chain = None if chain is None else chain.double()
    exact = learned(F, x.double(), weight.double(), routing, **given | {"chain": exact_chain})
    ours = learned(backend, x, weight, routing, **given)
    assert ours.loss.dtype == x.dtype
    assert not ours.loss.requires_grad
    # The loss is a difference of free energies, and as exact as they are.
    z = routed(F, x.double(), weight.double(), routing).preactivation
    assert (ours.loss - exact.loss).abs() < 1e-5 * F.free_energy(z).abs().mean()
    assert gradient(ours).is_contiguous()
    assert relative_error(gradient(ours), gradient(exact)) < 1e-5
    if given.get("winners") is None:
        assert ours.on is exact.on is None
    else:
        assert ours.on is not None
        assert exact.on is not None
        decided = (z != 0).any((1, 2))  # without any vote, all experts are equal
        assert torch.equal(ours.on[decided], exact.on[decided])
    if chain is None:
        assert ours.x_model is exact.x_model is None
    else:
        assert ours.x_model is not None
        assert exact.x_model is not None
        assert relative_error(ours.x_model, exact.x_model) < 1e-5


def gradients(
    backend: RoutingBackend,
    x: Tensor,
    weight: Tensor,
    routing: F.RoutingOptions,
    grad_z: Tensor | None,
    grad_c: Tensor | None,
) -> list[Tensor]:
    """Differentiate ⟨grad_z, z⟩ + ⟨grad_c, c⟩ in x and in the weight, in the dtype of x."""
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    routed = backend.routing_by_agreement(x, weight, **asdict(routing))
    pairs = [(routed.preactivation, grad_z), (routed.coefficients, grad_c)]
    loss = sum((given.to(x.dtype) * value).sum() for value, given in pairs if given is not None)
    assert isinstance(loss, Tensor)
    found = torch.autograd.grad(loss, (x, weight), allow_unused=True, materialize_grads=True)
    return list(found)


def assert_gradients(
    backend: RoutingBackend,
    x: Tensor,
    weight: Tensor,
    routing: F.RoutingOptions,
    generator: torch.Generator,
    bound: float = 5e-5,
) -> None:
    """Compare the gradients of float32 tensors with those of the reference in float64."""
    experts, out_dim = weight.shape[1:3]
    grad_z = torch.randn(len(x), experts, out_dim, generator=generator)
    grad_c = torch.randn(*x.shape[:2], experts, generator=generator)
    given: list[tuple[Tensor | None, Tensor | None]] = [(grad_z, None), (grad_z, grad_c)]
    if routing.iterations > 1:  # otherwise the coefficients are constant
        given.append((None, grad_c))
    for pair in given:
        exact = gradients(F, x.double(), weight.double(), routing, *pair)
        ours = gradients(backend, x, weight, routing, *pair)
        for our, true in zip(ours, exact, strict=True):
            assert our.shape == true.shape
            assert our.dtype == x.dtype
            # One expert has the coefficient 1, and one input as well: their gradient is 0.
            assert relative_error(our, true) < bound or our.norm() < 1e-6
