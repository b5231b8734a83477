"""Metrics that training and evaluation share."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def effective_rank(codes: Tensor) -> float:
    """Compute the participation ratio (Σλ)²/Σλ² of the eigenvalues λ of the codes' covariance.

    It is the number of directions that carry the variance of the codes.

    Parameters
    ----------
    codes : (N, S)
        One row for each image.

    Returns
    -------
    float
        From 1 to S, or 0 if all codes are equal.
    """
    centred = (codes - codes.mean(0)).double()
    covariance = centred.T @ centred
    total = covariance.trace()  # Σλ; Σλ² is the sum of the squared entries
    return (total.square() / covariance.square().sum()).item() if total > 0 else 0.0
