"""The trained models that come with poecaps, one folder each; models are found by name."""

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
    """Return the names of the models that come with poecaps."""
    return tuple(sorted(file.parent.name for file in FOLDER.glob("*/model.safetensors")))


def is_shipped(model: str | os.PathLike[str]) -> bool:
    """Return whether this is the name of a model that comes with poecaps, and not a path."""
    return isinstance(model, str) and model in names()


def find(model: str | os.PathLike[str]) -> Path:
    """Return the folder of a model.

    Parameters
    ----------
    model
        Name of a model that comes with poecaps, or path of a folder.

    Raises
    ------
    FileNotFoundError
        If there is neither.
    """
    if is_shipped(model):
        return FOLDER / model
    folder = Path(model)
    if not folder.is_dir():
        known = names()
        close = difflib.get_close_matches(os.fspath(model).lower(), known, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else "."
        available = (
            f"Models that come with poecaps: {', '.join(known)}"
            if known
            else "This installation has no models"
        )
        raise FileNotFoundError(
            f"there is no folder {model}, and no model of that name comes with poecaps{hint} "
            f"{available}"
        )
    return folder


def load(model: str | os.PathLike[str], device: torch.device | str = "cpu") -> CapsuleNetwork:
    """Load a trained model: in evaluation mode, float32 and frozen.

    No parameter requires a gradient, so that results can be converted to NumPy directly, as in
    ``load("mnist").encode(x).numpy()``. To train the model further, make it trainable with
    ``network.requires_grad_()``.

    Parameters
    ----------
    model
        Name of a model that comes with poecaps (``"mnist"``, ``"fashion-mnist"``), or a folder
        written by `CapsuleNetwork.save` or by a training run. A name means the model of the package
        even if there is a folder of that name; write ``"./mnist"``, or give a `Path`, for the
        folder.
    device
        Device of the model.

    Raises
    ------
    FileNotFoundError
        If there is no such model.
    ModelError
        If its files are damaged, not written by poecaps, or of another format version.
    """
    return CapsuleNetwork.load(find(model), device)
