"""Where the commands write their results."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from poecaps import card, models
from poecaps._files import printable

if TYPE_CHECKING:
    from poecaps.network import CapsuleNetwork

FIGURES = "figures"


def say(*words: object, file: TextIO | None = None) -> None:
    """Print a line, with the control characters of names in it escaped; to standard output."""
    print(printable(" ".join(map(str, words))), file=file, flush=True)


def default_output(run: str, *parts: str) -> Path:
    """Return the default path of a result.

    It is in the folder of the run; for a model of the package it is in the current folder.
    """
    return Path(f"{run}-{parts[-1]}") if models.is_shipped(run) else Path(run, *parts)


def require_png(path: Path) -> None:
    """Raise ValueError unless the path of a picture ends in ``.png``."""
    if path.suffix.lower() != ".png":
        raise ValueError(f"--out must name a PNG, but is {path}; let it end in .png")


def write_card(network: CapsuleNetwork, folder: Path, *, draw: bool) -> None:
    """Write the model card of a run, unless it was edited."""
    if not card.write(folder, network, draw=draw):
        say(f"{folder / card.CARD} was edited, so it is not overwritten", file=sys.stderr)
