"""The explorer's routes: a table of paths before the shelf of runs.

    GET  /                                  the page
    GET  /static/NAME                       its files, from a table made at the start
    GET  /api/runs                          the runs
    GET  /api/runs/N                        what is known of one
    GET  /api/runs/N/examples/M             an image to look at
    POST /api/runs/N/QUESTION               look, routing, draw, sweep, sample, wall

All that computes goes through one queue; an error is {"error": "one line"}.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from importlib import resources
from typing import Any, NamedTuple

import torch
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from torchcaps import __version__
from torchcaps.errors import TorchcapsError
from torchcaps.explore.handlers import QUESTIONS, Answer, example, facts, runs
from torchcaps.explore.messages import read
from torchcaps.explore.middleware import PATIENCE, App, Guards
from torchcaps.explore.queue import FullError, GoneError, Queue
from torchcaps.explore.run_registry import OpenRun, RunRegistry

__all__ = ["Explorer", "application", "files"]

TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "json": "application/json",
    "svg": "image/svg+xml",
    "png": "image/png",
    "ico": "image/x-icon",
    "woff2": "font/woff2",
}
"""The files that are served, by the end of their names."""


class UnopenedError(Exception):
    """A run that cannot be read, and why."""


class File(NamedTuple):
    """A file of the page."""

    content: bytes
    media_type: str


def files() -> dict[str, File]:
    """The page's files by name."""
    folder = resources.files("torchcaps") / "explore" / "static"
    found = {}
    for path in folder.iterdir() if folder.is_dir() else ():
        media_type = TYPES.get(path.name.rpartition(".")[2])
        if media_type and path.is_file():
            found[path.name] = File(path.read_bytes(), media_type)
    return found


class Explorer:
    """The endpoints."""

    def __init__(self, shelf: RunRegistry, queue: Queue) -> None:
        self.shelf = shelf
        self.queue = queue
        self.files = files()

    def routes(self) -> list[Route]:
        """Path -> endpoint."""
        return [
            Route("/", self.file, methods=["GET"]),
            Route("/static/{name}", self.file, methods=["GET"]),
            Route("/api/runs", self.runs, methods=["GET"]),
            Route("/api/runs/{run}", self.facts, methods=["GET"]),
            Route("/api/runs/{run}/examples/{n}", self.example, methods=["GET"]),
            Route("/api/runs/{run}/{question}", self.question, methods=["POST"]),
        ]

    async def file(self, request: Request) -> Response:
        name = request.path_params.get("name", "index.html")
        file = self.files.get(name)
        if file is None:
            raise HTTPException(404)
        return Response(file.content, media_type=file.media_type)

    async def runs(self, request: Request) -> Response:
        return _reply(_encoded({"runs": runs(self.shelf), "version": __version__}))

    async def facts(self, request: Request) -> Response:
        number = self._run(request)
        return await self._answer(request, lambda: facts(number, self._open(number)))

    async def example(self, request: Request) -> Response:
        number = self._run(request)
        n = _number(request.path_params["n"])

        def work() -> Answer:
            opened = self._open(number)
            if n >= len(opened.examples):
                raise HTTPException(404)
            return example(n, opened)

        return await self._answer(request, work)

    async def question(self, request: Request) -> Response:
        number = self._run(request)
        question = QUESTIONS.get(request.path_params["question"])
        if question is None:
            raise HTTPException(404)
        body = await request.body()

        def work() -> Answer:
            asked = read(question.body, body)
            return question.answer(self._open(number), asked)

        return await self._answer(request, work)

    def _run(self, request: Request) -> int:
        number = _number(request.path_params["run"])
        if number >= len(self.shelf.entries):
            raise HTTPException(404)
        return number

    def _open(self, number: int) -> OpenRun:
        try:
            return self.shelf.open(number)
        except (TorchcapsError, OSError) as error:
            raise UnopenedError(str(error)) from None

    async def _answer(self, request: Request, work: Callable[[], Answer]) -> Response:
        """What comes of some work, which is done and written down in the worker's thread."""
        try:
            return _reply(await self.queue.answer(lambda: _encoded(work()), lambda: _hung_up(request)))
        except (FullError, GoneError):
            return _reply(_line("too many ask at once; ask again in a second"), 503, {"retry-after": "1"})
        except TorchcapsError as error:
            return _reply(_line(str(error)), 400)
        except UnopenedError as error:
            return _reply(_line(str(error)), 500)


def application(shelf: RunRegistry, origins: frozenset[str], queue: Queue, patience: float = PATIENCE) -> App:
    """The ASGI application; it opens the first run as soon as it starts."""

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        queue.begin(lambda: _warm(shelf))
        yield
        queue.close()

    handlers: dict[Any, Any] = {HTTPException: _refused, Exception: _unexpected}
    app = Starlette(routes=Explorer(shelf, queue).routes(), exception_handlers=handlers, lifespan=lifespan)
    app.router.redirect_slashes = False
    return Guards(app, origins, patience)


def _warm(shelf: RunRegistry) -> None:
    """Open the first run and let it look once, so that what is compiled at the first call is."""
    opened = shelf.open(0)
    image = torch.zeros(opened.run.model.spec[:3])
    opened.subject.infer(opened.examples.prepared(image.unsqueeze(0))[0])


async def _hung_up(request: Request) -> None:
    """Come back when the client has gone."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _number(text: str) -> int:
    """A number in a path; what is none is not found."""
    if not (text.isascii() and text.isdigit() and len(text) < 7):
        raise HTTPException(404)
    return int(text)


def _encoded(answer: Answer) -> bytes:
    return json.dumps(answer, allow_nan=False, separators=(",", ":")).encode()


def _line(text: str) -> bytes:
    return _encoded({"error": " ".join(text.split())})


def _reply(content: bytes, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(content, status, headers, "application/json")


async def _refused(_: Request, error: HTTPException) -> Response:
    return _reply(_line(error.detail), error.status_code, dict(error.headers or {}))


async def _unexpected(_: Request, error: Exception) -> Response:
    return _reply(_line(f"unexpected {type(error).__name__}: {str(error)[:200]}"), 500)
