"""Classifiers that are trained on the labels of the images."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from poecaps.data import ImageSet
from poecaps.evaluation import train_classifier
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


@pytest.mark.parametrize(
    "labels", [None, np.zeros(160, int), np.arange(160) % 2 - 1, np.arange(160) * 99]
)
def test_classifiers_need_labels(stripes: ImageSet, labels: np.ndarray | None) -> None:
    with pytest.raises(ValueError, match="data must have labels from 0 on, of 2 classes or more"):
        train_classifier(replace(stripes, labels=labels))
