"""Access rules of the explorer's server: allowed hosts, origin of a request, size and speed of a body, headers.

starlette checks the host (`TrustedHostMiddleware` with `allowed_hosts`). By hand is what neither starlette nor uvicorn
has: a same-origin check, a limit on the size and the time of a body, and security headers on every response.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterable

from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

__all__ = ["HEADERS", "MAX_BODY", "TIMEOUT", "SecurityHeaders", "allowed_hosts", "is_loopback", "read_json_body"]

MAX_BODY = 1 << 19
"""Largest accepted body in bytes: room for a color image of 256x256 in base64."""
MAX_DISCARDED = 1 << 22
"""Bytes of a larger body that are read and dropped: a client that is still sending would not read the refusal."""
TIMEOUT = 10
"""Seconds that the server waits for a client: for the next request, for its body, for a response to be read."""
LOOPBACK = ("127.0.0.1", "localhost", "::1")
ANY_ADDRESS = ("0.0.0.0", "::")

# Scripts, styles and requests only of this server; no frame around the page, no cache of anyone's images
HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}


def is_loopback(host: str) -> bool:
    """Return whether `host` is an address of this machine that no other machine can reach."""
    return host.lower() in LOOPBACK


def allowed_hosts(host: str) -> list[str]:
    """List the host names by which a server that listens on `host` may be called, for `TrustedHostMiddleware`.

    Args:
        host: address the server listens on; "0.0.0.0" and "::" stand for all addresses of this machine.

    Returns:
        Names and addresses in lower case, IPv6 addresses in brackets.

    >>> allowed_hosts("127.0.0.1")
    ['127.0.0.1', '[::1]', 'localhost']
    """
    # Any other name may be DNS rebinding: a foreign page whose host name was made to resolve to this machine
    names = {*LOOPBACK, *(_machine_names() if host in ANY_ADDRESS else [host.lower()])}
    return sorted(f"[{name}]" if ":" in name else name for name in names)


def _machine_names() -> Iterable[str]:
    """List this machine's name and the addresses that it resolves to."""
    name = socket.gethostname().lower()
    try:
        found = socket.getaddrinfo(name, None)
    except OSError:
        return [name]
    # An IPv6 address may end in its interface, as in fe80::1%eth0, which a Host header does not have
    return [name, *(str(address[0]).partition("%")[0] for *_, address in found)]


class SecurityHeaders:
    """ASGI application that sets `HEADERS` on every response of `app`, errors included."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Set as the response starts, so that responses which starlette makes for errors have them, too
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        await self.app(scope, receive, send_with_headers)


async def read_json_body(request: Request, timeout: float = TIMEOUT) -> bytes:
    """Read the body of a POST request that this server's own page may have sent.

    Args:
        request: the request; its host has been checked already.
        timeout: seconds within which the whole body must arrive.

    Returns:
        The body, at most `MAX_BODY` bytes.

    Raises:
        HTTPException: 400 for a page of another origin or a body that breaks off, 415 for a body that is not declared
            as JSON, 413 for one that is too large, 408 for one that is too slow.
    """
    # A browser sends Origin with every POST; a page elsewhere, or on another port, cannot choose it.
    own_origin = f"http://{request.headers['host']}".lower()
    if any(origin.lower() != own_origin for origin in request.headers.getlist("origin")):
        raise HTTPException(400, "the request comes from a page of another origin; open the explorer's own page")
    # Another origin's form can send text/plain without asking first, but not JSON.
    types = request.headers.getlist("content-type")
    if [value.partition(";")[0].strip().lower() for value in types] != ["application/json"]:
        raise HTTPException(415, "Content-Type is not application/json")
    # The HTTP parser has checked that a declared length is a number. A response before the body's end must close.
    close = {"connection": "close"}
    if int(request.headers.get("content-length", 0)) > MAX_DISCARDED:
        raise HTTPException(413, f"the body is larger than {MAX_BODY} bytes", close)
    try:
        async with asyncio.timeout(timeout):
            return await _collect(request)
    except TimeoutError:
        raise HTTPException(408, f"the body took longer than {timeout:g} seconds", close) from None
    except ClientDisconnect:
        raise HTTPException(400, "the body broke off") from None


async def _collect(request: Request) -> bytes:
    """Concatenate the pieces of a body, without ever holding more than `MAX_BODY` bytes."""
    body = bytearray()
    size = 0
    async for piece in request.stream():
        size += len(piece)
        # Beyond the limit pieces are dropped; the client reads the refusal only when it has sent all
        if size <= MAX_BODY:
            body += piece
        elif size > MAX_DISCARDED:
            break
    if size > MAX_BODY:
        raise HTTPException(413, f"the body is larger than {MAX_BODY} bytes", {"connection": "close"})
    return bytes(body)
