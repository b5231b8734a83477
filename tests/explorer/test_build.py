"""The static build: the same images without a server."""

from __future__ import annotations

import functools
import http.server
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from playwright.sync_api import expect

from poecaps.cli.main import main
from poecaps.explorer import maps, pictures
from poecaps.explorer.build import write_static
from poecaps.explorer.render import Setting
from poecaps.explorer.schema import Code
from tests.explorer.pages import drawn, pixels, shows, sketch, wait_until_still

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from playwright.sync_api import Browser, Page

    from poecaps.explorer.render import ExplorerModel

DECODE = """async ([name, code]) => {
    const api = await import('./api.js');
    return Array.from(await api.decode(name, code)); }"""
ENCODE = """async ([name, index]) => {
    const api = await import('./api.js');
    const image = await api.testImage(name, index);
    return api.encode(name, image, { centre: false, invert: false }); }"""
CENTRE = ENCODE.replace("centre: false", "centre: true")


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args: Any) -> None:
        """Write nothing."""


@pytest.fixture(scope="module")
def static_address(
    digits: ExplorerModel,
    colours: ExplorerModel,
    ink: ExplorerModel,
    frameless: ExplorerModel,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[str]:
    """Any web server, in a folder of its own, with the build of four models."""
    folder = tmp_path_factory.mktemp("site")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(maps, "IMAGES", 30)
        patch.setattr(maps, "ITERATIONS", 50)
        write_static([digits, colours, ink, frameless], folder / "page")
    handler = functools.partial(QuietHandler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever).start()
        yield f"http://127.0.0.1:{server.server_port}/page/"
        server.shutdown()


@pytest.fixture(scope="module")
def static_page(browser: Browser, static_address: str) -> Iterator[Page]:
    page, problems = browser.new_page(), list[str]()
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.goto(static_address)
    expect(page.locator("#image[data-number]")).to_be_visible()
    yield page
    page.close()
    assert problems == []


@pytest.mark.parametrize("name", ["digits", "colours", "frameless"])  # colours: two layers
def test_images_are_those_of_the_server(
    name: str, static_page: Page, request: pytest.FixtureRequest
) -> None:
    model: ExplorerModel = request.getfixturevalue(name)
    for settings in (
        (Setting(1, (0.5, -2.25, 1.0), 1.4, negative=True), Setting(2)),
        model.draw("joint", None, 3),
        (),
    ):
        code = Code.from_settings(settings).model_dump()
        found = np.array(static_page.evaluate(DECODE, [name, code]))
        assert np.abs(found - model.decode(settings).astype(int).ravel()).max() <= 1


def test_an_image_is_encoded_as_by_the_server(static_page: Page, digits: ExplorerModel) -> None:
    assert digits.images is not None
    found = static_page.evaluate(ENCODE, ["digits", 7])
    wanted = digits.encode(np.asarray(digits.images.images[7]))
    assert np.array_equal(found["image"], wanted.image)
    np.testing.assert_allclose(found["firing"], wanted.firing, atol=1e-5)
    np.testing.assert_allclose(found["routing"], wanted.routing, atol=1e-5)
    assert found["free_energy"] == pytest.approx(wanted.free_energy, abs=1e-4)
    difference = np.array(found["reconstruction"]) - wanted.reconstruction.astype(int)
    assert np.abs(difference).max() <= 1


@pytest.mark.parametrize("name", ["digits", "ink"])  # light on dark, dark on light
def test_an_image_is_centred_as_by_the_server(
    name: str, static_page: Page, request: pytest.FixtureRequest
) -> None:
    model: ExplorerModel = request.getfixturevalue(name)
    assert model.images is not None
    found = static_page.evaluate(CENTRE, [name, 7])
    picture = pictures.write(np.asarray(model.images.images[7]))
    wanted = pictures.read(picture, (1, 28, 28), centre=True, background=model.background)
    difference = np.array(found["image"]) - wanted.pixels.astype(int)
    assert np.abs(difference).mean() < 5  # each scales in its own way


def test_the_page_works_without_a_server(static_page: Page, digits: ExplorerModel) -> None:
    page = static_page
    expect(page.get_by_role("tab", name="Train")).to_be_hidden()
    page.get_by_label("Parameter 2", exact=True).fill("3.5")
    shows(page, drawn(digits, Setting(0, (0.0, 0.0, 3.5))))
    expect(page.locator("#python")).to_contain_text("poecaps.load")
    for domain in ("learned", "restricted", "complete", "joint"):
        page.get_by_label("Domain").select_option(domain)
        expect(page.locator("#domain-hint")).not_to_be_empty()
    expect(page.locator("#mix-text")).to_have_text("All experts are mixed.")
    page.get_by_role("tab", name="Encode").click()
    sketch(page, (0.3, 0.2), (0.6, 0.8))
    wait_until_still(page)
    expect(page.locator("#firing button")).to_have_count(4)
    assert pixels(page, "#seen").max() > 200
    page.get_by_role("tab", name="Map").click()
    expect(page.locator("#map")).to_have_attribute("aria-busy", "false")
    plane = maps.make_map(digits, 0)
    page.locator("#map").focus()
    page.keyboard.press("ArrowRight")
    shows(page, drawn(digits, *digits.settings(plane.at(0.52, 0.5))))
    page.get_by_role("tab", name="Interpolate").click()
    expect(page.locator("#between-strip button").first).to_be_enabled()
    page.get_by_role("tab", name="Traversal").click()
    expect(page.locator("#sheet.stale")).to_have_count(0)
    expect(page.get_by_role("alert")).to_be_empty()


def test_a_static_build_names_the_folder_of_a_run_and_not_its_path(
    static_page: Page, digits: ExplorerModel
) -> None:
    read = "async () => (await fetch('models/0-digits.json')).text()"
    assert str(digits.source) not in static_page.evaluate(read)
    static_page.get_by_label("Parameter 2", exact=True).fill("3.5")
    expect(static_page.locator("#python")).to_contain_text('poecaps.load("digits")')


def test_a_folder_that_is_not_empty_is_left_alone(
    digits: ExplorerModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    assert main(["explore", digits.source, "--static", str(tmp_path)]) == 1
    assert "is not empty; choose a new folder" in capsys.readouterr().err
    assert [each.name for each in tmp_path.iterdir()] == ["mine.txt"]
