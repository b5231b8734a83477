"""The command `evaluate`."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path  # noqa: TC003 (tyro reads the annotations)
from typing import Annotated

from tyro.conf import Positional  # noqa: TC002 (tyro reads the annotations)

from poecaps import _checks as checks
from poecaps import card, evaluation, models
from poecaps._files import write_json
from poecaps._modules import device_of
from poecaps._progress import Counter
from poecaps.cli.loading import load_parts, open_model, training_source
from poecaps.cli.options import Data, DataPath, Device, Model, output
from poecaps.cli.outputs import default_output, say, write_card


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
    dataset = data.removesuffix("-sample")
    classifier = evaluation.load_classifier(dataset) if dataset in evaluation.CLASSIFIERS else None
    result = evaluation.evaluate(
        network,
        parts.train,
        parts.test,
        classifier,
        seed=seed,
        samples=samples,
        device=device_of(network),
        report=Counter("evaluating", None),
    )
    if parts.note:
        result = replace(result, notes=(*result.notes, parts.note))
    say(result.table())
    write_json(out, json.loads(result.to_json()))
    say(f"written to {out}")
    folder = models.find(run)
    if out.resolve() == (folder / card.MEASURED).resolve():
        write_card(network, folder, draw=not (folder / card.PICTURE).is_file())
