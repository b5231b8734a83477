"""Metrics that training and evaluation share."""

from __future__ import annotations

import pytest
import torch

from poecaps.metrics import (
    agreement,
    effective_rank,
    energy,
    lost_share,
    margin,
    margins,
    reconstruction,
    stability,
)


def test_effective_rank_counts_directions(generator: torch.Generator) -> None:
    basis = torch.linalg.qr(torch.randn(20, 20, generator=generator)).Q[:, :5]
    code = torch.randn(4000, 5, generator=generator) @ basis.T + 3
    assert effective_rank(code) == pytest.approx(5, rel=0.02)
    assert effective_rank(torch.ones(10, 4)) == 0


def test_the_margin_is_the_mean_difference_of_the_two_largest_log_odds() -> None:
    log_odds = torch.tensor([[1.0, 3.0, 2.5], [-1.0, -5.0, -3.0]])
    assert margins(log_odds).tolist() == [0.5, 2.0]
    assert margin(log_odds) == 1.25
    assert margin(log_odds + 7) == 1.25  # a factor of all weights
    assert margins(log_odds[:, :1]).tolist() == [0, 0]


def test_the_agreement_compares_each_view_with_the_image_itself() -> None:
    expert = torch.tensor([[0, 0, 1, 0], [2, 1, 1, 1]])  # of an image and three views
    log_odds = torch.nn.functional.one_hot(expert, 3).float()
    assert agreement(log_odds) == pytest.approx(2 / 6)


def test_the_stability_is_the_chance_that_another_view_chooses_the_same_expert() -> None:
    expert = torch.tensor([[0, 0, 1], [2, 2, 2]])  # of the three views of two images
    log_odds = torch.nn.functional.one_hot(expert, 4).float()
    # Of the four ordered pairs that begin with the first expert, two end with it.
    assert stability(log_odds).tolist() == [0.5, 0, 1, 0]


def test_reconstruction_and_energy_are_better_if_larger(generator: torch.Generator) -> None:
    x = torch.rand(4, 3, 2, generator=generator)
    assert reconstruction(x, x) == 0
    assert reconstruction(x, torch.zeros_like(x)) == pytest.approx(-1)
    assert reconstruction(x, 0.5 * x) == pytest.approx(-0.25)
    assert lost_share(x, 0.5 * x) == pytest.approx(0.25)
    assert energy(torch.tensor([-1.0, -2.0])) == 1.5
