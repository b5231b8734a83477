"""Images from wherever they lie: sets known by name, IDX, NumPy files, folders of pictures."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from poecaps import _checks as checks
from poecaps.data import named
from poecaps.data._storage import DataError
from poecaps.data.arrays import Array, read_npy, read_npz
from poecaps.data.folder import read_folder
from poecaps.data.idx import Split, find_labels, find_split, read_idx
from poecaps.data.images import ImageSet
from poecaps.data.named import DatasetNotFoundError

if TYPE_CHECKING:
    import os

__all__ = ["DataError", "DatasetNotFoundError", "ImageSet", "load", "read_folder", "read_idx"]


def load(
    source: str | os.PathLike[str],
    *,
    split: Split = "train",
    path: str | os.PathLike[str] | None = None,
    size: int | tuple[int, int] | None = None,
    channels: int | None = None,
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
        - a ``.npy`` file, or a ``.npz`` file with ``images`` and perhaps ``labels`` (or ``x_train``, ``y_train``, …);
        - a folder of PNG, JPEG or WebP images, which may have subfolders ``train`` and ``test``.
    split
        ``"train"`` or ``"test"``; a source that is not split has only ``"train"``.
    path
        The folder that holds a full set known by name.
    size, channels
        For a folder of images: bring all to this (height, width), and to grey (1) or RGB (3).
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
    if isinstance(source, str) and source in named.NAMES:
        _refuse("size and channels are", "folders of images", source, size, channels)
        return named.load_named(source, split, path, download)
    _refuse("path is", "sets known by name", source, path)
    where = Path(source).expanduser()
    if not where.exists():
        close = difflib.get_close_matches(str(source), named.NAMES, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise FileNotFoundError(
            f"there is no file or folder {source}{hint} Sets known by name: {', '.join(named.NAMES)}"
        )
    if where.is_dir() and find_split(where, split) is None:
        return _load_folder(where, split, size, channels)
    _refuse("size and channels are", "folders of images", source, size, channels)
    images, labels = _read_arrays(where, split)
    return ImageSet(images, labels, source=str(where))


def _read_arrays(where: Path, split: Split) -> tuple[Array, Array | None]:
    """Images and labels of a file, or of a folder of IDX files."""
    pair = find_split(where, split) if where.is_dir() else None
    if pair is not None:
        return read_idx(pair[0]), read_idx(pair[1])
    if where.suffix == ".npz":
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
        raise DataError(f"{where} is one set of images, with no test split; name the file of the test images instead")
    if where.suffix == ".npy":
        return read_npy(where), None
    beside = find_labels(where)
    return read_idx(where), None if beside is None else read_idx(beside)


def _load_folder(where: Path, split: Split, size: int | tuple[int, int] | None, channels: int | None) -> ImageSet:
    if size is not None:
        size = (size, size) if isinstance(size, int) else size
        for name, pixels in zip(("height", "width"), size, strict=True):
            checks.require_int(f"size ({name})", pixels, 1)
    if channels not in (None, 1, 3):
        raise ValueError(f"channels must be 1 (grey) or 3 (RGB), but is {channels!r}")
    if (where / split).is_dir():
        where = where / split
    elif split == "test":
        raise DataError(f"{where} has no subfolder 'test'; make one, or name the folder of the test images instead")
    return read_folder(where, size=size, channels=channels)


def _refuse(what: str, whom: str, source: object, *values: object) -> None:
    if any(value is not None for value in values):
        raise ValueError(f"{what} for {whom}, and {source} is none")
