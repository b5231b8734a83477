"""Applications of a trained network: novelty, inpainting, interpolation and nearest neighbours.

Every function takes a `poecaps.CapsuleNetwork` in evaluation mode, as `poecaps.load` returns it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from poecaps import _checks as checks
from poecaps import functional as F
from poecaps._modules import in_batches

if TYPE_CHECKING:
    from torch import Tensor

    from poecaps.network import CapsuleNetwork

__all__ = [
    "Neighbours",
    "encode",
    "free_energy",
    "inpaint",
    "interpolate",
    "nearest_neighbours",
    "novelty_score",
]
QUERY_BATCH = 1000  # queries whose similarities to all codes are in memory together


@torch.no_grad()
def encode(network: CapsuleNetwork, images: Tensor) -> Tensor:
    """Encode any number of images, in batches, without gradients: (N, C, H, W) → (N, J, D)."""
    return in_batches(network.encode, images)


@torch.no_grad()
def free_energy(network: CapsuleNetwork, images: Tensor) -> Tensor:
    """Compute F of any number of images, in batches, without gradients: (N, C, H, W) → (N,)."""
    return in_batches(network.free_energy, images)


def novelty_score(
    network: CapsuleNetwork, images: Tensor, reference: Tensor | None = None
) -> Tensor:
    """Score how much images differ from the training images; higher is more novel.

    The obvious score is F itself, because P(x) = e^(−F(x))/Z. It fails in the same way as the
    likelihoods of deep generative models: images with stronger features than any training image
    have a lower F. An image is typical if its F is typical, neither higher nor lower (Nalisnick et
    al. 2019). With the free energies of training images as a reference, the score is therefore
    |F − median|, divided by the median of the same number over the reference.

    Parameters
    ----------
    network
        Trained.
    images : (N, C, H, W)
        From 0 to 1.
    reference : (M,), optional
        `free_energy` of a few hundred training images or more. None: the score is F.

    Returns
    -------
    (N,)
        With a reference, about half of the training images score below 1.
    """
    energy = free_energy(network, images)
    if reference is None:
        return energy
    checks.require_shape(
        "reference", reference, "M", (None,), "give the free energies of training images"
    )
    checks.require_images("reference", reference)
    median = reference.median()
    spread = (reference - median).abs().median()
    return (energy - median).abs() / spread.clamp(min=torch.finfo(spread.dtype).tiny)


def inpaint(
    network: CapsuleNetwork,
    images: Tensor,
    known: Tensor,
    *,
    draws: int = 3000,
    noise: float = 1.0,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Replace hidden pixels by their expectation, given the known pixels.

    Images y_s are drawn from the model, and the known pixels of an image x are taken to be those of
    one y_s with Gaussian noise::

        hidden pixels = Σ_s w_s y_s,    w_s ∝ exp(−‖x − y_s‖²/2σ²), the norm over the known pixels

    Encoding and decoding repeatedly with the known pixels put back is simpler, but had a higher
    error than the mean image: half a digit activates other experts than the whole digit.

    Parameters
    ----------
    network
        Trained.
    images : (N, C, H, W)
        From 0 to 1; hidden pixels may have any value and are not read.
    known : (H, W)
        Boolean mask, False where a pixel is hidden; the same for all images.
    draws
        Size of the sample from the domain ``"joint"``, the same sample for all images.
    noise
        σ, in units of pixel values. With a small σ few draws have weight; with a large σ the
        result is the mean of all draws.
    generator
        Source of the draws, on the device of the model.

    Returns
    -------
    (N, C, H, W)
        The images with their hidden pixels replaced.
    """
    checks.require_int("draws", draws, 1)
    checks.require_nonnegative("noise", noise)
    if noise == 0:
        raise ValueError("noise must be above 0")
    shape = network.architecture.image_shape
    remedy = "give images of the size that the model was trained on"
    checks.require_floating("images", images, pixels=True)
    checks.require_shape("images", images, "BCHW", (None, *shape), remedy)
    checks.require_tensor("known", known)
    checks.require_shape("known", known, "HW", shape[1:], remedy)
    if known.dtype != torch.bool:
        raise TypeError(
            f"known must be a boolean mask, but its dtype is {known.dtype}; "
            "make one by a comparison, such as known > 0"
        )
    checks.check_pixels_on_cpu(images[:, :, known], "images")
    with torch.no_grad():
        drawn = in_batches(network.decode, network.sample(draws, generator=generator))
    distance = torch.cdist(images[:, :, known].flatten(1), drawn[:, :, known].flatten(1)).square()
    weight = (-distance / (2 * noise**2)).softmax(1)
    expected = (weight @ drawn.flatten(1)).view_as(images)
    return torch.where(known, images, expected)


@torch.no_grad()
def interpolate(network: CapsuleNetwork, first: Tensor, second: Tensor, steps: int = 8) -> Tensor:
    """Interpolate linearly between the codes of two images, before squashing.

    Parameters
    ----------
    network
        Trained.
    first, second : (N, C, H, W)
        Start and end, from 0 to 1.
    steps
        Number of images, including both ends; at least 2.

    Returns
    -------
    (N, steps, C, H, W)
        The ends are the reconstructions of the given images.
    """
    checks.require_int("steps", steps, 2)
    if first.shape != second.shape:
        raise ValueError(
            f"first and second must have the same shape, but have {tuple(first.shape)} and "
            f"{tuple(second.shape)}"
        )
    start, end = (F.unsquash(encode(network, images)).unsqueeze(1) for images in (first, second))
    position = torch.linspace(0, 1, steps, dtype=start.dtype, device=start.device)
    codes = F.squash(torch.lerp(start, end, position.view(1, -1, 1, 1)))
    images = in_batches(network.decode, codes.flatten(0, 1))
    return images.view(len(first), steps, *images.shape[1:])


@dataclass(frozen=True, eq=False)
class Neighbours:
    """Result of `nearest_neighbours`."""

    indices: Tensor
    """(N, count), indices of the codes, the nearest first."""
    distances: Tensor
    """(N, count), 1 − cosine."""


def nearest_neighbours(codes: Tensor, queries: Tensor, count: int = 1) -> Neighbours:
    """Find the codes with the highest cosine similarity to each query.

    Parameters
    ----------
    codes : (M, J, D) or (M, S)
        The codes to search, from `encode`.
    queries : (N, J, D) or (N, S)
        The codes whose neighbours are wanted.
    count
        Number of neighbours, at most M.
    """
    checks.require_floating("codes", codes)
    checks.require_floating("queries", queries)
    if codes.ndim < 2 or codes.shape[1:] != queries.shape[1:]:
        raise ValueError(
            "codes and queries must come from the same network, but have shapes "
            f"{tuple(codes.shape)} and {tuple(queries.shape)}"
        )
    checks.require_int("count", count, 1, len(codes))
    codes, queries = F.direction(codes.flatten(1)), F.direction(queries.flatten(1))
    found = [(batch @ codes.T).topk(count) for batch in queries.split(QUERY_BATCH)]
    return Neighbours(
        torch.cat([each.indices for each in found]), 1 - torch.cat([each.values for each in found])
    )
