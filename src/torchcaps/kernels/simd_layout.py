"""Lay samples out in SIMD blocks, as compiled loops want them, and back.

A block holds L samples, of each number the L values side by side, so that one instruction works on all of them. A batch
is padded to whole blocks.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any, TypeAlias

import torch
from numpy.typing import NDArray
from torch import Tensor

from torchcaps.kernels.records import VECTOR_BYTES
from torchcaps.kernels.threads import in_threads

__all__ = ["as_array", "block_size", "from_blocks", "has_loops", "loops", "padded", "to_blocks"]

AnyArray: TypeAlias = NDArray[Any]


def has_loops(*tensors: Tensor) -> bool:
    """Return whether there are compiled loops for these tensors: on the CPU, all float32 or all float64."""
    kinds = {t.dtype for t in tensors}
    return all(t.device.type == "cpu" for t in tensors) and len(kinds) == 1 and kinds <= {torch.float32, torch.float64}


@cache
def loops(name: str) -> ModuleType:
    """Import a module of `kernels.loops`; only when one of its loops runs, since numba is slow to import."""
    return import_module(f"torchcaps.kernels.loops.{name}")


def as_array(t: Tensor) -> AnyArray:
    """Return a contiguous tensor's memory, or a contiguous copy of another tensor, as an array."""
    array: AnyArray = t.detach().contiguous().numpy()
    return array


def block_size(dtype: torch.dtype, size: int = VECTOR_BYTES) -> int:
    """Return L, the samples in a block whose SIMD vectors have `size` bytes."""
    return size // dtype.itemsize


def padded(b: int, dtype: torch.dtype) -> int:
    """Return the batch size b rounded up to whole blocks."""
    L = block_size(dtype)
    return -(-b // L) * L


def to_blocks(x: Tensor, *, children: bool = False, size: int = VECTOR_BYTES) -> Tensor:
    """Lay a batch out in blocks.

    Args:
        x: [b j k], or children [b i d].
        children: Whether blocks come after the first axis.
        size: Bytes of a SIMD vector.

    Returns:
        [n j k L], or of children [i n d L]; samples that fill the last block are 0.
    """
    (b, i, d) = x.shape
    L = block_size(x.dtype, size)
    n = -(-b // L)
    X = x.new_empty(i, n, d, L) if children else x.new_empty(n, i, d, L)
    # Threads take blocks: blocks come first in the view that the loop gets, in memory after the children
    flat = as_array(x)
    blocks = (X.transpose(0, 1) if children else X).numpy()
    in_threads(lambda _, start, stop: loops("layout").to_blocks(flat, blocks, start, stop), n)
    return X


def from_blocks(X: Tensor, b: int) -> Tensor:
    """Return the first b samples of [n j k L], as `to_blocks` makes it, as [b j k]."""
    n, j, k, _ = X.shape
    x = X.new_empty(b, j, k)
    in_threads(lambda _, start, stop: loops("layout").from_blocks(X.numpy(), x.numpy(), start, stop), n)
    return x
