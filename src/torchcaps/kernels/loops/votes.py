"""Sums over votes that are computed where they are used: a few slots of one place and one parent at a time.

Arrays are [rows, L]: a row holds one number of L samples, the lanes of a vector. The rows of one block of L samples
come one after another, then those of the next block. In a block they are in the order of

    X [child d], log_a [child]           children: place * types + type
    pairs [s j c], parents [s j k]       place s of a parent, parent type j, slot c of its window, number k of a pose

who [s c] names the child in a slot. W is [(j m) (d k)] (vectors) or [(j m) 16] (4 x 4 matrices), and slot c takes row
c % m of a parent; offset [c k] is added to the votes. Poses of parents are padded in W, in the offset and in scratch
arrays to a multiple of four rows.

A loop takes GROUP tasks together: W of a parent is read from memory once for all of them. It casts the votes of TILE
slots at a time, which stay in the first cache until they are used.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from torchcaps.kernels.loops import inline, loop
from torchcaps.kernels.loops.elementary import exp, log
from torchcaps.kernels.loops.simd import Array, Vector, Vector4, broadcast, fma4, load_from, maximum, memory

BYTES = 64
load, load4, store, fill = memory(BYTES)

MATRIX = 16
LOW = -1e30
"""Below every logit."""
LEAST = 1e-37
"""Weights below it count as nothing; its inverse is still a number."""
GROUP = 4
"""Tasks that share what they read of W."""
TILE = 16
"""Slots whose votes exist at a time."""


class Layer(NamedTuple):
    """Children, transformations and windows of one layer, as the loops read them."""

    matrix: bool
    children: int
    parents: int
    d: int
    k: int
    X: Array
    W: Array
    offset: Array
    who: Array


class Weights(NamedTuple):
    """Log weights of the votes [s j c] and log activations of the children [child]."""

    log_weight: Array
    log_activation: Array


class Moments(NamedTuple):
    """Log mass [s j], mean and variance [s j k] of the votes for each parent; or the gradients by them."""

    log_mass: Array
    mean: Array
    variance: Array


class Gaussians(NamedTuple):
    """Mean and scale [s j k] of each parent, and the bias [s j] of its logits; or the gradients by them."""

    mean: Array
    scale: Array
    bias: Array


class Terms(NamedTuple):
    """Terms of the gradient by the votes, g_V = sum_n w_n (a_n + b_n (V - center_n)): addresses [n] of their arrays.

    w is [s j c], the others are [s j k]. If no term is sloped, b is 0 and the votes are not needed.
    """

    sloped: bool
    weight: Array
    constant: Array
    slope: Array
    center: Array


class Gradients(NamedTuple):
    """Gradients by the children's poses [child d] and by W, to which a loop adds."""

    X: Array
    W: Array


class Competition(NamedTuple):
    """Who competes for each child.

    order [n 2] lists the (place, slot) of child after child, those of child i from ends[i] to ends[i + 1]. Parent types
    j with equal j % groups compete with each other.
    """

    places: int
    parents: int
    size: int
    groups: int
    order: Array
    ends: Array


# --- Votes ----------------------------------------------------------------------------------------------------------


@inline
def _gather(X: Array, who: Array, s: int, first: int, d: int, x: Array, at: int) -> None:
    """x [c d] = the poses of the children in the slots of place s, from row `at` on."""
    for c in range(who.shape[1]):
        for n in range(d):
            store(x, at + c * d + n, load(X, (first + who[s, c]) * d + n))


@inline
def _mix4(
    x: Array, at: int, column: int, count: int, W: Array, row: int, base: int, step: int, stride: int, sums: Vector4
) -> Vector4:
    """Return sums_i + sum_n x[at + n, column:] W[row, base + i step + n stride] for i from 0 to 3."""
    v0, v1, v2, v3 = sums
    for n in range(count):
        here = load(x, (at + n, column))
        p = base + n * stride
        v0 = here * broadcast(W, (row, p)) + v0
        v1 = here * broadcast(W, (row, p + step)) + v1
        v2 = here * broadcast(W, (row, p + 2 * step)) + v2
        v3 = here * broadcast(W, (row, p + 3 * step)) + v3
    return v0, v1, v2, v3


@inline
def _mix8(
    x: Array,
    at: int,
    column: int,
    count: int,
    W: Array,
    row: int,
    base: int,
    step: int,
    stride: int,
    sums: tuple[Vector4, Vector4],
) -> tuple[Vector4, Vector4]:
    """The same for i from 0 to 7: as many sums as keep both units of a processor that multiply and add busy."""
    (v0, v1, v2, v3), (v4, v5, v6, v7) = sums
    for n in range(count):
        here = load(x, (at + n, column))
        p = base + n * stride
        v0 = here * broadcast(W, (row, p)) + v0
        v1 = here * broadcast(W, (row, p + step)) + v1
        v2 = here * broadcast(W, (row, p + 2 * step)) + v2
        v3 = here * broadcast(W, (row, p + 3 * step)) + v3
        v4 = here * broadcast(W, (row, p + 4 * step)) + v4
        v5 = here * broadcast(W, (row, p + 5 * step)) + v5
        v6 = here * broadcast(W, (row, p + 6 * step)) + v6
        v7 = here * broadcast(W, (row, p + 7 * step)) + v7
    return (v0, v1, v2, v3), (v4, v5, v6, v7)


@inline
def _offset4(offset: Array, c: int, q: int) -> Vector4:
    return (
        broadcast(offset, (c, q)),
        broadcast(offset, (c, q + 1)),
        broadcast(offset, (c, q + 2)),
        broadcast(offset, (c, q + 3)),
    )


@inline
def _cast(layer: Layer, x: Array, at: int, j: int, start: int, stop: int, V: Array) -> None:
    """V [c k] = W_cj x_c + offset, or M_c W_cj + offset, of the slots c from start to stop; x from row `at` on."""
    matrix, _, J, d, k, _, W, offset, _ = layer
    m = len(W) // J
    rows = (k + 3) // 4 * 4
    w = start % m
    for c in range(start, stop):
        row = j * m + w
        v = (c - start) * rows
        if matrix:
            # A row of M times W: four numbers in, four out.
            for r in range(0, MATRIX, 4):
                m0, m1, m2, m3 = load4(x, at + c * MATRIX + r)
                v0, v1, v2, v3 = _offset4(offset, c, r)
                v0 = m0 * broadcast(W, (row, 0)) + v0
                v1 = m0 * broadcast(W, (row, 1)) + v1
                v2 = m0 * broadcast(W, (row, 2)) + v2
                v3 = m0 * broadcast(W, (row, 3)) + v3
                v0 = m1 * broadcast(W, (row, 4)) + v0
                v1 = m1 * broadcast(W, (row, 5)) + v1
                v2 = m1 * broadcast(W, (row, 6)) + v2
                v3 = m1 * broadcast(W, (row, 7)) + v3
                v0 = m2 * broadcast(W, (row, 8)) + v0
                v1 = m2 * broadcast(W, (row, 9)) + v1
                v2 = m2 * broadcast(W, (row, 10)) + v2
                v3 = m2 * broadcast(W, (row, 11)) + v3
                v0 = m3 * broadcast(W, (row, 12)) + v0
                v1 = m3 * broadcast(W, (row, 13)) + v1
                v2 = m3 * broadcast(W, (row, 14)) + v2
                v3 = m3 * broadcast(W, (row, 15)) + v3
                store(V, v + r, (v0, v1, v2, v3))
        else:
            # Eight numbers of the vote share the loads of the child's pose, then four.
            for q in range(0, rows - 7, 8):
                eight = (_offset4(offset, c, q), _offset4(offset, c, q + 4))
                low, high = _mix8(x, at + c * d, 0, d, W, row, q, 1, rows, eight)
                store(V, v + q, low)
                store(V, v + q + 4, high)
            if rows % 8 > 0:
                q = rows - 4
                store(V, v + q, _mix4(x, at + c * d, 0, d, W, row, q, 1, rows, _offset4(offset, c, q)))
        w = w + 1 if w + 1 < m else 0


@inline
def _matrix_back(
    layer: Layer, x: Array, at: int, j: int, start: int, stop: int, G: Array, gx: Array, gW: Array
) -> None:
    """gx [c 16] += G W^T and gW [(m 16) L] += M^T G, lane by lane, for the slots from start to stop."""
    W = layer.W
    m = len(W) // layer.parents
    w = start % m
    for c in range(start, stop):
        v = (c - start) * MATRIX
        own = at + c * MATRIX
        row = j * m + w
        # G W^T, a row of the matrix at a time.
        for r in range(0, MATRIX, 4):
            g0, g1, g2, g3 = load4(G, v + r)
            for n in range(4):
                some = g0 * broadcast(W, (row, 4 * n)) + load(gx, own + r + n)
                some = g1 * broadcast(W, (row, 4 * n + 1)) + some
                some = g2 * broadcast(W, (row, 4 * n + 2)) + some
                store(gx, own + r + n, g3 * broadcast(W, (row, 4 * n + 3)) + some)
        # M^T G, a sum for each sample of the vector; they are added up at the end.
        for n in range(4):
            m0 = load(x, own + n)
            m1 = load(x, own + n + 4)
            m2 = load(x, own + n + 8)
            m3 = load(x, own + n + 12)
            for r in range(4):
                some = m0 * load(G, v + r) + load(gW, row * MATRIX + 4 * n + r)
                some = m1 * load(G, v + r + 4) + some
                some = m2 * load(G, v + r + 8) + some
                store(gW, row * MATRIX + 4 * n + r, m3 * load(G, v + r + 12) + some)
        w = w + 1 if w + 1 < m else 0


@inline
def _transpose(x: Array, count: int, d: int, turned: Array) -> None:
    """turned [c l d] = x [c d l] of so many slots, d padded by zeros to whole vectors."""
    L = x.shape[1]
    width = turned.shape[1]
    for c in range(count):
        for l in range(L):
            for n in range(width):
                turned[c * L + l, n] = x[c * d + n, l] if n < d else 0.0


@inline
def _load_column(a: Array, row: int, column: int) -> Vector4:
    """The vectors of four rows from a column on."""
    return load(a, (row, column)), load(a, (row + 1, column)), load(a, (row + 2, column)), load(a, (row + 3, column))


@inline
def _store_column(a: Array, row: int, column: int, values: Vector4) -> None:
    v0, v1, v2, v3 = values
    store(a, (row, column), v0)
    store(a, (row + 1, column), v1)
    store(a, (row + 2, column), v2)
    store(a, (row + 3, column), v3)


@inline
def _vector_back(
    layer: Layer, turned: Array, at: int, j: int, start: int, stop: int, G: Array, gx: Array, gW: Array
) -> None:
    """gx [c d] += W^T G, lanes being samples; gW [(j m) k, d] += G x^T, lanes being the numbers of a child's pose."""
    W = layer.W
    d = layer.d
    m = len(W) // layer.parents
    rows = (layer.k + 3) // 4 * 4
    L = G.shape[1]
    width = turned.shape[1]
    w = start % m
    for c in range(start, stop):
        v = (c - start) * rows
        own = at + c * d
        row = j * m + w
        # The child's gradient, eight numbers at a time, then four, then one.
        for n in range(0, d - 7, 8):
            eight = (load4(gx, own + n), load4(gx, own + n + 4))
            low, high = _mix8(G, v, 0, rows, W, row, n * rows, rows, 1, eight)
            store(gx, own + n, low)
            store(gx, own + n + 4, high)
        n = d // 8 * 8
        if n + 4 <= d:
            store(gx, own + n, _mix4(G, v, 0, rows, W, row, n * rows, rows, 1, load4(gx, own + n)))
        for n in range(d // 4 * 4, d):
            some = load(gx, own + n)
            for q in range(rows):
                some = load(G, v + q) * broadcast(W, (row, n * rows + q)) + some
            store(gx, own + n, some)
        # The gradient by W, eight of its rows at a time, then four, summed over the samples of the vector.
        turn = (at // d + c) * L
        for n in range(0, width, L):
            for q in range(0, rows - 7, 8):
                to = row * rows + q
                eight = (_load_column(gW, to, n), _load_column(gW, to + 4, n))
                low, high = _mix8(turned, turn, n, L, G, v + q, 0, L, 1, eight)
                _store_column(gW, to, n, low)
                _store_column(gW, to + 4, n, high)
            if rows % 8 > 0:
                q = rows - 4
                to = row * rows + q
                four = _load_column(gW, to, n)
                _store_column(gW, to, n, _mix4(turned, turn, n, L, G, v + q, 0, L, 1, four))
        w = w + 1 if w + 1 < m else 0


@inline
def _clear(a: Array, rows: int) -> None:
    for row in range(rows):
        store(a, row, 0.0)


@inline
def _scatter(gx: Array, at: int, who: Array, s: int, first: int, d: int, g_X: Array) -> None:
    """g_X [child d] += gx [c d], from row `at` on."""
    for c in range(who.shape[1]):
        for n in range(d):
            to = (first + who[s, c]) * d + n
            store(g_X, to, load(g_X, to) + load(gx, at + c * d + n))


@inline
def _read(parents: Array, row: int, k: int, local: Array) -> None:
    """local [k] = the numbers of one parent, padded by 0."""
    for q in range(k):
        store(local, q, load(parents, row + q))
    for q in range(k, (k + 3) // 4 * 4):
        store(local, q, 0.0)


@inline
def _write(local: Array, k: int, parents: Array, row: int) -> None:
    for q in range(k):
        store(parents, row + q, load(local, q))


# --- Mean and variance under weights --------------------------------------------------------------------------------


@inline
def _loudest(log_a: Array, who: Array, s: int, first: int) -> Vector:
    """The largest log activation in a window; weights count relative to it, so that small ones keep their digits."""
    most = load(log_a, first + who[s, 0])
    for c in range(1, who.shape[1]):
        most = maximum(most, load(log_a, first + who[s, c]))
    return most


@inline
def _weights(log_w: Array, row: int, log_a: Array, who: Array, s: int, first: int, most: Vector, w: Array) -> Vector:
    """w [c] = softmax over slots of log_w + log_a; returns the logarithm of the sum of exp(log_w + log_a - most)."""
    C = who.shape[1]
    top = fill(log_w, LOW)
    for c in range(C):
        here = load(log_w, row + c) + (load(log_a, first + who[s, c]) - most)
        store(w, c, here)
        top = maximum(top, here)
    whole = fill(log_w, 0.0)
    for c in range(C):
        e = exp(load(w, c) - top)
        store(w, c, e)
        whole = whole + e
    inverse = 1.0 / whole
    for c in range(C):
        store(w, c, load(w, c) * inverse)
    return top + log(whole)


@loop
def moments(start: int, stop: int, layer: Layer, weights: Weights, found: Moments) -> None:
    """Of every parent: log of its mass, mean and variance of its votes under exp(log_w + log_a); tasks (block, s)."""
    _, children, J, d, k, X, _, _, who = layer
    log_w, log_a = weights
    lse, mean, variance = found
    S, C = who.shape
    L = BYTES // X.itemsize
    rows = (k + 3) // 4 * 4
    # Workspace: allocated once, filled again for every group of tasks.
    x = np.empty((GROUP * C * d, L), X.dtype)
    V = np.empty((TILE * rows, L), X.dtype)
    w = np.empty((C, L), X.dtype)
    m = np.empty((rows, L), X.dtype)
    v = np.empty((rows, L), X.dtype)
    zero = fill(x, 0.0)
    least = fill(x, LEAST)
    for group in range(start, stop, GROUP):
        # A task is one place of one block of samples.
        for task in range(group, min(group + GROUP, stop)):
            _gather(X, who, task % S, task // S * children, d, x, (task - group) * C * d)
        for j in range(J):
            for task in range(group, min(group + GROUP, stop)):
                s = task % S
                first = task // S * children
                parent = task * J + j
                most = _loudest(log_a, who, s, first)
                store(lse, parent, _weights(log_w, parent * C, log_a, who, s, first, most, w) + most)
                _clear(m, rows)
                _clear(v, rows)
                before = zero
                for tile in range(0, C, TILE):
                    end = min(tile + TILE, C)
                    _cast(layer, x, (task - group) * C * d, j, tile, end, V)
                    # The share of these slots in all so far.
                    here = zero
                    for c in range(tile, end):
                        here = here + load(w, c)
                    share = here / maximum(before + here, least)
                    both = before * share
                    inverse = 1.0 / maximum(here, least)
                    before = before + here
                    # Mean and variance of these slots, four numbers of the pose at a time, and then of all so far: the
                    # means' distance adds to the variance (Chan, Golub, LeVeque 1979).
                    for q in range(0, rows, 4):
                        sums = (zero, zero, zero, zero)
                        for c in range(tile, end):
                            sums = fma4(load(w, c), load4(V, (c - tile) * rows + q), sums)
                        m0, m1, m2, m3 = sums
                        m0 = m0 * inverse
                        m1 = m1 * inverse
                        m2 = m2 * inverse
                        m3 = m3 * inverse
                        squares = load4(v, q)
                        for c in range(tile, end):
                            v0, v1, v2, v3 = load4(V, (c - tile) * rows + q)
                            d0 = v0 - m0
                            d1 = v1 - m1
                            d2 = v2 - m2
                            d3 = v3 - m3
                            squares = fma4(load(w, c), (d0 * d0, d1 * d1, d2 * d2, d3 * d3), squares)
                        o0, o1, o2, o3 = load4(m, q)
                        d0 = m0 - o0
                        d1 = m1 - o1
                        d2 = m2 - o2
                        d3 = m3 - o3
                        store(v, q, fma4(both, (d0 * d0, d1 * d1, d2 * d2, d3 * d3), squares))
                        store(m, q, fma4(share, (d0, d1, d2, d3), (o0, o1, o2, o3)))
                _write(m, k, mean, parent * k)
                _write(v, k, variance, parent * k)


@loop
def moments_back(
    start: int, stop: int, layer: Layer, weights: Weights, found: Moments, slopes: Moments, w: Array, g_log_w: Array
) -> None:
    """g_s = w (g_lse + sum_k g_mean d + g_variance (d^2 - variance)), and the weights w [s j c] again.

    The gradient by the votes, w (g_mean + 2 g_variance d), is left to `collect`.
    """
    _, children, J, d, k, X, _, _, who = layer
    log_w, log_a = weights
    lse, mean, variance = found
    g_lse, g_mean, g_variance = slopes
    S, C = who.shape
    L = BYTES // X.itemsize
    rows = (k + 3) // 4 * 4
    # Workspace: allocated once, filled again for every group of tasks.
    x = np.empty((GROUP * C * d, L), X.dtype)
    V = np.empty((TILE * rows, L), X.dtype)
    m = np.empty((rows, L), X.dtype)
    a = np.empty((rows, L), X.dtype)
    b = np.empty((rows, L), X.dtype)
    for group in range(start, stop, GROUP):
        # A task is one place of one block of samples.
        for task in range(group, min(group + GROUP, stop)):
            _gather(X, who, task % S, task // S * children, d, x, (task - group) * C * d)
        for j in range(J):
            for task in range(group, min(group + GROUP, stop)):
                s = task % S
                first = task // S * children
                parent = task * J + j
                log_sum = load(lse, parent)
                constant = load(g_lse, parent)
                _read(mean, parent * k, k, m)
                _read(g_mean, parent * k, k, a)
                _read(g_variance, parent * k, k, b)
                # What all slots of the window have in common: g_lse - sum_k g_variance variance.
                for q in range(k):
                    constant = constant - load(b, q) * load(variance, parent * k + q)
                for tile in range(0, C, TILE):
                    end = min(tile + TILE, C)
                    _cast(layer, x, (task - group) * C * d, j, tile, end, V)
                    for c in range(tile, end):
                        some = constant
                        for q in range(0, rows, 4):
                            v0, v1, v2, v3 = load4(V, (c - tile) * rows + q)
                            m0, m1, m2, m3 = load4(m, q)
                            a0, a1, a2, a3 = load4(a, q)
                            b0, b1, b2, b3 = load4(b, q)
                            d0 = v0 - m0
                            d1 = v1 - m1
                            d2 = v2 - m2
                            d3 = v3 - m3
                            some = (b0 * d0 + a0) * d0 + some
                            some = (b1 * d1 + a1) * d1 + some
                            some = (b2 * d2 + a2) * d2 + some
                            some = (b3 * d3 + a3) * d3 + some
                        # The weight again, which the forward pass did not keep.
                        here = load(log_w, parent * C + c) + (load(log_a, first + who[s, c]) - log_sum)
                        w_c = exp(here)
                        store(w, parent * C + c, w_c)
                        store(g_log_w, parent * C + c, some * w_c)


# --- Log likelihood -------------------------------------------------------------------------------------------------


@loop
def likelihood(start: int, stop: int, layer: Layer, gaussians: Gaussians, logits: Array) -> None:
    """logits [s j c] = bias_j - 1/2 sum_k (scale (V - mean))^2."""
    _, children, J, d, k, X, _, _, who = layer
    mean, scale, bias = gaussians
    S, C = who.shape
    L = BYTES // X.itemsize
    rows = (k + 3) // 4 * 4
    # Workspace: allocated once, filled again for every group of tasks.
    x = np.empty((GROUP * C * d, L), X.dtype)
    V = np.empty((TILE * rows, L), X.dtype)
    m = np.empty((rows, L), X.dtype)
    p = np.empty((rows, L), X.dtype)
    for group in range(start, stop, GROUP):
        # A task is one place of one block of samples.
        for task in range(group, min(group + GROUP, stop)):
            _gather(X, who, task % S, task // S * children, d, x, (task - group) * C * d)
        for j in range(J):
            for task in range(group, min(group + GROUP, stop)):
                parent = task * J + j
                _read(mean, parent * k, k, m)
                _read(scale, parent * k, k, p)
                base = load(bias, parent)
                for tile in range(0, C, TILE):
                    end = min(tile + TILE, C)
                    _cast(layer, x, (task - group) * C * d, j, tile, end, V)
                    for c in range(tile, end):
                        far = fill(x, 0.0)
                        for q in range(0, rows, 4):
                            v0, v1, v2, v3 = load4(V, (c - tile) * rows + q)
                            m0, m1, m2, m3 = load4(m, q)
                            p0, p1, p2, p3 = load4(p, q)
                            z0 = (v0 - m0) * p0
                            z1 = (v1 - m1) * p1
                            z2 = (v2 - m2) * p2
                            z3 = (v3 - m3) * p3
                            far = z0 * z0 + far
                            far = z1 * z1 + far
                            far = z2 * z2 + far
                            far = z3 * z3 + far
                        store(logits, parent * C + c, base - far * 0.5)


@loop
def likelihood_back(
    start: int, stop: int, layer: Layer, gaussians: Gaussians, g_logits: Array, by_gaussians: Gaussians
) -> None:
    """With z = scale d: g_bias = sum_c g, g_mean = scale sum_c g z, g_scale = -sum_c g z d.

    The scale, not the precision: for votes of 1e17 sums of g d^2 would not fit into float32. The gradient by the
    votes, -g scale^2 d, is left to `collect`.
    """
    _, children, J, d, k, X, _, _, who = layer
    mean, scale, _ = gaussians
    g_mean, g_scale, g_bias = by_gaussians
    S, C = who.shape
    L = BYTES // X.itemsize
    rows = (k + 3) // 4 * 4
    # Workspace: allocated once, filled again for every group of tasks.
    x = np.empty((GROUP * C * d, L), X.dtype)
    V = np.empty((TILE * rows, L), X.dtype)
    m = np.empty((rows, L), X.dtype)
    p = np.empty((rows, L), X.dtype)
    sum_z = np.empty((rows, L), X.dtype)
    sum_zd = np.empty((rows, L), X.dtype)
    for group in range(start, stop, GROUP):
        # A task is one place of one block of samples.
        for task in range(group, min(group + GROUP, stop)):
            _gather(X, who, task % S, task // S * children, d, x, (task - group) * C * d)
        for j in range(J):
            for task in range(group, min(group + GROUP, stop)):
                parent = task * J + j
                _read(mean, parent * k, k, m)
                _read(scale, parent * k, k, p)
                _clear(sum_z, rows)
                _clear(sum_zd, rows)
                # The bias enters every logit of its parent.
                whole = fill(x, 0.0)
                for c in range(C):
                    whole = whole + load(g_logits, parent * C + c)
                store(g_bias, parent, whole)
                # Sums over the slots of g z and g z d.
                for tile in range(0, C, TILE):
                    end = min(tile + TILE, C)
                    _cast(layer, x, (task - group) * C * d, j, tile, end, V)
                    for q in range(0, rows, 4):
                        m0, m1, m2, m3 = load4(m, q)
                        p0, p1, p2, p3 = load4(p, q)
                        f0, f1, f2, f3 = load4(sum_z, q)
                        h0, h1, h2, h3 = load4(sum_zd, q)
                        for c in range(tile, end):
                            g_c = load(g_logits, parent * C + c)
                            v0, v1, v2, v3 = load4(V, (c - tile) * rows + q)
                            d0 = v0 - m0
                            d1 = v1 - m1
                            d2 = v2 - m2
                            d3 = v3 - m3
                            e0 = g_c * (d0 * p0)
                            e1 = g_c * (d1 * p1)
                            e2 = g_c * (d2 * p2)
                            e3 = g_c * (d3 * p3)
                            f0 = f0 + e0
                            f1 = f1 + e1
                            f2 = f2 + e2
                            f3 = f3 + e3
                            h0 = e0 * d0 + h0
                            h1 = e1 * d1 + h1
                            h2 = e2 * d2 + h2
                            h3 = e3 * d3 + h3
                        store(sum_z, q, (f0, f1, f2, f3))
                        store(sum_zd, q, (h0, h1, h2, h3))
                for q in range(k):
                    store(g_mean, parent * k + q, load(sum_z, q) * load(p, q))
                    store(g_scale, parent * k + q, load(sum_zd, q) * -1.0)


# --- Competition ----------------------------------------------------------------------------------------------------


@loop
def compete(start: int, stop: int, who: Competition, background: float, logits: Array, out: Array) -> None:
    """out = log-softmax of the logits over all parents that compete for a child; tasks (block, child).

    `background` is one more logit that competes, -inf for none.
    """
    S, J, C, groups, slots, ends = who
    children = len(ends) - 1
    for task in range(start, stop):
        child = task % children
        first = task // children * S
        # Parents of one group compete: the largest logit, the sum of exponentials above it, the logarithm of that.
        for group in range(groups):
            top = fill(logits, background if background > LOW else LOW)
            for n in range(ends[child], ends[child + 1]):
                s = first + slots[n, 0]
                c = slots[n, 1]
                for j in range(group, J, groups):
                    top = maximum(top, load(logits, (s * J + j) * C + c))
            whole = exp(fill(logits, background) - top) if background > LOW else fill(logits, 0.0)
            for n in range(ends[child], ends[child + 1]):
                s = first + slots[n, 0]
                c = slots[n, 1]
                for j in range(group, J, groups):
                    whole = whole + exp(load(logits, (s * J + j) * C + c) - top)
            norm = top + log(whole)
            for n in range(ends[child], ends[child + 1]):
                s = first + slots[n, 0]
                c = slots[n, 1]
                for j in range(group, J, groups):
                    row = (s * J + j) * C + c
                    store(out, row, load(logits, row) - norm)


@loop
def compete_back(start: int, stop: int, who: Competition, log_share: Array, g: Array, out: Array) -> None:
    """g_logits = g - R sum g, the sum over the parents that compete for a child."""
    S, J, C, groups, slots, ends = who
    children = len(ends) - 1
    for task in range(start, stop):
        child = task % children
        first = task // children * S
        # The sum over all parents that compete for the child, then each one's own gradient.
        for group in range(groups):
            whole = fill(g, 0.0)
            for n in range(ends[child], ends[child + 1]):
                s = first + slots[n, 0]
                c = slots[n, 1]
                for j in range(group, J, groups):
                    whole = whole + load(g, (s * J + j) * C + c)
            for n in range(ends[child], ends[child + 1]):
                s = first + slots[n, 0]
                c = slots[n, 1]
                for j in range(group, J, groups):
                    row = (s * J + j) * C + c
                    R = exp(load(log_share, row))
                    store(out, row, load(g, row) - R * whole)


@loop
def child_sums(start: int, stop: int, who: Competition, pairs: Array, out: Array) -> None:
    """out [child] = the sum of pairs [s j c] over all parents and all slots in which a child stands."""
    S, J, C, _, slots, ends = who
    children = len(ends) - 1
    for task in range(start, stop):
        child = task % children
        first = task // children * S
        whole = fill(pairs, 0.0)
        for n in range(ends[child], ends[child + 1]):
            s = first + slots[n, 0]
            c = slots[n, 1]
            for j in range(J):
                whole = whole + load(pairs, (s * J + j) * C + c)
        store(out, task, whole)


# --- Sums, dot products and lengths ---------------------------------------------------------------------------------


@loop
def total(start: int, stop: int, layer: Layer, w: Array, out: Array) -> None:
    """out [s j k] = sum_c w V."""
    _, children, J, d, k, X, _, _, who = layer
    S, C = who.shape
    L = BYTES // X.itemsize
    rows = (k + 3) // 4 * 4
    # Workspace: allocated once, filled again for every group of tasks.
    x = np.empty((GROUP * C * d, L), X.dtype)
    V = np.empty((TILE * rows, L), X.dtype)
    m = np.empty((rows, L), X.dtype)
    for group in range(start, stop, GROUP):
        # A task is one place of one block of samples.
        for task in range(group, min(group + GROUP, stop)):
            _gather(X, who, task % S, task // S * children, d, x, (task - group) * C * d)
        for j in range(J):
            for task in range(group, min(group + GROUP, stop)):
                parent = task * J + j
                _clear(m, rows)
                for tile in range(0, C, TILE):
                    end = min(tile + TILE, C)
                    _cast(layer, x, (task - group) * C * d, j, tile, end, V)
                    for q in range(0, rows, 4):
                        sums = load4(m, q)
                        for c in range(tile, end):
                            sums = fma4(load(w, parent * C + c), load4(V, (c - tile) * rows + q), sums)
                        store(m, q, sums)
                _write(m, k, out, parent * k)


@loop
def dot(start: int, stop: int, layer: Layer, parents: Array, squares: bool, out: Array) -> None:
    """out [s j c] = sum_k V parents, or the squares of the votes, sum_k V^2."""
    _, children, J, d, k, X, _, _, who = layer
    S, C = who.shape
    L = BYTES // X.itemsize
    rows = (k + 3) // 4 * 4
    # Workspace: allocated once, filled again for every group of tasks.
    x = np.empty((GROUP * C * d, L), X.dtype)
    V = np.empty((TILE * rows, L), X.dtype)
    p = np.empty((rows, L), X.dtype)
    for group in range(start, stop, GROUP):
        # A task is one place of one block of samples.
        for task in range(group, min(group + GROUP, stop)):
            _gather(X, who, task % S, task // S * children, d, x, (task - group) * C * d)
        for j in range(J):
            for task in range(group, min(group + GROUP, stop)):
                parent = task * J + j
                if not squares:
                    _read(parents, parent * k, k, p)
                for tile in range(0, C, TILE):
                    end = min(tile + TILE, C)
                    _cast(layer, x, (task - group) * C * d, j, tile, end, V)
                    for c in range(tile, end):
                        some = fill(x, 0.0)
                        for q in range(rows):
                            v = load(V, (c - tile) * rows + q)
                            some = v * (v if squares else load(p, q)) + some
                        store(out, parent * C + c, some)


# --- Back to the children and to W ----------------------------------------------------------------------------------


@inline
def _read_terms(addresses: Array, count: int, like: Array, row: int, k: int, local: Array) -> None:
    """local [n k] = the numbers of one parent in each term, padded by 0."""
    rows = (k + 3) // 4 * 4
    for n in range(count):
        for q in range(rows):
            store(local, n * rows + q, load_from(addresses[n], like, row + q) if q < k else fill(like, 0.0))


@loop
def collect(start: int, stop: int, layer: Layer, terms: Terms, gradients: Gradients) -> None:
    """Add what the gradient by the votes, the sum of all terms, means for the children and for W; tasks (block, s)."""
    matrix, children, J, d, k, X, _, _, who = layer
    g_X, g_W = gradients
    count = len(terms.weight)
    S, C = who.shape
    L = BYTES // X.itemsize
    rows = (k + 3) // 4 * 4
    # Workspace: allocated once, filled again for every group of tasks.
    x = np.empty((GROUP * C * d, L), X.dtype)
    gx = np.empty((GROUP * C * d, L), X.dtype)
    turned = np.empty((0 if matrix else GROUP * C * L, (d + L - 1) // L * L), X.dtype)
    V = np.empty((TILE * rows, L), X.dtype)
    G = np.empty((TILE * rows, L), X.dtype)
    constant = np.empty((count * rows, L), X.dtype)
    slope = np.empty((count * rows, L), X.dtype)
    center = np.empty((count * rows, L), X.dtype)
    for group in range(start, stop, GROUP):
        # A task is one place of one block of samples.
        size = min(group + GROUP, stop) - group
        for n in range(size):
            _gather(X, who, (group + n) % S, (group + n) // S * children, d, x, n * C * d)
        _clear(gx, size * C * d)
        if not matrix:
            _transpose(x, size * C, d, turned)
        for j in range(J):
            for task in range(group, group + size):
                parent = task * J + j
                at = (task - group) * C * d
                _read_terms(terms.constant, count, x, parent * k, k, constant)
                _read_terms(terms.slope, count, x, parent * k, k, slope)
                _read_terms(terms.center, count, x, parent * k, k, center)
                for tile in range(0, C, TILE):
                    end = min(tile + TILE, C)
                    if terms.sloped:
                        _cast(layer, x, at, j, tile, end, V)
                    # The gradient by the votes of a few slots, term by term.
                    _clear(G, TILE * rows)
                    for n in range(count):
                        weight = terms.weight[n]
                        for q in range(0, rows, 4):
                            a0, a1, a2, a3 = load4(constant, n * rows + q)
                            b0, b1, b2, b3 = load4(slope, n * rows + q)
                            m0, m1, m2, m3 = load4(center, n * rows + q)
                            for c in range(tile, end):
                                w = load_from(weight, x, parent * C + c)
                                e0, e1, e2, e3 = (a0, a1, a2, a3)
                                if terms.sloped:
                                    v0, v1, v2, v3 = load4(V, (c - tile) * rows + q)
                                    e0 = b0 * (v0 - m0) + a0
                                    e1 = b1 * (v1 - m1) + a1
                                    e2 = b2 * (v2 - m2) + a2
                                    e3 = b3 * (v3 - m3) + a3
                                to = (c - tile) * rows + q
                                store(G, to, fma4(w, (e0, e1, e2, e3), load4(G, to)))
                    if matrix:
                        _matrix_back(layer, x, at, j, tile, end, G, gx, g_W)
                    else:
                        _vector_back(layer, turned, at, j, tile, end, G, gx, g_W)
        for n in range(size):
            _scatter(gx, n * C * d, who, (group + n) % S, (group + n) // S * children, d, g_X)
