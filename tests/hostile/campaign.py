"""Checkpoints that are damaged or forged, and npz files of any contents, by the thousand.

Each is refused by one error, or loads, at little cost:

    python tests/hostile/campaign.py --mutants 70000 --forgeries 6000 --arrays 2000

The suite runs a small share of it (`test_campaign.py`).
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import resource
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.append(str(Path(__file__).parents[1]))  # for `support`, if this is run as a script

import numpy as np

from support.mutations import blind_edits
from support.tiny_recipe import tiny
from torchcaps.data import NpzConfig
from torchcaps.errors import CheckpointError, DataError
from torchcaps.train.checkpoint import read_tensors, save, write_tensors
from torchcaps.train.recipe import Recipe
from torchcaps.train.run import load_run
from torchcaps.train.train_state import build_training
from torchcaps.types import ImageSpec

SPEC = ImageSpec(1, 16, 16, 10)
MODELS: list[dict[str, Any]] = [
    {"name": "capsnet", "channels": 4, "kernel": 5, "types": 2, "type_dimension": 4, "decoder": [8], "dimension": 4},
    {"name": "matrix-tiny"},
    {"name": "cnn", "widths": [4], "hidden": [8]},
    {"name": "sparse", "channels": 4, "kernel": 5, "types": 2, "capsules": 4, "decoder": [8], "primary_kernel": 5},
    {"name": "poe", "capsules": 4, "autoencoder": {"channels": [4, 8], "kernel": 3}},
]
SIZES = [0, -1, 1, 2, 3, 7, 63, 64, 65, 1000, 4096, 65_535, 65_536, 65_537, 10**6, 10**9, 2**31, 2**63 - 1, 2**63]
VALUES = [*SIZES, 2**64, 10**30, 10**400, 0.5, -0.5, 1e308, float("inf"), float("nan"), True, None, "", "none", "all"]
VALUES += [
    "x" * 9999,
    [],
    [1],
    [65_536] * 64,
    [1] * 100_000,
    {},
    {"name": "em"},
    {"name": "dynamic", "iterations": 100},
]
DTYPES = ["u1", "u1", "u1", "i8", "i4", "u2", "i1", "u8", "f4", "f8", "f2", "c8", "?", "U", "S", "M8[s]", "O"]
"""Types of numpy that an npz file may hold; text is given a length of five."""
ODD: dict[str, list[Any]] = {
    "u": [0, 1, 255],
    "i": [0, -1, 127],
    "f": [0.0, -1.0, 0.5, float("nan"), float("inf"), 65_000.0],
    "c": [0, 1j],
    "b": [True],
    "M": [0],
    "O": [None, "x", 1],
}
"""Values that one element gets, by the kind of its type."""


class Report(NamedTuple):
    """What a campaign saw: outcome -> how often, the slowest case in seconds, and growth of memory in MB."""

    outcomes: Counter[str]
    slowest: float
    grown: float


def originals(folder: Path) -> list[Path]:
    """Write a small checkpoint of each kind of model."""
    paths = []
    for number, model in enumerate(MODELS):
        recipe: Recipe = tiny(model=model)
        paths.append(folder / f"{number}.safetensors")
        save(paths[-1], build_training(recipe, SPEC, images=80).checkpoint(recipe))
    return paths


def attack(path: Path) -> str:
    """Load a file as any command does, and name what came of it; other errors than ours go up."""
    try:
        load_run(path)
    except CheckpointError as error:
        assert "\n" not in str(error)
        assert len(str(error)) < 2000
        return "refused"
    return "loaded"


def forge(rng: random.Random, document: dict[str, Any]) -> None:
    """Change one to three entries of a document, most of them sizes of its recipe."""
    for _ in range(rng.choice([1, 1, 2, 3])):
        # Start at one of the tables that are still there, and go down to a value or a table
        recipe = document["meta"]["recipe"]
        node: Any = rng.choice([recipe["model"]] * 6 + [recipe["data"], recipe, document["meta"], document])
        while True:
            key = rng.choice(list(node) if isinstance(node, dict) else range(len(node)))
            if not isinstance(node[key], dict | list) or not node[key] or rng.random() < 0.3:
                break
            node = node[key]
        tables = (document, document["meta"], recipe, recipe["model"], recipe["data"])
        is_table = any(node[key] is table for table in tables)
        node[key] = copy.deepcopy(rng.choice(VALUES))  # a later change must not reach VALUES itself
        if is_table:
            return


def attack_npz(path: Path) -> str:
    """Load an npz file as training does, and name what came of it; other errors than ours go up."""
    try:
        splits = NpzConfig(path=str(path), test=0.5).load()
    except DataError as error:
        assert "\n" not in str(error)
        assert len(str(error)) < 2000
        return "refused"
    for data in splits[:2]:
        assert data.images.shape[0] == data.labels.shape[0]
    return "loaded"


def invent_array(rng: random.Random, count: int, axes: int) -> np.ndarray:
    """Make an array of a dtype, a shape and values that a user's program might have stored.

    Args:
        rng: The random numbers.
        count: Rows that a well-formed file would have.
        axes: Its axes in a well-formed file.
    """
    shape = [count, *(rng.choice([1, 3, 8, 28]) for _ in range(axes - 1))]
    # Half of the arrays are well-formed; others lack an axis, have one too many, are empty or have another length
    if rng.random() < 0.5:
        return np.random.default_rng(rng.randrange(2**32)).integers(0, 3, shape).astype("u1")
    if rng.random() < 0.4:
        shape = rng.choice([shape[:-1], [*shape, 2], [0, *shape[1:]], [count + 1, *shape[1:]], [*shape[:-1], 0]])
    dtype = rng.choice(DTYPES)
    values = np.random.default_rng(rng.randrange(2**32)).integers(0, rng.choice([1, 2, 10, 255]) + 1, shape)
    if dtype in "US":
        return values.astype(dtype + "5")
    with np.errstate(all="ignore"):
        array = np.asarray(values * rng.choice([1, 1, 1, 0.5, -1, 1e6])).astype(dtype)
        if array.size:
            array.flat[rng.randrange(array.size)] = rng.choice(ODD[array.dtype.kind])
    return array


def run_npz(folder: Path, *, arrays: int, seed: int = 0) -> Report:
    """Attack with so many npz files of invented contents.

    Raises:
        AssertionError: An error has more than one line.
        Exception: Any error that is not a DataError.
    """
    rng = random.Random(seed)
    target = folder / "attacked.npz"
    outcomes: Counter[str] = Counter()
    slowest = 0.0
    before = _resident()
    for _ in range(arrays):
        # The arrays that a file should have, some of them missing or under other names
        count = rng.choice([1, 2, 12, 40])
        found = {"images": invent_array(rng, count, rng.choice([3, 4])), "labels": invent_array(rng, count, 1)}
        if rng.random() < 0.1:
            found[rng.choice(["x", "image", "images.npy"])] = found.pop(rng.choice(["images", "labels"]))
        np.savez(target, **found)
        begun = time.perf_counter()
        outcomes[f"npz {attack_npz(target)}"] += 1
        slowest = max(slowest, time.perf_counter() - begun)
    return Report(outcomes, slowest, _resident() - before)


def run(folder: Path, *, mutants: int, forgeries: int, seed: int = 0) -> Report:
    """Attack with so many damaged files and so many forged ones.

    Raises:
        AssertionError: A damaged file loads, or an error has more than one line.
        Exception: Any error that is not a CheckpointError.
    """
    rng = random.Random(seed)
    paths = originals(folder)
    target = folder / "attacked.safetensors"
    outcomes: Counter[str] = Counter()
    slowest = 0.0
    before = _resident()
    contents = [path.read_bytes() for path in paths]
    documents = [read_tensors(path) for path in paths]
    for number in range(mutants + forgeries):
        # A damaged file, or one whose digest fits a document that was changed
        which = rng.randrange(len(paths))
        if number < mutants:
            data = blind_edits(rng, contents[which])
            target.write_bytes(data)
            kind = "mutant" if data != contents[which] else "equal"
        else:
            document = json.loads(json.dumps(documents[which].document))
            forge(rng, document)
            document.pop("format", None)
            write_tensors(target, documents[which].tensors, document)
            kind = "forgery"
        begun = time.perf_counter()
        outcome = f"{kind} {attack(target)}"
        slowest = max(slowest, time.perf_counter() - begun)
        outcomes[outcome] += 1
        assert outcome != "mutant loaded"
    return Report(outcomes, slowest, _resident() - before)


def _resident() -> float:
    """Return the most memory that this process has had, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main(words: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mutants", type=int, default=70_000, help="damaged files (70,000)")
    parser.add_argument("--forgeries", type=int, default=6_000, help="files with hostile recipes and right digests")
    parser.add_argument("--arrays", type=int, default=2_000, help="npz files of invented contents")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(words)
    with tempfile.TemporaryDirectory() as folder:
        found = run(Path(folder), mutants=given.mutants, forgeries=given.forgeries, seed=given.seed)
        of_arrays = run_npz(Path(folder), arrays=given.arrays, seed=given.seed)
    for report in (found, of_arrays):
        print(dict(report.outcomes), f"slowest {report.slowest:.2f} s, memory grew by {report.grown:.0f} MB")


if __name__ == "__main__":
    main()
