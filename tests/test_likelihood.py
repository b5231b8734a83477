"""The partition function: annealed importance sampling against quadrature and closed forms."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from poecaps.energy import CapsuleDensity
from poecaps.likelihood import (
    LogPartition,
    bennett_ratio,
    bracket_log_partition,
    estimate_log_partition,
    exact_log_partition,
    fit_log_partition,
    thermodynamic_integral,
)
from tests.densities import ZOO, Known, base_quadrature, from_zoo, make_density, two_modes

if TYPE_CHECKING:
    from torch import Tensor

    from poecaps.options import Base


def one_expert(generator: torch.Generator, strength: float, components: int) -> CapsuleDensity:
    density = make_density(generator, 3, 1, 1, 2, base_components=components)
    with torch.no_grad():
        density.log_strength.fill_(math.log(strength))
    return density


def closed_form(density: CapsuleDensity) -> float:
    """log E (1 + q)^α of q = xᵀ A x with x ~ N(0, Σ), for α = 1 and α = 2.

    E q = tr AΣ, and E q² = (tr AΣ)² + 2 tr (AΣ)².
    """
    root = density.base.from_white(torch.eye(3, dtype=torch.float64)).flatten(1)
    matrix = root @ density.even_matrix().detach()
    product = matrix @ matrix.T
    trace = product.trace()
    if density.strength.item() < 1.5:
        return math.log(1 + trace)
    return math.log(1 + 2 * trace + trace**2 + 2 * (product @ product).trace())


@pytest.mark.parametrize("components", [0, 1, 3])
@pytest.mark.parametrize("strength", [1.0, 2.0])
def test_one_expert_has_a_closed_form(
    strength: float, components: int, generator: torch.Generator
) -> None:
    density = one_expert(generator, strength, components)
    assert exact_log_partition(density, 8) == pytest.approx(closed_form(density), abs=1e-12)
    result = estimate_log_partition(density, chains=600, steps=20, generator=generator)
    assert abs(result.forward - closed_form(density)) < 3 * result.forward_error
    assert result.forward_error < 0.05


class Quadratic:
    """F(u) = (c − 1)/2 ‖u‖² over N(0, 1): the model is N(0, 1/c), and Z = c^(−N/2)."""

    def __init__(self, precision: float) -> None:
        self.precision = precision

    def base(self, u: Tensor) -> tuple[Tensor, Tensor]:
        return u.square().sum(1) / 2, u

    def energy(self, u: Tensor) -> tuple[Tensor, Tensor]:
        factor = self.precision - 1
        return factor * u.square().sum(1) / 2, factor * u

    def sample_base(self, count: int, generator: torch.Generator | None = None) -> Tensor:
        return torch.randn(count, 5, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("precision", [0.5, 3.0])
def test_any_energy_over_a_base_measure_can_be_measured(
    precision: float, generator: torch.Generator
) -> None:
    target = Quadratic(precision)
    ticks: list[tuple[int, int]] = []
    result = bracket_log_partition(
        target,
        chains=300,
        steps=40,
        start=target.sample_base(300, generator) / math.sqrt(precision),
        generator=generator,
        report=lambda done, total: ticks.append((done, total)),
    )
    exact = -5 / 2 * math.log(precision)
    assert abs(result.forward - exact) < 4 * result.forward_error
    assert abs(result.reverse - exact) < 4 * result.reverse_error
    assert max(result.forward_error, result.reverse_error) < 0.05
    assert (result.chains, result.steps) == (300, 40)
    assert ticks == [(done, 120) for done in range(1, 121)]


@pytest.mark.parametrize("precision", [0.5, 3.0])
def test_draws_at_several_temperatures_tell_the_partition_function(
    precision: float, generator: torch.Generator
) -> None:
    """Bennett's estimate from both ends, and the thermodynamic integral from one draw at each t."""
    target, exact = Quadratic(precision), -5 / 2 * math.log(precision)
    u = target.sample_base(3000, generator)
    (lower, _), (upper, _) = target.energy(u[:1500]), target.energy(u[1500:] / math.sqrt(precision))
    assert bennett_ratio(lower, upper).item() == pytest.approx(exact, abs=0.1)
    many = bennett_ratio(lower.view(-1, 3), upper.view(-1, 3))
    assert many.shape == (3,)
    assert many.mean().item() == pytest.approx(exact, abs=0.1)
    t = torch.rand(3000, generator=generator, dtype=torch.float64).mul(1.5).clamp(max=1)
    energy, _ = target.energy(u / (1 + t.unsqueeze(1) * (precision - 1)).sqrt())
    assert thermodynamic_integral(t, energy) == pytest.approx(exact, abs=0.15)


def test_bennetts_estimate_of_constant_energies_is_exact() -> None:
    """Z changes by the factor e^(−W), also where the W are so far apart that all terms are 0."""
    same = torch.full((4, 2), -800.0)
    assert bennett_ratio(same, same).tolist() == pytest.approx([800.0, 800.0])
    assert -900 < bennett_ratio(torch.tensor([900.0]), torch.tensor([-900.0])).item() < 900


@pytest.mark.parametrize("name", ZOO)
def test_two_rules_of_quadrature_agree(name: str, generator: torch.Generator) -> None:
    """That of the library, and midpoints."""
    density = from_zoo(name, generator)
    points, log_weight = base_quadrature(density)
    with torch.no_grad():
        expected = torch.logsumexp(log_weight - density.free_energy(points), 0).item()
    assert exact_log_partition(density, 40) == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize("name", ZOO)
def test_both_directions_estimate_the_partition_function(
    name: str, generator: torch.Generator
) -> None:
    """The zoo has even mixing and routing, with linear coordinates and without."""
    density = from_zoo(name, generator)
    chains, steps = (400, 60) if density.is_even else (150, 40)
    points, log_weight = base_quadrature(density)
    with torch.no_grad():
        exact = torch.logsumexp(log_weight - density.free_energy(points), 0).item()
    result = estimate_log_partition(
        density,
        chains=chains,
        steps=steps,
        leapfrog_steps=3,
        start=Known(density).draws(chains, generator),
        generator=generator,
    )
    assert abs(result.forward - exact) < 3 * result.forward_error
    assert abs(result.reverse - exact) < 3 * result.reverse_error
    assert 0 < result.forward_error < 0.15
    assert 0 < result.reverse_error < 0.15
    assert chains / 8 < result.effective_sample_size < chains
    assert abs(result.bracket) < 0.4
    assert (result.chains, result.steps) == (chains, steps)


def test_more_temperatures_make_the_estimates_more_precise(generator: torch.Generator) -> None:
    density = from_zoo("even", generator, std=2.0)
    start = Known(density).draws(300, generator)
    few, many = (
        estimate_log_partition(density, chains=300, steps=steps, start=start, generator=generator)
        for steps in (2, 40)
    )
    assert many.forward_error < 0.6 * few.forward_error
    assert many.reverse_error < 0.6 * few.reverse_error
    assert many.effective_sample_size > 1.5 * few.effective_sample_size


def test_one_temperature_is_plain_importance_sampling(generator: torch.Generator) -> None:
    """log w = −F of draws of the base measure, and F of draws of the model after one step."""
    density = from_zoo("even", generator)
    exact = exact_log_partition(density)
    start = Known(density).draws(2000, generator)
    result = estimate_log_partition(density, chains=2000, steps=1, start=start, generator=generator)
    assert abs(result.forward - exact) < 3 * result.forward_error
    assert abs(result.reverse - exact) < 4 * result.reverse_error


def test_without_a_start_the_reverse_chains_begin_at_draws(generator: torch.Generator) -> None:
    density, reports = from_zoo("even", generator), []
    result = estimate_log_partition(
        density,
        chains=200,
        steps=30,
        generator=generator,
        report=lambda done, total: reports.append((done, total)),
    )
    exact = exact_log_partition(density)
    assert abs(result.forward - exact) < 3 * result.forward_error
    assert abs(result.reverse - exact) < 3 * result.reverse_error
    assert reports == [(done, 90) for done in range(1, 91)]


@pytest.mark.parametrize("strengths", [(10.0, 10.2), (10.0, 14.0)])
def test_two_modes_are_weighted(strengths: tuple[float, float], generator: torch.Generator) -> None:
    """Annealing finds both about as often, but the second has 65 % or all of the probability."""
    density = two_modes(strengths)
    x = torch.linspace(-15, 15, 20_001, dtype=torch.float64)
    with torch.no_grad():
        log_density = -x.square() / 2 - density.free_energy(x.view(-1, 1, 1))
    width = (x[1] - x[0]).item() / math.sqrt(2 * math.pi)
    exact = torch.logsumexp(log_density, 0).item() + math.log(width)
    result = estimate_log_partition(density, chains=500, steps=100, generator=generator)
    assert abs(result.forward - exact) < 4 * result.forward_error
    # Chains that go back from one mode alone come late to the other: the estimate is too high.
    assert -4 * result.reverse_error < result.reverse - exact < 1
    assert max(result.forward_error, result.reverse_error) < 0.4
    assert result.effective_sample_size < 250


def test_reverse_chains_begin_at_weighted_ends(generator: torch.Generator) -> None:
    """With one temperature, the ends of the forward chains are still draws of the base measure."""
    density = from_zoo("even", generator, std=0.25)
    result = estimate_log_partition(density, chains=4000, steps=1, generator=generator)
    assert result.effective_sample_size > 2000  # too many for a resampling on the way
    assert abs(result.reverse - exact_log_partition(density)) < 5 * result.reverse_error


def test_the_error_is_the_spread_of_estimates(generator: torch.Generator) -> None:
    density = two_modes((10.0, 10.2))
    found = [
        estimate_log_partition(density, chains=200, steps=30, generator=generator)
        for _ in range(25)
    ]
    spread = torch.tensor([each.forward for each in found]).std().item()
    expected = sum(each.forward_error**2 for each in found) / len(found)
    assert 0.6 < spread / math.sqrt(expected) < 1.6


def test_without_experts_there_is_nothing_to_estimate(generator: torch.Generator) -> None:
    density = CapsuleDensity(2, 3, 2, 2, dtype=torch.float64)
    density.reset_parameters(std=0.0)
    result = estimate_log_partition(density, chains=4, steps=3, generator=generator)
    assert (result.forward, result.reverse) == (0.0, 0.0)
    assert result.effective_sample_size == pytest.approx(4)


def test_the_same_seed_gives_the_same_estimate(generator: torch.Generator) -> None:
    density = from_zoo("even, linear", generator)

    def estimate(seed: int) -> LogPartition:
        seeded = torch.Generator().manual_seed(seed)
        return estimate_log_partition(density, chains=8, steps=3, generator=seeded)

    assert estimate(1) == estimate(1)
    assert estimate(1) != estimate(2)


def test_a_wide_bracket_is_a_warning(generator: torch.Generator) -> None:
    density = make_density(generator, 4, 4, 8, 4, strength=40.0)
    with pytest.warns(UserWarning, match=r"log Z is uncertain: the two .* more than 2 steps"):
        result = estimate_log_partition(density, chains=8, steps=2, generator=generator)
    assert result.bracket > 10
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        estimate_log_partition(from_zoo("even", generator), chains=8, steps=9, generator=generator)


def test_estimates_that_change_places_are_a_warning(generator: torch.Generator) -> None:
    """Chains in reverse that do not begin with draws of the model make the estimate too low."""
    density = make_density(generator, 4, 4, 8, 4, strength=40.0)
    far = torch.zeros(8, 4, 4).to(density.weight)
    with pytest.warns(UserWarning, match="log Z is uncertain"):
        result = estimate_log_partition(
            density, chains=8, steps=100, start=far, generator=generator
        )
    assert result.bracket < -10


def test_a_stored_estimate_is_part_of_the_state(generator: torch.Generator) -> None:
    density = from_zoo("even", generator)
    result = estimate_log_partition(density, chains=8, steps=3, generator=generator)
    fit_log_partition(density, result)
    assert density.partition.tolist() == [result.forward, result.reverse, 1.0]
    assert density.log_partition == pytest.approx((result.forward + result.reverse) / 2)
    other = from_zoo("even", generator)
    other.load_state_dict(density.state_dict())
    assert other.log_partition == density.log_partition


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["forward", "reverse"])
def test_estimates_that_are_not_finite_are_not_stored(
    name: str, bad: float, generator: torch.Generator
) -> None:
    density = from_zoo("even", generator)
    before = density.partition.clone()
    changes: dict[str, Any] = {name: bad}
    result = replace(LogPartition(1.0, 2.0, 0.1, 0.1, 8.0, 8, 3), **changes)
    with pytest.raises(ValueError, match=f"log Z must be finite, but they are .*{bad}"):
        fit_log_partition(density, result)
    assert torch.equal(density.partition, before)


def test_single_precision_gives_the_same_integral(generator: torch.Generator) -> None:
    density = from_zoo("even, linear", generator)
    exact = exact_log_partition(density, 30)
    assert exact_log_partition(density.float(), 30) == pytest.approx(exact, abs=1e-5)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"chains": 1}, ValueError, "chains must be a whole number of at least 2, but is 1"),
        ({"steps": 0}, ValueError, "steps must be a whole number of at least 1, but is 0"),
        ({"leapfrog_steps": 0}, ValueError, "leapfrog_steps must be a whole number of at least 1"),
        ({"start": torch.zeros(3, 2, 1).double()}, ValueError, "start must hold 4 states, but"),
        ({"start": torch.zeros(4, 2, 2).double()}, ValueError, "start must have shape"),
        ({"start": torch.full((4, 2, 1), math.inf).double()}, ValueError, "start must be finite"),
    ],
)
def test_invalid_arguments_are_an_error(
    options: dict[str, Any], error: type[Exception], message: str, generator: torch.Generator
) -> None:
    with pytest.raises(error, match=message):
        estimate_log_partition(from_zoo("even", generator), **{"chains": 4, "steps": 1} | options)


def test_reverse_chains_in_other_coordinates_are_an_error(generator: torch.Generator) -> None:
    target = Quadratic(2.0)
    for start, message in (
        (target.sample_base(3, generator), "start must hold 4 states, but holds 3"),
        (target.sample_base(4, generator)[:, 1:], r"start must have shape \(B=4, N=5\)"),
    ):
        with pytest.raises(ValueError, match=message):
            bracket_log_partition(target, chains=4, steps=2, start=start)


def test_weights_that_are_not_numbers_are_an_error(generator: torch.Generator) -> None:
    density = from_zoo("even", generator)
    density.weight.data[0] = math.nan
    with pytest.raises(ValueError, match=r"the energy of the chains is not a number \(NaN\)"):
        estimate_log_partition(density, chains=4, steps=1)
    density.weight.data[0] = math.inf
    with pytest.raises(ValueError, match="the energy of the chains is −∞ where they start"):
        estimate_log_partition(density, chains=4, steps=1)


def test_reverse_chains_start_inside_the_ball(generator: torch.Generator) -> None:
    outside = torch.full((4, 2, 1), 1.5, dtype=torch.float64)
    with pytest.raises(ValueError, match="start must hold squashed capsules, of norm below 1"):
        estimate_log_partition(from_zoo("ball", generator), chains=4, steps=1, start=outside)


@pytest.mark.parametrize(("capsules", "dim"), [(1, 1), (4, 1), (1, 2), (2, 2)])
def test_one_expert_on_the_ball_has_a_closed_form(
    capsules: int, dim: int, generator: torch.Generator
) -> None:
    """E (1 + ‖Wx‖²) = 1 + Σ_i tr W_iᵀW_i/(K + 2), as E x² is 1/(K + 2) for each number."""
    density = make_density(generator, capsules, dim, 1, 2, base="ball")
    density.log_strength.data.zero_()
    expected = math.log(1 + density.even_matrix().square().sum().item() / (dim + 2))
    assert exact_log_partition(density, 6) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("name", ["even", "routed over inputs", "ball"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_quadrature_of_weights_that_are_not_finite_is_an_error(
    bad: float, name: str, generator: torch.Generator
) -> None:
    density = from_zoo(name, generator)
    density.log_strength.data[0] = bad
    with pytest.raises(ValueError, match=f"log Z must be finite, but is {bad}; look for weights"):
        exact_log_partition(density, 8)


@pytest.mark.parametrize(
    ("sizes", "base"), [((5, 1), "gaussian"), ((5, 1), "ball"), ((1, 3), "ball")]
)
def test_quadrature_needs_few_numbers(sizes: tuple[int, int], base: Base) -> None:
    capsules, dim = sizes
    density = CapsuleDensity(capsules, dim, 2, 2, base=base)
    message = rf"I·K of at most 4, .* but I·K is {capsules * dim} and K is {dim}; use estimate"
    with pytest.raises(ValueError, match=message):
        exact_log_partition(density)
