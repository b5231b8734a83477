"""Judges of samples for images without a classifier of the package."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from poecaps.data import ImageSet, load
from poecaps.evaluation import RandomFeatures, frechet_distance, train_classifier
from poecaps.evaluation.judge import fit


@pytest.fixture(scope="module")
def stripes() -> ImageSet:
    """Small colour images with a bright stripe: across (0) or down (1)."""
    random = np.random.default_rng(0)
    images = random.integers(0, 90, (160, 12, 12, 3), dtype=np.uint8)
    labels = np.arange(160) % 2
    for image, label in zip(images, labels, strict=True):
        place = random.integers(2, 8)
        image.swapaxes(0, label)[place : place + 3] += 150
    return ImageSet(images, labels)


def test_a_classifier_is_trained_on_the_labels_of_any_images(stripes: ImageSet) -> None:
    seen: list[tuple[int, int]] = []
    before = torch.get_rng_state()
    classifier = train_classifier(
        stripes.subset(slice(120)), epochs=8, report=lambda *each: seen.append(each)
    )
    assert torch.equal(before, torch.get_rng_state())
    predictions = classifier.predict(stripes.batch(slice(120, 160)))
    assert (predictions.labels.numpy() == stripes.labels[120:]).mean() > 0.9  # type: ignore[index]
    assert seen[-1] == (8 * 120, 8 * 120)
    assert not classifier.training
    assert not any(parameter.requires_grad for parameter in classifier.parameters())
    assert classifier.metadata["training_images"] == 120


def test_the_same_seed_gives_the_same_classifier(stripes: ImageSet) -> None:
    first, second, other = (
        train_classifier(stripes, epochs=1, seed=seed).head.weight for seed in (0, 0, 1)
    )
    assert torch.equal(first, second)
    assert not torch.equal(first, other)


@pytest.mark.parametrize("steps", range(1, 12))
def test_any_number_of_steps_is_taken(stripes: ImageSet, steps: int) -> None:
    few = stripes.subset(slice(2 * steps))
    assert few.labels is not None
    labels = torch.from_numpy(few.labels)
    classifier = fit(few, labels, epochs=1, batch_size=2, rate=1e-3, seed=0, device="cpu")
    assert classifier.head.weight.isfinite().all()


@pytest.mark.parametrize("labels", [None, np.zeros(160, int), np.arange(160) % 2 - 1])
def test_classifiers_need_labels(stripes: ImageSet, labels: np.ndarray | None) -> None:
    with pytest.raises(ValueError, match="data must have labels from 0 on, of 2 classes or more"):
        train_classifier(replace(stripes, labels=labels))


def test_random_features_order_images_by_their_noise_and_by_their_blur() -> None:
    data = load("mnist-sample").subset(slice(2000))
    features = RandomFeatures(data.batches(500))
    images, reference = data.batch(range(1000)), features(data.batch(range(1000, 2000)))
    noise = torch.randn(images.shape, generator=torch.Generator().manual_seed(0))
    noisy = [(images + level * noise).clamp(0, 1) for level in (0, 0.2, 0.5)]
    blurred = [torch.nn.functional.avg_pool2d(images, side, 1, side // 2) for side in (1, 3, 5)]
    for worse in (noisy, blurred):
        distances = [frechet_distance(features(each), reference).distance for each in worse]
        assert distances == sorted(distances)
        assert distances[0] < 0.5 * distances[1]
    spread = features(data.batch(slice(None))).var(0)
    torch.testing.assert_close(spread, torch.ones(128), atol=0.1, rtol=0)


def test_random_features_depend_on_the_images_alone(stripes: ImageSet) -> None:
    batches = list(stripes.batches(80))
    torch.manual_seed(1)
    first = RandomFeatures(batches)(batches[0])
    torch.manual_seed(2)
    assert torch.equal(first, RandomFeatures(batches)(batches[0]))
