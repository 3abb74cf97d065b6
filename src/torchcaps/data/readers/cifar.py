"""CIFAR-10, the binary version: records of one label byte and 3072 pixels (red, green, blue plane of 32 x 32).

The official archive is read as a stream by `tarfile`: the six batches are read, by name, and nothing is extracted.
"""

from __future__ import annotations

import tarfile
from itertools import islice
from pathlib import Path
from typing import IO, NamedTuple, cast

import numpy as np

from torchcaps.data.readers.safe_io import Stream, bad, content

__all__ = ["Cifar10", "read_cifar_archive"]

_RECORD = 1 + 3 * 32 * 32
_LARGEST_BATCH = 10_000
_FOLDER = "cifar-10-batches-bin"
_TRAIN = [f"{_FOLDER}/data_batch_{i}.bin" for i in range(1, 6)]
_TEST = f"{_FOLDER}/test_batch.bin"
_LARGEST_ARCHIVE = 1 << 28
_MOST_MEMBERS = 1000
_CHUNK = 1 << 18
_PLAIN_TYPES = (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.LNKTYPE, tarfile.SYMTYPE, tarfile.DIRTYPE)


class Cifar10(NamedTuple):
    """Training and test images uint8 [n 3 32 32] and labels int64 [n], 0 to 9."""

    images: np.ndarray
    labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray


class _PlainMember(tarfile.TarInfo):
    """A member whose extended headers are passed over as files: `tarfile` would load whatever length they claim."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> _PlainMember:
        member = super().frombuf(buf, encoding, errors)
        if member.type not in _PLAIN_TYPES:
            member.type = b"?"
        return member


def read_cifar_archive(path: Path) -> Cifar10:
    """Read the official `cifar-10-binary.tar.gz`; the five training batches in their order.

    Raises:
        DataError: if the archive is damaged, or a batch is missing, there twice or not a regular file.
    """
    batches: dict[str, np.ndarray] = {}  # records [n 3073] by name
    with content(path, _LARGEST_ARCHIVE) as stream:
        possible = stream.left
        with tarfile.open(fileobj=cast("IO[bytes]", stream), mode="r|", tarinfo=_PlainMember) as archive:
            for member in islice(archive, _MOST_MEMBERS):
                name = member.name.removeprefix("./")
                if name not in [*_TRAIN, _TEST]:
                    continue
                file = archive.extractfile(member) if member.isreg() else None
                if file is None or name in batches:
                    raise bad(path, f"its member {name!r} is a link, a folder or there twice; one file is wanted")
                batches[name] = _records(Stream(path, file, min(member.size, possible)), member.size, name)
        # To the end: that is where gzip compares its checksum.
        while stream.read(_CHUNK):
            pass
    missing = [name for name in [*_TRAIN, _TEST] if name not in batches]
    if missing:
        raise bad(path, f"lacks {', '.join(missing)}; the archive cifar-10-binary.tar.gz is wanted")
    train = np.concatenate([batches[name] for name in _TRAIN])
    test = batches[_TEST]
    return Cifar10(_images(train), train[:, 0].astype(np.int64), _images(test), test[:, 0].astype(np.int64))


def _records(stream: Stream, size: int, name: str) -> np.ndarray:
    """Read a batch of `size` bytes as records [n 3073], the first byte of each its label."""
    count, rest = divmod(size, _RECORD)
    if rest or not 1 <= count <= _LARGEST_BATCH:
        raise bad(stream.path, f"{name!r} has {size:,} bytes; 1 to {_LARGEST_BATCH:,} times {_RECORD} are wanted")
    records = stream.array((count, _RECORD), np.uint8)
    labels = records[:, 0]
    if labels.max() > 9:
        raise bad(stream.path, f"{name!r} has the label {labels.max()} in record {labels.argmax()}; 0 to 9 are wanted")
    return records


def _images(records: np.ndarray) -> np.ndarray:
    """Return the pixels of records [n 3073] as images [n 3 32 32]."""
    return np.ascontiguousarray(records[:, 1:]).reshape(-1, 3, 32, 32)
