"""Where the commands write their results."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from poecaps import card, models

if TYPE_CHECKING:
    from poecaps.network import CapsuleNetwork

FIGURES = "figures"


def default_output(run: str, *parts: str) -> Path:
    """Return the default path of a result.

    It is in the folder of the run; for a model of the package it is in the current folder.
    """
    return Path(f"{run}-{parts[-1]}") if models.is_shipped(run) else Path(run, *parts)


def write_card(network: CapsuleNetwork, folder: Path, *, draw: bool) -> None:
    """Write the model card of a run, unless it was edited."""
    if not card.write(folder, network, draw=draw):
        print(f"{folder / card.CARD} was edited, so it is not overwritten", file=sys.stderr)
