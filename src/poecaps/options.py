"""Options of the model: everything that determines the shape of its weights and how they are used.

The docstring of each field is also its help text on the command line.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Literal, get_args

from poecaps import _checks as checks
from poecaps import functional as F

Base = Literal["gaussian", "ball"]
BASES: tuple[Base, ...] = get_args(Base)

# Upper bounds, far above what is useful, so that a file from elsewhere cannot ask for a computation
# without an end: a batch is computed in one call, which an interrupt does not end.
MAX_ITERATIONS = 100  # of a loop within one call
MAX_SIZE = 2**20  # of an axis
MAX_SIDE = 2**14  # pixels
MAX_LAYERS = 100
MAX_PIXELS = 2**25  # numbers of an image with its margin, such as 3,000×3,000 pixels in colour
MAX_NUMBERS = 2**28  # of the largest array that is computed for one image: 1 GiB in float32


@dataclass(frozen=True)
class DensityOptions:
    """Options of the density over the input capsules, `poecaps.energy.CapsuleDensity`."""

    experts: tuple[int, int] | None = None
    """Number and dimension of the experts of the density; None: the model has no density."""
    linear_dims: int = 8
    """Numbers of an expert that are coordinates on a line; 0: an expert is a sphere (the paper)."""
    strength: float = 2.0
    """Initial strength of an expert: how many experts with the same weights it stands for."""
    base: Base = "gaussian"
    """Base measure: gaussian, or ball (uniform on unit balls, the paper)."""
    base_components: int = 256
    """Principal components of the Gaussian base measure; 0: independent capsules."""
    base_max_variance: float | None = None
    """Upper bound of the variances of the Gaussian base measure; None: those of the data."""
    iterations: int = 1
    """Iterations of routing by agreement; 1: all votes count equally."""
    sharpness: float = 1.0
    """Factor of the agreement in the routing."""
    normalize: F.Axis = "outputs"
    """Axis over which the routing coefficients sum to 1: the inputs, or the outputs (experts)."""
    agreement: F.Agreement = "cosine"
    """Measure of agreement: the cosine or the inner product of vote and expert."""

    def validate(self, prefix: str = "") -> None:
        """Raise ValueError or TypeError if an option is invalid; see `ModelOptions.validate`."""
        if self.experts is not None:
            if not isinstance(self.experts, tuple) or len(self.experts) != 2:
                raise ValueError(
                    f"{prefix}experts must be a number and a dimension, but is {self.experts!r}"
                )
            for number in self.experts:
                checks.require_int(f"every number of {prefix}experts", number, 1, MAX_SIZE)
            checks.require_int(f"{prefix}linear_dims", self.linear_dims, 0, self.experts[1])
        checks.require_int(f"{prefix}linear_dims", self.linear_dims, 0)
        checks.require_positive(f"{prefix}strength", self.strength)
        checks.require_choice(f"{prefix}base", self.base, BASES)
        checks.require_int(f"{prefix}base_components", self.base_components, 0, MAX_SIZE)
        if self.base_max_variance is not None:
            checks.require_positive(f"{prefix}base_max_variance", self.base_max_variance)
        checks.require_int(f"{prefix}iterations", self.iterations, 1, MAX_ITERATIONS)
        checks.require_nonnegative(f"{prefix}sharpness", self.sharpness)
        checks.require_choice(f"{prefix}normalize", self.normalize, get_args(F.Axis))
        checks.require_choice(f"{prefix}agreement", self.agreement, get_args(F.Agreement))


@dataclass(frozen=True)
class ModelOptions:
    """All options of a `CapsuleNetwork`, except the shape of its images."""

    features: int = 128
    """Number of filters of each convolution."""
    kernel_size: int = 9
    """Height and width of the filters; training on images below 17×17 makes 9 a third of a side."""
    margin: int | None = None
    """Pixels by which images are continued beyond their sides; None: training chooses, else 0."""
    even_overlap: bool | None = None
    """Whether the decoder evens out the overlap of filters; None: training chooses, else not."""
    halvings: int = 0
    """Further convolutions with stride 2 before the two, for images above about 40×40."""
    colour_whitening: bool = False
    """Whether the colours of the pixels are decorrelated before the convolutions."""
    bias: bool = True
    """Whether the convolutions have biases."""
    dropout: float = 0.2
    """Dropout probability of the features while the autoencoder is trained."""
    capsule_dim: int = 8
    """Number of features in one input capsule."""
    experts: tuple[tuple[int, int], ...] = ((20, 16),)
    """Number and dimension of the experts of each capsule layer, from the lowest to the highest."""
    iterations: int = 3
    """Iterations of routing by agreement."""
    sharpness: float = 5.0
    """Factor of the agreement in the routing."""
    normalize: F.Axis = "inputs"
    """Axis over which the routing coefficients sum to 1: the inputs, or the outputs (experts)."""
    agreement: F.Agreement = "cosine"
    """Measure of agreement: the cosine or the inner product of vote and expert."""
    winners: int | None = None
    """Number of experts that may fire for an image; None: all of them."""
    decoder_sharpness: float = 1.0
    """Factor of the agreement in the routing of the capsule decoder."""
    centre: bool = True
    """Whether the mean over the training images is subtracted from each input capsule."""
    scale: float | None = 0.4
    """Mean norm to which the input capsules are scaled before squashing; None: no scaling."""
    whiten: bool = False
    """Whether each input capsule is whitened by its covariance over the training images."""
    equalized_components: int = 0
    """Leading principal components of all capsules that get the variance of the last; 0: none."""
    pixel_decoder: bool = False
    """Whether images are decoded by separate filters, not by the transposed encoder filters."""
    joint_components: int = 1000
    """Maximum number of Gaussians in the density of whole codes, each for 25 images or more."""
    expert_components: int = 20
    """Maximum number of Gaussians in the density of the codes of one expert."""
    density: DensityOptions = field(default_factory=DensityOptions)
    """Density over the input capsules that can be sampled."""

    def validate(self, prefix: str = "") -> None:
        """Raise ValueError or TypeError if an option is invalid.

        Parameters
        ----------
        prefix
            Put before the name of the option in the message, such as ``"model."``.
        """
        for name in (
            "features",
            "kernel_size",
            "capsule_dim",
            "joint_components",
            "expert_components",
        ):
            checks.require_int(prefix + name, getattr(self, name), 1, MAX_SIZE)
        if self.margin is not None:
            checks.require_int(f"{prefix}margin", self.margin, 0, MAX_SIDE)
        checks.require_int(f"{prefix}halvings", self.halvings, 0, checks.MAX_HALVINGS)
        checks.require_int(f"{prefix}iterations", self.iterations, 1, MAX_ITERATIONS)
        layers = self.experts
        if (
            not isinstance(layers, tuple)
            or not 1 <= len(layers) <= MAX_LAYERS
            or not all(isinstance(layer, tuple) and len(layer) == 2 for layer in layers)
        ):
            raise ValueError(
                f"{prefix}experts must be one or more pairs of a number and a dimension, at most "
                f"{MAX_LAYERS}, but is {str(layers)[:200]}"
            )
        for number in (number for layer in layers for number in layer):
            checks.require_int(f"every number of {prefix}experts", number, 1, MAX_SIZE)
        if self.features % self.capsule_dim:
            raise ValueError(
                f"{prefix}features must be a multiple of capsule_dim, "
                f"but {self.features} is not a multiple of {self.capsule_dim}"
            )
        checks.require_nonnegative(f"{prefix}dropout", self.dropout)
        if self.dropout >= 1:
            raise ValueError(f"{prefix}dropout must be below 1, but is {self.dropout}")
        if self.scale is not None:
            checks.require_nonnegative(f"{prefix}scale", self.scale)
            if self.scale == 0:
                raise ValueError(f"{prefix}scale must be above 0, or None for no scaling")
        checks.require_nonnegative(f"{prefix}decoder_sharpness", self.decoder_sharpness)
        checks.require_nonnegative(f"{prefix}sharpness", self.sharpness)
        checks.require_int(f"{prefix}equalized_components", self.equalized_components, 0, MAX_SIZE)
        checks.require_choice(f"{prefix}normalize", self.normalize, get_args(F.Axis))
        checks.require_choice(f"{prefix}agreement", self.agreement, get_args(F.Agreement))
        if not isinstance(self.density, DensityOptions):
            raise TypeError(f"{prefix}density must be DensityOptions, but is {self.density!r}")
        self.density.validate(f"{prefix}density.")
        if self.winners is not None:
            fewest = min(count for count, _ in layers)
            checks.require_int(f"{prefix}winners", self.winners, 1, fewest)


@dataclass(frozen=True)
class Architecture(ModelOptions):
    """All options of a `CapsuleNetwork`; everything that training changes is in its weights."""

    image_shape: tuple[int, int, int] = (1, 28, 28)
    """C, H and W of the images."""

    @classmethod
    def of(cls, options: ModelOptions, image_shape: tuple[int, int, int]) -> Architecture:
        """Return the architecture of a model with these options, for images of this shape."""
        values = {each.name: getattr(options, each.name) for each in fields(ModelOptions)}
        return cls(**values, image_shape=image_shape)

    def validate(self, prefix: str = "") -> None:
        """Raise ValueError or TypeError if an option is invalid; see `ModelOptions.validate`."""
        super().validate(prefix)
        if not isinstance(self.image_shape, tuple) or len(self.image_shape) != 3:
            raise ValueError(f"{prefix}image_shape must be (C, H, W), but is {self.image_shape!r}")
        for number in self.image_shape:
            checks.require_int(f"every number of {prefix}image_shape", number, 1, MAX_SIDE)
        pixels = self._numbers()[0]
        if pixels > MAX_PIXELS:
            raise ValueError(
                f"{prefix}image_shape must have at most {MAX_PIXELS:,} numbers with the margin, "
                f"but has {pixels:,}; scale the images down"
            )
        if self.largest_array() > MAX_NUMBERS:
            raise ValueError(
                f"the features of one image must have at most {MAX_NUMBERS:,} numbers, but have "
                f"{self.largest_array():,}; scale the images down, or use more {prefix}halvings or "
                f"fewer {prefix}features"
            )

    def largest_array(self) -> int:
        """Return how many numbers the largest array has that is computed for one image."""
        return max(self._numbers())

    def _numbers(self) -> list[int]:
        """Return how many numbers the image with its margin has, and what each convolution does."""
        channels, *sides = self.image_shape
        padded = [side + 2 * (self.margin or 0) for side in sides]
        numbers = [channels * math.prod(padded)]
        for halving in range(1, self.halvings + 1):
            halved = (max(1, side >> halving) for side in padded)
            numbers.append(max(1, self.features // 2) * math.prod(halved))
        inner = (max(1, (side >> self.halvings) - self.kernel_size + 1) for side in padded)
        return [*numbers, self.features * math.prod(inner)]
