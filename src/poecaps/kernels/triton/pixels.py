# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""The loss of the pixel decoder with its gradient, and the mask of its codes."""

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from poecaps.kernels.triton.jit import kernel
from poecaps.kernels.triton.launch import LaunchConfig, cdiv, launch, padded

# Pixels of one program.
BLOCK = 1024

LAUNCH = LaunchConfig(num_warps=4, num_stages=1)


@kernel
def _pixel_loss_kernel(
    logits_ptr, images_ptr, grad_ptr, part_ptr, count, scale, cross_entropy, BLOCK_N: tl.constexpr
):
    """Sum the loss of a block of pixels: → part (blocks,), and write its derivatives (count,)."""
    offs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = offs < count
    logit = tl.load(logits_ptr + offs, mask=mask, other=0.0)
    image = tl.load(images_ptr + offs, mask=mask, other=0.0)
    small = tl.exp(-tl.abs(logit))  # at most 1, so that nothing overflows
    one = 1.0 + small
    probability = tl.where(logit >= 0, 1.0 / one, small / one)
    error = probability - image
    # log1p: the part of `small` that rounding loses in 1 + small is added in first order.
    log1p = tl.log(one) + (small - (one - 1.0)) / one
    entropy = tl.maximum(logit, 0.0) - logit * image + log1p
    loss = tl.where(mask, tl.abs(error) + cross_entropy * entropy, 0.0)
    sign = tl.where(error > 0, 1.0, tl.where(error < 0, -1.0, 0.0))
    grad = sign * small / (one * one) + cross_entropy * error
    tl.store(grad_ptr + offs, scale * grad, mask=mask)
    tl.store(part_ptr + tl.program_id(0), scale * tl.sum(loss, 0))


class _PixelLoss(torch.autograd.Function):
    """The loss, whose gradient is computed at the same time."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, images: Tensor, cross_entropy: float) -> Tensor:
        logits, images = logits.contiguous(), images.contiguous()
        grad, count = torch.empty_like(logits), logits.numel()
        part = grad.new_empty(cdiv(count, BLOCK))
        numbers = (count, 1 / max(1, count), float(cross_entropy))
        launch(
            _pixel_loss_kernel,
            (len(part),),
            (logits, images, grad, part, *numbers),
            {"BLOCK_N": BLOCK},
            LAUNCH,
        )
        ctx.save_for_backward(grad)
        return part.sum()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor, None, None]:
        (grad,) = ctx.saved_tensors
        return grad * grad_loss, None, None


def pixel_loss(logits: Tensor, images: Tensor, cross_entropy: float) -> Tensor:
    """Compute `poecaps.kernels.pixels.pixel_loss`: (B, C, H, W), (B, C, H, W) → ()."""
    loss: Tensor = _PixelLoss.apply(logits, images, cross_entropy)
    return loss


@kernel
def _mask_kernel(
    y_ptr, uniform_ptr, out_ptr, share,
    J: tl.constexpr, D: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Mask the code of one image."""
    b = tl.program_id(0).to(tl.int64)
    offs_j = tl.arange(0, BLOCK_J)
    offs_d = tl.arange(0, BLOCK_D)
    offsets = b * J * D + offs_j[:, None] * D + offs_d[None, :]
    mask = (offs_j < J)[:, None] & (offs_d < D)[None, :]
    y = tl.load(y_ptr + offsets, mask=mask, other=0.0)
    # The threads of a row may round its sum differently, because the compiler fuses the product of
    # a thread with the addition of a product of another thread. Without the factor, a number of the
    # strongest expert could be below the maximum that another thread has found.
    square = tl.sum(y * y, 1)
    strongest = (1 - 1e-6) * tl.max(square, 0)
    least = tl.where(tl.load(uniform_ptr + b) >= share, 0.0, strongest)
    tl.store(out_ptr + offsets, tl.where((square < least)[:, None], 0.0, y), mask=mask)


def mask_to_strongest(y: Tensor, uniform: Tensor, share: float) -> Tensor:
    """Compute `poecaps.kernels.pixels.mask_to_strongest`: (B, J, D), (B, 1, 1) → (B, J, D)."""
    y = y.contiguous()
    batch, experts, dim = y.shape
    out = torch.empty_like(y)
    launch(
        _mask_kernel,
        (batch,),
        (y, uniform.contiguous(), out, float(share)),
        {"J": experts, "D": dim, "BLOCK_J": padded(experts, 1), "BLOCK_D": padded(dim, 1)},
        LAUNCH,
    )
    return out
