"""Models and images for the commands."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from poecaps import data, models
from poecaps._devices import find_device
from poecaps._progress import Counter
from poecaps.autoencoder import minimum_image_size
from poecaps.cli.outputs import say
from poecaps.data import DataError, DatasetNotFoundError, datasets
from poecaps.data.folder import suppress_skipped_warnings
from poecaps.data.idx import Split, find_images
from poecaps.network import CapsuleNetwork
from poecaps.training import record
from poecaps.training.checkpoint import newest_checkpoint

if TYPE_CHECKING:
    from poecaps.data import ImageSet

SPLITS: tuple[Split, Split] = ("train", "test")


def find_model(run: str) -> Path:
    """Return the folder of a model, with a note if the name of a package model is ambiguous."""
    if models.is_shipped(run) and (Path(run) / "model.safetensors").is_file():
        say(
            f"{run} is the model of the package; for the model in the folder here write ./{run}",
            file=sys.stderr,
        )
    return models.find(run)


def open_model(run: str, device: str) -> CapsuleNetwork:
    """Load the model of a run.

    Raises
    ------
    FileNotFoundError
        If there is no model. For an unfinished run, the message has the command that resumes it.
    """
    torch_device, folder = find_device(device), find_model(run)
    if not (folder / "model.safetensors").exists() and newest_checkpoint(folder) is not None:
        raise FileNotFoundError(
            f"{run} is not finished; resume it with: poecaps train --resume {shlex.quote(run)}"
        )
    return CapsuleNetwork.load(folder, torch_device)


def load_images(
    network: CapsuleNetwork,
    run: str,
    source: str | None,
    path: str | None,
    split: Split | None,
) -> ImageSet:
    """Load images for a model, and report skipped files on standard error.

    Parameters
    ----------
    network, run
        The model, and its name or folder.
    source, path
        The data as in `poecaps.data.load`; by default the training data of the model.
    split
        By default the test images, or the training images if there is no test split.

    Raises
    ------
    DataError
        If the images do not have the shape that the model expects.
    """
    if source is None:
        source, path = training_source(run, path)
    if split is None:
        images = _load_test_images(network, source, path)
        if images is None:
            images = _load(network, source, path, "train")
    else:
        images = _load(network, source, path, split)
    if images.skipped:
        say(f"found {images.describe()}", file=sys.stderr)
    return _require_shape(network, images)


def load_figure_images(
    network: CapsuleNetwork, run: Path, training_images: ImageSet | None
) -> ImageSet:
    """Load the test images for the figures of a run, or without a test split the training images.

    Parameters
    ----------
    network, run
        The model and its folder.
    training_images
        The training images, if they are loaded already.
    """
    source, path = training_source(run, None)
    images = _load_test_images(network, source, path)
    if images is None:
        images = training_images
    if images is None:
        images = _load(network, source, path, "train")
    return _require_shape(network, images)


def training_source(run: str | Path, path: str | None) -> tuple[str, str | None]:
    """Return the name or path of the data that a model was trained on, and its folder if given.

    For a model of the package whose dataset is not on this machine, this is the sample of the
    dataset in the package.
    """
    folder = models.find(run)
    if not (folder / record.RECORD).is_file():
        raise ValueError(f"the training data of {run} are unknown; give images with --data")
    config = record.options_of(folder, record.read(folder))
    source, path = config.data, path or config.data_path
    if (
        models.is_shipped(run)
        and path is None
        and source in datasets.PUBLIC_DATASETS
        and not is_on_this_machine(source)
    ):
        sample = f"{source}-sample"
        say(
            f"the full dataset {source} is not on this machine; using {sample} of the package",
            file=sys.stderr,
        )
        source = sample
    return source, path


def is_on_this_machine(name: str) -> bool:
    """Return whether both splits of a full dataset are available without a download."""
    try:
        return all(datasets.find_files(name, split, None, download=False) for split in SPLITS)
    except DatasetNotFoundError:
        return False


def _load_test_images(network: CapsuleNetwork, source: str, path: str | None) -> ImageSet | None:
    """Load the test images, or return None if the data have no test split."""
    try:
        return _load(network, source, path, "test")
    except DataError:
        return None


def _load(network: CapsuleNetwork, source: str, path: str | None, split: Split) -> ImageSet:
    """Load images; those of a folder are scaled to the size that the model expects."""
    channels, height, width = network.architecture.image_shape
    conversion: dict[str, Any] = {}
    location = Path(source).expanduser()
    if (
        source not in datasets.NAMES
        and location.is_dir()
        and find_images(location, "train") is None
    ):
        smallest = minimum_image_size(network.architecture.kernel_size)
        conversion = {"size": (height, width), "channels": channels, "smallest": smallest}
    with suppress_skipped_warnings():
        return data.load(
            source, split=split, path=path, report=Counter("reading", "files"), **conversion
        )


def _require_shape(network: CapsuleNetwork, images: ImageSet) -> ImageSet:
    """Return the images, or raise `DataError` if the model expects images of another shape."""
    channels, height, width = network.architecture.image_shape
    if images.shape != (channels, height, width):
        kind = "grey" if channels == 1 else "RGB"
        raise DataError(
            f"the model expects {kind} images of {height}×{width}, but the data are {images}"
        )
    return images
