"""What data sets there are, which are here, and how to get the others: for `torchcaps data`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from torchcaps.data import DATASETS
from torchcaps.data.cache import fetch_set, state
from torchcaps.data.manifest import SETS
from torchcaps.errors import DataError

__all__ = ["fetch", "is_here", "overview"]

NEEDS = {"affnist": "mnist", "multimnist": "mnist"}
"""Sets that are made from another set's files."""
BUILT_IN = ("glyphs",)
OWN = ("folder", "npz")


def overview(data_dir: Path | None = None) -> list[dict[str, str]]:
    """One row a set: name, about, state, size, license."""
    return [_row(name, data_dir) for name in DATASETS]


def is_here(name: str, data_dir: Path | None = None) -> bool:
    """Whether a set can be loaded as things are; a wrong file in a folder that the user named is a DataError."""
    if name in BUILT_IN or name in OWN:
        return name in BUILT_IN
    files = state(NEEDS.get(name, name), data_dir)
    variants = {file.variant for file, _ in files}
    return any(all(path for file, path in files if file.variant == variant) for variant in variants)


def fetch(name: str) -> Iterator[str]:
    """Get the files of a set into the cache, a line for each."""
    if name in BUILT_IN or name in OWN:
        yield f"{name}: nothing to fetch, it is {'built in' if name in BUILT_IN else 'your own'}"
        return
    for file, path in fetch_set(NEEDS.get(name, name)).items():
        yield f"{file}: {path}"


def _row(name: str, data_dir: Path | None) -> dict[str, str]:
    about = (DATASETS[name].__doc__ or "").splitlines()[0]
    source = NEEDS.get(name, name)
    if name in OWN or name in BUILT_IN:
        found = "built in" if name in BUILT_IN else "your own: [data] path = ..."
        return {"name": name, "about": about, "state": found, "size": "no file", "license": "yours"}
    known = SETS[source]
    try:
        found = "here" if is_here(name, data_dir) else f"missing: fetch {source}"
    except DataError as error:
        found = str(error)
    size = "size unknown" if known.size is None else f"{known.size / 1e6:.0f} MB"
    return {"name": name, "about": about, "state": found, "size": size, "license": known.license}
