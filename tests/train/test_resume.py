from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from support.tiny_recipe import TINY, tiny_toml
from torchcaps.config import from_dict
from torchcaps.testing import assert_resumes
from torchcaps.train import load_run, train
from torchcaps.train.recipe import Recipe


def test_kill_9_and_resume_changes_no_bit(tmp_path):
    words = ["--train.epochs", "20", "--train.save-every", "7"]
    assert_resumes(str(tiny_toml(tmp_path)), tmp_path, kills=2, words=words)


def test_norms_go_on_where_they_were(tmp_path):
    """Moving averages are part of the state: cut at step 3, a training ends at the same bits."""
    recipe = from_dict(Recipe, {**TINY, "model": {"name": "matrix-tiny", "norm": True, "loss": "cross-entropy"}})
    short = replace(recipe, train=replace(recipe.train, epochs=0.3, save_every=1))
    long = replace(recipe, train=replace(recipe.train, epochs=0.6, save_every=1))
    train(short, tmp_path / "cut", quiet=True)
    early = load_run(tmp_path / "cut").model.state_dict()["norms.1.odds.mean"].clone()
    train(long, tmp_path / "cut", resume=True, quiet=True)
    train(long, tmp_path / "whole", quiet=True)
    cut, whole = (load_run(tmp_path / name).model.state_dict() for name in ("cut", "whole"))
    assert all(torch.equal(cut[name], whole[name]) for name in whole)
    assert not torch.equal(whole["norms.1.odds.mean"], early)


@pytest.mark.long
def test_twenty_kills(tmp_path):
    words = ["--train.epochs", "60", "--train.save-every", "7"]
    early = assert_resumes(str(tiny_toml(tmp_path)), tmp_path, kills=20, seed=1, words=words)
    assert early >= 15


def test_the_instrument_sees_a_difference(tmp_path):
    """A recipe that saves no optimizer state would differ; here the seed plays that part."""
    from torchcaps.testing.resume import _assert_same
    from torchcaps.train import load_recipe, train

    path = str(tiny_toml(tmp_path))
    for name, seed in {"a": 1, "b": 2}.items():
        train(load_recipe(path, {"seed": seed, "train": {"epochs": 0.1}}), tmp_path / name, quiet=True)
    with pytest.raises(AssertionError, match="differs"):
        _assert_same(tmp_path / "a", tmp_path / "b")
