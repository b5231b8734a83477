"""A training that is watched: in its own process, through the HTTP interface."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

import poecaps
from poecaps.explorer import training as live
from poecaps.explorer.server import create_app
from tests.explorer.conftest import serving

if TYPE_CHECKING:
    from collections.abc import Iterator

    from poecaps.explorer.render import ExplorerModel

SMALL = {"source": "mnist-sample", "images": live.MIN_IMAGES, "experts": 3, "seed": 1}


@pytest.fixture(scope="module")
def trainer(digits: ExplorerModel) -> Iterator[httpx.Client]:
    """A server whose model has enough images to learn from."""
    images = poecaps.data.load("mnist-sample", split="test")
    app = create_app([replace(digits, images=images)], token=None)
    with (
        serving(app) as address,
        httpx.Client(base_url=address, timeout=30, trust_env=False) as client,
    ):
        yield client


def wait(client: httpx.Client, *statuses: str) -> dict[str, Any]:
    """Wait until a training has one of these statuses."""
    for _ in range(6000):
        state: dict[str, Any] = client.get("/api/training").json()
        if state["status"] in statuses:
            return state
        time.sleep(0.05)
    pytest.fail(f"the training is still {state['status']}")


def test_a_model_is_trained_and_can_be_explored(trainer: httpx.Client) -> None:
    sources = [each["name"] for each in trainer.get("/api/training/sources").json()]
    assert sources == ["mnist-sample", "fashion-mnist-sample", "model:digits"]
    assert trainer.get("/api/training").json()["status"] == "idle"
    begun = trainer.post("/api/training", json=SMALL | {"source": "model:digits"}).json()
    assert (begun["run"], begun["status"], begun["points"]) == (1, "starting", [])
    again = trainer.post("/api/training", json=SMALL)
    assert again.status_code == 409
    assert again.json() == {"error": "a model is being trained already; stop it first"}
    state = wait(trainer, "finished", "failed", "stopped")
    assert state["error"] is None
    assert state["stages"] == ["autoencoder", "encoder 1", "decoder 1", "pixel decoder"]
    assert {point["stage"] for point in state["points"]} == set(state["stages"])
    assert all(point["held_out"] is not None for point in state["points"])
    later = trainer.get("/api/training", params={"since": 3}).json()
    assert (later["first"], later["points"]) == (3, state["points"][3:])
    counts = {name: each["count"] for name, each in state["pictures"].items()}
    assert counts == {"images": 10, "reconstructions": 10, "experts": 3, "draws": 3}
    assert state["model"] == "trained-here"
    assert trainer.get("/api/models").json() == ["digits", "trained-here"]
    code = {"experts": [{"expert": 2}]}
    assert trainer.post("/api/models/trained-here/decode", json=code).status_code == 200
    lines = trainer.post("/api/models/trained-here/python", json=code).json()["lines"]
    names: dict[str, Any] = {}
    exec(lines, names)
    assert names["image"].shape == (1, 1, 28, 28)


def test_a_training_is_stopped_at_once(trainer: httpx.Client) -> None:
    trainer.post("/api/training", json=SMALL | {"images": live.MAX_IMAGES})
    stopped = trainer.delete("/api/training").json()
    assert stopped["status"] == "stopped"
    assert trainer.delete("/api/training").json()["status"] == "stopped"
    assert trainer.post("/api/training", json=SMALL | {"source": "/etc"}).status_code == 404
    for wrong in ({"images": 99}, {"images": 5001}, {"experts": 1}, {"seed": -1}, {"data": "x"}):
        assert trainer.post("/api/training", json=SMALL | wrong).status_code == 422


def test_nothing_is_left_behind_and_time_is_limited(digits: ExplorerModel) -> None:
    training = live.LiveTraining([digits], str, max_seconds=0.2)
    assert "model:digits" not in training.sources()  # it has too few images
    training.start("mnist-sample", live.MIN_IMAGES, 2, 0)
    assert training.folder is not None
    assert training.process is not None
    folder = Path(training.folder.name)
    training.process.wait(30)
    state = training.snapshot()
    assert (state["status"], state["error"]) == ("stopped", "stopped after 0 seconds, the limit")
    training.close()
    assert not folder.exists()
