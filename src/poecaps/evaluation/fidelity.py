"""Measures of samples that need no labels, and that a change of contrast does not improve.

The features are those of a convolutional network with random weights (`RandomFeatures`). Naeem et
al. (2020) found such features to be as good as those of trained classifiers for images that are far
from photographs. Before the features are computed, `match_contrast` gives the samples the pixel
values of the training images, so that no monotone change of contrast has an effect.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn

from poecaps import _checks as checks
from poecaps._modules import in_batches
from poecaps.evaluation.measures import covariance_root, moments

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

LEVELS = 256  # values of a pixel that are told apart
NEIGHBOURS = 5  # as in Naeem et al.
MAX_NEAREST = 1000  # images whose nearest training image is searched for
CHUNK = 1000  # rows whose distances to all others are in memory together
NEGLIGIBLE = 1e-12  # share of the largest eigenvalue that is a rounding error of float64
Z_95 = 1.96  # half-width of a 95 % interval of a Gaussian, in standard errors


# --------------------------------------------------------------------------------------------------
# Contrast


def pixel_levels(batches: Iterable[Tensor]) -> Tensor:
    """Count how often each of 256 pixel values occurs in images: (B, C, H, W), … → (256,)."""
    counts = torch.zeros(LEVELS, dtype=torch.long)
    for images in batches:
        level = (images * (LEVELS - 1)).round().long().flatten()
        counts += level.bincount(minlength=LEVELS).cpu()
    if not counts.any():
        raise ValueError("batches must contain at least one image, but is empty")
    return counts


def match_contrast(images: Tensor, levels: Tensor) -> Tensor:
    """Replace the pixel values of images so that they are distributed as in other images.

    The value x of a pixel becomes the quantile of the other images' values that belongs to the rank
    of x among all pixels of all `images`; equal values have their mean rank. This is one monotone
    function for all images. Hence the result is the same for images and for any strictly monotone
    change of their contrast, and images that already have the distribution stay as they are, but
    for the rounding to 256 values.

    Parameters
    ----------
    images : (N, C, H, W)
    levels : (256,)
        From `pixel_levels`, for the training images.

    Returns
    -------
    (N, C, H, W)
    """
    checks.require_shape("levels", levels, "L", (LEVELS,), "use pixel_levels of training images")
    _, index, counts = images.flatten().unique(return_inverse=True, return_counts=True)
    rank = (counts.cumsum(0) - counts / 2) / images.numel()
    cumulative = levels.to(images.device).double().cumsum(0) / levels.sum()
    level = torch.searchsorted(cumulative, rank.double()).clamp(max=LEVELS - 1)
    matched: Tensor = (level.to(images.dtype) / (LEVELS - 1))[index].view_as(images)
    return matched


def change_contrast(images: Tensor, gain: float) -> Tensor:
    """Multiply the logits of pixels by `gain`: sigmoid(gain · logit(x)), with 0 → 0 and 1 → 1."""
    checks.require_positive("gain", gain)
    changed: Tensor = torch.sigmoid(gain * torch.logit(images.double())).to(images.dtype)
    return changed


# --------------------------------------------------------------------------------------------------
# Features without labels


class RandomFeatures(nn.Module):
    """Features of images by a convolutional network with fixed random weights.

    Four convolutions with 3×3 filters and rectified units, average pooling after the first, second
    and fourth, and a random projection. The filters of the first convolution have mean 0, so that a
    constant image has no features. The weights come from `numpy.random.RandomState`, whose numbers
    are the same in every release of NumPy.

    Parameters
    ----------
    channels
        C of the images.
    features
        F, the number of features.
    """

    WIDTHS = (16, 32, 64, 64)
    POOLED = 3  # rows and columns of the last pooling

    def __init__(self, channels: int = 1, features: int = 128) -> None:
        super().__init__()
        for name, value in {"channels": channels, "features": features}.items():
            checks.require_int(name, value, 1)
        self.channels = channels
        random = np.random.RandomState(0)  # unlike a Generator, its numbers never change

        def normal(*shape: int) -> nn.Parameter:
            scale = math.sqrt(2 / math.prod(shape[1:]))
            values = torch.from_numpy(scale * random.standard_normal(shape)).float()
            return nn.Parameter(values, requires_grad=False)

        sizes = zip(self.WIDTHS, (channels, *self.WIDTHS[:-1]), strict=True)
        self.filters = nn.ParameterList([normal(out, into, 3, 3) for out, into in sizes])
        self.filters[0] -= self.filters[0].mean((2, 3), keepdim=True)
        self.projection = normal(features, self.WIDTHS[-1] * self.POOLED**2)

    def forward(self, images: Tensor) -> Tensor:
        """Compute features: (B, C, H, W) in [0, 1] → (B, F)."""
        checks.require_floating("images", images, pixels=True)
        remedy = "give the number of channels of the images to RandomFeatures"
        checks.require_shape("images", images, "BCHW", (None, self.channels, None, None), remedy)
        x = images
        for number, weight in enumerate(self.filters):
            x = nn.functional.conv2d(x, weight, padding=1).relu_()
            if number < 2:
                x = nn.functional.avg_pool2d(x, 2, ceil_mode=True)
        x = nn.functional.adaptive_avg_pool2d(x, self.POOLED)
        return x.flatten(1) @ self.projection.T

    @torch.no_grad()
    def extract(self, images: Tensor) -> Tensor:
        """Compute features in batches: (N, C, H, W) → (N, F)."""
        return in_batches(self, images, 100)


# --------------------------------------------------------------------------------------------------
# Neighbours


@dataclass(frozen=True)
class Neighbourhoods:
    """Result of `neighbourhoods`."""

    precision: float
    """Share of the samples in the neighbourhood of a reference image: realistic samples."""
    recall: float
    """Share of the reference images in the neighbourhood of a sample."""
    density: float
    """Mean number of neighbourhoods of reference images that contain a sample, divided by k."""
    coverage: float
    """Share of the reference images whose neighbourhood contains a sample."""
    precision_error: float
    """Standard errors: over samples of precision and density, over reference images else."""
    recall_error: float
    density_error: float
    coverage_error: float


def neighbourhoods(samples: Tensor, reference: Tensor, k: int = NEIGHBOURS) -> Neighbourhoods:
    """Compute precision, recall, density and coverage (Naeem et al. 2020).

    The neighbourhood of a point is the ball around it up to its k-th nearest neighbour in its own
    set. Two sets of the same distribution have a density of 1 and, if they are equally large, a
    coverage of 1 − 2^−k, 97 % for k = 5.

    Parameters
    ----------
    samples, reference : (N, F), (M, F)
        Features, of more than k points each.
    k
        Number of neighbours.
    """
    checks.require_int("k", k, 1)
    for name, points in {"samples": samples, "reference": reference}.items():
        checks.require_shape(name, points, "NF", (None, reference.shape[-1]), "use equal features")
        if len(points) <= k:
            raise ValueError(f"{name} must have more than k = {k} rows, but has {len(points)}")
    x, y = samples.double(), reference.double()
    x_radius, y_radius = _radii(x, k), _radii(y, k)
    near: list[Tensor] = []  # of each sample, the number of reference images that are that near
    recalled = torch.zeros(len(y), dtype=torch.bool, device=y.device)
    covered = torch.zeros_like(recalled)
    for part, radius in zip(x.split(CHUNK), x_radius.split(CHUNK), strict=True):
        distance = _distances(part, y)
        inside = distance <= y_radius
        near.append(inside.sum(1))
        covered |= inside.any(0)
        recalled |= (distance <= radius.unsqueeze(1)).any(0)
    count = torch.cat(near).double()
    values = ((count > 0).double(), recalled.double(), count / k, covered.double())
    return Neighbourhoods(*(each.mean().item() for each in values), *map(_mean_error, values))


def _radii(points: Tensor, k: int) -> Tensor:
    """Compute the distance of every point to its k-th nearest neighbour: (N, F) → (N,)."""
    # The nearest point is the point itself.
    return torch.cat([_distances(x, points).kthvalue(k + 1).values for x in points.split(CHUNK)])


def _distances(x: Tensor, y: Tensor) -> Tensor:
    return torch.cdist(x, y, compute_mode="use_mm_for_euclid_dist")


def _mean_error(values: Tensor) -> float:
    """Compute the standard error of a mean: (N,) → ()."""
    return (values.double().std() / math.sqrt(len(values))).item()


@dataclass(frozen=True)
class NearestImages:
    """Result of `nearest_images`."""

    median: float
    """Median distance of samples to the nearest training image."""
    test_median: float
    """The same of test images."""
    nearer: float
    """Probability that a sample is nearer to the training images than a test image is."""
    nearer_error: float
    """Its standard error over samples."""


def nearest_images(samples: Tensor, test: Tensor) -> NearestImages:
    """Compare how near samples and test images are to their nearest training images.

    `nearer` is ½ for a perfect model, and 1 for copies of training images. Blurred images are near
    to all others, so a large value has two possible reasons.

    Parameters
    ----------
    samples, test : (N,), (M,)
        From `distances_to_nearest`.
    """
    order = test.sort().values
    below = torch.searchsorted(order, samples, right=True)  # test images that are at most as far
    tied = below - torch.searchsorted(order, samples)
    nearer = 1 - (below - tied / 2).double() / len(test)
    return NearestImages(
        samples.median().item(), test.median().item(), nearer.mean().item(), _mean_error(nearer)
    )


def distances_to_nearest(images: Tensor, training: Iterable[Tensor]) -> Tensor:
    """Compute the Euclidean distance over pixels to the nearest training image.

    Parameters
    ----------
    images : (N, C, H, W)
    training : iterable of (B, C, H, W)

    Returns
    -------
    (N,)
    """
    x = images.flatten(1)
    nearest = x.new_full((len(x),), math.inf)
    for batch in training:
        nearest = torch.minimum(nearest, _distances(x, batch.flatten(1)).amin(1))
    return nearest


# --------------------------------------------------------------------------------------------------
# Intervals


@torch.no_grad()
def frechet_error(samples: Tensor, reference: Tensor) -> float:
    """Compute the standard error of a Fréchet distance over samples.

    This is the infinitesimal jackknife, the limit of the bootstrap without its random numbers: the
    standard deviation of the influence of single samples x on the distance, divided by √N. With
    mean μ₁ and covariance Σ₁ of the samples, and μ₂, Σ₂ of the reference, the influence is::

        2(μ₁ − μ₂)·(x − μ₁) + (x − μ₁)ᵀ G (x − μ₁) + const,   G = 1 − Σ₂^½ (Σ₂^½ Σ₁ Σ₂^½)^−½ Σ₂^½

    The reference is held fixed, because all models are compared with the same images.

    Parameters
    ----------
    samples, reference : (N, F), (M, F)
        See `frechet_distance`.
    """
    mean_1, covariance_1 = moments(samples)
    mean_2, covariance_2 = moments(reference)
    root = covariance_root(covariance_2)
    values, vectors = torch.linalg.eigh(root @ covariance_1 @ root)
    known = values > NEGLIGIBLE * values[-1]  # directions in which the samples vary at all
    inverse_root = vectors[:, known] * values[known].rsqrt() @ vectors[:, known].T
    gradient = torch.eye(len(root), device=root.device).double() - root @ inverse_root @ root
    centred = samples.double() - mean_1
    influence = 2 * centred @ (mean_1 - mean_2) + (centred @ gradient * centred).sum(1)
    return _mean_error(influence)
