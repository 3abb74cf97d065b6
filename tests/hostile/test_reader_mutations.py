"""Whatever bytes a data file holds, its reader returns arrays that the file can back, or raises DataError.

Each input is a pure function of (seed, number): a valid file of some reader, edited blindly or by someone who knows
the format and puts every checksum right again. Peak memory is measured twice: Python's and numpy's own by
`tracemalloc`, and the whole process's from outside, by running this file as a program in a fresh one.
"""

from __future__ import annotations

import gzip
import importlib.util
import io
import json
import os
import random
import resource
import struct
import subprocess
import sys
import tempfile
import tracemalloc
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from support.data_files import BATCHES, cifar, idx, norb, npz, picture
from torchcaps.data.readers import read_cifar_archive, read_idx, read_norb, read_npz, read_pictures
from torchcaps.errors import DataError

Mutation = Callable[[random.Random, bytes], bytes]
EXPANSION = 1032
MEGABYTE = 1 << 20


@dataclass(frozen=True)
class Target:
    """A valid file, who reads it, and how someone who knows its format would forge it."""

    name: str
    read: Callable[[Path], object]
    original: bytes
    forge: Mutation | None = None


# Blind edits of bytes

EDGES = [0, 1, 3, 4, 7, 8, 127, 255, 256, 0x7FFF, 0xFFFF, 1 << 16, 1 << 20, 1 << 26, (1 << 30) - 1, 1 << 30]
EDGES += [(1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32, 1 << 40, (1 << 63) - 1, 1 << 63, (1 << 64) - 1]
MAGICS = [b"\0\0\x08\x03", b"\0\0\x0d\x03", b"\x1f\x8b\x08\0", b"PK\x03\x04", b"PK\x05\x06", b"PK\x06\x07", b"\x89PNG"]
MAGICS += [b"\x55\x4c\x3d\x1e", b"\x93NUMPY\x02\0", b"\xff\xd8\xff\xe0", b"ustar\0", b"\x80\x04", b"x\x9c", b"GIF89a"]


def at(rng: random.Random, data: bytes) -> int:
    """A place in the file, half of the time among its first bytes, where the headers are."""
    return rng.randrange(min(len(data), rng.choice([16, 64, 256, 1 << 30, 1 << 30])) + 1)


def flip_bits(rng: random.Random, data: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.choice([1, 1, 1, 2, 5, 20]) if data else 0):
        changed[min(at(rng, data), len(data) - 1)] ^= 1 << rng.randrange(8)
    return bytes(changed)


def change_number(rng: random.Random, data: bytes) -> bytes:
    """Write a number at the edge of something, in any width and byte order."""
    width, place = rng.choice([1, 2, 4, 4, 4, 8]), at(rng, data)
    number = (rng.choice(EDGES) + rng.choice([0, 0, -1, 1])) % (1 << 8 * width)
    return data[:place] + number.to_bytes(width, rng.choice(["little", "big"])) + data[place + width :]


def change_magic(rng: random.Random, data: bytes) -> bytes:
    magic, place = rng.choice(MAGICS), rng.choice([0, 0, 0, at(rng, data)])
    return data[:place] + magic + data[place + len(magic) :]


def splice(rng: random.Random, data: bytes) -> bytes:
    """Cut the end off, add to it, or delete, repeat or insert a stretch."""
    place, size = at(rng, data), rng.choice([1, 4, 8, 40, 512])
    stretch = data[place : place + size]
    changes = [
        data[:place],
        data + rng.choice([b"\0", b" ", rng.randbytes(8), data[-8:], data, bytes(4096)]),
        data[:place] + data[place + size :],
        data[:place] + stretch * rng.choice([2, 50]) + data[place + size :],
        data[:place] + rng.randbytes(size % 9) + data[place:],
    ]
    return rng.choice(changes)


def exchange(rng: random.Random, data: bytes) -> bytes:
    """Swap two stretches of equal length, such as two fields of a header."""
    size, a, b = rng.choice([1, 2, 4, 8]), *sorted((at(rng, data), at(rng, data)))
    if b < a + size:
        return data
    return data[:a] + data[b : b + size] + data[a + size : b] + data[a : a + size] + data[b + size :]


def blind(rng: random.Random, data: bytes) -> bytes:
    return rng.choice([flip_bits, change_number, change_magic, splice, splice, exchange])(rng, data)


# Edits by someone who knows the format


def forge_gzip(rng: random.Random, data: bytes) -> bytes:
    """Another content with the checksum that belongs to it; bombs; gzips in gzips, and one after the other."""
    inner = gzip.decompress(data)
    changes: list[Callable[[], bytes]] = [
        *[lambda: gzip.compress(blind(rng, inner), 1, mtime=0)] * 4,
        lambda: gzip.compress(inner + bytes(rng.choice([1, 100, 1 << 16, 1 << 21])), 1),
        lambda: gzip.compress(gzip.compress(data, 1) if rng.random() < 0.5 else data, 1),
        lambda: data + rng.choice([data, gzip.compress(b""), gzip.compress(inner[16:])]),
        lambda: data[:3] + bytes([rng.choice([1, 2, 4, 8, 16, 31, 255])]) + data[4:],
    ]
    return rng.choice(changes)()


def forge_tar(rng: random.Random, data: bytes) -> bytes:
    """One header of a tar changed, its checksum right."""
    if data[:2] == b"\x1f\x8b":
        return forge_gzip(rng, data) if rng.random() < 0.3 else gzip.compress(forge_tar(rng, gzip.decompress(data)), 1)
    start = rng.choice([i for i in range(0, len(data), 512) if data[i + 257 : i + 262] == b"ustar"])
    block = bytearray(data[start : start + 512])
    field = rng.choice(["name", "size", "type", "any"])
    if field == "name":
        block[:100] = rng.choice([b"../x", b"/etc/passwd", BATCHES[5].encode()]).ljust(100, b"\0")
    elif field == "size":
        octal = [f"{number % (1 << 33):011o}".encode() + b"\0" for number in (*EDGES, 3073, 2 * 3073)]
        block[124:136] = rng.choice([*octal, b"\x80" + rng.randbytes(11), b"-0000000001\0", b" " * 12])
    elif field == "type":
        block[156] = rng.choice(b"0\x001234567LKxgSVAZ")
    else:
        block[rng.randrange(512)] = rng.randrange(256)
    block[148:156] = b" " * 8
    block[148:156] = f"{sum(block):06o}\0 ".encode()
    return data[:start] + bytes(block) + data[start + 512 :]


TYPES = [
    "|u1",
    "<f8",
    ">i4",
    "<U3",
    "|O",
    "|V8",
    "<M8[D]",
    "<c16",
    "|S0",
    "i4,i4",
    "<U99999999",
    "f",
    "\\n",
    "|b1",
    ">U2",
]
SHAPES = ["()", "(3,)", "(2, 3)", "(0,)", "(-1,)", f"({1 << 40},)", f"({1 << 30}, {1 << 30})", "(3.0,)", "3", "(True,)"]
SHAPES += [f"(0, {1 << 62}, {1 << 62})", "(" + "1," * 33 + ")", "(" + "9" * 5000 + ",)", "((3,),)", "[3]"]
TEXTS = [
    "",
    "{",
    "{}",
    "[" * 9000,
    "-" * 9990,
    "'" * 3,
    "\n\t1\n 2",
    "lambda: 0",
    "{[]: 1}",
    "{'descr'}",
    "\0",
    "é" * 9,
]
NAMES = ["a.npy", "images.npy", "../a.npy", "/a.npy", "b/a.npy", "a\\b.npy", "a", ".npy", "é.npy", "a\n.npy", "x" * 300]


def forge_npy(rng: random.Random, data: bytes) -> bytes:
    """Another header: other types, shapes and orders, or text that is no header; its length right."""
    if rng.random() < 0.4:
        return blind(rng, data)
    length = int.from_bytes(data[8:10], "little")
    order = rng.choice(["False", "True", "0", "None"])
    text = f"{{'descr': '{rng.choice(TYPES)}', 'fortran_order': {order}, 'shape': {rng.choice(SHAPES)}, }}"
    text = rng.choice(TEXTS) if rng.random() < 0.2 else text
    version = rng.choice([1, 1, 2, 3])
    body = rng.choice([data[10 + length :], rng.randbytes(rng.choice([0, 3, 6, 24, 48]))])
    size = len(text.encode("latin-1")).to_bytes(2 if version == 1 else 4, "little")
    return data[:6] + bytes([version, 0]) + size + text.encode("latin-1") + body


def forge_npz(rng: random.Random, data: bytes) -> bytes:
    """Members changed, renamed, doubled, pickled, nested, bombs; the zip right."""
    out, source = io.BytesIO(), zipfile.ZipFile(io.BytesIO(data))
    method = rng.choice([zipfile.ZIP_STORED] * 3 + [zipfile.ZIP_DEFLATED] * 4 + [zipfile.ZIP_BZIP2])
    members = [(name, source.read(name)) for name in source.namelist()]
    chosen, (name, content) = rng.randrange(len(members)), rng.choice(members)
    pickled = io.BytesIO()
    np.save(pickled, np.array([{"a": 1}, None], object), allow_pickle=True)
    changes = [forge_npy(rng, content)] * 12 + [pickled.getvalue(), data, content + bytes(1 << 21), b"\x80\x04N."]
    members[chosen] = (rng.choice(NAMES) if rng.random() < 0.2 else name, rng.choice(changes))
    with warnings.catch_warnings(), zipfile.ZipFile(out, "w", method) as target:
        warnings.simplefilter("ignore")
        for member in members * rng.choice([1] * 9 + [2]):
            target.writestr(*member)
    return out.getvalue()


def chunk(name: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))


def forge_png(rng: random.Random, data: bytes) -> bytes:
    """Chunks changed, dropped, repeated, added, their checksums right; headers of other sizes."""
    chunks, place = [], 8
    while place < len(data):
        size = int.from_bytes(data[place : place + 4], "big")
        chunks.append((data[place + 4 : place + 8], data[place + 8 : place + 8 + size]))
        place += 12 + size
    i = rng.randrange(len(chunks))
    action = rng.choice(["edit", "edit", "edit", "header", "drop", "repeat", "add", "pixels"])
    if action == "edit":
        chunks[i] = (chunks[i][0], blind(rng, chunks[i][1]))
    elif action == "header":
        sizes = [rng.choice([1, 7, 8, 9, 4096, 1 << 16, (1 << 31) - 1, 1 << 31]) for _ in range(2)]
        kind = (rng.choice([1, 2, 4, 8, 16]), rng.choice([0, 2, 3, 4, 6]), 0, 0, rng.choice([0, 0, 1]))
        chunks[0] = (b"IHDR", struct.pack(">IIBBBBB", *sizes, *kind))
    elif action == "drop":
        del chunks[i]
    elif action == "repeat":
        chunks.insert(i, chunks[i])
    elif action == "add":
        names = b"tEXt zTXt iTXt iCCP acTL fcTL PLTE tRNS eXIf gAMA pHYs sRGB".split()
        bodies = [rng.randbytes(rng.randint(0, 40)), b"a\0\0" + zlib.compress(bytes(1 << 21), 1), bytes(7) + b"\3"]
        chunks.insert(i, (rng.choice(names), rng.choice(bodies)))
    else:
        raw = blind(rng, zlib.decompress(b"".join(body for name, body in chunks if name == b"IDAT")))
        chunks = [c if c[0] != b"IDAT" else (b"IDAT", zlib.compress(raw, 1)) for c in chunks]
    return data[:8] + b"".join(chunk(*c) for c in chunks)


# The valid files


def targets() -> list[Target]:
    """Every reader, plain and compressed; pictures alone and beside a good one; without Pillow, no pictures."""
    cube, table = np.arange(60, dtype=np.uint8).reshape(3, 4, 5), np.arange(8, dtype="<i4").reshape(2, 4)
    dat, cat = norb(cube[:, None]), norb(table, "<i4")
    arrays = {"images": cube, "labels": np.arange(3), "names": np.array(["a", "bc"])}
    out = [
        Target("idx", read_idx, idx(cube)),
        Target("idx-gz", read_idx, gzip.compress(idx(cube)), forge_gzip),
        Target("norb-dat", read_norb, dat),
        Target("norb-cat", read_norb, cat),
        Target("norb-dat-gz", read_norb, gzip.compress(dat), forge_gzip),
        Target("cifar-tar", read_cifar_archive, cifar(), forge_tar),
        Target("cifar-tar-gz", read_cifar_archive, gzip.compress(cifar()), forge_tar),
        Target("npz", read_npz, npz(pack=False, **arrays), forge_npz),
        Target("npz-packed", read_npz, npz(**arrays), forge_npz),
    ]
    if importlib.util.find_spec("PIL"):
        gray = np.arange(64, dtype=np.uint8).reshape(8, 8) * 3
        color = np.stack([gray, gray.T, 255 - gray], -1)
        for kind in ("lone", "pair"):
            for pixels, format in ((gray, "PNG"), (color, "PNG"), (color, "JPEG"), (color, "GIF"), (color, "WEBP")):
                forge = forge_png if format == "PNG" else None
                name = f"{kind}-{format}-{pixels.ndim}"
                out.append(Target(name, read_class_folder, picture(pixels, format=format), forge))
    return out


def read_class_folder(path: Path) -> tuple[np.ndarray, np.ndarray]:
    return read_pictures(path.parents[1])[:2]


# The law


def mutant(rng: random.Random, target: Target) -> bytes:
    """Up to three blind edits, or a forgery and perhaps one blind edit of it."""
    data, edits = target.original, rng.choice([1, 1, 1, 2, 3])
    if target.forge and rng.random() < 0.6:
        data, edits = target.forge(rng, data), rng.choice([0, 0, 0, 1])
    for _ in range(edits):
        data = blind(rng, data)
    return data


def check(target: Target, path: Path, data: bytes) -> bool:
    """Read the input: True if it gave arrays, all of them backed by the file; False if it was refused in one line."""
    path.write_bytes(data)
    try:
        result = target.read(path)
    except DataError as error:
        text = str(error)
        assert "\n" not in text and str(path.parents[1]) in text and len(text) < 700, text
        return False
    if isinstance(result, dict):
        result = result.values()
    arrays = [result] if isinstance(result, np.ndarray) else list(result)
    size = sum(array.nbytes for array in arrays)
    assert sum(len(array.tobytes()) for array in arrays) == size
    if target.name.startswith("pair"):
        assert arrays[0].shape in [(2, 1, 8, 8), (2, 3, 8, 8)]
    elif target.name.startswith("lone"):
        assert arrays[0].shape[0] == 1 and size <= 8 + 3 * (1 << 22)
    else:
        assert size <= EXPANSION * len(data)
    return True


@contextmanager
def workshop() -> Iterator[Callable[[Target], Path]]:
    """A folder in memory, if the system has one, with a place for the file of each target."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None, prefix="torchcaps-mutants-") as root:

        def place(target: Target) -> Path:
            folder = Path(root) / target.name
            (folder / "a").mkdir(parents=True)
            if target.name.startswith("pair"):
                (folder / "b").mkdir()
                (folder / "b/good.png").write_bytes(picture(np.zeros((8, 8), np.uint8), format="PNG"))
            return folder / "a/file"

        yield place


def inputs(seed: int, count: int) -> Iterator[tuple[Target, Path, bytes]]:
    """Every valid file, then `count` mutants, spread evenly over the targets."""
    known = targets()
    with workshop() as place:
        places = [place(target) for target in known]
        for target, path in zip(known, places, strict=True):
            yield target, path, target.original
        for number in range(count):
            which = number % len(known)
            yield known[which], places[which], mutant(random.Random(f"{seed} {number}"), known[which])


def attack(seed: int, count: int) -> dict[str, list[int]]:
    """Check `count` inputs; how many of each target were refused and how many gave arrays, and growth in bytes."""
    tally: dict[str, list[int]] = {}
    for number, (target, path, data) in enumerate(inputs(seed, count)):
        try:
            read = check(target, path, data)
        except Exception as error:
            raise AssertionError(f"{target.name}, seed {seed}, input {number}: {error!r}") from error
        if data is target.original and target.name not in tally:
            assert read, f"the valid {target.name} is refused"
            tally[target.name] = [0, 0]
            before = resident()
        else:
            tally[target.name][read] += 1
    return tally | {"growth": [resident() - before]}


def resident() -> int:
    """Bytes that this process held in memory at most, so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def start(seed: int, count: int) -> subprocess.Popen[str]:
    command = [sys.executable, __file__, str(seed), str(count)]
    folders = os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"PYTHONPATH": folders}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def assert_survived(process: subprocess.Popen[str], count: int) -> None:
    """Only DataError or arrays, both from every reader, and less than 100 MB of growth."""
    out, trouble = process.communicate()
    assert process.returncode == 0, trouble[-3000:]
    tally = json.loads(out)
    [growth] = tally.pop("growth")
    assert growth < 100 * MEGABYTE
    assert sum(map(sum, tally.values())) == count
    assert all(refused and loaded for refused, loaded in tally.values()), tally
    print(f"{count} inputs, growth {growth / MEGABYTE:.1f} MB, refused and read: {tally}")


def test_mutants_are_refused_or_read_within_bounds() -> None:
    assert_survived(start(seed=0, count=2500), 2500)


def test_mutants_need_little_memory_of_python_and_numpy() -> None:
    """Traced around each reading alone; what is imported or cached once is not counted."""
    attack(seed=1, count=40)
    largest = 0
    tracemalloc.start()
    try:
        for target, path, data in inputs(seed=2, count=500):
            tracemalloc.reset_peak()
            before, _ = tracemalloc.get_traced_memory()
            check(target, path, data)
            largest = max(largest, tracemalloc.get_traced_memory()[1] - before)
    finally:
        tracemalloc.stop()
    assert largest < 20 * MEGABYTE


@pytest.mark.long
def test_half_a_million_mutants_are_refused_or_read_within_bounds() -> None:
    count = 260_000
    for process in [start(seed=seed, count=count) for seed in (3, 4)]:
        assert_survived(process, count)


@pytest.mark.parametrize("target", targets()[:9], ids=lambda target: target.name)
def test_every_truncation_is_refused(target: Target) -> None:
    """A tar may lack some of the zeros at its end; a gzip may be padded with zeros, a plain file may not."""
    with workshop() as place:
        path = place(target)
        end = len(target.original) - (10_240 if target.name == "cifar-tar" else 0)
        for size in range(0, end, 1 + len(target.original) // 300):
            assert not check(target, path, target.original[:size]), size
        if target.name in ("idx", "norb-dat", "norb-cat"):
            for extra in (b"\0", b"\n", bytes(8), bytes(512)):
                assert not check(target, path, target.original + extra), extra


if __name__ == "__main__":
    print(json.dumps(attack(int(sys.argv[1]), int(sys.argv[2]))))
