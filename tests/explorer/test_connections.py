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

from benchmarks.explorer_attack import (
    HALF_A_HEAD,
    HalfSentBodies,
    HalfSentHeads,
    UnreadAnswers,
    move_sliders,
)
from benchmarks.explorer_load import running_explorer
from poecaps.explorer import connections
from poecaps.explorer.connections import BoundedLogHandler, ConnectionLimits, bounded_log
from poecaps.explorer.security import SecurityMiddleware
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
@pytest.mark.parametrize("attack", [HalfSentHeads, HalfSentBodies])
def test_sliders_move_under_half_sent_requests(
    attack: type[HalfSentHeads], digits: ExplorerModel, tmp_path: Path
) -> None:
    """More connections than the explorer may open files; `make attack` has a thousand."""
    path = tmp_path / "log"
    with (
        path.open("w") as log,
        running_explorer(digits.source, log=log, open_files=128) as address,
        attack(address, 300) as requests,
    ):
        moves = move_sliders(address, seconds=WAIT, max_moves=5)
        assert moves.faults == []
        assert len(moves.seconds) == 5
        assert requests.held <= 64
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


def occupy(address: str, path: str, count: int) -> list[socket.socket]:
    """Open connections that send requests without end, and never read an answer."""
    request = f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode()
    opened = []
    for _ in range(count):
        connection = connect(address)
        connection.settimeout(1)  # by then, neither side can send any more
        with suppress(TimeoutError, ConnectionError):
            connection.sendall(request * 100_000)
        opened.append(connection)
    return opened


async def answer(scope: Any, receive: Any, send: Any) -> None:
    """Answer with the status in the path, and with much to read."""
    if scope["type"] == "http":
        status = int(scope["path"][1:])
        headers = [(b"content-length", b"100000")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": bytes(100_000)})


@pytest.mark.parametrize("status", [401, 200])
def test_a_connection_that_reads_no_answer_is_replaced(status: int) -> None:
    with serving(answer, max_connections=4) as address:
        occupying = occupy(address, f"/{status}", 4)
        assert len(httpx.get(f"{address}/200", timeout=WAIT, trust_env=False).content) == 100_000
        for each in occupying:
            each.close()


def test_a_rejected_connection_is_replaced_before_one_that_reads_slowly() -> None:
    with serving(answer, max_connections=2) as address:
        (reader,) = occupy(address, "/200", 1)
        (rejected,) = occupy(address, "/401", 1)
        for _ in range(2):
            assert httpx.get(f"{address}/200", timeout=WAIT, trust_env=False).status_code == 200
        reader.settimeout(WAIT)
        read = 0
        while read < BIG:  # it still gets all that it asks for
            read += len(part := reader.recv(1_000_000))
            assert part
        rejected.settimeout(WAIT)
        with suppress(ConnectionResetError):
            while rejected.recv(1_000_000):
                pass
        reader.close()
        rejected.close()


def test_a_connection_is_not_replaced_while_its_answer_is_computed() -> None:
    begun, go_on = threading.Event(), threading.Event()

    async def slow(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and scope["path"] == "/slow":
            begun.set()
            await asyncio.to_thread(go_on.wait, WAIT)
        await hello(scope, receive, send)

    request = b"GET /slow HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
    with serving(slow, max_connections=2) as address, connect(address, request) as computing:
        assert begun.wait(WAIT)
        waiting = [connect(address, HALF_A_HEAD) for _ in range(4)]
        assert says_hello(address)
        go_on.set()
        assert computing.recv(15) == b"HTTP/1.1 200 OK"
        for each in waiting:
            each.close()


@pytest.mark.parametrize(
    ("head", "status"), [("", 401), ("Host: example.org\r\n", 403), ("Origin: http://a\r\n", 403)]
)
def test_whoever_has_no_token_is_answered_once(head: str, status: int) -> None:
    """Then the connection is closed; others of its requests are not even read."""
    called = False

    async def application(scope: Any, receive: Any, send: Any) -> None:
        nonlocal called
        called = called or scope["type"] == "http"
        await hello(scope, receive, send)

    head = head if "Host" in head else f"Host: 127.0.0.1\r\n{head}"
    request = f"GET /api/models HTTP/1.1\r\n{head}\r\n".encode()
    protected = SecurityMiddleware(application, token="the-token-of-the-tests")
    with serving(protected) as address, connect(address, request) as connection:
        answer = b""
        while part := connection.recv(10_000):
            answer += part
        assert answer.startswith(f"HTTP/1.1 {status} ".encode())
        assert b"\r\nconnection: close\r\n" in answer.lower()
    assert not called


def test_sliders_move_although_others_occupy_all_connections_without_a_token(
    digits: ExplorerModel, tmp_path: Path
) -> None:
    """They send requests without end, and read no answer."""
    with (
        (tmp_path / "log").open("w") as log,
        running_explorer(digits.source, log=log, open_files=128) as address,
        UnreadAnswers(address, 130, reopen=True),
    ):
        moves = move_sliders(address, seconds=WAIT, max_moves=5)
        assert moves.faults == []
        assert len(moves.seconds) == 5
    assert "Traceback" not in (tmp_path / "log").read_text()


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
