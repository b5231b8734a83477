"""The command `explore`."""

from __future__ import annotations

import itertools
import os
import shlex
import sys
import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tyro.conf import FlagCreatePairsOff, Positional, arg

from poecaps import _checks as checks
from poecaps import models
from poecaps._progress import Counter
from poecaps.cli.loading import load_unseen, open_model, training_source, untrained_note
from poecaps.cli.options import Data, DataPath, Model  # noqa: TC001 (tyro reads the annotations)
from poecaps.cli.outputs import say
from poecaps.data import DataError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from poecaps.data import ImageSet
    from poecaps.explorer.render import ExplorerModel, Part

DEFAULT_MODEL = "mnist"
TOKEN_VARIABLE = "POECAPS_TOKEN"  # noqa: S105 (the name of a variable)


def explore(
    runs: Annotated[
        Positional[tuple[Model, ...]],
        arg(
            metavar="[RUN [RUN ...]]",
            help="Folders of trained models, or names of models of the package, to switch between.",
            help_behavior_hint=f"(default: {DEFAULT_MODEL}, a model of the package)",
        ),
    ] = (),
    *,
    data: Data = None,
    data_path: DataPath = None,
    host: str = "127.0.0.1",
    port: int = 0,
    token: Annotated[
        str | None, arg(metavar="TOKEN", help_behavior_hint="(default: a random one)")
    ] = None,
    no_token: FlagCreatePairsOff[bool] = False,
    browser: bool = True,
    static: Annotated[
        Path | None, arg(metavar="FOLDER", help_behavior_hint="(default: serve the page)")
    ] = None,
) -> None:
    """Explore the experts of a model in a browser: change parameters and watch the image change.

    Stop it with Ctrl-C. docs/explorer.md has more information.

    Parameters
    ----------
    host
        Address to listen on; any address other than this machine's own lets others connect.
    port
        Port to listen on; 0 selects a free port.
    token
        Secret part of the address. POECAPS_TOKEN in the environment is hidden from other users.
    no_token
        Let every program and user of this machine use the explorer.
    browser
        Open the page in a browser.
    static
        Write the page into a new folder, for any web server, and do not serve it.
    """
    checks.require_int("port", port, 0, 65535)
    if static is not None:
        _write_static(runs, data, data_path, static)
        return
    try:
        from poecaps.explorer import security, server
    except ModuleNotFoundError as error:
        if error.name not in ("fastapi", "pydantic", "starlette", "uvicorn"):
            raise
        raise OSError(
            f"the explorer needs {error.name}; pip install 'poecaps[explorer]'"
        ) from error
    if no_token and token is not None:
        raise ValueError("--no-token cannot be combined with --token; leave out one of them")
    given = token or os.environ.get(TOKEN_VARIABLE) or security.new_token()
    secret = None if no_token else given
    security.require_token(secret, host)
    opened = _open_all(runs, data, data_path)

    def ready(url: str, url_for_browser: str) -> None:
        if not security.is_loopback(host):
            say(
                f"warning: at {host} everybody who has the address can use the explorer, and read "
                "along, because it is not encrypted",
                file=sys.stderr,
            )
        say(f"the explorer is at {url} (stop it with Ctrl-C)")
        if browser:
            webbrowser.open(url_for_browser)

    server.serve(opened, token=secret, host=host, port=port, ready=ready)


def _write_static(
    runs: Sequence[str], data: str | None, data_path: str | None, folder: Path
) -> None:
    """Write a static build of the page, which does not need the packages of the server."""
    from poecaps.explorer.build import write_static

    write_static(_open_all(runs, data, data_path), folder, report=Counter("drawing", "experts"))
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    say(
        f"the page is in {folder} ({size / 1e6:.0f} MB); put it on a web server, or look at it "
        f"with: python -m http.server --directory {shlex.quote(str(folder))}"
    )


def _open_all(runs: Sequence[str], data: str | None, data_path: str | None) -> list[ExplorerModel]:
    """Open all models, by default the one of the package."""
    if not runs and DEFAULT_MODEL not in models.names():
        raise FileNotFoundError(
            f"the model {DEFAULT_MODEL} is not part of this installation; give a run, as in: "
            "poecaps explore runs/demo"
        )
    opened: list[ExplorerModel] = []
    for run in runs or (DEFAULT_MODEL,):
        opened.append(_open(run, data, data_path, [each.name for each in opened]))
    return opened


def _open(run: str, source: str | None, path: str | None, taken: Sequence[str]) -> ExplorerModel:
    """Open a model for the explorer under an unused name, with images if available."""
    from poecaps.explorer.render import ExplorerModel

    network = open_model(run, "cpu")
    images: ImageSet | None = None
    part: Part = "other"
    try:
        used = (source, path) if source is not None else training_source(run, path)
        images, part = load_unseen(network, run, *used)
    except (DataError, OSError, ValueError) as error:
        say(f"{run} is shown without images of its data: {error}", file=sys.stderr)
    name = run if models.is_shipped(run) else Path(run).resolve().name or "model"
    names = (name if count == 1 else f"{name}-{count}" for count in itertools.count(1))
    free = next(each for each in names if each not in taken)
    return ExplorerModel(free, run, network, images, part, untrained_note(models.find(run)))
