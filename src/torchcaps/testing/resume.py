"""Does a run that is killed go on as if nothing had happened?"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from torchcaps.train.checkpoint import load
from torchcaps.train.journal import read_journal

__all__ = ["assert_resumes"]

COMMAND = (sys.executable, "-m", "torchcaps")
"""What starts the command line."""


class _Span(NamedTuple):
    """A stage in a run: how many steps came before it, and how long it took."""

    before: int
    seconds: float


def assert_resumes(recipe: str, folder: Path, *, kills: int = 3, seed: int = 0, words: Sequence[str] = ()) -> int:
    """Train a recipe to its end; then `kills` times anew, kill -9 at a random moment, and resume.

    The moments fall into the stages of the model in turn.

    Args:
        recipe: Name of the recipe, or the path of a .toml file.
        folder: Where the runs are written.
        kills: How many runs to kill.
        seed: Of the moments.
        words: Further words of the command line.

    Returns:
        How many kills came before the end of a run.

    Raises:
        AssertionError: Model, optimizer or schedule do not end, bit for bit, as in the run that was left alone.
    """
    # The run that is left alone, whose journal tells when its stages begin and how long they last
    _finish(_start(recipe, folder / "whole", words))
    spans = _spans(read_journal(folder / "whole" / "journal.jsonl"))
    moments = random.Random(seed)
    early = 0
    for number in range(kills):
        # Kill at a random moment of a stage
        run = folder / f"killed-{number}"
        span = spans[number % len(spans)]
        process = _start(recipe, run, words)
        _wait_for_step(span.before, run / "journal.jsonl", process)
        time.sleep(moments.uniform(0, max(span.seconds, 0.1)))
        # A run that was done before the kill proves nothing, and is not counted
        early += process.poll() is None
        process.kill()
        process.wait()
        # Resume, and compare with the run that was left alone
        _check_visible(run)
        _finish(_start(recipe, run, [*words, "--resume"]))
        _assert_same(folder / "whole", run)
    return early


def _start(recipe: str, out: Path, words: Sequence[str]) -> subprocess.Popen[bytes]:
    """`torchcaps train` in a process of its own, with one thread, so that sums are taken in one order."""
    command = [*COMMAND, "train", recipe, "--out", str(out), "--quiet", *words]
    return subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL)


def _finish(process: subprocess.Popen[bytes]) -> None:
    assert process.wait() == 0, f"training ended with code {process.returncode}"


def _spans(journal: Sequence[Mapping[str, Any]]) -> list[_Span]:
    """The stages of a whole run; the last entry of each is its last step."""
    # A dict holds the last entry of each stage
    last = list({entry.get("stage"): entry for entry in journal}.values())
    start = [{"step": 0, "seconds": 0.0}, *last]
    return [_Span(a["step"], b["seconds"] - a["seconds"]) for a, b in zip(start, last, strict=False)]


def _wait_for_step(step: int, path: Path, process: subprocess.Popen[bytes]) -> None:
    """Until the journal is there, and so training has begun, and tells of that step."""
    while not path.exists() or max((entry["step"] for entry in read_journal(path)), default=0) < step:
        if process.poll() is not None:
            assert process.returncode == 0, f"training ended with code {process.returncode} before step {step}"
            return
        time.sleep(0.005)


def _check_visible(run: Path) -> None:
    """Whatever the moment, a checkpoint that can be seen is whole."""
    if (run / "checkpoint.safetensors").exists():
        load(run / "checkpoint.safetensors")


def _assert_same(one: Path, other: Path) -> None:
    a, b = (load(run / "checkpoint.safetensors") for run in (one, other))
    assert a.tensors.keys() == b.tensors.keys(), f"{other} holds other tensors than {one}"
    for name, tensor in a.tensors.items():
        assert torch.equal(tensor, b.tensors[name]), f"{name} in {other} differs from {one}"
    assert a.state == b.state, f"the state in {other} differs from {one}"
    # Seconds differ from run to run, so only these fields are compared
    for key in ("stage", "step", "finished"):
        assert getattr(a.meta, key) == getattr(b.meta, key), f"{key} in {other} differs from {one}"
