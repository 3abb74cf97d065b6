"""Dynamic routing as passes over the children, in each of which a vote is made once, used and forgotten.

With accumulated logits b_ij = V_ij . v_1 + V_ij . v_2 + ... = V_ij . q_j, where q is the sum of the parents so far (of
their directions, and V_ij / |V_ij|, for cosines). So no logit need be kept: routing is attention whose keys are its
values. One pass is s = sum_i softmax(V . q) V, and its derivatives, for the given ds and with c = softmax(V . q), are

    dc = V . ds      db = c (dc - sum c dc)      dq = sum_i db V      dV = c ds + db q

The sum of c dc over parents is the child's own affair; over children it is s . ds, known beforehand. For cosines V is
V / |V| in b and dq, which adds -(db b / |V|^2) V to dV, where db q becomes db q / |V|.

The arrays, with blocks of L samples, one in each lane:

    W [i j k d]    X [i n d L]    Q, S, dS, dQ [n j k L]    C, E, U [i j (n L)]    V [.. k L], the votes of the moment

C is the coupling; E is db, or db / |V|; U is the factor of V in dV. All votes are made for four k at once, and a few
children at a time for all blocks, so that their W stays in the cache.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from torchcaps.kernels.loops import loop
from torchcaps.kernels.loops.vector import (
    add,
    div,
    exp,
    fill,
    fma,
    half,
    larger,
    load,
    mul,
    none,
    part,
    raise_by,
    root,
    spread,
    store,
    sub,
    total,
    totals,
)

__all__ = [
    "from_lanes",
    "grad",
    "pull_children",
    "pull_parents",
    "reverse",
    "route_children",
    "route_parents",
    "scatter",
    "to_lanes",
    "weigh",
]

Array = Any  # numpy arrays; inside a loop also vectors of lanes
ROWS = 8
"""Children whose votes for one parent are kept at once."""
NEAR = 16
"""Children whose weights are kept near while all blocks pass."""


# --- Lanes ----------------------------------------------------------------------------------------------------------


@loop
def to_lanes(x: Array, X: Array, start: int, stop: int) -> None:
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
def from_lanes(X: Array, x: Array, start: int, stop: int) -> None:
    """X, seen as [n i d L], -> x [b i d], the blocks from start to stop."""
    _, I, D, L = X.shape
    for n in range(start, stop):
        for lane in range(min(L, x.shape[0] - n * L)):
            for i in range(I):
                for d in range(D):
                    x[n * L + lane, i, d] = X[n, i, d, lane]


# --- One child and one parent ---------------------------------------------------------------------------------------


@part
def vote(W: Array, X: Array, Q: Array, n: int, i: int, j: int, V: Array, row: int) -> Array:
    """V[row] = W_ij x_i; returns V_ij . q_j."""
    K, D = W.shape[2], W.shape[3]
    b = fill(X, 0.0)
    for k in range(0, K - 3, 4):
        v0 = v1 = v2 = v3 = fill(X, 0.0)
        for d in range(D):
            x = load(X, (i, n, d))
            v0 = fma(spread(W, (i, j, k, d)), x, v0)
            v1 = fma(spread(W, (i, j, k + 1, d)), x, v1)
            v2 = fma(spread(W, (i, j, k + 2, d)), x, v2)
            v3 = fma(spread(W, (i, j, k + 3, d)), x, v3)
        store(V, (row, k), v0)
        store(V, (row, k + 1), v1)
        store(V, (row, k + 2), v2)
        store(V, (row, k + 3), v3)
        b = fma(v0, load(Q, (n, j, k)), b)
        b = fma(v1, load(Q, (n, j, k + 1)), b)
        b = fma(v2, load(Q, (n, j, k + 2)), b)
        b = fma(v3, load(Q, (n, j, k + 3)), b)
    for k in range(K // 4 * 4, K):
        v = fill(X, 0.0)
        for d in range(D):
            v = fma(spread(W, (i, j, k, d)), load(X, (i, n, d)), v)
        store(V, (row, k), v)
        b = fma(v, load(Q, (n, j, k)), b)
    return b


@part
def inverse_length(V: Array, row: int, floor: float) -> Array:
    """1 / sqrt(|V[row]|^2 + floor)."""
    square = fill(V, floor)
    for k in range(V.shape[1]):
        v = load(V, (row, k))
        square = fma(v, v, square)
    return div(fill(V, 1.0), root(square))


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
        s0, s1 = load(S, (n, j, k)), load(S, (n, j, k + 1))
        s2, s3 = load(S, (n, j, k + 2)), load(S, (n, j, k + 3))
        for r in range(row, row + rows):
            c = load(weight, (r,))
            s0 = fma(c, load(V, (r, k)), s0)
            s1 = fma(c, load(V, (r, k + 1)), s1)
            s2 = fma(c, load(V, (r, k + 2)), s2)
            s3 = fma(c, load(V, (r, k + 3)), s3)
        store(S, (n, j, k), s0)
        store(S, (n, j, k + 1), s1)
        store(S, (n, j, k + 2), s2)
        store(S, (n, j, k + 3), s3)
    for k in range(K // 4 * 4, K):
        s = load(S, (n, j, k))
        for r in range(row, row + rows):
            s = fma(load(weight, (r,)), load(V, (r, k)), s)
        store(S, (n, j, k), s)


@part
def scale(S: Array, n: int, j: int, factor: Array) -> None:
    """s_j *= factor."""
    for k in range(S.shape[2]):
        store(S, (n, j, k), mul(factor, load(S, (n, j, k))))


# --- Passes ---------------------------------------------------------------------------------------------------------


@loop
def weigh(W: Array, X: Array, C: Array, share: float, S: Array, blocks: Array, parents: Array) -> None:
    """s_j = share sum_i c_ij V_ij; C without children stands for c = 1."""
    (I, _, D, L), K = X.shape, W.shape[2]
    cx = np.empty((NEAR, D, L), W.dtype)
    for first in range(0, I, NEAR):
        rows = min(NEAR, I - first)
        for j in range(parents[0], parents[1]):
            for n in range(blocks[0], blocks[1]):
                for r in range(rows):
                    c = fill(X, share)
                    if C.shape[0] > 0:
                        c = mul(c, load(C, (first + r, j, n * L)))
                    for d in range(D):
                        store(cx, (r, d), mul(c, load(X, (first + r, n, d))))
                for k in range(0, K - 3, 4):
                    s0, s1 = load(S, (n, j, k)), load(S, (n, j, k + 1))
                    s2, s3 = load(S, (n, j, k + 2)), load(S, (n, j, k + 3))
                    for r in range(rows):
                        i = first + r
                        for d in range(D):
                            x = load(cx, (r, d))
                            s0 = fma(spread(W, (i, j, k, d)), x, s0)
                            s1 = fma(spread(W, (i, j, k + 1, d)), x, s1)
                            s2 = fma(spread(W, (i, j, k + 2, d)), x, s2)
                            s3 = fma(spread(W, (i, j, k + 3, d)), x, s3)
                    store(S, (n, j, k), s0)
                    store(S, (n, j, k + 1), s1)
                    store(S, (n, j, k + 2), s2)
                    store(S, (n, j, k + 3), s3)
                for k in range(K // 4 * 4, K):
                    s = load(S, (n, j, k))
                    for r in range(rows):
                        for d in range(D):
                            s = fma(spread(W, (first + r, j, k, d)), load(cx, (r, d)), s)
                    store(S, (n, j, k), s)


@loop
def route_parents(
    W: Array, X: Array, Q: Array, floor: float, C: Array, S: Array, summed: bool, start: int, stop: int
) -> None:
    """C = softmax over parents of V . q and, if wanted, s += sum_i c_ij V_ij. A floor above 0: cosines."""
    (I, J, K, _), L = W.shape, X.shape[3]
    V, c = np.empty((J, K, L), W.dtype), np.empty((J, L), W.dtype)
    for first in range(0, I, NEAR):
        for n in range(start, stop):
            for i in range(first, min(I, first + NEAR)):
                top = fill(X, -np.inf)
                for j in range(J):
                    b = vote(W, X, Q, n, i, j, V, j)
                    if floor > 0:
                        b = mul(b, inverse_length(V, j, floor))
                    store(c, (j,), b)
                    top = larger(top, b)
                whole = fill(X, 0.0)
                for j in range(J):
                    e = exp(sub(load(c, (j,)), top))
                    store(c, (j,), e)
                    whole = add(whole, e)
                part = div(fill(X, 1.0), whole)
                for j in range(J):
                    e = mul(load(c, (j,)), part)
                    store(c, (j,), e)
                    store(C, (i, j, n * L), e)
                    if summed:
                        gather(S, n, j, V, j, 1, c)


@loop
def route_children(
    W: Array, X: Array, Q: Array, floor: float, C: Array, S: Array, summed: bool, blocks: Array, parents: Array
) -> None:
    """C = softmax over children of V . q and, if wanted, s += sum_i c_ij V_ij. A floor above 0: cosines.

    The softmax grows with the children: what came before is scaled down whenever a larger logit comes.
    """
    (I, J, K, _), (_, N, _, L) = W.shape, X.shape
    V, c = np.empty((ROWS, K, L), W.dtype), np.empty((ROWS, L), W.dtype)
    top, whole = np.full((N, J, L), -np.inf, W.dtype), np.zeros((N, J, L), W.dtype)
    for first in range(0, I, ROWS):
        rows = min(ROWS, I - first)
        for j in range(parents[0], parents[1]):
            for n in range(blocks[0], blocks[1]):
                old = new = load(top, (n, j))
                for r in range(rows):
                    b = vote(W, X, Q, n, first + r, j, V, r)
                    if floor > 0:
                        b = mul(b, inverse_length(V, r, floor))
                    store(c, (r,), b)
                    store(C, (first + r, j, n * L), b)
                    new = larger(new, b)
                shrink = exp(sub(old, new))
                z = mul(shrink, load(whole, (n, j)))
                for r in range(rows):
                    e = exp(sub(load(c, (r,)), new))
                    store(c, (r,), e)
                    z = add(z, e)
                store(top, (n, j), new)
                store(whole, (n, j), z)
                if summed:
                    scale(S, n, j, shrink)
                    gather(S, n, j, V, 0, rows, c)
    for j in range(parents[0], parents[1]):
        for n in range(blocks[0], blocks[1]):
            share = div(fill(X, 1.0), load(whole, (n, j)))
            store(whole, (n, j), share)
            scale(S, n, j, share)
    for i in range(I):
        for j in range(parents[0], parents[1]):
            for n in range(blocks[0], blocks[1]):
                b = sub(load(C, (i, j, n * L)), load(top, (n, j)))
                store(C, (i, j, n * L), mul(load(whole, (n, j)), exp(b)))


# --- Passes back ----------------------------------------------------------------------------------------------------


@part
def pull(
    V: Array, row: int, e: Array, Q: Array, floor: float, E: Array, U: Array, n: int, i: int, j: int, L: int
) -> Array:
    """From e = db: what goes with V into dq, kept as E; and for cosines what goes with V into dV, added to U."""
    if floor > 0:
        inverse = inverse_length(V, row, floor)
        e = mul(e, inverse)
        b = mul(mul(along(V, row, Q, n, j), inverse), inverse)
        store(U, (i, j, n * L), sub(load(U, (i, j, n * L)), mul(e, b)))
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
                    e = mul(load(C, (i, j, n * L)), sub(load(dc, (j,)), mean))
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
                    dc = sub(vote(W, X, dS, n, first + r, j, V, r), load(mean, (n, j)))
                    db = mul(load(C, (first + r, j, n * L)), dc)
                    store(e, (r,), pull(V, r, db, Q, floor, E, U, n, first + r, j, L))
                gather(dQ, n, j, V, 0, rows, e)


@part
def change(
    C: Array, dS: Array, E: Array, Q: Array, base: Array, block: int, rows: int, i: int, j: int, dV: Array
) -> None:
    """dV[r] = base[r] + sum_t c ds[t, r] + e q[t, r] for the blocks r from `block` on."""
    _, K, L = dV.shape
    for r in range(rows):
        at = (block + r) * L
        for k in range(0, K - 3, 4):
            g0, g1, g2, g3 = load(base, (r, k)), load(base, (r, k + 1)), load(base, (r, k + 2)), load(base, (r, k + 3))
            for t in range(C.shape[0]):
                c, e = load(C, (t, i, j, at)), load(E, (t, i, j, at))
                g0 = fma(c, load(dS, (t, r, k)), fma(e, load(Q, (t, r, k)), g0))
                g1 = fma(c, load(dS, (t, r, k + 1)), fma(e, load(Q, (t, r, k + 1)), g1))
                g2 = fma(c, load(dS, (t, r, k + 2)), fma(e, load(Q, (t, r, k + 2)), g2))
                g3 = fma(c, load(dS, (t, r, k + 3)), fma(e, load(Q, (t, r, k + 3)), g3))
            store(dV, (r, k), g0)
            store(dV, (r, k + 1), g1)
            store(dV, (r, k + 2), g2)
            store(dV, (r, k + 3), g3)
        for k in range(K // 4 * 4, K):
            g = load(base, (r, k))
            for t in range(C.shape[0]):
                g = fma(load(C, (t, i, j, at)), load(dS, (t, r, k)), g)
                g = fma(load(E, (t, i, j, at)), load(Q, (t, r, k)), g)
            store(dV, (r, k), g)


@part
def to_child(W: Array, dV: Array, block: int, rows: int, dX: Array, i: int, j: int) -> None:
    """dx_i += W_ij^T dV[r] for the blocks r from `block` on."""
    K, D = W.shape[2], W.shape[3]
    for n in range(block, block + rows):
        for d in range(0, D - 3, 4):
            x0, x1 = load(dX, (i, n, d)), load(dX, (i, n, d + 1))
            x2, x3 = load(dX, (i, n, d + 2)), load(dX, (i, n, d + 3))
            for k in range(K):
                g = load(dV, (n - block, k))
                x0 = fma(spread(W, (i, j, k, d)), g, x0)
                x1 = fma(spread(W, (i, j, k, d + 1)), g, x1)
                x2 = fma(spread(W, (i, j, k, d + 2)), g, x2)
                x3 = fma(spread(W, (i, j, k, d + 3)), g, x3)
            store(dX, (i, n, d), x0)
            store(dX, (i, n, d + 1), x1)
            store(dX, (i, n, d + 2), x2)
            store(dX, (i, n, d + 3), x3)
        for d in range(D // 4 * 4, D):
            x = load(dX, (i, n, d))
            for k in range(K):
                x = fma(spread(W, (i, j, k, d)), load(dV, (n - block, k)), x)
            store(dX, (i, n, d), x)


@part
def to_weight(dV: Array, X: Array, i: int, block: int, rows: int, dW: Array, child: int, j: int) -> None:
    """dW_ij += sum over the blocks r from `block` on of dV[r] x^T, for the child of dW that X has at place i."""
    (_, _, K, D), L = dW.shape, X.shape[3]
    h = L // 2
    for k in range(0, K - 1, 2):
        for d in range(0, D - 3, 4):
            a0 = a1 = a2 = a3 = b0 = b1 = b2 = b3 = none(half(X, (i, block, d, 0)))
            for r in range(rows):
                n = block + r
                v, u = half(dV, (r, k, 0)), half(dV, (r, k + 1, 0))
                x0, x1 = half(X, (i, n, d, 0)), half(X, (i, n, d + 1, 0))
                x2, x3 = half(X, (i, n, d + 2, 0)), half(X, (i, n, d + 3, 0))
                a0, a1, a2, a3 = fma(v, x0, a0), fma(v, x1, a1), fma(v, x2, a2), fma(v, x3, a3)
                b0, b1, b2, b3 = fma(u, x0, b0), fma(u, x1, b1), fma(u, x2, b2), fma(u, x3, b3)
                v, u = half(dV, (r, k, h)), half(dV, (r, k + 1, h))
                x0, x1 = half(X, (i, n, d, h)), half(X, (i, n, d + 1, h))
                x2, x3 = half(X, (i, n, d + 2, h)), half(X, (i, n, d + 3, h))
                a0, a1, a2, a3 = fma(v, x0, a0), fma(v, x1, a1), fma(v, x2, a2), fma(v, x3, a3)
                b0, b1, b2, b3 = fma(u, x0, b0), fma(u, x1, b1), fma(u, x2, b2), fma(u, x3, b3)
            raise_by(dW, (child, j, k, d), totals(a0, a1, a2, a3))
            raise_by(dW, (child, j, k + 1, d), totals(b0, b1, b2, b3))
    for k in range(K):
        for d in range(D // 4 * 4 if k < K // 2 * 2 else 0, D):
            a = fill(X, 0.0)
            for r in range(rows):
                a = fma(load(dV, (r, k)), load(X, (i, block + r, d)), a)
            dW[child, j, k, d] += total(a)


@part
def together(A: Array, block: int, rows: int, j: int, A_j: Array) -> None:
    """A_j[r] = A[block + r, j]: what belongs to one parent, side by side in the cache."""
    for r in range(rows):
        for k in range(A_j.shape[1]):
            store(A_j, (r, k), load(A, (block + r, j, k)))


@loop
def reverse(W: Array, C: Array, H: Array, dX: Array, start: int, stop: int) -> None:
    """dx_i += sum_j c_ij W_ij^T h_j for the children from start to stop."""
    N, J, K, L = H.shape
    H_j, cH = np.empty((ROWS, K, L), W.dtype), np.empty((ROWS, K, L), W.dtype)
    for block in range(0, N, ROWS):
        rows = min(ROWS, N - block)
        for first in range(start, stop, NEAR):
            for j in range(J):
                together(H, block, rows, j, H_j)
                for i in range(first, min(stop, first + NEAR)):
                    for r in range(rows):
                        c = load(C, (i, j, (block + r) * L))
                        for k in range(K):
                            store(cH, (r, k), mul(c, load(H_j, (r, k))))
                    to_child(W, cH, block, rows, dX, i, j)


@loop
def grad(X: Array, C: Array, A: Array, dW: Array, start: int, stop: int) -> None:
    """dW_ij += sum_b c_ij a_j x_i^T for the children from start to stop."""
    (N, J, K, L), D = A.shape, X.shape[2]
    A_j, cx = np.empty((ROWS, K, L), X.dtype), np.empty((1, ROWS, D, L), X.dtype)
    for block in range(0, N, ROWS):
        rows = min(ROWS, N - block)
        for first in range(start, stop, NEAR):
            for j in range(J):
                together(A, block, rows, j, A_j)
                for i in range(first, min(stop, first + NEAR)):
                    for r in range(rows):
                        c = load(C, (i, j, (block + r) * L))
                        for d in range(D):
                            store(cx, (0, r, d), mul(c, load(X, (i, block + r, d))))
                    to_weight(A_j, cx, 0, 0, rows, dW, i, j)


@part
def turn(W: Array, X: Array, U: Array, V: Array, base: Array, block: int, rows: int, i: int, j: int, dV: Array) -> None:
    """dV[r] += u V for the blocks r from `block` on."""
    L = X.shape[3]
    for r in range(rows):
        vote(W, X, base, block + r, i, j, V, 0)
        u = load(U, (i, j, (block + r) * L))
        for k in range(V.shape[1]):
            store(dV, (r, k), fma(u, load(V, (0, k)), load(dV, (r, k))))


@loop
def scatter(
    W: Array, X: Array, C: Array, dS: Array, E: Array, Q: Array, U: Array, base: Array, dX: Array, dW: Array,
    start: int, stop: int,
) -> None:  # fmt: skip
    """dx_i += sum_j W_ij^T dV_ij and dW_ij += sum_b dV_ij x_i^T, with dV = base + sum_t (c_t ds_t + e_t q_t) + u V.

    C, E [t i j (n L)], dS, Q [t n j k L]; U without children is none. The children from start to stop.
    """
    (_, J, K, _), (_, N, _, L), T = W.shape, X.shape, len(C)
    dV, V, base_j = np.empty((ROWS, K, L), W.dtype), np.empty((1, K, L), W.dtype), np.empty((ROWS, K, L), W.dtype)
    dS_j, Q_j = np.empty((T, ROWS, K, L), W.dtype), np.empty((T, ROWS, K, L), W.dtype)
    for block in range(0, N, ROWS):
        rows = min(ROWS, N - block)
        for first in range(start, stop, NEAR):
            for j in range(J):
                together(base, block, rows, j, base_j)
                for t in range(T):
                    together(dS[t], block, rows, j, dS_j[t])
                    together(Q[t], block, rows, j, Q_j[t])
                for i in range(first, min(stop, first + NEAR)):
                    change(C, dS_j, E, Q_j, base_j, block, rows, i, j, dV)
                    if U.shape[0] > 0:
                        turn(W, X, U, V, base, block, rows, i, j, dV)
                    to_child(W, dV, block, rows, dX, i, j)
                    to_weight(dV, X, i, block, rows, dW, i, j)
