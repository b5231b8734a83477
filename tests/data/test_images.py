"""What a set of images promises once it is open."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from poecaps.data import DataError, ImageSet, hold_out

Array = np.ndarray[Any, Any]


def test_images_stay_uint8_until_a_batch_is_drawn(digits: Array) -> None:
    data = ImageSet(digits)
    assert data.images.dtype == np.uint8
    assert np.shares_memory(data.images, digits)
    batch = data.batch([4, 1])
    assert batch.shape == (2, 1, 5, 4)
    assert batch.dtype == torch.float32
    np.testing.assert_array_equal(batch[:, 0].numpy(), digits[[4, 1]].astype(np.float32) / 255)


@pytest.mark.parametrize(
    "indices",
    [[1, 3], range(1, 4, 2), slice(1, 4, 2), np.array([1, 3]), torch.tensor([1, 3])],
    ids=repr,
)
def test_a_batch_is_drawn_by_any_kind_of_index(digits: Array, indices: Any) -> None:
    assert torch.equal(ImageSet(digits).batch(indices), ImageSet(digits[[1, 3]]).batch(slice(None)))


def test_a_mask_chooses_the_images_where_it_is_true(digits: Array) -> None:
    mask = np.arange(6) % 2 == 1
    assert torch.equal(ImageSet(digits).batch(mask), ImageSet(digits[mask]).batch(slice(None)))


@pytest.mark.parametrize("indices", [3, [1.5], [[1, 2]], np.array([True, False]), None], ids=repr)
def test_other_indices_are_refused(digits: Array, indices: Any) -> None:
    with pytest.raises(
        TypeError,
        match="indices must be a sequence of whole numbers, a slice or a mask of 6 truth values",
    ):
        ImageSet(digits).batch(indices)
    with pytest.raises(TypeError, match=r"for several images use batch"):
        ImageSet(digits)[0:2]  # type: ignore[index]


def test_tensors_and_lists_of_labels_are_taken(digits: Array) -> None:
    data = ImageSet(torch.from_numpy(digits), [0, 1, 2, 3, 4, 5])  # type: ignore[arg-type]
    assert torch.equal(data.batch([2]), ImageSet(digits).batch([2]))
    assert data.labels is not None
    assert data.labels.tolist() == [0, 1, 2, 3, 4, 5]
    with pytest.raises(DataError, match="signed 64-bit integers, but reach 18446744073709551615"):
        ImageSet(digits, np.full(6, 2**64 - 1, np.uint64))


def test_axes_are_brought_to_one_order(digits: Array) -> None:
    colour = np.stack([digits, digits // 2, digits // 3], axis=-1)
    first = ImageSet(np.moveaxis(colour, -1, 1))
    assert first.shape == ImageSet(colour).shape == (3, 5, 4)
    assert torch.equal(first.batch(range(6)), ImageSet(colour).batch(range(6)))
    assert first.batch([0]).is_contiguous()
    assert ImageSet(digits[..., None]).shape == ImageSet(digits[:, None]).shape == (1, 5, 4)


@pytest.mark.parametrize("dtype", ["<f4", ">f4", "f8", "f2"])
def test_floats_from_0_to_1_are_taken_as_they_are(digits: Array, dtype: str) -> None:
    images = (digits / 255).astype(dtype)
    torch.testing.assert_close(
        ImageSet(images).batch([2])[0, 0], torch.tensor(images[2].astype("f4"))
    )
    assert ImageSet(digits > 99).batch([2]).unique().tolist() == [0.0, 1.0]


def test_batches_cover_every_image_once(digits: Array) -> None:
    data = ImageSet(digits)
    assert [len(batch) for batch in data.batches(4)] == [4, 2]
    assert [len(batch) for batch in data.batches(4, drop_last=True)] == [4]
    assert torch.equal(torch.cat(list(data.batches(4))), data.batch(range(6)))

    def shuffled(seed: int) -> torch.Tensor:
        return torch.cat(list(data.batches(4, generator=torch.Generator().manual_seed(seed))))

    assert torch.equal(shuffled(1), shuffled(1))
    assert not torch.equal(shuffled(1), shuffled(2))
    assert torch.equal(
        shuffled(1).flatten(1).sum(1).sort().values,
        data.batch(range(6)).flatten(1).sum(1).sort().values,
    )


def test_a_dataloader_takes_it(digits: Array) -> None:
    images, labels = next(iter(DataLoader(ImageSet(digits, np.arange(6)), batch_size=6)))  # type: ignore[arg-type]
    assert torch.equal(images, ImageSet(digits).batch(range(6)))
    assert labels.tolist() == list(range(6))
    assert next(iter(DataLoader(ImageSet(digits), batch_size=3))).shape == (3, 1, 5, 4)  # type: ignore[arg-type]


def test_it_introduces_itself_in_one_line(digits: Array) -> None:
    data = ImageSet(digits, np.arange(6) % 3, source="here", skipped={"a.txt": "not a picture"})
    assert repr(data) == "ImageSet(6 grey images of 5×4, 3 labels, from here, 1 file skipped)"


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (np.zeros((6, 20), np.uint8), r"have shape \(6, 20\), but must have shape \(N, H, W\)"),
        (np.zeros((6, 5, 4, 2), np.uint8), r"have shape \(6, 5, 4, 2\)"),
        (np.zeros((0, 5, 4), np.uint8), "are empty"),
        (np.zeros((6, 5, 4), np.int32), "are int32, but must be uint8"),
        (np.full((6, 5, 4), 255.0), "image 0 has the value 255.0; divide by"),
        (np.full((6, 5, 4), np.nan), "image 0 has the value nan"),
        (np.full((6, 5, 4), -0.5), "image 0 has the value -0.5; correct them"),
        (np.arange(6.0).reshape(6, 1, 1), "image 2 has the value 2.0"),
    ],
)
def test_images_that_would_be_garbage_are_refused(
    images: Array, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("poecaps.data.images.CHECK_BATCH", 2)
    with pytest.raises(DataError, match=message):
        ImageSet(images)


@pytest.mark.parametrize(
    "labels", [np.arange(5), np.arange(6.0), np.arange(6)[:, None]], ids=["few", "float", "2-d"]
)
def test_labels_must_be_one_whole_number_an_image(digits: Array, labels: Array) -> None:
    with pytest.raises(DataError, match="there must be one whole number for each of the 6 images"):
        ImageSet(digits, labels)


def test_one_line_describes_a_set() -> None:
    images = np.zeros((3, 5, 4, 3), np.uint8)
    assert ImageSet(images[:1], source="here").describe() == "1 RGB image of 5×4 in here"
    named = ImageSet(images, np.array([0, 2, 1]), label_names=("ant", "bee", "cat"), source="here")
    assert named.describe() == "3 RGB images of 5×4 in here, 3 classes (ant, bee, cat)"
    partly = ImageSet(images, np.array([0, 0, 0]), label_names=("ant", "bee"), source="here")
    assert partly.describe() == "3 RGB images of 5×4 in here, 1 class"
    skipped = {"x/a.gif": "not PNG", "x/b.png": "unreadable", "y/c.gif": "not PNG"}
    text = ImageSet(images, source="here", skipped=skipped).describe()
    assert text == (
        "3 RGB images of 5×4 in here; 3 files skipped: 2 not PNG (a.gif, …), 1 unreadable (b.png)"
    )


def test_a_subset_keeps_what_belongs_to_its_images() -> None:
    whole = ImageSet(
        np.arange(5, dtype=np.uint8).reshape(5, 1, 1),
        np.arange(5) % 2,
        label_names=("even", "odd"),
        files=("a", "b", "c", "d", "e"),
    )
    part = whole.subset([3, 0])
    assert part.images.ravel().tolist() == [3, 0]
    assert part.labels is not None
    assert part.labels.tolist() == [1, 0]
    assert (part.files, part.label_names) == (("d", "a"), ("even", "odd"))


def numbered(files: list[str]) -> ImageSet:
    images = np.arange(len(files), dtype=np.uint8).reshape(-1, 1, 1)
    return ImageSet(images, files=tuple(files))


def test_held_out_images_are_a_random_tenth_and_the_others_are_the_rest() -> None:
    files = [f"{number}.png" for number in range(200)]
    train, test = hold_out(numbered(files))
    assert test is not None
    assert (len(train), len(test), train.held_out) == (180, 20, 20)
    assert sorted(train.files + test.files) == sorted(files)
    assert "180 grey images of 1×1 in an array, and 20 more that are held out" in train.describe()
    assert hold_out(numbered(files))[1].files == test.files  # type: ignore[union-attr]
    assert hold_out(numbered(files), seed=1)[1].files != test.files  # type: ignore[union-attr]
    first = sum(int(name.removesuffix(".png")) < 100 for name in test.files)
    assert 4 <= first <= 16, "they are spread over the set"


def test_held_out_images_stay_held_out_if_others_are_added() -> None:
    files = [f"{number}.png" for number in range(200)]
    _, before = hold_out(numbered(files))
    _, after = hold_out(numbered(sorted([*files, *(f"new{number}.png" for number in range(20))])))
    assert before is not None
    assert after is not None
    assert len(set(before.files) & set(after.files)) >= 17


def test_a_few_images_cannot_be_divided() -> None:
    train, test = hold_out(numbered(["a", "b", "c"]))
    assert test is None
    assert len(train) == 3
    with pytest.raises(ValueError, match="share must be below 1"):
        hold_out(numbered(["a", "b", "c"]), 1.0)
