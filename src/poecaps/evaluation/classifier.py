"""A small convolutional classifier: the judge of generated images, and the space in which they are compared."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from poecaps import _checks as checks
from poecaps._files import ModelError
from poecaps.serialization import CLASSIFIER_VERSION, read_tensors, write_tensors

if TYPE_CHECKING:
    import os

    from torch import Tensor

WEIGHTS = Path(__file__).parent / "weights"
CLASSIFIERS = ("mnist", "fashion-mnist")  # the sets that a trained classifier is shipped for
BATCH = 100  # images judged together; more do not fit into the caches of a CPU


@dataclass(frozen=True, eq=False)
class Predictions:
    """What a classifier sees in images."""

    probabilities: Tensor
    """(N, classes)."""
    features: Tensor
    """(N, F), the last hidden layer."""

    @property
    def verdicts(self) -> Tensor:
        """(N,), the class of the highest probability."""
        return self.probabilities.argmax(1)


class Classifier(nn.Module):
    """Five convolutions and a hidden layer, about 138,000 weights, for images of 28×28 or more.

    28×28 → 2 convolutions, pooled → 14×14 → 2 convolutions, pooled → 7×7 → 1 convolution, pooled → 3×3 → `features`
    rectified numbers → classes. Each convolution has 3×3 filters, batch normalisation and a ReLU.

    Parameters
    ----------
    classes
        How many.
    channels
        C of the images.
    features
        F, the size of the hidden layer that the Fréchet distance is measured in.
    """

    about: dict[str, Any]
    """How it was trained and how well it does; empty before `load_classifier` fills it."""

    def __init__(self, classes: int = 10, channels: int = 1, features: int = 128) -> None:
        super().__init__()
        for name, value in {"classes": classes, "channels": channels, "features": features}.items():
            checks.require_int(name, value, 1)
        self.channels, self.about = channels, {}
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
        """Compute the last hidden layer: (B, C, H, W) from 0 to 1 → (B, F)."""
        checks.require_floating("images", images, pixels=True)
        sizes = (None, self.channels, None, None)
        checks.require_shape(
            "images", images, "BCHW", sizes, "give the images that the classifier was trained for"
        )
        return torch.relu(self.hidden(self.trunk(images)))

    def forward(self, images: Tensor) -> Tensor:
        """Compute the logits: (B, C, H, W) → (B, classes)."""
        logits: Tensor = self.head(self.features(images))
        return logits

    @torch.no_grad()
    def judge(self, images: Tensor) -> Predictions:
        """Judge images (N, C, H, W), a few hundred at a time."""
        features = torch.cat([self.features(part) for part in images.split(BATCH)])
        return Predictions(self.head(features).softmax(1), features)

    def save(self, path: str | os.PathLike[str], about: dict[str, Any]) -> None:
        """Write weights and what is known about them into one safetensors file."""
        sizes = {
            "classes": self.head.out_features,
            "channels": self.channels,
            "features": self.hidden.out_features,
        }
        write_tensors(
            Path(path),
            self.state_dict(),
            {"classifier": sizes} | about,
            version=CLASSIFIER_VERSION,
        )


def _convolution(below: int, above: int) -> tuple[nn.Module, ...]:
    return (
        nn.Conv2d(below, above, 3, padding=1, bias=False),
        nn.BatchNorm2d(above),
        nn.ReLU(inplace=True),
    )


def load_classifier(name: str | os.PathLike[str], device: torch.device | str = "cpu") -> Classifier:
    """Load a trained classifier, in evaluation mode.

    Parameters
    ----------
    name
        A set known by name (``"mnist"``, ``"fashion-mnist"``, or the bundled sample of either), or the path of a
        ``.safetensors`` file that `tools/train_classifier.py` wrote.
    device
        Where it goes.

    Raises
    ------
    ValueError
        If no classifier is shipped under this name.
    ModelError
        If the file is damaged or holds something else.
    """
    path = Path(name)
    if path.suffix != ".safetensors":
        known = str(name).removesuffix("-sample")
        if known not in CLASSIFIERS:
            raise ValueError(
                f"name must be one of {', '.join(CLASSIFIERS)} or a .safetensors file, but is {str(name)!r}; "
                "train one with tools/train_classifier.py, or evaluate without (classifier=None)"
            )
        path = WEIGHTS / f"{known}.safetensors"
    tensors, about = read_tensors(path, version=CLASSIFIER_VERSION)
    sizes = about.get("classifier")
    if not isinstance(sizes, dict):
        raise ModelError(f"{path} holds no classifier")
    try:
        classifier = Classifier(**sizes)
        classifier.load_state_dict(tensors)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ModelError(f"{path} holds no classifier that this version knows ({error})") from error
    classifier.about = about
    classifier.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # twice as fast on a CPU
    return classifier.to(device).eval().requires_grad_(False)
