"""The linear probe against scikit-learn and known answers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler

from poecaps.evaluation import linear_probe


def blobs(
    generator: torch.Generator, count: int, spread: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw three overlapping clusters in 6 dimensions of very different scale."""
    labels = torch.arange(count) % 3
    centres = torch.randn(3, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    codes = centres[labels] + spread * torch.randn(
        count, 6, dtype=torch.float64, generator=generator
    )
    return codes * torch.tensor([1, 100, 0.01, 1, 3, 1], dtype=torch.float64) + 5, labels


@pytest.mark.parametrize("l2", [1e-2, 1e-4])
def test_it_agrees_with_scikit_learn(generator: torch.Generator, l2: float) -> None:
    x, y = blobs(generator, 300, 1.5)
    x_test, y_test = blobs(generator, 500, 1.5)
    ours = linear_probe(x, y, x_test, y_test, l2=l2)
    scaler = StandardScaler().fit(x.numpy())
    theirs = LogisticRegression(C=1 / (l2 * len(x)), tol=1e-6, max_iter=1000).fit(
        scaler.transform(x.numpy()), y
    )
    probabilities = theirs.predict_proba(scaler.transform(x.numpy()))
    assert ours.converged
    assert ours.loss == pytest.approx(-np.log(probabilities[np.arange(len(x)), y]).mean(), rel=1e-4)
    assert ours.train_accuracy == pytest.approx(
        theirs.score(scaler.transform(x.numpy()), y), abs=1.01 / len(x)
    )
    assert ours.test_accuracy == pytest.approx(
        theirs.score(scaler.transform(x_test.numpy()), y_test), abs=1.01 / 500
    )


def test_float32_gives_the_same_answer(generator: torch.Generator) -> None:
    (x, y), (x_test, y_test) = blobs(generator, 300, 1.5), blobs(generator, 500, 1.5)
    double = linear_probe(x, y, x_test, y_test)
    single = linear_probe(x.float(), y, x_test.float(), y_test)
    assert single.converged
    assert single.loss == pytest.approx(double.loss, rel=1e-3)
    assert single.test_accuracy == pytest.approx(double.test_accuracy, abs=2.01 / 500)


def test_separable_codes_are_classified_without_errors(generator: torch.Generator) -> None:
    (x, y), (x_test, y_test) = blobs(generator, 300, 0.05), blobs(generator, 300, 0.05)
    probe = linear_probe(x, y, x_test, y_test)
    assert (probe.train_accuracy, probe.test_accuracy) == (1.0, 1.0)


def test_constant_codes_predict_the_most_frequent_label() -> None:
    x, y = torch.full((90, 4), 7.3), torch.tensor([0, 1, 1]).repeat(30)
    assert linear_probe(x, y, x, y).test_accuracy == pytest.approx(2 / 3)


def test_small_variations_on_a_large_constant_are_used(generator: torch.Generator) -> None:
    y = torch.arange(200) % 2
    x = 100 + 0.01 * (y.unsqueeze(1) + 0.1 * torch.randn(200, 3, generator=generator))
    assert linear_probe(x, y, x, y).test_accuracy == 1.0


def test_labels_need_not_be_consecutive_and_unknown_ones_count_as_errors(
    generator: torch.Generator,
) -> None:
    x, y = blobs(generator, 300, 0.05)
    names = torch.tensor([7, -3, 1000])
    y_test = names[y].clone()
    y_test[:30] = 5
    assert linear_probe(x, names[y], x, y_test).test_accuracy == pytest.approx(0.9)


def test_the_gradient_mode_of_the_caller_is_irrelevant(generator: torch.Generator) -> None:
    x, y = blobs(generator, 60, 1.0)
    with torch.no_grad():
        inside = linear_probe(x, y, x, y)
    assert inside == linear_probe(x, y, x, y)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"train_codes": torch.zeros(4, 2, 2)}, r"train_codes must have shape \(N, S\).*flatten"),
        (
            {"train_labels": torch.zeros(3, dtype=torch.long)},
            "train_labels must be one integer for each of the 4",
        ),
        ({"test_labels": torch.zeros(4)}, "test_labels must be one integer.*float32"),
        ({"test_codes": torch.zeros(4, 3)}, "test_codes must have 2 numbers each.*has 3"),
        ({"train_codes": torch.full((4, 2), float("nan"))}, "train_codes must be finite"),
        ({"l2": -1.0}, "l2 must be a finite number of at least 0"),
    ],
)
def test_it_rejects_invalid_arguments(change: dict[str, object], message: str) -> None:
    whole = torch.zeros(4, dtype=torch.long)
    given = {
        "train_codes": torch.zeros(4, 2),
        "train_labels": whole,
        "test_codes": torch.zeros(4, 2),
        "test_labels": whole,
    }
    with pytest.raises(ValueError, match=message):
        linear_probe(**{**given, **change})  # type: ignore[arg-type]
