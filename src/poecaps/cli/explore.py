"""The command `explore`."""

from __future__ import annotations

import itertools
import os
import sys
import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tyro.conf import FlagCreatePairsOff, Positional, arg

from poecaps import _checks as checks
from poecaps import models
from poecaps.cli.loading import load_images, open_model
from poecaps.cli.options import Model  # noqa: TC001 (tyro reads the annotations)
from poecaps.cli.outputs import say
from poecaps.data import DataError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from poecaps.explorer.render import ExplorerModel

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
    host: str = "127.0.0.1",
    port: int = 0,
    token: Annotated[
        str | None, arg(metavar="TOKEN", help_behavior_hint="(default: a random one)")
    ] = None,
    no_token: FlagCreatePairsOff[bool] = False,
    browser: bool = True,
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
    """
    checks.require_int("port", port, 0, 65535)
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
    if not runs and DEFAULT_MODEL not in models.names():
        raise FileNotFoundError(
            f"the model {DEFAULT_MODEL} is not part of this installation; give a run, as in: "
            "poecaps explore runs/demo"
        )
    opened: list[ExplorerModel] = []
    for run in runs or (DEFAULT_MODEL,):
        opened.append(_open(run, [each.name for each in opened]))

    def ready(url: str) -> None:
        if not security.is_loopback(host):
            say(
                f"warning: at {host} everybody who has the address can use the explorer, and read "
                "along, because it is not encrypted",
                file=sys.stderr,
            )
        say(f"the explorer is at {url} (stop it with Ctrl-C)")
        if browser:
            webbrowser.open(url)

    server.serve(opened, token=secret, host=host, port=port, ready=ready)


def _open(run: str, taken: Sequence[str]) -> ExplorerModel:
    """Open a model for the explorer under an unused name, with test images if available."""
    from poecaps.explorer.render import ExplorerModel

    network = open_model(run, "cpu")
    try:
        images = load_images(network, run, None, None, None)
    except (DataError, OSError, ValueError) as error:
        say(f"{run} is shown without test images: {error}", file=sys.stderr)
        images = None
    name = run if models.is_shipped(run) else Path(run).resolve().name or "model"
    names = (name if count == 1 else f"{name}-{count}" for count in itertools.count(1))
    return ExplorerModel(next(each for each in names if each not in taken), run, network, images)
