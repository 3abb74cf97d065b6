"""The explorer on a free port in a thread of its own, and how the tests talk to it."""

from __future__ import annotations

import http.client
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from support.tiny_recipe import tiny
from torchcaps.explore.middleware import TIMEOUT
from torchcaps.explore.queue import Queue
from torchcaps.explore.run_registry import RunRegistry
from torchcaps.explore.server import build_server, listen
from torchcaps.train.checkpoint import Checkpoint
from torchcaps.train.recipe import Recipe
from torchcaps.train.run import Run
from torchcaps.train.train_state import build_training
from torchcaps.types import ImageSpec


class Address(NamedTuple):
    host: str
    port: int

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"


@contextmanager
def served(registry: RunRegistry, queue: Queue | None = None, timeout: int = TIMEOUT) -> Iterator[Address]:
    """A real server for as long as the block lasts."""
    ready = threading.Event()
    with listen("127.0.0.1", 0) as listener:
        address = Address("127.0.0.1", listener.getsockname()[1])
        server = build_server(registry, "127.0.0.1", ready.set, queue=queue, timeout=timeout)
        thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
        thread.start()
        try:
            assert ready.wait(60), "the server did not start"
            yield address
        finally:
            server.should_exit = True
            thread.join(20)
            assert not thread.is_alive(), "the server did not stop"


def ask(
    address: Address, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
) -> tuple[int, dict[str, str], Any]:
    """Status, headers (names in lower case) and the answer: what JSON says, or bytes. `body`: bytes, or what JSON can
    hold."""
    connection = http.client.HTTPConnection(address.host, address.port, timeout=60)
    try:
        given = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        kind = {"Content-Type": "application/json"} if body is not None else {}
        connection.request(method, path, given, {**kind, **(headers or {})})
        response = connection.getresponse()
        answer, names = response.read(), {name.lower(): value for name, value in response.getheaders()}
        is_json = names.get("content-type", "").startswith("application/json") and answer
        return response.status, names, json.loads(answer) if is_json else answer
    finally:
        connection.close()


def raw_request(address: Address, path: str, *headers: str, method: str = "POST") -> bytes:
    """The head of a request."""
    first = [f"{method} {path} HTTP/1.1", f"Host: {address.host}:{address.port}", "Content-Type: application/json"]
    return ("\r\n".join([*first, *headers]) + "\r\n\r\n").encode()


def connect(address: Address, *pieces: bytes) -> socket.socket:
    """A socket into which these bytes have been sent."""
    connection = socket.create_connection(address, timeout=60)
    for piece in pieces:
        connection.sendall(piece)
    return connection


def read_all(connection: socket.socket) -> bytes:
    """All that comes until the other end closes, or cuts the connection."""
    received = bytearray()
    try:
        while piece := connection.recv(65536):
            received += piece
    except ConnectionResetError:
        pass
    return bytes(received)


def tiny_run(folder: Path, **over: Any) -> Path:
    """The folder of a run of the tiny recipe that has taken no step; of other data, for images of 16x16."""
    recipe: Recipe = tiny(**over)
    run, spec = Run(folder, recipe), ImageSpec(1, 16, 16, 10)
    run.write_recipe()
    torch.manual_seed(0)
    checkpoint: Checkpoint = build_training(recipe, spec, images=1000).checkpoint(run.recipe)
    run.save(checkpoint)
    return folder
