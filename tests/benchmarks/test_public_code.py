"""Public code is loaded from a clone, runs on a CPU, and stands beside ours in a table."""

from __future__ import annotations

import json
import sys

import pytest
import torch
from benchmarks.public_code import PUBLIC, Comparison, cells_of, load_file, on_a_cpu

from benchmarks import public_code

NETWORK = """
import torch
from torchvision import datasets
from beside import WIDTH


class CapsuleNet(torch.nn.Module):
    def __init__(self, input_size, classes, routings):
        super().__init__()
        self.layer = torch.nn.Linear(784, classes)

    def forward(self, x, y):
        return self.layer(x.flatten(1)).cuda() * torch.cuda.FloatTensor(1).fill_(1.0), x


def caps_loss(y, lengths, x, decoded, weight):
    return (lengths - y).square().mean() * WIDTH
"""


@pytest.fixture
def clone(tmp_path, monkeypatch):
    (tmp_path / "capsulenet.py").write_text(NETWORK)
    (tmp_path / "beside.py").write_text("WIDTH = 3.0\n")
    yield tmp_path
    sys.modules.pop("beside", None)


def test_code_for_gpus_takes_a_step_on_a_cpu(clone):
    module = load_file(clone, "capsulenet.py")
    with on_a_cpu():
        step = public_code.capsnet_step(module, 4)
        step()
    assert "torchvision" not in sys.modules
    assert torch.Tensor.cuda.__name__ == "cuda"


def test_a_table_has_public_code_over_ours(clone, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(public_code, "case_of", lambda name: _Case())
    times = {"theirs": 1.28, "ours": 0.32}
    monkeypatch.setattr(public_code, "best_times", lambda tasks, seconds: {name: times[name] for name in tasks})
    assert public_code.main(["--capsnet", str(clone), "--json", str(tmp_path / "out.json")]) == 0
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["machine"]["processor"] in capsys.readouterr().out
    [row] = [Comparison(**row) for row in found["rows"]]
    assert (row.repository, row.batch, row.public_ms, row.our_ms) == (PUBLIC["capsnet"].repository, 128, 10.0, 2.5)
    assert cells_of([row])[1][-3:] == ["10", "2.5", "4.0"]


class _Case:
    def ours(self, batch):
        return self

    def step(self):
        return None


def test_a_folder_without_the_file_is_refused_in_one_line(tmp_path, capsys):
    assert public_code.main(["--matrix", str(tmp_path)]) == 2
    assert "capsules.py' is not there" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        public_code.main([])
