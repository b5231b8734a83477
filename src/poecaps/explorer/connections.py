"""Connections of the explorer: their number, their deadlines, and a log that stays small.

The application sees a request once its head is complete. Clients that never complete one are
therefore kept in check here, below the application.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from contextlib import contextmanager
from enum import Enum, auto
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterator

    from starlette.types import Message, Receive, Scope, Send

MAX_CONNECTIONS = 128
HEAD_TIMEOUT = 10.0  # seconds in which the head of a request must arrive
REQUEST_TIMEOUT = 20.0  # its body; longer than that of the application, which explains it
RESPONSE_TIMEOUT = 60.0  # the response must be computed and read
STOP_TIMEOUT = 2  # after which a server that is to stop waits for no client any more

# asyncio accepts so many connections at once, before it looks at those that are open. It must not
# reach the limit of open files with them.
ACCEPTED_AT_ONCE = 16
BACKLOG = 2048  # connections that the system keeps until they are accepted

LOG_LINES = 20  # that are written at once
LOG_INTERVAL = 60.0  # seconds after which a further line is written
LOG_LINE_SIZE = 4000  # characters of a line, tracebacks included
LOGGERS = ("asyncio", "uvicorn", "poecaps.explorer")


class Phase(Enum):
    """What a connection waits for."""

    HEAD = auto()
    BODY = auto()
    RESPONSE = auto()


class ConnectionLimits:
    """The open connections of a server, and their limits.

    If there are too many, a new connection replaces the one that has been sending its request, or
    has had it rejected, for the longest time; if there is none, the one that has not read its
    response for the longest time. A client that sends its request at once is therefore served even
    if others open connections as fast as they can, and send nothing or read nothing. Only those
    whose response is computed, and not yet rejected, cannot be replaced; the application limits
    their number.

    Parameters
    ----------
    max_connections
        Open connections; at most half of the files that this process may open.
    head_timeout, request_timeout, response_timeout
        Seconds in which the head and the body of a request must arrive, and in which the response
        must be computed and read.
    """

    def __init__(
        self,
        *,
        max_connections: int = MAX_CONNECTIONS,
        head_timeout: float = HEAD_TIMEOUT,
        request_timeout: float = REQUEST_TIMEOUT,
        response_timeout: float = RESPONSE_TIMEOUT,
    ) -> None:
        self.max_connections = min(max_connections, max_open_files() // 2)
        self.timeouts = {
            Phase.HEAD: head_timeout,
            Phase.BODY: request_timeout,
            Phase.RESPONSE: response_timeout,
        }
        self.open: set[LimitedProtocol] = set()
        # What may be replaced, the oldest first.
        self.sending: dict[LimitedProtocol, None] = {}  # or rejected
        self.unread: dict[LimitedProtocol, None] = {}

    def add(self, connection: LimitedProtocol) -> None:
        """Add a connection, and close another one if there are too many."""
        if len(self.open) >= self.max_connections:
            closed = next(iter(self.sending or self.unread), connection)
            self.remove(closed)
            closed.transport.abort()
        if not connection.transport.is_closing():
            self.open.add(connection)

    def remove(self, connection: LimitedProtocol) -> None:
        """Remove a connection that is closed."""
        self.open.discard(connection)
        self.sending.pop(connection, None)
        self.unread.pop(connection, None)

    def abort(self) -> None:
        """Close all connections at once, whatever their clients have still to read or to send."""
        for each in self.open:
            each.transport.abort()


class LimitedProtocol(H11Protocol):
    """HTTP over a connection that is closed if its next phase does not begin in time."""

    def __init__(self, *args: Any, limits: ConnectionLimits, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.limits = limits
        self.phase: Phase | None = None
        self.deadline: asyncio.TimerHandle | None = None
        self.application, self.app = self.app, self._call

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Count a new connection."""
        super().connection_made(transport)
        self.limits.add(self)
        self._update()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget a closed connection."""
        self.limits.remove(self)
        if self.deadline is not None:
            self.deadline.cancel()
        super().connection_lost(exc)

    def handle_events(self) -> None:
        """Handle what has arrived; after a response, for the next request."""
        super().handle_events()
        self._update()

    def pause_writing(self) -> None:
        """Note that the client does not read its response."""
        super().pause_writing()
        if self in self.limits.open:
            self.limits.unread.setdefault(self)

    def resume_writing(self) -> None:
        """Note that the client reads again."""
        super().resume_writing()
        self.limits.unread.pop(self, None)

    async def _call(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Call the application, and note whether it rejects the request.

        A connection whose last request was rejected stays replaceable, so that nobody who may not
        use the application can occupy it, however many requests they send at once.
        """

        async def observe(message: Message) -> None:
            if message["type"] == "http.response.start" and self in self.limits.open:
                if 400 <= message["status"] < 500:
                    self.limits.sending.setdefault(self)
                elif self.phase is Phase.RESPONSE:
                    self.limits.sending.pop(self, None)
            await send(message)

        await self.application(scope, receive, observe)

    def _update(self) -> None:
        """Set the deadline of a phase when it begins; bytes that arrive later do not move it."""
        phases = {h11.IDLE: Phase.HEAD, h11.SEND_BODY: Phase.BODY}
        phase = phases.get(self.conn.their_state, Phase.RESPONSE)
        if phase is self.phase or self not in self.limits.open:
            return
        if phase is Phase.RESPONSE:
            self.limits.sending.pop(self, None)
        else:
            self.limits.sending.setdefault(self)
        self.phase = phase
        # While the client still reads a response, it does not send the next request.
        is_reading = self.transport.get_write_buffer_size() > 0
        seconds = self.limits.timeouts[Phase.RESPONSE if is_reading else phase]
        if self.deadline is not None:
            self.deadline.cancel()
        self.deadline = self.loop.call_later(seconds, self.transport.abort)


class LimitedServer(uvicorn.Server):
    """A server of an application over limited connections.

    Once it is to stop, requests in progress have `STOP_TIMEOUT` seconds to end. Then connections
    are aborted, so that nothing can wait for a client, and requests are cancelled. What follows is
    the end of the application, and does not depend on clients.

    Parameters
    ----------
    app
        The ASGI application.
    limits
        Options of `ConnectionLimits`.
    """

    def __init__(self, app: Any, **limits: Any) -> None:
        self.limits = ConnectionLimits(**limits)
        protocol = partial(LimitedProtocol, limits=self.limits)
        super().__init__(
            uvicorn.Config(
                app,
                http=cast("type[asyncio.Protocol]", protocol),
                ws="none",
                loop="asyncio",
                log_config=None,
                log_level="warning",
                access_log=False,
                server_header=False,
                proxy_headers=False,
                backlog=ACCEPTED_AT_ONCE,
                timeout_graceful_shutdown=STOP_TIMEOUT,
            )
        )

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to accept connections."""
        await super().startup(sockets)
        for each in sockets or ():
            each.listen(BACKLOG)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop, however many clients send or read slowly, or not at all."""
        # A request that has missed its cancellation ends if its client is gone.
        abort = asyncio.get_running_loop().call_later(STOP_TIMEOUT, self.limits.abort)
        try:
            await super().shutdown(sockets)
        finally:
            abort.cancel()
            self.limits.abort()


def max_open_files() -> int:
    """Return how many files this process may open."""
    try:
        import resource
    except ModuleNotFoundError:  # on Windows, where there is no such limit
        return sys.maxsize
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return sys.maxsize if limit == resource.RLIM_INFINITY else limit


# --------------------------------------------------------------------------------------------------
# The log


class BoundedLogHandler(logging.Handler):
    """Writes a limited number of lines to standard error, however many there are.

    The lines that were left out are counted, and the next one says how many.

    Parameters
    ----------
    lines
        Lines that are written at once.
    interval
        Seconds after which a further line is written.
    size
        Characters of a line.
    """

    def __init__(
        self,
        lines: int = LOG_LINES,
        interval: float = LOG_INTERVAL,
        size: int = LOG_LINE_SIZE,
    ) -> None:
        super().__init__(logging.WARNING)
        self.lines, self.interval, self.size = lines, interval, size
        self.left, self.left_out, self.filled = float(lines), 0, time.monotonic()

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line, or count it."""
        now = time.monotonic()
        self.left = min(self.lines, self.left + (now - self.filled) / self.interval)
        self.filled = now
        if self.left < 1:
            self.left_out += 1
            return
        self.left -= 1
        text = _printable(self.format(record)[: self.size])
        if self.left_out:
            text += f" ({self.left_out:,} earlier messages were left out)"
        self.left_out = 0
        print(f"poecaps: {text}", file=sys.stderr, flush=True)  # noqa: T201


def _printable(text: str) -> str:
    """Replace characters that could control a terminal."""
    return "".join(each if each.isprintable() or each == "\n" else "�" for each in text)


@contextmanager
def bounded_log() -> Iterator[None]:
    """Send the messages of the server to a `BoundedLogHandler` only."""
    handler, loggers = BoundedLogHandler(), [logging.getLogger(name) for name in LOGGERS]
    propagated = [each.propagate for each in loggers]
    for each in loggers:
        each.addHandler(handler)
        each.propagate = False
    try:
        yield
    finally:
        for each, before in zip(loggers, propagated, strict=True):
            each.removeHandler(handler)
            each.propagate = before
