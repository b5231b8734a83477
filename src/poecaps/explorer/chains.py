"""Markov chains of the explorer: a few steps of Hamiltonian Monte Carlo for each request.

The server keeps no chains. A response has the whole state of its chains, I·K numbers for each, and
the next request sends it back. So there is nothing to expire, to count or to guess: no request can
use up the memory of the server or reach the chains of another page, and chains survive a restart of
the server. A state is bounded and checked like everything else that a request brings, and can only
be a point of the space that chains walk on.

The random numbers of a step are a function of the seed and the number of the step. Chains are
therefore the same however their steps are divided into requests.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from poecaps import _checks as checks
from poecaps.explorer.render import as_pixels
from poecaps.sampling import INITIAL_STEP_SIZE, StepSize, hmc_step, start_chains

if TYPE_CHECKING:
    from torch import Tensor

    from poecaps.explorer.render import ExplorerModel

    Array = np.ndarray[Any, Any]

# Upper bounds of a request. With the preset energy, 10 steps of 8 chains take a second on a core.
MAX_CHAINS = 8
MAX_STEPS = 10
MAX_STATE_BYTES = 4_000_000  # base64 makes a third more of it, which a request may still have
MAX_TEMPERATURE = 100.0
ANNEAL, MAX_ANNEAL = 200, 10_000  # steps
MAX_STEP = 1_000_000  # where a chain ends
LEAPFROG_STEPS = 5  # as while learning
ADAPTED_STEPS = 50  # after a start or another temperature, in which the step size is adapted
MIN_STEP_SIZE, MAX_STEP_SIZE = 1e-5, 10.0
# The coordinates of the base measure are of order 1. Far beyond, energies would overflow.
MAX_COORDINATE = 1e6


class ChainError(ValueError):
    """A chain or an image does not belong to a model, or a chain has ended."""


@dataclass(frozen=True, eq=False)
class ChainState:
    """All that the next step of B chains depends on.

    Attributes
    ----------
    position : (B, I·K)
        States u of the chains, in the coordinates of the base measure; float32.
    seed
        Seed of the random numbers.
    step
        Steps made so far.
    anneal
        Steps in which the chains are annealed from the base measure to the model.
    temperature
        Temperature of the last step.
    settled
        Steps at this temperature, counted up to `ADAPTED_STEPS`.
    step_size
        Length of a leapfrog step.
    """

    position: Array
    seed: int
    step: int = 0
    anneal: int = 0
    temperature: float = 1.0
    settled: int = 0
    step_size: float = INITIAL_STEP_SIZE


@dataclass(frozen=True, eq=False)
class Walk:
    """A start of B chains, or T steps of them.

    Attributes
    ----------
    state
        The state after the last step.
    images : (B, H, W, C)
        Its images; uint8.
    free_energy : (T, B)
        Free energy after each step; of a start, one row for the start itself.
    accepted : (T, B)
        Whether the proposal of each step was accepted; of a start, empty.
    inverse_temperature : (T,)
        t of each step, from 0 (the base measure) to 1 (the model); of a start, empty.
    """

    state: ChainState
    images: Array
    free_energy: Array
    accepted: Array
    inverse_temperature: tuple[float, ...]


def max_chains(model: ExplorerModel) -> int:
    """Return the most chains that a request may have; 0 for a model without a density."""
    if model.network.density is None:
        return 0
    return min(MAX_CHAINS, MAX_STATE_BYTES // (4 * _size(model)))


def _size(model: ExplorerModel) -> int:
    """Return the size of the state of one chain, I·K."""
    density = model.network.require_density()
    return density.in_capsules * density.in_dim


@torch.no_grad()
def start(
    model: ExplorerModel,
    count: int,
    seed: int,
    *,
    anneal: int = ANNEAL,
    image: Array | None = None,
) -> Walk:
    """Start chains.

    Parameters
    ----------
    model
        A model with a density.
    count
        Number of chains, B.
    seed
        The same seed gives the same chains.
    anneal
        Steps in which chains that start from noise are annealed from the base measure to the model.
    image : (H, W, C) or (H·W·C,), optional
        Image at which all chains start, uint8. They are then not annealed. By default the chains
        start from draws of the base measure.

    Raises
    ------
    ChainError
        If the image does not have the size of the model's input, or so many chains of this model
        are more than the explorer runs.
    """
    checks.require_int("count", count, 1, MAX_CHAINS)
    checks.require_int("anneal", anneal, 0, MAX_ANNEAL)
    if count > max_chains(model):
        raise ChainError(
            f"a chain of {model.name} has {_size(model):,} numbers, of which the explorer runs at "
            f"most {max_chains(model)} chains at once, not {count}"
        )
    target = model.chain_target
    if image is None:
        u = target.sample_positions(count, _generator(seed, 0))
    else:
        channels, height, width = model.network.architecture.image_shape
        if image.size != height * width * channels:
            raise ChainError(
                f"the image must have {height}×{width}×{channels} bytes, as the input of "
                f"{model.name}, but has {image.size:,}"
            )
        shaped = np.moveaxis(image.reshape(height, width, channels), -1, 0)
        pixels = torch.from_numpy(shaped.astype(np.float32)) / 255
        white = target.density.base.to_white(model.network.whitened(pixels.unsqueeze(0)))
        u = white.repeat(count, 1)
    state = ChainState(_to_array(u), seed, anneal=anneal if image is None else 0)
    energy = target.energy(target.coordinates(u))[0].unsqueeze(0).numpy()
    return Walk(state, _images(model, u), energy, np.zeros((0, count), bool), ())


@torch.no_grad()
def advance(model: ExplorerModel, state: ChainState, steps: int, temperature: float = 1.0) -> Walk:
    """Make steps of Hamiltonian Monte Carlo.

    The step size is adapted while the chains are annealed and in the first steps at a temperature.
    All other steps leave the density at this temperature exactly invariant.

    Parameters
    ----------
    model
        A model with a density.
    state
        The state of the chains.
    steps
        Number of steps, T.
    temperature
        Temperature of the energy; 1 is the model, higher is closer to the base measure.

    Raises
    ------
    ChainError
        If the state does not belong to chains of this model, or the chains have ended.
    """
    checks.require_int("steps", steps, 1, MAX_STEPS)
    if not 1 <= temperature <= MAX_TEMPERATURE:
        raise ValueError(
            f"temperature must be from 1 to {MAX_TEMPERATURE:.0f}, but is {temperature}"
        )
    if state.step + steps > MAX_STEP:
        raise ChainError(f"a chain ends after {MAX_STEP:,} steps; start another one")
    u, target = _position(model, state), model.chain_target
    y = target.coordinates(u)  # the directions that no expert reads stay as they were drawn
    settled = state.settled if temperature == state.temperature else 0
    size = StepSize(torch.tensor(state.step_size).to(u))
    chains = start_chains(target, y, torch.zeros(len(u)).to(u))
    energies, all_accepted, ts = [], [], []
    for step in range(state.step, state.step + steps):
        share = (step + 1) / state.anneal if step < state.anneal else 1.0
        ts.append(share / temperature)
        generator = _generator(state.seed, step + 1)
        chains, accepted = hmc_step(
            target,
            chains.at(torch.full((len(u),), ts[-1]).to(u)),
            torch.randn(y.shape, generator=generator).to(u),
            torch.rand(len(u), generator=generator).to(u),
            step_size=size.value,
            leapfrog_steps=LEAPFROG_STEPS,
        )
        size.frozen = step >= state.anneal and settled >= ADAPTED_STEPS
        size.update(accepted.to(u).mean())
        size.value.clamp_(MIN_STEP_SIZE, MAX_STEP_SIZE)
        settled = min(settled + 1, ADAPTED_STEPS)
        energies.append(chains.energy)
        all_accepted.append(accepted)
    u = target.positions(chains.position, u)
    after = ChainState(
        _to_array(u),
        state.seed,
        state.step + steps,
        state.anneal,
        float(temperature),
        settled,
        size.value.item(),
    )
    return Walk(
        after,
        _images(model, u),
        torch.stack(energies).numpy(),
        torch.stack(all_accepted).numpy(),
        tuple(ts),
    )


def _position(model: ExplorerModel, state: ChainState) -> Tensor:
    """Return the checked positions of chains (B, I·K); an array of numbers is cut into chains."""
    size, numbers = _size(model), state.position.size
    count, rest = divmod(numbers, size)
    if rest or not 1 <= count <= max_chains(model):
        raise ChainError(
            f"the state must hold {size:,} numbers for each of 1 to {max_chains(model)} chains of "
            f"{model.name}, but holds {numbers:,}"
        )
    if not bool((np.abs(state.position) <= MAX_COORDINATE).all()):  # false for NaN
        raise ChainError(
            f"the state must hold numbers from {-MAX_COORDINATE:,.0f} to {MAX_COORDINATE:,.0f}; "
            "start another chain"
        )
    weight = model.chain_target.density.weight
    return torch.tensor(state.position).view(count, size).to(weight)


def _generator(seed: int, step: int) -> torch.Generator:
    """Return the source of the random numbers of a step; step 0 is the start."""
    state = np.random.SeedSequence([seed, step]).generate_state(1, np.uint64)
    return torch.Generator().manual_seed(int(state[0] >> np.uint64(1)))


def _to_array(u: Tensor) -> Array:
    array: Array = u.float().numpy()
    return array


def _images(model: ExplorerModel, u: Tensor) -> Array:
    """Decode positions (B, I·K) to images (B, H, W, C), uint8."""
    x = model.chain_target.density.base.from_white(u)
    return as_pixels(model.network.decode_whitened(x))
