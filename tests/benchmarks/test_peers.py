"""The peers: exact facts about their parts, and their search."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from benchmarks import peers
from benchmarks.density_baselines import FactorAnalysers
from benchmarks.density_baselines import GaussianRBM as UnitRBM
from benchmarks.peers import SEARCH, BernoulliLayer, Clock, Training, chosen_names, main
from poecaps.data import ImageSet
from poecaps.evaluation import evaluate

if TYPE_CHECKING:
    from pathlib import Path

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def data() -> ImageSet:
    images = np.zeros((64, 12, 11), np.uint8)
    for number, image in enumerate(images):
        image[2 : 5 + number % 7, 2 : 4 + number % 5] = 255
    return ImageSet(images)


def test_a_clock_ends_after_its_steps() -> None:
    assert list(Clock(1e9, 4, CPU)) == pytest.approx([0, 0.25, 0.5, 0.75], abs=1e-6)
    assert len(list(Clock(1e9, 10, CPU).part(0.5))) == 5
    assert list(Clock(1e-9, None, CPU)) in ([], [0.0])


def test_a_flow_of_one_point_ends_there() -> None:
    """The velocity that minimises the loss for data at a point p is (p − x) / (1 − t)."""
    point = torch.tensor([2.0, -1.0])

    def velocity(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return (point - x) / (1 - t.unsqueeze(1)).clamp(min=1e-3)

    torch.manual_seed(0)
    assert peers.flow_loss(velocity, point.expand(500, 2)).item() < 1e-3
    ends = peers.follow_flow(velocity, torch.randn(20, 2))
    torch.testing.assert_close(ends, point.expand(20, 2), rtol=0, atol=0.05)


def test_the_gradient_of_an_rbm_is_that_of_its_exact_likelihood() -> None:
    """P(v) ∝ e^(−F(v)) is the sum of e^(−E(v, h)) over the hidden units."""
    torch.manual_seed(0)
    layer = BernoulliLayer(3, 2, CPU)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_()
    v = torch.tensor([1.0, 0.0, 1.0])
    total = sum(
        torch.exp(v @ layer.visible + h @ layer.hidden + v @ layer.weight @ h)
        for h in torch.tensor([[0.0, 0.0], [0.0, 1.0], [1.0, 0.0], [1.0, 1.0]])
    )
    assert isinstance(total, torch.Tensor)
    torch.testing.assert_close(layer.free_energy(v.unsqueeze(0))[0], -total.log())


def test_the_mean_of_a_gaussian_rbm_given_its_units(generator: torch.Generator) -> None:
    """With the units fixed, minus the log-density is smallest at the mean."""
    rbm = UnitRBM(3, scale=0.5, bias=0.1)
    with torch.no_grad():
        for parameter in rbm.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    h = torch.bernoulli(torch.full((1, 6), 0.5), generator=generator)
    u = rbm.visible_mean(h).detach().requires_grad_()
    square = (rbm.log_precision.exp() * u.square()).sum() / 2
    energy = square - (u @ rbm.visible).sum() - (h * (u @ rbm.weight.T)).sum()
    (gradient,) = torch.autograd.grad(energy, u)
    torch.testing.assert_close(gradient, torch.zeros_like(u), rtol=0, atol=1e-5)


def test_draws_of_factor_analysers_have_the_moments_of_the_points(
    generator: torch.Generator,
) -> None:
    points = torch.randn(3000, 1, generator=generator) @ torch.tensor([[1.0, 2.0, -1.0]])
    points[1500:] += 20
    mixture = FactorAnalysers(points, 2, 1, iterations=5, generator=generator)
    drawn = mixture.sample_means(20_000, generator)
    torch.testing.assert_close(drawn.mean(0), points.mean(0), rtol=0.05, atol=0.2)
    torch.testing.assert_close(drawn.T.cov(), points.T.cov(), rtol=0.1, atol=0.5)
    torch.testing.assert_close(mixture.posterior(points).sum(1), torch.ones(3000))


@pytest.mark.parametrize(
    "name",
    [
        "regularised autoencoder, 16 numbers, penalty 0.001",
        "VAE, 8 numbers, β 1, gaussian",
        "VAE, 8 numbers, β 0.5, bernoulli",
        "flow on codes, 16 numbers, β 0.1",
        "Gaussian RBM, learning rate 0.001",
        "deep belief network, 1000-1000, learning rate 0.001",
        "flow matching, 32 filters",
    ],
)
def test_a_peer_encodes_and_draws_images(
    name: str, data: ImageSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "FLOW_STEPS", 2)
    monkeypatch.setattr(peers, "CHAIN_STEPS", 3)
    monkeypatch.setattr(peers, "GIBBS_STEPS", 3)
    model = SEARCH[name](Training(data, Clock(1e9, 3, CPU), seed=0))
    result = evaluate(model, data, data, samples=8)
    assert name.startswith(model.name)
    assert math.isfinite(result.domains["joint"].random_frechet.distance)


def test_an_autoencoder_learns() -> None:
    """A decoder that ignores its code loses all of the variance, at best."""
    small = np.zeros((16, 8, 8), np.uint8)
    for number, image in enumerate(small):
        image[: 2 + number // 4 * 2, : 2 + number % 4 * 2] = 255
    data = ImageSet(small)
    images = data.batch(slice(None))
    model = peers.RegularisedAutoencoder(Training(data, Clock(1e9, 80, CPU), seed=0), 16, 1e-3)
    error = (model.reconstruct(images) - images).square().mean()
    assert error < 0.5 * (images.mean(0) - images).square().mean()


def row(name: str, distance: float, on: str = "held-out", **more: float) -> dict[str, Any]:
    domains = {"joint": distance, **more}
    return {
        "variant": name,
        "on": on,
        "evaluation": {
            "domains": {
                domain: {"random_frechet": {"distance": value}} for domain, value in domains.items()
            }
        },
    }


def test_the_best_option_of_each_peer_is_chosen_on_held_out_images() -> None:
    rows = [row("a, 1", 3.0), row("a, 2", 2.0), row("b, 1", 9.0, density=1.0), row("b, 2", 4.0)]
    assert chosen_names(rows) == ["a, 2", "b, 1"]
    with pytest.raises(ValueError, match="a, 1 was not measured on held-out images"):
        chosen_names([row("a, 1", 3.0, on="test")])


@pytest.mark.usefixtures("same_process")
def test_the_search_is_written_down_and_its_best_is_measured(bars: Path, tmp_path: Path) -> None:
    search, final = tmp_path / "search.json", tmp_path / "final.json"
    size = ["--data", str(bars), "--device", "cpu", "--samples", "10", "--steps", "2"]
    size += ["--held-out", "16"]
    options = "VAE, 8 numbers, β 1, bernoulli;VAE, 8 numbers, β 0.5, bernoulli"
    main([*size, "--only", options, "--json", str(search)])
    rows = json.loads(search.read_text())
    assert [each["variant"] for each in rows] == options.split(";")
    main([*size, "--chosen", str(search), "--on", "test", "--json", str(final)])
    (measured,) = json.loads(final.read_text())
    assert [measured["variant"]] == chosen_names(rows)
    assert "--samples 10 --steps 2 --seconds 60" in measured["command"]
    assert measured["on"] == "test"
    assert measured["evaluation"]["training_images"] == 48
