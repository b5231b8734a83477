"""Preprocessing of the input capsules: centre, whiten, equalize, scale and squash; and back."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from poecaps import functional as F
from poecaps._modules import MappedBatches

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

# Equalizing divides the standard deviation of a direction by at most this number, so that the map
# can be inverted in float32 even if fewer directions have any variance than are equalized.
MAX_ATTENUATION = 100
# Share of the mean eigenvalue that is added to the eigenvalues of a covariance before whitening:
# without it, directions with hardly any variance, which hold noise, would be amplified most.
WHITENING_SHRINKAGE = 1e-3
SMALLEST_EIGENVALUE = 1e-12  # added as well, for capsules that are constant
SMALLEST_VARIANCE = 1e-30  # in place of 0 in a denominator


class Preprocessing(nn.Module):
    """An invertible affine map of all capsules, fitted to training data, followed by squashing.

    x = squash(s L A (a − m)), with m the mean (or 0), A_i the inverse square root of the covariance
    of each capsule (or 1), L the equalization (or 1) and s one number that brings the mean norm to
    its target (or 1).

    Whitening makes the directions within one capsule equally strong, but a few directions that all
    capsules share still carry most of the variance, and experts learn little else. With V the r
    leading principal directions of all I·K numbers A(a − m) and λ their variances, of which λ_r is
    the smallest::

        L = 1 + V (diag (λ_r/λ)^½ − 1) Vᵀ

    reduces the variance of these directions to λ_r and leaves all others unchanged. No direction is
    divided by more than 100.

    Parameters
    ----------
    capsules, dim
        I and K.
    centre
        Whether the mean is subtracted.
    scale
        Mean norm of the capsules before squashing; None: no scaling.
    whiten
        Whether each capsule is whitened.
    equalized_components
        r, at most I·K; 0: no equalization.

    Attributes
    ----------
    mean : (I, K)
        m.
    matrix, inverse : (I, K, K)
        s A and its inverse.
    components : (I·K, r), or None
        V.
    factors : (r,), or None
        (λ_r/λ)^½.
    """

    mean: Tensor
    matrix: Tensor
    inverse: Tensor
    components: Tensor | None
    factors: Tensor | None

    def __init__(
        self,
        capsules: int,
        dim: int,
        *,
        centre: bool,
        scale: float | None,
        whiten: bool,
        equalized_components: int = 0,
    ) -> None:
        super().__init__()
        if equalized_components > capsules * dim:
            raise ValueError(
                f"equalized_components must be at most {capsules * dim}, the number of features in "
                f"all capsules, but is {equalized_components}"
            )
        self.centre, self.scale, self.whiten = centre, scale, whiten
        identity = torch.eye(dim).expand(capsules, dim, dim)
        self.register_buffer("mean", torch.zeros(capsules, dim))
        self.register_buffer("matrix", identity.clone())
        self.register_buffer("inverse", identity.clone())
        rank = equalized_components
        self.register_buffer("components", torch.eye(capsules * dim, rank) if rank else None)
        self.register_buffer("factors", torch.ones(rank) if rank else None)

    def to_capsules(self, a: Tensor) -> Tensor:
        """Transform and squash activations: (B, I, K) → (B, I, K)."""
        return F.squash(self.transform(a))

    def from_capsules(self, x: Tensor) -> Tensor:
        """Invert `to_capsules`: (B, I, K) → (B, I, K)."""
        return self.inverse_transform(F.unsquash(x))

    def transform(self, a: Tensor) -> Tensor:
        """Apply the affine map: s L A (a − m), (B, I, K) → (B, I, K)."""
        centred = a.to(self.mean.dtype) - self.mean
        return self._equalize(torch.einsum("ikl,bil->bik", self.matrix, centred))

    def inverse_transform(self, z: Tensor) -> Tensor:
        """Invert `transform`: (B, I, K) → (B, I, K)."""
        equalized = self._equalize(z, inverse=True)
        return torch.einsum("ikl,bil->bik", self.inverse, equalized) + self.mean

    def _equalize(self, z: Tensor, *, inverse: bool = False) -> Tensor:
        """Multiply by L, or by its inverse: (B, I, K) → (B, I, K)."""
        if self.components is None or self.factors is None:
            return z
        flat, factors = z.flatten(1), 1 / self.factors if inverse else self.factors
        return (flat + (flat @ self.components * (factors - 1)) @ self.components.T).view_as(z)

    @torch.no_grad()
    def fit(self, batches: Iterable[Tensor]) -> None:
        """Fit the map to activations.

        Parameters
        ----------
        batches : iterable of (B, I, K)
            Iterated over several times; each time it must give the same activations.
        """
        count, mean, covariance = self._moments(batches)
        centre = mean if self.centre else torch.zeros_like(mean)
        self.mean.copy_(centre)
        matrix = self._whitening(covariance)
        if self.components is not None and self.factors is not None:
            whitened = MappedBatches(
                lambda a: _whitened(a, mean, matrix).flatten(1),
                batches,
            )
            rank = len(self.factors)
            variance, directions = leading_directions(whitened, mean.numel(), rank)
            self.components.copy_(directions)
            target = variance[-1].clamp(min=MAX_ATTENUATION**-2 * variance[0])
            ratio = target / variance.clamp(min=SMALLEST_VARIANCE)
            self.factors.copy_(ratio.sqrt().clamp(max=1))
        if self.scale is not None:
            norms = torch.stack(
                [
                    self._equalize(z).norm(dim=-1).mean(1).double().sum()
                    for z in MappedBatches(lambda a: _whitened(a, centre, matrix), batches)
                ]
            )
            matrix = matrix * (self.scale * count / norms.sum())
        self.matrix.copy_(matrix)
        self.inverse.copy_(torch.linalg.inv(matrix))

    def _moments(self, batches: Iterable[Tensor]) -> tuple[int, Tensor, Tensor]:
        """Count activations, and compute their mean (I, K) and covariances (I, K, K), float64."""
        count = 0
        first, second = torch.zeros_like(self.mean, dtype=torch.float64), self.matrix.double() * 0
        for a in batches:
            a = a.double()
            count += len(a)
            first += a.sum(0)
            second += torch.einsum("bik,bil->ikl", a, a)
        mean = first / count
        return count, mean, second / count - torch.einsum("ik,il->ikl", mean, mean)

    def _whitening(self, covariance: Tensor) -> Tensor:
        """Compute A (I, K, K) from the covariances: their inverse square roots, or 1."""
        if not self.whiten:
            identity = torch.eye(
                covariance.shape[1], dtype=covariance.dtype, device=covariance.device
            )
            return identity.expand_as(covariance)
        values, vectors = torch.linalg.eigh(covariance)
        values = values.clamp(min=0)
        values = values + WHITENING_SHRINKAGE * values.mean() + SMALLEST_EIGENVALUE
        inverse_root: Tensor = vectors @ (values.rsqrt().unsqueeze(-1) * vectors.mT)
        return inverse_root


def _whitened(a: Tensor, mean: Tensor, matrix: Tensor) -> Tensor:
    """Compute A(a − m) in float32: (B, I, K) → (B, I, K)."""
    return torch.einsum("ikl,bil->bik", matrix.float(), a.float() - mean.float())


def leading_directions(
    batches: Iterable[Tensor],
    size: int,
    count: int,
    *,
    oversampling: int = 16,
    iterations: int = 8,
) -> tuple[Tensor, Tensor]:
    """Compute the leading principal directions of centred points that are streamed in batches.

    Randomized subspace iteration (Halko, Martinsson and Tropp 2011): each iteration is one pass
    over the points, and no S×S matrix is formed. `torch.pca_lowrank` computes the same from a
    matrix of all points, which would have to be in memory. Directions of nearly equal variance may
    be mixed with each other.

    Parameters
    ----------
    batches : iterable of (B, S)
        Iterated over several times; each time it must give the same points.
    size
        S.
    count
        R, the number of directions.
    oversampling
        Directions that are iterated beyond R, so that the last of the R converge as well.
    iterations
        Passes over the points.

    Returns
    -------
    variances : (R,)
        Falling, float64.
    directions : (S, R)
        Orthonormal.
    """
    width = min(count + oversampling, size)
    basis = torch.randn(size, width, generator=torch.Generator().manual_seed(0))
    for _ in range(iterations):
        image, points = None, 0
        for batch in batches:
            basis = basis.to(batch)
            step = batch.T @ (batch @ basis)
            image, points = step if image is None else image.add_(step), points + len(batch)
        assert image is not None  # noqa: S101 (there is at least one batch)
        basis = torch.linalg.qr(image)[0]
    # The principal directions within the subspace (Rayleigh-Ritz).
    scatter = torch.zeros(width, width, dtype=torch.float64, device=basis.device)
    for batch in batches:
        projected = (batch @ basis).double()
        scatter += projected.T @ projected
    values, vectors = torch.linalg.eigh(scatter / points)
    leading = vectors.flip(1)[:, :count].to(basis.dtype)
    return values.flip(0)[:count].clamp(min=0), basis @ leading
