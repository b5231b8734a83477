"""What experts keep and how they move when images are transformed.

`python -m benchmarks.transformations --path FOLDER --json FILE` trains each model below on digits
placed at random in a frame of 40×40 pixels, and adds a row to FILE for each model and seed; rows
that FILE already contains are skipped. `--table FILE` prints FILE as a table. The digits are those
of `benchmarks.affine_digits`.

probe            Accuracy of a linear probe that is fitted to codes of the training images: on test
                 images placed like them, and on affine test images, of which no model has seen any.
experts          Accuracy of the most active expert under the best matching of experts to labels, on
                 both; for models without experts, that of 10 k-means clusters of their codes.
transformations  Held-out R² of linear maps from the change of a code to the transformation of the
                 image: rotation, shear, size, aspect, shift and thickness all change at once. The
                 map of experts reads the numbers of the expert that is most active for the
                 untransformed image, and each expert has a map of its own. The map of codes reads
                 all numbers. Maps are fitted to one half of the test digits and measured on the
                 other.
same expert      Share of these pairs for which the most active expert is the same.

Only the autoencoder and the encoder of poecaps are trained. The baselines are those of
`benchmarks.baselines`, with codes of 320 numbers (pixels: 1,600) and as many passes over the images
as the preset `default` makes in all its stages.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from benchmarks import variants
from benchmarks.affine_digits import (
    NAMES,
    affine_digits,
    draw_shapes,
    placed_digits,
    placements,
    transformed,
)
from benchmarks.baselines import BASELINES, Budget, default_epochs, limit
from benchmarks.internals import command_for, find_device
from benchmarks.variants import Job, Variant, preset_with
from poecaps._modules import in_batches
from poecaps.evaluation import NetworkEncoder, SupportsFiring, clustering, linear_probe

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from poecaps.data import ImageSet
    from poecaps.evaluation import Encoder

FILE = "affine-digits.npz"  # the training images, as `benchmarks.affine_digits` writes them
PAIR_ROOM = 6  # pixels in which the untransformed digit of a pair is placed, around the centre
PAIR_SHIFT = 3.0  # largest shift of a pair, in pixels: the digit stays in the frame
CLUSTERS, CLUSTERED = 10, 10_000  # k-means, and codes that it is fitted to
FEWEST_PAIRS = 50  # of an expert that gets a map of its own
RIDGES = tuple(10.0**exponent for exponent in range(-6, 2))  # candidates, relative to the variance

ENCODER_ONLY = {
    "model__pixel_decoder": False,
    "decoder__epochs": 0,
    "pixel_decoder__epochs": 0,
}
encoder_with = partial(preset_with, "default", **ENCODER_ONLY)
_TEN = {"model__experts": ((10, 32),)}
_VIEWS = {**_TEN, "encoder__views__count": 4}

POECAPS: dict[str, Variant] = {
    "20 experts of 16": encoder_with(),
    "20 experts of 16, 2 views": encoder_with(encoder__views__count=2),
    "80 experts of 16, 2 views": encoder_with(model__experts=((80, 16),), encoder__views__count=2),
    "10 experts of 32": encoder_with(**_TEN),
    "10 experts of 32, 4 views": encoder_with(**_VIEWS),
    "10 experts of 32, 4 views, shift 0.15": encoder_with(**_VIEWS, encoder__views__shift=0.15),
    "10 experts of 32, 4 views, 5 restarts": encoder_with(**_VIEWS, encoder__restarts=5),
    "10 experts of 32, 4 views, no routing": encoder_with(**_VIEWS, model__iterations=1),
}
PEERS = ("pixels", "pca", "autoencoder", "vae")
STUDY = (*POECAPS, *PEERS)


@dataclass(frozen=True)
class Digits:
    """All images of the study."""

    training: ImageSet
    """Placed at random."""
    placed: ImageSet
    """Test images, placed like the training images."""
    affine: ImageSet
    """Test images, transformed."""
    before: ImageSet
    """Test images near the centre."""
    after: ImageSet
    """The same, transformed."""
    change: Tensor
    """Their transformations: (N, len(NAMES))."""


def make_digits(training: ImageSet, test: ImageSet, *, copies: int) -> Digits:
    """Make the images from digits; they do not depend on the seed of a model."""
    before, after, change = make_pairs(test)
    placed, affine = placed_digits(test, seed=1), affine_digits(test, seed=2)
    return Digits(placed_digits(training, copies=copies), placed, affine, before, after, change)


def make_pairs(test: ImageSet) -> tuple[ImageSet, ImageSet, Tensor]:
    """Return images near the centre, the same images transformed, and the transformations."""
    generator = torch.Generator().manual_seed(3)
    start = placements(len(test), PAIR_ROOM, generator)
    change = draw_shapes(len(test), generator)
    change[:, 4:6] = PAIR_SHIFT * (2 * torch.rand(len(test), 2, generator=generator) - 1)
    change[:, 6] = torch.rand(len(test), generator=generator)
    return transformed(test, start), transformed(test, start + change), change


# --------------------------------------------------------------------------------------------------
# Linear maps from codes to transformations


@dataclass(frozen=True)
class LinearMap:
    """y = (x − mean) W + intercept."""

    mean: Tensor
    weight: Tensor
    intercept: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        """Apply the map: (N, S) → (N, P)."""
        return (x - self.mean) @ self.weight + self.intercept


def fit_map(x: Tensor, y: Tensor, ridge: float) -> LinearMap:
    """Fit a ridge regression: (N, S), (N, P) → map.

    It minimises ‖y − y̅ − (x − x̅) W‖² + ridge · N · v · ‖W‖², with v the mean variance of x.
    """
    mean, intercept = x.mean(0), y.mean(0)
    centred = x - mean
    gram = centred.T @ centred
    penalty = (ridge * gram.trace() / len(gram)).clamp(min=1e-12)  # 0 only for equal codes
    gram.diagonal().add_(penalty)
    weight = torch.linalg.solve(gram, centred.T @ (y - intercept))
    return LinearMap(mean, weight, intercept)


def fit_best_map(x: Tensor, y: Tensor) -> LinearMap:
    """Fit a ridge regression whose penalty is chosen on every fifth row."""
    held_out = torch.arange(len(x), device=x.device) % 5 == 0

    def error(ridge: float) -> float:
        found = fit_map(x[~held_out], y[~held_out], ridge)
        residual = (y[held_out] - found(x[held_out])) / y.std(0).clamp(min=1e-12)
        return residual.square().mean().item()

    return fit_map(x, y, min(RIDGES, key=error))


def explained(x: Tensor, y: Tensor, group: Tensor) -> dict[str, float]:
    """Compute the held-out R² = 1 − Σ(y − ŷ)² / Σ(y − y̅)² of linear maps, one for each group.

    Even rows are fitted to, and odd ones measured on. A group with too few even rows has the mean
    of all as its prediction.

    Parameters
    ----------
    x : (N, S)
        Changes of codes.
    y : (N, P)
        Transformations.
    group : (N,)
        Group of each row, from 0.

    Returns
    -------
    dict
        R² of each name of `NAMES`, and their mean.
    """
    x, y = x.double(), y.double().to(x.device)
    fitted = torch.arange(len(x), device=x.device) % 2 == 0
    predicted = y[fitted].mean(0).expand_as(y).clone()
    for number in group.unique().tolist():
        members = group == number
        if int((members & fitted).sum()) >= FEWEST_PAIRS:
            found = fit_best_map(x[members & fitted], y[members & fitted])
            predicted[members] = found(x[members])
    measured = y[~fitted]
    residual = (measured - predicted[~fitted]).square().sum(0)
    share = 1 - residual / (measured - measured.mean(0)).square().sum(0)
    values = dict(zip(NAMES, share.tolist(), strict=True))
    return {**values, "mean": share.mean().item()}


# --------------------------------------------------------------------------------------------------
# Models


def train_model(job: Job, digits: Digits) -> tuple[Encoder | None, dict[str, Any]]:
    """Train a model; return it with the beginning of its row, or None if it has diverged."""
    o, device = job.options, find_device(job.options.device)
    if job.name not in POECAPS:
        epochs = default_epochs() if o.epochs is None else o.epochs
        started = time.perf_counter()
        size = {} if o.filters is None else {"filters": o.filters}
        budget = Budget(epochs, gibbs=0, seed=job.seed, device=device, **size)
        peer = BASELINES[job.name](digits.training, budget)
        seconds = round(time.perf_counter() - started, 2)
        row = {"variant": job.name, "seed": job.seed, "epochs": epochs}
        return peer, {**row, "training_seconds": seconds}
    config = variants.with_filters(job.config(POECAPS), o)
    config = replace(config, data=FILE, data_path=None)
    with job.folder() as folder:
        network, trained = variants.train_and_time(config, folder, digits.training)
    row = {"variant": job.name, "seed": job.seed, "command": command_for(config), **trained}
    return None if network is None else NetworkEncoder(network), row


def run(job: Job) -> dict[str, Any]:
    """Train and measure, and return the row."""
    o = job.options
    training, test = (limit(images, o.limit) for images in variants.load_images(o))
    digits = make_digits(training, test, copies=o.copies)
    model, row = train_model(job, digits)
    if model is None:
        return row
    return (
        row
        | variants.protocol_of(o)
        | {"copies": o.copies, "images": len(training), "test_images": len(test)}
        | measure(model, digits, find_device(o.device), job.seed)
    )


@torch.no_grad()
def measure(model: Encoder, digits: Digits, device: torch.device, seed: int) -> dict[str, Any]:
    """Measure a model; see the description of this module."""

    def encode(images: ImageSet) -> Tensor:
        batches = (batch.to(device) for batch in images.batches(500))
        return in_batches(model.encode, batches).float()

    training, labels = encode(digits.training), _labels(digits.training)
    row: dict[str, Any] = {"code_size": training.shape[1], "probe": {}, "experts": {}}
    clusters_of = None if isinstance(model, SupportsFiring) else fit_clusters(training, seed)
    for name, images in (("placed", digits.placed), ("affine", digits.affine)):
        codes = encode(images)
        with torch.enable_grad():
            probe = linear_probe(training, labels, codes, _labels(images))
        row["probe"][name] = probe.test_accuracy
        if isinstance(model, SupportsFiring):
            clusters = model.firing(codes).argmax(1)
        else:
            assert clusters_of is not None  # noqa: S101
            clusters = torch.cdist(codes, clusters_of).argmin(1)
        found = clustering(clusters, _labels(images))
        row["experts"][name] = {"accuracy": found.accuracy, "nmi": found.normalised}
    before, after = encode(digits.before), encode(digits.after)
    everything = torch.zeros(len(before), dtype=torch.long, device=before.device)
    row["transformations"] = {"code": explained(after - before, digits.change, everything)}
    if isinstance(model, SupportsFiring):
        first, second = (model.firing(codes) for codes in (before, after))
        expert = first.argmax(1)
        row["same_expert"] = (second.argmax(1) == expert).double().mean().item()
        moved = (after - before).view(len(before), first.shape[1], -1)
        own = moved[torch.arange(len(moved), device=moved.device), expert]
        row["transformations"]["expert"] = explained(own, digits.change, expert)
    return row


def fit_clusters(codes: Tensor, seed: int) -> Tensor:
    """Return the centres of k-means clusters of codes: (N, S) → (CLUSTERS, S)."""
    from sklearn.cluster import KMeans

    step = -(-len(codes) // CLUSTERED)
    fitted = KMeans(CLUSTERS, n_init=3, random_state=seed).fit(codes[::step].cpu().numpy())
    return torch.from_numpy(fitted.cluster_centers_).to(codes)


def _labels(data: ImageSet) -> Tensor:
    assert data.labels is not None  # noqa: S101 (the digits of MNIST have labels)
    return torch.from_numpy(data.labels.astype("int64"))


QUALITY_COLUMNS = {  # heading: path of the number in a row, format
    "probe, placed": ("probe.placed", ".4f"),
    "probe, affine": ("probe.affine", ".4f"),
    "experts, placed": ("experts.placed.accuracy", ".3f"),
    "experts, affine": ("experts.affine.accuracy", ".3f"),
    "same expert": ("same_expert", ".3f"),
}
MAP_COLUMNS = {  # R² of the maps of experts, and of those of codes
    kind: {name: (f"transformations.{kind}.{name}", ".2f") for name in NAMES}
    for kind in ("expert", "code")
}
ALL_COLUMNS = QUALITY_COLUMNS | {
    f"{name}, {kind}": column
    for kind, columns in MAP_COLUMNS.items()
    for name, column in columns.items()
}


def table(
    rows: Sequence[Mapping[str, Any]],
    columns: variants.Columns = ALL_COLUMNS,
) -> str:
    """Format rows as a Markdown table; see `benchmarks.variants.table`."""
    return variants.table(rows, {name: name for name in STUDY}, columns, "model")


def main(arguments: Sequence[str] | None = None) -> None:
    """Train and measure the requested models, or print a file as a table."""
    parser = variants.make_parser(__doc__)
    parser.add_argument(
        "--epochs", type=int, help="passes of the baselines (default: those of the preset default)"
    )
    parser.add_argument(
        "--copies", type=int, default=1, help="places of each training digit (default: 1)"
    )
    parser.add_argument("--limit", type=int, help="maximum number of training, and of test images")
    variants.add_filters(parser)
    variants.add_protocol(parser)
    variants.run_study(parser, arguments, STUDY, run, table)


if __name__ == "__main__":
    main()
