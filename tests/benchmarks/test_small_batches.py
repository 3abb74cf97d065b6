"""The rows of small batches are ratios of two sides of the same step."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks import small_batches


@pytest.fixture
def measured(monkeypatch):
    """Times by name of the side, instead of measured ones, and steps that do nothing."""
    monkeypatch.setattr(small_batches, "case_of", lambda name: _Case())
    monkeypatch.setattr(small_batches, "compiled_step", lambda network, batch: lambda: None)
    times = {"one": 0.02, "two": 0.013, "ours": 0.3, "plain": 0.4}
    monkeypatch.setattr(small_batches, "best_times", lambda tasks, seconds: {name: times[name] for name in tasks})


class _Case:
    def ours(self, batch):
        return self

    def step(self):
        return None


def test_ratios_are_two_threads_over_one_and_ours_over_the_compiled_one(measured):
    assert small_batches.thread_row(8, 1.0) == ["matrix capsules, 2 threads", "8", "13.0", "1 thread", "20.0", "0.65"]
    assert small_batches.compiled_row(32, 1.0)[-1] == "0.75"


def test_the_table_is_written(measured, tmp_path, capsys):
    path = tmp_path / "table.json"
    assert small_batches.main(["--seconds", "1", "--json", str(path)]) == 0
    table = json.loads(path.read_text())
    assert table[0] == small_batches.HEAD
    assert [row[1] for row in table[1:]] == ["1", "8", "32", "32", "128"]
    assert "torch.compile" in capsys.readouterr().out


def test_threads_are_set_for_a_step_and_restored():
    before = torch.get_num_threads()
    assert small_batches.on_threads(1, torch.get_num_threads)() == 1
    assert torch.get_num_threads() == before
