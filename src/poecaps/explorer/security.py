"""Protection of the explorer: allowed senders, and limits on the size and number of requests."""

from __future__ import annotations

import hmac
import ipaddress
import json
import logging
import re
import secrets
import time
from typing import TYPE_CHECKING
from urllib.parse import parse_qs

import anyio

if TYPE_CHECKING:
    from collections.abc import Iterable, MutableMapping
    from typing import Any

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

MAX_BODY_BYTES = 8_000_000
MAX_CONCURRENT_REQUESTS = 32  # further requests are answered with status 429
BODY_TIMEOUT = 15.0  # seconds in which the body of a request must arrive
LOCAL_HOSTS = ("127.0.0.1", "localhost", "::1")
TOKEN_BYTES = 24  # of a random token
TICKET_SECONDS = 120.0  # in which a browser that was started must open the page
# Of answers after which the connection is closed, so that whoever has no token cannot keep it.
CLOSING = (401, 403, 408, 413)
TOKEN = re.compile(r"[A-Za-z0-9_-]{16,128}")  # valid in a URL and in a cookie
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}


class RejectedRequestError(Exception):
    """A request that is answered with an error status instead of being passed on."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def new_token() -> str:
    """Return a random token."""
    return secrets.token_urlsafe(TOKEN_BYTES)


def is_loopback(host: str) -> bool:
    """Return whether only this machine can connect to a server at this host."""
    try:
        return host in LOCAL_HOSTS or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def require_token(token: str | None, host: str) -> None:
    """Raise ValueError if a token is invalid, or missing where others can connect."""
    if token is None and not is_loopback(host):
        raise ValueError(
            f"a token is required at host {host!r}, where others can connect; "
            f"only {', '.join(LOCAL_HOSTS)} may be without"
        )
    if token is not None and not TOKEN.fullmatch(token):
        raise ValueError(
            f"token must have 16 to 128 letters, digits, - or _, but has {len(token)} characters"
            + (", some of them others" if 16 <= len(token) <= 128 else "")
        )


class SecurityMiddleware:
    """ASGI middleware that rejects unwanted requests and adds security headers to every response.

    A page of another site can make a browser send requests to this server. The name of that site is
    in the header `Origin` or, if the site's DNS name was made to point to this machine, in `Host`.
    Both must be those of this server.

    Other programs and other users of this machine can send any header. They do not know the token,
    which is part of the URL that the browser opens first. The response to that request stores the
    token in a cookie and redirects to the page, so that neither the address bar nor a copied link
    contains it.

    A browser that a program starts gets a ticket instead of the token. The command line of the
    browser, which other users of the machine can read, contains it, but it opens the page only once
    and not for long.

    Parameters
    ----------
    app
        The application to protect.
    token
        The token that requests must have: in a cookie, as the parameter `token` of the URL or in
        the header `Authorization: Bearer TOKEN`. None: requests need no token.
    ticket
        What the first visit may have as the parameter `token` of the URL, once, instead of the
        token.
    hosts
        Names, without port, under which this server may be addressed.
    any_address
        Whether the server may also be addressed by any IP address, which is needed if others may
        use it. This is safe, because a site can make a name point here, but not an address.
    max_body_bytes, max_concurrent_requests, body_timeout
        Limits: bytes of a request, requests in progress, and seconds until a body has arrived.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        token: str | None,
        ticket: str | None = None,
        hosts: Iterable[str] = LOCAL_HOSTS,
        any_address: bool = False,
        max_body_bytes: int = MAX_BODY_BYTES,
        max_concurrent_requests: int = MAX_CONCURRENT_REQUESTS,
        body_timeout: float = BODY_TIMEOUT,
    ) -> None:
        self.app, self.token = app, token
        self.ticket, self.ticket_ends = ticket, time.monotonic() + TICKET_SECONDS
        self.hosts = frozenset(host.lower() for host in hosts)
        self.any_address = any_address
        self.max_body_bytes = max_body_bytes
        self.max_concurrent_requests = max_concurrent_requests
        self.body_timeout = body_timeout
        self.in_progress = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer it with an error."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        counted = started = False

        async def send_with_headers(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                present = {name.lower() for name, _ in message["headers"]}
                added = [
                    (name.encode(), value.encode())
                    for name, value in HEADERS.items()
                    if name.encode() not in present
                ]
                message = {**message, "headers": [*message["headers"], *added]}
            await send(message)

        headers = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]
        }
        try:
            self._check_sender(headers, scope)
            if self._is_first_visit(scope):
                await self._send_cookie(send_with_headers, scope)
                return
            self._check_token(headers, scope)
            if self.in_progress >= self.max_concurrent_requests:
                raise RejectedRequestError(
                    429,
                    f"{self.max_concurrent_requests} requests are already in progress; "
                    "try again in a second",
                )
            self.in_progress += 1
            counted = True
            body = await self._read_body(receive)
            await self.app(scope, _replay(body, receive), send_with_headers)
        except RejectedRequestError as error:
            if not counted:
                await self._discard_body(receive)
            await _send_error(send_with_headers, error)
        except Exception:
            logging.getLogger(__name__).exception("%s %r failed", scope["method"], scope["path"])
            if started:
                raise
            await _send_error(
                send_with_headers,
                RejectedRequestError(
                    500, "internal error of the explorer; its terminal has the details"
                ),
            )
        finally:
            self.in_progress -= counted

    def _check_token(self, headers: MutableMapping[str, str], scope: Scope) -> None:
        given = [
            headers.get("authorization", "").removeprefix("Bearer "),
            _query_token(scope),
            _cookie(headers.get("cookie", ""), _cookie_name(scope)),
        ]
        if not any([self._is_token(each) for each in given]):  # noqa: C419 (in constant time)
            raise RejectedRequestError(
                401,
                "the explorer needs its token; open the address that poecaps explore has printed, "
                "or send the header Authorization: Bearer TOKEN",
            )

    def _is_token(self, text: str) -> bool:
        return self.token is None or hmac.compare_digest(
            text.encode("utf-8", "replace"), self.token.encode()
        )

    def _is_first_visit(self, scope: Scope) -> bool:
        """Return whether a browser opens the page with the token, or a ticket, in its URL."""
        if scope["method"] != "GET" or scope["path"] != "/" or not (given := _query_token(scope)):
            return False
        return self._is_token(given) or self._takes_ticket(given)

    def _takes_ticket(self, text: str) -> bool:
        """Return whether this is the ticket, which is not valid any more after that."""
        if self.ticket is None or time.monotonic() > self.ticket_ends:
            return False
        if not hmac.compare_digest(text.encode("utf-8", "replace"), self.ticket.encode()):
            return False
        self.ticket = None
        return True

    async def _send_cookie(self, send: Send, scope: Scope) -> None:
        """Store the token in the browser, and redirect to the page without it."""
        cookie = f"{_cookie_name(scope)}={self.token or ''}; Path=/; HttpOnly; SameSite=Lax"
        headers = [
            (b"location", b"/"),
            (b"set-cookie", cookie.encode()),
            (b"cache-control", b"no-store"),
            (b"content-length", b"0"),
        ]
        await send({"type": "http.response.start", "status": 303, "headers": headers})
        await send({"type": "http.response.body", "body": b""})

    def _check_sender(self, headers: MutableMapping[str, str], scope: Scope) -> None:
        host = headers.get("host", "")
        if not self._is_allowed(_without_port(host)):
            raise RejectedRequestError(403, "the explorer does not accept requests for this Host")
        origin = headers.get("origin")
        if origin is not None and origin != f"{scope['scheme']}://{host}":
            raise RejectedRequestError(
                403, "the explorer does not accept requests from another Origin"
            )
        is_foreign = headers.get("sec-fetch-site") in ("cross-site", "same-site")
        if is_foreign and headers.get("sec-fetch-mode") != "navigate":
            raise RejectedRequestError(
                403, "the explorer does not accept requests from other sites"
            )

    def _is_allowed(self, name: str) -> bool:
        if name.lower() in self.hosts:
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return self.any_address

    async def _read_body(self, receive: Receive, *, keep: bool = True) -> bytes:
        """Read the whole body; one that is too large is read to its end, but not kept.

        Clients read the response only after they have sent the whole body.
        """
        parts, size, more = [], 0, True
        # Before Python 3.12, `asyncio.wait_for` ignores that the server cancels the request if a
        # part of the body arrives at the same moment.
        with anyio.move_on_after(self.body_timeout):
            while more:
                message = await receive()
                part = message.get("body", b"")
                size += len(part)
                if keep and size <= self.max_body_bytes:
                    parts.append(part)
                else:
                    parts.clear()
                more = message["type"] == "http.request" and message.get("more_body", False)
        if more:
            raise RejectedRequestError(
                408, f"the request was not complete after {self.body_timeout:.0f} seconds"
            )
        if size > self.max_body_bytes:
            raise RejectedRequestError(
                413,
                f"the request has {size:,} bytes, but at most {self.max_body_bytes:,} are accepted",
            )
        return b"".join(parts)

    async def _discard_body(self, receive: Receive) -> None:
        """Read the rest of a rejected request, so that the client reads the response."""
        try:
            await self._read_body(receive, keep=False)
        except RejectedRequestError:
            return


def _query_token(scope: Scope) -> str:
    query: str = scope["query_string"].decode("latin-1")
    return parse_qs(query).get("token", [""])[0]


def _cookie_name(scope: Scope) -> str:
    """Return the name of the cookie; browsers send the cookies of a host to all of its ports."""
    return f"poecaps-explorer-{scope['server'][1]}"


def _cookie(header: str, name: str) -> str:
    """Return the value of a cookie, or ""."""
    pairs = (each.strip().partition("=") for each in header.split(";"))
    return next((value for found, _, value in pairs if found == name), "")


def _without_port(host: str) -> str:
    """Remove the port from a Host header, and the brackets from an IPv6 address."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]


def _replay(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that yields the body that was read, then further messages."""
    replayed = False

    async def replay() -> MutableMapping[str, Any]:
        nonlocal replayed
        if replayed:
            return await receive()
        replayed = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay


async def _send_error(send: Send, error: RejectedRequestError) -> None:
    body = json.dumps({"error": str(error)}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if error.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    if error.status == 429:
        headers.append((b"retry-after", b"1"))
    if error.status in CLOSING:
        headers.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
