"""Samples into SIMD blocks and back: a block holds L samples, of each number the L values side by side."""

from __future__ import annotations

from torchcaps.kernels.loops import inline, loop
from torchcaps.kernels.loops.simd import Array

__all__ = ["copy_from_blocks", "copy_to_blocks", "from_blocks", "to_blocks"]


@loop
def to_blocks(x: Array, X: Array, start: int, stop: int) -> None:
    """Copy x [b i d] into the blocks from start to stop of X [n i d L]; lanes without a sample are 0."""
    _, I, D, L = X.shape
    for n in range(start, stop):
        # Samples in this block; the last block may have fewer than L
        here = min(L, x.shape[0] - n * L)
        for i in range(I):
            for d in range(D):
                for lane in range(here):
                    X[n, i, d, lane] = x[n * L + lane, i, d]
                for lane in range(here, L):
                    X[n, i, d, lane] = 0


@loop
def from_blocks(X: Array, x: Array, start: int, stop: int) -> None:
    """Copy the blocks from start to stop of X [n i d L] into x [b i d]."""
    _, I, D, L = X.shape
    for n in range(start, stop):
        for lane in range(min(L, x.shape[0] - n * L)):
            for i in range(I):
                for d in range(D):
                    x[n * L + lane, i, d] = X[n, i, d, lane]


@inline
def copy_to_blocks(x: Array, X: Array, block: int, rows: int, first: int, stop: int) -> None:
    """Copy the children from first to stop of x [b i d] into X [.. r d L], `rows` blocks r from `block` on."""
    D = X.shape[2]
    L = X.shape[3]
    for b in range(block * L, (block + rows) * L):
        r = b // L - block
        lane = b % L
        for i in range(first, stop):
            for d in range(D):
                X[i - first, r, d, lane] = x[b, i, d] if b < len(x) else 0


@inline
def copy_from_blocks(X: Array, x: Array, block: int, rows: int, first: int, stop: int) -> None:
    """Copy back from X into x; samples that only fill the last block are left out."""
    D = X.shape[2]
    L = X.shape[3]
    for b in range(block * L, min(len(x), (block + rows) * L)):
        r = b // L - block
        lane = b % L
        for i in range(first, stop):
            for d in range(D):
                x[b, i, d] = X[i - first, r, d, lane]
