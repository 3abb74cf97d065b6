"""Read files that may be damaged or hostile: nothing is allocated that the file cannot hold.

A `Stream` knows how many bytes can still come: of a plain file what is left of it, of a gzip at most 1032 times its
size, since deflate writes no more than 258 bytes for two bits. Every claim of a header is compared with that number,
and with a cap, before memory is asked for. This stays by hand since numpy and gzip allocate what a header claims.
"""

from __future__ import annotations

import gzip
import math
import os
import stat
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Protocol

import numpy as np
from numpy.typing import DTypeLike

from torchcaps.errors import DataError

__all__ = ["EXPANSION", "MOST", "Stream", "bad", "content", "opened", "size_of"]

MOST = 1 << 30
"""Bytes that a reader returns at most, unless it is told otherwise: 1 GiB."""

EXPANSION = 1032
"""Deflate expands no byte to more than this many."""

_CHUNK = 1 << 18
_LONGEST_REASON = 300
_GZIP = b"\x1f\x8b"
_PYTHON_ERRORS = (OSError, EOFError, ValueError, OverflowError, RuntimeError, MemoryError)
_LIBRARY_ERRORS = (*_PYTHON_ERRORS, struct.error, zlib.error, zipfile.BadZipFile, tarfile.TarError)
"""What the system and the standard library raise on damaged files; zipfile a RuntimeError for encrypted members."""


def bad(path: Path, reason: str) -> DataError:
    """Return the error of all readers: which file, and what is wrong with it, in one line."""
    return DataError(f"{str(path)!r}: {' '.join(reason.split())[:_LONGEST_REASON]}")


def size_of(file: BinaryIO) -> int:
    """Return the length of an open file in bytes."""
    return os.fstat(file.fileno()).st_size


@contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """Open a regular file for reading.

    Raises:
        DataError: for whatever goes wrong while it is read, also in the block.
    """
    try:
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            raise bad(path, "is a folder; give the paths of the files in it")
        if not stat.S_ISREG(mode):
            raise bad(path, "is not a regular file; give the path of the file itself")
        with path.open("rb") as file:
            yield file
    except DataError:
        raise
    except FileNotFoundError as error:
        raise bad(path, "there is no such file") from error
    except _LIBRARY_ERRORS as error:
        raise bad(path, f"cannot be read: {error or type(error).__name__}; it is damaged or of another kind") from error


class Readable(Protocol):
    """An open file, or what it holds compressed."""

    def read(self, count: int, /) -> bytes: ...


class Stream:
    """Bytes that are read forwards.

    Attributes:
        path: The file, for error messages.
        left: Number of bytes that can still come at most; exactly so many if the stream is not compressed.
        is_plain: Whether the stream is not compressed.
    """

    def __init__(self, path: Path, file: Readable, left: int, *, is_plain: bool = True) -> None:
        self.path = path
        self.left = left
        self.is_plain = is_plain
        self._file = file

    def take(self, count: int) -> bytes:
        """Read exactly `count` bytes."""
        return self.array((count,), np.uint8).tobytes()

    def array(self, shape: Sequence[int], dtype: DTypeLike) -> np.ndarray:
        """Read the next values as an array; it is allocated only if so many bytes can follow.

        Raises:
            DataError: if they cannot, or do not.
        """
        dtype = np.dtype(dtype)
        size = dtype.itemsize * math.prod(shape)
        if size > self.left:
            reason = f"{size:,} more bytes are wanted and at most {self.left:,} can follow"
            raise bad(self.path, f"{reason}; it is cut short, or its header is wrong")
        self.left -= size
        out = np.empty(size, np.uint8)
        done = 0
        # In pieces: memory that is not written to costs nothing, whatever a header claims.
        while done < size:
            piece = self._file.read(min(size - done, _CHUNK))
            if not piece:
                raise bad(self.path, f"is cut short: {size - done:,} more bytes are wanted")
            out[done : done + len(piece)] = np.frombuffer(piece, np.uint8)
            done += len(piece)
        return out.view(dtype).reshape(shape)

    def read(self, count: int) -> bytes:
        """Read at most `count` bytes of those that can still come; b"" at the end."""
        piece = self._file.read(min(count, self.left))
        self.left -= len(piece)
        return piece

    def last_array(self, shape: Sequence[int], dtype: DTypeLike, most: int) -> np.ndarray:
        """Read what is left as one array of at most `most` bytes; the end of a gzip is where its checksum is compared.

        Raises:
            DataError: if the array would be larger, or bytes follow it.
        """
        size = np.dtype(dtype).itemsize * math.prod(shape)
        if size > most:
            raise bad(self.path, f"claims {size:,} bytes, {list(shape)} values; at most {most:,} bytes are read")
        values = self.array(shape, dtype)
        if self._file.read(1):
            raise bad(self.path, "holds more data than its header says; it is damaged or of another kind")
        return values


@contextmanager
def content(path: Path, most: int = MOST) -> Iterator[Stream]:
    """Open a file as a stream or, if it begins as a gzip does, at most `most` bytes of its content."""
    with opened(path) as file:
        is_gzip = file.read(2) == _GZIP
        file.seek(0)
        if not is_gzip:
            yield Stream(path, file, size_of(file))
            return
        with gzip.GzipFile(fileobj=file) as inner:
            yield Stream(path, inner, min(most, EXPANSION * size_of(file)), is_plain=False)
