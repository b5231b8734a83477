"""Map-style datasets, and datasets of the Hub, which a stand-in for the library provides."""

from __future__ import annotations

import sys
import types
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from PIL import Image

import poecaps
from poecaps.cli.main import main
from poecaps.data import DataError, DatasetNotFoundError, MissingSplitError, from_dataset, load
from poecaps.training import PRESETS, record
from tests.cli.conftest import SMALL

if TYPE_CHECKING:
    from pathlib import Path

COUNT = 24


def pixels(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


class Pairs(torch.utils.data.Dataset[Any]):
    """As the datasets of torchvision are: (image, label), and the names of the classes."""

    classes = ("even", "odd")

    def __init__(self, images: list[Any]) -> None:
        self.images = images

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return self.images[index], index % 2


ARRAYS = list(pixels(4, 9, 8, 3))


@pytest.mark.parametrize(
    "images",
    [
        [Image.fromarray(array) for array in ARRAYS],
        ARRAYS,
        [torch.from_numpy(array).permute(2, 0, 1) for array in ARRAYS],
        [torch.from_numpy(array).permute(2, 0, 1) / 255 for array in ARRAYS],
        [(array / 255).astype(np.float32) for array in ARRAYS],
    ],
    ids=["pillow", "array", "tensor", "float tensor", "float array"],
)
def test_every_kind_of_image_is_read(images: list[Any]) -> None:
    seen: list[tuple[int, int]] = []
    found = from_dataset(Pairs(images), report=lambda *each: seen.append(each))
    assert np.array_equal(found.images, np.stack(ARRAYS))
    assert found.labels is not None
    assert found.labels.tolist() == [0, 1, 0, 1]
    assert found.label_names == ("even", "odd")
    assert found.source == "Pairs"
    assert seen[-1] == (4, 4)


@pytest.mark.parametrize("image", [torch.rand(7, 6), torch.rand(1, 7, 6), pixels(7, 6)])
def test_grey_images_have_one_channel(image: Any) -> None:
    assert from_dataset([image, image]).shape == (1, 7, 6)
    assert from_dataset([image, image], channels=3, size=5).shape == (3, 5, 5)


def test_labels_are_left_out_unless_all_are_whole_numbers() -> None:
    image = pixels(7, 6)
    assert (
        from_dataset([(image, torch.tensor(3)), {"img": image, "label": np.int64(4)}]).labels
        is not None
    )
    for item in (image, (image, "cat"), (image, 0.5), {"image": image}, (image, torch.zeros(2))):
        assert from_dataset([(image, 3), item]).labels is None


def test_images_of_different_sizes_need_a_size() -> None:
    items = [pixels(9, 8, 3), pixels(8, 8, 3)]
    with pytest.raises(
        DataError, match="item 1 has 8×8 pixels, but item 0 has 9×8; set the option"
    ):
        from_dataset(items)
    assert from_dataset(items, size=(6, 7)).shape == (3, 6, 7)


@pytest.mark.parametrize(
    ("dataset", "error", "message"),
    [
        (iter([]), TypeError, "must be an ImageSet or a map-style dataset"),
        ([], DataError, "list is empty"),
        (["a"], TypeError, "images of list must be Pillow images, tensors or arrays, but are str"),
        ([{"x": 1}], TypeError, "or have the key image"),
        ([torch.full((1, 4, 4), 2.0)], DataError, "must be floats from 0 to 1"),
    ],
)
def test_other_objects_are_refused(dataset: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        from_dataset(dataset)


def test_a_network_is_trained_on_a_dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = PRESETS["default"]()
    model = replace(config.model, features=8, capsule_dim=4, experts=((2, 3),))
    short = {
        name: replace(getattr(config, name), epochs=1)
        for name in ("autoencoder", "encoder", "decoder", "pixel_decoder")
    }
    config = replace(config, model=model, size=(18, 19), device="cpu", **short)
    network = poecaps.train(config, data=Pairs(list(pixels(COUNT, 24, 24))))
    assert network.architecture.image_shape == (1, 18, 19)
    assert (tmp_path / "runs" / "Pairs" / "model.safetensors").is_file()


class Feature:
    def __init__(self, kind: str, names: tuple[str, ...] = ()) -> None:
        self.__class__ = type(kind, (Feature,), {})
        self.names = names


class Part(Pairs):
    """As a part of a dataset of the library `datasets`."""

    def __init__(self, columns: dict[str, list[Any]], features: dict[str, Feature]) -> None:
        self.columns, self.features = columns, features

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, index: int) -> Any:
        return {name: values[index] for name, values in self.columns.items()}

    def select_columns(self, names: list[str]) -> Part:
        return Part({name: self.columns[name] for name in names}, self.features)

    def rename_columns(self, names: dict[str, str]) -> Part:
        columns = {names.get(name, name): values for name, values in self.columns.items()}
        return Part(columns, self.features)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, Part]]:
    """Datasets by name, of a stand-in for the library `datasets`."""
    images = [Image.fromarray(array) for array in pixels(COUNT, 20, 20, 3)]
    features = {
        "picture": Feature("Image"),
        "kind": Feature("ClassLabel", ("a", "b")),
        "id": Feature("Value"),
    }
    columns: dict[str, list[Any]] = {
        "picture": images,
        "kind": [n % 2 for n in range(COUNT)],
        "id": list(range(COUNT)),
    }
    part = Part(columns, features)
    words = Part({"text": ["a"]}, {"text": Feature("Value")})
    found = {
        "me/pets": {"train": part, "validation": part},
        "one": {"train": part},
        "words": {"train": words},
    }

    def load_dataset(name: str, configuration: str | None) -> dict[str, Part]:
        if name not in found or configuration not in (None, "small"):
            raise FileNotFoundError(f"no dataset {name}, {configuration}\nfurther lines")
        return found[name]

    module = types.ModuleType("datasets")
    module.load_dataset = load_dataset  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", module)
    return found


@pytest.mark.parametrize("split", ["train", "test"])
@pytest.mark.parametrize("source", ["hf:me/pets", "hf:me/pets:small"])
def test_a_dataset_of_the_hub_is_read_by_its_types(hub: object, source: str, split: Any) -> None:
    found = load(source, split=split, size=16)
    assert (len(found), found.shape, found.label_names) == (COUNT, (3, 16, 16), ("a", "b"))
    assert found.labels is not None
    assert found.labels.tolist() == [n % 2 for n in range(COUNT)]
    assert found.source == source


@pytest.mark.parametrize(
    ("source", "split", "error", "message"),
    [
        ("hf:none", "train", DatasetNotFoundError, "cannot load hf:none: no dataset none, None$"),
        ("hf:one:big", "train", DatasetNotFoundError, "no dataset one, big$"),
        ("hf:one", "test", MissingSplitError, "hf:one has no test split: its parts are train"),
        ("hf:words", "train", DataError, "hf:words has no column of images, but text"),
    ],
)
def test_what_the_hub_does_not_have(
    hub: object, source: str, split: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        load(source, split=split)


def test_a_damaged_picture_of_the_hub(hub: dict[str, dict[str, Part]]) -> None:
    class Damaged(Part):
        def __getitem__(self, index: int) -> Any:
            raise Image.DecompressionBombError("too many pixels\nfurther lines")

        def select_columns(self, names: list[str]) -> Part:
            return self

        rename_columns = select_columns  # type: ignore[assignment]

    whole = hub["one"]["train"]
    hub["one"]["train"] = Damaged(whole.columns, whole.features)
    with pytest.raises(DataError, match=r"hf:one has a picture .* read: too many pixels$"):
        load("hf:one")


def test_the_library_is_named_if_it_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert main(["train", "--data", "hf:me/pets"]) == 1
    assert capsys.readouterr().err == (
        "poecaps: hf:me/pets needs the library datasets; pip install 'poecaps[datasets]'\n"
    )


def test_the_commands_take_a_dataset_of_the_hub(
    hub: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dataset without a test part is divided, and models get images of their size."""
    monkeypatch.chdir(tmp_path)
    assert (
        main(["train", "--data", "hf:one", "--no-figures", "--quiet", "--size", "19", "19", *SMALL])
        == 0
    )
    (run,) = (tmp_path / "runs").iterdir()
    assert run.name == "hf-one"
    assert main(["encode", str(run), "--data", "hf:one"]) == 0
    (file,) = run.glob("codes-*-train.npz")
    with np.load(file) as codes:
        assert len(codes["codes"]) == COUNT - 2  # without those that are held out
    assert record.read(run)["data"]["held_out"] == 2
