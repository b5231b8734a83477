"""Likelihoods of pixels: the map and its determinant, the baselines, and the whole script."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch.distributions import Categorical, LowRankMultivariateNormal, MixtureSameFamily

from benchmarks import pixels
from benchmarks.density_baselines import FactorAnalysers, GaussianRBM, even_schedule, fit_rbm
from benchmarks.pixels import LAMBDA, PatchMap, bits_per_dim, dequantize, make_problem
from poecaps.data import ImageSet
from poecaps.energy import GaussianBase
from poecaps.likelihood import bracket_log_partition
from poecaps.training import DensityStage, TrainingError

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

TINY = pixels.Size(
    training=200,
    held_out=20,
    test=30,
    steps=4,
    routed_steps=2,
    batch_size=16,
    chains=8,
    average=0.5,
    annealing_steps=6,
    annealing_chains=8,
    analysers=((1, 2), (2, 2)),
    iterations=2,
)


def fitted_map(
    generator: torch.Generator, height: int, width: int, patch: int
) -> tuple[PatchMap, Tensor]:
    """Return a map in float64 that was fitted to random images, and these."""
    shared = torch.rand(200, 1, 1, generator=generator, dtype=torch.float64)
    noise = torch.rand(200, height, width, generator=generator, dtype=torch.float64)
    y = 0.2 + 0.3 * shared + 0.3 * noise
    patches = PatchMap(height, width, patch).double()
    patches.fit(y)
    return patches, y


# The map


def test_the_determinant_is_that_of_autograd(generator: torch.Generator) -> None:
    patches, y = fitted_map(generator, 4, 6, 2)
    for image in y[:3]:
        jacobian = torch.autograd.functional.jacobian(
            lambda flat: patches(flat.view(1, 4, 6)).flatten(), image.flatten()
        )
        expected = torch.linalg.slogdet(jacobian)[1]
        torch.testing.assert_close(patches.log_det(image.unsqueeze(0)).squeeze(0), expected)


def test_the_map_is_inverted(generator: torch.Generator) -> None:
    patches, y = fitted_map(generator, 4, 6, 2)
    torch.testing.assert_close(patches.inverse(patches(y)), y)


def test_a_capsule_is_a_whitened_patch(generator: torch.Generator) -> None:
    patches, y = fitted_map(generator, 4, 6, 2)
    changed = y.clone()
    changed[:, 2:, 4:] = 0.5  # the last patch
    moved = (patches(changed) - patches(y)).abs().amax((0, 2))
    assert moved[:-1].max() == 0 < moved[-1]
    x = patches(y)
    torch.testing.assert_close(x.mean(0), torch.zeros_like(x[0]), rtol=0, atol=1e-12)
    covariance = torch.einsum("bik,bil->ikl", x, x) / len(x)
    identity = torch.eye(4, dtype=torch.float64).expand_as(covariance)
    torch.testing.assert_close(covariance, identity, rtol=0, atol=0.05)


@pytest.mark.parametrize("components", [0, 2])
def test_the_density_of_two_pixels_integrates_to_one(
    components: int, generator: torch.Generator
) -> None:
    patches, y = fitted_map(generator, 1, 2, 1)
    base = GaussianBase(2, 1, components, dtype=torch.float64)
    base.fit([patches(y)])
    axis = (torch.arange(800, dtype=torch.float64) + 0.5) / 800
    grid = torch.cartesian_prod(axis, axis).unsqueeze(1)
    log_prob = base.log_prob(patches(grid)) + patches.log_det(grid)
    assert log_prob.exp().mean().item() == pytest.approx(1, abs=1e-3)


def test_bits_are_those_of_papamakarios_et_al(generator: torch.Generator) -> None:
    """b(x) = −log p(x)/(D log 2) − log₂(1 − 2λ) + 8 + Σ_i (log₂ σ(x_i) + log₂(1 − σ(x_i)))/D."""
    patches, y = fitted_map(generator, 4, 4, 2)
    x = torch.logit(LAMBDA + (1 - 2 * LAMBDA) * y).flatten(1)
    log_prob = torch.randn(len(y), generator=generator, dtype=torch.float64)  # in logit space
    jacobian = torch.nn.functional.logsigmoid(x) + torch.nn.functional.logsigmoid(-x)
    expected = -log_prob / (16 * math.log(2)) - math.log2(1 - 2 * LAMBDA) + 8
    expected += jacobian.mean(1) / math.log(2)
    found = bits_per_dim(log_prob + patches.logit_log_det(y), 16)
    torch.testing.assert_close(found, expected)


def test_a_uniform_density_needs_eight_bits() -> None:
    assert bits_per_dim(torch.zeros(1), 784).item() == 8


def test_noise_keeps_the_bytes() -> None:
    images = ImageSet(np.arange(256, dtype=np.uint8).reshape(4, 8, 8))
    y = dequantize(images, torch.Generator().manual_seed(0))
    assert torch.equal((256 * y).floor().byte().flatten(), torch.arange(256).byte())
    assert y.frac().unique().numel() == 256
    assert torch.equal(y, dequantize(images, torch.Generator().manual_seed(0)))


def test_test_images_do_not_depend_on_the_training_images() -> None:
    training, test = (random_images(count, seed) for seed, count in enumerate((80, 30)))
    few, many = (
        make_problem(training, test, replace(TINY, training=count), 0, torch.device("cpu"))
        for count in (40, 60)
    )
    assert few.logit_log_det == many.logit_log_det
    assert (len(few.training.x), len(many.training.x)) == (40, 60)
    assert not torch.equal(few.test.x, many.test.x)  # the whitening is that of training images


# Factor analysers


def mixture_of(points: Tensor, iterations: int) -> FactorAnalysers:
    return FactorAnalysers(
        points, 2, 2, iterations=iterations, generator=torch.Generator().manual_seed(0)
    )


def clusters(generator: torch.Generator) -> Tensor:
    """Draw from two clusters, each with one strong direction: (400, 5)."""
    factor = torch.randn(400, 1, generator=generator, dtype=torch.float64)
    noise = torch.randn(400, 5, generator=generator, dtype=torch.float64)
    directions = torch.randn(2, 5, generator=generator, dtype=torch.float64)
    which = torch.arange(400) % 2
    return factor * directions[which] + 0.3 * noise + 3.0 * which.unsqueeze(1)


def test_factor_analysers_have_the_density_of_torch(generator: torch.Generator) -> None:
    points = clusters(generator)
    mixture = mixture_of(points, 3)
    expected = MixtureSameFamily(
        Categorical(mixture.weights),
        LowRankMultivariateNormal(mixture.means, mixture.factors, mixture.noise),
    )
    torch.testing.assert_close(mixture.log_prob(points), expected.log_prob(points))


def test_expectation_maximization_raises_the_likelihood(generator: torch.Generator) -> None:
    points = clusters(generator)
    mixture = mixture_of(points, 20)
    last = mixture.log_prob(points).mean().item()
    assert mixture.history == sorted(mixture.history)
    assert mixture.history[0] + 1e-3 < mixture.history[-1] <= last
    single = torch.distributions.MultivariateNormal(points.mean(0), points.T.cov())
    assert mixture.history[-1] > single.log_prob(points).mean().item() + 0.5


# Gaussian RBM


def random_rbm(generator: torch.Generator) -> GaussianRBM:
    rbm = GaussianRBM(2, scale=1.0, bias=-0.5)
    with torch.no_grad():
        for parameter in rbm.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.2)
    return rbm


@torch.no_grad()
def exact_log_partition(rbm: GaussianRBM) -> float:
    """Sum over the states of the hidden units; given these, u is Gaussian."""
    variance = (-rbm.log_precision).exp()
    terms = []
    for states in itertools.product((0.0, 1.0), repeat=len(rbm.hidden)):
        h = torch.tensor(states)
        mean = rbm.visible + h @ rbm.weight
        gaussian = (variance.log() + mean.square() * variance).sum() / 2
        terms.append(h @ rbm.hidden + gaussian)
    return torch.logsumexp(torch.stack(terms), 0).item()


def test_the_energy_of_the_rbm_is_differentiated(generator: torch.Generator) -> None:
    rbm = random_rbm(generator)
    u = torch.randn(7, 2, generator=generator, requires_grad=True)
    value, gradient = rbm.energy(u.detach())
    expected = rbm.free_energy(u)
    torch.testing.assert_close(value, expected.detach())
    torch.testing.assert_close(gradient, torch.autograd.grad(expected.sum(), u)[0])


def test_the_partition_function_of_the_rbm_is_bracketed(generator: torch.Generator) -> None:
    rbm = random_rbm(generator)
    found = bracket_log_partition(rbm, chains=400, steps=50, generator=generator)
    exact = exact_log_partition(rbm)
    assert abs(found.forward - exact) < 4 * found.forward_error + 1e-3
    assert abs(found.reverse - exact) < 4 * found.reverse_error + 1e-3
    assert max(found.forward_error, found.reverse_error) < 0.05


def test_the_rbm_learns_a_skewed_density(generator: torch.Generator) -> None:
    u = 1 - torch.empty(1000, 2).exponential_(generator=generator)  # mean 0, variance 1
    rbm = GaussianRBM(2, scale=1.0, bias=-1.0)
    options = DensityStage(
        learning_rate=0.02,
        final_learning_rate_ratio=0.05,
        strength_rate=1.0,
        chains=128,
        lifetime=0,
        average=0.9,
    )

    def gain() -> float:
        return -rbm.free_energy(u).mean().item() - exact_log_partition(rbm)

    assert gain() < 0
    fit_rbm(
        rbm, u, schedule=even_schedule(300), batch_size=128, options=options, generator=generator
    )
    assert gain() > 0.05


def test_an_rbm_that_diverges_is_an_error(generator: torch.Generator) -> None:
    options = DensityStage(learning_rate=1e30, chains=8, lifetime=0)
    with pytest.raises(TrainingError, match="lower the learning rate"):
        fit_rbm(
            GaussianRBM(2, scale=1.0, bias=0.0),
            torch.randn(20, 2, generator=generator),
            schedule=even_schedule(5),
            batch_size=4,
            options=options,
            generator=generator,
        )


# The script


def random_images(count: int, seed: int) -> ImageSet:
    """Return images of 8×8 pixels with a bright bar on a dark ground."""
    random = np.random.default_rng(seed)
    images = random.integers(0, 30, (count, 8, 8)).astype(np.uint8)
    for image in images:
        start = random.integers(0, 5)
        image[start : start + 3] = random.integers(150, 256, (3, 8))
    return ImageSet(images)


def save_images(path: Path, training: int, test: int) -> str:
    np.savez(
        path,
        x_train=random_images(training, 0).images,
        x_test=random_images(test, 1).images,
    )
    return str(path)


def test_the_script_measures_every_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pixels, "QUICK", TINY)
    data = save_images(tmp_path / "bars.npz", 220, 40)
    file = tmp_path / "out" / "pixels.json"
    pixels.main(["--data", data, "--device", "cpu", "--quick", "--json", str(file)])
    report = json.loads(file.read_text())
    printed = capsys.readouterr().out
    assert report["data"] == {"training_images": 200, "held_out_images": 20, "test_images": 30}
    assert report["published"] == []
    found = {model["name"]: model for model in report["models"]}
    assert list(found) == [
        "independent capsules",
        "full covariance",
        "factor analysers",
        "Gaussian RBM, 128 units",
        "poecaps, 128×1",
        "poecaps, 8×16",
        "poecaps, 20×16, R 1, over independent capsules",
        "poecaps, 20×16, R 3, over independent capsules",
    ]
    assert found["factor analysers"]["chosen"].endswith("of 2 factors")
    for model in found.values():
        assert 0 < model["bits"] < 20
        assert f"| {model['bits']:.3f} | {model['error']:.3f} |" in printed
        nats = model["nats_above_base"]
        if nats is not None:
            independent = "independent" in model["name"]
            base = found["independent capsules" if independent else "full covariance"]
            gain = (base["bits"] - model["bits"]) * 64 * math.log(2)
            assert nats == pytest.approx(gain, abs=1e-3)
            middle = (model["lowest"] + model["highest"]) / 2
            assert model["bits"] == pytest.approx(middle)
            width = model["partition"]["reverse"] - model["partition"]["forward"]
            difference = (model["highest"] - model["lowest"]) * 64 * math.log(2)
            assert difference == pytest.approx(width)


def test_an_interrupted_script_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pixels, "QUICK", replace(TINY, routed_steps=0))
    file = tmp_path / "pixels.json"
    data = save_images(tmp_path / "bars.npz", 220, 40)
    arguments = ["--data", data, "--device", "cpu", "--quick", "--json", str(file)]
    pixels.main(arguments)
    whole = json.loads(file.read_text())
    file.write_text(json.dumps(whole | {"models": whole["models"][:-1]}))
    capsys.readouterr()
    pixels.main(arguments)
    again, printed = json.loads(file.read_text()), capsys.readouterr().out
    assert printed.count(" bits/dim, ") == 1
    for before, after in zip(whole["models"], again["models"], strict=True):
        assert before | {"seconds": 0} == after | {"seconds": 0}
    pixels.main([*arguments, "--seeds", "0,1", "--only", "full covariance;poecaps, 8×16"])
    added = json.loads(file.read_text())["models"][len(whole["models"]) :]
    assert [(model["name"], model["seed"]) for model in added] == [
        ("full covariance", 1),
        ("poecaps, 8×16", 1),
    ]
    assert added[1]["command"].endswith("--seeds 1 --quick --only 'poecaps, 8×16'")
    assert not any("machine" in model for model in added)
    another = whole["machine"] | {"device": "another CPU"}
    monkeypatch.setattr("benchmarks.pixels.machine.describe", lambda _: another)
    pixels.main([*arguments, "--seeds", "2", "--only", "full covariance"])
    again = json.loads(file.read_text())
    assert again["machine"] == whole["machine"]
    assert again["models"][-1]["machine"] == another
    monkeypatch.setattr(pixels, "QUICK", replace(TINY, routed_steps=0, chains=4))
    before = file.read_bytes()
    with pytest.raises(SystemExit):
        pixels.main(arguments)
    assert "has results of another size" in capsys.readouterr().err
    assert file.read_bytes() == before


def test_experts_start_as_the_sides_of_numbers() -> None:
    images = random_images(80, 0)
    problem = make_problem(images, images, TINY, 0, torch.device("cpu"))
    x = problem.test.x
    density = pixels._density(problem, 128, 1, strength=0.5)
    pixels._start_as_sides(density, scale=4.0, origin=5.0)
    with torch.no_grad():
        experts = density.preactivation(x).flatten(1)
    flat = x.flatten(1)
    torch.testing.assert_close(experts, torch.cat((4 * flat + 5, 5 - 4 * flat), 1).relu())


def test_published_figures_in_logit_space_are_converted() -> None:
    images = random_images(80, 0)
    problem = make_problem(images, images, TINY, 0, torch.device("cpu"))
    rows = {row["name"]: row for row in pixels.published("mnist", problem)}
    log_prob = torch.tensor(rows["MAF (5)"]["nats"] + problem.logit_log_det)
    assert rows["MAF (5)"]["bits"] == pytest.approx(bits_per_dim(log_prob, 64).item())
    assert rows["FFJORD"]["bits"] == 0.99
    report = {"models": [], "published": list(rows.values())}
    assert "*FFJORD, published (arXiv 1810.01367)*" in pixels.table(report)
    assert pixels.published("fashion-mnist", problem) == []


@pytest.mark.parametrize(
    ("shape", "dtype", "message"),
    [
        ((80, 10, 8), np.uint8, "multiples of 4 pixels, but has images of shape"),
        ((80, 8, 8, 3), np.uint8, "must have grey images"),
        ((20, 8, 8), np.uint8, "more than 20 training images"),
        ((80, 8, 8), np.float32, "images of bytes, but has float32"),
    ],
)
def test_other_images_are_rejected(
    shape: tuple[int, ...],
    dtype: type,
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pixels, "QUICK", TINY)
    images: np.ndarray[Any, Any] = np.zeros(shape, dtype)
    np.savez(tmp_path / "x.npz", x_train=images, x_test=images)
    with pytest.raises(SystemExit):
        pixels.main(["--data", str(tmp_path / "x.npz"), "--device", "cpu", "--quick"])
    assert message in capsys.readouterr().err
