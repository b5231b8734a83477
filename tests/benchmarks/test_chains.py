"""The measurement of persistent chains, on random capsules."""

from __future__ import annotations

import torch

from benchmarks.chains import NEVER, lost_variance
from poecaps import squash


def test_a_chain_started_at_small_weights_loses_far_more_variance_than_cd_1(
    generator: torch.Generator,
) -> None:
    x = squash(torch.randn(300, 9, 16, generator=generator))
    assert lost_variance(x, 0, 0.0, steps=60) > 5 * lost_variance(x, NEVER, 0.0, steps=60)
