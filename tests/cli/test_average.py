"""`torchcaps average` as a person meets it: the mean of the weights of runs is a run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from support.cli import is_suggestion, talk
from support.easy_images import easy
from support.tiny_recipe import TINY, tiny
from torchcaps.config import from_dict
from torchcaps.errors import CheckpointError
from torchcaps.evaluate.classification import classification
from torchcaps.train import load, load_run, train
from torchcaps.train.recipe import Recipe
from torchcaps.train.running_statistics import training_batches
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
    assert code == 0 and is_suggestion(err) and out.count("\n") == 1 and "'again-mean', the mean of 2 runs" in out
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
    with pytest.raises(CheckpointError, match=r"weights alone; .* start another run from it \(--start\)"):
        train(recipe, out, resume=True, quiet=True)


def test_the_mean_of_runs_with_batch_norms_has_statistics_of_its_own_and_errs_less(capsys, tmp_path):
    """Two runs at a high learning rate: their mean, with statistics measured for it, is better than both."""
    folders, out = (tmp_path / "first", tmp_path / "second"), tmp_path / "mean"
    model = {"name": "matrix-tiny", "norm": True, "loss": "cross-entropy"}
    over = {"data": easy(tmp_path), "model": model, "optimizer": {"name": "Adam", "lr": 0.06}}
    recipe = from_dict(Recipe, {**TINY, **over, "train": {**TINY["train"], "epochs": 1.0}})
    train(recipe, tmp_path / "start", quiet=True)
    train(replace(recipe, seed=1, start=str(tmp_path / "start")), folders[0], quiet=True)
    train(replace(recipe, seed=2, start=str(folders[0])), folders[1], quiet=True)
    assert run(capsys, *folders, "--out", out)[0] == 0

    test = recipe.data.load().test
    errors = [classification(load(folder), test)["test_error"] for folder in (*folders, out)]
    assert errors[2] <= (errors[0] + errors[1]) / 2
    # Weights are averaged; the statistics are the plain mean of those of the training batches.
    one, other, mean = (load(folder) for folder in (*folders, out))
    for a, b, m in zip(one.parameters(), other.parameters(), mean.parameters(), strict=True):
        torch.testing.assert_close(m, (a + b) / 2, rtol=1e-6, atol=1e-7)
    found = []
    mean.features_norm.register_forward_pre_hook(lambda _, x: found.append(x[0].mean((0, 2, 3))))
    wanted = mean.features_norm.mean.clone()
    for batch in training_batches(recipe.data.load().train, recipe.train, seed=2):
        mean.scores(batch.images)
    assert len(found) == 10
    torch.testing.assert_close(wanted, torch.stack(found).mean(0), rtol=1e-5, atol=1e-6)


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
