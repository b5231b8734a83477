"""Named datasets: the samples in the package, the folders that are searched, and downloads."""

from __future__ import annotations

import gzip
import hashlib
import threading
from contextlib import suppress
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from poecaps.data import DataError, DatasetNotFoundError, datasets, load

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Array = np.ndarray[Any, Any]


@pytest.mark.parametrize("name", ["mnist-sample", "fashion-mnist-sample"])
@pytest.mark.parametrize(("split", "count"), [("train", 10_000), ("test", 2_000)])
def test_the_bundled_sample(name: str, split: Any, count: int) -> None:
    data = load(name, split=split)
    assert len(data) == count
    assert data.shape == (1, 28, 28)
    assert len(data.label_names) == 10
    assert data.labels is not None
    shares = np.bincount(data.labels, minlength=10) / count
    assert shares.min() > 0.07
    assert shares.max() < 0.13
    assert data.batch([0, count - 1]).amax((1, 2, 3)).min() > 0.9


def test_the_licences_travel_with_the_sample() -> None:
    text = (datasets.BUNDLED / "LICENSES.md").read_text(encoding="utf-8")
    assert "CC BY-SA 3.0" in text
    assert "Copyright © 2017 Zalando SE" in text


@pytest.fixture
def files(idx_bytes: Callable[[Array], bytes], digits: Array) -> dict[str, bytes]:
    """A tiny set in MNIST's four files, unpacked."""
    labels = np.arange(6, dtype=np.uint8)
    return {
        "train-images-idx3-ubyte": idx_bytes(digits),
        "train-labels-idx1-ubyte": idx_bytes(labels),
        "t10k-images-idx3-ubyte": idx_bytes(digits[:2]),
        "t10k-labels-idx1-ubyte": idx_bytes(labels[:2]),
    }


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """Every place a set is looked for, moved into an empty folder; no mirror answers."""
    monkeypatch.setenv("POECAPS_DATA", str(tmp_path / "given"))
    monkeypatch.setattr(datasets, "SYSTEM_FOLDER", tmp_path / "system")
    monkeypatch.setattr(datasets, "cache_folder", lambda: tmp_path / "cache")
    monkeypatch.setattr(datasets, "download_split", no_network)
    monkeypatch.setattr(datasets, "_require_published", lambda *_: None)
    return {name: tmp_path / name for name in ("given", "cache", "system")}


def no_network(name: str, split: str) -> None:
    raise DataError("every mirror failed")


def put(folder: Path, files: dict[str, bytes]) -> None:
    folder.mkdir(parents=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)


def test_places_are_searched_in_order(
    places: dict[str, Path],
    files: dict[str, bytes],
    idx_bytes: Callable[[Array], bytes],
    tmp_path: Path,
) -> None:
    """Fill the folders from last to first, each with one image more: the newest is found."""
    for count, place in enumerate(("system", "cache", "given"), start=1):
        images = np.zeros((count, 5, 4), np.uint8)
        both = {
            "train-images-idx3-ubyte": idx_bytes(images),
            "train-labels-idx1-ubyte": idx_bytes(images[:, 0, 0]),
        }
        put(places[place] / "mnist", both)
        assert len(load("mnist")) == count
    put(tmp_path / "elsewhere", files)
    assert len(load("mnist", path=tmp_path / "elsewhere")) == 6


def test_an_explicit_path_is_never_passed_over(
    places: dict[str, Path], files: dict[str, bytes], tmp_path: Path
) -> None:
    put(places["system"] / "mnist", files)
    with pytest.raises(DatasetNotFoundError, match=r"path: .*nowhere"):
        load("mnist", path=tmp_path / "nowhere")


@pytest.mark.parametrize("separator", "-.")
@pytest.mark.parametrize("packed", [False, True])
def test_files_are_found_under_their_customary_names(
    places: dict[str, Path], files: dict[str, bytes], separator: str, packed: bool, digits: Array
) -> None:
    renamed = {
        name.replace("-idx", f"{separator}idx") + (".gz" if packed else ""): gzip.compress(content)
        if packed
        else content
        for name, content in files.items()
    }
    put(places["given"] / "fashion-mnist", renamed)
    data = load("fashion-mnist")
    np.testing.assert_array_equal(data.images[..., 0], digits)
    assert data.label_names[9] == "ankle boot"
    assert len(load("fashion-mnist", split="test")) == 2
    images = next(name for name in renamed if name.startswith("train-images"))
    beside = load(places["given"] / "fashion-mnist" / images)
    assert beside.labels is not None
    assert beside.labels.tolist() == list(range(6))
    assert len(load(places["given"] / "fashion-mnist", split="test")) == 2


def test_a_torchvision_root_will_do(
    places: dict[str, Path], files: dict[str, bytes], tmp_path: Path
) -> None:
    put(tmp_path / "root" / "FashionMNIST" / "raw", files)
    assert len(load("fashion-mnist", path=tmp_path / "root")) == 6


def test_another_set_in_the_place_of_this_one_is_refused(
    mirror: Mirror, files: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mnist = datasets.PUBLIC_DATASETS["mnist"]
    other = replace(mnist, sha256=dict.fromkeys(mnist.sha256, "0" * 64))
    monkeypatch.setattr(datasets, "PUBLIC_DATASETS", {"mnist": other, "fashion-mnist": mnist})
    put(tmp_path / "given", files)
    message = "is a file of fashion-mnist, not train-labels-idx1-ubyte of mnist"
    with pytest.raises(DataError, match=message):
        load("mnist", path=tmp_path / "given")


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", ["images-idx3", "labels-idx1"])
def test_an_altered_file_is_not_a_published_one(
    mirror: Mirror, files: dict[str, bytes], kind: str, packed: bool, tmp_path: Path
) -> None:
    """Wherever it is; the remedy for one in the cache is to delete it."""
    name = f"train-{kind}-ubyte"
    altered = files | {name: files[name][:-3] + bytes(3)}
    if packed:
        altered = {f"{each}.gz": gzip.compress(content) for each, content in altered.items()}
    put(tmp_path / "poecaps" / "mnist", altered)
    with pytest.raises(DataError, match=rf"not the published {name} of mnist; delete it"):
        load("mnist")
    put(tmp_path / "given", altered)
    with pytest.raises(DataError, match=rf"not the published {name} of mnist; give .*given as"):
        load("mnist", path=tmp_path / "given")
    assert len(load(tmp_path / "given")) == 6


def test_a_folder_of_idx_files_needs_no_labels_and_names_a_missing_split(
    files: dict[str, bytes], tmp_path: Path
) -> None:
    put(tmp_path / "mine", {"train-images-idx3-ubyte": files["train-images-idx3-ubyte"]})
    assert load(tmp_path / "mine").labels is None
    with pytest.raises(
        DataError, match=r"has no test split: it does not contain t10k-images-idx3-ubyte"
    ):
        load(tmp_path / "mine", split="test")


def test_when_nothing_is_found_one_error_names_every_place(places: dict[str, Path]) -> None:
    with pytest.raises(DatasetNotFoundError) as caught:
        load("mnist")
    message = str(caught.value)
    for place in places.values():
        assert str(place / "mnist") in message
    assert "download: every mirror failed" in message
    assert "give the data path" in message
    assert "mnist-sample" in message
    with pytest.raises(DatasetNotFoundError, match="disabled"):
        load("mnist", download=False)


def test_a_damaged_set_is_an_error_and_not_passed_over(
    places: dict[str, Path], files: dict[str, bytes]
) -> None:
    put(places["system"] / "mnist", files)
    put(
        places["given"] / "mnist",
        files | {"train-images-idx3-ubyte": files["train-images-idx3-ubyte"][:-1]},
    )
    with pytest.raises(DataError, match="truncated"):
        load("mnist")


def test_images_and_labels_of_different_sets_are_refused(
    places: dict[str, Path], files: dict[str, bytes]
) -> None:
    put(
        places["given"] / "mnist",
        files | {"train-labels-idx1-ubyte": files["t10k-labels-idx1-ubyte"]},
    )
    with pytest.raises(
        DataError, match=r"labels of mnist \(train\) have shape \(2,\).* each of the 6 images"
    ):
        load("mnist")


def test_unknown_names_and_splits_are_refused(tmp_path: Path, files: dict[str, bytes]) -> None:
    with pytest.raises(
        FileNotFoundError,
        match=r"no file or folder mnsit.*did you mean 'mnist'.*fashion-mnist-sample",
    ):
        load("mnsit")
    with pytest.raises(FileNotFoundError, match="did you mean 'mnist'"):
        load("MNIST")
    for nothing in ("", None, np.zeros((2, 5, 4), np.uint8)):
        with pytest.raises(TypeError, match=r"source must be a name or a path.*ImageSet\(array\)"):
            load(nothing)  # type: ignore[arg-type]
    with pytest.raises(
        ValueError,
        match="applies only to the full datasets, but mnist-sample is part of the package",
    ):
        load("mnist-sample", path=tmp_path)
    assert len(load(Path("mnist-sample"), split="test")) == 2000
    with pytest.raises(ValueError, match="split must be one of 'train', 'test', but is 'valid'"):
        load("mnist-sample", split="valid")  # type: ignore[arg-type]
    with pytest.raises(
        ValueError,
        match="size and channels apply only to folders of images, but mnist-sample is not",
    ):
        load("mnist-sample", size=32)
    (tmp_path / "images").write_bytes(files["train-images-idx3-ubyte"])
    with pytest.raises(DataError, match="without a test split"):
        load(tmp_path / "images", split="test")
    with pytest.raises(ValueError, match="size and channels apply only to folders of images"):
        load(tmp_path / "images", channels=1)


# --------------------------------------------------------------------------------------------------
# Download, from a server on this machine


class Mirror(ThreadingHTTPServer):
    """Serves `answers[path]`, a list of (status, body), one by one; the last is repeated."""

    answers: dict[str, list[tuple[int, bytes]]]
    asked: list[str]
    is_over: threading.Event


class Handler(BaseHTTPRequestHandler):
    server: Mirror

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        if self.path.startswith(("/slow-head/", "/slow-body/")):
            sent = b"H" * 2000
            with suppress(OSError):
                if self.path.startswith("/slow-body/"):
                    sent = gzip.compress(bytes(2000), compresslevel=0)
                    self.send_response(200)
                    self.end_headers()
                for byte in sent:
                    if self.server.is_over.wait(0.01):  # a byte now and then, for 20 seconds
                        break
                    self.wfile.write(bytes([byte]))
            return
        if self.path.startswith("/away/"):
            self.send_response(302)
            self.send_header("Location", "https://127.0.0.1:9/")
            self.end_headers()
            return
        answers = self.server.answers.get(self.path, [(404, b"")])
        status, body = answers.pop(0) if len(answers) > 1 else answers[0]
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def mirror(
    files: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Mirror]:
    """Two mirrors instead of the public ones: an empty one, and one with the tiny set."""
    server = Mirror(("127.0.0.1", 0), Handler)
    server.asked, server.is_over = [], threading.Event()
    server.answers = {
        f"/good/{name}.gz": [(200, gzip.compress(content))] for name, content in files.items()
    }
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    address = f"http://127.0.0.1:{server.server_address[1]}"
    checksums = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
    published = datasets.PublicDataset(
        "MNIST/raw", (f"{address}/bad/", f"{address}/good/"), checksums, ("a", "b")
    )
    monkeypatch.setattr(datasets, "PUBLIC_DATASETS", {"mnist": published})
    monkeypatch.setattr(datasets, "SYSTEM_FOLDER", tmp_path / "system")
    monkeypatch.delenv("POECAPS_DATA", raising=False)
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("time.sleep", lambda _: None)
    monkeypatch.setattr(datasets, "SCHEMES", ("http",))
    monkeypatch.setenv("no_proxy", "*")
    yield server
    server.is_over.set()
    server.shutdown()
    thread.join()
    server.server_close()


def cached(tmp_path: Path) -> list[str]:
    folder = tmp_path / "poecaps" / "mnist"
    return sorted(file.name for file in folder.iterdir()) if folder.exists() else []


def test_a_set_is_downloaded_once_and_unpacked(
    mirror: Mirror, digits: Array, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = load("mnist")
    np.testing.assert_array_equal(data.images[..., 0], digits)
    assert cached(tmp_path) == ["train-images-idx3-ubyte", "train-labels-idx1-ubyte"]
    assert "/good/train-images-idx3-ubyte.gz" in capsys.readouterr().err
    asked = len(mirror.asked)
    assert len(load("mnist")) == 6
    assert len(mirror.asked) == asked
    assert len(load("mnist", split="test")) == 2
    assert len(cached(tmp_path)) == 4


def test_what_is_there_is_not_fetched_again(
    mirror: Mirror, files: dict[str, bytes], tmp_path: Path
) -> None:
    put(
        tmp_path / "poecaps" / "mnist",
        {"train-images-idx3-ubyte": files["train-images-idx3-ubyte"]},
    )
    assert len(load("mnist")) == 6
    assert mirror.asked == ["/bad/train-labels-idx1-ubyte.gz", "/good/train-labels-idx1-ubyte.gz"]


def test_progress_is_shown_on_a_terminal(
    mirror: Mirror, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    load("mnist")
    assert "\r  100%" in capsys.readouterr().err


def test_a_failing_mirror_is_tried_again(mirror: Mirror) -> None:
    good = mirror.answers["/good/train-images-idx3-ubyte.gz"]
    good[:0] = [(503, b"busy"), (200, good[0][1][:-9])]
    assert len(load("mnist")) == 6
    assert mirror.asked.count("/good/train-images-idx3-ubyte.gz") == 3
    assert (
        mirror.asked.count("/bad/train-images-idx3-ubyte.gz") == 1
    )  # a 404 does not pass by waiting


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (gzip.compress(b"something else"), "sha256 of the decompressed file is .*, but must be"),
        (b"<html>", "the response is not a gzip file"),
        (gzip.compress(bytes(1000))[:-9], "IncompleteRead"),
    ],
    ids=["another", "a page", "cut"],  # gzip files have a time
)
def test_a_wrong_file_is_never_kept(
    mirror: Mirror, body: bytes, message: str, tmp_path: Path
) -> None:
    mirror.answers["/good/train-labels-idx1-ubyte.gz"] = [(200, body)]
    with pytest.raises(DatasetNotFoundError, match=message) as caught:
        load("mnist")
    assert "/bad/train-labels-idx1-ubyte.gz: HTTP Error 404" in str(caught.value)
    assert cached(tmp_path) == ["train-images-idx3-ubyte"]


def from_mirror(mirror: Mirror, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the dataset be downloaded from one folder of the mirror only."""
    mnist = datasets.PUBLIC_DATASETS["mnist"]
    address = f"http://127.0.0.1:{mirror.server_address[1]}/{folder}/"
    monkeypatch.setattr(
        datasets, "PUBLIC_DATASETS", {"mnist": replace(mnist, mirrors=(address, address))}
    )


def test_a_bomb_is_not_unpacked(
    mirror: Mirror, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datasets, "MAX_FILE", 10_000)
    mirror.answers["/good/train-images-idx3-ubyte.gz"] = [(200, gzip.compress(bytes(10**6)))]
    with pytest.raises(DatasetNotFoundError, match="the file has more than 10,000 bytes"):
        load("mnist")
    assert cached(tmp_path) == []


@pytest.mark.parametrize("part", ["head", "body"])
def test_a_download_has_a_deadline(
    part: str, mirror: Mirror, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mirror that sends a byte now and then is always alive, and never done."""
    from_mirror(mirror, f"slow-{part}", monkeypatch)
    monkeypatch.setattr(datasets, "DEADLINE", 0.3)
    with pytest.raises(DatasetNotFoundError, match="the download took longer than 0 s"):
        load("mnist")
    assert cached(tmp_path) == []


def test_only_encrypted_connections_are_used(
    mirror: Mirror, monkeypatch: pytest.MonkeyPatch
) -> None:
    from_mirror(mirror, "away", monkeypatch)
    with pytest.raises(
        DatasetNotFoundError, match=r"https://127\.0\.0\.1:9/ is not an address of http"
    ):
        load("mnist")
    monkeypatch.undo()
    for dataset in datasets.PUBLIC_DATASETS.values():
        for url in dataset.mirrors:
            assert url.startswith("https://")
    with pytest.raises(DataError, match=r"http://127\.0\.0\.1:9/ is not an address of https"):
        next(datasets._received("http://127.0.0.1:9/", 1e9))


def test_a_cache_that_cannot_be_written_is_named(mirror: Mirror, tmp_path: Path) -> None:
    (tmp_path / "poecaps").write_text("in the way")
    with pytest.raises(DatasetNotFoundError, match=r"download: .*poecaps"):
        load("mnist")


@pytest.mark.parametrize(
    ("platform", "variables", "expected"),
    [
        ("linux", {"XDG_CACHE_HOME": "/x"}, "/x/poecaps"),
        ("linux", {"XDG_CACHE_HOME": ""}, "/home/me/.cache/poecaps"),
        ("darwin", {}, "/home/me/Library/Caches/poecaps"),
        ("win32", {"LOCALAPPDATA": "/local"}, "/local/poecaps"),
    ],
)
def test_the_cache_is_where_the_system_keeps_caches(
    platform: str, variables: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.platform", platform)
    monkeypatch.setattr(Path, "home", lambda: Path("/home/me"))
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert datasets.cache_folder() == Path(expected)
