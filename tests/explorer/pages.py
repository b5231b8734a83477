"""What the tests of the page in a real browser share."""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

    from playwright.sync_api import Page

    from poecaps.explorer.render import ExplorerModel, Setting

# For what is the same on a wide screen, where `test_all_can_be_done_by_keyboard` reaches the
# controls.
on_a_phone = pytest.mark.parametrize("page", ["phone"], indirect=True)


def pixels(page: Page, canvas: str = "#image") -> Any:
    """Pixels of a canvas of the page: (H, W)."""
    read = """canvas => {
        const context = canvas.getContext('2d');
        const data = context.getImageData(0, 0, canvas.width, canvas.height).data;
        let text = '';
        for (let i = 0; i < data.length; i += 4) text += String.fromCharCode(data[i]);
        return [canvas.height, canvas.width, btoa(text)]; }"""
    height, width, text = page.locator(canvas).evaluate(read)
    return np.frombuffer(base64.b64decode(text), np.uint8).reshape(height, width)


def shows(page: Page, expected: Any, canvas: str = "#image") -> None:
    """Wait until a canvas shows these pixels."""
    for _ in range(400):
        if np.array_equal(pixels(page, canvas), expected):
            return
        page.wait_for_timeout(20)
    pytest.fail(f"{canvas} does not show what it should; it has {pixels(page, canvas)}")


def after(page: Page, action: Callable[[], Any], canvas: str = "#image") -> Any:
    """Pixels of a canvas after an action that changes them once."""
    before = pixels(page, canvas)
    action()
    for _ in range(400):
        if not np.array_equal(now := pixels(page, canvas), before):
            return now
        page.wait_for_timeout(20)
    pytest.fail(f"{canvas} has not changed")


def sketch(page: Page, *points: tuple[float, float]) -> None:
    """Draw a line through points, relative to the sketch, with a finger on a touch screen."""
    page.locator("#sketch").scroll_into_view_if_needed()
    box = page.locator("#sketch").bounding_box()
    assert box is not None
    at = [(box["x"] + x * box["width"], box["y"] + y * box["height"]) for x, y in points]
    if page.evaluate("navigator.maxTouchPoints"):
        finger = page.context.new_cdp_session(page)
        for number, (x, y) in enumerate(at):
            touch = {
                "type": "touchMove" if number else "touchStart",
                "touchPoints": [{"x": x, "y": y}],
            }
            finger.send("Input.dispatchTouchEvent", touch)
        finger.send("Input.dispatchTouchEvent", {"type": "touchEnd", "touchPoints": []})
    else:
        page.mouse.move(*at[0])
        page.mouse.down()
        for x, y in at[1:]:
            page.mouse.move(x, y, steps=5)
        page.mouse.up()


def drawn(model: ExplorerModel, *settings: Setting) -> Any:
    return model.decode(settings)[..., 0]


def wait_until_still(page: Page, canvas: str = "#seen") -> None:
    """Wait until a canvas has not changed for a while: every piece of a line is encoded."""
    before, same = pixels(page, canvas), 0
    for _ in range(200):
        page.wait_for_timeout(100)
        now = pixels(page, canvas)
        same = same + 1 if np.array_equal(now, before) and now.any() else 0
        if same == 5:
            return
        before = now
    pytest.fail(f"{canvas} is empty, or keeps changing")
