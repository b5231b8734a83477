"""The command `evaluate`."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path  # noqa: TC003 (tyro reads the annotations)
from typing import TYPE_CHECKING, Annotated

import numpy as np
import torch
from tyro.conf import Positional  # noqa: TC002 (tyro reads the annotations)

from poecaps import _checks as checks
from poecaps import card, evaluation, models
from poecaps._files import write_json
from poecaps._modules import device_of
from poecaps._progress import Counter
from poecaps.cli.loading import load_parts, open_model, training_source
from poecaps.cli.options import Data, DataPath, Device, Model, output
from poecaps.cli.outputs import default_output, say, write_card
from poecaps.data import DataError
from poecaps.evaluation.judge import is_labelled
from poecaps.evaluation.protocol import FEWEST_IMAGES
from poecaps.serialization import has_half_precision

if TYPE_CHECKING:
    from poecaps.cli.loading import Parts


def evaluate(
    run: Positional[Model],
    *,
    data: Data = None,
    data_path: DataPath = None,
    samples: int = 10_000,
    seed: int = 0,
    out: Annotated[Path | None, output("JSON file", "RUN/evaluation.json")] = None,
    device: Device = "auto",
) -> None:
    """Evaluate a model with a fixed protocol; print a table and write JSON.

    The protocol measures how well a linear classifier predicts the labels from the codes, how
    close samples are to test images, how many samples are recognisable, and how specialised the
    experts are. docs/evaluation.md defines every metric. The model card (README.md in the folder of
    the run) shows the results.

    Without test images in the data, those that training has held out are used: a tenth of a folder.
    With --data, a folder or file of test images can be given.

    Samples of mnist and fashion-mnist are judged by a classifier of the package. For other data
    with labels, a classifier is trained on the training images first. Measures in random features
    need no classifier.

    Parameters
    ----------
    samples
        Images drawn from each domain.
    seed
        Random seed; the same seed gives the same results.
    """
    checks.require_int("samples", samples, 2)
    checks.require_int("seed", seed, 0, 2**63 - 1)
    out = out or default_output(run, "evaluation.json")
    if out.suffix.lower() != ".json":
        raise ValueError(f"--out must name a .json file, but is {out}")
    network = open_model(run, device)
    if data is None:
        data, data_path = training_source(run, data_path)
    parts = load_parts(network, run, data, data_path)
    _require_enough(parts)
    judge = _judge(data, parts, seed, device_of(network))
    result = evaluation.evaluate(
        network,
        parts.train,
        parts.test,
        judge.classifier,
        seed=seed,
        samples=samples,
        device=device_of(network),
        report=Counter("evaluating", None),
    )
    notes = tuple(note for note in (judge.note, parts.note) if note)
    result = replace(result, notes=(*result.notes, *notes))
    folder = models.find(run)
    if has_half_precision(folder):
        result = result.with_metadata(half=True)
    say(result.table())
    write_json(out, json.loads(result.to_json()))
    say(f"written to {out}")
    if out.resolve() == (folder / card.MEASURED).resolve():
        write_card(network, folder, draw=not (folder / card.PICTURE).is_file())


def _require_enough(parts: Parts) -> None:
    """Raise `DataError` if there are too few images, before a classifier is trained."""
    for kind, images in (("training", parts.train), ("test", parts.test)):
        if len(images) < FEWEST_IMAGES:
            raise DataError(
                f"evaluate needs at least {FEWEST_IMAGES} {kind} images, but has {len(images)} of "
                f"{images.source}"
            )


@dataclass(frozen=True)
class _Judge:
    """The classifier of samples, if there can be one, and what a reader should know about it."""

    classifier: evaluation.Classifier | None
    note: str = ""


def _judge(data: str, parts: Parts, seed: int, device: torch.device) -> _Judge:
    """Return the classifier of the package for these data, or one trained on their labels."""
    dataset = data.removesuffix("-sample")
    if dataset in evaluation.CLASSIFIERS:
        return _Judge(evaluation.load_classifier(dataset))
    train, test = parts.train, parts.test
    if train.labels is None or test.labels is None:
        return _Judge(None)
    if not is_labelled(train) or not np.isin(test.labels, train.labels).all():
        return _Judge(
            None,
            "no classifier judges the samples: the labels are not those of two classes or more, "
            "counted from 0, that training and test images share",
        )
    classifier = evaluation.train_classifier(
        train, seed=seed, device=device, report=Counter("training a classifier")
    )
    predicted = [classifier.predict(batch.to(device)).labels.cpu() for batch in test.batches(1000)]
    accuracy = (torch.cat(predicted).numpy() == test.labels).mean().item()
    classifier.metadata |= {"test_images": len(test), "test_accuracy": round(accuracy, 5)}
    note = (
        f"samples are judged by a classifier that was trained on the {len(train):,} training "
        f"images; it is right for {accuracy:.1%} of the test images"
    )
    return _Judge(classifier, note.replace("%", " %"))
