"""Codes of the capsules of a trained network: those of its experts, and simpler ones.

`python -m benchmarks.capsule_codes mnist --path FOLDER --json FILE` computes the input capsules of
a trained network for all images once, and from them codes of about as many numbers as those of its
experts: by the same layer with random weights, routed and not; by principal components; by
k-subspaces; and by k-means with its residual, as in `benchmarks.equal_terms`. For each code it
measures the linear probe of the protocol, the accuracy of the probe with 1,000 labels, and the NMI
of the most active expert, subspace or cluster and the label.

Codes with random numbers have five seeds. The subsets of 1,000 labels are those of
`benchmarks.few_labels`; with several seeds, each seed has its own subset. The table compares the
experts with each of the other codes. The half-width of a 95 % interval of a difference combines
that over seeds and subsets (Student's t) with that over test images, for which the accuracies of
two codes are taken as independent: they are positively correlated, so the interval is too wide
rather than too narrow. The experts are those of one training.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import statistics
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

import poecaps
from benchmarks import equal_terms, machine
from benchmarks.baselines import CODE_SIZE, PrincipalComponents, limit
from benchmarks.intervals import Interval, mean_interval
from poecaps import squash, unsquash
from poecaps._modules import in_batches
from poecaps.data import load
from poecaps.evaluation import linear_probe
from poecaps.evaluation.fidelity import Z_95
from poecaps.evaluation.measures import specialisation

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from poecaps import CapsuleExperts

SEEDS = 5
LABELS = 1000
RESAMPLED = 50  # sets of test images, for the standard error of the NMI
EXPERTS, OUTPUTS = "experts of poecaps", "their outputs, squashed"
CODES = (
    EXPERTS,
    OUTPUTS,
    "random W, routed",
    "random W, not routed",
    "principal components",
    "k-subspaces",
    "k-means, residual",
)
MEASURES = {"probe": ".4f", "few": ".4f", "nmi": ".3f"}
"""Name in the numbers, and format."""

RANDOM = {"random W, routed", "random W, not routed", "k-subspaces", "k-means, residual"}

Codes = tuple["Tensor", "Tensor"]  # of training and of test images


def lengths(experts: int) -> Callable[[Tensor], Tensor]:
    """Return a function for the squared length of each expert: (B, J·D) → (B, J)."""
    return lambda codes: codes.unflatten(1, (experts, -1)).square().sum(2)


class CapsuleCodes:
    """Every code of the capsules of training and test images.

    Parameters
    ----------
    layer
        The trained experts.
    capsules : (N, I·K), (M, I·K)
    """

    def __init__(self, layer: CapsuleExperts, capsules: tuple[Tensor, Tensor]) -> None:
        self.layer, self.capsules = layer, capsules

    def __call__(self, name: str, seed: int) -> tuple[Codes, Callable[[Tensor], Tensor] | None]:
        """Return the codes, and the function from them to the activity of experts or clusters."""
        experts, dim = self.layer.weight.shape[1:3]
        if name == EXPERTS:
            return self._encoded(self.layer), lengths(experts)
        if name == OUTPUTS:
            first, second = (
                squash(z.unflatten(1, (experts, dim))).flatten(1) for z in self._encoded(self.layer)
            )
            return (first, second), None
        if name.startswith("random W"):
            other = copy.deepcopy(self.layer)
            other.reset_parameters(std=1.0, generator=torch.Generator().manual_seed(seed))
            if name.endswith("not routed"):
                other.iterations = 1
            return self._encoded(other), lengths(experts)
        train, test = self._points
        if name == "principal components":
            return (train[:, :CODE_SIZE], test[:, :CODE_SIZE]), None
        generator = torch.Generator().manual_seed(seed)
        if name == "k-subspaces":
            count, size = equal_terms.SUBSPACES, equal_terms.SUBSPACE_DIM
            bases = equal_terms.fit_subspaces(train, count, size, generator)
            first, second = (
                in_batches(lambda x: equal_terms.projections(x, bases).flatten(1), points)
                for points in (train, test)
            )
            return (first, second), lengths(count)
        code = equal_terms.fit_kmeans_residual(train, generator)
        return (code(train), code(test)), lambda codes: codes[:, : equal_terms.SUBSPACES]

    def _encoded(self, layer: CapsuleExperts) -> Codes:
        inputs, size = layer.weight.shape[0], layer.weight.shape[3]

        def preactivation(x: Tensor) -> Tensor:
            return unsquash(layer(x.unflatten(1, (inputs, size)))).flatten(1)

        with torch.no_grad():
            first, second = (in_batches(preactivation, x, 1000) for x in self.capsules)
        return first, second

    @cached_property
    def _points(self) -> Codes:
        """Principal components, in which subspaces and clusters are searched for."""
        train, test = self.capsules
        found = PrincipalComponents(
            lambda: iter(train.split(2000)), min(equal_terms.KEPT, len(train))
        )
        return found.transform(train), found.transform(test)


def measure(
    codes: CapsuleCodes,
    labels: tuple[Tensor, Tensor],
    result: dict[str, dict[str, Any]],
    report: Callable[[], None] = lambda: None,
) -> None:
    """Measure every code, and add it to the result; codes and seeds that it has are skipped."""
    chosen = [
        torch.randperm(len(labels[0]), generator=torch.Generator().manual_seed(seed))[:LABELS]
        for seed in range(SEEDS)
    ]
    for name in CODES:
        for seed in range(SEEDS if name in RANDOM else 1):
            row = result.get(name, {"probe": [], "few": []})
            if len(row["probe"]) > seed:
                continue
            (train, test), active = codes(name, seed)
            row["probe"].append(linear_probe(train, labels[0], test, labels[1]).test_accuracy)
            for part in chosen[seed : seed + 1] if name in RANDOM else chosen:
                few = linear_probe(train[part], labels[0][part], test, labels[1])
                row["few"].append(few.test_accuracy)
            if active is not None:
                nmi = specialisation(active(test), labels[1]).normalised
                row.setdefault("nmi", []).append(nmi)
                error = nmi_error(active(test), labels[1], seed)
                row.setdefault("nmi_error", []).append(error)
            result[name] = row
            report()


def nmi_error(active: Tensor, labels: Tensor, seed: int) -> float:
    """Return the standard error of the NMI over test images, by resampling them."""
    clusters = active.argmax(1)
    table = torch.zeros(active.shape[1], int(labels.max()) + 1)
    table.index_put_((clusters, labels), torch.ones(len(labels)), accumulate=True)
    generator = torch.Generator().manual_seed(seed)
    shares = table.flatten() / len(labels)
    found = []
    for _ in range(RESAMPLED):
        drawn = torch.multinomial(shares, len(labels), replacement=True, generator=generator)
        found.append(_nmi(drawn.bincount(minlength=len(shares)).view_as(table) / len(labels)))
    return statistics.stdev(found)


def _nmi(shares: Tensor) -> float:
    """Return the NMI of the joint distribution (J, C) of clusters and labels."""
    first, second = (torch.special.entr(shares.sum(axis)).sum() for axis in (0, 1))
    joint = torch.special.entr(shares).sum()
    return float((first + second - joint) / ((first + second) / 2))


def difference(result: Mapping[str, Any], name: str, measure: str) -> Interval:
    """Estimate how much larger a measure of the experts is than that of another code."""
    ours, other = (result["codes"][each] for each in (EXPERTS, name))
    first, second = ours[measure], other[measure]
    if len(first) == 1:
        first = first * len(second)  # one training, several seeds of the other code
    pairs = [a - b for a, b in zip(first, second, strict=False)]  # of the same subsets
    over_seeds = mean_interval(pairs) if len(pairs) > 1 else Interval(pairs[0], 0.0)
    if measure == "nmi":
        squares = sum(statistics.mean(code["nmi_error"]) ** 2 for code in (ours, other))
    else:
        means = (statistics.mean(values) for values in (first, second))
        squares = sum(mean * (1 - mean) for mean in means) / result["test_images"]
    return Interval(over_seeds.value, math.hypot(over_seeds.half_width, Z_95 * math.sqrt(squares)))


def table(result: Mapping[str, Any]) -> str:
    """Format a Markdown table: mean and standard deviation of each code, and the difference."""
    from benchmarks.report import markdown_table
    from benchmarks.variants import cell

    rows = []
    for name, code in result["codes"].items():
        row = [name, str(len(code["probe"]))]
        for measure, form in MEASURES.items():
            row.append(cell(code.get(measure, []), form))
            if name == EXPERTS or measure not in code:
                row.append("–")
            else:
                row.append(difference(result, name, measure).signed(form))
        rows.append(row)
    head = ["code", "seeds", "linear probe", "experts minus code", f"{LABELS:,} labels"]
    return markdown_table([*head, "experts minus code", "NMI", "experts minus code"], rows)


def main(arguments: Sequence[str] | None = None) -> None:
    """Encode, measure, print the table, and write the numbers."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("network", help="name of a bundled model, or folder of a trained one")
    parser.add_argument("--data", help="dataset of the model (default: its name)")
    parser.add_argument("--path", help="folder of the dataset")
    parser.add_argument("--limit", type=int, help="maximum number of training, and of test images")
    parser.add_argument(
        "--json", type=Path, help="file of the numbers; codes that it contains are skipped"
    )
    options = parser.parse_args(arguments)
    data = options.data or options.network
    train, test = (
        limit(load(data, split=split, path=options.path), options.limit)
        for split in ("train", "test")
    )
    if train.labels is None or test.labels is None:
        parser.error(f"--data must have labels, but {data} has none")
    network = poecaps.load(options.network, "cpu").eval()
    with torch.no_grad():
        first, second = (
            in_batches(lambda x: network.capsules(x).float().flatten(1), images.batches(500))
            for images in (train, test)
        )
    result: dict[str, Any] = {
        "training_images": len(train),
        "test_images": len(test),
        "labels": LABELS,
        "codes": {},
    }
    if options.json is not None and options.json.is_file():
        result["codes"] = json.loads(options.json.read_text())["codes"]

    def report() -> None:
        print(table(result).splitlines()[-1], flush=True)
        machine.write(result, options.json)  # after each code: an interrupted run can go on

    measure(
        CapsuleCodes(cast("CapsuleExperts", network.encoders[0]), (first, second)),
        (torch.from_numpy(train.labels), torch.from_numpy(test.labels)),
        result["codes"],
        report,
    )
    print(f"\n{table(result)}")


if __name__ == "__main__":
    main()
