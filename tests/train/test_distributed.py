"""Several processes do what one does with the same batch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from support.easy_images import easy
from support.processes import command, run_group
from support.tiny_recipe import tiny_toml
from torchcaps.cli import main
from torchcaps.train import load_recipe, load_run, train
from torchcaps.train.checkpoint import load as read_checkpoint
from torchcaps.train.journal import read_journal
from torchcaps.train.run import checkpoint_path
from torchcaps.utils.distributed import ProcessGroup

STEPS = ["--train.epochs", "2", "--quiet"]  # 20 steps


def largest_difference(one: Path, two: Path) -> float:
    """Between the parameters of two runs of 20 steps."""
    runs = [load_run(folder) for folder in (one, two)]
    assert [run.step for run in runs] == [20, 20]
    pairs = zip(*(run.model.state_dict().values() for run in runs), strict=True)
    return max(float((a - b).abs().max()) for a, b in pairs)


def test_torchrun_equals_one_process(tmp_path):
    """As a user starts it. The other tests fork their processes into the same environment, which takes less time."""
    words = ["train", str(tiny_toml(tmp_path)), *STEPS, "--optimizer.name", "SGD", "--optimizer.lr", "0.1", "--out"]
    assert main([*words, str(tmp_path / "one")]) == 0
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*torchrun, "-m", "torchcaps", *words, str(tmp_path / "two")],
        env=environment, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert "Warning:" not in done.stderr
    assert largest_difference(tmp_path / "one", tmp_path / "two") <= 1e-6
    assert (tmp_path / "two" / "journal.jsonl").read_text().count("\n") == 10


def test_two_processes_equal_one_with_adam(tmp_path):
    words = ["train", str(tiny_toml(tmp_path)), *STEPS, "--optimizer.name", "Adam", "--optimizer.lr", "0.001", "--out"]
    assert main([*words, str(tmp_path / "one")]) == 0
    run_group(command, *words, str(tmp_path / "two"))
    assert largest_difference(tmp_path / "one", tmp_path / "two") <= 1e-6


def command_in_double(*words: str) -> int:
    """Run the command line in double precision, in which rounding cannot hide an error."""
    torch.set_default_dtype(torch.float64)
    return main(list(words))


@pytest.mark.parametrize("size", [2, 3])
def test_several_processes_norm_their_capsules_as_one_does(tmp_path, size):
    """Each sees its share of every batch of 8, one of three less than the others; means of norms are of the batch, and
    so are their gradients."""
    tiny_toml(tmp_path)
    recipe = tmp_path / "normed.toml"
    recipe.write_text(
        'base = "tiny.toml"\n[model]\nname = "matrix-tiny"\nnorm = true\nloss = "cross-entropy"\n'
        '[optimizer]\nname = "SGD"\nlr = 0.01\n[train]\nepochs = 0.5\nema_decay = 0.5\nmixup_alpha = 0.2\n'
    )
    words = ["train", str(recipe), "--quiet", "--out"]  # 5 steps
    run_group(command_in_double, *words, str(tmp_path / "one"), size=1)
    run_group(command_in_double, *words, str(tmp_path / "two"), size=size)
    # The weights and their moving average, whose running statistics the processes measured together.
    one, two = (read_checkpoint(checkpoint_path(tmp_path / name)).tensors for name in ("one", "two"))
    assert one.keys() == two.keys()
    assert {f"state.{which}.norms.3.odds.variance" for which in ("model", "average")} <= one.keys()
    assert one["state.model.conv.weight"].dtype == torch.float64
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, rtol=1e-8, atol=1e-10, msg=lambda m, name=name: f"{name}: {m}")


def test_the_loss_that_is_reported_is_that_of_the_batch(tmp_path):
    words = ["train", str(tiny_toml(tmp_path)), "--train.epochs", "0.5", "--train.log-every", "1", "--quiet", "--out"]
    assert main([*words, str(tmp_path / "one")]) == 0
    run_group(command, *words, str(tmp_path / "three"), size=3)
    one, three = ([e["loss"] for e in read_journal(tmp_path / n / "journal.jsonl")] for n in ("one", "three"))
    assert len(one) == 5 and three == pytest.approx(one, abs=1e-5)


def test_two_processes_resume_a_moving_average_to_the_bit(tmp_path):
    words = ["train", str(tiny_toml(tmp_path)), "--train.ema-decay", "0.9", "--resume", "auto", "--quiet"]
    for epochs, folder in (("0.7", "parts"), ("1.5", "parts"), ("1.5", "whole")):
        run_group(command, *words, "--train.epochs", epochs, "--out", str(tmp_path / folder))
    whole, parts = (read_checkpoint(checkpoint_path(tmp_path / name)).tensors for name in ("whole", "parts"))
    assert whole.keys() == parts.keys() and any(name.startswith("state.average.") for name in whole)
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


def test_two_processes_stop_at_the_same_check_as_one(tmp_path):
    tiny_toml(tmp_path)
    recipe = tmp_path / "stops.toml"
    recipe.write_text(
        f'base = "tiny.toml"\ndata = {{ name = "npz", path = "{easy(tmp_path)["path"]}", validation = 20 }}\n'
        'model = { name = "cnn", widths = [4], dropout = 0 }\ntrain = { stop_at = 0.9, validate_every = 3 }\n'
    )
    run_group(command, "train", str(recipe), "--quiet", "--out", str(tmp_path / "two"))
    train(load_recipe(str(recipe)), tmp_path / "one", quiet=True)
    one, two = load_run(tmp_path / "one"), load_run(tmp_path / "two")
    assert one.stopped_early and two.stopped_early and one.step == two.step < 20
    for a, b in zip(one.model.parameters(), two.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5)


def test_a_team_of_one_changes_nothing():
    group, module = ProcessGroup(), torch.nn.Linear(2, 2)
    assert group.is_main and group.wrap(module) is module
    assert group.mean(torch.tensor([1.0, 2.0])).tolist() == [1.0, 2.0]
    assert group.any(True) and not group.any(False)
