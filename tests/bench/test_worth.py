"""benchmarks/worth.py: kernels are taken at any size while it measures, and only then."""

from __future__ import annotations

import json

from script import script

from torchcaps.routing import fused


def test_the_table_is_in_the_order_of_votes(tmp_path, monkeypatch):
    worth = script("worth")
    monkeypatch.setattr(worth, "LAYERS", [("dynamic-6x4-2x4", 12), ("em-4x2", 8)])
    monkeypatch.setattr(worth, "BATCHES", (1, 2))
    before = fused.WORTH
    assert worth.main(["--seconds", "0.001", "--json", str(tmp_path / "worth.json")]) == 0
    assert before == fused.WORTH > 0
    head, *rows = json.loads((tmp_path / "worth.json").read_text())
    assert [row[2] for row in rows] == ["8", "12", "16", "24"]
    assert head[0] == "layer" and all(float(row[3]) > 0 for row in rows)
