"""Reading files that may be damaged or hostile: nothing is allocated that the file cannot hold.

A `Stream` knows how many bytes can still come: for a plain file what is left of it, for a compressed one at most
1032 times its size, since deflate writes no more than 258 bytes for two bits. Every claim of a header is held
against that number, and against a cap, before memory is asked for; data are inflated piece by piece, never whole.
Whatever the system or a decompressor has to say against a file becomes one `DataError` that names it.
"""

from __future__ import annotations

import math
import os
import stat
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import DTypeLike, NDArray

from torchcaps.errors import DataError

__all__ = ["MOST", "Stream", "bad", "byte_count", "content", "opened", "plain", "size_of"]

MOST = 1 << 30
"""Bytes that a reader hands out at most, unless it is told otherwise: 1 GiB."""

EXPANSION = 1032
"""Deflate expands no byte to more than this many."""

_CHUNK = 1 << 18
_LONGEST_REASON = 300
_GZIP = b"\x1f\x8b"
_GZIP_BITS = 31
_TROUBLE = (OSError, EOFError, ValueError, OverflowError, RuntimeError, MemoryError, struct.error, zlib.error)


def bad(path: Path, reason: str) -> DataError:
    """The one error of all readers: which file, and what is wrong with it, in one line."""
    return DataError(f"{str(path)!r}: {' '.join(reason.split())[:_LONGEST_REASON]}")


def size_of(file: BinaryIO) -> int:
    """Bytes in an open file."""
    return os.fstat(file.fileno()).st_size


def byte_count(path: Path, shape: Sequence[int], itemsize: int, most: int) -> int:
    """Bytes of an array of that shape, by exact integers; refused beyond `most` (axes of 0 count as 1 there)."""
    if itemsize * math.prod(max(n, 1) for n in shape) > most or min(shape, default=0) < 0:
        raise bad(path, f"claims {itemsize} bytes x {list(shape)}; at most {most:,} bytes are read")
    return itemsize * math.prod(shape)


@contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """A regular file, open for reading; all that goes wrong while it is read is `DataError`."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise bad(path, "is not a regular file; give the path of the file itself")
        with path.open("rb") as file:
            yield file
    except DataError:
        raise
    except FileNotFoundError as error:
        raise bad(path, "there is no such file") from error
    except (*_TROUBLE, zipfile.BadZipFile) as error:
        raise bad(path, f"cannot be read: {error or type(error).__name__}; it is damaged or of another kind") from error


class Inflate:
    """One deflated stream, read in pieces of bounded size; its checksum and its end are checked."""

    def __init__(self, feed: Callable[[int], bytes], bits: int) -> None:
        self._feed = feed
        self._inflater = zlib.decompressobj(bits)
        self._pending = b""

    def read(self, count: int) -> bytes:
        """At most `count` > 0 bytes; b"" only once the stream has ended well and nothing follows it."""
        while not self._inflater.eof:
            piece = self._inflater.decompress(self._pending, count)
            self._pending = self._inflater.unconsumed_tail
            if piece:
                return piece
            if not self._inflater.eof:
                self._pending = self._feed(_CHUNK)
                if not self._pending:
                    raise EOFError("the compressed data are cut short")
        if self._inflater.unused_data or self._feed(1):
            raise EOFError("bytes follow the end of the compressed data")
        return b""


class Stream:
    """Bytes read forwards, of which at most `left` (if `exact`: just so many) can still come."""

    def __init__(self, path: Path, read: Callable[[int], bytes], left: int, *, exact: bool = True) -> None:
        self.path = path
        self.left = left
        self.exact = exact
        self._read = read

    def some(self, count: int) -> bytes:
        """At most `count` bytes of those left; b"" at the end."""
        piece = self._read(min(count, self.left)) if self.left else b""
        self.left -= len(piece)
        return piece

    def take(self, count: int) -> bytes:
        """Exactly `count` bytes."""
        return self.array((count,), np.uint8).tobytes()

    def unpack(self, layout: str) -> tuple[Any, ...]:
        """The next values by a layout of `struct`."""
        return struct.unpack(layout, self.take(struct.calcsize(layout)))

    def array(self, shape: Sequence[int], dtype: DTypeLike) -> NDArray[Any]:
        """The next values as an array; allocated only after the bytes were found to be possible."""
        dtype = np.dtype(dtype)
        size = self.claim(dtype.itemsize * math.prod(shape))
        out = np.empty(size, np.uint8)
        done = 0
        while done < size:
            piece = self._piece(size - done)
            out[done : done + len(piece)] = np.frombuffer(piece, np.uint8)
            done += len(piece)
        return out.view(dtype).reshape(shape)

    def skip(self, count: int) -> None:
        """Pass over exactly `count` bytes."""
        self.claim(count)
        while count:
            count -= len(self._piece(count))

    def claim(self, count: int) -> int:
        """Set aside the next `count` bytes, which must be possible."""
        if count > self.left:
            reason = f"{count:,} more bytes are wanted and at most {self.left:,} can follow"
            raise bad(self.path, f"{reason}; it is cut short, or its header is wrong")
        self.left -= count
        return count

    def part(self, count: int) -> Stream:
        """The next `count` bytes as a stream of their own, to be read to its end before this one goes on."""
        self.claim(count)
        return Stream(self.path, self._read, count)

    def inflated(self, bits: int, most: int) -> Stream:
        """What these bytes hold compressed: at most `most` bytes of it."""
        return Stream(self.path, Inflate(self.some, bits).read, min(most, EXPANSION * self.left), exact=False)

    def drain(self) -> None:
        """Pass over what is left; if `exact`, all of it must be there."""
        if self.exact:
            self.skip(self.left)
        while self.some(_CHUNK):
            pass

    def end(self) -> None:
        """Nothing may follow."""
        if self.left if self.exact else self._read(1):
            raise bad(self.path, "holds more data than its header says; it is damaged or of another kind")

    def _piece(self, count: int) -> bytes:
        piece = self._read(min(count, _CHUNK))
        if not piece:
            raise bad(self.path, f"is cut short: {count:,} more bytes are wanted")
        return piece


@contextmanager
def plain(path: Path) -> Iterator[Stream]:
    """The bytes of a file."""
    with opened(path) as file:
        yield Stream(path, file.read, size_of(file))


@contextmanager
def content(path: Path, most: int = MOST) -> Iterator[Stream]:
    """The bytes of a file or, if it begins as a gzip does, at most `most` bytes of what it holds compressed."""
    with opened(path) as file:
        zipped = file.read(2) == _GZIP
        file.seek(0)
        stream = Stream(path, file.read, size_of(file))
        yield stream.inflated(_GZIP_BITS, most) if zipped else stream
