"""IDX, the format of MNIST and Fashion-MNIST.

    0 0 type rank | rank sizes, four bytes each, big-endian | the values, last axis fastest

Only type 8 (unsigned bytes) is used by these sets, with rank 1 for labels and 3 for images.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from torchcaps.data.readers.safe_io import MOST, bad, byte_count, content

__all__ = ["read_idx"]

_UBYTE = 8
_RANKS = range(1, 5)


def read_idx(path: Path, *, most: int = MOST) -> NDArray[Any]:
    """An IDX file of bytes, plain or gzipped (its content tells, not its name): images [n h w], labels [n]."""
    with content(path, most + 4 + 4 * max(_RANKS)) as stream:
        zero, kind, rank = stream.unpack(">HBB")
        if zero or kind != _UBYTE or rank not in _RANKS:
            magic = f"{zero:04x}{kind:02x}{rank:02x}"
            raise bad(path, f"begins with {magic}; an IDX file of bytes begins with 00000801 to 00000804")
        shape = stream.unpack(f">{rank}I")
        if 0 in shape:
            raise bad(path, f"says that its shape is {list(shape)}: it holds nothing")
        byte_count(path, shape, 1, most)
        values = stream.array(shape, "u1")
        stream.end()
    return values
