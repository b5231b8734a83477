"""Measures of codes and samples: one function per measure, with its definition in the docstring."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from poecaps import _checks as checks
from poecaps.evaluation.probe import check_rows

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

CONFIDENT = 0.9  # probability from which a prediction counts as confident
# A pixel belongs to the background if it is dark (or bright) in this share of the training images.
BACKGROUND_AGREEMENT = 0.95
# Negatives are detected only if at least this share of the pixels belongs to the background.
MIN_BACKGROUND = 0.05
MAX_COMPARED = 1000  # images of a class used for pairwise distances


@dataclass(frozen=True)
class FrechetDistance:
    """Result of `frechet_distance`."""

    distance: float
    """The sum of the two terms."""
    mean_term: float
    """‖μ₁ − μ₂‖²."""
    covariance_term: float
    """tr(Σ₁ + Σ₂ − 2(Σ₁Σ₂)^½)."""


def frechet_distance(first: Tensor, second: Tensor) -> FrechetDistance:
    """Compute the Fréchet distance of two sets of features, each treated as a Gaussian.

    With mean μ and covariance Σ of each set::

        ‖μ₁ − μ₂‖² + tr(Σ₁ + Σ₂ − 2(Σ₁Σ₂)^½)

    The distance is 0 if the moments are equal. It is biased upwards for small sets, so compare
    only distances of sets of equal size. Computed in float64; tr(Σ₁Σ₂)^½ is the sum of the square
    roots of the eigenvalues of Σ₁^½ Σ₂ Σ₁^½.

    Parameters
    ----------
    first, second : (N, F), (M, F)
        At least two rows each.
    """
    for name, features in {"first": first, "second": second}.items():
        checks.require_shape(
            name, features, "NF", (None, first.shape[-1]), "use the same features for both"
        )
        if len(features) < 2:
            raise ValueError(
                f"{name} must have at least 2 rows to have a covariance, but has {len(features)}"
            )
    mean_1, covariance_1 = moments(first)
    mean_2, covariance_2 = moments(second)
    root = covariance_root(covariance_1)
    cross = torch.linalg.eigvalsh(root @ covariance_2 @ root).clamp(min=0).sqrt().sum()
    mean_term = (mean_1 - mean_2).square().sum().item()
    covariance_term = (covariance_1.trace() + covariance_2.trace() - 2 * cross).item()
    return FrechetDistance(mean_term + covariance_term, mean_term, covariance_term)


def moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Compute mean and covariance in float64: (N, F) → (F,), (F, F)."""
    x = x.double()
    return x.mean(0), torch.atleast_2d(x.T.cov())


def covariance_root(covariance: Tensor) -> Tensor:
    """Compute the symmetric square root of a covariance: (F, F) → (F, F)."""
    values, vectors = torch.linalg.eigh(covariance)
    root: Tensor = vectors * values.clamp(min=0).sqrt() @ vectors.T
    return root


@dataclass(frozen=True)
class Recognisability:
    """Result of `recognisability`."""

    share: float
    """Share of the samples with a confident prediction."""
    mean_confidence: float
    """Mean of the highest class probability."""


def recognisability(probabilities: Tensor, *, confident: float = CONFIDENT) -> Recognisability:
    """Compute the share of samples whose highest class probability is at least `confident`.

    Parameters
    ----------
    probabilities : (N, classes)
        Class probabilities from a classifier.
    confident
        Threshold in [0, 1].
    """
    top = probabilities.amax(1)
    return Recognisability((top >= confident).double().mean().item(), top.double().mean().item())


@dataclass(frozen=True)
class Diversity:
    """Result of `diversity`."""

    entropy: float
    """In nats."""
    effective_classes: float
    """exp(entropy), the number of equally frequent classes with this entropy."""


def diversity(predicted: Tensor) -> Diversity:
    """Compute the entropy −Σ_c p_c log p_c of predicted classes.

    p_c is the share of the samples for which class c is predicted.

    Parameters
    ----------
    predicted : (N,)
        The most probable class of each sample.
    """
    entropy = _entropy(_frequencies(predicted)).item()
    return Diversity(entropy, torch.tensor(entropy).exp().item())


@dataclass(frozen=True)
class Clustering:
    """Result of `clustering` and `specialisation`."""

    mutual_information: float
    """I(cluster; label), in nats."""
    normalised: float
    """I(cluster; label) / ½(H(cluster) + H(label)), from 0 to 1."""
    adjusted: float
    """The same, adjusted for chance: 0 for uninformative clusters, 1 for one cluster per label."""
    effective_experts: float
    """exp(H(cluster)), the effective number of clusters; of experts, those that are active."""
    accuracy: float
    """Share of the images in the cluster that the best matching assigns to their label."""
    purity: float
    """Share of the images that have the most frequent label of their cluster."""
    adjusted_rand: float
    """Adjusted Rand index: agreement of pairs of images, 0 by chance and 1 at most."""


def specialisation(firing: Tensor, labels: Tensor) -> Clustering:
    """Compare the most active expert of an image with its label; see `clustering`.

    Parameters
    ----------
    firing : (N, J)
        Firing probabilities.
    labels : (N,)
    """
    check_rows("firing", firing, "labels", labels)
    return clustering(firing.argmax(1), labels)


def clustering(clusters: Tensor, labels: Tensor) -> Clustering:
    """Compare a clustering of images with their labels.

    With p(j, c) the share of the images with cluster j and label c::

        I = Σ_jc p(j, c) log( p(j, c) / (p(j) p(c)) ),     NMI = I / ½(H(j) + H(c))

    NMI is scikit-learn's ``normalized_mutual_info_score``. It is 0 if all images are in one
    cluster. With many clusters and few images it exceeds 0 by chance. To compare models with
    different numbers of clusters, use the adjusted mutual information, scikit-learn's
    ``adjusted_mutual_info_score``, where E is the mean of I over all permutations of the labels::

        AMI = (I − E) / (½(H(j) + H(c)) − E)

    The accuracy is Σ p(j, c) over the one-to-one matching of clusters and labels that makes it
    largest (the Hungarian method), so clusters without a label of their own count as errors; the
    purity is Σ_j max_c p(j, c), and grows with the number of clusters. The adjusted Rand index is
    scikit-learn's ``adjusted_rand_score``.

    Parameters
    ----------
    clusters : (N,)
        Number of the cluster of each image, from 0.
    labels : (N,)
    """
    if clusters.ndim != 1 or clusters.shape != labels.shape or not len(labels):
        raise ValueError(
            "clusters and labels must have one number for each image, but have the shapes "
            f"{tuple(clusters.shape)} and {tuple(labels.shape)}"
        )
    _, label = labels.to(clusters.device).unique(return_inverse=True)
    pair = clusters * (label.max() + 1) + label
    entropy_cluster, entropy_label, entropy_pair = (
        _entropy(_frequencies(values)) for values in (clusters, label, pair)
    )
    information = (entropy_cluster + entropy_label - entropy_pair).clamp(min=0)
    mean_entropy = (entropy_cluster + entropy_label) / 2
    # Two constant labellings agree perfectly but carry no information: the score is 0, not 1.
    normalised = (information / mean_entropy).item() if mean_entropy > 0 else 0.0
    chance = _expected_information(clusters.bincount(), label.bincount()).to(mean_entropy)
    gap = mean_entropy - chance
    counts = pair.bincount(minlength=int((clusters.max() + 1) * (label.max() + 1)))
    table = counts.view(-1, int(label.max()) + 1).cpu()  # images by cluster and label
    return Clustering(
        mutual_information=information.item(),
        normalised=normalised,
        adjusted=((information - chance) / gap).item() if gap > 1e-12 else 0.0,
        effective_experts=entropy_cluster.exp().item(),
        accuracy=_largest_matching(table.tolist()) / len(labels),
        purity=table.amax(1).sum().item() / len(labels),
        adjusted_rand=_adjusted_rand(table),
    )


def _adjusted_rand(table: Tensor) -> float:
    """Compute (R − E[R]) / (max R − E[R]), with R the pairs that are together in both: (J, C)."""

    def pairs(counts: Tensor) -> float:
        counts = counts.double()
        return float((counts * (counts - 1) / 2).sum())

    together, first, second = pairs(table), pairs(table.sum(1)), pairs(table.sum(0))
    chance = first * second / max(1.0, pairs(table.sum()))
    most = (first + second) / 2
    return (together - chance) / (most - chance) if most > chance else 1.0


def _largest_matching(table: list[list[int]]) -> int:
    """Compute the largest sum of entries, of which no two are in the same row or column.

    The Hungarian method: rows are added one at a time, each by the shortest augmenting path, with a
    price for every row and column that keeps all reduced costs nonnegative.
    """
    if len(table) > len(table[0]):
        table = [list(column) for column in zip(*table, strict=True)]
    rows, columns = len(table), len(table[0])
    row_price, column_price = [0.0] * rows, [0.0] * columns
    row_of: list[int | None] = [None] * columns
    for new in range(rows):
        distance, came_from = [math.inf] * columns, [-1] * columns
        visited: set[int] = set()
        row: int | None = new
        reached, column = 0.0, -1
        while row is not None:  # until a column is free
            for each in range(columns):
                cost = reached - table[row][each] - row_price[row] - column_price[each]
                if each not in visited and cost < distance[each]:
                    distance[each], came_from[each] = cost, column
            column = min(
                (each for each in range(columns) if each not in visited),
                key=distance.__getitem__,
            )
            visited.add(column)
            reached, row = distance[column], row_of[column]
        row_price[new] += reached
        for each in visited - {column}:
            other = row_of[each]
            assert other is not None  # noqa: S101 (only the last column was free)
            row_price[other] += reached - distance[each]
            column_price[each] -= reached - distance[each]
        while column >= 0:  # along the path, every column takes the row of the one before
            before = came_from[column]
            row_of[column] = new if before < 0 else row_of[before]
            column = before
    return sum(table[row][each] for each, row in enumerate(row_of) if row is not None)


def _expected_information(first: Tensor, second: Tensor) -> Tensor:
    """Compute the expected mutual information of two random labellings: (J,), (C,) → ().

    The arguments are the class counts of the labellings, and the expectation is over all
    permutations. Classes of a and b among n images have k images in common with the hypergeometric
    probability (a choose k)(n−a choose b−k) / (n choose b), and contribute k/n · log(kn/ab).
    """
    n = first.sum().double().cpu()
    b = second[second > 0].double().cpu().unsqueeze(1)
    k = torch.arange(1, int(b.max()) + 1, dtype=torch.float64)
    total = torch.zeros((), dtype=torch.float64)
    for a in first[first > 0].double().cpu():
        # For impossible k, the factorial of a negative number makes the probability exp(−∞) = 0.
        probability = (_log_choose(a, k) + _log_choose(n - a, b - k) - _log_choose(n, b)).exp()
        total += (probability * k / n * (k * n / (a * b)).log()).sum()
    return total


def _log_choose(n: Tensor, k: Tensor) -> Tensor:
    return torch.lgamma(n + 1) - torch.lgamma(k + 1) - torch.lgamma(n - k + 1)


def _frequencies(values: Tensor) -> Tensor:
    """Compute the relative frequency of each distinct value: (N,) → (V,)."""
    counts = values.unique(return_counts=True)[1].double()
    frequencies: Tensor = counts / counts.sum()
    return frequencies


def _entropy(frequencies: Tensor) -> Tensor:
    entropy: Tensor = torch.special.entr(frequencies).sum()
    return entropy


@dataclass(frozen=True)
class Purity:
    """Result of `purity`."""

    mean: float
    """Mean over the experts."""
    per_expert: tuple[float, ...]
    """Share of the most frequent predicted class, for each expert."""
    labels: tuple[int, ...]
    """The most frequent predicted class, for each expert."""


def purity(predicted: Tensor) -> Purity:
    """Compute the share of the most frequent predicted class among the draws of one expert.

    Parameters
    ----------
    predicted : (J, n)
        Predicted classes of the n draws of each expert.
    """
    counted = [row.unique(return_counts=True) for row in predicted]
    per_expert = tuple(counts.max().item() / predicted.shape[1] for _, counts in counted)
    labels = tuple(int(values[counts.argmax()]) for values, counts in counted)
    return Purity(sum(per_expert) / len(per_expert), per_expert, labels)


@dataclass(frozen=True)
class Variety:
    """Result of `variety`."""

    mean: float
    """Mean over the experts."""
    per_expert: tuple[float, ...]
    """For each expert; NaN if its class has fewer than two test images."""


def variety(draws: Iterable[Tensor], predicted: Tensor, images: Tensor, labels: Tensor) -> Variety:
    """Compute how much the draws of one expert differ, relative to test images of the same class.

    For expert j, let c be the most frequent predicted class of its draws, G_j its draws with
    predicted class c, and T_c the test images with label c. With d(A) the mean Euclidean distance,
    over pixels, of two different members of A::

        variety_j = d(G_j) / d(T_c)

    An expert that always draws the same image has variety 0; one whose draws differ as much as the
    test images of its class has 1. Only draws of one class are compared, so an expert does not gain
    by drawing several classes. Noise increases the variety, so read it together with
    `recognisability`. At most 1,000 images of a class are compared. The mean leaves out experts
    whose class has fewer than two test images.

    Parameters
    ----------
    draws : J tensors (n, C, H, W)
    predicted : (J, n)
        Predicted classes of the draws.
    images : (M, C, H, W)
        Test images.
    labels : (M,)
        Labels of the test images, in the numbering of `predicted`.
    """
    reference: dict[int, float] = {}
    per_expert = []
    for drawn, classes, main in zip(draws, predicted, purity(predicted).labels, strict=True):
        if main not in reference:
            reference[main] = _mean_distance(images[(labels == main).to(images.device)])
        per_expert.append(
            _mean_distance(drawn[classes == main]) / reference[main]
            if reference[main]
            else float("nan")
        )
    known = [value for value in per_expert if value == value]
    return Variety(sum(known) / len(known) if known else float("nan"), tuple(per_expert))


def _mean_distance(images: Tensor) -> float:
    """Compute the mean Euclidean distance of two different images; 0 for fewer than two."""
    flat = images[:MAX_COMPARED].flatten(1).float()
    return torch.nn.functional.pdist(flat).double().mean().item() if len(flat) > 1 else 0.0


@dataclass(frozen=True)
class Variation:
    """Result of `variation`: means over the experts."""

    thickness: float
    slant: float
    width: float
    height: float


def variation(
    draws: Iterable[Tensor], predicted: Tensor, images: Tensor, labels: Tensor
) -> Variation:
    """Compute how much each of four `properties` varies over the draws of one expert.

    `variety` compares pixels; this function compares properties that have names. For expert j and
    each property, it divides the standard deviation over the draws with the most frequent
    predicted class c by the standard deviation over the test images with label c. 0: the property
    is always the same; 1: it varies as much as over the test images of the class.

    Parameters
    ----------
    draws, predicted, images, labels
        See `variety`.
    """
    reference: dict[int, Tensor] = {}
    per_expert = []
    for drawn, classes, main in zip(draws, predicted, purity(predicted).labels, strict=True):
        if main not in reference:
            reference[main] = _deviations(images[(labels == main).to(images.device)])
        per_expert.append(_deviations(drawn[classes == main]) / reference[main])
    return Variation(*torch.stack(per_expert).nanmean(0).tolist())


def _deviations(images: Tensor) -> Tensor:
    """Compute the standard deviation of each property; NaN for fewer than two images."""
    values = properties(images)
    return values.std(0) if len(values) > 1 else torch.full_like(values.sum(0), torch.nan)


def properties(images: Tensor) -> Tensor:
    """Measure thickness, slant, width and height of bright objects: (N, C, H, W) → (N, 4), float64.

    With x the sum of the image's channels and μ_ab its central moments, a along columns and b
    along rows::

        thickness = 2 Σx / Σ‖∇x‖       a stroke of width w and length l has area wl and outline 2l
        slant     = μ₁₁ / μ₀₂          columns to the side per row down
        width     = √(μ₂₀ − μ₁₁²/μ₀₂)  of the image without its slant
        height    = √μ₀₂
    """
    x = images.double().sum(1)
    down, across = (torch.diff(x, dim=axis, prepend=x.narrow(axis, 0, 1)) for axis in (1, 2))
    total = x.sum((1, 2)).clamp(min=1e-9)
    thickness = 2 * total / (down.square() + across.square()).sqrt().sum((1, 2)).clamp(min=1e-9)
    mass = x / total.view(-1, 1, 1)
    rows, columns = (torch.arange(side, dtype=x.dtype, device=x.device) for side in x.shape[1:])
    v = rows.view(1, -1, 1) - (mass.sum(2) @ rows).view(-1, 1, 1)
    u = columns.view(1, 1, -1) - (mass.sum(1) @ columns).view(-1, 1, 1)
    mu_02, mu_20, mu_11 = ((mass * moment).sum((1, 2)) for moment in (v * v, u * u, u * v))
    slant = mu_11 / mu_02.clamp(min=1e-9)
    width = (mu_20 - slant * mu_11).clamp(min=0).sqrt()
    return torch.stack([thickness, slant, width, mu_02.sqrt()], 1)


@dataclass(frozen=True)
class Background:
    """Result of `background`."""

    mean: Tensor
    """(C, H, W), the mean training image."""
    mask: Tensor
    """(C, H, W), bool: the pixels that belong to the background."""


def background(batches: Iterable[Tensor]) -> Background:
    """Find the background: the pixels that are dark, or bright, in almost all training images.

    A pixel belongs to the background if it is below ½ in at least 95 % of the images, or above ½
    in at least 95 %. On MNIST and Fashion-MNIST these are the pixels at the border, although some
    pullovers fill the frame.

    Parameters
    ----------
    batches : iterable of (B, C, H, W)
        All training images.
    """
    count, total, dark, bright = 0, torch.zeros(()), torch.zeros(()), torch.zeros(())
    for images in batches:
        count += len(images)
        total = images.sum(0, dtype=torch.float64) + total.to(images.device)
        dark = (images < 0.5).sum(0) + dark.to(images.device)
        bright = (images > 0.5).sum(0) + bright.to(images.device)
    if count == 0:
        raise ValueError("batches must contain at least one image, but is empty")
    mask = torch.maximum(dark, bright) >= BACKGROUND_AGREEMENT * count
    return Background((total / count).float(), mask)


@dataclass(frozen=True)
class Negatives:
    """Result of `negatives`."""

    share: float | None
    """Share of the images that are negatives; None if the training images share no background."""
    background_pixels: int
    """Number of pixels that belong to the background."""


def negatives(images: Tensor, background: Background) -> Negatives:
    """Compute the share of negatives: images that are bright where the training images are dark.

    An image x is a negative if, over the pixels p of the `background`, it is closer to the negative
    1 − m of the mean training image m than to m itself::

        Σ_p (x_p − (1 − m_p))²  <  Σ_p (x_p − m_p)²

    Only the background is compared, so that an object that fills the frame does not count as a
    negative. If less than 5 % of the pixels belong to the background, as in photographs, negatives
    cannot be detected, and the share is None.

    Parameters
    ----------
    images : (N, C, H, W)
    background
        Background of the training images.
    """
    pixels = int(background.mask.sum())
    if pixels < MIN_BACKGROUND * background.mask.numel():
        return Negatives(None, pixels)
    return Negatives(are_negatives(images, background).double().mean().item(), pixels)


def are_negatives(images: Tensor, background: Background) -> Tensor:
    """Return which images are negatives in the sense of `negatives`: (N, C, H, W) → (N,)."""
    x = images[:, background.mask.to(images.device)]
    m = background.mean[background.mask].to(images.device)
    nearer: Tensor = (x - (1 - m)).square().sum(1) < (x - m).square().sum(1)
    return nearer


@dataclass(frozen=True)
class Reconstruction:
    """Result of `reconstruction`."""

    error: float
    """Mean squared error per pixel."""
    relative: float
    """Error divided by that of the mean training image: 0 is perfect, 1 equals the mean image."""


def reconstruction(pairs: Iterable[tuple[Tensor, Tensor]], mean: Tensor) -> Reconstruction:
    """Compute the mean squared error of reconstructions, and its ratio to that of the mean image.

    Parameters
    ----------
    pairs : iterable of (B, C, H, W), (B, C, H, W)
        Images and their reconstructions.
    mean : (C, H, W)
        The mean training image.
    """
    pixels, error, baseline = 0, 0.0, 0.0
    for images, reconstructed in pairs:
        pixels += images.numel()
        error += (reconstructed - images).double().square().sum().item()
        baseline += (mean.to(images.device) - images).double().square().sum().item()
    if pixels == 0:
        raise ValueError("pairs must contain at least one image, but is empty")
    return Reconstruction(error / pixels, error / baseline if baseline else float("nan"))
