"""What stands between the network and the explorer: who may ask, how much, and how many at once."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, MutableMapping
    from typing import Any

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

LARGEST_BODY = 8_000_000  # bytes of a request
MOST_AT_ONCE = 32  # requests under way; one more gets a 429
PATIENCE = 15.0  # seconds in which the body of a request must arrive
LOCAL_HOSTS = ("127.0.0.1", "localhost", "::1")
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}


class Refusal(Exception):  # noqa: N818 (a decision, not a fault)
    """A request that is answered with an error before the explorer sees it."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Guard:
    """ASGI middleware that refuses strangers, large bodies and crowds, and adds security headers to every answer.

    A page of another site can make a browser send requests here. Its own name is in `Origin`, or, if it had its name
    point to this machine, in `Host`; both must be ours.

    Parameters
    ----------
    app
        What is guarded.
    hosts
        Names, without port, that a request may call this server by.
    any_address
        Whether it may be called by any IP address, too, as a server that others may use must be: a page can make a name
        point here, but not an address.
    largest_body, most_at_once, patience
        Bounds of a request in bytes, of requests under way, and of the seconds in which a body must arrive.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        hosts: Iterable[str] = LOCAL_HOSTS,
        any_address: bool = False,
        largest_body: int = LARGEST_BODY,
        most_at_once: int = MOST_AT_ONCE,
        patience: float = PATIENCE,
    ) -> None:
        self.app = app
        self.hosts = frozenset(host.lower() for host in hosts)
        self.any_address = any_address
        self.largest_body, self.most_at_once, self.patience = largest_body, most_at_once, patience
        self.under_way = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer it with a refusal."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        counted = started = False

        async def send_guarded(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                known = {name.lower() for name, _ in message["headers"]}
                added = [
                    (n.encode(), v.encode()) for n, v in HEADERS.items() if n.encode() not in known
                ]
                message = {**message, "headers": [*message["headers"], *added]}
            await send(message)

        try:
            self._check_sender(
                {
                    name.decode("latin-1"): value.decode("latin-1")
                    for name, value in scope["headers"]
                },
                scope,
            )
            if self.under_way >= self.most_at_once:
                raise Refusal(
                    429,
                    f"{self.most_at_once} requests are under way already; try again in a second",
                )
            self.under_way += 1
            counted = True
            body = await self._read(receive)
            await self.app(scope, _replay(body, receive), send_guarded)
        except Refusal as refusal:
            if not counted:
                await self._discard(receive)
            await _answer(send_guarded, refusal)
        except Exception:
            logging.getLogger(__name__).exception("%s %s failed", scope["method"], scope["path"])
            if started:
                raise
            await _answer(
                send_guarded,
                Refusal(500, "this is a fault of the explorer; its terminal tells more"),
            )
        finally:
            self.under_way -= counted

    def _check_sender(self, headers: MutableMapping[str, str], scope: Scope) -> None:
        host = headers.get("host", "")
        if not self._is_ours(_name(host)):
            raise Refusal(403, "the explorer does not answer to this Host")
        origin = headers.get("origin")
        if origin is not None and origin != f"{scope['scheme']}://{host}":
            raise Refusal(403, "the explorer does not answer to pages of another Origin")
        foreign = headers.get("sec-fetch-site") in ("cross-site", "same-site")
        if foreign and headers.get("sec-fetch-mode") != "navigate":
            raise Refusal(403, "the explorer does not answer to other sites")

    def _is_ours(self, name: str) -> bool:
        if name.lower() in self.hosts:
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return self.any_address

    async def _read(self, receive: Receive, *, keep: bool = True) -> bytes:
        """Read the whole body; one that is too large is read to its end, so that the answer is heard, but not kept."""
        parts, size, more = [], 0, True
        deadline = asyncio.get_running_loop().time() + self.patience
        while more:
            try:
                message = await asyncio.wait_for(
                    receive(), deadline - asyncio.get_running_loop().time()
                )
            except asyncio.TimeoutError:
                raise Refusal(
                    408, f"the request was not complete after {self.patience:.0f} seconds"
                ) from None
            part = message.get("body", b"")
            size += len(part)
            if keep and size <= self.largest_body:
                parts.append(part)
            else:
                parts.clear()
            more = message["type"] == "http.request" and message.get("more_body", False)
        if size > self.largest_body:
            raise Refusal(
                413, f"the request has {size:,} bytes; at most {self.largest_body:,} are read"
            )
        return b"".join(parts)

    async def _discard(self, receive: Receive) -> None:
        """Read what a refused client still sends, so that it hears the answer."""
        try:
            await self._read(receive, keep=False)
        except Refusal:
            return


def _name(host: str) -> str:
    """Take the port off a Host header, and the brackets off an IPv6 address."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]


def _replay(body: bytes, receive: Receive) -> Receive:
    """Give the body that was read, and after it what else comes, as a disconnection."""
    given = False

    async def replay() -> MutableMapping[str, Any]:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay


async def _answer(send: Send, refusal: Refusal) -> None:
    body = json.dumps({"error": str(refusal)}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if refusal.status == 429:
        headers.append((b"retry-after", b"1"))
    await send({"type": "http.response.start", "status": refusal.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
