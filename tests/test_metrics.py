"""Metrics that training and evaluation share."""

from __future__ import annotations

import pytest
import torch

from poecaps.metrics import effective_rank


def test_effective_rank_counts_directions(generator: torch.Generator) -> None:
    basis = torch.linalg.qr(torch.randn(20, 20, generator=generator)).Q[:, :5]
    code = torch.randn(4000, 5, generator=generator) @ basis.T + 3
    assert effective_rank(code) == pytest.approx(5, rel=0.02)
    assert effective_rank(torch.ones(10, 4)) == 0
