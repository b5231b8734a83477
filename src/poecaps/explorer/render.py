"""Computations of the explorer: codes from slider positions, and images from codes.

The sliders of an expert determine its preactivation, the vector before squashing::

    z_j = ± magnitude · (mean_j + deviation_j ⊙ offsets)

with the mean and the standard deviation of the codes of the training images for which the expert
fires most.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from poecaps import functional as F
from poecaps._modules import in_batches
from poecaps.code_density import DOMAIN_INFO
from poecaps.explorer import pictures
from poecaps.sampling import DensityTarget

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from poecaps.code_density import Domain
    from poecaps.data import ImageSet
    from poecaps.network import CapsuleNetwork

    Array = np.ndarray[Any, Any]

Part = Literal["test", "held-out", "training", "other"]
STEPS = (-3.0, -2.0, -1.0, 0.0, 1.0, 2.0, 3.0)  # of a traversal, in standard deviations
DECIMALS = 2  # of offsets and magnitudes, so that all of them fit into a link
MAX_OFFSET, MAX_MAGNITUDE = 10_000.0, 10.0
MIN_DEVIATION = 1e-3  # so that a slider also has an effect on an expert that hardly varies
DECODE_BATCH = 16  # images decoded together; larger batches need more memory and are not faster


@dataclass(frozen=True)
class Setting:
    """Positions of the sliders of one expert; missing offsets are 0."""

    expert: int
    offsets: tuple[float, ...] = ()
    magnitude: float = 1.0
    negative: bool = False


@dataclass(frozen=True, eq=False)
class EncodedImage:
    """An image and its encoding by a model.

    Attributes
    ----------
    image, reconstruction : (H, W, C)
        The model's input and its reconstruction; uint8.
    firing : (J,)
        Firing probability of each expert.
    free_energy
        Free energy F of the input capsules under the first layer.
    settings
        The code as slider positions.
    routing : (J, rows, columns)
        Routing coefficients of each expert, summed over the capsules at each position of the grid.
    """

    image: Array
    reconstruction: Array
    firing: tuple[float, ...]
    free_energy: float
    settings: tuple[Setting, ...]
    routing: Array


@dataclass(frozen=True, eq=False)
class ExplorerModel:
    """A trained model on the CPU, as the explorer shows it.

    Attributes
    ----------
    name
        Its name on the page and in URLs.
    source
        The argument with which `poecaps.load` opens it.
    network
        The model.
    images
        Images to encode, if available.
    part
        Which part of its data they are: the test images, images held out of the training data, the
        training images, or others.
    note
        What a reader should know about the model, such as that it was not trained.
    """

    name: str
    source: str
    network: CapsuleNetwork
    images: ImageSet | None = None
    part: Part = "test"
    note: str = ""

    @property
    def experts(self) -> int:
        """Number of experts, J."""
        return self.network.architecture.experts[-1][0]

    @property
    def parameters(self) -> int:
        """Instantiation parameters of an expert, D."""
        return self.network.architecture.experts[-1][1]

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of the positions of the input capsules."""
        _, height, width = self.network.architecture.image_shape
        return self.network.autoencoder.grid((height, width))

    @property
    def receptive_field(self) -> int:
        """Side in pixels of the receptive field of a position."""
        scale = self.network.autoencoder.stem.scale
        # The two convolutions read 2S − 1 numbers. Each halving has 4×4 filters with stride 2.
        return scale * (2 * self.network.architecture.kernel_size - 2) + 3 * (scale - 1) + 1

    @property
    def stride(self) -> int:
        """Distance in pixels of the receptive fields of neighbours."""
        return 2 * self.network.autoencoder.stem.scale

    @property
    def first_pixel(self) -> int:
        """Where the first receptive field begins; negative if it begins beyond the image."""
        stem = self.network.autoencoder.stem
        return 1 - stem.scale - stem.margin

    @property
    def mean(self) -> Tensor:
        """Preactivation of each expert when all of its sliders are 0: (J, D)."""
        return self.network.code_density.mean

    @cached_property
    def deviation(self) -> Tensor:
        """Change of the preactivation when a slider moves by 1: (J, D)."""
        return self.network.code_density.std.clamp(min=MIN_DEVIATION)

    @cached_property
    def background(self) -> float | None:
        """Brightness of the plain background of grey images, or None if they have none."""
        if self.network.architecture.image_shape[0] != 1:
            return None
        if self.images is None:
            images = self.typical_images
        else:
            spread = np.linspace(0, len(self.images) - 1, min(len(self.images), 100)).astype(int)
            images = as_pixels(self.images.batch(spread))
        return pictures.plain_background(images[..., 0])

    @cached_property
    def chain_target(self) -> DensityTarget:
        """The density on which chains walk; ValueError if the model has none."""
        # It multiplies large matrices once, which takes longer than a step.
        return DensityTarget(self.network.require_density(), reduced=True)

    @torch.inference_mode()
    def preactivation(self, settings: Sequence[Setting]) -> Tensor:
        """Return the preactivations (J, D): several settings of one expert add up, others are 0."""
        z = torch.zeros_like(self.mean)
        for each in settings:
            offsets = torch.zeros(self.parameters)
            offsets[: len(each.offsets)] = torch.tensor(each.offsets)
            factor = -each.magnitude if each.negative else each.magnitude
            vector = self.mean[each.expert] + self.deviation[each.expert] * offsets
            z[each.expert] += factor * vector
        return z

    def settings(self, z: Tensor) -> tuple[Setting, ...]:
        """Return the slider positions of preactivations (J, D), without experts that are 0.

        The magnitude is the norm relative to that of the mean. The setting is negative if the
        vector points away from the mean. The offsets account for the rest.
        """
        return tuple(self._setting(int(j), z[j]) for j in z.any(dim=1).nonzero().flatten())

    def _setting(self, expert: int, z: Tensor) -> Setting:
        mean = self.mean[expert]
        norm = float(z.norm() / mean.norm()) if mean.any() else 1.0
        magnitude = min(max(round(norm, DECIMALS), 10**-DECIMALS), MAX_MAGNITUDE)
        negative = bool(z @ mean < 0)
        offsets = (z / (-magnitude if negative else magnitude) - mean) / self.deviation[expert]
        # Adding 0.0 turns -0.0 into 0.0.
        rounded = (offsets.double().numpy().round(DECIMALS) + 0.0).clip(-MAX_OFFSET, MAX_OFFSET)
        return Setting(expert, tuple(rounded.tolist()), magnitude, negative)

    def decode(self, settings: Sequence[Setting]) -> Array:
        """Return the image of one code: (H, W, C), uint8."""
        image: Array = self.decode_many(self.preactivation(settings).unsqueeze(0))[0]
        return image

    def draw(self, domain: Domain, expert: int | None, seed: int) -> tuple[Setting, ...]:
        """Draw a code from a domain, like `CapsuleNetwork.sample`."""
        generator = torch.Generator().manual_seed(seed)
        if DOMAIN_INFO[domain].whole_code:
            expert = None
        with torch.inference_mode():
            z = self.network.code_density.sample(1, domain, expert, generator)
        return self.settings(z[0])

    @cached_property
    def typical_images(self) -> Array:
        """Image of each expert when all of its sliders are 0: (J, H, W, C), uint8."""
        per_expert = [self.preactivation([Setting(j)]) for j in range(self.experts)]
        return self.decode_many(torch.stack(per_expert))

    def traverse(self, settings: Sequence[Setting], expert: int) -> Array:
        """Vary each slider of an expert while all others are fixed: (D, steps, H, W, C), uint8.

        An expert without a setting is varied around its mean.
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
        images = self.decode_many(torch.stack(varied))
        return images.reshape(self.parameters, len(STEPS), *images.shape[1:])

    def interpolate(
        self, start: Sequence[Setting], end: Sequence[Setting], steps: int
    ) -> tuple[tuple[tuple[Setting, ...], ...], Array]:
        """Interpolate linearly between two codes, before squashing.

        Parameters
        ----------
        start, end
            The codes.
        steps
            Number of codes, including both ends; at least 2.

        Returns
        -------
        codes
            As slider positions.
        images : (steps, H, W, C)
            uint8.
        """
        position = torch.linspace(0, 1, steps).view(-1, 1, 1)
        z = torch.lerp(self.preactivation(start), self.preactivation(end), position)
        return tuple(self.settings(each) for each in z), self.decode_many(z)

    @torch.inference_mode()
    def encode(self, pixels: Array) -> EncodedImage:
        """Encode an image (H, W, C), uint8."""
        image = torch.from_numpy(np.moveaxis(pixels, -1, 0).astype(np.float32)).unsqueeze(0) / 255
        x = capsules = self.network.capsules(image)
        routing: Tensor | None = None  # (1, I, J), through all layers
        for encoder in self.network.encoders:
            coefficients: Tensor = encoder.route(x).coefficients  # type: ignore[operator]
            routing = coefficients if routing is None else routing @ coefficients
            x = encoder(x)
        assert routing is not None  # noqa: S101 (there is at least one layer)
        free_energy: Tensor = self.network.encoders[0].free_energy(capsules)  # type: ignore[operator]
        at_positions = routing[0].view(*self.grid, -1, self.experts).sum(2)
        return EncodedImage(
            image=pixels,
            reconstruction=as_pixels(self.network.decode(x))[0],
            firing=tuple(x[0].norm(dim=-1).tolist()),
            free_energy=float(free_energy[0]),
            settings=self.settings(F.unsquash(x[0])),
            routing=at_positions.permute(2, 0, 1).numpy(),
        )

    def python(self, settings: Sequence[Setting]) -> str:
        """Return three lines of Python that reproduce the image of a code."""
        z = self.preactivation(settings)
        on = z.any(dim=1).nonzero().flatten().tolist()
        make = f"z = torch.zeros(1, {self.experts}, {self.parameters})"
        if on:
            # NumPy prints the shortest decimal that is exactly this float32.
            rows = ", ".join(f"[{', '.join(map(str, row))}]" for row in z[on].numpy())
            make += f"; z[0, {on}] = torch.tensor([{rows}])"
        return "\n".join(
            (
                f"import poecaps, torch; network = poecaps.load({self.source!r})",
                make,
                "image = network.decode(poecaps.squash(z)).detach()  # (1, C, H, W), from 0 to 1",
            )
        )

    @torch.inference_mode()
    def decode_many(self, z: Tensor) -> Array:
        """Return the images of preactivations: (B, J, D) → (B, H, W, C), uint8."""
        return as_pixels(
            in_batches(lambda part: self.network.decode(F.squash(part)), z, DECODE_BATCH)
        )


def as_pixels(images: Tensor) -> Array:
    """Round images to 8 bits: (B, C, H, W) from 0 to 1 → (B, H, W, C), uint8."""
    pixels: Array = (images * 255).round().to(torch.uint8).permute(0, 2, 3, 1).contiguous().numpy()
    return pixels
