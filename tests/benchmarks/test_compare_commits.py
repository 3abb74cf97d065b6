"""benchmarks/compare_commits.py: two trees take turns, and a slower one is told."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.compare_commits import Comparison, compare, join_pairs, main

from benchmarks import compare_commits

SRC = Path(__file__).parents[2] / "src"


class Known:
    """A worker whose times are known; it notes its turns."""

    def __init__(self, name: str, turns: list[str], *seconds: float) -> None:
        self.name = name
        self.turns = turns
        self.times = iter(seconds * 2)

    def seconds(self, name: str, kind: str, budget: float) -> float:
        self.turns.append(self.name)
        return next(self.times) if budget else 0.0


def test_trees_take_turns_and_the_best_time_counts():
    turns: list[str] = []
    rows = compare(Known("old", turns, 3.0, 2.0), Known("new", turns, 2.2, 5.0), ["x"], rounds=2, seconds=1.0)
    assert rows == [Comparison("x", "forward", (2.0,), (2.2,)), Comparison("x", "step", (2.0,), (2.2,))]
    assert turns == ["old", "new"] * 6
    assert rows[0].ratio == pytest.approx(1.1)


def test_the_median_over_pairs_of_processes_counts():
    pairs = [[Comparison("x", "step", (2.0,), (new,))] for new in (1.8, 9.0, 2.2)]
    (row,) = join_pairs(pairs)
    assert row == Comparison("x", "step", (2.0, 2.0, 2.0), (1.8, 9.0, 2.2))
    assert row.ratio == pytest.approx(1.1)


def test_a_tree_against_itself(capsys):
    words = [str(SRC), str(SRC), "dynamic-6x4-2x4", "--batch", "4", "--threads", "1", "--rounds", "1", "--pairs", "1"]
    assert main([*words, "--seconds", "0.001", "--tolerance", "1000"]) == 0
    assert capsys.readouterr().out.count("dynamic-6x4-2x4") == 2


def test_a_slower_tree_and_a_wrong_folder(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(compare_commits, "compare", lambda *_: [Comparison("x", "step", (1.0,), (1.06,))])
    assert main([str(SRC), str(SRC), "--pairs", "1"]) == 1
    assert "x step is 6.0% slower" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([str(tmp_path), str(SRC)])
    assert "holds no package torchcaps" in capsys.readouterr().err
