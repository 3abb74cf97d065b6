"""numpy's npz files, read by `numpy.load` without pickle: plain arrays of numbers or text, under plain names.

numpy allocates what the header of an array claims, so the sizes in the zip directory and each header are compared
with the file before `numpy.load` sees them.
"""

from __future__ import annotations

import math
import re
import tokenize
import warnings
import zipfile
from collections import Counter
from pathlib import Path

import numpy as np
from numpy.lib import format as npy

from torchcaps.data.readers.safe_io import EXPANSION, MOST, bad, opened, size_of

__all__ = ["read_npz"]

_KINDS = "biufcSU"
_NAME = re.compile(r"\w[\w .-]*\.npy")
_MOST_MEMBERS = 1000
_LONGEST_HEADER = 10_000
_HEADER_ERRORS = (ValueError, TypeError, SyntaxError, LookupError, RecursionError, MemoryError, tokenize.TokenError)


def read_npz(path: Path, *, most: int = MOST) -> dict[str, np.ndarray]:
    """Read the arrays of an npz file.

    Args:
        path: The file.
        most: Bytes that all arrays together may have.

    Returns:
        The arrays by name, in the machine's byte order.

    Raises:
        DataError: if the file is damaged, holds Python objects or claims more than it can hold.
    """
    with opened(path) as file:
        # What numpy would believe is checked first.
        with zipfile.ZipFile(file) as archive:
            members = archive.infolist()
            _check_directory(path, members, size_of(file), most)
            for member in members:
                _check_array(path / member.filename, archive, member)
        # Then numpy reads.
        file.seek(0)
        with np.load(file, allow_pickle=False) as arrays:
            return {name: _in_native_order(arrays[name]) for name in arrays.files}


def _check_directory(path: Path, members: list[zipfile.ZipInfo], size: int, most: int) -> None:
    """Refuse names that are not plain, other compressions than numpy's, and sizes that cannot be."""
    if not 1 <= len(members) <= _MOST_MEMBERS:
        raise bad(path, f"has {len(members)} members; 1 to {_MOST_MEMBERS} are read")
    for member in members:
        name = member.orig_filename
        if not _NAME.fullmatch(name) or name != member.filename:
            raise bad(path, f"has a member named {name!r}; plain names such as 'images.npy' are wanted")
        if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise bad(path, f"its member {name!r} is compressed in another way than numpy does; use numpy.savez")
        # Stored members keep their size, deflated ones grow by a bounded factor.
        largest = member.compress_size * (1 if member.compress_type == zipfile.ZIP_STORED else EXPANSION)
        if member.compress_size > size or member.file_size > largest:
            raise bad(path, f"its member {name!r} claims {member.file_size:,} bytes, which cannot be; it is damaged")
    name, count = Counter(member.filename for member in members).most_common(1)[0]
    if count > 1:
        raise bad(path, f"has the member {name!r} twice")
    total = sum(member.file_size for member in members)
    if total > most + len(members) * _LONGEST_HEADER:
        raise bad(path, f"holds {total:,} bytes unpacked; at most {most:,} bytes are read")


def _check_array(path: Path, archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> None:
    """Refuse a header that does not describe plain values of just the member's size."""
    with archive.open(member) as file, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            version = npy.read_magic(file)
            read_header = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
            shape, _, dtype = read_header(file, max_header_size=_LONGEST_HEADER)
        except _HEADER_ERRORS as error:
            raise bad(path, "has a header that cannot be read; it is damaged, or not a numpy array") from error
        if version > (2, 0) or dtype.hasobject:
            raise bad(path, "holds Python objects (pickle), which may run code, or field names; save plain numbers")
        if dtype.names or dtype.subdtype or dtype.kind not in _KINDS or not dtype.itemsize:
            raise bad(path, f"is of type {dtype}; plain numbers or text are wanted")
        if not all(type(n) is int and n >= 0 for n in shape):
            raise bad(path, f"says that its shape is {shape}; sizes of 0 or more are wanted")
        # The values must fill the member: numpy would allocate what the shape claims.
        wanted = dtype.itemsize * math.prod(shape)
        found = member.file_size - file.tell()
        if wanted != found:
            raise bad(path, f"holds {found:,} bytes for {dtype} {list(shape)}, {wanted:,} are wanted; it is damaged")


def _in_native_order(array: np.ndarray) -> np.ndarray:
    """Swap the bytes of values that another kind of machine wrote."""
    return array.astype(array.dtype.newbyteorder("="), copy=False)
