"""The script that trains and draws, on a handful of images."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

import poecaps
from benchmarks.whole_model import main

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_it_leaves_a_network_and_four_pictures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.save(tmp_path / "x.npy", np.random.default_rng(0).integers(0, 256, (64, 18, 17), dtype=np.uint8))
    main(["--data", str(tmp_path / "x.npy"), "--epochs", "1", "--winners", "3", "--folder", str(tmp_path / "run")])
    pictures = {file.stem for file in (tmp_path / "run").glob("*.png")}
    assert pictures == {"reconstructions", "joint", "learned", "curves"}
    assert poecaps.load(tmp_path / "run").architecture.winners == 3
    assert "effective rank" in capsys.readouterr().out
