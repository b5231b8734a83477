"""Models and images for the commands."""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from poecaps import data, models
from poecaps._devices import find_device
from poecaps._files import ModelError
from poecaps._modules import device_of, in_batches
from poecaps._progress import Counter, counted
from poecaps.autoencoder import minimum_image_size
from poecaps.cli.outputs import say
from poecaps.data import DataError, DatasetNotFoundError, MissingSplitError, datasets
from poecaps.data.folder import is_picture, suppress_skipped_warnings
from poecaps.data.idx import Split, find_images
from poecaps.data.images import HELD_OUT_SHARE
from poecaps.data.mapped import is_on_hub, require_asked_for
from poecaps.network import CapsuleNetwork
from poecaps.training import origin, record
from poecaps.training.checkpoint import newest_checkpoint

if TYPE_CHECKING:
    from torch import Tensor

    from poecaps.data import ImageSet
    from poecaps.explorer.render import Part

Shown = Literal["codes", "images", "density"]
SPLITS: tuple[Split, Split] = ("train", "test")


def find_model(run: str) -> Path:
    """Return the folder of a model, with a note if the name of a package model is ambiguous."""
    if models.is_shipped(run) and (Path(run) / "model.safetensors").is_file():
        say(
            f"{run} is the model of the package; for the model in the folder here write ./{run}",
            file=sys.stderr,
        )
    return models.find(run)


def open_model(run: str, device: str, shows: Shown = "images") -> CapsuleNetwork:
    """Load the model of a run, with a note if what a command shows of it was not trained.

    Parameters
    ----------
    run
        Name or folder of the model.
    device
        Name of the device.
    shows
        What the command shows: codes of the experts, images that are decoded from codes, or the
        density of the model.

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
    network = CapsuleNetwork.load(folder, torch_device)
    note = untrained_note(folder, shows)
    if note:
        if network.density is not None:
            note += (
                f"; for draws of its density: poecaps generate {shlex.quote(run)} --domain model"
            )
        say(f"note: {note}", file=sys.stderr)
    return network


def untrained_note(folder: Path, shows: Shown = "images") -> str:
    """Say that what is shown of a model comes from random weights, or return an empty string.

    Nothing is known of a model without a valid record of its training.
    """
    try:
        untrained = record.options_of(folder, record.read(folder)).untrained()
    except (ModelError, OSError):
        return ""
    if shows != "density" and "experts" in untrained:
        return f"the experts were not trained ({untrained['experts']}): their codes mean nothing"
    if shows == "images" and "decoder" in untrained:
        return f"the decoder was not trained ({untrained['decoder']}): its images mean nothing"
    return ""


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
        By default the test images, or all images if there is no test split. The test images of
        training data without a test split are those that were held out, and the training images
        are the others.

    Raises
    ------
    DataError
        If the images do not have the shape that the model expects.
    """
    if source is None:
        source, path = training_source(run, path)
    if split == "train":
        images = _load_split(network, source, path, "train")
        learned, unseen = _divide_as_trained(images, run, source)
        if unseen is not None:
            say(
                f"note: {len(learned):,} images, without the {len(unseen):,} that training has "
                "held out; --split test has those",
                file=sys.stderr,
            )
        return learned
    try:
        return _load_split(network, source, path, "test")
    except MissingSplitError:
        images = _load_split(network, source, path, "train")
        if split is None:
            return images
        unseen, part = _held_out(images, run, source)
        if part != "held-out":
            raise
        return unseen


@dataclass(frozen=True)
class Parts:
    """Images to fit probes on, and images to test on."""

    train: ImageSet
    test: ImageSet
    note: str = ""
    """What a reader of the results should know about them."""


def encode_images(network: CapsuleNetwork, images: ImageSet) -> Tensor:
    """Encode images in batches, with progress: N images → (N, J, D), on the CPU."""
    device = device_of(network)
    batches = counted(images.batches(network.images_at_once()), len(images), Counter("encoding"))
    with torch.no_grad():
        return in_batches(lambda batch: network.encode(batch.to(device)).cpu(), batches)


def load_parts(network: CapsuleNetwork, run: str, source: str, path: str | None) -> Parts:
    """Load training and test images for a model, and report skipped files on standard error.

    The test images are, in this order:

    - those of the data, if they have any;
    - all images of `source`, if it is not the training data: a folder or file of test images;
    - the images that the model has not learned from, as `poecaps train` holds out a tenth of a
      folder;
    - a random tenth of the training images, with a note.

    Parameters
    ----------
    network, run
        The model, and its name or folder.
    source, path
        The data as in `poecaps.data.load`.

    Raises
    ------
    DataError
        If the images do not have the shape that the model expects, or are too few.
    """
    images = _load_split(network, source, path, "train")
    try:
        test = _load_split(network, source, path, "test")
    except MissingSplitError:
        folder = models.find(run)
        if not (folder / record.RECORD).is_file() or _is_training_data(source, folder):
            return _divide(images, folder)
        source, path = training_source(run, None)
        return _with_same_labels(_load_split(network, source, path, "train"), images)
    return Parts(images, test)


def load_unseen(
    network: CapsuleNetwork, run: str, source: str | None, path: str | None
) -> tuple[ImageSet, Part]:
    """Load images to show with a model, if possible those from which it has not learned.

    These are the test images of the data, or the images of its training data that were held out,
    or else all images of `source`.

    Parameters
    ----------
    network, run
        The model, and its name or folder.
    source, path
        The data as in `poecaps.data.load`; by default the training data of the model.

    Raises
    ------
    DataError
        If the images do not have the shape that the model expects.
    """
    if source is None:
        source, path = training_source(run, path)
    try:
        return _load_split(network, source, path, "test"), "test"
    except MissingSplitError:
        return _held_out(_load_split(network, source, path, "train"), run, source)


def load_shown(
    network: CapsuleNetwork, run: str, source: str | None, path: str | None, split: Split | None
) -> ImageSet:
    """Load the images that a user chose, by default those from which a model has not learned.

    A note on standard error says so if it has learned from them.

    Parameters
    ----------
    network, run
        The model, and its name or folder.
    source, path, split
        As in `load_images`, but without a split as in `load_unseen`.
    """
    if split is not None:
        return load_images(network, run, source, path, split)
    images, part = load_unseen(network, run, source, path)
    if part == "training":
        say("note: there are no test images; the model has learned from these", file=sys.stderr)
    return images


def _held_out(images: ImageSet, run: str, source: str) -> tuple[ImageSet, Part]:
    """Return the images of a source that training has held out, or all if there are none."""
    folder = models.find(run)
    if not (folder / record.RECORD).is_file() or not _is_training_data(source, folder):
        return images, "other"
    unseen = _divide_as_trained(images, run, source)[1]
    return (images, "training") if unseen is None else (unseen, "held-out")


def _divide_as_trained(images: ImageSet, run: str, source: str) -> tuple[ImageSet, ImageSet | None]:
    """Divide a source without a test part into the images to learn from and those held out.

    The second is None if training has held out none of them.
    """
    folder = models.find(run)
    if (folder / record.RECORD).is_file() and _is_training_data(source, folder):
        about = record.read(folder)
        if about["data"].get("held_out"):
            return data.hold_out(images, record.options_of(folder, about).held_out)
    return images, None


def _is_training_data(source: str, folder: Path) -> bool:
    """Return whether a source is the folder or file that a model was trained on."""
    trained = record.options_of(folder, record.read(folder)).data
    return Path(source).expanduser().resolve() == Path(trained).expanduser().resolve()


def _divide(images: ImageSet, folder: Path) -> Parts:
    """Divide images without a test part, those of a training run as the run has done."""
    share, note = HELD_OUT_SHARE, "the model may have learned from the test images"
    if (folder / record.RECORD).is_file():
        about = record.read(folder)
        share = record.options_of(folder, about).held_out or HELD_OUT_SHARE
        learned = not about["data"].get("held_out")
        note = "the model has learned from the test images, too" if learned else ""
    train, test = data.hold_out(images, share)
    if test is None:
        raise DataError(
            f"{images.source} has no test images, and is too small to hold out {share:.0%} of it; "
            "give a folder of test images with --data"
        )
    return Parts(train, test, note)


def _with_same_labels(train: ImageSet, test: ImageSet) -> Parts:
    """Give the labels of test images the numbers that training images have, by their names."""
    if train.label_names == test.label_names or train.labels is None or test.labels is None:
        return Parts(train, test)
    if not test.label_names or not set(test.label_names) <= set(train.label_names):
        note = "the test images have other labels than the training images"
        return Parts(train, replace(test, labels=None, label_names=()), note)
    numbers = np.array([train.label_names.index(name) for name in test.label_names])
    return Parts(train, replace(test, labels=numbers[test.labels], label_names=train.label_names))


def training_source(run: str | Path, path: str | None) -> tuple[str, str | None]:
    """Return the name or path of the data that a model was trained on, and its folder if given.

    For a model of the package whose dataset is not on this machine, this is the sample of the
    dataset in the package.

    Raises
    ------
    ValueError
        If the data are unknown, those of the Hugging Face Hub, or a path that only the record
        names: a model from elsewhere must not choose which files of this machine are read.
    """
    folder = models.find(run)
    if not (folder / record.RECORD).is_file():
        raise ValueError(f"the training data of {run} are unknown; give images with --data")
    about = record.read(folder)
    config = record.options_of(folder, about)
    require_asked_for(run, config.data)
    reads_path = config.data not in datasets.NAMES or (path is None and config.data_path)
    if reads_path and not origin.is_ours(about, config):
        named = {"--data": config.data, "--data-path": config.data_path}
        options = [f"{name} {shlex.quote(value)}" for name, value in named.items() if value]
        once = (
            ""
            if config.data_path
            else f", or once for all commands: poecaps train --resume {shlex.quote(str(run))} "
            f"{options[0]} --no-figures"
        )
        raise ValueError(
            f"the images of {run} are not read unless you ask for them, because its record has no "
            f"mark of this user; give {' '.join(options)}{once}"
        )
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


def _load_split(network: CapsuleNetwork, source: str, path: str | None, split: Split) -> ImageSet:
    """Load images of the shape that the model expects, and report skipped files."""
    images = _load(network, source, path, split)
    if images.skipped:
        say(f"found {images.describe()}", file=sys.stderr)
    return _require_shape(network, images)


def _load(network: CapsuleNetwork, source: str, path: str | None, split: Split) -> ImageSet:
    """Load images; pictures are scaled to the size that the model expects."""
    channels, height, width = network.architecture.image_shape
    conversion: dict[str, Any] = {}
    location = Path(source).expanduser()
    is_folder = location.is_dir() and find_images(location, "train") is None
    converts = is_folder or is_picture(location) or is_on_hub(source)
    if source not in datasets.NAMES and converts:
        a = network.architecture
        smallest = minimum_image_size(a.kernel_size, halvings=a.halvings)  # as in the training
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
