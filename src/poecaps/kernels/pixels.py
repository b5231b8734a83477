"""Small functions of the pixel decoder's step, each one kernel on a GPU instead of many.

In plain PyTorch elsewhere. This module does not import Triton before its kernels are used.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch
from torch import nn

from poecaps.kernels.triton import support

if TYPE_CHECKING:
    from torch import Tensor

# Whether the kernels are used on a GPU.
FUSE = True


def pixel_loss(logits: Tensor, images: Tensor, cross_entropy: float) -> Tensor:
    """Compute the mean absolute error of pixels plus a multiple of their cross-entropy.

    Parameters
    ----------
    logits : (B, C, H, W)
        Pixels before the sigmoid, float32.
    images : (B, C, H, W)
        From 0 to 1, float32.
    cross_entropy
        Factor of the cross-entropy.

    Returns
    -------
    ()
    """
    if _is_fused(logits):
        from poecaps.kernels.triton import pixels

        return pixels.pixel_loss(logits, images, cross_entropy)
    absolute = (torch.sigmoid(logits) - images).abs().mean()
    entropy = nn.functional.binary_cross_entropy_with_logits(logits, images)
    return absolute + cross_entropy * entropy


def mask_to_strongest(y: Tensor, uniform: Tensor, share: float) -> Tensor:
    """Set all but the strongest expert to 0 in a share of the codes.

    Parameters
    ----------
    y : (B, J, D)
        Codes, without a gradient.
    uniform : (B, 1, 1)
        A number from 0 to 1 for each code: those with a number below `share` are masked.
    share
        From 0 to 1.

    Returns
    -------
    (B, J, D)
    """
    if _is_fused(y):
        from poecaps.kernels.triton import pixels

        return pixels.mask_to_strongest(y, uniform, share)
    norm: Tensor = y.norm(dim=-1, keepdim=True)  # (B, J, 1)
    return y * ((uniform >= share) | (norm == norm.amax(1, keepdim=True)))


def _is_fused(x: Tensor) -> bool:
    has_device = x.device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"
    return FUSE and has_device and x.dtype == torch.float32 and support.installed()
