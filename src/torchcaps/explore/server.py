"""The explorer's server: uvicorn on one address of this machine, which waits for no client longer than it must."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from torchcaps.errors import RecipeError
from torchcaps.explore.middleware import PATIENCE, origins_of
from torchcaps.explore.queue import Queue
from torchcaps.explore.routes import application
from torchcaps.explore.run_registry import RunRegistry

__all__ = ["address_of", "listen", "serve", "server_on"]

CONNECTIONS = 512
"""So many at once; of more, what they ask is not looked at: 503."""


class _Impatient(H11Protocol):
    """A connection that is cut if the head of its next request is not there in time, or its answers are not read;
    uvicorn would wait for ever."""

    head: asyncio.TimerHandle | None = None
    unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_head()

    def on_response_complete(self) -> None:
        self._await_head()
        super().on_response_complete()

    def handle_events(self) -> None:
        before = self.cycle
        super().handle_events()
        if self.cycle is not before and not self.cycle.response_complete:
            self._stop()

    def pause_writing(self) -> None:
        super().pause_writing()
        self.unread = self.loop.call_later(PATIENCE, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self.unread is not None:
            self.unread.cancel()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop()
        self.resume_writing()
        super().connection_lost(exc)

    def _await_head(self) -> None:
        self._stop()
        self.head = self.loop.call_later(PATIENCE, self.transport.abort)

    def _stop(self) -> None:
        if self.head is not None:
            self.head.cancel()
            self.head = None


class _Server(uvicorn.Server):
    """Says when it accepts."""

    def __init__(self, config: uvicorn.Config, ready: Callable[[], object]) -> None:
        super().__init__(config)
        self.ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.ready()


def listen(host: str, port: int) -> socket.socket:
    """A socket on an address of this machine; of port 0, a free one."""
    if not 0 <= port < 1 << 16:
        raise RecipeError(f"--port {port} is asked for; 0 (a free one) to 65535 is wanted")
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.create_server(address[:2], family=family, backlog=CONNECTIONS)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # inherited; asyncio sets it on others only
        return listener
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise RecipeError(f"cannot listen on {host}, port {port}: {reason}; choose another --port or --host") from None


def address_of(listener: socket.socket) -> str:
    """Where a browser on this machine finds what listens there."""
    host, port = listener.getsockname()[:2]
    here = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://{f'[{here}]' if ':' in here else here}:{port}/"


def server_on(
    listener: socket.socket,
    shelf: RunRegistry,
    host: str,
    ready: Callable[[], object],
    *,
    queue: Queue | None = None,
    patience: float = PATIENCE,
) -> uvicorn.Server:
    """The server, to be run with `listener` as its socket; `host` is what that was asked to listen on."""
    origins = origins_of(host, listener.getsockname()[1])
    app: Any = application(shelf, origins, queue or Queue(), patience)
    config = uvicorn.Config(
        app,
        http=_Impatient,
        ws="none",
        loop="asyncio",
        lifespan="on",
        log_config=None,
        log_level="critical",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=5,
        timeout_graceful_shutdown=2,
        limit_concurrency=CONNECTIONS,
    )
    return _Server(config, ready)


def serve(shelf: RunRegistry, host: str, port: int, ready: Callable[[str], object]) -> None:
    """Serve until the process is interrupted; `ready` is told the address once it answers."""
    with listen(host, port) as listener:
        address = address_of(listener)
        server_on(listener, shelf, host, lambda: ready(address)).run([listener])
