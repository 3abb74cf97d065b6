from __future__ import annotations

import pytest

from tiny import tiny_toml
from torchcaps.testing import assert_resumes


def test_kill_9_and_resume_changes_no_bit(tmp_path):
    words = ["--train.epochs", "20", "--train.save-every", "7"]
    assert_resumes(str(tiny_toml(tmp_path)), tmp_path, kills=2, words=words)


@pytest.mark.long
def test_twenty_kills(tmp_path):
    words = ["--train.epochs", "60", "--train.save-every", "7"]
    early = assert_resumes(str(tiny_toml(tmp_path)), tmp_path, kills=20, seed=1, words=words)
    assert early >= 15


def test_the_instrument_sees_a_difference(tmp_path):
    """A recipe that saves no optimiser state would differ; here the seed plays that part."""
    from torchcaps.testing.resume import _assert_same
    from torchcaps.train import load_recipe, train

    path = str(tiny_toml(tmp_path))
    for name, seed in {"a": 1, "b": 2}.items():
        train(load_recipe(path, {"seed": seed, "train": {"epochs": 0.1}}), tmp_path / name, quiet=True)
    with pytest.raises(AssertionError, match="differs"):
        _assert_same(tmp_path / "a", tmp_path / "b")
