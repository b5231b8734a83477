"""The commands on a plain folder of pictures, without a test part."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from PIL import Image

import poecaps
from poecaps.cli.main import main
from poecaps.data import hold_out
from poecaps.training import record
from tests.cli.conftest import SMALL, arrays

if TYPE_CHECKING:
    from pathlib import Path

COUNT = 60
NAMES = ("even", "odd")


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Grey digits that are stored as RGB, in a subfolder for each label."""
    folder = tmp_path_factory.mktemp("pictures")
    digits = poecaps.data.load("mnist-sample")
    assert digits.labels is not None
    for number in range(COUNT):
        name = NAMES[digits.labels[number] % 2]
        (folder / name).mkdir(exist_ok=True)
        image = Image.fromarray(digits.images[number, ..., 0]).convert("RGB")
        image.save(folder / name / f"{number}.png")
    return folder


@pytest.fixture(scope="module")
def trained(pictures: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "pictures"
    options = ["--data", str(pictures), "--out", str(folder), "--no-figures", *SMALL]
    assert main(["train", *options]) == 0
    return folder


def measure(run: Path, out: Path, *options: str) -> dict[str, object]:
    assert main(["evaluate", str(run), "--samples", "4", "--out", str(out), *options]) == 0
    return dict(json.loads(out.read_text()))


def test_nothing_is_learned_from_a_tenth(trained: Path, pictures: Path) -> None:
    about = record.read(trained)
    assert (about["data"]["images"], about["data"]["held_out"]) == (54, 6)
    train, _ = hold_out(poecaps.data.load(pictures))
    assert about["data"]["sha256"] == record.describe_data(train)["sha256"]


def test_a_model_is_evaluated_on_the_held_out_tenth(trained: Path, tmp_path: Path) -> None:
    measured = measure(trained, tmp_path / "e.json")
    assert (measured["training_images"], measured["test_images"]) == (54, 6)
    assert not [note for note in measured["notes"] if "learned from" in note]  # type: ignore[attr-defined]


def test_few_test_images_are_noted(trained: Path, tmp_path: Path) -> None:
    notes: Any = measure(trained, tmp_path / "e.json")["notes"]
    assert [note for note in notes if note.startswith("only 6 test images: precision, recall")]


def test_reconstructions_are_those_of_the_held_out_tenth(
    trained: Path, pictures: Path, tmp_path: Path
) -> None:
    _, unseen = hold_out(poecaps.data.load(pictures))
    assert unseen is not None
    assert main(["reconstruct", str(trained), "--out", str(tmp_path / "r.png")]) == 0
    shown = arrays(tmp_path / "r.npz")["originals"]
    np.testing.assert_array_equal(shown, unseen.batch(slice(None)).numpy())


def test_without_a_test_part_test_is_the_held_out_tenth(
    trained: Path, pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, unseen = hold_out(poecaps.data.load(pictures))
    assert unseen is not None
    out, options = tmp_path / "c.npz", ["--split", "test", "--out", str(tmp_path / "c.npz")]
    assert main(["encode", str(trained), *options]) == 0
    assert tuple(arrays(out)["files"]) == unseen.files
    last = str(len(unseen) - 1)
    assert main(["traverse", str(trained), "--image", last, "--steps", "2"]) == 0
    assert main(["traverse", str(trained), "--image", str(len(unseen)), "--steps", "2"]) == 2
    # Nothing of another folder was held out.
    (tmp_path / "other").mkdir()
    Image.new("L", (28, 28)).save(tmp_path / "other" / "black.png")
    capsys.readouterr()
    assert main(["encode", str(trained), "--data", str(tmp_path / "other"), *options]) == 1
    assert "has no subfolder 'test'" in capsys.readouterr().err


def test_samples_are_judged_by_a_classifier_of_the_own_labels(
    trained: Path, tmp_path: Path
) -> None:
    measured: dict[str, Any] = measure(trained, tmp_path / "e.json")
    assert measured["classifier"]["training_images"] == 54
    right = measured["classifier"]["test_accuracy"] * measured["test_images"]
    assert right == pytest.approx(round(right), abs=1e-6)
    assert measured["domains"]["joint"]["recognisability"] is not None
    assert measured["domains"]["joint"]["frechet"]["distance"] > 0
    (note,) = (note for note in measured["notes"] if "trained on the 54 training images" in note)
    assert note.endswith(" % of the test images")


def test_the_training_data_by_name_are_divided_as_well(
    trained: Path, pictures: Path, tmp_path: Path
) -> None:
    measured = measure(trained, tmp_path / "e.json", "--data", str(pictures))
    assert (measured["training_images"], measured["test_images"]) == (54, 6)


def test_a_model_that_has_learned_from_every_picture_gets_a_note(
    pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    options = ["--data", str(pictures), "--out", str(run), "--no-figures", "--held-out", "0"]
    assert main(["train", *options, "--quiet", *SMALL]) == 0
    assert record.read(run)["data"]["images"] == COUNT
    measured = measure(run, tmp_path / "e.json")
    assert (measured["training_images"], measured["test_images"]) == (54, 6)
    assert "the model has learned from the test images, too" in measured["notes"]  # type: ignore[operator]
    capsys.readouterr()
    assert main(["reconstruct", str(run)]) == 0
    assert "the model has learned from these" in capsys.readouterr().err


def test_a_model_without_a_record_is_evaluated_on_a_tenth_of_any_folder(
    trained: Path, pictures: Path, tmp_path: Path
) -> None:
    poecaps.load(trained).save(tmp_path / "saved")
    measured = measure(tmp_path / "saved", tmp_path / "e.json", "--data", str(pictures))
    assert (measured["training_images"], measured["test_images"]) == (54, 6)
    assert "the model may have learned from the test images" in measured["notes"]  # type: ignore[operator]


def test_test_pictures_may_be_another_folder_whose_labels_are_matched_by_name(
    trained: Path, pictures: Path, tmp_path: Path
) -> None:
    (tmp_path / "new" / "odd").mkdir(parents=True)
    (tmp_path / "new" / "even").mkdir()
    for name in NAMES:
        for file in sorted((pictures / name).iterdir())[:8]:
            (tmp_path / "new" / name / file.name).write_bytes(file.read_bytes())
    measured = measure(trained, tmp_path / "e.json", "--data", str(tmp_path / "new"))
    assert (measured["training_images"], measured["test_images"]) == (COUNT, 16)
    assert measured["probe"] is not None
    (tmp_path / "new" / "even").rename(tmp_path / "new" / "neither")
    measured = measure(trained, tmp_path / "e.json", "--data", str(tmp_path / "new"))
    assert measured["probe"] is None
    assert measured["classifier"] is None
    assert "the test images have other labels than the training images" in measured["notes"]  # type: ignore[operator]


def test_too_few_pictures_to_divide(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    few = tmp_path / "few"
    few.mkdir()
    random = np.random.default_rng(0)
    for number in range(4):
        pixels = random.integers(0, 256, (28, 28), np.uint8)
        Image.fromarray(pixels).save(few / f"{number}.png")
    options = ["--data", str(few), "--out", str(run), "--no-figures", "--quiet"]
    assert main(["train", *options, *SMALL]) == 0
    assert main(["evaluate", str(run), "--samples", "4"]) == 1
    assert "give a folder of test images with --data" in capsys.readouterr().err


def test_a_single_test_picture_is_refused_before_any_work(
    trained: Path, pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With labels, a classifier would be trained first; and one picture has no covariance."""
    single = tmp_path / "single" / NAMES[0]
    single.mkdir(parents=True)
    shutil.copy(next((pictures / NAMES[0]).iterdir()), single)
    assert main(["evaluate", str(trained), "--data", str(single.parent)]) == 1
    *progress, message = capsys.readouterr().err.splitlines()
    assert message.startswith("poecaps: evaluate needs at least 2 test images, but has 1 of ")
    assert not any("classifier" in line or "warning" in line for line in progress)


def test_training_codes_and_test_codes_are_of_different_pictures(
    trained: Path, pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Otherwise a classifier would be scored on codes that it was fitted on."""
    train, test = hold_out(poecaps.data.load(pictures))
    assert test is not None
    for data in ([], ["--data", str(pictures)]):
        files = {}
        for split in ("train", "test"):
            out = tmp_path / f"{split}.npz"
            options = ["--split", split, "--out", str(out), *data]
            assert main(["encode", str(trained), *options]) == 0
            files[split] = tuple(arrays(out)["files"])
        assert files == {"train": train.files, "test": test.files}
        assert not set(train.files) & set(test.files)
        assert f"without the {len(test)} that training has held" in capsys.readouterr().err


def test_codes_say_whose_they_are(trained: Path, pictures: Path, tmp_path: Path) -> None:
    assert main(["encode", str(trained), "--out", str(tmp_path / "c.npz")]) == 0
    written = arrays(tmp_path / "c.npz")
    assert len(written["codes"]) == COUNT - 6  # a tenth is held out
    assert written["label_names"].tolist() == list(NAMES)
    for file, label in zip(written["files"], written["labels"], strict=True):
        assert (pictures / file).is_file()
        assert file.startswith(NAMES[label])


def test_one_picture_is_encoded(trained: Path, pictures: Path, tmp_path: Path) -> None:
    assert main(["encode", str(trained), "--out", str(tmp_path / "all.npz")]) == 0
    whole = arrays(tmp_path / "all.npz")
    picture, out = pictures / str(whole["files"][7]), tmp_path / "one.npz"
    assert main(["encode", str(trained), "--data", str(picture), "--out", str(out)]) == 0
    one = arrays(out)
    assert one["files"].tolist() == [picture.name]
    np.testing.assert_allclose(one["codes"][0], whole["codes"][7], atol=1e-5)


def test_a_traversal_from_an_image_varies_its_strongest_expert(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["encode", str(trained), "--out", str(tmp_path / "c.npz")]) == 0
    firing = arrays(tmp_path / "c.npz")["firing"]
    image = next(index for index, row in enumerate(firing) if row.argmax() != 0)
    capsys.readouterr()
    which = ["--image", str(image), "--split", "train"]
    assert main(["traverse", str(trained), *which, "--steps", "2"]) == 0
    assert f"expert-{firing[image].argmax()}-image-{image}.png" in capsys.readouterr().out
    assert main(["traverse", str(trained), "--steps", "2"]) == 0
    assert "expert-0.png" in capsys.readouterr().out


def test_reconstructions_are_spread_over_the_pictures(
    trained: Path, pictures: Path, tmp_path: Path
) -> None:
    out = tmp_path / "r.png"
    options = ["--split", "train", "--count", "4", "--out", str(out)]
    assert main(["reconstruct", str(trained), *options]) == 0
    train, _ = hold_out(poecaps.data.load(pictures))
    images = train.batch([0, 18, 35, 53]).numpy()
    np.testing.assert_allclose(arrays(out.with_suffix(".npz"))["originals"], images, atol=1e-6)


def test_the_measures_without_labels_are_on_the_card_and_in_info(
    pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain, run = tmp_path / "plain", tmp_path / "run"
    plain.mkdir()
    for file in pictures.glob("*/*.png"):
        shutil.copy(file, plain)
    options = ["--data", str(plain), "--out", str(run), "--no-figures", "--quiet"]
    assert main(["train", *options, *SMALL]) == 0
    measured: Any = measure(run, run / "evaluation.json")
    draws, tests = measured["domains"]["joint"], measured["test_images"]
    assert draws["frechet"] is None
    capsys.readouterr()
    assert main(["info", str(run)]) == 0
    about, text = capsys.readouterr().out, (run / "README.md").read_text(encoding="utf-8")
    distance = f"{draws['random_frechet']['distance']:.4f}"
    name = "Fréchet distance in random features of draws from all experts together"
    assert f"{name} {distance}" in about
    assert f"| {name} | {distance} |" in text
    assert "precision" not in about  # they are undefined for few images
    draws["neighbourhoods"] = {"precision": 0.5, "recall": 0.25}
    (run / "evaluation.json").write_text(json.dumps(measured))
    assert main(["info", str(run)]) == 0
    about = capsys.readouterr().out
    assert tests < 10
    assert "precision of draws from all experts together 50.0%" in about
    assert "recall of draws from all experts together 25.0%" in about


def test_a_part_of_the_pictures_is_enough(pictures: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    options = ["--data", str(pictures), "--out", str(run), "--no-figures", "--quiet"]
    assert main(["train", *options, "--images", "20", "--preset", "fast", *SMALL]) == 0
    assert record.read(run)["data"]["images"] == 20
