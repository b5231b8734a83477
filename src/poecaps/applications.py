"""Applications of a trained network: clusters, novelty, inpainting, interpolation, neighbours.

Every function takes a `poecaps.CapsuleNetwork` in evaluation mode, as `poecaps.load` returns it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

import torch

from poecaps import _checks as checks
from poecaps import functional as F
from poecaps._modules import in_batches
from poecaps._progress import counted
from poecaps.metrics import margins
from poecaps.sampling import ANNEALED_SHARE, sample

if TYPE_CHECKING:
    from torch import Tensor

    from poecaps._progress import Report
    from poecaps.network import CapsuleNetwork

__all__ = [
    "Clusters",
    "Neighbours",
    "cluster",
    "denoise",
    "encode",
    "free_energy",
    "inpaint",
    "inpaint_by_density",
    "interpolate",
    "log_prob",
    "nearest_neighbours",
    "novelty_score",
]
Measure = Literal["free_energy", "log_prob"]
MEASURES: tuple[Measure, ...] = get_args(Measure)
QUERY_BATCH = 1000  # queries whose similarities to all codes are in memory together


@torch.no_grad()
def encode(network: CapsuleNetwork, images: Tensor, *, report: Report | None = None) -> Tensor:
    """Encode any number of images, in batches, without gradients: (N, C, H, W) → (N, J, D).

    After each batch, `report` is called with the number of finished images and that of all images.
    """
    batches = images.split(network.images_at_once())
    return in_batches(network.encode, counted(batches, len(images), report))


@dataclass(frozen=True)
class Clusters:
    """Result of `cluster`.

    Attributes
    ----------
    expert : (N,)
        The most active expert of each image.
    firing : (N,)
        Its firing probability.
    margin : (N,)
        How much more active it is than the second: the difference of their log‖z_j‖². At least 0;
        near 0, the choice between the two is arbitrary.
    """

    expert: Tensor
    firing: Tensor
    margin: Tensor


@torch.no_grad()
def cluster(network: CapsuleNetwork, images: Tensor, *, report: Report | None = None) -> Clusters:
    """Sort images by their most active expert: (N, C, H, W) → N clusters.

    After each batch, `report` is called with the number of finished images and that of all images.

    The experts learned without labels, so a cluster has no name. After training with several views
    of every image (`encoder.views`) and about as many experts as there are kinds of objects, the
    images of an expert show one kind.
    """
    return clusters_of(encode(network, images, report=report))


def clusters_of(codes: Tensor) -> Clusters:
    """Sort codes by their most active expert: (N, J, D) → N clusters; see `cluster`."""
    firing = codes.norm(dim=-1)
    best = firing.max(dim=1)
    # ‖squash(z)‖ = ‖z‖²/(1+‖z‖²), so that log‖z‖² is its logit.
    log_odds = torch.logit(firing.double(), eps=torch.finfo(firing.dtype).tiny)
    return Clusters(best.indices, best.values, margins(log_odds).float())


@torch.no_grad()
def log_prob(network: CapsuleNetwork, images: Tensor) -> Tensor:
    """Compute `CapsuleNetwork.log_prob` of any number of images, in batches, without gradients.

    Parameters
    ----------
    network
        Trained, with a density.
    images : (N, C, H, W)
        From 0 to 1.

    Returns
    -------
    (N,)
        In nats; see `novelty_score`.
    """
    return in_batches(network.log_prob, images)


@torch.no_grad()
def free_energy(network: CapsuleNetwork, images: Tensor) -> Tensor:
    """Compute F of any number of images, in batches, without gradients: (N, C, H, W) → (N,)."""
    return in_batches(network.free_energy, images)


def novelty_score(
    network: CapsuleNetwork,
    images: Tensor,
    reference: Tensor | None = None,
    *,
    by: Measure | None = None,
) -> Tensor:
    """Score how much images differ from the training images; higher is more novel.

    The obvious score is −log P(x). It fails in the same way as the likelihoods of deep generative
    models: images with stronger features than any training image may be more probable. An image is
    typical if its log P is typical, neither higher nor lower (Nalisnick et al. 2019). With log P of
    training images as a reference, the score is therefore |log P − median|, divided by the median
    of the same number over the reference.

    Parameters
    ----------
    network
        Trained.
    images : (N, C, H, W)
        From 0 to 1.
    reference : (M,), optional
        The result of the function that `by` names for a few hundred training images or more. None:
        the score is −log P.
    by
        ``"log_prob"``: log P of the density of the network and its base measure, `log_prob`.
        ``"free_energy"``: log P = −F up to a constant, with F of the experts of the first layer,
        `free_energy`. None: ``"log_prob"`` if the network has a density, else ``"free_energy"``.

    Returns
    -------
    (N,)
        With a reference, about half of the training images score below 1.
    """
    if by is None:
        by = "free_energy" if network.density is None else "log_prob"
    checks.require_choice("by", by, MEASURES)
    if reference is not None:
        checks.require_floating("reference", reference)
        checks.require_shape(
            "reference", reference, "M", (None,), f"give the {by} of each of M training images"
        )
        checks.require_images("reference", reference)
        if not bool(reference.isfinite().all()):
            raise ValueError("reference must be finite, but holds NaN or infinite numbers")
    values = free_energy(network, images) if by == "free_energy" else log_prob(network, images)
    if reference is None:
        return values if by == "free_energy" else -values
    median = reference.median()
    spread = (reference - median).abs().median()
    return (values - median).abs() / spread.clamp(min=torch.finfo(spread.dtype).tiny)


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
    checks.require_positive("noise", noise)
    _check_masked(network, images, known)
    with torch.no_grad():
        drawn = in_batches(network.decode, network.sample(draws, generator=generator))
    distance = torch.cdist(images[:, :, known].flatten(1), drawn[:, :, known].flatten(1)).square()
    weight = (-distance / (2 * noise**2)).softmax(1)
    expected = (weight @ drawn.flatten(1)).view_as(images)
    return torch.where(known, images, expected)


def inpaint_by_density(
    network: CapsuleNetwork,
    images: Tensor,
    known: Tensor,
    *,
    noise: float = 0.1,
    draws: int = 8,
    steps: int = 300,
    generator: torch.Generator | None = None,
    report: Report | None = None,
) -> Tensor:
    """Replace hidden pixels by draws from their posterior under the density of the network.

    The known pixels of an image are taken to be those of the decoded capsules x with Gaussian noise
    of standard deviation σ. Markov chains draw x from its posterior::

        P(x | known pixels) ∝ P(x) exp(−‖decode(x) − image‖²/2σ²), the norm over the known pixels

    If the experts read the principal components y = Vᵀx of the base measure alone, as after
    training with `base_components`, this is the posterior of y, with x = V y: all other
    directions, which can hardly be seen, are left at their mean, and chains are shorter in time.
    It is not the posterior of x, in which these directions explain a part of the known pixels.

    Chains of a few hundred steps have not converged: their draws fit the known pixels less well
    than those of longer ones.

    Parameters
    ----------
    network
        Trained, with a density.
    images : (N, C, H, W)
        From 0 to 1; hidden pixels may have any value and are not read.
    known : (H, W)
        Boolean mask, False where a pixel is hidden; the same for all images.
    noise
        σ, in units of pixel values.
    draws
        Chains for each image.
    steps
        Steps of a chain, which starts from noise.
    generator
        Source of random numbers, on the device of the model.
    report
        Called with the number of finished steps and that of all steps.

    Returns
    -------
    (draws, N, C, H, W)
        The images with their hidden pixels replaced. Their mean over the draws has the smallest
        squared error.
    """
    _check_masked(network, images, known)
    drawn = _posterior(network, images, known, noise, draws, steps, generator, report)
    return torch.where(known, images, drawn)


def denoise(
    network: CapsuleNetwork,
    images: Tensor,
    *,
    noise: float,
    draws: int = 8,
    steps: int = 300,
    generator: torch.Generator | None = None,
    report: Report | None = None,
) -> Tensor:
    """Remove Gaussian noise from images: the mean of the posterior under the density.

    Parameters
    ----------
    network
        Trained, with a density.
    images : (N, C, H, W)
        Images with noise. Values outside 0…1 are allowed.
    noise
        Standard deviation of the noise, in units of pixel values.
    draws, steps, generator, report
        As in `inpaint_by_density`.

    Returns
    -------
    (N, C, H, W)
        From 0 to 1.
    """
    known = torch.ones(images.shape[2:], dtype=torch.bool, device=images.device)
    _check_masked(network, images, known, pixels=False)
    drawn = _posterior(network, images, known, noise, draws, steps, generator, report)
    return drawn.mean(0)


def _posterior(
    network: CapsuleNetwork,
    images: Tensor,
    known: Tensor,
    noise: float,
    draws: int,
    steps: int,
    generator: torch.Generator | None,
    report: Report | None,
) -> Tensor:
    """Draw images given the known pixels of others: (N, C, H, W) → (draws, N, C, H, W)."""
    checks.require_positive("noise", noise)
    checks.require_int("draws", draws, 1)
    checks.require_int("steps", steps, 2)
    checks.require_images("images", images)
    density = network.require_density()
    seen = images[:, :, known].flatten(1).repeat(draws, 1)
    in_components = density.reads_components_alone()

    def decode(x: Tensor) -> Tensor:
        return network.decode_whitened(density.from_components(x) if in_components else x)

    def evidence(x: Tensor) -> Tensor:
        decoded = decode(x)[:, :, known].flatten(1)
        return (decoded - seen).square().sum(-1) / (2 * noise**2)

    anneal = round(ANNEALED_SHARE * steps)
    samples = sample(
        density.restrict() if in_components else density,
        len(seen),
        steps=steps - anneal,
        anneal=anneal,
        evidence=evidence,
        generator=generator,
        report=report,
    )
    with torch.no_grad():
        decoded = in_batches(decode, samples.capsules)
    return decoded.view(draws, *images.shape)


def _check_masked(
    network: CapsuleNetwork, images: Tensor, known: Tensor, *, pixels: bool = True
) -> None:
    """Raise an error if images or the mask of their known pixels do not fit a network."""
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
    if pixels:
        checks.check_pixels_on_cpu(images[:, :, known], "images")
    else:
        checks.check_values_on_cpu(images, "images", ball=False)


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
