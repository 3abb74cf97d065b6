"""torchcaps bench"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

if TYPE_CHECKING:
    from torchcaps.bench import Plan, Row

__all__ = ["Bench"]

_STDOUT = Path("-")


@dataclass(frozen=True)
class Bench:
    """Measure speed and memory as ratios to the plain path, to the trunk and to a matrix product.

    Example: torchcaps bench capsnet-28 --batch 32 --json now.json --against then.json
    Without names: dynamic-1152x8-10x16, dynamic-4608x8-16x16, cd-576x8-20x16, em-64-8-16-16, em-32-32-32-32,
    capsnet-28, sparse-40; other sizes are named likewise. All of it takes about a quarter of an hour, --quick two
    minutes.
    """

    names: Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="[NAME ...]")] = ()
    """Cases; all if none is named."""
    batch: tuple[int, ...] = ()
    """Batch sizes (1 32 128; with --quick 32)."""
    threads: tuple[int, ...] = ()
    """Numbers of threads, 0 = all (0 1; with --quick 0)."""
    quick: bool = False
    """One batch size, shorter runs: rougher figures."""
    memory: bool = True
    """Leave peak memory out: it takes a process for each figure."""
    json: Annotated[tuple[Path, ...] | None, tyro.conf.arg(metavar="[FILE]")] = None
    """Write the rows as JSON into a file, or print them if no file is named."""
    against: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Rows of an earlier run, written by --json: how many times as fast each is now."""

    def run(self) -> int:
        from torchcaps.bench import compare, measure, read_rows, write_rows
        from torchcaps.bench.report import print_table
        from torchcaps.bench.rows import as_json
        from torchcaps.bench.timing import busy
        from torchcaps.utils.progress import progress

        names, file = self._words()
        plan = self._plan(names)
        then = read_rows(self.against) if self.against else None
        _check_shared(plan, then, self.against)
        _check_folder(file)
        warning = busy()
        if warning:
            print(f"torchcaps: {warning}", file=sys.stderr)
        rows = measure(plan, lambda pairs: progress(pairs, "measuring"))
        if then:
            rows = compare(rows, then)
        if file == _STDOUT:
            print(as_json(rows), end="")
            return 0
        print_table(rows)
        if file:
            write_rows(file, rows)
            print(f"written to {file}")
        return 0

    def _words(self) -> tuple[tuple[str, ...], Path | None]:
        """The cases and the file: what stands behind --json may be the first name, not the file."""
        from torchcaps.bench import case_of
        from torchcaps.errors import RecipeError

        files: list[Path] = []
        names = list(self.names)
        for word in self.json or ():
            try:
                case_of(str(word))
                names.append(str(word))
            except RecipeError:
                files.append(word)
        if len(files) > 1:
            raise RecipeError(f"--json {' '.join(map(str, files))} names {len(files)} files; one is wanted")
        file = None if self.json is None else (files or [_STDOUT])[0]
        return tuple(dict.fromkeys(names)), file

    def _plan(self, names: tuple[str, ...]) -> Plan:
        from torchcaps.bench import FULL, QUICK, case_of

        for name in names:
            case_of(name)  # refuses it before anything is measured
        plan = QUICK if self.quick else FULL
        return replace(
            plan,
            names=names or plan.names,
            batches=tuple(dict.fromkeys(self.batch)) or plan.batches,
            threads=self.threads or plan.threads,
            memory=self.memory,
        )


def _check_shared(plan: Plan, then: list[Row] | None, path: Path | None) -> None:
    """Say before measuring, rather than after, that there is nothing to compare."""
    from torchcaps.errors import RecipeError

    if then is None:
        return
    if not any(r.name in plan.names and r.batch in plan.batches and r.threads in plan.counts for r in then):
        has = sorted({f"{r.name} at batch {r.batch} with {r.threads} threads" for r in then})
        more = f" and {len(has) - 3} others" if len(has) > 3 else ""
        raise RecipeError(f"'{path}' has none of the rows asked for; it has {', '.join(has[:3])}{more}")


def _check_folder(file: Path | None) -> None:
    """Likewise, that the file cannot be written."""
    from torchcaps.errors import RecipeError

    if file and file != _STDOUT and (file.is_dir() or not file.parent.is_dir()):
        raise RecipeError(f"cannot write '{file}': give --json a file in a folder that exists")
