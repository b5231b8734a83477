"""The autoencoder's convolutions: the choice between PyTorch and the Triton kernels.

The encoder is a convolution with stride 1 and one with stride 2, each followed by a bias and a
leaky ReLU. The decoder applies the same filters transposed. B images of C channels and H×W pixels
become F features on a grid of h×w positions. This module does not import Triton before its kernels
are used.
"""

from __future__ import annotations

import os
from functools import cache
from typing import TYPE_CHECKING

import torch

from poecaps import _checks as checks
from poecaps.kernels import torch_convolution
from poecaps.kernels.triton import support

if TYPE_CHECKING:
    from torch import Tensor

    from poecaps.kernels.torch_convolution import ConvParameters

# Features per 16-byte vector of bfloat16, times two: the least that the matrix units multiply.
FEATURE_MULTIPLE = 16

# Major compute capabilities with enough shared memory for the pipelines of the kernels.
CAPABILITIES = (9, 10)


def encode(images: Tensor, parameters: ConvParameters, *, negative_slope: float) -> Tensor:
    """Compute features.

    Parameters
    ----------
    images : (B, C, H, W)
    parameters
        Filters and biases; those of the decoder are not used.
    negative_slope
        Of the leaky ReLU.

    Returns
    -------
    (B, F, h, w)
    """
    size, needs_grad = (images.shape[2], images.shape[3]), torch.is_grad_enabled()
    if why_not(images, parameters, size, needs_grad=needs_grad) is None:
        from poecaps.kernels.triton import convolution

        return convolution.encode(images, parameters, negative_slope=negative_slope)
    return torch_convolution.encode(images, parameters, negative_slope=negative_slope)


def decode(
    features: Tensor, parameters: ConvParameters, size: tuple[int, int], *, negative_slope: float
) -> Tensor:
    """Compute images before their sigmoid.

    Parameters
    ----------
    features : (B, F, h, w)
    parameters
        Filters and biases; those of the encoder are not used.
    size
        (H, W) of the images. A stride of 2 does not determine it: an even and an odd side can have
        the same number of positions.
    negative_slope
        Of the leaky ReLU.

    Returns
    -------
    (B, C, H, W)
    """
    if why_not(features, parameters, size) is None:
        from poecaps.kernels.triton import convolution

        return convolution.decode(features, parameters, size, negative_slope=negative_slope)
    return torch_convolution.decode(features, parameters, size, negative_slope=negative_slope)


def reconstruct(
    images: Tensor,
    parameters: ConvParameters,
    *,
    dropout: float,
    uniform: Tensor | None,
    negative_slope: float,
) -> Tensor:
    """Encode, drop features, and decode to images before their sigmoid.

    Parameters
    ----------
    images : (B, C, H, W)
    parameters
        Filters and biases.
    dropout
        Probability of a feature to be dropped.
    uniform : (B, F, h, w), optional
        Uniform numbers from 0 to 1: features whose number is below `dropout` are dropped. None:
        drawn from torch's default generator.
    negative_slope
        Of the leaky ReLU.

    Returns
    -------
    (B, C, H, W)
    """
    size, needs_grad = (images.shape[2], images.shape[3]), images.requires_grad
    if why_not(images, parameters, size, needs_grad=needs_grad) is None:
        from poecaps.kernels.triton import convolution

        return convolution.reconstruct(
            images, parameters, dropout=dropout, uniform=uniform, negative_slope=negative_slope
        )
    if images.device.type == "cpu":
        return torch_convolution.reconstruct(
            images, parameters, dropout=dropout, uniform=uniform, negative_slope=negative_slope
        )
    features = encode(images, parameters, negative_slope=negative_slope)
    features = torch_convolution.drop_features(features, dropout, uniform)
    return decode(features, parameters, size, negative_slope=negative_slope)


# --------------------------------------------------------------------------------------------------
# The choice


def why_not(
    x: Tensor, parameters: ConvParameters, size: tuple[int, int], *, needs_grad: bool = False
) -> str | None:
    """Return why the Triton kernels cannot serve a call, and the remedy; None if they can.

    Parameters
    ----------
    x : (B, C, H, W) or (B, F, h, w)
        Images, or features.
    parameters
        Filters and biases.
    size
        (H, W) of the images.
    needs_grad
        Whether a gradient through `encode`, or a gradient of `reconstruct` in the images is
        required.
    """
    if torch.compiler.is_compiling():
        return "torch.compile cannot trace the Triton convolutions; call the model without it"
    if needs_grad:
        return "the Triton convolutions compute no gradient in the images; use torch.no_grad"
    device, features = x.device, len(parameters.conv1_weight)
    kind = device.type
    if not torch.is_autocast_enabled(kind) or torch.get_autocast_dtype(kind) != torch.bfloat16:
        return f'the Triton convolutions need torch.autocast("{kind}", dtype=torch.bfloat16)'
    if (reason := _device_why_not(device)) is not None:
        return reason
    weights = (parameters.conv1_weight, parameters.conv2_weight)
    if any(tensor.device != device for tensor in weights):
        return f"the filters must be on the device of their input, {device}; move the model to it"
    if any(checks.is_wrapped(tensor) for tensor in (x, *weights)):
        return "torch.func cannot transform the Triton convolutions; call the model outside of it"
    if any(tensor.dtype != torch.float32 for tensor in weights):
        return "the Triton convolutions need filters in float32; use model.float()"
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"the Triton convolutions cannot take {x.dtype}; use float32"
    if features % FEATURE_MULTIPLE != 0:
        return (
            f"the number of features must be a multiple of {FEATURE_MULTIPLE} "
            f"for the Triton convolutions, but is {features}"
        )
    if (channels := parameters.conv1_weight.shape[1]) > torch_convolution.FEW_CHANNELS:
        return f"the Triton convolutions are made for images, not for {channels} channels"
    if len(x) == 0:
        return "the Triton convolutions need at least one image"
    patch = parameters.conv1_weight[0].numel()
    if len(x) * max(features, patch) * size[0] * size[1] >= 2**31:  # 32-bit offsets
        return f"{len(x)} images are too many for the Triton convolutions; use smaller batches"
    return None


def _device_why_not(device: torch.device) -> str | None:
    """Return why the Triton kernels cannot run on a device; None if they can."""
    if not support.installed():
        return "Triton is not installed; pip install triton"
    if device.type == "cuda":
        major = _major_capability(device)
        if major not in CAPABILITIES:
            needed = " or ".join(map(str, CAPABILITIES))
            return f"the Triton convolutions need a GPU of compute capability {needed}, not {major}"
    elif os.environ.get("TRITON_INTERPRET") != "1":
        return "the Triton convolutions need a CUDA device"
    return None


@cache
def _major_capability(device: torch.device) -> int:
    return torch.cuda.get_device_capability(device)[0]


def describe(device: torch.device) -> str:
    """Describe in one line how training computes convolutions on a device."""
    if device.type != "cuda":
        return "torch: minimal filtering in training, matrix products for few channels"
    if (reason := _device_why_not(device)) is not None:
        return f"torch: PyTorch's convolutions, matrix products for few channels; {reason}"
    return "triton: implicit GEMM kernels in bfloat16, without im2col matrices"
