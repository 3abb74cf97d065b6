"""Does a run that is killed go on as if nothing had happened?"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from torchcaps.train.checkpoint import load

__all__ = ["assert_resumes"]


def assert_resumes(recipe: str, folder: Path, *, kills: int = 3, seed: int = 0, words: Sequence[str] = ()) -> int:
    """Train a recipe to its end; then `kills` times anew, kill -9 at a random moment, and resume.

    Raises AssertionError unless model, optimiser and schedule end bit for bit as in the run that was left alone.
    `words` are further words of the command line. Returns how many kills came before the end.
    """
    start = time.monotonic()
    _finish(_start(recipe, folder / "whole", words))
    length = time.monotonic() - start - _seconds_to_start(recipe, folder / "first", words)
    moments, early = random.Random(seed), 0
    for number in range(kills):
        run = folder / f"killed-{number}"
        process = _start(recipe, run, words)
        _wait_for(run / "journal.jsonl", process)
        time.sleep(moments.uniform(0, max(length, 0.1)))
        early += process.poll() is None
        process.kill()
        process.wait()
        _check_visible(run)
        _finish(_start(recipe, run, [*words, "--resume"]))
        _assert_same(folder / "whole", run)
    return early


def _start(recipe: str, out: Path, words: Sequence[str]) -> subprocess.Popen[bytes]:
    """`torchcaps train` in a process of its own, with one thread, so that sums are taken in one order."""
    command = [sys.executable, "-m", "torchcaps", "train", recipe, "--out", str(out), "--quiet", *words]
    return subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL)


def _finish(process: subprocess.Popen[bytes]) -> None:
    assert process.wait() == 0, f"training ended with code {process.returncode}"


def _seconds_to_start(recipe: str, out: Path, words: Sequence[str]) -> float:
    """How long a process takes before its first step."""
    start = time.monotonic()
    process = _start(recipe, out, words)
    _wait_for(out / "journal.jsonl", process)
    process.kill()
    process.wait()
    return time.monotonic() - start


def _wait_for(path: Path, process: subprocess.Popen[bytes]) -> None:
    while not path.exists():
        assert process.poll() is None, f"training ended with code {process.returncode} before its first step"
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
    for key in ("step", "state"):
        assert a.meta[key] == b.meta[key], f"{key} in {other} differs from {one}"
