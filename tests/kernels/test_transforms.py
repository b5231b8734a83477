"""torch.func of layers, whose routing runs by the fast backends."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

from poecaps import CapsuleExperts, squash
from poecaps import functional as F
from poecaps.kernels import cpu
from tests.kernels.problems import BACKENDS, OPTIONS, options, problem, relative_error

if TYPE_CHECKING:
    from collections.abc import Callable

    from poecaps.kernels.protocol import RoutingBackend

    Function = Callable[..., Tensor]

SIZES = [(6, 13, 8, 5, 16), (6, 3, 8, 9, 16)]  # more inputs than experts, and fewer
func: Any = torch.func


def free_energy(backend: RoutingBackend, routing: F.RoutingOptions) -> Function:
    """Return the mean free energy of capsules (B, I, K) under a weight (I, J, D, K)."""

    def energy(x: Tensor, weight: Tensor) -> Tensor:
        routed = backend.routing_by_agreement(x, weight, **asdict(routing))
        return F.free_energy(routed.preactivation).mean() + routed.coefficients.square().sum()

    return energy


def slopes_of_images(energy: Function) -> Function:
    """Gradients in each image."""
    one = func.grad(lambda x, weight: energy(x.unsqueeze(0), weight))
    return lambda x, weight: func.vmap(one, (0, None))(x, weight)


def slopes_of_parts(energy: Function) -> Function:
    """Gradients in the weight, of each half of the images."""
    one = func.grad(energy, argnums=1)
    return lambda x, weight: func.vmap(one, (1, None))(x.unflatten(0, (-1, 2)), weight)


def energies_of_models(energy: Function) -> Function:
    """Energies under several weights, at the last axis."""
    return lambda x, weight: func.vmap(energy, (None, 4))(
        x, torch.stack((weight, 2 * weight), dim=4)
    )


def slopes_of_models(energy: Function) -> Function:
    """Gradients in each of several weights, of other images for each."""
    one = func.grad(energy, argnums=1)
    return lambda x, weight: func.vmap(one)(
        torch.stack((x, x.flip(0))), torch.stack((weight, -weight.flip(1)))
    )


def jacobian(energy: Function) -> Function:
    """Derivatives of the energies of images in one of their inputs."""
    values = func.vmap(lambda x, weight: energy(x.unsqueeze(0), weight), (0, None))
    return lambda x, weight: func.jacrev(values)(x, weight)


def second_derivatives(energy: Function) -> Function:
    """The matrix of second derivatives of one image."""
    return lambda x, weight: func.jacrev(func.jacrev(energy))(x[:1, :2], weight[:2])


TRANSFORMS = [
    slopes_of_images,
    slopes_of_parts,
    energies_of_models,
    slopes_of_models,
    jacobian,
    second_derivatives,
]


@pytest.mark.parametrize("transform", TRANSFORMS, ids=lambda each: each.__name__)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("sizes", SIZES)
def test_transforms(
    transform: Callable[[Function], Function],
    backend: RoutingBackend,
    sizes: tuple[int, ...],
    generator: torch.Generator,
) -> None:
    """They are those of the reference in float64."""
    x, weight = problem(sizes, generator)
    routing = options(3, "inputs", "cosine")
    ours = transform(free_energy(backend, routing))(x, weight)
    exact = transform(free_energy(F, routing))(x.double(), weight.double())
    assert ours.shape == exact.shape
    assert relative_error(ours, exact) < 1e-4


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("normalize", "agreement"), OPTIONS)
def test_vmap_of_reconstructions_and_their_slopes(
    backend: RoutingBackend,
    normalize: F.Axis,
    agreement: F.Agreement,
    generator: torch.Generator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Equal to those of all images at once, without votes."""
    x, weight = problem((6, 13, 8, 5, 16), generator)
    routing = options(3, normalize, agreement)

    def down(x: Tensor) -> Tensor:
        return backend.reconstruct(x, weight, routing, winners=2, balance=None)

    def slopes(x: Tensor) -> Tensor:
        found: Tensor = func.grad(lambda x: down(x).square().sum())(x)
        return found

    monkeypatch.setattr(F, "votes", None)
    monkeypatch.setattr(F, "reconstruction", None)
    parts = x.unflatten(0, (3, 2))
    for function in (down, slopes):
        found = func.vmap(function)(parts).flatten(0, 1)
        torch.testing.assert_close(found, function(x))


@pytest.mark.parametrize("backend", [None, "torch"])
@pytest.mark.parametrize("is_half", [False, True])
def test_layers_without_the_reference(
    backend: Any,
    is_half: bool,
    generator: torch.Generator,
    monkeypatch: pytest.MonkeyPatch,
    recwarn: pytest.WarningsRecorder,
) -> None:
    """Nested vmap, over layers as well; without a warning, and without votes."""
    monkeypatch.setattr(cpu.routing, "MIN_MULTIPLICATIONS", 0)
    monkeypatch.setattr(F, "votes", None)
    dtype = torch.bfloat16 if is_half else torch.float32
    layer = CapsuleExperts(13, 8, 5, 16, winners=3, backend=backend, dtype=dtype)
    layer.reset_parameters(std=1.0, generator=generator)
    x = squash(torch.randn(2, 3, 4, 13, 8, generator=generator)).to(dtype)
    with torch.no_grad():
        expected = layer(x.flatten(0, 2)).unflatten(0, x.shape[:3])
    torch.testing.assert_close(func.vmap(func.vmap(layer))(x), expected)
    torch.testing.assert_close(func.vmap(func.vmap(layer), 1, 1)(x), expected)
    weights = torch.stack((layer.weight, layer.weight.flip(1))).detach()

    def code(weight: Tensor, x: Tensor) -> Tensor:
        value: Tensor = func.functional_call(layer, {"weight": weight}, (x,))
        return value

    found = func.vmap(code, (0, None))(weights, x[0, 0])
    torch.testing.assert_close(found[0], expected[0, 0])
    assert not torch.allclose(found[1], expected[0, 0])
    leaf = x[0, 0].clone().requires_grad_()
    (exact,) = torch.autograd.grad(layer.free_energy(leaf).sum(), leaf)
    slopes = func.grad(lambda x: layer.free_energy(x).sum())(x[0, 0])
    torch.testing.assert_close(slopes, exact)
    assert not recwarn.list
