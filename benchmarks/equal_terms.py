"""Codes on equal terms: every code gets the same pixel decoder, loss, epochs and code density.

`python -m benchmarks.equal_terms --data mnist --path FOLDER --json FILE` trains each code below
with each pixel loss, and adds a row to FILE for each. `--only "k-subspaces, absolute error"` makes
one row. Rows that FILE already contains are skipped; `--table FILE` prints FILE as a table.

Every code has 320 numbers for an image, learned with as many passes over the images as the first
two stages of the preset `default`:

pixel PCA            principal components of the pixels
autoencoder PCA      principal components of the features of the convolutional autoencoder
VAE                  posterior means of `benchmarks.baselines.VAE`
Gaussian RBM         P(h | v) of `benchmarks.baselines.GaussianRBM`
Bernoulli RBM        P(h | v) of scikit-learn's BernoulliRBM, which takes minutes on one core

The following are computed from the input capsules of the preset `default`, for which its first
stage and its preprocessing are trained:

random W             20 experts of 16 numbers with random weights, routed
random W, no routing the same with one routing iteration
principal components of all capsules: the W whose experts keep most of their variance
k-subspaces          20 subspaces of 16 dimensions, each fitted to the images for which it explains
                     most, with prices that make all of them win equally often; no energy, no
                     routing; the code is the projection on every subspace
k-means, residual    20 centres, as a one-hot vector, and 300 principal components of the
                     difference from the nearest one
poecaps              the experts of the preset `default`

Each code is standardised and decoded by a linear map to the features, followed by the pixel decoder
of poecaps; both start from random weights, and learn with as many passes as the last two stages of
`default`. Samples are decoded draws from the mixture of Gaussians that poecaps fits to codes.
"poecaps, own decoder" is the unchanged preset.

The pixel losses are those of `PIXEL_LOSSES`: the absolute error with a little cross-entropy is that
of the preset `default`.
"""

from __future__ import annotations

import itertools
import json
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from benchmarks import baselines, variants
from benchmarks.baselines import (
    CODE_SIZE,
    Budget,
    CodeMixture,
    PrincipalComponents,
    SingleDomainSampler,
)
from benchmarks.internals import find_device
from benchmarks.variants import Job, preset_with
from poecaps import Architecture, ConvAutoencoder, unsquash
from poecaps._modules import in_batches
from poecaps.autoencoder import PixelDecoder
from poecaps.code_density import kmeans
from poecaps.evaluation import CLASSIFIERS, NetworkEncoder, evaluate, load_classifier
from poecaps.training import PRESETS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import Tensor

    from poecaps import CapsuleExperts, CapsuleNetwork
    from poecaps.data import ImageSet
    from poecaps.evaluation import Encoder

SUBSPACES, SUBSPACE_DIM = 20, 16
KEPT = 512  # principal components of the capsules in which subspaces are searched for
SUBSPACE_ROUNDS = 30
PRICE_ROUNDS = 20  # changes of the prices in a round
DECODER_RATE = 1e-3


# --------------------------------------------------------------------------------------------------
# Pixel losses: from logits and images to a number


def absolute_error(logits: Tensor, images: Tensor) -> Tensor:
    """Compute the loss of the pixel decoder of the preset `default`."""
    weight = PRESETS["default"]().pixel_decoder.cross_entropy
    return (torch.sigmoid(logits) - images).abs().mean() + weight * cross_entropy(logits, images)


def cross_entropy(logits: Tensor, images: Tensor) -> Tensor:
    """Compute the negative log-likelihood of Bernoulli pixels, the loss of a VAE."""
    return nn.functional.binary_cross_entropy_with_logits(logits, images)


def squared_error(logits: Tensor, images: Tensor) -> Tensor:
    """Compute the mean squared error."""
    return (torch.sigmoid(logits) - images).square().mean()


PIXEL_LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "absolute error": absolute_error,
    "cross-entropy": cross_entropy,
    "squared error": squared_error,
}


# --------------------------------------------------------------------------------------------------
# Codes


def code_epochs() -> int:
    """Return the passes over the images in the first two stages of the preset `default`."""
    config = PRESETS["default"]()
    return config.autoencoder.epochs + config.encoder.epochs


def decoder_epochs() -> int:
    """Return the passes over the images in the last two stages of the preset `default`."""
    config = PRESETS["default"]()
    return config.decoder.epochs + config.pixel_decoder.epochs


def batches_of(data: ImageSet, device: torch.device) -> Iterator[Tensor]:
    """Yield all images in order."""
    return (batch.to(device) for batch in data.batches(500))


def pixel_pca(data: ImageSet, budget: Budget) -> Callable[[Tensor], Tensor]:
    """Return the leading principal components of the pixels."""
    found = PrincipalComponents(
        lambda: (batch.flatten(1) for batch in batches_of(data, budget.device))
    )
    return lambda images: found.transform(images.flatten(1))


def autoencoder_pca(data: ImageSet, budget: Budget) -> Callable[[Tensor], Tensor]:
    """Return the leading principal components of the features of an autoencoder."""
    features = baselines.Autoencoder(data, budget)
    with torch.no_grad():
        found = PrincipalComponents(
            lambda: (features.encode(batch) for batch in batches_of(data, budget.device))
        )
    return lambda images: found.transform(features.encode(images))


def baseline_code(name: str) -> Callable[[ImageSet, Budget], Callable[[Tensor], Tensor]]:
    """Return the code of a baseline."""
    return lambda data, budget: baselines.BASELINES[name](data, budget).encode


def train_default(
    job: Job, data: ImageSet, **changes: Any
) -> tuple[CapsuleNetwork, Mapping[str, Any]]:
    """Train the preset `default` with some changes; return the network and its row."""
    o = job.options
    options = {**_epochs(o.epochs), "model__features": o.filters, **changes}
    variant = preset_with("default", **options)
    config = variant.config(data=o.data, data_path=o.path, seed=job.seed, device=o.device)
    with job.folder() as folder:
        network, trained = variants.train_and_time(config, folder, data)
    if network is None:
        raise RuntimeError(f"the preset default failed: {trained['failed']}")
    return network.eval(), trained


def _epochs(epochs: int | None) -> dict[str, int]:
    """Return the options of a run with so many epochs in every stage."""
    stages = ("autoencoder", "encoder", "decoder", "pixel_decoder")
    return {} if epochs is None else {f"{stage}__epochs": epochs for stage in stages}


NO_DECODERS = {"decoder__epochs": 0, "pixel_decoder__epochs": 0}


def preactivations(network: CapsuleNetwork) -> Callable[[Tensor], Tensor]:
    """Return z of all experts of a network."""
    return lambda images: unsquash(network.encode(images).float()).flatten(1)


def random_weights(job: Job, data: ImageSet, iterations: int) -> Callable[[Tensor], Tensor]:
    """Return the experts of the preset `default` with random weights."""
    network, _ = train_default(
        job, data, **NO_DECODERS, encoder__epochs=0, model__iterations=iterations
    )
    experts = cast("CapsuleExperts", network.encoders[0])
    experts.reset_parameters(std=1.0, generator=torch.Generator().manual_seed(job.seed))
    return preactivations(network)


def capsules_of(job: Job, data: ImageSet) -> Callable[[Tensor], Tensor]:
    """Return the input capsules of the preset `default`, flattened: (B, C, H, W) → (B, I·K)."""
    network, _ = train_default(job, data, **NO_DECODERS, encoder__epochs=0)
    return lambda images: network.capsules(images).flatten(1)


def capsule_pca(job: Job, data: ImageSet) -> Callable[[Tensor], Tensor]:
    """Return the leading principal components of the capsules."""
    capsules, device = capsules_of(job, data), find_device(job.options.device)
    found = PrincipalComponents(lambda: map(capsules, batches_of(data, device)))
    return lambda images: found.transform(capsules(images))


def kmeans_residual(job: Job, data: ImageSet) -> Callable[[Tensor], Tensor]:
    """Return the nearest of 20 centres of the capsules, and components of the rest."""
    capsules, device = capsules_of(job, data), find_device(job.options.device)
    reduced = PrincipalComponents(lambda: map(capsules, batches_of(data, device)), KEPT)

    def reduce(images: Tensor) -> Tensor:
        return reduced.transform(capsules(images))

    points = in_batches(reduce, batches_of(data, device))
    code = fit_kmeans_residual(points, torch.Generator().manual_seed(job.seed))
    return lambda images: code(reduce(images))


def fit_kmeans_residual(points: Tensor, generator: torch.Generator) -> Callable[[Tensor], Tensor]:
    """Fit centres to points (P, S), and components to the rest; return the code: (B, S) → (B, C).

    The first `SUBSPACES` numbers of a code are the nearest centre as a one-hot vector.
    """
    nearest = kmeans(points, SUBSPACES, generator)
    centres = torch.stack([points[nearest == j].mean(0) for j in range(SUBSPACES)]).nan_to_num()
    rest = PrincipalComponents(lambda: iter([points - centres[nearest]]), CODE_SIZE - SUBSPACES)

    def encode(x: Tensor) -> Tensor:
        cluster = torch.cdist(x, centres).argmin(1)
        one_hot = nn.functional.one_hot(cluster, SUBSPACES).to(x)
        return torch.cat([one_hot, rest.transform(x - centres[cluster])], 1)

    return encode


def k_subspaces(job: Job, data: ImageSet) -> Callable[[Tensor], Tensor]:
    """Return the projections of the capsules on balanced k-subspaces."""
    capsules, device = capsules_of(job, data), find_device(job.options.device)
    reduced = PrincipalComponents(lambda: map(capsules, batches_of(data, device)), KEPT)
    points = in_batches(lambda x: reduced.transform(capsules(x)), batches_of(data, device))
    generator = torch.Generator().manual_seed(job.seed)
    bases = fit_subspaces(points, SUBSPACES, SUBSPACE_DIM, generator)
    return lambda images: projections(reduced.transform(capsules(images)), bases).flatten(1)


def fit_subspaces(points: Tensor, count: int, dim: int, generator: torch.Generator) -> Tensor:
    """Fit balanced k-subspaces: (P, S) → (count, S, dim), each with orthonormal columns.

    Alternate between giving every point to the subspace with the largest ‖projection‖² minus price,
    and taking the leading eigenvectors of the points of each subspace. A price rises while its
    subspace has more than its share of the points.
    """
    size = points.shape[1]
    first = torch.randn(count, size, dim, generator=generator).to(points)
    bases, price = torch.linalg.qr(first)[0], points.new_zeros(count)
    for _ in range(SUBSPACE_ROUNDS):
        score = projections(points, bases).square().sum(2)
        for round_ in range(PRICE_ROUNDS):
            share = (score - price).argmax(1).bincount(minlength=count) / len(points)
            price = price + score.std() / (1 + round_) * (share - 1 / count)
        owner = (score - price).argmax(1)
        moments = torch.stack([_second_moment(points[owner == j]) for j in range(count)])
        bases = torch.linalg.eigh(moments.double())[1][:, :, size - dim :].to(points)
    return bases


def projections(points: Tensor, bases: Tensor) -> Tensor:
    """Project points on subspaces: (P, S), (J, S, D) → (P, J, D)."""
    return torch.einsum("ps,jsd->pjd", points, bases)


def _second_moment(points: Tensor) -> Tensor:
    return points.T @ points / max(1, len(points))


OWN = "poecaps, own decoder"
OF_IMAGES: dict[str, Callable[[ImageSet, Budget], Callable[[Tensor], Tensor]]] = {
    "pixel PCA": pixel_pca,
    "autoencoder PCA": autoencoder_pca,
    "VAE": baseline_code("vae"),
    "Gaussian RBM": baseline_code("gaussian-rbm"),
    "Bernoulli RBM": baseline_code("bernoulli-rbm"),
}
OF_CAPSULES: dict[str, Callable[[Job, ImageSet], Callable[[Tensor], Tensor]]] = {
    "random W": lambda job, data: random_weights(job, data, 3),
    "random W, no routing": lambda job, data: random_weights(job, data, 1),
    "principal components": capsule_pca,
    "k-subspaces": k_subspaces,
    "k-means, residual": kmeans_residual,
    "poecaps": lambda job, data: preactivations(train_default(job, data, **NO_DECODERS)[0]),
}
CODES = (*OF_IMAGES, *OF_CAPSULES)
STUDY = (*(f"{code}, {loss}" for loss, code in itertools.product(PIXEL_LOSSES, CODES)), OWN)


# --------------------------------------------------------------------------------------------------
# The decoder and the density that every code gets


class DecodedCode(SingleDomainSampler):
    """A code with the pixel decoder and the density of poecaps.

    Parameters
    ----------
    name
        Name in tables.
    encoder
        From images to codes of S numbers, frozen.
    data
        Training images.
    loss
        One of `PIXEL_LOSSES`.
    budget
        Epochs of the decoder, seed and device.
    features
        Number of filters of each convolution of the decoder.
    """

    def __init__(
        self,
        name: str,
        encoder: Callable[[Tensor], Tensor],
        data: ImageSet,
        loss: Callable[[Tensor, Tensor], Tensor],
        budget: Budget,
        features: int,
    ) -> None:
        self.name, self.encoder = name, encoder
        with torch.no_grad():
            codes = in_batches(encoder, batches_of(data, budget.device)).float()
        self.mean, self.scale = codes.mean(0), 1 / codes.std(0).clamp(min=1e-6 * codes.std())
        self.density = CodeMixture(codes, budget.seed)
        channels, height, width = data.shape
        generator = torch.Generator().manual_seed(budget.seed)
        filters = ConvAutoencoder(channels, features=features, generator=generator)
        self.grid = (features, *filters.grid((height, width)))
        torch.manual_seed(budget.seed)
        self.linear = nn.Linear(codes.shape[1], torch.Size(self.grid).numel()).to(budget.device)
        self.pixels = PixelDecoder(filters, (height, width)).to(budget.device)
        self._fit(codes, data, loss, budget)

    def _fit(
        self,
        codes: Tensor,
        data: ImageSet,
        loss: Callable[[Tensor, Tensor], Tensor],
        budget: Budget,
    ) -> None:
        images = data.batch(slice(None))
        size = min(baselines.BATCH_SIZE, len(data))
        parameters = [*self.linear.parameters(), *self.pixels.parameters()]
        steps = budget.epochs * (len(data) // size)
        optimizer, schedule = baselines.make_optimizer(parameters, DECODER_RATE, steps)
        generator = torch.Generator().manual_seed(budget.seed)
        half = budget.device.type == "cuda"
        for _ in range(budget.epochs):
            order = torch.randperm(len(data), generator=generator)
            for chosen in order[: len(data) // size * size].split(size):
                with torch.autocast(budget.device.type, torch.bfloat16, enabled=half):
                    logits = self._logits(codes[chosen.to(budget.device)])
                target = images[chosen].to(budget.device)
                baselines.take_step(loss(logits.float(), target), optimizer, schedule)

    def _logits(self, codes: Tensor) -> Tensor:
        features = self.linear((codes - self.mean) * self.scale)
        return self.pixels.logits(features.view(-1, *self.grid))

    def decode(self, codes: Tensor) -> Tensor:
        """Decode codes: (B, S) → (B, C, H, W)."""
        return in_batches(lambda part: torch.sigmoid(self._logits(part)), codes, 500)

    def encode(self, images: Tensor) -> Tensor:
        """Encode images: (B, C, H, W) → (B, S)."""
        return self.encoder(images).float()

    def reconstruct(self, images: Tensor) -> Tensor:
        """Encode and decode."""
        return self.decode(self.encode(images))

    def draw(self, count: int, generator: torch.Generator) -> Tensor:
        """Decode draws from the density of codes."""
        return self.decode(self.density.sample(count, generator))


# --------------------------------------------------------------------------------------------------
# The study


def train_model(job: Job, data: ImageSet) -> Encoder:
    """Train the code and the decoder of a row."""
    o, device = job.options, find_device(job.options.device)
    if job.name == OWN:
        return NetworkEncoder(train_default(job, data)[0], OWN)
    code, loss = job.name.rsplit(", ", 1)
    if code in OF_IMAGES:
        epochs = code_epochs() if o.epochs is None else o.epochs
        budget = Budget(epochs, gibbs=0, seed=job.seed, device=device, filters=o.filters)
        encode = OF_IMAGES[code](data, budget)
    else:
        encode = OF_CAPSULES[code](job, data)
    epochs = decoder_epochs() if o.epochs is None else o.epochs
    budget = Budget(epochs, gibbs=0, seed=job.seed, device=device)
    return DecodedCode(job.name, encode, data, PIXEL_LOSSES[loss], budget, o.filters)


def run(job: Job) -> dict[str, Any]:
    """Train and evaluate, and return the row."""
    o, device = job.options, find_device(job.options.device)
    training, images = (baselines.limit(each, o.limit) for each in variants.load_images(o))
    start = time.perf_counter()
    model = train_model(job, training)
    trained = time.perf_counter()
    has_classifier = o.data.removesuffix("-sample") in CLASSIFIERS
    classifier = load_classifier(o.data, device) if has_classifier else None
    result = evaluate(
        model, training, images, classifier, seed=job.seed, samples=o.samples, device=device
    )
    return {
        "variant": job.name,
        "seed": job.seed,
        "command": variants.row_command("equal_terms", job),
        **variants.protocol_of(o),
        "training_seconds": round(trained - start, 2),
        "evaluation_seconds": round(time.perf_counter() - trained, 2),
        "evaluation": json.loads(replace(result, name=job.name).to_json()),
    }


COLUMNS = {  # heading: path of the number in a row, format
    "linear probe": ("evaluation.probe.test_accuracy", ".4f"),
    "pixel MSE": ("evaluation.reconstruction.error", ".4f"),
    "random FD": ("evaluation.domains.joint.random_frechet.distance", ".4f"),
    "matched FD": ("evaluation.domains.joint.matched_frechet.distance", ".1f"),
    "FD": ("evaluation.domains.joint.frechet.distance", ".1f"),
    "density": ("evaluation.domains.joint.neighbourhoods.density", ".3f"),
    "coverage": ("evaluation.domains.joint.neighbourhoods.coverage", ".1%"),
    "recognisable": ("evaluation.domains.joint.recognisability.share", ".1%"),
    "nearer": ("evaluation.domains.joint.nearest.nearer", ".1%"),
    "floor: random FD": ("evaluation.reconstructed_samples.random_frechet.distance", ".4f"),
    "floor: FD": ("evaluation.reconstructed_samples.frechet.distance", ".1f"),
    "training, s": ("training_seconds", ".0f"),
}


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Format rows as a Markdown table; see `benchmarks.variants.table`."""
    return variants.table(rows, {name: name for name in STUDY}, COLUMNS, "code, pixel loss")


def main(arguments: Sequence[str] | None = None) -> None:
    """Train and evaluate the requested rows, or print a file as a table."""
    parser = variants.make_parser(__doc__, samples=10_000)
    variants.add_protocol(parser)
    parser.add_argument(
        "--epochs", type=int, help="passes in every stage (default: those of the preset default)"
    )
    parser.add_argument(
        "--filters",
        type=int,
        default=Architecture().features,
        help=f"of the convolutions of poecaps (default: {Architecture().features})",
    )
    parser.add_argument("--limit", type=int, help="maximum number of training, and of test images")
    variants.run_study(parser, arguments, STUDY, run, table)


if __name__ == "__main__":
    main()
