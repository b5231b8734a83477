"""`CapsuleExperts` as a layer of a supervised network: a small classifier with routed capsules.

`python examples/supervised.py` trains on the 10,000 digits that come with poecaps and tests on
2,000 others. The layer is an ordinary `nn.Module` from (B, I, K) to (B, J, D), trained by
`backward` and Adam. There is one expert for each digit, and its norm is the probability that the
digit is present (Sabour, Frosst and Hinton 2017). The final test accuracy was 98.9 %, and 98.6 %
with --seed 1. `--device cuda` trains on a GPU.
"""

from __future__ import annotations

import argparse
import time

import torch
from torch import Tensor, nn

import poecaps


class Capsules(nn.Module):
    """Group features into capsules and squash them: (B, C, H, W) → (B, H·W·C/dim, dim)."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, features: Tensor) -> Tensor:
        """Group and squash."""
        return poecaps.squash(features.permute(0, 2, 3, 1).flatten(1).unflatten(1, (-1, self.dim)))


def classifier(classes: int = 10) -> nn.Sequential:
    """Three convolutions, 128 capsules of dimension 8, an expert of dimension 16 for each class."""
    experts = poecaps.CapsuleExperts(128, 8, classes, 16, normalize="outputs")
    experts.reset_parameters(std=0.1)  # the default, 0.01, is for contrastive divergence
    return nn.Sequential(
        nn.Conv2d(1, 32, 5, padding=2),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(64, 64, 3, stride=2, padding=1),
        Capsules(8),
        experts,
    )


def margin_loss(length: Tensor, labels: Tensor) -> Tensor:
    """Push the norm of the label's expert above 0.9, all others below 0.1: (B, J), (B,) → ()."""
    right = nn.functional.one_hot(labels, length.shape[1]).bool()
    missing, wrong = (0.9 - length).relu().square(), (length - 0.1).relu().square()
    return torch.where(right, missing, 0.5 * wrong).sum(1).mean()


def shifted(images: Tensor) -> Tensor:
    """Shift a batch of images by up to two pixels, for data augmentation."""
    down, right = torch.randint(-2, 3, (2,)).tolist()
    return images.roll((down, right), (2, 3))  # the border of a digit is black


@torch.no_grad()
def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Return the share of images whose strongest expert is that of their label."""
    model.eval()
    found = torch.cat([model(part).norm(dim=-1).argmax(1) for part in images.split(500)])
    return (found == labels).double().mean().item()


def main() -> None:
    """Train, and print the accuracy after each epoch."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument(
        "--images", type=int, default=10_000, help="training images (default: 10000)"
    )
    parser.add_argument("--test", type=int, default=2000, help="test images (default: 2000)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu", help="such as cuda or mps (default: cpu)")
    options = parser.parse_args()

    torch.manual_seed(options.seed)
    train, test = (poecaps.data.load("mnist-sample", split=split) for split in ("train", "test"))
    device = torch.device(options.device)
    labels, test_labels = (torch.from_numpy(data.labels).to(device) for data in (train, test))
    images = train.batch(range(options.images)).to(device)
    test_images = test.batch(range(options.test)).to(device)
    test_labels = test_labels[: options.test]
    model = classifier().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    steps = options.epochs * (options.images // 100)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=4e-3, total_steps=steps)
    started = time.perf_counter()
    for epoch in range(options.epochs):
        model.train()
        for chosen in torch.randperm(options.images).to(device).split(100):
            loss = margin_loss(model(shifted(images[chosen])).norm(dim=-1), labels[chosen])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
        seconds = time.perf_counter() - started
        print(
            f"epoch {epoch + 1}: {accuracy(model, test_images, test_labels):.1%} "
            f"of test images, {seconds:.0f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
