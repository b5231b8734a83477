"""The command `encode`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import numpy as np
from tyro.conf import Positional  # noqa: TC002 (tyro reads the annotations)

from poecaps._files import atomic_write
from poecaps.cli.loading import encode_images, load_images, open_model
from poecaps.cli.options import Data, DataPath, Device, Model, output
from poecaps.cli.outputs import default_output, say
from poecaps.data.idx import Split  # noqa: TC001 (tyro reads the annotations)


def encode(
    run: Positional[Model],
    *,
    data: Data = None,
    data_path: DataPath = None,
    split: Split = "train",
    out: Annotated[
        Path | None,
        output(".npz file", "RUN/codes-SPLIT.npz, or RUN/codes-DATA-SPLIT.npz with --data"),
    ] = None,
    device: Device = "auto",
) -> None:
    """Write the codes of images and the firing probabilities of the experts as NumPy arrays.

    The file contains codes (N, J, D), firing (N, J) and, for labelled data, labels (N,). For
    pictures, files (N,) has the file of each, and label_names those of the labels. --data may
    also name a single picture.

    Parameters
    ----------
    split
        Part of the data; without a test part, test is what training has held out, train the rest.
    """
    # The colons of hf:NAME are not allowed in all names of files.
    source = [Path(data.replace(":", "-")).stem or "images"] if data else []
    name = "-".join(["codes", *source, f"{split}.npz"])
    out = out or default_output(run, name)
    if out.suffix.lower() != ".npz":
        raise ValueError(f"--out must name an .npz file, but is {out}")
    network = open_model(run, device, "codes")
    images = load_images(network, run, data, data_path, split)
    codes = encode_images(network, images)
    arrays: dict[str, Any] = {"codes": codes.numpy(), "firing": codes.norm(dim=-1).numpy()}
    if images.labels is not None:
        arrays["labels"] = images.labels
    if images.label_names:
        arrays["label_names"] = np.array(images.label_names)
    if images.files:
        arrays["files"] = np.array(images.files)
    out.parent.mkdir(parents=True, exist_ok=True)
    try:
        with atomic_write(out) as file:
            np.savez(file, **arrays)
    except OSError as error:  # the error of a full disk does not name the file
        raise OSError(error.errno, error.strerror, str(out)) from error
    say(f"{out}: codes {codes.shape[0]:,}×{codes.shape[1]}×{codes.shape[2]} of {images.source}")
