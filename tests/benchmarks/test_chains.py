"""The measurement of persistent chains, on made-up capsules."""

from __future__ import annotations

import torch

from benchmarks.chains import NEVER, lost
from poecaps import squash


def test_a_chain_started_at_small_weights_loses_far_more_than_plain_learning(
    generator: torch.Generator,
) -> None:
    x = squash(torch.randn(300, 9, 16, generator=generator))
    assert lost(x, 0, 0.0, steps=60) > 5 * lost(x, NEVER, 0.0, steps=60)
