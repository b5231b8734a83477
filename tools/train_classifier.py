"""Train the classifier that evaluation uses to label generated images.

Usage: python tools/train_classifier.py --data mnist --path FOLDER_OF_THE_FULL_DATASET

The loss is cross-entropy without label smoothing, so that a probability of 0.9 is calibrated; the
optimizer is AdamW with a cosine schedule. Images are shifted by up to two pixels in each direction,
and half of them are made fainter, greyer, blurrier and noisier, because generated images can be
readable without the contrast of a scan.

A classifier trained on clean images only is confident about noise, and failed generated images are
mixtures and blobs. Each batch therefore also contains blends of 2 and of 4 images, whose target is
the mean of their labels, and structureless images, whose target is the uniform distribution.

The saved weights are those of the last step, not of the best epoch.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from poecaps.data import load
from poecaps.evaluation.classifier import WEIGHTS, Classifier
from poecaps.evaluation.measures import CONFIDENT

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from poecaps.data import ImageSet

SHIFT = 2  # largest shift in pixels, in each direction


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
    train, test = (_to_device(dataset, options.device) for dataset in datasets)
    started = time.perf_counter()
    classifier = fit(*train, options.epochs, options.batch_size, options.rate, options.seed)
    metadata = {
        "data": options.data,
        "training_images": len(datasets[0]),
        "test_images": len(datasets[1]),
        "epochs": options.epochs,
        "seed": options.seed,
        "seconds": round(time.perf_counter() - started, 1),
        "torch": torch.__version__,
        "command": _command(options),
        **measure(classifier, *test, options.seed),
    }
    path = options.out or WEIGHTS / f"{Path(options.data).name}.safetensors"
    path.parent.mkdir(parents=True, exist_ok=True)
    classifier.save(path, metadata)
    for name, value in metadata.items():
        print(f"{name:20} {value}")
    print(f"saved to {path}")
    return metadata


def fit(
    images: Tensor, labels: Tensor, epochs: int, batch_size: int, rate: float, seed: int
) -> Classifier:
    """Train on images (N, C, H, W) and labels (N,)."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    on_device = torch.Generator(images.device).manual_seed(seed)
    classes = int(labels.max()) + 1
    classifier = Classifier(classes, images.shape[1]).to(images.device)
    classifier.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    decayed = [p for p in classifier.parameters() if p.dim() > 1]
    others = [p for p in classifier.parameters() if p.dim() <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.05}, {"params": others, "weight_decay": 0.0}]
    )
    batch_size = min(batch_size, len(images))
    total = epochs * (len(images) // batch_size)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, rate, total_steps=total, pct_start=0.1
    )
    classifier.train()
    for epoch in range(epochs):
        order = torch.randperm(len(images), generator=generator).to(images.device)
        for chosen in order.split(batch_size)[: len(images) // batch_size]:
            across, down = torch.randint(-SHIFT, SHIFT + 1, (2,), generator=generator).tolist()
            batch = degrade(shift(images[chosen], across, down), on_device)
            batch, targets = add_nonsense(
                batch, nn.functional.one_hot(labels[chosen], classes).float(), on_device
            )
            batch = batch.contiguous(memory_format=torch.channels_last)
            loss = nn.functional.cross_entropy(classifier(batch), targets)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            schedule.step()
        print(
            f"epoch {epoch + 1:3} of {epochs}  loss {loss.item():.4f}", file=sys.stderr, flush=True
        )
    return classifier.eval()


def shift(images: Tensor, across: int, down: int) -> Tensor:
    """Shift images (B, C, H, W) by whole pixels, with black padding."""
    height, width = images.shape[2:]
    padded = nn.functional.pad(images, (SHIFT,) * 4)
    return padded[
        :, :, SHIFT - down : SHIFT - down + height, SHIFT - across : SHIFT - across + width
    ]


def degrade(images: Tensor, generator: torch.Generator) -> Tensor:
    """Degrade the first half of images (B, C, H, W): fainter, greyer, blurrier, noisier."""
    half = len(images) // 2
    clean, degraded = images[half:], images[:half]
    blur, contrast, floor, noise = torch.rand(
        4, half, 1, 1, 1, generator=generator, device=images.device
    )
    blurred = nn.functional.avg_pool2d(degraded, 3, 1, 1)
    degraded = torch.lerp(degraded, blurred, (2 * blur - 0.5).clamp(0, 1))
    degraded = degraded * (0.4 + 0.6 * contrast)
    degraded = degraded + 0.2 * floor * (1 - degraded)
    gaussian = torch.randn(degraded.shape, generator=generator, device=images.device)
    degraded = degraded + 0.15 * noise * gaussian
    return torch.cat([degraded.clamp(0, 1), clean])


def add_nonsense(
    images: Tensor, targets: Tensor, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Add blends and structureless images to a batch (B, C, H, W) with its targets (B, classes)."""
    tenth = max(1, len(images) // 10)
    batches, batch_targets = [images], [targets]
    for count, parts in ((2 * tenth, 2), (tenth, 4)):
        chosen = torch.randint(
            len(images), (count, parts), generator=generator, device=images.device
        )
        batches.append(images[chosen].mean(1))
        batch_targets.append(targets[chosen].mean(1))
    for nonsense in structureless(images[:tenth], generator):
        batches.append(nonsense)
        batch_targets.append(torch.full_like(targets[: len(nonsense)], 1 / targets.shape[1]))
    return torch.cat(batches), torch.cat(batch_targets)


def structureless(images: Tensor, generator: torch.Generator) -> tuple[Tensor, ...]:
    """Generate B each of noise, blobs and images with shuffled pixels, from images (B, C, H, W)."""
    count, channels, height, width = images.shape
    device = images.device
    noise = torch.rand(images.shape, generator=generator, device=device)
    coarse = torch.randn(count, channels, 5, 5, generator=generator, device=device)
    blobs = torch.sigmoid(3 * nn.functional.interpolate(coarse, (height, width), mode="bicubic"))
    orders = torch.rand(count, 1, height * width, generator=generator, device=device).argsort(2)
    shuffled = images.flatten(2).gather(2, orders.expand(-1, channels, -1)).view_as(images)
    return noise, blobs, shuffled


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


def _to_device(data: ImageSet, device: str) -> tuple[Tensor, Tensor]:
    if data.labels is None:
        raise SystemExit(f"--data must be a labelled dataset, but {data.source} has no labels")
    return data.batch(slice(None)).to(device), torch.from_numpy(data.labels).to(device)


def _command(options: argparse.Namespace) -> str:
    named = {"data": options.data, "epochs": options.epochs, "batch-size": options.batch_size}
    named |= {"rate": options.rate, "seed": options.seed}
    parts = [f"--{name} {shlex.quote(str(value))}" for name, value in named.items()]
    return f"python tools/train_classifier.py {' '.join(parts)}"


if __name__ == "__main__":
    main()
