"""Many requests at once: none is lost, a full queue refuses at once, and nothing is computed for who has gone."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from benchmarks.explore import measure_models

from support.explorer_server import Address, ask, connect, raw_request, read_all, served, tiny_run
from torchcaps.explore.queue import ClientGoneError, Queue
from torchcaps.explore.run_registry import find_runs

DRAW = "/api/runs/0/draw"


@pytest.fixture(scope="module")
def registry(tmp_path_factory):
    return find_runs([tiny_run(tmp_path_factory.mktemp("run") / "a")])


def draw(address: Address, n: int) -> tuple[int, object]:
    """How often a slider move was refused before it was answered, and the answer."""
    body = {"capsule": n % 10, "pose": [n / 1000, 0.1, 0.2, 0.3]}
    for refusals in range(1000):
        status, headers, answer = ask(address, "POST", DRAW, body)
        if status == 200:
            return refusals, answer
        assert status == 503 and headers["retry-after"] == "1" and set(answer) == {"error"}, answer
        time.sleep(0.05)
    raise AssertionError("never answered")


@contextmanager
def held(queue: Queue):
    """The worker is busy within the block."""
    begun, go_on = threading.Event(), threading.Event()
    queue.submit(lambda: (begun.set(), go_on.wait(60)))
    assert begun.wait(60)
    try:
        yield
    finally:
        go_on.set()


def until(condition) -> None:
    """Wait until a condition holds; a test that never gets there fails."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "it never came about"
        time.sleep(0.01)


@pytest.mark.parametrize("waiting", [64, 2])
def test_fifty_clients_lose_nothing(registry, waiting):
    queue = Queue(waiting)
    with served(registry, queue) as address, ThreadPoolExecutor(50) as clients:
        answers = list(clients.map(lambda n: draw(address, n), range(200 if waiting == 64 else 100)))
        alone = [draw(address, n)[1] for n in range(0, len(answers), 37)]
    assert waiting == 2 or not any(refusals for refusals, _ in answers)  # 50 never fill 64 places
    assert [answer for _, answer in answers][::37] == alone
    assert queue.size == 0


def test_the_benchmark_moves_both_kinds_of_slider(registry):
    with served(registry) as address:
        (row,) = measure_models(address.port, count=1, requests=2)
    assert row["run"] == registry.entries[0].name and row.keys() == {"run", "input", "pose"}
    for kind in ("input", "pose"):
        assert row[kind]["lost"] == 0 and 0 < row[kind]["p50_ms"] <= row[kind]["p95_ms"] <= row[kind]["max_ms"]


def test_a_full_queue_is_503_at_once_and_recovers(registry):
    queue = Queue(waiting=1)
    with served(registry, queue) as address, ThreadPoolExecutor(2) as clients:
        draw(address, 0)
        with held(queue):
            waiting = [clients.submit(draw, address, n) for n in (1, 2)]
            until(lambda: queue.size == 2)
            status, headers, answer = ask(address, "POST", DRAW, {"capsule": 0, "pose": [0.0] * 4})
            assert (status, headers["retry-after"]) == (503, "1") and "try again" in answer["error"]
            assert ask(address, "GET", "/api/runs")[0] == 200  # which computes nothing
        assert [done.result(60)[0] for done in waiting] == [0, 0]
        assert draw(address, 3)[0] == 0


def test_who_disconnects_leaves_the_queue(registry):
    queue = Queue(waiting=4)
    with served(registry, queue) as address:
        draw(address, 0)
        with held(queue):
            with connect(address, raw_request(address, "/api/runs/0", method="GET")):
                until(lambda: queue.size == 1)
            until(lambda: queue.size == 0)
        assert draw(address, 1)[0] == 0


def test_requests_on_one_connection_are_answered_in_turn(registry):
    with served(registry) as address:
        requests = [raw_request(address, "/api/runs", method="GET")] * 9
        last = raw_request(address, "/api/runs", "Connection: close", method="GET")
        with connect(address, *requests, last) as connection:
            assert read_all(connection).count(b"HTTP/1.1 200 ") == 10


def test_abandoned_work_is_dropped_unless_it_has_begun():
    async def talk(queue):
        disconnect, done = asyncio.Event(), []
        begun, go_on = threading.Event(), threading.Event()
        one = asyncio.ensure_future(queue.run(lambda: (begun.set(), go_on.wait(60))[1], disconnect.wait))
        two = asyncio.ensure_future(queue.run(lambda: done.append(1), disconnect.wait))
        await asyncio.to_thread(begun.wait)
        disconnect.set()
        with pytest.raises(ClientGoneError):
            await two
        go_on.set()
        return await one, done

    assert asyncio.run(talk(Queue(4))) == (True, [])
