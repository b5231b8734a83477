from __future__ import annotations

import os
import shutil
import sys
import threading
import traceback
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import httpx
import pytest
import torch
from playwright.sync_api import expect, sync_playwright

import poecaps
from poecaps.data import ImageSet
from poecaps.explorer.connections import LimitedServer
from poecaps.explorer.render import ExplorerModel
from poecaps.explorer.server import create_app, listen
from poecaps.options import Architecture, DensityOptions
from tests.networks import untrained

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from fastapi import FastAPI
    from playwright.sync_api import Browser, Page

TOKEN = "the-token-of-the-tests"
BEARER = {"authorization": f"Bearer {TOKEN}"}


@pytest.fixture(scope="session")
def digits(tmp_path_factory: pytest.TempPathFactory) -> ExplorerModel:
    """Four experts of five numbers over grey digits, saved where `poecaps.load` finds it."""
    test = poecaps.data.load("mnist-sample", split="test")
    shape = Architecture(
        features=8, capsule_dim=4, experts=((4, 5),), joint_components=4, expert_components=2
    )
    network = untrained(shape, test.batch(range(100)), torch.Generator().manual_seed(1))
    folder = tmp_path_factory.mktemp("models") / "digits"
    network.save(folder)
    return ExplorerModel("digits", str(folder), network, ImageSet(test.images[:30]))


@pytest.fixture(scope="session")
def ink(tmp_path_factory: pytest.TempPathFactory) -> ExplorerModel:
    """Three experts over dark digits on light paper."""
    test = 255 - poecaps.data.load("mnist-sample", split="test").images[:100]
    images = ImageSet(test)
    shape = Architecture(
        features=8, capsule_dim=4, experts=((3, 5),), joint_components=4, expert_components=2
    )
    network = untrained(shape, images.batch(range(100)), torch.Generator().manual_seed(4))
    folder = tmp_path_factory.mktemp("models") / "ink"
    network.save(folder)
    return ExplorerModel("ink", str(folder), network, ImageSet(test[:30]))


@pytest.fixture(scope="session")
def colours() -> ExplorerModel:
    """Two layers over small, not square pictures in colour with a margin, without test images."""
    images = torch.rand(60, 3, 20, 23, generator=torch.Generator().manual_seed(2))
    shape = Architecture(
        features=8,
        capsule_dim=4,
        experts=((5, 4), (3, 6)),
        joint_components=4,
        expert_components=2,
        image_shape=(3, 20, 23),
        margin=1,
    )
    return ExplorerModel(
        "colours", "runs/colours", untrained(shape, images, torch.Generator().manual_seed(1))
    )


@pytest.fixture(scope="session")
def frameless() -> ExplorerModel:
    """A pixel decoder that evens out the overlap of filters, over pictures that are not square."""
    images = torch.rand(60, 1, 18, 23, generator=torch.Generator().manual_seed(5))
    shape = Architecture(
        features=8,
        kernel_size=5,
        capsule_dim=4,
        experts=((3, 6),),
        joint_components=4,
        expert_components=2,
        pixel_decoder=True,
        image_shape=(1, 18, 23),
        margin=3,
        even_overlap=True,
    )
    return ExplorerModel(
        "frameless", "runs/frameless", untrained(shape, images, torch.Generator().manual_seed(6))
    )


def with_density(name: str, options: DensityOptions) -> ExplorerModel:
    """Return a model of grey digits with a density, whose experts have large random weights."""
    test = poecaps.data.load("mnist-sample", split="test")
    images, generator = test.batch(range(100)), torch.Generator().manual_seed(3)
    shape = Architecture(
        features=8,
        capsule_dim=4,
        experts=((4, 5),),
        joint_components=4,
        expert_components=2,
        density=options,
    )
    network = untrained(shape, images, generator)
    assert network.density is not None
    assert network.whitening is not None
    with torch.no_grad():
        activations = network.activations(images)
        network.whitening.fit([activations])
        network.density.base.fit([network.whiten(activations)])
    network.density.reset_parameters(std=0.3, generator=generator)
    images_shown = ImageSet(test.images[:30])
    note = "the experts were not trained"
    return ExplorerModel(name, f"runs/{name}", network, images_shown, part="training", note=note)


@pytest.fixture(scope="session")
def walks() -> ExplorerModel:
    """Six experts as a density over the features of grey digits."""
    return with_density(
        "walks", DensityOptions(experts=(6, 4), linear_dims=2, base_components=10, strength=2.0)
    )


@pytest.fixture(scope="session")
def app(digits: ExplorerModel, colours: ExplorerModel, walks: ExplorerModel) -> FastAPI:
    return create_app([digits, colours, walks], token=TOKEN)


@contextmanager
def serving(app: Any, **limits: Any) -> Iterator[str]:
    """Serve an application on a free local port, as `poecaps explore` does; yield its URL."""
    server = LimitedServer(app, **limits)
    with listen("127.0.0.1") as listener:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(60)  # far more than it needs, in whatever state its clients are
            if thread.is_alive():
                pytest.fail(f"the server does not stop\n{stacks()}")


def stacks() -> str:
    """Return what all threads of this process are doing."""
    names = {each.ident: each.name for each in threading.enumerate()}
    return "\n".join(
        f"{names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in sys._current_frames().items()
    )


@pytest.fixture(scope="session")
def address(app: FastAPI) -> Iterator[str]:
    with serving(app) as address:
        yield address


@pytest.fixture(scope="session")
def client(address: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=address, headers=BEARER, timeout=30, trust_env=False) as client:
        yield client


@pytest.fixture(scope="session")
def chromium() -> str:
    """Path of Chromium; without it, tests are skipped, or fail if POECAPS_BROWSER=required (CI)."""
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if found := shutil.which(name):
            return found
    why = "there is no chromium; apt-get install chromium, or what your system has instead"
    if os.environ.get("POECAPS_BROWSER") == "required":
        pytest.fail(why)
    pytest.skip(why)


@pytest.fixture
def picture_file(tmp_path: Path, digits: ExplorerModel) -> Path:
    from poecaps.explorer import pictures

    assert digits.images is not None
    path = tmp_path / "digit.png"
    path.write_bytes(pictures.write(digits.images.images[3]))
    return path


# --------------------------------------------------------------------------------------------------
# The page in a real browser

FLAGS = (
    *(
        "--no-sandbox",
        "--disable-gpu",
        "--disable-quic",
        "--no-proxy-server",
        "--no-first-run",
        "--disable-sync",
    ),
    *("--disable-background-networking", "--disable-component-update"),
)


class Screen(NamedTuple):
    width: int
    height: int
    touch: bool
    colours: Any


SCREENS = {"phone": Screen(390, 844, True, "dark"), "desktop": Screen(1440, 900, False, "light")}


@pytest.fixture(scope="session")
def browser(chromium: str) -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=list(FLAGS))
        yield browser
        browser.close()


@pytest.fixture
def problems() -> list[str]:
    """The errors in the consoles of the browsers."""
    return []


@pytest.fixture
def opened(browser: Browser, address: str, problems: list[str]) -> Iterator[Callable[..., Page]]:
    """Open the page on a screen; in the end there may be no problems."""
    contexts = []

    def open_page(screen: str = "desktop", fragment: str = "") -> Page:
        size = SCREENS[screen]
        context = browser.new_context(
            viewport={"width": size.width, "height": size.height},
            has_touch=size.touch,
            color_scheme=size.colours,
        )
        context.grant_permissions(["clipboard-read", "clipboard-write"], origin=address)
        contexts.append(context)
        page = context.new_page()
        page.on(
            "console",
            lambda message: problems.append(message.text) if message.type == "error" else None,
        )
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.goto(f"{address}/?token={TOKEN}{fragment}")
        expect(page.locator("#image[data-number]")).to_be_visible()
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert problems == []


@pytest.fixture(params=SCREENS)
def page(request: pytest.FixtureRequest, opened: Callable[..., Page]) -> Page:
    return opened(request.param)
