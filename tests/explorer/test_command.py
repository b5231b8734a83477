"""`poecaps explore`, as a person starts it."""

from __future__ import annotations

import builtins
import re
import signal
import socket
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from poecaps import models
from poecaps.cli.main import main
from tests.systems import needs_links, needs_signals

if TYPE_CHECKING:
    from pathlib import Path

    from poecaps.explorer.render import ExplorerModel


@needs_signals
def test_it_prints_its_address_serves_and_ends_with_ctrl_c(digits: ExplorerModel) -> None:
    command = [
        sys.executable,
        "-m",
        "poecaps",
        "explore",
        digits.source,
        digits.source,
        "--no-browser",
    ]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            found = re.search(
                r"(http://127\.0\.0\.1:\d+/)\?token=[\w-]{32} ", process.stdout.readline()
            )
            assert found
            with httpx.Client(base_url=found[1], timeout=30, trust_env=False) as client:
                assert client.get("/api/models").status_code == 401
                assert client.get(found[0].strip()).status_code == 303  # leaves a cookie
                assert client.get("/api/models").json() == ["digits", "digits-2"]
                assert client.get("/").status_code == 200
            process.send_signal(signal.SIGINT)
            _, said = process.communicate(timeout=30)
        finally:
            process.kill()
    assert process.returncode == 0
    assert "without images of its data" in said
    assert "Traceback" not in said


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What would be served, and which pages opened."""
    from poecaps.explorer import server

    seen: dict[str, Any] = {"opened": []}

    def serve(explored: Any, *, ready: Any, **options: Any) -> None:
        seen.update(models=explored, **options)
        ready("http://127.0.0.1:4711/?token=secret", "http://127.0.0.1:4711/?token=once")

    monkeypatch.setattr(server, "serve", serve)
    monkeypatch.setattr("webbrowser.open", seen["opened"].append)
    return seen


def test_the_browser_opens_and_others_are_warned_of(
    digits: ExplorerModel, served: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explore", digits.source, "--port", "4711"]) == 0
    assert served["opened"] == ["http://127.0.0.1:4711/?token=once"]
    assert (served["host"], served["port"]) == ("127.0.0.1", 4711)
    said = capsys.readouterr()
    assert "the explorer is at http://127.0.0.1:4711/?token=secret (" in said.out
    assert "warning" not in said.err
    assert main(["explore", digits.source, "--host", "0.0.0.0", "--no-browser"]) == 0
    assert len(served["opened"]) == 1
    assert "everybody who has the address can use the explorer" in capsys.readouterr().err


def test_the_token_is_random_ones_own_or_on_this_machine_none(
    digits: ExplorerModel,
    served: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    tokens = []
    for options in (
        [],
        [],
        ["--token", "my-own-token-0123"],
        ["--no-token"],
        ["--no-token", "--host", "::1"],
    ):
        assert main(["explore", digits.source, "--no-browser", *options]) == 0
        tokens.append(served["token"])
    assert len(set(tokens[:2])) == 2
    assert min(map(len, tokens[:2])) == 32
    assert tokens[2:] == ["my-own-token-0123", None, None]
    monkeypatch.setenv("POECAPS_TOKEN", "of-the-environment")
    assert main(["explore", digits.source, "--no-browser"]) == 0
    assert served.pop("token") == "of-the-environment"
    for options, reason in (
        (["--no-token", "--host", "0.0.0.0"], "a token is required at host '0.0.0.0'"),
        (["--token", "short"], "token must have 16 to 128 letters, digits, - or _"),
        (["--token", "has spaces and such"], "some of them others"),
        (["--token", "my-own-token-0123", "--no-token"], "leave out one of them"),
    ):
        capsys.readouterr()
        assert main(["explore", digits.source, "--no-browser", *options]) == 2
        assert reason in capsys.readouterr().err
        assert "token" not in served


@needs_links
def test_the_shipped_model_is_the_default(
    digits: ExplorerModel, served: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(models, "FOLDER", tmp_path)
    (tmp_path / "mnist").symlink_to(digits.source)
    assert main(["explore"]) == 0
    assert [(each.name, each.source) for each in served["models"]] == [("mnist", "mnist")]


def test_without_a_model_it_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(models, "FOLDER", tmp_path)
    assert main(["explore"]) == 1
    assert "poecaps explore runs/demo" in capsys.readouterr().err
    assert main(["explore", str(tmp_path / "nowhere")]) == 1
    assert "there is no folder" in capsys.readouterr().err


def test_without_fastapi_it_says_what_to_install(
    digits: ExplorerModel, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in sys.modules if name.startswith("poecaps.explorer")]:
        monkeypatch.delitem(sys.modules, name)
    real = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name.split(".")[0] == "fastapi":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    monkeypatch.delattr("poecaps.explorer", raising=False)
    assert main(["explore", digits.source]) == 1
    assert "pip install 'poecaps[explorer]'" in capsys.readouterr().err


def test_a_port_that_is_taken_is_an_error(
    digits: ExplorerModel, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        assert main(["explore", digits.source, "--no-browser", "--port", port]) == 1
        assert "choose another port" in capsys.readouterr().err
    assert main(["explore", digits.source, "--no-browser", "--port", "70000"]) == 2
