"""Numbers that short programs on README.md and docs/index.md print.

`OMP_NUM_THREADS=1 python -m benchmarks.pages --json docs/results/pages-cpu.json` runs the ten lines
of the README with several seeds, and fits the classifier of docs/index.md to codes of the bundled
model `mnist` and to pixels, with few labels and with more. It takes a minute on one core.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import torch
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import poecaps
from benchmarks import machine
from poecaps import applications
from poecaps.data.idx import Split

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT = Path(__file__).parents[1]
SEEDS = range(5)  # of the ten lines
SIZES = ((500, 500), (5000, 1000))  # labels to fit, and test images


def variance_lost(seed: int) -> float:
    """Run the ten lines of the README, and return the share of the variance that is lost."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (program,) = re.findall(
        r"^## Ten lines of Python$.*?```python\n(.*?)```", readme, re.DOTALL | re.MULTILINE
    )
    torch.manual_seed(seed)
    names: dict[str, Any] = {}
    with contextlib.redirect_stdout(io.StringIO()):  # the share, rounded to a percentage
        exec(program, names)  # noqa: S102 (the program of the README)
    x, experts = names["x"], names["experts"]
    with torch.no_grad():
        return float((experts.reconstruct(x) - x).square().sum() / x.square().sum())


def accuracies(labels: int, test_images: int) -> dict[str, float]:
    """Fit the classifier of docs/index.md to codes and to pixels, and measure both."""
    network = poecaps.load("mnist")
    sample = [poecaps.data.load("mnist-sample", split=split) for split in get_args(Split)]
    parts = []
    for data, count in zip(sample, (labels, test_images), strict=True):
        images = data.batch(range(count))
        assert data.labels is not None  # noqa: S101 (bundled with the images)
        inputs = {"codes": applications.encode(network, images), "pixels": images}
        parts.append(({name: x.flatten(1) for name, x in inputs.items()}, data.labels[:count]))
    (train, known), (test, truth) = parts
    classifier = make_pipeline(StandardScaler(), LogisticRegression(C=0.01))
    return {name: classifier.fit(train[name], known).score(test[name], truth) for name in train}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the numbers, and write them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="file to write the numbers to")
    options = parser.parse_args(arguments)
    lost = [variance_lost(seed) for seed in SEEDS]
    print("ten lines: " + ", ".join(f"{each:.1%}" for each in lost) + " of variance lost")
    measured = []
    for labels, test_images in SIZES:
        found = accuracies(labels, test_images)
        measured.append({"labels": labels, "test_images": test_images, **found})
        print(f"{labels:,} labels: codes {found['codes']:.1%}, pixels {found['pixels']:.1%}")
    report = {
        "command": machine.command("benchmarks.pages", parser, options),
        "machine": machine.describe(torch.device("cpu")),
        "variance_lost": lost,
        "accuracies": measured,
    }
    machine.write(report, options.json)


if __name__ == "__main__":
    main()
