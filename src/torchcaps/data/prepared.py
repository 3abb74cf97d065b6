"""Images that are prepared once: decoded and resized into a file of bytes in the user's cache, mapped when it is used.

    CACHE/prepared/sources/KEY.json         KEY: names, sizes and times of change of the files, and settings -> CONTENT
    CACHE/prepared/content/CONTENT/         images.bin, the bytes [n c h w], and record.json, which describes them

CONTENT is the SHA-256 of the images and their record, so that the same images are stored once, however they were found.
A folder appears under its name only when it is whole. Processes that want the same images share the file and, through
the system's cache, the memory. `torchcaps data clean` removes all of it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchcaps.config import Table
from torchcaps.data.readers.safe_io import MOST
from torchcaps.errors import DataError, TrainingError
from torchcaps.utils.files import cache_dir, write_atomically
from torchcaps.utils.mapped import map_file
from torchcaps.utils.notices import notice

__all__ = ["Cleaned", "ImageWriter", "Made", "Prepared", "clean", "prepare"]

FORMAT = 2
"""Version of the files; part of every key, so that files of another version are never found."""
_LONGEST_RECORD = 1 << 28


class Prepared(NamedTuple):
    """Images in one format.

    Attributes:
        images: uint8 [n c h w], mapped from the cache or, where that cannot be written, in memory.
        record: What belongs to them, such as their labels.
        digest: SHA-256 of both, in hexadecimal.
        report: What was found on the way; not part of the digest.
    """

    images: Tensor
    record: Table
    digest: str
    report: Table


class Made(NamedTuple):
    """What a function that makes images returns beside them, for JSON: what belongs to them, and what it found."""

    record: Table
    report: Table


class ImageWriter:
    """Takes images one by one, all of one shape; to a file, or into memory if there is none."""

    def __init__(self, file: BinaryIO | None) -> None:
        self._file = file
        self._stored: list[np.ndarray] = []
        self._hash = hashlib.sha256()
        self.shape: tuple[int, ...] = ()
        self.count = 0

    def append(self, images: np.ndarray) -> None:
        """Add one image, uint8 [c h w], or several [m c h w]."""
        images = np.ascontiguousarray(images)
        if images.ndim == 3:
            images = images[None]
        self.shape = images.shape[1:]
        self.count += len(images)
        self._hash.update(images.data)
        if self._file is not None:
            self._file.write(images.data)
            return
        self._stored.append(images)
        if self.count * int(np.prod(self.shape)) > MOST:
            raise DataError(
                f"the images have more than {MOST:,} bytes and the cache cannot be written; free disk space"
            )

    def in_memory(self) -> Tensor:
        """Return what was added, if there is no file."""
        return torch.from_numpy(np.concatenate(self._stored))

    def digest(self, record: Table) -> str:
        """Return the SHA-256 of all images and a record of them."""
        total = self._hash.copy()
        total.update(json.dumps(record, sort_keys=True).encode())
        return total.hexdigest()


def prepare(identity: object, make: Callable[[ImageWriter], Made]) -> Prepared:
    """Return images from the cache, or make them and put them there.

    Args:
        identity: Plain data that change whenever the images would: names, sizes and times of change of the files, and
            all settings.
        make: Writes the images, all of one shape, and returns their record and its report.

    Returns:
        The images and their record. Where the cache cannot be written they are in memory, which is said aloud.

    Raises:
        DataError: if `make` raises it, or the images neither fit on the disk nor are small enough for memory.
    """
    text = json.dumps([FORMAT, identity], sort_keys=True)
    source = _root() / "sources" / f"{hashlib.sha256(text.encode()).hexdigest()}.json"
    found = _find(source)
    if found is not None:
        return found
    try:
        (_root() / "content").mkdir(parents=True, exist_ok=True)
        source.parent.mkdir(exist_ok=True)
        # Of several processes that want the same images, one makes them and the others wait.
        with _lock(_root()):
            return _find(source) or _make(source, make)
    except (OSError, TrainingError) as error:
        reason = getattr(error, "strerror", None) or error
        notice(f"the cache {str(_root())!r} cannot be written ({reason}); images stay in memory")
    writer = ImageWriter(None)
    made = make(writer)
    return Prepared(writer.in_memory(), made.record, writer.digest(made.record), made.report)


class Cleaned(NamedTuple):
    """How many prepared sets were removed, and their bytes."""

    sets: int
    size: int


def clean() -> Cleaned:
    """Remove all prepared images; a process that uses some keeps them until it ends.

    Raises:
        DataError: if something cannot be removed.
    """
    content = _root() / "content"
    try:
        found = [path for path in content.iterdir() if path.is_dir()] if content.is_dir() else []
        size = sum(file.stat().st_size for path in found for file in path.iterdir())
        if _root().is_dir():
            shutil.rmtree(_root())
    except OSError as error:
        raise DataError(f"cannot remove {str(_root())!r}: {error.strerror or error}; remove it by hand") from error
    return Cleaned(len([path for path in found if not path.name.startswith(".")]), size)


def _root() -> Path:
    return cache_dir() / "prepared"


_BROKEN = (OSError, ValueError, KeyError, TypeError, RecursionError)
"""What reading a file raises that is not whole, or not ours."""


def _find(source: Path) -> Prepared | None:
    """Return images that are in the cache; whatever is not whole there counts as absent."""
    with contextlib.suppress(*_BROKEN):
        entry = _read_json(source)
        return _stored(str(entry["content"]), entry["report"])
    return None


def _stored(digest: str, report: Table) -> Prepared:
    """Map the images of a name.

    Raises:
        OSError, ValueError, KeyError, TypeError, RecursionError: if they are not whole.
    """
    if Path(digest).name != digest:
        raise ValueError(f"{digest!r} is no name of images")
    folder = _root() / "content" / digest
    stored = _read_json(folder / "record.json")
    return Prepared(map_file(folder / "images.bin", stored["shape"]), stored["record"], digest, report)


def _make(source: Path, make: Callable[[ImageWriter], Made]) -> Prepared:
    """Write images beside their place, and rename them when they are whole."""
    content = _root() / "content"
    # What killed processes left: the lock is ours, so nobody writes now.
    for left in content.glob(".writing-*"):
        shutil.rmtree(left, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=".writing-", dir=content))
    try:
        with (folder / "images.bin").open("wb") as file:
            writer = ImageWriter(file)
            made = make(writer)
            file.flush()
            os.fsync(file.fileno())
        stored = {"shape": [writer.count, *writer.shape], "record": made.record}
        (folder / "record.json").write_text(json.dumps(stored), encoding="utf-8")
        digest = writer.digest(made.record)
        # The same images may be there already, found by other names; if they are not whole, these replace them.
        try:
            _stored(digest, made.report)
        except _BROKEN:
            shutil.rmtree(content / digest, ignore_errors=True)
            folder.replace(content / digest)
        write_atomically(source, [json.dumps({"content": digest, "report": made.report}).encode()])
        return _stored(digest, made.report)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _read_json(path: Path) -> Table:
    if path.stat().st_size > _LONGEST_RECORD:
        raise ValueError(f"{path} is too long")
    value: Table = json.loads(path.read_text(encoding="utf-8"))
    return value


@contextlib.contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Wait until no other process prepares images; where the system has no such locks, nobody waits."""
    if sys.platform == "win32":
        yield
        return
    import fcntl

    handle = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
