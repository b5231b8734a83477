"""What is unusual, what is hidden, what lies between and what is near, on pictures of bars."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from poecaps import CapsuleNetwork, squash, unsquash
from poecaps.applications import encode, free_energy, inpaint, interpolate, nearest, novelty_score
from poecaps.data import ImageSet
from poecaps.training import DecoderStage, EncoderStage, PixelDecoderStage, Stage, train
from tests.training.runs import config_for


def bars(count: int, seed: int) -> torch.Tensor:
    """Draw bars, upright or flat, somewhere in the picture: (count, 1, 20, 19)."""
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
    return train(config, tmp_path_factory.mktemp("uses") / "run", data=data).eval()


class TestUnusualness:
    def test_energies_above_and_below_the_usual_are_alike(self, network: CapsuleNetwork) -> None:
        images = torch.cat([bars(30, seed=1), torch.zeros(1, 1, 20, 19), torch.ones(1, 1, 20, 19)])
        energy = free_energy(network, images)
        assert energy.std() > 0.01
        for middle in energy:
            usual = middle + torch.tensor([-5.0, -1.0, 0.0, 1.0, 5.0])  # median of the distances: 1
            torch.testing.assert_close(
                novelty_score(network, images, usual), (energy - middle).abs()
            )

    def test_the_median_of_the_usual_images_scores_one(self, network: CapsuleNetwork) -> None:
        images = bars(201, seed=0)
        score = novelty_score(network, images, free_energy(network, images))
        assert score.median() == 1

    def test_alone_it_is_the_free_energy(self, network: CapsuleNetwork) -> None:
        images = bars(300, seed=2)  # more than go through the network together
        with torch.no_grad():
            torch.testing.assert_close(novelty_score(network, images), network.free_energy(images))

    def test_nothing_to_compare_with_is_refused(self, network: CapsuleNetwork) -> None:
        with pytest.raises(ValueError, match="usual must hold"):
            novelty_score(network, bars(2, seed=0), torch.zeros(0))


class TestFillIn:
    def test_it_beats_the_mean_image(
        self, network: CapsuleNetwork, generator: torch.Generator
    ) -> None:
        known = torch.ones(20, 19, dtype=torch.bool)
        known[10:] = False
        images, mean = bars(100, seed=1), bars(400, seed=0).mean(0)
        filled = inpaint(network, images, known, draws=1000, generator=generator)
        assert torch.equal(filled[:, :, :10], images[:, :, :10])
        errors = [(each - images)[:, :, 10:].square().mean() for each in (filled, mean)]
        assert errors[0] < 0.8 * errors[1]

    def test_hidden_pixels_are_not_looked_at(self, network: CapsuleNetwork) -> None:
        known = torch.ones(20, 19, dtype=torch.bool)
        known[:, 5:12] = False
        images = bars(3, seed=1)
        spoiled = torch.where(known, images, torch.nan)
        first, second = (
            inpaint(network, each, known, draws=50, generator=torch.Generator().manual_seed(1))
            for each in (images, spoiled)
        )
        assert torch.equal(first, second)

    def test_much_noise_gives_the_mean_of_what_the_model_draws(
        self, network: CapsuleNetwork
    ) -> None:
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

    def test_a_mask_of_numbers_or_of_another_size_is_refused(self, network: CapsuleNetwork) -> None:
        with pytest.raises(TypeError, match="truth values"):
            inpaint(network, bars(1, seed=0), torch.ones(20, 19))
        with pytest.raises(ValueError, match="known must have shape"):
            inpaint(network, bars(1, seed=0), torch.ones(19, 20, dtype=torch.bool))


class TestInterpolate:
    def test_it_goes_straight_from_one_reconstruction_to_the_other(
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

    def test_images_of_two_shapes_are_refused(self, network: CapsuleNetwork) -> None:
        with pytest.raises(ValueError, match="must have one shape"):
            interpolate(network, bars(3, seed=1), bars(2, seed=1))


class TestNearest:
    def test_it_finds_the_smallest_angles(self, generator: torch.Generator) -> None:
        codes, queries = (torch.randn(count, 3, 4, generator=generator) for count in (50, 1200))
        found = nearest(codes, queries, 4)
        cosine = torch.nn.functional.cosine_similarity(
            queries.view(-1, 1, 12), codes.view(1, -1, 12), dim=2
        )
        expected = cosine.sort(1, descending=True)
        assert torch.equal(found.indices, expected.indices[:, :4])
        torch.testing.assert_close(found.distances, 1 - expected.values[:, :4], atol=1e-6, rtol=0)

    def test_images_near_each_other_show_the_same_kind_of_bar(
        self, network: CapsuleNetwork
    ) -> None:
        seen, asked = bars(300, seed=0), bars(100, seed=1)
        found = nearest(encode(network, seen), encode(network, asked)).indices[:, 0]

        def upright(images: torch.Tensor) -> torch.Tensor:
            return images.amax(3).sum((1, 2)) > 10  # rows that a bar reaches

        assert (upright(seen)[found] == upright(asked)).double().mean() > 0.95

    def test_codes_of_another_network_are_refused(self) -> None:
        with pytest.raises(ValueError, match="codes of one network"):
            nearest(torch.zeros(3, 2, 4), torch.zeros(3, 2, 5))
        with pytest.raises(ValueError, match="count must be a whole number from 1 to 3"):
            nearest(torch.zeros(3, 2, 4), torch.zeros(3, 2, 4), 4)
