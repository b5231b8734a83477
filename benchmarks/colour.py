"""What the options for colour do, and where coloured images become too difficult.

`python -m benchmarks.colour --path FOLDER --photographs FILE --json FILE` trains each variant below
on digits on each ground of `benchmarks.coloured_digits`, and on the photographs themselves,
evaluates it with the protocol of `poecaps evaluate`, and adds a row to FILE for each; rows that
FILE already contains are skipped. The name of a row is that of its images and of its variant, such
as "plain: several scales". `--pictures FOLDER` writes eighty draws of each, and forty images above
their reconstructions, not selected. `--table FILE` prints FILE as a table.

Each set also has a row for 320 principal components of its pixels, as many numbers as a code has,
with samples from the density that poecaps fits to its codes. Of 320 training images or fewer, some
components have no variance, and the probe is at chance. On the grounds plain and gradient, where a
digit is as often darker as lighter, hardly any direction of the pixels tells the class.

The variants of the preset `fast` are for a CPU. They compare each option with and without it, and,
with `--size 64`, which enlarges the digits to 64×64 pixels, the number of halvings.

Samples are judged by a classifier that is trained on the labels of the same training images, as
`poecaps evaluate` does for images of your own. `judge` in a row is its accuracy on the images that
are measured on, and the recognisable share of training images is the most that samples can reach.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from benchmarks import variants
from benchmarks.baselines import CODE_SIZE, PCA, Budget, limit
from benchmarks.coloured_digits import (
    GROUNDS,
    SEED,
    add_photographs,
    coloured_digits,
)
from benchmarks.internals import command_for, find_device
from benchmarks.variants import Job, Variant, preset_with
from poecaps import plotting
from poecaps.data import load
from poecaps.evaluation import NetworkEncoder, evaluate, train_classifier

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping, Sequence

    from poecaps.data import ImageSet
    from poecaps.evaluation import Classifier

PHOTOGRAPHS = "photographs alone"  # the set without digits, with the labels of the photographs
SETS = (*GROUNDS, PHOTOGRAPHS)
COMPONENTS = f"{CODE_SIZE} principal components"
DRAWS, RECONSTRUCTIONS = 80, 40  # of a picture
HELD_OUT_PHOTOGRAPHS = 10  # one in so many is kept for held-out digits

BATCH = 1000  # images that are enlarged together

default_with = partial(preset_with, "default")
fast_with = partial(preset_with, "fast")
_WHITENED = {"model__colour_whitening": True}
_SCALES = {"multi_scale": 1.0}
# Filters of 9×9 would leave a grid of 1×1 of 28×28 pixels that are halved.
_HALVED = {"model__halvings": 1, "model__kernel_size": 5, "model__margin": 4}

VARIANTS: dict[str, Variant] = {
    "default": default_with(),
    "colour whitening": default_with(**_WHITENED),
    "several scales": default_with(**_SCALES),
    "colour whitening, several scales": default_with(**_WHITENED, **_SCALES),
    "halved": default_with(**_HALVED),
    "halved, colour whitening": default_with(**_HALVED, **_WHITENED),
    "halved, colour whitening, several scales": default_with(**_HALVED, **_WHITENED, **_SCALES),
    "fast": fast_with(),
    "fast, colour whitening": fast_with(**_WHITENED),
    "fast, several scales": fast_with(**_SCALES),
    "fast, colour whitening, several scales": fast_with(**_WHITENED, **_SCALES),
    "fast, one halving": fast_with(model__halvings=1),
    # Filters of 9×9 do not fit into the 16×16 that are left of 64×64 pixels.
    "fast, two halvings": fast_with(model__halvings=2, model__kernel_size=5),
}
STUDY = tuple(f"{images}: {name}" for images in SETS for name in (*VARIANTS, COMPONENTS))


@dataclass(frozen=True)
class Images:
    """The images of a row."""

    training: ImageSet
    measured: ImageSet


def make_images(name: str, options: Any) -> Images:
    """Make the images of a set; they do not depend on the seed of a model."""
    learned = kept = None
    if name in ("photograph", PHOTOGRAPHS):
        learned, kept = photographs_of(options)
        if name == PHOTOGRAPHS:
            return Images(limit(learned, options.limit), limit(kept, options.limit))
    training, measured = (
        enlarged(limit(part, options.limit), options.size) for part in variants.load_images(options)
    )
    return Images(
        coloured_digits(training, name, SEED, photographs=learned),
        coloured_digits(measured, name, SEED + 1, photographs=kept),
    )


def enlarged(data: ImageSet, size: int | None) -> ImageSet:
    """Return images with sides of `size` pixels, by bilinear interpolation; None: as they are."""
    if size is None:
        return data
    parts = []
    for start in range(0, len(data), BATCH):
        pixels = data.batch(slice(start, start + BATCH))
        whole = nn.functional.interpolate(pixels, (size, size), mode="bilinear")
        parts.append(whole.mul(255).round().to(torch.uint8).permute(0, 2, 3, 1))
    return replace(data, images=torch.cat(parts).numpy())


def photographs_of(options: argparse.Namespace) -> tuple[ImageSet, ImageSet]:
    """Return the photographs to learn from and those to measure on."""
    if options.photographs is None:
        raise ValueError("the images of photographs need --photographs")
    learned = load(options.photographs)
    if variants.measured_part(options) == "test":
        return learned, load(options.photographs, split="test")
    number = torch.arange(len(learned)) % HELD_OUT_PHOTOGRAPHS
    return learned.subset(number.nonzero()[:, 0]), learned.subset((number == 0).nonzero()[:, 0])


def run(job: Job) -> dict[str, Any]:
    """Train and measure, and return the row."""
    o, device = job.options, find_device(job.options.device)
    set_name, _, variant = job.name.partition(": ")
    images = make_images(set_name, o)
    model: NetworkEncoder | PCA
    row: dict[str, Any] = {"variant": job.name, "seed": job.seed}
    if variant == COMPONENTS:
        started = time.perf_counter()
        model = PCA(images.training, Budget(0, gibbs=0, seed=job.seed, device=device))
        row["training_seconds"] = round(time.perf_counter() - started, 2)
    else:
        file = f"{set_name.replace(' ', '-')}.npz"
        config = VARIANTS[variant].config(data=file, seed=job.seed, device=o.device)
        with job.folder() as folder:
            network, trained = variants.train_and_time(config, folder, images.training)
        row |= {"command": command_for(config), **trained}
        if network is None:
            return row
        model = NetworkEncoder(network)
    row |= variants.protocol_of(o) | {"training_images": len(images.training), "size": o.size}
    if o.pictures is not None:
        save_pictures(model, images.measured, device, o.pictures / job.file_name)
    started = time.perf_counter()
    judge = train_classifier(images.training, device=device)
    row["judge"] = accuracy(judge, images.measured, device)
    found = evaluate(
        model, images.training, images.measured, judge, samples=o.samples, device=device
    )
    row["evaluation_seconds"] = round(time.perf_counter() - started, 2)
    return row | {"evaluation": json.loads(found.to_json())}


def accuracy(judge: Classifier, data: ImageSet, device: torch.device) -> float:
    """Return the share of images whose label a classifier predicts."""
    batches = data.batches(1000)
    predicted = torch.cat([judge.predict(batch.to(device)).labels.cpu() for batch in batches])
    return (predicted.numpy() == data.labels).mean().item()


@torch.no_grad()
def save_pictures(
    model: NetworkEncoder | PCA, data: ImageSet, device: torch.device, path: Path
) -> None:
    """Write draws and reconstructions of a model, each as a PNG file without its arrays."""
    draws = model.sample(DRAWS, "joint", torch.Generator(device).manual_seed(0))
    plotting.image_grid(draws, path.with_name(f"{path.name}.png"), columns=20, raw=False)
    original = data.batch(slice(RECONSTRUCTIONS)).to(device)
    both = torch.cat(
        [part for each in original.split(20) for part in (each, model.reconstruct(each))]
    )
    file = path.with_name(f"{path.name}-reconstructions.png")
    plotting.image_grid(both, file, columns=20, raw=False)


COLUMNS = {  # heading: path of the number in a row, format
    "linear probe": ("evaluation.probe.test_accuracy", ".3f"),
    "recognisable, all experts": ("evaluation.domains.joint.recognisability.share", ".1%"),
    "classes": ("evaluation.domains.joint.diversity.effective_classes", ".1f"),
    "Fréchet distance": ("evaluation.domains.joint.frechet.distance", ".0f"),
    "recognisable, one expert": ("evaluation.domains.learned.recognisability.share", ".1%"),
    "reconstructions": ("evaluation.reconstructed_samples.recognisability.share", ".1%"),
    "training images": ("evaluation.training_samples.recognisability.share", ".1%"),
    "judge": ("judge", ".1%"),
    "variance lost": ("evaluation.reconstruction.relative", ".1%"),
    "training, s": ("training_seconds", ".0f"),
}


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Format rows as a Markdown table; see `benchmarks.variants.table`."""
    return variants.table(rows, {name: name for name in STUDY}, COLUMNS, "images: model")


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = variants.make_parser(__doc__, samples=10_000)
    add_photographs(parser)
    parser.add_argument("--limit", type=int, help="maximum number of training, and of test images")
    parser.add_argument("--size", type=int, help="sides of the digits (default: those of --data)")
    parser.add_argument("--pictures", type=Path, help="folder for pictures of the draws")
    variants.add_protocol(parser)
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Train and measure the requested variants, or print a file as a table."""
    variants.run_study(make_parser(), arguments, STUDY, run, table)


if __name__ == "__main__":
    main()
