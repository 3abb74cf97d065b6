"""What a derivative dV of the votes means for children and weights, dx_i = sum_j W_ij^T dV_ij and dW_ij = dV_ij x_i^T.

The last pass of dynamic routing backwards, and with dV = c h the sums of contrastive divergence; equations and arrays
as in `loops.dynamic`. A loop works on some of the children, whose dx and dW belong to it alone.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from torchcaps.kernels.loops import loop, part
from torchcaps.kernels.loops.dynamic import NEAR, ROWS, inverse_length, vote
from torchcaps.kernels.loops.elementary import exp
from torchcaps.kernels.loops.layout import collect, deliver
from torchcaps.kernels.loops.simd import fill, fma, fma4, half, load, load4, raise_by, spread, store, total, totals

__all__ = ["grad", "reverse", "scatter"]

Array = Any  # numpy arrays; inside a loop also vectors of lanes


@part
def to_child(W: Array, i: int, j: int, dV: Array, rows: int, dX: Array, child: int) -> None:
    """dX[child, r] += W_ij^T dV[r] for so many rows r."""
    K = W.shape[2]
    D = W.shape[3]
    for r in range(rows):
        for d in range(0, D - 3, 4):
            x = load4(dX, (child, r, d))
            for k in range(K):
                w0 = spread(W, (i, j, k, d))
                w1 = spread(W, (i, j, k, d + 1))
                w2 = spread(W, (i, j, k, d + 2))
                w3 = spread(W, (i, j, k, d + 3))
                x = fma4(load(dV, (r, k)), (w0, w1, w2, w3), x)
            store(dX, (child, r, d), x)
        for d in range(D // 4 * 4, D):
            y = load(dX, (child, r, d))
            for k in range(K):
                y = fma(spread(W, (i, j, k, d)), load(dV, (r, k)), y)
            store(dX, (child, r, d), y)


@part
def clear(dX: Array, rows: int) -> None:
    """dX[:, :rows] = 0."""
    for child in range(dX.shape[0]):
        for r in range(rows):
            for d in range(dX.shape[2]):
                store(dX, (child, r, d), fill(dX, 0.0))


@part
def to_weight(dV: Array, X: Array, i: int, block: int, rows: int, dW: Array, child: int, j: int) -> None:
    """dW_ij += sum over the blocks r from `block` on of dV[r] x^T, for the child of dW that X has at place i."""
    (_, _, K, D) = dW.shape
    L = X.shape[3]
    for k in range(0, K - 1, 2):
        for d in range(0, D - 3, 4):
            zero = fill(half(X, (i, block, d, 0)), 0.0)
            a = b = (zero, zero, zero, zero)
            for r in range(rows):
                n = block + r
                for at in (0, L // 2):
                    x0 = half(X, (i, n, d, at))
                    x1 = half(X, (i, n, d + 1, at))
                    x2 = half(X, (i, n, d + 2, at))
                    x3 = half(X, (i, n, d + 3, at))
                    a = fma4(half(dV, (r, k, at)), (x0, x1, x2, x3), a)
                    b = fma4(half(dV, (r, k + 1, at)), (x0, x1, x2, x3), b)
            raise_by(dW, (child, j, k, d), totals(*a))
            raise_by(dW, (child, j, k + 1, d), totals(*b))
    for k in range(K):
        for d in range(D // 4 * 4 if k < K // 2 * 2 else 0, D):
            s = fill(X, 0.0)
            for r in range(rows):
                s = fma(load(dV, (r, k)), load(X, (i, block + r, d)), s)
            dW[child, j, k, d] += total(s)


@part
def together(A: Array, block: int, rows: int, j: int, A_j: Array) -> None:
    """A_j[r] = A[block + r, j]: what belongs to one parent, side by side in the cache."""
    for r in range(rows):
        for k in range(A_j.shape[1]):
            store(A_j, (r, k), load(A, (block + r, j, k)))


@loop
def reverse(W: Array, C: Array, H: Array, dx: Array, start: int, stop: int) -> None:
    """dx_i = sum_j c_ij W_ij^T h_j, as [b i d], for the children from start to stop."""
    (N, J, K, L) = H.shape
    D = W.shape[3]
    H_j = np.empty((ROWS, K, L), W.dtype)
    cH = np.empty((ROWS, K, L), W.dtype)
    dX = np.empty((NEAR, ROWS, D, L), W.dtype)
    for block in range(0, N, ROWS):
        rows = min(ROWS, N - block)
        for first in range(start, stop, NEAR):
            end = min(stop, first + NEAR)
            clear(dX, rows)
            for j in range(J):
                together(H, block, rows, j, H_j)
                for i in range(first, end):
                    for r in range(rows):
                        c = load(C, (i, j, (block + r) * L))
                        for k in range(K):
                            store(cH, (r, k), c * load(H_j, (r, k)))
                    to_child(W, i, j, cH, rows, dX, i - first)
            deliver(dX, dx, block, rows, first, end)


@loop
def grad(X: Array, C: Array, A: Array, dW: Array, start: int, stop: int) -> None:
    """dW_ij += sum_b c_ij a_j x_i^T for the children from start to stop."""
    (N, J, K, L) = A.shape
    D = X.shape[2]
    A_j = np.empty((ROWS, K, L), X.dtype)
    cx = np.empty((1, ROWS, D, L), X.dtype)
    for block in range(0, N, ROWS):
        rows = min(ROWS, N - block)
        for first in range(start, stop, NEAR):
            for j in range(J):
                together(A, block, rows, j, A_j)
                for i in range(first, min(stop, first + NEAR)):
                    for r in range(rows):
                        c = load(C, (i, j, (block + r) * L))
                        for d in range(D):
                            store(cx, (0, r, d), c * load(X, (i, block + r, d)))
                    to_weight(A_j, cx, 0, 0, rows, dW, i, j)


@part
def shares(V: Array, r: int, Q: Array, dS: Array, floor: float, Z: Array, i: int, j: int, at: int, ce: Array) -> Array:
    """ce[t] = c and what goes with q into dV, of every iteration t; returns what goes with V, which is 0 for dots."""
    turn = fill(V, 0.0)
    inverse = fill(V, 1.0)
    if floor > 0:
        inverse = inverse_length(V, r, floor)
    child = min(i, Z.shape[2] - 1)
    parent = min(j, Z.shape[3] - 1)
    for t in range(Z.shape[0]):
        b = dc = fill(V, 0.0)
        for k in range(V.shape[1]):
            v = load(V, (r, k))
            b = fma(v, load(Q, (t, r, k)), b)
            dc = fma(v, load(dS, (t, r, k)), dc)
        if floor > 0:
            b = b * inverse
        c = exp(b - load(Z, (t, 0, child, parent, at))) * load(Z, (t, 1, child, parent, at))
        e = c * (dc - load(Z, (t, 2, child, parent, at)))
        if floor > 0:
            e = e * inverse
            turn = turn - (e * b) * inverse
        store(ce, (t, 0), c)
        store(ce, (t, 1), e)
    return turn


@part
def change(ce: Array, dS: Array, Q: Array, base: Array, r: int, dV: Array) -> None:
    """dV[r] = base[r] + sum_t c ds[t, r] + e q[t, r]."""
    K = dV.shape[1]
    for k in range(0, K - 3, 4):
        g = load4(base, (r, k))
        for t in range(ce.shape[0]):
            g = fma4(load(ce, (t, 1)), load4(Q, (t, r, k)), g)
            g = fma4(load(ce, (t, 0)), load4(dS, (t, r, k)), g)
        store(dV, (r, k), g)
    for k in range(K // 4 * 4, K):
        h = load(base, (r, k))
        for t in range(ce.shape[0]):
            h = fma(load(ce, (t, 1)), load(Q, (t, r, k)), h)
            h = fma(load(ce, (t, 0)), load(dS, (t, r, k)), h)
        store(dV, (r, k), h)


@loop
def scatter(
    W: Array,
    x: Array,
    Q: Array,
    floor: float,
    dS: Array,
    Z: Array,
    base: Array,
    dx: Array,
    dW: Array,
    start: int,
    stop: int,
) -> None:
    """dx_i = sum_j W_ij^T dV_ij and dW_ij += sum_b dV_ij x_i^T, with dV = base + sum_t (c_t ds_t + e_t q_t) + u V.

    x, dx [b i d], of which only a tile is in lanes; Q, dS [t n j k L], Z [t 3 i j (n L)]. The children from start to
    stop.
    """
    (T, N, J, K, L) = Q.shape
    D = W.shape[3]
    dV = np.empty((ROWS, K, L), W.dtype)
    V = np.empty((ROWS, K, L), W.dtype)
    base_j = np.empty((ROWS, K, L), W.dtype)
    dS_j = np.empty((T, ROWS, K, L), W.dtype)
    Q_j = np.empty((T, ROWS, K, L), W.dtype)
    ce = np.empty((T, 2, L), W.dtype)
    X = np.empty((NEAR, ROWS, D, L), W.dtype)
    dX = np.empty((NEAR, ROWS, D, L), W.dtype)
    for block in range(0, N, ROWS):
        rows = min(ROWS, N - block)
        for first in range(start, stop, NEAR):
            end = min(stop, first + NEAR)
            clear(dX, rows)
            collect(x, X, block, rows, first, end)
            for j in range(J):
                together(base, block, rows, j, base_j)
                for t in range(T):
                    together(dS[t], block, rows, j, dS_j[t])
                    together(Q[t], block, rows, j, Q_j[t])
                for i in range(first, end):
                    for r in range(rows):
                        vote(W[first:], X, base, r, i - first, j, V, r)
                        turn = shares(V, r, Q_j, dS_j, floor, Z, i, j, (block + r) * L, ce)
                        change(ce, dS_j, Q_j, base_j, r, dV)
                        if floor > 0:
                            for k in range(K):
                                store(dV, (r, k), fma(turn, load(V, (r, k)), load(dV, (r, k))))
                    to_child(W, i, j, dV, rows, dX, i - first)
                    to_weight(dV, X, i - first, 0, rows, dW, i, j)
            deliver(dX, dx, block, rows, first, end)
