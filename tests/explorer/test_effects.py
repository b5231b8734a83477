"""What parameters change, measured on images; and maps of codes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from poecaps.data import ImageSet
from poecaps.explorer import effects, maps, render
from poecaps.explorer.effects import Effect
from poecaps.explorer.render import ExplorerModel
from tests.networks import TINY, untrained

STEPS = np.array([-2.0, -1.0, 0.0, 1.0, 2.0])


def bar(
    *,
    thick: float = 5,
    tall: float = 16,
    lean: float = 0,
    light: float = 1,
    right: float = 0,
    ring: float = 0,
) -> np.ndarray:
    """Draw a bar or, with a radius, a ring on black: (28, 28), with soft edges."""
    y, x = np.mgrid[:28, :28] - 13.5
    across = x - right + lean * y
    if ring:
        distance = np.abs(np.hypot(x, y) - ring) - thick / 2
    else:
        distance = np.maximum(np.abs(across) - thick / 2, np.abs(y) - tall / 2)
    return light * np.clip(0.5 - distance, 0, 1)


@pytest.mark.parametrize(
    ("measure", "images"),
    [
        ("slant", [bar(lean=0.15 * s) for s in STEPS]),
        ("height", [bar(tall=16 + 2 * s) for s in STEPS]),
        ("brightness", [bar(light=0.7 + 0.12 * s) for s in STEPS]),
        ("horizontal", [bar(right=1.5 * s) for s in STEPS]),
        ("thickness", [bar(ring=8, thick=3 + 0.6 * s) for s in STEPS]),
        ("size", [bar(ring=8 + s, thick=3) for s in STEPS]),
        (None, [bar(lean=0.15 * s, right=1.2 * s, light=0.7 + 0.1 * s) for s in STEPS]),
        (None, [bar() for _ in STEPS]),
    ],
)
def test_what_changes_is_named_if_it_is_one_thing(measure: str, images: list[np.ndarray]) -> None:
    found = effects._effect(STEPS, np.stack(images))
    assert found.measure == measure
    if measure is not None:
        assert found.rises
        back = effects._effect(STEPS, np.stack(images[::-1]))
        assert (back.measure, back.rises) == (measure, False)
        assert back.size == pytest.approx(found.size)


def test_what_comes_and_goes_is_not_named() -> None:
    images = np.stack([bar(lean=0.2 * abs(s)) for s in STEPS])
    assert effects._effect(STEPS, images).measure is None


def test_the_effects_of_a_model(digits: ExplorerModel) -> None:
    found = effects.effects(digits, 1)
    assert len(found) == digits.parameters
    assert all(isinstance(each, Effect) and each.size > 0 for each in found)
    assert len({each.size for each in found}) == digits.parameters


@pytest.mark.parametrize(("kind", "measure"), [("digits", "slant"), ("photographs", None)])
def test_only_images_on_a_plain_background_have_strokes(
    kind: str, measure: str | None, digits: ExplorerModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Photographs fill their frame: what is bright in them is not a stroke on black."""
    model = digits
    if kind == "photographs":
        shades = np.linspace(0, 1, 28)
        slopes = np.random.default_rng(0).uniform(-150, 150, (2, 30, 1, 1))
        pictures = 128 + slopes[0] * (shades - 0.5) + slopes[1] * (shades[:, None] - 0.5)
        model = replace(digits, images=ImageSet(pictures.clip(0, 255).astype(np.uint8)[..., None]))
    leaning = np.stack([255 * bar(lean=0.15 * step) for step in render.STEPS])[None, ..., None]
    monkeypatch.setattr(ExplorerModel, "traverse", lambda *_: leaning)
    (found,) = effects.effects(model, 0)
    assert found.measure == measure
    assert found.size > 0


# --------------------------------------------------------------------------------------------------
# Maps


def test_similar_points_are_near_each_other() -> None:
    generator = torch.Generator().manual_seed(0)
    centres = 20 * torch.randn(4, 10, generator=generator)
    which = torch.arange(80) % 4
    points = centres[which] + torch.randn(80, 10, generator=generator)
    places = maps.embed(points)
    assert torch.equal(places, maps.embed(points))
    distance = torch.cdist(places, places).fill_diagonal_(torch.inf)
    assert bool((which[distance.argmin(1)] == which).all())
    middles = torch.stack([places[which == each].mean(0) for each in range(4)])
    spread = torch.stack([places[which == each].std(0).norm() for each in range(4)]).max()
    assert torch.pdist(middles).min() > 2 * spread


def test_the_map_of_an_expert_is_a_plane_through_its_mean(digits: ExplorerModel) -> None:
    found = maps.make_map(digits, 2)
    centre, right, up = found.at(0.5, 0.5), found.at(0.75, 0.5), found.at(0.5, 0.25)
    assert not centre[[0, 1, 3]].any()
    torch.testing.assert_close(found.at(0.75, 0.25), right + up - centre)
    assert abs(float(((right - centre) * (up - centre)).sum())) < 1e-5
    drawn = digits.network.code_density.sample(
        4000, "learned", 2, torch.Generator().manual_seed(1)
    )[:, 2]
    assert (centre[2] - drawn.mean(0)).norm() < 0.2 * drawn.std(0).norm()
    assert found.explained is not None
    assert 1 >= found.explained[0] >= found.explained[1] > 0
    again = maps.make_map(digits, 2)
    assert np.array_equal(again.images, found.images)
    assert len(found.images) == found.columns**2


def test_maps_of_single_numbers_and_of_one_image(
    generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An expert of one number has a map with one axis; with few images, draws are mapped."""
    monkeypatch.setattr(maps, "IMAGES", 20)
    monkeypatch.setattr(maps, "ITERATIONS", 20)
    shape = replace(TINY, experts=((1, 1),))
    network = untrained(shape, torch.rand(30, 1, 20, 19, generator=generator), generator)
    model = ExplorerModel("one", "runs/one", network, ImageSet(np.zeros((1, 20, 19), np.uint8)))
    plane = maps.make_map(model, 0)
    assert plane.explained == pytest.approx((1, 0))
    assert plane.at(0.5, 0.1) == plane.at(0.5, 0.9) != plane.at(0.9, 0.5)
    codes, places = maps.make_map(model, None).codes()
    assert len(codes) == 20
    assert places.isfinite().all()


@pytest.mark.parametrize("name", ["digits", "colours"])  # with images of its data, and without
def test_the_map_of_all_experts_passes_through_codes(
    name: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(maps, "IMAGES", 40)
    monkeypatch.setattr(maps, "ITERATIONS", 50)
    model: ExplorerModel = request.getfixturevalue(name)
    found = maps.make_map(model, None)
    codes, places = found.codes()
    inside = int(((places > 0) & (places < 1)).all(1).nonzero()[0])
    torch.testing.assert_close(
        found.at(*places[inside].tolist()), codes[inside], rtol=1e-3, atol=1e-3
    )
    assert found.filled.any()
    assert not found.images[~found.filled].any()
