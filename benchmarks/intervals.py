"""Confidence intervals over seeds, of means and of differences between models."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

LEVEL = 0.95


@dataclass(frozen=True)
class Interval:
    """An estimate with the half-width of its 95 % interval."""

    value: float
    half_width: float

    @property
    def excludes_zero(self) -> bool:
        """Return whether the difference that this interval estimates is significant."""
        return abs(self.value) > self.half_width

    def text(self, form: str) -> str:
        """Format as value ± half-width."""
        return f"{self.value:{form}} ± {self.half_width:{form}}".replace("%", " %")

    def signed(self, form: str) -> str:
        """Format a difference with its sign, as ±value ± half-width."""
        return f"{self.value:+{form}} ± {self.half_width:{form}}".replace("%", " %")


def mean_interval(values: Sequence[float]) -> Interval:
    """Estimate a mean from several seeds, by Student's t.

    Training with another seed draws other samples, too: the spread between seeds contains that of
    the draws.
    """
    _require_seeds(values)
    error = statistics.stdev(values) / math.sqrt(len(values))
    return Interval(statistics.mean(values), _quantile(len(values) - 1) * error)


def difference_interval(first: Sequence[float], second: Sequence[float]) -> Interval:
    """Estimate the difference of two means from several seeds each, by Welch's t."""
    squares = []
    for values in (first, second):
        _require_seeds(values)
        squares.append(statistics.variance(values) / len(values))
    difference = statistics.mean(first) - statistics.mean(second)
    total = sum(squares)
    if total == 0:
        return Interval(difference, 0.0)
    freedom = total**2 / sum(
        square**2 / (len(values) - 1)
        for square, values in zip(squares, (first, second), strict=True)
    )
    return Interval(difference, _quantile(freedom) * math.sqrt(total))


def difference_of_pairs(first: Sequence[float], second: Sequence[float]) -> Interval:
    """Estimate the mean difference of two models with the same seeds, by Student's t of pairs."""
    return mean_interval([a - b for a, b in zip(first, second, strict=True)])


def single_difference_interval(single: float, several: Sequence[float]) -> Interval:
    """Estimate the difference of one run from the mean of several seeds, by Student's t.

    This is the prediction interval of one more run: the spread of the single run is taken to be
    that of the others. With three seeds, its half-width is 4.30·√(4/3), five standard deviations.
    """
    _require_seeds(several)
    spread = statistics.stdev(several) * math.sqrt(1 + 1 / len(several))
    return Interval(single - statistics.mean(several), _quantile(len(several) - 1) * spread)


def _require_seeds(values: Sequence[float]) -> None:
    if len(values) < 2:
        raise ValueError(f"an interval over seeds needs at least 2 seeds, but has {len(values)}")


def _quantile(freedom: float) -> float:
    from scipy import stats

    return float(stats.t.ppf((1 + LEVEL) / 2, freedom))
