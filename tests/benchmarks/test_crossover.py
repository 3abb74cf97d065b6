"""benchmarks/crossover.py: kernels are taken at any size while it measures, and only then; two tables."""

from __future__ import annotations

import json
import os

import pytest

from benchmarks import crossover
from support.hardware import multiplies_bfloat16
from torchcaps.kernels import fourier
from torchcaps.kernels.threads import SWITCH
from torchcaps.routing import dispatch


def test_the_table_is_in_the_order_of_votes(tmp_path, monkeypatch):
    monkeypatch.setattr(crossover, "LAYERS", [("dynamic-6x4-2x4", 12), ("em-4x2", 8)])
    monkeypatch.setattr(crossover, "BATCHES", (1, 2))
    before = dispatch.WORTH
    assert crossover.main(["--seconds", "0.001", "--json", str(tmp_path / "crossover.json")]) == 0
    assert before == dispatch.WORTH > 0
    head, *rows = json.loads((tmp_path / "crossover.json").read_text())
    assert [row[2] for row in rows] == ["8", "12", "16", "24"]
    assert head[0] == "layer" and all(float(row[3]) > 0 for row in rows)


def test_the_table_of_convolutions(tmp_path, monkeypatch, capsys):
    small, large = crossover.Convolution(16, 32, 2, 2, 5), crossover.Convolution(16, 16, 5, 1, 10)
    monkeypatch.setattr(crossover, "CONVOLUTIONS", [small, large])
    monkeypatch.setattr(crossover, "SAMPLES", (1, 3))
    monkeypatch.setattr(fourier, "FFT_COST", 0)
    monkeypatch.setenv(SWITCH, "plain")
    path = tmp_path / "convolutions.json"
    assert crossover.main(["--what", "convolutions", "--seconds", "0.001", "--json", str(path)]) == 0
    head, *rows = json.loads(path.read_text())
    assert [(row[0], row[1]) for row in rows] == [(str(conv), b) for conv in (small, large) for b in ("1", "3")]
    assert head[-1] == "taken" and [row[-1] for row in rows] == ["no", "no", "yes", "yes"]
    assert all(len(row) == len(head) and float(row[2]) > 0 and float(row[3]) > 0 for row in rows)
    assert "torch / ours" in capsys.readouterr().out and os.environ[SWITCH] == "plain"


def test_both_ways_of_a_step_have_both_gradients():
    x, w = crossover.Convolution(16, 16, 3, 2, 6).tensors(2)
    for way in (crossover.torch_conv2d, *crossover.WAYS.values()):
        assert [grad.shape for grad in crossover.step_of(way, x, w, 2)()] == [x.shape, w.shape]


def test_bfloat16_is_measured_beside_torchs_and_float32(tmp_path, monkeypatch):
    if not multiplies_bfloat16():
        pytest.skip("this CPU does not multiply bfloat16 matrices")
    monkeypatch.setattr(crossover, "BFLOAT16_CONVOLUTIONS", [crossover.Convolution(16, 16, 7, 1, 9)])
    monkeypatch.setattr(crossover, "BFLOAT16_SAMPLES", (1, 3))
    path = tmp_path / "bfloat16.json"
    assert crossover.main(["--what", "bfloat16", "--seconds", "0.001", "--json", str(path)]) == 0
    head, *rows = json.loads(path.read_text())
    assert len(head) == len(rows[0]) == 8 and [row[1] for row in rows] == ["1", "3"]
    assert all(float(cell) > 0 for row in rows for cell in row[2:5]) and rows[0][-1] == "yes"


def test_an_unknown_table_is_refused(capsys):
    with pytest.raises(SystemExit) as caught:
        crossover.main(["--what", "convolution"])
    assert caught.value.code == 2 and "convolutions" in capsys.readouterr().err
