"""What stands before the application: who may ask (host, origin), how much, how slowly, and the answers' headers.

Pure ASGI. A body is read here, whole, before the application sees the request; so nothing behind waits for a client.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any

__all__ = ["LARGEST", "PATIENCE", "Guards", "is_loopback", "origins_of"]

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

LARGEST = 65_536
"""Bytes of a body."""
DISCARDED = 1 << 20
"""Bytes of a larger one that are read and dropped, so that its sender hears why it is refused."""
PATIENCE = 10.0
"""Seconds that a body may take."""
LOOPBACK = ("127.0.0.1", "localhost", "::1")
EVERYWHERE = ("0.0.0.0", "::")

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
_HEADERS = [(name.encode(), value.encode()) for name, value in HEADERS.items()]


class RefusedError(Exception):
    """A request that goes no further: its status, and one line."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


def is_loopback(host: str) -> bool:
    """True of the names of this machine that no other can reach."""
    return host.lower() in LOOPBACK


def origins_of(host: str, port: int) -> frozenset[str]:
    """The `host:port` by which a server that listens on `host` may be called; without the port too if it is 80.

    >>> sorted(origins_of("127.0.0.1", 8000))
    ['127.0.0.1:8000', '[::1]:8000', 'localhost:8000']
    """
    names = {*LOOPBACK, *(_own_names() if host in EVERYWHERE else [host.lower()])}
    written = {f"[{name}]" if ":" in name else name for name in names}
    return frozenset(f"{name}:{port}" for name in written) | (written if port == 80 else frozenset())


def _own_names() -> Iterable[str]:
    """This machine's name and addresses, as far as it knows them."""
    name = socket.gethostname().lower()
    try:
        found = socket.getaddrinfo(name, None)
    except OSError:
        return [name]
    return [name, *(str(address[0]).partition("%")[0] for *_, address in found)]


class Guards:
    """An ASGI application that lets through to `app` what is asked of one of `origins` in due form."""

    def __init__(self, app: App, origins: frozenset[str], patience: float = PATIENCE) -> None:
        self.app = app
        self.origins = origins
        self.patience = patience

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        guarded = _with_headers(send)
        try:
            self._check(scope)
            body = await self._body(scope, receive)
        except RefusedError as refused:
            await refuse(guarded, refused)
        else:
            await self.app(scope, _again(body, receive), guarded)

    def _check(self, scope: Message) -> None:
        hosts = _values(scope, b"host")
        if len(hosts) != 1 or hosts[0].lower() not in self.origins:
            raise RefusedError(400, "this address is not the explorer's; open the one that it printed when it began")
        if scope["method"] in ("GET", "HEAD"):
            return
        if any(origin.lower().removeprefix("http://") not in self.origins for origin in _values(scope, b"origin")):
            raise RefusedError(400, "a page of another origin asks; only the explorer's own may")
        if scope["method"] == "POST" and not _is_json(_values(scope, b"content-type")):
            raise RefusedError(415, "Content-Type is not application/json")

    async def _body(self, scope: Message, receive: Receive) -> bytes:
        """The whole body; none is awaited where none is wanted."""
        if scope["method"] != "POST":
            return b""
        if any(len(size) > 7 or int(size) > DISCARDED for size in _lengths(scope)):
            raise too_large()
        try:
            async with asyncio.timeout(self.patience):
                return await _collected(receive)
        except TimeoutError:
            raise RefusedError(408, f"the body took longer than {self.patience:g} seconds") from None


async def _collected(receive: Receive) -> bytes:
    body = bytearray()
    size = 0
    more = True
    while more and size <= DISCARDED:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise RefusedError(400, "the body broke off")
        piece = message.get("body", b"")
        more = message.get("more_body", False)
        size += len(piece)
        if size <= LARGEST:
            body += piece
    if size > LARGEST:
        raise too_large()
    return bytes(body)


def too_large() -> RefusedError:
    """What becomes of a body over the cap."""
    return RefusedError(413, f"the body is larger than {LARGEST} bytes")


def _again(body: bytes, receive: Receive) -> Receive:
    """A `receive` that hands out the body once, and then what comes after it: that the client has gone."""
    rest = [body]

    async def receive_again() -> Message:
        if rest:
            return {"type": "http.request", "body": rest.pop(), "more_body": False}
        while (message := await receive())["type"] == "http.request":
            pass  # what a GET may bring along
        return message

    return receive_again


def _with_headers(send: Send) -> Send:
    async def send_with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            own = [header for header in message.get("headers", []) if header[0].decode().lower() not in HEADERS]
            message = {**message, "headers": [*own, *_HEADERS]}
        await send(message)

    return send_with_headers


async def refuse(send: Send, refused: RefusedError) -> None:
    """Answer with the line, and close: what else the client sends is not read."""
    body = json.dumps({"error": str(refused)}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    headers.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": refused.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _values(scope: Message, name: bytes) -> list[str]:
    """All values of a header; ASGI servers give names in lower case."""
    return [value.decode("latin-1").strip() for key, value in scope["headers"] if key == name]


def _lengths(scope: Message) -> list[str]:
    """The declared lengths of the body, without leading zeros."""
    sizes = _values(scope, b"content-length")
    if not all(size.isascii() and size.isdigit() for size in sizes):
        raise RefusedError(400, "Content-Length is not a number")
    return [size.lstrip("0") or "0" for size in sizes]


def _is_json(types: list[str]) -> bool:
    return len(types) == 1 and types[0].partition(";")[0].strip().lower() == "application/json"
