"""Readers against other people's writers (struct, gzip, tarfile, numpy, Pillow), and each refusal by name."""

from __future__ import annotations

import gzip
import hashlib
import io
import math
import os
import struct
import sys
import tarfile
import tracemalloc
import zipfile
import zlib
from collections.abc import Callable
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
from torchcaps.data.readers.safe_io import EXPANSION, Inflate
from torchcaps.errors import DataError

Read = Callable[[Path], object]
SHARED = Path(os.environ.get("TORCHCAPS_DATA") or Path(__file__).parents[3] / "shared" / "data")


def values(*shape: int, dtype: str = "u1", high: int = 256) -> np.ndarray:
    """Reproducible numbers of any shape."""
    return np.random.default_rng(sum(shape)).integers(0, high, shape).astype(dtype)


def refused(read: Read, path: Path, *words: str) -> str:
    """The one line with which a file is refused; it names the file and the reason."""
    with pytest.raises(DataError) as error:
        read(path)
    text = str(error.value)
    assert "\n" not in text and repr(path.name)[1:-1] in text
    for word in words:
        assert word in text, text
    return text


def put(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def peak_of(act: Callable[[], object]) -> int:
    """Bytes of Python and numpy memory that an action needs at most."""
    tracemalloc.start()
    try:
        act()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


# ------------------------------------------------------------------------------------ what all readers share


READERS: list[Read] = [read_idx, read_norb, read_cifar, read_cifar_archive, read_npz, read_npy]


@pytest.mark.parametrize("read", READERS)
def test_what_is_no_file_is_refused(read: Read, tmp_path: Path) -> None:
    refused(read, tmp_path / "absent", "no such file")
    refused(read, tmp_path, "not a regular file")
    refused(read, put(tmp_path / "empty", b""))
    refused(read, put(tmp_path / "two\nlines", b"x" * 5000))
    os.mkfifo(tmp_path / "pipe")
    refused(read, tmp_path / "pipe", "not a regular file")
    with pytest.raises(DataError):
        read(Path("a\0b"))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
@pytest.mark.parametrize("read", READERS)
def test_a_file_that_may_not_be_read_is_refused(read: Read, tmp_path: Path) -> None:
    put(tmp_path / "a", b"x").chmod(0)
    refused(read, tmp_path / "a", "ermission")


@pytest.mark.parametrize("read", READERS)
def test_each_refuses_the_files_of_the_others(read: Read, tmp_path: Path) -> None:
    files = {
        read_idx: idx(values(3, 4, 5)),
        read_norb: norb(values(3, 2, 4, 5)),
        read_cifar: cifar(values(2, 3072), [1, 9]),
        read_cifar_archive: archive(),
        read_npz: npz(a=values(3)),
        read_npy: npy(values(3)),
    }
    for owner, data in files.items():
        path = put(tmp_path / "file", data)
        if owner is read:
            read(path)
        else:
            refused(read, path)


@pytest.mark.parametrize("count", [1, 2, 3, 7, 64, 1000, 1 << 20])
def test_inflating_in_pieces_gives_the_whole(count: int) -> None:
    data = bytes(50_000) + values(20_000, high=4).tobytes()
    inflate = Inflate(io.BytesIO(zlib.compress(data)).read, 15)
    pieces = list(iter(lambda: inflate.read(count), b""))
    assert b"".join(pieces) == data
    assert max(map(len, pieces)) <= count


def test_deflate_expands_no_more_than_we_allow() -> None:
    size = 1 << 26
    assert 1000 < size / len(zlib.compress(bytes(size), 9)) < EXPANSION


# ------------------------------------------------------------------------------------------------------- IDX


def idx(array: np.ndarray) -> bytes:
    return struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.tobytes()


@pytest.mark.parametrize("shape", [(1,), (7,), (3, 2), (3, 4, 5), (2, 3, 4, 5)])
@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_idx_round_trip(shape: tuple[int, ...], pack: Callable[[bytes], bytes], tmp_path: Path) -> None:
    array = values(*shape)
    read = read_idx(put(tmp_path / "images.bin", pack(idx(array))))
    assert read.dtype == np.uint8
    np.testing.assert_array_equal(read, array)


def test_idx_refusals(tmp_path: Path) -> None:
    good, path = idx(values(3, 4, 5)), tmp_path / "a"
    refused(read_idx, put(path, b"\0\0\x0d\x03" + good[4:]), "00000d03", "00000801")
    refused(read_idx, put(path, b"\0\0\x08\x05" + good[4:] + bytes(99)), "00000805")
    refused(read_idx, put(path, b"\0\0\x08\x00"), "00000800")
    refused(read_idx, put(path, good[:-1]), "60 more bytes are wanted", "at most 59")
    refused(read_idx, put(path, good + b"\0"), "more data than its header says")
    refused(read_idx, put(path, idx(values(3, 0, 5))), "holds nothing")
    refused(read_idx, put(path, b"\0\0\x08\x03" + b"\xff" * 12), "at most 1,073,741,824 bytes are read")
    refused(lambda p: read_idx(p, most=59), put(path, good), "at most 59 bytes")
    assert read_idx(put(path, good), most=60).size == 60
    assert read_idx(put(path, gzip.compress(good)), most=60).size == 60


def test_idx_gzip_refusals(tmp_path: Path) -> None:
    good, path = idx(values(3, 4, 5)), tmp_path / "a.gz"
    packed = gzip.compress(good)
    refused(read_idx, put(path, gzip.compress(good[:-1])), "cut short")
    refused(read_idx, put(path, gzip.compress(good + b"\0")), "more data than its header says")
    refused(read_idx, put(path, packed + b"\0"), "bytes follow the end")
    refused(read_idx, put(path, packed + gzip.compress(b"")), "bytes follow the end")
    refused(read_idx, put(path, gzip.compress(packed)), "begins with 1f8b")
    wrong = packed[:-8] + bytes([packed[-8] ^ 1]) + packed[-7:]
    refused(read_idx, put(path, wrong), "incorrect data check")
    for size in range(len(packed)):
        refused(read_idx, put(path, packed[:size]))


def test_a_gzip_bomb_is_not_expanded(tmp_path: Path) -> None:
    """64 MiB of zeros behind a header of 10 bytes: refused in a few hundred KiB."""
    bomb = put(tmp_path / "bomb.gz", gzip.compress(idx(values(10)) + bytes(1 << 26)))
    assert peak_of(lambda: refused(read_idx, bomb, "more data than its header says")) < 1 << 21


@pytest.mark.parametrize("shape", [(1 << 29,), (1 << 20, 30, 30), ((1 << 32) - 1,) * 4, (0, (1 << 32) - 1, 1, 9)])
@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_a_claimed_shape_allocates_nothing(
    shape: tuple[int, ...], pack: Callable[[bytes], bytes], tmp_path: Path
) -> None:
    path = put(tmp_path / "a", pack(struct.pack(f">HBB{len(shape)}I", 0, 8, len(shape), *shape) + bytes(1000)))
    assert peak_of(lambda: refused(read_idx, path)) < 1 << 21


# ------------------------------------------------------------------------------------------------------ NORB


MAGIC = {"<f4": 0x1E3D4C51, "<f8": 0x1E3D4C53, "<i4": 0x1E3D4C54, "u1": 0x1E3D4C55, "<i2": 0x1E3D4C56}


def norb(array: np.ndarray, dtype: str = "u1") -> bytes:
    sizes = [*array.shape, 1, 1][: max(3, array.ndim)]
    return struct.pack(f"<II{len(sizes)}I", MAGIC[dtype], array.ndim, *sizes) + array.astype(dtype).tobytes()


@pytest.mark.parametrize("dtype", MAGIC)
@pytest.mark.parametrize("shape", [(7,), (5, 4), (3, 4, 5), (3, 2, 4, 5)])
@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_norb_round_trip(dtype: str, shape: tuple[int, ...], pack: Callable[[bytes], bytes], tmp_path: Path) -> None:
    array = values(*shape, dtype=dtype)
    read = read_norb(put(tmp_path / "x-dat.mat", pack(norb(array, dtype))))
    assert read.dtype == np.dtype(dtype)
    np.testing.assert_array_equal(read, array)


def test_norb_bytes_are_mapped_and_cannot_be_written(tmp_path: Path) -> None:
    path = put(tmp_path / "dat", struct.pack("<6I", MAGIC["u1"], 4, 1, 3, 1 << 20, 1) + bytes(3 << 20))
    assert peak_of(lambda: read_norb(path)) < 1 << 20
    read = read_norb(path)
    assert isinstance(read, np.memmap) and not read.flags.writeable
    assert read.shape == (1, 3, 1 << 20, 1)


def test_norb_begins_as_the_official_category_file_does(tmp_path: Path) -> None:
    """24300 categories: magic, one axis, and the sizes 24300, 1, 1."""
    start = bytes.fromhex("544c3d1e 01000000 ec5e0000 01000000 01000000")
    read = read_norb(put(tmp_path / "cat", start + np.arange(24300, dtype="<i4").tobytes()))
    np.testing.assert_array_equal(read, np.arange(24300))


def test_norb_refusals(tmp_path: Path) -> None:
    good, path = norb(values(3, 2, 4, 5)), tmp_path / "a"
    refused(read_norb, put(path, struct.pack("<I", 0x1E3D4C52) + good[4:]), "1E3D4C52")
    refused(read_norb, put(path, struct.pack(">I", 0x1E3D4C55) + good[4:]), "554C3D1E")
    refused(read_norb, put(path, good[:4] + struct.pack("<I", 9) + good[8:]), "9 axes")
    refused(read_norb, put(path, good[:4] + struct.pack("<I", 0) + good[8:]), "0 axes")
    refused(read_norb, put(path, good[:-1]))
    refused(read_norb, put(path, good + b"\0"), "more data")
    refused(read_norb, put(path, norb(values(3, 0, 4, 5))), "holds nothing")
    flat = struct.pack("<5I", 0x1E3D4C54, 1, 2, 2, 1) + bytes(8)
    refused(read_norb, put(path, flat), "must be 1")
    huge = struct.pack("<6I", 0x1E3D4C55, 4, *[(1 << 32) - 1] * 4) + bytes(100)
    assert peak_of(lambda: refused(read_norb, put(path, huge))) < 1 << 20
    assert peak_of(lambda: refused(read_norb, put(path, gzip.compress(huge)))) < 1 << 20
    large = struct.pack("<5I", 0x1E3D4C54, 1, 1 << 27, 1, 1) + bytes(100)
    assert peak_of(lambda: refused(read_norb, put(path, gzip.compress(large)))) < 1 << 20


# ----------------------------------------------------------------------------------------------------- CIFAR


def cifar(pixels: np.ndarray, labels: list[int]) -> bytes:
    return b"".join(bytes([label]) + row.tobytes() for label, row in zip(labels, pixels, strict=True))


NAMES = [*(f"cifar-10-batches-bin/data_batch_{i}.bin" for i in range(1, 6)), "cifar-10-batches-bin/test_batch.bin"]


def archive(names: list[str] = NAMES, mode: str = "w:gz", edit: Callable[[tarfile.TarInfo], object] = id) -> bytes:
    """The official layout with two images a batch; image k of batch i is made by `batch(i)`."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode=mode) as tar:
        folder = tarfile.TarInfo("cifar-10-batches-bin")
        folder.type = tarfile.DIRTYPE
        tar.addfile(folder)
        for name, data in [
            ("cifar-10-batches-bin/readme.html", b"hello"),
            *zip(names, map(batch, range(6)), strict=False),
        ]:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            edit(info)
            tar.addfile(info, io.BytesIO(data))
    return out.getvalue()


def batch(i: int) -> bytes:
    return cifar(values(2, 3072, high=i + 2), [i, 9 - i])


def test_cifar_round_trip_by_single_pixels(tmp_path: Path) -> None:
    pixels = values(3, 3072)
    images, labels = read_cifar(put(tmp_path / "data_batch_1.bin", cifar(pixels, [3, 0, 9])))
    assert images.shape == (3, 3, 32, 32) and images.dtype == np.uint8 and labels.dtype == np.int64
    assert labels.tolist() == [3, 0, 9]
    for n, c, y, x in [(0, 0, 0, 0), (1, 2, 31, 30), (2, 1, 5, 17)]:
        assert images[n, c, y, x] == pixels[n, 1024 * c + 32 * y + x]


@pytest.mark.parametrize("mode", ["w", "w:gz"])
def test_cifar_archive_keeps_the_batches_in_order(mode: str, tmp_path: Path) -> None:
    order = [NAMES[i] for i in (5, 2, 0, 1, 4, 3)]
    out = read_cifar_archive(put(tmp_path / "a.tar.gz", archive(order, mode)))
    by_name = dict(zip(order, range(6), strict=True))
    expected = [read_cifar(put(tmp_path / "b", batch(by_name[name]))) for name in NAMES]
    np.testing.assert_array_equal(out[0], np.concatenate([images for images, _ in expected[:5]]))
    np.testing.assert_array_equal(out[1], np.concatenate([labels for _, labels in expected[:5]]))
    np.testing.assert_array_equal(out[2], expected[5][0])
    np.testing.assert_array_equal(out[3], expected[5][1])


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_cifar_archive_of_every_tar_dialect(form: int, tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar.gz", "w:gz", format=form) as tar:
        for i, name in enumerate(NAMES):
            info = tarfile.TarInfo("./" + name)
            info.size, info.mtime, info.pax_headers = len(batch(i)), 1.5, {"comment": "é" * 200}
            tar.addfile(info, io.BytesIO(batch(i)))
    assert read_cifar_archive(tmp_path / "a.tar.gz")[1].tolist() == [0, 9, 1, 8, 2, 7, 3, 6, 4, 5]


def test_cifar_refusals(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    refused(read_cifar, put(path, batch(0)[:-1]), "6,145 bytes", "times 3073")
    refused(read_cifar, put(path, cifar(values(2, 3072), [3, 10])), "label 10 in record 1")


def test_cifar_archive_refusals(tmp_path: Path) -> None:
    def kind(name: bytes) -> Callable[[tarfile.TarInfo], object]:
        return lambda info: setattr(info, "type", name if info.name == NAMES[2] else info.type)

    path = tmp_path / "a.tar.gz"
    for link in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE):
        refused(read_cifar_archive, put(path, archive(edit=kind(link))), "data_batch_3.bin", "link")
    refused(read_cifar_archive, put(path, archive(NAMES[:5])), "lacks", "test_batch.bin")
    refused(read_cifar_archive, put(path, archive(["../" + name for name in NAMES])), "lacks")
    refused(read_cifar_archive, put(path, archive(["/" + name for name in NAMES])), "lacks")
    refused(read_cifar_archive, put(path, archive([NAMES[0], *NAMES[:5]])), "twice")
    whole = archive(mode="w")
    refused(read_cifar_archive, put(path, whole.replace(b"ustar", b"uster", 1)), "checksum")
    refused(read_cifar_archive, put(path, gzip.compress(whole[:20_000])), "cut short")
    refused(read_cifar_archive, put(path, gzip.compress(whole)[:-4]), "cut short")
    damaged = bytearray(gzip.compress(whole))
    damaged[-6] ^= 1
    refused(read_cifar_archive, put(path, bytes(damaged)), "incorrect data check")


def test_a_tar_bomb_is_not_kept_in_memory(tmp_path: Path) -> None:
    """An extended header of 64 MiB, which `tarfile` would read whole, and a batch that is too large."""
    header = tarfile.TarInfo("x")
    header.size, header.type = 1 << 26, tarfile.XHDTYPE
    bomb = gzip.compress(header.tobuf(tarfile.USTAR_FORMAT) + bytes(1 << 26) + bytes(1024))
    assert peak_of(lambda: refused(read_cifar_archive, put(tmp_path / "a", bomb), "lacks")) < 1 << 22
    header = tarfile.TarInfo(NAMES[0])
    header.size = 3073 * 10_001
    bomb = gzip.compress(header.tobuf(tarfile.USTAR_FORMAT) + bytes(1 << 25))
    assert peak_of(lambda: refused(read_cifar_archive, put(tmp_path / "a", bomb), "30,733,073")) < 1 << 22


# ------------------------------------------------------------------------------------------------- npz, npy


def npz(*, pack: bool = True, **arrays: np.ndarray) -> bytes:
    out = io.BytesIO()
    (np.savez_compressed if pack else np.savez)(out, **arrays)
    return out.getvalue()


def npy(array: np.ndarray, version: tuple[int, int] | None = None) -> bytes:
    out = io.BytesIO()
    np.lib.format.write_array(out, array, version)
    return out.getvalue()


def zipped(*members: tuple[str, bytes], method: int = zipfile.ZIP_DEFLATED) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", method) as archive:
        for name, data in members:
            archive.writestr(name, data)
    return out.getvalue()


@pytest.mark.parametrize("pack", [True, False])
@pytest.mark.parametrize(
    "dtype", ["?", "u1", "<i2", ">i4", "<i8", ">u8", "<f2", ">f4", "<f8", "<c8", "S3", "<U5", ">U5"]
)
def test_npz_round_trip(pack: bool, dtype: str, tmp_path: Path) -> None:
    cube = values(3, 4, 5, high=2).astype(dtype)
    arrays = {"images": cube, "a b.c-d": np.asfortranarray(cube), "scalar": cube[1, 1, 1], "none": cube[:0]}
    read = read_npz(put(tmp_path / "a.npz", npz(pack=pack, **arrays)))
    assert list(read) == list(arrays)
    for name, array in arrays.items():
        np.testing.assert_array_equal(read[name], array)
        assert read[name].shape == array.shape and read[name].dtype == array.dtype.newbyteorder("=")
        assert read[name].dtype.isnative


@pytest.mark.parametrize("version", [(1, 0), (2, 0)])
def test_npy_round_trip(version: tuple[int, int], tmp_path: Path) -> None:
    for array in (values(3, 4), np.asfortranarray(values(3, 4)), values(2, 3, dtype=">f4")):
        np.testing.assert_array_equal(read_npy(put(tmp_path / "a.npy", npy(array, version))), array)


@pytest.mark.parametrize(
    "name",
    ["../a.npy", "/a.npy", "b/a.npy", "b\\a.npy", "..", ".npy", "..npy", "a.txt", "a", "C:a.npy", "a.npy/",
     "\u202ea.npy", " a.npy"],
)  # fmt: skip
def test_npz_member_names_must_be_plain(name: str, tmp_path: Path) -> None:
    refused(read_npz, put(tmp_path / "x.npz", zipped((name, npy(values(3))))), "plain names")


def test_npz_refusals(tmp_path: Path) -> None:
    path, good = tmp_path / "x.npz", npy(values(3, 4))
    with pytest.warns(UserWarning, match="Duplicate"):
        twice = zipped(("a.npy", good), ("a.npy", good))
    refused(read_npz, put(path, twice), "twice")
    refused(read_npz, put(path, npz(a=np.array([{"x": 1}, None], object))), "pickle")
    refused(read_npz, put(path, npz(a=np.zeros(3, [("x", "f4"), ("y", "i4")]))), "plain numbers or text")
    refused(read_npz, put(path, npz(a=np.array(["2020"], "M8[D]"))), "plain numbers or text")
    refused(read_npz, put(path, zipped(("a.npy", b"\x80\x04N."))), "a.npy")
    refused(read_npz, put(path, zipped(("a.npy", good[:-1]))), "cut short")
    refused(read_npz, put(path, zipped(("a.npy", good + b"\0"))), "more data")
    refused(read_npz, put(path, zipped(("a.npy", good), method=zipfile.ZIP_LZMA)), "another way")
    refused(read_npz, put(path, zipped(("a.npy", good), method=zipfile.ZIP_BZIP2)), "another way")
    refused(read_npz, put(path, zipped(("a.npy", zipped(("a.npy", good))))), "npy file of version")
    refused(read_npz, put(path, zipped()), "0 members")
    refused(read_npz, put(path, zipped(*((f"{i}.npy", good) for i in range(1001)))), "1001 members")
    whole = zipped(("a.npy", good))
    refused(read_npz, put(path, whole[:-2] + b"\1\0x"), "comment")
    secret = whole.replace(b"PK\x01\x02\x14\x03\x14\x00\x00", b"PK\x01\x02\x14\x03\x14\x00\x01")
    refused(read_npz, put(path, secret), "encrypted")
    stored = zipped(("a.npy", good), method=zipfile.ZIP_STORED)
    at = stored.index(good) + len(good) - 1
    refused(read_npz, put(path, stored[:at] + bytes([stored[at] ^ 1]) + stored[at + 1 :]), "CRC")
    refused(lambda p: read_npz(p, most=100), put(path, npz(a=values(20_000))), "at most 100")
    for size in range(len(whole)):
        refused(read_npz, put(path, whole[:size]))


def said(descr: str, shape: str, fortran: str = "False") -> str:
    return f"{{'descr': {descr}, 'fortran_order': {fortran}, 'shape': {shape}, }}"


def header(text: str, version: int = 1) -> bytes:
    return b"\x93NUMPY" + bytes([version, 0]) + len(text).to_bytes(2 if version == 1 else 4, "little") + text.encode()


@pytest.mark.parametrize(
    "text",
    [
        "", "{}", "[]", "(" * 5000, "-" * 9000 + "1", "{[]: 1}", "\ud7ff", "'''", "{'descr': 'u1'\n\t\0",
        "__import__('os').abort()",
        said("'u1'", "(3, 5"), said("'u1'", "(-1,)"), said("'u1'", "(True,)"), said("'u1'", "(3,)", "1"),
        said("'u1'", f"({'1,' * 40})"), said("'u1'", f"({'9' * 4400},)"), said("'|O'", "(3,)"), said("'<U0'", "(3,)"),
        said("'i4,i4'", "(3,)"), said("'V3'", "(1,)"), said("('u1', (3,))", "()"), said("3", "(3,)"),
        said("[]", "(3,)"),
    ],
)  # fmt: skip
def test_npy_headers_that_lie_or_cannot_be_read(text: str, tmp_path: Path) -> None:
    for version in (1, 2):
        data = header(text, version) + bytes(3)
        refused(read_npy, put(tmp_path / "a.npy", data))
        refused(read_npz, put(tmp_path / "a.npz", zipped(("a.npy", data))))


@pytest.mark.parametrize("shape", [(1 << 30,), (1 << 40,), (1 << 31, 1 << 31), (0, 1 << 62, 1 << 62), (1 << 70,)])
@pytest.mark.parametrize("descr", ["|u1", "<f8", "<U99999999"])
def test_npy_shapes_allocate_nothing(shape: tuple[int, ...], descr: str, tmp_path: Path) -> None:
    data = header(f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}}}") + bytes(1000)
    for read, path in [
        (read_npy, put(tmp_path / "a.npy", data)),
        (read_npz, put(tmp_path / "a.npz", zipped(("a.npy", data)))),
    ]:
        assert peak_of(lambda r=read, p=path: refused(r, p)) < 1 << 21


def test_npy_versions_and_long_headers_are_refused(tmp_path: Path) -> None:
    good = npy(values(3))
    refused(read_npy, put(tmp_path / "a.npy", good[:6] + b"\3\0" + good[8:]), "version 1 or 2")
    refused(read_npy, put(tmp_path / "a.npy", header(" " * 10_001, 2)), "header of 10,001 bytes")
    refused(read_npy, put(tmp_path / "a.npy", b"\x93NUMPY\2\0" + b"\xff" * 4 + bytes(99)), "header of 4,294,967,295")


def test_zip_bombs_are_not_expanded(tmp_path: Path) -> None:
    path = tmp_path / "bomb.npz"
    large = zipped(("a.npy", header("{}") + bytes(1 << 26)), ("b.npy", bytes(1 << 20)))
    assert (
        peak_of(lambda: refused(lambda p: read_npz(p, most=1 << 20), put(path, large), "at most 1,048,576")) < 1 << 21
    )
    assert peak_of(lambda: refused(read_npz, put(path, large))) < 1 << 21
    small = zipped(("a.npy", npy(values(3))))
    size = struct.pack("<I", len(npy(values(3))))
    claim = small.replace(size, struct.pack("<I", 1 << 29))
    assert peak_of(lambda: refused(read_npz, put(path, claim), "cannot be")) < 1 << 21
    many = bytearray(small)  # a directory of 2^31 bytes, or of 2^16 entries
    many[-10:-6] = struct.pack("<I", 1 << 31)
    assert peak_of(lambda: refused(read_npz, put(path, bytes(many)), "members")) < 1 << 20


def test_overlapping_members_count_by_what_they_unpack_to(tmp_path: Path) -> None:
    """Every entry of the directory points to one and the same member of 1 MiB; all together are too much."""
    one = zipped(("a.npy", npy(np.zeros(1 << 20, np.uint8))))
    start = one.index(b"PK\x01\x02")
    entry = one[start:-22]
    entries = b"".join(entry.replace(b"a.npy", f"{i}.npy".encode()) for i in range(9))
    end = struct.pack("<4sHHHHIIH", b"PK\x05\x06", 0, 0, 9, 9, len(entries), start, 0)
    path = put(tmp_path / "a.npz", one[:start] + entries + end)
    refused(lambda p: read_npz(p, most=1 << 22), path, "at most 4,194,304")


# -------------------------------------------------------------------------------------------------- pictures


def save(path: Path, array: np.ndarray, **options: Any) -> Path:
    image = pytest.importorskip("PIL.Image")
    path.parent.mkdir(parents=True, exist_ok=True)
    image.fromarray(array).save(path, **options)
    return path


def test_pictures_round_trip_in_gray(tmp_path: Path) -> None:
    """Classes and files by name, whatever the order in which they were written; hidden and outer files do not count."""
    places = ["dog/2.png", "cat/b.png", "Zebra/x.PNG", "dog/10.png", "cat/a.png"]
    arrays = {place: values(6, 5) + i for i, place in enumerate(places)}
    for place, array in arrays.items():
        save(tmp_path / place, array)
    put(tmp_path / "readme.txt", b"hello")
    put(tmp_path / "cat/.hidden", b"hello")
    (tmp_path / ".git").mkdir()
    images, labels, names = read_pictures(tmp_path)
    assert names == ["Zebra", "cat", "dog"] and labels.tolist() == [0, 1, 1, 2, 2]
    assert images.dtype == np.uint8 and images.shape == (5, 1, 6, 5) and labels.dtype == np.int64
    for n, place in enumerate(["Zebra/x.PNG", "cat/a.png", "cat/b.png", "dog/10.png", "dog/2.png"]):
        np.testing.assert_array_equal(images[n, 0], arrays[place])


def test_pictures_in_color_and_mixed(tmp_path: Path) -> None:
    color, gray = values(4, 7, 3), values(4, 7)
    save(tmp_path / "a/1.png", color)
    save(tmp_path / "a/2.png", gray)
    save(tmp_path / "b/1.png", np.concatenate([color, values(4, 7, 1)], -1))  # transparency is dropped
    save(tmp_path / "b/2.png", (gray.astype(np.uint16) << 8) + 77)
    images, labels, _ = read_pictures(tmp_path)
    assert images.shape == (4, 3, 4, 7) and labels.tolist() == [0, 0, 1, 1]
    np.testing.assert_array_equal(images[0], color.transpose(2, 0, 1))
    np.testing.assert_array_equal(images[2], color.transpose(2, 0, 1))
    for channel in range(3):
        np.testing.assert_array_equal(images[1, channel], gray)
        np.testing.assert_array_equal(images[3, channel], gray)


def test_pictures_of_all_gray_kinds_stay_gray(tmp_path: Path) -> None:
    gray = values(4, 6)
    save(tmp_path / "a/1.png", (gray.astype(np.uint16) << 8) + 200)
    save(tmp_path / "a/2.png", gray > 127)
    save(tmp_path / "a/3.png", np.stack([gray, 255 - gray], -1))
    images, _, _ = read_pictures(tmp_path)
    np.testing.assert_array_equal(images[:, 0], [gray, 255 * (gray > 127), gray])


def test_pictures_from_jpeg_are_near_and_the_ending_does_not_count(tmp_path: Path) -> None:
    smooth = np.add.outer(np.arange(16), 4 * np.arange(24)).astype(np.uint8)
    save(tmp_path / "a/1.jpg", smooth, quality=95)
    save(tmp_path / "a/2.png", smooth, format="JPEG", quality=95)
    images, _, _ = read_pictures(tmp_path)
    assert images.shape == (2, 1, 16, 24)
    assert np.abs(images.astype(int) - smooth).max() <= 4
    save(tmp_path / "a/3.jpeg", np.stack([smooth] * 3, -1))
    assert read_pictures(tmp_path)[0].shape == (3, 3, 16, 24)


def test_pictures_refusals(tmp_path: Path) -> None:
    pytest.importorskip("PIL")
    refused(read_pictures, tmp_path / "absent", "No such file")
    refused(read_pictures, tmp_path, "no class folder")
    refused(read_pictures, put(tmp_path / "file", b""), "cannot be listed")
    first = save(tmp_path / "a/1.png", values(6, 5))
    (tmp_path / "b").mkdir()
    with pytest.raises(DataError, match="/b': is an empty class"):
        read_pictures(tmp_path)
    other = save(tmp_path / "b/1.png", values(5, 6))
    with pytest.raises(DataError, match=r"b/1\.png': is 6x5; .* 5x6"):
        read_pictures(tmp_path)
    for data in (b"", b"hello", first.read_bytes()[:40], b"\xff\xd8\xff", b"GIF89a" + bytes(40)):
        put(other, data)
        with pytest.raises(DataError, match=r"b/1\.png.*(not a PNG|damaged)"):
            read_pictures(tmp_path)
    other.unlink()
    (tmp_path / "b/inner").mkdir()
    with pytest.raises(DataError, match="b/inner': is not a file"):
        read_pictures(tmp_path)
    (tmp_path / "b/inner").rmdir()
    os.mkfifo(tmp_path / "b/pipe")
    with pytest.raises(DataError, match="b/pipe': is not a file"):
        read_pictures(tmp_path)


@pytest.mark.parametrize("kind", ["GIF", "BMP", "TIFF", "WEBP", "PPM"])
def test_pictures_of_other_formats_are_refused_even_as_png(kind: str, tmp_path: Path) -> None:
    save(tmp_path / "a/1.png", values(6, 5), format=kind)
    with pytest.raises(DataError, match=r"a/1\.png': is damaged, too large, or not a PNG or JPEG"):
        read_pictures(tmp_path)


@pytest.mark.parametrize("kind", ["PNG", "MPO"])
def test_pictures_that_move_are_refused(kind: str, tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    frames = [image.fromarray(values(16, 16, 3) // (i + 1)) for i in range(3)]
    (tmp_path / "a").mkdir()
    frames[0].save(tmp_path / "a/1.png", format=kind, save_all=True, append_images=frames[1:])
    with pytest.raises(DataError, match=r"a/1\.png': holds more than one picture"):
        read_pictures(tmp_path)


@pytest.mark.parametrize("what", ["file", "class"])
def test_links_out_of_the_folder_are_refused_and_links_within_are_followed(what: str, tmp_path: Path) -> None:
    save(tmp_path / "in/a/1.png", values(6, 5))
    save(tmp_path / "out/b/1.png", values(6, 5))
    inner, outer = ("a/1.png", "b/1.png") if what == "file" else ("a", "b")
    link = tmp_path / "in" / ("a/2.png" if what == "file" else "c")
    link.symlink_to(tmp_path / "in" / inner)
    assert len(read_pictures(tmp_path / "in")[0]) == 2
    link.unlink()
    link.symlink_to(tmp_path / "out" / outer)
    with pytest.raises(DataError, match="link out of the folder"):
        read_pictures(tmp_path / "in")


def png(width: int, height: int, rows: bytes, bits: int = 1) -> bytes:
    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    start = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, bits, 0, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + start + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


@pytest.mark.parametrize(("width", "height"), [(2049, 2048), (20_000, 20_000), ((1 << 31) - 1,) * 2, (1 << 26, 1)])
def test_pictures_of_huge_dimension_are_not_expanded(width: int, height: int, tmp_path: Path) -> None:
    pytest.importorskip("PIL")
    (tmp_path / "a").mkdir()
    rows = bytes(min(height * (1 + math.ceil(width / 8)), 1 << 24))
    put(tmp_path / "a/bomb.png", png(width, height, rows))
    with pytest.raises(DataError, match=r"bomb\.png"):
        read_pictures(tmp_path)
    assert read_pictures(put_single(tmp_path / "b", png(9, 2, b"\0\xff\x80\0\0\0")))[0].tolist() == [
        [[[255] * 9, [0] * 9]]
    ]


def put_single(folder: Path, data: bytes) -> Path:
    (folder / "a").mkdir(parents=True)
    put(folder / "a/1.png", data)
    return folder


def test_without_pillow_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(DataError, match=r"pip install 'torchcaps\[images\]'"):
        read_pictures(tmp_path)


# ---------------------------------------------------------------------------------- the real files, if present


MNIST = {
    "train-images-idx3-ubyte.gz": ((60_000, 28, 28), "6bbc9ace898e44ae57da46a324031adb"),
    "train-labels-idx1-ubyte.gz": ((60_000,), "a25bea736e30d166cdddb491f175f624"),
    "t10k-images-idx3-ubyte.gz": ((10_000, 28, 28), "2646ac647ad5339dbf082846283269ea"),
    "t10k-labels-idx1-ubyte.gz": ((10_000,), "27ae3e4e09519cfbb04c329615203637"),
}


def shared(place: str) -> Path:
    path = SHARED / place
    if not path.exists():
        pytest.skip(f"{place} is not in {SHARED}; set TORCHCAPS_DATA to a folder that has it")
    return path


@pytest.mark.parametrize("name", MNIST)
def test_mnist_has_the_published_digest(name: str) -> None:
    shape, digest = MNIST[name]
    array = read_idx(shared(f"mnist/{name}"))
    assert array.shape == shape
    assert hashlib.md5(idx(array)).hexdigest() == digest


@pytest.mark.parametrize("name", MNIST)
def test_fashion_mnist_has_the_same_shapes(name: str) -> None:
    array = read_idx(shared(f"fashion-mnist/{name}"))
    assert array.shape == MNIST[name][0]
    if array.ndim == 1:
        assert np.bincount(array).tolist() == [len(array) // 10] * 10


@pytest.mark.parametrize("part", ["train", "test"])
def test_smallnorb_has_its_factors(part: str) -> None:
    arrays = read_npz(shared(f"smallnorb/smallnorb48_{part}.npz"))
    assert list(arrays) == ["images", "category", "instance", "elevation", "azimuth", "lighting"]
    assert arrays["images"].shape == (24_300, 2, 48, 48) and arrays["images"].dtype == np.uint8
    assert [len(np.unique(arrays[name])) for name in list(arrays)[1:]] == [5, 5, 9, 18, 6]
