"""Folders of pictures, as people have them."""

from __future__ import annotations

import io
import os
import shutil
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from PIL import Image

from poecaps.data import DataError, MissingSplitError, buffers, folder, load, read_folder
from poecaps.data.folder import (
    AHEAD,
    THREADS,
    LargePicturesWarning,
    SkippedFilesWarning,
    _decode,
    _in_parallel,
    suppress_skipped_warnings,
)
from tests.systems import needs_fifo

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

Array = np.ndarray[Any, Any]
JPEG = {"quality": 100, "subsampling": 0}


def save(path: Path, image: Array | Image.Image, **options: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    (image if isinstance(image, Image.Image) else Image.fromarray(image)).save(path, **options)


def coloured(digit: Array) -> Array:
    return np.stack([digit, digit // 2, digit], -1)


def test_reading_is_reported(digits: Array, tmp_path: Path) -> None:
    for index, digit in enumerate(digits):
        save(tmp_path / f"{index}.png", digit)
    seen: list[tuple[int, int]] = []
    load(tmp_path, report=lambda *report: seen.append(report))
    assert seen == sorted(seen)
    assert set(seen) == {(done, len(digits)) for done in range(len(digits) + 1)}


def test_skipped_files_are_reported_as_read(digits: Array, tmp_path: Path) -> None:
    for index, digit in enumerate(digits):
        save(tmp_path / f"{index}.png", digit)
        save(tmp_path / f"{index}-small.png", digit[:9])
        (tmp_path / f"{index}-broken.png").write_bytes(b"no picture")
    seen: list[tuple[int, int]] = []
    with suppress_skipped_warnings():
        read_folder(tmp_path, smallest=17, report=lambda *report: seen.append(report))
    assert seen == sorted(seen)
    assert seen[0] == (0, 3 * len(digits))
    assert [done == total for done, total in seen].index(True) == len(seen) - 1


def test_few_files_are_decoded_in_advance(tmp_path: Path) -> None:
    """So that the memory does not grow with their number, and in their order."""
    files = [tmp_path / str(number) for number in range(10 * AHEAD)]
    begun: list[Path] = []
    with ThreadPoolExecutor(THREADS) as pool:
        for number, (file, found) in enumerate(_in_parallel(pool, begun.append, files)):
            assert (file, found) == (files[number], None)
            assert len(begun) <= number + 1 + AHEAD
    assert sorted(begun) == sorted(files)


class EagerPool(ThreadPoolExecutor):
    """Does what it is asked at once, as many fast threads would."""

    def submit(self, function: Any, /, *arguments: Any, **options: Any) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(function(*arguments, **options))
        return done


def test_few_pixels_are_decoded_in_advance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several small pictures at a time, and one that exceeds the limit by itself."""
    widths = [30, 10, 10, 10, 110, 10, 10, 60, 60, 20]
    for number, width in enumerate(widths):
        save(tmp_path / f"{number}.png", Image.new("L", (width, 10), number))
    begun = list[int]()

    def decode(file: Path, **options: Any) -> Array:
        begun.append(int(file.stem))
        return _decode(file, **options)

    def in_parallel(*arguments: Any) -> Iterator[Any]:
        for number, found in enumerate(_in_parallel(*arguments)):
            ahead = [10 * widths[each] for each in begun[number:]]
            assert sum(ahead) <= 1000 or len(ahead) == 1
            most.append(len(ahead))
            yield found

    most = list[int]()
    monkeypatch.setattr(folder, "ThreadPoolExecutor", EagerPool)
    monkeypatch.setattr(folder, "PIXELS_AHEAD", 1000)
    monkeypatch.setattr(folder, "_decode", decode)
    monkeypatch.setattr(folder, "_in_parallel", in_parallel)
    assert read_folder(tmp_path, size=10).images[:, 0, 0, 0].tolist() == list(range(10))
    assert begun == list(range(10))
    assert max(most) == 4  # of the small ones


def test_pictures_that_take_much_space_are_announced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    for number in range(3):
        Image.new("RGB", (100, 50), number).save(tmp_path / f"{number}.webp")
    monkeypatch.setattr(folder, "LARGE_FOLDER", 3 * 100 * 50 * 3 - 1)
    assert len(read_folder(tmp_path, size=20)) == 3
    assert not recwarn
    with pytest.warns(LargePicturesWarning, match="3 pictures of 50×100 take .* --size 32 32"):
        read_folder(tmp_path)
    monkeypatch.setattr(folder, "LARGE_FOLDER", 3 * 100 * 50 * 3)
    read_folder(tmp_path)


def test_grey_images_are_read_in_the_order_of_their_names(digits: Array, tmp_path: Path) -> None:
    for index, digit in enumerate(digits):
        save(tmp_path / f"{9 - index}.png", digit)
    data = load(tmp_path)
    assert data.shape == (1, 5, 4)
    assert data.labels is None
    np.testing.assert_array_equal(data.images[..., 0], digits[::-1])


@pytest.mark.parametrize(
    ("suffix", "options"),
    [("png", {}), ("webp", {"lossless": True}), ("jpeg", JPEG), ("JPG", JPEG)],
)
def test_every_format_in_colour(suffix: str, options: dict[str, Any], tmp_path: Path) -> None:
    colour = np.zeros((16, 16, 3), np.uint8)
    colour[:, :8] = (200, 30, 60)
    buffer = io.BytesIO()
    Image.fromarray(colour).save(buffer, "jpeg" if suffix == "JPG" else suffix, **options)
    (tmp_path / f"a.{suffix}").write_bytes(buffer.getvalue())
    data = load(tmp_path)
    assert data.shape == (3, 16, 16)
    assert np.abs(data.images[0].astype(int) - colour).max() <= 3


def test_one_colour_image_makes_the_set_rgb_and_channels_decides_otherwise(
    digits: Array, tmp_path: Path
) -> None:
    save(tmp_path / "a.png", digits[0])
    save(tmp_path / "b.png", coloured(digits[1]))
    data = load(tmp_path)
    assert data.shape == (3, 5, 4)
    np.testing.assert_array_equal(data.images[0], np.stack([digits[0]] * 3, -1))
    grey = load(tmp_path, channels=1)
    assert grey.shape == (1, 5, 4)
    np.testing.assert_array_equal(grey.images[0, ..., 0], digits[0])


@pytest.mark.parametrize("suffix", ["png", "jpeg"])
def test_grey_images_that_are_stored_as_rgb_are_grey_and_the_description_says_so(
    suffix: str, digits: Array, tmp_path: Path
) -> None:
    for index, digit in enumerate(digits):
        image = Image.fromarray(digit).convert("RGB")
        save(tmp_path / f"{index}.{suffix}", image, **JPEG if suffix == "jpeg" else {})
    data = load(tmp_path)
    assert data.shape == (1, 5, 4)
    assert np.abs(data.images[..., 0].astype(int) - digits).max() <= 3
    assert f"{len(digits)} grey images of 5×4 (stored as RGB)" in data.describe()
    assert load(tmp_path, channels=3).shape == (3, 5, 4)
    assert "stored" not in load(tmp_path, channels=1).describe()


@pytest.mark.parametrize("grey", ["a", "b", "c"])
def test_no_single_image_decides_that_a_set_is_grey(
    grey: str, digits: Array, tmp_path: Path
) -> None:
    for name, digit in zip("abc", digits, strict=False):
        save(tmp_path / f"{name}.png", digit if name == grey else coloured(digit))
    assert load(tmp_path).shape == (3, 5, 4)


def test_images_are_scaled_and_cropped_on_request(tmp_path: Path) -> None:
    wide = np.zeros((20, 60), np.uint8)
    wide[:, 20:40] = 255
    save(tmp_path / "wide.png", wide)
    save(tmp_path / "square.png", np.full((40, 40), 255, np.uint8))
    with pytest.raises(
        DataError,
        match=r"different sizes: .*wide.png has 20×60 pixels, but .*square.png has 40×40; set the "
        "option size",
    ):
        load(tmp_path)
    for side in (200, 300):  # photographs should not be learned at their size
        (tmp_path / "photographs").mkdir(exist_ok=True)
        save(tmp_path / "photographs" / f"{side}.png", np.zeros((side, side), np.uint8))
    with pytest.raises(DataError, match="such as --size 32 32, to scale"):
        load(tmp_path / "photographs")
    shutil.rmtree(tmp_path / "photographs")
    data = load(tmp_path, size=10)
    assert data.shape == (1, 10, 10)
    assert data.images[:, 3:7, 3:7].min() == 255
    assert load(tmp_path, size=(8, 6)).shape == (1, 8, 6)


def test_unusual_pixels_mean_what_a_viewer_shows(tmp_path: Path) -> None:
    ramp = np.linspace(0, 65535, 20).reshape(4, 5).astype(np.uint16)
    save(tmp_path / "a16.png", ramp)
    np.testing.assert_array_equal(load(tmp_path).images[0, ..., 0], (ramp // 257).astype(np.uint8))

    (tmp_path / "a16.png").unlink()
    clear = np.full((4, 5, 4), 255, np.uint8)
    clear[0, ..., 3] = 0
    save(tmp_path / "alpha.png", clear)
    save(tmp_path / "palette.png", Image.fromarray(np.full((4, 5, 3), 255, np.uint8)).quantize())
    data = load(tmp_path)
    assert data.images[0, 0].max() == 0
    assert data.images[0, 1:].min() == 255
    assert data.images[1].min() == 255


def test_a_photograph_is_turned_upright(tmp_path: Path) -> None:
    sideways = np.zeros((8, 16), np.uint8)
    exif = Image.Exif()
    exif[0x0112] = 6
    save(tmp_path / "a.jpg", sideways, exif=exif)
    assert load(tmp_path).shape == (1, 16, 8)


def test_subfolders_are_labels_and_train_and_test_are_splits(digits: Array, tmp_path: Path) -> None:
    for split, count in (("train", 4), ("test", 2)):
        for index in range(count):
            save(tmp_path / split / ("cat" if index % 2 else "ant") / f"{index}.png", digits[index])
    train, test = load(tmp_path), load(tmp_path, split="test")
    assert (len(train), len(test)) == (4, 2)
    assert train.label_names == ("ant", "cat")
    assert train.labels is not None
    assert train.labels.tolist() == [0, 0, 1, 1]
    with pytest.raises(DataError, match="has no subfolder 'test'"):
        load(tmp_path / "train", split="test")


def test_the_first_level_is_the_label_and_one_subfolder_is_none(
    digits: Array, tmp_path: Path
) -> None:
    for name in ("a/x/y/0.png", "b/x/z/0.png", "b/x/y/1.png"):
        save(tmp_path / "two" / name, digits[0])
    two = load(tmp_path / "two")
    assert two.label_names == ("a", "b")
    assert two.labels is not None
    assert two.labels.tolist() == [0, 1, 1]
    save(tmp_path / "one" / "a" / "0.png", digits[0])
    assert load(tmp_path / "one").labels is None


def test_other_formats_under_a_known_suffix_are_refused(digits: Array, tmp_path: Path) -> None:
    Image.fromarray(digits[0]).save(tmp_path / "a.gif")
    (tmp_path / "a.gif").rename(tmp_path / "a.png")
    with pytest.raises(DataError, match=r"cannot read .*a.png: not a valid image"):
        load(tmp_path)


def test_black_and_white_and_transparent_grey_are_grey(digits: Array, tmp_path: Path) -> None:
    save(tmp_path / "a.png", Image.fromarray(digits[0]).convert("1"))
    save(tmp_path / "b.png", Image.fromarray(digits[0]).convert("LA"))
    assert load(tmp_path).shape == (1, 5, 4)


def test_both_splits_number_their_labels_alike(digits: Array, tmp_path: Path) -> None:
    for name in ("train/ant", "train/bee", "test/bee", "test/cat"):
        save(tmp_path / name / "0.png", digits[0])
    train, test = load(tmp_path), load(tmp_path, split="test")
    assert train.label_names == test.label_names == ("ant", "bee", "cat")
    assert train.labels is not None
    assert test.labels is not None
    assert train.labels.tolist() == [0, 1]
    assert test.labels.tolist() == [1, 2]


@pytest.mark.parametrize("folders", [["test"], ["cat", "dog", "test"], ["training", "test"]])
def test_test_images_are_never_taken_for_training(
    folders: list[str], digits: Array, tmp_path: Path
) -> None:
    for name in folders:
        save(tmp_path / name / "0.png", digits[0])
    with pytest.raises(DataError, match="has a subfolder 'test' but not its counterpart"):
        load(tmp_path)


def test_one_image_outside_the_subfolders_and_there_are_no_labels(
    digits: Array, tmp_path: Path
) -> None:
    for name in ("ant/0.png", "bee/0.png", "0.png"):
        save(tmp_path / name, digits[0])
    assert load(tmp_path).labels is None


def test_a_folder_that_cannot_be_read_is_an_error(
    digits: Array, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path / "a.png", digits[0])

    def forbidden(top: object, onerror: Any) -> Any:
        onerror(PermissionError(13, "Permission denied", "secret"))
        return iter(())

    monkeypatch.setattr("os.walk", forbidden)
    with pytest.raises(PermissionError, match="secret"):
        load(tmp_path)


def test_a_path_that_is_no_folder_is_named(digits: Array, tmp_path: Path) -> None:
    save(tmp_path / "a.png", digits[0])
    with pytest.raises(NotADirectoryError, match=r"a.png is not a folder"):
        read_folder(tmp_path / "a.png")


def test_a_single_picture_is_a_set_of_one(digits: Array, tmp_path: Path) -> None:
    save(tmp_path / "a.png", digits[0])
    data = load(tmp_path / "a.png", size=(10, 8), channels=3)
    assert (len(data), data.shape, data.files) == (1, (3, 10, 8), ("a.png",))
    assert data.source == str(tmp_path / "a.png")
    with pytest.raises(MissingSplitError, match=r"a.png is a single image"):
        load(tmp_path / "a.png", split="test")
    (tmp_path / "b.png").write_bytes(b"no picture")
    with pytest.raises(DataError, match="not a valid image"):
        load(tmp_path / "b.png")


def test_other_files_are_skipped_and_named(digits: Array, tmp_path: Path) -> None:
    save(tmp_path / "a.png", digits[0])
    (tmp_path / "notes.txt").write_text("no picture")
    (tmp_path / ".DS_Store").write_bytes(b"")
    with pytest.warns(UserWarning, match="1 file skipped"):
        data = load(tmp_path)
    assert data.skipped == {str(tmp_path / "notes.txt"): "not PNG, JPEG or WebP"}
    assert "1 file skipped" in repr(data)


@pytest.mark.parametrize("content", [b"", b"not a picture", b"\x89PNG\r\n\x1a\n" + b"\0" * 50])
def test_a_broken_image_is_skipped_and_named(content: bytes, digits: Array, tmp_path: Path) -> None:
    save(tmp_path / "ant" / "a.png", digits[0])
    (tmp_path / "ant" / "b.png").write_bytes(content)
    save(tmp_path / "bee" / "c.png", digits[1])
    with pytest.warns(UserWarning, match="1 file skipped"):
        data = load(tmp_path)
    np.testing.assert_array_equal(data.images[..., 0], digits[:2])
    assert data.skipped == {str(tmp_path / "ant" / "b.png"): "unreadable"}
    assert data.labels is not None
    assert data.labels.tolist() == [0, 1]


@pytest.mark.parametrize("read", [load, read_folder])
def test_a_warning_tells_the_caller_once_what_was_skipped(
    read: Any, digits: Array, tmp_path: Path
) -> None:
    save(tmp_path / "a.png", digits[0])
    (tmp_path / "cut.png").write_bytes(b"")
    (tmp_path / "notes.txt").write_text("no picture")
    with pytest.warns(UserWarning, match="skipped") as told:
        data = read(tmp_path)
    (warning,) = told
    skipped = "2 files skipped: 1 not PNG, JPEG or WebP (notes.txt), 1 unreadable (cut.png)"
    assert (
        str(warning.message)
        == f"found {data.describe()}"
        == f"found 1 grey image of 5×4 in {tmp_path}; {skipped}"
    )
    assert warning.filename == __file__  # the line that asked for the images


def test_a_cut_image_between_sound_ones_is_skipped(digits: Array, tmp_path: Path) -> None:
    """Its header is whole, so that it is not found out before it is decoded."""
    noise = np.random.default_rng(0).integers(0, 256, (5, 4), dtype=np.uint8)
    for name, picture in (("a", noise), ("b", digits[0]), ("c", noise), ("d", digits[1])):
        save(tmp_path / f"{name}.png", picture)
    for name in ("a", "c"):
        whole = (tmp_path / f"{name}.png").read_bytes()
        (tmp_path / f"{name}.png").write_bytes(whole[: whole.index(b"IDAT") + 8])
    with pytest.warns(UserWarning, match="2 files skipped"):
        data = load(tmp_path)
    np.testing.assert_array_equal(data.images[..., 0], digits[:2])
    assert data.skipped == {str(tmp_path / f"{name}.png"): "unreadable" for name in ("a", "c")}


def test_images_that_are_too_small_are_skipped_before_they_are_scaled(
    digits: Array, tmp_path: Path
) -> None:
    save(tmp_path / "a.png", digits[0])  # 5×4
    save(tmp_path / "b.png", np.resize(digits[1], (5, 5)))
    with pytest.warns(UserWarning, match="1 file skipped"):
        data = load(tmp_path, size=8, smallest=5)
    assert (len(data), data.shape) == (1, (1, 8, 8))
    assert data.skipped == {str(tmp_path / "a.png"): "smaller than 5×5"}
    assert len(load(tmp_path, size=8, smallest=4)) == 2
    assert len(load(tmp_path, size=8, smallest=6)) == 2, "a folder of small images is read"


def test_a_cut_image_is_named_where_there_is_no_other(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (40, 40), dtype=np.uint8)
    for name in ("a.png", "a.jpg", "a.webp"):
        path = tmp_path / name[2:] / name
        save(path, noise)
        whole = path.read_bytes()
        path.write_bytes(whole[: len(whole) // 2])
        with pytest.raises(DataError, match=rf"{name}: .*repair or remove it"):
            load(path.parent)


def test_an_image_too_large_to_be_true_is_refused(
    digits: Array, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path / "a.png", digits[0])
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 15)
    with pytest.raises(DataError, match=r"a.png: not a valid image .*exceeds limit"):
        load(tmp_path)


def test_a_folder_without_images_says_what_is_there(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"is empty; give a folder of PNG, JPEG or WebP"):
        read_folder(tmp_path)
    (tmp_path / "data.csv").write_text("1,2")
    with pytest.raises(
        DataError, match=r"contains only data.csv; give a folder of PNG, JPEG or WebP"
    ):
        load(tmp_path)


def test_many_images_go_to_disk(
    digits: Array, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for index, digit in enumerate(digits):
        save(tmp_path / f"{index}.png", digit)
    monkeypatch.setattr(buffers, "MAX_IN_MEMORY", 10)
    data = load(tmp_path)
    assert isinstance(data.images, np.memmap)
    np.testing.assert_array_equal(data.images[..., 0], digits)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"channels": 2}, "channels must be 1 .grey. or 3 .RGB., but is 2"),
        ({"channels": True}, "channels must be 1 .grey. or 3 .RGB., but is True"),
        ({"size": 0}, "size must be a whole number from 1 to 16384, but is 0"),
        ({"size": 10**6}, "size must be a whole number from 1 to 16384, but is 1000000"),
        (
            {"size": (16, 16, 3)},
            r"size must be one number, or height and width, but is \(16, 16, 3\)",
        ),
        ({"path": "x"}, "a data path applies only to named datasets"),
    ],
)
def test_options_that_make_no_sense_are_refused(
    options: dict[str, Any], message: str, digits: Array, tmp_path: Path
) -> None:
    save(tmp_path / "a.png", digits[0])
    with pytest.raises(ValueError, match=message):
        load(tmp_path, **options)


@needs_fifo
@pytest.mark.parametrize("kind", [".png", ".npy", ".npz", "-idx3-ubyte"])
def test_no_fifo_is_opened(kind: str, digits: Array, tmp_path: Path) -> None:
    """Reading a FIFO that nobody writes to would never return."""
    save(tmp_path / "a.png", digits[0])
    os.mkfifo(tmp_path / f"f{kind}")
    (tmp_path / "zeros.png").symlink_to("/dev/zero")
    with suppress_skipped_warnings():
        data = load(tmp_path)
    assert len(data) == 1
    assert data.skipped[str(tmp_path / f"f{kind}")] == "not a regular file"
    assert data.skipped[str(tmp_path / "zeros.png")] == "not a regular file"
    with pytest.raises(DataError, match="neither a file nor a folder"):
        load(tmp_path / f"f{kind}")
    with pytest.raises((OSError, DataError), match="not a regular file"):
        _decode(tmp_path / f"f{kind}", None, 1)


def test_escape_sequences_in_names_are_not_printed(digits: Array, tmp_path: Path) -> None:
    save(tmp_path / "a.png", digits[0])
    (tmp_path / "\x1b]0;title\x07.txt").write_text("x")
    with pytest.warns(SkippedFilesWarning) as caught:
        load(tmp_path)
    assert r"\x1b]0;title\x07.txt" in str(caught[0].message)
    assert "\x1b" not in str(caught[0].message)
