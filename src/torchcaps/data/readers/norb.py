"""The binary matrix format of NORB and smallNORB.

    magic | rank | max(rank, 3) sizes, those beyond the rank being 1 | the values, last axis fastest

All integers have four bytes, little-endian. The magic tells the type of the values:

    1E3D4C51  float32     1E3D4C54  int32 (`cat`, `info`)     1E3D4C56  int16
    1E3D4C53  float64     1E3D4C55  uint8 (`dat`)             1E3D4C52  packed, which no set uses: refused
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torchcaps.data.readers.safe_io import MOST, Stream, bad, byte_count, content

__all__ = ["read_norb"]

_TYPES: dict[int, np.dtype[Any]] = {
    0x1E3D4C51: np.dtype("<f4"),
    0x1E3D4C53: np.dtype("<f8"),
    0x1E3D4C54: np.dtype("<i4"),
    0x1E3D4C55: np.dtype("u1"),
    0x1E3D4C56: np.dtype("<i2"),
}
_RANKS = range(1, 9)
_LONGEST_HEADER = 8 + 4 * max(_RANKS)


def read_norb(path: Path) -> NDArray[Any]:
    """A NORB matrix, plain or gzipped: pairs [n 2 h w] of bytes, categories [n], poses [n 4].

    Bytes of a plain file are mapped, read-only, and so may be larger than memory; all else is read, up to 1 GiB.
    """
    with content(path, MOST + _LONGEST_HEADER) as stream:
        dtype, shape, header = _header(stream)
        if stream.exact and dtype == np.uint8:
            stream.claim(math.prod(shape))
            stream.end()
            return np.memmap(path, dtype, "r", offset=header, shape=shape)
        byte_count(path, shape, dtype.itemsize, MOST)
        values = stream.array(shape, dtype)
        stream.end()
    return values.astype(dtype.newbyteorder("="), copy=False)


def _header(stream: Stream) -> tuple[np.dtype[Any], tuple[int, ...], int]:
    """The type, the shape, and how many bytes the header has."""
    magic, rank = stream.unpack("<II")
    if magic not in _TYPES:
        known = ", ".join(f"{m:08X}" for m in _TYPES)
        raise bad(stream.path, f"begins with {magic:08X}; a NORB matrix begins with one of {known}")
    if rank not in _RANKS:
        raise bad(stream.path, f"says that it has {rank} axes; 1 to {max(_RANKS)} are wanted")
    fields = max(rank, 3)
    sizes: tuple[int, ...] = stream.unpack(f"<{fields}I")
    if any(n != 1 for n in sizes[rank:]):
        raise bad(stream.path, f"has sizes {list(sizes)} for {rank} axes; the further ones must be 1")
    if 0 in sizes:
        raise bad(stream.path, f"says that its shape is {list(sizes[:rank])}: it holds nothing")
    return _TYPES[magic], sizes[:rank], 8 + 4 * fields
