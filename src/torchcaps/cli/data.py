"""The command `torchcaps data`."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import tyro

from torchcaps.cli.next_steps import suggest_next

if TYPE_CHECKING:
    from torchcaps.data import DataConfig, FolderConfig

__all__ = ["Data"]


@dataclass(frozen=True)
class Data:
    """List the data sets, download one, verify what is there, draw a grid of images, or empty the cache.

    Example: torchcaps data list

    Example: torchcaps data fetch mnist

    Example: torchcaps data check --data.path pictures --data.size 32

    Example: torchcaps data show mnist --out mnist.png

    Example: torchcaps data clean

    Your own data are named by --data.path FOLDER or --data.path FILE.npz; every other key of their [data] table can be
    set as well, such as --data.size 32.
    """

    action: tyro.conf.Positional[Literal["list", "fetch", "check", "show", "clean"]]
    """list: what is known and what is here; fetch NAME: download it;
    check [NAME]: verify hashes, counts, balance and that no image is in two splits, or describe your own folder;
    show NAME: draw images; clean: remove the images that were prepared from your folders."""
    name: tyro.conf.Positional[str | None] = None
    """The data set that fetch, check or show is about;
    check takes all that are here without one, or what --data.path names."""
    data_dir: Path | None = None
    """A folder that is searched before TORCHCAPS_DATA and the cache."""
    out: Path = Path("images.png")
    """The file that show draws to."""
    json: bool = False
    """Print the list, or what check found in a folder of your own, as JSON."""
    overrides: tyro.conf.Suppress[tuple[str, ...]] = ()

    def run(self) -> int:
        from torchcaps.data import DATASETS
        from torchcaps.errors import DataError, suggestion

        # Check the name before a slow action
        name = self._name()
        if name is not None and name not in DATASETS:
            raise DataError(f"unknown data set '{name}'{suggestion(name, DATASETS)}")
        if name is None and self.action in ("fetch", "show"):
            raise DataError(f"{self.action} what? torchcaps data {self.action} NAME; known: {', '.join(DATASETS)}")
        if self.action == "check":
            self._check(name)
        elif self.action == "show" and name is not None:
            self._show(name)
        elif self.action == "fetch" and name is not None:
            self._fetch(name)
        elif self.action == "clean":
            self._clean()
        else:
            self._list()
        return 0

    def _settings(self) -> dict[str, object]:
        """Return the keys of the [data] table that were given."""
        from torchcaps.config import parse_overrides
        from torchcaps.errors import RecipeError

        given = parse_overrides(self.overrides)
        for key in given:
            if key != "data":
                raise RecipeError(f"'torchcaps data' does not know '--{key}'; keys of the data are --data.KEY VALUE")
        settings: dict[str, object] = given.get("data", {})
        return settings

    def _name(self) -> str | None:
        """Return the data set that was named, or the kind of the user's own that --data.path names."""
        settings = self._settings()
        if self.name is not None or not settings:
            return self.name
        return str(settings.get("name", "npz" if str(settings.get("path", "")).endswith(".npz") else "folder"))

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
        suggest_next("data", "fetch", "mnist")

    def _fetch(self, name: str) -> None:
        from torchcaps.data.status import fetch

        for line in fetch(name):
            print(line)
        suggest_next("data", "show", name)

    def _clean(self) -> None:
        from torchcaps.data.prepared import clean

        removed = clean()
        print(f"removed {removed.sets} prepared sets, {removed.size / 1e6:.1f} MB")
        suggest_next("data", "list")

    def _check(self, name: str | None) -> None:
        from torchcaps.data import DATASETS, FolderConfig, check_splits
        from torchcaps.data.status import is_here

        # Without a name, every set that is on this machine: loading another would end the command
        names = [name] if name else [n for n in DATASETS if is_here(n, self.data_dir)]
        for one in names:
            config = self._config(one)
            if isinstance(config, FolderConfig):
                self._check_folder(config)
            else:
                print(f"{one:14} {check_splits(config.load())}")
        # Name what was left out: no line for a set would look like a success
        absent = [] if name else [n for n in DATASETS if n not in names]
        if absent:
            print(f"not here: {', '.join(absent)}")
        # A folder of pictures has its own recipe
        if name == "folder":
            suggest_next("train", "capsnet-folder", "--data.path", str(self._settings().get("path", self.data_dir)))
        else:
            suggest_next("list")

    def _check_folder(self, config: FolderConfig) -> None:
        """Say what is in a folder of pictures and what training would get."""
        import json

        from torchcaps.data.folder_check import check_folder

        found = check_folder(config)
        print(json.dumps(found.to_json(), indent=2) if self.json else "\n".join(found.lines()))

    def _show(self, name: str) -> None:
        from torchcaps.evaluate.dataset_preview import preview_grid
        from torchcaps.utils.files import write_atomically

        write_atomically(self.out, [preview_grid(self._config(name).load().test)])
        print(f"drew {self.out}")
        suggest_next("list")

    def _config(self, name: str) -> DataConfig:
        """Return a set by the settings that were given; `folder` and `npz` also take --data-dir as their path."""
        from torchcaps.config import from_dict
        from torchcaps.data import DATASETS
        from torchcaps.errors import DataError

        known = {f.name for f in fields(DATASETS[name])}
        settings = {key: value for key, value in self._settings().items() if key != "name"}
        # Sets drawn by code have neither key: for them --data-dir is ignored
        key = "path" if "path" in known else "data_dir"
        if self.data_dir is not None and key in known:
            settings = {key: str(self.data_dir), **settings}
        if key == "path" and not settings.get("path"):
            raise DataError(f"'{name}' is your own data: say where it is with --data.path (or --data-dir)")
        if "path" in settings:
            settings["path"] = str(settings["path"])
        config: DataConfig = from_dict(DATASETS[name], settings, where="--data")
        return config
