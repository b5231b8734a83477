"""The claims of the paper, one number each, measured on a trained run; and its Figure 2, not picked.

`poecaps train --preset paper --data mnist --data-path FOLDER --out RUN`, then
`python -m benchmarks.claims RUN --path FOLDER --json FILE --figures PICTURES`, which adds the run to FILE.

Figure 2 is 20 columns (experts) of 4 draws, in the complete domain (2a, 2c) and in the restricted one (2b, 2d).
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from poecaps import CapsuleNetwork, plotting
from poecaps import functional as F
from poecaps._files import atomic_write
from poecaps.data import load
from poecaps.evaluation import Background, background, load_classifier, measures
from poecaps.evaluation.protocol import without_nan
from poecaps.training import record

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from poecaps.code_density import Domain
    from poecaps.evaluation import Classifier

ROWS = 4
DRAWS = 500  # of each expert


@dataclass(frozen=True)
class Flips:
    """What happens to draws x of the complete domain when x is replaced by −x."""

    negatives: float
    """Share of the draws that are negatives."""
    of_opposites: float
    """Share of their opposites that are."""
    cured: float | None
    """Share of the negatives whose opposite is none; None if there are none."""
    flipped: float | None
    """Share of the others whose opposite is a negative; None if there are none."""


@dataclass(frozen=True)
class Objects:
    """How much experts draw objects, in one domain."""

    recognisable: float
    """Share of the draws that the classifier is sure of."""
    purity: float
    """Share of an expert's most frequent verdict, mean over experts."""
    classes: float
    """Effective number of classes among all draws."""
    negatives: float | None
    """Share of the draws that are negatives."""
    variation: dict[str, float]
    """Spread of each property within an expert's most frequent verdict, as a share of that within the class."""


@torch.no_grad()
def flips(network: CapsuleNetwork, of: Background, draws: int, generator: torch.Generator) -> Flips:
    """Draw from every expert in the complete domain, and from the opposite point."""
    experts, _ = network.architecture.experts[-1]
    here, there = [], []
    for expert in range(experts):
        for count in _parts(draws):
            z = network.code_density.sample(count, "complete", expert, generator)
            here.append(measures.are_negatives(network.decode(F.squash(z)), of))
            there.append(measures.are_negatives(network.decode(F.squash(-z)), of))
    first, second = torch.cat(here), torch.cat(there)

    def share(truth: Tensor) -> float | None:
        return truth.double().mean().item() if len(truth) else None

    return Flips(
        negatives=share(first) or 0.0,
        of_opposites=share(second) or 0.0,
        cured=share(~second[first]),
        flipped=share(second[~first]),
    )


@torch.no_grad()
def objects(
    network: CapsuleNetwork,
    domain: Domain,
    judge: Classifier,
    of: Background,
    test: tuple[Tensor, Tensor],
    draws: int,
    generator: torch.Generator,
) -> Objects:
    """Draw equally often from every expert, and judge."""
    experts, _ = network.architecture.experts[-1]
    drawn = [
        torch.cat(
            [
                network.generate(count, domain, expert=expert, generator=generator)
                for count in _parts(draws)
            ]
        )
        for expert in range(experts)
    ]
    everything = torch.cat(drawn)
    judged = judge.judge(everything)
    verdicts = judged.verdicts.view(experts, draws)
    return Objects(
        recognisable=measures.recognisability(judged.probabilities).share,
        purity=measures.purity(verdicts).mean,
        classes=measures.diversity(judged.verdicts).classes,
        negatives=measures.negatives(everything, of).share,
        variation=asdict(measures.variation(drawn, verdicts, *test)),
    )


def figure(network: CapsuleNetwork, domain: Domain, path: Path, seed: int = 0) -> Path:
    """Draw one panel of Figure 2."""
    generator = torch.Generator(next(network.parameters()).device).manual_seed(seed)
    experts, _ = network.architecture.experts[-1]
    with torch.no_grad():
        draws = [
            network.generate(ROWS, domain, expert=expert, generator=generator)
            for expert in range(experts)
        ]
    return plotting.expert_grid(
        torch.stack(draws, 1), path, title=f"Domain {domain}: {ROWS} draws of each expert"
    )


def training_seconds(run: Path) -> float | None:
    """Tell how long a run took from its start to its end, if it did so in one go."""
    about = record.read(run)
    if len(about["starts"]) != 1 or not about.get("finished"):
        return None
    begin, end = (
        datetime.fromisoformat(time) for time in (about["starts"][0]["time"], about["finished"])
    )
    return (end - begin).total_seconds()


def _parts(count: int) -> list[int]:
    return [min(250, count - start) for start in range(0, count, 250)]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, draw, print and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "run", type=Path, help="folder of a trained run on mnist or fashion-mnist, or their samples"
    )
    parser.add_argument("--path", help="folder that holds the full set (default: as in the run)")
    parser.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu", help="(default: a GPU)"
    )
    parser.add_argument(
        "--draws", type=int, default=DRAWS, help=f"of each expert (default: {DRAWS})"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the draws (default: 0)")
    parser.add_argument(
        "--name", help="what the run is called in the file (default: as its folder)"
    )
    parser.add_argument("--json", type=Path, help="file that the numbers are added to")
    parser.add_argument("--figures", type=Path, help="folder for the two panels of Figure 2")
    options = parser.parse_args(arguments)

    config = record.read(options.run)["config"]
    network = CapsuleNetwork.load(options.run, options.device)
    training, test = (
        load(config["data"], split=split, path=options.path or config["data_path"])
        for split in ("train", "test")
    )
    if test.labels is None:
        parser.error(f"the test images of {config['data']} have no labels")
    of = background(training.batches(1000))
    judge = load_classifier(config["data"], options.device)
    images = torch.cat(list(test.batches(1000))).to(options.device)
    labelled = (images, torch.from_numpy(test.labels))
    generator = torch.Generator(options.device).manual_seed(options.seed)
    domains: tuple[Domain, ...] = ("complete", "restricted", "learned")
    found: dict[str, Any] = {
        "run": options.name or options.run.name,
        "data": config["data"],
        "draws": options.draws,
        "seed": options.seed,
        "training_seconds": training_seconds(options.run),
        "device": record.read(options.run)["starts"][-1].get("device"),
        "flips": asdict(flips(network, of, options.draws, generator)),
        "objects": {
            domain: asdict(objects(network, domain, judge, of, labelled, options.draws, generator))
            for domain in domains
        },
    }
    text = json.dumps(without_nan(found), indent=2)
    print(text)
    if options.json is not None:
        others = json.loads(options.json.read_text()) if options.json.is_file() else []
        others = [each for each in others if each["run"] != found["run"]]
        with atomic_write(options.json) as file:
            file.write((json.dumps([*others, without_nan(found)], indent=1) + "\n").encode())
    if options.figures is not None:
        for domain in domains:
            print(
                figure(
                    network,
                    domain,
                    options.figures / f"{options.run.name}-{domain}.png",
                    options.seed,
                )
            )


if __name__ == "__main__":
    main()
