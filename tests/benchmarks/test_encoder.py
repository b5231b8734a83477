"""The benchmark of the encoder runs, with several views and restarts."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np
import pytest

from benchmarks import machine
from benchmarks.encoder import main

if TYPE_CHECKING:
    from pathlib import Path


def test_the_benchmark_measures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(machine, "MIN_TURN_SECONDS", 1e-3)
    images = np.random.default_rng(0).integers(256, size=(40, 20, 19), dtype=np.uint8)
    np.save(tmp_path / "images.npy", images)
    given = ["--data", str(tmp_path / "images.npy"), "--batch", "8", "--features", "8"]
    given += ["--experts", "3", "4", "--counts", "1", "2", "--restart-views", "3", "--rounds", "1"]
    main([*given, "--json", str(tmp_path / "found.json")])
    found = json.loads((tmp_path / "found.json").read_text())
    assert found.keys() == {"command", "machine", "steps"}
    cases = [(row["views"], row["restarts"]) for row in found["steps"]]
    assert cases == [(1, 1), (2, 1), (1, 2), (3, 1), (3, 2)]
    assert found["steps"][0]["relative"] == 1
    for row in found["steps"]:
        assert row["images_per_s"] == pytest.approx(8 / row["median_s"])
        assert not row["cuda_graph"]
    assert "images/s" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (["--batch", "20000"], "--batch must be at most 10000"),
        (["--counts", "0"], "encoder.views.count must be a whole number from 1 to 1000, but is 0"),
    ],
)
def test_invalid_options_are_errors(
    option: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises((SystemExit, ValueError)) as error:
        main(option)
    assert message in capsys.readouterr().err + str(error.value)
