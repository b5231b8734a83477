"""Commands about the density of a model: `sample` and `likelihood`."""

from __future__ import annotations

import warnings
from dataclasses import asdict
from functools import partial
from pathlib import Path  # noqa: TC003 (tyro reads the annotations)
from typing import TYPE_CHECKING, Annotated, Any

import torch
from tyro.conf import Positional, arg

from poecaps import _checks as checks
from poecaps import likelihood as likelihoods
from poecaps import plotting
from poecaps._files import write_json
from poecaps._modules import BATCH_SIZE, device_of, in_batches
from poecaps._progress import Counter, counted
from poecaps.cli.loading import load_shown, open_model
from poecaps.cli.options import Data, DataPath, Device, Model, OptionalSplit, output
from poecaps.cli.outputs import FIGURES, default_output, require_png, say
from poecaps.network import DENSITY_STEPS, CapsuleNetwork
from poecaps.sampling import tempering_ladder

if TYPE_CHECKING:
    from torch import Tensor

STRIP_COLUMNS = 20  # times in a strip of chains
STRIP_ROWS = 8  # chains in a strip


def sample(
    run: Positional[Model],
    *,
    chains: int = 64,
    steps: int = DENSITY_STEPS,
    image: Annotated[
        int | None,
        arg(
            metavar="INT",
            help="Start all chains at this image of the data, counted from 0.",
            help_behavior_hint="(default: start from noise)",
        ),
    ] = None,
    data: Data = None,
    data_path: DataPath = None,
    split: OptionalSplit = None,
    temper: Annotated[int | None, arg(metavar="INT", help_behavior_hint="(default: none)")] = None,
    temperature: float = 1.0,
    tied: bool = False,
    show: bool = False,
    seed: int = 0,
    out: Annotated[Path | None, output("PNG", "RUN/figures/samples.png")] = None,
    device: Device = "auto",
) -> None:
    """Run Markov chains on the density of a model, and print their diagnostics.

    Most diagnostics are those of the free energy, which may be alike for different kinds of images.
    The last R-hat, of the leading coordinates, also tells whether chains cross between them.

    Parameters
    ----------
    chains
        Number of chains.
    steps
        Steps of each chain. From noise, it is annealed in two thirds of them.
    temper
        Chains at so many temperatures that exchange their states.
    temperature
        Temperature of the energy; above 1 is closer to the base measure.
    tied
        Decode by the filters of the autoencoder, even if there is a pixel decoder.
    show
        Also draw a strip of the chains over time, and an animation of it.
    seed
        Random seed.
    """
    checks.require_int("chains", chains, 1)
    checks.require_int("seed", seed, 0, 2**63 - 1)
    if temper is not None:
        checks.require_int("temper", temper, 2)
    network = open_model(run, device, "density")
    target = out or default_output(run, FIGURES, "samples.png")
    require_png(target)  # before the chains run
    options: dict[str, Any] = {"temperature": temperature}
    if image is not None:
        images = load_shown(network, run, data, data_path, split)
        checks.require_int("image", image, 0, len(images) - 1)
        with torch.no_grad():
            start = network.whitened(images.batch([image]).to(device_of(network)))
        options["start"] = start.repeat(chains, 1, 1)
    elif (data, data_path, split) != (None, None, None):
        raise ValueError(
            "--data, --data-path and --split select the data of --image; add --image as well"
        )
    every = -(-steps // (STRIP_COLUMNS - 1))  # rounded up: no more than the columns of a strip
    drawn = network.sample_density(
        chains,
        steps=steps,
        ladder=None if temper is None else tempering_ladder(temper),
        keep_every=every if show else None,
        generator=torch.Generator(device_of(network)).manual_seed(seed),
        report=Counter("sampling", "steps"),
        **options,
    )
    say(f"acceptance             {drawn.acceptance:.2f} (step size {drawn.step_size:.3f})")
    say(f"free energy            {drawn.free_energy[-1].mean():.1f}")
    say(f"effective sample size  {drawn.effective_sample_size:.0f} of {drawn.free_energy.numel()}")
    say(f"split R-hat            {drawn.split_rhat:.3f}")
    say(f"leading R-hat          {drawn.leading_rhat:.3f} of {drawn.leading.shape[-1]} coordinates")
    say(f"autocorrelation time   {drawn.autocorrelation_time:.1f} steps of a chain")
    if drawn.swap_rates:
        say("exchanges accepted    ", *(f"{rate:.2f}" for rate in drawn.swap_rates))
    pictures = _decode(network, drawn.capsules, tied)
    say(plotting.image_grid(pictures, target, title="states of the chains after the last step"))
    if show:
        strip = torch.stack([_decode(network, each[:STRIP_ROWS], tied) for each in drawn.strip])
        times = [every * index for index in range(len(strip))]
        path = target.with_name(f"{target.stem}-strip.png")
        say(plotting.chain_strip(strip, path, steps=times, title="chains over time, in steps"))
        say(plotting.animation(strip, target.with_name(f"{target.stem}-animation.png")))


def likelihood(
    run: Positional[Model],
    *,
    data: Data = None,
    data_path: DataPath = None,
    split: OptionalSplit = None,
    chains: int = 128,
    steps: int = 1000,
    images: int = 2000,
    seed: int = 0,
    out: Annotated[Path | None, output("JSON file", "RUN/likelihood.json")] = None,
    device: Device = "auto",
) -> None:
    """Estimate the log-likelihood of images under the density of a model, from both sides.

    It is given in nats above a model of independent capsules. Warnings tell that the two estimates
    differ by more than 10 nats, or that they rest on fewer than 16 effective chains.

    Parameters
    ----------
    chains
        Chains of annealed importance sampling, in each direction.
    steps
        Number of temperatures; more of them bring the two estimates closer together.
    images
        Number of images, from the first on.
    seed
        Random seed.
    """
    checks.require_int("images", images, 2)
    checks.require_int("seed", seed, 0, 2**63 - 1)
    path = out or default_output(run, "likelihood.json")
    if path.suffix.lower() != ".json":
        raise ValueError(f"--out must name a .json file, but is {path}")
    network = open_model(run, device, "density")
    density = network.require_density()
    shown = load_shown(network, run, data, data_path, split)
    batch = shown.batch(range(min(images, len(shown)))).to(device_of(network))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        estimate = likelihoods.estimate_log_partition(
            density,
            chains=chains,
            steps=steps,
            generator=torch.Generator(device_of(network)).manual_seed(seed),
            report=Counter("annealed importance sampling", "steps"),
        )
    likelihoods.fit_log_partition(density, estimate)
    batches = counted(batch.split(BATCH_SIZE), len(batch), Counter("log-likelihood"))
    with torch.no_grad():
        value, ratio = in_batches(partial(_log_prob, network), batches).unbind(1)
    base = value - ratio
    half = abs(estimate.bracket) / 2
    mean = value.mean().item()
    error = None if len(value) == 1 else value.std().item() / len(value) ** 0.5
    say(f"log Z            {estimate.forward:.1f} forward, {estimate.reverse:.1f} in reverse")
    say(f"effective chains {estimate.effective_sample_size:.0f} of {estimate.chains}")
    say(f"log-likelihood   {mean - half:.1f} to {mean + half:.1f} nats above independent capsules")
    if error is not None:
        say(f"                 standard error over {len(value):,} images {error:.1f}")
    say(f"of these         {base.mean():.1f} by the base measure, the others by the experts")
    for warning in caught:
        say(f"warning: {warning.message}")
    if estimate.effective_sample_size < likelihoods.FEW_CHAINS:
        say(
            f"warning: log Z rests on fewer than {likelihoods.FEW_CHAINS:.0f} effective chains; "
            "use more --steps or --chains"
        )
    result = {
        **asdict(estimate),
        "images": len(value),
        "log_likelihood": mean,
        "standard_error": error,
        "base": base.mean().item(),
    }
    write_json(path, result)
    say(f"written to {path}")


def _log_prob(network: CapsuleNetwork, images: Tensor) -> Tensor:
    """Compute the log-likelihood of images and the part of the experts in it: → (B, 2)."""
    ratio = network.require_density().log_ratio(network.whitened(images))
    return torch.stack([network.log_prob(images), ratio], dim=1)


@torch.no_grad()
def _decode(network: CapsuleNetwork, capsules: Tensor, tied: bool) -> Tensor:
    return in_batches(lambda part: network.decode_whitened(part, tied=tied).cpu(), capsules)
