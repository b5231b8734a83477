"""Few labels: a linear classifier of codes and of pixels, trained on 100 to 10,000 labelled images.

`python -m benchmarks.few_labels mnist --path FOLDER --json FILE` encodes the images by a trained
network, trains the linear probe of the protocol on random subsets of the labelled training images,
and prints its accuracy on all test images: the mean over the subsets, and the half-width of its
95 % interval. The subsets are the same for codes, for pixels and for their principal components.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

import torch

import poecaps
from benchmarks import machine
from benchmarks.baselines import CODE_SIZE, PrincipalComponents, limit
from benchmarks.report import few_label_table
from poecaps._modules import in_batches
from poecaps.data import load
from poecaps.evaluation import NetworkEncoder, linear_probe

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

COUNTS = (100, 300, 1000, 2000, 10_000)
Accuracies = dict[str, dict[str, list[float]]]
"""For each number of labels and each code: the accuracy with every subset."""


def measure(
    codes: Mapping[str, tuple[Tensor, Tensor]],
    labels: tuple[Tensor, Tensor],
    counts: Sequence[int],
    subsets: int,
) -> Accuracies:
    """Train probes on random subsets of the training images.

    Parameters
    ----------
    codes : name → (N, S), (M, S)
        Codes of training and of test images.
    labels : (N,), (M,)
    counts
        Numbers of labelled images; those above N are left out.
    subsets
        Random subsets for each number.
    """
    result: Accuracies = {}
    for count in counts:
        if count > len(labels[0]):
            continue
        accuracies: dict[str, list[float]] = {name: [] for name in codes}
        for seed in range(subsets):
            generator = torch.Generator().manual_seed(seed)
            chosen = torch.randperm(len(labels[0]), generator=generator)[:count]
            for name, (training, test) in codes.items():
                probe = linear_probe(
                    training[chosen.to(training.device)], labels[0][chosen], test, labels[1]
                )
                accuracies[name].append(probe.test_accuracy)
        result[str(count)] = accuracies
    return result


def main(arguments: Sequence[str] | None = None) -> None:
    """Encode, measure, print the table, and write the numbers."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("network", help="name of a bundled model, or folder of a trained one")
    parser.add_argument("--data", help="dataset of the model (default: its name)")
    parser.add_argument("--path", help="folder of the dataset")
    parser.add_argument("--subsets", type=int, default=5, help="random subsets (default: 5)")
    parser.add_argument("--limit", type=int, help="maximum number of training, and of test images")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, help="file to write the numbers to")
    options = parser.parse_args(arguments)
    data = options.data or options.network
    train, test = (
        limit(load(data, split=split, path=options.path), options.limit)
        for split in ("train", "test")
    )
    if train.labels is None or test.labels is None:
        parser.error(f"--data must have labels, but {data} has none")

    def encoded(encode: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            first, second = (
                in_batches(encode, (batch.to(options.device) for batch in images.batches(500)))
                for images in (train, test)
            )
        return first, second

    pixels = encoded(lambda images: images.flatten(1))
    components = PrincipalComponents(lambda: iter([pixels[0]]), CODE_SIZE)
    network = NetworkEncoder(poecaps.load(options.network, options.device))
    result = measure(
        {
            "codes": encoded(network.encode),
            "pixels": pixels,
            "principal components of pixels": (
                components.transform(pixels[0]),
                components.transform(pixels[1]),
            ),
        },
        (torch.from_numpy(train.labels), torch.from_numpy(test.labels)),
        COUNTS,
        options.subsets,
    )
    print(few_label_table(result))
    machine.write(result, options.json)


if __name__ == "__main__":
    main()
