"""Dynamic routing, back through one pass: from ds of its sum to dq; equations and arrays as in `loops.dynamic`."""

from __future__ import annotations

from typing import Any

import numpy as np

from torchcaps.kernels.loops import loop, part
from torchcaps.kernels.loops.dynamic import NEAR, ROWS, along, gather, inverse_length, vote
from torchcaps.kernels.loops.vector import fill, fma, load, store

__all__ = ["pull_children", "pull_parents"]

Array = Any  # numpy arrays; inside a loop also vectors of lanes


@part
def pull(
    V: Array, row: int, e: Array, Q: Array, floor: float, E: Array, U: Array, n: int, i: int, j: int, L: int
) -> Array:
    """From e = db: what goes with V into dq, kept as E; and for cosines what goes with V into dV, added to U."""
    if floor > 0:
        inverse = inverse_length(V, row, floor)
        e = e * inverse
        b = (along(V, row, Q, n, j) * inverse) * inverse
        store(U, (i, j, n * L), load(U, (i, j, n * L)) - (e * b))
    store(E, (i, j, n * L), e)
    return e


@loop
def pull_parents(
    W: Array,
    X: Array,
    Q: Array,
    floor: float,
    C: Array,
    dS: Array,
    E: Array,
    U: Array,
    dQ: Array,
    start: int,
    stop: int,
) -> None:
    """dq += sum_i db V, for a softmax over parents; E and U are what `scatter` takes."""
    (I, J, K, _), L = W.shape, X.shape[3]
    V, dc = np.empty((J, K, L), W.dtype), np.empty((J, L), W.dtype)
    for first in range(0, I, NEAR):
        for n in range(start, stop):
            for i in range(first, min(I, first + NEAR)):
                mean = fill(X, 0.0)
                for j in range(J):
                    each = vote(W, X, dS, n, i, j, V, j)
                    store(dc, (j,), each)
                    mean = fma(each, load(C, (i, j, n * L)), mean)
                for j in range(J):
                    e = load(C, (i, j, n * L)) * (load(dc, (j,)) - mean)
                    store(dc, (j,), pull(V, j, e, Q, floor, E, U, n, i, j, L))
                    gather(dQ, n, j, V, j, 1, dc)


@loop
def pull_children(
    W: Array,
    X: Array,
    Q: Array,
    floor: float,
    C: Array,
    dS: Array,
    mean: Array,
    E: Array,
    U: Array,
    dQ: Array,
    blocks: Array,
    parents: Array,
) -> None:
    """dq += sum_i db V, for a softmax over children; mean [n j L] is s . ds."""
    (I, _, K, _), L = W.shape, X.shape[3]
    V, e = np.empty((ROWS, K, L), W.dtype), np.empty((ROWS, L), W.dtype)
    for first in range(0, I, ROWS):
        rows = min(ROWS, I - first)
        for j in range(parents[0], parents[1]):
            for n in range(blocks[0], blocks[1]):
                for r in range(rows):
                    dc = vote(W, X, dS, n, first + r, j, V, r) - load(mean, (n, j))
                    db = load(C, (first + r, j, n * L)) * dc
                    store(e, (r,), pull(V, r, db, Q, floor, E, U, n, first + r, j, L))
                gather(dQ, n, j, V, 0, rows, e)
