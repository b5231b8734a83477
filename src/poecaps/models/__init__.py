"""The trained models that come with poecaps, a folder for each, and where a model is found."""

from __future__ import annotations

import difflib
import os
from pathlib import Path
from typing import TYPE_CHECKING

from poecaps.network import CapsuleNetwork

if TYPE_CHECKING:
    import torch

FOLDER = Path(__file__).parent


def names() -> tuple[str, ...]:
    """Names of the models that come with poecaps."""
    return tuple(sorted(file.parent.name for file in FOLDER.glob("*/model.safetensors")))


def is_shipped(model: str | os.PathLike[str]) -> bool:
    """Tell whether this is the name of a model that comes with poecaps, and not a path."""
    return isinstance(model, str) and model in names()


def find(model: str | os.PathLike[str]) -> Path:
    """Folder of a model: that of the package for the name of one that comes with it, or else the one at that path.

    Raises
    ------
    FileNotFoundError
        If it is neither.
    """
    if is_shipped(model):
        return FOLDER / model
    folder = Path(model)
    if not folder.is_dir():
        known = names()
        close = difflib.get_close_matches(os.fspath(model).lower(), known, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else "."
        which = (
            f"Models that come with it: {', '.join(known)}"
            if known
            else "This installation has no models"
        )
        raise FileNotFoundError(
            f"there is no folder {model}, and no model of that name comes with poecaps{hint} {which}"
        )
    return folder


def load(model: str | os.PathLike[str], device: torch.device | str = "cpu") -> CapsuleNetwork:
    """Open a trained model, in evaluation mode, float32 and frozen.

    No parameter asks for a gradient, so that results can be used at once, as in ``load("mnist").encode(x).numpy()``. To
    train the model further, unfreeze it with ``network.requires_grad_()``.

    Parameters
    ----------
    model
        Name of a model that comes with poecaps (``"mnist"``, ``"fashion-mnist"``), or the folder that
        `CapsuleNetwork.save` or a run wrote. A name means the model of the package even where there is a folder of that
        name; write ``"./mnist"``, or give a `Path`, for the folder.
    device
        Where it goes.

    Raises
    ------
    FileNotFoundError
        If there is no such model.
    ModelError
        If its files are damaged, foreign, or of a newer version.
    """
    return CapsuleNetwork.load(find(model), device)
