"""The command line as people use it."""

from __future__ import annotations

import io
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import poecaps
from poecaps._files import read_tensors
from poecaps._json import dataclass_from_json
from poecaps.cli import main
from poecaps.network import DOMAINS
from poecaps.training import PRESETS
from poecaps.training.checkpoint import CHECKPOINT
from poecaps.training.config import Config

SMALL = shlex.split("""--model.features 8 --model.capsule-dim 4 --model.experts 3 5 --model.joint-components 4 --batch-size 16
    --autoencoder.epochs 1 --encoder.epochs 1 --decoder.epochs 1 --pixel-decoder.epochs 1 --device cpu""")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "digits.npz"
    train, test = poecaps.data.load("mnist-sample"), poecaps.data.load("mnist-sample", split="test")
    assert train.labels is not None
    np.savez(path, x_train=train.images[:48], y_train=train.labels[:48], x_test=test.images[:20])
    return path


@pytest.fixture(scope="module")
def run(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "small"
    assert main(["train", "--data", str(source), "--out", str(folder), "--quiet", *SMALL]) == 0
    return folder


def arrays(path: Path) -> dict[str, Any]:
    with np.load(path) as file:
        return dict(file)


# ---------------------------------------------------------------------------------------------------------
# Training


def test_training_leaves_a_model_its_record_and_pictures(run: Path) -> None:
    names = {str(file.relative_to(run)) for file in run.rglob("*") if file.is_file()}
    pictures = {*DOMAINS, "reconstructions", "curves"}
    assert names == {
        *(
            "config.json",
            "model.safetensors",
            "checkpoint.safetensors",
            "run.json",
            "metrics.jsonl",
        ),
        *("README.md", "samples.png"),
        *(f"figures/{name}{suffix}" for name in pictures for suffix in (".png", ".npz")),
    }
    assert poecaps.load(run).architecture.experts == ((3, 5),)


def test_all_four_domains_are_grids_of_figure_2(run: Path) -> None:
    for domain in DOMAINS:
        images = arrays(run / "figures" / f"{domain}.npz")["images"]
        assert images.shape == ((80, 1, 28, 28) if domain == "joint" else (4, 3, 1, 28, 28))
        with Image.open(run / "figures" / f"{domain}.png") as picture:
            assert picture.size[0] > 3 * 28


def test_every_field_can_be_set_and_nothing_else_changes(source: Path, tmp_path: Path) -> None:
    changes = ["--encoder.k", "2", "--encoder.optimizer", "adam", "--encoder.learning-rate", "0.1"]
    where = ["--data", str(source), "--out", str(tmp_path / "run"), "--quiet", "--no-figures"]
    assert (
        main(
            ["train", "--preset", "paper", *where, *SMALL, "--pixel-decoder.epochs", "0", *changes]
        )
        == 0
    )
    used = dataclass_from_json(Config, json.loads((tmp_path / "run" / "run.json").read_text())["config"])
    paper = PRESETS["paper"]()
    assert (
        used.encoder.k,
        used.encoder.optimizer,
        used.encoder.learning_rate,
        used.encoder.epochs,
    ) == (2, "adam", 0.1, 1)
    assert (used.encoder.l2, used.decoder.learning_rate, used.decoder.optimizer) == (
        1e-7,
        paper.decoder.learning_rate,
        "sgd",
    )
    assert (used.model.bias, used.model.centre, used.model.scale, used.model.sharpness) == (
        False,
        False,
        None,
        1.0,
    )
    assert (used.model.experts, paper.model.experts) == (((3, 5),), ((20, 16),))


@pytest.mark.parametrize(
    "arguments",
    [["--preset", "paper"], ["--preset=paper"], ["--preset", "default", "--preset", "paper"]],
)
def test_help_shows_the_values_of_the_preset(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as leave:
        main(["train", *arguments, "--help"])
    assert leave.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "Learning rate at the start. (default: 100.0)" in text


def test_progress_is_plain_lines_where_there_is_no_terminal(source: Path, tmp_path: Path) -> None:
    arguments = [sys.executable, "-m", "poecaps", "train", "--data", str(source), *SMALL]
    done = subprocess.run(arguments, capture_output=True, text=True, check=True, cwd=tmp_path)
    lines = [line for line in done.stderr.splitlines() if not line.startswith("warning")]
    assert "the autoencoder does no better than the mean image" in done.stderr  # after three steps
    assert lines[0] == f"found 48 grey images of 28×28 in {source}, 10 classes"
    assert lines[1] == "trains in runs/digits"
    assert [line.split()[1] for line in lines[2:]] == ["autoencoder"] * 2 + ["encoder"] * 2 + [
        "decoder"
    ] * 2 + ["pixel_decoder"] * 2
    assert all(line.isprintable() for line in lines)
    assert "runs/digits/figures/joint.png" in done.stdout
    again = subprocess.run(
        [*arguments, "--no-figures"], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert "the model is in runs/digits-2" in again.stdout


def on_a_terminal(arguments: list[str], folder: Path) -> str:
    """Run a command with its standard error on a terminal, and return what is written there."""
    import pty

    ours, theirs = pty.openpty()
    process = subprocess.Popen(arguments, stderr=theirs, stdout=subprocess.DEVNULL, cwd=folder)
    os.close(theirs)
    seen = b""
    while True:
        try:
            chunk = os.read(ours, 4096)
        except OSError:  # how the end looks on Linux
            break
        if not chunk:
            break
        seen += chunk
    os.close(ours)
    assert process.wait() == 0, seen.decode()
    return seen.decode()


@pytest.mark.skipif(os.name != "posix", reason="needs a pseudo-terminal")
def test_progress_is_one_live_line_for_each_stage_on_a_terminal(
    source: Path, tmp_path: Path
) -> None:
    arguments = [
        sys.executable,
        "-m",
        "poecaps",
        "train",
        "--data",
        str(source),
        "--no-figures",
        *SMALL,
    ]
    seen = on_a_terminal(arguments, tmp_path)
    lines = [line for line in seen.split("\r\n") if line]
    lines = [line for line in lines if not line.startswith("warning")]
    assert len(lines) == 6  # what was found, where it trains, and four stages
    assert all("\r\x1b[K" in line and "100%" in line for line in lines[2:])


@pytest.mark.skipif(os.name != "posix", reason="needs a pseudo-terminal")
def test_a_run_goes_on_on_a_terminal(source: Path, tmp_path: Path) -> None:
    """From the middle of a stage, where no pace is known yet."""
    train = [sys.executable, "-m", "poecaps", "train", "--no-figures"]
    process = subprocess.Popen([*train, "--data", str(source), "--out", "run", *SMALL, "--autoencoder.epochs", "200",
                                "--checkpoint-every", "0.1"], stderr=subprocess.DEVNULL, cwd=tmp_path)  # fmt: skip
    while True:
        assert process.poll() is None
        if (tmp_path / "run" / "run.json").exists() and read_tensors(tmp_path / "run" / CHECKPOINT)[
            1
        ]["step"] > 0:
            break
        time.sleep(0.01)
    process.kill()
    process.wait()
    seen = on_a_terminal([*train, "--resume", "run"], tmp_path)
    assert "resumes at epoch" in seen
    assert "Traceback" not in seen
    assert json.loads((tmp_path / "run" / "run.json").read_text())["finished"]


def test_a_run_may_go_on_on_another_device(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    (copy / "model.safetensors").unlink()
    assert main(["train", "--resume", str(copy), "--device", "cuda:77", "--quiet"]) == 2
    assert main(["train", "--resume", str(copy), "--device", "cpu", "--quiet"]) == 0
    assert "cuda:77" in capsys.readouterr().err


def test_a_run_without_epochs_still_leaves_a_model(source: Path, tmp_path: Path) -> None:
    none = [
        "--autoencoder.epochs",
        "0",
        "--encoder.epochs",
        "0",
        "--decoder.epochs",
        "0",
        "--pixel-decoder.epochs",
        "0",
    ]
    folder = tmp_path / "run"
    assert (
        main(["train", "--data", str(source), "--out", str(folder), "--quiet", *SMALL, *none]) == 0
    )
    assert (folder / "figures" / "joint.png").exists()
    assert main(["info", str(folder)]) == 0


def test_the_flag_for_tensorboard_writes_its_events(source: Path, tmp_path: Path) -> None:
    arguments = [
        "--data",
        str(source),
        "--out",
        str(tmp_path / "run"),
        "--quiet",
        "--no-figures",
        "--tensorboard",
    ]
    assert main(["train", *arguments, *SMALL]) == 0
    assert list((tmp_path / "run" / "tensorboard").glob("events.out.tfevents.*"))


def test_several_processes_must_be_told_a_folder(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["train"]) == 2
    assert "name it with --out" in capsys.readouterr().err


def test_the_demo_of_the_makefile_trains_the_default_on_the_bundled_digits(
    source: Path, tmp_path: Path
) -> None:
    """Its command, with few images and a small model in place of minutes."""
    makefile = (Path(__file__).parent.parent / "Makefile").read_text()
    (line,) = [line for line in makefile.splitlines() if "/poecaps train" in line]
    words = line.replace("$(BIN)/poecaps", "").replace("$(DEMO)", str(tmp_path / "demo")).split()
    assert "--data" not in words
    assert main([*words, "--quiet", "--data", str(source), *SMALL]) == 0
    options = json.loads((tmp_path / "demo" / "run.json").read_text())["config"]
    assert options["encoder"]["rate"] == PRESETS["default"]().encoder.learning_rate
    made = {file.stem for file in (tmp_path / "demo" / "figures").glob("*.png")}
    assert made == {*DOMAINS, "reconstructions", "curves"}


def test_a_full_disk_while_drawing_says_that_the_model_is_safe(
    source: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("numpy.savez", full)
    assert main(["train", "--data", str(source), "--out", str(tmp_path / "run"), *SMALL]) == 1
    err = capsys.readouterr().err
    assert f"the model in {tmp_path / 'run'} is whole" in err
    assert "reconstructions.png" in err
    assert main(["encode", str(tmp_path / "run")]) == 1
    assert "codes-train.npz" in capsys.readouterr().err


def test_output_without_the_letters_for_it(run: Path) -> None:
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    arguments = [sys.executable, "-m", "poecaps", "info", str(run)]
    done = subprocess.run(arguments, env=environment, capture_output=True, text=True, check=True)
    assert "28?28, grey" in done.stdout


def test_quiet_is_quiet(source: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["train", "--data", str(source), "--out", str(tmp_path / "run"), "--quiet", *SMALL])
        == 0
    )
    assert capfd.readouterr() == ("", "")


def test_a_finished_run_can_be_resumed_and_a_broken_disk_is_no_traceback(
    run: Path,
    source: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    assert main(["train", "--resume", str(copy), "--no-figures"]) == 0

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    assert main(["train", "--data", str(source), "--out", str(tmp_path / "full"), *SMALL]) == 1
    assert "cannot write into" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("shape", "data_shape"), [((28, 28), (28, 28)), ((32, 32, 3), (32, 32)), ((28, 20), (28, 20))]
)
def test_images_of_any_kind_train_and_generate(
    shape: tuple[int, ...], data_shape: tuple[int, int], tmp_path: Path
) -> None:
    images = np.random.default_rng(0).integers(0, 256, (32, *shape), dtype=np.uint8)
    np.save(tmp_path / "x.npy", images)
    folder = str(tmp_path / "run")
    assert (
        main(["train", "--data", str(tmp_path / "x.npy"), "--out", folder, "--quiet", *SMALL]) == 0
    )
    assert (
        main(["generate", folder, "--domain", "learned", "--out", str(tmp_path / "drawn.png")]) == 0
    )
    channels = 3 if len(shape) == 3 else 1
    assert arrays(tmp_path / "drawn.npz")["images"].shape == (4, 3, channels, *data_shape)


def test_a_folder_of_pictures_trains_and_is_reconstructed(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    for name, size in (("a", (40, 30)), ("b", (24, 36)), ("c", (30, 30)), ("d", (64, 20))):
        (tmp_path / "pictures").mkdir(exist_ok=True)
        picture = Image.fromarray(random.integers(0, 256, (*size, 3), dtype=np.uint8))
        picture.save(tmp_path / "pictures" / f"{name}.png")
    data = ["--data", str(tmp_path / "pictures"), "--size", "20", "18", "--channels", "3"]
    assert main(["train", *data, "--out", str(tmp_path / "run"), "--quiet", *SMALL]) == 0
    assert arrays(tmp_path / "run" / "figures" / "reconstructions.npz")["originals"].shape == (
        4,
        3,
        20,
        18,
    )


def test_one_line_says_what_was_found_and_what_was_skipped_and_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    random = np.random.default_rng(0)
    for name, side in (("ant/a", 30), ("ant/b", 24), ("bee/c", 30), ("bee/tiny", 16)):
        file = tmp_path / "pictures" / f"{name}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(random.integers(0, 256, (side, side, 3), dtype=np.uint8)).save(file)
    whole = (tmp_path / "pictures" / "ant" / "a.png").read_bytes()
    (tmp_path / "pictures" / "ant" / "cut.png").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "pictures" / "bee" / "empty.png").write_bytes(b"")
    (tmp_path / "pictures" / "notes.txt").write_text("taken in May")
    data = ["--data", str(tmp_path / "pictures"), "--size", "20", "18"]
    assert main(["train", *data, "--out", str(tmp_path / "run"), *SMALL]) == 0
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "skipped" in line]
    assert line == (
        f"found 3 RGB images of 20×18 in {tmp_path / 'pictures'}, 2 classes (ant, bee); 4 files skipped: "
        "1 no PNG, JPEG or WebP (notes.txt), 2 cannot be read (empty.png, …), 1 smaller than 17×17 (tiny.png)"
    )
    assert arrays(tmp_path / "run" / "figures" / "reconstructions.npz")["originals"].shape == (
        3,
        3,
        20,
        18,
    )

    assert main(["reconstruct", str(tmp_path / "run"), "--device", "cpu"]) == 0
    assert [each for each in capsys.readouterr().err.splitlines() if "skipped" in each] == [line]

    config = dataclass_from_json(Config, json.loads((tmp_path / "run" / "run.json").read_text())["config"])
    with pytest.warns(UserWarning, match="4 files skipped") as told:
        poecaps.train(config, tmp_path / "again")
    assert [(str(each.message), each.filename) for each in told] == [(line, __file__)]

    seen: list[str] = []
    poecaps.train(
        config, tmp_path / "told", found=lambda images: seen.append(f"found {images.describe()}")
    )
    assert seen == [line]


# ---------------------------------------------------------------------------------------------------------
# What a trained model can do


def test_the_same_seed_gives_the_same_picture(run: Path, tmp_path: Path) -> None:
    for name, seed in (("a", "5"), ("b", "5"), ("c", "6")):
        assert (
            main(["generate", str(run), "--seed", seed, "--out", str(tmp_path / f"{name}.png")])
            == 0
        )
    first, second, other = ((tmp_path / f"{name}.png").read_bytes() for name in "abc")
    assert first == second
    assert first != other


def test_restricted_draws_are_complete_draws_or_their_negations(run: Path, tmp_path: Path) -> None:
    """The two pictures of one seed can be compared draw by draw."""
    network = poecaps.load(run)
    for domain in ("complete", "restricted"):
        assert (
            main(
                ["generate", str(run), "--domain", domain, "--out", str(tmp_path / f"{domain}.png")]
            )
            == 0
        )
    complete, restricted = (
        arrays(tmp_path / f"{domain}.npz")["images"] for domain in ("complete", "restricted")
    )
    same = np.isclose(complete, restricted, atol=1e-5).all((2, 3, 4))
    generator = torch.Generator().manual_seed(0)
    for expert in range(3):
        code = network.sample(4, "complete", expert=expert, generator=generator)[:, expert]
        agrees = (code @ network.code_density.mean_direction[expert] >= 0).numpy()
        assert np.array_equal(same[:, expert], agrees)
    assert not same.all()


def test_one_expert_can_be_drawn_alone(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", str(run), "--domain", "learned", "--expert", "2", "--rows", "2"]) == 0
    path = Path(capsys.readouterr().out.strip())
    assert path == run / "figures" / "learned-2.png"
    assert arrays(path.with_suffix(".npz"))["images"].shape == (40, 1, 28, 28)


def test_reconstructions_are_the_models(run: Path, tmp_path: Path) -> None:
    assert main(["reconstruct", str(run), "--count", "7", "--out", str(tmp_path / "r.png")]) == 0
    drawn = arrays(tmp_path / "r.npz")
    assert len(drawn["originals"]) == 7
    test = poecaps.data.load("mnist-sample", split="test").batch(range(7))
    np.testing.assert_array_equal(drawn["originals"], test.numpy())  # the test images come first
    with torch.no_grad():
        made = poecaps.load(run).reconstruct(test)
    np.testing.assert_allclose(drawn["reconstructions"], made.numpy(), atol=1e-6)
    assert (
        main(
            [
                "reconstruct",
                str(run),
                "--split",
                "train",
                "--count",
                "3",
                "--out",
                str(tmp_path / "t.png"),
            ]
        )
        == 0
    )
    train = poecaps.data.load("mnist-sample").batch(range(3))
    np.testing.assert_array_equal(arrays(tmp_path / "t.npz")["originals"], train.numpy())


def test_a_traversal_changes_one_parameter_at_a_time(run: Path, tmp_path: Path) -> None:
    network = poecaps.load(run)
    options = ["--expert", "1", "--steps", "5", "--reach", "2"]
    assert main(["traverse", str(run), *options, "--out", str(tmp_path / "t.png")]) == 0
    drawn = arrays(tmp_path / "t.npz")
    np.testing.assert_allclose(drawn["values"], [-2, -1, 0, 1, 2])
    assert drawn["images"].shape == (5, 5, 1, 28, 28)
    z = torch.zeros(3, 5)
    z[1] = network.code_density.mean[1]
    with torch.no_grad():
        np.testing.assert_allclose(
            drawn["images"][3, 2], network.decode(poecaps.squash(z)[None])[0], atol=1e-5
        )
        z[1, 3] += 2 * network.code_density.std[1, 3]
        np.testing.assert_allclose(
            drawn["images"][3, 4], network.decode(poecaps.squash(z)[None])[0], atol=1e-5
        )


def test_a_traversal_may_start_from_an_image(run: Path, tmp_path: Path) -> None:
    assert (
        main(
            ["traverse", str(run), "--image", "4", "--steps", "3", "--out", str(tmp_path / "t.png")]
        )
        == 0
    )
    test = poecaps.data.load("mnist-sample", split="test").batch([4])
    with torch.no_grad():
        made = poecaps.load(run).reconstruct(test)[0].numpy()
    for row in arrays(tmp_path / "t.npz")["images"]:
        np.testing.assert_allclose(row[1], made, atol=1e-4)


def test_codes_and_firing_probabilities_are_written(run: Path, tmp_path: Path) -> None:
    assert main(["encode", str(run), "--out", str(tmp_path / "deep" / "codes.npz")]) == 0
    written = arrays(tmp_path / "deep" / "codes.npz")
    images = poecaps.data.load("mnist-sample")
    assert images.labels is not None
    with torch.no_grad():
        codes = poecaps.load(run).encode(images.batch(range(48)))
    np.testing.assert_allclose(written["codes"], codes.numpy(), atol=1e-6)
    np.testing.assert_allclose(written["firing"], codes.norm(dim=-1).numpy(), atol=1e-6)
    np.testing.assert_array_equal(written["labels"], images.labels[:48])


def test_a_model_is_measured_as_a_table_and_as_json(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On the bundled digits, for which there is a classifier, and on the data of the run, for which there is none."""
    out = tmp_path / "of run.json"
    assert main(["evaluate", str(run), "--samples", "20", "--out", str(out)]) == 0
    measured = json.loads(out.read_text())
    assert measured["test_images"] == 20
    assert measured["domains"].keys() == set(DOMAINS)
    assert measured["classifier"] is None
    text = capsys.readouterr().out
    assert f"written to {out}" in text
    assert "effective rank" in text


def test_info_tells_what_a_run_is(
    run: Path, source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["info", str(run)]) == 0
    text = capsys.readouterr().out
    for fact in (
        "28×28, grey",
        "72 of 4 numbers",
        "3 of 5 numbers",
        f"{source} (48 images",
        "effective rank",
    ):
        assert fact in text
    assert "model.features = 8" in text
    assert "model.whiten" not in text  # as in the preset
    assert main(["info"]) == 0
    assert f"torch        {torch.__version__}" in capsys.readouterr().out


def test_info_tells_how_to_go_on_with_a_broken_run(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    about = json.loads((copy / "run.json").read_text())
    (copy / "run.json").write_text(json.dumps(about | {"finished": None}))
    (copy / "model.safetensors").unlink()
    assert main(["info", str(copy)]) == 0
    assert f"not yet; go on with: poecaps train --resume {copy}" in capsys.readouterr().out
    assert main(["generate", str(copy)]) == 1
    assert f"is not finished; go on with: poecaps train --resume {copy}" in capsys.readouterr().err


def test_the_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"poecaps {poecaps.__version__}\n"


COMPLETED = {  # a line that is being typed, and what it may become
    "poecaps gen": ["generate"],
    "poecaps generate --domain l": ["learned"],
    "poecaps generate --do": ["--domain"],
    "poecaps train --encoder.f": ["--encoder.final-learning-rate-ratio", "--encoder.target-firing"],
}


def scripted(shell: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    if shutil.which(shell) is None:
        pytest.skip(f"there is no {shell}")
    capsys.readouterr()
    assert main(["completion", shell]) == 0
    path = folder / "_poecaps"
    path.write_text(capsys.readouterr().out, encoding="utf-8")
    return path


def test_bash_completes_what_is_typed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = scripted("bash", tmp_path, capsys)
    for line, wanted in COMPLETED.items():
        words = f"COMP_WORDS=({line}); COMP_CWORD={len(line.split()) - 1}"
        program = f'source {script}; {words}; _tyro_poecaps; printf "%s\\n" "${{COMPREPLY[@]}}"'
        done = subprocess.run(
            ["bash", "--norc", "-c", program], capture_output=True, text=True, check=True
        )
        assert done.stdout.split("\n")[:-1] == wanted
        assert done.stderr == ""
    registered = ["bash", "--norc", "-c", f"source {script}; complete -p poecaps"]
    assert (
        "-o default"
        in subprocess.run(registered, capture_output=True, text=True, check=True).stdout
    )  # files, too


def test_fish_completes_what_is_typed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = scripted("fish", tmp_path, capsys)
    (tmp_path / "runs").mkdir()
    for line, wanted in {**COMPLETED, "poecaps generate ru": ["runs/"]}.items():
        program = f"source {script}; complete -C '{line}'"
        arguments = ["fish", "--no-config", "-c", program]
        done = subprocess.run(arguments, capture_output=True, text=True, check=True, cwd=tmp_path)
        assert sorted(each.split("\t")[0] for each in done.stdout.splitlines()) == wanted


def test_zsh_completes_what_is_typed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its own functions work only while somebody types, so others stand in for them."""
    script = scripted("zsh", tmp_path, capsys)
    for line, wanted in COMPLETED.items():
        program = (
            "_describe() { print -rl -- ${(P)2%%:*} }; _files() { print files }; typeset -A compstate=(nmatches 1);"
            f"words=({line}); CURRENT={len(line.split())}; source {script}"
        )
        done = subprocess.run(
            ["zsh", "-f", "-c", program], capture_output=True, text=True, check=True
        )
        assert done.stdout.split() == wanted
    assert script.read_text(encoding="utf-8").startswith("#compdef poecaps\n")  # how zsh finds it


# ---------------------------------------------------------------------------------------------------------
# Mistakes


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([], "usage: poecaps"),
        (["tran"], "train"),
        (["train", "--enncoder.rate", "1"], "--encoder.learning-rate"),
        (["train", "--model.expert", "1"], "--model.experts"),
        (["train", "--encoder.epochs", "many"], "--encoder.epochs"),
        (["train", "--encoder.mixing", "sometimes"], "bernoulli"),
        (["train", "--preset", "papper"], "paper"),
        (
            ["train", "--encoder.epochs", "-2"],
            "encoder.epochs must be a whole number of at least 0, but is -2",
        ),
        (["train", "--batch-size", "0"], "batch_size must be"),
        (["train", "--device", "cuda:99"], "device must be"),
        (["train", "--device", "hpu"], "device must be"),
        (["train", "--model.joint-components", "0"], "model.components must be"),
        (["train", "--model.experts"], "model.experts must be"),
        (["train", "--model.scale", "0"], "model.scale must be above 0"),
        (["train", "--model.kernel-size", "40"], "images must be at least 79×79"),
        (["train", "--model.image-shape", "1", "9", "9"], "Unrecognized options"),
        (["train", "--model.capsule-dim", "7"], "features must be a multiple of capsule_dim"),
        (
            ["train", "--size", "9", "9"],
            "--size and --channels are for folders of images, and mnist-",
        ),
        (
            ["train", "--data-path", "x"],
            "poecaps: --data-path is for the full sets, and mnist-sample is part of",
        ),
        (["train", "--resume", "x", "--seed", "3"], "--resume goes on with the options of the run"),
        (["generate"], "RUN"),
        (["completion", "csh"], "fish"),
        (["generate", "{run}", "--domain", "joined"], "joint"),
        (
            ["generate", "{run}", "--domain", "learned", "--expert", "3"],
            "expert must be a whole number from 0 to 2",
        ),
        (["generate", "{run}", "--expert", "1"], "add --domain learned"),
        (["generate", "{run}", "--rows", "0"], "rows must be"),
        (["generate", "{run}", "--seed", "-1"], "seed must be"),
        (["generate", "{run}", "--seed", "99999999999999999999"], "seed must be"),
        (["generate", "{run}", "--domain", "all", "--expert", "1"], "leave out one"),
        (["generate", "{run}", "--out", "drawn.jpg"], "let it end in .png"),
        (["generate", "{run}", "--domain", "all", "--out", "x.png"], "leave out one of them"),
        (["reconstruct", "{run}", "--count", "0"], "count must be"),
        (["reconstruct", "{run}", "--out", "drawn.jpg"], "let it end in .png"),
        (["traverse", "{run}", "--expert", "-1"], "expert must be"),
        (["traverse", "{run}", "--steps", "1"], "steps must be"),
        (["traverse", "{run}", "--image", "999"], "image must be a whole number from 0 to 19"),
        (["traverse", "{run}", "--data", "mnist"], "--image is taken from"),
        (["encode", "{run}", "--out", "codes.txt"], "--out must name an .npz file"),
        (["evaluate", "{run}", "--out", "x.txt"], "--out must name a .json file"),
        (["evaluate", "{run}", "--samples", "1"], "samples must be"),
    ],
)
def test_misuse_has_status_2_and_names_what_would_be_right(
    arguments: list[str], named: str, run: Path, tmp_path: Path
) -> None:
    check_complaint(arguments, named, 2 if arguments else 0, run, tmp_path)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["train", "--data", "nowhere"], "there is no file or folder nowhere"),
        (["train", "--data", "mnsit-sample"], "did you mean 'mnist-sample'?"),
        (
            ["train", "--data", "text.txt"],
            "is none of what can be read; name a folder of PNG, JPEG or WebP, or an",
        ),
        (
            ["train", "--out", "{run}"],
            "is not empty; name a new folder, or go on with the run in it: poecaps train --",
        ),
        (
            ["train", "--data", "pictures"],
            "pictures/0.png has 28×28; give --size H W to bring all images to",
        ),
        (
            ["train", "--data", "mnist", "--data-path", "empty"],
            "the folder that holds them with --data-path FOLDER,",
        ),
        (["train", "--resume", "nowhere"], "nowhere holds no run to go on with"),
        (["train", "--out", "/proc/none/run"], "cannot write into /proc/none/run"),
        (
            ["generate", "nowhere"],
            "there is no folder nowhere, and no model of that name comes with poecaps",
        ),
        (["generate", "empty"], "empty holds no trained model"),
        (["generate", "{broken}"], "model.safetensors"),
        (["reconstruct", "{run}", "--data", "wide.npy"], "the model sees grey images of 28×28"),
        (["encode", "{run}", "--data", "text.npz"], "text.npz"),
        (["encode", "{run}", "--out", "/proc/none/x.npz"], "/proc/none"),
        (["train", "--model.features", "8000000000"], "there is not enough memory"),
        (["generate", "{run}", "--rows", "1000000000000"], "there is not enough memory"),
        (
            ["info", "nowhere"],
            "there is no folder nowhere, and no model of that name comes with poecaps",
        ),
        (["info", "empty"], "empty holds no run: there is neither"),
    ],
)
def test_failure_has_status_1_and_says_what_is_wrong(
    arguments: list[str], named: str, run: Path, tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(run, broken)
    (broken / "model.safetensors").write_bytes(b"nonsense")
    np.save(tmp_path / "wide.npy", np.zeros((4, 28, 30), np.uint8))
    (tmp_path / "text.npz").write_text("no arrays")
    (tmp_path / "text.txt").write_text("no images")
    (tmp_path / "empty").mkdir()
    (tmp_path / "pictures").mkdir()
    for index, side in enumerate((28, 30)):
        Image.new("L", (side, side)).save(tmp_path / "pictures" / f"{index}.png")
    check_complaint(
        [argument.replace("{broken}", str(broken)) for argument in arguments],
        named,
        1,
        run,
        tmp_path,
    )


def check_complaint(arguments: list[str], named: str, status: int, run: Path, folder: Path) -> None:
    """Run in this process, as if from a folder, and look at what a user sees."""
    out, err, here = io.StringIO(), io.StringIO(), Path.cwd()
    before = {file: file.read_bytes() for file in run.rglob("*") if file.is_file()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.stdout", out)
        patch.setattr("sys.stderr", err)
        patch.chdir(folder)
        try:
            found = main([argument.replace("{run}", str(run)) for argument in arguments])
        except SystemExit as leave:
            found = leave.code  # type: ignore[assignment]
    assert Path.cwd() == here
    assert found == status, err.getvalue()
    said = " ".join((err.getvalue() if status else out.getvalue()).replace("│", " ").split())
    assert named in said
    assert "Traceback" not in said
    assert {file: file.read_bytes() for file in run.rglob("*") if file.is_file()} == before
    assert not (folder / "runs").exists()


def test_a_stranger_to_data_says_what_it_needs(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    poecaps.load(run).save(tmp_path / "bare")
    assert main(["reconstruct", str(tmp_path / "bare")]) == 2
    assert "does not say what it was trained on; name images with --data" in capsys.readouterr().err
    assert main(["info", str(tmp_path / "bare")]) == 0


def test_missing_matplotlib_is_said_and_stops_nothing(
    source: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["train", "--data", str(source), "--out", str(tmp_path / "run"), *SMALL]) == 0
    assert "pip install 'poecaps[plots]'" in capsys.readouterr().out
    assert (tmp_path / "run" / "figures" / "joint.png").exists()
    assert (tmp_path / "run" / CHECKPOINT).exists()
