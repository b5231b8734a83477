"""Compare the criteria that choose the best of several encoders without labels.

`python -m benchmarks.criteria --data mnist --path FOLDER --seeds 0,1,2 --json FILE` trains several
encoders at the same time (`encoder.restarts`) for each variant below, and adds a row to FILE for
each: the scores of every encoder by all criteria, and how well its most active experts agree with
the labels of images that were not trained on. `--table FILE` prints FILE as a table:

all, best        Mean and largest accuracy of the encoders.
by …             Accuracy of the encoder with the highest score by a criterion.
rank …           Rank correlation of the scores by a criterion and the accuracies, from −1 to 1.

By default, the last 10,000 training images are left out of the training and measured on: a
criterion is an option like others, and must not be chosen on test images. Only the autoencoder and
the encoder are trained.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from benchmarks import variants
from benchmarks.internals import starts_observed
from benchmarks.variants import Job, Variant, preset_with
from poecaps import functional as F
from poecaps._modules import in_batches
from poecaps.evaluation import clustering
from poecaps.training.config import CRITERIA

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from poecaps import CapsuleExperts, CapsuleNetwork
    from poecaps.data import ImageSet

HELD_OUT = 10_000
RESTARTS = 8

restarts_with = partial(
    preset_with,
    "default",
    model__pixel_decoder=False,
    decoder__epochs=0,
    pixel_decoder__epochs=0,
    encoder__restarts=RESTARTS,
)
_TEN: dict[str, Any] = {"model__experts": ((10, 32),)}
_SMALL: dict[str, Any] = {
    "encoder__views__rotation": 8.0,
    "encoder__views__shift": 0.05,
    "encoder__views__scale": 0.08,
}

STUDY: dict[str, Variant] = {
    "10 experts of 32": restarts_with(**_TEN),
    "10 experts of 32, 4 views": restarts_with(**_TEN, encoder__views__count=4),
    "10 experts of 32, 4 small views": restarts_with(**_TEN, **_SMALL, encoder__views__count=4),
    "10 experts of 16, 4 small views": restarts_with(
        model__experts=((10, 16),), **_SMALL, encoder__views__count=4
    ),
    "20 experts of 16": restarts_with(),
    "20 experts of 16, 4 views": restarts_with(encoder__views__count=4),
    "20 experts of 16, 2 small views": restarts_with(**_SMALL, encoder__views__count=2),
}


def run(job: Job) -> dict[str, Any]:
    """Train and measure, and return the row."""
    config = job.config(STUDY)
    training, images = variants.load_images(job.options)
    measured: list[dict[str, float]] = []

    def observe(network: CapsuleNetwork, starts: Sequence[CapsuleExperts]) -> None:
        measured.extend(agreement_with_labels(network, starts, images))

    with job.folder() as folder, starts_observed(observe):
        network, trained = variants.train_and_time(config, folder, training)
        row = job.row(config) | variants.protocol_of(job.options) | trained
        if network is None:
            return row
        (selection,) = variants.read_selections(folder).values()
    scores: dict[str, list[float]] = selection["scores"]
    return row | {"scores": scores, "starts": measured, "summary": summarise(scores, measured)}


@torch.no_grad()
def agreement_with_labels(
    network: CapsuleNetwork, starts: Sequence[CapsuleExperts], images: ImageSet
) -> list[dict[str, float]]:
    """Compare the most active expert of images with their labels, for each encoder.

    The encoders read the input capsules of the network: they are its lowest layer.
    """
    device = starts[0].weight.device
    assert images.labels is not None  # noqa: S101 (the study is of labelled images)
    labels = torch.from_numpy(images.labels.astype("int64"))

    def experts(batch: Tensor) -> Tensor:
        x = network.capsules(batch.to(device))
        log_odds = [F.log_odds(each.route(x).preactivation) + each.balance for each in starts]
        return torch.stack([each.argmax(1) for each in log_odds], dim=1)

    found = in_batches(experts, images.batches(500)).unbind(1)
    compared = [clustering(each, labels) for each in found]
    return [
        {"accuracy": each.accuracy, "nmi": each.normalised, "purity": each.purity}
        for each in compared
    ]


def summarise(
    scores: Mapping[str, Sequence[float]], starts: Sequence[Mapping[str, float]]
) -> dict[str, Any]:
    """Return what each criterion chooses, and how its scores are ordered.

    Parameters
    ----------
    scores
        Of each criterion, one for each encoder.
    starts
        Accuracies of the encoders.
    """
    accuracy = [start["accuracy"] for start in starts]
    by = {
        name: accuracy[max(range(len(each)), key=each.__getitem__)] for name, each in scores.items()
    }
    rank = {name: rank_correlation(each, accuracy) for name, each in scores.items()}
    mean = sum(accuracy) / len(accuracy)
    return {"all": mean, "best": max(accuracy), "by": by, "rank": rank}


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


COLUMNS = {  # heading: path of the number in a row, format
    "all": ("summary.all", ".3f"),
    "best": ("summary.best", ".3f"),
    **{f"by {name}": (f"summary.by.{name}", ".3f") for name in CRITERIA},
    **{f"rank {name}": (f"summary.rank.{name}", ".2f") for name in CRITERIA},
}


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Format rows as a Markdown table; see `benchmarks.variants.table`."""
    return variants.table(rows, {name: name for name in STUDY}, COLUMNS, "encoder")


def main(arguments: Sequence[str] | None = None) -> None:
    """Train and measure the requested variants, or print a file as a table."""
    parser = variants.make_parser(__doc__)
    variants.add_protocol(parser, HELD_OUT)
    variants.run_study(parser, arguments, STUDY, run, table)


if __name__ == "__main__":
    main()
