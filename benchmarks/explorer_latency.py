"""How long after a slider moves the image is there: ``python -m benchmarks.explorer_latency RUN``.

Starts `poecaps explore`, opens the page in headless Chromium, moves sliders one after the other and waits each time for
the canvas to be painted anew. The time runs in the page, from the event of the slider to the new pixels on the canvas:
the request, the model, the answer and the drawing are all in it.
"""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
from typing import cast

import numpy as np
import tyro
from playwright.sync_api import sync_playwright

FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-proxy-server", "--disable-background-networking"]
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


def measure(address: str, moves: int, pause: float) -> list[float]:
    """Milliseconds from a move of a slider to the new image, of so many moves."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        raise FileNotFoundError("there is no chromium to measure in")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=FLAGS)
        page = browser.new_page(viewport={"width": 1440, "height": 900})
        page.goto(address)
        page.wait_for_selector("#image[data-number]")
        page.evaluate(MOVE, [20, pause])  # the first few warm everything up
        times = cast("list[float]", page.evaluate(MOVE, [moves, pause]))
        browser.close()
    return times


def main(run: str, /, *, moves: int = 300, pause: float = 30, rounds: int = 3) -> None:
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
    """
    command = [sys.executable, "-m", "poecaps", "explore", run, "--no-browser"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:  # noqa: S603 (our own program)
        assert server.stdout is not None  # noqa: S101 (it is a pipe)
        found = re.search(r"http://127\.0\.0\.1:\d+", server.stdout.readline())
        if found is None:
            raise RuntimeError("the explorer has not started")
        try:
            for _ in range(rounds):
                times = np.percentile(measure(found[0], moves, pause), [5, 50, 95, 99])
                print("milliseconds: 5 % {:.1f}, median {:.1f}, 95 % {:.1f}, 99 % {:.1f}".format(*times), flush=True)
        finally:
            server.send_signal(signal.SIGINT)


if __name__ == "__main__":
    tyro.cli(main)
