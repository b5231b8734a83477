"""Parts of the page beyond the sliders, in a real browser."""

from __future__ import annotations

import base64
import re
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from PIL import Image
from playwright.sync_api import expect

from poecaps.explorer import maps, pictures
from poecaps.explorer.render import Setting
from poecaps.explorer.server import create_app
from tests.explorer.conftest import TOKEN, serving
from tests.explorer.pages import after, drawn, on_a_phone, pixels, shows, sketch, wait_until_still

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from playwright.sync_api import Browser, Page

    from poecaps.explorer.render import ExplorerModel

CONTRAST = """() => {
    const style = getComputedStyle(document.documentElement);
    const luminance = (name) => {
        const hex = style.getPropertyValue(name).trim().slice(1);
        const [r, g, b] = [0, 2, 4].map((i) => parseInt(hex.slice(i, i + 2), 16) / 255)
            .map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
        return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
    const [a, b] = [luminance('--rail'), luminance('--card')].sort();
    return (b + 0.05) / (a + 0.05); }"""


def test_a_slider_can_be_seen_on_its_panel(page: Page) -> None:
    assert page.evaluate(CONTRAST) >= 3  # WCAG 2.2, 1.4.11; the phone is dark


# --------------------------------------------------------------------------------------------------
# Encoding


def test_dark_on_light_is_inverted_and_said_and_can_be_overridden(
    opened: Callable[..., Page], tmp_path: Path
) -> None:
    page, file = opened(), tmp_path / "ink.png"
    paper = np.full((60, 60), 250, np.uint8)
    paper[10:50, 27:33] = 5
    Image.fromarray(paper).save(file)
    expect(page.get_by_label("Invert brightness")).to_be_disabled()
    page.locator("#file").set_input_files(file)
    expect(page.locator("#inverted")).to_contain_text("Dark on light")
    expect(page.get_by_label("Invert brightness")).to_be_checked()
    assert np.median(pixels(page, "#seen")) < 20
    after(page, page.get_by_label("Invert brightness").uncheck, "#seen")
    assert pixels(page, "#seen").mean() > 100
    expect(page.locator("#inverted")).to_be_empty()


@pytest.mark.parametrize("size", [(2, 600), (1, 700), (600, 1)])
def test_a_very_narrow_picture_is_shown(
    opened: Callable[..., Page], tmp_path: Path, size: tuple[int, int]
) -> None:
    page, file = opened(), tmp_path / "narrow.png"
    Image.new("L", size, 250).save(file)
    after(page, lambda: page.locator("#file").set_input_files(file), "#sketch")
    expect(page.get_by_label("Invert brightness")).to_be_enabled()


def test_transparent_paper_is_white_below_dark_ink(
    opened: Callable[..., Page], tmp_path: Path
) -> None:
    page, file = opened(), tmp_path / "transparent.png"
    ink = np.zeros((60, 60, 4), np.uint8)
    ink[10:50, 27:33, 3] = 255
    Image.fromarray(ink).save(file)
    page.locator("#file").set_input_files(file)
    expect(page.locator("#inverted")).to_contain_text("Dark on light")
    assert pixels(page, "#seen").max() > 200


def test_the_heat_map_follows_the_strongest_expert(
    opened: Callable[..., Page], digits: ExplorerModel
) -> None:
    page = opened()
    assert digits.images is not None
    for index in (7, 3):
        firing = digits.encode(np.asarray(digits.images.images[index])).firing
        strongest = int(np.argmax(firing))
        page.locator("#shelf button").nth((strongest + 1) % 4).click()
        page.get_by_label("Test image", exact=True).fill(str(index))
        page.get_by_role("button", name="Use", exact=True).click()
        pressed = page.locator("#firing button[aria-pressed=true]")
        expect(pressed).to_have_attribute("aria-label", re.compile(f"Expert {strongest} fires"))
        expect(page.locator("#heat-caption")).to_contain_text(
            re.compile(rf"xpert {strongest} looks(: .* times the average| at all parts alike)\.$")
        )


def test_ink_is_drawn_on_light_paper_where_a_model_knows_dark_on_light(
    browser: Browser, digits: ExplorerModel, ink: ExplorerModel, tmp_path: Path
) -> None:
    file = tmp_path / "chalk.png"
    board = np.full((60, 60), 5, np.uint8)
    board[10:50, 27:33] = 250
    Image.fromarray(board).save(file)
    with serving(create_app([ink, digits], token=TOKEN)) as address:
        page = browser.new_page()
        page.goto(f"{address}/?token={TOKEN}")
        expect(page.locator("#image[data-number]")).to_be_visible()
        sketch(page, (0.3, 0.2), (0.6, 0.8))
        drawing = pixels(page, "#sketch")
        png = pictures.write(drawing[..., None])
        seen = pictures.read(png, (1, 28, 28), centre=True, background=1.0).pixels[..., 0]
        shows(page, seen, "#seen")
        for canvas in (drawing, seen):
            assert np.median(canvas) > 250
            assert canvas.min() < 50

        page.get_by_role("combobox", name="Model").select_option("digits")
        expect(page.locator("#firing button")).to_have_count(4)
        assert np.array_equal(pixels(page, "#sketch"), drawing)
        shows(page, 255 - seen, "#seen")

        page.get_by_role("combobox", name="Model").select_option("ink")
        expect(page.locator("#firing button")).to_have_count(3)
        page.locator("#file").set_input_files(file)
        expect(page.locator("#inverted")).to_contain_text("Light on dark")
        assert np.median(pixels(page, "#seen")) > 250
        page.get_by_role("button", name="Clear").click()
        assert pixels(page, "#sketch").min() == 255
        page.close()


@on_a_phone
def test_a_drawing_stays_when_the_model_changes(page: Page) -> None:
    sketch(page, (0.3, 0.2), (0.6, 0.8))
    wait_until_still(page)
    drawing = pixels(page, "#sketch")
    page.get_by_role("combobox", name="Model").select_option("colours")
    expect(page.locator("#firing button")).to_have_count(3)
    assert np.array_equal(pixels(page, "#sketch"), drawing)
    assert pixels(page, "#seen").shape == (20, 23)
    assert pixels(page, "#seen").max() > 200


def test_images_are_called_what_they_are(opened: Callable[..., Page]) -> None:
    page = opened()
    expect(page.locator("#test-label")).to_have_text("Test image")
    page.get_by_role("combobox", name="Model").select_option("walks")
    expect(page.locator("#test-label")).to_have_text("Training image")


def test_drawing_with_keys(opened: Callable[..., Page]) -> None:
    page = opened()
    page.locator("#sketch").focus()
    page.keyboard.press("ArrowDown")
    assert pixels(page, "#sketch").max() == 0  # the pen is up
    page.keyboard.press("Space")
    expect(page.get_by_role("status")).to_have_text("The pen is down.")
    for _ in range(12):
        page.keyboard.press("ArrowDown")
    page.keyboard.press("Space")
    page.keyboard.press("ArrowRight")
    wait_until_still(page)
    rows, columns = np.nonzero(pixels(page, "#sketch"))
    assert 100 < np.ptp(rows) < 180
    assert np.ptp(columns) < 40
    expect(page.locator("#firing button")).to_have_count(4)
    page.keyboard.press("Delete")
    assert pixels(page, "#sketch").max() == 0
    expect(page.locator("#firing button")).to_have_count(0)


# --------------------------------------------------------------------------------------------------
# Undo


@on_a_phone
def test_changes_are_undone_and_redone(page: Page, digits: ExplorerModel) -> None:
    undo, redo = (page.get_by_role("button", name=name) for name in ("Undo", "Redo"))
    expect(undo).to_be_disabled()
    page.get_by_label("Parameter 2", exact=True).fill("3")
    expect(undo).to_be_enabled()
    page.locator("#shelf button").nth(1).click()
    undo.click()
    shows(page, drawn(digits, Setting(0, (0.0, 0.0, 3.0))))
    expect(page.locator("#sliders-title")).to_have_text("Expert 0")
    page.go_back()  # the browser's own button
    shows(page, drawn(digits, Setting(0)))
    expect(undo).to_be_disabled()
    redo.click()
    shows(page, drawn(digits, Setting(0, (0.0, 0.0, 3.0))))
    page.keyboard.press("Control+y")
    expect(page.locator("#sliders-title")).to_have_text("Expert 1")
    expect(redo).to_be_disabled()


def test_a_stroke_is_undone(opened: Callable[..., Page]) -> None:
    page = opened()
    sketch(page, (0.3, 0.2), (0.6, 0.8))
    wait_until_still(page)
    expect(page).to_have_url(re.compile("&i="))
    first, link = pixels(page, "#sketch"), page.url
    page.clock.install()  # from now on, time passes only in `run_for`
    page.clock.pause_at(page.evaluate("Date.now() + 1000"))
    sketch(page, (0.6, 0.2), (0.3, 0.8))
    page.clock.run_for(1000)  # the stroke is encoded as a whole
    page.clock.resume()
    expect(page).not_to_have_url(link)
    page.keyboard.press("Control+z")
    shows(page, first, "#sketch")
    page.get_by_role("combobox", name="Model").select_option("colours")
    expect(page).to_have_url(re.compile("m=colours"))
    page.go_back()
    expect(page.locator("#shelf button")).to_have_count(4)
    shows(page, first, "#sketch")


# --------------------------------------------------------------------------------------------------
# Sliders


def test_sliders_are_sorted_and_say_what_they_change(opened: Callable[..., Page]) -> None:
    page = opened()
    sizes = [0.1, 0.5, 0.2, 0.4, 0.3]
    effects: list[dict[str, Any]] = [
        {"size": size, "measure": None, "rises": True} for size in sizes
    ]
    effects[1]["measure"] = "thickness"
    effects[3] |= {"measure": "slant", "rises": False}
    page.route("**/experts/2/effects", lambda route: route.fulfill(json=effects))
    page.locator("#shelf button").nth(2).click()
    order = "rows => rows.map((row) => Number(row.querySelector('input').id.split('-')[1]))"
    rows = page.locator("#sliders .slider")
    expect(page.locator("#ends-1")).to_have_text("thin to thick")
    expect(page.locator("#ends-3")).to_have_text("leans right to leans left")
    expect(page.locator("#ends-0")).to_be_hidden()
    assert rows.evaluate_all(order) == [1, 3, 4, 2, 0]
    page.get_by_label("Strongest first").uncheck()
    assert rows.evaluate_all(order) == [0, 1, 2, 3, 4]


# --------------------------------------------------------------------------------------------------
# The other tabs


def test_walking_on_the_map(page: Page, digits: ExplorerModel) -> None:
    page.get_by_role("tab", name="Map").click()
    expect(page.locator("#map")).to_have_attribute("aria-busy", "false")
    plane = maps.make_map(digits, 0)
    shown = pixels(page, "#map-images")
    assert np.array_equal(shown[28:56, :28], plane.images[plane.columns, ..., 0])
    page.locator("#map").focus()
    page.keyboard.press("Shift+ArrowRight")
    page.keyboard.press("ArrowUp")
    shows(page, drawn(digits, *digits.settings(plane.at(0.6, 0.48))))
    page.locator("#map-of").select_option("all")
    expect(page.locator("#map")).to_have_attribute("aria-busy", "false")
    box = page.locator("#map-images").bounding_box()
    assert box is not None
    page.locator("#map").click(position={"x": box["width"] / 4, "y": box["height"] / 2})
    expect(page.locator("#map-place")).to_have_text(re.compile(r"25 % across, \d\d % down"))
    expect(page.locator("#mix-text")).to_have_text("All experts are mixed.")


@on_a_phone
def test_interpolating_between_two_images(page: Page, digits: ExplorerModel) -> None:
    page.get_by_role("tab", name="Interpolate").click()
    strip = page.get_by_role("group", name="Images from start to end").get_by_role("button")
    expect(strip.first).to_be_enabled()
    page.locator("#shelf button").nth(2).click()
    end = page.get_by_role("group", name="End", exact=True)
    end.get_by_role("button", name="Image above").click()
    _, images = digits.interpolate([Setting(0)], [Setting(2)], 17)
    for step, place in ((0, 1), (8, 5), (16, 9)):
        wanted = f"#between-strip button:nth-child({place}) canvas"
        shows(page, images[step, ..., 0], wanted)
    page.get_by_label("Share").press("Home")
    shows(page, images[0, ..., 0], "#between-image")
    strip.nth(4).click()
    expect(page.get_by_role("status")).to_have_text("Loaded into the sliders.")
    expect(page.locator("#mix-text")).to_have_text("Experts 0, 2 are mixed.")
    end.get_by_role("button", name="Encoded image").click()
    expect(page.get_by_role("status")).to_contain_text("Encode an image first")


def top_of(page: Page, selector: str) -> float:
    return float(page.locator(selector).evaluate("e => e.getBoundingClientRect().top"))


def answer_trainings(page: Page) -> tuple[dict[str, Any], list[Any]]:
    """Let the page see trainings that a test invents: their state, and what was asked for."""
    black = base64.b64encode(bytes(28 * 28)).decode()
    state: dict[str, Any] = {
        "run": 0,
        "status": "idle",
        "stages": [],
        "stage": None,
        "done": 0,
        "first": 0,
        "seconds_left": None,
        "points": [],
        "pictures": {},
        "model": None,
        "error": None,
    }
    asked: list[Any] = []

    def answer(route: Any) -> None:
        request = route.request
        if request.url.endswith("/start"):
            asked.append(request.post_data_json)
            picture = {"shape": [1, 28, 28], "count": 1, "pixels": black}
            state.update(
                run=state["run"] + 1,
                status="running",
                stages=["autoencoder", "encoder 1"],
                stage="autoencoder",
                done=0.5,
                points=[
                    {"stage": "autoencoder", "share": x, "error": 1 - x, "held_out": None}
                    for x in (0.25, 0.5)
                ],
                pictures={"images": picture, "reconstructions": picture},
                seconds_left=12.3,
            )
        elif request.url.endswith("/stop"):
            state.update(status="stopped")
        else:
            since = int(request.url.split("since=")[1])
            route.fulfill(json={**state, "first": since, "points": state["points"][since:]})
            return
        route.fulfill(json=state)

    page.route(re.compile("/api/training([?]|/start|/stop|$)"), answer)
    return state, asked


@on_a_phone
def test_watching_a_training(page: Page) -> None:
    state, asked = answer_trainings(page)
    page.get_by_role("tab", name="Train").click()
    state.update(run=7, status="finished")  # started by another page
    expect(page.locator("#training-status")).to_have_text("finished", timeout=10_000)
    page.locator("#training-experts").select_option("5")
    page.get_by_role("button", name="Train", exact=True).click()
    status = page.locator("#training-status")
    expect(status).to_have_text("autoencoder, 50 %, about 13 s left")
    assert asked == [{"source": "mnist-sample", "images": 2000, "experts": 5, "seed": 0}]
    expect(page.locator("#training-plot .followed").first).to_have_attribute(
        "points", re.compile(r"^\S+ \S+$")
    )
    expect(page.get_by_role("img", name="Their reconstructions, 1")).to_be_visible()
    top = page.locator("#training-panel").evaluate("e => e.getBoundingClientRect().top")
    assert 0 <= top < 120  # as much as possible of what is shown is in view
    first, second = (top_of(page, each) for each in ("#training-images-shown", "#training-plot"))
    is_phone = page.evaluate("innerWidth < 700")
    assert (first < second) == is_phone  # on a phone, only the first of both is in view
    state["points"] = [*state["points"], {**state["points"][0], "share": 1.0}]
    expect(page.locator("#training-plot .followed").first).to_have_attribute(
        "points", re.compile(r"^\S+ \S+ \S+$")
    )
    page.get_by_role("button", name="Stop").click()
    expect(status).to_have_text("stopped")
    expect(page.get_by_role("button", name="Train", exact=True)).to_be_enabled()


def test_a_training_by_keyboard(opened: Callable[..., Page]) -> None:
    """A button that is disabled does not take the focus with it."""
    page = opened()
    state, _ = answer_trainings(page)
    start, stop = page.locator("#training-start"), page.locator("#training-stop")
    page.locator("#encode-tab").focus()
    page.keyboard.press("End")
    expect(start).to_be_enabled()
    start.focus()
    page.keyboard.press("Enter")
    expect(stop).to_be_focused()
    page.keyboard.press("Enter")
    expect(start).to_be_focused()
    page.keyboard.press("Enter")
    expect(stop).to_be_focused()
    state.update(status="finished", model="colours")
    expect(start).to_be_focused()
    page.keyboard.press("Tab")
    expect(page.get_by_role("button", name="Explore this model")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator("#stage")).to_be_focused()
    expect(page.locator("#shelf button")).to_have_count(3)
    expect(page.locator("#image")).to_be_in_viewport()


def test_undo_and_redo_keep_the_focus(opened: Callable[..., Page]) -> None:
    page = opened()
    undo, redo = page.locator("#undo"), page.locator("#redo")
    page.locator("#flip").click()
    expect(undo).to_be_enabled()
    undo.focus()
    page.keyboard.press("Enter")
    expect(redo).to_be_focused()
    page.keyboard.press("Enter")
    expect(undo).to_be_focused()


def test_the_page_says_what_an_expert_is(page: Page) -> None:
    answer = page.get_by_text("stands for one kind of image, such as one way to write a digit")
    expect(answer).to_be_hidden()
    page.get_by_text("What is an expert?").focus()
    page.keyboard.press("Enter")
    expect(answer).to_be_visible()
    expect(answer).to_be_in_viewport()


def test_the_tour_leads_through_the_page(page: Page) -> None:
    page.get_by_role("button", name="Tour").click()
    tour = page.get_by_role("dialog")
    expect(tour.get_by_role("button", name="Next")).to_be_focused()
    titles: list[str] = []
    while tour.is_visible() and len(titles) < 20:
        titles.append(page.locator("#tour-title").inner_text())
        expect(page.locator(".toured")).to_have_count(1)
        page.keyboard.press("Enter")
    assert titles[0] == "Experts"
    assert len(set(titles)) == len(titles) >= 5
    expect(page.get_by_role("button", name="Tour")).to_be_focused()
    page.keyboard.press("Enter")
    page.keyboard.press("Escape")
    expect(tour).to_be_hidden()
    expect(page.locator(".toured")).to_have_count(0)


def test_a_link_opens_the_tab(opened: Callable[..., Page]) -> None:
    page = opened("desktop", "#m=digits&x=1&d=learned&s=0&e=1:1:&v=map")
    expect(page.get_by_role("tab", name="Map")).to_have_attribute("aria-selected", "true")
    expect(page.locator("#map")).to_be_visible()


def test_arrows_show_that_the_bar_of_tabs_can_be_scrolled(opened: Callable[..., Page]) -> None:
    wide, narrow = opened("desktop"), opened("phone")
    before, after_ = re.compile("more-before"), re.compile("more-after")
    expect(wide.locator("#tabs")).not_to_have_class(re.compile("more-"))
    expect(narrow.locator("#tabs")).to_have_class(after_)
    expect(narrow.locator("#tabs")).not_to_have_class(before)
    assert narrow.evaluate("getComputedStyle(tabs, '::after').opacity") == "1"
    assert narrow.evaluate("getComputedStyle(tabs, '::before').opacity") == "0"
    narrow.get_by_role("tab", name="Train").click()
    expect(narrow.locator("#tabs")).to_have_class(before)
    expect(narrow.locator("#tabs")).not_to_have_class(after_)


@pytest.mark.parametrize("width", [390, 760, 1120, 1280, 1440])
def test_the_words_of_a_slider_stay_on_one_line(opened: Callable[..., Page], width: int) -> None:
    page = opened()
    page.set_viewport_size({"width": width, "height": 800})
    measured = [{"size": 0.1, "measure": "slant", "rises": True}] * 5
    page.route("**/experts/2/effects", lambda route: route.fulfill(json=measured))
    page.locator("#shelf button").nth(2).click()
    words = page.locator("#sliders .ends").first
    expect(words).to_be_visible()
    assert words.evaluate("""e => e.scrollWidth <= e.clientWidth
        && e.clientHeight < 1.8 * parseFloat(getComputedStyle(e).fontSize)""")


# Which boxes to tick are too small, or not inside their panel.
BAD_BOXES = """() => [...document.querySelectorAll('.check input')].filter((box) => {
    const panel = box.closest('.panel').getBoundingClientRect();
    const { left, right, width } = box.getBoundingClientRect();
    const isShown = box.checkVisibility();
    return isShown && (width < 16 || left < panel.left || right > panel.right);
}).map((box) => box.id)"""


@pytest.mark.parametrize("width", [320, 360, 390, 768, 1024])
def test_all_fits_the_width_of_a_screen(opened: Callable[..., Page], width: int) -> None:
    page = opened()
    page.set_viewport_size({"width": width, "height": 800})
    for tab in page.get_by_role("tab").all():
        if not tab.is_visible():  # of a model without chains
            continue
        tab.click()
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), tab
        assert page.evaluate(BAD_BOXES) == []
    expect(page.get_by_label("Strongest first")).to_be_visible()


@pytest.mark.parametrize("key", ["End", "ArrowLeft"])
def test_tabs_by_keyboard(opened: Callable[..., Page], key: str) -> None:
    page = opened()
    page.locator("#encode-tab").focus()
    page.keyboard.press(key)
    expect(page.locator("#training-tab")).to_be_focused()
    expect(page.locator("#training-panel")).to_be_visible()
    expect(page.locator("#encode-panel")).to_be_hidden()
