"""What a linear classifier gains from expert capsules on tables of columns.

`OMP_NUM_THREADS=1 python -m benchmarks.tables --json docs/results/tables.json` measures the
accuracy of a logistic regression on each table and on each of its representations, in the same five
shuffled folds. Everything has the default options of its class, but for the random numbers.
"""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from sklearn import datasets
from sklearn.decomposition import PCA
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import StratifiedKFold, cross_val_score
from sklearn.neural_network import BernoulliRBM
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import MinMaxScaler, StandardScaler

from benchmarks import machine
from poecaps.sklearn import CapsuleExpertsTransformer

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

FOLDS = 5
MADE = {"n_features": 20, "n_informative": 8, "n_redundant": 6, "n_classes": 4}


def diabetes() -> tuple[Any, Any]:
    """Load the columns of `load_diabetes`, and whether the target is above its median."""
    rows, target = datasets.load_diabetes(return_X_y=True)
    return rows, target > np.median(target)


TABLES: dict[str, Callable[[], tuple[Any, Any]]] = {  # name in Markdown: rows and labels
    "`load_diabetes`, target above its median": diabetes,
    "`make_classification(900, 20, n_informative=8, n_redundant=6, n_classes=4, random_state=0)`": (
        lambda: datasets.make_classification(900, **MADE, random_state=0)
    ),
    "`load_digits`": lambda: datasets.load_digits(return_X_y=True),
    "`load_breast_cancer`": lambda: datasets.load_breast_cancer(return_X_y=True),
    "`load_wine`": lambda: datasets.load_wine(return_X_y=True),
    "`load_iris`": lambda: datasets.load_iris(return_X_y=True),
}
REPRESENTATIONS: dict[str, Callable[[], list[Any]]] = {  # name in the table: transformers
    "columns": lambda: [StandardScaler()],
    "PCA": lambda: [StandardScaler(), PCA(0.95)],
    "codes": lambda: [CapsuleExpertsTransformer(random_state=0)],
    "random experts": lambda: [
        CapsuleExpertsTransformer(n_iter=1, learning_rate=1e-12, random_state=0)
    ],
    "BernoulliRBM": lambda: [MinMaxScaler(), BernoulliRBM(320, random_state=0)],
}


def accuracies(
    data: tuple[Any, Any], representations: Sequence[str] = tuple(REPRESENTATIONS)
) -> dict[str, list[float]]:
    """Measure the accuracy in each fold, for each representation of a table."""
    folds = StratifiedKFold(FOLDS, shuffle=True, random_state=0)
    return in_folds(data, folds, representations)


def in_folds(
    data: tuple[Any, Any], folds: Any, representations: Sequence[str]
) -> dict[str, list[float]]:
    """Measure accuracies in any folds of scikit-learn."""
    result = {}
    for name in representations:
        model = make_pipeline(*REPRESENTATIONS[name](), LogisticRegression(max_iter=1000))
        with warnings.catch_warnings():
            warnings.simplefilter("error", ConvergenceWarning)
            result[name] = cross_val_score(model, *data, cv=folds).tolist()
    return result


def table(measured: Mapping[str, Mapping[str, Sequence[float]]]) -> str:
    """Format the mean accuracies."""
    head = ["table", *REPRESENTATIONS]
    rows = [
        [name, *(f"{fmean(folds[each]):.3f}" for each in REPRESENTATIONS)]
        for name, folds in measured.items()
    ]
    rule = ["---"] + ["---:"] * len(REPRESENTATIONS)
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, rule, *rows))


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the table, and write the numbers."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="file to write the numbers to")
    options = parser.parse_args(arguments)
    measured = {name: accuracies(load()) for name, load in TABLES.items()}
    print(table(measured))
    iris = datasets.load_iris(return_X_y=True)
    report = {
        "command": machine.command("benchmarks.tables", parser, options),
        "machine": machine.describe(torch.device("cpu")),
        "accuracies": measured,
        "example": in_folds(iris, 3, ("columns", "codes")),  # the first block of the page
    }
    machine.write(report, options.json)


if __name__ == "__main__":
    main()
