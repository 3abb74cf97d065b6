"""Samples into lanes and back: blocks of L samples, of each number the L values side by side."""

from __future__ import annotations

from typing import Any

from torchcaps.kernels.loops import loop, part

__all__ = ["collect", "deliver", "from_lanes", "to_lanes"]


@loop
def to_lanes(x: Any, X: Any, start: int, stop: int) -> None:
    """x [b i d] -> X, seen as [n i d L], the blocks from start to stop; lanes without a sample are 0."""
    _, I, D, L = X.shape
    for n in range(start, stop):
        here = min(L, x.shape[0] - n * L)
        for i in range(I):
            for d in range(D):
                for lane in range(here):
                    X[n, i, d, lane] = x[n * L + lane, i, d]
                for lane in range(here, L):
                    X[n, i, d, lane] = 0


@loop
def from_lanes(X: Any, x: Any, start: int, stop: int) -> None:
    """X, seen as [n i d L], -> x [b i d], the blocks from start to stop."""
    _, I, D, L = X.shape
    for n in range(start, stop):
        for lane in range(min(L, x.shape[0] - n * L)):
            for i in range(I):
                for d in range(D):
                    x[n * L + lane, i, d] = X[n, i, d, lane]


@part
def collect(x: Any, X: Any, block: int, rows: int, first: int, stop: int) -> None:
    """The children from first to stop of x [b i d] into X [.. r d L], so many blocks r from `block` on."""
    D = X.shape[2]
    L = X.shape[3]
    for b in range(block * L, (block + rows) * L):
        r = b // L - block
        lane = b % L
        for i in range(first, stop):
            for d in range(D):
                X[i - first, r, d, lane] = x[b, i, d] if b < len(x) else 0


@part
def deliver(X: Any, x: Any, block: int, rows: int, first: int, stop: int) -> None:
    """Back from X into x."""
    D = X.shape[2]
    L = X.shape[3]
    for b in range(block * L, min(len(x), (block + rows) * L)):
        r = b // L - block
        lane = b % L
        for i in range(first, stop):
            for d in range(D):
                x[b, i, d] = X[i - first, r, d, lane]
