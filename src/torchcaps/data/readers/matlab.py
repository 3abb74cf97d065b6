"""The part of MATLAB's level-5 format that affNIST uses: one struct `affNISTdata` of numeric matrices.

    file     128 bytes of text, version and byte order, then elements
    element  type, size, data, padding to 8 bytes; or, if data fit in 4 bytes: type and size in one word, data
    matrix   an element of elements: flags (the class), sizes, name, then values, or the fields of a struct
    15       a compressed element: a zlib stream that holds one matrix

Orientation. MATLAB stores a matrix column by column, so [1600 n] is n images of 1600 values one after the other, and
within an image affNIST goes row by row, as MNIST does: pixel (r, c) is value 40 r + c. That is what programs that
train on MNIST and test on affNIST rely on (`image.T.reshape(n, 40, 40)`); MATLAB's own `reshape(x, 40, 40)` would
show the digits transposed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from torchcaps.data.readers.safe_io import MOST, Stream, bad, plain

__all__ = ["read_affnist"]

_STRUCT = "affNISTdata"
_IMAGE = "image"
_LABEL = "label_int"
_SIDE = 40

_TYPES = {
    1: "<i1",
    2: "<u1",
    3: "<i2",
    4: "<u2",
    5: "<i4",
    6: "<u4",
    7: "<f4",
    9: "<f8",
    12: "<i8",
    13: "<u8",
}
_MATRIX = 14
_COMPRESSED = 15
_CLASS_STRUCT = 2
_CLASS_UINT8 = 9
_NUMERIC_CLASSES = range(6, 16)
_COMPLEX = 0x0800
_MOST_VARIABLES = 64
_MOST_FIELDS = 64
_LONGEST_HEADER = 4096
_ZLIB_BITS = 15


class _Head(NamedTuple):
    """What a matrix says of itself before its values."""

    kind: int
    complex: bool
    shape: tuple[int, ...]
    name: str


def read_affnist(path: Path) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """An official affNIST file: images [n 40 40], upright, and labels [n], 0 to 9."""
    found: dict[str, NDArray[Any]] = {}
    with plain(path) as stream:
        _check_start(stream)
        for _ in range(_MOST_VARIABLES):
            if not stream.left:
                break
            fields = _variable(stream)
            if found and fields:
                raise bad(path, f"holds {_STRUCT} twice; a file of affNIST is wanted")
            found = fields or found
        stream.end()
    missing = [name for name in (_IMAGE, _LABEL) if name not in found]
    if missing:
        raise bad(path, f"has no {_STRUCT}.{missing[0]}; a file of affNIST is wanted")
    return _checked(path, found[_IMAGE], found[_LABEL])


def _check_start(stream: Stream) -> None:
    start = stream.take(128)
    if start[124:128] == b"\0\2IM" or start.startswith(b"MATLAB 7.3"):
        raise bad(stream.path, "is a MATLAB 7.3 file (HDF5); save it again with the option -v7")
    if start[124:128] != b"\0\1IM":
        raise bad(stream.path, "does not begin as a little-endian MATLAB 5 file does; a file of affNIST is wanted")


def _checked(path: Path, image: NDArray[Any], label: NDArray[Any]) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    if image.dtype != np.uint8 or image.ndim != 2 or image.shape[0] != _SIDE**2 or not image.size:
        raise bad(path, f"{_IMAGE} is {image.dtype} {list(image.shape)}; uint8 [{_SIDE**2} n] is wanted")
    count = image.shape[1]
    if label.shape not in ((1, count), (count, 1)):
        raise bad(path, f"{_LABEL} has shape {list(label.shape)}; [1 {count}] is wanted, one for each image")
    if not np.isin(label, np.arange(10)).all():
        raise bad(path, f"{_LABEL} has values other than the digits 0 to 9")
    return image.T.reshape(count, _SIDE, _SIDE), label.reshape(count).astype(np.int64)  # [n h w], [n]


def _variable(stream: Stream) -> dict[str, NDArray[Any]] | None:
    """The fields we want of the next variable, or None if it is another one."""
    kind, size = stream.unpack("<II")
    body = stream.part(size)
    if kind == _COMPRESSED:
        inner = body.inflated(_ZLIB_BITS, MOST)
        kind, size = inner.unpack("<II")
        matrix = inner.part(size)
        found = _fields_of(kind, matrix)
        if found is not None:
            inner.end()
        body.drain()
        return found
    found = _fields_of(kind, body)
    body.drain()
    stream.skip(-size % 8)
    return found


def _fields_of(kind: int, matrix: Stream) -> dict[str, NDArray[Any]] | None:
    head = _head(kind, matrix)
    if head.name != _STRUCT:
        return None
    if head.kind != _CLASS_STRUCT or head.shape != (1, 1):
        raise bad(matrix.path, f"{_STRUCT} has class {head.kind} and shape {list(head.shape)}; one struct is wanted")
    found = {}
    for name in _field_names(matrix):
        kind, size = matrix.unpack("<II")
        field = matrix.part(size)
        if name in (_IMAGE, _LABEL):
            found[name] = _numeric(kind, field, name)
            field.end()
        field.drain()
        matrix.skip(-size % 8)
    matrix.end()
    return found


def _field_names(matrix: Stream) -> list[str]:
    width = _values(matrix, _LONGEST_HEADER)
    text = _values(matrix, _LONGEST_HEADER).tobytes()
    if width.size != 1 or not 1 <= width[0] <= 64 or len(text) % int(width[0]) or len(text) > _MOST_FIELDS * width[0]:
        raise bad(matrix.path, f"the table of field names of {_STRUCT} is damaged")
    step = int(width[0])
    names = [text[i : i + step].partition(b"\0")[0].decode("latin-1") for i in range(0, len(text), step)]
    if len(set(names)) < len(names):
        raise bad(matrix.path, f"two fields of {_STRUCT} have one name; it is damaged")
    return names


def _numeric(kind: int, field: Stream, name: str) -> NDArray[Any]:
    """A field's values as MATLAB means them: column-major, of any real type."""
    head = _head(kind, field)
    if head.kind not in _NUMERIC_CLASSES or head.complex:
        raise bad(field.path, f"{name} has class {head.kind}; a matrix of real numbers is wanted")
    values = _values(field, MOST)
    if head.kind == _CLASS_UINT8 and values.dtype != np.uint8:
        raise bad(field.path, f"{name} is of class uint8 but its values are stored as {values.dtype}; it is damaged")
    if len(head.shape) != 2 or head.shape[0] * head.shape[1] != values.size:
        raise bad(field.path, f"{name} has {values.size} values for the shape {list(head.shape)}; it is damaged")
    return values.reshape(head.shape, order="F")


def _head(kind: int, matrix: Stream) -> _Head:
    if kind != _MATRIX:
        raise bad(matrix.path, f"has an element of type {kind} where a matrix (14) is wanted; it is damaged")
    flags, shape, name = (_values(matrix, _LONGEST_HEADER) for _ in range(3))
    if flags.dtype != np.uint32 or flags.size != 2 or shape.dtype != np.int32 or not 2 <= shape.size <= 32:
        raise bad(matrix.path, "the header of a matrix is damaged")
    sizes = tuple(int(n) for n in shape)
    if min(sizes) < 0:
        raise bad(matrix.path, f"a matrix has the shape {list(sizes)}; it is damaged")
    word = int(flags[0])
    return _Head(word & 0xFF, bool(word & _COMPLEX), sizes, name.tobytes().decode("latin-1"))


def _values(stream: Stream, most: int) -> NDArray[Any]:
    """The next element as a flat array of at most `most` bytes."""
    tag = stream.take(8)
    word, size = (int.from_bytes(tag[i : i + 4], "little") for i in (0, 4))
    small = word >> 16
    kind, size = (word & 0xFFFF, small) if small else (word, size)
    if kind not in _TYPES or (small and size > 4) or size % np.dtype(_TYPES[kind]).itemsize or size > most:
        raise bad(stream.path, f"has an element of type {kind} and {size:,} bytes, which is not numbers or too long")
    dtype = np.dtype(_TYPES[kind])
    if small:
        return np.frombuffer(tag[4 : 4 + size], dtype)
    values = stream.array((size // dtype.itemsize,), dtype)
    stream.skip(-size % 8)
    return values
