"""Novelty, inpainting, interpolation and nearest neighbours, on images of bars."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from poecaps import CapsuleDensity, CapsuleNetwork, applications, sampling, squash, unsquash
from poecaps.applications import (
    denoise,
    encode,
    free_energy,
    inpaint,
    inpaint_by_density,
    interpolate,
    log_prob,
    nearest_neighbours,
    novelty_score,
)
from poecaps.data import ImageSet
from poecaps.options import DensityOptions
from poecaps.training import (
    DecoderStage,
    EncoderStage,
    PixelDecoderStage,
    Stage,
    fit_density,
    train,
)
from poecaps.training.config import DensityStage
from tests.training.runs import config_for


def bars(count: int, seed: int) -> torch.Tensor:
    """Return images of vertical or horizontal bars at random positions: (count, 1, 20, 19)."""
    random = np.random.default_rng(seed)
    images = np.zeros((count, 20, 19), np.float32)
    for image in images:
        if random.integers(2):
            column = random.integers(2, 14)
            image[2:18, column : column + 3] = 1
        else:
            row = random.integers(2, 14)
            image[row : row + 3, 2:17] = 1
    return torch.from_numpy(images).unsqueeze(1)


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> CapsuleNetwork:
    tiny = config_for(Path("in memory"))
    config = replace(
        tiny,
        model=replace(tiny.model, features=16, experts=((8, 8),), joint_components=8),
        autoencoder=Stage(epochs=15, learning_rate=1e-2),
        encoder=EncoderStage(epochs=10, learning_rate=0.1, winners=1, target_firing=0.5),
        decoder=DecoderStage(epochs=10, learning_rate=0.03),
        pixel_decoder=PixelDecoderStage(epochs=15, learning_rate=5e-3),
        batch_size=32,
    )
    data = ImageSet(bars(400, seed=0).numpy())
    return train(config, tmp_path_factory.mktemp("applications") / "run", data=data).eval()


@pytest.fixture(scope="module")
def dense(network: CapsuleNetwork) -> CapsuleNetwork:
    """The same autoencoder with a density of its features, and without a pixel decoder."""
    options = DensityOptions(experts=(16, 6), linear_dims=3, base_components=16)
    sizes = replace(network.architecture, pixel_decoder=False, density=options)
    made = CapsuleNetwork(sizes, generator=torch.Generator().manual_seed(0)).eval()
    made.autoencoder.load_state_dict(network.autoencoder.state_dict())
    assert made.whitening is not None
    with torch.no_grad():
        activations = made.activations(bars(400, seed=0))
        made.whitening.fit([activations])
        capsules = made.whiten(activations)
    stage = DensityStage(
        learning_rate=5e-3,
        final_learning_rate_ratio=0.05,
        chains=64,
        lifetime=60,
        leapfrog_steps=3,
        average=0.95,
        partition_chains=16,
        partition_steps=50,
    )
    fit_density(made.require_density(), capsules, steps=150, batch_size=64, options=stage)
    return made.requires_grad_(False)


class TestLogProb:
    def test_it_is_that_of_the_network_for_any_number_of_images(
        self, dense: CapsuleNetwork
    ) -> None:
        images = bars(300, seed=1)  # more than one batch
        found = log_prob(dense, images)
        torch.testing.assert_close(found, dense.log_prob(images), rtol=1e-4, atol=1e-2)
        assert not found.requires_grad

    def test_bars_are_more_probable_than_noise(
        self, dense: CapsuleNetwork, generator: torch.Generator
    ) -> None:
        noise = torch.rand(50, 1, 20, 19, generator=generator)
        assert log_prob(dense, bars(50, seed=1)).median() > log_prob(dense, noise).max()

    def test_a_network_without_a_density_raises_an_error(self, network: CapsuleNetwork) -> None:
        with pytest.raises(ValueError, match="this model has no density; train one with"):
            log_prob(network, bars(1, seed=0))


def upper_half() -> torch.Tensor:
    known = torch.ones(20, 19, dtype=torch.bool)
    known[10:] = False
    return known


class TestInpaintByDensity:
    def test_known_pixels_stay_and_every_draw_is_another_image(
        self, dense: CapsuleNetwork, generator: torch.Generator
    ) -> None:
        images, known, reports = bars(2, seed=1), upper_half(), []
        filled = inpaint_by_density(
            dense,
            images,
            known,
            draws=3,
            steps=9,
            generator=generator,
            report=lambda done, total: reports.append((done, total)),
        )
        assert filled.shape == (3, 2, 1, 20, 19)
        assert torch.equal(filled[:, :, :, :10], images[:, :, :10].expand(3, -1, -1, -1, -1))
        assert ((filled >= 0) & (filled <= 1)).all()
        for first, second in ((0, 1), (0, 2), (1, 2)):
            assert (filled[first] - filled[second]).abs().amax((1, 2, 3)).min() > 0.01
        assert reports == [(done, 9) for done in range(1, 10)]

    def test_the_error_is_below_that_of_the_mean_image(
        self, dense: CapsuleNetwork, generator: torch.Generator
    ) -> None:
        images, mean = bars(8, seed=1), bars(400, seed=0).mean(0)
        filled = inpaint_by_density(
            dense, images, upper_half(), draws=2, steps=60, generator=generator
        ).mean(0)
        errors = [(each - images)[:, :, 10:].square().mean() for each in (filled, mean)]
        assert errors[0] < 0.8 * errors[1]

    def test_the_chains_draw_from_the_components_alone(
        self, dense: CapsuleNetwork, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        used: list[CapsuleDensity] = []

        def observed(density: CapsuleDensity, *args: Any, **options: Any) -> sampling.Samples:
            used.append(density)
            return sampling.sample(density, *args, **options)

        monkeypatch.setattr(applications, "sample", observed)
        density, hidden = dense.require_density(), torch.zeros(20, 19, dtype=torch.bool)
        drawn = inpaint_by_density(dense, bars(2, seed=1), hidden, steps=6, generator=generator)
        assert (used[0].in_capsules, used[0].in_dim) == (1, 16)
        # Experts that read other directions as well, as random ones do, need all of them.
        other = copy.deepcopy(dense)
        other.require_density().reset_parameters(std=0.1, generator=generator)
        inpaint_by_density(other, bars(2, seed=1), hidden, draws=1, steps=2, generator=generator)
        assert used[1] is other.require_density()
        with torch.no_grad():
            capsules = dense.whitened(bars(20, seed=1))
            restored = density.from_components(density.components(capsules))
            torch.testing.assert_close(
                density.components(restored), density.components(capsules), rtol=1e-4, atol=1e-4
            )
            mean = dense.decode_whitened(torch.zeros_like(capsules[:1]))
        assert restored.shape == capsules.shape
        # With nothing known, draws differ from the mean, in at most 16 directions.
        assert drawn.shape == (8, 2, 1, 20, 19)
        assert torch.linalg.matrix_rank(restored.flatten(1)) <= 16
        assert (drawn - mean).abs().amax() > 0.05

    def test_hidden_pixels_are_not_read(self, dense: CapsuleNetwork) -> None:
        images, known = bars(2, seed=1), upper_half()
        spoiled = torch.where(known, images, torch.nan)
        first, second = (
            inpaint_by_density(
                dense, each, known, draws=2, steps=6, generator=torch.Generator().manual_seed(1)
            )
            for each in (images, spoiled)
        )
        assert torch.equal(first, second)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"noise": 0.0}, "noise must be above 0"),
            ({"noise": -1.0}, "noise must be above 0, but is -1.0"),
            ({"noise": math.nan}, "noise must be a finite number"),
            ({"draws": 0}, "draws must be a whole number of at least 1"),
            ({"steps": 1}, "steps must be a whole number of at least 2"),
            ({"known": torch.ones(19, 20, dtype=torch.bool)}, "known must have shape"),
            ({"images": torch.zeros(1, 1, 19, 20)}, "images must have shape"),
            ({"images": torch.full((1, 1, 20, 19), 2.0)}, "images must be from 0 to 1"),
            ({"images": torch.zeros(0, 1, 20, 19)}, "images must hold at least one image"),
        ],
    )
    def test_bad_arguments_raise_an_error(
        self, options: dict[str, Any], message: str, dense: CapsuleNetwork
    ) -> None:
        usual: dict[str, Any] = {"images": bars(1, seed=0), "known": upper_half(), "steps": 3}
        with pytest.raises(ValueError, match=message):
            inpaint_by_density(dense, **usual | options)

    def test_a_mask_of_numbers_raises_an_error(self, dense: CapsuleNetwork) -> None:
        with pytest.raises(TypeError, match="boolean mask"):
            inpaint_by_density(dense, bars(1, seed=0), torch.ones(20, 19))

    def test_a_network_without_a_density_raises_an_error(self, network: CapsuleNetwork) -> None:
        with pytest.raises(ValueError, match="this model has no density; train one with"):
            inpaint_by_density(network, bars(1, seed=0), upper_half())


class TestDenoise:
    def test_most_of_the_noise_is_removed(
        self, dense: CapsuleNetwork, generator: torch.Generator
    ) -> None:
        images = bars(6, seed=1)
        noisy = images + 0.4 * torch.randn(images.shape, generator=generator)
        clean = denoise(dense, noisy, noise=0.4, draws=3, steps=60, generator=generator)
        assert clean.shape == images.shape
        assert ((clean >= 0) & (clean <= 1)).all()
        before, after = (
            (each - images).square().mean((1, 2, 3)) for each in (noisy.clamp(0, 1), clean)
        )
        assert bool((after < before / 2).all())

    def test_the_same_seed_gives_the_same_image(self, dense: CapsuleNetwork) -> None:
        first, second, other = (
            denoise(
                dense,
                bars(1, seed=1),
                noise=0.2,
                draws=2,
                steps=6,
                generator=torch.Generator().manual_seed(seed),
            )
            for seed in (1, 1, 2)
        )
        assert torch.equal(first, second)
        assert not torch.equal(first, other)

    def test_bad_arguments_raise_an_error(self, dense: CapsuleNetwork) -> None:
        with pytest.raises(ValueError, match="noise must be above 0"):
            denoise(dense, bars(1, seed=0), noise=0)
        with pytest.raises(ValueError, match="images must have shape"):
            denoise(dense, torch.zeros(1, 1, 19, 20), noise=0.1)
        with pytest.raises(TypeError, match="images must be a floating-point tensor"):
            denoise(dense, torch.zeros(1, 1, 20, 19, dtype=torch.uint8), noise=0.1)
        with pytest.raises(ValueError, match="images must be finite"):
            denoise(dense, torch.full((1, 1, 20, 19), torch.nan), noise=0.1, steps=3)


class TestNoveltyScore:
    def test_energies_above_and_below_the_median_score_alike(self, network: CapsuleNetwork) -> None:
        images = torch.cat([bars(30, seed=1), torch.zeros(1, 1, 20, 19), torch.ones(1, 1, 20, 19)])
        energy = free_energy(network, images)
        assert energy.std() > 0.01
        for median in energy:
            # The median of the distances from the median is 1.
            reference = median + torch.tensor([-5.0, -1.0, 0.0, 1.0, 5.0])
            score = novelty_score(network, images, reference)
            torch.testing.assert_close(score, (energy - median).abs())

    def test_the_median_score_of_the_reference_is_one(self, network: CapsuleNetwork) -> None:
        images = bars(201, seed=0)
        score = novelty_score(network, images, free_energy(network, images))
        assert score.median() == 1

    def test_without_a_reference_it_is_the_free_energy(self, network: CapsuleNetwork) -> None:
        images = bars(300, seed=2)  # more than one batch
        with torch.no_grad():
            torch.testing.assert_close(novelty_score(network, images), network.free_energy(images))

    def test_with_a_density_it_is_about_log_p_unless_asked_otherwise(
        self, dense: CapsuleNetwork
    ) -> None:
        images = bars(300, seed=2)
        value, energy = log_prob(dense, images), free_energy(dense, images)
        assert torch.equal(novelty_score(dense, images), -value)
        assert torch.equal(novelty_score(dense, images, by="log_prob"), -value)
        assert torch.equal(novelty_score(dense, images, by="free_energy"), energy)
        for median in (value.min(), value.median()):
            reference = median + torch.tensor([-5.0, -1.0, 0.0, 1.0, 5.0])
            score = novelty_score(dense, images, reference)
            torch.testing.assert_close(score, (value - median).abs())

    @pytest.mark.parametrize(
        ("reference", "error", "message"),
        [
            ([1.0, 2.0], TypeError, "reference must be a torch.Tensor"),
            (torch.tensor([1.0, torch.nan]), ValueError, "reference must be finite"),
            (torch.ones(2, 2), ValueError, r"reference must have shape \(M\)"),
            (torch.ones(0), ValueError, "reference must hold at least one"),
        ],
    )
    def test_a_bad_reference_raises_an_error(
        self, reference: Any, error: type[Exception], message: str, network: CapsuleNetwork
    ) -> None:
        with pytest.raises(error, match=message):
            novelty_score(network, bars(2, seed=0), reference)

    def test_without_a_density_there_is_no_log_p(self, network: CapsuleNetwork) -> None:
        with pytest.raises(ValueError, match="this model has no density; train one with"):
            novelty_score(network, bars(1, seed=0), by="log_prob")

    def test_an_unknown_measure_raises_an_error(self, network: CapsuleNetwork) -> None:
        with pytest.raises(ValueError, match="by must be one of 'free_energy', 'log_prob', but is"):
            novelty_score(network, bars(1, seed=0), by="energy")  # type: ignore[arg-type]

    def test_an_empty_reference_raises_an_error(self, network: CapsuleNetwork) -> None:
        with pytest.raises(ValueError, match="reference must hold"):
            novelty_score(network, bars(2, seed=0), torch.zeros(0))


class TestInpaint:
    def test_the_error_is_below_that_of_the_mean_image(
        self, network: CapsuleNetwork, generator: torch.Generator
    ) -> None:
        known = torch.ones(20, 19, dtype=torch.bool)
        known[10:] = False
        images, mean = bars(100, seed=1), bars(400, seed=0).mean(0)
        filled = inpaint(network, images, known, draws=1000, generator=generator)
        assert torch.equal(filled[:, :, :10], images[:, :, :10])
        errors = [(each - images)[:, :, 10:].square().mean() for each in (filled, mean)]
        assert errors[0] < 0.8 * errors[1]

    def test_hidden_pixels_are_not_read(self, network: CapsuleNetwork) -> None:
        known = torch.ones(20, 19, dtype=torch.bool)
        known[:, 5:12] = False
        images = bars(3, seed=1)
        spoiled = torch.where(known, images, torch.nan)
        first, second = (
            inpaint(network, each, known, draws=50, generator=torch.Generator().manual_seed(1))
            for each in (images, spoiled)
        )
        assert torch.equal(first, second)

    def test_much_noise_gives_the_mean_of_the_draws(self, network: CapsuleNetwork) -> None:
        hidden = torch.zeros(20, 19, dtype=torch.bool)
        filled = inpaint(
            network,
            bars(2, seed=1),
            hidden,
            draws=50,
            noise=1e6,
            generator=torch.Generator().manual_seed(1),
        )
        with torch.no_grad():
            mean = network.generate(50, generator=torch.Generator().manual_seed(1)).mean(0)
        torch.testing.assert_close(filled, mean.expand_as(filled))

    def test_a_mask_of_numbers_or_of_another_size_raises_an_error(
        self, network: CapsuleNetwork
    ) -> None:
        with pytest.raises(TypeError, match="boolean mask"):
            inpaint(network, bars(1, seed=0), torch.ones(20, 19))
        with pytest.raises(ValueError, match="known must have shape"):
            inpaint(network, bars(1, seed=0), torch.ones(19, 20, dtype=torch.bool))


class TestInterpolate:
    def test_codes_are_interpolated_linearly_between_the_reconstructions(
        self, network: CapsuleNetwork
    ) -> None:
        first, second = bars(3, seed=1), bars(3, seed=2)
        walk = interpolate(network, first, second, steps=3)
        assert walk.shape == (3, 3, 1, 20, 19)
        with torch.no_grad():
            middle = (unsquash(network.encode(first)) + unsquash(network.encode(second))) / 2
            torch.testing.assert_close(walk[:, 0], network.reconstruct(first), atol=1e-4, rtol=0)
            torch.testing.assert_close(walk[:, 2], network.reconstruct(second), atol=1e-4, rtol=0)
            torch.testing.assert_close(
                walk[:, 1], network.decode(squash(middle)), atol=1e-4, rtol=0
            )

    def test_images_of_two_shapes_raise_an_error(self, network: CapsuleNetwork) -> None:
        with pytest.raises(ValueError, match="must have the same shape"):
            interpolate(network, bars(3, seed=1), bars(2, seed=1))


class TestNearestNeighbours:
    def test_they_have_the_highest_cosine(self, generator: torch.Generator) -> None:
        codes, queries = (torch.randn(count, 3, 4, generator=generator) for count in (50, 1200))
        found = nearest_neighbours(codes, queries, 4)
        cosine = torch.nn.functional.cosine_similarity(
            queries.view(-1, 1, 12), codes.view(1, -1, 12), dim=2
        )
        expected = cosine.sort(1, descending=True)
        assert torch.equal(found.indices, expected.indices[:, :4])
        torch.testing.assert_close(found.distances, 1 - expected.values[:, :4], atol=1e-6, rtol=0)

    def test_neighbours_show_the_same_kind_of_bar(self, network: CapsuleNetwork) -> None:
        seen, asked = bars(300, seed=0), bars(100, seed=1)
        neighbours = nearest_neighbours(encode(network, seen), encode(network, asked))
        found = neighbours.indices[:, 0]

        def upright(images: torch.Tensor) -> torch.Tensor:
            return images.amax(3).sum((1, 2)) > 10  # number of rows with a bar

        assert (upright(seen)[found] == upright(asked)).double().mean() > 0.95

    def test_codes_of_another_network_raise_an_error(self) -> None:
        with pytest.raises(ValueError, match="the same network"):
            nearest_neighbours(torch.zeros(3, 2, 4), torch.zeros(3, 2, 5))
        with pytest.raises(ValueError, match="count must be a whole number from 1 to 3"):
            nearest_neighbours(torch.zeros(3, 2, 4), torch.zeros(3, 2, 4), 4)
