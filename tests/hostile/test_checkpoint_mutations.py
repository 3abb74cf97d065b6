"""Every file that differs from a checkpoint by even one bit is refused with CheckpointError, and nothing else.

Two laws. A mutant of the bytes never loads. A forgery, whose tensors or document are changed and which is given a
digest that fits, loads or is refused. Neither costs more memory than the file's own size allows.
"""

from __future__ import annotations

import json
import random
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch

from support.mutations import blind_edits, flipped
from support.tiny_recipe import tiny
from torchcaps.config import to_dict
from torchcaps.errors import CheckpointError
from torchcaps.train.checkpoint import load, read_tensors, write_tensors
from torchcaps.train.run import load_run
from torchcaps.train.state_packing import pack_state
from torchcaps.train.train_state import build_training
from torchcaps.types import ImageSpec


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where mutants are written."""
    return tmp_path_factory.mktemp("mutations") / "a.safetensors"


@pytest.fixture(scope="module")
def original(path: Path) -> bytes:
    """The bytes of a small file with every kind of tensor and a nested state."""
    tensors, skeleton = pack_state({0: (torch.arange(3.0), None), "step": [1, 2.5, True]}, "optimizer")
    tensors |= {
        "weight": torch.tensor([[1.0, -0.0, float("nan")], [2.0, 3.0, 4.0]]),
        "half": torch.tensor([1.5, 2.5], dtype=torch.bfloat16),
        "mask": torch.tensor([True, False, True]),
        "count": torch.tensor(7),
        "empty": torch.empty(0, 3),
    }
    write_tensors(path, tensors, {"meta": {"epoch": 3, "history": [0.5, None]}, "state": skeleton})
    return path.read_bytes()


def header_of(data: bytes) -> dict[str, Any]:
    return json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])


def with_header(data: bytes, header: str) -> bytes:
    """The file with another header and the length that belongs to it."""
    text = header.encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + data[8 + int.from_bytes(data[:8], "little") :]


def compact(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))


def assert_refused(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    with pytest.raises(CheckpointError) as error:
        read_tensors(path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("count", [3000, pytest.param(100_000, marks=pytest.mark.long)])
def test_mutants_are_refused(path: Path, original: bytes, count: int) -> None:
    rng = random.Random(count)
    for data in (blind_edits(rng, original) for _ in range(count)):
        if data != original:
            assert_refused(path, data)


def test_every_single_bit_and_every_truncation_counts(path: Path, original: bytes) -> None:
    for place in range(len(original)):
        assert_refused(path, flipped(original, place, 1 << place % 8))
        assert_refused(path, original[:place])


def test_the_same_document_in_other_letters_is_refused(path: Path, original: bytes) -> None:
    """Nearly the same JSON: spaces, escapes, repeated keys, deep nests, huge numbers, other encodings."""
    header = header_of(original)
    text = compact(header)
    spellings = [text + " " * 17, text + " " * 24, " " + text, json.dumps(header), json.dumps(header, indent=1)]
    spellings += [text.replace(letter, f"\\u{ord(letter):04x}", 1) for letter in "torchcaps"]
    spellings += [text[:-1] + ',"x":' + more + "}" for more in ("[" * 20_000 + "]" * 20_000, "9" * 5000)]
    spellings += [text[:-1] + "," + text[1:], text.replace("[0,", "[0.0,", 1), "\ufeff" + text, text + "\0"]
    for spelling in spellings:
        assert_refused(path, with_header(original, spelling))


@pytest.mark.parametrize("claim", [1 << 24, 1 << 40, (1 << 63) - 1, (1 << 64) - 1])
@pytest.mark.parametrize("shape", [None, lambda n: [n], lambda n: [n, n], lambda n: [0, n], lambda n: [n, n, 0]])
def test_a_length_or_a_shape_beyond_the_file_allocates_nothing(path: Path, original: bytes, claim: int, shape) -> None:
    if shape is None:
        data = claim.to_bytes(8, "little") + original[8:]
    else:
        size = 4 * torch.tensor(shape(claim), dtype=torch.float64).prod().long().item()
        record = {"dtype": "F32", "shape": shape(claim), "data_offsets": [0, size]}
        data = with_header(original, compact({"__metadata__": header_of(original)["__metadata__"], "w": record}))
    tracemalloc.start()
    try:
        assert_refused(path, data)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


VALUES = [None, True, -1, 0, 3, 1 << 70, 0.5, float("nan"), float("inf"), "", "all", [], {}, [1], {"$tensor": "w"}]


def edit_tree(rng: random.Random, document: Any) -> None:
    """Replace, remove or wrap any one node of a document."""
    node = document
    while True:
        key = rng.choice(list(node) if isinstance(node, dict) else range(len(node)))
        inner = node[key]
        if not isinstance(inner, dict | list) or not inner or rng.random() < 0.2:
            break
        node = inner
    if rng.random() < 0.2:
        del node[key]
    else:
        node[key] = rng.choice([*VALUES, [inner]])


def test_a_forged_run_loads_or_is_refused(path: Path) -> None:
    """Whatever a document with a digest that fits says about its run and state: CheckpointError, or a model."""
    whole = build_training(tiny(), ImageSpec(1, 16, 16, 10), images=80).checkpoint(tiny())
    rng = random.Random(1)
    loaded = 0
    for _ in range(300):
        document = {"meta": to_dict(whole.meta), "state": json.loads(json.dumps(whole.state))}
        edit_tree(rng, document)
        write_tensors(path, whole.tensors, document)
        try:
            load_run(path)
            loaded += 1
        except CheckpointError as error:
            assert "\n" not in str(error)
    assert 0 < loaded < 300


@pytest.mark.parametrize("number", [0, -1, "2", None, True])
def test_a_forged_format_that_never_was_is_damage(path: Path, number: object) -> None:
    write_tensors(path, {}, {"format": number})
    with pytest.raises(CheckpointError, match="damaged"):
        load(path)
