"""NumPy files: memory-mapped if possible, never unpickled, an error if damaged."""

from __future__ import annotations

import io
import os
import pickle
import struct
import subprocess
import sys
import zipfile
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from poecaps.data import DataError, buffers, load
from poecaps.data.arrays import read_npy, read_npz

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

Array = np.ndarray[Any, Any]


def is_mapped(array: Array | None) -> bool:
    while array is not None:
        if isinstance(array, np.memmap):
            return True
        array = array.base if isinstance(array.base, np.ndarray) else None
    return False


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("large", [False, True])
def test_npy_is_memory_mapped_if_it_is_large(
    digits: Array, order: Any, large: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    np.save(tmp_path / "x.npy", np.asarray(digits, order=order))
    if large:
        monkeypatch.setattr(buffers, "MAX_IN_MEMORY", 10)
    found = load(tmp_path / "x.npy")
    assert is_mapped(found.images) == large
    np.testing.assert_array_equal(found.images[..., 0], digits)
    (tmp_path / "x.npy").rename(tmp_path / "X.NPY")
    assert len(load(tmp_path / "X.NPY")) == 6


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
@pytest.mark.parametrize("large", [False, True])
def test_npz_is_read_and_mapped_if_it_is_large(
    digits: Array,
    save: Callable[..., None],
    order: Any,
    large: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    save(tmp_path / "x.npz", labels=np.arange(6), images=np.asarray(digits, order=order))
    if large:
        monkeypatch.setattr(buffers, "MAX_IN_MEMORY", 10)
    found = load(tmp_path / "x.npz")
    np.testing.assert_array_equal(found.images[..., 0], digits)
    assert found.labels is not None
    assert found.labels.tolist() == [0, 1, 2, 3, 4, 5]
    assert is_mapped(found.images) == large


def test_a_large_compressed_member_is_unpacked_to_disk(
    digits: Array, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    np.savez_compressed(tmp_path / "x.npz", images=digits)
    monkeypatch.setattr(buffers, "MAX_IN_MEMORY", 10)
    found = load(tmp_path / "x.npz").images
    assert is_mapped(found)
    np.testing.assert_array_equal(found[..., 0], digits)


def test_npz_names(digits: Array, tmp_path: Path) -> None:
    path = tmp_path / "x.npz"
    np.savez(path, x_train=digits, y_train=np.arange(6), x_test=digits[:2], y_test=np.arange(2))
    train, test = load(path), load(path, split="test")
    assert train.labels is not None
    assert test.labels is not None
    assert train.labels.tolist() == [0, 1, 2, 3, 4, 5]
    assert test.labels.tolist() == [0, 1]
    np.savez(path, digits)
    assert load(path).labels is None
    with pytest.raises(
        DataError, match="contains the arrays arr_0, but no array named x_test or test_images"
    ):
        load(path, split="test")
    np.savez(path, pixels=digits)
    with pytest.raises(
        DataError,
        match=r"contains the arrays pixels, but no array named .*images; save it with np.savez",
    ):
        load(path)


class Bomb:
    """Unpickling it makes a file."""

    def __init__(self, mark: str) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, tuple[str, str]]:
        return open, (self.mark, "w")


def test_python_objects_are_refused_unopened(tmp_path: Path) -> None:
    bomb = Bomb(str(tmp_path / "exploded"))
    np.save(tmp_path / "x.npy", np.array([bomb], dtype=object), allow_pickle=True)
    np.savez(tmp_path / "x.npz", images=np.array([bomb], dtype=object))
    (tmp_path / "pickle.npy").write_bytes(pickle.dumps(bomb))
    for name in ("x.npy", "x.npz"):
        with pytest.raises(DataError, match="contains Python objects"):
            load(tmp_path / name)
    with pytest.raises(DataError, match="not a valid NumPy file"):
        load(tmp_path / "pickle.npy")
    assert not (tmp_path / "exploded").exists()


@pytest.mark.parametrize("shape", ["(True, 5, 4)", "(-3, -5, 4)", "(0, 5, 4)", "(3, 5, 4.0)"])
def test_impossible_shapes_are_refused(shape: str, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.zeros((3, 5, 4), np.uint8))
    content = (tmp_path / "x.npy").read_bytes()
    (tmp_path / "x.npy").write_bytes(
        content.replace(b"(3, 5, 4), }" + b" " * (len(shape) - 9), f"{shape}, }}".encode())
    )
    with pytest.raises(DataError, match=r"x.npy"):
        load(tmp_path / "x.npy")


def test_a_member_that_claims_its_neighbours_bytes_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.npz"
    np.savez(path, images=np.zeros((900, 5, 4), np.uint8), labels=np.zeros(9999, np.uint8))
    content = path.read_bytes()
    longer = content.replace(b"'shape': (900, 5, 4), }", b"'shape': (906, 5, 4), }")
    at = longer.index(
        b"PK\x01\x02"
    )  # the central directory: uncompressed size at byte 24 of its first entry
    size = int.from_bytes(longer[at + 24 : at + 28], "little") + 120
    path.write_bytes(longer[: at + 24] + size.to_bytes(4, "little") + longer[at + 28 :])
    with pytest.raises(DataError, match=r"images.npy\) is truncated"):
        load(path)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    folder = tmp_path_factory.mktemp("arrays")
    array = np.arange(60, dtype=np.uint8).reshape(3, 5, 4)
    np.save(folder / "a.npy", array)
    np.savez(folder / "b.npz", images=array)
    np.savez_compressed(folder / "c.npz", images=array)
    return [(folder / name).read_bytes() for name in ("a.npy", "b.npz", "c.npz")]


@given(data=st.data())
def test_cut_or_changed_files_are_refused_or_hold_an_array_of_the_promised_size(
    data: st.DataObject, files: list[bytes], tmp_path_factory: pytest.TempPathFactory
) -> None:
    which = data.draw(st.integers(0, 2))
    content = bytearray(files[which])
    if data.draw(st.booleans()):
        del content[data.draw(st.integers(0, len(content) - 1)) :]
    else:
        content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
    path = tmp_path_factory.getbasetemp() / ("x.npy" if which == 0 else "x.npz")
    path.write_bytes(content)
    try:
        array = read_npy(path) if which == 0 else read_npz(path, [["images"]])[0]
    except DataError as error:
        assert str(path) in str(error)  # noqa: PT017
    else:
        assert array is not None
        assert array.nbytes == 60
        np.array(array)


def test_a_header_cannot_reserve_more_than_the_file_can_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """201 bytes that announce 7.84 GB, also if they announce many compressed bytes, too."""
    monkeypatch.setattr(buffers, "allocate", None)
    header = io.BytesIO()
    about = {"descr": "|u1", "fortran_order": False, "shape": (10_000_000, 28, 28)}
    np.lib.format.write_array_header_1_0(header, about)
    with zipfile.ZipFile(tmp_path / "x.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("images.npy", header.getvalue() + bytes(100))
    content = bytearray((tmp_path / "x.npz").read_bytes())
    compressed = content.index(b"PK\1\2") + 20  # where the directory has the compressed size
    for size in (content[compressed : compressed + 4], b"\0\0\0\x7f"):
        content[compressed : compressed + 4] = size
        (tmp_path / "x.npz").write_bytes(content)
        with pytest.raises(DataError, match=r"announces 7840000000 bytes of data, more than \d+ c"):
            load(tmp_path / "x.npz")
    with zipfile.ZipFile(tmp_path / "x.npz", "w", zipfile.ZIP_LZMA) as archive:
        archive.writestr("images.npy", header.getvalue())
    with pytest.raises(DataError, match="unknown compression"):
        load(tmp_path / "x.npz")


@pytest.mark.parametrize("large", [False, True])
def test_a_file_that_is_cut_while_in_use_kills_nobody(
    large: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mapped pages beyond the end of a file would end the process by SIGBUS."""
    images = np.random.default_rng(0).integers(0, 256, (20, 100, 100), dtype=np.uint8)
    np.save(tmp_path / "x.npy", images)
    if large:
        monkeypatch.setattr(buffers, "MAX_IN_MEMORY", 10)
    found = load(tmp_path / "x.npy")
    os.truncate(tmp_path / "x.npy", 200)
    if large:
        with pytest.raises(DataError, match=r"was cut while it was in use: it had 200128 bytes"):
            found.batch([19])
    else:
        assert (
            found.batch([19]).mul(255).byte().numpy().ravel().tolist()
            == images[19].ravel().tolist()
        )


READ_WITH_LITTLE_MEMORY = """
import resource, sys
from poecaps.data import DataError, load

used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 2**28, used + 2**28))
try:
    load(sys.argv[1])
except DataError as error:
    print(error)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere, memory is not limited this way")
@pytest.mark.parametrize("name", ["x.npz", "x.npy"])
def test_a_long_header_is_not_read(name: str, tmp_path: Path) -> None:
    """A gigabyte of spaces, which is compressed to a megabyte, or a hole of the file."""
    path, size = tmp_path / name, 2**30
    start = b"\x93NUMPY\x02\x00" + struct.pack("<I", size)
    if name == "x.npy":
        path.write_bytes(start)
        os.truncate(path, size + 12)
    else:
        with (
            zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive,
            archive.open("images.npy", "w") as member,
        ):
            member.write(start)
            for _ in range(size >> 20):
                member.write(b" " * 2**20)
    command = [sys.executable, "-c", READ_WITH_LITTLE_MEMORY, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.count("\n") == 1, done.stderr
    assert "header is longer than 10,000 bytes" in done.stdout


def test_a_header_of_many_fields_is_refused_like_a_long_one(tmp_path: Path) -> None:
    """Of version 1, which may have 65,535 bytes."""
    np.save(tmp_path / "x.npy", np.zeros(3, [(f"field{number}", "u1") for number in range(1000)]))
    with pytest.raises(DataError, match=r"its header is longer than 10,000 bytes"):
        load(tmp_path / "x.npy")
