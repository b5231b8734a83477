"""Densities of codes: mixtures of Gaussians fitted to training codes, and the generation domains.

All densities in this module are over codes before squashing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

import torch
from torch import nn

from poecaps import functional as F

if TYPE_CHECKING:
    from torch import Tensor

Domain = Literal["complete", "restricted", "learned", "joint"]
"""Domain of codes, which are drawn from a `CodeDensity` and decoded."""
DOMAINS: tuple[Domain, ...] = get_args(Domain)
DensityDomain = Literal["model", "model-tied", "model-experts"]
"""Domain of the density of a network, `poecaps.CapsuleDensity`, sampled by Markov chains."""
DENSITY_DOMAINS: tuple[DensityDomain, ...] = get_args(DensityDomain)


@dataclass(frozen=True)
class DomainInfo:
    """What the rest of the package needs to know about a domain."""

    description: str
    """What images are drawn from, in plain words; different for each domain."""
    whole_code: bool
    """Whether all experts are drawn together, so that a single expert cannot be chosen."""


DOMAIN_INFO: dict[Domain | DensityDomain, DomainInfo] = {
    "complete": DomainInfo("one expert at a time, complete domain", whole_code=False),
    "restricted": DomainInfo("one expert at a time, restricted domain", whole_code=False),
    "learned": DomainInfo("one expert at a time, learned domain", whole_code=False),
    "joint": DomainInfo("all experts together", whole_code=True),
    "model": DomainInfo("the energy", whole_code=True),
    "model-tied": DomainInfo("the energy, tied filters", whole_code=True),
    "model-experts": DomainInfo("the energy with one expert on", whole_code=False),
}

# Principal components of whole codes that the joint density models. The variance outside them is
# small, and all dimensions would make the density several times as large.
JOINT_DIM = 128
JOINT_RANK = 8  # rank of the covariances of the joint density
# Points per Gaussian of a mixture, on average; with fewer points a mixture has fewer Gaussians.
MIN_POINTS_PER_GAUSSIAN = 25
# torch finds the eigenvectors of many symmetric matrices together on a GPU if these have at most
# this many rows; larger ones are processed one after the other.
BATCHED_EIGH_LIMIT = 32
# Squared eigenvalues below this share of the largest are rounding errors of float64.
NEGLIGIBLE = 1e-20
KMEANS_CHUNK = 4096  # points whose distances to all centres are in memory together


class GaussianMixtures(nn.Module):
    """N mixtures over vectors of S numbers, each of M Gaussians whose covariance has rank R.

    Parameters
    ----------
    mixtures, components, dim, rank
        N, M, S and R.

    Attributes
    ----------
    weights : (N, M)
        Mixture weights.
    means : (N, M, S)
    factors : (N, M, S, R)
        The covariance of a Gaussian is factor · factorᵀ.
    """

    weights: Tensor
    means: Tensor
    factors: Tensor

    def __init__(self, mixtures: int, components: int, dim: int, rank: int) -> None:
        super().__init__()
        self.register_buffer("weights", torch.full((mixtures, components), 1 / components))
        self.register_buffer("means", torch.zeros(mixtures, components, dim))
        self.register_buffer("factors", torch.zeros(mixtures, components, dim, min(rank, dim)))

    def check_weights(self) -> None:
        """Raise ValueError if the weights of a mixture are negative or sum to 0."""
        if bool((self.weights < 0).any() | (self.weights.sum(1) <= 0).any()):
            raise ValueError("the weights of a mixture must be at least 0, and some above 0")

    @torch.no_grad()
    def fit(self, index: int, points: Tensor, generator: torch.Generator | None) -> None:
        """Fit one of the mixtures by k-means, with one Gaussian for each cluster.

        Parameters
        ----------
        index
            Which mixture.
        points : (P, S)
            There are at most P/25 clusters; the weights of all other Gaussians are 0.
        generator
            Source of the initial cluster centres.
        """
        components, _, rank = self.factors[index].shape
        clusters = min(components, max(1, len(points) // MIN_POINTS_PER_GAUSSIAN))
        nearest = kmeans(points, clusters, generator)
        count = torch.bincount(nearest, minlength=components)
        total = torch.zeros_like(self.means[index]).index_add_(0, nearest, points)
        mean = total / count.clamp(min=1).unsqueeze(1)
        members = (points - mean[nearest])[nearest.argsort(stable=True)].split(count.tolist())
        covariance = torch.stack([each.T @ each / max(1, len(each)) for each in members])
        values, vectors = leading_eigenvectors(covariance.double(), rank)
        factor = vectors * values.clamp(min=0).sqrt().unsqueeze(1)
        self.weights[index] = count / len(points)
        self.means[index] = mean
        self.factors[index] = factor.to(mean.dtype)

    def sample(self, index: Tensor, generator: torch.Generator | None) -> Tensor:
        """Draw one point from each of the mixtures with these indices: (B,) → (B, S)."""
        part = torch.multinomial(self.weights[index], 1, generator=generator).squeeze(1)
        noise = torch.randn(
            len(index), self.factors.shape[3], 1, generator=generator, device=self.factors.device
        )
        return self.means[index, part] + (self.factors[index, part] @ noise).squeeze(-1)


class PCAMixture(nn.Module):
    """A mixture of Gaussians over the 128 leading principal components of vectors of S numbers.

    Outside these components every draw has the mean of the training data.

    Parameters
    ----------
    dim
        S.
    gaussians
        Number of Gaussians.

    Attributes
    ----------
    mean : (S,)
    components : (S, min(128, S))
        Principal directions.
    mixture
        `GaussianMixtures` with one mixture.
    """

    mean: Tensor
    components: Tensor

    def __init__(self, dim: int, gaussians: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(dim))
        self.register_buffer("components", torch.eye(dim, min(JOINT_DIM, dim)))
        self.mixture = GaussianMixtures(1, gaussians, min(JOINT_DIM, dim), rank=JOINT_RANK)

    @torch.no_grad()
    def fit(self, points: Tensor, generator: torch.Generator | None) -> None:
        """Fit to points (P, S); `generator` draws the initial cluster centres."""
        self.mean.copy_(points.mean(0))
        centred = points - self.mean
        directions = torch.linalg.eigh((centred.T @ centred).double())[1]
        self.components.copy_(directions[:, -self.components.shape[1] :])
        self.mixture.fit(0, centred @ self.components, generator)

    def sample(self, count: int, generator: torch.Generator | None) -> Tensor:
        """Draw points: (count, S)."""
        index = torch.zeros(count, dtype=torch.long, device=self.mean.device)
        return self.mean + self.mixture.sample(index, generator) @ self.components.T


class CodeDensity(nn.Module):
    """The densities that codes are drawn from, fitted to the codes of the training images.

    Parameters
    ----------
    experts, dim
        J and D.
    joint_components, expert_components
        Number of Gaussians in the mixture of whole codes, and in that of each expert.

    Attributes
    ----------
    mean, std : (J, D)
        Mean and standard deviation of each expert's codes over its own images: those for which it
        is the strongest expert.
    mean_direction : (J, D)
        Mean direction of each expert's codes over its own images. The images that an expert loses
        to others are many more, and may lie on the other side of its sphere.
    per_expert
        For each expert, a mixture of Gaussians fitted to its codes of its own images.
    joint
        A mixture of Gaussians fitted to whole codes.
    """

    mean_direction: Tensor
    mean: Tensor
    std: Tensor

    def __init__(
        self, experts: int, dim: int, *, joint_components: int, expert_components: int
    ) -> None:
        super().__init__()
        self.register_buffer("mean_direction", torch.zeros(experts, dim))
        self.register_buffer("mean", torch.zeros(experts, dim))
        self.register_buffer("std", torch.ones(experts, dim))
        self.per_expert = GaussianMixtures(experts, expert_components, dim, rank=dim)
        self.joint = PCAMixture(experts * dim, joint_components)

    @torch.no_grad()
    def fit(self, codes: Tensor, generator: torch.Generator | None = None) -> None:
        """Fit to squashed codes (P, J, D); `generator` draws the initial cluster centres."""
        z = F.unsquash(codes.float())
        norm = z.norm(dim=-1)
        strongest = norm.argmax(1)
        for j in range(z.shape[1]):
            own = z[strongest == j, j]
            # Too few codes for a covariance: take all images for which the expert fires at all, or
            # every image if there are none.
            if len(own) <= z.shape[2]:
                own = z[norm[:, j] > 0, j] if norm[:, j].any() else z[:, j]
            self.mean[j], self.std[j] = own.mean(0), own.std(0, correction=0)
            self.mean_direction[j] = F.direction(own).mean(0)
            self.per_expert.fit(j, own, generator)
        self.joint.fit(z.flatten(1), generator)

    def sample(
        self, count: int, domain: Domain, expert: int | None, generator: torch.Generator | None
    ) -> Tensor:
        """Draw codes before squashing, (count, J, D); see `CapsuleNetwork.generate`."""
        experts, dim = self.mean.shape
        device = self.mean.device
        if domain == "joint":
            return self.joint.sample(count, generator).view(-1, experts, dim)
        z = torch.randn(count, dim, generator=generator, device=device)
        chosen = torch.randint(experts, (count,), generator=generator, device=device)
        if expert is not None:
            chosen = torch.full_like(chosen, expert)
        if domain == "learned":
            z = self.per_expert.sample(chosen, generator)
        elif domain == "restricted":
            agrees = (z * self.mean_direction[chosen]).sum(-1, keepdim=True) >= 0
            z = torch.where(agrees, z, -z)
        return nn.functional.one_hot(chosen, experts).unsqueeze(-1) * z.unsqueeze(1)


def kmeans(
    points: Tensor, clusters: int, generator: torch.Generator | None, iterations: int = 25
) -> Tensor:
    """Cluster points by Lloyd's algorithm, starting from randomly chosen points.

    Parameters
    ----------
    points : (P, S)
    clusters
        At most P.
    generator
        Source of the initial centres.
    iterations
        Fixed, without a test of convergence.

    Returns
    -------
    (P,)
        Index of the cluster of each point.
    """
    device = None if generator is None else generator.device
    first = torch.randperm(len(points), generator=generator, device=device)
    centres = points[first[:clusters].to(points.device)]
    nearest = torch.zeros(len(points), dtype=torch.long, device=points.device)
    for _ in range(iterations):
        nearest = torch.cat(
            [torch.cdist(chunk, centres).argmin(1) for chunk in points.split(KMEANS_CHUNK)]
        )
        members = torch.bincount(nearest, minlength=len(centres)).clamp(min=1).unsqueeze(1)
        centres = torch.zeros_like(centres).index_add_(0, nearest, points) / members
    return nearest


def leading_eigenvectors(matrices: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Compute the largest eigenvalues and their eigenvectors of positive semidefinite matrices.

    Parameters
    ----------
    matrices : (M, S, S)
    count
        R.

    Returns
    -------
    values : (M, R)
        Rising.
    vectors : (M, S, R)
    """
    size = matrices.shape[-1]
    if matrices.device.type != "cpu" and size > BATCHED_EIGH_LIMIT >= 2 * count:
        return leading_eigenvectors_by_iteration(matrices, count)
    values, vectors = torch.linalg.eigh(matrices)
    return values[:, size - count :], vectors[:, :, size - count :]


def leading_eigenvectors_by_iteration(
    matrices: Tensor, count: int, iterations: int = 16
) -> tuple[Tensor, Tensor]:
    """Compute the same as `leading_eigenvectors` by subspace iteration.

    This is for GPUs, on which torch decomposes matrices of more than 32 rows one after the other.
    Here the decompositions that keep the subspace orthonormal are of 32 rows, and are batched.
    """
    directions = torch.randn(
        matrices.shape[-1], BATCHED_EIGH_LIMIT, generator=torch.Generator().manual_seed(0)
    ).to(matrices)
    for _ in range(iterations):
        image = matrices @ directions
        square, rotation = torch.linalg.eigh(image.mT @ image)  # square converges to λ²
        nonzero = square > NEGLIGIBLE * square[:, -1:]
        inverse_norm = torch.where(nonzero, square, torch.inf).rsqrt().unsqueeze(1)
        directions = image @ rotation * inverse_norm
    return square[:, -count:].clamp(min=0).sqrt(), directions[:, :, -count:]
