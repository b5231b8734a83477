"""Rows of a table as capsules under one layer of experts, and back."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import nn

from poecaps import functional as F
from poecaps.layer import CapsuleExperts
from poecaps.network import FEWEST, MixtureOfCodes
from poecaps.training.errors import TrainingError
from poecaps.training.stages import factor_for_firing

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

SCALE = 0.4  # root mean square of the norm of a capsule before it is squashed; g(z) peaks at 1
FIRING = 0.5  # mean firing probability of the strongest expert of a row
DAMPING = 1e-6  # of the mean eigenvalue of the Gram matrix of codes
ROUNDING = 1e-12  # spread of a column, as a share of its mean, that is none
EXPLODED = 1e3  # a mean weight of this size is no model any more
MOST = 1000  # Gaussians
CHUNK = 1000  # rows that are encoded together


class CapsuleTable(nn.Module):
    """A product of expert capsules over the rows of a table.

    K neighbouring columns are a capsule; the last is filled up with zeros. With m and s the mean and the standard
    deviation of each column over all rows seen, and t = (row − m)/s, the input capsules are squash(0.4 t/√K), so that
    no column and no capsule dominates. Rows come back by a linear map of the unsquashed code, found by least squares.

    Parameters
    ----------
    columns
        Of the table.
    capsule_dim
        K.
    experts, dim
        J and D.
    sharpness, normalize, winners
        See `CapsuleExperts`; the competition is for learning only.
    dtype
        float32 or float64.
    generator
        Source of the initial weights.
    """

    mean: Tensor
    variance: Tensor
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

        self.learner = layer(winners)  # what contrastive divergence moves
        self.experts = layer(
            None
        )  # the same as it is used: no competition, and one factor for all weights
        self.register_buffer("mean", torch.zeros(columns, dtype=torch.float64))
        self.register_buffer("variance", torch.ones(columns, dtype=torch.float64))
        self.register_buffer(
            "decoder", torch.zeros(experts * dim + 1, columns, dtype=torch.float64)
        )
        self.density: MixtureOfCodes | None = None

    def capsules(self, rows: Tensor) -> Tensor:
        """Input capsules: (B, columns) → (B, I, K)."""
        filled = nn.functional.pad(self._standardise(rows), (0, -self.columns % self.capsule_dim))
        scaled = filled * (SCALE / self.capsule_dim**0.5)
        return F.squash(scaled.view(len(rows), -1, self.capsule_dim).to(self.dtype))

    def encode(self, rows: Tensor) -> Tensor:
        """Codes: (B, columns) → (B, J, D)."""
        return torch.cat([self.experts(self.capsules(part)) for part in rows.split(CHUNK)])

    def decode(self, codes: Tensor) -> Tensor:
        """Rows from codes: (B, J, D) → (B, columns), float64."""
        return _with_one(codes) @ self.decoder * self._deviation() + self.mean

    def free_energy(self, rows: Tensor) -> Tensor:
        """F of the input capsules: (B, columns) → (B,)."""
        return torch.cat(
            [self.experts.free_energy(self.capsules(part)) for part in rows.split(CHUNK)]
        )

    def sample(self, count: int, generator: torch.Generator) -> Tensor:
        """Draw rows, decoded from a density of codes: (count, columns), float64."""
        assert self.density is not None  # noqa: S101 (settle comes first)
        z = self.density.sample(count, generator).double()
        return (
            torch.cat([z, z.new_ones(count, 1)], 1) @ self.decoder * self._deviation() + self.mean
        )

    @torch.no_grad()
    def see(self, rows: Tensor) -> None:
        """Take more rows into the mean and the variance of the columns (Chan, Golub and LeVeque 1979)."""
        rows = rows.double()
        old, new = self.rows_seen, len(rows)
        total, mean = old + new, rows.mean(0)
        between = (mean - self.mean).square() * old * new / total
        scatter = (self.variance * old if old else 0) + (rows - mean).square().sum(0) + between
        self.mean += (mean - self.mean) * new / total
        self.variance.copy_(scatter / total)
        self.rows_seen = total

    def learn(
        self, rows: Tensor, optimizer: torch.optim.Optimizer, batch: int, generator: torch.Generator
    ) -> None:
        """Go over rows once, in random order, by contrastive divergence."""
        for step in self.batches(rows, batch, generator):
            optimizer.zero_grad(set_to_none=True)
            self.learner.contrastive_divergence(self.capsules(step)).backward()
            optimizer.step()
        if not self.learner.weight.abs().mean() < EXPLODED:
            raise TrainingError("contrastive divergence diverged; lower learning_rate")

    @staticmethod
    def batches(rows: Tensor, size: int, generator: torch.Generator) -> Iterator[Tensor]:
        """Yield all rows once, in random order, `size` at a time."""
        order = torch.randperm(len(rows), generator=generator)
        return (rows[chosen] for chosen in order.split(size))

    @torch.no_grad()
    def settle(self, rows: Tensor, generator: torch.Generator) -> None:
        """Make the experts of what was learned, and fit the way back and the density of codes to rows.

        As in `poecaps.training`: head starts go into the weights, and one factor sets how much experts fire.
        """
        self.experts.load_state_dict(self.learner.state_dict())
        self.experts.fold_balance()
        strongest = [
            self.experts.route(self.capsules(part)).preactivation.norm(dim=-1).amax(1)
            for part in rows.split(CHUNK)
        ]
        self.experts.weight.mul_(factor_for_firing(torch.cat(strongest), FIRING))
        a = _with_one(self.encode(rows))
        gram = a.T @ a
        gram.diagonal().add_(DAMPING * gram.diagonal().mean())
        self.decoder.copy_(torch.linalg.solve(gram, a.T @ self._standardise(rows)))
        z = a[:, :-1].float()
        self.density = MixtureOfCodes(z.shape[1], max(1, min(MOST, len(rows) // FEWEST)))
        self.density.fit(z, generator)

    def _standardise(self, rows: Tensor) -> Tensor:
        return (rows.double() - self.mean) / self._deviation()

    def _deviation(self) -> Tensor:
        """Return standard deviations; 1 for a column whose spread is no more than rounding."""
        constant = self.variance <= (ROUNDING * self.mean).square()
        return torch.where(constant, 1, self.variance).sqrt()


def _with_one(codes: Tensor) -> Tensor:
    """Unsquashed codes in a row, and a 1 for the constant: (B, J, D) → (B, J·D + 1), float64."""
    z = F.unsquash(codes.double()).flatten(1)
    return torch.cat([z, z.new_ones(len(z), 1)], 1)
