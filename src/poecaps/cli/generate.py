"""Commands that draw images: `generate`, `reconstruct` and `traverse`."""

from __future__ import annotations

from pathlib import Path  # noqa: TC003 (tyro reads the annotations)
from typing import TYPE_CHECKING, Annotated, Any, Literal

import torch
from tyro.conf import Positional, arg

from poecaps import _checks as checks
from poecaps import plotting
from poecaps._modules import device_of, in_batches
from poecaps._progress import Counter
from poecaps.cli.loading import load_shown, open_model
from poecaps.cli.options import (
    Data,
    DataPath,
    Device,
    Model,
    OptionalSplit,
    output,
)
from poecaps.cli.outputs import FIGURES, default_output, require_png, say
from poecaps.code_density import DOMAIN_INFO, DOMAINS, Domain
from poecaps.network import DENSITY_STEPS, TRAVERSAL_REACH, TRAVERSAL_STEPS, CapsuleNetwork
from poecaps.sampling import DRAW_STEPS, LEVELS

if TYPE_CHECKING:
    from torch import Tensor

    from poecaps.data import ImageSet
    from poecaps.sampling import Samples

ROWS = 4  # draws of each expert, as in the paper's Figure 2
COLUMNS = 20  # of a grid in which a column is not an expert
LOW_SWAP_RATE = 0.2  # below it, there are too few temperatures


def generate(
    run: Positional[Model],
    *,
    domain: Annotated[
        Domain | Literal["model", "model-experts", "all"],
        arg(
            help="Distribution of the codes. One expert at a time, one column per expert: complete "
            "(a standard Gaussian), restricted (the half of it that training codes occupy) or "
            "learned (the distribution of the training codes). All experts together: joint. Each "
            "of these: all. From the density of the model, by Markov chains from noise: model, and "
            "with one of its experts on at a time, one column for each of the 20 with the largest "
            "strengths: model-experts."
        ),
    ] = "joint",
    expert: Annotated[int | None, arg(metavar="INT", help_behavior_hint="(default: each)")] = None,
    rows: int = ROWS,
    steps: Annotated[
        int | None,
        arg(
            metavar="INT",
            help_behavior_hint=f"(default: {DRAW_STEPS}; without tempering {DENSITY_STEPS})",
        ),
    ] = None,
    temper: Annotated[
        int | None,
        arg(metavar="INT", help_behavior_hint=f"(default: {LEVELS}; with one expert on 0)"),
    ] = None,
    tied: bool = False,
    seed: int = 0,
    out: Annotated[Path | None, output("PNG", "RUN/figures/DOMAIN.png")] = None,
    device: Device = "auto",
) -> None:
    """Generate new images from a model.

    The arrays of the images are saved in an .npz file of the same name.

    Parameters
    ----------
    expert
        Draw only from this expert, counted from 0.
    rows
        Rows of the grid: draws of each expert.
    steps
        Domains of the density: steps of each chain, from noise to its draw.
    temper
        Domains of the density: chains at so many temperatures exchange their states; 0: none.
    tied
        Domains of the density: decode by the filters of the autoencoder, not the pixel decoder.
    seed
        Random seed; the same seed gives the same picture.
    """
    checks.require_int("rows", rows, 1)
    checks.require_int("seed", seed, 0, 2**63 - 1)
    if domain == "all" and expert is not None:
        raise ValueError(
            "--expert draws from one expert, but --domain all includes all experts together; "
            "leave out one of them"
        )
    if domain == "model" or domain == "model-experts":
        if domain == "model-experts" and expert is not None:
            raise ValueError(
                "--expert draws from one expert, but --domain model-experts draws a column for "
                "each; add --domain model"
            )
        network = open_model(run, device, "density")
        name = domain if expert is None else f"{domain}-{expert}"
        path = out or default_output(run, FIGURES, f"{name}.png")
        require_png(path)  # before the chains run
        options = density_options(network, seed, steps=steps, temper=temper, tied=tied)
        if domain == "model":
            path, samples = draw_density(network, expert, rows, path, options)
        else:
            path, samples = draw_density_experts(network, rows, path, options)
        if samples.swap_rates:
            say(describe_exchanges(samples))
        say(path)
        return
    if steps is not None or temper is not None or tied:
        raise ValueError(
            "--steps, --temper and --tied are options of --domain model and model-experts; add one"
        )
    if domain != "all" and DOMAIN_INFO[domain].whole_code and expert is not None:
        raise ValueError(
            f"--expert draws from one expert, but the domain {domain} is all experts together; "
            "add --domain learned"
        )
    if domain == "all" and out is not None:
        raise ValueError(
            f"--out names one picture, but --domain all draws {len(DOMAINS)}; leave out one of them"
        )
    network = open_model(run, device)
    for each in DOMAINS if domain == "all" else (domain,):
        name = each if expert is None else f"{each}-{expert}"
        path = out or default_output(run, FIGURES, f"{name}.png")
        say(draw_domain(network, each, expert, rows, seed, path))


def describe_draws(domain: Domain, expert: int | None = None) -> str:
    """Describe the draws from a domain in plain words."""
    if expert is None:
        return f"draws from {DOMAIN_INFO[domain].description}"
    return f"draws from expert {expert}, {domain} domain"


@torch.no_grad()
def draw_domain(
    network: CapsuleNetwork, domain: Domain, expert: int | None, rows: int, seed: int, path: Path
) -> Path:
    """Draw images from a domain: one column per expert, or a grid for one or for all experts."""
    generator = torch.Generator(device_of(network)).manual_seed(seed)
    title = describe_draws(domain, expert)
    if DOMAIN_INFO[domain].whole_code or expert is not None:
        images = network.generate(rows * COLUMNS, domain, expert=expert, generator=generator)
        return plotting.image_grid(images, path, columns=COLUMNS, title=title)
    experts = range(network.architecture.experts[-1][0])
    per_expert = [network.generate(rows, domain, expert=j, generator=generator) for j in experts]
    return plotting.expert_grid(
        torch.stack(per_expert, dim=1), path, title=f"{title}, one column per expert"
    )


def density_options(
    network: CapsuleNetwork,
    seed: int,
    *,
    steps: int | None = None,
    temper: int | None = None,
    tied: bool = False,
    quiet: bool = False,
) -> dict[str, Any]:
    """Return the options of `draw_density` for those of a command."""
    if temper == 1:
        raise ValueError("temper must be 0, or a whole number of at least 2, but is 1")
    if temper is not None:
        checks.require_int("temper", temper, 0)
    return {
        "levels": temper,
        "tied": tied,
        "generator": torch.Generator(device_of(network)).manual_seed(seed),
        "report": None if quiet else Counter("sampling", "steps"),
        **({} if steps is None else {"steps": steps}),
    }


def describe_exchanges(samples: Samples) -> str:
    """Describe how often chains at neighbouring temperatures exchange their states."""
    lowest, levels = min(samples.swap_rates), len(samples.swap_rates) + 1
    remedy = "" if lowest >= LOW_SWAP_RATE else f"; use a --temper above {levels}"
    return f"lowest swap rate {lowest:.2f}, between neighbours of {levels} temperatures{remedy}"


@torch.no_grad()
def _draw(
    network: CapsuleNetwork, count: int, *, tied: bool, **options: Any
) -> tuple[Tensor, Samples]:
    """Draw images from the density of a network, with the diagnostics of the chains."""
    samples = network.draw_from_density(count, **options)
    return network.decode_whitened(samples.capsules, tied=tied), samples


def draw_density(
    network: CapsuleNetwork, expert: int | None, rows: int, path: Path, options: dict[str, Any]
) -> tuple[Path, Samples]:
    """Draw images from the density of a network, by chains from noise with `density_options`."""
    title = "draws from the energy, by chains from noise"
    if expert is not None:
        title = f"draws from the energy with only expert {expert} on"
    images, samples = _draw(network, rows * COLUMNS, expert=expert, **options)
    return plotting.image_grid(images, path, columns=COLUMNS, title=title), samples


def draw_density_experts(
    network: CapsuleNetwork, rows: int, path: Path, options: dict[str, Any]
) -> tuple[Path, Samples]:
    """Draw images from the density of a network with one expert on: one column per expert.

    All chains run together. Of more than 20 experts, those with the largest strengths are drawn, in
    the order of their numbers.
    """
    density = network.require_density()
    experts = density.strongest_experts(COLUMNS).sort().values
    images, samples = _draw(network, rows * len(experts), expert=experts.repeat(rows), **options)
    title = f"draws from {DOMAIN_INFO['model-experts'].description}, one column per expert"
    if len(experts) < density.out_capsules:
        title = f"{title}: the {len(experts)} strongest of {density.out_capsules}"
    columns = images.unflatten(0, (rows, len(experts)))
    return plotting.expert_grid(columns, path, experts=experts.tolist(), title=title), samples


def reconstruct(
    run: Positional[Model],
    *,
    data: Data = None,
    data_path: DataPath = None,
    split: OptionalSplit = None,
    count: int = 40,
    out: Annotated[Path | None, output("PNG", "RUN/figures/reconstructions.png")] = None,
    device: Device = "auto",
) -> None:
    """Draw images and their reconstructions by a model.

    By default these are test images, or else images that training has held out.

    The arrays of the images are saved in an .npz file of the same name.

    Parameters
    ----------
    count
        Number of images, at equal distances from the first to the last.
    """
    checks.require_int("count", count, 1)
    network = open_model(run, device)
    images = load_shown(network, run, data, data_path, split)
    path = out or default_output(run, FIGURES, "reconstructions.png")
    say(draw_reconstructions(network, images, path, count))


@torch.no_grad()
def draw_reconstructions(network: CapsuleNetwork, data: ImageSet, path: Path, count: int) -> Path:
    """Draw images that are spread over a set (top) and their reconstructions (bottom)."""
    spread = torch.linspace(0, len(data) - 1, min(count, len(data))).round().long()
    images = data.batch(spread)
    device = device_of(network)
    reconstructions = in_batches(
        lambda batch: network.reconstruct(batch.to(device)).cpu(), images, network.images_at_once()
    )
    return plotting.reconstructions(images, reconstructions, path)


def traverse(
    run: Positional[Model],
    *,
    expert: Annotated[
        int | None,
        arg(
            metavar="INT",
            help_behavior_hint="(default: 0, or with --image the strongest expert of the image)",
        ),
    ] = None,
    image: Annotated[
        int | None,
        arg(
            metavar="INT",
            help="Start from the code of this image of the data, counted from 0.",
            help_behavior_hint="(default: the mean code of the expert, all other experts off)",
        ),
    ] = None,
    data: Data = None,
    data_path: DataPath = None,
    split: OptionalSplit = None,
    steps: int = TRAVERSAL_STEPS,
    reach: float = TRAVERSAL_REACH,
    out: Annotated[Path | None, output("PNG", "RUN/figures/expert-NUMBER.png")] = None,
    device: Device = "auto",
) -> None:
    """Vary one instantiation parameter of an expert at a time, in one row per parameter.

    The rows are in the order of their effect, the mean change of the pixels, the strongest first.
    The number of the parameter stands left of its row. The arrays of the images are saved in the
    order of the parameters, in an .npz file of the same name.

    Parameters
    ----------
    expert
        Which expert, counted from 0.
    steps
        Images in a row.
    reach
        Range on both sides, in standard deviations of the training codes.
    """
    checks.require_int("steps", steps, 2)
    checks.require_nonnegative("reach", reach)
    if image is None and (data, data_path, split) != (None, None, None):
        raise ValueError(
            "--data, --data-path and --split select the data of --image; add --image as well"
        )
    network = open_model(run, device)
    offsets = torch.linspace(-reach, reach, steps)
    start = None
    if image is not None:
        images = load_shown(network, run, data, data_path, split)
        checks.require_int("image", image, 0, len(images) - 1)
        with torch.no_grad():
            start = network.encode(images.batch([image]).to(device_of(network)))[0]
        if expert is None:
            expert = int(start.norm(dim=-1).argmax())
    expert = expert or 0
    title, name = f"expert {expert}", f"expert-{expert}"
    if image is not None:
        title, name = f"{title}, from image {image}", f"{name}-image-{image}"
    with torch.no_grad():
        drawn = network.traverse(expert, offsets, start=start)
    path = out or default_output(run, FIGURES, f"{name}.png")
    title = f"{title}: one row per parameter, strongest first; offsets in standard deviations"
    effects = drawn.diff(dim=1).abs().flatten(1).mean(1)
    order = effects.argsort(descending=True, stable=True).tolist()
    say(plotting.traversal_grid(drawn, path, values=offsets, order=order, title=title))
