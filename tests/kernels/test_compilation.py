"""When loops are compiled: what is told, what is found on disk, and how threads wait for each other inside a loop."""

from __future__ import annotations

import importlib.util
import pickle
import shutil
import sys
from pathlib import Path

import numba
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from torchcaps.kernels import loops
from torchcaps.kernels.compilation import when_compiling
from torchcaps.kernels.loops.barrier import wait_for_all
from torchcaps.kernels.threads import ThreadRank, piece_of, run_together, split_range

DOUBLED = """
from torchcaps.kernels.loops import loop

@loop
def doubled(x):
    return 2 * x
"""


def double(path: Path) -> int:
    """Import the file as a new module among the loops, and return twice 21; how often compiling was announced."""
    said: list[str] = []
    spec = importlib.util.spec_from_file_location("torchcaps.kernels.loops.doubled", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
        with when_compiling(lambda: said.append("compiling")):
            assert module.doubled(21) == 42
    finally:
        del sys.modules[spec.name]
    return len(said)


def test_compiling_is_announced_and_code_on_disk_is_not_compiled(tmp_path, monkeypatch):
    path = tmp_path / "doubled.py"
    path.write_text(DOUBLED)
    assert double(path) == 1
    assert double(path) == 0
    # Another date is the same code; another file among the loops is not
    path.touch()
    assert double(path) == 0
    monkeypatch.setattr(loops, "source_stamp", lambda: b"other")
    assert double(path) == 1


@pytest.mark.parametrize(
    "content",
    [b"", b"cut", pickle.dumps(numba.__version__) + b"cnumba\nno_such_record\n."],
    ids=["empty", "cut", "gone"],
)
def test_a_list_of_compiled_code_that_cannot_be_read_is_written_anew(tmp_path, content):
    """Such as that of an earlier version of the package, which names a record that has another name now."""
    path = tmp_path / "doubled.py"
    path.write_text(DOUBLED)
    assert double(path) == 1
    (index,) = tmp_path.rglob("*.nbi")
    index.write_bytes(content)
    assert double(path) == 1
    assert double(path) == 0


def test_the_cache_belongs_to_the_content_of_all_loops(tmp_path, monkeypatch):
    copy = tmp_path / "loops"
    shutil.copytree(Path(loops.__file__).parent, copy, ignore=shutil.ignore_patterns("__pycache__"))
    before = loops.source_stamp()
    monkeypatch.setattr(loops, "__file__", str(copy / "__init__.py"))
    assert loops.source_stamp.__wrapped__() == before
    with (copy / "simd.py").open("a") as file:
        file.write("\n")
    assert loops.source_stamp.__wrapped__() != before


@numba.njit(nogil=True)
def _rounds(own: int, threads: int, arrivals: NDArray[np.int64], table: NDArray[np.int64]) -> None:
    for t in range(1, len(table)):
        # The sum of what all threads wrote in the round before, and who wrote it
        table[t, own] = table[t - 1].sum() + own
        wait_for_all(arrivals, threads)


@pytest.fixture
def three_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield 3
    torch.set_num_threads(before)


def test_threads_meet_inside_a_loop(three_threads):
    together = np.zeros((200, three_threads), np.int64)
    run_together(lambda: together, lambda table, thread: _rounds(*thread, table))
    expected = np.zeros((200, three_threads), dtype=object)
    for t in range(1, 200):
        for n in range(three_threads):
            expected[t, n] = (expected[t - 1].sum() + n + 2**63) % 2**64 - 2**63  # integers wrap
    assert (together == expected).all()


@pytest.mark.parametrize("absent", [0, 1])
def test_nobody_waits_for_a_thread_that_fails(three_threads, absent):
    table = np.zeros((5, three_threads), np.int64)

    def work(_: None, thread: ThreadRank) -> None:
        if thread.rank == absent:
            raise ValueError("this thread does not come")
        _rounds(*thread, table)

    with pytest.raises(ValueError, match="does not come"):
        run_together(lambda: None, work)


def test_nobody_waits_for_what_cannot_be_made(three_threads):
    worked = []

    def fail() -> None:
        raise ValueError("nothing was made")

    with pytest.raises(ValueError, match="nothing was made"):
        run_together(fail, lambda *_: worked.append(1))
    # The threads are free again
    run_together(lambda: None, lambda _, thread: worked.append(thread.rank))
    assert sorted(worked) == [0, 1, 2]


def test_pieces_are_the_runs_of_a_range():
    assert [piece_of(7, n, 3) for n in range(3)] == split_range(7, 3) == [(0, 2), (2, 4), (4, 7)]
    assert [stop - start for start, stop in (piece_of(2, n, 3) for n in range(3))].count(0) == 1
