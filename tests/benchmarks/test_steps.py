"""benchmarks/steps.py: what belongs to which part, and a table whose shares are whole."""

from __future__ import annotations

import importlib
import json
from types import SimpleNamespace

import pytest


@pytest.fixture
def steps():
    return importlib.import_module("benchmarks.steps")


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("aten::mkldnn_convolution", "convolution"),
        ("torchcaps::fourier_conv_backward", "convolution"),
        ("torchcaps::dynamic_forward", "routing"),
        ("GeneratedBackwardFor_torchcaps_em_routing", "routing"),
        ("aten::addmm", "linear"),
        ("Optimizer.step#Adam.step", "optimizer"),
        ("aten::relu", "the rest"),
    ],
)
def test_operations_belong_to_a_part(steps, name, part):
    assert steps.part_of(name) == part


def test_what_an_operation_calls_belongs_to_its_part(steps):
    def inside(*names):
        """The innermost of nested events, named from the outside in."""
        event = None
        for name in names:
            event = SimpleNamespace(name=name, cpu_parent=event)
        return event

    assert steps.owner(inside("torchcaps::fourier_conv", "aten::bmm")) == "convolution"
    assert steps.owner(inside("autograd::engine", "torchcaps::em_forward", "aten::mm", "aten::empty")) == "routing"
    assert steps.owner(inside("aten::linear", "aten::addmm", "aten::copy_")) == "linear"
    assert steps.owner(inside("aten::relu", "aten::empty")) == "the rest"


def test_shares_of_a_step_add_up(steps, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(steps, "SYSTEMS", {"em-4-2-2-2": 32, "cd-6x4-3x4": None})
    path = tmp_path / "steps.json"
    assert steps.main(["--batch", "2", "--steps", "1", "--threads", "1", "--json", str(path)]) == 0
    head, *rows = json.loads(path.read_text())
    assert [row[0] for row in rows] == ["em-4-2-2-2", "cd-6x4-3x4"]
    for row in rows:
        parts = [float(cell.rstrip("%")) for cell in row[2:-1]]
        assert len(row) == len(head) and abs(sum(parts) - 100) < 0.5
    assert rows[1][-1] == "-" and "ms a step" in capsys.readouterr().out


def test_a_wrong_size_is_one_line(steps, monkeypatch, capsys):
    monkeypatch.setattr(steps, "SYSTEMS", {"em-0-2-2-2": 32})
    assert steps.main(["--batch", "2"]) == 2
    assert "sizes are numbers from 1 on" in capsys.readouterr().err
