"""Each measure against a closed form, an established library or an extreme case."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.linalg
import torch
from scipy.optimize import linear_sum_assignment
from sklearn.metrics import (
    adjusted_mutual_info_score,
    adjusted_rand_score,
    mutual_info_score,
    normalized_mutual_info_score,
)

from poecaps.data import load
from poecaps.evaluation import (
    background,
    clustering,
    diversity,
    effective_rank,
    frechet_distance,
    negatives,
    purity,
    recognisability,
    reconstruction,
    specialisation,
    variation,
    variety,
)
from poecaps.evaluation.measures import properties


def with_moments(
    mean: torch.Tensor, covariance: torch.Tensor, generator: torch.Generator
) -> torch.Tensor:
    """Draw points with exactly this mean and covariance."""
    x = torch.randn(100, len(mean), dtype=torch.float64, generator=generator)
    x = (x - x.mean(0)) @ torch.linalg.inv(torch.linalg.cholesky(x.T.cov())).T
    return mean + x @ torch.linalg.cholesky(covariance).T


class TestFrechetDistance:
    def test_equal_sets_are_at_distance_0(self, generator: torch.Generator) -> None:
        x = torch.randn(200, 5, generator=generator)
        assert frechet_distance(x, x.flip(0)).distance == pytest.approx(0, abs=1e-8)

    def test_gaussians_whose_covariances_commute(self, generator: torch.Generator) -> None:
        # The covariance term of diagonal covariances is Σ (√λ₁ − √λ₂)².
        mean = torch.tensor([3.0, 0.0, 4.0], dtype=torch.float64)
        first = with_moments(
            torch.zeros(3).double(), torch.diag(torch.tensor([1.0, 4.0, 9.0])).double(), generator
        )
        second = with_moments(mean, torch.diag(torch.tensor([4.0, 4.0, 1.0])).double(), generator)
        result = frechet_distance(first, second)
        assert result.mean_term == pytest.approx(25)
        assert result.covariance_term == pytest.approx(1 + 0 + 4)
        assert result.distance == pytest.approx(30)

    def test_it_agrees_with_scipy(self, generator: torch.Generator) -> None:
        first = torch.randn(300, 7, generator=generator) @ torch.randn(7, 7, generator=generator)
        second = (
            torch.randn(200, 7, generator=generator) @ torch.randn(7, 7, generator=generator) + 1
        )
        covariances = [np.cov(x.double().numpy(), rowvar=False) for x in (first, second)]
        root = scipy.linalg.sqrtm(covariances[0] @ covariances[1]).real
        apart = (first.double().mean(0) - second.double().mean(0)).square().sum().item()
        expected = apart + np.trace(covariances[0] + covariances[1] - 2 * root)
        assert frechet_distance(first, second).distance == pytest.approx(expected, rel=1e-9)
        assert frechet_distance(second, first).distance == pytest.approx(expected, rel=1e-9)

    def test_constant_features_change_nothing(self, generator: torch.Generator) -> None:
        x, y = torch.randn(2, 50, 3, generator=generator).unbind()
        padded = [torch.cat([each, torch.zeros(50, 4)], 1) for each in (x, y)]
        assert frechet_distance(*padded).distance == pytest.approx(frechet_distance(x, y).distance)

    def test_it_rejects_sets_that_do_not_fit(self) -> None:
        with pytest.raises(ValueError, match=r"second must have shape.*same features"):
            frechet_distance(torch.zeros(4, 3), torch.zeros(4, 2))
        with pytest.raises(ValueError, match="second must have at least 2 rows"):
            frechet_distance(torch.zeros(4, 3), torch.zeros(1, 3))


def test_recognisability_is_the_share_of_confident_predictions() -> None:
    result = recognisability(torch.tensor([[0.95, 0.05], [0.1, 0.9], [0.5, 0.5], [0.2, 0.8]]))
    assert result.share == 0.5
    assert result.mean_confidence == pytest.approx((0.95 + 0.9 + 0.5 + 0.8) / 4)


@pytest.mark.parametrize(
    ("predicted", "classes"), [([3, 3, 3], 1), ([0, 1, 2, 3] * 5, 4), ([7, 9, 9, 7], 2)]
)
def test_diversity_counts_classes_that_are_equally_frequent(
    predicted: list[int], classes: int
) -> None:
    result = diversity(torch.tensor(predicted))
    assert result.entropy == pytest.approx(math.log(classes), abs=1e-12)
    assert result.effective_classes == pytest.approx(classes)


class TestSpecialisation:
    def test_it_agrees_with_scikit_learn(self, generator: torch.Generator) -> None:
        firing = torch.rand(400, 6, generator=generator)
        labels = torch.where(
            torch.rand(400, generator=generator) < 0.5,
            firing.argmax(1) // 2,
            torch.randint(4, (400,), generator=generator),
        )
        result = specialisation(firing, labels)
        winner = firing.argmax(1).numpy()
        assert result.mutual_information == pytest.approx(mutual_info_score(labels.numpy(), winner))
        assert result.normalised == pytest.approx(
            normalized_mutual_info_score(labels.numpy(), winner)
        )
        assert result.adjusted == pytest.approx(adjusted_mutual_info_score(labels.numpy(), winner))
        assert result.adjusted_rand == pytest.approx(adjusted_rand_score(labels.numpy(), winner))

    @pytest.mark.parametrize(("clusters", "classes"), [(7, 7), (20, 6), (5, 12), (1, 3), (3, 1)])
    def test_accuracy_is_that_of_the_best_matching(
        self, clusters: int, classes: int, generator: torch.Generator
    ) -> None:
        for strength in (0.0, 0.3, 0.8):
            labels = torch.randint(classes, (300,), generator=generator)
            found = torch.randint(clusters, (300,), generator=generator)
            same = torch.rand(300, generator=generator) < strength
            found = torch.where(same, (3 * labels + 1) % clusters, found)
            table = np.zeros((clusters, classes))
            np.add.at(table, (found.numpy(), labels.numpy()), 1)
            matched = table[linear_sum_assignment(table, maximize=True)].sum()
            result = clustering(found, labels)
            assert result.accuracy == pytest.approx(matched / 300)
            assert result.purity == pytest.approx(table.max(1).sum() / 300)
            assert result.accuracy <= result.purity

    def test_the_adjustment_removes_the_chance_level_of_many_uninformative_experts(
        self, generator: torch.Generator
    ) -> None:
        labels = torch.arange(2000) % 10
        results = [
            specialisation(torch.rand(2000, experts, generator=generator), labels)
            for experts in (20, 320)
        ]
        assert results[1].normalised > 0.1 > results[0].normalised
        assert [result.adjusted for result in results] == pytest.approx([0, 0], abs=0.01)

    def test_one_expert_for_each_label_is_1(self) -> None:
        labels = torch.arange(40) % 4
        result = specialisation(torch.eye(4)[(labels + 1) % 4], labels)
        assert result.normalised == pytest.approx(1)
        assert result.adjusted == pytest.approx(1)
        assert result.mutual_information == pytest.approx(math.log(4))
        assert (result.accuracy, result.purity, result.adjusted_rand) == (1, 1, 1)
        assert result.effective_experts == pytest.approx(4)

    def test_one_expert_for_everything_is_0(self) -> None:
        result = specialisation(
            torch.eye(3)[torch.zeros(12, dtype=torch.long)], torch.arange(12) % 4
        )
        assert result.normalised == pytest.approx(0, abs=1e-12)
        assert result.effective_experts == pytest.approx(1)
        assert result.adjusted == pytest.approx(0, abs=1e-12)
        assert (result.accuracy, result.purity) == (0.25, 0.25)
        assert result.adjusted_rand == pytest.approx(0, abs=1e-12)
        constants = specialisation(torch.ones(5, 1), torch.zeros(5, dtype=torch.long))
        assert (constants.normalised, constants.adjusted) == (0, 0)


def test_clusters_and_labels_must_belong_together() -> None:
    with pytest.raises(ValueError, match=r"but have the shapes \(4,\) and \(5,\)"):
        clustering(torch.zeros(4, dtype=torch.long), torch.zeros(5, dtype=torch.long))


def test_purity_is_the_share_of_the_most_frequent_prediction() -> None:
    result = purity(torch.tensor([[4, 4, 4, 4], [1, 2, 2, 3]]))
    assert result.per_expert == (1.0, 0.5)
    assert result.mean == 0.75
    assert result.labels == (4, 2)


class TestVariety:
    @pytest.fixture
    def test_set(self, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        labels = torch.arange(120) % 2
        return labels.view(-1, 1, 1, 1) + 0.1 * torch.rand(
            120, 1, 5, 5, generator=generator
        ), labels

    def test_a_collapsed_expert_has_0(self, test_set: tuple[torch.Tensor, torch.Tensor]) -> None:
        images, labels = test_set
        always = images[:1].expand(30, -1, -1, -1)
        assert variety([always], torch.zeros(1, 30, dtype=torch.long), images, labels).mean == 0

    def test_an_expert_that_draws_test_images_of_its_class_has_1(
        self, test_set: tuple[torch.Tensor, torch.Tensor]
    ) -> None:
        images, labels = test_set
        draws = [images[labels == 0], images[labels == 1]]
        predicted = torch.tensor([[0], [1]]).expand(-1, 60)
        assert variety(draws, predicted, images, labels).per_expert == pytest.approx((1, 1))

    def test_half_the_contrast_is_half_the_variety(
        self, test_set: tuple[torch.Tensor, torch.Tensor]
    ) -> None:
        images, labels = test_set
        predicted = torch.zeros(1, 60, dtype=torch.long)
        assert variety([images[labels == 0] / 2], predicted, images, labels).mean == pytest.approx(
            0.5
        )

    def test_drawing_several_classes_does_not_increase_it(
        self, test_set: tuple[torch.Tensor, torch.Tensor]
    ) -> None:
        images, labels = test_set
        mixed = torch.cat([images[:1].expand(20, -1, -1, -1), images[1:2].expand(10, -1, -1, -1)])
        predicted = torch.tensor([0] * 20 + [1] * 10).unsqueeze(0)
        assert variety([mixed], predicted, images, labels).mean == 0

    def test_a_predicted_class_without_test_images_is_left_out(
        self, test_set: tuple[torch.Tensor, torch.Tensor]
    ) -> None:
        images, labels = test_set
        draws = [images[labels == 0], images[labels == 0]]
        result = variety(draws, torch.tensor([[0], [9]]).expand(-1, 60), images, labels)
        assert result.mean == pytest.approx(1)
        assert math.isnan(result.per_expert[1])


@pytest.mark.parametrize("name", ["mnist-sample", "fashion-mnist-sample"])
def test_negatives_are_told_from_test_images_without_error(name: str) -> None:
    reference = background(load(name).batches(1000))
    images = load(name, split="test").batch(slice(None))
    assert negatives(images, reference).share == 0
    assert negatives(1 - images, reference).share == 1
    assert negatives(torch.cat([images[:300], 1 - images[:100]]), reference).share == 0.25
    pale = 0.25 + images / 2  # like the draws of a model with little contrast
    assert negatives(pale, reference).share == 0
    assert negatives(1 - pale, reference).share == 1


def test_a_bright_background_works_the_same_way() -> None:
    paper = 1 - load("mnist-sample").batch(range(500))
    reference = background([paper[:200], paper[200:]])
    assert negatives(paper, reference).share == 0
    assert negatives(1 - paper, reference).share == 1


def test_images_without_a_common_background_have_no_negatives(generator: torch.Generator) -> None:
    photographs = torch.rand(200, 3, 8, 8, generator=generator)
    assert negatives(photographs, background([photographs])).share is None


def test_reconstruction_is_measured_against_the_mean_image(generator: torch.Generator) -> None:
    images = torch.rand(40, 1, 6, 5, generator=generator)
    mean = images.mean(0)
    perfect = reconstruction([(images[:25], images[:25]), (images[25:], images[25:])], mean)
    assert (perfect.error, perfect.relative) == (0, 0)
    assert reconstruction([(images, mean.expand_as(images))], mean).relative == pytest.approx(1)
    halfway = reconstruction([(images, (images + mean) / 2)], mean)
    assert halfway.relative == pytest.approx(0.25)
    assert reconstruction([(images, images + 0.1)], mean).error == pytest.approx(0.01)


def test_the_effective_rank_of_a_known_covariance(generator: torch.Generator) -> None:
    equal = with_moments(torch.ones(4).double(), torch.eye(4).double(), generator)
    assert effective_rank(torch.cat([equal, torch.zeros(100, 3)], 1)) == pytest.approx(4)
    unequal = with_moments(
        torch.zeros(2).double(), torch.diag(torch.tensor([3.0, 1.0])).double(), generator
    )
    assert effective_rank(unequal) == pytest.approx(16 / 10)


def bars(widths: list[float], slants: list[float], size: int = 40) -> torch.Tensor:
    """Draw upright bars, 24 rows high, with these widths, sheared by `slants` columns per row."""
    images = torch.zeros(len(widths), 1, size, size)
    for image, width, slant in zip(images, widths, slants, strict=True):
        for row in range(8, 32):
            middle = size / 2 + slant * (row - 19.5)
            left, right = middle - width / 2, middle + width / 2
            columns = torch.arange(size).float()
            image[0, row] = ((right - columns).clamp(0, 1) - (left - columns).clamp(0, 1)).clamp(
                0, 1
            )
    return images


class TestProperties:
    def test_a_bar_has_its_thickness_slant_width_and_height(self) -> None:
        thickness, slant, width, height = properties(bars([4.0, 4.0], [0.0, 0.25])).T
        assert thickness[0].item() == pytest.approx(
            4 * 24 / (24 + 4), rel=0.05
        )  # twice the area over the outline
        assert slant.tolist() == pytest.approx([0, 0.25], abs=0.02)
        assert width.tolist() == pytest.approx([math.sqrt(15 / 12)] * 2, rel=0.1)  # of 4 columns
        assert height.tolist() == pytest.approx([math.sqrt((24**2 - 1) / 12)] * 2, rel=0.01)

    def test_variation_is_that_of_one_class(self) -> None:
        real = bars([2.0, 4.0, 6.0, 3.0, 3.0], [0.2, 0.0, -0.2, 0.1, 0.3])
        labels = torch.tensor([1, 1, 1, 2, 2])
        same, half = real[:3], bars([3.0, 4.0, 5.0], [0.1, 0.0, -0.1])
        found = variation([same, half], torch.ones(2, 3, dtype=torch.long), real, labels)
        assert found.thickness == pytest.approx(0.75, abs=0.03)
        assert found.slant == pytest.approx(0.75, abs=0.02)
        still = variation(
            [real[:1].expand(3, -1, -1, -1)], torch.ones(1, 3, dtype=torch.long), real, labels
        )
        assert (still.thickness, still.slant, still.width) == pytest.approx((0, 0, 0), abs=1e-9)

    def test_an_expert_with_one_draw_of_its_class_is_left_out(self) -> None:
        real = bars([2.0, 4.0, 6.0], [0.2, 0.0, -0.2])
        predicted = torch.tensor([[1, 1, 1], [1, 2, 3]])
        found = variation([real, real], predicted, real, torch.ones(3, dtype=torch.long))
        assert found.slant == pytest.approx(1)
