"""Stage 1: the convolutional autoencoder whose filters turn images into capsules."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from poecaps import _checks as checks
from poecaps.kernels import filters as fast

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


PIXEL_BIAS_SCALE = 10.0  # what the canvas is multiplied by: Adam moves it as fast as filters, of which many add up in a pixel


class ConvAutoencoder(nn.Module):
    """Two convolutions up, and the same filters transposed down.

    Up: `kernel`×`kernel` filters with stride 1, leaky ReLU, then with stride 2, leaky ReLU; dropout. Down: the same
    filters transposed, leaky ReLU, then a sigmoid. With the paper's sizes 28×28 → 20×20 → 6×6×128.

    Parameters
    ----------
    channels
        C of the images, 1 (grey) or 3 (RGB).
    features
        Filters of each convolution.
    kernel
        Side of the filters.
    dropout
        Share of hidden features that training hides from the decoder.
    bias
        Whether the convolutions have biases, one set going up and one going down.
    slope
        Of the leaky ReLU, for negative values.
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
        kernel: int = 9,
        dropout: float = 0.2,
        bias: bool = True,
        slope: float = 0.2,
        generator: torch.Generator | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        for name, value in {"channels": channels, "features": features, "kernel": kernel}.items():
            checks.require_int(name, value, 1)
        for name, number in {"dropout": dropout, "slope": slope}.items():
            checks.require_nonnegative(name, number)
            if number >= 1:
                raise ValueError(f"{name} must be below 1, but is {number}")
        self.channels, self.features, self.kernel = channels, features, kernel
        self.dropout, self.slope = dropout, slope

        def empty(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(*shape, device=device, dtype=dtype))

        self.conv1_weight = empty(features, channels, kernel, kernel)
        self.conv2_weight = empty(features, features, kernel, kernel)
        for name, size in {"conv1_bias": features, "conv2_bias": features, "deconv2_bias": features, "deconv1_bias": channels}.items():
            self.register_parameter(name, empty(size) if bias else None)
        self.reset_parameters(generator)

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draw filters that keep the variance of what they see (He et al.), and zero the biases."""
        gain = nn.init.calculate_gain("leaky_relu", self.slope)
        for filters in (self.conv1_weight, self.conv2_weight):
            nn.init.normal_(filters, std=gain / filters[0].numel() ** 0.5, generator=generator)
        for bias in (self.conv1_bias, self.conv2_bias, self.deconv2_bias, self.deconv1_bias):
            if bias is not None:
                nn.init.zeros_(bias)

    def grid(self, size: tuple[int, int]) -> tuple[int, int]:
        """Height and width of the features of an image of this height and width.

        Raises
        ------
        ValueError
            If the image is too small to have any.
        """
        return _grid(self.kernel, size)

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
        if not torch.is_grad_enabled() and fast.fits(images, self.conv1_weight, self.conv2_weight, images.shape[2:]):
            return fast.encode(images, self._filters(), self.slope)
        hidden = nn.functional.leaky_relu(_from_few(images, self.conv1_weight, self.conv1_bias), self.slope, inplace=True)
        return _leak(nn.functional.conv2d(hidden, self.conv2_weight, stride=2), self.conv2_bias, self.slope)

    def decode(self, features: Tensor, size: tuple[int, int]) -> Tensor:
        """Draw images of this height and width from features.

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
        return _way_down(self, features, size)

    def forward(self, images: Tensor) -> Tensor:
        """Reconstruct images, with dropout in training mode: (B, C, H, W) → (B, C, H, W)."""
        return torch.sigmoid(self._reconstruction_logits(images))

    def loss(self, images: Tensor, *, draw: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """Compute the mean cross-entropy between pixels and their reconstruction, with dropout in training mode.

        Parameters
        ----------
        images : (B, C, H, W)
        draw
            Source of the dropout in place of torch's own: returns uniform numbers from 0 to 1 in the shape of its
            argument, the features.
        """
        logits = self._reconstruction_logits(images, draw).float()
        return nn.functional.binary_cross_entropy_with_logits(logits, images.float())

    def _check(self, images: Tensor) -> tuple[int, int]:
        """Refuse what is no batch of images of the model, and return the grid of their features."""
        checks.require_floating("images", images, pixels=True)
        checks.require_shape("images", images, "BCHW", (None, self.channels, None, None), "C must be that of the model")
        return self.grid((images.shape[2], images.shape[3]))

    def _filters(self) -> fast.Filters:
        return fast.Filters(self.conv1_weight, self.conv2_weight, self.conv1_bias, self.conv2_bias, self.deconv2_bias, self.deconv1_bias)

    def _reconstruction_logits(self, images: Tensor, draw: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        grid = self._check(images)
        if not images.requires_grad and fast.fits(images, self.conv1_weight, self.conv2_weight, images.shape[2:]):
            drawn = None
            if self.training and self.dropout > 0:
                like = images.new_empty(len(images), self.features, *grid, dtype=torch.float32)
                drawn = (draw or torch.rand_like)(like)
            return fast.reconstruct(images, self._filters(), drawn, self.dropout, self.slope)
        features = self.encode(images)
        if draw is None:
            features = nn.functional.dropout(features, self.dropout, self.training)
        elif self.training:
            features = features * (draw(features) >= self.dropout) / (1 - self.dropout)
        return self.logits(features, (images.shape[2], images.shape[3]))


class PixelDecoder(nn.Module):
    """The way down of an autoencoder with filters of its own, so that they can be tuned while the way up stays.

    It has a canvas as well, a bias for each pixel: a stride of 2 may leave a row and a column at the rim that no
    feature reaches, and the bias that all pixels share cannot make them dark.

    Parameters
    ----------
    like
        The autoencoder whose sizes and filters it starts with.
    size
        (H, W) of the images.
    """

    conv1_weight: nn.Parameter
    conv2_weight: nn.Parameter
    deconv2_bias: nn.Parameter | None
    deconv1_bias: nn.Parameter | None

    def __init__(self, like: ConvAutoencoder, size: tuple[int, int]) -> None:
        super().__init__()
        self.slope, self.size = like.slope, size
        self.pixel_bias = nn.Parameter(like.conv1_weight.new_zeros(like.channels, *size))
        for name in ("conv1_weight", "conv2_weight", "deconv2_bias", "deconv1_bias"):
            own = getattr(like, name)
            self.register_parameter(name, None if own is None else nn.Parameter(own.detach().clone()))

    @torch.no_grad()
    def follow(self, autoencoder: ConvAutoencoder) -> None:
        """Take over the filters and biases of an autoencoder's way down, and begin with an empty canvas."""
        for name, parameter in self.named_parameters():
            parameter.copy_(torch.zeros_like(parameter) if name == "pixel_bias" else getattr(autoencoder, name))

    def logits(self, features: Tensor) -> Tensor:
        """Compute images before their sigmoid: (B, F, h, w) → (B, C, H, W)."""
        return _way_down(self, features, self.size) + PIXEL_BIAS_SCALE * self.pixel_bias


def least_side(kernel: int) -> int:
    """Side of the smallest images that filters of this side can see, one after the other."""
    return 2 * kernel - 1


def _grid(kernel: int, size: tuple[int, int]) -> tuple[int, int]:
    height, width = ((side - kernel + 1 - kernel) // 2 + 1 for side in size)
    if height < 1 or width < 1:
        least = least_side(kernel)
        raise ValueError(
            f"images must be at least {least}×{least} for filters of {kernel}×{kernel}, "
            f"but are {size[0]}×{size[1]}; enlarge them, or use a smaller kernel"
        )
    return height, width


def _way_down(of: ConvAutoencoder | PixelDecoder, features: Tensor, size: tuple[int, int]) -> Tensor:
    """Draw logits (B, C, H, W) from features (B, F, h, w) with the filters transposed."""
    checks.require_floating("features", features)
    kernel = of.conv1_weight.shape[-1]
    sizes = (None, len(of.conv2_weight), *_grid(kernel, size))
    checks.require_shape("features", features, "BFhw", sizes, "encode an image of the size that you decode")
    if fast.fits(features, of.conv1_weight, of.conv2_weight, size):
        filters = fast.Filters(of.conv1_weight, of.conv2_weight, None, None, of.deconv2_bias, of.deconv1_bias)
        return fast.decode(features, filters, size, of.slope)
    # A stride of 2 forgets whether the side before it was odd or even; the image's size tells.
    padding = [(side - 2 * kernel + 1) % 2 for side in size]
    hidden = nn.functional.conv_transpose2d(features, of.conv2_weight, stride=2, output_padding=padding)
    images = _to_few(_leak(hidden, of.deconv2_bias, of.slope), of.conv1_weight)
    return images if of.deconv1_bias is None else images + of.deconv1_bias.view(-1, 1, 1)


def _leak(x: Tensor, bias: Tensor | None, slope: float) -> Tensor:
    """Add a bias and apply the leaky ReLU, in place; nobody else holds what a convolution returns: (B, F, h, w)."""
    if bias is not None:
        # As many biases as images: the gradient is summed for each image first, which a GPU does five times as fast.
        x = x.add_(bias.to(x.dtype).view(-1, 1, 1).expand(len(x), -1, 1, 1))
    return nn.functional.leaky_relu(x, slope, inplace=True)


# ---------------------------------------------------------------------------------------------------------
# Convolutions of few channels, as products: several times as fast as those of the libraries, on CPUs and GPUs


def _from_few(images: Tensor, filters: Tensor, bias: Tensor | None) -> Tensor:
    """Convolve images of few channels: (B, C, H, W), (F, C, k, k), (F,) → (B, F, h, w), with F the last in memory."""
    kind = images.device.type
    if torch.is_autocast_enabled(kind):
        images = images.to(torch.get_autocast_dtype(kind))
    patches = _patches(images, filters.shape[-1])
    if bias is not None:
        patches.select(-1, filters[0].numel()).fill_(1)
    return (patches @ _matrix(filters, bias).to(patches.dtype)).permute(0, 3, 1, 2)


def _to_few(hidden: Tensor, filters: Tensor) -> Tensor:
    """Convolve with the filters transposed: (B, F, h, w), (F, C, k, k) → (B, C, H, W)."""
    compiling = torch.compiler.is_compiling()  # compilers know a gradient of their own
    spread: Callable[..., Tensor] = _Transposed.forward if compiling else _Transposed.apply
    return spread(hidden, _matrix(filters).to(hidden.dtype), *filters.shape[1:3])


class _Transposed(torch.autograd.Function):
    """The convolution with a matrix of filters transposed: a product and a sum; backward, patches and two products."""

    generate_vmap_rule = True

    @staticmethod
    def forward(hidden: Tensor, matrix: Tensor, channels: int, kernel: int) -> Tensor:
        columns = matrix[: channels * kernel**2].expand(len(hidden), -1, -1) @ hidden.flatten(2)
        height, width = hidden.shape[2] + kernel - 1, hidden.shape[3] + kernel - 1
        return nn.functional.fold(columns, (height, width), kernel)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG004 (not needed)
        hidden, matrix, _, ctx.kernel = inputs
        ctx.save_for_backward(hidden, matrix)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        hidden, matrix = ctx.saved_tensors
        patches = _patches(gradient, ctx.kernel)
        to_hidden = (patches @ matrix).permute(0, 3, 1, 2)
        return to_hidden, patches.flatten(0, 2).T @ hidden.permute(0, 2, 3, 1).flatten(0, 2), None, None


def _patches(images: Tensor, kernel: int) -> Tensor:
    """Cut out what a filter sees: (B, C, H, W) → (B, h, w, C·k·k and zeros)."""
    seen = images.unfold(2, kernel, 1).unfold(3, kernel, 1).permute(0, 2, 3, 1, 4, 5)
    count = math.prod(seen.shape[3:])
    patches = images.new_zeros(*seen.shape[:3], _padded(count))
    patches[..., :count].view(seen.shape).copy_(seen)
    return patches


def _matrix(filters: Tensor, bias: Tensor | None = None) -> Tensor:
    """Lay filters (F, C, k, k) in columns, the bias below them: (C·k·k and more, F)."""
    flat = filters.flatten(1).T
    below = flat.new_zeros(1, len(filters)) if bias is None else bias.unsqueeze(0)
    return torch.cat([flat, below.expand(_padded(len(flat)) - len(flat), -1)])


def _padded(count: int) -> int:
    """Make room for a bias, and a multiple of 8, as tensor cores like it."""
    return 8 * (count // 8 + 1)
