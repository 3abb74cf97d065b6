"""Measure the time of a slider move on the explorer's page, alone and under load, and that no request is lost.

python -m benchmarks.explore [--clients 50] [--requests 40] [--json benchmarks/explore.json]

The server runs in a process of its own on loopback, with the models that ship with the package or, without any, an
untrained small CapsNet. First one client moves sliders of every model: one that disturbs the input, whose every move is
another image to infer (POST infer), and one of a pose (POST draw) where the model decodes. Then all clients move a
slider of the first model's poses, each as soon as it has its response. A refused move (503) is sent again a little
later, and its time counts from the first attempt. Moves without any response are `lost`; the exit code is 1 if there
are any.
"""

from __future__ import annotations

import argparse
import base64
import http.client
import json
import os
import platform
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.timing import busy
from torchcaps import __version__
from torchcaps.explore.run_registry import shipped_runs
from torchcaps.train import load_recipe
from torchcaps.train.run import Run
from torchcaps.train.train_state import build_training
from torchcaps.types import ImageSpec
from torchcaps.utils.files import write_atomically

FRESH = "capsnet-mnist-small"
"""Recipe of the untrained model."""
TIMEOUT = 60.0
"""Seconds after which a move counts as lost."""
PAUSE = 0.05
"""Seconds until a refused move is sent again."""


class Move(NamedTuple):
    """A slider move: seconds until its response (None if there was none), and how often it was refused."""

    seconds: float | None
    refusals: int


class RunFacts(NamedTuple):
    """What a client must know of a run to move its sliders."""

    number: int
    name: str
    capsules: int
    dimension: int
    has_decoder: bool
    image: Mapping[str, object]


class Client:
    """One browser: a persistent connection, which is opened again when the server has closed it."""

    def __init__(self, port: int) -> None:
        self.connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT)

    def request(self, path: str, body: Mapping[str, object] | None = None) -> tuple[int, bytes]:
        """Send a request, a POST if there is a body; return the status and the content of the response."""
        content = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"} if content else {}
        self.connection.request("POST" if content else "GET", path, content, headers)
        response = self.connection.getresponse()
        return response.status, response.read()

    def describe_run(self, number: int = 0) -> RunFacts:
        """Open a run and return its facts, with its first test image."""
        status, content = self.request(f"/api/runs/{number}")
        if status != 200:
            raise SystemExit(f"explore: the run cannot be opened: {content.decode()}")
        facts = json.loads(content)
        image = json.loads(self.request(f"/api/runs/{number}/examples/0")[1])["image"]
        return RunFacts(number, facts["name"], len(facts["names"]), facts["dimension"], facts["has_decoder"], image)

    def move(self, path: str, body: Mapping[str, object]) -> Move:
        """Move a slider, and repeat a refused request until it is answered or fails."""
        start = time.perf_counter()
        refusals = 0
        try:
            while time.perf_counter() - start < TIMEOUT:
                status, _ = self.request(path, body)
                if status != 503:
                    return Move(time.perf_counter() - start if status == 200 else None, refusals)
                refusals += 1
                time.sleep(PAUSE)
        except (OSError, http.client.HTTPException):
            self.connection.close()
        return Move(None, refusals)


@contextmanager
def served(run: Path | None) -> Iterator[int]:
    """Run `torchcaps explore` in a process of its own; yields its port."""
    command = [sys.executable, "-m", "torchcaps", "explore", *([str(run)] if run else []), "--no-browser"]
    with (
        tempfile.TemporaryDirectory() as empty,
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=empty) as process,
    ):
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line.startswith("torchcaps explore: http://"):
                raise SystemExit(f"explore: the server did not start: {line!r}")
            yield int(line.strip().strip("/").rpartition(":")[2])
        finally:
            process.terminate()


def fresh_run(folder: Path) -> Path:
    """Write a run that has taken no step: it decodes as fast as any."""
    recipe = load_recipe(FRESH)
    run = Run(folder, recipe)
    run.write_recipe()
    run.save(build_training(recipe, ImageSpec(1, 28, 28, 10), images=1000).checkpoint(run.recipe))
    return folder


def drag(client: Client, number: int, facts: RunFacts, count: int) -> list[Move]:
    """Drag a slider back and forth in `count` moves; `number` of the client chooses which."""
    found = []
    for n in range(count):
        pose = [0.0] * facts.dimension
        pose[number % len(pose)] = 0.5 * (n % 21 - 10) / 10
        body = {"capsule": number % facts.capsules, "pose": pose}
        found.append(client.move(f"/api/runs/{facts.number}/draw", body))
    return found


def disturb(client: Client, facts: RunFacts, count: int) -> list[Move]:
    """Disturb the input in `count` moves: every image is another one, so that nothing is answered from memory."""
    found = []
    for n in range(count):
        pixels = bytearray(base64.b64decode(str(facts.image["data"])))
        pixels[n % len(pixels)] ^= 255
        image = {"shape": facts.image["shape"], "data": base64.b64encode(bytes(pixels)).decode()}
        found.append(client.move(f"/api/runs/{facts.number}/infer", {"image": image}))
    return found


def measure_models(port: int, count: int, requests: int) -> list[dict[str, object]]:
    """Measure one client on each of the first `count` runs: moves of the input and, with a decoder, of a pose."""
    client = Client(port)
    found: list[dict[str, object]] = []
    for number in range(count):
        facts = client.describe_run(number)
        disturb(client, facts, 3)  # warm-up
        row: dict[str, object] = {"run": facts.name, "input": summary(disturb(client, facts, requests))}
        if facts.has_decoder:
            drag(client, 0, facts, 3)
            row["pose"] = summary(drag(client, 0, facts, requests))
        found.append(row)
    return found


def measure(port: int, clients: int, requests: int) -> dict[str, float]:
    """Measure `clients` at once, each with `requests` moves."""
    facts = Client(port).describe_run()
    start_together = threading.Barrier(clients + 1)

    def run_client(number: int) -> list[Move]:
        client = Client(port)
        start_together.wait()
        return drag(client, number, facts, requests)

    with ThreadPoolExecutor(clients) as pool:
        running = [pool.submit(run_client, number) for number in range(clients)]
        start_together.wait()
        start = time.perf_counter()
        found = [move for one in running for move in one.result()]
        seconds = time.perf_counter() - start
    return {"clients": clients, "moves": len(found), **summary(found), "moves_per_second": len(found) / seconds}


def summary(found: Sequence[Move]) -> dict[str, float]:
    """Summarize moves: milliseconds of those with a response, number of refusals, number of lost moves.

    >>> summary([Move(0.002, 0), Move(0.001, 1), Move(None, 0)])
    {'p50_ms': 1.0, 'p95_ms': 2.0, 'max_ms': 2.0, 'turned_away': 1, 'lost': 1}
    """
    times = sorted(1000 * move.seconds for move in found if move.seconds is not None) or [float("nan")]

    def quantile(share: float) -> float:
        return times[max(0, -int(-share * len(times) // 1) - 1)]

    lost = sum(move.seconds is None for move in found)
    refusals = sum(move.refusals for move in found)
    return {
        "p50_ms": quantile(0.5),
        "p95_ms": quantile(0.95),
        "max_ms": times[-1],
        "turned_away": refusals,
        "lost": lost,
    }


def describe_machine() -> dict[str, object]:
    """Describe the machine and the versions that the figures belong to."""
    return {
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torchcaps": __version__,
        **{name: version(name) for name in ("starlette", "uvicorn", "torch", "numpy")},
        "warning": busy(),
    }


def report(clients: int, requests: int) -> dict[str, object]:
    """Measure one client, then `clients` at once."""
    machine = describe_machine()
    with tempfile.TemporaryDirectory() as folder:
        shipped = next(iter(shipped_runs()), None)
        run = None if shipped else fresh_run(Path(folder) / "fresh")
        with served(run) as port:
            models = measure_models(port, max(1, len(shipped_runs())), requests)
            drag(Client(port), 0, Client(port).describe_run(), 5)  # warm-up
            alone = measure(port, 1, requests)
            load = measure(port, clients, requests)
    name = shipped.name if shipped else FRESH
    lost = alone["lost"] + load["lost"]
    return {"machine": machine, "run": name, "models": models, "alone": alone, "load": load, "lost": lost}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print the figures; return the exit code."""
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
    return 1 if found["lost"] else 0


if __name__ == "__main__":
    sys.exit(main())
