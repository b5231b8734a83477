"""What the explorer asks of a model: codes from the positions of sliders, and images from codes.

The sliders of an expert stand for its preactivation, the vector before squashing::

    z_j = ± magnitude · (mean_j + unit_j ⊙ offsets)

with the mean and the standard deviation of the codes of the training images for which the expert is the strongest.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from poecaps import functional as F

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from poecaps.data import ImageSet
    from poecaps.network import CapsuleNetwork, Domain

    Array = np.ndarray[Any, Any]

STRIDE = 2  # of the second convolution; the first has 1
STEPS = (-3.0, -2.0, -1.0, 0.0, 1.0, 2.0, 3.0)  # of a traversal, in standard deviations
DECIMALS = 2  # of offsets and magnitudes, so that a link can hold all of them
FARTHEST, LOUDEST = 10_000.0, 10.0  # bounds of offsets and of a magnitude
SMALLEST_UNIT = 1e-3  # of a slider, where an expert hardly varies
TOGETHER = 16  # images decoded at once: more take memory and are no faster


@dataclass(frozen=True)
class Setting:
    """Where the sliders of one expert stand; offsets that are not given are 0."""

    expert: int
    offsets: tuple[float, ...] = ()
    magnitude: float = 1.0
    negative: bool = False


@dataclass(frozen=True, eq=False)
class Encoded:
    """What a model sees in an image.

    Attributes
    ----------
    image, reconstruction : (H, W, C)
        What was seen, and what the code of it decodes to; uint8.
    firing : (J,)
        Firing probability of each expert.
    free_energy
        F of the input capsules under the first layer.
    settings
        The code, as positions of sliders.
    routing : (J, rows, columns)
        How much of the votes of each position of the grid goes to each expert.
    """

    image: Array
    reconstruction: Array
    firing: tuple[float, ...]
    free_energy: float
    settings: tuple[Setting, ...]
    routing: Array


@dataclass(frozen=True, eq=False)
class ExplorerModel:
    """A trained model, on the CPU, as the explorer shows it.

    Attributes
    ----------
    name
        What it is called on the page and in addresses.
    source
        What `poecaps.load` opens it by.
    images
        Test images, where there are any.
    """

    name: str
    source: str
    network: CapsuleNetwork
    images: ImageSet | None = None

    @property
    def experts(self) -> int:
        """Number of experts, J."""
        return self.network.architecture.experts[-1][0]

    @property
    def parameters(self) -> int:
        """Numbers of one expert, D."""
        return self.network.architecture.experts[-1][1]

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of positions that input capsules lie at."""
        _, height, width = self.network.architecture.image_shape
        return self.network.autoencoder.grid((height, width))

    @property
    def field(self) -> int:
        """Side of the square of pixels that one position sees; neighbours see squares `STRIDE` pixels apart."""
        return 2 * self.network.architecture.kernel_size - 1

    @property
    def mean(self) -> Tensor:
        """Where all sliders of an expert are 0: (J, D)."""
        return self.network.code_density.mean

    @cached_property
    def unit(self) -> Tensor:
        """How far a slider goes by 1: (J, D)."""
        return self.network.code_density.std.clamp(min=SMALLEST_UNIT)

    @torch.inference_mode()
    def preactivation(self, settings: Sequence[Setting]) -> Tensor:
        """Vectors before squashing; settings of the same expert add up, experts without one are 0: (J, D)."""
        z = torch.zeros_like(self.mean)
        for each in settings:
            offsets = torch.zeros(self.parameters)
            offsets[: len(each.offsets)] = torch.tensor(each.offsets)
            factor = -each.magnitude if each.negative else each.magnitude
            z[each.expert] += factor * (self.mean[each.expert] + self.unit[each.expert] * offsets)
        return z

    def settings(self, z: Tensor) -> tuple[Setting, ...]:
        """Positions of sliders from vectors before squashing (J, D); an expert that is 0 is left out.

        The magnitude is the length of a vector in lengths of the mean, and one that points away from the mean is
        negative; offsets tell the rest.
        """
        return tuple(self._setting(int(j), z[j]) for j in z.any(dim=1).nonzero().flatten())

    def _setting(self, expert: int, z: Tensor) -> Setting:
        mean = self.mean[expert]
        length = float(z.norm() / mean.norm()) if mean.any() else 1.0
        magnitude = min(max(round(length, DECIMALS), 10**-DECIMALS), LOUDEST)
        negative = bool(z @ mean < 0)
        offsets = (z / (-magnitude if negative else magnitude) - mean) / self.unit[expert]
        rounded = (offsets.double().numpy().round(DECIMALS) + 0.0).clip(
            -FARTHEST, FARTHEST
        )  # no −0
        return Setting(expert, tuple(rounded.tolist()), magnitude, negative)

    def decode(self, settings: Sequence[Setting]) -> Array:
        """Draw the image of one code: (H, W, C), uint8."""
        image: Array = self._draw(self.preactivation(settings).unsqueeze(0))[0]
        return image

    def draw(self, domain: Domain, expert: int | None, seed: int) -> tuple[Setting, ...]:
        """Draw a code from a domain, as `CapsuleNetwork.sample` does."""
        generator = torch.Generator().manual_seed(seed)
        with torch.inference_mode():
            z = self.network.code_density.sample(
                1, domain, None if domain == "joint" else expert, generator
            )
        return self.settings(z[0])

    @cached_property
    def shelf(self) -> Array:
        """What each expert draws when all of its sliders are 0: (J, H, W, C), uint8."""
        alone = [self.preactivation([Setting(j)]) for j in range(self.experts)]
        return self._draw(torch.stack(alone))

    def traverse(self, settings: Sequence[Setting], expert: int) -> Array:
        """Draw what each slider of an expert does to a picture, all else held: (D, steps, H, W, C), uint8.

        An expert that is not part of the picture is varied from its mean.
        """
        own = next((each for each in settings if each.expert == expert), Setting(expert))
        others = [each for each in settings if each is not own]
        base = own.offsets + (0.0,) * (self.parameters - len(own.offsets))
        varied = [
            self.preactivation(
                [
                    *others,
                    Setting(expert, (*base[:d], step, *base[d + 1 :]), own.magnitude, own.negative),
                ]
            )
            for d in range(self.parameters)
            for step in STEPS
        ]
        sheet = self._draw(torch.stack(varied))
        return sheet.reshape(self.parameters, len(STEPS), *sheet.shape[1:])

    @torch.inference_mode()
    def encode(self, pixels: Array) -> Encoded:
        """Look at an image (H, W, C), uint8."""
        image = torch.from_numpy(np.moveaxis(pixels, -1, 0).astype(np.float32)).unsqueeze(0) / 255
        x = capsules = self.network.capsules(image)
        listening: Tensor | None = None
        for encoder in self.network.encoders:
            coefficients: Tensor = encoder.route(x).coefficients  # type: ignore[operator]
            listening = coefficients if listening is None else listening @ coefficients
            x = encoder(x)
        assert listening is not None  # noqa: S101 (there is at least one layer)
        free_energy: Tensor = self.network.encoders[0].free_energy(capsules)  # type: ignore[operator]
        at_positions = listening[0].view(*self.grid, -1, self.experts).sum(2)
        return Encoded(
            image=pixels,
            reconstruction=as_pixels(self.network.decode(x))[0],
            firing=tuple(x[0].norm(dim=-1).tolist()),
            free_energy=float(free_energy[0]),
            settings=self.settings(F.unsquash(x[0])),
            routing=at_positions.permute(2, 0, 1).numpy(),
        )

    def python(self, settings: Sequence[Setting]) -> str:
        """Write the three lines of Python that make the image of a code again."""
        z = self.preactivation(settings)
        on = z.any(dim=1).nonzero().flatten().tolist()
        make = f"z = torch.zeros(1, {self.experts}, {self.parameters})"
        if on:
            rows = ", ".join(
                f"[{', '.join(map(str, row))}]" for row in z[on].numpy()
            )  # the shortest exact float32
            make += f"; z[0, {on}] = torch.tensor([{rows}])"
        return "\n".join(
            (
                f"import poecaps, torch; network = poecaps.load({self.source!r})",
                make,
                "image = network.decode(poecaps.squash(z)).detach()  # (1, C, H, W), from 0 to 1",
            )
        )

    @torch.inference_mode()
    def _draw(self, z: Tensor) -> Array:
        """Images of vectors before squashing: (B, J, D) → (B, H, W, C), uint8."""
        return np.concatenate(
            [as_pixels(self.network.decode(F.squash(part))) for part in z.split(TOGETHER)]
        )


def as_pixels(images: Tensor) -> Array:
    """Round images to 8 bits: (B, C, H, W) from 0 to 1 → (B, H, W, C), uint8."""
    pixels: Array = (images * 255).round().to(torch.uint8).permute(0, 2, 3, 1).contiguous().numpy()
    return pixels
