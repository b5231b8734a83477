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
import math
import statistics
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
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import Tensor

    from poecaps import CapsuleExperts

SEEDS = 5
LABELS = 1000
RESAMPLED = 50  # sets of test images, for the standard error of the NMI
EXPERTS = "experts of poecaps"
CODES = (
    EXPERTS,
    "their outputs, squashed",
    "random W, routed",
    "random W, not routed",
    "principal components",
    "k-subspaces",
    "k-means, residual",
)
MEASURES = {"probe": ".4f", "few": ".3f", "nmi": ".3f"}
"""Name in the numbers, and format."""

# From capsules to codes, and from codes to the activity of each expert or cluster
Encode = tuple["Callable[[Tensor], Tensor]", "Callable[[Tensor], Tensor] | None"]


def lengths(experts: int) -> Callable[[Tensor], Tensor]:
    """Return a function for the squared length of each expert: (B, J·D) → (B, J)."""
    return lambda codes: codes.unflatten(1, (experts, -1)).square().sum(2)


def codes_of(layer: CapsuleExperts, capsules: Tensor) -> Iterator[tuple[str, int, Encode]]:
    """Yield name, seed and functions of each code of capsules (N, I·K)."""
    inputs, experts, dim, size = layer.weight.shape

    def preactivation(of: CapsuleExperts) -> Callable[[Tensor], Tensor]:
        return lambda x: unsquash(of(x.unflatten(1, (inputs, size)))).flatten(1)

    active = lengths(experts)
    learned = preactivation(layer)
    yield CODES[0], 0, (learned, active)
    yield (
        CODES[1],
        0,
        (lambda x: squash(learned(x).unflatten(1, (experts, dim))).flatten(1), None),
    )
    for seed in range(SEEDS):
        other = copy.deepcopy(layer)
        other.reset_parameters(std=1.0, generator=torch.Generator().manual_seed(seed))
        yield CODES[2], seed, (preactivation(other), active)
        other.iterations = 1
        yield CODES[3], seed, (preactivation(other), active)
    kept = min(equal_terms.KEPT, len(capsules))
    components = PrincipalComponents(lambda: iter(capsules.split(2000)), kept)
    points = components.transform(capsules)
    yield CODES[4], 0, (lambda x: components.transform(x)[:, :CODE_SIZE], None)
    for seed in range(SEEDS):
        bases = equal_terms.fit_subspaces(
            points,
            equal_terms.SUBSPACES,
            equal_terms.SUBSPACE_DIM,
            torch.Generator().manual_seed(seed),
        )

        def projected(x: Tensor, bases: Tensor = bases) -> Tensor:
            return equal_terms.projections(components.transform(x), bases).flatten(1)

        yield CODES[5], seed, (projected, lengths(equal_terms.SUBSPACES))
    for seed in range(SEEDS):
        code = equal_terms.fit_kmeans_residual(points, torch.Generator().manual_seed(seed))

        def clustered(x: Tensor, code: Callable[[Tensor], Tensor] = code) -> Tensor:
            return code(components.transform(x))

        yield CODES[6], seed, (clustered, lambda codes: codes[:, : equal_terms.SUBSPACES])


def measure(
    layer: CapsuleExperts,
    capsules: tuple[Tensor, Tensor],
    labels: tuple[Tensor, Tensor],
    report: Callable[[str], None] = lambda _: None,
) -> dict[str, dict[str, Any]]:
    """Measure every code of the capsules of training and test images: (N, I·K), (M, I·K)."""
    result: dict[str, dict[str, Any]] = {}
    chosen = [
        torch.randperm(len(labels[0]), generator=torch.Generator().manual_seed(seed))[:LABELS]
        for seed in range(SEEDS)
    ]
    for name, seed, (encode, active) in codes_of(layer, capsules[0]):
        with torch.no_grad():
            train, test = (in_batches(encode, iter(x.split(1000))) for x in capsules)
        row = result.setdefault(name, {"probe": [], "few": []})
        row["probe"].append(linear_probe(train, labels[0], test, labels[1]).test_accuracy)
        random = name in {CODES[2], CODES[3], CODES[5], CODES[6]}
        for part in chosen[seed : seed + 1] if random else chosen:
            few = linear_probe(train[part], labels[0][part], test, labels[1])
            row["few"].append(few.test_accuracy)
        if active is not None:
            row.setdefault("nmi", []).append(specialisation(active(test), labels[1]).normalised)
            row.setdefault("nmi_error", []).append(nmi_error(active(test), labels[1], seed))
        report(f"{name}, seed {seed}: {row}")
    return result


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
    if len(first) < len(second):
        first = first * len(second)  # one training, several seeds of the other code
    pairs = [a - b for a, b in zip(first, second, strict=True)]
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
        row = [name]
        for measure, form in MEASURES.items():
            row.append(cell(code.get(measure, []), form))
            if name == EXPERTS or measure not in code:
                row.append("–")
            else:
                row.append(difference(result, name, measure).text("+" + form).replace("± +", "± "))
        rows.append(row)
    head = ["code", "linear probe", "experts minus code", f"{LABELS:,} labels"]
    return markdown_table([*head, "experts minus code", "NMI", "experts minus code"], rows)


def main(arguments: Sequence[str] | None = None) -> None:
    """Encode, measure, print the table, and write the numbers; or print a file as a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("network", help="name of a bundled model, or folder of a trained one")
    parser.add_argument("--data", help="dataset of the model (default: its name)")
    parser.add_argument("--path", help="folder of the dataset")
    parser.add_argument("--limit", type=int, help="maximum number of training, and of test images")
    parser.add_argument("--json", type=Path, help="file to write the numbers to")
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
    result = {
        "training_images": len(train),
        "test_images": len(test),
        "labels": LABELS,
        "codes": measure(
            cast("CapsuleExperts", network.encoders[0]),
            (first, second),
            (torch.from_numpy(train.labels), torch.from_numpy(test.labels)),
            lambda text: print(text, flush=True),
        ),
    }
    print(table(result))
    machine.write(result, options.json)


if __name__ == "__main__":
    main()
