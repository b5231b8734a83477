"""Images of map-style datasets: torchvision's, your own, and those of the library `datasets`."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from poecaps.data.buffers import allocate
from poecaps.data.errors import DataError, DatasetNotFoundError, MissingSplitError
from poecaps.data.folder import as_channels, as_size, drop_equal_channels, fit
from poecaps.data.images import ImageSet

if TYPE_CHECKING:
    import os

    from poecaps._progress import Report
    from poecaps.data.idx import Split

HUB_PREFIX = "hf:"
IMAGE_KEYS, LABEL_KEYS = ("image", "img"), ("label", "labels")
# The parts of a dataset of the Hub, in the order in which they are tried.
HUB_SPLITS: dict[Split, tuple[str, ...]] = {"train": ("train",), "test": ("test", "validation")}

Array = np.ndarray[Any, Any]


def from_dataset(
    dataset: Any,
    *,
    size: int | tuple[int, int] | None = None,
    channels: int | None = None,
    report: Report | None = None,
) -> ImageSet:
    """Read all items of a map-style dataset, such as one of torchvision, into an `ImageSet`.

    Parameters
    ----------
    dataset
        Any object with a length whose items are an image, or an image and its label: a pair, or a
        dictionary with the keys ``image`` (or ``img``) and ``label``. An image is a Pillow image,
        a tensor (C, H, W) or (H, W), or an array (H, W) or (H, W, C); numbers are uint8, or floats
        from 0 to 1. Transforms should neither be random nor normalise the pixels. The names of the
        labels are the attribute ``classes``, if there is one.
    size : (height, width), optional
        Scale each image to cover this size and crop its centre; one number means a square. Without
        it, all images must have the same size.
    channels
        1 for grey, 3 for RGB; by default grey if all images are grey, also if they are stored as
        RGB.
    report
        Called with the number of items that were read, and that of all items.

    Raises
    ------
    TypeError
        If the object is not a map-style dataset, or its items are not images.
    DataError
        If it is empty, or the images have different sizes and `size` is not given.
    """
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise TypeError(
            "data must be an ImageSet or a map-style dataset, with a length and items, but is "
            f"{type(dataset).__name__}; collect its images in an array, and give ImageSet(array)"
        )
    names = getattr(dataset, "classes", ())
    return _read(
        dataset,
        source=type(dataset).__name__,
        label_names=tuple(names) if all(isinstance(name, str) for name in names) else (),
        size=size,
        channels=channels,
        report=report,
    )


def is_on_hub(source: str) -> bool:
    """Return whether a source is that of a dataset of the Hugging Face Hub, such as hf:mnist."""
    return source.startswith(HUB_PREFIX)


def require_asked_for(run: str | os.PathLike[str], source: str, asked: str | None = None) -> None:
    """Raise ValueError if a run names a dataset of the Hub that the user does not ask for.

    A run from elsewhere must not choose what is downloaded.
    """
    if is_on_hub(source) and asked != source:
        raise ValueError(
            f"{run} was trained on {source}, which is not downloaded unless you ask for it; "
            f"give --data {source}"
        )


def read_hub_dataset(
    source: str,
    split: Split,
    *,
    size: int | tuple[int, int] | None = None,
    channels: int | None = None,
    report: Report | None = None,
) -> ImageSet:
    """Read a part of a dataset of the Hugging Face Hub, by the library `datasets`.

    Parameters
    ----------
    source
        ``"hf:NAME"``, or ``"hf:NAME:CONFIGURATION"``. The name may also be a folder that `datasets`
        can read. Programs that come with a dataset are not run.
    split
        ``"train"``, or ``"test"``, for which a dataset may have a part ``validation`` instead.
    size, channels, report
        See `from_dataset`.

    Raises
    ------
    DatasetNotFoundError
        If there is no such dataset.
    MissingSplitError
        If the dataset has no such part.
    DataError
        If it has no images, or if `datasets` is not installed.
    """
    try:
        import datasets
    except ModuleNotFoundError as error:
        if error.name != "datasets":
            raise
        raise DataError(
            f"{source} needs the library datasets; pip install 'poecaps[datasets]'"
        ) from error
    size, channels = as_size(size), as_channels(channels)
    name, _, configuration = source.removeprefix(HUB_PREFIX).partition(":")
    try:
        parts = datasets.load_dataset(name, configuration or None)
    except Exception as error:  # many kinds: of the network, of the Hub and of files
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise DatasetNotFoundError(f"cannot load {source}: {reason}") from error
    found = next((each for each in HUB_SPLITS[split] if each in parts), None)
    if found is None:
        raise MissingSplitError(
            f"{source} has no {split} split: its parts are {', '.join(map(str, parts))}"
        )
    part = parts[found]
    kinds = {key: type(feature).__name__ for key, feature in part.features.items()}
    image = next((key for key, kind in kinds.items() if kind == "Image"), None)
    if image is None:
        raise DataError(
            f"{source} has no column of images, but {', '.join(kinds)}; give another dataset, or "
            "another configuration as hf:NAME:CONFIGURATION"
        )
    label = next((key for key, kind in kinds.items() if kind == "ClassLabel"), None)
    items = part.select_columns([image] if label is None else [image, label])
    renamed = {image: "image"} | ({} if label is None else {label: "label"})
    items = items.rename_columns({old: new for old, new in renamed.items() if old != new})
    try:
        return _read(
            items,
            source=source,
            label_names=() if label is None else tuple(part.features[label].names),
            size=size,
            channels=channels,
            report=report,
        )
    except (DataError, MemoryError, TypeError):
        raise
    except Exception as error:  # Pillow raises many kinds of errors for damaged pictures
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise DataError(f"{source} has a picture that cannot be read: {reason}") from error


def _read(
    items: Any,
    *,
    source: str,
    label_names: tuple[str, ...],
    size: int | tuple[int, int] | None,
    channels: int | None,
    report: Report | None,
) -> ImageSet:
    """Read all items as RGB, and keep one channel if all images are grey."""
    sides, channels = as_size(size), as_channels(channels)
    count = len(items)
    if count == 0:
        raise DataError(f"{source} is empty; give a dataset with images")
    decoded = channels or 3
    images: Array = np.empty(0, np.uint8)
    labels = []
    for number in range(count):
        if report is not None:
            report(number, count)
        image, label = _image_and_label(items[number], source)
        pixels = _as_pixels(image, sides, decoded, source)
        if number == 0:
            images = allocate((count, *pixels.shape), np.dtype(np.uint8))
        if pixels.shape != images.shape[1:]:
            shapes = [f"{shape[0]}×{shape[1]}" for shape in (pixels.shape, images.shape[1:])]
            raise DataError(
                f"the images of {source} have different sizes: item {number} has {shapes[0]} "
                f"pixels, but item 0 has {shapes[1]}; set the option size (height, width) to scale "
                "all of them to one size"
            )
        images[number] = pixels
        labels.append(label)
    if report is not None:
        report(count, count)
    known = [label for label in labels if label is not None]
    if channels is None:
        images = drop_equal_channels(images)
    return ImageSet(
        images,
        np.array(known) if len(known) == count else None,
        label_names=label_names if len(known) == count else (),
        source=source,
    )


def _image_and_label(item: Any, source: str) -> tuple[Any, int | None]:
    """Return the image of an item, and its label if it is a whole number."""
    label = None
    if isinstance(item, Mapping):
        keys = [key for key in itertools.chain(IMAGE_KEYS, LABEL_KEYS) if key in item]
        image = next((item[key] for key in keys if key in IMAGE_KEYS), None)
        label = next((item[key] for key in keys if key in LABEL_KEYS), None)
    elif isinstance(item, (tuple, list)) and item:
        image, label = item[0], item[1] if len(item) > 1 else None
    else:
        image = item
    if image is None:
        raise TypeError(
            f"items of {source} must be images, pairs of an image and a label, or have the key "
            f"image, but the first is {type(item).__name__}"
        )
    number = np.asarray(label)
    return image, int(number) if number.ndim == 0 and number.dtype.kind in "iub" else None


def _as_pixels(image: Any, size: tuple[int, int] | None, channels: int, source: str) -> Array:
    """Return an image as (H, W, C), uint8."""
    from PIL import Image

    if isinstance(image, Image.Image):
        return fit(image, size, channels)
    if isinstance(image, (torch.Tensor, np.ndarray)):
        is_tensor = isinstance(image, torch.Tensor)
        batch: Any = image[None] if image.ndim == 3 or not is_tensor else image[None, None]
        array = ImageSet(batch)
        pixels = array.images[0]
        if array.images.dtype != np.uint8:
            pixels = (pixels.astype(np.float64) * 255).round().astype(np.uint8)
        pixels = pixels[..., 0] if pixels.shape[-1] == 1 else pixels
        return fit(Image.fromarray(np.ascontiguousarray(pixels)), size, channels)
    raise TypeError(
        f"images of {source} must be Pillow images, tensors or arrays, but are "
        f"{type(image).__name__}"
    )
