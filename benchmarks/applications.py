"""What a trained network is good for besides drawing, each use measured beside a simpler way.

`python -m benchmarks.applications --data mnist-sample --network RUN --against fashion-mnist-sample --json FILE` prints a table.

unusual      AUROC of telling test images of the set from those of the other set, which no model has seen: by the free
             energy of the experts, by how unusual that is, and by the share of an image that is lost on the way to the
             experts and back; by the free energy of a BernoulliRBM, likewise; by what an autoencoder of the same
             filters loses. 0.5 is chance, below it the other set looks more like the training images than themselves
fill in      mean squared error of hidden pixels, beside that of the mean image
between      share of images half-way between two test images of different labels that a classifier recognises with
             90 % confidence, in the space of experts and as a blend of pixels
near         share of test images whose nearest training image has their label, by codes and by pixels (cosine of both)

For both ways of the first, run it twice: with each set, and a network trained on it.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

import poecaps
from benchmarks.baselines import AllFeatures, BernoulliMachine, Budget, _limit
from poecaps.applications import encode, free_energy, inpaint, interpolate, nearest_neighbours
from poecaps.data import ImageSet, load
from poecaps.evaluation import CLASSIFIERS, load_classifier, recognisability

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from poecaps import CapsuleNetwork
    from poecaps.evaluation import Classifier

CHUNK = 250


@dataclass(frozen=True)
class Uses:
    """All numbers of one run."""

    network: str
    data: str
    against: str
    training_images: int
    test_images: int
    seed: int
    epochs: int
    """Passes of the RBM and of the autoencoder."""
    unusual: dict[str, float]
    inpaint: dict[str, dict[str, float]]
    between: dict[str, float] | None
    near: dict[str, float] | None


def auroc(inside: Tensor, outside: Tensor) -> float:
    """Probability that an image from outside scores higher than one from inside; a tie counts half: (N,), (M,)."""
    order = torch.cat([inside, outside]).double().unique(return_inverse=True)[1]
    below, above = (order[: len(inside)], order[len(inside) :])
    counts = torch.bincount(below, minlength=int(order.max()) + 1).double()
    lower = counts.cumsum(0) - counts
    return float((lower[above] + counts[above] / 2).mean() / len(inside))


def typicality(usual: Tensor) -> Callable[[Tensor], Tensor]:
    """Score by the distance from the median of usual scores."""
    return lambda scores: (scores - usual.median()).abs()


def machine_energy(machine: BernoulliMachine, images: Tensor) -> Tensor:
    """F(v) = −b·v − Σ_j log(1 + e^(c_j + W_j·v)): (B, C, H, W) → (B,)."""
    v = images.flatten(1)
    return -(v @ machine.visible) - nn.functional.softplus(
        v @ machine.weight.T + machine.hidden
    ).sum(1)


def lost(reconstruct: Callable[[Tensor], Tensor], images: Tensor) -> Tensor:
    """Squared error of each image: (N, C, H, W) → (N,)."""
    parts = [(reconstruct(part) - part).square().sum((1, 2, 3)) for part in images.split(CHUNK)]
    return torch.cat(parts)


def measure_unusual(
    network: CapsuleNetwork, train: ImageSet, inside: Tensor, outside: Tensor, budget: Budget
) -> dict[str, float]:
    """AUROC of every score."""
    machine = BernoulliMachine(train, budget)
    with torch.enable_grad():  # it learns by gradients, unlike all else here
        autoencoder = AllFeatures(train, budget)
    some = _limit(train, 2000).batch(slice(None)).to(inside.device)
    energies: dict[str, Callable[[Tensor], Tensor]] = {
        "poecaps": lambda images: free_energy(network, images),
        "bernoulli-rbm": lambda images: machine_energy(machine, images),
    }
    result = {}
    for name, energy in energies.items():
        plain, unusual = (energy(inside), energy(outside)), typicality(energy(some))
        result[f"{name}: free energy"] = auroc(*plain)
        result[f"{name}: distance from the usual free energy"] = auroc(*map(unusual, plain))
    ways = {
        "poecaps": network.reconstruct,
        "bernoulli-rbm": machine.reconstruct,
        "autoencoder": autoencoder.reconstruct,
    }
    for name, way in ways.items():
        result[f"{name}: reconstruction error"] = auroc(lost(way, inside), lost(way, outside))
    return result


def masks(height: int, width: int) -> dict[str, Tensor]:
    """Which pixels are known: (H, W) each."""
    right, bottom, centre = (torch.ones(height, width, dtype=torch.bool) for _ in range(3))
    right[:, width // 2 :] = False
    bottom[height // 2 :] = False
    centre[height // 4 : height - height // 4, width // 4 : width - width // 4] = False
    return {"right half": right, "lower half": bottom, "centre": centre}


def measure_fill_in(
    network: CapsuleNetwork, mean: Tensor, images: Tensor, draws: int, seed: int
) -> dict[str, dict[str, float]]:
    """Error of hidden pixels for each mask."""
    result = {}
    for name, known in masks(*images.shape[2:]).items():
        known = known.to(images.device)
        generator = torch.Generator(images.device).manual_seed(seed)
        filled = inpaint(network, images, known, draws=draws, generator=generator)
        errors = [
            (each - images)[:, :, ~known].square().mean().item()
            for each in (filled, mean.expand_as(images))
        ]
        result[name] = dict(zip(("filled in", "mean image"), errors, strict=True))
    return result


def measure_between(
    network: CapsuleNetwork, test: ImageSet, classifier: Classifier, device: Any
) -> dict[str, float]:
    """Share of images half-way that are recognisable, of pairs of neighbours in the set with different labels."""
    assert test.labels is not None  # noqa: S101 (asked before)
    pairs = np.arange(len(test) // 2) * 2
    pairs = pairs[test.labels[pairs] != test.labels[pairs + 1]]
    first, second = (test.batch(chosen).to(device) for chosen in (pairs, pairs + 1))
    ways = {
        "experts": interpolate(network, first, second, 3)[:, 1],
        "pixels": (first + second) / 2,
        "ends": first,
    }
    return {
        name: recognisability(classifier.judge(images).probabilities).share
        for name, images in ways.items()
    }


def measure_near(
    network: CapsuleNetwork, train: ImageSet, test: ImageSet, device: Any
) -> dict[str, float]:
    """Share of test images whose nearest training image has the same label."""
    labels = [torch.from_numpy(each.labels) for each in (train, test)]
    images = [each.batch(slice(None)).to(device) for each in (train, test)]
    ways = {
        "codes": [encode(network, each) for each in images],
        "pixels": [each.flatten(1) for each in images],
    }
    return {
        name: (labels[0][nearest_neighbours(places, asked).indices[:, 0].cpu()] == labels[1])
        .double()
        .mean()
        .item()
        for name, (places, asked) in ways.items()
    }


def table(uses: Uses) -> str:
    """Lay the numbers out as text."""
    lines = [
        f"{uses.network}, trained on {uses.data}; {uses.test_images} test images, seed {uses.seed}"
    ]
    lines += [f"unusual ({uses.against}), AUROC", *_lines(uses.unusual)]
    for name, errors in uses.inpaint.items():
        lines += [f"fill in the {name}, squared error", *_lines(errors)]
    if uses.between is not None:
        lines += ["between two images, share recognised", *_lines(uses.between)]
    if uses.near is not None:
        lines += ["nearest training image, share of the same label", *_lines(uses.near)]
    return "\n".join(lines)


def _lines(numbers: dict[str, float]) -> list[str]:
    return [f"  {name:54}{value:8.4f}" for name, value in numbers.items()]


@torch.no_grad()
def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the table, write the JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data", default="mnist-sample", help="the set that the network was trained on"
    )
    parser.add_argument("--path", help="folder that holds it, if it is a full set known by name")
    parser.add_argument("--against", default="fashion-mnist-sample", help="the other set")
    parser.add_argument("--against-path", help="folder that holds that one")
    parser.add_argument(
        "--network", required=True, help="a trained model: its name, or the folder of a run"
    )
    parser.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu", help="(default: a GPU)"
    )
    parser.add_argument(
        "--epochs", type=int, default=10, help="of the RBM and the autoencoder (default: 10)"
    )
    parser.add_argument("--draws", type=int, default=3000, help="to fill in from (default: 3000)")
    parser.add_argument(
        "--limit", type=int, help="use so many training and at most so many test images"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="file for all the numbers")
    options = parser.parse_args(arguments)

    train, test = (
        _limit(load(options.data, split=split, path=options.path), options.limit)
        for split in ("train", "test")
    )
    other = _limit(load(options.against, split="test", path=options.against_path), options.limit)
    if train.shape != other.shape:
        parser.error(
            f"--against must hold images of {train.shape} (C, H, W), but holds images of {other.shape}"
        )
    network = poecaps.load(options.network, options.device)
    device, budget = (
        options.device,
        Budget(options.epochs, 0, options.seed, torch.device(options.device)),
    )
    inside, outside = (each.batch(slice(None)).to(device) for each in (test, other))
    mean = train.batch(slice(None)).mean(0).to(device)
    judged = options.data.removesuffix("-sample") in CLASSIFIERS
    labelled = train.labels is not None and test.labels is not None
    unusual = measure_unusual(network, train, inside, outside, budget)
    uses = Uses(
        network=str(options.network),
        data=options.data,
        against=options.against,
        training_images=len(train),
        test_images=len(test),
        seed=options.seed,
        epochs=options.epochs,
        unusual=unusual,
        inpaint=measure_fill_in(network, mean, inside, options.draws, options.seed),
        between=measure_between(network, test, load_classifier(options.data, device), device)
        if judged
        else None,
        near=measure_near(network, train, test, device) if labelled else None,
    )
    print(table(uses))
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(asdict(uses), indent=2) + "\n")


if __name__ == "__main__":
    main()
