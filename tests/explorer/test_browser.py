"""The page in a real browser, on a phone and on a wide screen."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from PIL import Image
from playwright.sync_api import expect

from poecaps.code_density import DOMAINS
from poecaps.explorer import chains
from poecaps.explorer.render import Setting
from poecaps.explorer.server import create_app
from tests.explorer.conftest import SCREENS, TOKEN, serving
from tests.explorer.pages import after, drawn, on_a_phone, pixels, shows, sketch, wait_until_still

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from playwright.sync_api import Browser, Page

    from poecaps.explorer.render import ExplorerModel


def test_moving_a_slider_changes_the_image(page: Page, digits: ExplorerModel) -> None:
    shows(page, drawn(digits, Setting(0)))
    page.get_by_label("Parameter 2", exact=True).fill("3.5")
    shows(page, drawn(digits, Setting(0, (0.0, 0.0, 3.5))))
    shows(page, drawn(digits, Setting(0, (0.0, 0.0, 3.5))), "#small-image")


@on_a_phone
def test_the_sign_flips_at_a_click(page: Page, digits: ExplorerModel) -> None:
    flip = page.get_by_role("button", name="Flip sign")
    flip.click()
    shows(page, drawn(digits, Setting(0, negative=True)))
    expect(flip).to_have_attribute("aria-pressed", "true")
    flip.click()
    shows(page, drawn(digits, Setting(0)))


@on_a_phone
def test_magnitude_and_firing(page: Page) -> None:
    fires = float(page.locator("#fires").inner_text().split()[1])
    after(page, lambda: page.get_by_label("Magnitude").fill("2.5"))
    assert float(page.locator("#fires").inner_text().split()[1]) > fires
    after(page, page.get_by_role("button", name="Reset to mean").click)
    assert float(page.locator("#fires").inner_text().split()[1]) == fires


@on_a_phone
def test_choosing_and_mixing_experts(page: Page, digits: ExplorerModel) -> None:
    shelf = page.locator("#shelf button")
    shelf.nth(2).click()
    shows(page, drawn(digits, Setting(2)))
    page.get_by_label("Mix experts").check()
    shelf.nth(1).click()
    shows(page, drawn(digits, Setting(2), Setting(1)))
    assert "Experts 1, 2 are mixed" in page.locator("#mix").inner_text()
    page.get_by_role("button", name="Keep only expert 1").click()
    shows(page, drawn(digits, Setting(1)))


@on_a_phone
def test_drawing_at_random(page: Page, digits: ExplorerModel) -> None:
    page.get_by_role("button", name="New draw").click()
    expect(page.get_by_label("Seed", exact=True)).not_to_have_value("0")
    shows(
        page,
        drawn(
            digits,
            *digits.draw("learned", 0, int(page.get_by_label("Seed", exact=True).input_value())),
        ),
    )
    page.get_by_label("Seed", exact=True).fill("7")
    page.keyboard.press("Enter")
    shows(page, drawn(digits, *digits.draw("learned", 0, 7)))
    for domain in DOMAINS:
        page.get_by_label("Domain").select_option(domain)
        shows(page, drawn(digits, *digits.draw(domain, 0, 7)))
    expect(page.locator("#mix-text")).to_have_text("All experts are mixed.")


def test_a_drawn_digit_is_seen_and_loaded(page: Page) -> None:
    sketch(page, (0.2, 0.1), (0.4, 0.1), (0.3, 0.5))
    wait_until_still(page)
    wait_until_still(page, "#reconstruction")
    expect(page.locator("#firing button")).to_have_count(4)
    seen = pixels(page, "#reconstruction")
    assert pixels(page, "#seen").max() > 200
    expect(page.locator("#free-energy")).to_have_text(re.compile(r"free energy [−\d.]+"))
    expect(page.locator("#heat-caption")).to_contain_text(re.compile(r"expert \d looks"))
    expect(page.get_by_role("img", name="Input of the model; expert")).to_be_visible()
    loaded = after(page, page.get_by_role("button", name="Load into the sliders").click)
    assert np.abs(loaded.astype(int) - seen).mean() < 3  # offsets are rounded
    expect(page.locator("#mix-text")).to_have_text("All experts are mixed.")
    after(page, lambda: page.get_by_label("Parameter 0", exact=True).fill("3"))  # and on from there
    after(page, page.get_by_role("button", name="Clear").click, "#reconstruction")
    assert pixels(page, "#reconstruction").max() == 0
    expect(page.get_by_role("img", name="Input of the model: none yet")).to_be_visible()


@on_a_phone
def test_a_test_image_and_where_each_expert_listens(page: Page, digits: ExplorerModel) -> None:
    page.get_by_label("Test image", exact=True).fill("7")
    page.get_by_role("button", name="Use", exact=True).click()
    assert digits.images is not None
    shows(page, digits.images.images[7, ..., 0], "#seen")
    shows(
        page,
        digits.encode(np.asarray(digits.images.images[7])).reconstruction[..., 0],
        "#reconstruction",
    )
    heat = page.locator("#heat").screenshot()
    page.locator("#firing button").nth(3).click()
    expect(page.locator("#sliders-title")).to_have_text("Expert 3")
    expect(page.locator("#heat-caption")).to_contain_text(re.compile("xpert 3 looks"))
    assert page.locator("#heat").screenshot() != heat
    assert page.locator("#heat").evaluate("canvas => [canvas.width, canvas.height]") == [6, 6]


@on_a_phone
def test_a_file_is_opened_and_a_broken_one_tells_why(
    page: Page, picture_file: Path, tmp_path: Path
) -> None:
    page.get_by_label("Centre the drawing").uncheck()
    page.locator("#file").set_input_files(picture_file)
    seen = np.asarray(Image.open(picture_file))
    shows(page, seen, "#seen")
    broken = tmp_path / "broken.png"
    broken.write_bytes(picture_file.read_bytes()[:40])
    page.locator("#file").set_input_files(broken)
    expect(page.get_by_role("alert")).to_have_text("Cannot read broken.png: not a valid image.")
    assert np.array_equal(pixels(page, "#seen"), seen)
    page.keyboard.press("Escape")
    expect(page.get_by_role("alert")).to_be_empty()


def test_a_dropped_file_is_seen(opened: Callable[..., Page], picture_file: Path) -> None:
    page = opened()
    page.get_by_label("Centre the drawing").uncheck()
    drop = """([name, bytes]) => { const files = new DataTransfer();
        files.items.add(new File([new Uint8Array(bytes)], name, { type: 'image/png' }));
        document.getElementById('sketch').dispatchEvent(
            new DragEvent('drop', { dataTransfer: files, bubbles: true, cancelable: true })); }"""
    dropped = ["digit.png", list(picture_file.read_bytes())]
    page.evaluate(drop, dropped)
    shows(page, np.asarray(Image.open(picture_file)), "#seen")


@on_a_phone
def test_a_copied_link_brings_everything_back(
    page: Page, opened: Callable[..., Page], address: str
) -> None:
    page.locator("#shelf button").nth(1).click()
    page.get_by_label("Mix experts").check()
    page.locator("#shelf button").nth(3).click()
    page.get_by_label("Parameter 4", exact=True).fill("-2.75")
    page.get_by_label("Magnitude").fill("1.7")
    page.get_by_role("button", name="Flip sign").click()
    sketch(page, (0.3, 0.2), (0.6, 0.8))
    wait_until_still(page)
    expect(page.locator("#firing button")).to_have_count(4)
    page.get_by_role("button", name="Copy link").click()
    expect(page.get_by_role("status")).to_have_text("Link copied.")
    link = page.evaluate("navigator.clipboard.readText()")
    assert link.startswith(f"{address}/#")
    again = opened("desktop", link.removeprefix(f"{address}/"))
    for canvas in ("#image", "#seen", "#reconstruction", "#heat"):
        shows(again, pixels(page, canvas), canvas)
    for control in ("#parameter-4", "#magnitude", "#seed", "#domain"):
        assert again.locator(control).input_value() == page.locator(control).input_value()
    expect(again.locator("#sliders-title")).to_have_text("Expert 3")


def test_the_token_is_needed_once_and_does_not_stay_in_the_address(
    browser: Browser, opened: Callable[..., Page], address: str
) -> None:
    page = opened()
    assert TOKEN not in page.url
    page.reload()
    expect(page.locator("#image[data-number]")).to_be_visible()
    page.goto(address)  # as from a bookmark
    expect(page.locator("#image[data-number]")).to_be_visible()
    stranger = browser.new_context()
    try:
        answer = stranger.new_page().goto(address)
        assert answer is not None
        assert answer.status == 401
    finally:
        stranger.close()


def test_nonsense_in_a_link_does_no_harm(opened: Callable[..., Page]) -> None:
    page = opened(
        "desktop", "#m=digits&x=999&d=up&s=-1&e=1:9e9:x;77:1:;0:-1:1,2,3,4,5,6,7,8;z&t=12345&i=%%%"
    )
    expect(page.locator("#sliders-title")).to_have_text("Expert 3")
    expect(page.get_by_role("alert")).to_be_empty()
    other = opened("desktop", "#m=elsewhere&e=0:1:")
    expect(other.get_by_role("alert")).to_contain_text("elsewhere, which is not open here")


@on_a_phone
def test_python_and_picture_can_be_taken_along(page: Page, digits: ExplorerModel) -> None:
    page.get_by_label("Parameter 1", exact=True).fill("-3.5")
    settings = [Setting(0, (0.0, -3.5))]
    expect(page.locator("#python")).to_have_text(digits.python(settings))
    page.get_by_role("button", name="Copy Python").click()
    expect(page.get_by_role("status")).to_have_text("Three lines of Python copied.")
    assert page.evaluate("navigator.clipboard.readText()") == digits.python(settings)
    with page.expect_download() as download:
        page.get_by_role("button", name="Download PNG").click()
    picture = np.asarray(Image.open(io.BytesIO(download.value.path().read_bytes())))
    assert np.array_equal(picture[::10, ::10], digits.decode(settings)[..., 0])


def test_the_traversal_sheet_is_drawn_and_leads_on(page: Page, digits: ExplorerModel) -> None:
    page.get_by_role("tab", name="Traversal").click()
    expect(page.locator("#sheet.stale")).to_have_count(0)
    sheet = digits.traverse([Setting(0)], 0)
    assert np.array_equal(
        pixels(page, "#sheet [role=row]:nth-child(4) [role=gridcell]:nth-child(8) canvas"),
        sheet[2, 6, ..., 0],
    )
    cell = page.get_by_role("button", name="Parameter 2 at 3 standard deviations")
    cell.click()
    shows(page, drawn(digits, Setting(0, (0.0, 0.0, 3.0))))
    assert page.get_by_label("Parameter 2", exact=True).input_value() == "3"


def test_all_can_be_done_by_keyboard(opened: Callable[..., Page], digits: ExplorerModel) -> None:
    page = opened()
    reached: list[str] = []
    while len(reached) < 60:
        page.keyboard.press("Tab")
        name = page.evaluate(
            "document.activeElement.id || document.activeElement.getAttribute('aria-label') || ''"
        )
        if not name and reached:
            break
        reached.append(name)
    for wanted in (
        "copy-link",
        "several",
        "Expert 3",
        "domain",
        "seed",
        "new-draw",
        "magnitude",
        "flip",
        "parameter-4",
    ):
        assert wanted in reached
    for wanted in ("download", "copy-python", "encode-tab", "sketch", "choose-file", "test-index"):
        assert wanted in reached
    page.locator("#parameter-0").focus()
    for key in ("PageUp", "PageUp", "ArrowRight", "ArrowLeft", "PageUp"):
        page.keyboard.press(key)
    assert page.locator("#parameter-0").input_value() == "3"
    shows(page, drawn(digits, Setting(0, (3.0,))))
    page.locator("#shelf button").nth(2).focus()
    after(page, lambda: page.keyboard.press("Enter"))
    expect(page.locator("#sliders-title")).to_have_text("Expert 2")
    assert (
        page.locator("#shelf button").nth(2).evaluate("e => getComputedStyle(e).outlineStyle")
        == "solid"
    )
    page.locator("#encode-tab").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Tab")
    expect(page.locator("#sheet-download")).to_be_focused()
    page.locator("#sheet button[tabindex='0']").focus()
    expect(page.locator("#sheet.stale")).to_have_count(0)
    page.keyboard.press("ArrowDown")  # on a wide screen steps go down
    assert (
        page.evaluate("document.activeElement.ariaLabel") == "Parameter 0 at 1 standard deviations"
    )


def test_everything_has_a_name_for_screen_readers(page: Page) -> None:
    unnamed = page.evaluate(
        """() => [...document.querySelectorAll(
            'button, input:not([hidden]), select, section, main > * canvas')]
        .filter((e) => !e.closest('[aria-hidden]') && !e.matches('button canvas'))
        .filter((e) => !e.ariaLabel && !e.labels?.length && !e.innerText?.trim())
        .filter((e) => !e.getAttribute('aria-labelledby'))
        .map((e) => e.outerHTML)"""
    )
    assert unnamed == []


def test_nothing_sticks_out_sideways(page: Page) -> None:
    for tab in page.get_by_role("tab").all():
        tab.click()
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    tall = page.evaluate("document.getElementById('new-draw').getBoundingClientRect().height")
    assert tall >= 32  # room for a finger


def test_a_late_answer_never_overwrites_a_newer_one(
    opened: Callable[..., Page], digits: ExplorerModel
) -> None:
    page = opened()
    held: list[Any] = []

    def hold_the_first(route: Any) -> None:
        if held:
            route.continue_()
        else:
            held.append(route)

    page.route("**/decode?as=pixels", hold_the_first)
    page.get_by_label("Parameter 0", exact=True).fill("-3")
    page.get_by_label("Parameter 0", exact=True).fill("3")
    shows(page, drawn(digits, Setting(0, (3.0,))))
    with page.expect_response("**/decode?as=pixels") as late:
        held[0].continue_()
    assert late.value.body() != b""
    page.wait_for_timeout(100)
    shows(page, drawn(digits, Setting(0, (3.0,))))


def test_a_busy_server_is_asked_again(
    opened: Callable[..., Page], digits: ExplorerModel, problems: list[str]
) -> None:
    page = opened()
    times = 2
    page.route(
        "**/decode?as=pixels",
        lambda route: route.fulfill(status=429, json={"error": "too many"}),
        times=times,
    )
    page.get_by_label("Parameter 0", exact=True).fill("3")
    shows(page, drawn(digits, Setting(0, (3.0,))))
    expect(page.get_by_role("alert")).to_be_empty()
    assert len(problems) == times  # Chromium's own lines
    assert all("429" in each for each in problems)
    problems.clear()


def test_a_server_that_is_gone_is_reported(
    opened: Callable[..., Page], problems: list[str]
) -> None:
    page = opened()
    page.route("**/decode?as=pixels", lambda route: route.abort())
    page.get_by_label("Parameter 0", exact=True).fill("3")
    expect(page.get_by_role("alert")).to_have_text(
        "The explorer does not respond. Is it still running?"
    )
    assert all("ERR_FAILED" in each for each in problems)
    problems.clear()


@on_a_phone
def test_models_can_be_switched(page: Page, colours: ExplorerModel) -> None:
    page.get_by_role("combobox", name="Model").select_option("colours")
    expect(page.locator("#shelf button")).to_have_count(3)
    shows(page, drawn(colours, Setting(0)))  # its red
    assert page.locator("#sliders input").count() == 6
    expect(page.locator("#test")).to_be_hidden()
    expect(page.locator("#python")).to_contain_text("runs/colours")


def test_a_model_that_is_loaded_is_not_taken_for_the_one_that_is_shown(
    opened: Callable[..., Page], problems: list[str]
) -> None:
    page, held = opened(), list[Any]()
    page.route("**/api/models/colours", lambda route: held.append(route))
    menu = page.get_by_role("combobox", name="Model")
    menu.select_option("colours")
    expect(page.get_by_role("main")).to_have_attribute("aria-busy", "true")
    held[0].abort()
    expect(page.get_by_role("main")).to_have_attribute("aria-busy", "false")
    expect(menu).to_have_value("digits")
    expect(page.get_by_role("alert")).not_to_be_empty()
    assert all("ERR_FAILED" in each for each in problems)
    problems.clear()


@pytest.mark.parametrize("screen", SCREENS)
def test_a_single_model_is_named(browser: Browser, digits: ExplorerModel, screen: str) -> None:
    size, name = (
        SCREENS[screen],
        "digits <b> of many hands, with a name that is longer than a phone is wide",
    )
    with serving(create_app([replace(digits, name=name)], token=None)) as address:
        page = browser.new_page(viewport={"width": size.width, "height": size.height})
        page.goto(address)
        expect(page.locator("#model-name")).to_have_text(name)
        expect(page.locator("#model-name")).to_be_visible()
        expect(page.locator("#model")).to_be_hidden()
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        page.close()


def test_among_several_models_the_choice_names_the_one(page: Page) -> None:
    expect(page.locator("#model")).to_be_visible()
    expect(page.locator("#model-name")).to_be_hidden()


def test_a_note_about_a_model_is_shown_with_it(page: Page, walks: ExplorerModel) -> None:
    note = page.locator("#model-note")
    expect(note).to_be_hidden()
    page.get_by_role("combobox", name="Model").select_option("walks")
    expect(note).to_have_text(f"Note: {walks.note}.")
    expect(note).to_be_visible()


# --------------------------------------------------------------------------------------------------
# Chains


@pytest.fixture
def walking(page: Page) -> Page:
    """The page with the model that has a density, and its chains at their start."""
    show_chains(page)
    return page


def show_chains(page: Page) -> None:
    page.get_by_role("combobox", name="Model").select_option("walks")
    page.get_by_role("tab", name="Chains").click()
    expect(page.locator("#chains-grid canvas[data-step='0']")).to_have_count(chains.MAX_CHAINS)
    page.get_by_label("Steps at a time").select_option("1")


def chain_shows(page: Page, expected: chains.Walk) -> None:
    """Wait until the pictures of all chains are these."""
    for chain, image in enumerate(expected.images):
        shows(page, image[..., 0], f"#chains-grid button:nth-child({chain + 1}) canvas")
    expect(page.locator("#chains-count")).to_have_text(f"step {expected.state.step}")


def wait_for_step(page: Page, step: int) -> None:
    """Wait until the chains have made more steps than this."""
    for _ in range(3000):
        if int(page.locator("#chains-grid canvas").first.get_attribute("data-step") or 0) > step:
            return
        page.wait_for_timeout(20)
    pytest.fail(f"the chains have not made {step} steps")


def test_chains_walk_step_by_step(walking: Page, walks: ExplorerModel) -> None:
    at = chains.start(walks, chains.MAX_CHAINS, 0)
    chain_shows(walking, at)
    for _ in range(2):
        walking.get_by_role("button", name="Step", exact=True).click()
        at = chains.advance(walks, at.state, 1)
        chain_shows(walking, at)
    walking.get_by_label("Steps at a time").select_option("5")
    walking.get_by_label("Temperature").fill("1")  # the right end
    walking.get_by_role("button", name="Step", exact=True).click()
    chain_shows(walking, chains.advance(walks, at.state, 5, 10.0))
    expect(walking.locator("#chains-t")).to_have_text("annealing, t = 0.00")
    expect(walking.locator("#chains-acceptance")).to_have_text(re.compile(r"acceptance [01]\.\d\d"))


@on_a_phone
def test_playing_moves_the_pictures_until_the_pause(walking: Page) -> None:
    walking.get_by_label("Steps at a time").select_option("5")
    after(walking, walking.get_by_role("button", name="Play").click, "#chains-grid canvas >> nth=0")
    wait_for_step(walking, 30)
    assert walking.locator("#chains-plot polyline").count() == chains.MAX_CHAINS
    assert len(str(walking.locator("#chains-plot .followed").get_attribute("points")).split()) > 30
    expect(walking.get_by_role("img", name="Chain 0 after 25 steps")).to_be_visible()
    walking.get_by_role("button", name="Pause").click()
    sent: list[str] = []
    walking.on("request", lambda request: sent.append(request.url))
    walking.wait_for_timeout(400)
    assert sent == []


@pytest.mark.parametrize(("motion", "milliseconds"), [("no-preference", 100), ("reduce", 1000)])
def test_pictures_change_less_often_with_reduced_motion(
    opened: Callable[..., Page], motion: Any, milliseconds: int
) -> None:
    page = opened()
    page.emulate_media(reduced_motion=motion)
    show_chains(page)
    page.clock.install()  # from now on, time passes only in `run_for`
    page.clock.pause_at(page.evaluate("Date.now() + 1000"))
    page.get_by_role("button", name="Play").click()
    page.clock.run_for(1)
    count = page.locator("#chains-count")
    expect(count).to_have_text("step 1")
    page.clock.run_for(milliseconds - 10)
    page.wait_for_timeout(300)
    expect(count).to_have_text("step 1")
    page.clock.run_for(20)
    expect(count).to_have_text("step 2")


def test_the_past_is_thinned_out_when_it_is_full(opened: Callable[..., Page]) -> None:
    page = opened()
    show_chains(page)
    page.get_by_label("Steps at a time").select_option("10")
    page.get_by_role("button", name="Play").click()
    wait_for_step(page, 320)
    page.get_by_role("button", name="Pause").click()
    expect(page.locator("#chains-past")).to_have_text("Chain 0 every 50 steps, from left to right")
    expect(page.get_by_role("img", name="Chain 0 after 300 steps")).to_be_visible()
    expect(page.locator("#chains-t")).to_have_text("t = 1.00")


@on_a_phone
def test_chains_start_again_from_the_same_or_another_seed(
    walking: Page, walks: ExplorerModel
) -> None:
    walking.get_by_role("button", name="Step", exact=True).click()
    expect(walking.locator("#chains-count")).to_have_text("step 1")
    walking.get_by_role("button", name="Restart").click()
    chain_shows(walking, chains.start(walks, chains.MAX_CHAINS, 0))
    walking.locator("#chains-seed").fill("12")
    walking.keyboard.press("Enter")
    chain_shows(walking, chains.start(walks, chains.MAX_CHAINS, 12))
    walking.get_by_role("button", name="Random seed").click()
    expect(walking.locator("#chains-seed")).not_to_have_value("12")
    seed = int(walking.locator("#chains-seed").input_value())
    chain_shows(walking, chains.start(walks, chains.MAX_CHAINS, seed))


@on_a_phone
def test_chains_start_from_a_drawn_digit(walking: Page, walks: ExplorerModel) -> None:
    option = walking.locator("#chains-start option[value=image]")
    expect(option).to_be_disabled()
    walking.get_by_role("tab", name="Encode").click()
    sketch(walking, (0.3, 0.2), (0.6, 0.8))
    wait_until_still(walking)
    walking.get_by_role("tab", name="Chains").click()
    expect(option).to_be_enabled()
    walking.get_by_label("Start from").select_option("image")
    drawing = pixels(walking, "#seen")[..., np.newaxis]
    begin = chains.start(walks, chains.MAX_CHAINS, 0, image=drawing)
    chain_shows(walking, begin)
    walking.get_by_role("button", name="Step", exact=True).click()
    chain_shows(walking, chains.advance(walks, begin.state, 1))
    expect(walking.locator("#chains-t")).to_have_text("t = 1.00")
    walking.get_by_role("tab", name="Encode").click()
    sketch(walking, (0.7, 0.2), (0.3, 0.8))  # another drawing, and all chains start there
    expect(walking.locator("#chains-count")).to_have_text("step 0")
    walking.get_by_role("button", name="Clear").click()
    walking.get_by_role("tab", name="Chains").click()
    expect(walking.get_by_label("Start from")).to_have_value("noise")


@on_a_phone
def test_a_chain_is_followed(walking: Page, walks: ExplorerModel) -> None:
    chosen = walking.locator("#chains-grid button").nth(3)
    chosen.click()
    expect(chosen).to_have_attribute("aria-pressed", "true")
    begin = chains.start(walks, chains.MAX_CHAINS, 0)
    shows(walking, begin.images[3, ..., 0], "#chains-strip canvas >> nth=0")
    energy = f"{begin.free_energy[0, 3]:.1f}".replace("-", "−")
    expect(walking.locator("#chains-now")).to_have_text(energy)
    expect(chosen).to_have_attribute("aria-label", f"Chain 3, free energy {energy}")


def test_chains_by_keyboard(opened: Callable[..., Page]) -> None:
    page = opened()
    show_chains(page)
    page.locator("#chains-start").focus()
    reached = ["chains-start"]
    while len(reached) < 8:
        page.keyboard.press("Tab")
        reached.append(page.evaluate("document.activeElement.id"))
    assert reached == [
        *("chains-start", "chains-seed", "chains-random", "chains-steps"),
        *("temperature", "chains-play", "chains-step", "chains-restart"),
    ]
    page.locator("#temperature").focus()
    page.keyboard.press("End")
    expect(page.locator("#temperature")).to_have_attribute("aria-valuetext", "10.00")
    page.locator("#chains-play").focus()
    page.keyboard.press("Space")
    expect(page.locator("#chains-play")).to_have_text("Pause")
    wait_for_step(page, 2)
    page.keyboard.press("Space")
    expect(page.locator("#chains-play")).to_have_text("Play")


def test_the_panel_of_chains_fits_and_has_names(walking: Page) -> None:
    test_everything_has_a_name_for_screen_readers(walking)
    test_nothing_sticks_out_sideways(walking)
    walking.get_by_role("tab", name="Chains").click()
    expect(walking.locator("#chains-grid button").nth(0)).to_be_visible()


def test_without_a_density_there_are_no_chains(opened: Callable[..., Page]) -> None:
    page = opened()
    expect(page.locator("#chains-panel")).to_be_hidden()
    sent: list[str] = []
    page.on("request", lambda request: sent.append(request.url))
    page.wait_for_timeout(200)
    assert not any("chains" in url for url in sent)
    show_chains(page)
    page.get_by_role("button", name="Play").click()
    page.get_by_role("combobox", name="Model").select_option("digits")
    expect(page.locator("#chains-panel")).to_be_hidden()
    page.wait_for_timeout(200)
    sent.clear()
    page.wait_for_timeout(300)
    assert not any("chains" in url for url in sent)


def test_an_error_pauses_the_chains(
    opened: Callable[..., Page], walks: ExplorerModel, problems: list[str]
) -> None:
    page = opened()
    show_chains(page)
    reason = "a chain ends after 1,000,000 steps; start another one"
    page.route(
        "**/chains/steps", lambda route: route.fulfill(status=409, json={"error": reason}), times=1
    )
    page.get_by_role("button", name="Play").click()
    expect(page.get_by_role("alert")).to_have_text(reason)
    expect(page.locator("#chains-play")).to_have_text("Play")
    page.get_by_role("button", name="Step", exact=True).click()
    expect(page.get_by_role("alert")).to_be_empty()
    begin = chains.start(walks, chains.MAX_CHAINS, 0)
    chain_shows(page, chains.advance(walks, begin.state, 1))
    assert all("409" in each for each in problems)
    problems.clear()
