"""How long after a slider moves the image is there: ``python -m benchmarks.explorer_latency RUN``.

Starts `poecaps explore`, opens the page in headless Chromium, moves sliders one after the other and waits each time for
the canvas to be painted anew. The time runs in the page, from the event of the slider to the new pixels on the canvas:
the request, the model, the answer and the drawing are all in it.
"""

from __future__ import annotations

import shutil
from contextlib import contextmanager
from pathlib import Path  # noqa: TC003 (tyro reads the annotations)
from typing import TYPE_CHECKING, cast

import numpy as np
import tyro
from playwright.sync_api import sync_playwright

from benchmarks.explorer_load import started

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
MOVE = """async ([moves, pause]) => {
    const image = document.getElementById("image"), times = [];
    const rows = [...document.querySelectorAll("#sliders input")];
    for (let i = 0; i < moves; i += 1) {
        const slider = rows[i % rows.length];
        const painted = new Promise((done) => {
            const seen = new MutationObserver(() => { seen.disconnect(); done(performance.now()); });
            seen.observe(image, { attributeFilter: ["data-number"] });
        });
        slider.value = 6 * Math.random() - 3;
        const began = performance.now();
        slider.dispatchEvent(new Event("input", { bubbles: true }));
        times.push(await painted - began);
        await new Promise((done) => setTimeout(done, pause));
    }
    return times;
}"""


@contextmanager
def opened(address: str) -> Iterator[Page]:
    """Open the page in headless Chromium, on a wide screen."""
    chromium = (
        shutil.which("chromium")
        or shutil.which("chromium-browser")
        or shutil.which("google-chrome")
    )
    if chromium is None:
        raise FileNotFoundError("there is no chromium to open the page in")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=FLAGS)
        page = browser.new_page(viewport={"width": 1440, "height": 1300})
        page.goto(address)
        page.wait_for_selector("#image[data-number]")
        yield page
        browser.close()


def measure(address: str, moves: int, pause: float) -> list[float]:
    """Milliseconds from a move of a slider to the new image, of so many moves."""
    with opened(address) as page:
        page.evaluate(MOVE, [20, pause])  # the first few warm everything up
        return cast("list[float]", page.evaluate(MOVE, [moves, pause]))


def take_picture(address: str, path: Path) -> None:
    """Take the picture of the page that the documentation shows."""
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


def main(
    run: str,
    /,
    *,
    moves: int = 300,
    pause: float = 30,
    rounds: int = 3,
    picture: Path | None = None,
) -> None:
    """Measure one run.

    Parameters
    ----------
    run
        Folder or name of a trained model.
    moves
        How often a slider moves in a round.
    pause
        Milliseconds between an image and the next move.
    rounds
        How often all is measured.
    picture
        PNG to write instead, of the page: docs/images/explorer.png.
    """
    with started(run) as address:
        if picture is not None:
            take_picture(address, picture)
            return
        for _ in range(rounds):
            times = np.percentile(measure(address, moves, pause), [5, 50, 95, 99])
            print(
                "milliseconds: 5 % {:.1f}, median {:.1f}, 95 % {:.1f}, 99 % {:.1f}".format(*times),
                flush=True,
            )


if __name__ == "__main__":
    tyro.cli(main)
