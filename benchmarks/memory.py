"""Peak memory of a case, each measured in a process of its own.

    python -m benchmarks.memory_worker capsnet-28 --batch 32 --what plain

"Over import" is the most memory that the process ever held, less what it held once all code was there: torchcaps,
numba, what torch fetches for an optimizer, and the machine code of loops and convolutions, for which some samples pass
first. Weights, inputs, gradients and the optimizer's state count, libraries do not. The
figures are the kernel's resident set (VmRSS) and its peak (VmHWM). Not `ru_maxrss`, which a new process inherits from
the one that starts it: a child of a bench that once held 10 GB would report 10 GB.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import math
import pkgutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple

import torch

from benchmarks.cases import Work, case_of
from torchcaps.kernels import loops
from torchcaps.routing.dispatch import FEWEST
from torchcaps.train.recipe import OptimizerConfig

__all__ = ["Peaks", "What", "available_mb", "measurable", "now_mb", "peak_mb", "peaks", "probe"]

What = Literal["fast", "plain"]

_ROOT = Path(__file__).parents[1]
_STATUS = Path("/proc/self/status")
_MACHINE = Path("/proc/meminfo")


class Peaks(NamedTuple):
    """MB over import: weights and inputs, the peak of a forward pass, the peak of a step after it."""

    held: float
    forward: float
    step: float


def measurable() -> bool:
    """Whether this system tells how much memory a process holds; Linux does."""
    return _STATUS.exists()


def now_mb() -> float:
    """Memory that this process holds."""
    return _read(_STATUS, "VmRSS")


def peak_mb() -> float:
    """The most that this process ever held."""
    return _read(_STATUS, "VmHWM")


def available_mb() -> float:
    """Memory that the machine can still give; without limit where nobody knows."""
    return _read(_MACHINE, "MemAvailable") if _MACHINE.exists() else math.inf


def probe(name: str, batch: int, what: What) -> Peaks:
    """Run the case once forward and one step; right only in a process that has done nothing else."""
    for module in pkgutil.iter_modules(loops.__path__, f"{loops.__name__}."):
        importlib.import_module(module.name)
    OptimizerConfig()  # tries itself, for which torch imports much
    case = case_of(name)
    make = case.ours if what == "fast" else case.plain
    _pass_some(make)
    imported = now_mb()
    work = make(batch)
    held = now_mb()
    work.forward()
    forward = peak_mb()
    work.step()
    return Peaks(held - imported, forward - imported, peak_mb() - imported)


def _pass_some(make: Callable[[int], Work]) -> None:
    """As few samples as a kernel takes through everything, and nothing of it kept: what was freed goes back to the
    system (glibc)."""
    work = make(FEWEST)
    work.forward()
    work.step()
    del work
    gc.collect()
    getattr(ctypes.CDLL(None), "malloc_trim", lambda pad: None)(0)


def peaks(name: str, batch: int, what: What, count: int | None = None) -> Peaks | None:
    """`probe` in a fresh process with so many threads; None, and a line that says so, if it did not live."""
    words = [name, "--batch", str(batch), "--what", what, "--threads", str(count or torch.get_num_threads())]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.memory_worker", *words], cwd=_ROOT, capture_output=True, text=True
    )
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}; too little memory?"])[-1]
        print(f"benchmarks: no memory figure of {name} ({what}, batch {batch}): {reason}", file=sys.stderr)
        return None
    return Peaks(**json.loads(done.stdout))


def _read(path: Path, key: str) -> float:
    """A size in a file of /proc, in MB."""
    return next(int(line.split()[1]) / 1024 for line in path.read_text().splitlines() if line.startswith(f"{key}:"))
