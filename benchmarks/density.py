"""Study of the density: what each part of the model adds, in nats and in draws.

`python -m benchmarks.density --data mnist --path FOLDER --json FILE` trains each variant below,
from the density of the paper to the preset `energy`, and adds a row to FILE for each:

nats
    Mean of log P(v) relative to independent capsules, over images that were not trained on; the
    lower and the upper estimate by annealed importance sampling in both directions, the share of
    the base measure alone, and how many nats images are above their mirror images −v.
draws
    From chains that start from noise, decoded by the tied filters of the autoencoder and, if the
    model has one, by the pixel decoder: the share that a classifier recognises, the effective
    number of classes, the Fréchet distance, and the share that is recognisable only when mirrored.

With `--on held-out`, the last images of the training set are left out of the training and measured
on; options are chosen there. `--on test` trains on all of them and measures on the test images.
`--table FILE` prints FILE as a table.
"""

from __future__ import annotations

import time
import warnings
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from benchmarks import variants
from benchmarks.variants import Job, Variant, preset_with
from poecaps._modules import in_batches
from poecaps.data import load
from poecaps.evaluation import frechet_distance, load_classifier, measures
from poecaps.likelihood import estimate_log_partition

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from poecaps import CapsuleNetwork
    from poecaps.data import ImageSet
    from poecaps.evaluation import Classifier

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
    "density__epochs": 5,
}
_PAPER = {
    **_SMALL,
    "model__density__linear_dims": 0,
    "model__density__strength": 1.0,
    "density__strength_rate": 0.0,
}
_STRONG = {**_SMALL, "model__density__strength": 20.0}

STUDY: dict[str, Variant] = {
    "paper: ball, strength 1, spheres": energy_with(**_PAPER, model__density__base="ball"),
    "Gaussian base": energy_with(**_PAPER),
    "learned strengths": energy_with(**_STRONG, model__density__linear_dims=0),
    "4 linear coordinates": energy_with(**_STRONG, model__density__linear_dims=4),
    "4 linear coordinates, routing": energy_with(
        **_STRONG, model__density__linear_dims=4, model__density__iterations=3
    ),
    "8 linear coordinates": energy_with(**_STRONG, model__density__linear_dims=8),
    "60 experts of 8": energy_with(
        **{**_STRONG, "model__density__experts": (60, 8), "model__density__strength": 10.0}
    ),
    "60 experts of 8, principal components": energy_with(
        **_ALONE, model__density__experts=(60, 8), model__density__strength=10.0
    ),
    "energy, persistent chains": energy_with(**_ALONE, density__lifetime=0),
    "energy, no average": energy_with(**_ALONE, density__average=0.0),
    "energy": Variant("energy"),
}


def run(job: Job) -> dict[str, Any]:
    """Train and measure, and return the row."""
    config, o = job.config(STUDY), job.options
    training, images = _images(o.data, o.path, o.on)
    with job.folder() as folder:
        network, trained = variants.train_and_time(config, folder, training)
    row = job.row(config) | trained
    if network is None:
        return row
    row["nats"] = likelihood(network, images, temperatures=o.temperatures, seed=job.seed)
    classifier = load_classifier(o.data, device=network.require_density().weight.device)
    row["draws"] = draws(network, images, classifier, count=o.samples, steps=o.steps, seed=job.seed)
    return row


def _images(data: str, path: str | None, on: str) -> tuple[ImageSet, ImageSet]:
    """Return the images to train on and those to measure on."""
    training = load(data, path=path)
    if on == "test":
        return training, load(data, split="test", path=path)
    held_out = min(HELD_OUT, len(training) // 2)
    return _part(training, slice(None, -held_out)), _part(training, slice(-held_out, None))


def _part(data: ImageSet, part: slice) -> ImageSet:
    labels = None if data.labels is None else data.labels[part]
    return replace(data, images=data.images[part], labels=labels)


@torch.no_grad()
def likelihood(
    network: CapsuleNetwork, images: ImageSet, *, temperatures: int, seed: int
) -> dict[str, float]:
    """Measure the mean log-likelihood of images, relative to independent capsules, in nats."""
    density = network.require_density()
    device = density.weight.device
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the bracket is a column of the table
        estimate = estimate_log_partition(
            density,
            chains=256,
            steps=temperatures,
            generator=torch.Generator(device).manual_seed(seed),
        )

    def energies(batch: Tensor) -> Tensor:
        x = network.whitened(batch.to(device))
        base = density.base.log_ratio(x)
        return torch.stack((base, density.free_energy(x), density.free_energy(-x)), dim=1)

    base, energy, mirrored = (
        in_batches(energies, images.batch(slice(None))).double().mean(0).tolist()
    )
    return {
        "lower": base - energy - max(estimate.forward, estimate.reverse),
        "upper": base - energy - min(estimate.forward, estimate.reverse),
        "base": base,
        "bracket": estimate.bracket,
        "above_mirror_images": mirrored - energy,
        "mean_strength": density.strength.mean().item(),
    }


@torch.no_grad()
def draws(
    network: CapsuleNetwork,
    images: ImageSet,
    classifier: Classifier,
    *,
    count: int,
    steps: int,
    seed: int,
) -> dict[str, Any]:
    """Draw from noise and measure the images; the time is that of a second, smaller call."""
    device = network.require_density().weight.device
    samples = network.sample_density(
        count, steps=steps, generator=torch.Generator(device).manual_seed(seed)
    )
    start = time.perf_counter()
    few = network.sample_density(
        DRAWS_FOR_TIME, steps=steps, generator=torch.Generator(device).manual_seed(seed + 1)
    )
    few.capsules.sum().item()
    result: dict[str, Any] = {
        "seconds": round(time.perf_counter() - start, 2),
        "acceptance": samples.acceptance,
        "split_rhat": samples.split_rhat,
    }
    reference = in_batches(
        lambda batch: classifier.predict(batch.to(device)).features, images.batch(slice(None))
    )
    decoders = {"tied": True} | ({} if network.pixel_decoder is None else {"pixel_decoder": False})
    for name, tied in decoders.items():
        predictions = [
            classifier.predict(
                in_batches(lambda x: network.decode_whitened(x, tied=tied), capsules)  # noqa: B023
            )
            for capsules in (samples.capsules, -samples.capsules)
        ]
        sure, mirrored = (each.probabilities.amax(1) >= CONFIDENT for each in predictions)
        drawn = predictions[0]
        result[name] = {
            "recognisable": sure.float().mean().item(),
            "classes": measures.diversity(drawn.probabilities.argmax(1)).effective_classes,
            "frechet": frechet_distance(drawn.features.cpu(), reference.cpu()).distance,
            "only_mirrored": (mirrored & ~sure).float().mean().item(),
        }
    return result


COLUMNS = {  # heading: path of the number in a row, format
    "nats, lower": ("nats.lower", ",.0f"),
    "bracket": ("nats.bracket", ".1f"),
    "base alone": ("nats.base", ",.0f"),
    "above mirror images": ("nats.above_mirror_images", ",.0f"),
    "recognisable": ("draws.tied.recognisable", ".1%"),
    "classes": ("draws.tied.classes", ".2f"),
    "Fréchet distance": ("draws.tied.frechet", ".0f"),
    "only mirrored": ("draws.tied.only_mirrored", ".1%"),
    "Fréchet distance, pixel decoder": ("draws.pixel_decoder.frechet", ".0f"),
    "training, s": ("training_seconds", ".0f"),
    "80 draws, s": ("draws.seconds", ".1f"),
}


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Format rows as a Markdown table; see `benchmarks.variants.table`."""
    return variants.table(rows, {name: name for name in STUDY}, COLUMNS, "density")


def main(arguments: Sequence[str] | None = None) -> None:
    """Train and measure the requested variants, or print a file as a table."""
    parser = variants.make_parser(__doc__, samples=5000)
    parser.add_argument(
        "--on",
        choices=("held-out", "test"),
        default="held-out",
        help="images to measure on (default: held-out)",
    )
    parser.add_argument(
        "--steps", type=int, default=600, help="steps of a chain from noise (default: 600)"
    )
    parser.add_argument(
        "--temperatures", type=int, default=2000, help="of the likelihood (default: 2000)"
    )
    variants.run_study(parser, arguments, STUDY, run, table)


if __name__ == "__main__":
    main()
