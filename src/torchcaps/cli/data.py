"""torchcaps data"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import tyro

__all__ = ["Data"]


@dataclass(frozen=True)
class Data:
    """List the data sets, fetch one, or check what is there.

    Example: torchcaps data check
    """

    action: tyro.conf.Positional[Literal["list", "fetch", "check"]]
    """list: what is known; fetch NAME: get its files; check: load each set and look at it."""
    name: tyro.conf.Positional[str | None] = None
    """The data set that fetch or check is about; check takes all without one."""

    def run(self) -> int:
        from torchcaps.data import DATASETS
        from torchcaps.errors import DataError, nearest

        if self.name is not None and self.name not in DATASETS:
            raise DataError(f"unknown data set '{self.name}'{nearest(self.name, DATASETS)}")
        if self.action == "fetch" and self.name is None:
            raise DataError(f"fetch what? torchcaps data fetch NAME; known: {', '.join(DATASETS)}")
        for name in DATASETS if self.name is None else [self.name]:
            print(f"{name:10} {getattr(self, '_' + self.action)(name)}")
        return 0

    def _list(self, name: str) -> str:
        return "built in, drawn by code; no file, no licence, nothing to fetch"

    def _fetch(self, name: str) -> str:
        return "is built in: there is nothing to fetch"

    def _check(self, name: str) -> str:
        from torchcaps.data import DATASETS, check_splits

        return check_splits(DATASETS[name]().load())
