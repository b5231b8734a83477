"""Numbers that short programs of the documentation print."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from benchmarks import pages
from benchmarks.report import NUMBERS

if TYPE_CHECKING:
    from pathlib import Path


def test_the_command_measures_what_the_pages_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "SEEDS", range(1))
    monkeypatch.setattr(pages, "SIZES", ((500, 500),))
    pages.main(["--json", str(tmp_path / "pages.json")])
    written = json.loads((tmp_path / "pages.json").read_text())
    assert written["command"] == "python -m benchmarks.pages"
    documented = json.loads((NUMBERS / "pages-cpu.json").read_text())
    theirs, lost = documented["accuracies"][0], documented["variance_lost"][0]
    assert written["accuracies"] == [pytest.approx(theirs, abs=0.01)]
    assert written["variance_lost"] == [pytest.approx(lost, abs=0.01)]
