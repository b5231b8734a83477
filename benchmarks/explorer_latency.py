"""Measure the latency of the explorer: ``python -m benchmarks.explorer_latency RUN``.

Starts `poecaps explore`, opens the page in headless Chromium, moves sliders one after the other and
waits each time until the canvas shows the new image. The time is measured in the page, from the
slider event to the new pixels on the canvas, and includes the request, the model, the response and
the drawing.
"""

from __future__ import annotations

import shutil
from contextlib import contextmanager
from pathlib import Path  # noqa: TC003 (tyro reads the annotations)
from typing import TYPE_CHECKING, cast

import numpy as np
import tyro
from playwright.sync_api import sync_playwright

from benchmarks.explorer_load import running_explorer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from playwright.sync_api import Page

FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-proxy-server",
    "--disable-background-networking",
]
CHAIN_STEPS = 275  # of the screenshot: 200 of annealing, and some of the model
MOVE = """async ([moves, pause]) => {
    const image = document.getElementById("image"), times = [];
    const rows = [...document.querySelectorAll("#sliders input")];
    for (let i = 0; i < moves; i += 1) {
        const slider = rows[i % rows.length];
        const painted = new Promise((done) => {
            const observer = new MutationObserver(() => {
                observer.disconnect();
                done(performance.now());
            });
            observer.observe(image, { attributeFilter: ["data-number"] });
        });
        slider.value = 6 * Math.random() - 3;
        const start = performance.now();
        slider.dispatchEvent(new Event("input", { bubbles: true }));
        times.push(await painted - start);
        await new Promise((done) => setTimeout(done, pause));
    }
    return times;
}"""


@contextmanager
def opened(address: str) -> Iterator[Page]:
    """Open the page in headless Chromium with a large viewport."""
    chromium = (
        shutil.which("chromium")
        or shutil.which("chromium-browser")
        or shutil.which("google-chrome")
    )
    if chromium is None:
        raise FileNotFoundError("cannot open the page: Chromium is not installed")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=FLAGS)
        page = browser.new_page(viewport={"width": 1440, "height": 1300})
        page.goto(address)
        page.wait_for_selector("#image[data-number]")
        yield page
        browser.close()


def measure(address: str, moves: int, pause: float) -> list[float]:
    """Return the milliseconds from slider event to new image, for each move."""
    with opened(address) as page:
        page.evaluate(MOVE, [20, pause])  # warm-up
        return cast("list[float]", page.evaluate(MOVE, [moves, pause]))


def take_screenshot(address: str, path: Path) -> None:
    """Take the screenshot of the documentation."""
    with opened(address) as page:
        page.locator("#test-index").fill("17")
        page.locator("#test-take").click()
        page.wait_for_selector("#firing button")
        shares = "bars => bars.map((bar) => Number(bar.style.getPropertyValue('--share')))"
        firing = page.locator("#firing .bar").evaluate_all(shares)
        page.locator("#shelf button").nth(int(np.argmax(firing))).click()
        page.locator("#seed").fill("3")
        page.keyboard.press("Enter")
        page.mouse.move(0, 0)
        page.evaluate("document.activeElement.blur(); scrollTo(0, 0)")
        page.wait_for_timeout(1500)
        page.screenshot(path=path)


def take_screenshot_of_chains(address: str, path: Path) -> None:
    """Take the screenshot of the tab Chains, whose chains have passed the annealing."""
    with opened(address) as page:
        page.set_viewport_size({"width": 1200, "height": 1300})
        page.locator("#chains-tab").click()
        page.locator("#chains-steps").select_option("10")
        page.wait_for_selector("#chains-grid canvas[data-step='0']")
        shown, step = page.locator("#chains-grid canvas").first, 0
        while step < CHAIN_STEPS:
            page.locator("#chains-step").click()
            while int(shown.get_attribute("data-step") or 0) == step:
                page.wait_for_timeout(20)
            step = int(shown.get_attribute("data-step") or 0)
        page.mouse.move(0, 0)
        middle = "panel => panel.scrollIntoView({ block: 'center' })"
        page.locator("#chains-panel").evaluate(middle)  # where the small image is hidden
        page.evaluate("document.activeElement.blur()")
        page.wait_for_timeout(1000)
        page.locator("#chains-panel").screenshot(path=path)


def main(
    run: str,
    /,
    *,
    moves: int = 300,
    pause: float = 30,
    rounds: int = 3,
    picture: Path | None = None,
    chains: Path | None = None,
) -> None:
    """Measure the latency with one model.

    Parameters
    ----------
    run
        Folder or name of a trained model.
    moves
        Slider moves per round.
    pause
        Milliseconds between an image and the next move.
    rounds
        Number of rounds.
    picture
        Only write a screenshot of the page to this PNG file: docs/images/explorer.png.
    chains
        Only write a screenshot of the chains of a model with a density: docs/images/chains.png.
    """
    with running_explorer(run) as address:
        if picture is not None:
            take_screenshot(address, picture)
        if chains is not None:
            take_screenshot_of_chains(address, chains)
        if picture is not None or chains is not None:
            return
        for _ in range(rounds):
            low, median, high, highest = np.percentile(
                measure(address, moves, pause), [5, 50, 95, 99]
            )
            print(
                f"milliseconds: 5th percentile {low:.1f}, median {median:.1f}, "
                f"95th {high:.1f}, 99th {highest:.1f}",
                flush=True,
            )


if __name__ == "__main__":
    tyro.cli(main)
