"""The binary matrix format of NORB and smallNORB, by hand since no library that we depend on reads it.

    magic | rank | max(rank, 3) sizes, those beyond the rank being 1 | the values, last axis fastest

All integers have four bytes, little-endian. The magic tells the type of the values:

    1E3D4C51  float32     1E3D4C54  int32 (`cat`, `info`)     1E3D4C56  int16
    1E3D4C53  float64     1E3D4C55  uint8 (`dat`)             1E3D4C52  packed, which no set uses: refused
"""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import NamedTuple

import numpy as np

from torchcaps.data.readers.safe_io import MOST, Stream, bad, content

__all__ = ["read_norb"]

_TYPES = {0x1E3D4C51: "<f4", 0x1E3D4C53: "<f8", 0x1E3D4C54: "<i4", 0x1E3D4C55: "u1", 0x1E3D4C56: "<i2"}
_RANKS = range(1, 9)
_LONGEST_HEADER = 8 + 4 * max(_RANKS)


def read_norb(path: Path) -> np.ndarray:
    """Read a NORB matrix, plain or gzipped.

    Returns:
        Stereo pairs uint8 [n 2 h w], categories int32 [n] or poses int32 [n 4]. Bytes of a plain file are mapped,
        read-only, and so may be larger than memory; all else is read, up to 1 GiB.

    Raises:
        DataError: if the file is damaged or of another kind.
    """
    with content(path, MOST + _LONGEST_HEADER) as stream:
        header = _read_header(stream)
        # The images of the official files, unpacked, are 448 MB: they stay on disk.
        if stream.is_plain and header.dtype == np.uint8:
            if math.prod(header.shape) != stream.left:
                shape = list(header.shape)
                raise bad(path, f"holds {stream.left:,} bytes for {shape}; it is damaged or of another kind")
            return np.memmap(path, header.dtype, "r", offset=header.length, shape=header.shape)
        values = stream.last_array(header.shape, header.dtype, MOST)
    return values.astype(header.dtype.newbyteorder("="), copy=False)


class _Header(NamedTuple):
    """Type and shape of the values, and length of the header in bytes."""

    dtype: np.dtype
    shape: tuple[int, ...]
    length: int


def _read_header(stream: Stream) -> _Header:
    magic, rank = struct.unpack("<II", stream.take(8))
    if magic not in _TYPES:
        known = ", ".join(f"{m:08X}" for m in _TYPES)
        raise bad(stream.path, f"begins with {magic:08X}; a NORB matrix begins with one of {known}")
    if rank not in _RANKS:
        raise bad(stream.path, f"says that it has {rank} axes; 1 to {max(_RANKS)} are wanted")
    fields = max(rank, 3)
    sizes: tuple[int, ...] = struct.unpack(f"<{fields}I", stream.take(4 * fields))
    if any(n != 1 for n in sizes[rank:]):
        raise bad(stream.path, f"has sizes {list(sizes)} for {rank} axes; the further ones must be 1")
    if 0 in sizes:
        raise bad(stream.path, f"says that its shape is {list(sizes[:rank])}: it holds nothing")
    return _Header(np.dtype(_TYPES[magic]), sizes[:rank], 8 + 4 * fields)
