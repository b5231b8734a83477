"""The autoencoder's convolutions in PyTorch.

Convolutions with many channels are PyTorch's. Convolutions from and to images, which have few
channels, are matrix products with an im2col matrix: several times faster than PyTorch's, on CPUs
and GPUs.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

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


def encode(images: Tensor, parameters: ConvParameters, *, negative_slope: float) -> Tensor:
    """Compute features; see `poecaps.kernels.convolution.encode`: (B, C, H, W) → (B, F, h, w)."""
    if images.shape[1] > FEW_CHANNELS:
        hidden = nn.functional.conv2d(images, parameters.conv1_weight, parameters.conv1_bias)
    else:
        hidden = _conv2d_by_matmul(images, parameters.conv1_weight, parameters.conv1_bias)
    hidden = nn.functional.leaky_relu(hidden, negative_slope, inplace=True)
    features = nn.functional.conv2d(hidden, parameters.conv2_weight, stride=2)
    return _bias_and_leaky_relu_(features, parameters.conv2_bias, negative_slope)


def decode(
    features: Tensor, parameters: ConvParameters, size: tuple[int, int], *, negative_slope: float
) -> Tensor:
    """Compute images before their sigmoid: (B, F, h, w) → (B, C, *size).

    See `poecaps.kernels.convolution.decode`.
    """
    kernel_size = parameters.conv1_weight.shape[-1]
    # A stride of 2 does not tell whether the side before it was odd or even; the image's size does.
    padding = [(side - 2 * kernel_size + 1) % 2 for side in size]
    hidden = nn.functional.conv_transpose2d(
        features, parameters.conv2_weight, stride=2, output_padding=padding
    )
    hidden = _bias_and_leaky_relu_(hidden, parameters.deconv2_bias, negative_slope)
    if parameters.conv1_weight.shape[1] > FEW_CHANNELS:
        images = nn.functional.conv_transpose2d(hidden, parameters.conv1_weight)
    else:
        images = _conv_transpose2d_by_matmul(hidden, parameters.conv1_weight)
    bias = parameters.deconv1_bias
    return images if bias is None else images + bias.view(-1, 1, 1)


def drop_features(features: Tensor, dropout: float, uniform: Tensor | None) -> Tensor:
    """Apply dropout: (B, F, h, w) → (B, F, h, w); `uniform` as in `reconstruct`."""
    if uniform is None:
        return nn.functional.dropout(features, dropout)
    return features * (uniform >= dropout) / (1 - dropout)


def _bias_and_leaky_relu_(x: Tensor, bias: Tensor | None, negative_slope: float) -> Tensor:
    """Add a bias and apply the leaky ReLU, in place: (B, F, h, w).

    Only for results of a convolution, which autograd does not keep.
    """
    if bias is not None:
        # Expanded to one bias per image: its gradient is then summed for each image first, which is
        # five times as fast on a GPU.
        x = x.add_(bias.to(x.dtype).view(-1, 1, 1).expand(len(x), -1, 1, 1))
    return nn.functional.leaky_relu(x, negative_slope, inplace=True)


# --------------------------------------------------------------------------------------------------
# Convolutions with few channels, as matrix products


def _conv2d_by_matmul(images: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Convolve images: (B, C, H, W), (F, C, S, S), (F,) → (B, F, h, w), channels-last in memory."""
    kind = images.device.type
    if torch.is_autocast_enabled(kind):
        images = images.to(torch.get_autocast_dtype(kind))
    columns = _im2col(images, weight.shape[-1])
    if bias is not None:
        columns.select(-1, weight[0].numel()).fill_(1)
    return (columns @ _weight_matrix(weight, bias).to(columns.dtype)).permute(0, 3, 1, 2)


def _conv_transpose2d_by_matmul(hidden: Tensor, weight: Tensor) -> Tensor:
    """Convolve with transposed filters: (B, F, h, w), (F, C, S, S) → (B, C, H, W)."""
    # Compilers differentiate the forward pass themselves.
    compiling = torch.compiler.is_compiling()
    transposed: Callable[..., Tensor] = (
        _ConvTranspose2d.forward if compiling else _ConvTranspose2d.apply
    )
    return transposed(hidden, _weight_matrix(weight).to(hidden.dtype), *weight.shape[1:3])


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
    columns = images.new_zeros(*patches.shape[:3], _padded(count))
    columns[..., :count].view(patches.shape).copy_(patches)
    return columns


def _weight_matrix(weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return filters (F, C, S, S) as columns, the bias below them: (C·S·S, F), padded."""
    flat = weight.flatten(1).T
    below = flat.new_zeros(1, len(weight)) if bias is None else bias.unsqueeze(0)
    return torch.cat([flat, below.expand(_padded(len(flat)) - len(flat), -1)])


def _padded(count: int) -> int:
    """Return the row length for `count` numbers and one for a bias, as a multiple of 8."""
    return ROW_MULTIPLE * (count // ROW_MULTIPLE + 1)
