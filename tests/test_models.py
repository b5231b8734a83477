"""The models that come with poecaps, replaced by a tiny one, and the search for a model by name."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from PIL import Image

import poecaps
from poecaps import Architecture, CapsuleNetwork, hub, models
from poecaps.card import is_unedited
from poecaps.card import write as write_card
from poecaps.cli.main import main
from poecaps.code_density import DOMAINS
from poecaps.data import datasets
from poecaps.training import PRESETS, record, train
from tests.samples import some_of_the_bundled
from tools.refit_directions import main as refit_directions
from tools.ship_model import main as ship_model
from tools.ship_model import ship

if TYPE_CHECKING:
    from collections.abc import Sequence

SMALL = {"features": 8, "capsule_dim": 4, "experts": ((3, 5),), "joint_components": 4}
PRESENT = models.names()  # before a test replaces them


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run whose record states the full MNIST, in a folder of this machine, as data."""
    root = tmp_path_factory.mktemp("elsewhere")
    np.save(root / "few.npy", poecaps.data.load("mnist-sample").images[:48])
    usual = PRESETS["default"]()
    short = {
        name: replace(getattr(usual, name), epochs=1)
        for name in ("autoencoder", "encoder", "decoder", "pixel_decoder")
    }
    config = replace(
        usual, data=str(root / "few.npy"), batch_size=16, device="cpu", seed=7, **short
    )
    train(replace(config, model=replace(usual.model, **SMALL)), root / "run")  # type: ignore[arg-type]
    about = record.read(root / "run")
    about["config"] |= {"data": "mnist", "data_path": str(root)}
    about["data"] |= {"source": "mnist (train)", "images": 60_000}
    record.write(root / "run", about)
    return root / "run"


@pytest.fixture
def shipped(
    run: Path,
    tmp_path_factory: pytest.TempPathFactory,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Path:
    """A package with two models; the current folder is empty, and there are no full data sets."""
    package = tmp_path_factory.mktemp("package")
    monkeypatch.setattr(models, "FOLDER", package)
    ship(run, "mnist")
    shutil.copytree(package / "mnist", package / "fashion-mnist")
    monkeypatch.chdir(tmp_path)
    nowhere = package / "__pycache__"
    nowhere.mkdir()
    monkeypatch.setattr(datasets, "SYSTEM_FOLDER", nowhere)
    monkeypatch.setattr(datasets, "cache_folder", lambda: nowhere)
    monkeypatch.delenv("POECAPS_DATA", raising=False)

    def refuse(*_: Any) -> None:
        raise AssertionError("nothing may be downloaded unasked")

    monkeypatch.setattr(datasets, "download_split", refuse)
    return package


def written(folder: Path) -> set[str]:
    return {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()}


# Names


def test_a_model_is_found_by_its_name_or_by_its_folder(shipped: Path, run: Path) -> None:
    assert models.names() == ("fashion-mnist", "mnist")
    assert models.find("fashion-mnist") == shipped / "fashion-mnist"
    assert poecaps.load("mnist").architecture.experts == ((3, 5),)
    by_path, direct = poecaps.load(run).state_dict(), CapsuleNetwork.load(run).state_dict()
    assert torch.equal(by_path["encoders.0.weight"], direct["encoders.0.weight"])


def test_a_name_means_the_shipped_model_and_a_path_the_folder(
    shipped: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    CapsuleNetwork(Architecture(features=8, experts=((2, 9),))).save("mnist")
    assert poecaps.load("mnist").architecture.experts == ((3, 5),)
    for path in ("./mnist", "mnist/", Path("mnist"), str(tmp_path / "mnist")):
        assert poecaps.load(path).architecture.experts == ((2, 9),)
    assert main(["info", "mnist"]) == 0
    said = capsys.readouterr()
    assert "3 of dimension 5" in said.out
    assert (
        "mnist is the model of the package; for the model in the folder here write ./mnist"
        in said.err
    )
    assert main(["info", "./mnist"]) == 0
    said = capsys.readouterr()
    assert "2 of dimension 9" in said.out
    assert said.err == ""


def test_the_error_of_an_unknown_name_lists_the_models(
    shipped: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    message = (
        r"there is no folder mnits, and no model of that name .*; "
        r"did you mean 'mnist'\? .*: fashion-mnist, mnist$"
    )
    with pytest.raises(FileNotFoundError, match=message):
        poecaps.load("mnits")
    monkeypatch.setattr(models, "FOLDER", shipped / "mnist")
    with pytest.raises(
        FileNotFoundError, match=r"there is no folder mnist, .* This installation has no models"
    ):
        poecaps.load("mnist")


def test_the_hub_is_not_asked_for_what_cannot_be_there(
    shipped: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "_huggingface_hub", lambda: pytest.fail("the Hub was asked"))
    assert poecaps.from_pretrained("mnist").architecture.experts == ((3, 5),)
    for name in ("mnits", "./mnist", "/nowhere/at/all"):
        with pytest.raises(
            FileNotFoundError,
            match=f"^there is no folder {name}, and no model .*: fashion-mnist.*$",
        ):
            poecaps.from_pretrained(name)
    with pytest.raises(pytest.fail.Exception, match="the Hub was asked"):
        poecaps.from_pretrained("me/digits-2.0")


# The command line


@pytest.mark.parametrize(
    ("arguments", "files"),
    [
        (["generate", "mnist"], ["mnist-joint.png", "mnist-joint.npz"]),
        (
            ["generate", "mnist", "--domain", "learned", "--expert", "1"],
            ["mnist-learned-1.png", "mnist-learned-1.npz"],
        ),
        (
            ["reconstruct", "mnist", "--count", "3"],
            ["mnist-reconstructions.png", "mnist-reconstructions.npz"],
        ),
        (
            ["traverse", "mnist", "--image", "2", "--expert", "0"],
            ["mnist-expert-0-image-2.png", "mnist-expert-0-image-2.npz"],
        ),
        (["encode", "mnist", "--split", "test"], ["mnist-codes-test.npz"]),
        (["encode", "mnist", "--split", "test", "--out", "mine.npz"], ["mine.npz"]),
        (["info", "mnist"], []),
    ],
)
def test_results_of_a_shipped_model_go_into_the_current_folder(
    arguments: list[str], files: Sequence[str], shipped: Path, tmp_path: Path
) -> None:
    before = {file: file.read_bytes() for file in shipped.rglob("*") if file.is_file()}
    assert main(arguments) == 0
    assert written(tmp_path) == set(files)
    assert {file: file.read_bytes() for file in shipped.rglob("*") if file.is_file()} == before


def test_a_shipped_model_takes_the_bundled_sample_if_its_own_set_is_missing(
    shipped: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["reconstruct", "mnist", "--count", "2"]) == 0
    assert (
        "the full dataset mnist is not on this machine; using mnist-sample of the package"
        in capsys.readouterr().err
    )
    with np.load("mnist-reconstructions.npz") as drawn:
        sample = poecaps.data.load("mnist-sample", split="test").batch([0, 1999])
        np.testing.assert_array_equal(drawn["originals"], sample.numpy())


def test_a_shipped_model_takes_its_own_set_if_it_is_there(
    shipped: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It needs both splits: otherwise one would be compared with the sample of the other."""
    monkeypatch.setenv("POECAPS_DATA", str(tmp_path))
    shutil.copytree(
        datasets.BUNDLED / "fashion-mnist", tmp_path / "mnist"
    )  # images that can be told apart
    monkeypatch.setattr(datasets, "_require_published", lambda *_: None)
    assert main(["reconstruct", "mnist", "--count", "2", "--out", "a.png"]) == 0
    assert capsys.readouterr().err == ""
    assert main(["info"]) == 0
    assert re.search(r"^data +mnist, fashion-mnist \(not", capsys.readouterr().out, re.MULTILINE)
    with np.load("a.npz") as drawn:
        clothes = poecaps.data.load("fashion-mnist-sample", split="test").batch([0, 1999])
        np.testing.assert_array_equal(drawn["originals"], clothes.numpy())
    (tmp_path / "mnist" / "t10k-images-idx3-ubyte.gz").unlink()
    assert main(["encode", "mnist", "--out", "b.npz"]) == 0
    assert "using mnist-sample of the package" in capsys.readouterr().err


def test_a_shipped_model_is_evaluated_on_one_set_with_its_classifier(
    shipped: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    few = {split: poecaps.data.load("mnist-sample", split=split) for split in ("train", "test")}
    asked = []

    def load(source: str, *, split: str, path: str | None, **_: Any) -> poecaps.data.ImageSet:
        asked.append((source, split, path))
        whole = few[split]
        assert whole.labels is not None
        return poecaps.data.ImageSet(whole.images[:60], whole.labels[:60], source=source)

    monkeypatch.setattr("poecaps.data.load", load)
    assert main(["evaluate", "mnist", "--samples", "20"]) == 0
    assert asked == [("mnist-sample", "train", None), ("mnist-sample", "test", None)]
    said = capsys.readouterr()
    assert said.err.count("using mnist-sample of the package") == 1
    assert "written to mnist-evaluation.json" in said.out
    written = json.loads((tmp_path / "mnist-evaluation.json").read_text())
    assert written["classifier"]["data"] == "mnist"
    assert written["metadata"] == {"half": True}  # measured with the rounded weights


def test_a_card_says_if_the_rounded_weights_were_measured(tmp_path: Path) -> None:
    folder = tmp_path / "mnist"
    shutil.copytree(models.find("mnist"), folder)
    network = poecaps.load(folder)
    measured = json.loads((folder / "evaluation.json").read_text())
    for about, said in (({"half": True}, False), ({}, True), (7, True), ({"half": 1}, True)):
        (folder / "evaluation.json").write_text(json.dumps(measured | {"metadata": about}))
        assert write_card(folder, network, name="mnist", draw=False)
        assert ("before the weights were rounded" in (folder / "README.md").read_text()) is said


def test_info_lists_shipped_models(shipped: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info"]) == 0
    text = capsys.readouterr().out
    assert re.search(r"^models +fashion-mnist, mnist$", text, re.MULTILINE)
    absent = r"mnist \(not on this machine\), fashion-mnist \(not on this machine\)"
    assert re.search(rf"^data +{absent}, mnist-sample, fashion-mnist-sample$", text, re.MULTILINE)
    assert main(["info", "mnist"]) == 0
    text = capsys.readouterr().out
    for fact in (
        "mnist, a model of the package",
        "mnist (train) (60,000 images",
        "poecaps train --data mnist",
        "seed = 7",
    ):
        assert fact in text


# Shipping


def test_a_shipped_model_is_the_run_in_half_precision_without_its_machine(
    shipped: Path, run: Path
) -> None:
    folder = shipped / "mnist"
    assert written(folder) == {
        "README.md",
        "config.json",
        "model.safetensors",
        "run.json",
        "samples.png",
    }
    ours, theirs = poecaps.load(run), poecaps.load("mnist")
    assert ours.architecture == theirs.architecture
    for name, tensor in ours.state_dict().items():
        torch.testing.assert_close(theirs.state_dict()[name], tensor, rtol=1e-3, atol=1e-6)
    assert (folder / "model.safetensors").stat().st_size < 0.65 * (
        run / "model.safetensors"
    ).stat().st_size
    for file in ("README.md", "config.json", "run.json"):
        text = (folder / file).read_text(encoding="utf-8")
        assert str(run.parent) not in text
        assert record.describe_versions()["platform"] not in text
    about = record.read(folder)
    options = record.read(run)["config"]
    assert about["config"] == options | {"data_path": None, "device": "auto"}
    assert about["starts"][0]["versions"]["torch"] == torch.__version__


def test_the_card_states_the_origin_of_the_model(shipped: Path) -> None:
    card = (shipped / "mnist" / "README.md").read_text(encoding="utf-8")
    for fact in (
        "28×28, grey",
        "3 experts of dimension 5",
        "CC BY-SA 3.0",
        "60,000",
        "| seed | 7 |",
        "| preset | default",
    ):
        assert fact in card
    assert "run `poecaps evaluate mnist`" in card


def test_the_card_has_the_numbers_of_the_evaluation(
    shipped: Path,
    run: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "bundled").mkdir()
    few = some_of_the_bundled(tmp_path / "bundled", {"train": 300, "test": 100})
    monkeypatch.setattr(datasets, "BUNDLED", few)
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    out = ["--out", str(copy / "evaluation.json")]
    assert (
        main(
            [
                "evaluate",
                str(copy),
                "--data",
                "mnist-sample",
                "--samples",
                "20",
                "--device",
                "cpu",
                *out,
            ]
        )
        == 0
    )
    assert ship_model([str(copy), "mnist"]) == 0
    assert str(shipped / "mnist" / "model.safetensors") in capsys.readouterr().out
    measured = json.loads((copy / "evaluation.json").read_text())
    card = (shipped / "mnist" / "README.md").read_text(encoding="utf-8")
    assert "on mnist-sample (test), 100 images,\nwith 20 draws" in card
    assert "seed 0, before the weights were rounded.\n" in card
    assert (
        f"| linear probe on codes, test accuracy | {measured['probe']['test_accuracy']:.2%} |"
        in card
    )
    for domain, draws in (
        ("joint", "draws from all experts together"),
        ("learned", "draws from one expert: learned"),
        ("restricted", "draws from one expert: restricted"),
        ("complete", "draws from one expert: complete"),
    ):
        distance = measured["domains"][domain]["frechet"]["distance"]
        assert f"| Fréchet distance of {draws} | {distance:.1f} |" in card


@pytest.mark.parametrize(
    ("changes", "name", "message"),
    [
        ({}, "../mnist", "small letters, digits and hyphens, but is '../mnist'"),
        ({"finished": None}, "mnist", "is not finished"),
        (
            {"config": {"data": "/home/me/faces.npy"}},
            "mnist",
            "was trained on /home/me/faces.npy, but must be trained on one of",
        ),
    ],
)
def test_a_run_that_cannot_be_shipped_raises_an_error(
    changes: dict[str, Any], name: str, message: str, run: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    about = record.read(copy)
    config = about["config"] | changes.get("config", {})
    record.write(copy, about | changes | {"config": config})
    monkeypatch.setattr(models, "FOLDER", tmp_path / "package")
    assert ship_model([str(copy), name]) == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "package").exists()


def test_mean_directions_are_fitted_again_to_the_training_images(
    shipped: Path, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    network = CapsuleNetwork.load(shipped / "mnist")
    usual = network.code_density.mean_direction.clone()
    network.code_density.mean_direction.neg_()
    network.save(shipped / "mnist", half=True)
    domains = {name: {"frechet": {"distance": 7.0}} for name in ("restricted", "learned")}
    measured = {"data": "mnist", "test_images": 5, "samples": 5, "seed": 0, "domains": domains}
    (shipped / "mnist" / "evaluation.json").write_text(json.dumps(measured))
    images = str(run.parent / "few.npy")
    assert refit_directions(["mnist", "--data", images]) == 0
    assert "3 of the mean directions point to the other side" in capsys.readouterr().out
    refitted = CapsuleNetwork.load(shipped / "mnist")
    torch.testing.assert_close(refitted.code_density.mean_direction, usual, rtol=0.01, atol=0.01)
    assert torch.equal(refitted.code_density.mean, network.code_density.mean)
    card = (shipped / "mnist" / "README.md").read_text(encoding="utf-8")
    assert "Fréchet distance of draws from one expert: learned | 7.0 |" in card
    assert "restricted" not in card  # measured with the old directions
    assert is_unedited(card)
    others = run.parent / "negatives.npy"
    np.save(others, 255 - np.load(images))
    assert refit_directions(["mnist", "--data", str(others)]) == 1
    assert "are not those that mnist was trained on" in capsys.readouterr().err


# The real ones


@pytest.mark.parametrize("name", PRESENT)
def test_the_restricted_domain_of_a_model_is_the_half_of_its_own_images(name: str) -> None:
    density = poecaps.load(name).code_density
    assert bool(((density.mean_direction * density.mean).sum(1) > 0).all())


@pytest.mark.parametrize("name", PRESENT)
def test_every_model_of_the_package_draws(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = poecaps.load(name)
    for domain in DOMAINS:
        with torch.no_grad():
            images = network.generate(20, domain, generator=torch.Generator().manual_seed(0))
        assert bool(((images >= 0) & (images <= 1)).all())  # false for NaN
        assert images.std(0).mean() > 0.05  # the images differ
    monkeypatch.chdir(tmp_path)
    assert main(["generate", name, "--device", "cpu"]) == 0
    with Image.open(tmp_path / f"{name}-joint.png") as picture:
        assert picture.size[0] > 20 * 28
    text = (models.FOLDER / name / "README.md").read_text(encoding="utf-8")
    assert is_unedited(text)
    assert f"\n# {name}\n" in text
    assert "](samples.png)" in text
    assert (models.FOLDER / name / "samples.png").stat().st_size < 60_000
    assert record.read(models.FOLDER / name)["config"]["data"] in datasets.NAMES
