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
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from support.data_files import BATCHES, cifar, idx, norb, npy_header, npz, picture, png_chunk, put
from support.mutations import EDGES, blind_edit, blind_edits
from torchcaps.data.fitting import PictureFormat, read_fitted
from torchcaps.data.readers import read_cifar_archive, read_idx, read_norb, read_npz, read_picture
from torchcaps.data.readers.pictures import read_header
from torchcaps.data.readers.safe_io import EXPANSION
from torchcaps.errors import DataError

MEGABYTE = 1 << 20


class Target(NamedTuple):
    """A valid file, who reads it, and how someone who knows its format would forge it."""

    name: str
    read: Callable[[Path], object]
    original: bytes
    forge: Callable[[random.Random, bytes], bytes] = blind_edits


# Edits by someone who knows the format


def forge_gzip(rng: random.Random, data: bytes) -> bytes:
    """Another content with the checksum that belongs to it; bombs; gzips in gzips, and one after the other."""
    inner = gzip.decompress(data)
    action = rng.choice(["edit", "edit", "edit", "bomb", "nest", "append", "flags"])
    if action == "append":
        return data + rng.choice([data, gzip.compress(b""), gzip.compress(inner[16:])])
    if action == "flags":
        return data[:3] + bytes([rng.choice([1, 2, 4, 8, 16, 31, 255])]) + data[4:]
    bomb = inner + bytes(rng.choice([1, 100, 1 << 16, 1 << 21]))
    return gzip.compress({"edit": blind_edit(rng, inner), "bomb": bomb, "nest": data}[action], 1, mtime=0)


def forge_tar(rng: random.Random, data: bytes) -> bytes:
    """One header of a tar changed, its checksum right."""
    if data[:2] == b"\x1f\x8b":
        return forge_gzip(rng, data) if rng.random() < 0.3 else gzip.compress(forge_tar(rng, gzip.decompress(data)), 1)
    start = rng.choice([i for i in range(0, len(data), 512) if data[i + 257 : i + 262] == b"ustar"])
    block = bytearray(data[start : start + 512])
    names = [name.ljust(100, b"\0") for name in (b"../x", b"/etc/passwd", BATCHES[5].encode())]
    sizes = [f"{number % (1 << 33):011o}\0".encode() for number in (*EDGES, 3073, 2 * 3073)]
    sizes += [b"\x80" + rng.randbytes(11), b"-0000000001\0", b" " * 12]
    kinds = [bytes([kind]) for kind in b"0\x001234567LKxgSVAZ"]
    place, values = rng.choice([(0, names), (124, sizes), (156, kinds), (rng.randrange(512), [rng.randbytes(1)])])
    value = rng.choice(values)
    block[place : place + len(value)] = value
    block[148:156] = b" " * 8
    block[148:156] = f"{sum(block):06o}\0 ".encode()
    return data[:start] + bytes(block) + data[start + 512 :]


TYPES = ["|u1", "<f8", ">i4", "<U3", "|O", "|V8", "<M8[D]", "<c16", "|S0", "i4,i4", "<U99999999", "f", "\\n", "|b1"]
SHAPES = ["()", "(3,)", "(2, 3)", "(0,)", "(-1,)", f"({1 << 40},)", f"({1 << 30}, {1 << 30})", "(3.0,)", "3", "(True,)"]
SHAPES += [f"(0, {1 << 62}, {1 << 62})", "(" + "1," * 33 + ")", "(" + "9" * 5000 + ",)", "((3,),)", "[3]"]
TEXTS = ["", "{", "{}", "[" * 9000, "-" * 9990, "'''", "\n\t1\n 2", "lambda: 0", "{[]: 1}", "{'descr'}", "\0", "é" * 9]
NAMES = ["a.npy", "images.npy", "../a.npy", "/a.npy", "b/a.npy", "a\\b.npy", "a", ".npy", "é.npy", "a\n.npy", "x" * 300]


def forge_npy(rng: random.Random, data: bytes) -> bytes:
    """Another header: other types, shapes and orders, or text that is no header; its length right."""
    if rng.random() < 0.4:
        return blind_edit(rng, data)
    order = rng.choice(["False", "True", "0", "None"])
    text = f"{{'descr': '{rng.choice(TYPES)}', 'fortran_order': {order}, 'shape': {rng.choice(SHAPES)}, }}"
    body = rng.choice([data[10 + int.from_bytes(data[8:10], "little") :], rng.randbytes(rng.choice([0, 3, 6, 24, 48]))])
    return npy_header(rng.choice([*[text] * 4, rng.choice(TEXTS)]), rng.choice([1, 1, 2, 3])) + body


def forge_npz(rng: random.Random, data: bytes) -> bytes:
    """Members changed, renamed, doubled, pickled, nested, bombs; the zip right."""
    out, source = io.BytesIO(), zipfile.ZipFile(io.BytesIO(data))
    method = rng.choice([zipfile.ZIP_STORED] * 3 + [zipfile.ZIP_DEFLATED] * 4 + [zipfile.ZIP_BZIP2])
    members = [(name, source.read(name)) for name in source.namelist()]
    name, content = rng.choice(members)
    pickled = io.BytesIO()
    np.save(pickled, np.array([{"a": 1}, None], object), allow_pickle=True)
    changes = [forge_npy(rng, content)] * 12 + [pickled.getvalue(), data, content + bytes(1 << 21), b"\x80\x04N."]
    members[rng.randrange(len(members))] = (rng.choice(NAMES) if rng.random() < 0.2 else name, rng.choice(changes))
    with warnings.catch_warnings(), zipfile.ZipFile(out, "w", method) as target:
        warnings.simplefilter("ignore")
        for member in members * rng.choice([1] * 9 + [2]):
            target.writestr(*member)
    return out.getvalue()


def forge_png(rng: random.Random, data: bytes) -> bytes:
    """Chunks changed, dropped, repeated, added, their checksums right; headers of other sizes."""
    chunks, place = [], 8
    while place < len(data):
        size = int.from_bytes(data[place : place + 4], "big")
        chunks.append((data[place + 4 : place + 8], data[place + 8 : place + 8 + size]))
        place += 12 + size
    i = rng.randrange(len(chunks))
    name, body = chunks[i]
    action = rng.choice(["edit", "edit", "edit", "header", "drop", "repeat", "add", "pixels"])
    if action == "header":
        sizes = [rng.choice([1, 7, 8, 9, 4096, 1 << 16, (1 << 31) - 1, 1 << 31]) for _ in range(2)]
        kind = (rng.choice([1, 2, 4, 8, 16]), rng.choice([0, 2, 3, 4, 6]), 0, 0, rng.choice([0, 0, 1]))
        chunks[0] = (b"IHDR", struct.pack(">IIBBBBB", *sizes, *kind))
    elif action == "add":
        names = b"tEXt zTXt iTXt iCCP acTL fcTL PLTE tRNS eXIf gAMA pHYs sRGB".split()
        bodies = [rng.randbytes(rng.randint(0, 40)), b"a\0\0" + zlib.compress(bytes(1 << 21), 1), bytes(7) + b"\3"]
        chunks.insert(i, (rng.choice(names), rng.choice(bodies)))
    elif action == "pixels":
        chunks = [(n, zlib.compress(blind_edit(rng, zlib.decompress(b)), 1) if n == b"IDAT" else b) for n, b in chunks]
    else:
        chunks[i : i + 1] = {"edit": [(name, blind_edit(rng, body))], "drop": [], "repeat": [(name, body)] * 2}[action]
    return data[:8] + b"".join(png_chunk(*chunk) for chunk in chunks)


# The valid files


def targets() -> list[Target]:
    """Every reader, plain and compressed; pictures whole and fitted to a size; without Pillow, no pictures."""
    cube, table = np.arange(60, dtype=np.uint8).reshape(3, 4, 5), np.arange(8, dtype="<i4").reshape(2, 4)
    dat = norb(cube[:, None])
    arrays = {"images": cube, "labels": np.arange(3), "names": np.array(["a", "bc"])}
    out = [
        Target("idx", read_idx, idx(cube)),
        Target("idx-gz", read_idx, gzip.compress(idx(cube)), forge_gzip),
        Target("norb-dat", read_norb, dat),
        Target("norb-cat", read_norb, norb(table, "<i4")),
        Target("norb-dat-gz", read_norb, gzip.compress(dat), forge_gzip),
        Target("cifar-tar", read_cifar_archive, cifar(), forge_tar),
        Target("cifar-tar-gz", read_cifar_archive, gzip.compress(cifar()), forge_tar),
        Target("npz", read_npz, npz(pack=False, **arrays), forge_npz),
        Target("npz-packed", read_npz, npz(**arrays), forge_npz),
    ]
    if importlib.util.find_spec("PIL"):
        gray = np.arange(64, dtype=np.uint8).reshape(8, 8) * 3
        color = np.stack([gray, gray.T, 255 - gray], -1)
        for kind, read in (("whole", read_picture), ("fitted", fitted)):
            out.append(Target(f"{kind}-gray", read, picture(gray, format="PNG"), forge_png))
            out.append(Target(f"{kind}-color", read, picture(color, format="PNG"), forge_png))
            for format in ("JPEG", "GIF", "WEBP", "BMP"):
                out.append(Target(f"{kind}-{format}", read, picture(color, format=format)))
    return out


def fitted(path: Path) -> np.ndarray:
    """A picture as training gets it."""
    read_header(path)
    return read_fitted(path, PictureFormat(3, 8, 8)).numpy()


# The law


def is_read(target: Target, path: Path, data: bytes) -> bool:
    """Read the input: True if it gave arrays, all of them backed by the file; False if it was refused in one line."""
    put(path, data)
    try:
        result = target.read(path)
    except DataError as error:
        text = str(error)
        assert "\n" not in text and str(path.parents[1]) in text and len(text) < 700, text
        return False
    arrays = list(result.values()) if isinstance(result, dict) else result
    arrays = [arrays] if isinstance(arrays, np.ndarray) else list(arrays)
    size = sum(array.nbytes for array in arrays)
    assert sum(len(array.tobytes()) for array in arrays) == size
    if target.name.startswith("fitted"):
        assert arrays[0].shape == (3, 8, 8)
    elif target.name.startswith("whole"):
        assert arrays[0].shape[0] in (1, 3) and size <= 3 * (1 << 26)
    else:
        assert size <= EXPANSION * len(data)
    return True


def resident() -> int:
    """Bytes that this process held in memory at most, so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def attack(seed: int, count: int) -> dict[str, list[int]]:
    """Read every valid file, then `count` mutants, spread evenly over the targets.

    Returns:
        Of each target how many mutants were refused and how many gave arrays; by how many bytes the process grew; how
        many bytes of Python's and numpy's memory the costliest reading took.
    """
    known = targets()
    tally = {target.name: [0, 0] for target in known}
    costliest = before = 0
    with tempfile.TemporaryDirectory(prefix="torchcaps-mutants-") as root:
        for number in range(-len(known), count):
            target = known[number % len(known)]
            rng = random.Random(f"{seed} {number}")
            data = target.original if number < 0 else rng.choice([blind_edits, target.forge])(rng, target.original)
            if number % 5 == 0:  # tracing takes time
                tracemalloc.start()
            try:
                read = is_read(target, Path(root, target.name, "a", "file"), data)
                assert read or number >= 0, "the valid file is refused"
            except Exception as error:
                raise AssertionError(f"{target.name}, seed {seed}, input {number}: {error!r}") from error
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            if number < 0:  # what is imported or cached once is not counted
                before = resident()
            else:
                tally[target.name][read] += 1
                costliest = max(costliest, peak)
    return tally | {"memory": [resident() - before, costliest]}


@pytest.mark.parametrize(
    ("seed", "count"), [(0, 2500), *(pytest.param(s, 260_000, marks=pytest.mark.long) for s in (3, 4))]
)
def test_mutants_are_refused_or_read_within_bounds(seed: int, count: int) -> None:
    """Only DataError or arrays, both from every reader, and little memory."""
    folders = [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(folders)}
    command = [sys.executable, __file__, str(seed), str(count)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    tally = json.loads(done.stdout)
    growth, costliest = tally.pop("memory")
    assert growth < 100 * MEGABYTE and costliest < 20 * MEGABYTE
    assert sum(map(sum, tally.values())) == count
    assert all(refused and loaded for refused, loaded in tally.values()), tally


@pytest.mark.parametrize("target", targets()[:9], ids=lambda target: target.name)
def test_every_truncation_is_refused(target: Target, tmp_path: Path) -> None:
    """A tar may lack some of the zeros at its end; a gzip may be padded with zeros, a plain file may not."""
    path = tmp_path / "a/file"
    end = len(target.original) - (10_240 if target.name == "cifar-tar" else 0)
    for size in range(0, end, 1 + len(target.original) // 300):
        assert not is_read(target, path, target.original[:size]), size
    if target.name in ("idx", "norb-dat", "norb-cat"):
        for extra in (b"\0", b"\n", bytes(8), bytes(512)):
            assert not is_read(target, path, target.original + extra), extra


if __name__ == "__main__":
    print(json.dumps(attack(int(sys.argv[1]), int(sys.argv[2]))))
