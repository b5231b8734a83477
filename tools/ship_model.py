"""Add the model of a training run to the package, in half precision, with a model card.

Run as: python tools/ship_model.py RUN NAME

Then `poecaps generate NAME` and `poecaps.load("NAME")` find it. The record of the run is copied
without paths and other information about the machine. RUN/evaluation.json is copied if it exists,
and the card shows its numbers.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from poecaps import CapsuleNetwork, ModelError, hub, models
from poecaps._json import dataclass_from_json
from poecaps.code_density import DOMAINS
from poecaps.data import datasets
from poecaps.training import Config, record

if TYPE_CHECKING:
    from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Ship a run, print its files and their sizes, and return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, help="folder of a finished run on a known data set")
    parser.add_argument("name", help="name of the model, such as mnist")
    options = parser.parse_args(arguments)
    try:
        folder = ship(options.run, options.name)
    except (ValueError, OSError) as error:
        print(f"ship_model: {error}", file=sys.stderr)
        return 1
    for file in sorted(folder.iterdir()):
        print(f"{file.stat().st_size:12,}  {file}")
    return 0


def ship(run: Path, name: str) -> Path:
    """Write the folder of a shipped model, and return it.

    Raises
    ------
    ValueError
        If the run is not finished, was trained on images that are not a known data set, or has
        weights that are too large for float16; or if the name is invalid.
    """
    if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", name):
        raise ValueError(
            f"the name must consist of small letters, digits and hyphens, but is {name!r}"
        )
    network, about = CapsuleNetwork.load(run), record.read(run)
    if not about.get("finished"):
        raise ModelError(f"{run} is not finished")
    config = dataclass_from_json(Config, about["config"])
    if config.data not in datasets.NAMES:
        raise ValueError(
            f"{run} was trained on {config.data}, but must be trained on one of "
            f"{', '.join(datasets.NAMES)}"
        )
    with tempfile.TemporaryDirectory() as trial:
        network.save(trial, half=True)
        _check_images(CapsuleNetwork.load(trial), run)
    folder = models.FOLDER / name
    if folder.is_dir():
        shutil.rmtree(folder)
    hub.write_repository(
        network, folder, run=run, name=name, half=True, licence="mit", shipped=True
    )
    return folder


@torch.no_grad()
def _check_images(network: CapsuleNetwork, run: Path) -> None:
    """Raise ModelError if a model, rounded and loaded again, does not generate valid images."""
    for domain in DOMAINS:
        images = network.generate(20, domain, generator=torch.Generator().manual_seed(0))
        if not bool(((images >= 0) & (images <= 1)).all()):
            raise ModelError(
                f"{run} in half precision generates pixels outside 0…1 in the domain {domain}"
            )


if __name__ == "__main__":
    sys.exit(main())
