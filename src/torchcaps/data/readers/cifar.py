"""CIFAR-10, the binary version: records of one label byte and 3072 pixels (red, green, blue plane of 32 x 32).

The official archive is read as it is: the tar is walked in a stream, only the six batches are kept, by name, and
only if they are regular files; nothing is extracted. (Python's `tarfile` would hold in memory whatever an extended
header claims.)
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from torchcaps.data.readers.safe_io import MOST, Stream, bad, content, plain

__all__ = ["read_cifar", "read_cifar_archive"]

Bytes = NDArray[np.uint8]
Labels = NDArray[np.int64]

_RECORD = 1 + 3 * 32 * 32
_BATCH = 10_000
_FOLDER = "cifar-10-batches-bin"
_TRAIN = [f"{_FOLDER}/data_batch_{i}.bin" for i in range(1, 6)]
_TEST = f"{_FOLDER}/test_batch.bin"

_BLOCK = 512
_MOST_MEMBERS = 1000
_REGULAR = (b"0", b"\0")


def read_cifar(path: Path) -> tuple[Bytes, Labels]:
    """One batch file (`data_batch_1.bin`): images [n 3 32 32] and labels [n], 0 to 9."""
    with plain(path) as stream:
        return _records(stream, stream.left, MOST // _RECORD, path.name)


def read_cifar_archive(path: Path) -> tuple[Bytes, Labels, Bytes, Labels]:
    """The official `cifar-10-binary.tar.gz`: training images and labels (five batches in order), then the test's."""
    batches: dict[str, tuple[Bytes, Labels]] = {}
    with content(path) as stream:
        for member in _members(stream):
            if member.name not in [*_TRAIN, _TEST]:
                continue
            if member.kind not in _REGULAR or member.name in batches:
                raise bad(path, f"its member {member.name!r} is a link, a folder or there twice; one file is wanted")
            batches[member.name] = _records(member.body, member.size, _BATCH, member.name)
        stream.drain()
        stream.end()
    missing = [name for name in [*_TRAIN, _TEST] if name not in batches]
    if missing:
        raise bad(path, f"lacks {', '.join(missing)}; the archive cifar-10-binary.tar.gz is wanted")
    images, labels = zip(*(batches[name] for name in _TRAIN), strict=True)
    return np.concatenate(images), np.concatenate(labels), *batches[_TEST]


def _records(stream: Stream, size: int, most: int, name: str) -> tuple[Bytes, Labels]:
    count, rest = divmod(size, _RECORD)
    if rest or not 1 <= count <= most:
        raise bad(stream.path, f"{name!r} has {size:,} bytes; 1 to {most:,} times {_RECORD} are wanted")
    records = stream.array((count, _RECORD), "u1")
    labels = records[:, 0].astype(np.int64)
    if labels.max() > 9:
        raise bad(stream.path, f"{name!r} has the label {labels.max()} in record {labels.argmax()}; 0 to 9 are wanted")
    return np.ascontiguousarray(records[:, 1:]).reshape(count, 3, 32, 32), labels  # [n c h w]


class _Member(NamedTuple):
    name: str
    kind: bytes
    size: int
    body: Stream


def _members(stream: Stream) -> Iterator[_Member]:
    """The members of a tar, up to its block of zeros; what is not read of a body is passed over."""
    for _ in range(_MOST_MEMBERS):
        block = stream.take(_BLOCK)
        if not any(block):
            return
        size = _octal(stream.path, block[124:136])
        if _octal(stream.path, block[148:156]) != sum(block) - sum(block[148:156]) + 8 * ord(" "):
            raise bad(stream.path, "the checksum of a tar header is wrong; it is damaged or no tar archive")
        prefix = _text(block[345:500]) + "/" if block[257:262] == b"ustar" and block[345] else ""
        body = stream.part(size + -size % _BLOCK)
        yield _Member((prefix + _text(block[:100])).removeprefix("./"), block[156:157], size, body)
        body.drain()
    raise bad(stream.path, f"has more than {_MOST_MEMBERS} members; the archive cifar-10-binary.tar.gz is wanted")


def _text(field: bytes) -> str:
    return field.partition(b"\0")[0].decode("latin-1")


def _octal(path: Path, field: bytes) -> int:
    digits = field.strip(b" \0")
    if not re.fullmatch(rb"[0-7]{1,11}", digits):
        raise bad(path, "a number in a tar header is not octal; it is damaged or no tar archive")
    return int(digits, 8)
