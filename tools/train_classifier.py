"""Train the classifier that evaluation uses to label generated images.

Usage: python tools/train_classifier.py --data mnist --path FOLDER_OF_THE_FULL_DATASET

`poecaps.evaluation.judge` trains it, and says how; this program measures and saves it.
"""

from __future__ import annotations

import argparse
import shlex
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from poecaps._progress import Counter
from poecaps.data import load
from poecaps.evaluation.classifier import WEIGHTS, Classifier
from poecaps.evaluation.judge import fit, structureless
from poecaps.evaluation.measures import CONFIDENT

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from poecaps.data import ImageSet


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Train, evaluate and save a classifier; return the saved metadata."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data",
        default="mnist",
        help="mnist, fashion-mnist or another labelled dataset (default: mnist)",
    )
    parser.add_argument("--path", help="folder of the full mnist or fashion-mnist")
    parser.add_argument(
        "--epochs", type=int, default=30, help="passes over the images (default: 30)"
    )
    parser.add_argument(
        "--batch-size", type=int, default=250, help="images per batch (default: 250)"
    )
    parser.add_argument(
        "--rate", type=float, default=2e-3, help="maximum learning rate (default: 0.002)"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the initial weights and batches (default: 0)"
    )
    parser.add_argument(
        "--device",
        default="cuda" if torch.cuda.is_available() else "cpu",
        help="device to train on (default: a GPU if available)",
    )
    parser.add_argument("--out", type=Path, help="file to write (default: inside the package)")
    options = parser.parse_args(arguments)

    datasets = [load(options.data, split=split, path=options.path) for split in ("train", "test")]
    labels, test_labels = (_labels(dataset) for dataset in datasets)
    test = datasets[1].batch(slice(None)).to(options.device)
    started = time.perf_counter()
    classifier = fit(
        datasets[0],
        labels,
        options.epochs,
        options.batch_size,
        options.rate,
        options.seed,
        options.device,
        Counter("training", "images"),
    )
    metadata = {
        "data": options.data,
        "training_images": len(datasets[0]),
        "test_images": len(datasets[1]),
        "epochs": options.epochs,
        "seed": options.seed,
        "seconds": round(time.perf_counter() - started, 1),
        "torch": torch.__version__,
        "command": _command(options),
        **measure(classifier, test, test_labels.to(options.device), options.seed),
    }
    path = options.out or WEIGHTS / f"{Path(options.data).name}.safetensors"
    path.parent.mkdir(parents=True, exist_ok=True)
    classifier.save(path, metadata)
    for name, value in metadata.items():
        print(f"{name:20} {value}")
    print(f"saved to {path}")
    return metadata


def measure(classifier: Classifier, images: Tensor, labels: Tensor, seed: int) -> dict[str, float]:
    """Measure accuracy, accuracy of confident predictions, and confidence about nonsense."""
    confidence, predicted = classifier.predict(images).probabilities.max(1)
    right, sure = predicted == labels, confidence >= CONFIDENT
    generator = torch.Generator(images.device).manual_seed(seed)
    other = torch.randperm(len(images), generator=generator, device=images.device)
    noise, blobs, shuffled = structureless(images, generator)
    readable = {
        "faint": images / 2,
        "soft": nn.functional.avg_pool2d(images, 3, 1, 1),
        "grey": 0.1 + 0.9 * images,
    }
    nonsense = {
        "blends": ((images + images[other]) / 2)[labels != labels[other]],
        "noise": noise,
        "blobs": blobs,
        "shuffled": shuffled,
        "negatives": 1 - images,
    }
    numbers = {
        "test_accuracy": right.float().mean().item(),
        "mean_confidence": confidence.mean().item(),
        "sure": sure.float().mean().item(),
        "accuracy_when_sure": right[sure].float().mean().item(),
    }
    for name, changed in (readable | nonsense).items():
        top = classifier.predict(changed).probabilities.amax(1)
        numbers[f"sure_of_{name}"] = (top >= CONFIDENT).float().mean().item()
    return {name: round(value, 5) for name, value in numbers.items()}


def _labels(data: ImageSet) -> Tensor:
    if data.labels is None:
        raise SystemExit(f"--data must be a labelled dataset, but {data.source} has no labels")
    return torch.from_numpy(data.labels)


def _command(options: argparse.Namespace) -> str:
    named = {"data": options.data, "epochs": options.epochs, "batch-size": options.batch_size}
    named |= {"rate": options.rate, "seed": options.seed}
    parts = [f"--{name} {shlex.quote(str(value))}" for name, value in named.items()]
    return f"python tools/train_classifier.py {' '.join(parts)}"


if __name__ == "__main__":
    main()
