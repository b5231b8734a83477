"""Confidence intervals over seeds, compared with SciPy and with their coverage."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from benchmarks.intervals import (
    Interval,
    difference_interval,
    difference_of_pairs,
    mean_interval,
    single_difference_interval,
)

FIRST, SECOND = (3.1, 2.7, 3.4, 3.0, 2.9), (2.0, 2.6, 1.9)


def test_the_interval_of_a_mean_is_that_of_scipy() -> None:
    found = mean_interval(FIRST)
    low, high = stats.t.interval(0.95, 4, np.mean(FIRST), stats.sem(FIRST))
    assert (found.value - found.half_width, found.value + found.half_width) == pytest.approx(
        (low, high)
    )


def test_the_interval_of_a_difference_is_that_of_scipy() -> None:
    found = difference_interval(FIRST, SECOND)
    exact = stats.ttest_ind(FIRST, SECOND, equal_var=False).confidence_interval(0.95)
    assert found.value - found.half_width == pytest.approx(exact.low)
    assert found.value + found.half_width == pytest.approx(exact.high)
    assert found.excludes_zero
    assert not difference_interval(FIRST, FIRST[::-1]).excludes_zero


def test_the_interval_of_pairs_is_that_of_scipy() -> None:
    second = (2.9, 2.6, 3.0, 2.9, 2.6)
    found = difference_of_pairs(FIRST, second)
    exact = stats.ttest_rel(FIRST, second).confidence_interval(0.95)
    assert found.value - found.half_width == pytest.approx(exact.low)
    assert found.value + found.half_width == pytest.approx(exact.high)
    assert found.half_width < difference_interval(FIRST, second).half_width
    with pytest.raises(ValueError, match="zip"):
        difference_of_pairs(FIRST, SECOND)


def test_one_run_of_the_same_distribution_is_within_its_interval_in_19_of_20_cases() -> None:
    draws = np.random.default_rng(0).normal(3.0, 2.0, (4000, 4))
    outside = [single_difference_interval(one, rest).excludes_zero for one, *rest in draws]
    assert np.mean(outside) == pytest.approx(0.05, abs=0.01)
    width = single_difference_interval(0.0, SECOND).half_width / np.std(SECOND, ddof=1)
    assert width == pytest.approx(4.97, abs=0.01)


def test_equal_seeds_have_no_width() -> None:
    assert difference_interval((1.0, 1.0), (0.5, 0.5)) == Interval(0.5, 0.0)


def test_one_seed_has_no_interval() -> None:
    with pytest.raises(ValueError, match="needs at least 2 seeds, but has 1"):
        mean_interval((1.0,))
    with pytest.raises(ValueError, match="needs at least 2 seeds, but has 1"):
        difference_interval(FIRST, (1.0,))


def test_text() -> None:
    assert Interval(0.123, 0.045).text(".1%") == "12.3 % ± 4.5 %"
    assert Interval(0.123, 0.045).signed(".1%") == "+12.3 % ± 4.5 %"
    assert Interval(-0.5, 0.25).signed(".2f") == "-0.50 ± 0.25"
