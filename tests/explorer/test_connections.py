"""Connections below the application: their number, their deadlines, and the log."""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
import threading
from contextlib import closing, suppress
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import httpx
import pytest

from benchmarks.explorer_attack import HALF_A_HEAD, HalfSentHeads, move_sliders
from benchmarks.explorer_load import running_explorer
from poecaps.explorer import connections
from poecaps.explorer.connections import BoundedLogHandler, ConnectionLimits, bounded_log
from poecaps.explorer.server import listen
from tests.explorer.conftest import serving
from tests.systems import needs_unix

if TYPE_CHECKING:
    from pathlib import Path

    from poecaps.explorer.render import ExplorerModel

WAIT = 30.0  # seconds, far more than any deadline of these tests
BIG = 50_000_000  # bytes of a response, more than the system buffers


async def hello(scope: Any, receive: Any, send: Any) -> None:
    """A small application, which reads the body."""
    if scope["type"] != "http":
        return
    while (await receive()).get("more_body"):
        pass
    headers = [(b"content-length", b"5")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": b"hello"})


def connect(address: str, sent: bytes = b"") -> socket.socket:
    where = urlsplit(address)
    connection = socket.create_connection(("127.0.0.1", where.port or 0), timeout=WAIT)
    connection.sendall(sent)
    return connection


def is_closed(connection: socket.socket) -> bool:
    """Wait until the server closes a connection without a word."""
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def says_hello(address: str) -> bool:
    return httpx.get(address, timeout=WAIT, trust_env=False).text == "hello"


@needs_unix
def test_sliders_move_under_half_sent_heads(digits: ExplorerModel, tmp_path: Path) -> None:
    """More connections than the explorer may open files; `make attack` has a thousand."""
    path = tmp_path / "log"
    with (
        path.open("w") as log,
        running_explorer(digits.source, log=log, open_files=128) as address,
        HalfSentHeads(address, 300) as heads,
    ):
        moves = move_sliders(address, seconds=WAIT, max_moves=5)
        assert moves.faults == []
        assert len(moves.seconds) == 5
        assert heads.held <= 64
    assert path.stat().st_size < 10_000
    assert "Traceback" not in path.read_text()


def test_a_head_must_arrive_in_time_even_if_bytes_keep_coming() -> None:
    with (
        serving(hello, head_timeout=0.5) as address,
        connect(address, HALF_A_HEAD) as silent,
        connect(address) as empty,
        connect(address, HALF_A_HEAD) as dribbling,
    ):
        closed = False
        dribbling.settimeout(0.03)  # from the start: a byte comes long before the deadline
        for _ in range(1000):
            try:
                dribbling.sendall(b"x")
                closed = is_closed(dribbling)
            except TimeoutError:
                continue
            except (BrokenPipeError, ConnectionResetError):
                closed = True
            break
        assert closed
        assert is_closed(silent)
        assert is_closed(empty)
        assert says_hello(address)


def test_the_head_of_a_second_request_has_a_deadline_too() -> None:
    whole = b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
    with (
        serving(hello, head_timeout=0.5) as address,
        connect(address, whole) as connection,
    ):
        answer = b""
        while not answer.endswith(b"hello"):
            answer += connection.recv(1000)
        connection.sendall(HALF_A_HEAD)
        assert is_closed(connection)


def test_a_body_must_arrive_in_time_whatever_the_application_does() -> None:
    head = b"POST / HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 100\r\n\r\n{"
    with serving(hello, request_timeout=0.5) as address, connect(address, head) as connection:
        assert is_closed(connection)


def test_a_client_that_does_not_read_is_not_waited_for() -> None:
    ended = threading.Event()

    async def much(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": bytes(BIG), "more_body": True})
        await send({"type": "http.response.body", "body": b"the end"})  # waits for the reader
        ended.set()

    head = b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
    with serving(much, response_timeout=0.5) as address, connect(address, head) as connection:
        assert ended.wait(WAIT)
        read = 0
        with suppress(ConnectionResetError):
            while part := connection.recv(1_000_000):
                read += len(part)
        assert read < BIG


@pytest.mark.parametrize("body", [b"", b"{"])
def test_a_server_stops_although_a_request_misses_its_cancellation(body: bytes) -> None:
    """The client holds its connection open, and no deadline of the connection comes first."""
    begun = threading.Event()

    async def stubborn(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        while True:
            begun.set()
            with suppress(asyncio.CancelledError):
                if (await receive())["type"] == "http.disconnect":
                    return

    head = b"POST / HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 100\r\n\r\n"
    with (
        closing(socket.socket()) as connection,
        serving(stubborn, request_timeout=1000, response_timeout=1000) as address,
    ):
        connection.connect(("127.0.0.1", urlsplit(address).port or 0))
        connection.sendall(head + body)
        assert begun.wait(WAIT)


def test_a_new_connection_replaces_the_oldest_that_sends_nothing() -> None:
    with serving(hello, max_connections=4) as address:
        waiting = [connect(address, HALF_A_HEAD) for _ in range(4)]
        assert says_hello(address)
        assert is_closed(waiting[0])
        waiting[1].sendall(b"\r\n\r\n")
        assert waiting[1].recv(15) == b"HTTP/1.1 200 OK"
        for each in waiting:
            each.close()


def test_connections_are_fewer_than_the_files_that_may_be_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connections, "max_open_files", lambda: 50)
    assert ConnectionLimits(max_connections=128).max_connections == 25
    monkeypatch.setattr(connections, "max_open_files", lambda: sys.maxsize)
    assert ConnectionLimits(max_connections=128).max_connections == 128


def test_requests_that_are_not_http_are_answered_and_logged_a_few_times(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with bounded_log(), serving(hello) as address:
        for _ in range(100):
            with connect(address, b"\x1b[2Jnonsense\r\n\r\n") as connection:
                assert b"400" in connection.recv(100)
        assert says_hello(address)
    said = capsys.readouterr().err
    assert 0 < len(said.splitlines()) <= connections.LOG_LINES
    assert "\x1b" not in said


def test_the_log_leaves_out_lines_and_counts_them(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(connections, "time", SimpleNamespace(monotonic=lambda: now[0]))
    handler = BoundedLogHandler(lines=3, interval=60, size=50)
    log = logging.Logger("test")
    log.addHandler(handler)
    for _ in range(1000):
        log.warning("\x1b[31m%s", "x" * 1000)
    said = capsys.readouterr().err
    assert len(said.splitlines()) == 3
    assert len(said) < 300
    assert "\x1b" not in said
    now[0] = 61.0
    log.warning("later")
    log.warning("too early")
    assert capsys.readouterr().err == "poecaps: later (997 earlier messages were left out)\n"


def test_the_queue_of_the_system_is_long() -> None:
    """Clients connect at once, however many others wait to be accepted."""
    with closing(listen("127.0.0.1")) as listener:
        port = listener.getsockname()[1]
        waiting = [socket.create_connection(("127.0.0.1", port), timeout=WAIT) for _ in range(200)]
        for each in waiting:
            each.close()
