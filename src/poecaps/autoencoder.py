"""Stage 1: the convolutional autoencoder whose features are the input capsules."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from poecaps import _checks as checks
from poecaps.kernels import convolution
from poecaps.kernels.torch_convolution import ConvParameters

if TYPE_CHECKING:
    from torch import Tensor

# Factor of the pixel bias. Adam changes every parameter by about the learning rate in a step. The
# logit of a pixel is a sum over many filters, but has only one pixel bias.
PIXEL_BIAS_SCALE = 10.0


class ConvAutoencoder(nn.Module):
    """Two convolutions, and a decoder with the same filters transposed.

    Encoder: a convolution with `kernel_size`×`kernel_size` filters and stride 1, leaky ReLU, a
    second one with stride 2, leaky ReLU; dropout. Decoder: the same filters transposed, leaky ReLU
    after the first of them, sigmoid after the second. With the paper's sizes, 28×28 → 20×20 →
    6×6×128.

    Parameters
    ----------
    channels
        C of the images, 1 (grey) or 3 (RGB).
    features
        F, the filters of each convolution.
    kernel_size
        Side of the filters.
    dropout
        Probability of a feature to be dropped in training mode.
    bias
        Whether the convolutions have biases; encoder and decoder have separate ones.
    negative_slope
        Of the leaky ReLU.
    generator
        Source of the initial filters.
    device, dtype
        As for any `torch.nn` layer.
    """

    conv1_bias: nn.Parameter | None
    conv2_bias: nn.Parameter | None
    deconv2_bias: nn.Parameter | None
    deconv1_bias: nn.Parameter | None

    def __init__(
        self,
        channels: int = 1,
        *,
        features: int = 128,
        kernel_size: int = 9,
        dropout: float = 0.2,
        bias: bool = True,
        negative_slope: float = 0.2,
        generator: torch.Generator | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        for name, value in {
            "channels": channels,
            "features": features,
            "kernel_size": kernel_size,
        }.items():
            checks.require_int(name, value, 1)
        for name, number in {"dropout": dropout, "negative_slope": negative_slope}.items():
            checks.require_nonnegative(name, number)
            if number >= 1:
                raise ValueError(f"{name} must be below 1, but is {number}")
        self.channels, self.features, self.kernel_size = channels, features, kernel_size
        self.dropout, self.negative_slope = dropout, negative_slope

        def empty(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(*shape, device=device, dtype=dtype))

        self.conv1_weight = empty(features, channels, kernel_size, kernel_size)
        self.conv2_weight = empty(features, features, kernel_size, kernel_size)
        self.register_parameter("conv1_bias", empty(features) if bias else None)
        self.register_parameter("conv2_bias", empty(features) if bias else None)
        self.register_parameter("deconv2_bias", empty(features) if bias else None)
        self.register_parameter("deconv1_bias", empty(channels) if bias else None)
        self.reset_parameters(generator)

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draw filters that preserve the variance of their input (He et al.); zero the biases."""
        gain = nn.init.calculate_gain("leaky_relu", self.negative_slope)
        for weight in (self.conv1_weight, self.conv2_weight):
            nn.init.normal_(weight, std=gain / weight[0].numel() ** 0.5, generator=generator)
        for bias in (self.conv1_bias, self.conv2_bias, self.deconv2_bias, self.deconv1_bias):
            if bias is not None:
                nn.init.zeros_(bias)

    def grid(self, size: tuple[int, int]) -> tuple[int, int]:
        """Return height and width of the features of an image of this height and width.

        Raises
        ------
        ValueError
            If the image is too small for the filters.
        """
        return feature_grid(self.kernel_size, size)

    def encode(self, images: Tensor) -> Tensor:
        """Compute features.

        Parameters
        ----------
        images : (B, C, H, W)
            From 0 to 1.

        Returns
        -------
        (B, F, h, w)
            With (h, w) = `grid((H, W))`.
        """
        self._check(images)
        return convolution.encode(
            images, self._conv_parameters(), negative_slope=self.negative_slope
        )

    def decode(self, features: Tensor, size: tuple[int, int]) -> Tensor:
        """Compute images of this height and width from features.

        Parameters
        ----------
        features : (B, F, h, w)
            With (h, w) = `grid(size)`.
        size
            (H, W).

        Returns
        -------
        (B, C, H, W)
            From 0 to 1.
        """
        return torch.sigmoid(self.logits(features, size))

    def logits(self, features: Tensor, size: tuple[int, int]) -> Tensor:
        """Compute the images of `decode` before their sigmoid."""
        return _decoder_logits(features, self._conv_parameters(), size, self.negative_slope)

    def forward(self, images: Tensor) -> Tensor:
        """Reconstruct images, with dropout in training mode: (B, C, H, W) → (B, C, H, W)."""
        return torch.sigmoid(self._reconstruction_logits(images))

    def loss(self, images: Tensor, *, uniform: Tensor | None = None) -> Tensor:
        """Compute the mean cross-entropy of reconstructed pixels, with dropout in training mode.

        Parameters
        ----------
        images : (B, C, H, W)
            From 0 to 1.
        uniform : (B, F, h, w), optional
            Uniform numbers from 0 to 1, with (h, w) = `grid((H, W))`: in training mode, features
            whose number is below `dropout` are dropped. None: drawn from torch's default generator.

        Returns
        -------
        ()
            float32.
        """
        logits = self._reconstruction_logits(images, uniform).float()
        return nn.functional.binary_cross_entropy_with_logits(logits, images.float())

    def _check(self, images: Tensor) -> tuple[int, int]:
        """Return the grid of the features; raise an error if `images` are not valid images."""
        checks.require_floating("images", images, pixels=True)
        sizes = (None, self.channels, None, None)
        checks.require_shape("images", images, "BCHW", sizes, "C must be that of the model")
        return self.grid((images.shape[2], images.shape[3]))

    def _conv_parameters(self) -> ConvParameters:
        return ConvParameters(
            self.conv1_weight,
            self.conv2_weight,
            self.conv1_bias,
            self.conv2_bias,
            self.deconv2_bias,
            self.deconv1_bias,
        )

    def _reconstruction_logits(self, images: Tensor, uniform: Tensor | None = None) -> Tensor:
        height, width = self._check(images)
        if uniform is not None:
            sizes = (len(images), self.features, height, width)
            remedy = "give one number for each feature"
            checks.require_shape("uniform", uniform, "BFhw", sizes, remedy)
        return convolution.reconstruct(
            images,
            self._conv_parameters(),
            dropout=self.dropout if self.training else 0.0,
            uniform=uniform if self.training else None,
            negative_slope=self.negative_slope,
        )


class PixelDecoder(nn.Module):
    """A copy of an autoencoder's decoder, which can be trained while the encoder stays frozen.

    It has one more parameter, a bias for each pixel. A stride of 2 may leave a row and a column at
    the border that no feature reaches, and the bias that all pixels share cannot make them dark.

    Parameters
    ----------
    autoencoder
        The autoencoder whose decoder is copied.
    size
        (H, W) of the images.
    """

    deconv2_bias: nn.Parameter | None
    deconv1_bias: nn.Parameter | None

    def __init__(self, autoencoder: ConvAutoencoder, size: tuple[int, int]) -> None:
        super().__init__()
        self.negative_slope, self.size = autoencoder.negative_slope, size

        def empty_like(parameter: nn.Parameter | None) -> nn.Parameter | None:
            return None if parameter is None else nn.Parameter(torch.empty_like(parameter))

        like = autoencoder.conv1_weight
        self.pixel_bias = nn.Parameter(like.new_empty(autoencoder.channels, *size))
        self.conv1_weight = nn.Parameter(torch.empty_like(like))
        self.conv2_weight = nn.Parameter(torch.empty_like(autoencoder.conv2_weight))
        self.register_parameter("deconv2_bias", empty_like(autoencoder.deconv2_bias))
        self.register_parameter("deconv1_bias", empty_like(autoencoder.deconv1_bias))
        self.copy_from(autoencoder)

    @torch.no_grad()
    def copy_from(self, autoencoder: ConvAutoencoder) -> None:
        """Copy filters and biases of an autoencoder's decoder, and zero the pixel bias."""
        self.pixel_bias.zero_()
        self.conv1_weight.copy_(autoencoder.conv1_weight)
        self.conv2_weight.copy_(autoencoder.conv2_weight)
        if self.deconv2_bias is not None and autoencoder.deconv2_bias is not None:
            self.deconv2_bias.copy_(autoencoder.deconv2_bias)
        if self.deconv1_bias is not None and autoencoder.deconv1_bias is not None:
            self.deconv1_bias.copy_(autoencoder.deconv1_bias)

    def logits(self, features: Tensor) -> Tensor:
        """Compute images before their sigmoid: (B, F, h, w) → (B, C, H, W)."""
        parameters = ConvParameters(
            conv1_weight=self.conv1_weight,
            conv2_weight=self.conv2_weight,
            conv1_bias=None,
            conv2_bias=None,
            deconv2_bias=self.deconv2_bias,
            deconv1_bias=self.deconv1_bias,
        )
        logits = _decoder_logits(features, parameters, self.size, self.negative_slope)
        return logits + PIXEL_BIAS_SCALE * self.pixel_bias


def minimum_image_size(kernel_size: int) -> int:
    """Return the side of the smallest images for two convolutions with filters of this side."""
    return 2 * kernel_size - 1


def feature_grid(kernel_size: int, size: tuple[int, int]) -> tuple[int, int]:
    """Return height and width of the features of an image; see `ConvAutoencoder.grid`."""
    height, width = ((side - kernel_size + 1 - kernel_size) // 2 + 1 for side in size)
    if height < 1 or width < 1:
        least = minimum_image_size(kernel_size)
        raise ValueError(
            f"images must be at least {least}×{least} for filters of {kernel_size}×{kernel_size}, "
            f"but are {size[0]}×{size[1]}; enlarge them, or use a smaller kernel_size"
        )
    return height, width


def _decoder_logits(
    features: Tensor, parameters: ConvParameters, size: tuple[int, int], negative_slope: float
) -> Tensor:
    """Compute logits (B, C, H, W) from features (B, F, h, w)."""
    checks.require_floating("features", features)
    height, width = feature_grid(parameters.conv1_weight.shape[-1], size)
    sizes = (None, len(parameters.conv2_weight), height, width)
    remedy = "encode an image of the size that you decode"
    checks.require_shape("features", features, "BFhw", sizes, remedy)
    return convolution.decode(features, parameters, size, negative_slope=negative_slope)
