"""Measures without labels: exact small cases, and what changes of contrast do to them."""

from __future__ import annotations

import math

import pytest
import torch

from poecaps.data import load
from poecaps.evaluation import (
    RandomFeatures,
    change_contrast,
    distances_to_nearest,
    frechet_distance,
    frechet_error,
    load_classifier,
    match_contrast,
    nearest_images,
    neighbourhoods,
    pixel_levels,
)
from poecaps.evaluation.fidelity import Z_95


@pytest.fixture(scope="module")
def digits() -> torch.Tensor:
    return load("mnist-sample").batch(slice(500))


def on_a_line(*positions: float) -> torch.Tensor:
    return torch.tensor(positions).unsqueeze(1)


class TestContrast:
    def test_training_images_stay_as_they_are(self, digits: torch.Tensor) -> None:
        matched = match_contrast(digits, pixel_levels([digits]))
        torch.testing.assert_close(matched, digits, rtol=0, atol=1e-6)

    def test_a_half_of_the_pixels_is_dark_and_a_quarter_bright(self) -> None:
        levels = torch.zeros(256, dtype=torch.long)
        levels[0], levels[51], levels[255] = 2, 1, 1
        images = torch.tensor([0.3, 0.4, 0.5, 0.6]).view(1, 1, 2, 2)
        expected = torch.tensor([0.0, 0.0, 0.2, 1.0]).view(1, 1, 2, 2)
        torch.testing.assert_close(match_contrast(images, levels), expected)

    def test_equal_pixels_stay_equal(self) -> None:
        levels = torch.ones(256, dtype=torch.long)
        matched = match_contrast(torch.tensor([0.1, 0.1, 0.1, 0.9]).view(1, 1, 2, 2), levels)
        assert matched.unique().numel() == 2

    @pytest.mark.parametrize("gain", [0.25, 2.0, 4.0])
    def test_a_change_of_contrast_is_undone(self, gain: float, digits: torch.Tensor) -> None:
        levels, images = pixel_levels([digits[:250]]), 0.01 + 0.98 * digits[250:]
        changed = change_contrast(images, gain)
        assert (changed - images).abs().max() > 0.1
        torch.testing.assert_close(match_contrast(changed, levels), match_contrast(images, levels))

    def test_a_gain_multiplies_logits(self) -> None:
        changed = change_contrast(torch.tensor([0.0, 0.2, 0.5, 1.0]), 2.0)
        torch.testing.assert_close(changed, torch.tensor([0.0, 1 / 17, 0.5, 1.0]))

    def test_no_measure_of_matched_samples_leaves_its_interval(self, digits: torch.Tensor) -> None:
        """Faint digits are far from digits for the classifier alone, and a gain helps them there.

        This fails if a measure changes by more than its interval under a change of contrast.
        """
        reference, faint = digits[:250], 0.4 * digits[250:] + 0.01
        sharp, levels = change_contrast(faint, 4.0), pixel_levels([reference])
        classifier, network = load_classifier("mnist"), RandomFeatures()
        for extract in (lambda x: classifier.predict(x).features, network.extract):
            test = extract(reference)
            before, after = (extract(match_contrast(x, levels)) for x in (faint, sharp))
            width = Z_95 * frechet_error(before, test)
            change = (
                frechet_distance(after, test).distance - frechet_distance(before, test).distance
            )
            assert abs(change) < width
            ours, theirs = neighbourhoods(before, test), neighbourhoods(after, test)
            assert abs(ours.coverage - theirs.coverage) < Z_95 * ours.coverage_error
            assert abs(ours.density - theirs.density) < Z_95 * ours.density_error
            raw = [extract(x) for x in (faint, sharp)]
            distances = [frechet_distance(each, test).distance for each in raw]
            assert abs(distances[0] - distances[1]) > Z_95 * frechet_error(raw[0], test)


class TestRandomFeatures:
    def test_weights_are_the_same_every_time(self) -> None:
        first, second = RandomFeatures(), RandomFeatures()
        assert all(
            torch.equal(ours, theirs)
            for ours, theirs in zip(first.parameters(), second.parameters(), strict=True)
        )

    @pytest.mark.parametrize("shape", [(1, 28, 28), (3, 32, 24), (1, 5, 7)])
    def test_images_of_any_size(
        self, shape: tuple[int, int, int], generator: torch.Generator
    ) -> None:
        features = RandomFeatures(shape[0], 20)
        assert features(torch.rand(4, *shape, generator=generator)).shape == (4, 20)

    def test_inside_a_constant_image_nothing_is_seen(self) -> None:
        network = RandomFeatures()
        edge = torch.nn.functional.conv2d(torch.ones(1, 1, 6, 6), network.filters[0])
        torch.testing.assert_close(edge, torch.zeros_like(edge), rtol=0, atol=1e-5)

    def test_worse_images_are_farther_away(
        self, digits: torch.Tensor, generator: torch.Generator
    ) -> None:
        network = RandomFeatures()
        first, second = digits[:250], digits[250:]
        test = network.extract(first)

        def distance(images: torch.Tensor) -> float:
            matched = match_contrast(images, pixel_levels([first]))
            return frechet_distance(network.extract(matched), test).distance

        blurred = torch.nn.functional.avg_pool2d(second, 5, stride=1, padding=2)
        noisy = (second + 0.5 * torch.randn(second.shape, generator=generator)).clamp(0, 1)
        shuffled = second.flatten(1)[:, torch.randperm(784, generator=generator)].view_as(second)
        good = distance(second)
        for worse in (blurred, noisy, shuffled, second[:25].repeat(10, 1, 1, 1)):
            assert distance(worse) > 1.5 * good

    def test_images_with_other_channels_raise_an_error(self) -> None:
        with pytest.raises(ValueError, match=r"images must .*RandomFeatures"):
            RandomFeatures(3)(torch.zeros(2, 1, 28, 28))


class TestNeighbourhoods:
    def test_points_on_a_line(self) -> None:
        """With k = 1, neighbourhoods of 0, 1, 3, 7 reach as far as 1, 1, 2 and 4."""
        reference, samples = on_a_line(0, 1, 3, 7), on_a_line(0.5, 1.5, 20, 21)
        found = neighbourhoods(samples, reference, k=1)
        # 0.5 is near 0 and 1; 1.5 is near 1 and 3; 20 and 21 are near none.
        assert found.precision == pytest.approx(2 / 4)
        assert found.density == pytest.approx((2 + 2) / 4)
        assert found.coverage == pytest.approx(3 / 4)
        # The neighbourhoods of the samples reach as far as 1: 0, 1 and no other are inside.
        assert found.recall == pytest.approx(2 / 4)
        assert found.precision_error == pytest.approx(math.sqrt(1 / 3) / 2)

    def test_a_copy_of_the_reference(self, generator: torch.Generator) -> None:
        x = torch.randn(50, 4, generator=generator)
        found = neighbourhoods(x, x, k=3)
        assert found.precision == found.recall == found.coverage == 1
        assert found.density > 1  # every point is inside its own neighbourhood, too

    def test_equal_distributions_have_the_values_of_the_paper(
        self, generator: torch.Generator
    ) -> None:
        """Density 1, and coverage 1 − 2^−k."""
        x, y = torch.randn(2, 2500, 3, generator=generator).unbind()
        found = neighbourhoods(x, y, k=3)
        assert found.density == pytest.approx(1, abs=0.05)
        assert found.coverage == pytest.approx(1 - 2**-3, abs=0.03)

    def test_a_lost_mode_lowers_recall_and_coverage_only(self, generator: torch.Generator) -> None:
        x, y = torch.randn(2, 400, 2, generator=generator).unbind()
        y[200:] += 100
        found = neighbourhoods(x, y)
        assert found.recall < 0.55
        assert found.coverage < 0.55
        assert found.precision > 0.9

    def test_too_few_points_raise_an_error(self) -> None:
        with pytest.raises(ValueError, match="samples must have more than k = 5 rows, but has 3"):
            neighbourhoods(torch.zeros(3, 2), torch.zeros(9, 2))


class TestNearestImages:
    def test_distance_to_the_nearest_of_all_batches(self) -> None:
        images = torch.tensor([[3.0, 0.0], [0.0, 0.9]]).view(2, 1, 1, 2)
        training = [torch.zeros(1, 1, 1, 2), torch.tensor([[3.0, 4.0]]).view(1, 1, 1, 2)]
        found = distances_to_nearest(images, training)
        torch.testing.assert_close(found, torch.tensor([3.0, 0.9]))

    def test_share_of_pairs(self) -> None:
        """Of the pairs, 1 < 2, 1 < 5, 3 < 5 count, and 5 = 5 counts as a half."""
        found = nearest_images(torch.tensor([1.0, 3.0, 5.0]), torch.tensor([2.0, 5.0]))
        assert found.nearer == pytest.approx(3.5 / 6)
        assert (found.median, found.test_median) == (3, 2)

    def test_copies_are_always_nearer(self) -> None:
        assert nearest_images(torch.zeros(5), torch.ones(9)).nearer == 1


@pytest.mark.parametrize("count", [150, 1000])
def test_the_standard_error_is_that_of_repeated_draws(
    count: int, generator: torch.Generator
) -> None:
    reference = torch.randn(5000, 4, generator=generator)
    scale = torch.tensor([1.5, 1.0, 1.0, 0.5])
    draws = torch.randn(60, count, 4, generator=generator) * scale + 0.3
    actual = torch.tensor([frechet_distance(each, reference).distance for each in draws]).std()
    estimates = [frechet_error(each, reference) for each in draws[:8]]
    assert sum(estimates) / len(estimates) == pytest.approx(actual.item(), rel=0.3)
