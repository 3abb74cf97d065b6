"""Valid data files of every format that torchcaps reads, written by other people's writers."""

from __future__ import annotations

import gzip
import hashlib
import io
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np

NORB_MAGIC = {"<f4": 0x1E3D4C51, "<f8": 0x1E3D4C53, "<i4": 0x1E3D4C54, "u1": 0x1E3D4C55, "<i2": 0x1E3D4C56}
BATCHES = [f"cifar-10-batches-bin/{name}.bin" for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")]


def values(*shape: int, dtype: str = "u1", high: int = 256) -> np.ndarray:
    """Reproducible numbers of any shape."""
    return np.random.default_rng(sum(shape)).integers(0, high, shape).astype(dtype)


def put(path: Path, data: bytes) -> Path:
    """Write a file, and the folders that it lies in."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def idx(array: np.ndarray) -> bytes:
    return struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.tobytes()


def norb(array: np.ndarray, dtype: str = "u1") -> bytes:
    sizes = [*array.shape, 1, 1][: max(3, array.ndim)]
    return struct.pack(f"<II{len(sizes)}I", NORB_MAGIC[dtype], array.ndim, *sizes) + array.astype(dtype).tobytes()


def batch(i: int, count: int = 2) -> bytes:
    """A CIFAR batch: the labels i, 9 - i, ... and pixels that differ from batch to batch."""
    labels = [i, 9 - i][:count]
    return b"".join(
        bytes([label]) + row.tobytes() for label, row in zip(labels, values(2, 3072, high=i + 2), strict=False)
    )


def cifar(names: list[str] = BATCHES, edit: Callable[[tarfile.TarInfo], object] = id, **options: object) -> bytes:
    """A tar in the official layout, with batches of these names in this order."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", **options) as tar:
        folder = tarfile.TarInfo("cifar-10-batches-bin")
        folder.type = tarfile.DIRTYPE
        tar.addfile(folder)
        for name, data in [
            ("cifar-10-batches-bin/readme.html", b"hi"),
            *zip(names, map(batch, range(6)), strict=False),
        ]:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            edit(info)
            tar.addfile(info, io.BytesIO(data))
    return out.getvalue()


def cifar_gz(*names: str, **options: object) -> bytes:
    return gzip.compress(cifar(list(names) or BATCHES, **options), 1, mtime=0)


def npz(*, pack: bool = True, **arrays: np.ndarray) -> bytes:
    out = io.BytesIO()
    (np.savez_compressed if pack else np.savez)(out, **arrays)
    return out.getvalue()


def npy(array: np.ndarray, version: tuple[int, int] | None = None) -> bytes:
    out = io.BytesIO()
    np.lib.format.write_array(out, array, version)
    return out.getvalue()


def npy_header(text: str, version: int = 1) -> bytes:
    """The beginning of an npy file that says this, whatever it is."""
    said = text.encode()
    return b"\x93NUMPY" + bytes([version, 0]) + len(said).to_bytes(2 if version == 1 else 4, "little") + said


def zipped(*members: tuple[str, bytes], method: int = zipfile.ZIP_DEFLATED) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", method) as archive:
        for name, data in members:
            archive.writestr(name, data)
    return out.getvalue()


def picture(array: np.ndarray, **options: object) -> bytes:
    from PIL import Image

    out = io.BytesIO()
    Image.fromarray(array).save(out, **options)
    return out.getvalue()


def png_chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
