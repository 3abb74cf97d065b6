"""benchmarks/epochs.py: a row's figures belong together, and the table is written as cells."""

from __future__ import annotations

import json

import pytest
from script import script

from torchcaps.models import TinyMatrixConfig


@pytest.fixture
def epochs(monkeypatch):
    module = script("epochs")
    monkeypatch.setattr(module, "NETWORKS", {"tiny": TinyMatrixConfig()})
    return module


def test_a_row_says_the_same_speed_in_two_ways(epochs):
    name, iterations, per_second, cpu, minutes, memory = epochs.measure("tiny", 3, 16, 1, 0.05)
    assert (name, iterations) == ("tiny", "3")
    assert float(minutes) == pytest.approx(epochs.PAIRS / float(per_second) / 60, abs=0.1, rel=0.05)
    assert 0 < float(cpu) <= 3 * 1000 / float(per_second)
    assert memory == "-" or float(memory) >= 0


def test_the_table_is_written_as_cells(epochs, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(epochs, "rows", lambda batch, count, seconds: [epochs.HEAD, [str(batch)] * len(epochs.HEAD)])
    assert epochs.main(["--batch", "7", "--json", str(tmp_path / "cells.json")]) == 0
    assert json.loads((tmp_path / "cells.json").read_text()) == [epochs.HEAD, ["7"] * 6]
    assert "images/s" in capsys.readouterr().out
    assert epochs.main(["--json", str(tmp_path / "nowhere" / "cells.json")]) == 2
