"""Images from wherever they lie: sets known by name, IDX, NumPy files, folders of pictures."""

from __future__ import annotations

import difflib
import os
from pathlib import Path
from typing import Any, get_args

from poecaps import _checks as checks
from poecaps.data import named
from poecaps.data._storage import DataError
from poecaps.data.arrays import Array, read_npy, read_npz
from poecaps.data.folder import SUFFIXES, read_folder, subfolders
from poecaps.data.idx import PREFIX, Split, find_images, find_labels, may_be_idx, read_idx
from poecaps.data.images import ImageSet
from poecaps.data.named import DatasetNotFoundError

__all__ = ["DataError", "DatasetNotFoundError", "ImageSet", "load", "read_folder", "read_idx"]


def load(
    source: str | os.PathLike[str],
    *,
    split: Split = "train",
    path: str | os.PathLike[str] | None = None,
    size: int | tuple[int, int] | None = None,
    channels: int | None = None,
    smallest: int = 1,
    download: bool = True,
) -> ImageSet:
    """Load images by the name of a set or by their path.

    Parameters
    ----------
    source
        - ``"mnist-sample"``, ``"fashion-mnist-sample"``: 10,000 training and 2,000 test images, part of this package;
        - ``"mnist"``, ``"fashion-mnist"``: the full sets, looked for in `path`, or else in ``$POECAPS_DATA/<name>``,
          the user cache and ``/usr/share/datasets/<name>``, then downloaded into the cache;
        - an IDX file of images, gzipped or plain (labels are found beside it), or a folder with MNIST's four files;
        - a ``.npy`` file, or a ``.npz`` file with the images of the split as ``x_train`` or ``train_images``
          (``x_test``, ``test_images``), or without a split as ``images``, ``x`` or ``arr_0``; labels likewise as
          ``y_train``, ``train_labels``, ``labels``, ``y`` or ``arr_1``;
        - a folder of PNG, JPEG or WebP images, which may have subfolders ``train`` and ``test``, and in them one
          subfolder for each label; see `read_folder`.
    split
        ``"train"`` or ``"test"``; a source that is not split has only ``"train"``.
    path
        The folder that holds a full set known by name, or the root in which torchvision put it.
    size, channels
        For a folder of images: scale each to cover this (height, width) and crop its centre; bring all to grey (1) or
        RGB (3).
    smallest
        For a folder of images: pass over those with a side of fewer pixels.
    download
        Whether a full set may be downloaded.

    Raises
    ------
    DataError
        If the source does not hold what it should.
    DatasetNotFoundError, FileNotFoundError
        If there is nothing of that name.
    """
    checks.require_choice("split", split, get_args(Split))
    if not isinstance(source, (str, os.PathLike)) or not os.fspath(source):
        given = "empty" if isinstance(source, str) else f"of type {type(source).__name__}"
        raise TypeError(
            f"source must be a name or a path, but is {given}; wrap an array with ImageSet(array)"
        )
    if os.fspath(source) in named.NAMES:
        _refuse("size and channels are", "folders of images", source, size, channels)
        return named.load_named(os.fspath(source), split, path, download)
    _refuse("path is", "sets known by name", source, path)
    where = Path(source).expanduser()
    if not where.exists():
        close = difflib.get_close_matches(os.fspath(source).lower(), named.NAMES, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else "."
        raise FileNotFoundError(
            f"there is no file or folder {source}{hint} Sets known by name: {', '.join(named.NAMES)}"
        )
    if not where.is_dir() and not where.is_file():
        raise DataError(f"{where} is neither a file nor a folder")
    if where.is_dir() and not any(find_images(where, each) for each in get_args(Split)):
        return _load_folder(where, split, size=size, channels=channels, smallest=smallest)
    _refuse("size and channels are", "folders of images", source, size, channels)
    images, labels = _read_arrays(where, split)
    return ImageSet(images, labels, source=str(where))


def _read_arrays(where: Path, split: Split) -> tuple[Array, Array | None]:
    """Images and labels of a file, or of a folder of IDX files."""
    suffix = where.suffix.lower()
    if where.is_dir():
        found = find_images(where, split)
        if found is None:
            raise DataError(
                f"{where} has no {split} split: there is no {PREFIX[split]}-images-idx3-ubyte in it"
            )
        return _read_idx_pair(found)
    if suffix == ".npz":
        plain = split == "train"
        images, labels = read_npz(
            where,
            [
                (f"x_{split}", f"{split}_images", *(("x", "arr_0", "images") if plain else ())),
                (f"y_{split}", f"{split}_labels", *(("y", "arr_1", "labels") if plain else ())),
            ],
        )
        assert images is not None  # noqa: S101 (read_npz insists on the first)
        return images, labels
    if split == "test":
        raise DataError(
            f"{where} is one set of images, with no test split; name the file of the test images instead"
        )
    if suffix == ".npy":
        return read_npy(where), None
    if suffix in SUFFIXES:
        raise DataError(f"{where} is one picture; name the folder that holds it and others")
    if not may_be_idx(where):
        raise DataError(
            f"{where} is none of what can be read; name a folder of PNG, JPEG or WebP, or an .npy, .npz or IDX file"
        )
    return _read_idx_pair(where)


def _read_idx_pair(images: Path) -> tuple[Array, Array | None]:
    beside = find_labels(images)
    return read_idx(images), None if beside is None else read_idx(beside)


def _load_folder(where: Path, split: Split, **how: Any) -> ImageSet:
    """Images of a folder, or of its part for this split; both parts number their labels alike."""
    parts = [where / each for each in get_args(Split) if (where / each).is_dir()]
    if len(parts) == 2:
        names = sorted(set.union(*map(subfolders, parts)))
        return read_folder(where / split, label_names=names, **how)
    if parts:
        raise DataError(
            f"{where} has a subfolder {parts[0].name!r} but not its counterpart, so it is unclear what to learn from; "
            f"name {parts[0]} itself, or make both 'train' and 'test'"
        )
    if split == "test":
        raise DataError(
            f"{where} has no subfolder 'test'; make one, or name the folder of the test images instead"
        )
    return read_folder(where, **how)


def _refuse(what: str, whom: str, source: object, *values: object) -> None:
    if any(value is not None for value in values):
        raise ValueError(f"{what} for {whom}, and {source} is none")
