"""EM routing of matrix capsules, forward: L samples at a time, votes recomputed for each parent and iteration.

Names: c = (n i) a slot of a window, child = place * types + type, C slots, J parent types, S window positions. Arrays
[rows, L], the rows of one block of samples one after another:

    X [child 16] poses, A [child] log activations, shares [t-1 s j c] log R of iterations 1, 2 ...,
    fits [t s j FIT] the Gaussians: mean 16, variance 16, then LSE = log sum_c exp(s_c) with s = log R + log a relative
    to the largest of the window, MASS = sum_c R a, and LOGIT of the switch

W is [j m 16] and slot c takes row c % m; offset [c 16]; who [s c] names the child in a slot; first [child] is the first
iteration's log R. A child is shared among groups of rivals: one group (all parents), or one for each parent type.

For a window position and a parent the votes of all slots (C x 16 x L numbers) stay in the cache between the mean,
the variance and the next logits. What a child is given is normalized when all positions are through.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from torchcaps.kernels.loops import loop, part
from torchcaps.kernels.loops.elementary import exp, exponent, log, mantissa
from torchcaps.kernels.loops.simd import fma4, larger, memory, pick

__all__ = ["BYTES", "FIT", "LOGIT", "LSE", "MASS", "POSE", "cast_votes", "fill", "forward", "load", "load4"]
__all__ += ["log_volume", "logistic", "loudest", "store"]

BYTES = 32
"""Of a vector: the loops hold a dozen at a time, which at twice the width would not all stay in registers."""
load, load4, store, fill = memory(BYTES)

POSE = 16
LSE = 32
MASS = 33
LOGIT = 34
FIT = 35
LN2 = math.log(2)
LOG_2PI = math.log(2 * math.pi)
LOW = -1e30
"""Below every logit."""


@part
def cast_votes(X: Any, x: int, W: Any, offset: Any, j: int, who: Any, s: int, V: Any) -> None:
    """V [c 16] = M W_j + offset for the slots of position s; x is the first child of the block."""
    w = 0
    for c in range(who.shape[1]):
        for row in range(0, POSE, 4):
            at = (x + who[s, c]) * POSE + row
            m0, m1, m2, m3 = load4(X, at)
            for k in range(4):
                v = m0 * W[j, w, k] + offset[c, row + k]
                v = m1 * W[j, w, k + 4] + v
                v = m2 * W[j, w, k + 8] + v
                store(V, c * POSE + row + k, m3 * W[j, w, k + 12] + v)
        w = w + 1 if w + 1 < W.shape[1] else 0


@part
def loudest(A: Any, x: int, who: Any, s: int) -> Any:
    """The largest log activation that position s sees."""
    most = load(A, x + who[s, 0])
    for c in range(1, who.shape[1]):
        most = larger(most, load(A, x + who[s, c]))
    return most


@part
def log_volume(fits: Any, at: int) -> Any:
    """sum_h log variance_h: exponents are added and mantissas multiplied, so that it takes one logarithm."""
    whole = fill(fits, 0.0)
    product = fill(fits, 1.0)
    for h in range(POSE):
        v = load(fits, at + POSE + h)
        whole = whole + exponent(v)
        product = product * mantissa(v)
    return whole * LN2 + log(product)


@part
def logistic(z: Any) -> Any:
    """1 / (1 + e^-z)."""
    e = exp(larger(z, z * -1.0) * -1.0)  # e^-|z|
    return pick(z, e, e * 0.0 + 1.0) / (e + 1.0)


@part
def _log_logistic(z: Any) -> Any:
    """log logistic(z) = min(z, 0) - log(1 + e^-|z|)."""
    e = exp(larger(z, z * -1.0) * -1.0)
    return pick(z, z, z * 0.0) - log(e + 1.0)


@part
def _share_out(logits: Any, at: int, top: Any, norm: Any, who: Any, J: int, groups: int) -> None:
    """logits [s j c] from row `at` on become log R: minus, in two parts, their logsumexp over a child's rivals."""
    S, C = who.shape
    for row in range(len(top)):
        store(top, row, LOW)
        store(norm, row, 0.0)
    for s in range(S):
        for j in range(J):
            for c in range(C):
                g = who[s, c] * groups + j % groups
                store(top, g, larger(load(top, g), load(logits, at + (s * J + j) * C + c)))
    for s in range(S):
        for j in range(J):
            for c in range(C):
                g = who[s, c] * groups + j % groups
                here = at + (s * J + j) * C + c
                above = load(logits, here) - load(top, g)
                store(logits, here, above)
                store(norm, g, load(norm, g) + exp(above))
    for row in range(len(norm)):
        store(norm, row, log(load(norm, row)))
    for s in range(S):
        for j in range(J):
            for c in range(C):
                g = who[s, c] * groups + j % groups
                here = at + (s * J + j) * C + c
                store(logits, here, load(logits, here) - load(norm, g))


@part
def _weigh(w: Any, C: int) -> Any:
    """w [c] = exp(s_c) / sum_c exp(s_c) in place; returns log sum_c exp(s_c)."""
    top = load(w, 0)
    for c in range(1, C):
        top = larger(top, load(w, c))
    whole = fill(w, 0.0)
    for c in range(C):
        e = exp(load(w, c) - top)
        store(w, c, e)
        whole = whole + e
    part = 1.0 / whole
    for c in range(C):
        store(w, c, load(w, c) * part)
    return top + log(whole)


@part
def _fit_mean(V: Any, w: Any, C: int, fits: Any, at: int) -> None:
    """mean_h = sum_c w_c V_ch."""
    zero = fill(V, 0.0)
    for row in range(0, POSE, 4):
        mean = zero, zero, zero, zero
        for c in range(C):
            mean = fma4(load(w, c), load4(V, c * POSE + row), mean)
        store(fits, at + row, mean)


@part
def _fit_variance(V: Any, w: Any, C: int, fits: Any, at: int, least: float) -> None:
    """variance_h = sum_c w_c (V_ch - mean_h)^2 + least."""
    zero = fill(V, 0.0)
    for row in range(0, POSE, 4):
        m0, m1, m2, m3 = load4(fits, at + row)
        variance = zero, zero, zero, zero
        for c in range(C):
            v0, v1, v2, v3 = load4(V, c * POSE + row)
            d0 = v0 - m0
            d1 = v1 - m1
            d2 = v2 - m2
            d3 = v3 - m3
            variance = fma4(load(w, c), (d0 * d0, d1 * d1, d2 * d2, d3 * d3), variance)
        v0, v1, v2, v3 = variance
        store(fits, at + POSE + row, (v0 + least, v1 + least, v2 + least, v3 + least))


@part
def _distances(V: Any, C: int, fits: Any, at: int, q: Any) -> None:
    """q [c] = sum_h (V_ch - mean_h)^2 / variance_h."""
    for row in range(0, POSE, 4):
        m0, m1, m2, m3 = load4(fits, at + row)
        r0, r1, r2, r3 = load4(fits, at + POSE + row)
        r0 = 1.0 / r0
        r1 = 1.0 / r1
        r2 = 1.0 / r2
        r3 = 1.0 / r3
        for c in range(C):
            v0, v1, v2, v3 = load4(V, c * POSE + row)
            d0 = v0 - m0
            d1 = v1 - m1
            d2 = v2 - m2
            d3 = v3 - m3
            some = (d0 * d0) * r0 + (d1 * d1) * r1
            some = some + ((d2 * d2) * r2 + (d3 * d3) * r3)
            store(q, c, some if row == 0 else load(q, c) + some)


@part
def _keep_mean(fits: Any, at: int, previous: Any) -> None:
    """The mean at row `at`, or the origin before the first iteration (at < 0)."""
    for h in range(POSE):
        store(previous, h, load(fits, at + h) if at >= 0 else fill(fits, 0.0))


@part
def _damp(fits: Any, at: int, previous: Any, damping: float) -> None:
    """mean <- mean + damping (previous - mean)."""
    for h in range(POSE):
        mean = load(fits, at + h)
        store(fits, at + h, mean + (load(previous, h) - mean) * damping)


@part
def _tell(q: Any, C: int, coupling: Any, b: int, s: int, j: int) -> None:
    """coupling [b s c j] = R = exp(q) for those of the samples b, b + 1 .. that exist."""
    for c in range(C):
        store(q, c, exp(load(q, c)))
    for l in range(min(q.shape[1], len(coupling) - b)):
        for c in range(C):
            coupling[b + l, s, c, j] = q[c, l]


@part
def _switch(fits: Any, at: int, lse: Any, most: Any, lam: float, beta_a: float, beta_u: float) -> None:
    """mass = sum_c R a and logit = lambda (beta_a - mass sum_h (beta_u + log sigma_h))."""
    mass = exp(lse + most)
    cost = (log_volume(fits, at) * 0.5 + POSE * beta_u) * mass
    store(fits, at + LSE, lse)
    store(fits, at + MASS, mass)
    store(fits, at + LOGIT, (beta_a - cost) * lam)


@part
def _bid(fits: Any, at: int, beta_u: float, least: float, descent: bool, q: Any, C: int) -> None:
    """q [c] from distances to logits: log (a_j N_ij), or -a_j energy_ij."""
    z = load(fits, at + LOGIT)
    volume = log_volume(fits, at)
    if descent:
        on = logistic(z)
        floor = fill(fits, 0.0)
        for h in range(POSE):
            floor = floor + least / load(fits, at + POSE + h)
        base = on * -1.0 * ((volume + floor) * 0.5 + POSE * (beta_u - 0.5))
        slope = on * -0.5
    else:
        base = _log_logistic(z) - (volume + POSE * LOG_2PI) * 0.5
        slope = fill(fits, -0.5)
    for c in range(C):
        store(q, c, base + slope * load(q, c))


@loop
def forward(
    start: int,
    stop: int,
    X: Any,
    A: Any,
    W: Any,
    offset: Any,
    beta_a: Any,
    beta_u: Any,
    who: Any,
    first: Any,
    lam: Any,
    least: float,
    damping: float,
    descent: bool,
    groups: int,
    kept: bool,
    shares: Any,
    fits: Any,
    coupling: Any,
) -> None:
    """Route the blocks start .. stop; `kept` says that shares and fits have room for all iterations, not only one."""
    (S, C) = who.shape
    J = len(W)
    T = len(lam)
    children = len(first)
    L = X.shape[1]
    V = np.empty((C * POSE, L), X.dtype)
    w = np.empty((C, L), X.dtype)
    q = np.empty((C, L), X.dtype)
    top = np.empty((children * groups, L), X.dtype)
    norm = np.empty((children * groups, L), X.dtype)
    previous = np.empty((POSE, L), X.dtype)
    logits = shares if kept else np.empty((S * J * C, L), X.dtype)
    for block in range(start, stop):
        x = block * children
        for t in range(T):
            old = (block * (T - 1) + t - 1) * S * J * C if kept else 0
            new = (block * (T - 1) + t) * S * J * C if kept else 0
            if t > 0:
                _share_out(logits, old, top, norm, who, J, groups)
            for s in range(S):
                most = loudest(A, x, who, s)
                for j in range(J):
                    here = (s * J + j) * C
                    at = ((((block * T + t) if kept else block) * S + s) * J + j) * FIT
                    before = -1 if t == 0 else (at - S * J * FIT if kept else at)
                    for c in range(C):
                        child = who[s, c]
                        log_R = load(logits, old + here + c) if t > 0 else fill(X, first[child])
                        store(q, c, log_R)
                        store(w, c, log_R + (load(A, x + child) - most))
                    lse = _weigh(w, C)
                    cast_votes(X, x, W, offset, j, who, s, V)
                    if damping > 0:
                        _keep_mean(fits, before, previous)
                    _fit_mean(V, w, C, fits, at)
                    if damping > 0:
                        _damp(fits, at, previous, damping)
                    _fit_variance(V, w, C, fits, at, least)
                    _switch(fits, at, lse, most, lam[t], beta_a[j], beta_u[j])
                    if t + 1 == T:
                        _tell(q, C, coupling, block * L, s, j)
                    else:
                        _distances(V, C, fits, at, q)
                        _bid(fits, at, beta_u[j], least, descent, q, C)
                        for c in range(C):
                            store(logits, new + here + c, load(q, c))
