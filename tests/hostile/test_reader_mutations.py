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
import random
import resource
import struct
import subprocess
import sys
import tarfile
import tempfile
import tracemalloc
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from torchcaps.data.readers import (
    read_cifar,
    read_cifar_archive,
    read_idx,
    read_norb,
    read_npy,
    read_npz,
    read_pictures,
)
from torchcaps.errors import DataError

Mutation = Callable[[random.Random, bytes], bytes]
EXPANSION = 1032
MEGABYTE = 1 << 20


@dataclass(frozen=True)
class Target:
    """A valid file, who reads it, and how someone who knows its format would forge it."""

    name: str
    read: Callable[[Path], Any]
    original: bytes
    forge: Mutation | None = None
    lone: bool = False


# ---------------------------------------------------------------------------------------- blind edits of bytes


EDGES = [0, 1, 2, 3, 4, 7, 8, 127, 128, 255, 256, 0x7FFF, 0xFFFF, 1 << 16, 1 << 20, 1 << 26, 1 << 29, (1 << 30) - 1]
EDGES += [1 << 30, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32, 1 << 40, (1 << 63) - 1, 1 << 63, (1 << 64) - 1]
MAGICS = [
    b"\0\0\x08\x03",
    b"\0\0\x08\x01",
    b"\0\0\x0d\x03",
    b"\x1f\x8b\x08\0",
    b"PK\x03\x04",
    b"PK\x05\x06",
    b"PK\x06\x07",
]
MAGICS += [
    b"\x55\x4c\x3d\x1e",
    b"\x54\x4c\x3d\x1e",
    b"\x93NUMPY\x01\0",
    b"\x93NUMPY\x02\0",
    b"\0\1IM",
    b"\0\2IM",
    b"\x89PNG",
]
MAGICS += [b"\xff\xd8\xff\xe0", b"\xff\xc2", b"ustar\0", b"\x80\x04", b"x\x9c", b"BZh9", b"GIF89a"]


def at(rng: random.Random, data: bytes) -> int:
    """A place in the file, half of the time among its first bytes, where the headers are."""
    return rng.randrange(min(len(data), rng.choice([16, 64, 256, 1 << 30, 1 << 30])) + 1)


def flip_bits(rng: random.Random, data: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.choice([1, 1, 1, 2, 5, 20])):
        if changed:
            changed[min(at(rng, data), len(changed) - 1)] ^= 1 << rng.randrange(8)
    return bytes(changed)


def change_number(rng: random.Random, data: bytes) -> bytes:
    """Write a number at the edge of something, in any width and byte order."""
    width, place = rng.choice([1, 2, 4, 4, 4, 8]), at(rng, data)
    number = (rng.choice(EDGES) + rng.choice([0, 0, -1, 1])) % (1 << 8 * width)
    return data[:place] + number.to_bytes(width, rng.choice(["little", "big"])) + data[place + width :]


def change_magic(rng: random.Random, data: bytes) -> bytes:
    magic, place = rng.choice(MAGICS), rng.choice([0, 0, 0, at(rng, data)])
    return data[:place] + magic + data[place + len(magic) :]


def truncate(rng: random.Random, data: bytes) -> bytes:
    return data[: at(rng, data)]


def extend(rng: random.Random, data: bytes) -> bytes:
    return data + rng.choice([b"\0", b" ", rng.randbytes(8), data[-8:], data, bytes(4096)])


def delete(rng: random.Random, data: bytes) -> bytes:
    place = at(rng, data)
    return data[:place] + data[place + rng.randint(1, 40) :]


def repeat(rng: random.Random, data: bytes) -> bytes:
    place, size = at(rng, data), rng.choice([1, 4, 8, 64, 512])
    return data[: place + size] + data[place : place + size] * rng.choice([1, 1, 50]) + data[place + size :]


def insert(rng: random.Random, data: bytes) -> bytes:
    place = at(rng, data)
    return data[:place] + rng.randbytes(rng.randint(1, 8)) + data[place:]


def exchange(rng: random.Random, data: bytes) -> bytes:
    """Swap two stretches of equal length, such as two fields of a header."""
    size, a, b = rng.choice([1, 2, 4, 8]), *sorted((at(rng, data), at(rng, data)))
    if b < a + size:
        return data
    return data[:a] + data[b : b + size] + data[a + size : b] + data[a : a + size] + data[b + size :]


BLIND: list[Mutation] = [flip_bits, flip_bits, change_number, change_number, change_magic, truncate, extend, delete]
BLIND += [repeat, insert, exchange]


def blind(rng: random.Random, data: bytes) -> bytes:
    return rng.choice(BLIND)(rng, data)


# --------------------------------------------------------------------------- edits by someone who knows the format


def forge_gzip(rng: random.Random, data: bytes) -> bytes:
    """Another content with the checksum that belongs to it; bombs; gzips in gzips, and one after the other."""
    inner = gzip.decompress(data)
    action = rng.choice(["edit", "edit", "edit", "edit", "bomb", "nest", "again", "header"])
    if action == "edit":
        return gzip.compress(blind(rng, inner), 1, mtime=0)
    if action == "bomb":
        return gzip.compress(inner + bytes(rng.choice([1, 100, 1 << 16, 1 << 21])), 1)
    if action == "nest":
        return gzip.compress(gzip.compress(data, 1) if rng.random() < 0.5 else data, 1)
    if action == "again":
        return data + rng.choice([data, gzip.compress(b""), gzip.compress(inner[16:])])
    return data[:3] + bytes([rng.choice([1, 2, 4, 8, 16, 31, 255])]) + data[4:]


def tar_block(rng: random.Random, data: bytes) -> bytes:
    """One header of a tar changed, its checksum right."""
    starts = [i for i in range(0, len(data), 512) if data[i + 257 : i + 262] == b"ustar"]
    start = rng.choice(starts)
    block = bytearray(data[start : start + 512])
    field = rng.choice(["name", "size", "type", "any"])
    if field == "name":
        names = [
            b"../x",
            b"/etc/passwd",
            b"cifar-10-batches-bin/test_batch.bin",
            b"./cifar-10-batches-bin/test_batch.bin",
        ]
        block[:100] = rng.choice(names).ljust(100, b"\0")
    elif field == "size":
        sizes = [
            f"{rng.choice(EDGES) % (1 << 33):011o}".encode() + b"\0",
            b"\x80" + rng.randbytes(11),
            b"-0000000001\0",
        ]
        block[124:136] = rng.choice([*sizes, b" " * 12, f"{3073 * rng.randint(0, 3):011o}".encode() + b"\0"])
    elif field == "type":
        block[156] = rng.choice(b"0\x001234567LKxgSVAZ")
    else:
        block[rng.randrange(512)] = rng.randrange(256)
    block[148:156] = b" " * 8
    block[148:156] = f"{sum(block):06o}\0 ".encode()
    return data[:start] + bytes(block) + data[start + 512 :]


def forge_tar(rng: random.Random, data: bytes) -> bytes:
    zipped = data[:2] == b"\x1f\x8b"
    if zipped and rng.random() < 0.3:
        return forge_gzip(rng, data)
    inner = tar_block(rng, gzip.decompress(data) if zipped else data)
    return gzip.compress(inner, 1, mtime=0) if zipped else inner


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
    "",
    "\\n",
    "|b1",
    ">U2",
]
SHAPES = ["()", "(3,)", "(2, 3)", "(0,)", "(-1,)", "(1 << 40,)", f"({1 << 40},)", f"({1 << 30}, {1 << 30})", "(3.0,)"]
SHAPES += [
    "[3]",
    "3",
    "(True,)",
    f"(0, {1 << 62}, {1 << 62})",
    "(" + "1," * 33 + ")",
    "(" + "9" * 5000 + ",)",
    "((3,),)",
]
TEXTS = [
    "",
    "{",
    "{}",
    "[" * 9000,
    "{" * 300,
    "-" * 9990,
    "'" * 3,
    "\n\t1\n 2",
    "lambda: 0",
    "{[]: 1}",
    "{'descr'}",
    "\0",
    "é" * 9,
]


def forge_npy(rng: random.Random, data: bytes) -> bytes:
    """Another header: other types, shapes and orders, or text that is no header; its length right."""
    if rng.random() < 0.4:
        return blind(rng, data)
    length = int.from_bytes(data[8:10], "little")
    quote = "'" if rng.random() < 0.9 else ""
    order = rng.choice(["False", "True", "0", "None"])
    text = f"{{'descr': {quote}{rng.choice(TYPES)}{quote}, 'fortran_order': {order}, 'shape': {rng.choice(SHAPES)}, }}"
    text = rng.choice(TEXTS) if rng.random() < 0.2 else text
    version = rng.choice([1, 1, 2, 3])
    body = rng.choice([data[10 + length :], rng.randbytes(rng.choice([0, 3, 6, 24, 48]))])
    size = len(text.encode("latin-1")).to_bytes(2 if version == 1 else 4, "little")
    return data[:6] + bytes([version, 0]) + size + text.encode("latin-1") + body


PICKLED = io.BytesIO()
np.save(PICKLED, np.array([{"a": 1}, None], object), allow_pickle=True)
NAMES = [
    "a.npy",
    "images.npy",
    "../a.npy",
    "/a.npy",
    "b/a.npy",
    "a\\b.npy",
    "a",
    ".npy",
    "a.npy/",
    "é.npy",
    "a\n.npy",
    "x" * 300,
]


def forge_npz(rng: random.Random, data: bytes) -> bytes:
    """Members changed, renamed, doubled, pickled, nested, bombs; the zip right, or then also changed blindly."""
    out, source = io.BytesIO(), zipfile.ZipFile(io.BytesIO(data))
    method = rng.choice([zipfile.ZIP_STORED] * 3 + [zipfile.ZIP_DEFLATED] * 4 + [zipfile.ZIP_BZIP2])
    members = [(name, source.read(name)) for name in source.namelist()]
    chosen, (name, content) = rng.randrange(len(members)), rng.choice(members)
    changes = [forge_npy(rng, content)] * 12 + [PICKLED.getvalue(), data, content + bytes(1 << 21), b"\x80\x04N."]
    name = rng.choice(NAMES) if rng.random() < 0.2 else name
    members[chosen] = (name, rng.choice(changes))
    with warnings.catch_warnings(), zipfile.ZipFile(out, "w", method) as target:
        warnings.simplefilter("ignore")
        for member in members * rng.choice([1] * 9 + [2]):
            target.writestr(*member)
    return out.getvalue()


def chunk(name: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))


def forge_png(rng: random.Random, data: bytes) -> bytes:
    """Chunks changed, dropped, repeated, added, their checksums right; true images of other sizes."""
    if rng.random() < 0.05:
        width, height = (rng.choice([1, 8, 100, 2000]) for _ in "wh")
        start = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0))
        return data[:8] + start + chunk(b"IDAT", zlib.compress(bytes((width + 1) * height), 1)) + chunk(b"IEND", b"")
    chunks, place = [], 8
    while place < len(data):
        size = int.from_bytes(data[place : place + 4], "big")
        chunks.append((data[place + 4 : place + 8], data[place + 8 : place + 8 + size]))
        place += 12 + size
    i = rng.randrange(len(chunks))
    name, body = chunks[i]
    extra = [
        b"tEXt",
        b"zTXt",
        b"iTXt",
        b"iCCP",
        b"acTL",
        b"fcTL",
        b"PLTE",
        b"tRNS",
        b"eXIf",
        b"gAMA",
        b"cHRM",
        b"pHYs",
        b"sRGB",
    ]
    action = rng.choice(["edit", "edit", "edit", "header", "drop", "repeat", "add", "idat"])
    if action == "edit":
        chunks[i] = (name, blind(rng, body))
    elif action == "header":
        sizes = [rng.choice([1, 7, 8, 9, 4096, 1 << 16, (1 << 31) - 1, 1 << 31]) for _ in range(2)]
        kind = (rng.choice([1, 2, 4, 8, 16]), rng.choice([0, 2, 3, 4, 6]), 0, 0, rng.choice([0, 0, 1]))
        chunks[0] = (b"IHDR", struct.pack(">IIBBBBB", *sizes, *kind))
    elif action == "drop":
        del chunks[i]
    elif action == "repeat":
        chunks.insert(i, chunks[i])
    elif action == "add":
        bodies = [
            rng.randbytes(rng.randint(0, 40)),
            b"a\0\0" + zlib.compress(bytes(1 << 21), 1),
            struct.pack(">II", 3, 0),
        ]
        chunks.insert(i, (rng.choice(extra), rng.choice(bodies)))
    else:
        raw = blind(rng, zlib.decompress(b"".join(body for name, body in chunks if name == b"IDAT")))
        chunks = [c if c[0] != b"IDAT" else (b"IDAT", zlib.compress(raw, 1)) for c in chunks]
    return data[:8] + b"".join(chunk(*c) for c in chunks)


# ------------------------------------------------------------------------------------------- the valid files


def idx(array: np.ndarray) -> bytes:
    return struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.tobytes()


def norb(array: np.ndarray, magic: int) -> bytes:
    sizes = [*array.shape, 1, 1][: max(3, array.ndim)]
    return struct.pack(f"<II{len(sizes)}I", magic, array.ndim, *sizes) + array.tobytes()


def archive() -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for name in ["readme.html", *(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"]:
            info = tarfile.TarInfo(f"cifar-10-batches-bin/{name}")
            info.size = 3073
            tar.addfile(info, io.BytesIO(bytes([7]) + bytes(3072)))
    return out.getvalue()


def saved(save: Callable[..., None], **arrays: np.ndarray) -> bytes:
    out = io.BytesIO()
    save(out, **arrays)
    return out.getvalue()


def picture(array: np.ndarray, **options: Any) -> bytes:
    from PIL import Image

    out = io.BytesIO()
    Image.fromarray(array).save(out, **options)
    return out.getvalue()


def class_folder(path: Path) -> Any:
    return read_pictures(path.parents[1])[:2]


def targets() -> list[Target]:
    """Every reader, plain and compressed; those whose writer is not installed are left out."""
    cube, table = np.arange(60, dtype=np.uint8).reshape(3, 4, 5), np.arange(8, dtype="<i4").reshape(2, 4)
    dat, cat, tar = norb(cube[:, None], 0x1E3D4C55), norb(table, 0x1E3D4C54), archive()
    arrays = {"images": cube, "labels": np.arange(3), "names": np.array(["a", "bc"])}
    out = [
        Target("idx", read_idx, idx(cube)),
        Target("idx-labels", read_idx, idx(cube[0, 0])),
        Target("idx-gz", read_idx, gzip.compress(idx(cube)), forge_gzip),
        Target("norb-dat", read_norb, dat),
        Target("norb-cat", read_norb, cat),
        Target("norb-dat-gz", read_norb, gzip.compress(dat), forge_gzip),
        Target("norb-cat-gz", read_norb, gzip.compress(cat), forge_gzip),
        Target("cifar", read_cifar, bytes([3]) + bytes(3072) + bytes([9]) + bytes(3072)),
        Target("cifar-tar", read_cifar_archive, tar, forge_tar),
        Target("cifar-tar-gz", read_cifar_archive, gzip.compress(tar), forge_tar),
        Target("npz", read_npz, saved(np.savez, **arrays), forge_npz),
        Target("npz-packed", read_npz, saved(np.savez_compressed, **arrays), forge_npz),
        Target("npy", read_npy, saved(np.save, arr=cube), forge_npy),
    ]
    if importlib.util.find_spec("PIL"):
        gray = np.arange(64, dtype=np.uint8).reshape(8, 8) * 3
        color = np.stack([gray, gray.T, 255 - gray], -1)
        for lone in (True, False):
            kind = "lone-" if lone else "pair-"
            out += [Target(kind + "png-gray", class_folder, picture(gray, format="PNG"), forge_png, lone)]
            out += [Target(kind + "png", class_folder, picture(color, format="PNG"), forge_png, lone)]
            out += [Target(kind + "jpeg", class_folder, picture(color, format="JPEG"), None, lone)]
            out += [
                Target(kind + "jpeg-steps", class_folder, picture(gray, format="JPEG", progressive=True), None, lone)
            ]
    return out


# ---------------------------------------------------------------------------------------------------- the law


def mutant(rng: random.Random, target: Target) -> bytes:
    """Up to three blind edits, or a forgery and perhaps one blind edit of it."""
    data, edits = target.original, rng.choice([1, 1, 1, 2, 3])
    if target.forge and rng.random() < 0.6:
        data, edits = target.forge(rng, data), rng.choice([0, 0, 0, 1])
    for _ in range(edits):
        data = blind(rng, data)
    return data


def arrays_of(result: Any) -> list[np.ndarray]:
    if isinstance(result, dict):
        return list(result.values())
    return [result] if isinstance(result, np.ndarray) else list(result)


def check(target: Target, path: Path, data: bytes) -> bool:
    """Read the input: True if it gave arrays, all of them backed by the file; False if it was refused in one line."""
    path.write_bytes(data)
    try:
        arrays = arrays_of(target.read(path))
    except DataError as error:
        text = str(error)
        assert "\n" not in text and str(path.parents[1]) in text and len(text) < 700, text
        return False
    size = sum(array.nbytes for array in arrays)
    assert sum(len(array.tobytes()) for array in arrays) == size
    if target.name.startswith("pair"):
        assert arrays[0].shape in [(2, 1, 8, 8), (2, 3, 8, 8)]
    elif target.lone:
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
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


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


STRICT = {"idx", "idx-labels", "idx-gz", "norb-dat", "norb-cat", "norb-dat-gz", "npz", "npz-packed", "npy"}


@pytest.mark.parametrize("target", [target for target in targets() if target.name in STRICT], ids=lambda t: t.name)
def test_every_truncation_and_every_addition_is_refused(target: Target) -> None:
    with workshop() as place:
        path = place(target)
        for size in range(0, len(target.original), 1 + len(target.original) // 300):
            assert not check(target, path, target.original[:size]), size
        for extra in (b"\0", b"\n", bytes(8), bytes(512)):
            assert not check(target, path, target.original + extra), extra


if __name__ == "__main__":
    print(json.dumps(attack(int(sys.argv[1]), int(sys.argv[2]))))
