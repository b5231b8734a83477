"""Metrics that both training and evaluation report."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def effective_rank(code: Tensor) -> float:
    """Compute the participation ratio (Σλ)²/Σλ² of the covariance of codes: (N, S) → float.

    λ are the eigenvalues of the covariance. The ratio counts the directions that carry the
    variance of the codes: it is S if all directions have the same variance, and 0 for constant
    codes.
    """
    centred = (code - code.mean(0)).double()
    covariance = centred.T @ centred
    total = covariance.trace()  # Σλ; Σλ² is the sum of the squared entries of the covariance
    return (total.square() / covariance.square().sum()).item() if total > 0 else 0.0
