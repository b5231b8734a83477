"""Stage 1: the convolutional autoencoder whose features are the input capsules."""

from __future__ import annotations

import copy
import itertools
from typing import TYPE_CHECKING

import torch
from torch import nn

from poecaps import _checks as checks
from poecaps.functional import laplacian_distance
from poecaps.kernels import convolution
from poecaps.kernels.torch_convolution import ConvParameters

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

# Factor of the pixel bias. Adam changes every parameter by about the learning rate in a step. The
# logit of a pixel is a sum over many filters, but has only one pixel bias.
PIXEL_BIAS_SCALE = 10.0
BLACK = 0.5 / 255  # lightest value of a pixel that is shown as black


class Stem(nn.Module):
    """What comes before the two convolutions of an autoencoder, and after its decoder.

    By default nothing. With a `margin`, images are continued beyond their sides; with
    `colour_whitening`, the channels of a pixel are decorrelated; each of `halvings` convolutions
    with 4×4 filters and stride 2, followed by a leaky ReLU, halves height and width. The decoder
    inverts this, from the last to the first: the same filters transposed, the colours of the
    training images, and the margin cropped.

    Parameters
    ----------
    channels
        C of the images.
    features
        Filters of each convolution.
    margin, halvings, colour_whitening, bias, negative_slope
        See `ConvAutoencoder`.
    device, dtype
        As for any `torch.nn` layer.
    """

    colour_mean: Tensor
    colour_basis: Tensor

    def __init__(
        self,
        channels: int,
        features: int,
        *,
        margin: int = 0,
        halvings: int = 0,
        colour_whitening: bool = False,
        bias: bool = True,
        negative_slope: float = 0.2,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.margin, self.negative_slope = margin, negative_slope
        self.colour_whitening, self.scale = colour_whitening, 1 << halvings

        def empty(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(*shape, device=device, dtype=dtype))

        counts = [channels, *[features] * halvings]
        pairs = list(itertools.pairwise(counts))
        self.channels = counts[-1]  # of what the first of the two convolutions reads
        self.weights = nn.ParameterList(empty(above, below, 4, 4) for below, above in pairs)
        self.up_biases = nn.ParameterList(empty(above) for _, above in pairs if bias)
        self.down_biases = nn.ParameterList(empty(below) for below, _ in pairs if bias)
        if colour_whitening:
            zeros, eye = torch.zeros(channels), torch.eye(channels)
            self.register_buffer("colour_mean", zeros.to(device=device, dtype=dtype))
            self.register_buffer("colour_basis", eye.to(device=device, dtype=dtype))

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draw filters that preserve the variance of their input (He et al.); zero the biases."""
        gain = nn.init.calculate_gain("leaky_relu", self.negative_slope)
        for weight in self.weights:
            nn.init.normal_(weight, std=gain / weight[0].numel() ** 0.5, generator=generator)
        for bias in (*self.up_biases, *self.down_biases):
            nn.init.zeros_(bias)

    @torch.no_grad()
    def fit_colours(self, batches: Iterable[Tensor]) -> None:
        """Set the mean and the principal directions of the colours of images (B, C, H, W).

        The columns of `colour_basis` are the directions, each times the standard deviation along
        it, but at least a hundredth of the largest.
        """
        count, first, second = 0, torch.zeros(()), torch.zeros(())
        for batch in batches:
            pixels = batch.movedim(1, -1).flatten(0, -2).cpu().double()
            count, first = count + len(pixels), first + pixels.sum(0)
            second = second + pixels.T @ pixels
        mean = first / count
        variances, directions = torch.linalg.eigh(second / count - torch.outer(mean, mean))
        deviations = variances.clamp(min=1e-12).sqrt()
        basis = directions * deviations.clamp(min=0.01 * deviations.max().item())
        self.colour_mean.copy_(mean)
        self.colour_basis.copy_(basis)

    def size(self, size: tuple[int, int]) -> tuple[int, int]:
        """Return height and width of what the convolutions read of an image of this size.

        Raises
        ------
        ValueError
            If the sides with their margin cannot be halved.
        """
        padded = [side + 2 * self.margin for side in size]
        if any(side % self.scale for side in padded):
            raise ValueError(
                f"images with their margin must have sides that are multiples of {self.scale}, "
                f"but have {padded[0]}×{padded[1]}; scale them, or use fewer halvings"
            )
        return padded[0] // self.scale, padded[1] // self.scale

    def encode(self, images: Tensor) -> Tensor:
        """Compute what the first of the two convolutions reads: (B, C, H, W) → (B, C', H', W')."""
        x = images
        if self.margin:
            x = nn.functional.pad(x, (self.margin,) * 4, mode="replicate")
        if self.colour_whitening:
            # The inverse of a matrix with orthogonal columns; torch.linalg.inv cannot be part of a
            # CUDA graph.
            whitening = (self.colour_basis / self.colour_basis.square().sum(0)).T
            x = _mix_channels(x - self.colour_mean.view(-1, 1, 1), whitening)
        for weight, bias in itertools.zip_longest(self.weights, self.up_biases):
            x = nn.functional.conv2d(x, weight, bias, stride=2, padding=1)
            x = nn.functional.leaky_relu(x, self.negative_slope)
        return x

    def decode(self, x: Tensor) -> Tensor:
        """Compute images before their sigmoid: (B, C', H', W') → (B, C, H, W)."""
        layers = list(itertools.zip_longest(self.weights, self.down_biases))
        for weight, bias in reversed(layers):
            x = nn.functional.leaky_relu(x, self.negative_slope)
            x = nn.functional.conv_transpose2d(x, weight, bias, stride=2, padding=1)
        if self.colour_whitening:
            # The slope of the logit at 1/2 is 4: a step along a direction changes the logits by
            # what it changes the pixels.
            x = _mix_channels(x, 4 * self.colour_basis)
            x = x + torch.logit(self.colour_mean, eps=1e-3).view(-1, 1, 1)
        margin = self.margin
        return x[..., margin:-margin, margin:-margin] if margin else x


def _mix_channels(x: Tensor, matrix: Tensor) -> Tensor:
    """Multiply the channels of every pixel by a matrix: (B, C, H, W), (C, C) → (B, C, H, W)."""
    return torch.einsum("bchw,dc->bdhw", x, matrix.to(x.dtype))


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
    margin
        Pixels by which an image is continued beyond each of its sides, by repeating those at the
        border, before it is encoded; decoded images are cropped by as many. Without a margin, few
        filters overlap at the border of a decoded image, which shows as a frame.
    even_overlap
        Whether the decoder divides the sum of filters at each pixel by the share of them that
        overlap there, see `overlap_shares`, so that no frame is left. It is made for a margin of at
        least half of `kernel_size`: without one, the share of a corner is below 1/1000.
    halvings
        Number of additional convolutions before the two, each with features/2 filters of 4×4 and
        stride 2, for larger images.
    colour_whitening
        Whether the channels of a pixel are decorrelated and scaled to the same variance before they
        are encoded, and back after they are decoded; see `Stem.fit_colours`.
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
        margin: int = 0,
        even_overlap: bool = False,
        halvings: int = 0,
        colour_whitening: bool = False,
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
        checks.require_int("margin", margin, 0)
        checks.require_int("halvings", halvings, 0, checks.MAX_HALVINGS)
        for name, number in {"dropout": dropout, "negative_slope": negative_slope}.items():
            checks.require_nonnegative(name, number)
            if number >= 1:
                raise ValueError(f"{name} must be below 1, but is {number}")
        self.channels, self.features, self.kernel_size = channels, features, kernel_size
        self.dropout, self.negative_slope = dropout, negative_slope
        self.even_overlap = even_overlap
        self.stem = Stem(
            channels,
            max(1, features // 2),
            margin=margin,
            halvings=halvings,
            colour_whitening=colour_whitening,
            bias=bias,
            negative_slope=negative_slope,
            device=device,
            dtype=dtype,
        )

        def empty(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(*shape, device=device, dtype=dtype))

        self.conv1_weight = empty(features, self.stem.channels, kernel_size, kernel_size)
        self.conv2_weight = empty(features, features, kernel_size, kernel_size)
        self.register_parameter("conv1_bias", empty(features) if bias else None)
        self.register_parameter("conv2_bias", empty(features) if bias else None)
        self.register_parameter("deconv2_bias", empty(features) if bias else None)
        self.register_parameter("deconv1_bias", empty(self.stem.channels) if bias else None)
        self.reset_parameters(generator)

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draw filters that preserve the variance of their input (He et al.); zero the biases."""
        gain = nn.init.calculate_gain("leaky_relu", self.negative_slope)
        for weight in (self.conv1_weight, self.conv2_weight):
            nn.init.normal_(weight, std=gain / weight[0].numel() ** 0.5, generator=generator)
        for bias in (self.conv1_bias, self.conv2_bias, self.deconv2_bias, self.deconv1_bias):
            if bias is not None:
                nn.init.zeros_(bias)
        self.stem.reset_parameters(generator)

    def grid(self, size: tuple[int, int]) -> tuple[int, int]:
        """Return height and width of the features of an image of this height and width.

        Raises
        ------
        ValueError
            If the image is too small for the filters, or its sides cannot be halved.
        """
        return feature_grid(self.kernel_size, self.stem.size(size), size)

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
            self.stem.encode(images),
            self._conv_parameters(),
            negative_slope=self.negative_slope,
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
        return _decoder_logits(
            features,
            self._conv_parameters(),
            self.stem,
            size,
            self.negative_slope,
            even_overlap=self.even_overlap,
        )

    def forward(self, images: Tensor) -> Tensor:
        """Reconstruct images, with dropout in training mode: (B, C, H, W) → (B, C, H, W)."""
        return torch.sigmoid(self._reconstruction_logits(images))

    def loss(
        self, images: Tensor, *, uniform: Tensor | None = None, multi_scale: float = 0.0
    ) -> Tensor:
        """Compute the mean cross-entropy of reconstructed pixels, with dropout in training mode.

        Parameters
        ----------
        images : (B, C, H, W)
            From 0 to 1.
        uniform : (B, F, h, w), optional
            Uniform numbers from 0 to 1, with (h, w) = `grid((H, W))`: in training mode, features
            whose number is below `dropout` are dropped. None: drawn from torch's default generator.
        multi_scale
            Weight of `poecaps.functional.laplacian_distance` to the images beside it.

        Returns
        -------
        ()
            float32.
        """
        logits = self._reconstruction_logits(images, uniform).float()
        loss = nn.functional.binary_cross_entropy_with_logits(logits, images.float())
        if multi_scale:
            distance = laplacian_distance(torch.sigmoid(logits), images.float())
            loss = loss + multi_scale * distance
        return loss

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
        parameters = self._conv_parameters()
        logits = convolution.reconstruct(
            self.stem.encode(images),
            parameters,
            dropout=self.dropout if self.training else 0.0,
            uniform=uniform if self.training else None,
            negative_slope=self.negative_slope,
        )
        if self.even_overlap:
            logits = _even_out(logits, parameters)
        return self.stem.decode(logits)


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
        self.even_overlap = autoencoder.even_overlap
        self.stem = copy.deepcopy(autoencoder.stem)

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
        self.stem.load_state_dict(autoencoder.stem.state_dict())
        self.conv1_weight.copy_(autoencoder.conv1_weight)
        self.conv2_weight.copy_(autoencoder.conv2_weight)
        if self.deconv2_bias is not None and autoencoder.deconv2_bias is not None:
            self.deconv2_bias.copy_(autoencoder.deconv2_bias)
        if self.deconv1_bias is not None and autoencoder.deconv1_bias is not None:
            self.deconv1_bias.copy_(autoencoder.deconv1_bias)

    @torch.no_grad()
    def start_border(self, mean: Tensor) -> None:
        """Give pixels that no feature reaches the values of a mean image (C, H, W), by their bias.

        From 0 they would need many steps, and show as a frame until then.
        """
        height, width = feature_grid(self.conv1_weight.shape[-1], self.stem.size(self.size))
        random = torch.Generator().manual_seed(0)
        features = torch.rand(8, len(self.conv2_weight), height, width, generator=random)
        logits = self.logits(features.to(mean))
        unreached = (logits == logits[0]).all(0)
        bias = self.pixel_bias + (torch.logit(mean, eps=BLACK) - logits[0]) / PIXEL_BIAS_SCALE
        self.pixel_bias.copy_(torch.where(unreached, bias, self.pixel_bias))

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
        logits = _decoder_logits(
            features,
            parameters,
            self.stem,
            self.size,
            self.negative_slope,
            even_overlap=self.even_overlap,
        )
        return logits + PIXEL_BIAS_SCALE * self.pixel_bias


def minimum_image_size(kernel_size: int, margin: int = 0, halvings: int = 0) -> int:
    """Return the side of the smallest images for two convolutions with filters of this side."""
    return max(1, (2 * kernel_size - 1) * int(2**halvings) - 2 * margin)


def feature_grid(
    kernel_size: int, size: tuple[int, int], image_size: tuple[int, int] | None = None
) -> tuple[int, int]:
    """Return height and width of the features of an image; see `ConvAutoencoder.grid`.

    Parameters
    ----------
    kernel_size
        Side of the filters.
    size
        Height and width of what the two convolutions read.
    image_size
        Height and width of the image, for the message of an error, if they differ.
    """
    height, width = ((side - kernel_size + 1 - kernel_size) // 2 + 1 for side in size)
    if height < 1 or width < 1:
        least, given = 2 * kernel_size - 1, image_size or size
        if given != size:
            least = least * given[0] // size[0]
        raise ValueError(
            f"images must be at least {least}×{least} for filters of {kernel_size}×{kernel_size}, "
            f"but are {given[0]}×{given[1]}; enlarge them, or use a smaller kernel_size"
        )
    return height, width


def _decoder_logits(
    features: Tensor,
    parameters: ConvParameters,
    stem: Stem,
    size: tuple[int, int],
    negative_slope: float,
    *,
    even_overlap: bool,
) -> Tensor:
    """Compute logits (B, C, H, W) from features (B, F, h, w)."""
    checks.require_floating("features", features)
    inner = stem.size(size)
    height, width = feature_grid(parameters.conv1_weight.shape[-1], inner, size)
    sizes = (None, len(parameters.conv2_weight), height, width)
    remedy = "encode an image of the size that you decode"
    checks.require_shape("features", features, "BFhw", sizes, remedy)
    logits = convolution.decode(features, parameters, inner, negative_slope=negative_slope)
    if even_overlap:
        logits = _even_out(logits, parameters)
    return stem.decode(logits)


def overlap_shares(kernel_size: int, side: int, device: torch.device | str | None = None) -> Tensor:
    """Compute the share of the filters that overlap at each pixel of a row of the decoder's output.

    A pixel p is the sum of all pairs of taps k of the first filters and l of the second, both from
    0 to K - 1, for which k + l = p - 2j at a position j of the features. Far from the border, there
    are K²/2 of them.

    Parameters
    ----------
    kernel_size
        K.
    side
        Height or width of what the two convolutions read, with the margin.
    device
        Of the result.

    Returns
    -------
    (side,)
        Above 0, and 1 far from the border.
    """
    # On the device, because a CUDA graph cannot record a copy from the memory of the host.
    positions = torch.arange((side - 2 * kernel_size + 1) // 2 + 1, device=device)
    taps = torch.arange(side, device=device).unsqueeze(1) - 2 * positions  # k + l
    pairs = (kernel_size - (taps - (kernel_size - 1)).abs()).clamp(min=0).sum(1)
    full = max(1, kernel_size**2 // 2)  # with an odd K, every second pixel has one pair more
    return pairs.clamp(1, full) / full  # the sum of a pixel without pairs is 0, whatever its share


def _even_out(logits: Tensor, parameters: ConvParameters) -> Tensor:
    """Divide the sums of filters by their `overlap_shares`: (B, C, H, W) → (B, C, H, W)."""
    kernel_size, bias = parameters.conv1_weight.shape[-1], parameters.deconv1_bias
    rows, columns = (overlap_shares(kernel_size, side, logits.device) for side in logits.shape[2:])
    shares = torch.outer(rows, columns).to(logits.dtype)
    if bias is None:
        return logits / shares
    bias = bias.view(-1, 1, 1)
    return (logits - bias) / shares + bias
