"""Compare the criteria that choose the best of several encoders without labels.

`python -m benchmarks.criteria --data mnist --path FOLDER --seeds 0,1,2 --json FILE` trains several
encoders at the same time (`encoder.restarts`) for each variant below, and adds a row to FILE for
each: the scores of every encoder by all criteria, and how well its most active experts agree with
the labels of images that were not trained on. `--table FILE` prints FILE as tables, one for
encoders with as many experts as classes, by accuracy, and one for those with more, by purity:

all, best        Mean and largest accuracy (or purity) of the encoders.
by …             That of the encoder with the highest score by a criterion.
rank …           Rank correlation of the scores by a criterion and of it, from −1 to 1.
NMI              Of the encoder with the highest agreement.
ARI              Its adjusted Rand index, for encoders that were dropped or recombined on the way.

With `--compare 3`, the encoders are also compared after 1/8, 1/4 and 1/2 of the steps, where three
halvings would drop the worse half of them. A further table says how well an early comparison
predicts the end. With `--balance-rate 0`, the balance of recombined encoders moves at another rate
than that of poecaps: write these rows to a FILE of their own.

By default, the last 10,000 training images are left out of the training and measured on: a
criterion is an option like others, and must not be chosen on test images. With `--on test`, the
encoders are measured on the test images, too. Only the autoencoder and the encoder are trained.
The energy of held-out images needs no labels either, and is compared with the criteria of poecaps.
"""

from __future__ import annotations

import statistics
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from benchmarks import variants
from benchmarks.internals import balance_rate, halvings_without_drops, starts_observed
from benchmarks.variants import WITHOUT, Job, Variant, class_variants, lookup, preset_with
from poecaps import functional as F
from poecaps._modules import device_of, in_batches
from poecaps.evaluation import clustering
from poecaps.training.config import CRITERIA, Criterion

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Mapping, Sequence

    from torch import Tensor

    from poecaps import CapsuleExperts, CapsuleNetwork
    from poecaps.data import ImageSet
    from poecaps.training import Config

HELD_OUT = 10_000
RESTARTS = 8
CLASSES = 10  # of the digits, and of the clothes

restarts_with = partial(
    preset_with,
    "default",
    model__pixel_decoder=False,
    decoder__epochs=0,
    pixel_decoder__epochs=0,
    encoder__restarts=RESTARTS,
)
HELD_OUT_ENERGY = "held-out energy"  # minus the mean free energy of held-out images
SCORES = (*CRITERIA, HELD_OUT_ENERGY)
CHOSEN: Criterion = "agreement"  # in the tables, and where encoders are dropped on the way
STUDY: dict[str, Variant] = class_variants(restarts_with, WITHOUT)


for _name, _part, _changes in (
    ("4 views", "batches of 512, 12 encoders", {"batch_size": 512, "encoder.restarts": 12}),
    (
        "4 views",
        "batches of 512, 20 epochs, 32 encoders",
        {
            "batch_size": 512,
            "encoder.epochs": 20,
            "encoder.restarts": 32,
            "encoder.halvings": 4,
        },
    ),
    (
        "4 small views, no routing",
        "batches of 256, 32 encoders",
        {"batch_size": 256, "encoder.restarts": 32, "encoder.halvings": 4},
    ),
):
    _base = STUDY[f"10 experts of 32, {_name}"]
    STUDY[f"10 experts of 32, {_name}, {_part}"] = replace(
        _base, changes={**_base.changes, **_changes, "encoder.criterion": CHOSEN}
    )

# Batches of the size with which twenty experts failed before this implementation.
_base = STUDY["20 experts of 16, 4 views"]
STUDY["20 experts of 16, 4 views, encoder batches of 256"] = replace(
    _base, changes={**_base.changes, "encoder.batch_size": 256}
)

# With recombinations. Small views are for clothes, whose encoders learn from smaller batches.
BATCHES = {"4 views": 512, "4 small views": 256}
for _name in ("10 experts of 32", "20 experts of 16"):
    for _kind, _batch in BATCHES.items():
        for _part in ("", ", no routing"):
            _base = STUDY[f"{_name}, {_kind}{_part}"]
            _label = f"encoder batches of {_batch}, 16 encoders"
            STUDY[f"{_name}, {_kind}{_part}, {_label}"] = replace(
                _base,
                changes={
                    **_base.changes,
                    "encoder.batch_size": _batch,
                    "encoder.restarts": 16,
                    "encoder.recombinations": 8,
                    "encoder.criterion": CHOSEN,
                },
            )


def config_of(job: Job) -> Config:
    """Return the options of a run."""
    config, restarts = variants.with_filters(job.config(STUDY), job.options), job.options.restarts
    if restarts is None:
        return config
    return replace(config, encoder=replace(config.encoder, restarts=restarts))


def run(job: Job) -> dict[str, Any]:
    """Train and measure, and return the row."""
    config, compare = config_of(job), job.options.compare
    training, images = variants.load_images(job.options)
    parts, held_out = {"": images}, variants.held_out_images(job.options)
    if held_out is not None:
        parts = {"": held_out, "test_": images}
    measured: dict[str, list[dict[str, float]]] = {}
    energies: list[float] = []

    def observe(network: CapsuleNetwork, starts: Sequence[CapsuleExperts]) -> None:
        for part, each in parts.items():
            measured[part] = agreement_with_labels(network, starts, each)
        if job.options.held_out:
            energies.extend(mean_energies(network, starts, parts[""]))

    with ExitStack() as stack:
        folder = stack.enter_context(job.folder())
        stack.enter_context(starts_observed(observe))
        if (rate := job.options.balance_rate) is not None:
            stack.enter_context(balance_rate(rate))
        compared = config
        if compare:
            stack.enter_context(halvings_without_drops())
            compared = replace(config, encoder=replace(config.encoder, halvings=compare))
        network, trained = variants.train_and_time(compared, folder, training)
        row = job.row(config) | variants.protocol_of(job.options) | trained
        if network is None:
            return row
        (selection,) = variants.read_selections(folder).values()
    scores: dict[str, list[float]] = selection["scores"]
    if energies:
        scores[HELD_OUT_ENERGY] = energies
    row |= {"scores": scores} | ({} if rate is None else {"balance_rate": rate})
    for part, found in measured.items():
        row |= {f"{part}starts": found, f"{part}summary": summarise(scores, found)}
    for name in ("halvings", "recombinations"):
        if selection[name]:
            row |= {"numbers": selection["starts"], name: selection[name]}
    return row


@torch.no_grad()
def agreement_with_labels(
    network: CapsuleNetwork, starts: Sequence[CapsuleExperts], images: ImageSet
) -> list[dict[str, float]]:
    """Compare the most active expert of images with their labels, for each encoder.

    The encoders read the input capsules of the network: they are its lowest layer.
    """
    assert images.labels is not None  # noqa: S101 (the study is of labelled images)
    labels = torch.from_numpy(images.labels.astype("int64"))

    def experts(x: Tensor) -> Tensor:
        log_odds = [F.log_odds(each.route(x).preactivation) + each.balance for each in starts]
        return torch.stack([each.argmax(1) for each in log_odds], dim=1)

    found = in_batches(experts, capsules(network, images)).unbind(1)
    compared = [clustering(each, labels) for each in found]
    return [
        {
            "accuracy": each.accuracy,
            "nmi": each.normalised,
            "ari": each.adjusted_rand,
            "purity": each.purity,
        }
        for each in compared
    ]


@torch.no_grad()
def mean_energies(
    network: CapsuleNetwork, starts: Sequence[CapsuleExperts], images: ImageSet
) -> list[float]:
    """Return minus the mean free energy of images, for each encoder."""

    def energies(x: Tensor) -> Tensor:
        return torch.stack([-each.free_energy(x) for each in starts], dim=1)

    found: list[float] = in_batches(energies, capsules(network, images)).double().mean(0).tolist()
    return found


def capsules(network: CapsuleNetwork, images: ImageSet) -> Iterator[Tensor]:
    """Yield the input capsules of images in batches: (B, I, K)."""
    device = device_of(network)
    return (network.capsules(batch.to(device)) for batch in images.batches(500))


def summarise(
    scores: Mapping[str, Sequence[float]], starts: Sequence[Mapping[str, float]]
) -> dict[str, dict[str, Any]]:
    """Return, for each measure, what each criterion chooses, and how its scores are ordered.

    Parameters
    ----------
    scores
        Of each criterion, one for each encoder.
    starts
        Measures of the encoders, by their names.
    """
    return {
        measure: _summary(scores, [start[measure] for start in starts]) for measure in starts[0]
    }


def _summary(scores: Mapping[str, Sequence[float]], values: Sequence[float]) -> dict[str, Any]:
    """Summarise one measure of the encoders."""
    by = {
        name: values[max(range(len(each)), key=each.__getitem__)] for name, each in scores.items()
    }
    rank = {name: rank_correlation(each, values) for name, each in scores.items()}
    return {"all": sum(values) / len(values), "best": max(values), "by": by, "rank": rank}


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Compute the correlation of the ranks (Spearman); 0 if all numbers of one are equal."""
    ranks = torch.stack([_ranks(torch.tensor(each).double()) for each in (first, second)])
    centred = ranks - ranks.mean(1, keepdim=True)
    scale = centred.square().sum(1).prod().sqrt()
    return (centred.prod(0).sum() / scale).item() if scale > 0 else 0.0


def _ranks(values: Tensor) -> Tensor:
    """Return how many numbers are smaller, and half of those that are equal: (N,)."""
    rows, columns = values.unsqueeze(1), values.unsqueeze(0)
    return (columns < rows).double().sum(1) + (columns == rows).double().sum(1) / 2


def columns(measure: str, scores: Sequence[str] = SCORES) -> variants.Columns:
    """Return the columns of a table by a measure of `summarise`, with these scores."""
    path = f"summary.{measure}"
    return {
        "all": (f"{path}.all", ".3f"),
        "best": (f"{path}.best", ".3f"),
        **{f"by {name}": (f"{path}.by.{name}", ".3f") for name in scores},
        **{f"rank {name}": (f"{path}.rank.{name}", ".2f") for name in scores},
        "NMI": (f"summary.nmi.by.{CHOSEN}", ".3f"),
    }


def measure_of(name: str) -> str:
    """Return the measure by which encoders of a variant are compared.

    With more experts than classes, most of them have no class in a matching.
    """
    ((experts, _),) = STUDY[name].config().model.experts
    return "accuracy" if experts <= CLASSES else "purity"


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Format rows as Markdown tables; see `by_measure`, `many` and `early`."""
    tables = [by_measure(rows, measure) for measure in ("accuracy", "purity")]
    tables += [many(rows), early(rows)]
    return "\n\n".join(each for each in tables if each.count("\n") > 1)  # those with lines


def by_measure(rows: Sequence[Mapping[str, Any]], measure: str) -> str:
    """Format what each criterion chooses from encoders of which none was dropped.

    See `benchmarks.variants.table`.
    """
    names = {name: name for name in STUDY if measure_of(name) == measure and not _on_the_way(name)}
    measured = [row for row in rows if row["variant"] in names and "summary" in row]
    known = [row["summary"][measure]["by"] for row in measured]
    scores = [name for name in SCORES if any(name in by for by in known)]
    return variants.table(rows, names, columns(measure, scores), f"encoder, {measure}")


def many(rows: Sequence[Mapping[str, Any]]) -> str:
    """Format what is kept of encoders that were dropped or recombined on the way."""
    names = {name: name + _on_the_way(name) for name in STUDY if _on_the_way(name)}
    measures = {
        "accuracy": ("accuracy", ".4f"),
        "NMI": ("nmi", ".3f"),
        "ARI": ("ari", ".3f"),
        "purity": ("purity", ".4f"),
    }
    kept = {
        f"{part}{heading}": (f"{part.replace(' ', '_')}summary.{measure}.by.{CHOSEN}", form)
        for part in ("", "test ")
        for heading, (measure, form) in measures.items()
    }
    return variants.table(rows, names, kept, "encoder")


def _on_the_way(name: str) -> str:
    """Describe how the encoders of a variant change on the way; empty if they do not."""
    options = STUDY[name].config().encoder
    changes = {"halvings": options.halvings, "recombinations": options.recombinations}
    return "".join(f", {count} {what}" for what, count in changes.items() if count)


def compared_all(row: Mapping[str, Any]) -> bool:
    """Return whether the encoders of a row were compared on the way, and none was dropped."""
    return any(each["starts"] == row["numbers"] for each in row.get("halvings", [])[-1:])


def early(rows: Sequence[Mapping[str, Any]]) -> str:
    """Format how the scores of encoders on the way are related to those at the end.

    Each cell is the rank correlation of the scores by a criterion after so many steps with the
    scores at the end, and with the accuracy (or purity) at the end.
    """
    lines = [
        f"| encoder | seed | steps | {' | '.join(f'{name}, accuracy' for name in CRITERIA)} |",
        f"| --- | --- | ---: |{' ---: |' * len(CRITERIA)}",
    ]
    for row in filter(compared_all, rows):
        measured = [start[measure_of(row["variant"])] for start in row["starts"]]
        for comparison in row["halvings"]:
            cells = []
            for name in CRITERIA:
                scores = comparison["scores"].get(name)
                ends = () if scores is None else (row["scores"][name], measured)
                ranks = [f"{rank_correlation(scores, end):.2f}" for end in ends]
                cells.append(", ".join(ranks) or "–")
            head = f"{row['variant']} | {row['seed']} | {comparison['step']}"
            lines.append(f"| {head} | {' | '.join(cells)} |")
    return "\n".join(lines)


def effects(rows: Sequence[Mapping[str, Any]], views: str) -> str:
    """Format what each measured part contributes to the accuracy and NMI of ten experts.

    Numbers are means over the encoders of a seed, and then over the seeds. The gain has two
    standard errors: with several seeds, those of the mean difference between equal seeds; with one,
    those of the difference between the means of its encoders, which are compared as independent.
    The row of the restarts compares the encoder with the highest agreement with the mean; with one
    seed, it has no error.

    Parameters
    ----------
    rows
        Of all variants and seeds.
    views
        Name of the views, ``"4 views"`` or ``"4 small views"``.
    """
    lines = [
        "| part | seeds | accuracy without | with | gain | NMI without | with | gain |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for part in PARTS:
        found = [part_pairs(rows, views, part, measure) for measure in ("accuracy", "nmi")]
        if all(found):
            cells = [text for pairs in found for text in _gain_cells(pairs, part)]
            lines.append(f"| {part} | {len(found[0])} | {' | '.join(cells)} |")
    return "\n".join(lines)


CHOICE = "best of several encoders"
PARTS = ("views", *(name.removeprefix("no ") for name in WITHOUT), CHOICE)


class SeedPair(NamedTuple):
    """A measure of the encoders of two variants with the same seed."""

    without: float
    """Of the variant without a part: the mean over its encoders."""
    full: float
    """Of the variant with it: the mean, or that of the encoder that is chosen."""
    starts: tuple[Sequence[float], Sequence[float]]
    """Of each encoder of both variants."""


def part_pairs(
    rows: Sequence[Mapping[str, Any]], views: str, part: str, measure: str
) -> list[SeedPair]:
    """Return a measure of ten experts without and with a part, for each seed that has both.

    Parameters
    ----------
    rows
        Of all variants and seeds.
    views
        Name of the views, ``"4 views"`` or ``"4 small views"``.
    part
        One of `PARTS`.
    measure
        A measure of `summarise`.
    """
    whole = f"10 experts of 32, {views}"
    other = {"views": "10 experts of 32", CHOICE: whole}.get(part, f"{whole}, no {part}")
    sides = ((other, "all"), (whole, f"by.{CHOSEN}" if part == CHOICE else "all"))
    found: list[dict[int, tuple[float, Sequence[float]]]] = []
    for name, path in sides:
        each: dict[int, tuple[float, Sequence[float]]] = {}
        for row in rows:
            value = lookup(row, f"summary.{measure}.{path}") if row["variant"] == name else None
            if value is not None:
                each[row["seed"]] = value, [start[measure] for start in row["starts"]]
        found.append(each)
    first, second = found
    return [
        SeedPair(first[seed][0], second[seed][0], (first[seed][1], second[seed][1]))
        for seed in sorted(first.keys() & second.keys())
    ]


def part_gain(rows: Sequence[Mapping[str, Any]], views: str, part: str, measure: str) -> str:
    """Format what a part gives to ten experts; for the arguments, see `part_pairs`."""
    return gain(part_pairs(rows, views, part, measure), part)


def gain(pairs: Sequence[SeedPair], part: str) -> str:
    """Format the mean difference of a part, with two standard errors if these are known."""
    differences = [pair.full - pair.without for pair in pairs]
    text, error = f"{statistics.mean(differences):+.3f}", None
    if len(pairs) > 1:
        error = statistics.stdev(differences) / len(pairs) ** 0.5
    elif part != CHOICE:  # the means of independent encoders
        error = sum(statistics.variance(each) / len(each) for each in pairs[0].starts) ** 0.5
    return text if error is None else f"{text} ± {2 * error:.3f}"


def _gain_cells(pairs: Sequence[SeedPair], part: str) -> list[str]:
    """Format the means of two numbers, and that of their difference."""
    before = statistics.mean(pair.without for pair in pairs)
    after = statistics.mean(pair.full for pair in pairs)
    return [f"{before:.3f}", f"{after:.3f}", gain(pairs, part)]


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = variants.make_parser(__doc__)
    variants.add_protocol(parser, HELD_OUT)
    variants.add_filters(parser)
    parser.add_argument(
        "--restarts", type=int, help="encoders of a row (default: those of the variant)"
    )
    parser.add_argument(
        "--compare",
        type=int,
        default=0,
        help="comparisons of the encoders on the way, without drops (default: 0)",
    )
    parser.add_argument(
        "--balance-rate",
        type=float,
        help="rate at which the balance of recombined encoders moves (default: that of poecaps)",
    )
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Train and measure the requested variants, or print a file as a table."""
    variants.run_study(make_parser(), arguments, STUDY, run, table)


if __name__ == "__main__":
    main()
