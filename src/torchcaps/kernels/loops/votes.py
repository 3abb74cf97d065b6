"""Sums over votes that are computed where they are used: one block of samples, one place and one parent at a time.

Arrays are [rows, L]: a row holds one number of L samples, the lanes of a vector. The rows of one block of L samples
come one after another, then those of the next block. In a block they are in the order of

    X [child d], log_a [child]           children: place * types + type
    pairs [s j c], parents [s j k]       place s of a parent, parent type j, slot c of its window, number k of a pose

who [s c] names the child in a slot. W is [j m (k d)] (vectors) or [j m 16] (4 x 4 matrices), and slot c takes row
c % m; offset [c k] is added to the votes. Scratch arrays are [rows, L]; poses are padded in them to a multiple of four
rows.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from torchcaps.kernels.loops import inline, loop
from torchcaps.kernels.loops.elementary import exp, log
from torchcaps.kernels.loops.simd import Array, Vector, fma4, maximum, memory

BYTES = 64
load, load4, store, fill = memory(BYTES)

MATRIX = 16
LOW = -1e30
"""Below every logit."""


class Layer(NamedTuple):
    """Children, transformations and windows of one layer, as the loops read them."""

    matrix: bool
    children: int
    d: int
    k: int
    X: Array
    W: Array
    offset: Array
    who: Array


class Weights(NamedTuple):
    """Log weights of the votes [s j c] and log activations of the children [child]; or the gradients by them."""

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
def _gather(X: Array, who: Array, s: int, first: int, d: int, x: Array) -> None:
    """x [c d] = the poses of the children in the slots of place s."""
    for c in range(who.shape[1]):
        for n in range(d):
            store(x, c * d + n, load(X, (first + who[s, c]) * d + n))


@inline
def _cast_matrix(x: Array, W: Array, offset: Array, j: int, C: int, V: Array) -> None:
    """V [c 16] = M_c W_cj + offset."""
    w = 0  # c % m, the row of W
    for c in range(C):
        # A row of M times W: four numbers in, four out.
        for row in range(0, MATRIX, 4):
            m0, m1, m2, m3 = load4(x, c * MATRIX + row)
            for k in range(4):
                v = m0 * W[j, w, k] + offset[c, row + k]
                v = m1 * W[j, w, k + 4] + v
                v = m2 * W[j, w, k + 8] + v
                store(V, c * MATRIX + row + k, m3 * W[j, w, k + 12] + v)
        w = w + 1 if w + 1 < W.shape[1] else 0


@inline
def _cast_vector(x: Array, W: Array, offset: Array, j: int, C: int, d: int, k: int, V: Array) -> None:
    """V [c k] = W_cj x_c + offset; rows that pad k to a multiple of four are 0."""
    rows = (k + 3) // 4 * 4
    w = 0  # c % m, the row of W
    for c in range(C):
        # Four numbers of the vote at a time share the loads of the child's pose.
        for q in range(0, k - 3, 4):
            v0 = fill(x, offset[c, q])
            v1 = fill(x, offset[c, q + 1])
            v2 = fill(x, offset[c, q + 2])
            v3 = fill(x, offset[c, q + 3])
            for n in range(d):
                here = load(x, c * d + n)
                v0 = here * W[j, w, q * d + n] + v0
                v1 = here * W[j, w, (q + 1) * d + n] + v1
                v2 = here * W[j, w, (q + 2) * d + n] + v2
                v3 = here * W[j, w, (q + 3) * d + n] + v3
            store(V, c * rows + q, (v0, v1, v2, v3))
        # The rest, and zeros behind it.
        for q in range(k // 4 * 4, rows):
            v = fill(x, 0.0)
            if q < k:
                v = fill(x, offset[c, q])
                for n in range(d):
                    v = load(x, c * d + n) * W[j, w, q * d + n] + v
            store(V, c * rows + q, v)
        w = w + 1 if w + 1 < W.shape[1] else 0


@inline
def _cast(matrix: bool, x: Array, W: Array, offset: Array, j: int, C: int, d: int, k: int, V: Array) -> None:
    if matrix:
        _cast_matrix(x, W, offset, j, C, V)
    else:
        _cast_vector(x, W, offset, j, C, d, k, V)


@inline
def _matrix_back(x: Array, W: Array, j: int, C: int, G: Array, gx: Array, gW: Array) -> None:
    """gx [c 16] += G W^T and gW [(m 16) L] += M^T G, lane by lane."""
    w = 0  # c % m, the row of W
    for c in range(C):
        v = c * MATRIX
        # G W^T, a row of the matrix at a time.
        for row in range(0, MATRIX, 4):
            g0, g1, g2, g3 = load4(G, v + row)
            for k in range(4):
                some = g0 * W[j, w, 4 * k] + load(gx, v + row + k)
                some = g1 * W[j, w, 4 * k + 1] + some
                some = g2 * W[j, w, 4 * k + 2] + some
                store(gx, v + row + k, g3 * W[j, w, 4 * k + 3] + some)
        # M^T G, a sum for each sample of the vector; they are added up at the end.
        at = (j * W.shape[1] + w) * MATRIX
        for k in range(4):
            m0 = load(x, v + k)
            m1 = load(x, v + k + 4)
            m2 = load(x, v + k + 8)
            m3 = load(x, v + k + 12)
            for n in range(4):
                some = m0 * load(G, v + n) + load(gW, at + 4 * k + n)
                some = m1 * load(G, v + n + 4) + some
                some = m2 * load(G, v + n + 8) + some
                store(gW, at + 4 * k + n, m3 * load(G, v + n + 12) + some)
        w = w + 1 if w + 1 < W.shape[1] else 0


@inline
def _transpose(x: Array, C: int, d: int, turned: Array) -> None:
    """turned [c l d] = x [c d l], d padded by zeros to whole vectors."""
    L = x.shape[1]
    width = turned.shape[1]
    for c in range(C):
        for l in range(L):
            for n in range(width):
                turned[c * L + l, n] = x[c * d + n, l] if n < d else 0.0


@inline
def _vector_back(
    x: Array, W: Array, j: int, C: int, d: int, k: int, G: Array, turned: Array, gx: Array, gW: Array
) -> None:
    """gx [c d] += W^T G, lanes being samples; gW [j m k, d] += G x^T, lanes being the numbers of a child's pose."""
    rows = (k + 3) // 4 * 4
    L = x.shape[1]
    width = turned.shape[1]
    w = 0  # c % m, the row of W
    for c in range(C):
        # The child's gradient, four numbers at a time, then the rest.
        for n in range(0, d - 3, 4):
            a0, a1, a2, a3 = load4(gx, c * d + n)
            for q in range(k):
                g = load(G, c * rows + q)
                a0 = g * W[j, w, q * d + n] + a0
                a1 = g * W[j, w, q * d + n + 1] + a1
                a2 = g * W[j, w, q * d + n + 2] + a2
                a3 = g * W[j, w, q * d + n + 3] + a3
            store(gx, c * d + n, (a0, a1, a2, a3))
        for n in range(d // 4 * 4, d):
            a = load(gx, c * d + n)
            for q in range(k):
                a = load(G, c * rows + q) * W[j, w, q * d + n] + a
            store(gx, c * d + n, a)
        # The gradient by W, four of its rows at a time, summed over the samples of the vector.
        at = (j * W.shape[1] + w) * rows
        for q in range(0, rows, 4):
            v = c * rows + q
            for n in range(0, width, L):
                b0 = load(gW, (at + q, n))
                b1 = load(gW, (at + q + 1, n))
                b2 = load(gW, (at + q + 2, n))
                b3 = load(gW, (at + q + 3, n))
                for l in range(L):
                    here = load(turned, (c * L + l, n))
                    b0 = here * G[v, l] + b0
                    b1 = here * G[v + 1, l] + b1
                    b2 = here * G[v + 2, l] + b2
                    b3 = here * G[v + 3, l] + b3
                store(gW, (at + q, n), b0)
                store(gW, (at + q + 1, n), b1)
                store(gW, (at + q + 2, n), b2)
                store(gW, (at + q + 3, n), b3)
        w = w + 1 if w + 1 < W.shape[1] else 0


@inline
def _votes_back(
    matrix: bool, x: Array, W: Array, j: int, C: int, d: int, k: int, G: Array, turned: Array, gx: Array, gW: Array
) -> None:
    if matrix:
        _matrix_back(x, W, j, C, G, gx, gW)
    else:
        _vector_back(x, W, j, C, d, k, G, turned, gx, gW)


@inline
def _clear(a: Array, rows: int) -> None:
    for row in range(rows):
        store(a, row, 0.0)


@inline
def _scatter(gx: Array, who: Array, s: int, first: int, d: int, g_X: Array) -> None:
    """g_X [child d] += gx [c d]."""
    for c in range(who.shape[1]):
        for n in range(d):
            at = (first + who[s, c]) * d + n
            store(g_X, at, load(g_X, at) + load(gx, c * d + n))


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
    matrix, children, d, k, X, W, offset, who = layer
    log_w, log_a = weights
    lse, mean, variance = found
    S, C = who.shape
    J = len(W)
    L = BYTES // X.itemsize
    rows = (k + 3) // 4 * 4
    # Workspace: allocated once, filled again for every task.
    x = np.empty((C * d, L), X.dtype)
    V = np.empty((C * rows, L), X.dtype)
    w = np.empty((C, L), X.dtype)
    m = np.empty((rows, L), X.dtype)
    v = np.empty((rows, L), X.dtype)
    for task in range(start, stop):
        # A task is one place of one block of samples.
        s = task % S
        block = task // S
        first = block * children
        most = _loudest(log_a, who, s, first)
        _gather(X, who, s, first, d, x)
        for j in range(J):
            parent = task * J + j
            store(lse, parent, _weights(log_w, parent * C, log_a, who, s, first, most, w) + most)
            _cast(matrix, x, W, offset, j, C, d, k, V)
            # Four numbers of the pose at a time: first their mean, then their variance about it.
            zero = fill(x, 0.0)
            for q in range(0, rows, 4):
                sums = (zero, zero, zero, zero)
                for c in range(C):
                    sums = fma4(load(w, c), load4(V, c * rows + q), sums)
                store(m, q, sums)
                m0, m1, m2, m3 = sums
                squares = (zero, zero, zero, zero)
                for c in range(C):
                    v0, v1, v2, v3 = load4(V, c * rows + q)
                    d0 = v0 - m0
                    d1 = v1 - m1
                    d2 = v2 - m2
                    d3 = v3 - m3
                    squares = fma4(load(w, c), (d0 * d0, d1 * d1, d2 * d2, d3 * d3), squares)
                store(v, q, squares)
            _write(m, k, mean, parent * k)
            _write(v, k, variance, parent * k)


@loop
def moments_back(
    start: int,
    stop: int,
    layer: Layer,
    weights: Weights,
    found: Moments,
    slopes: Moments,
    gradients: Gradients,
    by_weights: Weights,
) -> None:
    """g_s = w (g_lse + sum_k g_mean d + g_variance (d^2 - variance)) and g_V = w (g_mean + 2 g_variance d)."""
    matrix, children, d, k, X, W, offset, who = layer
    log_w, log_a = weights
    lse, mean, variance = found
    g_lse, g_mean, g_variance = slopes
    g_X, g_W = gradients
    g_log_w, g_log_a = by_weights
    S, C = who.shape
    J = len(W)
    L = BYTES // X.itemsize
    rows = (k + 3) // 4 * 4
    # Workspace: allocated once, filled again for every task.
    x = np.empty((C * d, L), X.dtype)
    gx = np.empty((C * d, L), X.dtype)
    turned = np.empty((0 if matrix else C * L, (d + L - 1) // L * L), X.dtype)
    V = np.empty((C * rows, L), X.dtype)
    w = np.empty((C, L), X.dtype)
    m = np.empty((rows, L), X.dtype)
    a = np.empty((rows, L), X.dtype)
    b = np.empty((rows, L), X.dtype)
    ga = np.empty((C, L), X.dtype)
    for task in range(start, stop):
        # A task is one place of one block of samples.
        s = task % S
        block = task // S
        first = block * children
        most = _loudest(log_a, who, s, first)
        _gather(X, who, s, first, d, x)
        _clear(gx, C * d)
        if not matrix:
            _transpose(x, C, d, turned)
        _clear(ga, C)
        for j in range(J):
            parent = task * J + j
            log_sum = load(lse, parent) - most
            constant = load(g_lse, parent)
            _read(mean, parent * k, k, m)
            _read(g_mean, parent * k, k, a)
            _read(g_variance, parent * k, k, b)
            # What all slots of the window have in common: g_lse - sum_k g_variance variance.
            for q in range(k):
                constant = constant - load(b, q) * load(variance, parent * k + q)
            # The weights again, which the forward pass did not keep.
            for c in range(C):
                here = load(log_w, parent * C + c) + (load(log_a, first + who[s, c]) - most)
                store(w, c, exp(here - log_sum))
            _cast(matrix, x, W, offset, j, C, d, k, V)
            # The gradient by each weight; the votes make room for their own gradient.
            for c in range(C):
                some = constant
                w_c = load(w, c)
                for q in range(0, rows, 4):
                    v0, v1, v2, v3 = load4(V, c * rows + q)
                    m0, m1, m2, m3 = load4(m, q)
                    a0, a1, a2, a3 = load4(a, q)
                    b0, b1, b2, b3 = load4(b, q)
                    d0 = v0 - m0
                    d1 = v1 - m1
                    d2 = v2 - m2
                    d3 = v3 - m3
                    e0 = b0 * d0 + a0
                    e1 = b1 * d1 + a1
                    e2 = b2 * d2 + a2
                    e3 = b3 * d3 + a3
                    some = e0 * d0 + some
                    some = e1 * d1 + some
                    some = e2 * d2 + some
                    some = e3 * d3 + some
                    back = (
                        w_c * (b0 * d0 + e0),
                        w_c * (b1 * d1 + e1),
                        w_c * (b2 * d2 + e2),
                        w_c * (b3 * d3 + e3),
                    )
                    store(V, c * rows + q, back)
                g_s = some * w_c
                store(g_log_w, parent * C + c, g_s)
                store(ga, c, load(ga, c) + g_s)
            _votes_back(matrix, x, W, j, C, d, k, V, turned, gx, g_W)
        _scatter(gx, who, s, first, d, g_X)
        _scatter(ga, who, s, first, 1, g_log_a)


# --- Log likelihood -------------------------------------------------------------------------------------------------


@loop
def likelihood(start: int, stop: int, layer: Layer, gaussians: Gaussians, logits: Array) -> None:
    """logits [s j c] = bias_j - 1/2 sum_k (scale (V - mean))^2."""
    matrix, children, d, k, X, W, offset, who = layer
    mean, scale, bias = gaussians
    S, C = who.shape
    J = len(W)
    L = BYTES // X.itemsize
    rows = (k + 3) // 4 * 4
    # Workspace: allocated once, filled again for every task.
    x = np.empty((C * d, L), X.dtype)
    V = np.empty((C * rows, L), X.dtype)
    m = np.empty((rows, L), X.dtype)
    p = np.empty((rows, L), X.dtype)
    for task in range(start, stop):
        # A task is one place of one block of samples.
        s = task % S
        block = task // S
        first = block * children
        _gather(X, who, s, first, d, x)
        for j in range(J):
            parent = task * J + j
            _read(mean, parent * k, k, m)
            _read(scale, parent * k, k, p)
            base = load(bias, parent)
            _cast(matrix, x, W, offset, j, C, d, k, V)
            for c in range(C):
                far = fill(x, 0.0)
                for q in range(0, rows, 4):
                    v0, v1, v2, v3 = load4(V, c * rows + q)
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
    start: int,
    stop: int,
    layer: Layer,
    gaussians: Gaussians,
    g_logits: Array,
    gradients: Gradients,
    by_gaussians: Gaussians,
) -> None:
    """With z = scale d: g_bias = sum_c g, g_mean = scale sum_c g z, g_scale = -sum_c g z d, g_V = -g z scale.

    The scale, not the precision: for votes of 1e17 sums of g d^2 would not fit into float32.
    """
    matrix, children, d, k, X, W, offset, who = layer
    mean, scale, _ = gaussians
    g_X, g_W = gradients
    g_mean, g_scale, g_bias = by_gaussians
    S, C = who.shape
    J = len(W)
    L = BYTES // X.itemsize
    rows = (k + 3) // 4 * 4
    # Workspace: allocated once, filled again for every task.
    x = np.empty((C * d, L), X.dtype)
    gx = np.empty((C * d, L), X.dtype)
    turned = np.empty((0 if matrix else C * L, (d + L - 1) // L * L), X.dtype)
    V = np.empty((C * rows, L), X.dtype)
    m = np.empty((rows, L), X.dtype)
    p = np.empty((rows, L), X.dtype)
    g = np.empty((C, L), X.dtype)
    for task in range(start, stop):
        # A task is one place of one block of samples.
        s = task % S
        block = task // S
        first = block * children
        _gather(X, who, s, first, d, x)
        _clear(gx, C * d)
        if not matrix:
            _transpose(x, C, d, turned)
        for j in range(J):
            parent = task * J + j
            _read(mean, parent * k, k, m)
            _read(scale, parent * k, k, p)
            # The bias enters every logit of its parent.
            zero = fill(x, 0.0)
            whole = zero
            for c in range(C):
                here = load(g_logits, parent * C + c)
                store(g, c, here)
                whole = whole + here
            store(g_bias, parent, whole)
            _cast(matrix, x, W, offset, j, C, d, k, V)
            # Sums over the slots of g z and g z d; the votes make room for their own gradient, -g z scale.
            for q in range(0, rows, 4):
                m0, m1, m2, m3 = load4(m, q)
                p0, p1, p2, p3 = load4(p, q)
                sum_d = (zero, zero, zero, zero)
                sum_dd = (zero, zero, zero, zero)
                for c in range(C):
                    g_c = load(g, c)
                    v0, v1, v2, v3 = load4(V, c * rows + q)
                    d0 = v0 - m0
                    d1 = v1 - m1
                    d2 = v2 - m2
                    d3 = v3 - m3
                    e0 = g_c * (d0 * p0)
                    e1 = g_c * (d1 * p1)
                    e2 = g_c * (d2 * p2)
                    e3 = g_c * (d3 * p3)
                    f0, f1, f2, f3 = sum_d
                    sum_d = (f0 + e0, f1 + e1, f2 + e2, f3 + e3)
                    h0, h1, h2, h3 = sum_dd
                    sum_dd = (e0 * d0 + h0, e1 * d1 + h1, e2 * d2 + h2, e3 * d3 + h3)
                    store(V, c * rows + q, (e0 * p0 * -1.0, e1 * p1 * -1.0, e2 * p2 * -1.0, e3 * p3 * -1.0))
                f0, f1, f2, f3 = sum_d
                store(m, q, (f0 * p0, f1 * p1, f2 * p2, f3 * p3))
                h0, h1, h2, h3 = sum_dd
                store(p, q, (h0 * -1.0, h1 * -1.0, h2 * -1.0, h3 * -1.0))
            _write(m, k, g_mean, parent * k)
            _write(p, k, g_scale, parent * k)
            _votes_back(matrix, x, W, j, C, d, k, V, turned, gx, g_W)
        _scatter(gx, who, s, first, d, g_X)


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


# --- Sums, dot products and lengths ---------------------------------------------------------------------------------


@loop
def total(start: int, stop: int, layer: Layer, w: Array, out: Array) -> None:
    """out [s j k] = sum_c w V."""
    matrix, children, d, k, X, W, offset, who = layer
    S, C = who.shape
    J = len(W)
    L = BYTES // X.itemsize
    rows = (k + 3) // 4 * 4
    # Workspace: allocated once, filled again for every task.
    x = np.empty((C * d, L), X.dtype)
    V = np.empty((C * rows, L), X.dtype)
    m = np.empty((rows, L), X.dtype)
    for task in range(start, stop):
        # A task is one place of one block of samples.
        s = task % S
        block = task // S
        first = block * children
        _gather(X, who, s, first, d, x)
        for j in range(J):
            parent = task * J + j
            _cast(matrix, x, W, offset, j, C, d, k, V)
            zero = fill(x, 0.0)
            for q in range(0, rows, 4):
                sums = (zero, zero, zero, zero)
                for c in range(C):
                    sums = fma4(load(w, parent * C + c), load4(V, c * rows + q), sums)
                store(m, q, sums)
            _write(m, k, out, parent * k)


@loop
def dot(start: int, stop: int, layer: Layer, parents: Array, out: Array) -> None:
    """out [s j c] = sum_k V parents."""
    matrix, children, d, k, X, W, offset, who = layer
    S, C = who.shape
    J = len(W)
    L = BYTES // X.itemsize
    rows = (k + 3) // 4 * 4
    # Workspace: allocated once, filled again for every task.
    x = np.empty((C * d, L), X.dtype)
    V = np.empty((C * rows, L), X.dtype)
    p = np.empty((rows, L), X.dtype)
    for task in range(start, stop):
        # A task is one place of one block of samples.
        s = task % S
        block = task // S
        first = block * children
        _gather(X, who, s, first, d, x)
        for j in range(J):
            parent = task * J + j
            _read(parents, parent * k, k, p)
            _cast(matrix, x, W, offset, j, C, d, k, V)
            for c in range(C):
                some = fill(x, 0.0)
                for q in range(rows):
                    some = load(V, c * rows + q) * load(p, q) + some
                store(out, parent * C + c, some)


@loop
def outer_back(start: int, stop: int, layer: Layer, w: Array, parents: Array, gradients: Gradients) -> None:
    """Gradients by children and weights where g_V = w_c parents_k, as in the sum and in the dot product."""
    matrix, children, d, k, X, W, _, who = layer
    g_X, g_W = gradients
    S, C = who.shape
    J = len(W)
    L = BYTES // X.itemsize
    rows = (k + 3) // 4 * 4
    # Workspace: allocated once, filled again for every task.
    x = np.empty((C * d, L), X.dtype)
    gx = np.empty((C * d, L), X.dtype)
    turned = np.empty((0 if matrix else C * L, (d + L - 1) // L * L), X.dtype)
    G = np.empty((C * rows, L), X.dtype)
    p = np.empty((rows, L), X.dtype)
    for task in range(start, stop):
        # A task is one place of one block of samples.
        s = task % S
        block = task // S
        first = block * children
        _gather(X, who, s, first, d, x)
        _clear(gx, C * d)
        if not matrix:
            _transpose(x, C, d, turned)
        for j in range(J):
            parent = task * J + j
            _read(parents, parent * k, k, p)
            for c in range(C):
                w_c = load(w, parent * C + c)
                for q in range(rows):
                    store(G, c * rows + q, w_c * load(p, q))
            _votes_back(matrix, x, W, j, C, d, k, G, turned, gx, g_W)
        _scatter(gx, who, s, first, d, g_X)


@loop
def lengths(start: int, stop: int, layer: Layer, out: Array) -> None:
    """out [s j c] = sum_k V^2."""
    matrix, children, d, k, X, W, offset, who = layer
    S, C = who.shape
    J = len(W)
    L = BYTES // X.itemsize
    rows = (k + 3) // 4 * 4
    # Workspace: allocated once, filled again for every task.
    x = np.empty((C * d, L), X.dtype)
    V = np.empty((C * rows, L), X.dtype)
    for task in range(start, stop):
        # A task is one place of one block of samples.
        s = task % S
        block = task // S
        first = block * children
        _gather(X, who, s, first, d, x)
        for j in range(J):
            _cast(matrix, x, W, offset, j, C, d, k, V)
            for c in range(C):
                some = fill(x, 0.0)
                for q in range(rows):
                    v = load(V, c * rows + q)
                    some = v * v + some
                store(out, (task * J + j) * C + c, some)


@loop
def lengths_back(start: int, stop: int, layer: Layer, g: Array, gradients: Gradients) -> None:
    """g_V = 2 g V."""
    matrix, children, d, k, X, W, offset, who = layer
    g_X, g_W = gradients
    S, C = who.shape
    J = len(W)
    L = BYTES // X.itemsize
    rows = (k + 3) // 4 * 4
    # Workspace: allocated once, filled again for every task.
    x = np.empty((C * d, L), X.dtype)
    gx = np.empty((C * d, L), X.dtype)
    turned = np.empty((0 if matrix else C * L, (d + L - 1) // L * L), X.dtype)
    V = np.empty((C * rows, L), X.dtype)
    for task in range(start, stop):
        # A task is one place of one block of samples.
        s = task % S
        block = task // S
        first = block * children
        _gather(X, who, s, first, d, x)
        _clear(gx, C * d)
        if not matrix:
            _transpose(x, C, d, turned)
        for j in range(J):
            _cast(matrix, x, W, offset, j, C, d, k, V)
            for c in range(C):
                twice = load(g, (task * J + j) * C + c) * 2.0
                for q in range(rows):
                    store(V, c * rows + q, twice * load(V, c * rows + q))
            _votes_back(matrix, x, W, j, C, d, k, V, turned, gx, g_W)
        _scatter(gx, who, s, first, d, g_X)
