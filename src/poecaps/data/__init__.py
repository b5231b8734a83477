"""Load images: named datasets, IDX and NumPy files, folders of pictures, other datasets."""

from __future__ import annotations

import difflib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from poecaps import _checks as checks
from poecaps.data import datasets
from poecaps.data.arrays import Array, read_npy, read_npz
from poecaps.data.errors import DataError, DatasetNotFoundError, MissingSplitError
from poecaps.data.folder import is_picture, label_folders, read_folder, read_picture
from poecaps.data.idx import PREFIX, Split, find_images, find_labels, looks_like_idx, read_idx
from poecaps.data.images import ImageSet, hold_out
from poecaps.data.mapped import from_dataset, is_on_hub, read_hub_dataset

if TYPE_CHECKING:
    from poecaps._progress import Report

__all__ = [
    "DataError",
    "DatasetNotFoundError",
    "ImageSet",
    "MissingSplitError",
    "from_dataset",
    "hold_out",
    "load",
    "read_folder",
    "read_idx",
]


def load(
    source: str | os.PathLike[str],
    *,
    split: Split = "train",
    path: str | os.PathLike[str] | None = None,
    size: int | tuple[int, int] | None = None,
    channels: int | None = None,
    smallest: int = 1,
    download: bool = True,
    report: Report | None = None,
) -> ImageSet:
    """Load images by the name of a dataset or by their path.

    Parameters
    ----------
    source
        - ``"mnist-sample"``, ``"fashion-mnist-sample"``: 10,000 training and 2,000 test images,
          part of this package;
        - ``"mnist"``, ``"fashion-mnist"``: the full datasets, searched in `path`, or else in
          ``$POECAPS_DATA/<name>``, the user cache and ``/usr/share/datasets/<name>``, and finally
          downloaded into the cache;
        - an IDX file of images, gzipped or plain (its labels are found in the same folder), or a
          folder with MNIST's four files;
        - a ``.npy`` file, or a ``.npz`` file with the images of the split as ``x_train`` or
          ``train_images`` (``x_test``, ``test_images``), or without a split as ``images``, ``x`` or
          ``arr_0``; labels likewise as ``y_train``, ``train_labels``, ``labels``, ``y`` or
          ``arr_1``;
        - a PNG, JPEG or WebP image, or a folder of them, which may have subfolders ``train`` and
          ``test``, and in them one subfolder for each label; see `read_folder`;
        - ``"hf:NAME"`` or ``"hf:NAME:CONFIGURATION"``: a dataset of the Hugging Face Hub, by the
          library `datasets` (``pip install 'poecaps[datasets]'``).
    split
        ``"train"`` or ``"test"``; a source without splits has only ``"train"``.
    path
        For a full dataset: the folder that contains it, or torchvision's root folder.
    size, channels
        For a folder of images or a dataset of the Hub: scale each image to cover this (height,
        width) and crop its centre; convert all images to grey (1) or RGB (3).
    smallest
        For a folder of images: skip images with a side of fewer pixels.
    download
        Whether a full dataset may be downloaded.
    report
        For a folder of images or a dataset of the Hub: called with the number of files or items
        that were read, and of all of them.

    Raises
    ------
    DataError
        If the source is damaged.
    MissingSplitError
        If the source does not contain the images of the split.
    DatasetNotFoundError, FileNotFoundError
        If the source does not exist.
    """
    checks.require_choice("split", split, get_args(Split))
    if not isinstance(source, (str, os.PathLike)) or not os.fspath(source):
        given = "empty" if isinstance(source, str) else f"of type {type(source).__name__}"
        raise TypeError(
            f"source must be a name or a path, but is {given}; wrap an array with ImageSet(array)"
        )
    if os.fspath(source) in datasets.NAMES:
        _require_no_conversion(source, size, channels)
        return datasets.load_dataset(os.fspath(source), split, path, download)
    if path is not None:
        raise ValueError(
            f"a data path applies only to named datasets, but {source} is not one of them; "
            "leave it out"
        )
    if is_on_hub(os.fspath(source)):
        return read_hub_dataset(
            os.fspath(source), split, size=size, channels=channels, report=report
        )
    location = Path(source).expanduser()
    if not location.exists():
        close = difflib.get_close_matches(os.fspath(source).lower(), datasets.NAMES, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else "."
        raise FileNotFoundError(
            f"there is no file or folder {source}{hint} Named datasets: {', '.join(datasets.NAMES)}"
        )
    if not location.is_dir() and not location.is_file():
        raise DataError(f"{location} is neither a file nor a folder")
    if location.is_dir() and not any(find_images(location, each) for each in get_args(Split)):
        options = {"size": size, "channels": channels, "smallest": smallest, "report": report}
        return _load_folder(location, split, **options)
    if is_picture(location):
        if split == "test":
            raise MissingSplitError(f"{location} is a single image, without a test split")
        return read_picture(location, size=size, channels=channels, smallest=smallest)
    _require_no_conversion(source, size, channels)
    images, labels = _read_arrays(location, split)
    return ImageSet(images, labels, source=str(location))


def _require_no_conversion(
    source: object, size: int | tuple[int, int] | None, channels: int | None
) -> None:
    """Raise `ValueError` if `size` or `channels` is given for a source that cannot be converted."""
    if size is not None or channels is not None:
        raise ValueError(
            f"the options size and channels apply only to folders of images, but {source} is not "
            "a folder of images; leave them out"
        )


def _read_arrays(location: Path, split: Split) -> tuple[Array, Array | None]:
    """Read the images and labels of a file, or of a folder of IDX files."""
    suffix = location.suffix.lower()
    if location.is_dir():
        found = find_images(location, split)
        if found is None:
            raise MissingSplitError(
                f"{location} has no {split} split: it does not contain "
                f"{PREFIX[split]}-images-idx3-ubyte"
            )
        return _read_idx_pair(found)
    if suffix == ".npz":
        without_split = split == "train"
        images, labels = read_npz(
            location,
            [
                (
                    f"x_{split}",
                    f"{split}_images",
                    *(("x", "arr_0", "images") if without_split else ()),
                ),
                (
                    f"y_{split}",
                    f"{split}_labels",
                    *(("y", "arr_1", "labels") if without_split else ()),
                ),
            ],
        )
        assert images is not None  # noqa: S101 (read_npz requires the first array)
        return images, labels
    if split == "test":
        raise MissingSplitError(
            f"{location} is one set of images without a test split; give the file of the test "
            "images instead"
        )
    if suffix == ".npy":
        return read_npy(location), None
    if not looks_like_idx(location):
        raise DataError(
            f"cannot read {location}: unknown format; give a folder of PNG, JPEG or WebP images, "
            "or an .npy, .npz or IDX file"
        )
    return _read_idx_pair(location)


def _read_idx_pair(images: Path) -> tuple[Array, Array | None]:
    labels = find_labels(images)
    return read_idx(images), None if labels is None else read_idx(labels)


def _load_folder(location: Path, split: Split, **options: Any) -> ImageSet:
    """Load the images of a folder, or of its subfolder for this split.

    Both splits use the same numbers for the same labels.
    """
    parts = [location / each for each in get_args(Split) if (location / each).is_dir()]
    if len(parts) == 2:
        names = sorted(set.union(*map(label_folders, parts)))
        return read_folder(location / split, label_names=names, **options)
    if parts:
        raise DataError(
            f"{location} has a subfolder {parts[0].name!r} but not its counterpart, so the split "
            f"is ambiguous; give {parts[0]} itself, or create both 'train' and 'test'"
        )
    if split == "test":
        raise MissingSplitError(
            f"{location} has no subfolder 'test'; create it, or give the folder of the test images "
            "instead"
        )
    return read_folder(location, **options)
