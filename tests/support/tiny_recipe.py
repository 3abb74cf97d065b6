"""The smallest recipe that uses everything: routing, decoder, augmentation, momentum, a schedule, clipping."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torchcaps.config import from_dict, merge
from torchcaps.train.checkpoint import read_tensors, write_tensors
from torchcaps.train.recipe import Recipe

TINY: dict[str, Any] = {
    "name": "tiny",
    "seed": 3,
    "data": {"name": "glyphs", "train": 80, "test": 40, "size": 16},
    "model": {
        "name": "capsnet", "channels": 4, "kernel": 5, "types": 2, "type_dimension": 4, "primary_kernel": 5,
        "dimension": 4, "decoder": [8],
    },
    "optimizer": {"name": "Adam", "lr": 0.01},
    "schedule": {"name": "ExponentialLR", "options": {"gamma": 0.99}},
    "train": {"epochs": 2.0, "batch": 8, "max_shift": 2, "clip": 1.0, "save_every": 4, "log_every": 2},
}  # fmt: skip


def tiny(**over: Any) -> Recipe:
    """The recipe, with tables changed: tiny(train={"epochs": 1.0})."""
    return from_dict(Recipe, merge(TINY, over))


def tiny_toml(folder: Path, extra: str = "") -> Path:
    """The recipe as a file, for the command line."""
    lines = ["seed = 3", extra]
    for table, values in TINY.items():
        if isinstance(values, dict):
            lines += [f"[{table}]", *(f"{key} = {_toml(value)}" for key, value in values.items())]
    path = folder / "tiny.toml"
    path.write_text("\n".join(lines) + "\n")
    return path


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{k} = {_toml(v)}" for k, v in value.items()) + " }"
    return f'"{value}"' if isinstance(value, str) else str(value)


def edit_document(source: Path, path: Path, change: dict[str, Any], state: object = None) -> None:
    """Write a checkpoint whose record says something else, with a digest that fits."""
    tensors, document = read_tensors(source)
    meta = {**document["meta"], **change}  # type: ignore[dict-item]
    write_tensors(path, tensors, {"meta": meta, "state": document["state"] if state is None else state})
