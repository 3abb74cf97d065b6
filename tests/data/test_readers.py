"""Readers against other people's writers (struct, gzip, tarfile, numpy, Pillow), and each refusal by name."""

from __future__ import annotations

import gzip
import hashlib
import os
import struct
import tarfile
import tracemalloc
import warnings
import zipfile
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from support.data_files import (
    BATCHES,
    NORB_MAGIC,
    batch,
    cifar,
    cifar_gz,
    idx,
    norb,
    npy,
    npy_header,
    npz,
    put,
    values,
    zipped,
)
from support.mutations import flipped
from torchcaps.data.readers import read_cifar_archive, read_idx, read_norb, read_npz
from torchcaps.data.readers.safe_io import EXPANSION
from torchcaps.errors import DataError

Read = Callable[[Path], object]
PACKED = pytest.mark.parametrize("pack", [bytes, gzip.compress])
FULL = (1 << 32) - 1


def refused(read: Read, path: Path, *words: str) -> None:
    """Refused with one line that names the file and the reason, in less than 3 MiB of Python's and numpy's memory."""
    tracemalloc.start()
    try:
        with pytest.raises(DataError) as error:
            read(path)
        assert tracemalloc.get_traced_memory()[1] < 3 << 20
    finally:
        tracemalloc.stop()
    text = str(error.value)
    assert "\n" not in text and repr(path.name)[1:-1] in text
    for word in words:
        assert word in text, text


# What is read


@pytest.mark.parametrize("shape", [(1,), (7,), (5, 4), (3, 4, 5), (2, 3, 4, 5)])
@PACKED
def test_idx_and_norb_round_trip(shape: tuple[int, ...], pack: Callable[[bytes], bytes], tmp_path: Path) -> None:
    path = put(tmp_path / "images.bin", pack(idx(values(*shape))))
    np.testing.assert_array_equal(read_idx(path), values(*shape), strict=True)
    for dtype in NORB_MAGIC:
        array = values(*shape, dtype=dtype)
        read = read_norb(put(tmp_path / f"{dtype}.mat", pack(norb(array, dtype))))
        np.testing.assert_array_equal(read, array, strict=True)
        assert isinstance(read, np.memmap) == (pack is bytes and dtype == "u1")
        assert not isinstance(read, np.memmap) or not read.flags.writeable


def test_norb_begins_as_the_official_category_file_does(tmp_path: Path) -> None:
    """24300 categories: magic, one axis, and the sizes 24300, 1, 1."""
    start = bytes.fromhex("544c3d1e 01000000 ec5e0000 01000000 01000000")
    read = read_norb(put(tmp_path / "cat", start + np.arange(24300, dtype="<i4").tobytes()))
    np.testing.assert_array_equal(read, np.arange(24300))


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
@PACKED
def test_cifar_keeps_the_batches_in_order_and_reads_every_tar_dialect(form, pack, tmp_path: Path) -> None:
    def edit(info: tarfile.TarInfo) -> None:
        info.name, info.mtime, info.pax_headers = "./" + info.name, 1.5, {"comment": "é" * 200}

    order = [5, 2, 0, 1, 4, 3]
    data = pack(cifar([BATCHES[i] for i in order], edit, format=form))
    read = read_cifar_archive(put(tmp_path / "a.tar.gz", data))
    records = np.stack([np.frombuffer(batch(order.index(i)), np.uint8).reshape(2, 3073) for i in range(6)])
    train = records[:5].reshape(10, 3073)
    np.testing.assert_array_equal(read.labels, train[:, 0].astype(np.int64), strict=True)
    np.testing.assert_array_equal(read.test_labels, records[5, :, 0])
    np.testing.assert_array_equal(read.images, train[:, 1:].reshape(10, 3, 32, 32), strict=True)
    for n, c, y, x in [(0, 0, 0, 0), (1, 2, 31, 30), (1, 1, 5, 17)]:
        assert read.test_images[n, c, y, x] == records[5, n, 1 + 1024 * c + 32 * y + x]


@pytest.mark.parametrize("pack", [True, False])
@pytest.mark.parametrize("dtype", ["?", "u1", "<i2", ">i4", "<i8", ">u8", "<f2", ">f4", "<f8", "<c8", "S3", ">U5"])
def test_npz_round_trip(pack: bool, dtype: str, tmp_path: Path) -> None:
    cube = values(3, 4, 5, high=2).astype(dtype)
    arrays = {"images": cube, "a b.c-d": np.asfortranarray(cube), "scalar": cube[1, 1, 1], "none": cube[:0]}
    read = read_npz(put(tmp_path / "a.npz", npz(pack=pack, **arrays)))
    assert list(read) == list(arrays)
    for name, array in arrays.items():
        np.testing.assert_array_equal(read[name], array.astype(array.dtype.newbyteorder("=")), strict=True)
        assert read[name].dtype.isnative
    second = zipped(("a.npy", npy(cube, (2, 0))))
    np.testing.assert_array_equal(read_npz(put(tmp_path / "b.npz", second))["a"], cube)


# What is refused

IDX = idx(values(3, 4, 5))
IDX_GZ = gzip.compress(IDX)
NORB = norb(values(3, 2, 4, 5))
CIFAR = cifar()
NPY = npy(values(3, 4))
ZIP = zipped(("a.npy", NPY))
STORED = zipped(("a.npy", NPY), method=zipfile.ZIP_STORED)
ZEROS = bytes(1 << 24)


def links(kind: bytes) -> bytes:
    return cifar_gz(edit=lambda info: setattr(info, "type", kind if info.name == BATCHES[2] else info.type))


def member(name: str, size: int, content: bytes, kind: bytes = tarfile.REGTYPE) -> bytes:
    """The beginning of a tar.gz: the header of one member, and its content, if it is that."""
    header = tarfile.TarInfo(name)
    header.size, header.type = size, kind
    return gzip.compress(header.tobuf(tarfile.USTAR_FORMAT) + content)


def zipped_twice() -> bytes:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return zipped(("a.npy", NPY), ("a.npy", NPY))


def claims(magic: str, *sizes: int) -> bytes:
    return struct.pack(magic, *sizes) + bytes(1000)


def npz_of(data: bytes) -> bytes:
    return zipped(("a.npy", data))


def said(descr: str, shape: object, fortran: str = "False") -> str:
    return f"{{'descr': {descr}, 'fortran_order': {fortran}, 'shape': {shape}, }}"


def overlapping() -> bytes:
    """Every entry of the directory points to one and the same member of 1 MiB; all together are too much."""
    one = zipped(("a.npy", npy(np.zeros(1 << 20, np.uint8))))
    start = one.index(b"PK\x01\x02")
    entries = b"".join(one[start:-22].replace(b"a.npy", f"{i}.npy".encode()) for i in range(9))
    return one[:start] + entries + struct.pack("<4sHHHHIIH", b"PK\x05\x06", 0, 0, 9, 9, len(entries), start, 0)


HUGE = claims("<6I", NORB_MAGIC["u1"], 4, FULL, FULL, FULL, FULL)
PLAIN = "plain numbers or text"
REFUSALS: dict[Read, list[tuple[str, bytes]]] = {
    read_idx: [
        ("begins with 00000d03; an IDX file of bytes begins with 00000801", b"\0\0\x0d\x03" + IDX[4:]),
        ("00000805", b"\0\0\x08\x05" + IDX[4:] + bytes(99)),
        ("00000800", b"\0\0\x08\x00"),
        ("60 more bytes are wanted and at most 59", IDX[:-1]),
        ("more data than its header says", IDX + b"\0"),
        ("holds nothing", idx(values(3, 0, 5))),
        ("holds nothing", claims(">HBB4I", 0, 8, 4, 0, FULL, 1, 9)),
        ("at most 1,073,741,824 bytes are read", claims(">HBB4I", 0, 8, 4, *[FULL] * 4)),
        ("can follow", claims(">HBB1I", 0, 8, 1, 1 << 29)),
        ("can follow", gzip.compress(claims(">HBB3I", 0, 8, 3, 1 << 20, 30, 30))),
        ("cut short", gzip.compress(claims(">HBB1I", 0, 8, 1, 20_000))),
        ("cut short", gzip.compress(IDX[:-1])),
        ("more data than its header says", gzip.compress(IDX + ZEROS)),
        ("Not a gzipped file", IDX_GZ + b"x"),
        ("begins with 1f8b", gzip.compress(IDX_GZ)),
        ("CRC check failed", flipped(IDX_GZ, -8)),
    ],
    read_norb: [
        ("1E3D4C52", struct.pack("<I", 0x1E3D4C52) + NORB[4:]),
        ("554C3D1E", struct.pack(">I", 0x1E3D4C55) + NORB[4:]),
        ("9 axes", NORB[:4] + struct.pack("<I", 9) + NORB[8:]),
        ("0 axes", NORB[:4] + struct.pack("<I", 0) + NORB[8:]),
        ("119 bytes for [3, 2, 4, 5]", NORB[:-1]),
        ("121 bytes for", NORB + b"\0"),
        ("more data", gzip.compress(NORB + b"\0")),
        ("holds nothing", norb(values(3, 0, 4, 5))),
        ("must be 1", claims("<5I", NORB_MAGIC["<i4"], 1, 2, 2, 1)),
        ("bytes for", HUGE),
        ("at most 1,073,741,824 bytes are read", gzip.compress(HUGE)),
        ("can follow", gzip.compress(claims("<5I", NORB_MAGIC["<i4"], 1, 1 << 27, 1, 1))),
    ],
    read_cifar_archive: [
        *(("data_batch_3.bin' is a link", links(kind)) for kind in (b"2", b"1", b"3", b"S")),
        ("lacks cifar-10-batches-bin/test_batch.bin", cifar_gz(*BATCHES[:5])),
        ("lacks", cifar_gz(*("../" + name for name in BATCHES))),
        ("lacks", cifar_gz(*("/" + name for name in BATCHES))),
        ("twice", cifar_gz(BATCHES[0], *BATCHES[:5])),
        ("label 10 in record 0", CIFAR.replace(batch(0), b"\x0a" + batch(0)[1:])),
        ("bad checksum", CIFAR.replace(b"ustar", b"uster", 1)),
        ("", gzip.compress(CIFAR[:20_000])),
        ("ended", gzip.compress(CIFAR)[:-4]),
        ("CRC check failed", flipped(gzip.compress(CIFAR), -6)),
        # An extended header that `tarfile` alone would load, and batches that are too large or not there.
        *(("lacks", member("x", len(ZEROS), ZEROS + bytes(1024), kind)) for kind in (b"x", b"L", b"S")),
        ("30,733,073 bytes; 1 to 10,000 times 3073", member(BATCHES[0], 3073 * 10_001, ZEROS)),
        ("can follow", member(BATCHES[0], 3073 * 10_000, bytes(999))),
    ],
    read_npz: [
        *(("plain names", zipped((name, NPY))) for name in ("../a.npy", "/a.npy", "b/a.npy", "b\\a.npy", "..", ".npy")),
        *(("plain names", zipped((name, NPY))) for name in ("a.txt", "a", "C:a.npy", "\u202ea.npy", " a.npy")),
        ("twice", zipped_twice()),
        ("pickle", npz(a=np.array([{"x": 1}, None], object))),
        (PLAIN, npz(a=np.zeros(3, [("x", "f4"), ("y", "i4")]))),
        (PLAIN, npz(a=np.array(["2020"], "M8[D]"))),
        ("plain numbers", npz_of(npy(values(3), (3, 0)))),
        ("a.npy", npz_of(b"\x80\x04N.")),
        ("sizes of 0 or more", npz_of(npy_header(said("'|u1'", "(-1, -1)")) + b"x")),
        ("holds 11 bytes for uint8 [3, 4], 12 are wanted", npz_of(NPY[:-1])),
        ("holds 13 bytes", npz_of(NPY + b"\0")),
        ("another way", zipped(("a.npy", NPY), method=zipfile.ZIP_LZMA)),
        ("another way", zipped(("a.npy", NPY), method=zipfile.ZIP_BZIP2)),
        ("not a numpy array", npz_of(ZIP)),
        ("0 members", zipped()),
        ("1001 members", zipped(*((f"{i}.npy", b"") for i in range(1001)))),
        ("encrypted", ZIP.replace(b"PK\x01\x02\x14\x03\x14\x00\x00", b"PK\x01\x02\x14\x03\x14\x00\x01")),
        ("CRC", flipped(STORED, STORED.index(NPY) + len(NPY) - 1)),
        # Bombs: an array behind an empty header, a size that cannot be and a directory of 2^31 bytes.
        ("header that cannot be read", npz_of(npy_header("{}") + ZEROS)),
        ("cannot be", ZIP.replace(struct.pack("<I", len(NPY)), struct.pack("<I", 1 << 29))),
        ("", ZIP[:-10] + struct.pack("<I", 1 << 31) + ZIP[-6:]),
    ],
}
BAD_HEADERS = ["", "{}", "[]", "(" * 5000, "-" * 9000 + "1", "{[]: 1}", "\ud7ff", "'''", "{'descr': 'u1'\n\t\0"]
BAD_HEADERS += ["__import__('os').abort()", " " * 10_001, said("'u1'", "(3,)", "1")]
BAD_HEADERS += [said("'u1'", s) for s in ("(3, 5", "(-1,)", "(True,)", f"({'1,' * 40})", f"({'9' * 4400},)")]
BAD_HEADERS += [said(t, "(3,)") for t in ("'|O'", "3", "[]", "'<U0'", "'i4,i4'", "('u1', (3,))")]
LARGE = [(1 << 30,), (1 << 31, 1 << 31), (0, 1 << 62, 1 << 62), (1 << 70,)]
BAD_HEADERS += [said(descr, shape) for shape in LARGE for descr in ("'|u1'", "'<f8'", "'<U99999999'")]
REFUSALS[read_npz] += [("", npz_of(npy_header(text, v) + bytes(1000))) for text in BAD_HEADERS for v in (1, 2)]


@pytest.mark.parametrize(
    ("read", "text", "data"),
    [pytest.param(read, *case, id=f"{read.__name__}: {case[0]}") for read, cases in REFUSALS.items() for case in cases],
)
def test_a_damaged_or_hostile_file_is_refused(read: Read, text: str, data: bytes, tmp_path: Path) -> None:
    refused(read, put(tmp_path / "file", data), text)


def test_no_more_is_read_than_the_caller_wants(tmp_path: Path) -> None:
    for data in (IDX, IDX_GZ):
        path = put(tmp_path / "a", data)
        assert read_idx(path, most=60).size == 60
        refused(lambda path: read_idx(path, most=59), path, "at most 59 bytes")
    refused(lambda path: read_npz(path, most=100), put(tmp_path / "a", npz(a=values(20_000))), "at most 100")
    refused(lambda path: read_npz(path, most=1 << 22), put(tmp_path / "a", overlapping()), "at most 4,194,304")
    assert 1000 < len(ZEROS) / len(zlib.compress(ZEROS, 9)) < EXPANSION  # what no deflate can exceed


FILES: dict[Read, bytes] = {read_idx: IDX, read_norb: NORB, read_cifar_archive: cifar_gz(), read_npz: ZIP}


@pytest.mark.parametrize("read", FILES)
def test_what_is_no_file_or_one_of_another_kind_is_refused(read: Read, tmp_path: Path) -> None:
    refused(read, tmp_path / "absent", "no such file")
    refused(read, tmp_path, "is a folder")
    refused(read, put(tmp_path / "two\nlines", b"x" * 5000))
    os.mkfifo(tmp_path / "pipe")
    refused(read, tmp_path / "pipe", "not a regular file")
    with pytest.raises(DataError):
        read(Path("a\0b"))
    if os.geteuid():
        put(tmp_path / "a", b"x").chmod(0)
        refused(read, tmp_path / "a", "ermission")
    for other in FILES.keys() - {read}:
        refused(read, put(tmp_path / "file", FILES[other]))


# The real files, if present


def real(place: str) -> Path:
    path = Path(os.environ.get("TORCHCAPS_DATA") or Path(__file__).parents[3] / "shared" / "data", place)
    if not path.exists():
        pytest.skip(f"{path} is absent; set TORCHCAPS_DATA to a folder that has {place}")
    return path


@pytest.mark.parametrize(
    ("name", "shape", "digest"),
    [
        ("train-images-idx3-ubyte.gz", (60_000, 28, 28), "6bbc9ace898e44ae57da46a324031adb"),
        ("train-labels-idx1-ubyte.gz", (60_000,), "a25bea736e30d166cdddb491f175f624"),
        ("t10k-images-idx3-ubyte.gz", (10_000, 28, 28), "2646ac647ad5339dbf082846283269ea"),
        ("t10k-labels-idx1-ubyte.gz", (10_000,), "27ae3e4e09519cfbb04c329615203637"),
    ],
)
def test_mnist_has_the_published_digest_and_fashion_mnist_its_shapes(
    name: str, shape: Sequence[int], digest: str
) -> None:
    assert hashlib.md5(idx(read_idx(real(f"mnist/{name}")))).hexdigest() == digest
    fashion = read_idx(real(f"fashion-mnist/{name}"))
    assert fashion.shape == shape
    assert fashion.ndim > 1 or np.bincount(fashion).tolist() == [len(fashion) // 10] * 10


@pytest.mark.parametrize("part", ["train", "test"])
def test_smallnorb_has_its_factors(part: str) -> None:
    arrays = read_npz(real(f"smallnorb/smallnorb48_{part}.npz"))
    assert list(arrays) == ["images", "category", "instance", "elevation", "azimuth", "lighting"]
    assert arrays["images"].shape == (24_300, 2, 48, 48) and arrays["images"].dtype == np.uint8
    assert [len(np.unique(arrays[name])) for name in list(arrays)[1:]] == [5, 5, 9, 18, 6]
