"""A set of images as training sees it: uint8, wherever it lies, until a batch is drawn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from poecaps import _checks as checks
from poecaps.data._storage import DataError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

CHUNK = 1024  # images looked at together when a float array is checked


@dataclass(frozen=True, eq=False, repr=False)
class ImageSet:
    """Images, and labels where there are any. Works as a map-style dataset for `torch.utils.data.DataLoader`.

    Attributes
    ----------
    images : (N, H, W, C)
        uint8 or bool, or floats from 0 to 1; C is 1 or 3. May be memory-mapped. `(N, H, W)` and `(N, C, H, W)` are
        accepted and viewed as `(N, H, W, C)`.
    labels : (N,), optional
        Whole numbers.
    label_names
        What the labels stand for, where the source says.
    source
        Where the images came from.
    skipped
        Files of the source that were passed over.
    """

    images: np.ndarray[Any, Any]
    labels: np.ndarray[Any, Any] | None = None
    label_names: tuple[str, ...] = ()
    source: str = "an array"
    skipped: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "images", _as_nhwc(self.images, self.source))
        if self.labels is not None:
            object.__setattr__(self, "labels", _as_labels(self.labels, len(self.images), self.source))

    def __repr__(self) -> str:
        channels, height, width = self.shape
        colour = "grey" if channels == 1 else "RGB"
        labelled = "unlabelled" if self.labels is None else f"{len(np.unique(self.labels))} labels"
        skipped = f", {len(self.skipped)} files skipped" if self.skipped else ""
        return f"ImageSet({len(self):,} {colour} images of {height}×{width}, {labelled}, from {self.source}{skipped})"

    def __len__(self) -> int:
        return len(self.images)

    @property
    def shape(self) -> tuple[int, int, int]:
        """(C, H, W), the shape of one image as PyTorch has it."""
        height, width, channels = self.images.shape[1:]
        return channels, height, width

    def batch(self, indices: Sequence[int] | np.ndarray[Any, Any] | Tensor | slice) -> Tensor:
        """Draw images as floats.

        Returns
        -------
        (B, C, H, W)
            float32 from 0 to 1.
        """
        if isinstance(indices, slice):
            indices = range(*indices.indices(len(self)))
        chosen = np.moveaxis(self.images[np.asarray(indices, dtype=np.int64)], -1, 1)
        batch = torch.from_numpy(np.ascontiguousarray(chosen, dtype=np.float32))
        return batch.div_(255) if self.images.dtype == np.uint8 else batch

    def batches(
        self, size: int, *, generator: torch.Generator | None = None, drop_last: bool = False
    ) -> Iterator[Tensor]:
        """Draw every image once, `size` at a time: shuffled by `generator`, or in order without one.

        Yields
        ------
        (B, C, H, W)
            float32 from 0 to 1.
        """
        checks.require_int("size", size, 1)
        order = np.arange(len(self))
        if generator is not None:
            order = torch.randperm(len(self), generator=generator, device=generator.device).cpu().numpy()
        for start in range(0, len(self), size):
            indices = order[start : start + size]
            if len(indices) == size or not drop_last:
                yield self.batch(indices)

    def __getitem__(self, index: int) -> Tensor | tuple[Tensor, int]:
        image = self.batch([index])[0]
        return image if self.labels is None else (image, int(self.labels[index]))


def _as_nhwc(images: np.ndarray[Any, Any], source: str) -> np.ndarray[Any, Any]:
    if not isinstance(images, np.ndarray):
        raise TypeError(f"images must be a NumPy array, but is {type(images).__name__}")
    if images.ndim == 3:
        images = images[..., np.newaxis]
    elif images.ndim == 4 and images.shape[-1] not in (1, 3) and images.shape[1] in (1, 3):
        images = np.moveaxis(images, 1, -1)
    if images.ndim != 4 or images.shape[-1] not in (1, 3):
        raise DataError(
            f"the images of {source} have shape {images.shape}; give (N, H, W), (N, H, W, C) or (N, C, H, W) "
            "with C 1 or 3"
        )
    if images.size == 0:
        raise DataError(f"the images of {source} are empty: their shape is {images.shape}")
    if images.dtype in (np.uint8, np.bool_):
        return images
    if images.dtype.kind != "f":
        raise DataError(
            f"the images of {source} are {images.dtype}; give uint8 from 0 to 255, bool, or floats from 0 to 1"
        )
    for start in range(0, len(images), CHUNK):
        part = images[start : start + CHUNK]
        bad = ~((part >= 0) & (part <= 1))
        if bad.any():
            where = tuple(int(index) for index in np.argwhere(bad)[0])
            raise DataError(
                f"the images of {source} must be floats from 0 to 1, but image {start + where[0]} has the value "
                f"{part[where]}; bring them there, for example by dividing by 255"
            )
    return images


def _as_labels(labels: np.ndarray[Any, Any], count: int, source: str) -> np.ndarray[Any, Any]:
    if labels.ndim != 1 or labels.dtype.kind not in "iu" or len(labels) != count:
        raise DataError(
            f"the labels of {source} have shape {labels.shape} and type {labels.dtype}; "
            f"there must be one whole number for each of the {count} images"
        )
    return np.asarray(labels, dtype=np.int64)
