"""Measure the claims of the paper on a trained run, and draw its Figure 2 without selection.

`poecaps train --preset paper --data mnist --data-path FOLDER --out RUN`, then
`python -m benchmarks.claims RUN --path FOLDER --json FILE --figures FIGURES`, which adds the run to
FILE.

Figure 2 has 20 columns (experts) of 4 draws, in the complete domain (2a, 2c) and in the restricted
domain (2b, 2d).
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from benchmarks import machine
from poecaps import CapsuleNetwork, plotting
from poecaps import functional as F
from poecaps._modules import BATCH_SIZE, device_of
from poecaps.code_density import DOMAIN_INFO
from poecaps.data import load
from poecaps.evaluation import Background, background, load_classifier, measures
from poecaps.evaluation.protocol import nan_to_none
from poecaps.training import record

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from poecaps.code_density import Domain
    from poecaps.evaluation import Classifier

ROWS = 4
DRAWS = 500  # draws of each expert
DOMAINS: tuple[Domain, ...] = ("complete", "restricted", "learned")


@dataclass(frozen=True)
class SignFlips:
    """Effect of replacing draws x of the complete domain by −x."""

    negatives: float
    """Share of the draws x that are negatives."""
    negatives_of_opposites: float
    """Share of the opposites −x that are negatives."""
    negatives_removed: float | None
    """Share of the negatives whose opposite is not a negative; None without negatives."""
    negatives_created: float | None
    """Share of the other draws whose opposite is a negative; None if all are negatives."""


@dataclass(frozen=True)
class DrawMetrics:
    """Metrics of draws from every expert, in one domain."""

    recognisable: float
    """Share of the draws with a confident prediction of the classifier."""
    purity: float
    """Share of the most frequent predicted class of an expert, mean over experts."""
    effective_classes: float
    """Effective number of predicted classes among all draws."""
    negatives: float | None
    """Share of the draws that are negatives."""
    variation: dict[str, float]
    """Standard deviation of each property over an expert's main class, relative to the class."""


@torch.no_grad()
def sign_flips(
    network: CapsuleNetwork, reference: Background, draws: int, generator: torch.Generator
) -> SignFlips:
    """Draw from every expert in the complete domain, and decode each draw and its opposite."""
    experts, _ = network.architecture.experts[-1]
    negative, opposite_negative = [], []
    for expert in range(experts):
        for count in _batch_sizes(draws):
            z = network.code_density.sample(count, "complete", expert, generator)
            negative.append(measures.are_negatives(network.decode(F.squash(z)), reference))
            opposite_negative.append(
                measures.are_negatives(network.decode(F.squash(-z)), reference)
            )
    first, second = torch.cat(negative), torch.cat(opposite_negative)

    def share(values: Tensor) -> float | None:
        return values.double().mean().item() if len(values) else None

    return SignFlips(
        negatives=share(first) or 0.0,
        negatives_of_opposites=share(second) or 0.0,
        negatives_removed=share(~second[first]),
        negatives_created=share(second[~first]),
    )


@torch.no_grad()
def draw_metrics(
    network: CapsuleNetwork,
    domain: Domain,
    classifier: Classifier,
    reference: Background,
    test: tuple[Tensor, Tensor],
    draws: int,
    generator: torch.Generator,
) -> DrawMetrics:
    """Draw the same number of images from every expert, and measure them."""
    experts, _ = network.architecture.experts[-1]
    drawn = [
        torch.cat(
            [
                network.generate(count, domain, expert=expert, generator=generator)
                for count in _batch_sizes(draws)
            ]
        )
        for expert in range(experts)
    ]
    images = torch.cat(drawn)
    predictions = classifier.predict(images)
    predicted = predictions.labels.view(experts, draws)
    return DrawMetrics(
        recognisable=measures.recognisability(predictions.probabilities).share,
        purity=measures.purity(predicted).mean,
        effective_classes=measures.diversity(predictions.labels).effective_classes,
        negatives=measures.negatives(images, reference).share,
        variation=asdict(measures.variation(drawn, predicted, *test)),
    )


def figure(network: CapsuleNetwork, domain: Domain, path: Path, seed: int = 0) -> Path:
    """Draw one panel of Figure 2."""
    generator = torch.Generator(device_of(network)).manual_seed(seed)
    experts, _ = network.architecture.experts[-1]
    with torch.no_grad():
        draws = [
            network.generate(ROWS, domain, expert=expert, generator=generator)
            for expert in range(experts)
        ]
    # Not by `poecaps.cli`, whose parser is not installed on every machine that measures.
    title = f"draws from {DOMAIN_INFO[domain].description}, one column per expert"
    return plotting.expert_grid(torch.stack(draws, 1), path, title=title)


def training_seconds(run: Path) -> float | None:
    """Return the seconds from start to end of a run; None if it was interrupted or unfinished."""
    history = record.read(run)
    if len(history["starts"]) != 1 or not history.get("finished"):
        return None
    start, end = (
        datetime.fromisoformat(time) for time in (history["starts"][0]["time"], history["finished"])
    )
    return (end - start).total_seconds()


def _batch_sizes(count: int) -> list[int]:
    return [min(BATCH_SIZE, count - start) for start in range(0, count, BATCH_SIZE)]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, and write the numbers and figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "run",
        type=Path,
        help="folder of a run trained on mnist or fashion-mnist, or on their samples",
    )
    parser.add_argument("--path", help="folder of the full dataset (default: that of the run)")
    parser.add_argument(
        "--device",
        default="cuda" if torch.cuda.is_available() else "cpu",
        help="(default: a GPU if available)",
    )
    parser.add_argument(
        "--draws", type=int, default=DRAWS, help=f"draws of each expert (default: {DRAWS})"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the draws (default: 0)")
    parser.add_argument(
        "--name", help="name of the run in the file (default: the name of its folder)"
    )
    parser.add_argument("--json", type=Path, help="file to add the numbers to")
    parser.add_argument("--figures", type=Path, help="folder for the panels of Figure 2")
    options = parser.parse_args(arguments)

    config = record.read(options.run)["config"]
    network = CapsuleNetwork.load(options.run, options.device)
    training, test = (
        load(config["data"], split=split, path=options.path or config["data_path"])
        for split in ("train", "test")
    )
    if test.labels is None:
        parser.error(f"the test images of {config['data']} have no labels")
    reference = background(training.batches(1000))
    classifier = load_classifier(config["data"], options.device)
    images = torch.cat(list(test.batches(1000))).to(options.device)
    labelled = (images, torch.from_numpy(test.labels))
    generator = torch.Generator(options.device).manual_seed(options.seed)
    result: dict[str, Any] = {
        "run": options.name or options.run.name,
        "data": config["data"],
        "draws_per_expert": options.draws,
        "seed": options.seed,
        "training_seconds": training_seconds(options.run),
        "device": record.read(options.run)["starts"][-1].get("device"),
        "sign_flips": asdict(sign_flips(network, reference, options.draws, generator)),
        "domains": {
            domain: asdict(
                draw_metrics(
                    network, domain, classifier, reference, labelled, options.draws, generator
                )
            )
            for domain in DOMAINS
        },
    }
    print(json.dumps(nan_to_none(result), indent=2))
    if options.json is not None:
        others = json.loads(options.json.read_text()) if options.json.is_file() else []
        others = [other for other in others if other["run"] != result["run"]]
        machine.write([*others, nan_to_none(result)], options.json)
    if options.figures is not None:
        for domain in DOMAINS:
            path = options.figures / f"{options.run.name}-{domain}.png"
            print(figure(network, domain, path, options.seed))


if __name__ == "__main__":
    main()
