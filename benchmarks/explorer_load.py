"""Load test of the explorer with fifty local clients: ``python -m benchmarks.explorer_load RUN``.

Starts `poecaps explore` in a separate process and sends requests from all clients without pause:
mostly decoding, as sliders do, and some draws, encodings and traversals. Prints the count of each
status code and the response times. A status other than 200 or 429, or a request without a response,
counts as a fault.
"""

from __future__ import annotations

import json
import random
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TextIO
from urllib.parse import urlsplit

import httpx
import numpy as np
import tyro

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def running_explorer(
    run: str, *, log: TextIO | None = None, open_files: int | None = None
) -> Iterator[str]:
    """Start the explorer in a separate process and yield its address, which contains its token.

    Parameters
    ----------
    run
        Folder or name of a trained model.
    log
        File for the messages of the explorer, instead of standard error.
    open_files
        Limit of the number of its open files.
    """
    command = [sys.executable, "-m", "poecaps", "explore", run, "--no-browser"]
    if open_files is not None:
        limit = f"ulimit -n {open_files:d} && exec {shlex.join(command)}"
        command = ["/bin/sh", "-c", limit]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True) as server:  # noqa: S603 (a fixed program)
        assert server.stdout is not None  # noqa: S101 (it is a pipe)
        found = re.search(r"http://127\.0\.0\.1:\d+/\?token=\S+", server.stdout.readline())
        try:
            if found is None:
                raise RuntimeError("the explorer did not start")
            yield found[0]
        finally:
            server.send_signal(signal.SIGINT)


@dataclass
class Load:
    """The responses that clients received."""

    statuses: Counter[int] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def summary(self) -> str:
        """Summarise the responses in three lines."""
        took = np.percentile(1000 * np.array(self.seconds or [np.nan]), [50, 95, 99])
        return (
            f"responses {sum(self.statuses.values()):,}: {dict(sorted(self.statuses.items()))}\n"
            f"faults {len(self.faults)} {self.faults[:3]}\n"
            f"milliseconds of status 200: median {took[0]:.0f}, 95th percentile {took[1]:.0f}, "
            f"99th {took[2]:.0f}"
        )


def load(
    address: str, clients: int, *, seconds: float | None = None, requests: int | None = None
) -> Load:
    """Send requests from several clients, for some seconds or a number of requests per client.

    The address must be on this machine; it contains the token of the explorer.
    """
    url, _, token = address.partition("/?token=")
    if urlsplit(address).hostname != "127.0.0.1":
        raise ValueError(f"address must be on this machine, but is {address}")
    seen, lock = Load(), threading.Lock()
    end = None if seconds is None else time.monotonic() + seconds

    def send_requests(number: int) -> None:
        choose, count = random.Random(number), 0  # noqa: S311 (not for security)
        headers = {"authorization": f"Bearer {token}"}
        with httpx.Client(base_url=url, headers=headers, timeout=60, trust_env=False) as client:
            models = client.get("/api/models")
            name = models.json()[0] if models.status_code == 200 else None
            while (end is None or time.monotonic() < end) and (
                requests is None or count < requests
            ):
                count += 1
                start = time.monotonic()
                try:
                    if name is None:
                        answer = client.get("/api/models")
                        name = answer.json()[0] if answer.status_code == 200 else None
                    else:
                        answer = _random_request(client, f"/api/models/{name}", choose)
                except httpx.HTTPError as error:
                    with lock:
                        seen.faults.append(repr(error))
                    continue
                with lock:
                    seen.statuses[answer.status_code] += 1
                    if answer.status_code == 200:
                        seen.seconds.append(time.monotonic() - start)
                    elif answer.status_code != 429:
                        seen.faults.append(f"{answer.status_code} {answer.text[:100]}")
                if answer.status_code == 429:
                    time.sleep(0.1 * choose.random())

    threads = [threading.Thread(target=send_requests, args=(number,)) for number in range(clients)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    return seen


def _random_request(client: httpx.Client, model: str, choose: random.Random) -> httpx.Response:
    picture = {
        "experts": [
            {"expert": choose.randrange(3), "offsets": [choose.uniform(-3, 3) for _ in range(4)]}
        ]
    }
    kind = choose.random()
    if kind < 0.85:
        return client.post(f"{model}/decode?as=pixels", json=picture)
    if kind < 0.92:
        return client.get(
            f"{model}/draw", params={"domain": "joint", "seed": choose.randrange(1000)}
        )
    if kind < 0.99:
        image = client.get(f"{model}/experts/{choose.randrange(3)}/typical")
        if image.status_code != 200:
            return image
        return client.post(
            f"{model}/encode", content=image.content, headers={"content-type": "image/png"}
        )
    return client.post(f"{model}/experts/0/traversal?as=pixels", json=picture)


def main(run: str, /, *, clients: int = 50, seconds: float = 30) -> None:
    """Measure the response times with one model.

    Parameters
    ----------
    run
        Folder or name of a trained model.
    clients
        Number of concurrent clients.
    seconds
        Duration of the test.
    """
    with running_explorer(run) as address:
        print(json.dumps({"run": run, "clients": clients, "seconds": seconds}))
        print(load(address, clients, seconds=seconds).summary())


if __name__ == "__main__":
    tyro.cli(main)
