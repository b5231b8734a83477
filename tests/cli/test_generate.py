"""`poecaps generate`, `reconstruct` and `traverse`."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

import poecaps
from poecaps import plotting
from poecaps.cli.main import main
from poecaps.explorer import effects
from poecaps.explorer.render import ExplorerModel
from tests.cli.conftest import arrays

if TYPE_CHECKING:
    import pytest


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


def test_one_expert_can_be_drawn_alone(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    assert main(["generate", str(copy), "--domain", "learned", "--expert", "2", "--rows", "2"]) == 0
    path = Path(capsys.readouterr().out.strip())
    assert path == copy / "figures" / "learned-2.png"
    assert arrays(path.with_suffix(".npz"))["images"].shape == (40, 1, 28, 28)


def test_reconstructions_are_the_models(run: Path, tmp_path: Path) -> None:
    assert main(["reconstruct", str(run), "--count", "2", "--out", str(tmp_path / "r.png")]) == 0
    drawn = arrays(tmp_path / "r.npz")
    assert len(drawn["originals"]) == 2
    test = poecaps.data.load("mnist-sample", split="test").batch([0, 19])  # the first and the last
    np.testing.assert_array_equal(drawn["originals"], test.numpy())
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
    train = poecaps.data.load("mnist-sample").batch([0, 24, 47])
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


def test_the_strongest_parameter_is_in_the_first_row(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the order of the sliders of the explorer."""
    orders: list[list[int]] = []
    draw = plotting.traversal_grid

    def note(*arguments: Any, order: list[int], **options: Any) -> Path:
        orders.append(order)
        return draw(*arguments, order=order, **options)

    monkeypatch.setattr(plotting, "traversal_grid", note)
    options = ["--expert", "2", "--steps", "5", "--reach", "2"]
    assert main(["traverse", str(run), *options, "--out", str(tmp_path / "t.png")]) == 0
    found = effects.effects(ExplorerModel("run", str(run), poecaps.load(run)), 2)
    sizes = [found[parameter].size for parameter in orders[0]]
    assert sizes == sorted(sizes, reverse=True)
    assert len(set(sizes)) == 5


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


def test_figures_have_titles_in_plain_words(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    titles: list[str] = []

    def note(_: object, path: Path, *, title: str, **__: object) -> Path:
        titles.append(title)
        return path

    for function in ("image_grid", "expert_grid", "traversal_grid"):
        monkeypatch.setattr(plotting, function, note)
    assert main(["generate", str(run), "--domain", "all"]) == 0
    assert titles == [
        "draws from one expert at a time, complete domain, one column per expert",
        "draws from one expert at a time, restricted domain, one column per expert",
        "draws from one expert at a time, learned domain, one column per expert",
        "draws from all experts together",
    ]
    titles.clear()
    assert main(["generate", str(run), "--domain", "learned", "--expert", "2"]) == 0
    assert main(["traverse", str(run), "--expert", "1", "--image", "4"]) == 0
    assert titles == [
        "draws from expert 2, learned domain",
        "expert 1, from image 4: one row per parameter, strongest first; "
        "offsets in standard deviations",
    ]
