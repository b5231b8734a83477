"""What is measured on codes and samples: one short function for each measure, its definition in its docstring."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from poecaps import _checks as checks
from poecaps.evaluation.probe import check_rows

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

CONFIDENT = 0.9
STEADY = 0.95  # share of the training images that must agree on a pixel of the background
FEWEST_WITNESSES = 0.05  # share of the pixels that must be background for a negative to be told
MOST_COMPARED = 1000  # images of one kind that are compared pair by pair


@dataclass(frozen=True)
class FrechetDistance:
    """Result of `frechet_distance`."""

    distance: float
    """The sum of the two parts."""
    of_means: float
    """‖μ₁ − μ₂‖²."""
    of_covariances: float
    """tr(Σ₁ + Σ₂ − 2(Σ₁Σ₂)^½)."""


def frechet_distance(first: Tensor, second: Tensor) -> FrechetDistance:
    """Measure how far two sets of features are apart, as two Gaussians.

    With mean μ and covariance Σ of each set::

        ‖μ₁ − μ₂‖² + tr(Σ₁ + Σ₂ − 2(Σ₁Σ₂)^½)

    It is 0 for equal moments. Small sets give too large a distance, so compare only what was measured with equal
    numbers. Computed in float64, with tr(Σ₁Σ₂)^½ as the sum of the roots of the eigenvalues of Σ₁^½ Σ₂ Σ₁^½.

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
                f"{name} must hold at least 2 rows to have a covariance, but holds {len(features)}"
            )
    mean_1, covariance_1 = _moments(first)
    mean_2, covariance_2 = _moments(second)
    values, vectors = torch.linalg.eigh(covariance_1)
    root = vectors * values.clamp(min=0).sqrt() @ vectors.T
    cross = torch.linalg.eigvalsh(root @ covariance_2 @ root).clamp(min=0).sqrt().sum()
    of_means = (mean_1 - mean_2).square().sum().item()
    of_covariances = (covariance_1.trace() + covariance_2.trace() - 2 * cross).item()
    return FrechetDistance(of_means + of_covariances, of_means, of_covariances)


def _moments(x: Tensor) -> tuple[Tensor, Tensor]:
    x = x.double()
    return x.mean(0), torch.atleast_2d(x.T.cov())


@dataclass(frozen=True)
class Recognisability:
    """Result of `recognisability`."""

    share: float
    """Of the samples that the classifier is sure of."""
    confidence: float
    """Mean of the highest probability."""


def recognisability(probabilities: Tensor, *, confident: float = CONFIDENT) -> Recognisability:
    """Measure the share of samples on which a classifier's highest probability is at least `confident`.

    Parameters
    ----------
    probabilities : (N, classes)
    confident
        From 0 to 1.
    """
    top = probabilities.amax(1)
    return Recognisability((top >= confident).double().mean().item(), top.double().mean().item())


@dataclass(frozen=True)
class Diversity:
    """Result of `diversity`."""

    entropy: float
    """In nats."""
    classes: float
    """exp(entropy), the number of equally frequent classes with this entropy."""


def diversity(verdicts: Tensor) -> Diversity:
    """Measure the entropy −Σ_c p_c log p_c of a classifier's verdicts, p_c the share of the samples judged to be c.

    Parameters
    ----------
    verdicts : (N,)
        The most probable class of each sample.
    """
    entropy = _entropy(_shares(verdicts)).item()
    return Diversity(entropy, torch.tensor(entropy).exp().item())


@dataclass(frozen=True)
class Specialisation:
    """Result of `specialisation`."""

    mutual_information: float
    """I(expert; label), in nats."""
    normalised: float
    """I(expert; label) / ½(H(expert) + H(label)), from 0 to 1."""
    adjusted: float
    """The same with what chance gives taken off: 0 for experts that know nothing, 1 for one expert for each label."""
    experts: float
    """exp(H(expert)), the effective number of experts that are ever the most active."""


def specialisation(firing: Tensor, labels: Tensor) -> Specialisation:
    """Measure the mutual information between the most active expert of an image and its label.

    With p(j, c) the share of the images on which expert j is the most active and whose label is c::

        I = Σ_jc p(j, c) log( p(j, c) / (p(j) p(c)) ),     NMI = I / ½(H(j) + H(c))

    as scikit-learn's ``normalized_mutual_info_score`` has it. One expert for everything gives 0. Many experts and few
    images give more than 0 by chance alone: with E the mean of I over all ways to shuffle the labels::

        AMI = (I − E) / (½(H(j) + H(c)) − E)

    as ``adjusted_mutual_info_score`` has it, compares models of different numbers of experts.

    Parameters
    ----------
    firing : (N, J)
        Firing probabilities.
    labels : (N,)
    """
    check_rows("firing", firing, "labels", labels)
    winner = firing.argmax(1)
    _, label = labels.to(firing.device).unique(return_inverse=True)
    both = winner * (label.max() + 1) + label
    of_winner, of_label, of_both = (_entropy(_shares(each)) for each in (winner, label, both))
    information = (of_winner + of_label - of_both).clamp(min=0)
    most = (of_winner + of_label) / 2
    # Two constants agree perfectly, and say nothing: 0, so that experts that do not specialise get no praise.
    normalised = (information / most).item() if most > 0 else 0.0
    chance = _information_by_chance(winner.bincount(), label.bincount()).to(most)
    adjusted = ((information - chance) / (most - chance)).item() if most - chance > 1e-12 else 0.0
    return Specialisation(information.item(), normalised, adjusted, of_winner.exp().item())


def _information_by_chance(first: Tensor, second: Tensor) -> Tensor:
    """Mean mutual information, over all shufflings, of two labellings whose classes have these counts: (J,), (C,) → ().

    Two classes of a and b among n images share k of them with the hypergeometric probability
    (a choose k)(n−a choose b−k) / (n choose b), and contribute k/n · log(kn/ab).
    """
    n = first.sum().double().cpu()
    b = second[second > 0].double().cpu().unsqueeze(1)
    k = torch.arange(1, int(b.max()) + 1, dtype=torch.float64)
    total = torch.zeros((), dtype=torch.float64)
    for a in first[first > 0].double().cpu():
        # Where k cannot be, a factorial of a negative number makes the probability exp(−∞).
        probability = (_log_choose(a, k) + _log_choose(n - a, b - k) - _log_choose(n, b)).exp()
        total += (probability * k / n * (k * n / (a * b)).log()).sum()
    return total


def _log_choose(n: Tensor, k: Tensor) -> Tensor:
    return torch.lgamma(n + 1) - torch.lgamma(k + 1) - torch.lgamma(n - k + 1)


def _shares(values: Tensor) -> Tensor:
    """Share of each value that occurs: (N,) → (V,)."""
    counts = values.unique(return_counts=True)[1].double()
    shares: Tensor = counts / counts.sum()
    return shares


def _entropy(shares: Tensor) -> Tensor:
    entropy: Tensor = torch.special.entr(shares).sum()
    return entropy


@dataclass(frozen=True)
class Purity:
    """Result of `purity`."""

    mean: float
    """Over the experts."""
    each: tuple[float, ...]
    """Share of its most frequent verdict, for each expert."""
    verdicts: tuple[int, ...]
    """That verdict, for each expert."""


def purity(verdicts: Tensor) -> Purity:
    """Measure how much one expert's samples are one thing: the share of their most frequent verdict.

    Parameters
    ----------
    verdicts : (J, n)
        What the classifier says to the n draws of each expert.
    """
    most = [row.unique(return_counts=True) for row in verdicts]
    each = tuple(counts.max().item() / verdicts.shape[1] for _, counts in most)
    return Purity(
        sum(each) / len(each), each, tuple(int(values[counts.argmax()]) for values, counts in most)
    )


@dataclass(frozen=True)
class Variety:
    """Result of `variety`."""

    mean: float
    """Over the experts."""
    each: tuple[float, ...]
    """For each expert."""


def variety(draws: Iterable[Tensor], verdicts: Tensor, images: Tensor, labels: Tensor) -> Variety:
    """Measure how much the draws of one expert differ from each other, as images of one class do.

    For expert j, let c be the most frequent verdict on its draws and G_j its draws with that verdict; T_c are the test
    images with label c. With d(A) the mean Euclidean distance, pixel by pixel, of two different members of A::

        variety_j = d(G_j) / d(T_c)

    An expert that always draws the same image has 0, one whose draws differ as test images of its class do has 1. Only
    draws of one class are compared with each other, so that an expert gains nothing by drawing different classes.
    Noise would gain, so read it beside `recognisability`. At most 1,000 images of a kind are compared. The variety of
    an expert whose class has fewer than two test images is left out of the mean and given as NaN.

    Parameters
    ----------
    draws : J tensors (n, C, H, W)
    verdicts : (J, n)
    images : (M, C, H, W)
        Test images, with their labels.
    labels : (M,)
        Numbered as the verdicts are.
    """
    real: dict[int, float] = {}
    each = []
    for drawn, said, verdict in zip(draws, verdicts, purity(verdicts).verdicts, strict=True):
        if verdict not in real:
            real[verdict] = _mean_distance(images[(labels == verdict).to(images.device)])
        each.append(
            _mean_distance(drawn[said == verdict]) / real[verdict]
            if real[verdict]
            else float("nan")
        )
    known = [value for value in each if value == value]
    return Variety(sum(known) / len(known) if known else float("nan"), tuple(each))


def _mean_distance(images: Tensor) -> float:
    """Mean Euclidean distance of two different images; 0 where there are no two."""
    flat = images[:MOST_COMPARED].flatten(1).float()
    return torch.nn.functional.pdist(flat).double().mean().item() if len(flat) > 1 else 0.0


@dataclass(frozen=True)
class Variation:
    """Result of `variation`, means over the experts."""

    thickness: float
    slant: float
    width: float
    height: float


def variation(
    draws: Iterable[Tensor], verdicts: Tensor, images: Tensor, labels: Tensor
) -> Variation:
    """Measure in what the draws of one expert differ from each other, as images of one class do.

    Where `variety` compares pixels, this compares the `properties` that a person would name: for expert j and each of
    them, the standard deviation over its draws with its most frequent verdict c, divided by that over the test images
    with label c. 0: always the same; 1: as different as test images of the class.

    Parameters
    ----------
    draws, verdicts, images, labels
        As for `variety`.
    """
    real: dict[int, Tensor] = {}
    each = []
    for drawn, said, verdict in zip(draws, verdicts, purity(verdicts).verdicts, strict=True):
        if verdict not in real:
            real[verdict] = _spread(images[(labels == verdict).to(images.device)])
        each.append(_spread(drawn[said == verdict]) / real[verdict])
    return Variation(*torch.stack(each).nanmean(0).tolist())


def _spread(images: Tensor) -> Tensor:
    """Take the standard deviation of each property; NaN where there are no two images."""
    found = properties(images)
    return found.std(0) if len(found) > 1 else torch.full_like(found.sum(0), torch.nan)


def properties(images: Tensor) -> Tensor:
    """Measure thickness, slant, width and height of what is bright in images: (N, C, H, W) → (N, 4), float64.

    With x the image, its channels added up, and μ_ab its central moments, a along columns and b along rows::

        thickness = 2 Σx / Σ‖∇x‖     a stroke of width w and length l has the area wl and the outline 2l
        slant     = μ₁₁ / μ₀₂        columns to the side for a row down
        width     = √(μ₂₀ − μ₁₁²/μ₀₂),  of the upright image
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
    tall, wide, tilt = ((mass * each).sum((1, 2)) for each in (v * v, u * u, u * v))
    slant = tilt / tall.clamp(min=1e-9)
    return torch.stack(
        [thickness, slant, (wide - slant * tilt).clamp(min=0).sqrt(), tall.sqrt()], 1
    )


@dataclass(frozen=True)
class Background:
    """Result of `background`: what the background of a set of images looks like."""

    mean: Tensor
    """(C, H, W), the mean training image."""
    witnesses: Tensor
    """(C, H, W) of bool: the pixels that belong to the background."""


def background(batches: Iterable[Tensor]) -> Background:
    """Find the background of training images: the pixels that are dark in almost all of them, or bright in almost all.

    A pixel is a witness if at least 95 % of the images have it below ½, or at least 95 % above. On MNIST that is the
    rim, on Fashion-MNIST too, although some pullovers fill the frame.

    Parameters
    ----------
    batches : iterable of (B, C, H, W)
        All the training images.
    """
    count, total, dark, bright = 0, torch.zeros(()), torch.zeros(()), torch.zeros(())
    for images in batches:
        count += len(images)
        total = images.sum(0, dtype=torch.float64) + total.to(images.device)
        dark = (images < 0.5).sum(0) + dark.to(images.device)
        bright = (images > 0.5).sum(0) + bright.to(images.device)
    if count == 0:
        raise ValueError("batches must hold at least one image, but are empty")
    return Background((total / count).float(), torch.maximum(dark, bright) >= STEADY * count)


@dataclass(frozen=True)
class Negatives:
    """Result of `negatives`."""

    share: float | None
    """Of the images that are negatives; None if the training images have no common background to tell by."""
    witnesses: int
    """Pixels of the background."""


def negatives(images: Tensor, of: Background) -> Negatives:
    """Measure the share of images that are negatives, bright where the training images are dark.

    An image x is a negative if, over the pixels p of the training images' `background`, it is nearer to the negative
    1 − m of their mean m than to m itself::

        Σ_p (x_p − (1 − m_p))²  <  Σ_p (x_p − m_p)²

    Looking at the background alone keeps an object that fills the frame from counting as one. Where less than 5 % of
    the pixels are background, as in photographs, there is no telling, and the share is None.

    Parameters
    ----------
    images : (N, C, H, W)
    of
        The background of the training images.
    """
    seen = int(of.witnesses.sum())
    if seen < FEWEST_WITNESSES * of.witnesses.numel():
        return Negatives(None, seen)
    return Negatives(are_negatives(images, of).double().mean().item(), seen)


def are_negatives(images: Tensor, of: Background) -> Tensor:
    """Tell which images are negatives, as `negatives` defines them: (N, C, H, W) → (N,)."""
    x, m = images[:, of.witnesses.to(images.device)], of.mean[of.witnesses].to(images.device)
    nearer: Tensor = (x - (1 - m)).square().sum(1) < (x - m).square().sum(1)
    return nearer


@dataclass(frozen=True)
class Reconstruction:
    """Result of `reconstruction`."""

    error: float
    """Mean squared error of a pixel."""
    relative: float
    """The same, divided by that of the mean training image: 0 is perfect, 1 no better than the mean."""


def reconstruction(pairs: Iterable[tuple[Tensor, Tensor]], mean: Tensor) -> Reconstruction:
    """Measure the mean squared error of reconstructions, and its ratio to that of the mean training image.

    Parameters
    ----------
    pairs : iterable of (B, C, H, W), (B, C, H, W)
        Images and their reconstructions.
    mean : (C, H, W)
        The mean training image.
    """
    pixels, error, trivial = 0, 0.0, 0.0
    for images, made in pairs:
        pixels += images.numel()
        error += (made - images).double().square().sum().item()
        trivial += (mean.to(images.device) - images).double().square().sum().item()
    if pixels == 0:
        raise ValueError("pairs must hold at least one image, but are empty")
    return Reconstruction(error / pixels, error / trivial if trivial else float("nan"))
