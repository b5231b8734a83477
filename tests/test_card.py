"""The model card of a saved network; upload to and download from the Hub, with its API replaced."""

from __future__ import annotations

import ast
import json
import re
import shlex
import shutil
import sys
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import huggingface_hub
import numpy as np
import pytest
import torch
import yaml
from PIL import Image

import poecaps
from poecaps import Architecture, CapsuleNetwork, ModelError, card, evaluation, hub
from poecaps.cli.main import main
from poecaps.evaluation import judge
from poecaps.training import PRESETS, record
from tests.networks import TINY_DENSITY, shorten_chains, untrained_with_density
from tests.systems import needs_links

if TYPE_CHECKING:
    from pathlib import Path

SMALL = shlex.split(
    "--model.features 8 --model.capsule-dim 4 --model.experts 3 5 --model.joint-components 4 "
    "--batch-size 16 --autoencoder.epochs 1 --encoder.epochs 1 --decoder.epochs 1 "
    "--pixel-decoder.epochs 1 --device cpu"
)


@pytest.fixture(autouse=True)
def _short_training_of_judges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge, "MAX_EPOCHS", 1)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on images that are not a known set."""
    root = tmp_path_factory.mktemp("home-of-somebody")
    train, test = poecaps.data.load("mnist-sample"), poecaps.data.load("mnist-sample", split="test")
    assert train.labels is not None
    assert test.labels is not None
    np.savez(root / "shapes.npz", x_train=train.images[:48], y_train=train.labels[:48],
             x_test=test.images[:20], y_test=test.labels[:20])  # fmt: skip
    arguments = [
        "--data",
        str(root / "shapes.npz"),
        "--out",
        str(root / "run"),
        "--quiet",
        "--seed",
        "3",
    ]
    assert main(["train", *arguments, *SMALL]) == 0
    return root / "run"


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    shutil.copytree(trained, tmp_path / "run")
    return tmp_path / "run"


def text_of(folder: Path) -> str:
    return (folder / "README.md").read_text(encoding="utf-8")


def head_of(folder: Path) -> dict[str, Any]:
    _, head, _ = text_of(folder).split("---\n", 2)
    found = yaml.safe_load(head)
    assert isinstance(found, dict)
    return found


# The card


def test_a_run_ends_with_a_card_that_states_how_it_was_trained(run: Path) -> None:
    head, text = head_of(run), text_of(run)
    assert head["library_name"] == "poecaps"
    assert head["pipeline_tag"] == "unconditional-image-generation"
    assert head["license"] == "unknown"  # the owner has to choose it
    assert "capsule-networks" in head["tags"]
    assert "datasets" not in head
    assert "model-index" not in head
    for fact in (
        "28×28, grey",
        "3 experts of dimension 5",
        "| seed | 3 |",
        "| training images | 48,",
        "shapes.npz",
    ):
        assert fact in text
    assert "Not evaluated yet; run `poecaps evaluate FOLDER`." in text
    assert "| preset | default, with the changes below |" in text
    assert "![40 random draws from all experts together](samples.png)" in text
    with Image.open(run / "samples.png") as picture:
        assert picture.size[0] > 10 * 28
    assert not (run / "samples.npz").exists()


def test_a_card_holds_no_path_of_the_machine(run: Path, trained: Path) -> None:
    assert main(["evaluate", str(run), "--samples", "20", "--device", "cpu"]) == 0
    text = text_of(run)
    assert str(trained.parent) not in text
    assert trained.parent.name not in text
    assert record.describe_versions()["platform"] not in text


def test_evaluation_completes_the_card(run: Path) -> None:
    before = (run / "samples.png").read_bytes()
    assert main(["evaluate", str(run), "--samples", "20", "--device", "cpu"]) == 0
    measured = json.loads((run / "evaluation.json").read_text())
    text, (model,) = text_of(run), head_of(run)["model-index"]
    accuracy = measured["probe"]["test_accuracy"]
    assert f"| linear probe on codes, test accuracy | {accuracy:.2%} |" in text
    assert "on shapes.npz, 20 images,\nwith 20 draws" in text
    assert "Not evaluated" not in text
    metrics = {each["type"]: each["value"] for each in model["results"][0]["metrics"]}
    assert metrics["accuracy"] == pytest.approx(accuracy)
    assert measured["classifier"]["training_images"] == 48  # trained on the labels of the data
    joint = measured["domains"]["joint"]["recognisability"]["share"]
    assert metrics["recognisable-draws"] == pytest.approx(joint)
    assert (run / "samples.png").read_bytes() == before


def test_the_hub_understands_the_head_of_a_card(run: Path) -> None:
    assert main(["evaluate", str(run), "--samples", "20", "--device", "cpu"]) == 0
    data = huggingface_hub.ModelCard.load(run / "README.md").data
    assert data.library_name == "poecaps"  # type: ignore[attr-defined, unused-ignore]
    results = data.eval_results  # type: ignore[attr-defined, unused-ignore]
    assert {each.metric_type for each in results} >= {"accuracy"}
    assert {each.task_type for each in results} == {"unconditional-image-generation"}


def test_an_edited_card_is_not_overwritten(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mine = text_of(run).replace("For trying out poecaps", "For finding broken parts")
    assert mine != text_of(run)
    (run / "README.md").write_text(mine, encoding="utf-8")
    assert main(["evaluate", str(run), "--samples", "20", "--device", "cpu"]) == 0
    assert text_of(run) == mine
    assert f"{run / 'README.md'} was edited, so it is not overwritten" in capsys.readouterr().err


def test_a_card_without_figures_shows_none(trained: Path, tmp_path: Path) -> None:
    data = str(trained.parent / "shapes.npz")
    assert (
        main(
            [
                "train",
                "--data",
                data,
                "--out",
                str(tmp_path / "run"),
                "--quiet",
                "--no-figures",
                *SMALL,
            ]
        )
        == 0
    )
    assert "samples.png" not in text_of(tmp_path / "run")
    assert not (tmp_path / "run" / "samples.png").exists()


def test_a_bare_network_has_a_card_too(tmp_path: Path) -> None:
    network = CapsuleNetwork(
        Architecture(features=8, experts=((2, 9),), image_shape=(3, 20, 18))
    ).eval()
    network.save(tmp_path / "bare", half=True)
    assert card.write(tmp_path / "bare", network, name='odd: "name"', licence="mit")
    head, text = head_of(tmp_path / "bare"), text_of(tmp_path / "bare")
    assert head["license"] == "mit"
    for fact in (
        "20×18, RGB",
        "2 experts of dimension 9",
        "the large tensors in float16",
        "(20, 3, 20, 18)",
    ):
        assert fact in text
    assert "run.json" not in text
    assert card.write(tmp_path / "bare", network, name="no UTF-8: \udcff")
    assert "\n# no UTF-8: ?\n" in text_of(tmp_path / "bare")


ODD = "ev|il `code` <b>\n# [two](x) \u2028__lines__"
SHOWN = "ev\\|il \\`code\\` &lt;b&gt; # \\[two\\](x)  \\_\\_lines\\_\\_"  # escaped, on one line


def rename(run: Path, data: str) -> None:
    """Change the name of the images in the record and the evaluation of a run."""
    about = record.read(run)
    config, starts = about["config"] | {"data": data}, about["starts"]
    record.write(
        run, about | {"config": config, "data": about["data"] | {"source": data}, "starts": starts}
    )
    if (run / "evaluation.json").is_file():
        measured = json.loads((run / "evaluation.json").read_text())
        (run / "evaluation.json").write_text(json.dumps(measured | {"data": data}))


@pytest.fixture(scope="module")
def measured(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("measured") / "run"
    shutil.copytree(trained, folder)
    assert main(["evaluate", str(folder), "--samples", "20", "--device", "cpu"]) == 0
    return folder


def test_odd_names_are_shown_unchanged(measured: Path, tmp_path: Path) -> None:
    run = tmp_path / ODD
    shutil.copytree(measured, run)
    rename(run, f"/home/me/{ODD}")
    assert card.write(run, poecaps.load(run), licence=ODD)
    head, text = head_of(run), text_of(run)
    assert head["license"] == head["model-index"][0]["name"] == ODD
    dataset = head["model-index"][0]["results"][0]["dataset"]
    assert dataset == {"type": "ev-il-code-b-two-x-lines", "name": ODD}
    body = text.split("---\n", 2)[2]
    assert body.startswith(
        f"\n# {SHOWN}\n\nA product of expert capsules, trained on {SHOWN} without labels.\n"
    )
    assert f"\n| data | {SHOWN}, provided by the author of the model |\n" in body
    assert f"\n| licence | weights: {SHOWN}; " in body
    assert f"\nMeasured by `poecaps evaluate` on {SHOWN}, 20 images,\n" in body
    prose = re.sub(r"^(`{3,})\w+\n.*?^\1$|<!-- written.*", "", body, flags=re.M | re.S)
    assert "<" not in prose
    assert constants_of_program(body) == ["FOLDER", 20]
    assert card.write(run, poecaps.load(run), name=f"me/{ODD}")  # as on the Hub
    assert constants_of_program(text_of(run)) == [f"me/{ODD}", 20]


def constants_of_program(text: str) -> list[object]:
    """Return the constants in the Python program of a card."""
    (program,) = re.findall(r"^```python\n(.*?)^```$", text, re.M | re.S)
    return [each.value for each in ast.walk(ast.parse(program)) if isinstance(each, ast.Constant)]


def test_a_card_lists_the_options_that_differ_from_the_preset(run: Path) -> None:
    (block,) = re.findall(r"^```yaml\n(.*?)^```$", text_of(run), re.M | re.S)
    options = yaml.safe_load(block)
    assert options["model.features"] == 8
    assert options["model.experts"] == [[3, 5]]
    assert options["encoder.epochs"] == 1
    assert not {"data", "seed", "batch_size", "device", "model.whiten"} & options.keys()
    assert "| batch size | 16 |" in text_of(run)
    assert "Options that differ from the preset `default`:" in text_of(run)


def test_a_card_shows_the_measures_of_draws_from_the_density(
    tmp_path: Path, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    shorten_chains(monkeypatch)
    train, test = poecaps.data.load("mnist-sample"), poecaps.data.load("mnist-sample", split="test")
    sizes = replace(TINY_DENSITY, image_shape=(1, 28, 28))
    network = untrained_with_density(sizes, train.batch(range(60)), generator)
    network.save(tmp_path)
    first, second = (poecaps.data.ImageSet(each.images[:60]) for each in (train, test))
    classifier = evaluation.load_classifier("mnist")
    result = evaluation.evaluate(network, first, second, classifier, samples=5)
    (tmp_path / card.MEASURED).write_text(result.to_json(), encoding="utf-8")
    assert card.write(tmp_path, network)
    lines = text_of(tmp_path).splitlines()
    rows = {
        "model": "draws from the energy",
        "model-tied": "draws from the energy, tied filters",
        "model-experts": "draws from one expert: model-experts",
    }
    for domain, draws in rows.items():
        of = result.domains[domain]
        assert of.frechet is not None
        assert of.recognisability is not None
        assert f"| Fréchet distance of {draws} | {of.frechet.distance:.1f} |" in lines
        assert f"| recognisable {draws} | {of.recognisability.share:.1%} |" in lines
    assert result.density_experts is not None
    purity = result.density_experts.purity.mean
    assert f"| purity of the draws of one expert of the energy | {purity:.1%} |" in lines


def test_a_block_of_code_ends_where_it_should(run: Path) -> None:
    odd = "a\n````\n<b>"
    about = record.read(run)
    record.write(run, about | {"config": about["config"] | {"precision": odd}})
    assert card.write(run, poecaps.load(run))
    (block,) = re.findall(r"^`````yaml\n(.*?)^`````$", text_of(run), re.M | re.S)
    assert yaml.safe_load(block)["precision"] == odd


@pytest.mark.parametrize(
    ("data", "name", "kind"),
    [
        ("/home/me/pictures/test", "pictures", "pictures"),
        ("/home/me/pictures/train", "pictures", "pictures"),
        ("test", "test", "test"),
        ("/home/me/写真", "写真", "images"),
        ("/home/me/123", "123", "123"),
        ("/home/me/null", "null", "null"),
        ("/", "images", "images"),
    ],
)
def test_images_are_called_by_their_folder(
    data: str, name: str, kind: str, measured: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(measured, run)
    rename(run, data)
    assert card.write(run, poecaps.load(run))
    assert head_of(run)["model-index"][0]["results"][0]["dataset"] == {"type": kind, "name": name}
    assert f"trained on {name} without labels" in text_of(run)
    assert f"\n| data | {name}, provided by" in text_of(run)
    assert f"\nMeasured by `poecaps evaluate` on {name}, 20 images" in text_of(run)


def test_a_preset_has_changes_only_where_something_was_changed(run: Path) -> None:
    about, usual = record.read(run), asdict(PRESETS["paper"]())
    record.write(run, about | {"config": usual | {"data": about["config"]["data"], "seed": 5}})
    assert card.write(run, poecaps.load(run))
    assert "\n| preset | paper |\n| batch size | 16 |\n| seed | 5 |\n" in text_of(run)
    assert "Options that differ" not in text_of(run)
    record.write(run, about | {"config": usual | {"precision": "float32"}})
    assert card.write(run, poecaps.load(run))
    assert "\n| preset | paper, with the changes below |\n" in text_of(run)


def test_a_card_that_is_not_utf8_is_not_overwritten(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = "für mich".encode("latin-1")
    (run / "README.md").write_bytes(mine)
    assert not card.write(run, poecaps.load(run))
    assert main(["evaluate", str(run), "--samples", "20", "--device", "cpu"]) == 0
    assert (run / "README.md").read_bytes() == mine
    assert "was edited, so it is not overwritten" in capsys.readouterr().err


# The Hub


class Uploads:
    """Replaces the API of the Hub, and keeps the uploaded folder."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.asked = folder, []  # type: Path, list[dict[str, Any]]

    def create_repo(self, _: Any, **options: Any) -> Any:
        self.asked.append(options)
        return huggingface_hub.RepoUrl(f"https://huggingface.co/{options['repo_id']}")

    def upload_folder(self, _: Any, **options: Any) -> str:
        self.asked.append(options)
        shutil.copytree(options["folder_path"], self.folder)
        return "https://huggingface.co/me/digits/commit/1"


@pytest.fixture
def uploads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Uploads:
    stand_in = Uploads(tmp_path / "uploaded")
    for name in ("create_repo", "upload_folder"):
        each = getattr(stand_in, name)
        monkeypatch.setattr(
            huggingface_hub.HfApi, name, lambda self, each=each, **options: each(self, **options)
        )
    return stand_in


def test_a_network_goes_to_the_hub_with_card_and_picture_and_comes_back(
    run: Path, trained: Path, uploads: Uploads, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["evaluate", str(run), "--samples", "20", "--device", "cpu"]) == 0
    network = poecaps.load(run)
    address = poecaps.push_to_hub(network, "me/digits", run=run, licence="mit", private=True)
    assert address == "https://huggingface.co/me/digits/commit/1"
    assert uploads.asked[0]["repo_id"] == uploads.asked[1]["repo_id"] == "me/digits"
    assert uploads.asked[0]["private"] is True
    sent = {file.name for file in uploads.folder.iterdir()}
    assert sent == {
        "config.json",
        "model.safetensors",
        "README.md",
        "samples.png",
        "run.json",
        "evaluation.json",
    }
    for file in ("config.json", "README.md", "run.json", "evaluation.json"):
        assert trained.parent.name not in (uploads.folder / file).read_text(encoding="utf-8")
    assert head_of(uploads.folder)["license"] == "mit"
    assert 'poecaps.from_pretrained("me/digits")' in text_of(uploads.folder)
    assert "evaluate me/digits" not in text_of(uploads.folder)  # it takes a folder
    assert head_of(uploads.folder)["model-index"][0]["name"] == "me/digits"

    asked: list[dict[str, Any]] = []

    def download(**options: Any) -> str:
        asked.append(options)
        return str(uploads.folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    again = poecaps.from_pretrained("me/digits", revision="v1")
    assert (asked[0]["repo_id"], asked[0]["revision"]) == ("me/digits", "v1")
    assert again.architecture == network.architecture
    for name, tensor in network.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor)


def test_a_network_without_a_run_goes_to_the_hub_as_well(uploads: Uploads) -> None:
    network = CapsuleNetwork(Architecture(features=8, experts=((2, 9),)))
    poecaps.push_to_hub(network, "me/bare", half=True)
    assert "Not evaluated yet; run `poecaps evaluate FOLDER`." in text_of(uploads.folder)
    assert {file.name for file in uploads.folder.iterdir()} == {
        *("config.json", "model.safetensors", "README.md", "samples.png"),
    }
    assert poecaps.from_pretrained(uploads.folder).architecture == network.architecture


def test_an_edited_card_goes_to_the_hub_as_it_is(run: Path, uploads: Uploads) -> None:
    mine = text_of(run).replace("For trying out poecaps", "For finding broken parts")
    assert mine != text_of(run)
    (run / "README.md").write_text(mine, encoding="utf-8")
    poecaps.push_to_hub(poecaps.load(run), "me/digits", run=run)
    assert text_of(uploads.folder) == mine


def test_a_missing_run_raises_an_error_before_anything_is_written(
    run: Path, tmp_path: Path
) -> None:
    with pytest.raises(
        FileNotFoundError, match=r"nowhere does not contain a run: run.json is missing"
    ):
        hub.write_repository(poecaps.load(run), tmp_path / "out", run=tmp_path / "nowhere")
    assert not (tmp_path / "out").exists()


@needs_links
def test_a_repository_is_not_written_through_links(run: Path, tmp_path: Path) -> None:
    files = (card.CARD, card.PICTURE, record.RECORD, "model.safetensors")
    (tmp_path / "out").mkdir()
    for name in files:
        (tmp_path / name).write_text("precious")
        (tmp_path / "out" / name).symlink_to(tmp_path / name)
    hub.write_repository(poecaps.load(run), tmp_path / "out", run=run)
    assert {(tmp_path / name).read_text() for name in files} == {"precious"}
    assert not any((tmp_path / "out" / name).is_symlink() for name in files)


@needs_links
@pytest.mark.parametrize("name", [card.CARD, card.PICTURE])
def test_a_link_in_a_run_is_not_published(name: str, run: Path, tmp_path: Path) -> None:
    """In a run from elsewhere, it may lead to any file of the user who publishes it."""
    (tmp_path / "secret").write_text("secret")
    (run / name).unlink(missing_ok=True)
    (run / name).symlink_to(tmp_path / "secret")
    with pytest.raises(ModelError, match=f"{name} is a symbolic link, so it is not copied"):
        hub.write_repository(poecaps.load(run), tmp_path / "out", run=run)
    assert not (tmp_path / "out").exists()


def test_without_huggingface_hub_a_folder_opens_and_a_name_raises_an_error(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    network = poecaps.from_pretrained(run)
    assert not network.training
    message = r"^the Hugging Face Hub needs huggingface_hub; pip install 'poecaps\[hub\]'$"
    with pytest.raises(ModuleNotFoundError, match=message):
        poecaps.from_pretrained("me/digits")
    with pytest.raises(ModuleNotFoundError, match=message):
        poecaps.push_to_hub(network, "me/digits")
