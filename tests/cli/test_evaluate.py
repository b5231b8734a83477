"""`poecaps evaluate`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from poecaps.cli.main import main
from poecaps.code_density import DOMAINS

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_a_model_is_measured_as_a_table_and_as_json(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On the data of the run, for which there is no classifier."""
    out = tmp_path / "of run.json"
    assert main(["evaluate", str(run), "--samples", "20", "--out", str(out)]) == 0
    measured = json.loads(out.read_text())
    assert measured["test_images"] == 20
    assert measured["domains"].keys() == set(DOMAINS)
    assert measured["classifier"] is None
    assert measured["domains"]["joint"]["frechet"] is None
    assert measured["domains"]["joint"]["random_frechet"]["distance"] > 0
    text = capsys.readouterr().out
    assert f"written to {out}" in text
    assert "effective rank" in text
