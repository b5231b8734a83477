"""A training that is watched: what its process sees, and how the explorer follows the process."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import httpx
import numpy as np
import pytest

import poecaps
from poecaps.explorer import learner
from poecaps.explorer import training as live
from poecaps.explorer.server import create_app
from tests.explorer.conftest import serving

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from poecaps.explorer.render import ExplorerModel

SMALL = {"source": "mnist-sample", "images": live.MIN_IMAGES, "experts": 3, "seed": 1}
STAGES = ["autoencoder", "encoder 1", "decoder 1", "pixel decoder"]
# A process that says what learner.py says, and has learned a model that is there already.
FAKE = """
import json, pathlib, shutil, sys, time
options = json.loads(sys.stdin.readline())
say = lambda **seen: print(json.dumps(seen), flush=True)
say(stages=["one", "two"])
for share in (0.5, 1.0):
    point = {"stage": "one", "share": share, "error": 0.5, "held_out": float("nan")}
    say(stage="one", done=share, seconds_left=3.0, point=point)
if options["seed"] == 13:
    time.sleep(600)
if options["seed"] == 14:
    sys.stdout.write('{"point": {"stage"')  # killed while it writes
    sys.exit(1)
shutil.copytree(sys.argv[2], pathlib.Path(sys.argv[1]) / "model")
say(finished=True)
"""


@pytest.fixture
def fake(digits: ExplorerModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def launch(_: live.LiveTraining, folder: Path) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", FAKE, str(folder), digits.source],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    monkeypatch.setattr(live.LiveTraining, "_launch", launch)


@pytest.fixture
def trainer(digits: ExplorerModel, fake: None) -> Iterator[httpx.Client]:
    """A server whose model has enough images to learn from."""
    images = poecaps.data.load("mnist-sample", split="test")
    app = create_app([replace(digits, images=images)], token=None)
    with (
        serving(app) as address,
        httpx.Client(base_url=address, timeout=30, trust_env=False) as client,
    ):
        yield client


def wait(client: httpx.Client, *statuses: str, points: int = 0) -> dict[str, Any]:
    """Wait until a training has one of these statuses, and so many points."""
    for _ in range(1200):
        state: dict[str, Any] = client.get("/api/training").json()
        if state["status"] in statuses and len(state["points"]) >= points:
            return state
        time.sleep(0.05)
    pytest.fail(f"the training is still {state['status']}")


def test_a_training_is_followed_and_its_model_can_be_explored(trainer: httpx.Client) -> None:
    sources = [each["name"] for each in trainer.get("/api/training/sources").json()]
    assert sources == ["mnist-sample", "fashion-mnist-sample", "model:digits"]
    assert trainer.get("/api/training").json()["status"] == "idle"
    begun = trainer.post("/api/training/start", json=SMALL | {"source": "model:digits"}).json()
    assert (begun["run"], begun["error"]) == (1, None)
    state = wait(trainer, "finished", "failed", "stopped")
    assert (state["status"], state["error"]) == ("finished", None)
    assert (state["stages"], state["stage"], state["done"]) == (["one", "two"], "one", 1.0)
    later = trainer.get("/api/training", params={"since": 1}).json()
    assert (later["first"], later["points"]) == (1, state["points"][1:])
    assert state["model"] == "trained-here"
    assert trainer.get("/api/models").json() == ["digits", "trained-here"]
    code = {"experts": [{"expert": 2}]}
    assert trainer.post("/api/models/trained-here/decode", json=code).status_code == 200
    names: dict[str, Any] = {}
    exec(trainer.post("/api/models/trained-here/python", json=code).json()["lines"], names)
    assert names["image"].shape == (1, 1, 28, 28)


def test_one_training_at_a_time_which_is_stopped_at_once(trainer: httpx.Client) -> None:
    trainer.post("/api/training/start", json=SMALL | {"seed": 13})
    wait(trainer, "running", points=2)
    again = trainer.post("/api/training/start", json=SMALL)
    assert again.status_code == 409
    assert again.json() == {"error": "a model is being trained already; stop it first"}
    assert trainer.post("/api/training/stop").json()["status"] == "stopped"
    assert trainer.post("/api/training/stop").json()["status"] == "stopped"
    assert trainer.get("/api/models").json() == ["digits"]
    assert trainer.post("/api/training/start", json=SMALL | {"source": "/etc"}).status_code == 404
    for wrong in ({"images": 99}, {"images": 5001}, {"experts": 1}, {"seed": -1}, {"data": "x"}):
        assert trainer.post("/api/training/start", json=SMALL | wrong).status_code == 422
    trainer.post("/api/training/start", json=SMALL | {"seed": 14})
    failed = wait(trainer, "failed")
    assert failed["run"] == 2
    assert "ended early" in failed["error"]


def test_time_is_limited_and_nothing_is_left_behind(digits: ExplorerModel, fake: None) -> None:
    training = live.LiveTraining([digits], str, max_seconds=0.3)
    assert "model:digits" not in training.sources()  # it has too few images
    training.start("mnist-sample", live.MIN_IMAGES, 2, 13)
    assert training.folder is not None
    assert training.process is not None
    folder = training.folder
    training.process.wait(60)
    state = training.snapshot()
    assert (state["status"], state["error"]) == ("stopped", "stopped after 0 seconds, the limit")
    training.close()
    assert not folder.exists()


def test_the_folder_of_a_killed_explorer_is_deleted_by_the_next_one(
    digits: ExplorerModel, fake: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    left, foreign = tmp_path / f"{live.PREFIX}left", tmp_path / f"{live.PREFIX}foreign"
    for folder in (left, foreign, tmp_path / "other"):
        (folder / "model").mkdir(parents=True)
    (left / live.LOCK).touch()  # as the system leaves it: without a lock
    (tmp_path / "other" / live.LOCK).touch()
    training = live.LiveTraining([digits], str)
    training.start("mnist-sample", live.MIN_IMAGES, 2, 13)
    assert training.folder is not None
    live.sweep()
    kept = {foreign, tmp_path / "other"}
    assert set(tmp_path.iterdir()) == kept | {training.folder}
    training.close()
    assert set(tmp_path.iterdir()) == kept


def test_a_training_that_cannot_start(
    digits: ExplorerModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither a folder is left nor a state in which no other training can start."""
    folders: list[Path] = []

    def launch(_: live.LiveTraining, folder: Path) -> subprocess.Popen[str]:
        folders.append(folder)
        if len(folders) == 1:
            raise OSError("no more processes")
        process = subprocess.Popen(
            [sys.executable, "-c", ""], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        process.wait()  # before it is told what to do
        return process

    monkeypatch.setattr(live.LiveTraining, "_launch", launch)
    training = live.LiveTraining([digits], str)
    with pytest.raises(live.TrainingError, match="cannot start: no more processes"):
        training.start("mnist-sample", live.MIN_IMAGES, 2, 0)
    assert training.snapshot()["status"] == "idle"
    assert not folders[0].exists()
    training.start("mnist-sample", live.MIN_IMAGES, 2, 0)
    for _ in range(1200):
        if training.snapshot()["status"] == "failed":
            break
        time.sleep(0.05)
    assert "ended early" in training.snapshot()["error"]
    training.close()
    assert not folders[1].exists()


@pytest.mark.parametrize("side", [28, 8])  # filters fit small images as well
def test_a_network_is_looked_at_while_it_learns(
    side: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = learner.config(3, 1)
    stages = ("autoencoder", "encoder", "decoder", "pixel_decoder")
    brief = {name: replace(getattr(short, name), epochs=1) for name in stages}
    monkeypatch.setattr(learner, "config", lambda *_: replace(short, **brief))
    images = poecaps.data.load("mnist-sample", split="train").images[: live.MIN_IMAGES]
    np.save(
        tmp_path / learner.IMAGES,
        images[:, 10 : 10 + side, 10 : 10 + side] if side < 28 else images,
    )
    seen: list[dict[str, Any]] = []
    learner.learn(tmp_path, 3, 1, lambda each: seen.append(json.loads(json.dumps(each))))
    assert seen[0] == {"stages": STAGES}
    assert seen[-1] == {"finished": True}
    points = [each["point"] for each in seen if "point" in each]
    assert {point["stage"] for point in points} == set(STAGES)
    assert all(point["error"] > 0 and point["held_out"] > 0 for point in points)
    pictures = [each["pictures"] for each in seen if "pictures" in each]
    counts = {name: each["count"] for name, each in pictures[-1].items()}
    assert counts == {"images": 10, "reconstructions": 10, "experts": 3, "draws": 3}
    assert pictures[0]["reconstructions"] != pictures[-1]["reconstructions"]
    assert poecaps.load(tmp_path / learner.MODEL).architecture.experts == ((3, 16),)
