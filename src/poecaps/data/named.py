"""The sets known by name: where they are looked for, and how they are fetched."""

from __future__ import annotations

import hashlib
import os
import sys
import tempfile
import time
import urllib.error
import urllib.request
import zlib
from dataclasses import dataclass
from http.client import HTTPException, IncompleteRead
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from poecaps.data._storage import DataError
from poecaps.data.idx import PREFIX, Split, find_images, find_labels, read_idx
from poecaps.data.images import ImageSet

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from http.client import HTTPResponse

BUNDLED = Path(__file__).parent / "bundled"
SYSTEM = Path("/usr/share/datasets")
ATTEMPTS = 3  # at each mirror
TIMEOUT = 15.0  # seconds without an answer
TRANSIENT = (
    urllib.error.URLError,
    HTTPException,
    TimeoutError,
    ConnectionError,
)  # faults that may pass


class DatasetNotFoundError(FileNotFoundError):
    """A named set is in none of the places where it is looked for."""

    __module__ = "poecaps.data"


@dataclass(frozen=True)
class Published:
    """A set that can be fetched: its mirrors, and the sha256 of its files unpacked, whatever packed them."""

    torchvision: str
    """Where torchvision keeps it below its root."""
    mirrors: tuple[str, ...]
    sha256: Mapping[str, str]
    label_names: tuple[str, ...]


PUBLISHED: Mapping[str, Published] = {
    "mnist": Published(
        torchvision="MNIST/raw",
        mirrors=(
            "https://ossci-datasets.s3.amazonaws.com/mnist/",
            "https://storage.googleapis.com/cvdf-datasets/mnist/",
        ),
        sha256={
            "train-images-idx3-ubyte": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
            "train-labels-idx1-ubyte": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
            "t10k-images-idx3-ubyte": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
            "t10k-labels-idx1-ubyte": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
        },
        label_names=tuple("0123456789"),
    ),
    "fashion-mnist": Published(
        torchvision="FashionMNIST/raw",
        mirrors=(
            "https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion/",
            "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
        ),
        sha256={
            "train-images-idx3-ubyte": "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
            "train-labels-idx1-ubyte": "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
            "t10k-images-idx3-ubyte": "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
            "t10k-labels-idx1-ubyte": "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
        },
        label_names=(
            "T-shirt/top", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot",
        ),
    ),
}  # fmt: skip
NAMES = (*PUBLISHED, *(f"{name}-sample" for name in PUBLISHED))


def load_named(
    name: str, split: Split, path: str | os.PathLike[str] | None, download: bool
) -> ImageSet:
    """Load a bundled sample, or a full set from the first place that has it."""
    full = name.removesuffix("-sample")
    if name == full:
        files = find_full(name, split, path, download)
    elif path is None:
        files = _find(BUNDLED / full, split)
    else:
        raise ValueError(
            f"path is for the full sets, and {name} is part of the package; leave it out"
        )
    if files is None:
        raise DatasetNotFoundError(
            f"{name} is missing from this installation ({BUNDLED / full}); reinstall poecaps"
        )
    images, labels = (read_idx(file) for file in files)
    if name == full:
        _refuse_another_set(name, labels, files[1])
    return ImageSet(
        images, labels, label_names=PUBLISHED[full].label_names, source=f"{name} ({split})"
    )


def find_full(
    name: str, split: Split, path: str | os.PathLike[str] | None, download: bool
) -> tuple[Path, Path] | None:
    """Find the images and labels of a full set: at `path` and nowhere else if given, or else in each place in turn.

    Raises
    ------
    DatasetNotFoundError
        If they are nowhere, naming every place that was tried.
    """
    wanted = " and ".join(file for file in PUBLISHED[name].sha256 if file.startswith(PREFIX[split]))
    tried = []
    for place, folder in _places(name) if path is None else _given("path", Path(path), name):
        if folder is not None and (files := _find(folder, split)) is not None:
            return files
        tried.append(f"{place}: {'not set' if folder is None else folder}")
    if path is None and download:
        try:
            fetch(name, split)
            return _find(cache() / name, split)
        except (OSError, DataError) as error:
            tried.append(f"download: {error}")
    elif path is None:
        tried.append("download: switched off (download=False)")
    lines = "\n".join(f"  - {line}" for line in tried)
    raise DatasetNotFoundError(
        f"{name} ({split}) was not found. Tried:\n{lines}\n"
        f"Put {wanted} (plain or .gz) into one of these folders, or name the folder that holds them with path=…, "
        f"or use the bundled {name}-sample."
    )


def _find(folder: Path, split: Split) -> tuple[Path, Path] | None:
    images = find_images(folder, split)
    labels = None if images is None else find_labels(images)
    return None if images is None or labels is None else (images, labels)


def _refuse_another_set(name: str, labels: np.ndarray[Any, Any], file: Path) -> None:
    """Refuse labels that are known to be those of another set, which somebody put where this one is looked for."""
    header = bytes([0, 0, 0x08, 1]) + np.array(labels.shape, ">u4").tobytes()
    found = hashlib.sha256(header + labels.tobytes()).hexdigest()
    for other, published in PUBLISHED.items():
        if other != name and found in published.sha256.values():
            raise DataError(
                f"{file} holds the labels of {other}, not of {name}; name the right folder"
            )


def cache() -> Path:
    """Folder that downloaded sets are kept in, following the custom of the system."""
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local"
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "poecaps"


def fetch(name: str, split: Split) -> None:
    """Download the images and labels of a set into the cache, each file checked and then put there at once.

    Raises
    ------
    OSError, DataError
        If no mirror delivers, naming the last fault of each, or if the cache cannot be written.
    """
    folder = cache() / name
    folder.mkdir(parents=True, exist_ok=True)
    for file, digest in PUBLISHED[name].sha256.items():
        if not file.startswith(PREFIX[split]) or (folder / file).exists():
            continue
        faults = []
        for mirror in PUBLISHED[name].mirrors:
            url = f"{mirror}{file}.gz"
            try:
                _fetch_file(url, folder / file, digest)
                break
            except (*TRANSIENT, DataError) as error:
                faults.append(f"{url}: {error}")
        else:
            raise DataError("no mirror delivered; " + "; ".join(faults))


def _fetch_file(url: str, target: Path, digest: str) -> None:
    """Download, unpack and check one file, and only then give it its name; what may pass is tried again."""
    for attempt in range(ATTEMPTS):
        if attempt:
            time.sleep(2.0 ** (attempt - 1))
        try:
            return _fetch_once(url, target, digest)
        except TRANSIENT as error:
            refused = isinstance(error, urllib.error.HTTPError) and error.code < 500
            if refused or attempt == ATTEMPTS - 1:
                raise
    return None


def _fetch_once(url: str, target: Path, digest: str) -> None:
    handle, part = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}-")
    try:
        found = hashlib.sha256()
        with os.fdopen(handle, "wb") as file:
            for chunk in _unpacked(url):
                file.write(chunk)
                found.update(chunk)
            file.flush()
            os.fsync(file.fileno())
        if found.hexdigest() != digest:
            raise DataError(f"sha256 of the unpacked file is {found.hexdigest()}, not {digest}")
        Path(part).chmod(0o644)
        Path(part).replace(target)
    finally:
        Path(part).unlink(missing_ok=True)


def _unpacked(url: str) -> Iterator[bytes]:
    """Chunks of a gzipped file as it arrives, with progress on standard error."""
    request = urllib.request.Request(url, headers={"User-Agent": "poecaps"})  # noqa: S310 (our own addresses)
    unzip = zlib.decompressobj(16 + zlib.MAX_WBITS)
    print(f"downloading {url}", file=sys.stderr, flush=True)  # noqa: T201
    with urllib.request.urlopen(request, timeout=TIMEOUT) as response:  # noqa: S310
        try:
            for chunk in _with_progress(response):
                yield unzip.decompress(chunk)
        except zlib.error as error:
            raise DataError(f"the answer is no gzip file ({error})") from error
    if not unzip.eof:
        raise IncompleteRead(b"")


def _with_progress(response: HTTPResponse) -> Iterator[bytes]:
    length = response.headers.get("Content-Length") or ""
    total = int(length) if length.isdecimal() else 0
    live = sys.stderr.isatty()
    done = 0
    while chunk := response.read(2**16):
        done += len(chunk)
        if live:
            share = f" {done / total:4.0%}" if total else ""
            print(f"\r {share} {done / 2**20:5.1f} MiB", end="", file=sys.stderr, flush=True)  # noqa: T201
        yield chunk
    if live:
        print(file=sys.stderr)  # noqa: T201


def _places(name: str) -> Iterator[tuple[str, Path | None]]:
    """Yield the folders to look in, in order; None where the user has not named one."""
    given = os.environ.get("POECAPS_DATA")
    if given:
        yield "$POECAPS_DATA", Path(given).expanduser() / name
        yield "$POECAPS_DATA", Path(given).expanduser() / PUBLISHED[name].torchvision
    else:
        yield "$POECAPS_DATA", None
    yield "user cache", cache() / name
    yield "system", SYSTEM / name


def _given(place: str, folder: Path, name: str) -> Iterator[tuple[str, Path]]:
    """Yield the folder a user named, and where it would hold the set if torchvision had put it there."""
    yield place, folder.expanduser()
    yield place, folder.expanduser() / PUBLISHED[name].torchvision
