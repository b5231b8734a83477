"""Training of the classifier that judges samples, on the labels of a set of images.

The loss is cross-entropy without label smoothing, so that a probability of 0.9 is calibrated; the
optimizer is AdamW with a cosine schedule. Images are shifted by up to two pixels in each direction,
and half of them are made fainter, greyer, blurrier and noisier, because generated images can be
readable without the contrast of a scan.

A classifier trained on clean images only is confident about noise, and failed generated images are
mixtures and blobs. Each batch therefore also contains blends of 2 and of 4 images, whose target is
the mean of their labels, and structureless images, whose target is the uniform distribution.

The result has the weights of the last step, not of the best epoch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from poecaps import _checks as checks
from poecaps.evaluation.classifier import Classifier

if TYPE_CHECKING:
    from torch import Tensor

    from poecaps._progress import Report
    from poecaps.data import ImageSet

SHIFT = 2  # largest shift in pixels, in each direction
BATCH_SIZE, STEPS_PER_EPOCH = 100, 6  # batches are smaller where an epoch had fewer steps
RATE = 2e-3  # maximum learning rate
# Images that a classifier sees in training by default, the same one several times if there are
# fewer: about a minute on two cores for images of 28×28.
PASSES = 30_000
MAX_EPOCHS = 30
MAX_LABEL = 9999  # the last layer has an output for each label up to the largest


def train_classifier(
    data: ImageSet,
    *,
    epochs: int | None = None,
    seed: int = 0,
    device: torch.device | str = "cpu",
    report: Report | None = None,
) -> Classifier:
    """Train a classifier on labelled images, to judge samples of a model of these images.

    Parameters
    ----------
    data
        Training images with labels from 0 on and up to 9,999, of two classes or more.
    epochs
        Passes over the images; by default as many as 30,000 images make, at least 1 and at most
        30.
    seed
        Seed of the initial weights and of the batches.
    device
        Device of the computation.
    report
        Called with the number of images that are seen, and of all images to be seen.

    Returns
    -------
    Classifier
        In evaluation mode, and frozen.
    """
    if not is_labelled(data):
        raise ValueError(
            f"data must have labels from 0 on, of 2 classes or more and up to {MAX_LABEL:,}, but "
            f"{data} has not"
        )
    if epochs is None:
        epochs = min(MAX_EPOCHS, max(1, round(PASSES / len(data))))
    checks.require_int("epochs", epochs, 1)
    batch_size = min(BATCH_SIZE, max(2, len(data) // STEPS_PER_EPOCH))
    classifier = fit(
        data, torch.from_numpy(data.labels), epochs, batch_size, RATE, seed, device, report
    )
    classifier.metadata = {
        "training_images": len(data),
        "epochs": epochs,
        "seed": seed,
        "torch": torch.__version__,
    }
    return classifier.requires_grad_(False)


def is_labelled(data: ImageSet) -> bool:
    """Return whether images have labels on which a classifier can be trained."""
    labels = data.labels
    if labels is None or not len(labels):
        return False
    return 0 <= int(labels.min()) < int(labels.max()) <= MAX_LABEL


def fit(
    data: ImageSet,
    labels: Tensor,
    epochs: int,
    batch_size: int,
    rate: float,
    seed: int,
    device: torch.device | str,
    report: Report | None = None,
) -> Classifier:
    """Train on images with labels (N,)."""
    device = torch.device(device)
    generator = torch.Generator().manual_seed(seed)
    on_device = torch.Generator(device).manual_seed(seed)
    classes = int(labels.max()) + 1
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        classifier = Classifier(classes, data.shape[0]).to(device)
    classifier.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    decayed = [p for p in classifier.parameters() if p.dim() > 1]
    others = [p for p in classifier.parameters() if p.dim() <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.05}, {"params": others, "weight_decay": 0.0}]
    )
    batch_size = min(batch_size, len(data))
    steps = len(data) // batch_size
    total = epochs * steps
    # The schedule divides by the steps of its first phase minus one, which must not be 0.
    warm_up = 0.1 if total > 10 else 0.3
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, rate, total_steps=total, pct_start=warm_up
    )
    classifier.train()
    seen = 0
    with torch.enable_grad():
        for _ in range(epochs):
            order = torch.randperm(len(data), generator=generator)
            for chosen in order.split(batch_size)[:steps]:
                across, down = torch.randint(-SHIFT, SHIFT + 1, (2,), generator=generator).tolist()
                batch = degrade(shift(data.batch(chosen).to(device), across, down), on_device)
                targets = nn.functional.one_hot(labels[chosen], classes).float().to(device)
                batch, targets = add_nonsense(batch, targets, on_device)
                batch = batch.contiguous(memory_format=torch.channels_last)
                loss = nn.functional.cross_entropy(classifier(batch), targets)
                optimizer.zero_grad(set_to_none=True)
                loss.backward()
                optimizer.step()
                schedule.step()
                seen += batch_size
                if report is not None:
                    report(seen, total * batch_size)
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
