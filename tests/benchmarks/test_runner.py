"""Timing, memory and the rows made of them, with clocks and peaks that are known."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from benchmarks.cases import NAMES, Case, Work, case_of
from benchmarks.cost import Cost
from benchmarks.memory import Peaks, available_mb, measurable, now_mb, peak_mb, peaks
from benchmarks.memory_worker import main as probe_main
from benchmarks.runner import FULL, QUICK, Plan, Timings, extrapolate, measure, plain_batch, rows_of, time_case
from benchmarks.timing import MOST_ROUNDS, SGEMM_FLOP, best_times, busy, sgemm, threads

from torchcaps.errors import RecipeError

ROOT = Path(__file__).parents[2]
linux = pytest.mark.skipif(not measurable(), reason="memory is read from /proc")


class Clock:
    """A clock that only tasks move."""

    def __init__(self) -> None:
        self.now, self.order = 0.0, []

    def task(self, name: str, *seconds: float):
        durations = itertools.chain(seconds, itertools.repeat(seconds[-1]))

        def act() -> None:
            self.order.append(name)
            self.now += next(durations)

        return act

    def __call__(self) -> float:
        return self.now


def test_the_best_time_counts_and_tasks_take_turns():
    clock = Clock()
    tasks = {"a": clock.task("a", 5.0, 1.0, 0.75, 2.0), "b": clock.task("b", 2.0, 3.0)}
    assert best_times(tasks, 12, clock) == {"a": 0.75, "b": 2.0}
    assert clock.order[:6] == list("ababab")


def test_a_task_stops_within_its_time():
    clock = Clock()
    best_times({"a": clock.task("a", 1.0), "b": clock.task("b", 0.25)}, 3, clock)
    assert clock.order.count("a") == 3 and clock.order.count("b") == 12


def test_a_slow_task_runs_twice_and_a_very_slow_one_once():
    clock = Clock()
    best_times({"slow": clock.task("slow", 3.0), "slower": clock.task("slower", 5.0)}, 1, clock)
    assert clock.order == ["slow", "slower", "slow"]


def test_a_task_that_takes_no_time_ends():
    clock = Clock()
    best_times({"a": clock.task("a", 0.0)}, 1, clock)
    assert len(clock.order) == MOST_ROUNDS


def test_sgemm_multiplies_what_its_count_says():
    product = sgemm()()
    assert isinstance(product, torch.Tensor)
    assert 2 * product.shape[0] * product.shape[1] * 1024 == SGEMM_FLOP
    assert float(product.mean()) == pytest.approx(256, rel=0.05)


def test_threads_are_put_back():
    before = torch.get_num_threads()
    with pytest.raises(KeyError), threads(before + 1):
        assert torch.get_num_threads() == before + 1
        raise KeyError
    assert torch.get_num_threads() == before


def test_a_busy_machine_is_told(monkeypatch):
    monkeypatch.setattr(os, "getloadavg", lambda: (3.25, 0, 0))
    assert "load average 3.2" in str(busy())
    monkeypatch.setattr(os, "getloadavg", lambda: (0.1, 9, 9))
    assert busy() is None


def test_plans():
    assert FULL.names == QUICK.names == NAMES
    assert FULL.batches == (1, 32, 128)
    assert Plan(threads=(0, 1, 3)).counts == tuple(sorted({torch.get_num_threads(), 1, 3}, reverse=True))
    for wrong in ({"batches": (0,)}, {"batches": (4, -1)}, {"threads": (-1,)}):
        with pytest.raises(RecipeError, match="is asked for"):
            Plan(**wrong)


TIMINGS = Timings(
    2, 4,
    {
        "ours forward": 0.5, "plain forward": 2.0, "trunk forward": 0.25,
        "ours step": 2.0, "plain step": 10.0, "trunk step": 1.6, "sgemm": SGEMM_FLOP / 1e9,
    },
)  # fmt: skip


def test_rows_by_hand():
    # batch 8; sgemm is 1 GFLOP/s.
    memory = Peaks(1.0, 10.0, 20.0), Peaks(2.0, 30.0, 160.0)
    forward, step = rows_of("x", 8, Cost(2e6, 1e7, 5), [TIMINGS], memory)
    assert (forward.kind, forward.batch, forward.threads, forward.plain_batch) == ("forward", 8, 2, 4)
    assert forward.ms_per_sample == pytest.approx(62.5)
    assert forward.plain_ratio == pytest.approx(4.0)
    assert forward.trunk_ratio == pytest.approx(2.0)
    assert forward.sgemm_gflops == pytest.approx(1.0)
    assert forward.sgemm_fraction == pytest.approx(8 * 2e6 / 0.5 / 1e9)
    assert (forward.peak_mb, forward.memory_ratio) == (10.0, 3.0)
    assert (step.kind, step.peak_mb, step.memory_ratio) == ("step", 20.0, 8.0)
    assert step.plain_ratio == pytest.approx(5.0) and step.trunk_ratio == pytest.approx(1.25)
    assert step.sgemm_fraction == pytest.approx(8 * 1e7 / 2 / 1e9)


def test_what_was_not_measured_is_null():
    seconds = {name: value for name, value in TIMINGS.seconds.items() if "trunk" not in name}
    timing = TIMINGS._replace(seconds=seconds)
    for memory in ((None, None), (None, Peaks(1, 2, 3)), (Peaks(1, 2, 3), None)):
        for row in rows_of("x", 8, Cost(1, 1, 1), [timing], memory):
            assert row.trunk_ratio is None and row.memory_ratio is None
            assert (row.peak_mb is None) == (memory[0] is None)


def test_what_does_not_grow_with_the_batch_is_not_multiplied():
    for fixed, each in ((0.0, 3.0), (100.0, 3.0), (7.0, 0.0)):
        assert extrapolate(128, 8, fixed + 8 * each, fixed + 4 * each) == pytest.approx(fixed + 128 * each)
    assert extrapolate(128, 8, 5.0, 6.0) == 5.0  # noise
    assert extrapolate(10, 5, 25.0, 10.0) == 50.0  # half of 5 is 2


def test_the_plain_path_s_memory_goes_on_along_its_line(monkeypatch):
    asked = []

    def known(name, batch, what, count):
        asked.append((what, batch))
        return Peaks(50, 60 + batch, 300 + 10 * batch)

    monkeypatch.setattr("benchmarks.runner.peaks", known)
    monkeypatch.setattr("benchmarks.runner.measurable", lambda: True)
    monkeypatch.setattr("benchmarks.runner.time_case", lambda case, batch, count, plan: TIMINGS)
    rows = measure(Plan(("dynamic-3x2-2x2",), (32,), (1,)))
    assert sorted(asked) == [("fast", 32), ("plain", 2), ("plain", 4)]
    assert [row.memory_ratio for row in rows] == [1.0, 1.0] and rows[1].peak_mb == 620


def test_a_sitting_extends_the_plain_path_s_times(monkeypatch):
    known = {"ours": 1.0, "plain": 14.0, "half": 12.0}  # plain: 10 and 1 a sample, at 4 and at 2
    monkeypatch.setattr("benchmarks.runner.plain_batch", lambda case, batch, seconds: 4)
    monkeypatch.setattr(
        "benchmarks.runner.best_times", lambda tasks, seconds: {n: known.get(n.split()[0], 1.0) for n in tasks}
    )
    found = time_case(case_of("dynamic-3x2-2x2"), 32, 1, QUICK)
    assert found.plain_batch == 4
    assert found.seconds["plain step"] == found.seconds["plain forward"] == pytest.approx(42.0)
    assert not any("half" in name for name in found.seconds)


def case(votes: int) -> Case:
    work = Work(lambda: None, lambda: None)
    return Case("fake", lambda b: work, lambda b: work, None, lambda: Cost(1, 1, votes))


def test_the_plain_path_gets_a_batch_that_fits_time_and_memory(monkeypatch):
    taken = {"step": 2.0}  # of 2 samples
    monkeypatch.setattr("benchmarks.runner.best_times", lambda tasks, seconds: taken)
    monkeypatch.setattr("benchmarks.runner.available_mb", lambda: 1e9)
    assert plain_batch(case(1), 128, 1000.0) == 128
    assert plain_batch(case(1), 128, 40.0) == 32
    assert plain_batch(case(1), 128, 0.001) == 4
    assert plain_batch(case(1), 1, 0.001) == 1
    monkeypatch.setattr("benchmarks.runner.available_mb", lambda: 2 * 96.0)  # room for 96 MB
    assert plain_batch(case(2**20 // 8), 128, 1000.0) == 8  # 12 MB a sample


def test_a_sitting_times_each_kind_of_each(monkeypatch):
    monkeypatch.setattr("benchmarks.runner.best_times", lambda tasks, seconds: dict.fromkeys(tasks, seconds))
    plan = replace(QUICK, seconds=0.5, plain_seconds=1.0)
    layer = time_case(case_of("dynamic-3x2-2x2"), 2, 1, plan)
    assert set(layer.seconds) == {"ours forward", "ours step", "plain forward", "plain step", "sgemm"}
    network = time_case(case_of("em-2-1-1-1"), 1, 1, plan)
    assert set(network.seconds) - set(layer.seconds) == {"trunk forward", "trunk step"}
    assert (layer.plain_batch, network.threads) == (2, 1)


def test_ours_is_compiled_before_it_is_timed(monkeypatch):
    seen: list[str] = []

    def work(who: str) -> Work:
        return Work(lambda: seen.append(f"{who} forward"), lambda: seen.append(f"{who} step"))

    def timed(tasks, seconds):
        seen.append("timed")
        return dict.fromkeys(tasks, 1.0)

    monkeypatch.setattr("benchmarks.runner.best_times", timed)
    fake = Case("fake", lambda b: work(f"ours {b}"), lambda b: work(f"plain {b}"), None, lambda: Cost(1, 1, 1))
    time_case(fake, 3, 1, QUICK)
    assert seen == ["ours 3 forward", "ours 3 step", "timed"]


def test_all_rows_of_a_plan():
    plan = Plan(("dynamic-3x2-2x2", "cd-3x2-2x2"), (1, 2), (1, 2), seconds=0.001, plain_seconds=0.01, memory=False)
    seen = []

    def progress(pairs):
        for pair in pairs:
            seen.append(pair)
            yield pair

    before = torch.get_num_threads()
    rows = measure(plan, progress)
    wanted = itertools.product(plan.names, plan.batches, (2, 1), ("forward", "step"))
    assert [(r.name, r.batch, r.threads, r.kind) for r in rows] == list(wanted)
    assert seen == list(itertools.product(plan.names, plan.batches))
    assert all(min(r.ms_per_sample, r.plain_ratio, r.sgemm_fraction, r.sgemm_gflops) > 0 for r in rows)
    assert all(r.peak_mb is None and r.trunk_ratio is None for r in rows)
    assert torch.get_num_threads() == before


def test_unknown_cases_are_refused_before_anything_runs():
    with pytest.raises(RecipeError, match="did you mean 'sparse-40'"):
        measure(Plan(("dynamic-3x2-2x2", "sparse40")), lambda pairs: pytest.fail("measured"))


# --- Memory -----------------------------------------------------------------------------------------------------------

ALLOCATE = """
import torch
from benchmarks.memory import now_mb, peak_mb
start, before = now_mb(), peak_mb()
block = torch.ones(300, 2**18)
held = now_mb()
del block
print(before - start, held - start, peak_mb() - start, now_mb() - start)
"""


@linux
def test_a_known_allocation_is_seen_and_remembered_and_a_parent_s_peak_is_not_inherited():
    block = torch.ones(700, 2**18)
    assert peak_mb() >= now_mb() > block.numel() * 4 / 2**20
    done = subprocess.run([sys.executable, "-c", ALLOCATE], cwd=ROOT, capture_output=True, text=True, check=True)
    before, held, peak, after = map(float, done.stdout.split())
    assert before < 100  # MB, of which importing needs some
    assert 295 < held < 330 and held - 5 < peak < 330 and after < 60


@linux
def test_the_probe_sees_the_votes_of_the_plain_path():
    # 64 x 576 x 20 x 16 votes of 4 bytes are 45 MB; a plain pass forward stores them at least once.
    found = peaks("cd-576x8-20x16", 64, "plain", 1)
    assert found is not None
    votes = 64 * 576 * 20 * 16 * 4 / 2**20
    assert votes < found.forward <= found.step < 40 * votes
    assert 0 < found.held < votes


def test_the_probe_prints_one_line_and_refuses_in_one(capsys):
    before = torch.get_num_threads()
    if measurable():
        assert probe_main(["dynamic-3x2-2x2", "--batch", "2", "--threads", "1"]) == 0
        assert set(json.loads(capsys.readouterr().out)) == {"held", "forward", "step"}
    assert probe_main(["dynamc-3x2-2x2"]) == 2
    out, err = capsys.readouterr()
    assert not out and "no case" in err and err.count("\n") == 1
    assert torch.get_num_threads() == before


@pytest.mark.parametrize(
    ("code", "told", "line"), [(2, "warning\nno case 'x'\n", "no case"), (-9, "", "too little memory?")]
)
def test_a_probe_that_dies_gives_none_and_a_line(capsys, monkeypatch, code, told, line):
    monkeypatch.setattr(subprocess, "run", lambda *words, **more: subprocess.CompletedProcess([], code, "", told))
    assert peaks("capsnet-28", 2, "plain") is None
    err = capsys.readouterr().err
    assert line in err and "capsnet-28 (plain, batch 2)" in err and err.count("\n") == 1


@linux
def test_the_machine_s_memory_is_read():
    assert 0 < available_mb() < 1e8
