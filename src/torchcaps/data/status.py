"""What data sets there are, which are on this machine, and how to get the others: for `torchcaps data`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from torchcaps.data import DATASETS
from torchcaps.data.cache import fetch_set, state
from torchcaps.data.manifest import LICENSES, files_of
from torchcaps.errors import DataError

__all__ = ["SetStatus", "fetch", "is_here", "overview"]

GENERATED_FROM = {"affnist": "mnist", "multimnist": "mnist"}
"""Sets that are generated from another set's files."""
BUILT_IN = ("glyphs",)
USER_DATA = ("folder", "npz", "given")


class SetStatus(NamedTuple):
    """A row of `torchcaps data list`: the set, what it is, whether it is here, its download and its license."""

    name: str
    about: str
    state: str
    size: str
    license: str


def overview(data_dir: Path | None = None) -> list[SetStatus]:
    """Describe every data set; `data_dir` is searched before $TORCHCAPS_DATA and the cache."""
    return [_status(name, data_dir) for name in DATASETS]


def is_here(name: str, data_dir: Path | None = None) -> bool:
    """Tell whether a set can be loaded from files that are on this machine.

    Raises:
        DataError: if a folder that the user named holds a wrong file.
    """
    if name in BUILT_IN or name in USER_DATA:
        return name in BUILT_IN
    files = state(GENERATED_FROM.get(name, name), data_dir)
    variants = {file.variant for file, _ in files}
    return any(all(path for file, path in files if file.variant == variant) for variant in variants)


def fetch(name: str) -> Iterator[str]:
    """Download the files of a set to the cache; yields a line for each.

    Raises:
        DataError: if a file cannot be had.
    """
    if name in BUILT_IN or name in USER_DATA:
        yield f"{name}: nothing to fetch, it is {'built in' if name in BUILT_IN else 'your own'}"
        return
    for file, path in fetch_set(GENERATED_FROM.get(name, name)).items():
        yield f"{file}: {path}"


def _status(name: str, data_dir: Path | None) -> SetStatus:
    about = (DATASETS[name].__doc__ or "").splitlines()[0]
    if name in BUILT_IN:
        return SetStatus(name, about, "built in", "no file", "MIT")
    if name in USER_DATA:
        where = "torchcaps.fit" if name == "given" else "[data] path = ..."
        return SetStatus(name, about, f"your own: {where}", "no file", "yours")
    source = GENERATED_FROM.get(name, name)
    try:
        found = "here" if is_here(name, data_dir) else f"missing: fetch {source}"
    except DataError as error:
        found = str(error)
    # A download brings the first variant of a set.
    downloaded = files_of(source, files_of(source)[0].variant)
    size = sum(file.size for file in downloaded) / 1e6
    return SetStatus(name, about, found, f"{size:.0f} MB", LICENSES[source])
