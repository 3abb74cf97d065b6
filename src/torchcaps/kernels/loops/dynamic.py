"""Dynamic routing as passes over the children, in each of which a vote is made once, used and forgotten.

With accumulated logits b_ij = V_ij . v_1 + V_ij . v_2 + ... = V_ij . q_j, where q is the sum of the parents so far (of
their directions, and V_ij / |V_ij|, for cosines). So no logit need be kept: routing is attention whose keys are its
values. One pass is s = sum_i softmax(V . q) V, and its derivatives, for the given ds and with c = softmax(V . q), are

    dc = V . ds      db = c (dc - sum c dc)      dq = sum_i db V      dV = c ds + db q

The sum of c dc over parents is the child's own affair; over children it is s . ds, known beforehand. For cosines V is
V / |V| in b and dq, which adds -(db b / |V|^2) V to dV, where db q becomes db q / |V|.

No coupling is kept for the way back either. With the vote made again, c = exp(V . q - top) part and db need only what
the softmax sums over: its largest logit `top`, `part` = 1 / sum exp(b - top) and `mean` = sum c dc. top and part stay
apart, since of their one logarithm large logits leave no digits; V . q is added up in the same order everywhere.

The arrays, with blocks of L samples, one in each lane:

    W [i j k d]    X [i n d L]    Q, S, dS, dQ [n j k L]    C [i j (n L)]    V [.. k L], the votes of the moment
    Z [3 i j (n L)], top, part and mean, with a single child or a single parent: the one that the softmax is over

All votes are made for four k at once, and a few children at a time for all blocks, so that their W stays in the cache.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from torchcaps.kernels.loops import loop, part
from torchcaps.kernels.loops.elementary import exp, root
from torchcaps.kernels.loops.simd import fill, fma, fma4, larger, load, load4, spread, store

__all__ = [
    "NEAR",
    "ROWS",
    "along",
    "gather",
    "inverse_length",
    "normalize",
    "route_children",
    "route_parents",
    "vote",
    "weigh",
]

Array = Any  # numpy arrays; inside a loop also vectors of lanes
ROWS = 8
"""Children whose votes for one parent are kept at once."""
NEAR = 16
"""Children whose weights are kept near while all blocks pass."""


# --- One child and one parent -----------------------------------------------------------------------------------------


@part
def column(W: Array, i: int, j: int, k: int, d: int) -> Array:
    """Four rows of W_ij from k on, in column d."""
    w0 = spread(W, (i, j, k, d))
    w1 = spread(W, (i, j, k + 1, d))
    return w0, w1, spread(W, (i, j, k + 2, d)), spread(W, (i, j, k + 3, d))


@part
def vote(W: Array, X: Array, Q: Array, n: int, i: int, j: int, V: Array, row: int) -> Array:
    """V[row] = W_ij x_i; returns V_ij . q_j."""
    K = W.shape[2]
    D = W.shape[3]
    zero = b = fill(X, 0.0)
    for k in range(0, K - 3, 4):
        v = zero, zero, zero, zero
        for d in range(D):
            v = fma4(load(X, (i, n, d)), column(W, i, j, k, d), v)
        store(V, (row, k), v)
        q = load4(Q, (n, j, k))
        b = fma(v[3], q[3], fma(v[2], q[2], fma(v[1], q[1], fma(v[0], q[0], b))))
    for k in range(K // 4 * 4, K):
        u = zero
        for d in range(D):
            u = fma(spread(W, (i, j, k, d)), load(X, (i, n, d)), u)
        store(V, (row, k), u)
        b = fma(u, load(Q, (n, j, k)), b)
    return b


@part
def inverse_length(V: Array, row: int, floor: float) -> Array:
    """1 / sqrt(|V[row]|^2 + floor)."""
    square = fill(V, floor)
    for k in range(V.shape[1]):
        v = load(V, (row, k))
        square = fma(v, v, square)
    return 1.0 / root(square)


@part
def along(V: Array, row: int, Q: Array, n: int, j: int) -> Array:
    """V[row] . q_j."""
    b = fill(V, 0.0)
    for k in range(V.shape[1]):
        b = fma(load(V, (row, k)), load(Q, (n, j, k)), b)
    return b


@part
def gather(S: Array, n: int, j: int, V: Array, row: int, rows: int, weight: Array) -> None:
    """s_j += sum over rows of weight[row] V[row]."""
    K = S.shape[2]
    for k in range(0, K - 3, 4):
        s = load4(S, (n, j, k))
        for r in range(row, row + rows):
            s = fma4(load(weight, r), load4(V, (r, k)), s)
        store(S, (n, j, k), s)
    for k in range(K // 4 * 4, K):
        t = load(S, (n, j, k))
        for r in range(row, row + rows):
            t = fma(load(weight, r), load(V, (r, k)), t)
        store(S, (n, j, k), t)


@part
def scale(S: Array, n: int, j: int, factor: Array) -> None:
    """s_j *= factor."""
    for k in range(S.shape[2]):
        store(S, (n, j, k), factor * load(S, (n, j, k)))


@part
def normalize(c: Array, top: Array) -> Array:
    """Logits c [j L] -> exp(c - top); returns 1 / their sum."""
    whole = fill(c, 0.0)
    for j in range(c.shape[0]):
        e = exp(load(c, (j,)) - top)
        store(c, (j,), e)
        whole = whole + e
    return 1.0 / whole


# --- Passes -----------------------------------------------------------------------------------------------------------


@loop
def weigh(W: Array, X: Array, C: Array, share: float, S: Array, blocks: Array, parents: Array) -> None:
    """s_j = share sum_i c_ij V_ij; C without children stands for c = 1."""
    (I, _, D, L) = X.shape
    K = W.shape[2]
    cx = np.empty((NEAR, D, L), W.dtype)
    for first in range(0, I, NEAR):
        rows = min(NEAR, I - first)
        for j in range(parents[0], parents[1]):
            for n in range(blocks[0], blocks[1]):
                for r in range(rows):
                    c = fill(X, share)
                    if C.shape[0] > 0:
                        c = c * load(C, (first + r, j, n * L))
                    for d in range(D):
                        store(cx, (r, d), c * load(X, (first + r, n, d)))
                for k in range(0, K - 3, 4):
                    s = load4(S, (n, j, k))
                    for r in range(rows):
                        for d in range(D):
                            s = fma4(load(cx, (r, d)), column(W, first + r, j, k, d), s)
                    store(S, (n, j, k), s)
                for k in range(K // 4 * 4, K):
                    t = load(S, (n, j, k))
                    for r in range(rows):
                        for d in range(D):
                            t = fma(spread(W, (first + r, j, k, d)), load(cx, (r, d)), t)
                    store(S, (n, j, k), t)


@loop
def route_parents(W: Array, X: Array, Q: Array, floor: float, C: Array, S: Array, start: int, stop: int) -> None:
    """s += sum_i c_ij V_ij with c = softmax over parents of V . q, kept in C unless that is empty.

    A floor above 0: cosines.
    """
    (I, J, K, _) = W.shape
    L = X.shape[3]
    V = np.empty((J, K, L), W.dtype)
    c = np.empty((J, L), W.dtype)
    for first in range(0, I, NEAR):
        for n in range(start, stop):
            for i in range(first, min(I, first + NEAR)):
                top = fill(X, -np.inf)
                for j in range(J):
                    b = vote(W, X, Q, n, i, j, V, j)
                    if floor > 0:
                        b = b * inverse_length(V, j, floor)
                    store(c, (j,), b)
                    top = larger(top, b)
                share = normalize(c, top)
                for j in range(J):
                    e = load(c, (j,)) * share
                    store(c, (j,), e)
                    if C.shape[0] > 0:
                        store(C, (i, j, n * L), e)
                    gather(S, n, j, V, j, 1, c)


@loop
def route_children(
    W: Array, X: Array, Q: Array, floor: float, C: Array, S: Array, Z: Array, blocks: Array, parents: Array
) -> None:
    """As `route_parents` with c = softmax over children of V . q, whose top and part go into Z [2 j (n L)].

    The softmax grows with the children: what came before is scaled down whenever a larger logit comes.
    """
    (I, _, K, _) = W.shape
    L = X.shape[3]
    V = np.empty((ROWS, K, L), W.dtype)
    c = np.empty((ROWS, L), W.dtype)
    for j in range(parents[0], parents[1]):
        for n in range(blocks[0], blocks[1]):
            store(Z, (0, j, n * L), fill(X, -np.inf))
            store(Z, (1, j, n * L), fill(X, 0.0))
    for first in range(0, I, ROWS):
        rows = min(ROWS, I - first)
        for j in range(parents[0], parents[1]):
            for n in range(blocks[0], blocks[1]):
                old = new = load(Z, (0, j, n * L))
                for r in range(rows):
                    b = vote(W, X, Q, n, first + r, j, V, r)
                    if floor > 0:
                        b = b * inverse_length(V, r, floor)
                    store(c, (r,), b)
                    if C.shape[0] > 0:
                        store(C, (first + r, j, n * L), b)
                    new = larger(new, b)
                shrink = exp(old - new)
                z = shrink * load(Z, (1, j, n * L))
                for r in range(rows):
                    e = exp(load(c, (r,)) - new)
                    store(c, (r,), e)
                    z = z + e
                store(Z, (0, j, n * L), new)
                store(Z, (1, j, n * L), z)
                scale(S, n, j, shrink)
                gather(S, n, j, V, 0, rows, c)
    for j in range(parents[0], parents[1]):
        for n in range(blocks[0], blocks[1]):
            share = fill(X, 1.0) / load(Z, (1, j, n * L))
            store(Z, (1, j, n * L), share)
            scale(S, n, j, share)
    for i in range(C.shape[0]):
        for j in range(parents[0], parents[1]):
            for n in range(blocks[0], blocks[1]):
                b = load(C, (i, j, n * L)) - load(Z, (0, j, n * L))
                store(C, (i, j, n * L), load(Z, (1, j, n * L)) * exp(b))
