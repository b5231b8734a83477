"""Study of the density: what each part of the model adds, in nats and in draws.

`python -m benchmarks.density --data mnist --path FOLDER --json FILE` trains each variant below,
from the density of the paper to the preset `energy`, and adds a row to FILE for each:

nats
    Mean of log P(v) relative to independent capsules, over images that were not trained on; the
    lower and the upper estimate by annealed importance sampling in both directions, the shares of
    the base measure alone and of the experts (lower estimate), and how many nats images are above
    their mirror images −v.
draws
    From chains that start from noise, decoded by the tied filters of the autoencoder and, if the
    model has one, by the pixel decoder: the share that a classifier recognises, the effective
    number of classes, the Fréchet distance, and the share that is recognisable only when mirrored.
tempered_draws
    The same with states of persistent chains that exchange states with chains at other temperatures
    (parallel tempering, as `poecaps generate --domain model` draws): those of P itself. With the
    lowest rate of exchange between two levels of the ladder. `--levels 0` leaves them out.
base_draws, reconstructions
    The same for draws of the base measure alone, and for the capsules of training images: what the
    experts start from, and the best that any density over these capsules can give.
component_reconstructions
    The same for the capsules of training images in the principal components that the experts read,
    without the other directions: how much of an image these components have.
nearest
    Median distance from draws to the nearest training image, and the same for the images that were
    not trained on, decoded in the same way: whether draws are copies.

The variants of contrastive divergence have no density: the measured one is that of the paper,
e^(−F) on the product of unit balls. Its base measure is uniform, and nats are relative to it.
Variants whose name begins with "story" are small, for the bundled digits on a CPU.

By default, the last 5,000 training images are left out of the training and measured on; options are
chosen there. `--on test` measures on the test images; `--held-out 0` trains on all training images
and does the same.
`--pictures FOLDER` writes eighty draws of each variant, not selected. `--table FILE` prints FILE as
a table.
"""

from __future__ import annotations

import time
import warnings
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from benchmarks import variants
from benchmarks.variants import Job, Variant, preset_with
from poecaps import plotting, sampling
from poecaps._modules import in_batches
from poecaps.energy import CapsuleDensity
from poecaps.evaluation import frechet_distance, load_classifier, measures
from poecaps.likelihood import estimate_log_partition

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from poecaps import CapsuleExperts, CapsuleNetwork
    from poecaps.data import ImageSet
    from poecaps.energy import GaussianBase
    from poecaps.evaluation import Classifier
    from poecaps.sampling import Samples

HELD_OUT = 5000  # images
CONFIDENT = 0.9  # probability from which on the classifier recognises an image
DRAWS_FOR_TIME = 80  # as many as `poecaps generate` draws


energy_with = partial(preset_with, "energy")

# Only the autoencoder and the density are trained, except for the unchanged preset.
_ALONE = {
    "model__pixel_decoder": False,
    "encoder__epochs": 0,
    "decoder__epochs": 0,
    "pixel_decoder__epochs": 0,
}
_SMALL = {
    **_ALONE,
    "model__density__experts": (20, 16),
    "model__density__base_components": 0,
    "model__density__base_max_variance": None,
    "density__chains": 512,
    "density__lifetime": 300,
    "density__levels": 0,
    "density__epochs": 5,
}
_PAPER = {
    **_SMALL,
    "model__density__linear_dims": 0,
    "model__density__strength": 1.0,
    "density__strength_rate": 0.0,
}
_STRONG = {**_SMALL, "model__density__strength": 20.0}
_WIDE = {
    "model__density__base_components": 1024,
    "model__density__base_max_variance": 30.0,
}
_DEMO = {  # of `make demo-energy`, for the bundled digits on a CPU
    **_ALONE,
    "autoencoder__epochs": 3,
    "model__density__experts": (100, 8),
    "model__density__base_components": 192,
    "density__epochs": 45,
    "density__levels": 20,
    "density__chains": 320,
}
_STORY = {  # few features and chains: the steps of the page, for the bundled digits on a CPU
    "model__features": 32,
    "autoencoder__epochs": 5,
    "density__epochs": 30,
    "density__chains": 128,
    "density__partition_steps": 0,
}
_LONG = {"density__epochs": 26, "density__final_learning_rate_ratio": 0.01}
_TEMPERED = {"density__chains": 1024, "density__lifetime": 0, "density__levels": 32}
_ANNEALED = {
    **_WIDE,
    "density__chains": 1024,
    "density__lifetime": 300,
    "density__levels": 0,
}

ROUTED = "4 linear coordinates, routing"
STORY_ROUTED = f"story: {ROUTED}"
STUDY: dict[str, Variant] = {
    "contrastive divergence, preset paper": Variant("paper"),
    "contrastive divergence, preset default": Variant("default"),
    "paper: ball, strength 1, spheres": energy_with(**_PAPER, model__density__base="ball"),
    "Gaussian base": energy_with(**_PAPER),
    "learned strengths": energy_with(**_STRONG, model__density__linear_dims=0),
    "4 linear coordinates": energy_with(**_STRONG, model__density__linear_dims=4),
    ROUTED: energy_with(**_STRONG, model__density__linear_dims=4, model__density__iterations=3),
    "8 linear coordinates": energy_with(**_STRONG, model__density__linear_dims=8),
    "no linear coordinates, 26 epochs": energy_with(
        **{**_STRONG, **_LONG}, model__density__linear_dims=0
    ),
    "4 linear coordinates, 26 epochs": energy_with(
        **{**_STRONG, **_LONG}, model__density__linear_dims=4
    ),
    "4 linear coordinates, 26 epochs, tempered chains": energy_with(
        **{**_STRONG, **_LONG, **_TEMPERED}, model__density__linear_dims=4
    ),
    "16 linear coordinates, 26 epochs": energy_with(
        **{**_STRONG, **_LONG}, model__density__linear_dims=16
    ),
    "60 experts of 8": energy_with(
        **{**_STRONG, "model__density__experts": (60, 8), "model__density__strength": 10.0}
    ),
    "60 experts of 8, principal components": energy_with(
        **_ALONE, model__density__experts=(60, 8), model__density__strength=10.0
    ),
    "demo": energy_with(**_DEMO),
    "demo, no linear coordinates": energy_with(**_DEMO, model__density__linear_dims=0),
    "demo, strength 1": energy_with(
        **_DEMO, model__density__strength=1.0, density__strength_rate=0.0
    ),
    "story: contrastive divergence": preset_with(
        "paper",
        model__features=32,
        model__pixel_decoder=False,
        autoencoder__epochs=5,
        decoder__epochs=0,
        pixel_decoder__epochs=0,
    ),
    "story: Gaussian base": energy_with(**{**_PAPER, **_STORY}),
    "story: learned strengths": energy_with(**{**_STRONG, **_STORY}, model__density__linear_dims=0),
    "story: 4 linear coordinates": energy_with(
        **{**_STRONG, **_STORY}, model__density__linear_dims=4
    ),
    STORY_ROUTED: energy_with(
        **{**_STRONG, **_STORY}, model__density__linear_dims=4, model__density__iterations=3
    ),
    "energy": Variant("energy"),
    "energy, 26 epochs": energy_with(**_ALONE, **_LONG),
    "energy, variances up to 30": energy_with(**_ALONE, model__density__base_max_variance=30.0),
    "energy, variances without a limit": energy_with(model__density__base_max_variance=None),
    "energy, 128 components, 26 epochs": energy_with(
        **_ALONE, **_LONG, model__density__base_components=128
    ),
    "energy, 1,024 components": energy_with(**_ALONE, **_WIDE),
    "energy, 1,024 components, 26 epochs": energy_with(**_ALONE, **_WIDE, **_LONG),
    "energy, annealed chains, 1,024 components": energy_with(**_ANNEALED),
    "energy, annealed chains, 1,024 components, no average": energy_with(
        **_ALONE, **_ANNEALED, density__average=0.0
    ),
    "energy, persistent chains, 1,024 components": energy_with(
        **_ALONE, **{**_ANNEALED, "density__lifetime": 0}
    ),
    "energy, annealed chains, 1,024 components, variances up to 100, lives of 600 steps": (
        energy_with(
            **{
                **_ANNEALED,
                "model__density__base_max_variance": 100.0,
                "density__lifetime": 600,
            }
        )
    ),
}


@dataclass(frozen=True)
class Measured:
    """A density with the maps between images and its capsules."""

    density: CapsuleDensity
    inputs: Callable[[Tensor], Tensor]
    """From images (B, C, H, W) to capsules (B, I, K)."""
    decoders: dict[str, Callable[[Tensor], Tensor]]
    """From capsules to images, by name."""

    @property
    def device(self) -> torch.device:
        """Device of the density."""
        return self.density.weight.device


def measured(network: CapsuleNetwork) -> Measured:
    """Return the density of a network or, if it has none, that of its first layer of experts."""
    tied = {"tied": True} | ({} if network.pixel_decoder is None else {"pixel_decoder": False})
    if network.density is not None:
        decode = network.decode_whitened
        return Measured(
            network.density,
            network.whitened,
            {name: partial(decode, tied=value) for name, value in tied.items()},
        )
    experts = cast("CapsuleExperts", network.encoders[0])

    def decode_capsules(x: Tensor, *, tied: bool) -> Tensor:
        activations = network.preprocessing.from_capsules(x)
        return torch.sigmoid(network.logits(activations, tied=tied))

    return Measured(
        density_of_experts(experts),
        network.capsules,
        {name: partial(decode_capsules, tied=value) for name, value in tied.items()},
    )


@torch.no_grad()
def density_of_experts(experts: CapsuleExperts) -> CapsuleDensity:
    """Return the density of the paper, e^(−F) on unit balls, of a layer of experts.

    A density counts coefficients in units of the uniform coefficient, so its weights are smaller by
    that factor.
    """
    routing = experts.routing
    density = CapsuleDensity(
        experts.in_capsules,
        experts.in_dim,
        experts.out_capsules,
        experts.out_dim,
        base="ball",
        **asdict(routing),
        device=experts.weight.device,
    )
    count = experts.in_capsules if routing.normalize == "inputs" else experts.out_capsules
    density.weight.copy_(experts.weight / count)
    return density


def run(job: Job) -> dict[str, Any]:
    """Train and measure, and return the row."""
    config, o = job.config(STUDY), job.options
    training, images = variants.load_images(o)
    with job.folder() as folder:
        network, trained = variants.train_and_time(config, folder, training)
    row = job.row(config) | trained
    if network is None:
        return row
    model = measured(network)
    row |= variants.protocol_of(o) | {"steps": o.steps, "temperatures": o.temperatures}
    row["nats"] = likelihood(model, images, temperatures=o.temperatures, seed=job.seed)
    classifier = load_classifier(o.data, device=model.device)
    measure = partial(measure_draws, model, images=images, classifier=classifier)
    samples, seconds = draw(sample_from_noise, model.density, o.samples, o.steps, job.seed)
    row["draws"] = {
        "seconds": seconds,
        "acceptance": samples.acceptance,
        "split_rhat": samples.split_rhat,
        "leading_rhat": samples.leading_rhat,
        **measure(samples.capsules),
    }
    if o.levels:
        tempered, seconds = draw(draw_by_tempering, model.density, o.samples, o.levels, job.seed)
        row["tempered_draws"] = {
            "seconds": seconds,
            "levels": o.levels,
            "swap_rate": min(tempered.swap_rates),
            "leading_rhat": tempered.leading_rhat,
            **measure(tempered.capsules),
        }
    base_draws = draw_from_base(model.density, o.samples, job.seed)
    row["base_draws"] = measure(base_draws)
    known = capsules_of(model, training, o.samples)
    row["reconstructions"] = measure(known)
    row["component_reconstructions"] = measure(in_components(model.density, known))
    row["nearest"] = {
        name: nearest_training_images(model, capsules, training)
        for name, capsules in (
            ("draws", samples.capsules),
            *((("tempered_draws", tempered.capsules),) if o.levels else ()),
            ("images", capsules_of(model, images, o.samples)),
        )
    }
    if o.pictures is not None:
        file = f"{o.data}-{job.file_name}"
        save_pictures(model, samples.capsules, o.pictures / file)
        save_pictures(model, base_draws, o.pictures / f"{file}-base")
        if o.levels:
            save_pictures(model, tempered.capsules, o.pictures / f"{file}-tempered")
    return row


def capsules_of(model: Measured, images: ImageSet, count: int) -> Tensor:
    """Compute the capsules of the first images: (B, I, K)."""
    return in_batches(model.inputs, images.batch(slice(count)).to(model.device))


def save_pictures(model: Measured, capsules: Tensor, path: Path) -> None:
    """Write the first eighty draws (B, I, K), decoded in every way that the model has."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for name, decode in model.decoders.items():
        pictures = decode(capsules[:DRAWS_FOR_TIME])
        file = path.with_name(f"{path.name}-{name.replace('_', '-')}.png")
        plotting.image_grid(pictures.cpu(), file, columns=20)


@torch.no_grad()
def likelihood(
    model: Measured, images: ImageSet, *, temperatures: int, seed: int
) -> dict[str, float]:
    """Measure the mean log-likelihood of images, relative to independent capsules, in nats."""
    density = model.density
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the bracket is a column of the table
        estimate = estimate_log_partition(
            density,
            chains=256,
            steps=temperatures,
            generator=torch.Generator(model.device).manual_seed(seed),
        )

    def energies(batch: Tensor) -> Tensor:
        x = model.inputs(batch.to(model.device))
        base = density.base.log_ratio(x)
        return torch.stack((base, density.free_energy(x), density.free_energy(-x)), dim=1)

    means = in_batches(energies, images.batch(slice(None))).double().mean(0)
    base, energy, mirrored = means.tolist()
    return {
        "lower": base - energy - max(estimate.forward, estimate.reverse),
        "upper": base - energy - min(estimate.forward, estimate.reverse),
        "base": base,
        "experts": -energy - max(estimate.forward, estimate.reverse),
        "bracket": estimate.bracket,
        "effective_chains": estimate.effective_sample_size,
        "above_mirror_images": mirrored - energy,
        "mean_strength": density.strength.mean().item(),
    }


@torch.no_grad()
def sample_from_noise(density: CapsuleDensity, count: int, steps: int, seed: int) -> Samples:
    """Draw by chains that are annealed from noise, as `generate --domain model --temper 0` does."""
    anneal = round(sampling.ANNEALED_SHARE * steps)
    return sampling.sample(
        density,
        count,
        steps=steps - anneal,
        anneal=anneal,
        generator=torch.Generator(density.weight.device).manual_seed(seed),
    )


@torch.no_grad()
def draw_by_tempering(density: CapsuleDensity, count: int, levels: int, seed: int) -> Samples:
    """Draw by parallel tempering, as `poecaps generate --domain model` does."""
    generator = torch.Generator(density.weight.device).manual_seed(seed)
    return sampling.draw(density, count, levels=levels, generator=generator)


def draw(
    sampler: Callable[[CapsuleDensity, int, int, int], Samples],
    density: CapsuleDensity,
    count: int,
    option: int,
    seed: int,
) -> tuple[Samples, float]:
    """Draw by a sampler; return the draws, and the seconds of a second call for eighty draws."""
    samples = sampler(density, count, option, seed)
    start = time.perf_counter()
    sampler(density, DRAWS_FOR_TIME, option, seed + 1).capsules.sum().item()
    return samples, round(time.perf_counter() - start, 2)


def in_components(density: CapsuleDensity, capsules: Tensor) -> Tensor:
    """Project capsules (B, I, K) onto the principal components that the experts read, if any."""
    if not density.has_components:
        return capsules
    directions = cast("GaussianBase", density.base).directions
    return (capsules.flatten(1) @ directions @ directions.T).view_as(capsules)


def draw_from_base(density: CapsuleDensity, count: int, seed: int) -> Tensor:
    """Draw from the base measure of a density, without its experts: (B, I, K)."""
    base = density.base
    size = density.in_capsules * density.in_dim
    noise = torch.randn(count, size, generator=torch.Generator().manual_seed(seed))
    return base.from_white(base.from_noise(noise.to(density.weight.device)))


@torch.no_grad()
def measure_draws(
    model: Measured, capsules: Tensor, images: ImageSet, classifier: Classifier
) -> dict[str, dict[str, float]]:
    """Measure draws (B, I, K), decoded in every way that the model has."""
    reference = in_batches(
        lambda batch: classifier.predict(batch.to(model.device)).features,
        images.batch(slice(None)),
    )
    result = {}
    for name, decode in model.decoders.items():
        drawn, mirrored = (
            classifier.predict(in_batches(decode, points)) for points in (capsules, -capsules)
        )
        sure = drawn.probabilities.amax(1) >= CONFIDENT
        sure_mirrored = mirrored.probabilities.amax(1) >= CONFIDENT
        result[name] = {
            "recognisable": sure.float().mean().item(),
            "classes": measures.diversity(drawn.probabilities.argmax(1)).effective_classes,
            "frechet": frechet_distance(drawn.features.cpu(), reference.cpu()).distance,
            "only_mirrored": (sure_mirrored & ~sure).float().mean().item(),
        }
    return result


@torch.no_grad()
def nearest_training_images(
    model: Measured, capsules: Tensor, training: ImageSet
) -> dict[str, float]:
    """Measure the median distance from decoded capsules (B, I, K) to the nearest training image.

    Draws that are copies of training images are much nearer to them than new images are, decoded
    in the same way.
    """
    known = training.batch(slice(None)).to(model.device).flatten(1)

    def distance(capsules: Tensor, decode: Callable[[Tensor], Tensor]) -> Tensor:
        return torch.cdist(decode(capsules).flatten(1), known).amin(1)

    return {
        name: in_batches(partial(distance, decode=decode), capsules).median().item()
        for name, decode in model.decoders.items()
    }


NATS_COLUMNS = {  # heading: path of the number in a row, format
    "nats, lower estimate": ("nats.lower", ",.0f"),
    "upper estimate": ("nats.upper", ",.0f"),
    "base measure alone": ("nats.base", ",.0f"),
    "experts": ("nats.experts", ",.0f"),
    "above mirror images": ("nats.above_mirror_images", ",.0f"),
    "mean strength": ("nats.mean_strength", ".1f"),
}
DRAW_COLUMNS = {
    "recognisable": ("draws.tied.recognisable", ".1%"),
    "classes": ("draws.tied.classes", ".2f"),
    "Fréchet distance": ("draws.tied.frechet", ".0f"),
    "only mirrored": ("draws.tied.only_mirrored", ".1%"),
    "Fréchet distance, pixel decoder": ("draws.pixel_decoder.frechet", ".0f"),
}
TEMPERED_COLUMNS = {
    "recognisable, tempered": ("tempered_draws.tied.recognisable", ".1%"),
    "classes, tempered": ("tempered_draws.tied.classes", ".2f"),
    "Fréchet distance, tempered": ("tempered_draws.tied.frechet", ".0f"),
    "only mirrored, tempered": ("tempered_draws.tied.only_mirrored", ".1%"),
    "Fréchet distance, tempered, pixel decoder": ("tempered_draws.pixel_decoder.frechet", ".0f"),
    "lowest swap rate": ("tempered_draws.swap_rate", ".2f"),
}
TIME_COLUMNS = {
    "training, s": ("training_seconds", ".0f"),
    "80 draws, s": ("draws.seconds", ".1f"),
    "tempered, s": ("tempered_draws.seconds", ".1f"),
}


def table(rows: Sequence[Mapping[str, Any]], columns: variants.Columns | None = None) -> str:
    """Format rows as a Markdown table, by default with all columns; see `variants.table`."""
    columns = columns or NATS_COLUMNS | DRAW_COLUMNS | TEMPERED_COLUMNS | TIME_COLUMNS
    return variants.table(rows, {name: name for name in STUDY}, columns, "density")


def routing_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Format what routing gives, seed by seed, as a Markdown table.

    Nats are from the lower to the upper estimate. The gain is what routing adds: at least its lower
    estimate minus the upper one without routing, and at most the upper one minus the lower one.
    """
    lines = [
        "| seed | nats without routing | with | gain | classes without | with "
        "| Fréchet distance without | with |",
        "| ---: |" + 7 * " ---: |",
    ]
    without, routed = (
        {row["seed"]: row for row in rows if row["variant"] == name}
        for name in (ROUTED.removesuffix(", routing"), ROUTED)
    )
    for seed in sorted(without.keys() & routed.keys()):
        pair = (without[seed], routed[seed])
        (low, high), (low_routed, high_routed) = (
            (row["nats"]["lower"], row["nats"]["upper"]) for row in pair
        )
        cells = [
            str(seed),
            *(f"{row['nats']['lower']:,.0f} to {row['nats']['upper']:,.0f}" for row in pair),
            f"{low_routed - high:+,.0f} to {high_routed - low:+,.0f}",
            *(f"{row['draws']['tied']['classes']:.2f}" for row in pair),
            *(f"{row['draws']['tied']['frechet']:.0f}" for row in pair),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


# The steps of docs/density.md: name in the comment of a table, and label, variant and draws of each
# line.
_PAPER_STEP, _BASE, _STRENGTHS, _LINEAR = (
    f"story: {name}"
    for name in (
        "contrastive divergence",
        "Gaussian base",
        "learned strengths",
        ROUTED.removesuffix(", routing"),
    )
)
STEPS = {
    "paper": (
        ("uniform density on the balls", _PAPER_STEP, "base_draws"),
        ("density of the paper", _PAPER_STEP, "draws"),
        ("training images", _PAPER_STEP, "reconstructions"),
    ),
    "base": (
        ("Gaussian base measure alone", _BASE, "base_draws"),
        ("with experts of strength 1", _BASE, "draws"),
        ("training images", _BASE, "reconstructions"),
    ),
    "strengths": (
        ("strength 1", _BASE, "draws"),
        ("learned strengths", _STRENGTHS, "draws"),
    ),
    "mirror": (
        ("no linear coordinates", _STRENGTHS, "draws"),
        ("4 linear coordinates", _LINEAR, "draws"),
    ),
    "routing": (
        ("without routing", _LINEAR, "draws"),
        ("with routing", STORY_ROUTED, "draws"),
    ),
}


def story_table(rows: Sequence[Mapping[str, Any]], step: str) -> str:
    """Format a step of the story as a Markdown table with one line per density.

    Nats are from the lower to the upper estimate. Those of a base measure are exact.
    """
    found = {row["variant"]: row for row in rows}
    lines = [
        "|  | nats | recognisable | classes | Fréchet distance | only mirrored "
        "| recognisable, tempered | classes, tempered | Fréchet distance, tempered |",
        "| --- |" + 8 * " ---: |",
    ]
    for label, variant, draws in STEPS[step]:
        row = found[variant]
        nats = {
            "base_draws": f"{row['nats']['base']:,.0f}",
            "draws": f"{row['nats']['lower']:,.1f} to {row['nats']['upper']:,.1f}",
        }
        tempered = "tempered_draws" if draws == "draws" else ""
        columns = (
            (f"{draws}.tied.recognisable", ".1%"),
            (f"{draws}.tied.classes", ".2f"),
            (f"{draws}.tied.frechet", ".0f"),
            (f"{draws}.tied.only_mirrored", ".1%"),
            (f"{tempered}.tied.recognisable", ".1%"),
            (f"{tempered}.tied.classes", ".2f"),
            (f"{tempered}.tied.frechet", ".0f"),
        )
        cells = [variants.cell([variants.lookup(row, path)], form) for path, form in columns]
        lines.append(f"| {' | '.join([label, nats.get(draws, '–'), *cells])} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Train and measure the requested variants, or print a file as a table."""
    parser = variants.make_parser(__doc__, samples=5000)
    variants.add_protocol(parser, HELD_OUT)
    parser.add_argument(
        "--steps", type=int, default=600, help="steps of a chain from noise (default: 600)"
    )
    parser.add_argument(
        "--temperatures", type=int, default=2000, help="of the likelihood (default: 2000)"
    )
    parser.add_argument(
        "--levels",
        type=int,
        default=sampling.LEVELS,
        help=f"levels of parallel tempering; 0: no such draws (default: {sampling.LEVELS})",
    )
    parser.add_argument("--pictures", type=Path, help="folder for pictures of the draws")
    variants.run_study(parser, arguments, STUDY, run, table)


if __name__ == "__main__":
    main()
