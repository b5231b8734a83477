"""What a trained network is good for besides drawing: what is unusual, what is hidden, what lies between, what is near.

Every function takes a `poecaps.CapsuleNetwork` in evaluation mode, as `poecaps.load` gives it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from poecaps import _checks as checks
from poecaps import functional as F

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from poecaps.network import CapsuleNetwork

__all__ = [
    "Neighbours",
    "encode",
    "free_energy",
    "inpaint",
    "interpolate",
    "nearest",
    "novelty_score",
]
CHUNK = 250  # images that go through the network together
QUERIES = 1000  # codes whose distances to all others are held at a time


def encode(network: CapsuleNetwork, images: Tensor) -> Tensor:
    """Encode any number of images, in parts, without gradients: (N, C, H, W) → (N, J, D)."""
    return _in_parts(network.encode, images)


def free_energy(network: CapsuleNetwork, images: Tensor) -> Tensor:
    """Compute F of any number of images, in parts, without gradients: (N, C, H, W) → (N,)."""
    return _in_parts(network.free_energy, images)


def novelty_score(network: CapsuleNetwork, images: Tensor, usual: Tensor | None = None) -> Tensor:
    """Score how unlike the training images others are; larger is more unlike.

    The obvious score is F itself, for P(x) = e^(−F(x))/Z. It is also the one that fails where it is least expected, as
    the likelihoods of deep models do: images with stronger features than any of the training set get a lower F than
    those. An image is typical if its F is as usual, neither higher nor lower (Nalisnick et al. 2019), so with the free
    energies of training images at hand the score is |F − median|, in units of the median of that among them.

    Parameters
    ----------
    network
        Trained.
    images : (N, C, H, W)
        From 0 to 1.
    usual : (M,), optional
        `free_energy` of some hundred training images or more. None: the score is F.

    Returns
    -------
    (N,)
        With `usual`, about half of the training images score below 1.
    """
    found = free_energy(network, images)
    if usual is None:
        return found
    checks.require_shape("usual", usual, "M", (None,), "give the free energies of training images")
    checks.require_images("usual", usual)
    middle = usual.median()
    spread = (usual - middle).abs().median()
    return (found - middle).abs() / spread.clamp(min=torch.finfo(spread.dtype).tiny)


def inpaint(
    network: CapsuleNetwork,
    images: Tensor,
    known: Tensor,
    *,
    draws: int = 3000,
    noise: float = 1.0,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Fill in what is hidden by its expectation, given what is known.

    With images y_s drawn from the model, and the known pixels of an image x those of a y_s with Gaussian noise::

        hidden pixels = Σ_s w_s y_s,    w_s ∝ exp(−‖x − y_s‖²/2σ²), the norm over the known pixels

    Going up and down through the network again and again with the known pixels put back is simpler, but did worse than
    the mean image: experts that see half a digit see another thing.

    Parameters
    ----------
    network
        Trained.
    images : (N, C, H, W)
        From 0 to 1; hidden pixels may have any value, they are not looked at.
    known : (H, W)
        Truth values, False where a pixel is hidden; the same for all images.
    draws
        How many images are drawn from the domain ``"joint"``, for all images together.
    noise
        σ, of a pixel. With little, few of the draws count; with much, the result is their mean.
    generator
        Source of the draws, on the model's device.

    Returns
    -------
    (N, C, H, W)
        The images, with hidden pixels replaced.
    """
    checks.require_int("draws", draws, 1)
    checks.require_nonnegative("noise", noise)
    if noise == 0:
        raise ValueError("noise must be above 0")
    checks.require_floating("images", images, pixels=True)
    checks.require_shape(
        "images",
        images,
        "BCHW",
        (None, *network.architecture.image_shape),
        "as the model draws them",
    )
    checks.require_tensor("known", known)
    checks.require_shape(
        "known", known, "HW", network.architecture.image_shape[1:], "as the model draws images"
    )
    if known.dtype != torch.bool:
        raise TypeError(
            f"known must hold truth values, but its dtype is {known.dtype}; compare with a number first"
        )
    checks.check_pixels_on_cpu(images[:, :, known], "images")
    with torch.no_grad():
        drawn = _in_parts(network.decode, network.sample(draws, generator=generator))
    distance = torch.cdist(images[:, :, known].flatten(1), drawn[:, :, known].flatten(1)).square()
    weight = (-distance / (2 * noise**2)).softmax(1)
    expected = (weight @ drawn.flatten(1)).view_as(images)
    return torch.where(known, images, expected)


def interpolate(network: CapsuleNetwork, first: Tensor, second: Tensor, steps: int = 8) -> Tensor:
    """Walk from images to others in the space of their experts, before squashing.

    Parameters
    ----------
    network
        Trained.
    first, second : (N, C, H, W)
        From 0 to 1: where to begin, and where to end.
    steps
        Images on the way, both ends included; at least 2.

    Returns
    -------
    (N, steps, C, H, W)
        The ends are reconstructions of the images given.
    """
    checks.require_int("steps", steps, 2)
    if first.shape != second.shape:
        raise ValueError(
            f"first and second must have one shape, but have {tuple(first.shape)} and {tuple(second.shape)}"
        )
    begin, end = (F.unsquash(encode(network, images)).unsqueeze(1) for images in (first, second))
    share = torch.linspace(0, 1, steps, dtype=begin.dtype, device=begin.device).view(1, -1, 1, 1)
    codes = F.squash(torch.lerp(begin, end, share))
    images = _in_parts(network.decode, codes.flatten(0, 1))
    return images.view(len(first), steps, *images.shape[1:])


@dataclass(frozen=True, eq=False)
class Neighbours:
    """Result of `nearest`."""

    indices: Tensor
    """(N, count), which codes, the nearest first."""
    distances: Tensor
    """(N, count), 1 − cosine."""


def nearest(codes: Tensor, queries: Tensor, count: int = 1) -> Neighbours:
    """Find those of many codes that point most nearly in the direction of each query.

    Parameters
    ----------
    codes : (M, J, D) or (M, S)
        Where to look, as `encode` gives them.
    queries : (N, J, D) or (N, S)
        What to look for.
    count
        How many neighbours, at most M.
    """
    checks.require_floating("codes", codes)
    checks.require_floating("queries", queries)
    if codes.ndim < 2 or codes.shape[1:] != queries.shape[1:]:
        raise ValueError(
            f"codes and queries must be codes of one network, but have shapes {tuple(codes.shape)} and "
            f"{tuple(queries.shape)}"
        )
    checks.require_int("count", count, 1, len(codes))
    places, asked = F.direction(codes.flatten(1)), F.direction(queries.flatten(1))
    found = [(part @ places.T).topk(count) for part in asked.split(QUERIES)]
    return Neighbours(
        torch.cat([each.indices for each in found]), 1 - torch.cat([each.values for each in found])
    )


@torch.no_grad()
def _in_parts(function: Callable[[Tensor], Tensor], batch: Tensor) -> Tensor:
    return torch.cat([function(part) for part in batch.split(CHUNK)])
