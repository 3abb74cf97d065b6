"""Many at once: nothing is lost, a full queue says so, and whoever hangs up is not worked for."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from support.explorer_server import Address, all_of, ask, say, served, tiny_run
from torchcaps.explore.queue import FullError, GoneError, Queue
from torchcaps.explore.run_registry import find_runs

CLIENTS, EACH = 50, 4
DRAW = "/api/runs/0/draw"


@pytest.fixture(scope="module")
def shelf(tmp_path_factory):
    return find_runs([tiny_run(tmp_path_factory.mktemp("run") / "a")])


def insist(address: Address, n: int) -> tuple[int, object]:
    """How often a slider move was turned away before it was answered, and the answer."""
    body = {"capsule": n % 10, "pose": [n / 1000, 0.1, 0.2, 0.3]}
    for turned_away in range(1000):
        status, headers, answer = ask(address, "POST", DRAW, body)
        if status == 200:
            return turned_away, answer
        assert status == 503 and headers["retry-after"] == "1" and set(answer) == {"error"}, answer
        time.sleep(0.05)
    raise AssertionError("never answered")


def test_fifty_clients_lose_nothing(shelf):
    queue = Queue()
    with served(shelf, queue) as address, ThreadPoolExecutor(CLIENTS) as clients:
        answers = list(clients.map(lambda n: insist(address, n), range(CLIENTS * EACH)))
        alone = [insist(address, n)[1] for n in range(0, CLIENTS * EACH, 37)]
    assert [turned_away for turned_away, _ in answers] == [0] * len(answers)  # 50 never fill 64 places
    assert [answer for _, answer in answers][::37] == alone
    assert queue.taken == 0


def test_a_small_queue_turns_away_and_a_retry_succeeds(shelf):
    queue = Queue(waiting=2)
    with served(shelf, queue) as address, ThreadPoolExecutor(20) as clients:
        answers = list(clients.map(lambda n: insist(address, n), range(40)))
    assert len(answers) == 40 and all(answer for _, answer in answers)


def test_a_full_queue_is_503_at_once_and_recovers(shelf):
    queue, begun, go_on = Queue(waiting=1), threading.Event(), threading.Event()

    def held():
        begun.set()
        go_on.wait(60)

    with served(shelf, queue) as address, ThreadPoolExecutor(2) as clients:
        insist(address, 0)
        queue.begin(held)
        assert begun.wait(60)
        waiting = [clients.submit(insist, address, n) for n in (1, 2)]
        until(lambda: queue.taken == 2)
        status, headers, answer = ask(address, "POST", DRAW, {"capsule": 0, "pose": [0.0] * 4})
        assert (status, headers["retry-after"]) == (503, "1") and "ask again" in answer["error"]
        assert ask(address, "GET", "/api/runs")[0] == 200  # which computes nothing
        go_on.set()
        assert [done.result(60)[0] for done in waiting] == [0, 0]
        assert insist(address, 3)[0] == 0


def test_who_hangs_up_leaves_the_queue(shelf):
    queue, begun, go_on = Queue(waiting=4), threading.Event(), threading.Event()

    def held():
        begun.set()
        go_on.wait(60)

    with served(shelf, queue) as address:
        insist(address, 0)
        queue.begin(held)
        assert begun.wait(60)
        with say(address, f"GET /api/runs/0 HTTP/1.1\r\nHost: {address.host}:{address.port}\r\n\r\n".encode()):
            until(lambda: queue.taken == 1)
        until(lambda: queue.taken == 0)
        go_on.set()
        assert insist(address, 1)[0] == 0


def test_requests_down_one_connection_are_answered_in_turn(shelf):
    with served(shelf) as address:
        one = f"GET /api/runs HTTP/1.1\r\nHost: {address.host}:{address.port}\r\n"
        with say(address, (f"{one}\r\n" * 9 + f"{one}Connection: close\r\n\r\n").encode()) as connection:
            assert all_of(connection).count(b"HTTP/1.1 200 ") == 10


def until(so) -> None:
    """Wait until something is so; a test that never gets there fails."""
    for _ in range(6000):
        if so():
            return
        time.sleep(0.01)
    raise AssertionError("it never came about")


# ---------------------------------------------------------------------------------------------- the queue alone


def with_queue(waiting: int, talk):
    """What comes of a coroutine that is given a queue."""
    queue = Queue(waiting)
    try:
        return asyncio.run(talk(queue))
    finally:
        queue.close()


async def never() -> None:
    await asyncio.Event().wait()


def test_the_queue_keeps_its_order_and_passes_errors_on():
    async def talk(queue):
        done = []
        await asyncio.gather(*(queue.answer(lambda n=n: done.append(n), never) for n in range(20)))
        with pytest.raises(ZeroDivisionError):
            await queue.answer(lambda: 1 // 0, never)
        return done, queue.taken

    assert with_queue(64, talk) == (list(range(20)), 0)


def test_the_queue_has_so_many_places():
    async def talk(queue):
        go_on = threading.Event()
        held = [asyncio.ensure_future(queue.answer(lambda: go_on.wait(60), never)) for _ in range(3)]
        await asyncio.sleep(0)
        with pytest.raises(FullError):
            await queue.answer(lambda: None, never)
        go_on.set()
        assert all(await asyncio.gather(*held))
        return await queue.answer(lambda: "room again", never)

    assert with_queue(2, talk) == "room again"


def test_work_that_nobody_waits_for_is_dropped_unless_it_has_begun():
    async def talk(queue):
        go_on, hang_up, begun, ran = threading.Event(), asyncio.Event(), asyncio.Event(), []
        loop = asyncio.get_running_loop()

        def first():
            loop.call_soon_threadsafe(begun.set)
            go_on.wait(60)
            return "to its end"

        one = asyncio.ensure_future(queue.answer(first, hang_up.wait))
        two = asyncio.ensure_future(queue.answer(lambda: ran.append(1), hang_up.wait))
        await begun.wait()
        hang_up.set()
        with pytest.raises(GoneError):
            await two
        go_on.set()
        return await one, ran

    assert with_queue(4, talk) == ("to its end", [])
