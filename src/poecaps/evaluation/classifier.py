"""A small convolutional classifier that labels generated images and gives Fréchet features."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from poecaps import _checks as checks
from poecaps._files import ModelError
from poecaps._modules import in_batches
from poecaps._progress import counted
from poecaps.serialization import CLASSIFIER_VERSION, read_tensors, write_tensors

if TYPE_CHECKING:
    import os

    from torch import Tensor

    from poecaps._progress import Report

WEIGHTS = Path(__file__).parent / "weights"
CLASSIFIERS = ("mnist", "fashion-mnist")  # the datasets with a trained classifier in the package
BATCH_SIZE = 100  # images classified together; activations of larger batches exceed a CPU's caches


@dataclass(frozen=True, eq=False)
class Predictions:
    """Result of `Classifier.predict`."""

    probabilities: Tensor
    """(N, classes)."""
    features: Tensor
    """(N, F), the last hidden layer."""

    @property
    def labels(self) -> Tensor:
        """(N,), the class with the highest probability."""
        return self.probabilities.argmax(1)


class Classifier(nn.Module):
    """Five convolutions and a hidden layer, about 138,000 weights, for images of 28×28 or more.

    28×28 → 2 convolutions, pooling → 14×14 → 2 convolutions, pooling → 7×7 → 1 convolution,
    pooling → 3×3 → hidden layer of `features` rectified units → classes. Each convolution has 3×3
    filters, batch normalisation and a ReLU.

    Parameters
    ----------
    classes
        Number of classes.
    channels
        C of the images.
    features
        F, the size of the hidden layer, whose activations are the features of the Fréchet distance.
    """

    metadata: dict[str, Any]
    """Training options and test accuracy; empty until `load_classifier` sets it."""

    def __init__(self, classes: int = 10, channels: int = 1, features: int = 128) -> None:
        super().__init__()
        for name, value in {"classes": classes, "channels": channels, "features": features}.items():
            checks.require_int(name, value, 1)
        self.channels, self.metadata = channels, {}
        self.trunk = nn.Sequential(
            *_convolution(channels, 24),
            *_convolution(24, 24),
            nn.MaxPool2d(2),
            *_convolution(24, 48),
            *_convolution(48, 48),
            nn.MaxPool2d(2),
            *_convolution(48, 64),
            nn.AdaptiveMaxPool2d(3),
            nn.Flatten(),
        )
        self.hidden = nn.Linear(64 * 3 * 3, features)
        self.head = nn.Linear(features, classes)

    def features(self, images: Tensor) -> Tensor:
        """Compute the last hidden layer: (B, C, H, W) in [0, 1] → (B, F)."""
        checks.require_floating("images", images, pixels=True)
        sizes = (None, self.channels, None, None)
        checks.require_shape(
            "images", images, "BCHW", sizes, "use images like those the classifier was trained on"
        )
        return torch.relu(self.hidden(self.trunk(images)))

    def forward(self, images: Tensor) -> Tensor:
        """Compute the logits: (B, C, H, W) → (B, classes)."""
        logits: Tensor = self.head(self.features(images))
        return logits

    @torch.no_grad()
    def predict(self, images: Tensor, *, report: Report | None = None) -> Predictions:
        """Predict class probabilities and features of images (N, C, H, W), in batches.

        After each batch, `report` is called with the number of finished images and of all images.
        """
        batches = counted(images.split(BATCH_SIZE), len(images), report)
        features = in_batches(self.features, batches)
        return Predictions(self.head(features).softmax(1), features)

    def save(self, path: str | os.PathLike[str], metadata: dict[str, Any]) -> None:
        """Write the weights and their metadata to one safetensors file."""
        sizes = {
            "classes": self.head.out_features,
            "channels": self.channels,
            "features": self.hidden.out_features,
        }
        write_tensors(
            Path(path),
            self.state_dict(),
            {"classifier": sizes} | metadata,
            version=CLASSIFIER_VERSION,
        )


def _convolution(in_channels: int, out_channels: int) -> tuple[nn.Module, ...]:
    return (
        nn.Conv2d(in_channels, out_channels, 3, padding=1, bias=False),
        nn.BatchNorm2d(out_channels),
        nn.ReLU(inplace=True),
    )


def load_classifier(name: str | os.PathLike[str], device: torch.device | str = "cpu") -> Classifier:
    """Load a trained classifier, in evaluation mode.

    Parameters
    ----------
    name
        A dataset name (``"mnist"``, ``"fashion-mnist"``, or the bundled sample of either), or the
        path of a ``.safetensors`` file written by `tools/train_classifier.py`.
    device
        Device of the classifier.

    Raises
    ------
    ValueError
        If the package has no classifier for this name.
    ModelError
        If the file is damaged or does not contain a classifier.
    """
    path = Path(name)
    if path.suffix != ".safetensors":
        dataset = str(name).removesuffix("-sample")
        if dataset not in CLASSIFIERS:
            raise ValueError(
                f"name must be one of {', '.join(CLASSIFIERS)} or a .safetensors file, "
                f"but is {str(name)!r}; train a classifier with tools/train_classifier.py, "
                "or evaluate without one (classifier=None)"
            )
        path = WEIGHTS / f"{dataset}.safetensors"
    tensors, metadata = read_tensors(path, version=CLASSIFIER_VERSION)
    sizes = metadata.get("classifier")
    if not isinstance(sizes, dict):
        raise ModelError(f"{path} does not contain a classifier")
    try:
        classifier = Classifier(**sizes)
        classifier.load_state_dict(tensors)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ModelError(
            f"{path} does not contain a classifier that this version can read ({error})"
        ) from error
    classifier.metadata = metadata
    # Channels last is twice as fast on a CPU.
    classifier.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return classifier.to(device).eval().requires_grad_(False)
