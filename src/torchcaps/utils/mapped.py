"""Tensors in files that are mapped into memory: larger than memory, shared by processes, resident only while read.

The system loads a page of the file when it is first touched, and counts it as memory of the process until the mapping
is told that it is not needed. `take` does that after every `RELEASE` bytes, so that a process that goes through a file
again and again stays small; the pages themselves stay in the system's cache for as long as memory is free.
"""

from __future__ import annotations

import math
import mmap
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from weakref import WeakValueDictionary

import torch
from torch import Tensor

__all__ = ["RELEASE", "is_mapped", "map_file", "release", "scratch", "take"]

RELEASE = 1 << 26
"""Bytes that may be touched before the pages of a mapping are given back."""

_AROUND = 1 << 21
"""Bytes that the system may map around a page that is touched: systems with large pages of files map a whole one."""


class _Mapping(mmap.mmap):
    """A mapped file that counts the bytes touched since its pages were last given back."""

    touched = 0


_MAPPINGS: WeakValueDictionary[int, _Mapping] = WeakValueDictionary()
"""Address -> mapping, of all that a tensor still uses: views of a tensor share its address."""


def map_file(path: Path, shape: Sequence[int], dtype: torch.dtype = torch.uint8) -> Tensor:
    """Map a file of raw values; writing to the tensor changes this process's copy and never the file.

    Args:
        path: The file.
        shape: The shape of its values, none of which may be missing.
        dtype: Their type.

    Returns:
        A tensor of that shape.

    Raises:
        OSError: if the file cannot be opened.
        ValueError: if it does not have just that many bytes.
    """
    wanted = math.prod(shape) * dtype.itemsize
    with path.open("rb") as file:
        found = os.fstat(file.fileno()).st_size
        if found != wanted:
            raise ValueError(f"{path} has {found:,} bytes; {wanted:,} are wanted")
        mapping = _Mapping(file.fileno(), wanted, access=mmap.ACCESS_COPY)
    return _tensor(mapping, shape, dtype)


def scratch(folder: Path, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Make a tensor in a file without a name, whose space is free again when the tensor is gone, kill -9 included.

    Args:
        folder: A folder on the disk that shall hold it; it is made.
        shape: The shape of the tensor.
        dtype: Its type.

    Returns:
        A tensor of zeros, to be written to.

    Raises:
        OSError: if the folder cannot be written, or the disk has no room for it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    size = math.prod(shape) * dtype.itemsize
    with tempfile.TemporaryFile(dir=folder) as file:
        # Reserved now: a disk that is full later would end the process with a signal
        os.posix_fallocate(file.fileno(), 0, size)
        mapping = _Mapping(file.fileno(), size, access=mmap.ACCESS_WRITE)
    return _tensor(mapping, shape, dtype)


def is_mapped(tensor: Tensor) -> bool:
    """Tell whether a tensor, or what it is a view of, is a mapped file."""
    return tensor.untyped_storage().data_ptr() in _MAPPINGS


def take(tensor: Tensor, rows: Tensor | slice) -> Tensor:
    """Select rows of a tensor; of a mapped one they are copied, and its pages are given back now and then.

    Args:
        tensor: [n ...].
        rows: Numbers [b] of rows, or a range of them.

    Returns:
        [b ...]; of a tensor that is not mapped, a range is a view.
    """
    chosen = tensor[rows]
    mapping = _MAPPINGS.get(tensor.untyped_storage().data_ptr())
    if mapping is None:
        return chosen
    # A range is a view of the file until it is copied
    chosen = chosen.clone() if isinstance(rows, slice) else chosen
    extra = 0 if isinstance(rows, slice) else _AROUND * len(chosen)
    mapping.touched += chosen.nbytes + extra
    if mapping.touched >= RELEASE:
        _give_back(mapping)
    return chosen


def release(tensor: Tensor) -> None:
    """Give the pages of a mapped tensor back to the system, whatever was touched; values stay as they are."""
    mapping = _MAPPINGS.get(tensor.untyped_storage().data_ptr())
    if mapping is not None:
        _give_back(mapping)


def _give_back(mapping: _Mapping) -> None:
    mapping.touched = 0
    # Not every system knows the advice; there, the process merely looks larger than it is
    if hasattr(mmap, "MADV_DONTNEED"):
        mapping.madvise(mmap.MADV_DONTNEED)


def _tensor(mapping: _Mapping, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    tensor = torch.frombuffer(mapping, dtype=dtype).view(*shape)
    _MAPPINGS[tensor.untyped_storage().data_ptr()] = mapping
    return tensor
