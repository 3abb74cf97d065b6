"""Every file that differs from a checkpoint by even one bit is refused with CheckpointError, and nothing else.

Two laws. A mutant of the bytes never loads. A forgery, whose tensors or document are changed and which is given a
digest that fits, loads or is refused, and costs no more memory than its own size allows.
"""

from __future__ import annotations

import json
import random
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from support.tiny_recipe import tiny
from torchcaps.config import to_dict
from torchcaps.errors import CheckpointError
from torchcaps.train.checkpoint import load, read_tensors, write_tensors
from torchcaps.train.run import load_run
from torchcaps.train.state_packing import pack_state
from torchcaps.train.train_state import build_training
from torchcaps.types import ImageSpec

Mutation = Callable[[random.Random, bytes], bytes]


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
        "bias": torch.tensor([1.0, -0.0, 2.0]),
        "half": torch.tensor([1.5, 2.5], dtype=torch.bfloat16),
        "mask": torch.tensor([True, False, True]),
        "count": torch.tensor(7),
        "empty": torch.empty(0, 3),
    }
    write_tensors(path, tensors, {"meta": {"epoch": 3, "history": [0.5, None]}, "state": skeleton})
    return path.read_bytes()


# ---------------------------------------------------------------------------------- mutations of bytes


def span(rng: random.Random, size: int, longest: int = 40) -> slice:
    start = rng.randrange(size + 1)
    return slice(start, min(size, start + rng.randint(1, longest)))


def flip_bits(rng: random.Random, data: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.choice([1, 1, 1, 2, 5])):
        if changed:
            changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def change_bytes(rng: random.Random, data: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.choice([1, 1, 3])):
        if changed:
            changed[rng.randrange(len(changed))] = rng.choice([0, 0xFF, *b' "{}[]:,0\\n', rng.randrange(256)])
    return bytes(changed)


def truncate(rng: random.Random, data: bytes) -> bytes:
    return data[: rng.randrange(len(data) + 1)]


def extend(rng: random.Random, data: bytes) -> bytes:
    return data + rng.choice([b"\0", b" ", rng.randbytes(8), data[-8:], data])


def delete(rng: random.Random, data: bytes) -> bytes:
    gone = span(rng, len(data))
    return data[: gone.start] + data[gone.stop :]


def duplicate(rng: random.Random, data: bytes) -> bytes:
    again = span(rng, len(data))
    return data[: again.stop] + data[again] + data[again.stop :]


def insert(rng: random.Random, data: bytes) -> bytes:
    at = rng.randrange(len(data) + 1)
    return data[:at] + rng.randbytes(rng.randint(1, 8)) + data[at:]


def exchange(rng: random.Random, data: bytes) -> bytes:
    """Swap two stretches of equal length, such as the bodies of two tensors."""
    length = rng.choice([1, 2, 4, 8, 12])
    if len(data) < 2 * length:
        return data
    a = rng.randrange(len(data) - 2 * length + 1)
    b = rng.randrange(a + length, len(data) - length + 1)
    return data[:a] + data[b : b + length] + data[a + length : b] + data[a : a + length] + data[b + length :]


def change_length(rng: random.Random, data: bytes) -> bytes:
    n = int.from_bytes(data[:8], "little")
    claims = [
        0,
        1,
        n - 8,
        n - 1,
        n + 1,
        n + 8,
        len(data),
        len(data) - 8,
        len(data) - 7,
        1 << 24,
        (1 << 24) + 1,
    ]
    claims += [1 << 31, 1 << 32, 1 << 40, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, rng.getrandbits(64)]
    return (rng.choice(claims) % (1 << 64)).to_bytes(8, "little") + data[8:]


BYTES: list[Mutation] = [flip_bits, change_bytes, truncate, extend, delete, duplicate, insert, exchange]
BYTES += [change_length]


def respell(rng: random.Random, data: bytes) -> bytes:
    """The same JSON, or nearly, in other letters: spaces, escapes, repeated keys, deep nests, other encodings."""
    header = header_of(data)
    text = compact(header)
    letter = rng.choice("torchcaps")
    spellings = [
        text + " " * rng.choice([17, 24]),
        " " + text,
        json.dumps(header),
        json.dumps(header, indent=1),
        text.replace(letter, f"\\u{ord(letter):04x}", 1),
        text[:-1] + "," + text[1:],
        text[:-1] + ',"x":' + "[" * 20_000 + "]" * 20_000 + "}",
        text[:-1] + ',"x":' + "9" * 5000 + "}",
        text.replace("[0,", "[0.0,", 1),
        "\ufeff" + text,
        text + "\0",
    ]
    return with_header(data, rng.choice(spellings))


MUTATIONS: list[Mutation] = [*BYTES, respell]


def with_header(data: bytes, header: str) -> bytes:
    """The file with another header and the length that belongs to it."""
    text = header.encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + data[8 + int.from_bytes(data[:8], "little") :]


def header_of(data: bytes) -> dict[str, Any]:
    header: dict[str, Any] = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return header


def compact(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))


# ------------------------------------------------------------------------------------------- the laws


def assert_refused(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    with pytest.raises(CheckpointError) as error:
        read_tensors(path)
    assert "\n" not in str(error.value)


def refuse_mutants(path: Path, original: bytes, seed: int, count: int) -> None:
    """Check `count` files with up to three mutations."""
    rng = random.Random(seed)
    for _ in range(count):
        data = original
        for _ in range(rng.choice([1, 1, 1, 2, 3])):
            data = rng.choice(MUTATIONS if data is original else BYTES)(rng, data)
        if data != original:
            assert_refused(path, data)


def test_mutants_are_refused(path: Path, original: bytes) -> None:
    refuse_mutants(path, original, seed=0, count=3000)


@pytest.mark.long
def test_a_hundred_thousand_mutants_are_refused(path: Path, original: bytes) -> None:
    refuse_mutants(path, original, seed=2, count=100_000)


def test_every_single_bit_counts(path: Path, original: bytes) -> None:
    for place in range(len(original)):
        changed = bytearray(original)
        changed[place] ^= 1 << place % 8
        assert_refused(path, bytes(changed))


def test_every_truncation_is_refused(path: Path, original: bytes) -> None:
    for size in range(len(original)):
        assert_refused(path, original[:size])


@pytest.mark.parametrize("claim", [1 << 24, 1 << 40, (1 << 63) - 1, (1 << 64) - 1])
def test_a_header_length_beyond_the_file_allocates_nothing(path: Path, original: bytes, claim: int) -> None:
    tracemalloc.start()
    try:
        assert_refused(path, claim.to_bytes(8, "little") + original[8:])
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "shape",
    [[1 << 38], [1 << 20, 1 << 20], [1 << 62], [1 << 40, 1 << 40], [0, 1 << 62], [1 << 62, 1 << 62, 0]],
)
def test_a_shape_beyond_the_file_allocates_nothing(path: Path, original: bytes, shape: list[int]) -> None:
    size = 4 * torch.tensor(shape, dtype=torch.float64).prod().long().item()
    record = {"dtype": "F32", "shape": shape, "data_offsets": [0, size]}
    header = {"__metadata__": header_of(original)["__metadata__"], "w": record}
    tracemalloc.start()
    try:
        assert_refused(path, with_header(original, compact(header)))
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


# ------------------------------------------------------------------------------------------ forgeries

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


def test_a_forged_run_loads_or_is_refused(path: Path, tmp_path: Path) -> None:
    """Whatever a document with a digest that fits says about its run and state: CheckpointError, or a model."""
    training = build_training(tiny(), ImageSpec(1, 16, 16, 10), images=80)
    whole = training.checkpoint(tiny())
    rng = random.Random(1)
    loaded = 0
    for _ in range(300):
        document = {"meta": to_dict(whole.meta), "state": json.loads(json.dumps(whole.state))}
        edit_tree(rng, document)
        write_tensors(tmp_path / "forged.safetensors", whole.tensors, document)
        try:
            load_run(tmp_path / "forged.safetensors")
            loaded += 1
        except CheckpointError as error:
            assert "\n" not in str(error)
    assert 0 < loaded < 300


@pytest.mark.parametrize("number", [0, -1, "2", None, True])
def test_a_forged_format_that_never_was_is_damage(path: Path, number: object) -> None:
    write_tensors(path, {}, {"format": number})
    with pytest.raises(CheckpointError, match="damaged"):
        load(path)
