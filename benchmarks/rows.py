"""The form of a measurement: the machine and a list of rows, as JSON, and how two of them compare."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from benchmarks.machine import Machine
from torchcaps.errors import DataError
from torchcaps.utils.files import write_atomically

__all__ = ["Key", "Measurement", "Row", "as_json", "compare", "read_measurement", "read_rows", "update", "write_rows"]

Key = tuple[str, str, int, int]


@dataclass(frozen=True)
class Row:
    """One case, forward or a whole step, at a batch and a number of threads. Ratios are better when larger, but for
    `trunk_ratio`.

    ms_per_sample   our time                              plain_ratio     the plain path's time / ours
    peak_mb         our peak memory over import           memory_ratio    the plain path's peak / ours
    sgemm_gflops    10^9 operations a second of a matrix product, at the same time, with the same threads
    sgemm_fraction  our operations a second, by formula, as a part of that
    trunk_ratio     our time / that of the convolutions alone; null where there are none
    plain_batch     the batch that the plain path was measured at; where it is smaller than `batch`, the plain path
                    needs too much memory or time, and its figures go on along the line through half of it and it
    then_ratio      our time then / now, where a run was compared with an earlier one

    Memory is measured with the largest number of threads, and null where it could not be.
    """

    name: str
    kind: str
    batch: int
    threads: int
    ms_per_sample: float
    plain_ratio: float
    memory_ratio: float | None
    peak_mb: float | None
    sgemm_fraction: float
    sgemm_gflops: float
    trunk_ratio: float | None
    plain_batch: int
    then_ratio: float | None = None

    @property
    def key(self) -> Key:
        """What a row of another run must share to be compared."""
        return self.name, self.kind, self.batch, self.threads


def compare(now: Iterable[Row], then: Iterable[Row]) -> list[Row]:
    """The rows of now, with how many times as fast they are as then; None where then has no such row."""
    before = {row.key: row.ms_per_sample for row in then}
    return [replace(row, then_ratio=before[row.key] / row.ms_per_sample if row.key in before else None) for row in now]


@dataclass(frozen=True)
class Measurement:
    """Rows that were measured together, and where; `machine` is None in files from before machines were recorded."""

    machine: Machine | None
    rows: list[Row]


def update(now: Sequence[Row], earlier: Sequence[Row]) -> list[Row]:
    """The earlier rows with those that were measured again in their places, and new rows behind them.

    A row that was measured again without memory keeps the memory that it had.
    """
    found = {row.key: row for row in earlier}
    for row in now:
        before = found.get(row.key, row)
        memory = before if row.peak_mb is None else row
        found[row.key] = replace(row, memory_ratio=memory.memory_ratio, peak_mb=memory.peak_mb)
    return list(found.values())


def as_json(rows: Sequence[Row], machine: Machine) -> str:
    """An object with the machine and a list of objects, one a row."""
    found = {"machine": asdict(machine), "rows": [asdict(row) for row in rows]}
    return json.dumps(found, indent=2, allow_nan=False) + "\n"


def write_rows(path: Path, rows: Sequence[Row], machine: Machine) -> None:
    """Write the file whole or not at all."""
    write_atomically(path, [as_json(rows, machine).encode()])


def read_measurement(path: Path) -> Measurement:
    """Read and check what `write_rows` wrote, or a list of rows alone, as earlier versions wrote it."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise DataError(
            f"cannot read '{path}': {reason}; a file of python -m benchmarks --json FILE is wanted"
        ) from None
    machine = None
    entries = found
    if isinstance(found, dict):
        machine = _machine_of(found.get("machine"))
        entries = found.get("rows") if machine is not None and found.keys() == {"machine", "rows"} else None
    if not isinstance(entries, list) or not entries or not all(_is_row(entry) for entry in entries):
        raise DataError(f"'{path}' is no list of measurements; a file of python -m benchmarks --json FILE is wanted")
    return Measurement(machine, [Row(**entry) for entry in entries])


def read_rows(path: Path) -> list[Row]:
    """Read the rows of a measurement, wherever it was taken."""
    return read_measurement(path).rows


def _machine_of(entry: object) -> Machine | None:
    """The machine that an entry describes; None if it describes none."""
    if not isinstance(entry, dict) or entry.keys() != {f.name for f in fields(Machine)}:
        return None
    if (
        not isinstance(entry["processor"], str)
        or not isinstance(entry["torch"], str)
        or type(entry["cores"]) is not int
    ):
        return None
    return Machine(**entry)


_KINDS: dict[str, tuple[type, ...]] = {"str": (str,), "int": (int,), "float": (int, float), "None": (type(None),)}


def _is_row(entry: object) -> bool:
    """Whether the names are those of a row and each value is what its annotation says."""
    if not isinstance(entry, dict) or entry.keys() != {f.name for f in fields(Row)}:
        return False
    for f in fields(Row):
        allowed = tuple(kind for word in str(f.type).split(" | ") for kind in _KINDS[word])
        if not isinstance(entry[f.name], allowed) or isinstance(entry[f.name], bool):
            return False
    return bool(entry["ms_per_sample"] > 0)
