"""benchmarks/epochs.py: a row's figures belong together, and the table is written as cells."""

from __future__ import annotations

import importlib
import json

import pytest

from torchcaps.models import TinyMatrixConfig


@pytest.fixture
def epochs(monkeypatch):
    module = importlib.import_module("benchmarks.epochs")
    monkeypatch.setattr(module, "NETWORKS", {"tiny": TinyMatrixConfig()})
    return module


def test_a_row_says_the_same_speed_in_two_ways(epochs):
    name, iterations, per_second, cpu, minutes = epochs.measure("tiny", 3, 16, 0.05)
    assert (name, iterations) == ("tiny", "3")
    assert float(minutes) == pytest.approx(epochs.PAIRS / float(per_second) / 60, abs=0.1, rel=0.05)
    assert float(cpu) > 0


def test_the_table_is_written_as_cells(epochs, tmp_path, capsys):
    words = ["--batch", "8", "--threads", "1", "--seconds", "0"]
    assert epochs.main([*words, "--json", str(tmp_path / "cells.json")]) == 0
    head, *rows = json.loads((tmp_path / "cells.json").read_text())
    assert head == epochs.HEAD and [row[:2] for row in rows] == [["tiny", "2"], ["tiny", "3"]]
    assert "images/s" in capsys.readouterr().out
    assert epochs.main([*words, "--json", str(tmp_path / "nowhere" / "cells.json")]) == 2
    with pytest.raises(SystemExit) as ended:
        epochs.main(["--threads", "0"])
    assert ended.value.code == 2
