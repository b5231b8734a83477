"""Models with an exact likelihood: learning is compared with the exact gradient and samples."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from benchmarks.zoo import (
    ROUTED,
    ZOO,
    Species,
    ball_rule,
    dropped_share,
    exact_ascent,
    full_divergence,
    held_ascent,
    log_likelihood,
    log_partition,
    measure,
    quadrature,
    sample,
)

VOLUME = {1: 2.0, 2: math.pi, 3: 4 / 3 * math.pi}


@pytest.mark.parametrize("dim", [1, 2, 3])
def test_the_rule_integrates_polynomials_over_the_ball(dim: int) -> None:
    """Π x_d^(2a_d) has integral Π Γ(a_d + ½) / Γ(Σ a_d + dim/2 + 1); odd powers give 0."""
    degree = 6
    points, weights = ball_rule(dim, degree)
    for powers in itertools.product(range(degree + 1), repeat=dim):
        if sum(powers) <= degree:
            exact = 0.0
            if all(power % 2 == 0 for power in powers):
                halves = [power / 2 for power in powers]
                exact = math.prod(math.gamma(a + 0.5) for a in halves) / math.gamma(
                    sum(halves) + dim / 2 + 1
                )
            assert weights @ (points**powers).prod(axis=1) == pytest.approx(exact, abs=1e-14)


@pytest.mark.parametrize("species", [s for s in ZOO if s.out_capsules == 1], ids=str)
def test_partition_function_of_one_expert_has_a_closed_form(
    species: Species, generator: torch.Generator
) -> None:
    """The mean of x xᵀ over the ball is 1/(K+2), so Z = V^I (1 + Σ_i c_i² ‖W_i‖² / (K+2))."""
    layer = species.layer(generator, std=3.0)
    coefficient = 1 / species.in_capsules
    second_moment = coefficient**2 * layer.weight.detach().square().sum() / (species.in_dim + 2)
    expected = species.in_capsules * math.log(VOLUME[species.in_dim]) + math.log1p(second_moment)
    assert log_partition(layer, quadrature(species)).item() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("species", ZOO, ids=str)
def test_samples_come_from_the_model(species: Species, generator: torch.Generator) -> None:
    """The mean of Σ_j ‖z_j‖² over samples is its exact expectation, within 5 standard errors."""
    layer, rule = species.layer(generator, std=3.0), quadrature(species, extra_degree=2)
    with torch.no_grad():

        def activity(x: torch.Tensor) -> torch.Tensor:
            return layer.route(x).preactivation.square().sum((1, 2))

        drawn = activity(sample(layer, 4000, generator))
        uniform = torch.softmax(rule.log_weights, 0) @ activity(rule.points)
        expected = torch.softmax(rule.log_weights - layer.free_energy(rule.points), 0) @ activity(
            rule.points
        )
    error = drawn.std() / math.sqrt(len(drawn))
    assert abs(drawn.mean() - expected) < 5 * error
    assert abs(drawn.mean() - uniform) > 5 * error


@pytest.mark.parametrize("species", ZOO, ids=str)
def test_gradient_of_the_log_likelihood(species: Species, generator: torch.Generator) -> None:
    """∂ mean log P/∂W = −mean ∂F/∂W + E_model[∂F/∂W], against finite differences."""
    data = sample(species.layer(generator, std=3.0), 50, generator)
    layer, rule = species.layer(generator, std=1.0), quadrature(species)

    def free_energy_gradient(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        (grad_weight,) = torch.autograd.grad(weights @ layer.free_energy(x), layer.weight)
        return grad_weight

    model = torch.softmax(rule.log_weights - layer.free_energy(rule.points).detach(), dim=0)
    uniform = torch.full((len(data),), 1 / len(data), dtype=torch.float64)
    gradient = -free_energy_gradient(data, uniform) + free_energy_gradient(rule.points, model)

    step = 1e-5
    for index in itertools.product(*map(range, layer.weight.shape)):
        values = []
        for sign in (1, -1):
            with torch.no_grad():
                layer.weight[index] += sign * step
                values.append(log_likelihood(layer, data, rule).item())
                layer.weight[index] -= sign * step
        difference = (values[0] - values[1]) / (2 * step)
        assert difference == pytest.approx(gradient[index].item(), rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("species", ZOO, ids=str)
def test_exact_ascent_raises_the_exact_likelihood(
    species: Species, generator: torch.Generator
) -> None:
    """Every step of gradient ascent raises it, and all close most of the gap to the truth."""
    truth = species.layer(generator, std=3.0)
    data, rule = sample(truth, 500, generator), quadrature(species)
    layer = species.layer(generator, std=0.5)
    with torch.no_grad():
        best = log_likelihood(truth, data, rule).item()
    history = []
    for _ in range(200):
        value = log_likelihood(layer, data, rule)
        (gradient,) = torch.autograd.grad(value, layer.weight)
        history.append(value.item())
        with torch.no_grad():
            layer.weight.add_(0.3 * gradient)
    assert all(after > before - 1e-12 for before, after in itertools.pairwise(history))
    assert history[-1] - history[0] > 0.6 * (best - history[0])


def test_without_routing_nothing_is_dropped(generator: torch.Generator) -> None:
    """With one iteration the coefficients are constant, so holding them changes no gradient."""
    species = ZOO[4]
    data = sample(species.layer(generator, std=3.0), 50, generator)
    layer, rule = species.layer(generator, std=1.0), quadrature(species)
    assert dropped_share(layer, data) == pytest.approx(0, abs=1e-12)
    for whole, held in (
        (exact_ascent(layer, data, rule), held_ascent(layer, data, rule)),
        (full_divergence(layer, data), layer.contrastive_divergence(data)),
    ):
        gradients = [torch.autograd.grad(loss, layer.weight)[0] for loss in (whole, held)]
        torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("species", ROUTED[:3], ids=str)
def test_routed_models_are_integrated_and_sampled(
    species: Species, generator: torch.Generator
) -> None:
    """Finer rules agree, and samples have the activity that the rule expects."""
    layer = species.layer(generator, std=3.0)
    rules = [quadrature(species, fineness=fineness) for fineness in range(3)]
    with torch.no_grad():
        coarse, fine, finest = (log_partition(layer, rule).item() for rule in rules)
        assert fine == pytest.approx(finest, abs=2e-3)
        assert coarse == pytest.approx(finest, abs=2e-2)

        def activity(x: torch.Tensor) -> torch.Tensor:
            return layer.route(x).preactivation.square().sum((1, 2))

        drawn = activity(sample(layer, 2000, generator))
        x, log_weights = rules[1].points, rules[1].log_weights
        expected = torch.softmax(log_weights - layer.free_energy(x), 0) @ activity(x)
        uniform = torch.softmax(log_weights, 0) @ activity(x)
    error = drawn.std() / math.sqrt(len(drawn))
    assert abs(drawn.mean() - expected) < 5 * error
    assert abs(drawn.mean() - uniform) > 5 * error


def test_the_whole_gradient_of_a_routed_model(generator: torch.Generator) -> None:
    """It is that of finite differences, and the one for held coefficients is not."""
    species = ROUTED[0]
    data = sample(species.layer(generator, std=3.0), 40, generator)
    layer, rule = species.layer(generator, std=1.0), quadrature(species)
    whole, held = (
        torch.autograd.grad(loss(layer, data, rule), layer.weight)[0].flatten()
        for loss in (exact_ascent, held_ascent)
    )
    weight, step = layer.weight.detach().view(-1), 1e-6
    differences = []
    for index in range(len(weight)):
        values = []
        for sign in (1, -1):
            weight[index] += sign * step
            values.append(-log_likelihood(layer, data, rule).item())
            weight[index] -= sign * step
        differences.append((values[0] - values[1]) / (2 * step))
    torch.testing.assert_close(torch.tensor(differences).to(whole), whole, rtol=1e-4, atol=1e-6)
    assert (held - whole).norm() > 0.05 * whole.norm()


def test_the_measurement_compares_all_learning_methods() -> None:
    result = measure(ZOO[1], seed=0, images=200, steps=20, learning_rate=0.2)
    assert set(result) == {"start", "truth", "exact", "deterministic", "bernoulli"}
    assert result["exact"] > result["start"]
