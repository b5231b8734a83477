"""Sliders under attack: ``python -m benchmarks.explorer_attack RUN``.

Starts `poecaps explore` in a separate process that may open few files, opens many connections that
never send more than half of the head of a request, and measures meanwhile how long it takes until a
slider move is answered. Only an explorer on this machine is attacked, with a limited number of
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

HALF_A_HEAD = b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Half: "
MAX_CONNECTIONS = 5000
TIMEOUT = 60.0  # of a slider move


class HalfSentHeads:
    """Connections to the explorer, each with half of the head of a request.

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
        self.where, self.connections, self.reopen = (
            ("127.0.0.1", where.port or 0),
            connections,
            reopen,
        )
        self.selector = selectors.DefaultSelector()
        self.opened = self.closed = 0
        self.stopped = threading.Event()
        self.thread = threading.Thread(target=self._hold)

    def __enter__(self) -> HalfSentHeads:
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
        for key in list(self.selector.get_map().values()):
            self._close(key.fileobj)
        self.selector.close()

    @property
    def held(self) -> int:
        """Connections that are open."""
        return self.opened - self.closed

    def _open(self) -> None:
        connection = socket.create_connection(self.where, timeout=TIMEOUT)
        connection.setblocking(False)
        connection.send(HALF_A_HEAD)
        self.selector.register(connection, selectors.EVENT_READ)
        self.opened += 1

    def _close(self, connection: object) -> None:
        assert isinstance(connection, socket.socket)  # noqa: S101 (nothing else is registered)
        self.selector.unregister(connection)
        connection.close()

    def _hold(self) -> None:
        """Notice which connections the explorer closes."""
        while not self.stopped.is_set():
            for key, _ in self.selector.select(timeout=0.1):
                self._close(key.fileobj)  # readable: closed, for there is nothing to answer
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
    """Measure slider moves without an attack, with connections that stay, and that come back.

    Parameters
    ----------
    run
        Folder or name of a trained model.
    connections
        Connections with half of a head.
    seconds
        Duration of each of the three parts.
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
            for reopen in (False, True):
                with HalfSentHeads(address, connections, reopen=reopen) as heads:
                    moves = move_sliders(address, seconds=seconds)
                    print(
                        f"{connections} half-sent heads{', reopened' * reopen}:",
                        f"{moves.summary()}; {heads.opened} opened, {heads.held} still open",
                        flush=True,
                    )
        print(f"log of the explorer: {path.stat().st_size:,} bytes")
        print(path.read_text()[:1000])


if __name__ == "__main__":
    tyro.cli(main)
