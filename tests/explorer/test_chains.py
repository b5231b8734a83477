"""Markov chains of the explorer: their states, their steps and what they depend on."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from poecaps.explorer import chains
from poecaps.explorer.chains import ChainError, ChainState, Walk, advance, max_chains, start
from poecaps.explorer.render import as_pixels
from poecaps.options import DensityOptions
from poecaps.sampling import TARGET_ACCEPTANCE
from tests.explorer.conftest import with_density

if TYPE_CHECKING:
    from poecaps.explorer.render import ExplorerModel


@pytest.fixture(scope="module", params=["even", "routed", "ball"])
def model(request: pytest.FixtureRequest) -> ExplorerModel:
    """Every kind of energy that chains can walk on."""
    options = {
        "even": DensityOptions(experts=(6, 4), linear_dims=2, base_components=10),
        "routed": DensityOptions(experts=(3, 4), linear_dims=0, base_components=0, iterations=3),
        "ball": DensityOptions(experts=(3, 4), linear_dims=0, base_components=0, base="ball"),
    }
    return with_density(request.param, options[request.param])


def walk(model: ExplorerModel, at: Walk, steps: int, temperature: float = 1.0) -> list[Walk]:
    """Make many steps, in as many requests as the page would send."""
    parts = [at]
    for _ in range(0, steps, chains.MAX_STEPS):
        parts.append(advance(model, parts[-1].state, chains.MAX_STEPS, temperature))
    return parts[1:]


def digit(model: ExplorerModel, index: int = 3) -> np.ndarray:
    assert model.images is not None
    return np.asarray(model.images.images[index])


def test_steps_move_the_chains(model: ExplorerModel) -> None:
    begin = start(model, 4, seed=1)
    assert begin.images.shape == (4, 28, 28, 1)
    assert begin.free_energy.shape == (1, 4)
    assert begin.accepted.shape == (0, 4)
    after = advance(model, begin.state, 5)
    assert (after.state.step, after.free_energy.shape, after.accepted.shape) == (5, (5, 4), (5, 4))
    moved = (after.state.position != begin.state.position).any(1)
    assert np.array_equal(moved, after.accepted.any(0))
    assert moved.any()
    assert all((after.images[i] != begin.images[i]).any() for i in moved.nonzero()[0])


def test_the_images_are_those_of_the_density(model: ExplorerModel) -> None:
    after = advance(model, start(model, 2, seed=1).state, 3)
    density = model.network.require_density()
    with torch.no_grad():
        x = density.base.from_white(torch.from_numpy(after.state.position))
        torch.testing.assert_close(
            torch.from_numpy(after.free_energy[-1]), density.free_energy(x), rtol=1e-4, atol=1e-3
        )
        assert np.array_equal(after.images, as_pixels(model.network.decode_whitened(x)))


def test_directions_that_no_expert_reads_stay_as_they_were_drawn(walks: ExplorerModel) -> None:
    """Six experts of four numbers read 24 of 288 directions: those of the gradients of F."""
    density = walks.network.require_density()
    u = torch.randn(60, 288, generator=torch.Generator().manual_seed(0), requires_grad=True)
    (gradient,) = torch.autograd.grad(density.free_energy(density.base.from_white(u)).sum(), u)
    _, size, directions = torch.linalg.svd(gradient)
    assert size[23] > 1e3 * size[24]
    begin = start(walks, 4, seed=1)
    after = advance(walks, begin.state, 10)
    before, now = (torch.from_numpy(each.state.position) @ directions.T for each in (begin, after))
    torch.testing.assert_close(now[:, 24:], before[:, 24:], rtol=0, atol=1e-4)
    assert not torch.allclose(now[:, :24], before[:, :24], rtol=0, atol=1e-2)


def test_the_same_seed_gives_the_same_chains(model: ExplorerModel) -> None:
    first, again, other = (
        advance(model, start(model, 3, seed).state, 4, 2.0) for seed in (7, 7, 8)
    )
    assert np.array_equal(first.state.position, again.state.position)
    assert np.array_equal(first.free_energy, again.free_energy)
    assert not np.array_equal(first.state.position, other.state.position)


def test_chains_do_not_depend_on_how_steps_are_divided(model: ExplorerModel) -> None:
    begin = start(model, 3, seed=2, anneal=6)
    whole = advance(model, begin.state, 9)
    parts = [begin]
    for steps in (1, 4, 2, 2):
        parts.append(advance(model, parts[-1].state, steps))
    last = parts[-1]
    np.testing.assert_allclose(last.state.position, whole.state.position, rtol=1e-5, atol=1e-5)
    assert last.state.step_size == pytest.approx(whole.state.step_size)
    energies = np.concatenate([part.free_energy for part in parts[1:]])
    np.testing.assert_allclose(energies, whole.free_energy, rtol=1e-4, atol=1e-3)
    accepted = np.concatenate([part.accepted for part in parts[1:]])
    assert np.array_equal(accepted, whole.accepted)


def test_noise_is_annealed_to_the_model_at_the_temperature(walks: ExplorerModel) -> None:
    first = advance(walks, start(walks, 2, seed=0, anneal=8).state, 10, temperature=2.0)
    np.testing.assert_allclose(
        first.inverse_temperature, [step / 16 for step in range(1, 9)] + [0.5, 0.5]
    )


def test_chains_start_at_an_image(model: ExplorerModel) -> None:
    image = digit(model)
    begin = start(model, 3, seed=5, image=image)
    assert begin.state.anneal == 0
    assert (begin.state.position == begin.state.position[0]).all()
    with torch.no_grad():
        x = model.network.whitened(torch.from_numpy(image).permute(2, 0, 1).unsqueeze(0) / 255)
        direct = as_pixels(model.network.decode_whitened(x))[0]
    assert np.abs(begin.images[0].astype(int) - direct).max() <= 2
    after = advance(model, begin.state, 10)
    assert after.inverse_temperature == (1.0,) * 10
    assert len({position.tobytes() for position in after.state.position}) == 3  # they part


def test_the_free_energy_falls_to_that_of_the_model_and_rises_with_the_temperature(
    walks: ExplorerModel,
) -> None:
    def mean(parts: list[Walk]) -> float:
        return float(np.mean([part.free_energy for part in parts]))

    begin = start(walks, 8, seed=0, anneal=50)
    cold = walk(walks, walk(walks, begin, 100)[-1], 200)
    hot = walk(walks, walk(walks, cold[-1], 100, 100.0)[-1], 200, 100.0)
    base = np.mean([start(walks, 8, seed).free_energy for seed in range(50)])
    assert mean(cold) < mean(hot)
    assert mean(hot) == pytest.approx(float(base), rel=0.1)  # the base measure, almost
    assert mean(cold) < 1.2 * mean(hot)


def test_the_step_size_is_adapted_after_a_start_and_another_temperature_only(
    walks: ExplorerModel,
) -> None:
    begin = start(walks, 8, seed=0, image=digit(walks))
    sizes = [part.state.step_size for part in walk(walks, begin, 200)]
    adapted = chains.ADAPTED_STEPS // chains.MAX_STEPS
    assert len(set(sizes[:adapted])) == adapted
    assert len(set(sizes[adapted - 1 :])) == 1
    settled = walk(walks, begin, 200)[-1]
    assert settled.state.settled == chains.ADAPTED_STEPS
    other = advance(walks, settled.state, 1, 3.0)
    assert (other.state.settled, other.state.temperature) == (1, 3.0)
    assert other.state.step_size != settled.state.step_size


def test_about_as_many_steps_are_accepted_as_wanted(model: ExplorerModel) -> None:
    parts = walk(model, walk(model, start(model, 8, seed=0, anneal=100), 100)[-1], 100)
    share = np.mean([part.accepted for part in parts])
    assert abs(share - TARGET_ACCEPTANCE) < 0.15


# --------------------------------------------------------------------------------------------------
# Limits


@pytest.mark.parametrize("temperature", [0.99, 0.0, -1.0, 100.5, float("nan"), float("inf")])
def test_a_temperature_out_of_range_is_refused(walks: ExplorerModel, temperature: float) -> None:
    state = start(walks, 1, seed=0).state
    with pytest.raises(ValueError, match="temperature must be from 1 to 100"):
        advance(walks, state, 1, temperature)


def test_numbers_out_of_range_are_refused(walks: ExplorerModel) -> None:
    for count in (0, chains.MAX_CHAINS + 1):
        with pytest.raises(ValueError, match="count must be"):
            start(walks, count, seed=0)
    with pytest.raises(ValueError, match="anneal must be"):
        start(walks, 1, seed=0, anneal=chains.MAX_ANNEAL + 1)
    state = start(walks, 1, seed=0).state
    for steps in (0, chains.MAX_STEPS + 1):
        with pytest.raises(ValueError, match="steps must be"):
            advance(walks, state, steps)


@pytest.mark.parametrize(
    ("position", "why"),
    [
        (np.zeros(0, np.float32), "but holds 0"),
        (np.zeros(287, np.float32), "288 numbers for each of 1 to 8 chains"),
        (np.zeros((9, 288), np.float32), "but holds 2,592"),
        (np.full((1, 288), np.nan, np.float32), "numbers from"),
        (np.full((1, 288), np.inf, np.float32), "numbers from"),
        (np.full((1, 288), 2e6, np.float32), "numbers from"),
    ],
)
def test_a_state_of_other_chains_is_refused(
    walks: ExplorerModel, position: np.ndarray, why: str
) -> None:
    with pytest.raises(ChainError, match=why):
        advance(walks, ChainState(position, seed=0), 1)


def test_the_farthest_states_have_finite_energies(model: ExplorerModel) -> None:
    far = np.full((2, 288), chains.MAX_COORDINATE, np.float32)
    after = advance(model, ChainState(far, seed=0, step_size=chains.MAX_STEP_SIZE), 3)
    assert np.isfinite(after.free_energy).all()
    assert np.isfinite(after.state.position).all()


def test_a_chain_ends(walks: ExplorerModel) -> None:
    state = replace(start(walks, 1, seed=0).state, step=chains.MAX_STEP - 1)
    assert advance(walks, state, 1).state.step == chains.MAX_STEP
    with pytest.raises(ChainError, match="ends after 1,000,000 steps"):
        advance(walks, state, 2)


def test_an_image_of_another_shape_is_refused(walks: ExplorerModel) -> None:
    with pytest.raises(
        ChainError, match="must have 28×28×1 bytes, as the input of walks, but has 756"
    ):
        start(walks, 1, seed=0, image=digit(walks)[:, 1:])


def test_fewer_chains_of_a_large_model(
    walks: ExplorerModel, digits: ExplorerModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert max_chains(digits) == 0
    assert max_chains(walks) == chains.MAX_CHAINS
    monkeypatch.setattr(chains, "MAX_STATE_BYTES", 3 * 4 * 288)
    assert max_chains(walks) == 3
    assert len(start(walks, 3, seed=0).images) == 3
    with pytest.raises(ChainError, match="at most 3 chains at once, not 4"):
        start(walks, 4, seed=0)
