"""Compare the speed of two source trees, such as a commit and the one before it, by turns on one machine.

    git worktree add /tmp/old COMMIT
    python -m benchmarks.compare_commits /tmp/old/src src [NAME ...] [--batch 128] [--pairs 5] [--tolerance 0.05]

Each tree runs in a process of its own with its own code, weights and cached kernels. The two take turns, a few runs at
a time, and never run at once; the best time of each counts, since whatever else the machine does only adds to it.

Two processes with the same code differ by up to a tenth, since each has its memory at other addresses. Several pairs of
processes are therefore measured one after another, and the median of their ratios counts. Exit code 1 if a case of the
new tree is slower than the tolerance allows.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from statistics import median
from time import perf_counter
from types import TracebackType
from typing import Any, NamedTuple

__all__ = ["Comparison", "Worker", "compare", "main"]

NAMES = ("em-64-8-16-16", "dynamic-1152x8-10x16", "cd-576x8-20x16", "capsnet-28")
KINDS = ("forward", "step")


class Comparison(NamedTuple):
    """Best seconds of a case in the old tree and in the new one, a number for each pair of processes."""

    name: str
    kind: str
    old: tuple[float, ...]
    new: tuple[float, ...]

    @property
    def ratios(self) -> tuple[float, ...]:
        """How many times as long the new tree takes, in each pair."""
        return tuple(new / old for old, new in zip(self.old, self.new, strict=True))

    @property
    def ratio(self) -> float:
        """The median of the ratios."""
        return median(self.ratios)


class Worker:
    """A process that times cases with the code of one source tree."""

    def __init__(self, src: Path, batch: int, threads: int) -> None:
        root = src.resolve().parent
        paths = os.pathsep.join(map(str, (src.resolve(), root)))
        words = [sys.executable, "-P", str(Path(__file__).resolve()), "--worker", str(batch), str(threads)]
        self._process = subprocess.Popen(
            words,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=root,
            env={"GOMP_SPINCOUNT": "1000", **os.environ, "PYTHONPATH": paths},
        )

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.terminate()
        self._process.wait()

    def seconds(self, name: str, kind: str, budget: float) -> float:
        """Return the best time of a case within some seconds; the first question also compiles.

        Args:
            name: Case, such as "capsnet-28".
            kind: "forward" or "step".
            budget: Seconds to spend, beyond one run.

        Returns:
            Seconds of the fastest run.

        Raises:
            RuntimeError: If the process died; its own message is on standard error.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps([name, kind, budget]) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # the empty answer below says so
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"the process that measures '{name}' ended; see its message above")
        return float(answer)


def compare(old: Worker, new: Worker, names: Sequence[str], rounds: int, seconds: float) -> list[Comparison]:
    """Time each case in both trees by turns.

    Args:
        old: Worker of the old tree.
        new: Worker of the new tree.
        names: Cases.
        rounds: Turns of each tree.
        seconds: Length of a turn.

    Returns:
        The best times of this pair of processes, for each case forward and step.
    """
    found = []
    for name in names:
        for kind in KINDS:
            for worker in (old, new):
                worker.seconds(name, kind, 0.0)  # compiles, or loads what was compiled
            pairs = [(old.seconds(name, kind, seconds), new.seconds(name, kind, seconds)) for _ in range(rounds)]
            best_old = min(pair[0] for pair in pairs)
            best_new = min(pair[1] for pair in pairs)
            found.append(Comparison(name, kind, (best_old,), (best_new,)))
    return found


def join_pairs(pairs: Sequence[Sequence[Comparison]]) -> list[Comparison]:
    """Put the comparisons of several pairs of processes together, case by case."""
    return [
        Comparison(same[0].name, same[0].kind, sum((row.old for row in same), ()), sum((row.new for row in same), ()))
        for same in zip(*pairs, strict=True)
    ]


def _line(row: Comparison) -> str:
    """Format a comparison for the terminal."""
    times = f"{1000 * median(row.old):10.2f} {1000 * median(row.new):10.2f} {row.ratio:10.3f}"
    return f"{row.name:24} {row.kind:8} {times}    {min(row.ratios):.3f} to {max(row.ratios):.3f}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare two trees; exit code 1 if the new one is slower."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:1] == ["--worker"]:
        _serve(batch=int(words[1]), threads=int(words[2]))
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path, metavar="OLD_SRC", help="the folder that holds the old package torchcaps")
    parser.add_argument("new", type=Path, metavar="NEW_SRC", help="the folder that holds the new one")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"cases (default: {' '.join(NAMES)})")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--threads", type=int, default=0, help="0 = all")
    parser.add_argument("--pairs", type=int, default=5, help="pairs of processes")
    parser.add_argument("--rounds", type=int, default=4, help="turns of each tree in a pair")
    parser.add_argument("--seconds", type=float, default=1.0, help="length of a turn")
    parser.add_argument("--tolerance", type=float, default=0.05, help="how much slower the new tree may be")
    given = parser.parse_args(words)
    for src in (given.old, given.new):
        if not (src / "torchcaps").is_dir():
            parser.error(f"'{src}' came, which holds no package torchcaps; a folder such as src is wanted")
    pairs = []
    for number in range(given.pairs):
        print(f"pair {number + 1} of {given.pairs}", file=sys.stderr)
        with Worker(given.old, given.batch, given.threads) as old, Worker(given.new, given.batch, given.threads) as new:
            pairs.append(compare(old, new, given.names or NAMES, given.rounds, given.seconds))
    rows = join_pairs(pairs)
    print(f"{'case':24} {'kind':8} {'old ms':>10} {'new ms':>10} {'new / old':>10}    smallest to largest ratio")
    for row in rows:
        print(_line(row))
    slower = [row for row in rows if row.ratio > 1 + given.tolerance]
    for row in slower:
        print(f"{row.name} {row.kind} is {row.ratio - 1:.1%} slower", file=sys.stderr)
    return 1 if slower else 0


def _serve(batch: int, threads: int) -> None:
    """Answer questions on standard input, with the code that the import path finds."""
    import torch

    torch.set_flush_denormal(True)
    if threads:
        torch.set_num_threads(threads)
    case_of = _case_of()
    works: dict[str, Any] = {}
    for line in sys.stdin:
        name, kind, budget = json.loads(line)
        if name not in works:
            works = {name: case_of(name).ours(batch)}  # one case at a time in memory
        print(_best(getattr(works[name], kind), budget), flush=True)


def _case_of() -> Callable[[str], Any]:
    """Find the cases of a tree: version 0.1 had them inside the package."""
    try:
        module = import_module("torchcaps.bench.cases")
    except ModuleNotFoundError:
        module = import_module("benchmarks.cases")
    found: Callable[[str], Any] = module.case_of
    return found


def _best(act: Callable[[], object], budget: float) -> float:
    """Return the shortest run of `act` within some seconds, of at least one."""
    best = float("inf")
    begin = perf_counter()
    while best == float("inf") or perf_counter() - begin < budget:
        start = perf_counter()
        act()
        best = min(best, perf_counter() - start)
    return best


if __name__ == "__main__":
    sys.exit(main())
