"""Two processes under torchrun do what one does with the same batch."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from support.easy_images import easy
from support.tiny_recipe import tiny_toml
from torchcaps.errors import TrainingError
from torchcaps.train import load_recipe, load_run, train
from torchcaps.utils.distributed import ProcessGroup

STEPS = ["--train.epochs", "2", "--quiet"]  # 20 steps


def launch(*words: str) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *words], env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize(("optimizer", "rate"), [("SGD", "0.1"), ("Adam", "0.001")])
def test_two_processes_equal_one(tmp_path, optimizer, rate):
    recipe = str(tiny_toml(tmp_path))
    train = ["-m", "torchcaps", "train", recipe, *STEPS, "--optimizer.name", optimizer, "--optimizer.lr", rate]
    launch(*train, "--out", str(tmp_path / "one"))
    launch(
        "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *train, "--out", str(tmp_path / "two")
    )
    one, two = load_run(tmp_path / "one"), load_run(tmp_path / "two")
    assert one.step == two.step == 20
    largest = max(
        float((a - b).abs().max())
        for a, b in zip(one.model.state_dict().values(), two.model.state_dict().values(), strict=True)
    )
    assert largest <= 1e-6
    assert (tmp_path / "two" / "journal.jsonl").read_text().count("\n") == 10


def test_two_processes_norm_their_capsules_as_one_does(tmp_path):
    """Each sees a half of every batch; the norms' means are of both halves, and so are their gradients."""
    tiny_toml(tmp_path)
    recipe = tmp_path / "normed.toml"
    recipe.write_text(
        'base = "tiny.toml"\n[model]\nname = "matrix-tiny"\nnorm = true\nloss = "cross-entropy"\n'
        '[optimizer]\nname = "SGD"\nlr = 0.01\n[train]\nepochs = 0.5\n'
    )
    words = ["-m", "torchcaps", "train", str(recipe), "--quiet", "--out"]  # 5 steps
    launch(*words, str(tmp_path / "one"))
    launch("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *words, str(tmp_path / "two"))
    one, two = (load_run(tmp_path / name).model.state_dict() for name in ("one", "two"))
    assert one.keys() == two.keys() and "norms.3.odds.variance" in one
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, rtol=1e-4, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}")


def test_two_processes_stop_at_the_same_check_as_one(tmp_path):
    tiny_toml(tmp_path)
    recipe = tmp_path / "stops.toml"
    recipe.write_text(
        f'base = "tiny.toml"\ndata = {{ name = "npz", path = "{easy(tmp_path)["path"]}", validation = 20 }}\n'
        'model = { name = "cnn", widths = [4], dropout = 0 }\ntrain = { stop_at = 0.9, validate_every = 3 }\n'
    )
    words = ["-m", "torchcaps", "train", str(recipe), "--quiet", "--out", str(tmp_path / "two")]
    launch("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *words)
    train(load_recipe(str(recipe)), tmp_path / "one", quiet=True)
    one, two = load_run(tmp_path / "one"), load_run(tmp_path / "two")
    assert one.stopped_early and two.stopped_early and one.step == two.step < 20
    for a, b in zip(one.model.parameters(), two.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5)


def test_a_team_of_one_changes_nothing():
    team, module = ProcessGroup(), torch.nn.Linear(2, 2)
    assert team.is_main and team.wrap(module) is module
    assert team.mean(torch.tensor([1.0, 2.0])).tolist() == [1.0, 2.0]
    assert team.any(True) and not team.any(False)


def test_a_batch_that_cannot_be_shared_is_refused():
    with pytest.raises(TrainingError, match="multiple"):
        ProcessGroup(size=3).check_batch(8)
