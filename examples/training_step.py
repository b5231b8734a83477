"""Experts in the form of a Lightning module: `training_step` and `configure_optimizers`.

`contrastive_divergence` is a loss like any other: `training_step` returns it, and the trainer calls
`backward` on it. With Lightning installed, replace `nn.Module` by `lightning.LightningModule`, and
the loop at the end by `lightning.Trainer(max_epochs=…).fit(…)`.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import poecaps


class Patches(nn.Module):
    """Experts over patches of 4×4 pixels."""

    mean: Tensor

    def __init__(self, mean: Tensor) -> None:
        super().__init__()
        self.register_buffer("mean", mean)
        self.experts = poecaps.CapsuleExperts(49, 16, 20, 16)

    def capsules(self, images: Tensor) -> Tensor:
        """Split images into patches: (B, 1, 28, 28) → (B, 49, 16)."""
        patches = (images - self.mean).unfold(2, 4, 4).unfold(3, 4, 4)
        return poecaps.squash(patches.reshape(-1, 49, 16))

    def forward(self, images: Tensor) -> Tensor:
        """Encode: (B, 1, 28, 28) → (B, 20, 16)."""
        codes: Tensor = self.experts(self.capsules(images))
        return codes

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:  # noqa: ARG002 (Lightning's signature)
        """Compute the loss of a batch of images and labels; the labels are not used."""
        images, _ = batch
        return self.experts.contrastive_divergence(self.capsules(images))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.Adam(self.parameters(), lr=0.1)


def main() -> None:
    """Train for some epochs, and print the reconstruction error of the patches."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--images", type=int, default=5000)
    options = parser.parse_args()

    torch.manual_seed(0)
    digits = poecaps.data.load("mnist-sample")
    model = Patches(digits.batch(range(1000)).mean(0))
    x = model.capsules(digits.batch(range(500)))
    assert digits.labels is not None  # part of each batch, but not used
    few = poecaps.data.ImageSet(digits.images[: options.images], digits.labels[: options.images])
    loader: DataLoader[list[Tensor]] = DataLoader(few, batch_size=128, shuffle=True)  # type: ignore[arg-type]

    optimizer = model.configure_optimizers()
    for epoch in range(options.epochs):
        for index, batch in enumerate(loader):
            optimizer.zero_grad()
            model.training_step(batch, index).backward()
            optimizer.step()
        with torch.no_grad():
            lost = (model.experts.reconstruct(x) - x).square().sum() / x.square().sum()
        print(f"epoch {epoch + 1}: {lost:.0%} of the variance is lost", flush=True)


if __name__ == "__main__":
    main()
