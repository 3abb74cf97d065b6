"""Dynamic routing, back through one pass: from ds of its sum to dq; equations and arrays as in `loops.dynamic`."""

from __future__ import annotations

from typing import Any

import numpy as np

from torchcaps.kernels.loops import loop
from torchcaps.kernels.loops.dynamic import NEAR, ROWS, along, gather, inverse_length, normalize, vote
from torchcaps.kernels.loops.elementary import exp
from torchcaps.kernels.loops.simd import fill, fma, larger, load, store

__all__ = ["pull_children", "pull_parents"]

Array = Any  # numpy arrays; inside a loop also vectors of lanes


@loop
def pull_parents(
    W: Array, X: Array, Q: Array, floor: float, dS: Array, Z: Array, dQ: Array, start: int, stop: int
) -> None:
    """dq += sum_i db V, for a softmax over parents, whose top, part and mean go into Z [3 i 1 (n L)]."""
    (I, J, K, _) = W.shape
    L = X.shape[3]
    V = np.empty((J, K, L), W.dtype)
    c = np.empty((J, L), W.dtype)
    dc = np.empty((J, L), W.dtype)
    inverse = np.empty((J, L), W.dtype)
    for first in range(0, I, NEAR):
        for n in range(start, stop):
            for i in range(first, min(I, first + NEAR)):
                top = fill(X, -np.inf)
                for j in range(J):
                    b = vote(W, X, Q, n, i, j, V, j)
                    store(dc, (j,), along(V, j, dS, n, j))
                    if floor > 0:
                        store(inverse, (j,), inverse_length(V, j, floor))
                        b = b * load(inverse, (j,))
                    store(c, (j,), b)
                    top = larger(top, b)
                share = normalize(c, top)
                mean = fill(X, 0.0)
                for j in range(J):
                    mean = fma(load(c, (j,)) * share, load(dc, (j,)), mean)
                store(Z, (0, i, 0, n * L), top)
                store(Z, (1, i, 0, n * L), share)
                store(Z, (2, i, 0, n * L), mean)
                for j in range(J):
                    e = (load(c, (j,)) * share) * (load(dc, (j,)) - mean)
                    if floor > 0:
                        e = e * load(inverse, (j,))
                    store(c, (j,), e)
                    gather(dQ, n, j, V, j, 1, c)


@loop
def pull_children(
    W: Array, X: Array, Q: Array, floor: float, dS: Array, Z: Array, dQ: Array, blocks: Array, parents: Array
) -> None:
    """dq += sum_i db V, for a softmax over children, whose top, part and mean are in Z [3 1 j (n L)]."""
    (I, _, K, _) = W.shape
    L = X.shape[3]
    V = np.empty((ROWS, K, L), W.dtype)
    e = np.empty((ROWS, L), W.dtype)
    for first in range(0, I, ROWS):
        rows = min(ROWS, I - first)
        for j in range(parents[0], parents[1]):
            for n in range(blocks[0], blocks[1]):
                top = load(Z, (0, 0, j, n * L))
                share = load(Z, (1, 0, j, n * L))
                mean = load(Z, (2, 0, j, n * L))
                for r in range(rows):
                    b = vote(W, X, Q, n, first + r, j, V, r)
                    dc = along(V, r, dS, n, j) - mean
                    if floor > 0:
                        inverse = inverse_length(V, r, floor)
                        b = b * inverse
                        dc = dc * inverse
                    store(e, (r,), ((exp(b - top) * share) * dc))
                gather(dQ, n, j, V, 0, rows, e)
