"""How long a slider move takes on the explorer's page, alone and while many clients ask, and that none is lost.

python -m benchmarks.explore [--clients 50] [--requests 40] [--json benchmarks/explore.json]

The server runs in a process of its own on loopback, with the run that comes with the package or, without one, a fresh
small CapsNet. First one client moves a slider (POST draw) again and again; then all clients do, each as soon as it has
its answer. A move that is turned away (503) is made again a little later, and counts from its first try. `lost` are
moves without an answer; the exit code is 1 if there are any.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import platform
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.timing import busy
from torchcaps import __version__
from torchcaps.explore.run_registry import shipped_run
from torchcaps.train import load_recipe
from torchcaps.train.run import Run
from torchcaps.train.train_state import build_training
from torchcaps.types import ImageSpec
from torchcaps.utils.files import write_atomically

FRESH = "capsnet-mnist-small"
PATIENCE = 60.0
PAUSE = 0.05
"""Seconds until a move that was turned away is made again."""


class Move(NamedTuple):
    """A slider move: seconds until its answer (None: there was none), and how often it was turned away."""

    seconds: float | None
    refusals: int


class Client:
    """One browser: a connection that is kept, and made anew when the server has closed it."""

    def __init__(self, port: int) -> None:
        self.connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)

    def ask(self, path: str, body: Any = None) -> tuple[int, bytes]:
        """Status and answer."""
        sent = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"} if sent else {}
        self.connection.request("POST" if sent else "GET", path, sent, headers)
        response = self.connection.getresponse()
        return response.status, response.read()

    def facts(self) -> dict[str, Any]:
        """Of the first run, which is in memory then."""
        status, answer = self.ask("/api/runs/0")
        if status != 200:
            raise SystemExit(f"explore: no run to ask: {answer.decode()}")
        found: dict[str, Any] = json.loads(answer)
        return found

    def move(self, capsule: int, pose: Sequence[float]) -> Move:
        """Until it is answered or fails."""
        start = time.perf_counter()
        refusals = 0
        try:
            while time.perf_counter() - start < PATIENCE:
                status, _ = self.ask("/api/runs/0/draw", {"capsule": capsule, "pose": pose})
                if status != 503:
                    return Move(time.perf_counter() - start if status == 200 else None, refusals)
                refusals += 1
                time.sleep(PAUSE)
        except (OSError, http.client.HTTPException):
            self.connection.close()
        return Move(None, refusals)


@contextmanager
def served(run: Path | None) -> Iterator[int]:
    """The port of `torchcaps explore` in a process of its own."""
    words = [sys.executable, "-m", "torchcaps", "explore", *([str(run)] if run else []), "--no-browser"]
    with tempfile.TemporaryDirectory() as empty, subprocess.Popen(
        words, stdout=subprocess.PIPE, text=True, cwd=empty
    ) as process:  # fmt: skip
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line.startswith("torchcaps explore: http://"):
                raise SystemExit(f"explore: the server did not start: {line!r}")
            yield int(line.strip().strip("/").rpartition(":")[2])
        finally:
            process.terminate()


def fresh_run(folder: Path) -> Path:
    """A run that has taken no step: it draws as fast as any."""
    recipe = load_recipe(FRESH)
    run = Run(folder, recipe)
    run.write_recipe()
    run.save(build_training(recipe, ImageSpec(1, 28, 28, 10), images=1000).checkpoint(run.recipe))
    return folder


def moves(client: Client, number: int, facts: dict[str, Any], count: int) -> list[Move]:
    """A slider dragged to and fro."""
    capsule = number % len(facts["names"])
    found = []
    for n in range(count):
        pose = [0.0] * facts["dimension"]
        pose[number % len(pose)] = 0.5 * (n % 21 - 10) / 10
        found.append(client.move(capsule, pose))
    return found


def measured(port: int, clients: int, requests: int) -> dict[str, Any]:
    """So many clients at once, each with so many moves."""
    facts = Client(port).facts()
    gate = threading.Barrier(clients + 1)

    def drag(number: int) -> list[Move]:
        client = Client(port)
        gate.wait()
        return moves(client, number, facts, requests)

    with ThreadPoolExecutor(clients) as pool:
        under_way = [pool.submit(drag, number) for number in range(clients)]
        gate.wait()
        start = time.perf_counter()
        found = [move for one in under_way for move in one.result()]
        seconds = time.perf_counter() - start
    return {"clients": clients, "moves": len(found), **summary(found), "moves_per_second": len(found) / seconds}


def summary(found: Sequence[Move]) -> dict[str, Any]:
    """Milliseconds of the moves that were answered, refusals, and what was lost.

    >>> summary([Move(0.002, 0), Move(0.001, 1), Move(None, 0)])
    {'p50_ms': 1.0, 'p95_ms': 2.0, 'max_ms': 2.0, 'turned_away': 1, 'lost': 1}
    """
    times = sorted(1000 * move.seconds for move in found if move.seconds is not None) or [float("nan")]

    def quantile(share: float) -> float:
        return times[max(0, -int(-share * len(times) // 1) - 1)]

    lost = sum(move.seconds is None for move in found)
    refusals = sum(move.refusals for move in found)
    return {
        "p50_ms": quantile(0.5), "p95_ms": quantile(0.95), "max_ms": times[-1], "turned_away": refusals, "lost": lost,
    }  # fmt: skip


def machine() -> dict[str, Any]:
    """What the figures belong to."""
    packages = {name: version(name) for name in ("starlette", "uvicorn", "torch", "numpy")}
    python = platform.python_version()
    return {"cpus": os.cpu_count(), "threads": torch.get_num_threads(), "python": python, "torchcaps": __version__,
            **packages, "warning": busy()}  # fmt: skip


def report(clients: int, requests: int) -> dict[str, Any]:
    """All figures."""
    about = machine()
    with tempfile.TemporaryDirectory() as folder:
        shipped = shipped_run()
        run = None if shipped else fresh_run(Path(folder) / "fresh")
        with served(run) as port:
            moves(Client(port), 0, Client(port).facts(), 5)  # the first ones find everything cold
            alone = measured(port, 1, requests)
            load = measured(port, clients, requests)
    return {"machine": about, "run": shipped.name if shipped else FRESH, "alone": alone, "load": load}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--requests", type=int, default=40, help="slider moves of each client")
    parser.add_argument("--json", type=Path, help="file to write the figures into")
    given = parser.parse_args(arguments)
    if busy():
        print(f"explore: {busy()}", file=sys.stderr)
    found = report(given.clients, given.requests)
    text = json.dumps(found, indent=1) + "\n"
    print(text, end="")
    if given.json:
        write_atomically(given.json, [text.encode()])
    return 1 if found["alone"]["lost"] + found["load"]["lost"] else 0


if __name__ == "__main__":
    sys.exit(main())
