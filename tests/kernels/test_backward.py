"""The gradient through the routing is that of the reference, on every CPU backend."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

from poecaps import CapsuleExperts, squash
from poecaps import functional as F
from poecaps.kernels import cpu, torch_routing
from poecaps.kernels.cpu import routing as cpu_routing
from poecaps.kernels.torch_routing import backward, many_to_few
from tests.kernels.problems import (
    BACKENDS,
    OPTIONS,
    PARTLY_FULL_SIZES,
    assert_gradients,
    gradients,
    needs_simd,
    options,
    problem,
    relative_error,
)

if TYPE_CHECKING:
    from poecaps.kernels.dispatch import Backend
    from poecaps.kernels.protocol import RoutingBackend

SIZES = [*PARTLY_FULL_SIZES, (18, 23, 17, 2, 2)]


@pytest.mark.parametrize(
    ("sizes", "small"),  # more inputs than experts, and fewer
    [((3, 5, 3, 2, 4), (2, 3, 2, 2, 2)), ((2, 3, 2, 6, 3), (2, 2, 2, 3, 2))],
)
@pytest.mark.parametrize("iterations", [1, 2, 3, 4])
@pytest.mark.parametrize(("normalize", "agreement"), OPTIONS)
def test_the_derivative_of_the_plain_version(
    sizes: tuple[int, ...],
    small: tuple[int, ...],
    iterations: int,
    normalize: F.Axis,
    agreement: F.Agreement,
    generator: torch.Generator,
) -> None:
    """Of first and, in a smaller problem, second order, by differences of values in float64.

    Those of second order in random directions, because there are many.
    """
    routing = F.RoutingOptions(iterations, 2.0, normalize, agreement)

    def outputs(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        routed = torch_routing.routing_by_agreement(x, weight, **asdict(routing))
        return (routed.preactivation, routed.coefficients)[: 1 if iterations == 1 else 2]

    given = [each.double().requires_grad_() for each in problem(sizes, generator)]
    assert torch.autograd.gradcheck(outputs, given)
    if iterations < 4:
        given = [each.double().requires_grad_() for each in problem(small, generator)]
        assert torch.autograd.gradgradcheck(outputs, given, fast_mode=True)


@pytest.mark.parametrize(
    ("sizes", "small"), [((3, 5, 3, 2, 4), (2, 3, 2, 2, 2)), ((2, 3, 2, 6, 3), (2, 2, 2, 3, 2))]
)
@pytest.mark.parametrize("winners", [None, 1])
def test_the_derivative_of_a_reconstruction(
    sizes: tuple[int, ...], small: tuple[int, ...], winners: int | None, generator: torch.Generator
) -> None:
    """Of first and second order, by differences of values in float64."""
    routing = F.RoutingOptions(3, 2.0, "inputs", "cosine")

    def down(x: Tensor, weight: Tensor) -> Tensor:
        return torch_routing.reconstruct(x, weight, routing, winners=winners, balance=None)

    given = [each.double().requires_grad_() for each in problem(sizes, generator)]
    assert torch.autograd.gradcheck(down, given)
    given = [each.double().requires_grad_() for each in problem(small, generator)]
    assert torch.autograd.gradgradcheck(down, given, fast_mode=True)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize(("normalize", "agreement"), OPTIONS)
def test_gradients_of_reconstructions(
    backend: RoutingBackend,
    sizes: tuple[int, ...],
    normalize: F.Axis,
    agreement: F.Agreement,
    generator: torch.Generator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those of the reference in float64, by other means."""
    x, weight = problem(sizes, generator)
    routing = F.RoutingOptions(3, 1.0, normalize, agreement)
    grad = torch.randn(x.shape, generator=generator)
    winners, balance = max(1, sizes[3] // 2), torch.randn(sizes[3], generator=generator)
    found: list[tuple[Tensor, ...]] = []
    for each, dtype in ((F, torch.float64), (backend, torch.float32)):
        leaf, maps = (given.detach().to(dtype).requires_grad_() for given in (x, weight))
        value = each.reconstruct(leaf, maps, routing, winners=winners, balance=balance)
        found.append(torch.autograd.grad((value * grad).sum(), (leaf, maps)))
        monkeypatch.setattr(F, "reconstruction", None)  # the backend does without it
    for ours, exact in zip(found[1], found[0], strict=True):
        assert relative_error(ours, exact) < 5e-5 or ours.norm() < 1e-6


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("iterations", [1, 2, 3, 4])
@pytest.mark.parametrize(("normalize", "agreement"), OPTIONS)
def test_gradients(
    backend: RoutingBackend,
    sizes: tuple[int, ...],
    iterations: int,
    normalize: F.Axis,
    agreement: F.Agreement,
    generator: torch.Generator,
) -> None:
    x, weight = problem(sizes, generator)
    routing = options(iterations, normalize, agreement)
    assert_gradients(backend, x, weight, routing, generator)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("normalize", F.AXES)
def test_random_sizes_and_sharpness(
    backend: RoutingBackend, normalize: F.Axis, generator: torch.Generator
) -> None:
    for _ in range(6):
        b, i, j = (int(torch.randint(1, high, (), generator=generator)) for high in (40, 90, 25))
        iterations = int(torch.randint(1, 6, (), generator=generator))
        sharpness = float(torch.rand((), generator=generator)) * 8
        routing = F.RoutingOptions(iterations, sharpness, normalize, "cosine")
        assert_gradients(backend, *problem((b, i, 8, j, 16), generator), routing, generator)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("normalize", "agreement"), OPTIONS)
def test_zero_capsules_and_zero_weights(
    backend: RoutingBackend,
    normalize: F.Axis,
    agreement: F.Agreement,
    generator: torch.Generator,
) -> None:
    """A zero vector has no direction; its gradient is the one that the reference defines."""
    x, weight = problem((5, 13, 8, 3, 16), generator)
    x[:, 2] = 0
    x[1] = 0
    weight[:, 1] = 0
    assert_gradients(backend, x, weight, options(3, normalize, agreement), generator)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("normalize", F.AXES)
def test_several_blocks(
    backend: RoutingBackend,
    normalize: F.Axis,
    generator: torch.Generator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of images, of inputs, and of votes that are not cached."""
    monkeypatch.setattr(many_to_few, "BLOCK", 32)
    monkeypatch.setattr(backward, "MAX_NUMBERS", 2**13)
    monkeypatch.setattr(cpu_routing, "BLOCK", 32)
    monkeypatch.setattr(cpu_routing, "THREAD_VOTE_BYTES", 0)
    monkeypatch.setattr(cpu_routing, "TILE_VECTORS", 300)
    x, weight = problem((32 + 32 + 5, 19, 8, 5, 16), generator)
    assert_gradients(backend, x, weight, options(3, normalize, "cosine"), generator)


@pytest.mark.parametrize("backend", BACKENDS)
def test_tensors_with_other_strides(backend: RoutingBackend, generator: torch.Generator) -> None:
    x, weight = problem((18, 13, 8, 3, 16), generator)
    routing = options(3, "inputs", "cosine")
    strided_x = x.transpose(0, 2).contiguous().transpose(0, 2)[:, ::2]
    strided_weight = weight.transpose(1, 3).contiguous().transpose(1, 3)[::2]
    assert_gradients(backend, strided_x, strided_weight, routing, generator)
    for grad_z in (torch.ones(()).expand(18, 3, 16), torch.randn(16, 3, 18).permute(2, 1, 0)):
        for grad_c in (torch.ones(()).expand(18, 13, 3), torch.randn(3, 13, 18).permute(2, 1, 0)):
            found = [
                gradients(each, x, weight, routing, first, second)
                for each, first, second in (
                    (backend, grad_z, grad_c),
                    (backend, grad_z.contiguous(), grad_c.contiguous()),
                )
            ]
            for ours, expected in zip(*found, strict=True):
                torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("iterations", [1, 3])
def test_only_the_required_gradients(
    backend: RoutingBackend, iterations: int, generator: torch.Generator
) -> None:
    x, weight = problem((5, 13, 8, 3, 16), generator)
    routing = options(iterations, "inputs", "cosine")
    grad_z = torch.randn(5, 3, 16, generator=generator)
    both = gradients(backend, x, weight, routing, grad_z, None)
    for n in range(2):
        leaves = [x.clone(), weight.clone()]
        leaves[n].requires_grad_()
        z = backend.routing_by_agreement(*leaves, **asdict(routing)).preactivation
        z.backward(grad_z)
        assert leaves[1 - n].grad is None
        torch.testing.assert_close(leaves[n].grad, both[n])
    z = backend.routing_by_agreement(x, weight, **asdict(routing)).preactivation
    assert not z.requires_grad


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("normalize", F.AXES)
@pytest.mark.parametrize("experts", [3, 9])
def test_an_empty_batch(backend: RoutingBackend, normalize: F.Axis, experts: int) -> None:
    x, weight = torch.zeros(0, 7, 8), torch.ones(7, experts, 16, 8)
    grad_z, grad_c = torch.zeros(0, experts, 16), torch.zeros(0, 7, experts)
    routing = options(3, normalize, "cosine")
    grad_x, grad_weight = gradients(backend, x, weight, routing, grad_z, grad_c)
    assert grad_x.shape == x.shape
    assert torch.equal(grad_weight, torch.zeros_like(weight))


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_second_derivative(backend: RoutingBackend, generator: torch.Generator) -> None:
    """Of a penalty on the gradient, which depends on both arguments; the reference computes it."""
    x, weight = problem((4, 9, 8, 3, 16), generator)
    found: list[list[Tensor]] = []
    for each, dtype in ((F, torch.float64), (backend, torch.float32)):
        leaf = x.detach().clone().to(dtype).requires_grad_()
        maps = weight.detach().clone().to(dtype).requires_grad_()
        scaled = maps * leaf.square().mean()  # the weight depends on the capsules
        z = each.routing_by_agreement(leaf, scaled, **asdict(options(3, "inputs", "cosine")))
        energy = F.free_energy(z.preactivation).sum()
        (slope,) = torch.autograd.grad(energy, leaf, create_graph=True)
        slope.square().sum().backward()
        assert leaf.grad is not None
        assert maps.grad is not None
        found.append([slope.detach(), leaf.grad, maps.grad])
    for ours, exact in zip(found[1], found[0], strict=True):
        assert relative_error(ours, exact) < 1e-4


@pytest.mark.parametrize("backend", BACKENDS)
def test_overwritten_tensors(backend: RoutingBackend, generator: torch.Generator) -> None:
    """The result may be overwritten, the arguments not."""
    x, weight = problem((5, 13, 8, 3, 16), generator)
    routing = asdict(options(3, "inputs", "cosine"))
    weight.requires_grad_()
    expected = backend.routing_by_agreement(x, weight, **routing).preactivation
    (2 * expected).sum().backward()
    assert weight.grad is not None
    before, weight.grad = weight.grad, None
    z = backend.routing_by_agreement(x, weight, **routing).preactivation
    z.mul_(2).sum().backward()
    torch.testing.assert_close(weight.grad, before)
    z = backend.routing_by_agreement(x, weight, **routing).preactivation
    with torch.no_grad():
        weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.sum().backward()


@needs_simd
@pytest.mark.parametrize("normalize", F.AXES)
def test_the_number_of_threads_changes_no_bit(
    normalize: F.Axis, generator: torch.Generator
) -> None:
    x, weight = problem((70, 60, 8, 5, 16), generator)
    grad_z = torch.randn(70, 5, 16, generator=generator)
    routing = options(3, normalize, "cosine")
    before = torch.get_num_threads()
    found: list[list[Tensor]] = []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        found.append(gradients(cpu, x, weight, routing, grad_z, None))
    torch.set_num_threads(before)
    cpu_routing._pool().shutdown()
    cpu_routing._pool.cache_clear()
    for one, three in zip(*found, strict=True):
        assert torch.equal(one, three)


@needs_simd
@pytest.mark.parametrize("normalize", F.AXES)
def test_the_workspace_of_another_call_does_not_matter(
    normalize: F.Axis, generator: torch.Generator
) -> None:
    x, weight = problem((21, 13, 5, 3, 17), generator)
    grad_z, grad_c = (torch.randn(size, generator=generator) for size in ((21, 3, 17), (21, 13, 3)))
    routing = options(3, normalize, "cosine")
    first = gradients(cpu, x, weight, routing, grad_z, grad_c)
    (workspace,) = cpu_routing._spare_workspaces
    workspace.fill_(torch.nan)
    again = gradients(cpu, x, weight, routing, grad_z, grad_c)
    for one, two in zip(first, again, strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("size", [1e-30, 1e-12, 1e12, 1e25])
@pytest.mark.parametrize("normalize", F.AXES)
def test_extreme_votes_have_finite_gradients(
    backend: RoutingBackend, size: float, normalize: F.Axis, generator: torch.Generator
) -> None:
    x, weight = problem((5, 40, 8, 3, 16), generator)
    grad_z = torch.randn(5, 3, 16, generator=generator) / size
    for agreement in F.AGREEMENTS[: 2 if size <= 1 else 1]:
        routing = F.RoutingOptions(3, 5.0, normalize, agreement)
        for found in gradients(backend, x, weight * size, routing, grad_z, None):
            assert found.isfinite().all()


@pytest.mark.parametrize("backend", ["torch", pytest.param("simd", marks=needs_simd)])
@pytest.mark.parametrize("winners", [None, 2])
@pytest.mark.parametrize("method", ["forward", "reconstruct", "free_energy"])
def test_layers_are_differentiable_by_every_backend(
    backend: Backend, winners: int | None, method: str, generator: torch.Generator
) -> None:
    """In the capsules and in the weight, as by the reference."""
    arguments: dict[str, Any] = {"winners": winners, "sharpness": 5.0}
    layer = CapsuleExperts(13, 8, 5, 16, backend=backend, **arguments)
    exact = CapsuleExperts(13, 8, 5, 16, backend="reference", dtype=torch.float64, **arguments)
    layer.reset_parameters(std=1.0, generator=generator)
    exact.load_state_dict(layer.state_dict())
    x = squash(torch.randn(6, 13, 8, generator=generator))
    found: list[list[Tensor | None]] = []
    for each, dtype in ((layer, torch.float32), (exact, torch.float64)):
        leaf = x.detach().clone().to(dtype).requires_grad_()
        value: Tensor = getattr(each, method)(leaf)
        (value * torch.arange(value.numel()).reshape(value.shape)).sum().backward()
        found.append([leaf.grad, each.weight.grad])
    for ours, true in zip(*found, strict=True):
        assert ours is not None
        assert true is not None
        assert relative_error(ours, true) < 1e-5
