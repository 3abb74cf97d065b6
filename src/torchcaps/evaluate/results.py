"""Results have one form: `results/<recipe>.json`, written by a command, read by `experiments/table.py`.

recipe    name of the recipe                     controls  row name -> metric -> list
config    the recipe as plain data               paper     metric -> the paper's number, where it has one
seeds     one a run                              budget    steps, seconds and threads of the runs
metrics   metric -> list over the seeds          versions  of torchcaps, torch and Python
"""

from __future__ import annotations

import json
import platform
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch

from torchcaps import __version__
from torchcaps.config import flatten
from torchcaps.errors import DataError
from torchcaps.utils.files import make_folder, parse_json, read_regular, write_atomically
from torchcaps.utils.notices import notice

__all__ = ["UNFINISHED", "UNFINISHED_LABEL", "Metrics", "Result", "gather", "read_result", "versions", "write_result"]

Metrics = dict[str, list[float]]
"""Metric name -> values over the seeds."""

_MAX_BYTES = 1 << 28
"""Of a results file."""

UNFINISHED = "unfinished_runs"
"""Entry of a result's budget: how many of its runs were not trained to their end. Absent if all were."""

UNFINISHED_LABEL = "unfinished"
"""Stands in brackets behind the name of a row whose runs were not trained to their end."""


@dataclass(frozen=True)
class Result:
    """One row of a results table and the rows of its controls.

    Attributes:
        recipe: Name of the recipe.
        config: The recipe's settings.
        seeds: Seeds of the runs.
        metrics: Name of a metric -> one value for each seed.
        controls: Name of a control -> its metrics.
        paper: Name of a metric -> the paper's number.
        budget: Steps, seconds, threads and parameters of a run.
        versions: Of the packages that made the result.
    """

    recipe: str
    config: dict[str, Any]
    seeds: list[int]
    metrics: Metrics
    controls: dict[str, Metrics]
    paper: dict[str, float]
    budget: dict[str, float]
    versions: dict[str, str]

    def __post_init__(self) -> None:
        for name, values in self.metrics.items():
            if len(values) != len(self.seeds):
                raise DataError(
                    f"results of '{self.recipe}': {name} has {len(values)} values for {len(self.seeds)} seeds"
                )


def gather(rows: Iterable[Mapping[str, float]]) -> Metrics:
    """Turn the rows of several seeds, each metric name -> value, into lists over the seeds."""
    rows = list(rows)
    # All rows have the metrics of the first.
    return {name: [float(row[name]) for row in rows] for name in (rows[0] if rows else {})}


def versions() -> dict[str, str]:
    return {"torchcaps": __version__, "torch": torch.__version__, "python": platform.python_version()}


def write_result(folder: Path, result: Result) -> Path:
    """Write a result as `<recipe>.json`, whole or not at all.

    Args:
        folder: Where to write; it is made if it does not exist.
        result: What to write.

    Returns:
        The path of the file. One that is there is replaced, which is said if it was of other settings.
    """
    path = make_folder(folder) / f"{result.recipe}.json"
    if path.exists():
        _report_replacement(path, result)
    write_atomically(path, [(json.dumps(asdict(result), indent=2) + "\n").encode()])
    return path


def _report_replacement(path: Path, result: Result) -> None:
    """Say so if the file is of runs with other settings, so that no result is lost unnoticed."""
    try:
        before = flatten(read_result(path).config)
    except DataError:
        return
    after = flatten(result.config)
    changed = [
        f"{key} = {before[key]}, now {after[key]}"
        for key in sorted(before.keys() & after.keys() - {"seed", "about"})
        if before[key] != after[key]
    ]
    if changed:
        notice(f"{path} is replaced; it was of runs with other settings: {'; '.join(changed)}")


def read_result(path: Path) -> Result:
    """Read and check a results file.

    Args:
        path: Of the file.

    Returns:
        The result.

    Raises:
        DataError: If it cannot be read, or is none.
    """
    names = {f.name for f in fields(Result)}
    try:
        data = parse_json(read_regular(path, _MAX_BYTES))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise DataError(
            f"cannot read results '{path}': {reason}; name a file that torchcaps evaluate --results wrote"
        ) from None
    # A missing or additional field means that another program or version wrote the file.
    if not isinstance(data, dict) or data.keys() != names:
        got = sorted(data) if isinstance(data, dict) else type(data).__name__
        raise DataError(f"'{path}' is no results file: it holds {got}, wanted {sorted(names)}")
    return Result(**data)
