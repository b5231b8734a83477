"""Put a trained run into the package, in half precision, with a model card and a record of how it was trained.

Run as: python tools/ship_model.py RUN NAME

Then `poecaps generate NAME` and `poecaps.load("NAME")` find it. Of the run's own record only what anybody could repeat
is kept: no paths, and the command is made anew from the options. RUN/evaluation.json, if there is one, is
kept, and the card shows its numbers.
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

from poecaps import hub, models
from poecaps._files import ModelError
from poecaps.data import datasets
from poecaps.network import DOMAINS, CapsuleNetwork
from poecaps.training import Config, record
from poecaps.training.config import from_json

if TYPE_CHECKING:
    from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Ship a run, say where it is and how large, and return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, help="folder of a finished run on a set known by name")
    parser.add_argument("name", help="what the model is to be called, such as mnist")
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
        If the run is not finished, was trained on images that others do not have, or has weights that float16 cannot
        hold; or if the name cannot be typed as one.
    """
    if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", name):
        raise ValueError(
            f"the name must be made of small letters, digits and hyphens, but is {name!r}"
        )
    network, about = CapsuleNetwork.load(run), record.read(run)
    if not about.get("finished"):
        raise ModelError(f"{run} is not finished")
    config = from_json(Config, about["config"])
    if config.data not in datasets.NAMES:
        raise ValueError(
            f"{run} was trained on {config.data}, but must be on one of {', '.join(datasets.NAMES)}"
        )
    with tempfile.TemporaryDirectory() as trial:
        network.save(trial, half=True)
        _check(CapsuleNetwork.load(trial), run)
    folder = models.FOLDER / name
    if folder.is_dir():
        shutil.rmtree(folder)
    hub.lay_out(network, folder, run=run, name=name, half=True, licence="mit", shipped=True)
    return folder


@torch.no_grad()
def _check(network: CapsuleNetwork, run: Path) -> None:
    """Refuse a model that, once rounded and read back, draws no images."""
    for domain in DOMAINS:
        images = network.generate(20, domain, generator=torch.Generator().manual_seed(0))
        if not bool(((images >= 0) & (images <= 1)).all()):
            raise ModelError(
                f"{run} in half precision draws no images from 0 to 1 in the domain {domain}"
            )


if __name__ == "__main__":
    sys.exit(main())
