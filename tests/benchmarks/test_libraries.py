"""The benchmark of libraries runs, and its measures of accuracy are right."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch

from benchmarks import libraries, machine

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: dict[str, Any] = {
        "POINTS": 300,
        "DIMENSIONS": 60,
        "COMPONENTS": 4,
        "SPARE": 4,
        "MATRICES": 3,
        "MATRIX_SIZE": 40,
        "LEADING": 2,
        "BATCH": 2,
        "FEATURES": 32,
    }
    for name, value in sizes.items():
        monkeypatch.setattr(libraries, name, value)
    monkeypatch.setattr(machine, "MIN_TURN_SECONDS", 1e-3)


@pytest.mark.usefixtures("small")
def test_the_benchmark_measures_and_names_what_it_skips(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "found.json"
    libraries.main(["--device", "cpu", "--rounds", "1", "--json", str(file)])
    found = json.loads(file.read_text())
    assert found.keys() == {"command", "machine", *libraries.PARTS}
    assert found["launch"] == {"launch": libraries.NEEDS_GPU}
    assert found["eigenvectors"] == {"eigenvectors": libraries.NEEDS_GPU}
    assert found["optimizer"]["step"] == libraries.NEEDS_GPU
    first = found["optimizer"]["first step in a process"]
    assert first.keys() == {"FusedAdam", "torch.optim.Adam"}
    assert all(each["median_s"] > 0 for each in first.values())
    methods = found["directions"]["directions, cpu"]
    assert methods.keys() == {
        "leading_directions",
        "torch.pca_lowrank, niter=2",
        "torch.pca_lowrank, niter=8",
    }
    for each in methods.values():
        assert 0.9 < each["captured"] < 1 + 1e-6
    (filtering, theirs) = found["convolution"]["step, autoencoder, cpu"].values()
    assert theirs["gradient_error"] < filtering["gradient_error"] < 1e-3
    printed = capsys.readouterr().out
    assert libraries.NEEDS_GPU in printed
    assert "captured" in printed


@pytest.mark.usefixtures("small")
def test_exact_eigenvectors_capture_everything() -> None:
    found = libraries._compare_eigenvectors(libraries._covariances(torch.device("cpu")), 1)
    exact, iteration = found["torch.linalg.eigh"], found["leading_eigenvectors_by_iteration"]
    assert exact["captured"] == pytest.approx(1)
    assert exact["eigenvalue_error"] == 0
    assert iteration["captured"] < 1 + 1e-9
    assert iteration["captured"] == pytest.approx(1, abs=1e-3)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
@pytest.mark.usefixtures("small")
def test_everything_is_measured_on_a_gpu(tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    libraries.main(["--device", "cuda", "--rounds", "1", "--json", str(file)])
    assert libraries.NEEDS_GPU not in file.read_text()
