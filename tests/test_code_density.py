"""Densities of codes: their moments, the experts they belong to, k-means and eigenvectors."""

from __future__ import annotations

import pytest
import torch

from poecaps import squash
from poecaps.code_density import (
    DENSITY_DOMAINS,
    DOMAIN_INFO,
    DOMAINS,
    CodeDensity,
    Domain,
    kmeans,
    leading_eigenvectors,
    leading_eigenvectors_by_iteration,
)


def test_every_domain_has_its_own_description() -> None:
    assert tuple(DOMAIN_INFO) == (*DOMAINS, *DENSITY_DOMAINS)
    assert len({info.description for info in DOMAIN_INFO.values()}) == len(DOMAIN_INFO)


@pytest.mark.parametrize("domain", DOMAINS)
def test_only_a_domain_of_whole_codes_draws_several_experts(
    domain: Domain, generator: torch.Generator
) -> None:
    density = CodeDensity(3, 4, joint_components=1, expert_components=1)
    density.fit(squash(torch.randn(200, 3, 4, generator=generator)), generator)
    active = density.sample(20, domain, None, generator).any(dim=-1).sum(1)
    assert (active > 1).all() == DOMAIN_INFO[domain].whole_code
    assert (active == 1).all() != DOMAIN_INFO[domain].whole_code


def test_densities_have_the_moments_of_the_codes(generator: torch.Generator) -> None:
    """Two clusters of codes, in each of which another expert is the strongest."""
    density = CodeDensity(2, 3, joint_components=2, expert_components=1)
    z = torch.randn(2000, 2, 3, generator=generator) * torch.tensor([0.5, 0.2, 0.1])
    z[:1000, 0] += 4
    z[1000:, 1] += 4
    density.fit(squash(z), generator)
    drawn = density.sample(20_000, "joint", None, generator)
    first = drawn[:, 0, 0] > 2
    assert 0.47 < first.float().mean().item() < 0.53
    torch.testing.assert_close(drawn[first].mean(0), z[:1000].mean(0), rtol=0.1, atol=0.05)
    torch.testing.assert_close(drawn[first].std(0), z[:1000].std(0), rtol=0.1, atol=0.01)
    learned = density.sample(20_000, "learned", 1, generator)[:, 1]
    own = z[1000:, 1]  # where expert 1 is the strongest
    torch.testing.assert_close(learned.mean(0), own.mean(0), rtol=0.1, atol=0.05)
    torch.testing.assert_close(torch.cov(learned.T), torch.cov(own.T), rtol=0.1, atol=0.05)
    torch.testing.assert_close(density.mean[1], own.mean(0), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(density.std[1], own.std(0), rtol=1e-2, atol=1e-3)


def test_the_restricted_domain_is_the_half_that_the_experts_own_images_visit(
    generator: torch.Generator,
) -> None:
    """Each expert wins few images, and its weaker codes of the others point the opposite way."""
    density = CodeDensity(5, 3, joint_components=1, expert_components=1)
    z = -0.5 + 0.1 * torch.randn(500, 5, 3, generator=generator)
    winner = torch.arange(500) % 5
    z[torch.arange(500), winner] = 3 + 0.1 * torch.randn(500, 3, generator=generator)
    density.fit(squash(z), generator)
    for expert in range(5):
        own = z[winner == expert, expert]
        drawn = density.sample(200, "restricted", expert, generator)[:, expert]
        assert (drawn @ own.mean(0) > 0).float().mean().item() > 0.95


def test_the_density_of_one_expert_may_have_several_components(generator: torch.Generator) -> None:
    density = CodeDensity(1, 2, joint_components=1, expert_components=2)
    z = torch.randn(1000, 1, 2, generator=generator) * 0.1 + 1
    z[:300] += 3
    density.fit(squash(z), generator)
    drawn = density.sample(4000, "learned", 0, generator)[:, 0, 0]
    high = drawn > 2.5
    assert 0.25 < high.float().mean().item() < 0.35
    assert drawn[high].mean().item() == pytest.approx(4, abs=0.05)
    assert drawn[~high].mean().item() == pytest.approx(1, abs=0.05)


def test_an_expert_that_is_never_the_strongest_is_fitted_to_the_images_it_fires_for(
    generator: torch.Generator,
) -> None:
    density = CodeDensity(2, 3, joint_components=2, expert_components=2)
    z = torch.randn(1000, 2, 3, generator=generator) * 0.1 + 2
    z[:, 0] += 5
    z[:700, 1] = 0
    density.fit(squash(z), generator)
    torch.testing.assert_close(density.mean[1], torch.full((3,), 2.0), rtol=0.05, atol=0)
    z[:, 1] = 0
    density.fit(squash(z), generator)
    assert not density.sample(10, "learned", 1, generator)[:, 1].any()


def test_kmeans_finds_separate_clusters(generator: torch.Generator) -> None:
    points = torch.randn(300, 3, generator=generator) * 0.1
    points[100:] += 5
    clusters = kmeans(points, 2, generator)
    assert clusters.shape == (300,)
    assert len(set(clusters[:100].tolist())) == len(set(clusters[100:].tolist())) == 1
    assert clusters[0] != clusters[-1]


@pytest.mark.parametrize("points", [5, 26, 60, 200])
def test_leading_eigenvectors_by_iteration_are_those_of_lapack(
    points: int, generator: torch.Generator
) -> None:
    """For covariances of as many points as a cluster has, some of lower rank, and one of 0."""
    std = torch.linspace(0, 3, 128).exp()
    centred = torch.randn(20, points, 128, generator=generator, dtype=torch.float64) * std
    covariance = centred.mT @ centred / points
    covariance[0] = 0
    results = []
    for find in (leading_eigenvectors_by_iteration, leading_eigenvectors):
        values, vectors = find(covariance, 8)
        results.append((values, vectors * values.clamp(min=0).unsqueeze(1) @ vectors.mT))
    for ours, exact in zip(*results, strict=True):
        torch.testing.assert_close(ours, exact, rtol=1e-3, atol=1e-3 * float(exact.abs().max()))
