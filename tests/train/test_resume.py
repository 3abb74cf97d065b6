from __future__ import annotations

import os
import signal
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from support.processes import Forked, command
from support.tiny_recipe import TINY, tiny, tiny_toml
from torchcaps.config import from_dict
from torchcaps.testing import assert_resumes
from torchcaps.testing import resume as instrument
from torchcaps.train import checkpoint, load_recipe, load_run, train
from torchcaps.train.recipe import Recipe
from torchcaps.utils import files

LONGER = tiny(train={"epochs": 3.0, "save_every": 3})
MOMENTS = ("before", "half", "written", "named", "after")
"""Where a process may stand in the write of a checkpoint: before it; with half of the temporary file on disk; with all
of it, but under its temporary name; under its name, which is not yet synced; after it."""


@pytest.fixture
def forked_command(monkeypatch):
    """Let the instrument fork `torchcaps train`, as `support.processes` does, instead of starting an interpreter."""

    def start(recipe: str, out: Path, words: Iterable[str]) -> Forked:
        return Forked(command, "train", recipe, "--out", str(out), "--quiet", *words)

    monkeypatch.setattr(instrument, "_start", start)


def killed_in_a_save(moment: str, folder: Path) -> None:
    """Go on with a run until kill -9 in the write of its second checkpoint from here, in a process of its own."""
    write_atomically = files.write_atomically
    write = files._write
    rename = Path.replace
    saves = 0

    def die_at(now: str) -> None:
        if moment == now and saves == 2:
            os.kill(os.getpid(), signal.SIGKILL)

    def save(path: Path, chunks: Iterable[bytes]) -> None:
        nonlocal saves
        saves += 1
        die_at("before")
        write_atomically(path, chunks)
        die_at("after")

    def write_in_halves(path: Path, chunks: Iterable[bytes]) -> None:
        data = b"".join(chunks)
        if moment == "half" and saves == 2:
            write(path, [data[: len(data) // 2]])
        die_at("half")
        write(path, [data])
        die_at("written")

    def rename_at_last(path: Path, target: Path) -> Path:
        named = rename(path, target)
        die_at("named")
        return named

    checkpoint.write_atomically = save
    files._write = write_in_halves
    Path.replace = rename_at_last
    train(LONGER, folder, resume="auto", quiet=True)


def test_kill_9_in_the_write_of_a_checkpoint_changes_no_bit(tmp_path):
    """One run is killed at each of MOMENTS in turn, with one more save in between.

    A process that is killed in a step leaves behind what one at the first or the last moment does, since between two
    saves only the journal is written.
    """
    whole = tmp_path / "whole"
    killed = tmp_path / "killed"
    train(LONGER, whole, quiet=True)
    visible = []
    left = []
    for moment in MOMENTS:
        assert Forked(killed_in_a_save, moment, killed).wait() == -signal.SIGKILL, moment
        visible.append(load_run(killed).step)
        left.append(sum(path.suffix == ".tmp" for path in killed.iterdir()))
    # The old checkpoint up to the new one's name, then the new one; a temporary file is swept at the next save
    assert visible == [3, 6, 9, 15, 21] and left == [0, 1, 1, 0, 0]
    train(LONGER, killed, resume=True, quiet=True)
    instrument._assert_same(whole, killed)


def test_kill_9_at_random_moments_changes_no_bit(tmp_path, forked_command):
    words = ["--train.epochs", "5", "--train.save-every", "7"]
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
    """Here the command line is started as a user starts it."""
    words = ["--train.epochs", "60", "--train.save-every", "7"]
    early = assert_resumes(str(tiny_toml(tmp_path)), tmp_path, kills=20, seed=1, words=words)
    assert early >= 15


def test_the_instrument_sees_a_difference(tmp_path):
    """A recipe that saves no optimizer state would differ; here the seed plays that part."""
    path = str(tiny_toml(tmp_path))
    for name, seed in {"a": 1, "b": 2}.items():
        train(load_recipe(path, {"seed": seed, "train": {"epochs": 0.1}}), tmp_path / name, quiet=True)
    with pytest.raises(AssertionError, match="differs"):
        instrument._assert_same(tmp_path / "a", tmp_path / "b")
