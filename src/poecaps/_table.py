"""The model of `poecaps.sklearn` for tables: one layer of experts over rows, and back."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import nn

from poecaps import functional as F
from poecaps._modules import in_batches
from poecaps.code_density import MIN_POINTS_PER_GAUSSIAN, PCAMixture
from poecaps.layer import CapsuleExperts
from poecaps.training.errors import TrainingError
from poecaps.training.stages import factor_for_firing

if TYPE_CHECKING:
    from torch import Tensor

# Root mean square of the norm of a capsule before squashing. At 1, doubling a small change of a
# capsule doubles that of the squashed one; for smaller capsules it changes with their square.
SCALE = 1.0
# Added to the variances of the principal components of the standardized columns, whose mean is 1,
# before they are whitened. Without it, directions of noise count as much as all others; chosen on
# `load_diabetes` and tables of `make_classification`.
SHRINKAGE = 0.3
MAX_WHITENED = 1000  # columns; the columns of wider tables are only standardized
TARGET_FIRING = 0.5  # mean firing probability of the strongest expert of a row
RIDGE = 1e-6  # of the least squares, relative to the mean of the diagonal of the Gram matrix
CONSTANT = 1e-12  # a column with a smaller standard deviation, relative to its mean, is constant
DIVERGED = 1e3  # mean absolute weight above which training has diverged
MAX_GAUSSIANS = 1000  # of the density of codes
BATCH_SIZE = 1000  # rows that are encoded together


class TabularModel(nn.Module):
    """A product of expert capsules over the rows of a table.

    With m and s the mean and the standard deviation of each column over all rows so far, the
    standardized row is t = (row − m)/s. Its correlations R are removed by t (R + 0.3)^(−½), as far
    as the 0.3 permits, so that the experts have more to learn than the few directions that most
    columns share. K neighbouring columns form a capsule; the last capsule is padded with zeros, and
    all are scaled to a mean square norm of 1 and squashed. Rows are decoded by a linear map of the
    unsquashed code, fitted by least squares.

    Parameters
    ----------
    columns
        Of the table.
    capsule_dim
        K.
    experts, dim
        J and D.
    sharpness, normalize, winners
        See `CapsuleExperts`; the competition is for training only.
    dtype
        float32 or float64.
    generator
        Source of the initial weights.

    Attributes
    ----------
    competing_experts
        The experts that contrastive divergence trains, with competition.
    experts
        The experts that encode: without competition, rescaled to a firing probability.
    mean : (columns,)
        Of all rows so far.
    covariance : (columns, columns), or (columns,)
        Of all rows so far; of more than 1,000 columns, the variances only.
    whitening : (columns, columns), optional
        (R + 0.3)^(−½), times a factor; None for more than 1,000 columns.
    code_scale : ()
        Factor of unsquashed codes with which their total variance is the number of columns that
        vary.
    decoder : (J·D + 1, columns)
        The linear map; its last row is the intercept.
    """

    mean: Tensor
    covariance: Tensor
    whitening: Tensor | None
    code_scale: Tensor
    decoder: Tensor

    def __init__(
        self,
        columns: int,
        capsule_dim: int,
        experts: int,
        dim: int,
        *,
        sharpness: float,
        normalize: F.Axis,
        winners: int | None,
        dtype: torch.dtype,
        generator: torch.Generator,
    ) -> None:
        super().__init__()
        self.columns, self.capsule_dim, self.dtype = columns, capsule_dim, dtype
        self.rows_seen = 0

        def layer(winners: int | None) -> CapsuleExperts:
            return CapsuleExperts(
                math.ceil(columns / capsule_dim),
                capsule_dim,
                experts,
                dim,
                sharpness=sharpness,
                normalize=normalize,
                winners=winners,
                dtype=dtype,
                generator=generator,
            )

        self.competing_experts = layer(winners)
        self.experts = layer(None)
        code_size = experts * dim
        self.register_buffer("mean", torch.zeros(columns, dtype=torch.float64))
        eye = torch.eye(columns, dtype=torch.float64) if columns <= MAX_WHITENED else None
        self.register_buffer(
            "covariance", torch.ones(columns, dtype=torch.float64) if eye is None else eye
        )
        self.register_buffer("whitening", None if eye is None else eye.clone())
        self.register_buffer("code_scale", torch.ones((), dtype=torch.float64))
        self.register_buffer("decoder", torch.zeros(code_size + 1, columns, dtype=torch.float64))
        self.density: PCAMixture | None = None

    # Using the model

    def capsules(self, rows: Tensor) -> Tensor:
        """Compute the input capsules: (B, columns) → (B, I, K)."""
        padded = nn.functional.pad(self.whitened(rows), (0, -self.columns % self.capsule_dim))
        scaled = padded * (SCALE / self.capsule_dim**0.5)
        return F.squash(scaled.view(len(rows), -1, self.capsule_dim).to(self.dtype))

    def whitened(self, rows: Tensor) -> Tensor:
        """Standardize rows and remove their correlations in part: (B, columns) → (B, columns)."""
        t = self._standardize(rows)
        return t if self.whitening is None else t @ self.whitening

    def encode(self, rows: Tensor) -> Tensor:
        """Encode rows: (N, columns) → (N, J, D)."""
        return in_batches(lambda batch: self.experts(self.capsules(batch)), rows, BATCH_SIZE)

    def decode(self, codes: Tensor) -> Tensor:
        """Decode codes to rows: (B, J, D) → (B, columns), float64."""
        return self._decode(F.unsquash(codes.double()).flatten(1))

    def scale(self, codes: Tensor) -> Tensor:
        """Return codes before squashing, scaled: (B, J, D) → (B, J·D)."""
        return F.unsquash(codes.double()).flatten(1) * self.code_scale

    def decode_scaled(self, scaled: Tensor) -> Tensor:
        """Decode the result of `scale` to rows: (B, J·D) → (B, columns), float64."""
        return self._decode(scaled.double() / self.code_scale)

    def free_energy(self, rows: Tensor) -> Tensor:
        """Compute F of the input capsules: (N, columns) → (N,)."""
        return in_batches(
            lambda batch: self.experts.free_energy(self.capsules(batch)), rows, BATCH_SIZE
        )

    def log_density(self, rows: Tensor) -> Tensor:
        """Compute log N(v; 0, 1) − F(x) up to a constant, with v the whitened row: → (N,).

        −F alone grows with the length of v, and with it the share of rows like no other.
        """
        white = in_batches(self.whitened, rows, BATCH_SIZE)
        return -self.free_energy(rows) - white.square().sum(1) / 2

    def sample(self, count: int, generator: torch.Generator) -> Tensor:
        """Draw codes from their density and decode them: (count, columns), float64."""
        assert self.density is not None  # noqa: S101 (finalize comes first)
        return self._decode(self.density.sample(count, generator).double())

    def _decode(self, z: Tensor) -> Tensor:
        """Decode unsquashed codes (B, J·D)."""
        return _with_intercept(z) @ self.decoder * self._std() + self.mean

    # Training

    @torch.no_grad()
    def partial_fit_statistics(self, rows: Tensor) -> None:
        """Update the mean and the covariance of the columns (Chan, Golub and LeVeque 1979)."""
        rows = rows.double()
        old, new = self.rows_seen, len(rows)
        total, mean = old + new, rows.mean(0)
        centred, moved = rows - mean, mean - self.mean
        if self.whitening is None:
            within, between = centred.square().sum(0), moved.square()
        else:
            within, between = centred.T @ centred, torch.outer(moved, moved)
        scatter = (self.covariance * old if old else 0) + within + between * (old * new / total)
        self.mean += moved * new / total
        self.covariance.copy_(scatter / total)
        self.rows_seen = total
        if self.whitening is not None:
            std = self._std()
            correlation = self.covariance / torch.outer(std, std)
            variances, directions = torch.linalg.eigh(correlation)
            variances = variances.clamp(min=0)
            # One factor keeps the mean variance of the columns at 1.
            kept = (variances / (variances + SHRINKAGE)).sum().clamp(min=1e-12)
            factor = (self._varying() / kept).sqrt()
            root = (variances + SHRINKAGE).rsqrt() * factor
            self.whitening.copy_(directions * root @ directions.T)

    def train_one_epoch(
        self,
        rows: Tensor,
        optimizer: torch.optim.Optimizer,
        batch_size: int,
        generator: torch.Generator,
    ) -> None:
        """Train the competing experts by contrastive divergence, in one pass over shuffled rows."""
        for chosen in torch.randperm(len(rows), generator=generator).split(batch_size):
            optimizer.zero_grad(set_to_none=True)
            x = self.capsules(rows[chosen])
            self.competing_experts.contrastive_divergence(x).backward()
            optimizer.step()
        if not self.competing_experts.weight.abs().mean() < DIVERGED:
            raise TrainingError("contrastive divergence diverged; lower learning_rate")

    @torch.no_grad()
    def finalize(self, rows: Tensor, generator: torch.Generator) -> None:
        """Update the experts that encode, and fit the decoder and the density of codes to rows.

        The experts are finished as in `poecaps.training`: the balance is folded into the weights,
        and one factor sets the firing probability.
        """
        self.experts.load_state_dict(self.competing_experts.state_dict())
        self.experts.fold_balance()
        strongest = in_batches(self._largest_norm, rows, BATCH_SIZE)
        self.experts.weight.mul_(factor_for_firing(strongest, TARGET_FIRING))
        z = F.unsquash(self.encode(rows).double()).flatten(1)
        spread = z.var(0, correction=0).sum()
        self.code_scale.copy_((self._varying() / spread).sqrt() if spread > 0 else torch.ones(()))
        a = _with_intercept(z)
        gram = a.T @ a
        gram.diagonal().add_(RIDGE * gram.diagonal().mean())
        self.decoder.copy_(torch.linalg.solve(gram, a.T @ self._standardize(rows)))
        gaussians = max(1, min(MAX_GAUSSIANS, len(rows) // MIN_POINTS_PER_GAUSSIAN))
        self.density = PCAMixture(z.shape[1], gaussians)
        self.density.fit(z.float(), generator)

    def _largest_norm(self, rows: Tensor) -> Tensor:
        """Compute max_j ‖z_j‖: (B, columns) → (B,)."""
        z = self.experts.route(self.capsules(rows)).preactivation
        norm: Tensor = z.norm(dim=-1).amax(1)
        return norm

    def _standardize(self, rows: Tensor) -> Tensor:
        return (rows.double() - self.mean) / self._std()

    def _std(self) -> Tensor:
        """Return the standard deviations of the columns; 1 for a constant column."""
        return torch.where(self._is_constant(), 1, self._variance()).sqrt()

    def _varying(self) -> int:
        """Count the columns that are not constant."""
        return int((~self._is_constant()).sum())

    def _is_constant(self) -> Tensor:
        return self._variance() <= (CONSTANT * self.mean).square()

    def _variance(self) -> Tensor:
        return self.covariance if self.covariance.ndim == 1 else self.covariance.diagonal()


def _with_intercept(z: Tensor) -> Tensor:
    """Append a 1 to every row: (B, S) → (B, S + 1)."""
    return torch.cat([z, z.new_ones(len(z), 1)], 1)
