"""The notebooks run from their first cell to their last, at a small size."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

FOLDER = Path(__file__).parent.parent / "examples" / "notebooks"
# Run after the cell that is tagged "parameters".
SMALL = {
    "ten-minutes": "steps = 21",
    "own-pictures": "pictures, epochs, filters, samples = 80, 1, 8, 20",
    "mathematics": "",
}


def cells_of(name: str) -> list[dict[str, Any]]:
    notebook = json.loads((FOLDER / f"{name}.ipynb").read_text(encoding="utf-8"))
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    return list(notebook["cells"])


def run(name: str) -> list[Any]:
    """Run the cells one after the other, and return the value of each one's last line."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    values = []
    for cell in cells_of(name):
        if cell["cell_type"] != "code":
            continue
        *lines, last = "".join(cell["source"]).rstrip().split("\n")
        try:
            value = compile(last, name, "eval")
        except SyntaxError:
            lines, value = [*lines, last], None
        exec(compile("\n".join(lines), name, "exec"), namespace)
        values.append(None if value is None else eval(value, namespace))
        if "parameters" in cell["metadata"].get("tags", ()):
            exec(SMALL[name], namespace)
    return values


@pytest.fixture(autouse=True)
def _in_a_new_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "agg")


def test_every_notebook_is_run() -> None:
    assert {file.stem for file in FOLDER.glob("*.ipynb")} == SMALL.keys()
    for name in SMALL:
        cells = cells_of(name)
        tags = [cell["metadata"].get("tags") for cell in cells]
        assert (["parameters"] in tags) == bool(SMALL[name])
        assert not any(cell.get("outputs") for cell in cells)  # results depend on the machine


def test_ten_minutes(capsys: pytest.CaptureFixture[str]) -> None:
    pictures = [value for value in run("ten-minutes") if isinstance(value, Image.Image)]
    assert len(pictures) == 4
    lost = [
        float(line.split()[2].rstrip("%"))
        for line in capsys.readouterr().out.splitlines()
        if "lost" in line
    ]
    assert lost[-1] < 0.6 * lost[0]


def test_own_pictures(capsys: pytest.CaptureFixture[str]) -> None:
    pictures = [value for value in run("own-pictures") if isinstance(value, Image.Image)]
    assert len(pictures) == 3
    table = capsys.readouterr().out
    assert "72 RGB images of 24×24" in table
    assert "recognisable" in table
    assert Path("runs/pictures/model.safetensors").is_file()


def test_nothing_is_drawn_in_a_folder_of_ones_own() -> None:
    Path("pictures").mkdir()
    namespace: dict[str, Any] = {}
    for cell in cells_of("own-pictures"):
        source = "".join(cell["source"]) if cell["cell_type"] == "code" else ""
        exec(source, namespace)
        if "ImageDraw.Draw" in source:
            break
    assert "drawing" not in namespace
    assert not list(Path("pictures").iterdir())


@pytest.mark.parametrize("widgets", [True, False])
def test_mathematics(
    widgets: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a stand-in for ipywidgets, which shows both ends of each range, and without."""
    plt = pytest.importorskip("matplotlib.pyplot")
    shown: list[str] = []

    def show() -> None:
        shown.append(plt.gca().get_title())
        plt.close()

    monkeypatch.setattr(plt, "show", show)

    class Widgets:
        @staticmethod
        def interact(function: Any, **ranges: Any) -> None:
            for end in (0, 1):
                function(**{name: each[end] for name, each in ranges.items()})

    monkeypatch.setitem(sys.modules, "ipywidgets", Widgets if widgets else None)
    with torch.random.fork_rng(devices=[]):
        run("mathematics")
    assert len(shown) == (4 if widgets else 2)
    shares = [int(title.split()[-4].rstrip("%")) for title in shown if "agree" in title]
    assert shares[0] >= 70
    assert shares[-1] > 85
    assert "largest difference of the two gradients" in capsys.readouterr().out
