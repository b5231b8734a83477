"""IDX files: every valid file is read, every invalid file is one clear error."""

from __future__ import annotations

import gzip
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from poecaps.data import DataError, buffers, read_idx

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

Array = np.ndarray[Any, Any]

arrays = st.sampled_from(["u1", "i1", "i2", "i4", "f4", "f8"]).flatmap(
    lambda code: npst.arrays(
        code, npst.array_shapes(min_dims=1, max_dims=4, min_side=1, max_side=5)
    )
)
packers = st.sampled_from([lambda data: data, gzip.compress])


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("idx") / "file"


@given(array=arrays, pack=packers)
def test_what_was_written_is_read(
    array: Array, pack: Callable[[bytes], bytes], path: Path, idx_bytes: Callable[[Array], bytes]
) -> None:
    path.write_bytes(pack(idx_bytes(array)))
    found = read_idx(path)
    assert found.dtype.kind == array.dtype.kind
    assert found.dtype.itemsize == array.dtype.itemsize
    np.testing.assert_array_equal(found, array)


@given(array=arrays, pack=packers, data=st.data())
def test_a_file_cut_anywhere_is_refused(
    array: Array,
    pack: Callable[[bytes], bytes],
    data: st.DataObject,
    path: Path,
    idx_bytes: Callable[[Array], bytes],
) -> None:
    whole = pack(idx_bytes(array))
    path.write_bytes(whole[: data.draw(st.integers(0, len(whole) - 1))])
    with pytest.raises(DataError, match=r"truncated|not an IDX file|damaged gzip"):
        read_idx(path)


@given(array=arrays, pack=packers, extra=st.binary(min_size=1, max_size=20))
def test_a_file_that_goes_on_is_refused(
    array: Array,
    pack: Callable[[bytes], bytes],
    extra: bytes,
    path: Path,
    idx_bytes: Callable[[Array], bytes],
) -> None:
    path.write_bytes(pack(idx_bytes(array) + extra))
    with pytest.raises(DataError, match=r"is too long: .*header announces"):
        read_idx(path)


def is_that_file(array: Array, content: bytes, idx_bytes: Callable[[Array], bytes]) -> bool:
    return idx_bytes(array.astype(array.dtype.newbyteorder("="))) == content


@settings(max_examples=300)
@given(
    prefix=st.sampled_from(
        [b"", b"\0\0", b"\0\0\x08\x01", b"\0\0\x08\x03\0\0\0\x01", b"\x1f\x8b\x08\0"]
    ),
    rest=st.binary(max_size=64),
)
def test_random_bytes_are_refused_or_mean_what_they_say(
    prefix: bytes, rest: bytes, path: Path, idx_bytes: Callable[[Array], bytes]
) -> None:
    path.write_bytes(prefix + rest)
    try:
        array = read_idx(path)
    except DataError as error:
        assert str(path) in str(error)  # noqa: PT017
    else:
        assert is_that_file(array, prefix + rest, idx_bytes)


@settings(max_examples=300)
@given(array=arrays, pack=packers, data=st.data())
def test_one_changed_byte_is_refused_or_means_what_it_says(
    array: Array,
    pack: Callable[[bytes], bytes],
    data: st.DataObject,
    path: Path,
    idx_bytes: Callable[[Array], bytes],
) -> None:
    content = bytearray(pack(idx_bytes(array)))
    where = data.draw(st.integers(0, len(content) - 1))
    content[where] ^= data.draw(st.integers(1, 255))
    path.write_bytes(content)
    try:
        found = read_idx(path)
    except DataError:
        return
    plain = bytes(content) if content[:2] != b"\x1f\x8b" else gzip.decompress(bytes(content))
    assert is_that_file(found, plain, idx_bytes)


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_a_header_that_promises_the_moon_costs_no_memory(
    pack: Callable[[bytes], bytes], path: Path
) -> None:
    path.write_bytes(pack(b"\0\0\x08\x04" + b"\xff" * 16 + b"data"))
    with pytest.raises(DataError, match="truncated"):
        read_idx(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"not an IDX file. It starts with the bytes \(none\)"),
        (b"<!DOCTYPE html>", "looks like a web page"),
        (b"\x89PNG\r\n\x1a\n", "not an IDX file. It starts with the bytes 89 50 4e 47"),
        (b"\0\0\x07\x01\0\0\0\x01a", "not an IDX file"),
        (b"\0\0\x08\x00", "number of axes from 1 to 8"),
        (
            b"\0\0\x08\x02\0\0\0\0\xff\xff\xff\xff",
            r"is empty: the shape in its header is \(0, 4294967295\)",
        ),
        (b"\0\0\x08\x03\0\0", "ends within its header"),
    ],
)
def test_errors_say_what_is_wrong(content: bytes, message: str, path: Path) -> None:
    path.write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        read_idx(path)
    assert str(path) in str(caught.value)


def test_blank_images_compress_well_and_are_read(
    path: Path, idx_bytes: Callable[[Array], bytes]
) -> None:
    blank = np.zeros((5000, 28, 28), np.uint8)
    path.write_bytes(gzip.compress(idx_bytes(blank)))
    assert blank.nbytes > 1000 * path.stat().st_size
    assert not read_idx(path).any()


def test_a_large_plain_file_is_memory_mapped(
    digits: Array, path: Path, idx_bytes: Callable[[Array], bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    path.write_bytes(idx_bytes(digits))
    assert not isinstance(read_idx(path), np.memmap)
    monkeypatch.setattr(buffers, "MAX_IN_MEMORY", 10)
    assert isinstance(read_idx(path), np.memmap)
    np.testing.assert_array_equal(read_idx(path), digits)


def test_a_large_gzipped_file_is_unpacked_to_disk(
    digits: Array, path: Path, idx_bytes: Callable[[Array], bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    path.write_bytes(gzip.compress(idx_bytes(digits)))
    assert not isinstance(read_idx(path), np.memmap)
    monkeypatch.setattr(buffers, "MAX_IN_MEMORY", 10)
    unpacked = read_idx(path)
    assert isinstance(unpacked, np.memmap)
    np.testing.assert_array_equal(unpacked, digits)


def test_no_room_to_unpack_is_one_clear_error(
    digits: Array, path: Path, idx_bytes: Callable[[Array], bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    path.write_bytes(gzip.compress(idx_bytes(digits)))
    monkeypatch.setattr(buffers, "MAX_IN_MEMORY", 10)
    monkeypatch.setattr("os.posix_fallocate", full, raising=False)
    with pytest.raises(DataError, match=r"not enough disk space.*No space left.*TMPDIR"):
        read_idx(path)
