"""Each baseline against an independent computation, and the whole script."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from sklearn import decomposition
from sklearn.neural_network import BernoulliRBM as SklearnRBM

from benchmarks.baselines import (
    BASELINES,
    CODE_SIZE,
    PCA,
    VAE,
    BernoulliRBM,
    Budget,
    CodeMixture,
    GaussianRBM,
    main,
)
from poecaps.data import ImageSet, load
from poecaps.evaluation import reconstruction

if TYPE_CHECKING:
    from pathlib import Path


def budget(epochs: int = 0, gibbs: int = 5) -> Budget:
    return Budget(epochs, gibbs, 0, torch.device("cpu"))


@pytest.fixture(scope="module")
def digits() -> ImageSet:
    return ImageSet(load("mnist-sample").images[:500])


@pytest.fixture
def rbm(digits: ImageSet, generator: torch.Generator) -> GaussianRBM:
    """Create an RBM in float64 with random weights, biases, offsets and variances."""
    made = GaussianRBM(digits, budget())
    for name in ("weight", "visible", "hidden", "log_variance"):
        values = getattr(made, name)
        noise = torch.randn(values.shape, generator=generator, dtype=torch.float64)
        setattr(made, name, torch.nn.Parameter(values.double().clamp(min=-1.5) + 0.1 * noise))
    made.mean = made.mean.double()
    made.offset = torch.rand(CODE_SIZE, generator=generator, dtype=torch.float64)
    return made


def energy(of: GaussianRBM, v: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
    """E(v, h), from the definition: (B, V), (B, S) → (B,)."""
    variance = of.log_variance.exp()
    square = ((v - of.visible).square() / (2 * variance)).sum(1)
    pairs = torch.einsum("bi,ij,bj->b", (v - of.mean) / variance, of.weight, h - of.offset)
    return square - pairs - (h - of.offset) @ of.hidden


class TestGaussianRBM:
    def test_its_gradient_is_that_of_the_energy(
        self, rbm: GaussianRBM, generator: torch.Generator
    ) -> None:
        v = torch.rand(7, 784, generator=generator, dtype=torch.float64)
        h = torch.rand(7, CODE_SIZE, generator=generator, dtype=torch.float64)
        parameters = [rbm.weight, rbm.visible, rbm.hidden, rbm.log_variance]
        expected = torch.autograd.grad(-energy(rbm, v, h).mean(), parameters)
        with torch.no_grad():
            computed = rbm.energy_gradient(v, h)
        for ours, theirs in zip(computed, expected, strict=True):
            torch.testing.assert_close(ours, theirs)

    @torch.no_grad()
    def test_its_conditionals_are_those_of_the_energy(
        self, rbm: GaussianRBM, generator: torch.Generator
    ) -> None:
        v = torch.rand(3, 784, generator=generator, dtype=torch.float64)
        h = torch.bernoulli(
            torch.full((3, CODE_SIZE), 0.5, dtype=torch.float64), generator=generator
        )
        on, off = h.clone(), h.clone()
        on[:, 11], off[:, 11] = 1, 0
        gap = energy(rbm, v, off) - energy(rbm, v, on)  # log-odds of unit 11
        torch.testing.assert_close(rbm.hidden_probability(v)[:, 11], torch.sigmoid(gap))
        mean = rbm.visible_mean(h)  # the minimum of the energy
        for step in (0.1, -0.1):
            assert bool((energy(rbm, mean + step, h) > energy(rbm, mean, h)).all())

    @torch.no_grad()
    def test_moving_the_offset_does_not_change_the_model(
        self, rbm: GaussianRBM, generator: torch.Generator
    ) -> None:
        v = torch.rand(4, 784, generator=generator, dtype=torch.float64)
        h = torch.bernoulli(
            torch.full((4, CODE_SIZE), 0.5, dtype=torch.float64), generator=generator
        )
        before = energy(rbm, v, h)
        rbm.update_offset(torch.ones(CODE_SIZE, dtype=torch.float64))
        shift = energy(rbm, v, h) - before
        torch.testing.assert_close(
            shift, shift[:1].expand(4)
        )  # a constant does not change the distribution

    @torch.no_grad()
    def test_training_reduces_the_reconstruction_error(self, digits: ImageSet) -> None:
        images = digits.batch(slice(None))
        errors = []
        for epochs in (0, 8):
            trained = GaussianRBM(digits, budget(epochs))
            errors.append(
                reconstruction([(images, trained.reconstruct(images))], images.mean(0)).relative
            )
        assert errors[1] < 0.6 < errors[0]


@torch.no_grad()
def test_the_bernoulli_rbm_agrees_with_scikit_learn(digits: ImageSet) -> None:
    images = digits.batch(range(40))
    ours = BernoulliRBM(digits, budget(epochs=2))
    theirs = SklearnRBM(CODE_SIZE, learning_rate=0.05, batch_size=50, n_iter=2, random_state=0)
    theirs.fit(digits.batch(slice(None)).flatten(1).numpy())
    expected = torch.from_numpy(theirs.transform(images.flatten(1).numpy())).float()
    torch.testing.assert_close(ours.encode(images), expected, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_chains_from_images_start_there() -> None:
    left = torch.zeros(200, 1, 10, 10)
    left[:, :, :, :5] = 1
    data = ImageSet(
        torch.cat([left, left.flip(3)[:20]]).numpy()
    )  # the right half is bright in 20 of 220 images
    trained = BernoulliRBM(data, budget(epochs=60, gibbs=0))
    drawn = trained.sample(400, "from images", torch.Generator().manual_seed(0))
    right = (drawn - left.flip(3)[0]).square().mean((1, 2, 3)) < 0.1
    assert right.double().mean().item() == pytest.approx(20 / 220, abs=0.05)


@torch.no_grad()
def test_principal_components_agree_with_scikit_learn(digits: ImageSet) -> None:
    pixels = digits.batch(slice(None)).flatten(1)
    reference = decomposition.PCA(CODE_SIZE, svd_solver="full").fit(pixels.double().numpy())
    expected = reference.inverse_transform(reference.transform(pixels[:20].double().numpy()))
    ours = PCA(digits, budget()).reconstruct(digits.batch(range(20))).flatten(1)
    np.testing.assert_allclose(ours.numpy(), expected.clip(0, 1), atol=1e-4)


@torch.no_grad()
def test_the_density_has_the_moments_of_the_codes(generator: torch.Generator) -> None:
    scale = torch.tensor([5.0, 1.0, 0.2, 3.0])
    codes = torch.randn(20_000, 4, generator=generator) * scale + 2
    drawn = CodeMixture(codes, seed=0).sample(20_000, generator)
    torch.testing.assert_close(drawn.mean(0), codes.mean(0), rtol=0.05, atol=0.05)
    torch.testing.assert_close(drawn.std(0), codes.std(0), rtol=0.05, atol=0.05)


def test_the_elbo_of_the_vae_is_the_sum_of_its_two_terms(digits: ImageSet) -> None:
    vae = VAE(digits, budget())
    images = digits.batch(range(6))
    with torch.no_grad():
        mean, log_variance = vae.encoder(images).chunk(2, dim=1)
        posterior = torch.distributions.Normal(mean, (log_variance / 2).exp())
        divergence = torch.distributions.kl_divergence(
            posterior, torch.distributions.Normal(0.0, 1.0)
        ).sum()
        torch.manual_seed(3)
        codes = mean + torch.randn_like(mean) * posterior.scale
        p = torch.sigmoid(vae.decoder(codes))
        likelihood = (images * p.log() + (1 - images) * (1 - p).log()).sum()
        torch.manual_seed(3)
        torch.testing.assert_close(vae.loss(images), (divergence - likelihood) / 6)


def test_the_vae_draws_from_its_prior_and_from_the_density_of_its_codes(digits: ImageSet) -> None:
    vae = VAE(digits, budget())
    with torch.no_grad():
        first = torch.sigmoid(
            vae.decoder(torch.randn(50, CODE_SIZE, generator=torch.Generator().manual_seed(1)))
        )
        prior, density = (
            vae.sample(50, domain, torch.Generator().manual_seed(1)) for domain in vae.domains
        )
        codes = vae.encode(digits.batch(slice(None)))
        drawn = vae.density.sample(2000, torch.Generator().manual_seed(1))
    torch.testing.assert_close(prior, first)
    torch.testing.assert_close(drawn.mean(0), codes.mean(0), rtol=0, atol=0.1 * codes.std().item())
    assert not torch.equal(prior, density)


def test_several_seeds_give_mean_and_standard_deviation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    size = [
        "--epochs",
        "1",
        "--samples",
        "30",
        "--limit",
        "200",
        "--device",
        "cpu",
        "--seeds",
        "0,5",
    ]
    main([*size, "--only", "pixels,vae", "--json", str(tmp_path / "all.json")])
    results = json.loads((tmp_path / "all.json").read_text())
    assert [(each["name"], each["seed"]) for each in results] == [
        ("pixels", 0),
        ("vae", 0),
        ("vae", 5),
    ]
    distances = [each["domains"]["joint"]["frechet"]["distance"] for each in results[1:]]
    printed = capsys.readouterr().out
    line = next(each for each in printed.splitlines() if "joint: Fréchet distance" in each)
    assert line.split()[-3:] == [
        f"{np.mean(distances):.4g}",
        "±",
        f"{np.std(distances, ddof=1):.2g}",
    ]
    assert "pixels, mean" not in printed


def test_the_script_compares_all_baselines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    random = np.random.default_rng(0)
    labels = np.arange(120) % 2
    images = random.integers(0, 50, (120, 18, 19), dtype=np.uint8)
    images[labels == 1, 8:12] += 180
    np.savez(
        tmp_path / "x.npz", x_train=images, y_train=labels, x_test=images[:60], y_test=labels[:60]
    )
    size = ["--epochs", "1", "--samples", "30", "--gibbs", "2", "--limit", "100", "--device", "cpu"]
    main(["--data", str(tmp_path / "x.npz"), *size, "--json", str(tmp_path / "out" / "all.json")])
    table = capsys.readouterr().out
    assert all(name in table for name in BASELINES)
    results = {
        each["name"]: each for each in json.loads((tmp_path / "out" / "all.json").read_text())
    }
    assert list(results) == list(BASELINES)
    assert all(each["training_images"] == 100 for each in results.values())
    assert all(
        each["code_size"] == 320
        for each in results.values()
        if each["name"] in ("vae", "gaussian-rbm")
    )
    assert results["pixels"]["probe"]["test_accuracy"] == 1
    assert results["vae"]["metadata"]["epochs"] == 1
    seconds = {name: each["metadata"]["training_seconds"] for name, each in results.items()}
    assert seconds["bernoulli-rbm"] > 0
    assert (
        seconds["autoencoder"] > seconds["autoencoder-all"] > 0
    )  # the same training, plus principal components
    assert set(results["gaussian-rbm"]["domains"]) == {"joint", "from images"}
    assert results["autoencoder"]["domains"]["joint"]["negatives"]["share"] is not None
    assert "no classifier for these data" in table


def test_an_unknown_baseline_is_rejected(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--only", "pca,gan"])
    assert "but contains gan" in capsys.readouterr().err
