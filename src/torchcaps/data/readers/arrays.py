"""numpy's npz and npy files, without pickle: plain arrays of numbers or text, under plain names.

An npz is a zip of npy files. Its directory must be short and its sizes possible before any member is opened; each
npy header is held against the member's size before memory is asked for. No more than `most` bytes are read in all.
"""

from __future__ import annotations

import io
import re
import struct
import tokenize
import warnings
import zipfile
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from torchcaps.data.readers.safe_io import EXPANSION, MOST, Stream, bad, byte_count, opened, plain, size_of

__all__ = ["read_npy", "read_npz"]

_KINDS = "biufcSU"
_NAME = re.compile(r"\w[\w .-]*\.npy")
_LONGEST_HEADER = 10_000
_MOST_MEMBERS = 1000
_LARGEST_DIRECTORY = 1 << 18
_END = b"PK\x05\x06"
_LOCATOR = b"PK\x06\x07"
_ENCRYPTED = 0x1


def read_npz(path: Path, *, most: int = MOST) -> dict[str, NDArray[Any]]:
    """The arrays of an npz by name, in the machine's byte order; at most `most` bytes together."""
    with opened(path) as file:
        _check_directory(path, file)
        with zipfile.ZipFile(file) as archive:
            members = archive.infolist()
            _check_members(path, members, size_of(file), most)
            return {member.filename.removesuffix(".npy"): _member(path, archive, member, most) for member in members}


def read_npy(path: Path, *, most: int = MOST) -> NDArray[Any]:
    """The array of an npy file, in the machine's byte order."""
    with plain(path) as stream:
        return _array(stream, most)


def _check_directory(path: Path, file: BinaryIO) -> None:
    """The last 22 bytes give the number and the size of the entries, which are all read at once: so few of them."""
    size = size_of(file)
    file.seek(max(size - 42, 0))
    tail = file.read(42)
    if tail[-22:-18] != _END or tail[:4] == _LOCATOR:
        raise bad(path, "does not end as an npz file does; it is cut short, has a comment or is of another kind")
    members, directory = struct.unpack("<HI", tail[-12:-6])
    if not 1 <= members <= _MOST_MEMBERS or directory > _LARGEST_DIRECTORY:
        raise bad(path, f"claims {members} members; 1 to {_MOST_MEMBERS} are read")
    file.seek(0)


def _check_members(path: Path, members: list[zipfile.ZipInfo], size: int, most: int) -> None:
    names = [member.orig_filename for member in members]
    for member in members:
        _check_member(path, member, size)
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise bad(path, f"has the member {min(twice)!r} twice")
    total = sum(member.file_size for member in members)
    if total > most + len(members) * _LONGEST_HEADER:
        raise bad(path, f"holds {total:,} bytes unpacked; at most {most:,} bytes are read")


def _check_member(path: Path, member: zipfile.ZipInfo, size: int) -> None:
    name = member.orig_filename
    if not _NAME.fullmatch(name) or name != member.filename:
        raise bad(path, f"has a member named {name!r}; plain names such as 'images.npy' are wanted")
    if member.flag_bits & _ENCRYPTED:
        raise bad(path, f"its member {name!r} is encrypted; save it without a password")
    if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise bad(path, f"its member {name!r} is compressed in another way than numpy does; save it with numpy.savez")
    stored = member.compress_type == zipfile.ZIP_STORED
    possible = member.compress_size * (1 if stored else EXPANSION)
    if member.compress_size > size or member.file_size > possible or (stored and member.file_size != possible):
        raise bad(path, f"its member {name!r} claims {member.file_size:,} bytes, which cannot be; it is damaged")


def _member(path: Path, archive: zipfile.ZipFile, member: zipfile.ZipInfo, most: int) -> NDArray[Any]:
    with archive.open(member) as file:
        return _array(Stream(path / member.filename, file.read, member.file_size), most)


def _array(stream: Stream, most: int) -> NDArray[Any]:
    """One npy file, to its end."""
    shape, fortran, dtype = _header(stream)
    byte_count(stream.path, shape, dtype.itemsize, most)
    values = stream.array(shape[::-1] if fortran else shape, dtype)
    stream.end()
    if not dtype.isnative:
        values = values.byteswap(inplace=True).view(dtype.newbyteorder("="))
    return values.T if fortran else values


def _header(stream: Stream) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Shape, order and type; the text of the header is cut off before numpy reads it."""
    start = stream.take(8)
    version = (start[6], start[7])
    if start[:6] != b"\x93NUMPY" or version not in ((1, 0), (2, 0)):
        raise bad(stream.path, "does not begin as an npy file of version 1 or 2 does")
    length = stream.take(2 if version == (1, 0) else 4)
    count = int.from_bytes(length, "little")
    if count > _LONGEST_HEADER:
        raise bad(stream.path, f"has a header of {count:,} bytes; at most {_LONGEST_HEADER:,} are read")
    shape, fortran, dtype = _parsed(stream.path, version, io.BytesIO(length + stream.take(count)))
    if dtype.hasobject:
        raise bad(stream.path, "holds Python objects (pickle), which may run code; save numbers or text")
    if dtype.names or dtype.subdtype or dtype.kind not in _KINDS or not dtype.itemsize:
        raise bad(stream.path, f"is of type {dtype}; plain numbers or text are wanted")
    return shape, fortran, dtype


def _parsed(path: Path, version: tuple[int, int], text: io.BytesIO) -> tuple[Any, bool, np.dtype[Any]]:
    read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            shape, fortran, dtype = read(text)
    except (ValueError, TypeError, SyntaxError, LookupError, RecursionError, MemoryError, tokenize.TokenError) as error:
        raise bad(path, "has a header that cannot be read; it is damaged") from error
    if len(shape) > 8 or not all(type(n) is int and n >= 0 for n in shape):
        raise bad(path, f"says that its shape is {shape}; up to 8 axes are wanted")
    return shape, fortran, dtype
