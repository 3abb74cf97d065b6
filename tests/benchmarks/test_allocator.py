"""The table compares the same steps before and after."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from benchmarks.allocator import StepCost

from benchmarks import allocator


def test_a_row_compares_the_steps_of_a_case(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    costs = iter([*[StepCost(0.02, 9000)] * len(allocator.CASES), *[StepCost(0.016, 3)] * len(allocator.CASES)])
    monkeypatch.setattr(allocator, "case_of", lambda name: _Case())
    monkeypatch.setattr(allocator, "measure_step", lambda step, seconds: next(costs))
    monkeypatch.setattr(allocator, "keep_freed_memory", lambda: True)
    path = tmp_path / "table.json"
    assert allocator.main(["--json", str(path)]) == 0
    head, *rows = json.loads(path.read_text())
    assert head == allocator.HEAD and [row[0] for row in rows] == list(allocator.CASES)
    assert rows[0][1:] == ["64", "20.0", "16.0", "1.25", "9,000", "3"]
    assert "returned ms" in capsys.readouterr().out


def test_it_says_so_if_memory_cannot_be_kept(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(allocator, "case_of", lambda name: _Case())
    monkeypatch.setattr(allocator, "measure_step", lambda step, seconds: StepCost(1.0, 1))
    monkeypatch.setattr(allocator, "keep_freed_memory", lambda: False)
    assert allocator.main([]) == 2
    assert "MALLOC_" in capsys.readouterr().err


def test_a_step_is_timed_and_its_page_faults_are_counted() -> None:
    calls: list[bytes] = []
    found = allocator.measure_step(lambda: calls.append(bytes(40 * 4096)), 0.001)
    assert len(calls) >= 3 and found.seconds > 0 and found.faults >= 0


class _Case:
    def ours(self, batch: int) -> _Case:
        assert batch == 64
        return self

    @property
    def step(self) -> Callable[[], object]:
        return lambda: None
