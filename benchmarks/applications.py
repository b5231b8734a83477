"""Measure the applications of a trained network, each against a simpler method.

`python -m benchmarks.applications --data mnist-sample --network RUN --against fashion-mnist-sample
--json FILE` prints a table.

novelty         AUROC of distinguishing test images of the dataset from those of the other dataset,
                which no model has seen: by the free energy of the experts, by its distance from the
                median, and by the reconstruction error; the same three for a BernoulliRBM; and by
                the reconstruction error of an autoencoder with the same architecture. If the
                network has a density: by its log P and the distance from the median log P, and as
                controls by the two parts of log P, the base measure without experts and the experts
                without base measure, and by the norm of the whitened features, which needs no
                model. 0.5 is chance level; below it, the other dataset looks more like the training
                images than the test images do
inpainting      mean squared error of hidden pixels, compared with that of the mean image
interpolation   share of images half-way between two test images with different labels that a
                classifier recognises with 90 % confidence: in the space of experts, and as a blend
                of pixels
neighbours      share of test images whose nearest training image has the same label, by the cosine
                similarity of codes and of pixels

To measure novelty in both directions, run the script once for each dataset, with a network trained
on it.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn

import poecaps
from benchmarks import machine
from benchmarks.baselines import Autoencoder, BernoulliRBM, Budget, limit
from poecaps._modules import in_batches
from poecaps.applications import encode, inpaint, interpolate, nearest_neighbours
from poecaps.data import ImageSet, load
from poecaps.evaluation import CLASSIFIERS, load_classifier, recognisability

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from poecaps import CapsuleNetwork
    from poecaps.evaluation import Classifier

REFERENCE_IMAGES = 2000  # training images whose medians are the references of novelty


@dataclass(frozen=True)
class ApplicationMetrics:
    """All numbers of one run."""

    network: str
    data: str
    against: str
    training_images: int
    test_images: int
    seed: int
    epochs: int
    """Passes of the RBM and of the autoencoder."""
    novelty: dict[str, float]
    inpainting: dict[str, dict[str, float]]
    interpolation: dict[str, float] | None
    neighbours: dict[str, float] | None


def auroc(inside: Tensor, outside: Tensor) -> float:
    """Return the probability that an outside score exceeds an inside score: (N,), (M,) → float.

    A tie counts half.
    """
    order = torch.cat([inside, outside]).double().unique(return_inverse=True)[1]
    inside_order, outside_order = (order[: len(inside)], order[len(inside) :])
    counts = torch.bincount(inside_order, minlength=int(order.max()) + 1).double()
    lower = counts.cumsum(0) - counts
    return float((lower[outside_order] + counts[outside_order] / 2).mean() / len(inside))


def distance_from_median(reference: Tensor) -> Callable[[Tensor], Tensor]:
    """Return a score: the distance from the median of reference values."""
    return lambda values: (values - reference.median()).abs()


def rbm_free_energy(rbm: BernoulliRBM, images: Tensor) -> Tensor:
    """Compute F(v) = −b·v − Σ_j log(1 + e^(c_j + W_j·v)): (B, C, H, W) → (B,)."""
    v = images.flatten(1)
    return -(v @ rbm.visible) - nn.functional.softplus(v @ rbm.weight.T + rbm.hidden).sum(1)


def squared_errors(reconstruct: Callable[[Tensor], Tensor], images: Tensor) -> Tensor:
    """Compute the squared reconstruction error of each image: (N, C, H, W) → (N,)."""
    return in_batches(lambda batch: (reconstruct(batch) - batch).square().sum((1, 2, 3)), images)


def density_statistics(network: CapsuleNetwork) -> dict[str, Callable[[Tensor], Tensor]]:
    """Return the statistics of a density by which novelty is measured: (B, C, H, W) → (B,) each.

    All of them are higher for images that are less probable. Beside −log P these are controls: its
    two parts, and the norm of the whitened features.
    """
    density = network.require_density()
    return {
        "−log P": lambda images: -network.log_prob(images),
        "−log P of the base measure": lambda images: (
            -density.base.log_ratio(network.whitened(images))
        ),
        "free energy of the density": lambda images: density.free_energy(network.whitened(images)),
        "norm of the features": lambda images: network.whitened(images).flatten(1).norm(dim=1),
    }


def measure_novelty(
    network: CapsuleNetwork, train: ImageSet, inside: Tensor, outside: Tensor, budget: Budget
) -> dict[str, float]:
    """Compute the AUROC of every novelty score; a budget without epochs leaves out the peers."""
    statistics: dict[tuple[str, str], Callable[[Tensor], Tensor]] = {
        ("poecaps", "free energy"): network.free_energy
    }
    reconstructions = {"poecaps": network.reconstruct}
    if network.density is not None:
        for name, statistic in density_statistics(network).items():
            statistics["poecaps", name] = statistic
    if budget.epochs:
        rbm = BernoulliRBM(train, budget)
        with torch.enable_grad():  # only the autoencoder is trained by autograd
            autoencoder = Autoencoder(train, budget)
        statistics["bernoulli-rbm", "free energy"] = lambda images: rbm_free_energy(rbm, images)
        reconstructions["bernoulli-rbm"] = rbm.reconstruct
        reconstructions["autoencoder"] = autoencoder.reconstruct
    reference = limit(train, REFERENCE_IMAGES).batch(slice(None)).to(inside.device)
    result = {}
    for (model, name), statistic in statistics.items():
        usual, *values = (in_batches(statistic, each) for each in (reference, inside, outside))
        score = distance_from_median(usual)
        result[f"{model}: {name}"] = auroc(*values)
        result[f"{model}: distance from the median {name}"] = auroc(*map(score, values))
    for model, reconstruct in reconstructions.items():
        result[f"{model}: reconstruction error"] = auroc(
            squared_errors(reconstruct, inside), squared_errors(reconstruct, outside)
        )
    return result


def masks(height: int, width: int) -> dict[str, Tensor]:
    """Return masks of the known pixels, (H, W) each."""
    right, bottom, centre = (torch.ones(height, width, dtype=torch.bool) for _ in range(3))
    right[:, width // 2 :] = False
    bottom[height // 2 :] = False
    centre[height // 4 : height - height // 4, width // 4 : width - width // 4] = False
    return {"right half": right, "lower half": bottom, "centre": centre}


def measure_inpainting(
    network: CapsuleNetwork, mean: Tensor, images: Tensor, draws: int, seed: int
) -> dict[str, dict[str, float]]:
    """Compute the error of hidden pixels for each mask."""
    result = {}
    for name, mask in masks(*images.shape[2:]).items():
        known = mask.to(images.device)
        generator = torch.Generator(images.device).manual_seed(seed)
        inpainted = inpaint(network, images, known, draws=draws, generator=generator)
        inpainted_error, mean_error = (
            (completed - images)[:, :, ~known].square().mean().item()
            for completed in (inpainted, mean.expand_as(images))
        )
        result[name] = {"inpainted": inpainted_error, "mean image": mean_error}
    return result


def measure_interpolation(
    network: CapsuleNetwork, test: ImageSet, classifier: Classifier, device: torch.device
) -> dict[str, float]:
    """Compute the share of recognisable images half-way between images with different labels.

    The pairs are consecutive images of the dataset.
    """
    assert test.labels is not None  # noqa: S101 (checked by the caller)
    pairs = np.arange(len(test) // 2) * 2
    pairs = pairs[test.labels[pairs] != test.labels[pairs + 1]]
    first, second = (test.batch(chosen).to(device) for chosen in (pairs, pairs + 1))
    methods = {
        "experts": interpolate(network, first, second, 3)[:, 1],
        "pixels": (first + second) / 2,
        "end points": first,
    }
    return {
        name: recognisability(classifier.predict(images).probabilities).share
        for name, images in methods.items()
    }


def measure_neighbours(
    network: CapsuleNetwork, train: ImageSet, test: ImageSet, device: torch.device
) -> dict[str, float]:
    """Compute the share of test images whose nearest training image has the same label."""
    train_labels, test_labels = (torch.from_numpy(data.labels) for data in (train, test))
    train_images, test_images = (data.batch(slice(None)).to(device) for data in (train, test))
    features: dict[str, Callable[[Tensor], Tensor]] = {
        "codes": lambda images: encode(network, images),
        "pixels": lambda images: images.flatten(1),
    }
    result = {}
    for name, feature in features.items():
        found = nearest_neighbours(feature(train_images), feature(test_images)).indices[:, 0].cpu()
        result[name] = (train_labels[found] == test_labels).double().mean().item()
    return result


def table(result: ApplicationMetrics) -> str:
    """Format the numbers as text."""
    lines = [
        f"{result.network}, trained on {result.data}; {result.test_images} test images, "
        f"seed {result.seed}",
        f"novelty (against {result.against}), AUROC",
        *_lines(result.novelty),
    ]
    for name, errors in result.inpainting.items():
        lines += [f"inpainting of the {name}, mean squared error", *_lines(errors)]
    if result.interpolation is not None:
        lines += [
            "half-way between two images, share recognisable",
            *_lines(result.interpolation),
        ]
    if result.neighbours is not None:
        lines += [
            "nearest training image, share with the same label",
            *_lines(result.neighbours),
        ]
    return "\n".join(lines)


def _lines(numbers: dict[str, float]) -> list[str]:
    return [f"  {name:62}{value:8.4f}" for name, value in numbers.items()]


@torch.no_grad()
def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the table, and write the JSON file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data", default="mnist-sample", help="dataset that the network was trained on"
    )
    parser.add_argument("--path", help="folder of that dataset, if it is a full one")
    parser.add_argument("--against", default="fashion-mnist-sample", help="the other dataset")
    parser.add_argument("--against-path", help="folder of the other dataset, if it is a full one")
    parser.add_argument(
        "--network", required=True, help="trained model: its name, or the folder of a run"
    )
    parser.add_argument(
        "--device",
        default="cuda" if torch.cuda.is_available() else "cpu",
        help="(default: a GPU if available)",
    )
    parser.add_argument(
        "--epochs",
        type=int,
        default=10,
        help="epochs of the RBM and the autoencoder (default: 10); 0 leaves them out",
    )
    parser.add_argument(
        "--draws", type=int, default=3000, help="draws used for inpainting (default: 3000)"
    )
    parser.add_argument(
        "--limit", type=int, help="maximum number of training images, and of test images"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="file to write the numbers to")
    options = parser.parse_args(arguments)

    train, test = (
        limit(load(options.data, split=split, path=options.path), options.limit)
        for split in ("train", "test")
    )
    other = limit(load(options.against, split="test", path=options.against_path), options.limit)
    if train.shape != other.shape:
        parser.error(
            f"--against must have images of shape {train.shape} (C, H, W), "
            f"but has images of shape {other.shape}"
        )
    network = poecaps.load(options.network, options.device)
    device = torch.device(options.device)
    budget = Budget(options.epochs, 0, options.seed, device)
    inside, outside = (data.batch(slice(None)).to(device) for data in (test, other))
    mean = train.batch(slice(None)).mean(0).to(device)
    has_classifier = options.data.removesuffix("-sample") in CLASSIFIERS
    labelled = train.labels is not None and test.labels is not None
    novelty = measure_novelty(network, train, inside, outside, budget)
    result = ApplicationMetrics(
        network=str(options.network),
        data=options.data,
        against=options.against,
        training_images=len(train),
        test_images=len(test),
        seed=options.seed,
        epochs=options.epochs,
        novelty=novelty,
        inpainting=measure_inpainting(network, mean, inside, options.draws, options.seed),
        interpolation=measure_interpolation(
            network, test, load_classifier(options.data, device), device
        )
        if has_classifier
        else None,
        neighbours=measure_neighbours(network, train, test, device) if labelled else None,
    )
    print(table(result))
    machine.write(asdict(result), options.json)


if __name__ == "__main__":
    main()
