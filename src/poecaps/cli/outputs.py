"""Where the commands write their results."""

from __future__ import annotations

import sys
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from poecaps import card, models
from poecaps._files import own_folder, printable

if TYPE_CHECKING:
    from poecaps.network import CapsuleNetwork

FIGURES = "figures"
MAX_CHARACTERS = 10_000  # of a line; a file from elsewhere may hold a name of many megabytes


def say(*words: object, file: TextIO | None = None) -> None:
    """Print a line, with the control characters of names in it escaped; to standard output.

    What cannot be written to standard error is left out, as if the terminal is gone.
    """
    text = " ".join(map(str, words))
    if len(text) > MAX_CHARACTERS:
        text = f"{text[:MAX_CHARACTERS]}… ({len(text):,} characters)"
    with suppress(OSError) if file is sys.stderr else nullcontext():
        print(printable(text), file=file, flush=True)


def default_output(run: str, *parts: str) -> Path:
    """Return the default path of a result.

    It is in the folder of the run; for a model of the package it is in the current folder.
    """
    if models.is_shipped(run):
        return Path(f"{run}-{parts[-1]}")
    return Path(own_folder(Path(run, *parts[:-1])) if parts[1:] else run, parts[-1])


def require_png(path: Path) -> None:
    """Raise ValueError unless the path of a picture ends in ``.png``."""
    if path.suffix.lower() != ".png":
        raise ValueError(f"--out must name a PNG, but is {path}; let it end in .png")


def write_card(network: CapsuleNetwork, folder: Path, *, draw: bool) -> None:
    """Write the model card of a run, unless it was edited."""
    if not card.write(folder, network, draw=draw):
        say(f"{folder / card.CARD} was edited, so it is not overwritten", file=sys.stderr)
