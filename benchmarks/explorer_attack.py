"""Sliders under attack: ``python -m benchmarks.explorer_attack RUN``.

Starts `poecaps explore` in a separate process that may open few files, opens many connections, and
measures meanwhile how long it takes until a slider move is answered. The connections never send
more than half of the head of a request, or of its body, or they send requests without a token again
and again and read no answer. Only an explorer on this machine is attacked, with a limited number of
connections and for a limited time.
"""

from __future__ import annotations

import selectors
import socket
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import httpx
import numpy as np
import tyro

from benchmarks.explorer_load import running_explorer

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self

HALF_A_HEAD = b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Half: "
HALF_A_BODY = (
    b"POST /api/models/mnist/decode HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 1000\r\n\r\n"
    + 500 * b"x"
)
REQUESTS = 200 * b"GET /api/models HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"  # without a token
RECEIVE_BUFFER = 2048  # bytes of answers that the system keeps for a client that does not read
PAUSE = 0.01  # seconds between two rounds of requests
MAX_CONNECTIONS = 5000
TIMEOUT = 60.0  # of a slider move


class Attack:
    """Connections to the explorer, which are kept until the end of the block.

    Parameters
    ----------
    address
        Address of the explorer, on this machine.
    connections
        Number of connections.
    reopen
        Whether to replace connections that the explorer closes.
    """

    def __init__(self, address: str, connections: int, *, reopen: bool = False) -> None:
        where = urlsplit(address)
        if where.hostname != "127.0.0.1" or connections > MAX_CONNECTIONS:
            raise ValueError(
                f"address must be on this machine, with at most {MAX_CONNECTIONS} connections, but "
                f"is {where.hostname} with {connections}"
            )
        self.where, self.connections = ("127.0.0.1", where.port or 0), connections
        self.reopen = reopen
        self.opened = self.closed = 0
        self.stopped = threading.Event()
        self.thread = threading.Thread(target=self._hold)

    def __enter__(self) -> Self:
        for _ in range(self.connections):
            self._open()
        self.thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stopped.set()
        self.thread.join()
        self._close_all()

    @property
    def held(self) -> int:
        """Connections that are open."""
        return self.opened - self.closed

    def _open(self) -> None:
        """Open a connection."""
        raise NotImplementedError

    def _hold(self) -> None:
        """Hold the connections until the attack is stopped."""
        raise NotImplementedError

    def _close_all(self) -> None:
        """Close all connections."""
        raise NotImplementedError


class HalfSentHeads(Attack):
    """Connections to the explorer, each with half of the head of a request.

    The parameters are those of `Attack`.
    """

    sent = HALF_A_HEAD

    def __init__(self, address: str, connections: int, *, reopen: bool = False) -> None:
        super().__init__(address, connections, reopen=reopen)
        self.selector = selectors.DefaultSelector()

    def _open(self) -> None:
        connection = socket.create_connection(self.where, timeout=TIMEOUT)
        connection.setblocking(False)
        connection.send(self.sent)
        self.selector.register(connection, selectors.EVENT_READ)
        self.opened += 1

    def _close(self, connection: object) -> None:
        assert isinstance(connection, socket.socket)  # noqa: S101 (nothing else is registered)
        self.selector.unregister(connection)
        connection.close()

    def _close_all(self) -> None:
        for key in list(self.selector.get_map().values()):
            self._close(key.fileobj)
        self.selector.close()

    def _hold(self) -> None:
        """Notice which connections the explorer closes."""
        while not self.stopped.is_set():
            for key, _ in self.selector.select(timeout=0.1):
                self._close(key.fileobj)  # readable: closed, or refused for want of a token
                self.closed += 1
                if self.reopen:
                    self._open()


class HalfSentBodies(HalfSentHeads):
    """Connections to the explorer, each with half of the body of a request without a token."""

    sent = HALF_A_BODY


class UnreadAnswers(Attack):
    """Connections that send requests without a token again and again, and never read an answer.

    The parameters are those of `Attack`.
    """

    def __init__(self, address: str, connections: int, *, reopen: bool = False) -> None:
        super().__init__(address, connections, reopen=reopen)
        self.sockets: list[socket.socket] = []

    def _open(self) -> None:
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER)
        connection.settimeout(TIMEOUT)
        connection.connect(self.where)
        connection.setblocking(False)
        self.sockets.append(connection)
        self.opened += 1

    def _close_all(self) -> None:
        for each in self.sockets:
            each.close()

    def _hold(self) -> None:
        """Send as many requests as the explorer takes."""
        while not self.stopped.wait(PAUSE):
            for each in list(self.sockets):
                if self.stopped.is_set():
                    return
                try:
                    each.send(REQUESTS)
                except BlockingIOError:
                    continue
                except OSError:  # closed
                    self.sockets.remove(each)
                    each.close()
                    self.closed += 1
                    if self.reopen:
                        self._open()


@dataclass
class Moves:
    """Slider moves: seconds until each was answered, and answers other than an image."""

    seconds: list[float] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def summary(self) -> str:
        """Summarise the moves in one line."""
        if not self.seconds:
            return f"no move was answered; {self.faults[:3]}"
        return (
            f"{len(self.seconds)} slider moves, median {1000 * np.median(self.seconds):.0f} ms, "
            f"longest {1000 * max(self.seconds):.0f} ms, {len(self.faults)} faults "
            f"{self.faults[:3]}"
        )


def move_sliders(
    address: str, *, seconds: float, pause: float = 0.1, max_moves: int = 10_000
) -> Moves:
    """Move a slider again and again, each time over a new connection."""
    url, _, token = address.partition("/?token=")
    headers, moves = {"authorization": f"Bearer {token}"}, Moves()
    name = httpx.get(f"{url}/api/models", headers=headers, trust_env=False, timeout=TIMEOUT).json()
    end = time.monotonic() + seconds
    for number in range(max_moves):
        if time.monotonic() > end:
            break
        code = {"experts": [{"expert": 0, "offsets": [(number % 60) / 10 - 3]}]}
        start = time.monotonic()
        try:
            answer = httpx.post(
                f"{url}/api/models/{name[0]}/decode?as=pixels",
                json=code,
                headers=headers,
                timeout=TIMEOUT,
                trust_env=False,
            )
            if answer.status_code != 200:
                moves.faults.append(f"{answer.status_code} {answer.text[:100]}")
        except httpx.HTTPError as error:
            moves.faults.append(repr(error))
        moves.seconds.append(time.monotonic() - start)
        time.sleep(pause)
    return moves


def main(
    run: str, /, *, connections: int = 1000, seconds: float = 20, open_files: int = 256
) -> None:
    """Measure slider moves without an attack, and with connections of each kind.

    Parameters
    ----------
    run
        Folder or name of a trained model.
    connections
        Connections of an attack.
    seconds
        Duration of each of the five parts.
    open_files
        Files that the explorer may open.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "log"
        with (
            path.open("w") as log,
            running_explorer(run, log=log, open_files=open_files) as address,
        ):
            print("without attack:", move_sliders(address, seconds=seconds).summary(), flush=True)
            attacks: dict[str, Attack] = {
                "half-sent heads": HalfSentHeads(address, connections),
                "half-sent heads, reopened": HalfSentHeads(address, connections, reopen=True),
                "half-sent bodies, reopened": HalfSentBodies(address, connections, reopen=True),
                "clients without a token that read no answer, reopened": UnreadAnswers(
                    address, connections, reopen=True
                ),
            }
            for name, attack in attacks.items():
                with attack:
                    moves = move_sliders(address, seconds=seconds)
                    print(
                        f"{connections} {name}: {moves.summary()}; {attack.opened} opened, "
                        f"{attack.held} still open",
                        flush=True,
                    )
        print(f"log of the explorer: {path.stat().st_size:,} bytes")
        print(path.read_text()[:1000])


if __name__ == "__main__":
    tyro.cli(main)
