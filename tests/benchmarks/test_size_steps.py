"""A row of sizes is the ratio of two measured layers."""

from __future__ import annotations

import json

from benchmarks.cases import case_of

from benchmarks import size_steps


def test_the_table_has_a_row_for_each_pair_and_batch(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(size_steps, "case_of", lambda name: _Case())
    times = {small: 0.01 for small, _ in size_steps.PAIRS} | {large: 0.015 for _, large in size_steps.PAIRS}
    monkeypatch.setattr(size_steps, "best_times", lambda steps, seconds, clock: {name: times[name] for name in steps})
    path = tmp_path / "sizes.json"
    assert size_steps.main(["--json", str(path)]) == 0
    head, *rows = json.loads(path.read_text())
    assert head == size_steps.HEAD
    assert len(rows) == len(size_steps.PAIRS) * len(size_steps.BATCHES)
    assert rows[0] == ["dynamic-1152x8-16x16", "10.0", "dynamic-1152x8-17x16", "15.0", "32", "1.50", "1.06"]
    assert "larger layer" in capsys.readouterr().out


def test_sizes_are_those_of_the_layers():
    for (small, large), ratio in size_steps.PAIRS.items():
        assert case_of(large).cost().votes / case_of(small).cost().votes == ratio


class _Case:
    def ours(self, batch):
        return self

    def step(self):
        return None
