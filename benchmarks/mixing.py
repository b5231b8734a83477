"""Check the chains and the likelihood of a trained density against sceptical questions.

`python -m benchmarks.mixing --network RUN --json FILE` prints the answers. RUN is a run of the
preset `energy`, such as that of `make demo-energy`.

Do chains forget where they began?
    Chains begin at test images, equally many of each class, and a classifier names the class of
    their states over time. As the classes of the starts are balanced, chains that have forgotten
    them are in the class of their start in one of ten cases, whatever the probabilities of the
    classes. Tempered chains, and chains at the model alone, with the same steps.
    In the second half of the steps: split-R̂ and effective sample size of the free energy, of the
    leading components and of the indicators of the classes; the largest R̂ and the smallest size
    of each kind. As the starts are far apart, R̂ near 1 says more here than for chains that all
    begin at noise.
Are draws from noise those of chains that began at images?
    Shares of the classes in both, and half the sum of their absolute differences.
Is log Z right?
    Besides the usual two estimates, the reverse one from tempered draws that had no part in the
    forward chains.
Does the density overfit, and is it more likely than a Gaussian?
    Mean log-likelihood of training and of test images; and of Gaussians with other numbers of
    principal components, fitted to the same training images.
Are draws copies?
    Median distance to the nearest training image of a class, averaged over the classes, so that a
    class with simple images that is drawn more often does not make draws look like copies.
"""

from __future__ import annotations

import argparse
import math
import statistics
import warnings
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import poecaps
from benchmarks import machine
from benchmarks.baselines import limit
from poecaps import sampling
from poecaps._modules import in_batches
from poecaps.data import load
from poecaps.energy import GaussianBase
from poecaps.evaluation import load_classifier, measures
from poecaps.likelihood import estimate_log_partition
from poecaps.training.density import FIT_BATCH

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from poecaps import CapsuleNetwork
    from poecaps.data import ImageSet
    from poecaps.energy import CapsuleDensity
    from poecaps.evaluation import Classifier
    from poecaps.sampling import Samples

CLASSES = 10
COORDINATES = 10  # leading components of which R̂ is computed
MIN_STATES = 4  # of a chain, from which R̂ can be computed
ADAPTED = 100  # steps at the start, in which the step size is adapted
# Steps over which a table has the mean share of the first class
WINDOWS = ((0, 500), (500, 1000), (1000, 1500), (1500, 3000), (3000, 6000))


def classes_of(network: CapsuleNetwork, capsules: Tensor, classifier: Classifier) -> Tensor:
    """Return the most probable class of each decoded state: (B, I, K) → (B,)."""
    images = in_batches(partial(network.decode_whitened, tied=True), capsules)
    return classifier.predict(images).probabilities.argmax(1)


def balanced(images: ImageSet, per_class: int) -> Tensor:
    """Return the first images of each class: (10 · per_class, C, H, W).

    Raises
    ------
    ValueError
        If there are fewer of one class.
    """
    assert images.labels is not None  # noqa: S101 (the bundled sets and the full ones have labels)
    labels = torch.from_numpy(images.labels).long()
    rows = [torch.nonzero(labels == each).flatten()[:per_class] for each in range(CLASSES)]
    if min(map(len, rows)) < per_class:
        raise ValueError(f"--per-class must be at most {min(map(len, rows))}, but is {per_class}")
    return images.batch(torch.cat(rows))


@torch.no_grad()
def coordinates(density: CapsuleDensity, capsules: Tensor) -> Tensor:
    """Return the leading components of capsules, or else the first numbers: (B, I, K) → (B, C)."""
    if density.has_components:
        return density.components(capsules).flatten(1)[:, :COORDINATES]
    return capsules.flatten(1)[:, :COORDINATES]


def worst(traces: Sequence[Tensor]) -> dict[str, float]:
    """Return the largest R̂ and the smallest effective sample size of several traces (T, B).

    Traces that are constant, as that of a class in which no chain ever is, have neither; nor have
    those of fewer than four states.
    """
    varying = [trace.double() for trace in traces if bool((trace != trace[0, 0]).any())]
    if not varying or len(varying[0]) < MIN_STATES:
        return {"rhat": math.nan, "size": math.nan}
    rhat = [sampling.split_rhat(trace) for trace in varying]
    size = [sampling.effective_sample_size(trace) for trace in varying]
    # Chains that differ, but never change, have no variance within them: R̂ is infinite.
    return {
        "rhat": max(math.inf if math.isnan(each) else each for each in rhat),
        "size": min(size),
    }


@torch.no_grad()
def forgetting(
    network: CapsuleNetwork,
    start: Tensor,
    classifier: Classifier,
    *,
    steps: int,
    every: int,
    levels: int,
    seed: int,
) -> dict[str, Any]:
    """Run chains from capsules of images (B, I, K), and measure how they forget these.

    Parameters
    ----------
    levels
        Levels of the ladder of tempering; 0: chains at the model alone.
    """
    density = network.require_density()
    samples = sampling.sample(
        density,
        len(start),
        start=start,
        anneal=ADAPTED,
        steps=steps,
        ladder=sampling.tempering_ladder(levels) if levels else None,
        keep_every=every,
        generator=torch.Generator().manual_seed(seed),
    )
    found = torch.stack([classes_of(network, each, classifier) for each in samples.strip])
    first, after = found[0], found[ADAPTED // every :]  # states 0, every, … steps after ADAPTED
    second_half = slice(len(after) // 2, None)
    later = after[second_half]
    states = samples.strip[ADAPTED // every :][second_half]
    leading = torch.stack([coordinates(density, each) for each in states])
    energy = torch.stack([density.free_energy(each) for each in states])
    shares = torch.bincount(later.flatten(), minlength=CLASSES) / later.numel()
    return {
        "chains": len(start),
        "levels": levels,
        "acceptance": samples.acceptance,
        "swap_rate": min(samples.swap_rates, default=None),
        "steps": [every * index for index in range(len(after))],
        "in_first_class": (after == first).double().mean(1).tolist(),
        "states": later.numel(),
        "free energy": worst([energy]),
        "leading components": worst(list(leading.unbind(-1))),
        "classes": worst([later == each for each in range(CLASSES)]),
        "shares": shares.tolist(),
        "effective_classes": measures.diversity(later.flatten()).effective_classes,
    }


@torch.no_grad()
def from_noise(
    network: CapsuleNetwork, classifier: Classifier, samples: Samples, shares: list[float]
) -> dict[str, Any]:
    """Compare the classes of draws from noise with shares of chains that began at images."""
    predicted = classes_of(network, samples.capsules, classifier)
    found = torch.bincount(predicted, minlength=CLASSES) / len(predicted)
    return {
        "draws": len(predicted),
        "swap_rate": min(samples.swap_rates),
        "split_rhat": samples.split_rhat,
        "effective_sample_size": samples.effective_sample_size,
        "free_energies": samples.free_energy.numel(),
        "shares": found.tolist(),
        "effective_classes": measures.diversity(predicted).effective_classes,
        "difference": (found - torch.tensor(shares)).abs().sum().item() / 2,
    }


@torch.no_grad()
def log_partition(
    density: CapsuleDensity, draws: Tensor, temperatures: int, seed: int
) -> dict[str, Any]:
    """Estimate log Z twice: in reverse from the forward chains, and from other draws."""
    found = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the bracket is in the result
        for name, start in (("own ends", None), ("tempered draws", draws)):
            generator = torch.Generator().manual_seed(seed)
            estimate = estimate_log_partition(
                density, chains=len(draws), steps=temperatures, start=start, generator=generator
            )
            found[name] = asdict(estimate) | {"bracket": estimate.bracket}
    return found


@torch.no_grad()
def likelihoods(
    network: CapsuleNetwork, sets: dict[str, ImageSet], log_z: float
) -> dict[str, dict[str, float]]:
    """Measure the share of the base measure and of the experts in the log-likelihood, in nats."""
    density, found = network.require_density(), {}
    for name, images in sets.items():
        x = in_batches(network.whitened, images.batch(slice(None)))
        base, experts = density.base.log_ratio(x), -density.free_energy(x) - log_z
        found[name] = {
            "images": len(images),
            "base": base.mean().item(),
            "experts": experts.mean().item(),
            "error": experts.std().item() / len(images) ** 0.5,
        }
    return found


@torch.no_grad()
def gaussians(
    network: CapsuleNetwork, training: ImageSet, test: ImageSet, components: Sequence[int]
) -> dict[str, dict[str, float]]:
    """Measure the log-likelihood of Gaussians with so many principal components, in nats."""
    density, found = network.require_density(), {}
    known, new = (
        in_batches(network.whitened, images.batch(slice(None))) for images in (training, test)
    )
    for count in components:
        base = GaussianBase(density.in_capsules, density.in_dim, count)
        base.fit(known.split(FIT_BATCH))
        found[str(count)] = {
            name: in_batches(base.log_ratio, x).mean().item()
            for name, x in (("training", known), ("test", new))
        }
    return found


@torch.no_grad()
def nearest(
    network: CapsuleNetwork,
    capsules: dict[str, Tensor],
    training: ImageSet,
    classifier: Classifier,
) -> dict[str, dict[str, float]]:
    """Measure distances to the nearest training image, over all and as a mean over classes."""
    known, found = training.batch(slice(None)).flatten(1), {}
    for name, x in capsules.items():
        images = in_batches(partial(network.decode_whitened, tied=True), x).flatten(1)
        distance = torch.cat([torch.cdist(part, known).amin(1) for part in images.split(500)])
        predicted = classes_of(network, x, classifier)
        medians = [distance[predicted == each].median() for each in predicted.unique()]
        found[name] = {
            "all": distance.median().item(),
            "by_class": torch.stack(medians).mean().item(),
        }
    return found


def table(report: dict[str, Any]) -> str:
    """Format how chains forget their start as a Markdown table."""
    kinds = {name: report[name] for name in ("tempered", "alone")}
    rows = [["", *(LABELS[name] for name in kinds)]]
    for low, high in WINDOWS:
        inside = [
            [
                share
                for step, share in zip(each["steps"], each["in_first_class"], strict=True)
                if low <= step < high
            ]
            for each in kinds.values()
        ]
        if all(inside):
            label = f"in the class of their start, steps {low:,} to {high:,}"
            rows.append([label, *(f"{statistics.mean(shares):.0%}" for shares in inside)])
    for kind in ("free energy", "leading components", "classes"):
        for measure, label, form in (
            ("rhat", "split-R̂ of the {}", ".2f"),
            ("size", "effective sample size of the {}", ",.0f"),
        ):
            cells = (format(each[kind][measure], form) for each in kinds.values())
            rows.append([label.format(kind), *cells])
    rows.append(
        ["effective classes", *(f"{each['effective_classes']:.2f}" for each in kinds.values())]
    )
    rule = ["---", *(["---:"] * len(kinds))]
    lines = [rows[0], rule, *rows[1:]]
    return "\n".join(f"| {' | '.join(row)} |" for row in lines).replace("%", " %")


LABELS = {"tempered": "tempered chains", "alone": "chains at the model alone"}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, and write the JSON file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--network", required=True, help="folder of a run with a density")
    parser.add_argument("--data", default="mnist-sample", help="dataset of the network")
    parser.add_argument("--path", help="folder of that dataset, if it is a full one")
    parser.add_argument(
        "--per-class", type=int, default=4, help="chains of each class (default: 4)"
    )
    parser.add_argument("--steps", type=int, default=6000, help="of these chains (default: 6000)")
    parser.add_argument("--every", type=int, default=20, help="steps between states (default: 20)")
    parser.add_argument("--levels", type=int, default=20, help="of tempering (default: 20)")
    parser.add_argument("--draws", type=int, default=256, help="draws from noise (default: 256)")
    parser.add_argument(
        "--temperatures", type=int, default=500, help="of the likelihood (default: 500)"
    )
    parser.add_argument(
        "--components",
        type=int,
        nargs="+",
        default=[192, 1024, 2048, 4608],
        help="of Gaussians to compare with (default: 192 1024 2048 4608)",
    )
    parser.add_argument("--limit", type=int, help="maximum number of images of each set")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="file to write the numbers to")
    options = parser.parse_args(arguments)
    if options.every < 1 or ADAPTED % options.every:
        parser.error(f"--every must divide {ADAPTED}, but is {options.every}")

    network = poecaps.load(options.network)
    density = network.require_density()
    training, test = (
        limit(load(options.data, split=each, path=options.path), options.limit)
        for each in ("train", "test")
    )
    classifier = load_classifier(options.data, torch.device("cpu"))
    report: dict[str, Any] = {
        "command": machine.command("benchmarks.mixing", parser, options),
        "machine": machine.describe(torch.device("cpu")),
    }
    with torch.no_grad():
        start = network.whitened(balanced(test, options.per_class))
    chains = {"steps": options.steps, "every": options.every, "seed": options.seed}
    for name, levels in (("tempered", options.levels), ("alone", 0)):
        report[name] = forgetting(network, start, classifier, levels=levels, **chains)
    print(table(report), flush=True)
    generator = torch.Generator().manual_seed(options.seed)
    samples = sampling.draw(density, options.draws, levels=options.levels, generator=generator)
    report["from_noise"] = from_noise(network, classifier, samples, report["tempered"]["shares"])
    report["log_partition"] = log_partition(
        density, samples.capsules, options.temperatures, options.seed
    )
    log_z = report["log_partition"]["own ends"]["forward"]
    report["likelihood"] = likelihoods(network, {"training": training, "test": test}, log_z)
    report["gaussians"] = gaussians(network, training, test, options.components)
    count = min(options.draws, len(test))
    with torch.no_grad():
        images = network.whitened(test.batch(range(count)))
    report["nearest"] = nearest(
        network, {"draws": samples.capsules, "images": images}, training, classifier
    )
    for name in ("from_noise", "log_partition", "likelihood", "gaussians", "nearest"):
        print(name, report[name])
    machine.write(report, options.json)


if __name__ == "__main__":
    main()
