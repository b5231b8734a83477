"""Facts about one layer of experts: its probabilities, its learning rule, and that it is an
ordinary module.
"""

from __future__ import annotations

import copy
import itertools
import math
import os
import shutil
import socket
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from poecaps import CapsuleExperts, squash
from poecaps import functional as F

if TYPE_CHECKING:
    from pathlib import Path

    from poecaps.kernels.dispatch import Backend
    from tests.processes import Commands

OPTIONS = [(axis, agreement) for axis in F.AXES for agreement in F.AGREEMENTS]
I, K, J, D = 6, 4, 5, 3  # noqa: E741


def make_layer(
    generator: torch.Generator,
    *,
    std: float = 1.0,
    dtype: torch.dtype = torch.float64,
    **options: Any,
) -> CapsuleExperts:
    layer = CapsuleExperts(I, K, options.pop("out_capsules", J), D, dtype=dtype, **options)
    layer.reset_parameters(std=std, generator=generator)
    return layer


def capsules(
    generator: torch.Generator, count: int = 8, dtype: torch.dtype = torch.float64
) -> Tensor:
    return squash(torch.randn(count, I, K, dtype=torch.float64, generator=generator)).to(dtype)


# --------------------------------------------------------------------------------------------------
# The model


@pytest.mark.parametrize("winners", [None, 1, 3])
@pytest.mark.parametrize("experts", [1, 4, 10])
def test_enumerating_all_states_gives_free_energy_firing_and_factorised_conditional(
    experts: int, winners: int | None, generator: torch.Generator
) -> None:
    winners = winners and min(winners, experts)
    layer = make_layer(generator, std=3.0, out_capsules=experts, winners=winners, sharpness=5.0)
    x = capsules(generator, 4)
    states = torch.tensor(list(itertools.product([0, 1], repeat=experts)))
    energies = torch.stack([layer.energy(x, state.expand(len(x), -1)) for state in states], dim=1)

    torch.testing.assert_close(
        layer.free_energy(x), -torch.logsumexp(-energies, dim=1), rtol=0, atol=1e-10
    )
    joint = torch.softmax(-energies, dim=1)
    p = layer.firing_probability(x)
    torch.testing.assert_close(p, joint @ states.double(), rtol=0, atol=1e-10)
    factors = torch.where(states.bool(), p.unsqueeze(1), 1 - p.unsqueeze(1))
    torch.testing.assert_close(joint, factors.prod(-1), rtol=0, atol=1e-10)
    torch.testing.assert_close(layer(x).norm(dim=-1), p, rtol=0, atol=1e-10)


def test_energy_of_the_off_state_is_zero_even_for_a_silent_expert(
    generator: torch.Generator,
) -> None:
    layer = make_layer(generator)
    x = torch.zeros(2, I, K, dtype=torch.float64, requires_grad=True)
    off = layer.energy(x, torch.zeros(2, J))
    assert torch.equal(off.detach(), torch.zeros(2, dtype=torch.float64))
    off.sum().backward()
    assert torch.equal(x.grad, torch.zeros_like(x))  # type: ignore[arg-type]
    assert torch.equal(
        layer.energy(x, torch.ones(2, J)).detach(), torch.full((2,), math.inf, dtype=torch.float64)
    )


def test_reconstruct_is_one_deterministic_mixing(generator: torch.Generator) -> None:
    layer, x = make_layer(generator, sharpness=5.0), capsules(generator)
    chain = x.clone()
    layer.contrastive_divergence(x, chain=chain)
    torch.testing.assert_close(layer.reconstruct(x), chain)


# --------------------------------------------------------------------------------------------------
# Learning. Algorithm 1 with plain loops is one route, autograd of the loss another, finite
# differences a third.


def algorithm_1(layer: CapsuleExperts, x: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """ΔW, the coefficients and x̃, from the paper's Algorithm 1 with a loop over images, inputs and
    experts.
    """
    w, c = layer.weight.detach(), layer.route(x).coefficients.detach()
    inputs, experts = range(I), range(J)

    def small(z: Tensor) -> Tensor:
        square = z @ z
        return square / (1 + square) * z / square.sqrt()

    def g(z: Tensor) -> Tensor:
        return z / (1 + z @ z)

    delta, mixed = torch.zeros_like(w), torch.zeros_like(x)
    for n in range(len(x)):
        visible = [x[n, i] for i in inputs]
        for _ in range(k):
            z = [sum(c[n, i, j] * w[i, j] @ visible[i] for i in inputs) for j in experts]
            up = [small(each) for each in z]  # type: ignore[arg-type]
            visible = [small(sum(c[n, i, j] * w[i, j].T @ up[j] for j in experts)) for i in inputs]  # type: ignore[arg-type]
        mixed[n] = torch.stack(visible)
        for j in experts:
            data = g(sum(c[n, i, j] * w[i, j] @ x[n, i] for i in inputs))  # type: ignore[arg-type]
            model = g(sum(c[n, i, j] * w[i, j] @ visible[i] for i in inputs))  # type: ignore[arg-type]
            for i in inputs:
                step = torch.outer(data, x[n, i]) - torch.outer(model, visible[i])
                delta[i, j] += 2 * c[n, i, j] * step / len(x)
    return delta, c, mixed


@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize(("normalize", "agreement"), OPTIONS)
def test_gradient_of_contrastive_divergence(
    normalize: F.Axis,
    agreement: F.Agreement,
    k: int,
    backend: Backend,
    generator: torch.Generator,
) -> None:
    options: dict[str, Any] = {"normalize": normalize, "agreement": agreement, "sharpness": 3.0}
    layer = make_layer(generator, backend=backend, **options)
    x = capsules(generator, 3).requires_grad_()
    loss = layer.contrastive_divergence(x, k)
    (3 * loss).backward()
    gradient = layer.weight.grad
    assert gradient is not None
    gradient = gradient / 3
    assert x.grad is None
    layer.backend = None  # for the coefficients
    layer.requires_grad_(False)

    delta, c, mixed = algorithm_1(layer, x.detach(), k)
    torch.testing.assert_close(gradient, -delta, rtol=1e-9, atol=1e-12)

    def free_energy_difference(w: Tensor) -> Tensor:
        def mean(v: Tensor) -> Tensor:
            z = torch.einsum("bij,ijdk,bik->bjd", c, w, v)
            return -torch.log1p(z.square().sum(-1)).sum(-1).mean()

        return mean(x.detach()) - mean(mixed)

    step = 1e-5
    for index in itertools.product(range(I), range(J), range(D), range(K)):
        change = torch.zeros_like(delta)
        change[index] = step
        w = layer.weight.detach()
        slope = (free_energy_difference(w + change) - free_energy_difference(w - change)) / (
            2 * step
        )
        assert slope.item() == pytest.approx(gradient[index].item(), rel=1e-6, abs=1e-9)


def test_bernoulli_mixing_draws_each_state_as_often_as_the_model_says(
    generator: torch.Generator,
) -> None:
    """Every x̃ is the reconstruction from unit vectors of some on/off state, and states occur with
    P(a|x).
    """
    layer = make_layer(generator, std=2.0, out_capsules=3)
    x, draws = capsules(generator, 1), 20_000
    routing = layer.route(x)
    states = torch.tensor(list(itertools.product([0.0, 1.0], repeat=3)), dtype=torch.float64)
    up = states.unsqueeze(-1) * F.direction(routing.preactivation)
    possible = F.reconstruction(up, layer.weight, routing.coefficients.expand(8, -1, -1)).detach()
    p = layer.firing_probability(x)[0].detach()
    probability = torch.where(states.bool(), p, 1 - p).prod(-1)

    chain = x.repeat(draws, 1, 1)
    layer.contrastive_divergence(x, mixing="bernoulli", chain=chain, generator=generator)
    distance = torch.cdist(chain.flatten(1), possible.flatten(1))
    assert distance.min(1).values.max() < 1e-6
    count = torch.bincount(distance.argmin(1), minlength=8)
    spread = (probability * (1 - probability) / draws).sqrt()
    assert bool(((count / draws - probability).abs() < 5 * spread).all())


def test_a_persistent_chain_goes_on_from_where_it_was(generator: torch.Generator) -> None:
    layer, x = make_layer(generator, sharpness=3.0), capsules(generator, 3)
    chain = capsules(generator, 4)
    expected = chain.clone()
    for _ in range(3):
        data, _, _ = positive_phase(layer, x)
        model, _, expected = positive_phase(layer, expected, after=2)
        layer.zero_grad()
        layer.contrastive_divergence(x, 2, chain=chain).backward()
        torch.testing.assert_close(chain, expected)
        torch.testing.assert_close(layer.weight.grad, model - data)


def positive_phase(
    layer: CapsuleExperts, x: Tensor, after: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """2 · mean c_ij g(z_j) x_iᵀ at the capsules reached from `x` by `after` mixings with its
    coefficients.
    """
    w, c = layer.weight.detach(), layer.route(x).coefficients.detach()
    for _ in range(after):
        x = F.reconstruction(squash(F.preactivation(x, w, c)), w, c)
    z = F.preactivation(x, w, c)
    g = z / (1 + z.square().sum(-1, keepdim=True))
    return 2 * torch.einsum("bij,bjd,bik->ijdk", c, g, x) / len(x), c, x


def test_learning_lowers_the_reconstruction_error(generator: torch.Generator) -> None:
    """Data on a few directions per capsule: after learning, one mixing keeps most of what it lost
    before.
    """
    basis = torch.randn(3, I, K, generator=generator)
    x = squash(torch.einsum("bn,nik->bik", torch.randn(256, 3, generator=generator), basis))
    layer = make_layer(generator, std=0.01, dtype=torch.float32, sharpness=5.0)
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.05)

    def error() -> float:
        with torch.no_grad():
            return ((layer.reconstruct(x) - x).square().sum() / x.square().sum()).item()

    before = error()
    for _ in range(200):
        optimizer.zero_grad()
        layer.contrastive_divergence(x).backward()
        optimizer.step()
    assert before > 0.99
    assert error() < 0.5


# --------------------------------------------------------------------------------------------------
# Competition


def test_only_the_winners_fire_and_the_balance_decides_close_calls(
    generator: torch.Generator,
) -> None:
    layer, x = make_layer(generator, winners=2), capsules(generator)
    z = layer.route(x).preactivation
    assert torch.equal((layer(x).norm(dim=-1) > 0).sum(-1), torch.full((len(x),), 2))
    assert torch.equal(
        (layer(x).norm(dim=-1) > 0), z.norm(dim=-1) >= z.norm(dim=-1).topk(2).values[:, 1:]
    )

    layer.balance[4] = 1e3
    assert bool((layer.firing_probability(x)[:, 4] > 0).all())
    layer.winners = None
    assert bool((layer(x).norm(dim=-1) > 0).all())
    torch.testing.assert_close(layer(x), squash(z))


def test_the_score_is_the_log_of_the_squared_norm_plus_the_balance() -> None:
    """A head start of log 4 beats a rival whose ‖z‖² is 3 times as large, and not one where it is 8
    times as large.
    """
    layer = CapsuleExperts(1, 1, 2, 1, iterations=1, winners=1, dtype=torch.float64)
    layer.balance[0] = math.log(4)
    for ratio, winner in ((3, 0), (8, 1)):
        with torch.no_grad():
            layer.weight[0, :, 0, 0] = torch.tensor([1.0, math.sqrt(ratio)])
        fires = layer.firing_probability(torch.tensor([[[0.9]]], dtype=torch.float64))[0] > 0
        assert fires.nonzero().flatten().tolist() == [winner]


def test_reconstruct_hears_only_the_winners(generator: torch.Generator) -> None:
    layer, x = make_layer(generator, winners=2), capsules(generator)
    layer.balance[:2] = 1e3
    alone = CapsuleExperts(I, K, 2, D, dtype=torch.float64)
    alone.load_state_dict({"weight": layer.weight[:, :2].detach(), "balance": layer.balance[:2]})
    torch.testing.assert_close(layer.reconstruct(x), alone.reconstruct(x))


def test_competition_with_a_chain(generator: torch.Generator) -> None:
    """Data and chain have winners of their own, held while they are mixed; the data's alone move
    the balance.
    """
    layer, x, chain = (
        make_layer(generator, winners=2, balance_rate=0.3),
        capsules(generator, 5),
        capsules(generator, 7),
    )
    w = layer.weight.detach()

    def phase(x: Tensor, mixings: int) -> tuple[Tensor, Tensor, Tensor]:
        c, z = layer.route(x).coefficients.detach(), layer.route(x).preactivation.detach()
        wins = (z.norm(dim=-1) >= z.norm(dim=-1).topk(2).values[:, 1:]).double()
        for _ in range(mixings):
            y = squash(F.preactivation(x, w, c)) * wins.unsqueeze(-1)
            x = F.reconstruction(y, w, c)
        z = F.preactivation(x, w, c)
        g = wins.unsqueeze(-1) * z / (1 + z.square().sum(-1, keepdim=True))
        return 2 * torch.einsum("bij,bjd,bik->ijdk", c, g, x) / len(x), x, wins

    data, _, wins = phase(x, 0)
    model, mixed, _ = phase(chain, 3)
    layer.contrastive_divergence(x, 3, chain=chain).backward()
    torch.testing.assert_close(layer.weight.grad, model - data)
    torch.testing.assert_close(chain, mixed)
    torch.testing.assert_close(
        layer.balance.double(), 0.3 * (2 / J - wins.mean(0)), rtol=1e-6, atol=1e-7
    )
    layer.reset_parameters()
    assert not bool(layer.balance.any())


def test_losers_are_off_in_both_phases(generator: torch.Generator) -> None:
    layer, x = make_layer(generator, winners=2), capsules(generator)
    layer.balance[:2] = 1e3
    layer.contrastive_divergence(x).backward()
    gradient = layer.weight.grad
    assert gradient is not None
    assert bool((gradient[:, :2] != 0).all())
    assert bool((gradient[:, 2:] == 0).all())

    alone = CapsuleExperts(I, K, 2, D, dtype=torch.float64)
    alone.load_state_dict({"weight": layer.weight[:, :2].detach(), "balance": layer.balance[:2]})
    alone.contrastive_divergence(x).backward()
    torch.testing.assert_close(gradient[:, :2], alone.weight.grad)


def test_the_balance_makes_all_experts_win_equally_often(generator: torch.Generator) -> None:
    layer, x = make_layer(generator, winners=1), capsules(generator, 500)
    with torch.no_grad():
        layer.weight[:, 0] *= 3

    def shares() -> Tensor:
        return (layer(x).norm(dim=-1) > 0).double().mean(0)

    assert shares()[0] > 0.6
    for _ in range(100):
        layer.contrastive_divergence(x)
    assert bool(((shares() - 1 / J).abs() < 0.05).all())

    assert layer.to(torch.bfloat16).balance.dtype == torch.float32
    layer.to(torch.float64)
    held = layer.balance.clone()
    layer.eval()
    layer.contrastive_divergence(x)
    assert torch.equal(layer.balance, held)


# --------------------------------------------------------------------------------------------------
# An ordinary module


def test_the_same_seed_gives_the_same_result() -> None:
    def run() -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(7)
        layer = CapsuleExperts(I, K, J, D, generator=generator)
        initial = layer.weight.detach().clone()
        layer.reset_parameters(std=2.0, generator=generator)
        x = capsules(generator, dtype=torch.float32)
        layer.contrastive_divergence(x, 2, mixing="bernoulli", generator=generator).backward()
        assert layer.weight.grad is not None
        return initial, layer.weight.grad

    first = run()
    torch.rand(1)  # what others draw meanwhile does not matter
    second = run()
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])
    assert 0.005 < first[0].std().item() < 0.015


@pytest.mark.parametrize("winners", [None, 2])
@pytest.mark.parametrize(("normalize", "agreement"), OPTIONS)
def test_a_batch_and_its_images_one_by_one_agree(
    normalize: F.Axis, agreement: F.Agreement, winners: int | None, generator: torch.Generator
) -> None:
    layer = make_layer(generator, normalize=normalize, agreement=agreement, winners=winners).eval()
    x = capsules(generator)
    for method in (layer, layer.reconstruct, layer.free_energy, layer.firing_probability):
        torch.testing.assert_close(method(x), torch.cat([method(image[None]) for image in x]))
    loss = layer.contrastive_divergence(x)
    torch.testing.assert_close(
        loss, torch.stack([layer.contrastive_divergence(image[None]) for image in x]).mean()
    )


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float32, 1e-5), (torch.float16, 2e-2), (torch.bfloat16, 1e-1)],
    ids=str,
)
@pytest.mark.parametrize(("normalize", "agreement"), OPTIONS)
def test_every_precision_agrees_with_float64(
    normalize: F.Axis,
    agreement: F.Agreement,
    dtype: torch.dtype,
    tolerance: float,
    generator: torch.Generator,
) -> None:
    wide = make_layer(generator, normalize=normalize, agreement=agreement, sharpness=3.0)
    with torch.no_grad():
        wide.weight.copy_(wide.weight.to(dtype))
    narrow = copy.deepcopy(wide).to(dtype)
    x = capsules(generator, dtype=dtype)

    def relative_error(ours: Tensor, exact: Tensor) -> float:
        return ((ours.double() - exact).norm() / exact.norm()).item()

    for name in ("forward", "reconstruct", "free_energy", "firing_probability"):
        ours, exact = getattr(narrow, name)(x), getattr(wide, name)(x.double())
        assert ours.dtype == (torch.float32 if name == "free_energy" else dtype)
        assert relative_error(ours, exact) < tolerance, name
    narrow.contrastive_divergence(x).backward()
    wide.contrastive_divergence(x.double()).backward()
    assert narrow.weight.grad is not None
    assert wide.weight.grad is not None
    assert narrow.weight.grad.dtype == dtype
    assert relative_error(narrow.weight.grad, wide.weight.grad) < 3 * tolerance


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(dtype: torch.dtype, generator: torch.Generator) -> None:
    layer = make_layer(generator, dtype=torch.float32)
    x = capsules(generator, dtype=torch.float32)
    exact = layer(x)
    with torch.autocast("cpu", dtype=dtype):
        code = layer(x)
        loss = layer.contrastive_divergence(x, mixing="bernoulli", generator=generator)
    assert code.dtype == dtype
    torch.testing.assert_close(code.float(), exact, rtol=0.05, atol=0.02)
    assert loss.dtype == torch.float32
    (code.float().sum() + loss).backward()
    assert layer.weight.grad is not None
    assert layer.weight.grad.dtype == torch.float32
    assert bool(layer.weight.grad.isfinite().all())


def test_autocast_reconciles_half_and_float32_but_not_float64(generator: torch.Generator) -> None:
    layer = make_layer(generator, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer(capsules(generator, dtype=torch.bfloat16)).dtype == torch.bfloat16
        with pytest.raises(
            TypeError, match=r"x is torch.float64 but the layer's weight is torch.float32"
        ):
            layer(capsules(generator))


def test_a_layer_on_the_meta_device_knows_its_shapes() -> None:
    layer = CapsuleExperts(I, K, J, D, device="meta")
    assert layer(torch.empty(2, I, K, device="meta")).shape == (2, J, D)


def test_defaults_are_the_papers() -> None:
    layer = CapsuleExperts(I, K, J, D)
    assert (layer.iterations, layer.sharpness, layer.normalize, layer.agreement) == (
        3,
        1.0,
        "inputs",
        "cosine",
    )
    assert layer.winners is None


@pytest.mark.filterwarnings("ignore")  # the compiler's own warnings differ from release to release
def test_compile(generator: torch.Generator) -> None:
    """The layer and its loss compile without a graph break, and give the same numbers and
    gradients.

    The inductor, which needs a C++ compiler, compiles the graphs of aot_eager.
    """
    backend = "aot_eager" if shutil.which("g++") is None else "inductor"
    layer = make_layer(generator, dtype=torch.float32, winners=3, iterations=2).eval()
    x = capsules(generator, dtype=torch.float32)

    def both(x: Tensor) -> tuple[Tensor, Tensor]:
        return layer(x), layer.contrastive_divergence(x)

    results = []
    for function in (both, torch.compile(both, backend=backend, fullgraph=True)):
        layer.zero_grad()
        code, loss = function(x)
        (code.sum() + loss).backward()
        assert layer.weight.grad is not None
        results.append((code.detach(), loss.detach(), layer.weight.grad.clone()))
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore")
def test_compile_with_dynamic_shapes_and_other_sharpness(generator: torch.Generator) -> None:
    layer = make_layer(generator, dtype=torch.float32, iterations=2)
    x = capsules(generator, dtype=torch.float32)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=True)
    for count, sharpness in ((8, 1.0), (5, 1.0), (7, 2.0)):
        layer.sharpness = sharpness
        torch.testing.assert_close(compiled(x[:count]), layer(x[:count]))


def test_functional_transforms(generator: torch.Generator) -> None:
    """Per-image gradients of the free energy by vmap are those of one image at a time."""
    layer, x = make_layer(generator), capsules(generator)
    per_image = torch.func.vmap(
        torch.func.grad(lambda image: layer.free_energy(image[None]).sum())
    )(x)
    x.requires_grad_()
    layer.free_energy(x).sum().backward()
    torch.testing.assert_close(per_image, x.grad)


def test_state_dict_deepcopy_and_trained_balance_survive(
    generator: torch.Generator, tmp_path: Path
) -> None:
    layer, x = make_layer(generator, winners=2), capsules(generator)
    layer.contrastive_divergence(x)
    assert bool(layer.balance.any())
    torch.save(layer.state_dict(), tmp_path / "layer.pt")
    other = make_layer(generator, winners=2)
    assert not torch.allclose(other(x), layer(x))
    other.load_state_dict(torch.load(tmp_path / "layer.pt", weights_only=True))
    twin = copy.deepcopy(layer)
    assert torch.equal(other(x), layer(x))
    assert torch.equal(twin(x), layer(x))
    with torch.no_grad():
        twin.weight.zero_()
    assert bool(layer.weight.any())


def test_contrastive_divergence_by_torch_func(generator: torch.Generator) -> None:
    """Gradients per image by vmap have the gradient of the batch as their mean."""

    class Loss(nn.Module):
        def __init__(self, layer: CapsuleExperts) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: Tensor) -> Tensor:
            return self.layer.contrastive_divergence(x)

    layer = make_layer(generator).eval()
    x, module = capsules(generator), Loss(layer)

    def loss(weight: Tensor, x: Tensor) -> Tensor:
        value: Tensor = torch.func.functional_call(module, {"layer.weight": weight}, (x,))
        return value

    layer.contrastive_divergence(x).backward()
    weight = layer.weight.detach()
    torch.testing.assert_close(torch.func.grad(loss)(weight, x), layer.weight.grad)
    per_image = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(weight, x.unsqueeze(1))
    torch.testing.assert_close(per_image.mean(0), layer.weight.grad)


def test_contrastive_divergence_of_the_reference_is_differentiable_twice(
    generator: torch.Generator,
) -> None:
    layer, x = make_layer(generator, backend="reference"), capsules(generator)
    loss = layer.contrastive_divergence(x)
    (gradient,) = torch.autograd.grad(loss, layer.weight, create_graph=True)
    direction = torch.randn(gradient.shape, dtype=gradient.dtype, generator=generator)
    (second,) = torch.autograd.grad((gradient * direction).sum(), layer.weight)
    c = layer.route(x).coefficients.detach()
    x_model = layer.reconstruct(x).detach()

    def gradient_at(weight: Tensor) -> Tensor:
        weight = weight.detach().requires_grad_()
        data, model = (F.free_energy(F.preactivation(v, weight, c)).mean() for v in (x, x_model))
        return torch.autograd.grad(data - model, weight)[0]

    step = 1e-6 * direction
    slope = gradient_at(layer.weight + step) - gradient_at(layer.weight - step)
    torch.testing.assert_close(second, slope / 2e-6, rtol=1e-5, atol=1e-8)


def test_a_chain_that_requires_a_gradient_is_overwritten(generator: torch.Generator) -> None:
    layer, x = make_layer(generator), capsules(generator)
    chain = x.clone().requires_grad_()
    layer.contrastive_divergence(x, chain=chain).backward()
    assert chain.grad is None
    assert not torch.equal(chain, x)


def test_uniform_numbers_of_another_shape_raise_an_error(generator: torch.Generator) -> None:
    layer, x = make_layer(generator), capsules(generator)
    with pytest.raises(ValueError, match=r"uniform must have shape \(k=2, N=8, J=5\)"):
        layer.contrastive_divergence(x, 2, mixing="bernoulli", uniform=torch.rand(8, J))


def test_it_trains_inside_an_ordinary_network(generator: torch.Generator) -> None:
    """Behind a linear map and another layer: gradients of a supervised loss reach every weight."""
    second = CapsuleExperts(J, D, 2, 3, generator=generator)
    second.reset_parameters(std=1.0, generator=generator)
    network = nn.Sequential(
        nn.Linear(I * K, I * K),
        nn.Unflatten(1, (I, K)),
        make_layer(generator, dtype=torch.float32),
        second,
    )
    length = network(torch.randn(16, I * K, generator=generator)).norm(dim=-1)
    nn.functional.cross_entropy(length, torch.arange(16) % 2).backward()
    for parameter in network.parameters():
        assert parameter.grad is not None
        assert bool(parameter.grad.any())


def ddp_worker(rank: int, rendezvous: str, results: str) -> None:
    generator = torch.Generator().manual_seed(3)
    layer = make_layer(generator)
    x = capsules(generator, 8)
    torch.distributed.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=2)
    parallel = nn.parallel.DistributedDataParallel(layer)
    parallel(x.chunk(2)[rank]).square().mean().backward()
    torch.save(layer.weight.grad, f"{results}/{rank}.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    os._exit(
        0
    )  # the interpreter's own way out now and then aborts in gloo's threads, after all is done


def test_distributed_data_parallel(commands: Commands, tmp_path: Path) -> None:
    """Two processes with half a batch each end with the gradient of the whole batch."""
    loopback = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
    rendezvous = (tmp_path / "rendezvous").as_uri()
    workers = [
        commands.start(
            str(rank), rendezvous, tmp_path, module=__name__, GLOO_SOCKET_IFNAME=loopback
        )
        for rank in range(2)
    ]
    for worker in workers:
        assert worker.wait() == 0, worker.communicate()
    generator = torch.Generator().manual_seed(3)
    layer = make_layer(generator)
    layer(capsules(generator, 8)).square().mean().backward()
    for rank in range(2):
        torch.testing.assert_close(
            torch.load(tmp_path / f"{rank}.pt", weights_only=True), layer.weight.grad
        )


# --------------------------------------------------------------------------------------------------
# What a caller can get wrong


def test_bad_data_are_refused_by_name_value_and_remedy(generator: torch.Generator) -> None:
    layer, x = make_layer(generator), capsules(generator)
    methods = (
        layer,
        layer.reconstruct,
        layer.free_energy,
        layer.firing_probability,
        layer.contrastive_divergence,
    )
    nan, outside = x.clone(), x.clone()
    nan[1, 2, 3] = math.nan
    outside[4, 5] = torch.tensor([0.6, 0.8, 0, 0], dtype=torch.float64)
    for method in methods:
        with pytest.raises(
            ValueError, match=r"x must have shape \(B, I=6, K=4\).*\(6, 4\); add the batch axis"
        ):
            method(x[0])
        with pytest.raises(
            ValueError,
            match=r"x must have shape \(B, I=6, K=4\).*\(8, 5, 4\); reshape it, or build",
        ):
            method(x[:, :5])
        with pytest.raises(
            TypeError, match=r"x is torch.float32 but the layer's weight is torch.float64"
        ):
            method(x.float())
        with pytest.raises(ValueError, match=r"x must be finite, but x\[1, 2\] = \[.*nan\]"):
            method(nan)
    for method in methods[1:]:
        with pytest.raises(ValueError, match=r"x\[4, 5\] has norm 1; apply poecaps.squash"):
            method(outside)
    assert layer(outside).shape == (8, J, D)
    with pytest.raises(ValueError, match=r"chain\[4, 5\] has norm 1"):
        layer.contrastive_divergence(x, chain=outside)
    with pytest.raises(ValueError, match="x must hold at least one image"):
        layer.contrastive_divergence(x[:0])
    with pytest.raises(ValueError, match="chain must hold at least one image"):
        layer.contrastive_divergence(x, chain=x[:0].clone())
    with pytest.raises(
        ValueError, match=r"chain is overwritten, but shares its memory with x; give it chain.clone"
    ):
        layer.contrastive_divergence(x, chain=x[:2])
    with pytest.raises(
        ValueError, match=r"on must be 0 \(off\) or 1 \(on\) for every expert, but holds 2"
    ):
        layer.energy(x, torch.full((8, J), 2))
    with pytest.raises(ValueError, match=r"x\[4, 5\] has norm 1"):
        layer.energy(outside, torch.ones(8, J))
    with pytest.raises(TypeError, match=r"on must be a torch.Tensor, but is list"):
        layer.energy(x, [1] * J)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"x must have shape .*; reshape it"):
        layer(x.flatten(1))
    with pytest.raises(ValueError, match=r"on must have shape \(B=8, J=5\).*\(8, 4\)"):
        layer.energy(x, torch.ones(8, 4))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"in_capsules": 0},
            ValueError,
            "in_capsules must be a whole number of at least 1, but is 0",
        ),
        ({"out_dim": 2.0}, TypeError, "out_dim must be a whole number of at least 1, but is 2.0"),
        ({"iterations": True}, TypeError, "iterations must be"),
        ({"normalize": "outpts"}, ValueError, "did you mean 'outputs'"),
        ({"winners": 6}, ValueError, "winners must be a whole number from 1 to 5, but is 6"),
        ({"winners": 0}, ValueError, "winners must be a whole number from 1 to 5, but is 0"),
        ({"balance_rate": -1.0}, ValueError, "balance_rate must be"),
        ({"dtype": torch.int32}, TypeError, "dtype must be one of torch.float16"),
    ],
)
def test_bad_options_are_refused(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    sizes = {"in_capsules": I, "in_dim": K, "out_capsules": J, "out_dim": D}
    with pytest.raises(error, match=message):
        CapsuleExperts(**(sizes | options))


def test_numbers_of_numpy_are_numbers() -> None:
    layer = CapsuleExperts(np.int64(I), K, J, D, sharpness=np.float32(5), winners=np.int32(2))
    assert layer.weight.shape == (I, J, D, K)


def test_bad_learning_options_are_refused(generator: torch.Generator) -> None:
    layer, x = make_layer(generator), capsules(generator)
    with pytest.raises(ValueError, match="k must be a whole number of at least 1, but is 0"):
        layer.contrastive_divergence(x, 0)
    with pytest.raises(
        ValueError, match="mixing must be one of 'deterministic', 'bernoulli', but is 'gibbs'"
    ):
        layer.contrastive_divergence(x, mixing="gibbs")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="winners must be a whole number from 1 to 5, but is 9"):
        layer.winners = 9
    with pytest.raises(ValueError, match="views must be a whole number of at least 1, but is 0"):
        layer.contrastive_divergence(x, views=0)
    message = f"x must hold 7 views of every image, but {len(x)} rows are not a multiple"
    with pytest.raises(ValueError, match=message):
        layer.contrastive_divergence(x, views=7)


def test_folding_the_balance_keeps_winners_and_coefficients(generator: torch.Generator) -> None:
    layer = CapsuleExperts(12, 4, 6, 5, winners=1, sharpness=3.0, dtype=torch.float64)
    layer.reset_parameters(std=1.0, generator=generator)
    layer.balance.copy_(2 * torch.randn(6, generator=generator, dtype=torch.float64))
    x = squash(torch.randn(50, 12, 4, generator=generator, dtype=torch.float64))
    with torch.no_grad():
        before, winners = layer.route(x).coefficients, layer.firing_probability(x).argmax(1)
        unfolded = CapsuleExperts(12, 4, 6, 5, dtype=torch.float64)
        unfolded.weight.copy_(layer.weight)
        layer.fold_balance()
        layer.winners = None
        torch.testing.assert_close(layer.route(x).coefficients, before)
        assert torch.equal(layer.firing_probability(x).argmax(1), winners)
        assert not torch.equal(unfolded.firing_probability(x).argmax(1), winners)
    assert not layer.balance.any()
    with pytest.raises(ValueError, match='needs agreement="cosine"'):
        CapsuleExperts(3, 2, 2, 2, agreement="inner").fold_balance()


if __name__ == "__main__":
    ddp_worker(int(sys.argv[1]), *sys.argv[2:])
