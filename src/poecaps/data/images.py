"""A set of images: stored as uint8, in memory or on disk, and converted to float batch by batch."""

from __future__ import annotations

import hashlib
import numbers
from collections import defaultdict
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from poecaps import _checks as checks
from poecaps._files import printable
from poecaps.data.buffers import allocate, require_uncut
from poecaps.data.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import Tensor

CHECK_BATCH = 1024  # images that are checked or copied together
HELD_OUT_SHARE = 0.1  # of a folder without a test part
MAX_LISTED_CLASSES = 6  # `describe` lists the class names up to this number of classes


@dataclass(frozen=True, eq=False, repr=False)
class ImageSet:
    """Images with optional labels; a map-style dataset for `torch.utils.data.DataLoader`.

    Attributes
    ----------
    images : (N, H, W, C)
        uint8 or bool, or floats from 0 to 1; C is 1 or 3. May be memory-mapped. Arrays of shape
        `(N, H, W)` and `(N, C, H, W)`, and tensors, are accepted and viewed as `(N, H, W, C)`.
    labels : (N,), optional
        Whole numbers.
    label_names
        The names of the labels, if the source provides them.
    source
        Where the images come from.
    skipped
        The files of the source that were skipped, with the reasons.
    files
        The file of each image, relative to the source, if every image is a file.
    grey_as_rgb
        Whether the files store grey images as RGB.
    held_out
        Number of images of the source that `hold_out` has put into another set.
    """

    images: np.ndarray[Any, Any]
    labels: np.ndarray[Any, Any] | None = None
    label_names: tuple[str, ...] = ()
    source: str = "an array"
    skipped: Mapping[str, str] = field(default_factory=dict)
    files: tuple[str, ...] = ()
    grey_as_rgb: bool = False
    held_out: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "images", _as_nhwc(self.images, self.source))
        if self.labels is not None:
            object.__setattr__(
                self, "labels", _as_labels(self.labels, len(self.images), self.source)
            )

    def __repr__(self) -> str:
        labelled = "unlabelled" if self.labels is None else f"{len(np.unique(self.labels))} labels"
        skipped = f", {self._count_skipped()}" if self.skipped else ""
        return f"ImageSet({self._count_images()}, {labelled}, from {self.source}{skipped})"

    def describe(self) -> str:
        """Return one line with the number of images, the source, the classes and skipped files."""
        line = f"{self._count_images()} in {self.source}"
        if self.labels is not None:
            count = len(np.unique(self.labels))
            names = (
                f" ({', '.join(self.label_names)})"
                if count == len(self.label_names) <= MAX_LISTED_CLASSES
                else ""
            )
            line += f", {count} {'class' if count == 1 else 'classes'}{names}"
        if self.held_out:
            line += f", and {self.held_out:,} more that are held out"
        if not self.skipped:
            return line
        files = defaultdict(list)
        for file, reason in self.skipped.items():
            files[reason].append(printable(Path(file).name))
        parts = (
            f"{len(names)} {reason} ({names[0]}{', …' if len(names) > 1 else ''})"
            for reason, names in files.items()
        )
        return f"{line}; {self._count_skipped()}: {', '.join(parts)}"

    def _count_images(self) -> str:
        channels, height, width = self.shape
        colour, noun = "grey" if channels == 1 else "RGB", "image" if len(self) == 1 else "images"
        stored = " (stored as RGB)" if self.grey_as_rgb else ""
        return f"{len(self):,} {colour} {noun} of {height}×{width}{stored}"

    def _count_skipped(self) -> str:
        return f"{len(self.skipped):,} {'file' if len(self.skipped) == 1 else 'files'} skipped"

    def __len__(self) -> int:
        return len(self.images)

    @property
    def shape(self) -> tuple[int, int, int]:
        """(C, H, W), the shape of one image in PyTorch's order."""
        height, width, channels = self.images.shape[1:]
        return channels, height, width

    def batch(self, indices: Sequence[int] | np.ndarray[Any, Any] | Tensor | slice) -> Tensor:
        """Return some of the images as floats.

        Parameters
        ----------
        indices : (B,)
            Whole numbers, a slice, or a mask of N truth values.

        Returns
        -------
        (B, C, H, W)
            float32 from 0 to 1.

        Raises
        ------
        DataError
            If the images are mapped to a file that has become shorter.
        """
        require_uncut(self.images, self.source)
        chosen = np.moveaxis(self.images[self._as_indices(indices)], -1, 1)
        batch = torch.from_numpy(np.ascontiguousarray(chosen, dtype=np.float32))
        return batch.div_(255) if self.images.dtype == np.uint8 else batch

    def batches(
        self, size: int, *, generator: torch.Generator | None = None, drop_last: bool = False
    ) -> Iterator[Tensor]:
        """Iterate once over all images, without labels, in batches.

        Parameters
        ----------
        size
            Images in a batch, B.
        generator
            Shuffles the images; without one they come in order.
        drop_last
            Whether to omit a last batch of fewer images.

        Returns
        -------
        iterator of (B, C, H, W)
            float32 from 0 to 1.
        """
        checks.require_int("size", size, 1)
        order = np.arange(len(self))
        if generator is not None:
            order = (
                torch.randperm(len(self), generator=generator, device=generator.device)
                .cpu()
                .numpy()
            )
        stop = len(self) - len(self) % size if drop_last else len(self)
        return (self.batch(order[start : start + size]) for start in range(0, stop, size))

    def subset(self, indices: Sequence[int] | np.ndarray[Any, Any] | Tensor | slice) -> ImageSet:
        """Return a set of some of the images, selected as in `batch`."""
        chosen = self._as_indices(indices)
        return replace(
            self,
            images=self._copy(chosen),
            labels=None if self.labels is None else self.labels[chosen],
            files=tuple(self.files[index] for index in chosen) if self.files else (),
        )

    def _copy(self, chosen: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Copy some of the images; many of them to a temporary file."""
        copy = allocate((len(chosen), *self.images.shape[1:]), self.images.dtype)
        for start in range(0, len(chosen), CHECK_BATCH):
            require_uncut(self.images, self.source)
            copy[start : start + CHECK_BATCH] = self.images[chosen[start : start + CHECK_BATCH]]
        return copy

    def __getitem__(self, index: int) -> Tensor | tuple[Tensor, int]:
        """Return an image (C, H, W), or (image, label) if the set has labels."""
        if not isinstance(index, numbers.Integral):
            raise TypeError(
                f"index must be one whole number, but is {index!r}; for several images use batch(…)"
            )
        image = self.batch([int(index)])[0]
        return image if self.labels is None else (image, int(self.labels[index]))

    def _as_indices(self, indices: Any) -> np.ndarray[Any, Any]:
        if isinstance(indices, slice):
            return np.arange(len(self))[indices]
        chosen = np.asarray(indices)
        if chosen.ndim == 1 and chosen.dtype == np.bool_ and len(chosen) == len(self):
            return np.flatnonzero(chosen)
        if chosen.ndim != 1 or (chosen.dtype.kind not in "iu" and chosen.size):
            raise TypeError(
                "indices must be a sequence of whole numbers, a slice or a mask of "
                f"{len(self)} truth values, but have shape {chosen.shape} and type {chosen.dtype}"
            )
        return chosen.astype(np.int64)


def hold_out(
    images: ImageSet, share: float = HELD_OUT_SHARE, *, seed: int = 0
) -> tuple[ImageSet, ImageSet | None]:
    """Divide images at random into those to learn from and those to test on.

    The choice depends on the seed and on the name of each file, or else on the number of each
    image, and on nothing else. If files are added to a folder, most images stay where they were.

    Parameters
    ----------
    images
        Images to divide.
    share
        Share of the images to test on, at least 0 and below 1.
    seed
        Seed of the choice.

    Returns
    -------
    train, test
        The second is None if the share of the images is less than half an image.
    """
    checks.require_share("share", share)
    if share == 1:
        raise ValueError("share must be below 1, so that images to learn from are left")
    count = round(share * len(images))
    if count == 0:
        return images, None
    names = images.files or tuple(map(str, range(len(images))))
    # The name of a file may be any bytes.
    salted = (f"{seed}/{Path(name).as_posix()}".encode(errors="surrogateescape") for name in names)
    keys = [hashlib.sha256(each).digest() for each in salted]
    order = sorted(range(len(images)), key=keys.__getitem__)
    test, train = sorted(order[:count]), sorted(order[count:])
    return replace(images.subset(train), held_out=count), images.subset(test)


def _as_nhwc(images: Any, source: str) -> Any:
    """Check images and view them as (N, H, W, C)."""
    if isinstance(images, torch.Tensor):
        images = images.numpy(force=True)
    if not isinstance(images, np.ndarray):
        raise TypeError(f"images must be a NumPy array or a tensor, but is {type(images).__name__}")
    if images.ndim == 3:
        images = images[..., np.newaxis]
    elif images.ndim == 4 and images.shape[-1] not in (1, 3) and images.shape[1] in (1, 3):
        images = np.moveaxis(images, 1, -1)
    if images.ndim != 4 or images.shape[-1] not in (1, 3):
        raise DataError(
            f"the images of {source} have shape {images.shape}, but must have shape (N, H, W), "
            "(N, H, W, C) or (N, C, H, W) with C 1 or 3; reshape flat rows, and remove an alpha "
            "channel"
        )
    if images.size == 0:
        raise DataError(f"the images of {source} are empty: their shape is {images.shape}")
    if images.dtype in (np.uint8, np.bool_):
        return images
    if images.dtype.kind != "f":
        raise DataError(
            f"the images of {source} are {images.dtype}, but must be uint8 from 0 to 255, bool, or "
            "floats from 0 to 1"
        )
    for start in range(0, len(images), CHECK_BATCH):
        require_uncut(images, source)
        part = images[start : start + CHECK_BATCH]
        bad = ~((part >= 0) & (part <= 1))
        if bad.any():
            where = tuple(int(index) for index in np.argwhere(bad)[0])
            remedy = (
                "divide by the largest possible value, such as 255"
                if part[where] > 1
                else "correct them"
            )
            raise DataError(
                f"the images of {source} must be floats from 0 to 1, but image {start + where[0]} "
                f"has the value {part[where]}; {remedy}"
            )
    return images


def _as_labels(labels: Any, count: int, source: str) -> Any:
    """Check labels and return them as (count,), int64."""
    labels = labels.numpy(force=True) if isinstance(labels, torch.Tensor) else np.asarray(labels)
    if labels.ndim != 1 or labels.dtype.kind not in "iu" or len(labels) != count:
        raise DataError(
            f"the labels of {source} have shape {labels.shape} and type {labels.dtype}; "
            f"there must be one whole number for each of the {count} images"
        )
    if labels.max() > np.iinfo(np.int64).max:
        raise DataError(
            f"the labels of {source} must fit into signed 64-bit integers, but reach {labels.max()}"
        )
    return labels.astype(np.int64)
