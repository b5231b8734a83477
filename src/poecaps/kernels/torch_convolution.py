"""The autoencoder's convolutions in PyTorch.

Convolutions with many channels are PyTorch's; in training on a CPU, they use minimal filtering
(`poecaps.kernels.winograd`). Convolutions from and to images, which have few channels, are matrix
products with an im2col matrix: several times faster than PyTorch's, on CPUs and GPUs.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from poecaps.kernels import winograd

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

# Tensor cores want rows of a multiple of 8 numbers.
ROW_MULTIPLE = 8
FEW_CHANNELS = 4  # up to which an im2col matrix is small enough


class ConvParameters(NamedTuple):
    """Filters of both convolutions, and the biases of the encoder and of the decoder."""

    conv1_weight: Tensor  # (F, C, S, S)
    conv2_weight: Tensor  # (F, F, S, S)
    conv1_bias: Tensor | None  # (F,)
    conv2_bias: Tensor | None  # (F,)
    deconv2_bias: Tensor | None  # (F,)
    deconv1_bias: Tensor | None  # (C,)


class Strided(NamedTuple):
    """The second convolution, with stride 2, and the first of the decoder, its transpose.

    Attributes
    ----------
    weight : (F, F, S, S)
    filters
        The same for minimal filtering; None: PyTorch's convolutions.
    """

    weight: Tensor
    filters: winograd.Filters | None = None

    @classmethod
    def of(cls, weight: Tensor, grid: tuple[int, int], x: Tensor) -> Strided:
        """Choose for an input x: minimal filtering in training on a CPU, elsewhere PyTorch's."""
        if torch.compiler.is_compiling() or not winograd.is_wanted(weight):
            return cls(weight)
        if winograd.why_not(weight, grid, x) is not None:
            return cls(weight)
        return cls(weight, winograd.Filters(weight, grid))

    def conv2d(self, x: Tensor) -> Tensor:
        """Convolve: (B, F, H, W) → (B, F, h, w)."""
        if self.filters is not None and len(x):
            return self.filters.conv2d(x)
        return nn.functional.conv2d(x, self.weight, stride=2)

    def conv_transpose2d(self, y: Tensor, size: tuple[int, int]) -> Tensor:
        """Convolve with transposed filters: (B, F, h, w) → (B, F, *size)."""
        if self.filters is not None and len(y):
            return self.filters.conv_transpose2d(y, size)
        # A stride of 2 does not tell whether the side before it was odd or even.
        padding = [(side - self.weight.shape[-1]) % 2 for side in size]
        return nn.functional.conv_transpose2d(y, self.weight, stride=2, output_padding=padding)

    def bias_and_leaky_relu(self, x: Tensor, bias: Tensor | None, negative_slope: float) -> Tensor:
        """Add a bias to the result of a convolution and apply the leaky ReLU: (B, F, h, w).

        In place after a convolution of PyTorch, whose result autograd does not keep. The result of
        minimal filtering is a view, which cannot be changed in place.
        """
        inplace = self.filters is None
        if bias is not None:
            bias = bias.to(x.dtype).view(-1, 1, 1)
            if inplace:
                # Expanded to one bias per image: its gradient is then summed for each image first,
                # which is five times as fast on a GPU.
                x = x.add_(bias.expand(len(x), -1, 1, 1))
            else:
                # Not expanded, so that the sum has the layout of x.
                x, inplace = x + bias, True
        return nn.functional.leaky_relu(x, negative_slope, inplace=inplace)


def reconstruct(
    images: Tensor,
    parameters: ConvParameters,
    *,
    dropout: float,
    uniform: Tensor | None,
    negative_slope: float,
) -> Tensor:
    """Encode, drop features, and decode: (B, C, H, W) → (B, C, H, W).

    See `poecaps.kernels.convolution.reconstruct`.
    """
    size = (images.shape[2], images.shape[3])
    strided = Strided.of(parameters.conv2_weight, _grid(parameters, size), images)
    features = encode(images, parameters, negative_slope=negative_slope, strided=strided)
    features = drop_features(features, dropout, uniform)
    return decode(features, parameters, size, negative_slope=negative_slope, strided=strided)


def encode(
    images: Tensor,
    parameters: ConvParameters,
    *,
    negative_slope: float,
    strided: Strided | None = None,
) -> Tensor:
    """Compute features; see `poecaps.kernels.convolution.encode`: (B, C, H, W) → (B, F, h, w)."""
    if strided is None:
        grid = _grid(parameters, (images.shape[2], images.shape[3]))
        strided = Strided.of(parameters.conv2_weight, grid, images)
    if images.shape[1] > FEW_CHANNELS:
        hidden = nn.functional.conv2d(images, parameters.conv1_weight, parameters.conv1_bias)
        hidden = nn.functional.leaky_relu(hidden, negative_slope, inplace=True)
    else:
        # Permuted afterwards: autograd copies the gradient of a view that is changed in place.
        hidden = _conv2d_by_matmul(images, parameters.conv1_weight, parameters.conv1_bias)
        hidden = nn.functional.leaky_relu(hidden, negative_slope, inplace=True).permute(0, 3, 1, 2)
    features = strided.conv2d(hidden)
    return strided.bias_and_leaky_relu(features, parameters.conv2_bias, negative_slope)


def decode(
    features: Tensor,
    parameters: ConvParameters,
    size: tuple[int, int],
    *,
    negative_slope: float,
    strided: Strided | None = None,
) -> Tensor:
    """Compute images before their sigmoid: (B, F, h, w) → (B, C, *size).

    See `poecaps.kernels.convolution.decode`.
    """
    if strided is None:
        grid = (features.shape[2], features.shape[3])
        strided = Strided.of(parameters.conv2_weight, grid, features)
    hidden = strided.conv_transpose2d(features, _hidden_size(parameters, size))
    hidden = strided.bias_and_leaky_relu(hidden, parameters.deconv2_bias, negative_slope)
    if parameters.conv1_weight.shape[1] > FEW_CHANNELS:
        images = nn.functional.conv_transpose2d(hidden, parameters.conv1_weight)
    else:
        images = _conv_transpose2d_by_matmul(hidden, parameters.conv1_weight)
    bias = parameters.deconv1_bias
    return images if bias is None else images + bias.view(-1, 1, 1)


def _hidden_size(parameters: ConvParameters, size: tuple[int, int]) -> tuple[int, int]:
    """Return the size after the first convolution, of images of a size."""
    kernel_size = parameters.conv1_weight.shape[-1]
    return size[0] - kernel_size + 1, size[1] - kernel_size + 1


def _grid(parameters: ConvParameters, size: tuple[int, int]) -> tuple[int, int]:
    """Return the size after the second convolution, of images of a size."""
    height, width = _hidden_size(parameters, size)
    kernel_size = parameters.conv2_weight.shape[-1]
    return (height - kernel_size) // 2 + 1, (width - kernel_size) // 2 + 1


def drop_features(features: Tensor, dropout: float, uniform: Tensor | None) -> Tensor:
    """Apply dropout: (B, F, h, w) → (B, F, h, w); `uniform` as in `reconstruct`."""
    if uniform is None:
        return nn.functional.dropout(features, dropout)
    return features * (uniform >= dropout) / (1 - dropout)


# --------------------------------------------------------------------------------------------------
# Convolutions with few channels, as matrix products


def _conv2d_by_matmul(images: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Convolve images: (B, C, H, W), (F, C, S, S), (F,) → (B, h, w, F)."""
    columns = _im2col(_as_autocast(images), weight.shape[-1])
    if bias is not None:
        columns.select(-1, weight[0].numel()).fill_(1)
    return columns @ _weight_matrix(weight, bias).to(columns.dtype)


def _conv_transpose2d_by_matmul(hidden: Tensor, weight: Tensor) -> Tensor:
    """Convolve with transposed filters: (B, F, h, w), (F, C, S, S) → (B, C, H, W)."""
    # Minimal filtering computes in float32 also under autocast, which backward passes are not.
    hidden = _as_autocast(hidden)
    # Compilers differentiate the forward pass themselves.
    compiling = torch.compiler.is_compiling()
    transposed: Callable[..., Tensor] = (
        _ConvTranspose2d.forward if compiling else _ConvTranspose2d.apply
    )
    return transposed(hidden, _weight_matrix(weight).to(hidden.dtype), *weight.shape[1:3])


def _as_autocast(x: Tensor) -> Tensor:
    """Return x in the precision of autocast, if that is on."""
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x


class _ConvTranspose2d(torch.autograd.Function):
    """The transposed convolution as product and col2im; backward, im2col and two products."""

    generate_vmap_rule = True

    @staticmethod
    def forward(hidden: Tensor, matrix: Tensor, channels: int, kernel_size: int) -> Tensor:
        columns = matrix[: channels * kernel_size**2].expand(len(hidden), -1, -1) @ hidden.flatten(
            2
        )
        height, width = hidden.shape[2] + kernel_size - 1, hidden.shape[3] + kernel_size - 1
        return nn.functional.fold(columns, (height, width), kernel_size)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG004 (torch's signature)
        hidden, matrix, _, ctx.kernel_size = inputs
        ctx.save_for_backward(hidden, matrix)

    @staticmethod
    def backward(ctx: Any, grad_images: Tensor) -> tuple[Tensor, Tensor, None, None]:
        hidden, matrix = ctx.saved_tensors
        columns = _im2col(grad_images, ctx.kernel_size)
        grad_hidden = (columns @ matrix).permute(0, 3, 1, 2)
        grad_matrix = columns.flatten(0, 2).T @ hidden.permute(0, 2, 3, 1).flatten(0, 2)
        return grad_hidden, grad_matrix, None, None


def _im2col(images: Tensor, kernel_size: int) -> Tensor:
    """Return the patches of images: (B, C, H, W) → (B, h, w, C·S·S), padded with zeros."""
    patches = images.unfold(2, kernel_size, 1).unfold(3, kernel_size, 1).permute(0, 2, 3, 1, 4, 5)
    count = math.prod(patches.shape[3:])
    columns = images.new_empty(*patches.shape[:3], _padded(count))
    columns[..., :count].view(patches.shape).copy_(patches)
    columns[..., count:].zero_()
    return columns


def _weight_matrix(weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return filters (F, C, S, S) as columns, the bias below them: (C·S·S, F), padded."""
    flat = weight.flatten(1).T
    below = flat.new_zeros(1, len(weight)) if bias is None else bias.unsqueeze(0)
    return torch.cat([flat, below.expand(_padded(len(flat)) - len(flat), -1)])


def _padded(count: int) -> int:
    """Return the row length for `count` numbers and one for a bias, as a multiple of 8."""
    return ROW_MULTIPLE * (count // ROW_MULTIPLE + 1)
