"""Named datasets: the samples in the package, and MNIST and Fashion-MNIST with their downloads."""

from __future__ import annotations

import hashlib
import os
import queue
import sys
import threading
import time
import urllib.error
import urllib.request
import zlib
from dataclasses import dataclass
from http.client import HTTPException, IncompleteRead
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from poecaps._files import atomic_write
from poecaps.data.errors import DataError, DatasetNotFoundError
from poecaps.data.idx import PREFIX, Split, find_images, find_labels, read_idx
from poecaps.data.images import ImageSet

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

BUNDLED = Path(__file__).parent / "bundled"
SYSTEM_FOLDER = Path("/usr/share/datasets")
ATTEMPTS = 3  # at each mirror
TIMEOUT = 15.0  # seconds without a response
DEADLINE = 600.0  # seconds for a file, with all attempts at all mirrors
MAX_FILE = 64 * 2**20  # bytes; the largest file of the datasets has 47,040,016
SCHEMES = ("https",)  # of mirrors, and of the addresses to which they redirect
TRANSIENT_ERRORS = (urllib.error.URLError, HTTPException, TimeoutError, ConnectionError)


@dataclass(frozen=True)
class PublicDataset:
    """A dataset that can be downloaded.

    Attributes
    ----------
    torchvision
        Where torchvision stores the files below its root folder.
    mirrors
        URLs of the folders that contain the gzipped files.
    sha256
        Checksum of each decompressed file, so that it does not depend on the compression.
    label_names
        Names of the labels 0, 1, ….
    """

    torchvision: str
    mirrors: tuple[str, ...]
    sha256: Mapping[str, str]
    label_names: tuple[str, ...]


PUBLIC_DATASETS: Mapping[str, PublicDataset] = {
    "mnist": PublicDataset(
        torchvision="MNIST/raw",
        mirrors=(
            "https://ossci-datasets.s3.amazonaws.com/mnist/",
            "https://storage.googleapis.com/cvdf-datasets/mnist/",
        ),
        sha256={
            "train-images-idx3-ubyte": (
                "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db"
            ),
            "train-labels-idx1-ubyte": (
                "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5"
            ),
            "t10k-images-idx3-ubyte": (
                "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7"
            ),
            "t10k-labels-idx1-ubyte": (
                "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2"
            ),
        },
        label_names=tuple("0123456789"),
    ),
    "fashion-mnist": PublicDataset(
        torchvision="FashionMNIST/raw",
        mirrors=(
            "https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion/",
            "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
        ),
        sha256={
            "train-images-idx3-ubyte": (
                "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888"
            ),
            "train-labels-idx1-ubyte": (
                "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9"
            ),
            "t10k-images-idx3-ubyte": (
                "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b"
            ),
            "t10k-labels-idx1-ubyte": (
                "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34"
            ),
        },
        label_names=(
            *("T-shirt/top", "trouser", "pullover", "dress", "coat"),
            *("sandal", "shirt", "sneaker", "bag", "ankle boot"),
        ),
    ),
}
NAMES = (*PUBLIC_DATASETS, *(f"{name}-sample" for name in PUBLIC_DATASETS))


def load_dataset(
    name: str, split: Split, path: str | os.PathLike[str] | None, download: bool
) -> ImageSet:
    """Load a sample from the package, or a full dataset from the first folder that contains it."""
    full_name = name.removesuffix("-sample")
    if name == full_name:
        files = find_files(name, split, path, download)
    elif path is None:
        files = _find_split(BUNDLED / full_name, split)
    else:
        raise ValueError(
            f"a data path applies only to the full datasets, but {name} is part of the package; "
            "leave it out"
        )
    if files is None:
        raise DatasetNotFoundError(
            f"{name} is missing from this installation ({BUNDLED / full_name}); reinstall poecaps"
        )
    images, labels = (read_idx(file) for file in files)
    if name == full_name:
        # Labels first: they tell apart the datasets, whose files have the same names.
        _require_published(name, f"{PREFIX[split]}-labels-idx1-ubyte", labels, files[1])
        _require_published(name, f"{PREFIX[split]}-images-idx3-ubyte", images, files[0])
    return ImageSet(
        images,
        labels,
        label_names=PUBLIC_DATASETS[full_name].label_names,
        source=f"{name} ({split})",
    )


def find_files(
    name: str, split: Split, path: str | os.PathLike[str] | None, download: bool
) -> tuple[Path, Path] | None:
    """Find the files of the images and labels of a full dataset.

    Parameters
    ----------
    name, split
        The dataset and its part.
    path
        If given, only this folder is searched; otherwise each folder of `_search_folders`.
    download
        Whether to download the files if they are not found.

    Raises
    ------
    DatasetNotFoundError
        If they are not found. The message lists every folder that was searched.
    """
    wanted = " and ".join(
        file for file in PUBLIC_DATASETS[name].sha256 if file.startswith(PREFIX[split])
    )
    tried = []
    searched = _search_folders(name) if path is None else _folders_at("path", Path(path), name)
    for origin, folder in searched:
        if folder is not None and (files := _find_split(folder, split)) is not None:
            return files
        tried.append(f"{origin}: {'not set' if folder is None else folder}")
    if path is None and download:
        try:
            download_split(name, split)
            return _find_split(cache_folder() / name, split)
        except (OSError, DataError) as error:
            tried.append(f"download: {error}")
    elif path is None:
        tried.append("download: disabled (download=False)")
    lines = "\n".join(f"  - {line}" for line in tried)
    raise DatasetNotFoundError(
        f"{name} ({split}) was not found. Tried:\n{lines}\n"
        f"Put {wanted} (plain or .gz) into one of these folders, give the data path of the folder "
        f"that contains them, or use {name}-sample, which is part of the package."
    )


def _find_split(folder: Path, split: Split) -> tuple[Path, Path] | None:
    """Return the files of a split's images and labels in a folder, or None."""
    images = find_images(folder, split)
    labels = None if images is None else find_labels(images)
    return None if images is None or labels is None else (images, labels)


def _require_published(name: str, published: str, array: np.ndarray[Any, Any], file: Path) -> None:
    """Raise `DataError` if an array is not that of the published file."""
    header = bytes([0, 0, 0x08, array.ndim]) + np.array(array.shape, ">u4").tobytes()
    digest = hashlib.sha256(header)
    digest.update(np.ascontiguousarray(array).data)
    found = digest.hexdigest()
    if found == PUBLIC_DATASETS[name].sha256[published]:
        return
    for other, dataset in PUBLIC_DATASETS.items():
        if found in dataset.sha256.values():
            raise DataError(f"{file} is a file of {other}, not {published} of {name}")
    remedy = f"give {file.parent} as the data, not as a folder with {name}"
    if file.parent == cache_folder() / name:
        remedy = "delete it, so that it is downloaded again"
    raise DataError(f"{file} is damaged, or not the published {published} of {name}; {remedy}")


def cache_folder() -> Path:
    """Return the folder of downloaded datasets, following the conventions of the system."""
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local"
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "poecaps"


def download_split(name: str, split: Split) -> None:
    """Download the images and labels of a dataset into the cache.

    Each file is verified against its checksum before it appears in the cache.

    Raises
    ------
    OSError, DataError
        If the download fails at every mirror (the message has the last error of each), or the
        cache cannot be written.
    """
    folder = cache_folder() / name
    folder.mkdir(parents=True, exist_ok=True)
    for file, digest in PUBLIC_DATASETS[name].sha256.items():
        if not file.startswith(PREFIX[split]) or (folder / file).exists():
            continue
        errors, deadline = [], time.monotonic() + DEADLINE
        for mirror in PUBLIC_DATASETS[name].mirrors:
            url = f"{mirror}{file}.gz"
            try:
                _download_file(url, folder / file, digest, deadline)
                break
            except (*TRANSIENT_ERRORS, DataError) as error:
                errors.append(f"{url}: {error}")
        else:
            raise DataError("every mirror failed; " + "; ".join(errors))


def _download_file(url: str, target: Path, digest: str, deadline: float) -> None:
    """Download, decompress and verify one file, with retries after transient errors."""
    for attempt in range(ATTEMPTS):
        if attempt:
            time.sleep(2.0 ** (attempt - 1))
        try:
            return _download_once(url, target, digest, deadline)
        except TRANSIENT_ERRORS as error:
            is_permanent = isinstance(error, urllib.error.HTTPError) and error.code < 500
            if is_permanent or attempt == ATTEMPTS - 1:
                raise
    return None


def _download_once(url: str, target: Path, digest: str, deadline: float) -> None:
    print(f"downloading {url}", file=sys.stderr, flush=True)  # noqa: T201
    found, written = hashlib.sha256(), 0
    decompressor = zlib.decompressobj(16 + zlib.MAX_WBITS)
    with atomic_write(target) as file:
        for received in _received(url, deadline):
            try:
                chunk = decompressor.decompress(received, MAX_FILE - written + 1)
            except zlib.error as error:
                raise DataError(f"the response is not a gzip file ({error})") from error
            written += len(chunk)
            if written > MAX_FILE:
                raise DataError(f"the file has more than {MAX_FILE:,} bytes")
            file.write(chunk)
            found.update(chunk)
        if not decompressor.eof:
            raise IncompleteRead(b"")
        if found.hexdigest() != digest:
            raise DataError(
                f"sha256 of the decompressed file is {found.hexdigest()}, but must be {digest}"
            )


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects to addresses that may be downloaded from."""

    def redirect_request(
        self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> Any:
        try:
            _require_scheme(newurl)
        except DataError:
            fp.close()
            raise
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _require_scheme(url: str) -> None:
    if url.partition(":")[0].lower() not in SCHEMES:
        raise DataError(f"{url} is not an address of {' or '.join(SCHEMES)}")


def _received(url: str, deadline: float) -> Iterator[bytes]:
    """Yield the body of a response as it arrives, until `deadline` at the latest.

    The network is used in another thread: the deadline holds even if a server sends a byte now and
    then, or its name is not found.
    """
    _require_scheme(url)
    arrived: queue.SimpleQueue[bytes | int | Exception] = queue.SimpleQueue()
    is_over = threading.Event()

    def fetch() -> None:
        try:
            request = urllib.request.Request(url, headers={"User-Agent": "poecaps"})  # noqa: S310 (checked)
            opener = urllib.request.build_opener(_Redirects)
            with opener.open(request, timeout=TIMEOUT) as response:
                length = response.headers.get("Content-Length") or ""
                arrived.put(int(length) if length.isdecimal() else 0)
                received = 0
                while not is_over.is_set() and received <= MAX_FILE:
                    chunk = response.read1(2**16)
                    received += len(chunk)
                    arrived.put(chunk)
                    if not chunk:
                        break
        except Exception as error:  # raised in the thread that waits
            if isinstance(error, urllib.error.HTTPError):
                error.close()
            arrived.put(error)

    threading.Thread(target=fetch, daemon=True).start()
    on_terminal, total, received = sys.stderr.isatty(), 0, 0
    try:
        while True:
            try:
                item = arrived.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise DataError(f"the download took longer than {DEADLINE:.0f} s") from None
            if isinstance(item, Exception):
                raise item
            if isinstance(item, int):
                total = item
            elif not item:
                break
            else:
                received += len(item)
                if on_terminal:
                    share = f" {received / total:4.0%}" if total else ""
                    line = f"\r {share} {received / 2**20:5.1f} MiB"
                    print(line, end="", file=sys.stderr, flush=True)  # noqa: T201
                yield item
    finally:
        is_over.set()
        if on_terminal and received:
            print(file=sys.stderr)  # noqa: T201


def _search_folders(name: str) -> Iterator[tuple[str, Path | None]]:
    """Yield the origin and path of each folder to search, in order; None if it is not set."""
    given = os.environ.get("POECAPS_DATA")
    if given:
        yield "$POECAPS_DATA", Path(given).expanduser() / name
        yield "$POECAPS_DATA", Path(given).expanduser() / PUBLIC_DATASETS[name].torchvision
    else:
        yield "$POECAPS_DATA", None
    yield "user cache", cache_folder() / name
    yield "system", SYSTEM_FOLDER / name


def _folders_at(origin: str, folder: Path, name: str) -> Iterator[tuple[str, Path]]:
    """Yield the folder that the user gave, and the one in it where torchvision stores the set."""
    yield origin, folder.expanduser()
    yield origin, folder.expanduser() / PUBLIC_DATASETS[name].torchvision
