"""Image files in and out."""

from __future__ import annotations

import io
import struct
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from poecaps.explorer import pictures
from poecaps.explorer.pictures import PictureError

GREY = (1, 28, 28)


def png(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(array).save(file, "PNG")
    return file.getvalue()


@pytest.mark.parametrize("shape", [(28, 28, 1), (9, 14, 3)])
def test_what_is_written_is_read_back(shape: tuple[int, int, int]) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    height, width, channels = shape
    assert np.array_equal(
        pictures.read(pictures.write(pixels), (channels, height, width)).pixels, pixels
    )


def test_enlarging_repeats_pixels() -> None:
    pixels = np.arange(12, dtype=np.uint8).reshape(3, 4, 1)
    large = np.asarray(Image.open(io.BytesIO(pictures.write(pixels, scale=5))))
    assert large.shape == (15, 20)
    assert np.array_equal(large[::5, ::5], pixels[..., 0])


def test_a_drawing_in_a_corner_comes_to_the_middle() -> None:
    page = np.zeros((280, 280), np.uint8)
    page[10:60, 10:40] = 255
    seen = pictures.read(png(page), GREY, centre=True).pixels[..., 0].astype(float)
    rows, columns = np.nonzero(seen > 127)
    assert np.ptp(rows) + 1 == 20
    assert np.ptp(columns) + 1 == 12
    assert abs(rows.mean() - 13.5) <= 0.5
    assert abs(columns.mean() - 13.5) <= 0.5


def test_a_drawing_on_light_paper_comes_to_the_middle_as_well() -> None:
    page = np.zeros((280, 280), np.uint8)
    page[10:60, 10:40] = 255
    white = pictures.read(png(page), GREY, centre=True, background=0.0).pixels
    black = pictures.read(png(255 - page), GREY, centre=True, background=1.0)
    assert not black.inverted
    assert np.array_equal(black.pixels, 255 - white)


@pytest.mark.parametrize(
    "drawn", [np.s_[0:0, 0:0], np.s_[3:4, 3:4], np.s_[:, 139:141], np.s_[:, :]]
)
def test_any_drawing_can_be_centred(drawn: tuple[slice, slice]) -> None:
    page = np.zeros((280, 280), np.uint8)
    page[drawn] = 255
    assert (pictures.read(png(page), GREY, centre=True).pixels.max() > 0) == bool(page.any())


def test_ink_on_paper_can_be_inverted() -> None:
    page = np.full((28, 28), 255, np.uint8)
    page[10:18, 10:18] = 0
    seen = pictures.read(png(page), GREY, invert=True)
    assert np.array_equal(seen.pixels[..., 0], 255 - page)
    assert seen.inverted


def test_dark_on_light_is_detected_where_a_model_knows_light_on_dark() -> None:
    shade = np.linspace(150, 200, 280)  # a photo of grey paper, lit from one side
    page = np.tile(shade, (280, 1)).astype(np.uint8)
    page[60:220, 120:150] = 40
    seen = pictures.read(png(page), GREY, centre=True, invert=None, background=0.0)
    assert seen.inverted
    assert seen.pixels[0].max() < 30
    assert seen.pixels[14, 13:15].min() > 200
    for background in (1.0, None):  # the model's images are dark on light, or photos
        assert not pictures.read(png(page), GREY, invert=None, background=background).inverted
    noise = np.random.default_rng(0).integers(0, 256, (28, 28), dtype=np.uint8)
    assert not pictures.read(png(noise), GREY, invert=None, background=0.0).inverted
    light_on_dark = pictures.read(png(255 - page), GREY, invert=None, background=0.0)
    assert not light_on_dark.inverted


def test_large_and_transparent_pictures_in_colour_become_what_the_model_sees() -> None:
    page = np.zeros((300, 500, 4), np.uint8)
    page[..., :3] = 255
    page[:, 250:, 3] = 255  # the left half is transparent
    seen = pictures.read(png(page), GREY).pixels[..., 0]
    assert seen[:, :12].max() < 30
    assert seen[:, 16:].min() > 225


def bomb(width: int, height: int) -> bytes:
    """Make a PNG that says it is huge."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0))
    return (
        b"\x89PNG\r\n\x1a\n"
        + header
        + chunk(b"IDAT", zlib.compress(bytes(1000)))
        + chunk(b"IEND", b"")
    )


def broken() -> dict[str, bytes]:
    whole = png(np.random.default_rng(0).integers(0, 256, (60, 60), dtype=np.uint8))
    return {
        "empty": b"",
        "text": b"not a picture",
        "cut": whole[: len(whole) // 2],
        "header": whole[:20],
        "svg": b"<svg xmlns='http://www.w3.org/2000/svg'/>",
        "gif": b"GIF89a\x01\x00\x01\x00\x00\x00\x00;",
        "bomb": bomb(60_000, 60_000),
        "huge": bomb(2**31 - 1, 2**31 - 1),
    }


@pytest.mark.parametrize("name", broken())
def test_a_broken_file_is_refused(name: str) -> None:
    with pytest.raises(PictureError):
        pictures.read(broken()[name], GREY)


@given(st.binary(max_size=300), st.integers(0, 80), st.binary(max_size=40))
def test_damage_is_either_read_or_refused(data: bytes, start: int, other: bytes) -> None:
    whole = png(np.zeros((8, 8), np.uint8))
    assert seen_or_refused(data)
    assert seen_or_refused(whole[:start] + other + whole[start + len(other) :])


def seen_or_refused(data: bytes) -> bool:
    try:
        return pictures.read(data, GREY).pixels.shape == (28, 28, 1)
    except PictureError:
        return True
