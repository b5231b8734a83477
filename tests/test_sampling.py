"""Markov chains leave their density invariant, and diagnostics know how good they are.

Many independent chains run on tiny densities whose moments are known by quadrature, so that the
mean of their last states has an honest standard error.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from poecaps.energy import CapsuleDensity, GaussianBase
from poecaps.sampling import (
    SAMPLERS,
    Chains,
    DensityTarget,
    ImportanceWeights,
    Sampler,
    StepSize,
    Target,
    autocorrelation,
    autocorrelation_time,
    draw,
    effective_sample_size,
    hmc_step,
    sample,
    split_rhat,
    start_chains,
    swap_replicas,
    tempering_ladder,
)
from tests.densities import ZOO, Known, from_zoo, make_density, two_modes

# Densities for which routing is differentiated need the most time.
COUNT, FEW = 2000, 500
LADDER = (1.0, 0.6, 0.25, 0.0)
LARGE_STEPS: dict[Sampler, float] = {"hmc": 1.1, "langevin": 1.5, "gibbs": 1.0}
SOME = ["even, linear", "routed over outputs", "ball, routed"]


def chains_for(density: CapsuleDensity) -> int:
    return COUNT if density.is_even else FEW


def settings(sampler: Sampler, generator: torch.Generator, **changes: Any) -> dict[str, Any]:
    """Enough steps for chains on simple densities to forget where they began."""
    steps = {"hmc": 20, "langevin": 60, "gibbs": 30}[sampler]
    size = {"hmc": 0.4, "langevin": 0.9, "gibbs": 0.4}[sampler]
    return {
        "sampler": sampler,
        "steps": steps,
        "anneal": 15,
        "step_size": size,
        "leapfrog_steps": 3,
        "generator": generator,
    } | changes


# --------------------------------------------------------------------------------------------------
# Invariance


@pytest.mark.parametrize("name", ZOO)
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_chains_leave_exact_draws_exact(
    sampler: Sampler, name: str, generator: torch.Generator
) -> None:
    """With steps so large that many are rejected, and the others have large errors."""
    density = from_zoo(name, generator)
    known, count = Known(density), chains_for(density)
    start = known.draws(count, generator)
    known.assert_are_draws(start)
    options = settings(sampler, generator, anneal=0, steps=8, step_size=LARGE_STEPS[sampler])
    samples = sample(density, count, start=start, **options)
    known.assert_are_draws(samples.capsules)
    assert 0.2 < samples.acceptance < 0.97
    assert bool((samples.capsules != start).any((1, 2)).double().mean() > 0.9)
    assert samples.free_energy.shape == (8, count)
    torch.testing.assert_close(
        samples.free_energy[-1], density.free_energy(samples.capsules).detach()
    )


@pytest.mark.parametrize("name", ZOO)
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_without_the_metropolis_test_the_draws_are_wrong(
    sampler: Sampler, name: str, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the steps that leave them exact with it."""

    def always(
        target: Target, chains: Chains, momentum: Tensor, uniform: Tensor, **options: Any
    ) -> tuple[Chains, Tensor]:
        return hmc_step(target, chains, momentum, 0 * uniform, **options)

    density = from_zoo(name, generator)
    known, count = Known(density), chains_for(density)
    start = known.draws(count, generator)
    options = settings(sampler, generator, anneal=0, steps=8, step_size=LARGE_STEPS[sampler])
    monkeypatch.setattr("poecaps.sampling.hmc_step", always)
    samples = sample(density, count, start=start, **options)
    assert samples.acceptance > 0.99
    with pytest.raises(AssertionError):
        known.assert_are_draws(samples.capsules)


@pytest.mark.parametrize("name", ["even", "even, linear", "even, three capsules", "ball"])
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_chains_that_begin_at_the_base_measure_reach_the_density(
    sampler: Sampler, name: str, generator: torch.Generator
) -> None:
    density = from_zoo(name, generator)
    samples = sample(density, COUNT, **settings(sampler, generator))
    Known(density).assert_are_draws(samples.capsules)
    with pytest.raises(AssertionError):
        Known(density, t=0.0).assert_are_draws(samples.capsules)


@pytest.mark.parametrize("name", ["even, linear", "routed over outputs", "ball"])
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_chains_draw_at_a_temperature(
    sampler: Sampler, name: str, generator: torch.Generator
) -> None:
    density = from_zoo(name, generator)
    known, count = Known(density, t=1 / 2.5), chains_for(density)
    options = settings(sampler, generator, anneal=0, temperature=2.5)
    if not density.is_even:
        options["steps"] = 8
    samples = sample(density, count, start=known.draws(count, generator), **options)
    known.assert_are_draws(samples.capsules)
    with pytest.raises(AssertionError):
        Known(density).assert_are_draws(samples.capsules)


@pytest.mark.parametrize("name", ["even", "ball"])
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_chains_draw_from_the_density_with_a_ladder(
    sampler: Sampler, name: str, generator: torch.Generator
) -> None:
    density = from_zoo(name, generator, std=1.5)
    samples = sample(density, COUNT, **settings(sampler, generator, ladder=LADDER))
    Known(density).assert_are_draws(samples.capsules)
    energy = density.free_energy(samples.capsules).detach()
    torch.testing.assert_close(samples.free_energy[-1], energy)
    assert len(samples.swap_rates) == 3
    assert all(0.3 < rate < 1 for rate in samples.swap_rates)


def test_modes_are_drawn_as_often_as_they_are_probable(generator: torch.Generator) -> None:
    """Annealing finds both modes equally often, but one has 35 % of the probability."""
    density = two_modes((10.0, 10.2))
    annealed = sample(density, 2000, anneal=100, steps=20, generator=generator).capsules
    assert (annealed > 0).double().mean().item() == pytest.approx(0.5, abs=0.05)
    samples = draw(density, 2000, steps=600, levels=8, generator=generator)
    assert samples.capsules.shape == (2000, 1, 1)
    assert (samples.capsules > 0).double().mean().item() == pytest.approx(0.354, abs=0.05)
    assert len(samples.swap_rates) == 7


@pytest.mark.parametrize(
    ("count", "chains", "every"), [(1, 1, 100), (5, 5, 100), (80, 16, 8), (300, 19, 2)]
)
def test_a_chain_gives_several_draws(
    count: int, chains: int, every: int, generator: torch.Generator
) -> None:
    """At equal distances, the last of them at the end."""
    density, seen = two_modes((3.0, 3.0)), []
    samples = draw(
        density,
        count,
        steps=100,
        levels=3,
        generator=generator,
        report=lambda done, total: seen.append((done, total)),
    )
    total = 100 - 100 % every
    assert seen[-1] == (total, total)
    assert samples.capsules.shape == (count, 1, 1)
    assert samples.free_energy.shape == (total - total // 5, chains)
    kept = samples.free_energy.flip(0)[::every][: -(-count // chains)].flip(0)
    energy = density.free_energy(samples.capsules).detach()
    torch.testing.assert_close(energy, kept.flatten()[:count])


def test_too_few_steps_for_the_draws_of_a_chain() -> None:
    with pytest.raises(ValueError, match="steps must be a whole number of at least 16, but is 10"):
        draw(two_modes((1.0, 1.0)), 256, steps=10, levels=2)


def test_the_gibbs_sampler_is_exact_at_every_temperature(generator: torch.Generator) -> None:
    """States are drawn with their probabilities at t; those at t = 1 would hold an expert on."""
    density = make_density(generator, 1, 1, 1, 1, linear_dims=1)
    with torch.no_grad():
        density.weight.fill_(2.0)
        density.log_strength.zero_()
        density.origin.zero_()
    hot, options = Known(density, t=0.2), settings("gibbs", generator, step_size=0.6)
    start = hot.draws(COUNT, generator)
    samples = sample(density, COUNT, start=start, temperature=5.0, **options)
    hot.assert_are_draws(samples.capsules)
    samples = sample(density, 5 * COUNT, ladder=(1.0, 0.3, 0.0), **options)
    Known(density).assert_are_draws(samples.capsules)


def test_exchanges_without_their_test_make_the_draws_wrong(
    generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    def always(chains: Chains, ladder: Tensor, uniform: Tensor, **odd: bool) -> Any:
        return swap_replicas(chains, ladder, 0 * uniform, **odd)

    density = from_zoo("even", generator, std=3.0)
    monkeypatch.setattr("poecaps.sampling.swap_replicas", always)
    samples = sample(density, COUNT, **settings("hmc", generator, ladder=LADDER))
    with pytest.raises(AssertionError):
        Known(density).assert_are_draws(samples.capsules)


@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize("sampler", ["hmc", "langevin"])
def test_given_states_chains_draw_from_the_conditional_density(
    sampler: Sampler, name: str, generator: torch.Generator
) -> None:
    """An expert that is on is never silent: its energy is infinite at z = 0."""
    density = from_zoo(name, generator)
    count, on = chains_for(density), torch.zeros(density.out_capsules)
    on[0] = 1
    known = Known(density, on=on)
    start = known.draws(count, generator)
    options = settings(sampler, generator, anneal=0, steps=8)
    samples = sample(density, count, on=on, start=start, **options)
    known.assert_are_draws(samples.capsules)
    assert bool((samples.capsules != start).any((1, 2)).double().mean() > 0.9)
    with pytest.raises(AssertionError):
        Known(density, on=1 - on).assert_are_draws(samples.capsules)


@pytest.mark.parametrize("ladder", [None, LADDER])
def test_chains_leave_states_in_which_an_expert_that_is_on_is_silent(
    ladder: tuple[float, ...] | None, generator: torch.Generator
) -> None:
    """Half of the draws of the base measure are such states, if all coordinates are linear."""
    density, on = two_modes((3.0, 3.0)), torch.tensor([0.0, 1.0])
    options = settings("hmc", generator, anneal=80, ladder=ladder, on=on)
    samples = sample(density, COUNT, **options)
    assert samples.free_energy[-1].isfinite().all()
    Known(density, on=on).assert_are_draws(samples.capsules)


@pytest.mark.parametrize("ladder", [None, LADDER])
@pytest.mark.parametrize("name", ["even, linear", "routed over outputs"])
def test_every_chain_may_have_states_of_its_own(
    name: str, ladder: tuple[float, ...] | None, generator: torch.Generator
) -> None:
    """In the first half of the chains only the first expert is on, in the second the last."""
    density = from_zoo(name, generator)
    only = torch.eye(density.out_capsules)
    first, last = Known(density, on=only[0]), Known(density, on=only[-1])
    count = chains_for(density)
    start = torch.cat([known.draws(count, generator) for known in (first, last)])
    options = settings("hmc", generator, anneal=0, steps=8, ladder=ladder)
    on = only[[0, -1]].repeat_interleave(count, 0)
    drawn = sample(density, 2 * count, on=on, start=start, **options).capsules
    first.assert_are_draws(drawn[:count])
    last.assert_are_draws(drawn[count:])
    with pytest.raises(AssertionError):
        last.assert_are_draws(drawn[:count])


def test_equal_states_of_every_chain_are_those_of_all_chains(generator: torch.Generator) -> None:
    density, on = from_zoo("even", generator), torch.tensor([1.0, 0.0])
    state = generator.get_state()
    one, many = (
        sample(density, 5, on=each, **settings("hmc", generator.set_state(state), ladder=LADDER))
        for each in (on, on.repeat(5, 1))
    )
    assert torch.equal(one.capsules, many.capsules)


@pytest.mark.parametrize("name", ["even, linear", "routed over outputs", "ball"])
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_with_evidence_chains_draw_from_the_posterior(
    sampler: Sampler, name: str, generator: torch.Generator
) -> None:
    """The sum of all numbers was observed to be 1, with noise."""
    density = from_zoo(name, generator)
    known, count = Known(density, evidence=one_in_all), chains_for(density)
    start = known.draws(count, generator)
    options = settings(sampler, generator, anneal=0, steps=8)
    samples = sample(density, count, start=start, evidence=one_in_all, **options)
    known.assert_are_draws(samples.capsules)
    assert bool((samples.capsules != start).any((1, 2)).double().mean() > 0.9)
    with pytest.raises(AssertionError):
        Known(density).assert_are_draws(samples.capsules)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_evidence_is_tempered_like_the_energy(sampler: Sampler, generator: torch.Generator) -> None:
    density = from_zoo("even, linear", generator)
    known = Known(density, t=0.4, evidence=one_in_all)
    start = known.draws(COUNT, generator)
    options = settings(sampler, generator, anneal=0, steps=8, temperature=2.5)
    samples = sample(density, COUNT, start=start, evidence=one_in_all, **options)
    known.assert_are_draws(samples.capsules)
    with pytest.raises(AssertionError):
        Known(density, evidence=one_in_all).assert_are_draws(samples.capsules)


@pytest.mark.parametrize("ladder", [None, LADDER])
def test_every_chain_may_have_evidence_of_its_own(
    ladder: tuple[float, ...] | None, generator: torch.Generator
) -> None:
    """The first half of the chains observed one sum, the second half another."""
    density = from_zoo("even, linear", generator)
    seen = torch.tensor([1.0, -1.0], dtype=torch.float64).repeat_interleave(COUNT)

    def evidence(x: Tensor) -> Tensor:
        return one_in_all(x * seen.view(-1, 1, 1))

    options = settings("hmc", generator, ladder=ladder, evidence=evidence)
    first, second = sample(density, 2 * COUNT, **options).capsules.split(COUNT)
    known = Known(density, evidence=one_in_all)
    known.assert_are_draws(first)
    Known(density, evidence=lambda x: one_in_all(-x)).assert_are_draws(second)
    with pytest.raises(AssertionError):
        known.assert_are_draws(second)


def one_in_all(x: Tensor) -> Tensor:
    return (x.sum((1, 2)) - 1).square() / (2 * 0.7**2)


@pytest.mark.parametrize("components", [0, 1, 3])
@pytest.mark.parametrize(("sampler", "iterations"), [*((s, 1) for s in SAMPLERS), ("hmc", 3)])
def test_clamped_capsules_stay_and_the_others_are_drawn_given_them(
    sampler: Sampler, iterations: int, components: int, generator: torch.Generator
) -> None:
    density = make_density(
        generator, 3, 1, 2, 2, iterations=iterations, base_components=components, linear_dims=1
    )
    count = chains_for(density)
    clamped = torch.tensor([False, True, False])
    fixed = torch.tensor([[0.0], [1.5], [0.0]], dtype=torch.float64)
    start = fixed + torch.randn(count, 3, 1, dtype=torch.float64, generator=generator)
    start[:, clamped] = fixed[clamped]
    options = settings(sampler, generator, start=start, clamped=clamped, keep_every=1)
    samples = sample(density, count, **options)
    for states in samples.strip:
        torch.testing.assert_close(states[:, clamped], start[:, clamped], rtol=0, atol=1e-12)
        if components == 0:
            assert torch.equal(states[:, clamped], start[:, clamped])
    Known(density, clamped=clamped, fixed=fixed).assert_are_draws(samples.capsules)
    with pytest.raises(AssertionError):
        Known(density, clamped=clamped, fixed=-fixed).assert_are_draws(samples.capsules)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_capsules_can_be_clamped_on_the_ball(sampler: Sampler, generator: torch.Generator) -> None:
    density = from_zoo("ball", generator)
    clamped, fixed = torch.tensor([True, False]), torch.tensor([[0.7], [0.0]]).double()
    start = fixed.repeat(COUNT, 1, 1)
    samples = sample(density, COUNT, start=start, clamped=clamped, **settings(sampler, generator))
    torch.testing.assert_close(samples.capsules[:, 0], start[:, 0], rtol=0, atol=1e-12)
    Known(density, clamped=clamped, fixed=fixed).assert_are_draws(samples.capsules)


def test_clamped_capsules_stay_with_a_ladder(generator: torch.Generator) -> None:
    density = from_zoo("even, three capsules", generator)
    clamped, fixed = torch.tensor([True, False, False]), torch.tensor([[1.0], [0.0], [0.0]])
    start = fixed.double().repeat(COUNT, 1, 1)
    options = settings("hmc", generator, start=start, clamped=clamped, ladder=(1.0, 0.3))
    samples = sample(density, COUNT, **options)
    torch.testing.assert_close(samples.capsules[:, 0], start[:, 0], rtol=0, atol=1e-12)
    Known(density, clamped=clamped, fixed=fixed.double()).assert_are_draws(samples.capsules)


# --------------------------------------------------------------------------------------------------
# One step


def test_the_step_size_may_differ_between_chains(generator: torch.Generator) -> None:
    density = from_zoo("even, linear", generator)
    target, sizes = DensityTarget(density), torch.tensor([0.1, 0.3, 0.5], dtype=torch.float64)
    u = torch.randn(3, 2, dtype=torch.float64, generator=generator)
    momentum = torch.randn(3, 2, dtype=torch.float64, generator=generator)
    t, uniform = torch.tensor([1.0, 0.5, 0.0]).double(), torch.zeros(3, dtype=torch.float64)
    chains = start_chains(target, u, t)
    together, _ = hmc_step(target, chains, momentum, uniform, step_size=sizes, leapfrog_steps=4)
    for n in range(3):
        alone, _ = hmc_step(
            target,
            start_chains(target, u[n : n + 1], t[n : n + 1]),
            momentum[n : n + 1],
            uniform[:1],
            step_size=sizes[n].item(),
            leapfrog_steps=4,
        )
        torch.testing.assert_close(together.position[n], alone.position[0])
    torch.testing.assert_close(together.energy, target.energy(together.position)[0])
    torch.testing.assert_close(together.gradient, target.energy(together.position)[1])


def test_a_trajectory_is_accepted_with_the_metropolis_probability(
    generator: torch.Generator,
) -> None:
    density = from_zoo("even, linear", generator)
    target = DensityTarget(density)
    u = torch.randn(200, 2, dtype=torch.float64, generator=generator)
    momentum = torch.randn(200, 2, dtype=torch.float64, generator=generator)
    t, step = torch.full((200,), 0.7, dtype=torch.float64), 1.1

    def hamiltonian(u: Tensor, p: Tensor) -> Tensor:
        return 0.7 * target.energy(u)[0] + u.square().sum(-1) / 2 + p.square().sum(-1) / 2

    def force(u: Tensor) -> Tensor:
        return -0.7 * target.energy(u)[1] - u

    half = momentum + step / 2 * force(u)
    end = u + step * half
    probability = (hamiltonian(u, momentum) - hamiltonian(end, half + step / 2 * force(end))).exp()
    assert 20 < (probability < 1).sum() < 200
    for factor, accepts in ((0.999, True), (1.001, False)):
        uniform = factor * probability
        chains = start_chains(target, u, t)
        moved, accepted = hmc_step(
            target, chains, momentum, uniform, step_size=step, leapfrog_steps=1
        )
        assert bool((accepted == accepts).all())
        torch.testing.assert_close(moved.position, end if accepts else u, rtol=1e-6, atol=1e-6)
        assert torch.equal(moved.inverse_temperature, t)


def test_a_chain_that_would_become_nan_stays(generator: torch.Generator) -> None:
    target = DensityTarget(from_zoo("even", generator))
    u = torch.randn(5, 2, dtype=torch.float64, generator=generator)
    chains = start_chains(target, u, torch.ones(5, dtype=torch.float64))
    momentum = torch.full((5, 2), 1e300, dtype=torch.float64)
    moved, accepted = hmc_step(
        target, chains, momentum, torch.zeros(5).double(), step_size=1e300, leapfrog_steps=2
    )
    assert not accepted.any()
    assert torch.equal(moved.position, u)


@pytest.mark.parametrize("name", ["even, linear", "routed over outputs", "ball, routed"])
def test_a_target_at_t_has_t_times_the_energy_and_its_own_probabilities(
    name: str, generator: torch.Generator
) -> None:
    density = from_zoo(name, generator)
    target, t = DensityTarget(density), torch.tensor([0.0, 0.3, 1.0], dtype=torch.float64)
    u = target.sample_base(3, generator)
    for ours, theirs in zip(target.at(t).energy(u), target.energy(u), strict=True):
        torch.testing.assert_close(ours, t.view(-1, *[1] * (theirs.ndim - 1)) * theirs)
    z = density.preactivation(density.base.from_white(u))
    expected = 1 - (1 + z.square().sum(-1)) ** (-t.unsqueeze(-1) * density.strength)
    torch.testing.assert_close(target.at(t).on_probability(u), expected)
    torch.testing.assert_close(target.on_probability(u)[2], expected[2])


# --------------------------------------------------------------------------------------------------
# Tempering


def replicas(energy: Tensor) -> Chains:
    """Chains with energies (L, C), whose positions and gradients tell them apart."""
    number = torch.arange(energy.numel(), dtype=torch.float64)
    position = torch.stack((number, -number), dim=1)
    return Chains(position, energy.flatten(), 10 * position, torch.zeros(energy.numel()))


def test_neighbours_of_the_right_pairs_exchange_their_states() -> None:
    """Each of four levels has two chains, and the first chain of each pair is exchanged."""
    energy = torch.arange(8, dtype=torch.float64).view(4, 2)
    ladder = torch.tensor([1.0, 0.5, 0.2, 0.0], dtype=torch.float64)
    uniform = torch.tensor([[0.0, 1.0]] * 3, dtype=torch.float64)
    expected = {False: [2, 1, 0, 3, 6, 5, 4, 7], True: [0, 1, 4, 3, 2, 5, 6, 7]}
    pairs = {False: [True, False, True], True: [False, True, False]}
    for odd in (False, True):
        before = replicas(energy)
        chains, swapped = swap_replicas(before, ladder, uniform, odd=odd)
        source = expected[odd]
        assert torch.equal(chains.position, before.position[source])
        assert torch.equal(chains.energy, before.energy[source])
        assert torch.equal(chains.gradient, before.gradient[source])
        assert torch.equal(chains.inverse_temperature, before.inverse_temperature)
        assert swapped[:, 0].tolist() == pairs[odd]
        assert not swapped[:, 1].any()


def test_states_are_exchanged_with_their_probability() -> None:
    """min(1, e^((t − t')(F − F'))): always if the colder chain has the higher energy."""
    ladder = torch.tensor([1.0, 0.4], dtype=torch.float64)
    energy = torch.tensor([[-3.0, -3.0, 2.0], [-1.0, -1.0, 1.0]], dtype=torch.float64)
    probability = math.exp(0.6 * -2)
    uniform = torch.tensor([[0.999 * probability, 1.001 * probability, 1.0]], dtype=torch.float64)
    _, swapped = swap_replicas(replicas(energy), ladder, uniform, odd=False)
    assert swapped.tolist() == [[True, False, True]]


def test_rates_of_exchange_are_shares_of_the_attempts(generator: torch.Generator) -> None:
    """Without experts all energies are 0, so that every attempt succeeds."""
    density = make_density(generator, 2, 1, 2, 2, std=0.0)
    for steps, anneal, rates in (
        (1, 0, (1.0, 0.0, 1.0)),
        (1, 1, (0.0, 1.0, 0.0)),
        (5, 0, (1.0, 1.0, 1.0)),
        (8, 3, (1.0, 1.0, 1.0)),
    ):
        samples = sample(density, 4, steps=steps, anneal=anneal, ladder=(1, 0.6, 0.3, 0))
        assert samples.swap_rates == rates


def test_the_acceptance_is_that_of_the_lowest_temperature(generator: torch.Generator) -> None:
    """The levels of t near 0 accept nearly all, and that of t = 1 nearly nothing."""
    density = make_density(generator, 2, 1, 2, 2, std=30.0, strength=40.0, linear_dims=2)
    ladder = (1.0, 1e-4, 1e-5, 1e-6, 0.0)
    samples = sample(
        density, 500, steps=4, anneal=0, ladder=ladder, step_size=0.5, generator=generator
    )
    assert samples.acceptance < 0.5


def test_the_ladder_of_tempering_falls_from_the_model_to_the_base_measure() -> None:
    assert tempering_ladder(5) == pytest.approx((1, 0.75**1.5, 0.5**1.5, 0.125, 0))
    assert tempering_ladder(2) == (1, 0)
    with pytest.raises(ValueError, match="levels must be a whole number of at least 2, but is 1"):
        tempering_ladder(1)


# --------------------------------------------------------------------------------------------------
# Sampling


def test_the_step_size_is_adapted_and_then_frozen(generator: torch.Generator) -> None:
    density = from_zoo("even", generator)

    def step_size(steps: int, anneal: int, first: float = 0.01) -> float:
        seeded = torch.Generator().manual_seed(1)
        return sample(
            density, 50, steps=steps, anneal=anneal, step_size=first, generator=seeded
        ).step_size

    assert step_size(20, 0) == 0.01
    assert step_size(20, 30) == step_size(1, 30)
    assert step_size(1, 30) > 0.015
    assert step_size(1, 30, first=20.0) < 5


def test_a_step_size_moves_towards_the_target_acceptance() -> None:
    size = StepSize(torch.tensor(0.2), 0.6)
    size.update(torch.tensor(1.0))
    assert size.value.item() == pytest.approx(0.2 * math.exp(0.1 * 0.4))
    size.update(torch.tensor(0.0))
    assert size.value.item() == pytest.approx(0.2 * math.exp(0.1 * (0.4 - 0.6)))
    size.frozen = True
    held = size.value.item()
    size.update(torch.tensor(1.0))
    assert size.value.item() == held


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_the_same_seed_gives_the_same_draws(sampler: Sampler, generator: torch.Generator) -> None:
    density = from_zoo("routed over outputs", generator)

    def drawn(seed: int) -> Tensor:
        seeded = torch.Generator().manual_seed(seed)
        options = settings(sampler, seeded, anneal=2, steps=3, ladder=(1, 0.5))
        return sample(density, 10, **options).capsules

    assert torch.equal(drawn(3), drawn(3))
    assert not torch.equal(drawn(3), drawn(4))


def test_resampled_chains_have_the_probabilities_of_the_modes(generator: torch.Generator) -> None:
    density = two_modes((10.0, 10.2))
    x = torch.linspace(-15, 15, 20_001, dtype=torch.float64)
    with torch.no_grad():
        share = (-x.square() / 2 - density.free_energy(x.view(-1, 1, 1))).softmax(0)
    expected = share[x > 0].sum()
    assert 0.3 < expected < 0.4
    found, resampled = (
        (
            sample(
                density, 4000, steps=20, anneal=100, resample=resample, generator=generator
            ).capsules
            > 0
        )
        .double()
        .mean()
        for resample in (False, True)
    )
    assert abs(found - expected) > 0.1  # the chains do not cross
    assert abs(resampled - expected) < 0.06


def test_resampled_chains_with_the_same_evidence_are_draws_of_the_posterior(
    generator: torch.Generator,
) -> None:
    density = from_zoo("even, linear", generator)
    options = settings("hmc", generator, anneal=30, on=torch.tensor([1.0, 0.0]), resample=True)
    samples = sample(density, COUNT, evidence=one_in_all, **options)
    Known(density, on=options["on"], evidence=one_in_all).assert_are_draws(samples.capsules)


def test_weights_choose_the_chains_that_go_on(generator: torch.Generator) -> None:
    numbers = torch.arange(8, dtype=torch.float64)
    chains = Chains(numbers.unsqueeze(1), numbers, numbers.unsqueeze(1), torch.ones(8))
    weights = ImportanceWeights(chains, generator)
    same = weights.update(0.1 * numbers, chains)  # none has much more weight than others
    assert same.energy.tolist() == list(range(8))
    assert weights.effective_sample_size() > 4
    mean, _ = weights.log_mean()
    moved = weights.update(torch.where(numbers < 2, 50.0 - 0.1 * numbers, 0.0), same)
    assert moved.energy.tolist() == moved.position[:, 0].tolist() == [0] * 4 + [1] * 4
    assert weights.origins.tolist() == [0] * 4 + [1] * 4
    assert weights.effective_sample_size() == pytest.approx(2)
    expected = math.log(2 / 8) + 50
    assert mean > 0
    assert weights.log_weights.tolist() == pytest.approx([expected] * 8)
    assert weights.log_mean()[0] == pytest.approx(expected)
    again = weights.resample(moved)
    assert again.energy.tolist() == [0] * 4 + [1] * 4


def test_the_strip_holds_the_start_and_the_states_on_the_way(generator: torch.Generator) -> None:
    density = from_zoo("even", generator)
    start, reports = torch.randn(4, 2, 1, generator=generator).double(), []
    samples = sample(
        density,
        4,
        steps=7,
        anneal=2,
        start=start,
        keep_every=3,
        generator=generator,
        report=lambda done, total: reports.append((done, total)),
    )
    assert len(samples.strip) == 4
    torch.testing.assert_close(samples.strip[0], start)
    torch.testing.assert_close(samples.strip[-1], samples.capsules)
    assert not torch.equal(samples.strip[1], samples.strip[2])
    assert reports == [(done, 9) for done in range(1, 10)]
    assert sample(density, 4, steps=2, anneal=0, generator=generator).strip == ()


def test_samples_know_their_diagnostics(generator: torch.Generator) -> None:
    samples = sample(
        from_zoo("ball", generator),
        20,
        steps=200,
        step_size=0.4,
        anneal=50,
        leapfrog_steps=2,
        generator=generator,
    )
    assert 500 < samples.effective_sample_size < 4000
    assert samples.split_rhat == pytest.approx(1, abs=0.02)
    short = sample(from_zoo("even", generator), 20, steps=3, anneal=0, generator=generator)
    assert math.isnan(short.effective_sample_size)
    assert math.isnan(short.split_rhat)
    assert 1 < samples.autocorrelation_time < 20 * 200 / 500
    assert math.isnan(short.autocorrelation_time)
    assert 1 <= samples.leading_rhat < 1.15
    assert math.isnan(short.leading_rhat)


def test_the_leading_coordinates_tell_that_chains_do_not_cross_between_modes(
    generator: torch.Generator,
) -> None:
    """The modes at u and −u have the same free energies."""
    density = two_modes((60.0, 60.0))
    options: dict[str, Any] = {"steps": 300, "anneal": 150, "generator": generator}
    stuck = sample(density, 40, **options)
    assert stuck.split_rhat < 1.1
    assert stuck.leading_rhat > 3
    crossing = sample(density, 40, ladder=tempering_ladder(12), **options)
    assert crossing.leading_rhat < 1.3


@pytest.mark.parametrize(
    ("components", "restricted", "clamped"),
    [(0, False, False), (12, False, False), (12, True, False), (12, False, True)],
)
def test_leading_coordinates_are_those_of_the_principal_directions(
    components: int, restricted: bool, clamped: bool, generator: torch.Generator
) -> None:
    density = CapsuleDensity(
        5, 3, 4, 4, base_components=components, dtype=torch.float64, generator=generator
    )
    assert isinstance(density.base, GaussianBase)
    batch = torch.randn(50, 5, 3, generator=generator, dtype=torch.float64)
    density.base.fit([batch])
    if restricted:
        density.extend(density.restrict())
    options: dict[str, Any] = {}
    if clamped:
        options = {"start": batch[:6], "clamped": torch.arange(5) < 2}
    samples = sample(density, 6, steps=2, anneal=2, generator=generator, **options)
    u = density.base.to_white(samples.capsules)
    expected = u @ density.base.directions if components else u
    torch.testing.assert_close(samples.leading[-1], expected[:, :10])
    assert not torch.equal(samples.leading[0], samples.leading[1])


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"count": 0}, ValueError, "count must be a whole number of at least 1, but is 0"),
        ({"steps": 0}, ValueError, "steps must be a whole number of at least 1"),
        ({"anneal": -1}, ValueError, "anneal must be a whole number of at least 0"),
        ({"leapfrog_steps": 0}, ValueError, "leapfrog_steps must be"),
        ({"temperature": 0.0}, ValueError, "temperature must be above 0"),
        ({"step_size": 0.0}, ValueError, "step_size must be above 0"),
        ({"step_size": -0.1}, ValueError, "step_size must be above 0, but is -0.1"),
        ({"step_size": math.nan}, ValueError, "step_size must be a finite number"),
        ({"keep_every": 0}, ValueError, "keep_every must be a whole number of at least 1"),
        ({"sampler": "gibb"}, ValueError, "sampler must be one of .*; did you mean 'gibbs'"),
        ({"resample": True, "anneal": 0}, ValueError, "resample=True needs several chains"),
        ({"resample": True, "ladder": (1.0, 0.5)}, ValueError, "resample=True needs several"),
        ({"resample": True, "count": 1}, ValueError, "resample=True needs several chains"),
        ({"resample": True, "start": torch.zeros(4, 2, 1).double()}, ValueError, "resample=True"),
        (
            {"resample": True, "anneal": 3, "on": torch.ones(4, 2)},
            ValueError,
            r"resample=True .* on must have shape \(J=2,\), but has shape \(4, 2\)",
        ),
        (
            {"resample": True, "anneal": 3, "evidence": lambda x: x.sum((1, 2)) * torch.arange(4)},
            ValueError,
            "resample=True .* all need the same observation, but evidence gives other numbers",
        ),
        ({"ladder": (1.0,)}, ValueError, "ladder must be two or more inverse temperatures"),
        ({"ladder": (0.9, 0.5)}, ValueError, r"from 1 down to at least 0, but is \(0.9, 0.5\)"),
        ({"ladder": (1.0, -0.1)}, ValueError, "ladder must be two or more inverse temperatures"),
        ({"ladder": (1.0, 0.3, 0.3)}, ValueError, "ladder must fall from level to level"),
        ({"ladder": (1.0, 0.2, 0.5)}, ValueError, r"but is \(1.0, 0.2, 0.5\)"),
        ({"ladder": (1.0, math.nan)}, ValueError, "ladder must fall from level to level"),
        ({"ladder": ("1", "low")}, TypeError, "ladder must be a sequence of numbers"),
        ({"ladder": 4}, TypeError, "ladder must be a sequence of numbers, but is 4"),
        ({"on": torch.ones(3)}, ValueError, r"on must have shape \(J=2\)"),
        ({"on": torch.ones(3, 2)}, ValueError, r"on must have shape \(B=\d+, J=2\)"),
        ({"on": torch.ones(())}, ValueError, r"on must have shape \(J=2\)"),
        ({"on": torch.full((2,), 0.5)}, ValueError, r"on must be 0 \(off\) or 1 \(on\)"),
        ({"on": torch.ones(2), "sampler": "gibbs"}, ValueError, "draws the states itself"),
        ({"start": torch.zeros(4, 3, 1).double()}, ValueError, "start must have shape"),
        ({"start": torch.zeros(4, 2, 1)}, TypeError, "start is torch.float32 but"),
        ({"start": torch.full((4, 2, 1), math.nan).double()}, ValueError, "start must be finite"),
        ({"start": torch.zeros(3, 2, 1).double()}, ValueError, "must hold 4 states, but holds 3"),
        ({"evidence": torch.sum}, ValueError, r"result of evidence must have shape \(B=4\)"),
        ({"evidence": lambda _: torch.zeros(4)}, ValueError, "evidence must be a differentiable"),
        ({"evidence": lambda _: 0.0}, TypeError, "result of evidence must be a torch.Tensor"),
        ({"evidence": lambda x: x.sum((1, 2)) * math.nan}, ValueError, "energy of the chains is"),
        ({"evidence": lambda x: x.exp().sum((1, 2)) * math.inf}, ValueError, "evidence is infini"),
        ({"clamped": torch.ones(2) > 0}, ValueError, "clamped needs start"),
        (
            {"clamped": torch.ones(2), "start": torch.zeros(4, 2, 1).double()},
            TypeError,
            "clamped must be a boolean mask, but its dtype is torch.float32",
        ),
        (
            {"clamped": [True, False], "start": torch.zeros(4, 2, 1).double()},
            TypeError,
            "clamped must be a torch.Tensor",
        ),
        (
            {"clamped": torch.ones(3) > 0, "start": torch.zeros(4, 2, 1).double()},
            ValueError,
            r"clamped must have shape \(I=2\)",
        ),
    ],
)
def test_invalid_arguments_are_an_error(
    options: dict[str, Any], error: type[Exception], message: str, generator: torch.Generator
) -> None:
    with pytest.raises(error, match=message):
        sample(from_zoo("even", generator), **{"count": 4, "steps": 1, "anneal": 0} | options)


def test_chains_start_inside_the_ball(generator: torch.Generator) -> None:
    outside = torch.full((4, 2, 1), 1.5, dtype=torch.float64)
    with pytest.raises(ValueError, match="start must hold squashed capsules, of norm below 1"):
        sample(from_zoo("ball", generator), 4, steps=1, start=outside)


def test_weights_that_are_not_numbers_are_an_error(generator: torch.Generator) -> None:
    density = from_zoo("even", generator)
    density.weight.data[0] = math.nan
    with pytest.raises(ValueError, match=r"the energy of the chains is not a number \(NaN\)"):
        sample(density, 4, steps=1)
    density.weight.data[0] = math.inf
    with pytest.raises(ValueError, match="the energy of the chains is −∞ where they start; look"):
        sample(density, 4, steps=1)
    density = from_zoo("even", generator)
    density.log_strength.data[1] = math.inf
    with pytest.raises(ValueError, match="the energy of the chains is −∞ where they start; look"):
        sample(density, 4, steps=1)


def test_chains_cannot_be_given_a_start_of_no_probability(generator: torch.Generator) -> None:
    """There, an expert that is on is silent. Draws of the base measure may be such states, too."""
    density = two_modes((3.0, 3.0))
    start, on = torch.ones(4, 1, 1, dtype=torch.float64), torch.tensor([0.0, 1.0])
    start[:2] *= -1
    with pytest.raises(ValueError, match="start must have a finite log-density, but that of chain"):
        sample(density, 4, on=on, start=start, steps=1)
    samples = sample(density, 50, on=on, steps=1, anneal=1, generator=generator)
    assert samples.free_energy.isinf().any()


def test_chains_of_other_sizes_are_an_error(generator: torch.Generator) -> None:
    target = DensityTarget(from_zoo("even", generator))
    position, one = torch.zeros(4, 2, dtype=torch.float64), torch.ones(4, dtype=torch.float64)
    with pytest.raises(ValueError, match="a number for each of 4 chains, but has shape"):
        start_chains(target, position, one[:3])
    chains = start_chains(target, position, one)
    for wrong in (torch.zeros(4, 3), torch.zeros(4, 2, 1)):
        with pytest.raises(ValueError, match=r"position must have shape \(B, N=2\), but has"):
            start_chains(target, wrong.to(position), one)
    for momentum, uniform in ((position[:3], one), (position, one[:1]), (position[:, :1], one)):
        with pytest.raises(ValueError, match="as the chains have, but they have"):
            hmc_step(target, chains, momentum, uniform, step_size=0.1, leapfrog_steps=1)
    for levels, shape in ((3, (2, 1)), (2, (1, 4)), (2, (2, 2))):
        with pytest.raises(ValueError, match="needs as many chains at each of them"):
            swap_replicas(chains, one[:levels], torch.rand(shape), odd=False)


def test_temperatures_positions_and_ladders_of_chains_are_checked(
    generator: torch.Generator,
) -> None:
    target = DensityTarget(from_zoo("even", generator))
    position, one = torch.zeros(4, 2, dtype=torch.float64), torch.ones(4, dtype=torch.float64)
    for bad in (math.nan, -0.5, math.inf):
        with pytest.raises(ValueError, match=f"inverse_temperature must hold .* but holds {bad}"):
            start_chains(target, position, bad * one)
    for bad in (math.nan, -math.inf):
        with pytest.raises(ValueError, match=f"position must hold finite numbers, but holds {bad}"):
            start_chains(target, position + bad, one)
    chains = start_chains(target, position, one)
    options: dict[str, Any] = {"step_size": 0.1, "leapfrog_steps": 1}
    with pytest.raises(ValueError, match=r"chains.inverse_temperature must hold .* shape \(3,\)"):
        hmc_step(target, chains.at(one[:3]), position, one, **options)
    with pytest.raises(ValueError, match="step_size must be one number or one for each of 4"):
        hmc_step(target, chains, position, one, **options | {"step_size": one[:3]})
    for ladder in ([0.0, 1.0], [1.0, 1.0], [1.0, math.nan]):
        with pytest.raises(ValueError, match="ladder must fall from number to number, but is"):
            swap_replicas(chains, torch.tensor(ladder), torch.rand(1, 2), odd=False)


def test_a_target_needs_states_and_temperatures_for_each_chain(generator: torch.Generator) -> None:
    density = from_zoo("even", generator)
    position, one = torch.zeros(4, 2, dtype=torch.float64), torch.ones(4, dtype=torch.float64)
    for shape in ((4, 3), (2,), (4, 2, 1)):
        with pytest.raises(ValueError, match=r"on must have shape \(B, J=2\), but has"):
            DensityTarget(density, torch.ones(shape))
    with pytest.raises(ValueError, match=r"inverse_temperature must have shape \(B\), but has"):
        DensityTarget(density).at(torch.ones(()))
    with pytest.raises(ValueError, match=r"on must have shape \(B=4, J=2\), but has"):
        DensityTarget(density).at(one, torch.ones(3, 2))
    for target, name in (
        (DensityTarget(density).at(one[:3]), "inverse_temperature"),
        (DensityTarget(density, torch.ones(3, 2)), "on"),
    ):
        with pytest.raises(ValueError, match=f"there are 4 chains, but {name} of .* given for 3"):
            target.energy(position)
    with pytest.raises(ValueError, match="there are 4 chains, but inverse_temperature of"):
        DensityTarget(density).at(one[:1]).on_probability(position)


def test_reduced_chains_start_in_the_coordinates_in_which_they_move(
    generator: torch.Generator,
) -> None:
    density = make_density(generator, 6, 2, 1, 3)
    target, one = DensityTarget(density, reduced=True), torch.ones(4, dtype=torch.float64)
    assert target.size == 3
    assert start_chains(target, target.sample_base(4, generator), one).energy.shape == (4,)
    with pytest.raises(ValueError, match=r"position must have shape \(B, N=3\), but has shape"):
        start_chains(target, target.sample_positions(4, generator), one)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"leapfrog_steps": 0}, ValueError, "leapfrog_steps must be a whole number of at least 1"),
        ({"leapfrog_steps": 1.0}, TypeError, "leapfrog_steps must be a whole number"),
        ({"step_size": math.nan}, ValueError, "finite numbers above 0, but holds nan"),
        ({"step_size": 0.0}, ValueError, "finite numbers above 0, but holds 0.0"),
        ({"step_size": -0.5}, ValueError, "finite numbers above 0, but holds -0.5"),
        ({"step_size": torch.tensor(math.nan)}, ValueError, "finite numbers .* but holds nan"),
        ({"step_size": torch.tensor([0.1, 0.0])}, ValueError, "above 0, but holds 0.0"),
        ({"step_size": torch.tensor([math.inf, 1])}, ValueError, "above 0, but holds inf"),
    ],
)
def test_a_trajectory_needs_steps_of_some_length(
    options: dict[str, Any], error: type[Exception], message: str, generator: torch.Generator
) -> None:
    target = DensityTarget(from_zoo("even", generator))
    position, one = torch.zeros(2, 2, dtype=torch.float64), torch.ones(2, dtype=torch.float64)
    chains = start_chains(target, position, one)
    valid: dict[str, Any] = {"step_size": 0.1, "leapfrog_steps": 1}
    hmc_step(target, chains, position, one, **valid)
    with pytest.raises(error, match=message):
        hmc_step(target, chains, position, one, **valid | options)


# --------------------------------------------------------------------------------------------------
# Diagnostics


def autoregressive(rho: float, steps: int, chains: int, generator: torch.Generator) -> Tensor:
    """x_(s+1) = ρ x_s + √(1−ρ²) ε, which has autocorrelation ρ^lag."""
    noise = torch.randn(steps, chains, dtype=torch.float64, generator=generator)
    trace = [noise[0]]
    for each in noise[1:]:
        trace.append(rho * trace[-1] + math.sqrt(1 - rho**2) * each)
    return torch.stack(trace)


@pytest.mark.parametrize("rho", [0.0, 0.5, 0.9, -0.4])
def test_the_autocorrelation_of_an_autoregressive_process(
    rho: float, generator: torch.Generator
) -> None:
    correlation = autocorrelation(autoregressive(rho, 2000, 50, generator))
    assert correlation[0] == pytest.approx(1)
    for lag in range(1, 8):
        assert correlation[lag].item() == pytest.approx(rho**lag, abs=0.03)


@pytest.mark.parametrize("rho", [0.0, 0.5, 0.9, -0.4])
def test_the_effective_sample_size_of_an_autoregressive_process(
    rho: float, generator: torch.Generator
) -> None:
    """n (1 − ρ)/(1 + ρ): that of independent draws is their number."""
    trace = autoregressive(rho, 2000, 20, generator)
    expected = trace.numel() * (1 - rho) / (1 + rho)
    assert effective_sample_size(trace) == pytest.approx(expected, rel=0.15)


@pytest.mark.parametrize("rho", [0.0, 0.5, 0.9, -0.4])
def test_the_autocorrelation_time_of_an_autoregressive_process(
    rho: float, generator: torch.Generator
) -> None:
    """1 + 2 Σ ρ^lag = (1 + ρ)/(1 − ρ), whether chains agree or not."""
    trace = autoregressive(rho, 2000, 50, generator)
    expected = pytest.approx((1 + rho) / (1 - rho), rel=0.15)
    assert autocorrelation_time(trace) == expected
    assert autocorrelation_time(trace + 5 * torch.arange(50)) == expected


def test_chains_that_disagree_are_worth_few_draws(generator: torch.Generator) -> None:
    trace = torch.randn(200, 10, generator=generator)
    assert split_rhat(trace) == pytest.approx(1, abs=0.01)
    apart = trace + torch.arange(10) % 2
    assert split_rhat(apart) > 1.1
    assert effective_sample_size(apart) < 0.1 * effective_sample_size(trace)
    drifting = trace + torch.linspace(0, 3, 200).unsqueeze(-1)  # all alike, but not at rest
    assert split_rhat(drifting) > 1.1


def test_diagnostics_of_constants_and_of_few_steps_are_not_numbers() -> None:
    for trace in (torch.ones(10, 3), torch.randn(3, 3)):
        assert math.isnan(effective_sample_size(trace))
        assert math.isnan(split_rhat(trace))
        assert math.isnan(autocorrelation_time(trace))
    for function in (effective_sample_size, split_rhat, autocorrelation, autocorrelation_time):
        with pytest.raises(ValueError, match=r"trace must have shape \(T, B\)"):
            function(torch.ones(10))
        with pytest.raises(TypeError, match=r"trace must be a torch.Tensor"):
            function([[1.0]])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("components", "restricted", "numbers"), [(0, False, 4), (3, False, 4), (3, True, 3)]
)
def test_directions_on_which_no_expert_depends_can_be_left_out(
    components: int, restricted: bool, numbers: int, generator: torch.Generator
) -> None:
    """Those outside of the range of W, or outside of the components if it reads no others."""
    density = CapsuleDensity(
        3,
        3,
        2,
        2,
        linear_dims=1,
        strength=2.5,
        base_components=components,
        dtype=torch.float64,
        generator=generator,
    )
    density.reset_parameters(1.0, generator)
    if components:
        density.base.fit([torch.randn(50, 3, 3, generator=generator, dtype=torch.float64)])
    if restricted:
        density.extend(density.restrict())
    full, reduced = DensityTarget(density), DensityTarget(density, reduced=True)
    u, noise = torch.randn(2, 7, 9, generator=generator, dtype=torch.float64)
    y = reduced.coordinates(u)
    assert y.shape == (7, numbers)
    torch.testing.assert_close(reduced.positions(y, u), u)
    moved = reduced.positions(y, noise)
    torch.testing.assert_close(reduced.coordinates(moved), y)
    assert not torch.allclose(moved, u)
    energy, gradient = reduced.energy(y)
    expected, full_gradient = full.energy(u)
    torch.testing.assert_close(energy, expected)
    torch.testing.assert_close(full.energy(moved)[0], expected)
    torch.testing.assert_close(reduced.coordinates(full_gradient), gradient)
    # The gradient has no part in the directions that are left out.
    torch.testing.assert_close(full_gradient.norm(dim=1), gradient.norm(dim=1))
