"""Fit the mean directions of the restricted domain of a shipped model again.

Run as: python tools/refit_directions.py NAME --path FOLDER

In older models, the mean direction of an expert is that over all training images and not only over
its own ones. This tool encodes the training images in FOLDER, computes the mean directions as
training does now, and writes them into the model; all other weights stay as they are. Measures of
the restricted domain, which are no longer those of the model, are removed from its evaluation and
its card.
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

import torch

from poecaps import CapsuleNetwork, ModelError, card, models
from poecaps._files import read_json, write_json
from poecaps._modules import in_batches
from poecaps.code_density import CodeDensity
from poecaps.data import load

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

# Largest difference between the stored and the recomputed means of an expert's codes, in units of
# their spread: weights are rounded, and training computes features in bfloat16.
TOLERANCE = 0.05


def main(arguments: Sequence[str] | None = None) -> int:
    """Refit a shipped model, print how many directions have turned, and return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", help="name of the shipped model, such as mnist")
    parser.add_argument("--data", help="training images (default: the data set of that name)")
    parser.add_argument("--path", help="folder of the data set")
    options = parser.parse_args(arguments)
    try:
        turned = refit(options.name, options.data or options.name, options.path)
    except (ValueError, OSError) as error:
        print(f"refit_directions: {error}", file=sys.stderr)
        return 1
    print(f"{options.name}: {turned} of the mean directions point to the other side than before")
    return 0


@torch.no_grad()
def refit(name: str, data: str, path: str | None = None) -> int:
    """Write new mean directions into a shipped model; return how many were on the other side.

    Raises
    ------
    ModelError
        If these are not the images that the model was trained on.
    """
    folder = models.find(name)
    network = CapsuleNetwork.load(folder)
    codes = in_batches(network.encode, load(data, path=path).batches(50))
    stored, (_, experts, dim) = network.code_density, codes.shape
    fitted = CodeDensity(experts, dim, joint_components=1, expert_components=1)
    fitted.fit(codes, torch.Generator().manual_seed(0))
    difference = ((fitted.mean - stored.mean) / stored.std).abs().max().item()
    if not difference < TOLERANCE:
        raise ModelError(
            f"the images of {data} are not those that {name} was trained on: means of its codes "
            f"differ by {difference:.2g} standard deviations"
        )
    turned = (fitted.mean_direction * stored.mean_direction).sum(1) < 0
    stored.mean_direction.copy_(fitted.mean_direction)
    network.save(folder, half=True)
    forget_measures(folder, network)
    return int(turned.sum())


def forget_measures(folder: Path, network: CapsuleNetwork) -> None:
    """Remove the restricted domain from the evaluation of a shipped model, and from its card."""
    if not (folder / card.MEASURED).is_file():
        return
    measured = read_json(folder / card.MEASURED)
    measured["domains"].pop("restricted", None)
    write_json(folder / card.MEASURED, measured)
    card.write(folder, network, name=folder.name, licence="mit", shipped=True, draw=False)


if __name__ == "__main__":
    sys.exit(main())
