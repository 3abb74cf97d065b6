"""Every file that differs from a checkpoint by even one bit is refused with CheckpointError, and nothing else.

Two laws. A mutant with the digest of the original never loads. A mutant that is given a fresh digest (so that
the digest hides no later check) loads or is refused, and costs no more memory than its own size allows.
"""

from __future__ import annotations

import hashlib
import json
import random
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from torchcaps.errors import CheckpointError
from torchcaps.train.checkpoint import Checkpoint, load, loads, save
from torchcaps.train.state_packing import pack_state

DIGEST = slice(8 + len('{"__metadata__":{"sha256":"'), 8 + len('{"__metadata__":{"sha256":"') + 64)
Mutation = Callable[[random.Random, bytes], bytes]


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The bytes of a small checkpoint with every kind of tensor and a nested state."""
    state = {0: (torch.arange(3.0), None), "step": [1, 2.5, True]}
    tensors, skeleton = pack_state(state, "optimizer")
    tensors |= {
        "weight": torch.tensor([[1.0, -0.0, float("nan")], [2.0, 3.0, 4.0]]),
        "bias": torch.tensor([1.0, -0.0, 2.0]),
        "half": torch.tensor([1.5, 2.5], dtype=torch.bfloat16),
        "mask": torch.tensor([True, False, True]),
        "count": torch.tensor(7),
        "empty": torch.empty(0, 3),
    }
    path = tmp_path_factory.mktemp("mutations") / "a.safetensors"
    save(path, Checkpoint(tensors, {"epoch": 3, "state": skeleton, "history": [0.5, None]}))
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


# ----------------------------------------------------------------------- mutations of the header's JSON


def with_header(data: bytes, header: str) -> bytes:
    """The file with another header and the length that belongs to it."""
    n = int.from_bytes(data[:8], "little")
    text = header.encode("utf-8", "surrogatepass")
    return len(text).to_bytes(8, "little") + text + data[8 + n :]


def header_of(data: bytes) -> dict[str, Any]:
    header: dict[str, Any] = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return header


def compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


NUMBERS = [
    -1,
    0,
    1,
    2,
    3,
    4,
    7,
    8,
    12,
    24,
    2.0,
    1e400,
    True,
    1 << 31,
    1 << 32,
    1 << 40,
    1 << 59,
    1 << 63,
    1 << 64,
]
VALUES: list[Any] = [
    None,
    "",
    "F32",
    "F64",
    "BF16",
    "F4",
    "BOOL",
    [],
    {},
    [0],
    {"a": 1},
    "\ud800",
    float("nan"),
]
VALUES += [*NUMBERS, 10**400, [1 << 40, 1 << 40, 0], [0] * 100, ["F32"]]


def change_record(rng: random.Random, data: bytes) -> bytes:
    """Another dtype, shape or offsets of one tensor."""
    header = header_of(data)
    record = header[rng.choice([name for name in header if name != "__metadata__"])]
    field = rng.choice(["dtype", "shape", "data_offsets"])
    if field != "dtype" and record[field] and rng.random() < 0.7:
        record[field][rng.randrange(len(record[field]))] = rng.choice(NUMBERS)
    else:
        record[field] = rng.choice(VALUES)
    return with_header(data, compact(header))


def swap_tensors(rng: random.Random, data: bytes) -> bytes:
    """Two names exchange their records, or only their dtypes, shapes or offsets."""
    header = header_of(data)
    a, b = rng.sample([name for name in header if name != "__metadata__"], 2)
    field = rng.choice([None, "dtype", "shape", "data_offsets"])
    if field is None:
        header[a], header[b] = header[b], header[a]
    else:
        header[a][field], header[b][field] = header[b][field], header[a][field]
    return with_header(data, compact(header))


def rename(rng: random.Random, data: bytes) -> bytes:
    """Another name for one key of the header, which may also swallow a second one."""
    header = header_of(data)
    old = rng.choice(list(header))
    new = rng.choice(["", "x", "weight", "bias", old + "~", old.upper(), "__metadata__", "\ud800", "torchcaps"])
    return with_header(data, compact({new if key == old else key: item for key, item in header.items()}))


def reorder(rng: random.Random, data: bytes) -> bytes:
    items = list(header_of(data).items())
    rng.shuffle(items)
    return with_header(data, compact(dict(items)))


def edit_tree(rng: random.Random, data: bytes) -> bytes:
    """Replace, remove or repeat any one node of the header."""
    header: Any = header_of(data)
    node: Any = header
    while True:
        key = rng.choice(list(node) if isinstance(node, dict) else range(len(node)))
        inner = node[key]
        if not isinstance(inner, dict | list) or not inner or rng.random() < 0.3:
            break
        node = inner
    action = rng.choice(["replace", "remove", "wrap", "add"])
    if action == "remove":
        del node[key]
    elif action == "add" and isinstance(node, dict):
        node[rng.choice(["x", "dtype", "format"])] = rng.choice(VALUES)
    else:
        node[key] = [inner] if action == "wrap" else rng.choice(VALUES)
    return with_header(data, compact(header))


def edit_metadata(rng: random.Random, data: bytes) -> bytes:
    """Another format, other meta, no meta, or another digest."""
    header = header_of(data)
    document = json.loads(header["__metadata__"]["torchcaps"])
    document[rng.choice(["format", "meta", "extra"])] = rng.choice(VALUES)
    texts = [compact(document)] * 8 + ["", "[]", "[" * 5000, "1" * 5000]
    header["__metadata__"]["torchcaps"] = rng.choice(texts)
    if rng.random() < 0.2:
        header["__metadata__"]["sha256"] = rng.choice(["", "0" * 64, header["__metadata__"]["sha256"].upper()])
    return with_header(data, compact(header))


def respell(rng: random.Random, data: bytes) -> bytes:
    """The same JSON, or nearly, in other letters: spaces, escapes, repeated keys, deep nests, other encodings."""
    header = header_of(data)
    text = compact(header)
    letter = rng.choice("torchcaps")
    spellings = [
        text,
        text + " " * rng.randint(1, 16),
        " " + text,
        json.dumps(header),
        json.dumps(header, indent=1),
        text.replace(letter, f"\\u{ord(letter):04x}", 1),
        text[:-1] + "," + text[1:],
        text[:-1] + ',"x":' + "[" * 20_000 + "]" * 20_000 + "}",
        text[:-1] + ',"x":' + "9" * 5000 + "}",
        text.replace(":3,", ":3.0,"),
        "\ufeff" + text,
        text + "\0",
    ]
    return with_header(data, rng.choice(spellings))


JSON: list[Mutation] = [change_record, swap_tensors, rename, reorder, edit_tree, edit_metadata, respell]


# ------------------------------------------------------------------------------------------- the laws


def mutant(rng: random.Random, original: bytes) -> bytes:
    """One edit of the header's JSON, or up to three of the bytes, or both."""
    data, edits = original, rng.choice([1, 1, 1, 2, 3])
    if rng.random() < 0.5:
        data, edits = rng.choice(JSON)(rng, data), rng.choice([0, 0, 0, 1])
    for _ in range(edits):
        data = rng.choice(BYTES)(rng, data)
    return data


def reseal(data: bytes) -> bytes:
    """A digest that fits, whatever else the file holds: what a careful forger would write."""
    digest = hashlib.sha256(data[: DIGEST.start] + data[DIGEST.stop :]).hexdigest().encode()
    return data[: DIGEST.start] + digest + data[DIGEST.stop :]


def assert_refused(data: bytes) -> str:
    with pytest.raises(CheckpointError) as error:
        loads(data, "mutant")
    assert "\n" not in str(error.value)
    return str(error.value)


def refuse_mutants(original: bytes, seed: int, count: int) -> dict[str, int]:
    """Check `count` mutants that differ from the original; how often each reason was given."""
    rng, reasons = (
        random.Random(seed),
        dict.fromkeys(["truncated", "damaged", "not a checkpoint", "newer"], 0),
    )
    done = 0
    while done < count:
        data = mutant(rng, original)
        if data != original:
            text = assert_refused(data)
            [reason] = [reason for reason in reasons if reason in text.partition(":")[0]]
            reasons[reason] += 1
            done += 1
    return reasons


def read_forgeries(original: bytes, seed: int, count: int) -> int:
    """Check `count` mutants with fresh digests: each loads or is refused; how many loaded."""
    rng, loaded = random.Random(seed), 0
    for _ in range(count):
        try:
            checkpoint = loads(reseal(mutant(rng, original)), "forgery")
        except CheckpointError:
            continue
        assert sum(tensor.nbytes for tensor in checkpoint.tensors.values()) <= 2 * len(original)
        loaded += 1
    return loaded


def test_the_original_loads_and_a_fresh_digest_is_the_same_one(original: bytes) -> None:
    assert loads(original, "original").meta["epoch"] == 3
    assert reseal(original) == original


def test_mutants_are_refused(original: bytes) -> None:
    reasons = refuse_mutants(original, seed=0, count=3000)
    assert all(count > 0 for count in reasons.values()), reasons


def test_forgeries_load_or_are_refused(original: bytes) -> None:
    loaded = read_forgeries(original, seed=1, count=3000)
    assert 0 < loaded < 3000  # both outcomes occur: the mutants do reach the checks behind the digest


@pytest.mark.long
def test_a_hundred_thousand_mutants_are_refused(original: bytes) -> None:
    reasons = refuse_mutants(original, seed=2, count=100_000)
    assert all(count > 0 for count in reasons.values()), reasons


@pytest.mark.long
def test_a_hundred_thousand_forgeries_load_or_are_refused(original: bytes) -> None:
    assert 0 < read_forgeries(original, seed=3, count=100_000) < 100_000


def test_every_single_bit_counts(original: bytes) -> None:
    for place in range(len(original)):
        changed = bytearray(original)
        changed[place] ^= 1 << place % 8
        assert_refused(bytes(changed))


def test_every_truncation_is_refused(original: bytes) -> None:
    for size in range(len(original)):
        assert "truncated" in assert_refused(original[:size])


@pytest.mark.parametrize("claim", [1 << 24, 1 << 40, (1 << 63) - 1, (1 << 64) - 1])
def test_a_header_length_beyond_the_file_allocates_nothing(original: bytes, claim: int) -> None:
    tracemalloc.start()
    try:
        assert_refused(claim.to_bytes(8, "little") + original[8:])
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "shape",
    [[1 << 38], [1 << 20, 1 << 20], [1 << 62], [1 << 40, 1 << 40], [0, 1 << 62], [1 << 62, 1 << 62, 0]],
)
def test_a_shape_beyond_the_file_allocates_nothing(original: bytes, shape: list[int]) -> None:
    size = 4 * torch.tensor(shape, dtype=torch.float64).prod().long().item()
    record = {"dtype": "F32", "shape": shape, "data_offsets": [0, size]}
    header = {"__metadata__": header_of(original)["__metadata__"], "w": record}
    tracemalloc.start()
    try:
        assert_refused(reseal(with_header(original, compact(header))))
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def forged(original: bytes, edit: Callable[[dict[str, Any]], object]) -> bytes:
    header = header_of(original)
    edit(header)
    return reseal(with_header(original, compact(header)))


def test_forged_offsets_that_contradict_the_order_are_refused(original: bytes) -> None:
    def swap(header: dict[str, Any]) -> None:  # both of three floats: sizes agree, places do not
        a, b = header["optimizer.0.0"], header["bias"]
        a["data_offsets"], b["data_offsets"] = b["data_offsets"], a["data_offsets"]

    assert "does not lie where its shape says" in assert_refused(forged(original, swap))


@pytest.mark.parametrize("number", [0, -1])
def test_a_forged_format_that_never_was_is_damage(original: bytes, number: int) -> None:
    def renumber(header: dict[str, Any]) -> None:
        document = json.loads(header["__metadata__"]["torchcaps"])
        header["__metadata__"]["torchcaps"] = compact(document | {"format": number})

    assert "damaged" in assert_refused(forged(original, renumber))


def test_a_forged_header_longer_than_we_write_is_refused_unread(original: bytes) -> None:
    padded = reseal(with_header(original, compact(header_of(original)).ljust((1 << 24) + 8)))
    assert "damaged" in assert_refused(padded)
    whole = reseal(with_header(original, compact(header_of(original)).ljust(1 << 24)))
    assert loads(whole, "padded").meta["epoch"] == 3


def test_a_mutant_on_disk_is_refused_as_in_memory(original: bytes, tmp_path: Path) -> None:
    rng, path = random.Random(4), tmp_path / "a.safetensors"
    for _ in range(200):
        data = mutant(rng, original)
        path.write_bytes(data)
        if data == original:
            assert load(path).meta["epoch"] == 3
        else:
            with pytest.raises(CheckpointError) as error:
                load(path)
            assert str(error.value).replace(repr(str(path)), "'mutant'") == assert_refused(data)
