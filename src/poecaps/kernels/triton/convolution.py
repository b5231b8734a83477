"""The autoencoder's convolutions on a GPU, with gradients, without im2col matrices.

The encoder is two convolutions; the decoder is the same two convolutions transposed. The biases,
leaky ReLUs and dropout between them are computed in the epilogues of the convolutions. Operands are
rounded to bfloat16, as under bfloat16 autocast; sums are float32. The kernels and their launchers
are in `conv1` and `conv2`; `conv_common` explains the letters.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import once_differentiable

from poecaps.kernels.triton.conv1 import (
    conv1,
    conv1_transpose,
    conv1_weight_grad,
    conv1_weight_grad_buffer,
    sum_conv1_weight_grad,
)
from poecaps.kernels.triton.conv2 import conv2, conv2_transpose, conv2_weight_grad
from poecaps.kernels.triton.conv_common import Epilogue, ProblemSize, problem_size

if TYPE_CHECKING:
    from torch import Tensor

    from poecaps.kernels.torch_convolution import ConvParameters


# --------------------------------------------------------------------------------------------------
# Encode


@torch.no_grad()
def encode(images: Tensor, parameters: ConvParameters, *, negative_slope: float) -> Tensor:
    """Compute features, without a gradient: (B, C, H, W) → (B, F, h, w), bfloat16."""
    size = problem_size(parameters.conv1_weight, (images.shape[2], images.shape[3]))
    conv1_weight, conv2_weight = _kernel_weights(parameters.conv1_weight, parameters.conv2_weight)
    hidden, _ = conv1(
        images.contiguous(),
        conv1_weight,
        size,
        Epilogue(negative_slope, parameters.conv1_bias, leaky_relu=True),
        torch.bfloat16,
    )
    epilogue = Epilogue(negative_slope, parameters.conv2_bias, leaky_relu=True)
    features, _ = conv2(hidden, conv2_weight, size, epilogue, torch.bfloat16)
    return features.permute(0, 3, 1, 2)


def _kernel_weights(conv1_weight: Tensor, conv2_weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the filters in the layout of the kernels: channels-last, the second in bfloat16.

    The first filters are small and rounded to bfloat16 by the kernels.
    """
    layout = torch.channels_last
    first = conv1_weight.detach().contiguous(memory_format=layout)
    return first, conv2_weight.detach().to(torch.bfloat16, memory_format=layout)


# --------------------------------------------------------------------------------------------------
# Decode


class _Decode(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        features: Tensor,
        conv1_weight: Tensor,
        conv2_weight: Tensor,
        deconv2_bias: Tensor | None,
        deconv1_bias: Tensor | None,
        size: ProblemSize,
        negative_slope: float,
    ) -> Tensor:
        kernel_weights = _kernel_weights(conv1_weight, conv2_weight)
        grid = features.permute(0, 2, 3, 1).to(torch.bfloat16).contiguous()
        hidden, images = _decode(
            grid, *kernel_weights, deconv2_bias, deconv1_bias, size, negative_slope
        )
        if ctx is not None:
            ctx.save_for_backward(grid, hidden, *kernel_weights)
            ctx.size, ctx.negative_slope, ctx.dtype = size, negative_slope, features.dtype
            ctx.has_deconv2_bias = deconv2_bias is not None
            ctx.has_deconv1_bias = deconv1_bias is not None
        return images

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_images: Tensor) -> tuple[Tensor | None, ...]:
        grid, hidden, conv1_weight, conv2_weight = ctx.saved_tensors
        size, negative_slope = ctx.size, ctx.negative_slope
        grad_images = grad_images.contiguous()

        buffer = conv1_weight_grad_buffer(hidden, size, uses=1)
        epilogue = Epilogue(negative_slope, activation=hidden)
        grad_hidden, grad_deconv2_bias = conv1(
            grad_images,
            conv1_weight,
            size,
            epilogue,
            torch.bfloat16,
            sum_columns=ctx.has_deconv2_bias,
        )
        conv1_weight_grad(grad_images, hidden, size, sum_x=False, out=buffer[0])
        grad_features, _ = conv2(
            grad_hidden, conv2_weight, size, Epilogue(negative_slope), ctx.dtype
        )
        grad_conv2_weight = conv2_weight_grad([(grid, grad_hidden)], size)
        grad_conv1_weight, _ = sum_conv1_weight_grad(buffer, size, has_bias=False)
        return (
            grad_features.permute(0, 3, 1, 2),
            grad_conv1_weight,
            grad_conv2_weight,
            grad_deconv2_bias,
            _sum_pixels(grad_images) if ctx.has_deconv1_bias else None,
            None,
            None,
        )


def decode(
    features: Tensor,
    parameters: ConvParameters,
    size: tuple[int, int],
    *,
    negative_slope: float,
) -> Tensor:
    """Compute images before their sigmoid: (B, F, h, w) → (B, C, *size), float32."""
    tensors = (
        features,
        parameters.conv1_weight,
        parameters.conv2_weight,
        parameters.deconv2_bias,
        parameters.deconv1_bias,
    )
    problem = problem_size(parameters.conv1_weight, size)
    return _apply(_Decode, tensors, problem, negative_slope)


def _decode(
    grid: Tensor,
    conv1_weight: Tensor,
    conv2_weight: Tensor,
    deconv2_bias: Tensor | None,
    deconv1_bias: Tensor | None,
    size: ProblemSize,
    negative_slope: float,
) -> tuple[Tensor, Tensor]:
    """Decode a feature grid (B, H2, W2, F): → hidden grid (B, H1, W1, F), images (B, C, H, W)."""
    epilogue = Epilogue(negative_slope, deconv2_bias, leaky_relu=True)
    hidden = conv2_transpose(grid, conv2_weight, size, epilogue, torch.bfloat16)
    return hidden, conv1_transpose(hidden, conv1_weight, deconv1_bias, size)


def _sum_pixels(images: Tensor) -> Tensor:
    """Sum over images and pixels: (B, C, H, W) → (C,).

    In two steps: one reduction to so few numbers occupies only a small part of a GPU.
    """
    return images.flatten(2).sum(2).sum(0)


# --------------------------------------------------------------------------------------------------
# Reconstruct: encode, dropout and decode, with one gradient in the filters that both use


class _Reconstruct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        images: Tensor,
        uniform: Tensor | None,
        conv1_weight: Tensor,
        conv2_weight: Tensor,
        conv1_bias: Tensor | None,
        conv2_bias: Tensor | None,
        deconv2_bias: Tensor | None,
        deconv1_bias: Tensor | None,
        size: ProblemSize,
        negative_slope: float,
        dropout: float,
    ) -> Tensor:
        kernel_weights = _kernel_weights(conv1_weight, conv2_weight)
        images, uniform = images.contiguous(), None if uniform is None else uniform.contiguous()
        epilogue = Epilogue(negative_slope, conv1_bias, leaky_relu=True)
        hidden, _ = conv1(images, kernel_weights[0], size, epilogue, torch.bfloat16)
        epilogue = Epilogue(
            negative_slope, conv2_bias, leaky_relu=True, uniform=uniform, dropout=dropout
        )
        grid, _ = conv2(hidden, kernel_weights[1], size, epilogue, torch.bfloat16)
        decoder_hidden, out = _decode(
            grid, *kernel_weights, deconv2_bias, deconv1_bias, size, negative_slope
        )
        if ctx is not None:
            ctx.save_for_backward(images, uniform, hidden, grid, decoder_hidden, *kernel_weights)
            ctx.size, ctx.negative_slope, ctx.dropout = size, negative_slope, dropout
            biases = (conv1_bias, conv2_bias, deconv2_bias, deconv1_bias)
            ctx.has_biases = [bias is not None for bias in biases]
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_images: Tensor) -> tuple[Tensor | None, ...]:
        images, uniform, hidden, grid, decoder_hidden, conv1_weight, conv2_weight = (
            ctx.saved_tensors
        )
        size, negative_slope = ctx.size, ctx.negative_slope
        has_conv1_bias, has_conv2_bias, has_deconv2_bias, has_deconv1_bias = ctx.has_biases
        grad_images = grad_images.contiguous()

        # Through the decoder.
        buffer = conv1_weight_grad_buffer(hidden, size, uses=2)
        grad_decoder_hidden, grad_deconv2_bias = conv1(
            grad_images,
            conv1_weight,
            size,
            Epilogue(negative_slope, activation=decoder_hidden),
            torch.bfloat16,
            sum_columns=has_deconv2_bias,
        )
        conv1_weight_grad(grad_images, decoder_hidden, size, sum_x=False, out=buffer[0])

        # Through dropout and the encoder's second leaky ReLU. Dropped features are 0, which counts
        # as negative; dropout sets their gradient to 0 as well.
        grad_grid, grad_conv2_bias = conv2(
            grad_decoder_hidden,
            conv2_weight,
            size,
            Epilogue(negative_slope, activation=grid, uniform=uniform, dropout=ctx.dropout),
            torch.bfloat16,
            sum_columns=has_conv2_bias,
        )
        pairs = [(grid, grad_decoder_hidden), (grad_grid, hidden)]
        grad_conv2_weight = conv2_weight_grad(pairs, size)

        # Through the encoder.
        epilogue = Epilogue(negative_slope, activation=hidden)
        grad_hidden = conv2_transpose(grad_grid, conv2_weight, size, epilogue, torch.bfloat16)
        conv1_weight_grad(images, grad_hidden, size, sum_x=has_conv1_bias, out=buffer[1])
        grad_conv1_weight, grad_conv1_bias = sum_conv1_weight_grad(
            buffer, size, has_bias=has_conv1_bias
        )
        return (
            None,
            None,
            grad_conv1_weight,
            grad_conv2_weight,
            grad_conv1_bias,
            grad_conv2_bias,
            grad_deconv2_bias,
            _sum_pixels(grad_images) if has_deconv1_bias else None,
            None,
            None,
            None,
        )


def reconstruct(
    images: Tensor,
    parameters: ConvParameters,
    *,
    dropout: float,
    uniform: Tensor | None,
    negative_slope: float,
) -> Tensor:
    """Encode, drop features and decode: (B, C, H, W) → (B, C, H, W), float32.

    The gradient reaches the parameters, not the images. For the arguments see
    `poecaps.kernels.convolution.reconstruct`.
    """
    size = problem_size(parameters.conv1_weight, (images.shape[2], images.shape[3]))
    if dropout == 0:
        uniform = None
    elif uniform is None:
        uniform = torch.rand(len(images), size.features, *size.grid, device=images.device)
    return _apply(_Reconstruct, (images, uniform, *parameters), size, negative_slope, dropout)


def _apply(
    function: type[torch.autograd.Function], tensors: tuple[Tensor | None, ...], *options: Any
) -> Tensor:
    """Apply an autograd function, or only its forward pass if no gradient is required."""
    needs_grad = any(tensor is not None and tensor.requires_grad for tensor in tensors)
    out: Tensor
    if torch.is_grad_enabled() and needs_grad:
        out = function.apply(*tensors, *options)
        return out
    with torch.no_grad():
        out = function.forward(None, *tensors, *options)
        return out
