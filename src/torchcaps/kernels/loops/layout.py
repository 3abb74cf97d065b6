"""Samples into lanes and back: blocks of L samples, of each number the L values side by side."""

from __future__ import annotations

from typing import Any

from torchcaps.kernels.loops import loop

__all__ = ["from_lanes", "to_lanes"]


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
