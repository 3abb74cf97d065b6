"""Server of the explorer: uvicorn on one address of this machine, which waits for no client longer than it must."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from torchcaps.errors import RecipeError
from torchcaps.explore.middleware import TIMEOUT, allowed_hosts
from torchcaps.explore.queue import Queue
from torchcaps.explore.routes import build_application
from torchcaps.explore.run_registry import RunRegistry

__all__ = ["CONNECTIONS", "IDLE_CONNECTIONS", "build_server", "listen", "serve", "url_of"]

CONNECTIONS = 512
"""Connections at a time; requests on further ones are answered with 503 at once."""

IDLE_CONNECTIONS = CONNECTIONS // 2
"""Connections up to which idle ones may stay; with more, each new one ends the one that has been idle for longest."""


class _TimedProtocol(H11Protocol):
    """HTTP connection that is cut when its client is slow.

    By hand, because uvicorn's `timeout_keep_alive` ends with the first byte of the next request, and because uvicorn
    waits without end for a client to read: here that many seconds limit the whole head of a request (idle connections
    included) and every wait until the client has read.
    """

    _timer: asyncio.TimerHandle | None = None
    _idle_since: float | None = None  # None while the application works on a request

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._restart_timer()
        # Clients of one machine have one address, so that no limit for each could tell them apart
        if len(self.connections) > IDLE_CONNECTIONS:
            self._end_longest_idle()

    def handle_events(self) -> None:
        # A new cycle is a request whose head is complete; single bytes of it do not count as progress
        previous = self.cycle
        super().handle_events()
        if self.cycle is not previous:
            self._restart_timer()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._restart_timer()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._restart_timer()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._restart_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._timer is not None:
            self._timer.cancel()

    def _restart_timer(self) -> None:
        """Wait for the client anew; no time runs while the application works on a request."""
        if self._timer is not None:
            self._timer.cancel()
        # A paused write means that the client does not read, so time runs although the response is not complete
        working = self.cycle is not None and not self.cycle.response_complete and not self.flow.write_paused
        self._idle_since = None if working else self.loop.time()
        if not working:
            self._timer = self.loop.call_later(self.timeout_keep_alive, self.transport.abort)

    def _end_longest_idle(self) -> None:
        """Cut the connection, other than this one, whose client has let the server wait for longest."""
        idle = [
            (other._idle_since, number, other)
            for number, other in enumerate(self.connections)
            if isinstance(other, _TimedProtocol) and other._idle_since is not None and other is not self
            if not other.transport.is_closing()
        ]
        if idle:
            min(idle)[2].transport.abort()


def listen(host: str, port: int) -> socket.socket:
    """Open a listening socket on an address of this machine.

    Args:
        host: name or address, IPv4 or IPv6.
        port: 0 for any free one.

    Raises:
        RecipeError: the port is out of range or taken, or the host is not an address of this machine.
    """
    if not 0 <= port < 1 << 16:
        raise RecipeError(f"--port is {port}; choose one from 0 (any free one) to 65535")
    try:
        # The first address of a name decides between IPv4 and IPv6
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.create_server(address[:2], family=family, backlog=CONNECTIONS)
        # Small responses are sent at once instead of waiting for more
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # inherited; asyncio sets it on others only
        return listener
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise RecipeError(f"cannot listen on {host}, port {port}: {reason}; choose another --port or --host") from None


def url_of(listener: socket.socket) -> str:
    """Return the URL at which a browser on this machine reaches a listening socket."""
    host, port = listener.getsockname()[:2]
    # A browser cannot open "all addresses", but loopback is one of them
    reachable = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://{f'[{reachable}]' if ':' in reachable else reachable}:{port}/"


def build_server(
    registry: RunRegistry,
    host: str,
    ready: Callable[[], object],
    *,
    queue: Queue | None = None,
    timeout: int = TIMEOUT,
) -> uvicorn.Server:
    """Configure uvicorn for the explorer; run it with the socket of `listen`.

    Args:
        registry: the runs that it offers.
        host: the address that the socket was asked to listen on; decides by which names the server may be called.
        ready: called when the application starts; a socket that listens already holds connections until then.
        queue: where computations wait; a new one by default.
        timeout: seconds to wait for a slow client.
    """
    config = uvicorn.Config(
        build_application(registry, allowed_hosts(host), queue or Queue(), ready=ready, timeout=timeout),
        http=_TimedProtocol,
        ws="none",
        loop="asyncio",
        lifespan="on",
        # The terminal belongs to the command, which prints the address and nothing else
        log_config=None,
        log_level="critical",
        access_log=False,
        # No version in responses, and no trust in headers that a proxy would set: there is none
        server_header=False,
        proxy_headers=False,
        # Limits: see `_TimedProtocol` for what else the first one covers
        timeout_keep_alive=timeout,
        timeout_graceful_shutdown=2,  # seconds that Ctrl-C waits for responses
        limit_concurrency=CONNECTIONS,
    )
    return uvicorn.Server(config)


def serve(registry: RunRegistry, host: str, port: int, ready: Callable[[str], object]) -> None:
    """Serve until the process is interrupted.

    Args:
        registry: the runs that are offered.
        host: address to listen on.
        port: port to listen on; 0 for any free one.
        ready: called with the page's URL when it can be opened.
    """
    with listen(host, port) as listener:
        # Listen before the server starts: connections wait in the backlog, and the port is known
        url = url_of(listener)
        build_server(registry, host, lambda: ready(url)).run([listener])
