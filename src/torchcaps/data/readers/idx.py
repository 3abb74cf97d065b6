"""IDX, the format of MNIST and Fashion-MNIST, by hand since no library that we depend on reads it.

    0 0 type rank | rank sizes, four bytes each, big-endian | the values, last axis fastest

Only type 8 (unsigned bytes) is used by these sets, with rank 1 for labels and 3 for images.
"""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np

from torchcaps.data.readers.safe_io import MOST, bad, content

__all__ = ["read_idx"]

_UBYTE = 8
_RANKS = range(1, 5)
_LONGEST_HEADER = 4 + 4 * max(_RANKS)


def read_idx(path: Path, *, most: int = MOST) -> np.ndarray:
    """Read an IDX file of bytes, plain or gzipped (its content tells, not its name).

    Args:
        path: The file.
        most: Bytes that the array may have.

    Returns:
        uint8: images [n h w] or labels [n].

    Raises:
        DataError: if the file is damaged or of another kind.
    """
    with content(path, most + _LONGEST_HEADER) as stream:
        zero, kind, rank = struct.unpack(">HBB", stream.take(4))
        if zero or kind != _UBYTE or rank not in _RANKS:
            magic = f"{zero:04x}{kind:02x}{rank:02x}"
            raise bad(path, f"begins with {magic}; an IDX file of bytes begins with 00000801 to 00000804")
        shape = struct.unpack(f">{rank}I", stream.take(4 * rank))
        if 0 in shape:
            raise bad(path, f"says that its shape is {list(shape)}: it holds nothing")
        return stream.last_array(shape, np.uint8, most)
