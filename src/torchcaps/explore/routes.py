"""HTTP routes of the explorer.

    GET  /                                  the page
    GET  /static/NAME                       its files, from a table made at the start
    GET  /api/runs                          the runs
    GET  /api/runs/N                        description of a run, which is opened if it is not yet
    GET  /api/runs/N/examples/M             a test image
    POST /api/runs/N/ACTION                 one of `handlers.ACTIONS`

All computation goes through one queue. An error is {"error": "one line"}.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from importlib import resources
from typing import NamedTuple

import torch
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from torchcaps import __version__
from torchcaps.errors import TorchcapsError
from torchcaps.explore.handlers import ACTIONS, JsonObject, describe_run, get_example, list_runs
from torchcaps.explore.messages import parse_request
from torchcaps.explore.middleware import TIMEOUT, SecurityHeaders, read_json_body
from torchcaps.explore.queue import ClientGoneError, Queue, QueueFullError
from torchcaps.explore.run_registry import OpenRun, RunRegistry

__all__ = ["Explorer", "build_application", "static_files"]

MEDIA_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "json": "application/json",
    "svg": "image/svg+xml",
    "png": "image/png",
    "ico": "image/x-icon",
    "woff2": "font/woff2",
}
"""Media types of the files that are served, by file extension."""


class UnreadableRunError(Exception):
    """A run that cannot be read, and why."""


class StaticFile(NamedTuple):
    """A file of the page."""

    content: bytes
    media_type: str


def static_files() -> dict[str, StaticFile]:
    """Read the page's files into memory, by name: no path of a request ever reaches the disk."""
    folder = resources.files("torchcaps") / "explore" / "static"
    found = {}
    # Files of an unknown type are not served
    for path in folder.iterdir() if folder.is_dir() else ():
        media_type = MEDIA_TYPES.get(path.name.rpartition(".")[2])
        if media_type and path.is_file():
            found[path.name] = StaticFile(path.read_bytes(), media_type)
    return found


class Explorer:
    """Endpoints of the explorer over a registry of runs."""

    def __init__(self, registry: RunRegistry, queue: Queue, timeout: float = TIMEOUT) -> None:
        self.registry = registry
        self.queue = queue
        self.timeout = timeout
        self.files = static_files()

    def routes(self) -> list[Route]:
        """Return the table of paths and endpoints."""
        return [
            Route("/", self.file, methods=["GET"]),
            Route("/static/{name}", self.file, methods=["GET"]),
            Route("/api/runs", self.runs, methods=["GET"]),
            Route("/api/runs/{run}", self.run, methods=["GET"]),
            Route("/api/runs/{run}/examples/{n}", self.example, methods=["GET"]),
            Route("/api/runs/{run}/{action}", self.action, methods=["POST"]),
        ]

    async def file(self, request: Request) -> Response:
        """Send a file of the page."""
        name = request.path_params.get("name", "index.html")
        file = self.files.get(name)  # a table of names, so that ".." is just a name that is not there
        if file is None:
            raise HTTPException(404)
        return Response(file.content, media_type=file.media_type)

    async def runs(self, request: Request) -> Response:
        """List the runs; nothing is opened for this."""
        return _json_response(_to_bytes({"runs": list_runs(self.registry), "version": __version__}))

    async def run(self, request: Request) -> Response:
        """Describe a run."""
        number = self._run_number(request)
        return await self._compute(request, lambda: describe_run(number, self._open(number)))

    async def example(self, request: Request) -> Response:
        """Send a test image of a run."""
        number = self._run_number(request)
        n = _parse_number(request.path_params["n"])

        # How many examples there are is known once the run is open, so this 404 comes from the worker
        def work() -> JsonObject:
            run = self._open(number)
            if n >= len(run.examples):
                raise HTTPException(404)
            return get_example(n, run)

        return await self._compute(request, work)

    async def action(self, request: Request) -> Response:
        """Compute what the body asks of a run."""
        # Refuse what does not exist before the body is read
        number = self._run_number(request)
        action = ACTIONS.get(request.path_params["action"])
        if action is None:
            raise HTTPException(404)
        body = await read_json_body(request, self.timeout)

        def work() -> JsonObject:
            # Parsing half a megabyte is work, too: in the worker, not in the event loop
            parsed = parse_request(action.request, body)
            return action.respond(self._open(number), parsed)

        return await self._compute(request, work)

    def _run_number(self, request: Request) -> int:
        number = _parse_number(request.path_params["run"])
        if number >= len(self.registry.entries):
            raise HTTPException(404)
        return number

    def _open(self, number: int) -> OpenRun:
        try:
            return self.registry.open(number)
        except (TorchcapsError, OSError) as error:
            raise UnreadableRunError(str(error)) from None

    async def _compute(self, request: Request, work: Callable[[], JsonObject]) -> Response:
        """Run `work`, and the encoding of its result, in the worker's thread."""
        try:
            content = await self.queue.run(lambda: _to_bytes(work()), lambda: _until_disconnect(request))
        # An error of the request is 400; a run that cannot be read is not the client's fault
        except (QueueFullError, ClientGoneError):
            return _error("too many requests at once; try again in a second", 503, {"retry-after": "1"})
        except TorchcapsError as error:
            return _error(str(error), 400)
        except UnreadableRunError as error:
            return _error(str(error), 500)
        return _json_response(content)


def build_application(
    registry: RunRegistry,
    hosts: Sequence[str],
    queue: Queue,
    *,
    ready: Callable[[], object],
    timeout: float = TIMEOUT,
) -> ASGIApp:
    """Build the ASGI application; the first run is opened as soon as it starts.

    Args:
        registry: the runs that it offers.
        hosts: names by which it may be called; any other gets 400.
        queue: where computations wait.
        ready: called when the application starts.
        timeout: seconds that a request's body may take.
    """

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        # Takes its turn in the queue: a request that comes first thing waits for it instead of loading the run again
        queue.submit(lambda: _warm_up(registry))
        ready()
        yield
        queue.close()

    # The headers come last, around starlette's own error responses
    app = Starlette(
        routes=Explorer(registry, queue, timeout).routes(),
        middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=list(hosts), www_redirect=False)],
        exception_handlers={HTTPException: _http_error, Exception: _unexpected_error},
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False  # a path exists or it is 404
    return SecurityHeaders(app)


def _warm_up(registry: RunRegistry) -> None:
    """Open the first run and run it once, so that what compiles at the first call is compiled."""
    run = registry.open(0)
    image = torch.zeros(run.trained.model.spec[:3])
    run.view.infer(run.examples.to_input(image.unsqueeze(0))[0])


async def _until_disconnect(request: Request) -> None:
    """Return when the client has gone."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _parse_number(text: str) -> int:
    """Parse a number in a path; anything else is a path that does not exist."""
    # isdigit alone accepts digits of other scripts; the length bounds what int has to parse
    if not (text.isascii() and text.isdigit() and len(text) < 7):
        raise HTTPException(404)
    return int(text)


def _to_bytes(content: JsonObject) -> bytes:
    # A NaN would not be JSON: `to_json` has replaced them, and one that slipped through is an error here
    return json.dumps(content, allow_nan=False, separators=(",", ":")).encode()


def _json_response(content: bytes, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(content, status, headers, "application/json")


def _error(text: str, status: int, headers: Mapping[str, str] | None = None) -> Response:
    return _json_response(_to_bytes({"error": " ".join(text.split())}), status, headers)


async def _http_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException), "starlette chose this handler by type"
    return _error(error.detail, error.status_code, error.headers)


async def _unexpected_error(_: Request, error: Exception) -> Response:
    return _error(f"unexpected {type(error).__name__}: {str(error)[:200]}", 500)
