"""Readers against other people's writers (struct, gzip, tarfile, numpy, Pillow), and each refusal by name."""

from __future__ import annotations

import gzip
import hashlib
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

import numpy as np
import pytest

from support.data_files import BATCHES, NORB_MAGIC, batch, cifar, cifar_gz, idx, norb, npy, npz, picture, values, zipped
from torchcaps.data.readers import read_cifar_archive, read_idx, read_norb, read_npz, read_pictures
from torchcaps.data.readers.safe_io import EXPANSION
from torchcaps.errors import DataError

Read = Callable[[Path], object]
SHARED = Path(os.environ.get("TORCHCAPS_DATA") or Path(__file__).parents[3] / "shared" / "data")
PACKED = pytest.mark.parametrize("pack", [bytes, gzip.compress])


def refused(read: Read, path: Path, *words: str) -> None:
    """A file is refused with one line that names it and the reason."""
    with pytest.raises(DataError) as error:
        read(path)
    text = str(error.value)
    assert "\n" not in text and repr(path.name)[1:-1] in text
    for word in words:
        assert word in text, text


def refused_in_little_memory(read: Read, path: Path, *words: str) -> None:
    """Refused, and with less than 2 MiB of Python's and numpy's memory."""
    tracemalloc.start()
    try:
        refused(read, path, *words)
        assert tracemalloc.get_traced_memory()[1] < 1 << 21
    finally:
        tracemalloc.stop()


def put(path: Path, data: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


# What all readers share

FILES: dict[Read, bytes] = {
    read_idx: idx(values(3, 4, 5)),
    read_norb: norb(values(3, 2, 4, 5)),
    read_cifar_archive: cifar_gz(),
    read_npz: npz(a=values(3)),
}


@pytest.mark.parametrize("read", FILES)
def test_what_is_no_file_is_refused(read: Read, tmp_path: Path) -> None:
    refused(read, tmp_path / "absent", "no such file")
    refused(read, tmp_path, "not a regular file")
    refused(read, put(tmp_path / "empty", b""))
    refused(read, put(tmp_path / "two\nlines", b"x" * 5000))
    os.mkfifo(tmp_path / "pipe")
    refused(read, tmp_path / "pipe", "not a regular file")
    with pytest.raises(DataError):
        read(Path("a\0b"))
    if os.geteuid():
        put(tmp_path / "a", b"x").chmod(0)
        refused(read, tmp_path / "a", "ermission")


@pytest.mark.parametrize("read", FILES)
def test_each_refuses_the_files_of_the_others(read: Read, tmp_path: Path) -> None:
    for owner, data in FILES.items():
        path = put(tmp_path / "file", data)
        if owner is read:
            read(path)
        else:
            refused(read, path)


def test_deflate_expands_no_more_than_we_allow() -> None:
    size = 1 << 26
    assert 1000 < size / len(zlib.compress(bytes(size), 9)) < EXPANSION


# IDX


@pytest.mark.parametrize("shape", [(1,), (7,), (3, 2), (3, 4, 5), (2, 3, 4, 5)])
@PACKED
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
    assert read_idx(put(path, good), most=60).size == read_idx(put(path, gzip.compress(good)), most=60).size == 60


def test_idx_gzip_refusals(tmp_path: Path) -> None:
    good, path = idx(values(3, 4, 5)), tmp_path / "a.gz"
    packed = gzip.compress(good)
    refused(read_idx, put(path, gzip.compress(good[:-1])), "cut short")
    refused(read_idx, put(path, gzip.compress(good + b"\0")), "more data than its header says")
    refused(read_idx, put(path, packed + b"x"), "Not a gzipped file")
    refused(read_idx, put(path, gzip.compress(packed)), "begins with 1f8b")
    refused(read_idx, put(path, packed[:-8] + bytes([packed[-8] ^ 1]) + packed[-7:]), "CRC check failed")
    for size in range(len(packed)):
        refused(read_idx, put(path, packed[:size]))


def test_a_gzip_bomb_is_not_expanded(tmp_path: Path) -> None:
    """64 MiB of zeros behind a header of 10 bytes."""
    bomb = put(tmp_path / "bomb.gz", gzip.compress(idx(values(10)) + bytes(1 << 26)))
    refused_in_little_memory(read_idx, bomb, "more data than its header says")


@pytest.mark.parametrize("shape", [(1 << 29,), (1 << 20, 30, 30), ((1 << 32) - 1,) * 4, (0, (1 << 32) - 1, 1, 9)])
@PACKED
def test_a_claimed_shape_allocates_nothing(shape: tuple[int, ...], pack: Callable, tmp_path: Path) -> None:
    claim = struct.pack(f">HBB{len(shape)}I", 0, 8, len(shape), *shape) + bytes(1000)
    refused_in_little_memory(read_idx, put(tmp_path / "a", pack(claim)))


# NORB


@pytest.mark.parametrize("dtype", NORB_MAGIC)
@pytest.mark.parametrize("shape", [(7,), (5, 4), (3, 4, 5), (3, 2, 4, 5)])
@PACKED
def test_norb_round_trip(dtype: str, shape: tuple[int, ...], pack: Callable[[bytes], bytes], tmp_path: Path) -> None:
    array = values(*shape, dtype=dtype)
    read = read_norb(put(tmp_path / "x-dat.mat", pack(norb(array, dtype))))
    assert read.dtype == np.dtype(dtype)
    np.testing.assert_array_equal(read, array)
    assert isinstance(read, np.memmap) == (pack is bytes and dtype == "u1")
    assert not isinstance(read, np.memmap) or not read.flags.writeable


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
    refused(read_norb, put(path, good[:-1]), "119 bytes for [3, 2, 4, 5]")
    refused(read_norb, put(path, good + b"\0"), "121 bytes for")
    refused(read_norb, put(path, gzip.compress(good + b"\0")), "more data")
    refused(read_norb, put(path, norb(values(3, 0, 4, 5))), "holds nothing")
    refused(read_norb, put(path, struct.pack("<5I", 0x1E3D4C54, 1, 2, 2, 1) + bytes(8)), "must be 1")
    huge = struct.pack("<6I", 0x1E3D4C55, 4, *[(1 << 32) - 1] * 4) + bytes(100)
    large = struct.pack("<5I", 0x1E3D4C54, 1, 1 << 27, 1, 1) + bytes(100)
    for claim in (huge, gzip.compress(huge), gzip.compress(large)):
        refused_in_little_memory(read_norb, put(path, claim))


# CIFAR


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
@PACKED
def test_cifar_keeps_the_batches_in_order_and_reads_every_tar_dialect(form, pack, tmp_path: Path) -> None:
    def edit(info: tarfile.TarInfo) -> None:
        info.name, info.mtime, info.pax_headers = "./" + info.name, 1.5, {"comment": "é" * 200}

    order = [5, 2, 0, 1, 4, 3]
    data = pack(cifar([BATCHES[i] for i in order], edit, format=form))
    read = read_cifar_archive(put(tmp_path / "a.tar.gz", data))
    records = np.stack(
        [np.frombuffer(batch(order.index(i)), np.uint8).reshape(2, 3073) for i in range(6)]
    )  # [6 2 3073]
    assert read.images.shape == (10, 3, 32, 32) and read.images.dtype == np.uint8 and read.labels.dtype == np.int64
    np.testing.assert_array_equal(read.labels, records[:5, :, 0].flatten())
    np.testing.assert_array_equal(read.test_labels, records[5, :, 0])
    np.testing.assert_array_equal(read.images.reshape(10, 3072), records[:5, :, 1:].reshape(10, 3072))
    for n, c, y, x in [(0, 0, 0, 0), (1, 2, 31, 30), (1, 1, 5, 17)]:
        assert read.test_images[n, c, y, x] == records[5, n, 1 + 1024 * c + 32 * y + x]


def test_cifar_refusals(tmp_path: Path) -> None:
    def kind(name: bytes) -> Callable[[tarfile.TarInfo], object]:
        return lambda info: setattr(info, "type", name if info.name == BATCHES[2] else info.type)

    path = tmp_path / "a.tar.gz"
    for link in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.GNUTYPE_SPARSE):
        refused(read_cifar_archive, put(path, cifar_gz(edit=kind(link))), "data_batch_3.bin", "link")
    refused(read_cifar_archive, put(path, cifar_gz(*BATCHES[:5])), "lacks", "test_batch.bin")
    refused(read_cifar_archive, put(path, cifar_gz(*("../" + name for name in BATCHES))), "lacks")
    refused(read_cifar_archive, put(path, cifar_gz(*("/" + name for name in BATCHES))), "lacks")
    refused(read_cifar_archive, put(path, cifar_gz(BATCHES[0], *BATCHES[:5])), "twice")
    whole = cifar()
    refused(read_cifar_archive, put(path, whole.replace(batch(0), b"\x0a" + batch(0)[1:])), "label 10 in record 0")
    refused(read_cifar_archive, put(path, whole.replace(b"ustar", b"uster", 1)), "bad checksum")
    refused(read_cifar_archive, put(path, gzip.compress(whole[:20_000])))
    refused(read_cifar_archive, put(path, gzip.compress(whole)[:-4]), "ended")
    damaged = bytearray(gzip.compress(whole))
    damaged[-6] ^= 1
    refused(read_cifar_archive, put(path, bytes(damaged)), "CRC check failed")


def test_a_tar_bomb_is_not_kept_in_memory(tmp_path: Path) -> None:
    """An extended header of 64 MiB, which `tarfile` alone would load, and batches that are too large or not there."""
    for kind in (tarfile.XHDTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_SPARSE):
        header = tarfile.TarInfo("x")
        header.size, header.type = 1 << 26, kind
        bomb = gzip.compress(header.tobuf(tarfile.USTAR_FORMAT) + bytes(1 << 26) + bytes(1024))
        refused_in_little_memory(read_cifar_archive, put(tmp_path / "a", bomb), "lacks")
    header = tarfile.TarInfo(BATCHES[0])
    for header.size, content, text in ((3073 * 10_001, 1 << 25, "30,733,073"), (3073 * 10_000, 999, "can follow")):
        data = header.tobuf(tarfile.USTAR_FORMAT) + bytes(content)
        refused_in_little_memory(read_cifar_archive, put(tmp_path / "a", gzip.compress(data)), text)


# npz


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


@pytest.mark.parametrize(
    "name",
    ["../a.npy", "/a.npy", "b/a.npy", "b\\a.npy", "..", ".npy", "a.txt", "a", "C:a.npy", "\u202ea.npy", " a.npy"],
)
def test_npz_member_names_must_be_plain(name: str, tmp_path: Path) -> None:
    refused(read_npz, put(tmp_path / "x.npz", zipped((name, npy(values(3))))), "plain names")


def test_npz_refusals(tmp_path: Path) -> None:
    path, good = tmp_path / "x.npz", npy(values(3, 4))
    assert read_npz(put(path, zipped(("a.npy", npy(values(3, 4), (2, 0))))))["a"].shape == (3, 4)
    with pytest.warns(UserWarning, match="Duplicate"):
        twice = zipped(("a.npy", good), ("a.npy", good))
    refused(read_npz, put(path, twice), "twice")
    refused(read_npz, put(path, npz(a=np.array([{"x": 1}, None], object))), "pickle")
    refused(read_npz, put(path, npz(a=np.zeros(3, [("x", "f4"), ("y", "i4")]))), "plain numbers or text")
    refused(read_npz, put(path, npz(a=np.array(["2020"], "M8[D]"))), "plain numbers or text")
    refused(read_npz, put(path, zipped(("a.npy", npy(values(3), (3, 0))))), "plain numbers")
    refused(read_npz, put(path, zipped(("a.npy", b"\x80\x04N."))), "a.npy")
    refused(read_npz, put(path, zipped(("a.npy", good[:-1]))), "holds 11 bytes", "12 are wanted")
    refused(read_npz, put(path, zipped(("a.npy", good + b"\0"))), "holds 13 bytes")
    refused(read_npz, put(path, zipped(("a.npy", good), method=zipfile.ZIP_LZMA)), "another way")
    refused(read_npz, put(path, zipped(("a.npy", good), method=zipfile.ZIP_BZIP2)), "another way")
    refused(read_npz, put(path, zipped(("a.npy", zipped(("a.npy", good))))), "not a numpy array")
    refused(read_npz, put(path, zipped()), "0 members")
    refused(read_npz, put(path, zipped(*((f"{i}.npy", good) for i in range(1001)))), "1001 members")
    whole = zipped(("a.npy", good))
    secret = whole.replace(b"PK\x01\x02\x14\x03\x14\x00\x00", b"PK\x01\x02\x14\x03\x14\x00\x01")
    refused(read_npz, put(path, secret), "encrypted")
    stored = zipped(("a.npy", good), method=zipfile.ZIP_STORED)
    at = stored.index(good) + len(good) - 1
    refused(read_npz, put(path, stored[:at] + bytes([stored[at] ^ 1]) + stored[at + 1 :]), "CRC")
    refused(lambda p: read_npz(p, most=100), put(path, npz(a=values(20_000))), "at most 100")
    for size in range(len(whole)):
        refused(read_npz, put(path, whole[:size]))


def said(descr: str, shape: object, fortran: str = "False") -> str:
    return f"{{'descr': {descr}, 'fortran_order': {fortran}, 'shape': {shape}, }}"


def with_header(text: str, version: int = 1) -> bytes:
    size = len(text).to_bytes(2 if version == 1 else 4, "little")
    return b"\x93NUMPY" + bytes([version, 0]) + size + text.encode()


BAD_HEADERS = ["", "{}", "[]", "(" * 5000, "-" * 9000 + "1", "{[]: 1}", "\ud7ff", "'''", "{'descr': 'u1'\n\t\0"]
BAD_HEADERS += [
    "__import__('os').abort()",
    " " * 10_001,
    said("'u1'", "(3,)", "1"),
    said("3", "(3,)"),
    said("[]", "(3,)"),
]
BAD_HEADERS += [said("'u1'", s) for s in ("(3, 5", "(-1,)", "(True,)", f"({'1,' * 40})", f"({'9' * 4400},)")]
BAD_HEADERS += [said(t, "(3,)") for t in ("'|O'", "3", "[]", "'<U0'", "'i4,i4'", "('u1', (3,))")]


@pytest.mark.parametrize("text", BAD_HEADERS, ids=range(len(BAD_HEADERS)))
def test_npz_headers_that_lie_or_cannot_be_read(text: str, tmp_path: Path) -> None:
    for version in (1, 2):
        refused(read_npz, put(tmp_path / "a.npz", zipped(("a.npy", with_header(text, version) + bytes(3)))))


@pytest.mark.parametrize("shape", [(1 << 30,), (1 << 31, 1 << 31), (0, 1 << 62, 1 << 62), (1 << 70,)])
@pytest.mark.parametrize("descr", ["'|u1'", "'<f8'", "'<U99999999'"])
def test_npz_shapes_allocate_nothing(shape: tuple[int, ...], descr: str, tmp_path: Path) -> None:
    data = with_header(said(descr, shape)) + bytes(1000)
    refused_in_little_memory(read_npz, put(tmp_path / "a.npz", zipped(("a.npy", data))))


def test_zip_bombs_are_not_expanded(tmp_path: Path) -> None:
    path = tmp_path / "bomb.npz"
    large = zipped(("a.npy", with_header("{}") + bytes(1 << 26)), ("b.npy", bytes(1 << 20)))
    refused_in_little_memory(lambda p: read_npz(p, most=1 << 20), put(path, large), "at most 1,048,576")
    refused_in_little_memory(read_npz, put(path, large))
    small = zipped(("a.npy", npy(values(3))))
    claim = small.replace(struct.pack("<I", len(npy(values(3)))), struct.pack("<I", 1 << 29))
    refused_in_little_memory(read_npz, put(path, claim), "cannot be")
    many = bytearray(small)  # a directory of 2^31 bytes
    many[-10:-6] = struct.pack("<I", 1 << 31)
    refused_in_little_memory(read_npz, put(path, bytes(many)))


def test_overlapping_members_count_by_what_they_unpack_to(tmp_path: Path) -> None:
    """Every entry of the directory points to one and the same member of 1 MiB; all together are too much."""
    one = zipped(("a.npy", npy(np.zeros(1 << 20, np.uint8))))
    start = one.index(b"PK\x01\x02")
    entries = b"".join(one[start:-22].replace(b"a.npy", f"{i}.npy".encode()) for i in range(9))
    end = struct.pack("<4sHHHHIIH", b"PK\x05\x06", 0, 0, 9, 9, len(entries), start, 0)
    path = put(tmp_path / "a.npz", one[:start] + entries + end)
    refused(lambda p: read_npz(p, most=1 << 22), path, "at most 4,194,304")


# Pictures


def save(path: Path, array: np.ndarray, *, format: str = "PNG", **options: object) -> Path:
    pytest.importorskip("PIL")
    return put(path, picture(array, format=format, **options))


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
    save(tmp_path / "a/1.jpg", smooth, format="JPEG", quality=95)
    save(tmp_path / "a/2.png", smooth, format="JPEG", quality=95)
    images, _, _ = read_pictures(tmp_path)
    assert images.shape == (2, 1, 16, 24)
    assert np.abs(images.astype(int) - smooth).max() <= 4
    save(tmp_path / "a/3.jpeg", np.stack([smooth] * 3, -1), format="JPEG")
    assert read_pictures(tmp_path)[0].shape == (3, 3, 16, 24)


@pytest.mark.parametrize("kind", ["GIF", "WEBP"])
@pytest.mark.parametrize("frames", [1, 3])
def test_of_gif_and_webp_the_first_frame_is_read(kind: str, frames: int, tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    blocks = np.kron(values(4, 4, high=4) * 60, np.ones((8, 8), np.uint8))  # few colors, which a palette can hold
    moving = [image.fromarray(np.stack([blocks // (i + 1)] * 3, -1)) for i in range(frames)]
    options = {"lossless": True} if kind == "WEBP" else {}
    (tmp_path / "a").mkdir()
    moving[0].save(tmp_path / "a/1", format=kind, save_all=True, append_images=moving[1:], **options)
    save(tmp_path / "a/2.png", blocks)
    images, _, _ = read_pictures(tmp_path)
    assert images.shape == (2, 3, 32, 32)
    np.testing.assert_array_equal(images[0], images[1])


def test_folders_without_pictures_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("PIL")
    refused(read_pictures, tmp_path / "absent", "there is no such folder", "cat/1.png")
    refused(read_pictures, put(tmp_path / "file", b""), "is not a folder", "cat/1.png")
    save(tmp_path / "flat/1.png", values(6, 5))
    refused(read_pictures, tmp_path / "flat", "has no class folder", "cat/1.png")
    save(tmp_path / "set/a/1.png", values(6, 5))
    (tmp_path / "set/b").mkdir()
    with pytest.raises(DataError, match="/b': is an empty class folder"):
        read_pictures(tmp_path / "set")
    (tmp_path / "set/b/inner").mkdir()
    with pytest.raises(DataError, match="b/inner': is not a file"):
        read_pictures(tmp_path / "set")
    (tmp_path / "set/b/inner").rmdir()
    os.mkfifo(tmp_path / "set/b/pipe")
    with pytest.raises(DataError, match="b/pipe': is not a file"):
        read_pictures(tmp_path / "set")


def test_files_that_are_no_pictures_are_refused(tmp_path: Path) -> None:
    first = save(tmp_path / "a/1.png", values(6, 5))
    other = save(tmp_path / "b/1.png", values(5, 6))
    with pytest.raises(DataError, match=r"b/1\.png': is 6x5; .* 5x6"):
        read_pictures(tmp_path)
    unknown = [picture(values(6, 5), format=kind) for kind in ("BMP", "TIFF", "PPM")]
    for data in (b"", b"hello", first.read_bytes()[:40], b"\xff\xd8\xff", b"GIF89a" + bytes(40), *unknown):
        put(other, data)
        with pytest.raises(DataError, match=r"b/1\.png': is (damaged|0x0)") as caught:
            read_pictures(tmp_path)
        assert data not in unknown or "PNG, JPEG, GIF and WebP pictures are read, so convert" in str(caught.value)


@pytest.mark.parametrize("kind", ["PNG", "MPO"])
def test_png_and_jpeg_of_several_pictures_are_refused(kind: str, tmp_path: Path) -> None:
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
    put(tmp_path / "a/bomb.png", png(9, 2, b"\0\xff\x80\0\0\0"))
    assert read_pictures(tmp_path).images.tolist() == [[[[255] * 9, [0] * 9]]]


def test_without_pillow_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(DataError, match=r"pip install 'torchcaps\[images\]'"):
        read_pictures(tmp_path)


# The real files, if present


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
