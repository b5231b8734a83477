"""`poecaps encode`."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

import poecaps
from poecaps.cli.main import main
from poecaps.training import record
from tests.cli.conftest import arrays

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


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


def test_a_file_of_codes_is_named_after_the_data_without_colons(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are the part of a dataset of the Hub, and some systems allow none in the name."""
    folder = tmp_path / "run"
    shutil.copytree(run, folder)
    images = poecaps.data.load("mnist-sample").subset(range(4))
    monkeypatch.setattr("poecaps.data.read_hub_dataset", lambda *_, **__: images)
    assert main(["encode", str(folder), "--data", "hf:somebody/pictures:small"]) == 0
    assert len(arrays(folder / "codes-pictures-small-train.npz")["codes"]) == 4
    assert main(["encode", str(folder), "--data", "hf:pictures"]) == 0
    assert [path.name for path in folder.glob("*:*")] == []


def test_a_run_may_be_resumed_meanwhile(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It deletes temporary files of killed processes, but not the one that is being written."""
    folder, savez = tmp_path / "run", np.savez
    shutil.copytree(run, folder)
    record.write(folder, record.read(folder) | {"finished": None})

    def save_slowly(file: Any, **arrays: Any) -> None:
        file.write(b"")
        assert main(["train", "--resume", str(folder), "--quiet", "--no-figures"]) == 0
        savez(file, **arrays)

    monkeypatch.setattr(np, "savez", save_slowly)
    assert main(["encode", str(folder)]) == 0
    assert arrays(folder / "codes-train.npz")["codes"].shape == (48, 3, 5)
    assert not list(folder.glob(".*.part"))
