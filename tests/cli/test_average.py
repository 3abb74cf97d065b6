"""`torchcaps average` as a person meets it: the mean of the weights of runs is a run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from support.cli import talk
from support.tiny_recipe import TINY, tiny
from torchcaps.config import from_dict
from torchcaps.errors import CheckpointError
from torchcaps.train import load, load_run, train
from torchcaps.train.recipe import Recipe
from torchcaps.utils.files import folder_lock

run, refused = talk("average")


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> tuple[Path, Path]:
    """A run, and one that started from its weights."""
    place = tmp_path_factory.mktemp("average")
    first, second = place / "first", place / "second"
    train(tiny(train={"epochs": 0.5}), first, quiet=True)
    train(replace(tiny(train={"epochs": 0.5}), seed=9, start=str(first), name="again"), second, quiet=True)
    return first, second


def test_the_mean_is_that_of_every_weight_and_a_run_like_any_other(capsys, folders, tmp_path):
    code, out, err = run(capsys, *folders, "--out", tmp_path / "mean")
    assert (code, err) == (0, "") and out.count("\n") == 1 and "'again-mean', the mean of 2 runs" in out
    one, other, mean = (load(folder).state_dict() for folder in (*folders, tmp_path / "mean"))
    assert one.keys() == mean.keys()
    for name, value in mean.items():
        torch.testing.assert_close(value, (one[name] + other[name]) / 2, rtol=1e-6, atol=1e-7)
    assert any(not torch.equal(mean[name], one[name]) for name in mean)
    last, found = load_run(folders[1]), load_run(tmp_path / "mean")
    assert (found.step, found.seconds) == (last.step, last.seconds)
    assert found.recipe.about == "The mean of the weights of tiny, again."
    assert found.recipe == replace(last.recipe, name="again-mean", about=found.recipe.about)


def test_a_run_may_start_from_the_mean_and_cannot_resume_it(capsys, folders, tmp_path):
    out = tmp_path / "mean"
    assert run(capsys, *folders, "--out", out, "--name", "middle")[0] == 0
    recipe = load_run(out).recipe
    assert recipe.name == "middle"
    outcome = train(replace(recipe, start=str(out), name="on"), tmp_path / "on", quiet=True)
    assert outcome.finished and outcome.step == load_run(out).step + 5
    with pytest.raises(CheckpointError, match="weights alone"):
        train(recipe, out, resume=True, quiet=True)


def test_runs_with_batch_norms_have_no_mean(capsys, tmp_path):
    """Their moving averages are of each one's own weights, and would be wrong for the mean of these."""
    model = {"name": "matrix-tiny", "norm": True}
    folders, out = (tmp_path / "first", tmp_path / "second"), tmp_path / "mean"
    recipe = from_dict(Recipe, {**TINY, "model": model, "train": {**TINY["train"], "epochs": 0.2}})
    train(recipe, folders[0], quiet=True)
    train(replace(recipe, seed=9, start=str(folders[0])), folders[1], quiet=True)
    assert "batch normalization" in refused(capsys, *folders, "--out", out)
    assert not out.exists()


def test_what_has_no_mean_is_one_line_and_leaves_nothing(capsys, folders, tmp_path):
    out = tmp_path / "mean"
    assert "two or more" in refused(capsys, folders[0], "--out", out)
    assert "holds no checkpoint" in refused(capsys, folders[0], tmp_path, "--out", out)
    wider = tmp_path / "wider"
    train(tiny(model={"channels": 5}, train={"epochs": 0.5}), wider, quiet=True)
    assert "weights of their own" in refused(capsys, folders[0], wider, "--out", out)
    started = tmp_path / "started"
    other = replace(tiny(model={"channels": 5}, train={"epochs": 0.5}), start=str(wider))
    train(other, started, quiet=True)
    assert "another network" in refused(capsys, folders[0], started, "--out", out)
    assert "named twice" in refused(capsys, folders[1], folders[0], folders[1], "--out", out)
    assert not out.exists()
    assert "already holds a run" in refused(capsys, *folders, "--out", folders[0])
    out.mkdir()
    with folder_lock(out):
        assert "another process is training into" in refused(capsys, *folders, "--out", out)
    assert not list(out.iterdir())
