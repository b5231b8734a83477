"""The shipped classifiers and the script that trains them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import safetensors.torch
import torch

from poecaps import ModelError
from poecaps.data import load
from poecaps.evaluation import CLASSIFIERS, Classifier, load_classifier
from poecaps.evaluation.classifier import WEIGHTS
from poecaps.evaluation.judge import shift
from tools.train_classifier import main

if TYPE_CHECKING:
    from pathlib import Path

PROMISED = {"mnist": 0.992, "fashion-mnist": 0.91}


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_the_shipped_weights_reach_the_promised_accuracy(name: str) -> None:
    classifier = load_classifier(f"{name}-sample")
    test = load(f"{name}-sample", split="test")
    predictions = classifier.predict(test.batch(range(1000)))
    right = predictions.labels.numpy() == test.labels[:1000]  # type: ignore[index]
    assert right.mean() >= PROMISED[name]
    assert classifier.metadata["test_accuracy"] >= PROMISED[name]
    assert classifier.metadata["data"] == name
    assert "train_classifier.py" in classifier.metadata["command"]
    confident = predictions.probabilities.amax(1).numpy() >= 0.9
    assert right[confident].mean() >= 0.95  # at 90 % confidence, at least 90 % must be right
    assert predictions.features.shape == (1000, 128)
    assert (WEIGHTS / f"{name}.safetensors").stat().st_size <= 600_000


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_it_is_not_confident_about_nonsense(name: str, generator: torch.Generator) -> None:
    classifier = load_classifier(name)
    images = load(f"{name}-sample", split="test").batch(range(400))
    nonsense = {
        "noise": torch.rand(200, 1, 28, 28, generator=generator),
        "grey": torch.full((1, 1, 28, 28), 0.5),
        "everything at once": images.mean(0, keepdim=True),
        "four at once": images.view(100, 4, 1, 28, 28).mean(1),
    }
    for kind, blended in nonsense.items():
        confident = classifier.predict(blended).probabilities.amax(1) >= 0.9
        assert confident.double().mean() < 0.1, kind


def test_logits_and_features_belong_together(generator: torch.Generator) -> None:
    classifier = Classifier(classes=3, channels=3, features=9).eval()
    images = torch.rand(5, 3, 32, 30, generator=generator)
    predictions = classifier.predict(images)
    torch.testing.assert_close(predictions.probabilities, classifier(images).softmax(1))
    torch.testing.assert_close(classifier.head(predictions.features), classifier(images))
    assert torch.equal(predictions.labels, classifier(images).argmax(1))


def test_the_script_trains_saves_and_is_repeatable(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    labels = np.arange(240) % 2
    images = random.integers(0, 60, (240, 28, 28), dtype=np.uint8)
    images[labels == 1, 10:18] += 150
    np.savez(
        tmp_path / "x.npz", x_train=images, y_train=labels, x_test=images[:80], y_test=labels[:80]
    )
    command = [
        "--data",
        str(tmp_path / "x.npz"),
        "--epochs",
        "3",
        "--batch-size",
        "20",
        "--device",
        "cpu",
    ]
    first, second = (
        main([*command, "--out", str(tmp_path / f"{run}.safetensors")]) for run in (1, 2)
    )
    assert first["test_accuracy"] == 1
    assert {**first, "seconds": 0} == {**second, "seconds": 0}
    classifier = load_classifier(tmp_path / "1.safetensors")
    assert classifier.metadata["training_images"] == 240
    assert not any(parameter.requires_grad for parameter in classifier.parameters())
    assert not classifier.training


def test_shifts_move_the_image_and_leave_black() -> None:
    images = torch.zeros(1, 1, 6, 6)
    images[0, 0, 2, 3] = 1
    moved = shift(images, across=1, down=-2)
    assert moved.nonzero().tolist() == [[0, 0, 0, 4]]


def test_anything_but_a_classifier_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError,
        match=r"mnist, fashion-mnist or a \.safetensors file.*'cifar10'.*train_classifier",
    ):
        load_classifier("cifar10")
    safetensors.torch.save_file({"x": torch.zeros(1)}, tmp_path / "foreign.safetensors")
    with pytest.raises(ModelError, match="was not written by poecaps"):
        load_classifier(tmp_path / "foreign.safetensors")
    with pytest.raises(ValueError, match="images must have shape"):
        Classifier()(torch.zeros(2, 3, 28, 28))
