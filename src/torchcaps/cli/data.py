"""The command `torchcaps data`."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import tyro

if TYPE_CHECKING:
    from torchcaps.data import DataConfig

__all__ = ["Data"]


@dataclass(frozen=True)
class Data:
    """List the data sets, download one, verify what is there, or draw a grid of images.

    Example: torchcaps data fetch mnist && torchcaps data show mnist --out mnist.png
    """

    action: tyro.conf.Positional[Literal["list", "fetch", "check", "show"]]
    """list: what is known and what is here; fetch NAME: download it; check [NAME]: verify hashes, counts, balance
    and that no image is in two splits; show NAME: draw images."""
    name: tyro.conf.Positional[str | None] = None
    """The data set that fetch, check or show is about; check takes all that are here without one."""
    data_dir: Path | None = None
    """A folder that is searched before TORCHCAPS_DATA and the cache."""
    out: Path = Path("images.png")
    """The file that show draws to."""
    json: bool = False
    """Print the list as JSON."""

    def run(self) -> int:
        from torchcaps.data import DATASETS
        from torchcaps.errors import DataError, suggestion

        # Check the name before a slow action
        if self.name is not None and self.name not in DATASETS:
            raise DataError(f"unknown data set '{self.name}'{suggestion(self.name, DATASETS)}")
        if self.name is None and self.action in ("fetch", "show"):
            raise DataError(f"{self.action} what? torchcaps data {self.action} NAME; known: {', '.join(DATASETS)}")
        steps = {"list": self._list, "fetch": self._fetch, "check": self._check, "show": self._show}
        steps[self.action]()
        return 0

    def _list(self) -> None:
        import json

        from torchcaps.data.status import overview

        rows = overview(self.data_dir)
        if self.json:
            print(json.dumps([row._asdict() for row in rows], indent=2))
            return
        for row in rows:
            print(f"{row.name:14} {row.state:28} {row.about}")
            print(f"{'':14} {row.size}, {row.license}")

    def _fetch(self) -> None:
        from torchcaps.data.status import fetch

        assert self.name is not None
        for line in fetch(self.name):
            print(line)

    def _check(self) -> None:
        from torchcaps.data import DATASETS, check_splits
        from torchcaps.data.status import is_here

        # Without a name, every set that is on this machine: loading another would end the command
        names = [self.name] if self.name else [n for n in DATASETS if is_here(n, self.data_dir)]
        for name in names:
            print(f"{name:14} {check_splits(self._config(name).load())}")
        # Name what was left out: no line for a set would look like a success
        absent = [] if self.name else [n for n in DATASETS if n not in names]
        if absent:
            print(f"not here: {', '.join(absent)}")

    def _show(self) -> None:
        from torchcaps.evaluate.dataset_preview import preview_grid
        from torchcaps.utils.files import write_atomically

        assert self.name is not None
        write_atomically(self.out, [preview_grid(self._config(self.name).load().test)])
        print(f"drew {self.out}")

    def _config(self, name: str) -> DataConfig:
        """Return a set with its defaults; `folder` and `npz` take --data-dir as their path."""
        from torchcaps.data import DATASETS
        from torchcaps.errors import DataError

        known = {f.name for f in fields(DATASETS[name])}
        if "path" in known and self.data_dir is None:
            raise DataError(f"'{name}' is your own data: say where it is with --data-dir")
        # Sets drawn by code have neither key: for them --data-dir is ignored
        key = "path" if "path" in known else "data_dir"
        given = {key: str(self.data_dir)} if self.data_dir and key in known else {}
        config: DataConfig = DATASETS[name](**given)
        return config
