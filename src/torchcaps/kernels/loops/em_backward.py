"""EM routing of matrix capsules, backward through all iterations; names and arrays as in `loops.em`.

Write g_x for the derivative of the loss by x, d = V - mu^t, and let iteration t have been

    s = log R + log a     w = softmax_c s     m = sum_c w V   mu = m + damping (mu^(t-1) - m)   v = sum_c w d^2 + least
    mass = sum_c e^s      z = lambda (beta_a - mass (16 beta_u + 1/2 sum_h log v))
    logit l = log logistic(z) - 1/2 sum_h (d^2 / v + log v + log 2 pi), or -logistic(z) energy

(1) The next iteration's log R = l - logsumexp l gives g_l = g_s - R sum g_s, the sum over a child's rivals. With k = 1
    (paper) or logistic(z) (descent), S0 = sum_c g_l, S1 = sum_c g_l d and S2 = sum_c g_l d^2 are all that is needed:

    g_mu = k S1 / v     g_v = k (S2 / v - S0) / (2 v)     g_z = S0 (1 - logistic(z))

    descent: also g_v += k least S0 / (2 v^2), and g_z = -k (1 - k) sum_c g_l energy_c, which S0 and S2 give too.

(2) Backward through the fit, with g_cost = -lambda g_z:

    g_v += mass g_cost / (2 v)     g_mu -= 2 g_v (m - mu)     g_m = (1 - damping) g_mu     g_mu^(t-1) += damping g_mu
    g_s = w (sum_h (g_m d + g_v d^2) + constant),   constant = -sum_h (g_m (m - mu) + g_v (v - least)) + mass g_mass

    where the constant holds what softmax subtracts, sum_c w g_w, which needs no pass over the votes of its own.

(3) When all iterations are through, the votes' own derivative is

    g_V = sum_t w^t (g_m + 2 g_v d) - k g_l^(t+1) d / v,     g_M = g_V W^T     g_W = M^T g_V

Steps 1 (of t + 1) and 2 (of t) of a position and a parent, and for t = 0 also step 3, share one computation of the
votes.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from torchcaps.kernels.loops import loop, part
from torchcaps.kernels.loops.elementary import exp
from torchcaps.kernels.loops.em import (
    FIT,
    LOGIT,
    LSE,
    MASS,
    POSE,
    cast_votes,
    fill,
    load,
    load4,
    log_volume,
    logistic,
    loudest,
    store,
)
from torchcaps.kernels.loops.simd import fma4, total

__all__ = ["backward"]

SLOPE = 2 * POSE
"""Rows of a parent's derivatives: g_mu 16, g_v 16."""


@part
def _weights(
    A: Any, x: int, who: Any, s: int, most: Any, first: Any, shares: Any, log_R: int, lse: Any, w: Any
) -> None:
    """w [c] = exp(log R + log a - lse), log R from row `log_R` of shares or, if that is negative, from `first`."""
    for c in range(who.shape[1]):
        child = who[s, c]
        share = load(shares, log_R + c) if log_R >= 0 else fill(A, first[child])
        store(w, c, exp(share + (load(A, x + child) - most) - lse))


@part
def _choose(g: Any, at: int, shares: Any, log_R: int, rivals: Any, who: Any, s: int, j: int, groups: int) -> Any:
    """g [c] from g_s to g_l = g_s - R sum g_s in place; returns S0 = sum_c g_l."""
    S0 = fill(g, 0.0)
    for c in range(who.shape[1]):
        R = exp(load(shares, log_R + c))
        g_l = load(g, at + c) - R * load(rivals, who[s, c] * groups + j % groups)
        store(g, at + c, g_l)
        S0 = S0 + g_l
    return S0


@part
def _sums(V: Any, g: Any, at: int, C: int, fits: Any, fit: int, slopes: Any, slope: int) -> None:
    """S1 = sum_c g_l d and S2 = sum_c g_l d^2, to the rows of g_mu and g_v."""
    zero = fill(V, 0.0)
    for row in range(0, POSE, 4):
        m0, m1, m2, m3 = load4(fits, fit + row)
        S1 = S2 = (zero, zero, zero, zero)
        for c in range(C):
            g_l = load(g, at + c)
            v0, v1, v2, v3 = load4(V, c * POSE + row)
            d0 = v0 - m0
            d1 = v1 - m1
            d2 = v2 - m2
            d3 = v3 - m3
            S1 = fma4(g_l, (d0, d1, d2, d3), S1)
            S2 = fma4(g_l, (d0 * d0, d1 * d1, d2 * d2, d3 * d3), S2)
        store(slopes, slope + row, S1)
        store(slopes, slope + POSE + row, S2)


@part
def _bid_back(
    fits: Any,
    fit: int,
    slopes: Any,
    slope: int,
    S0: Any,
    beta_u: float,
    least: float,
    descent: bool,
    g_beta: Any,
    beta: int,
) -> Any:
    """Step 1 from S0, S1, S2 to g_mu and g_v in place; returns g_z."""
    on = logistic(load(fits, fit + LOGIT))
    k = on if descent else fill(fits, 1.0)
    extra = S0 * least if descent else fill(fits, 0.0)
    far = fill(fits, 0.0)
    floor = fill(fits, 0.0)
    for h in range(POSE):
        inverse = 1.0 / load(fits, fit + POSE + h)
        S1 = load(slopes, slope + h)
        S2 = load(slopes, slope + POSE + h)
        store(slopes, slope + h, k * S1 * inverse)
        store(slopes, slope + POSE + h, k * ((S2 + extra) * inverse - S0) * (inverse * 0.5))
        far = far + S2 * inverse
        floor = floor + inverse * least
    if not descent:
        return S0 * (1.0 - on)
    energy = far * 0.5 + S0 * ((log_volume(fits, fit) + floor) * 0.5 + POSE * (beta_u - 0.5))
    store(g_beta, beta + 1, load(g_beta, beta + 1) - on * S0 * POSE)
    return on * (on - 1.0) * energy


@part
def _fit_back(
    fits: Any,
    fit: int,
    before: int,
    slopes: Any,
    slope: int,
    g_z: Any,
    lam: float,
    beta_u: float,
    least: float,
    damping: float,
    g_beta: Any,
    beta: int,
) -> Any:
    """Step 2: completes g_mu and g_v; returns the constant of g_s."""
    mass = load(fits, fit + MASS)
    g_cost = g_z * (-lam)
    store(g_beta, beta, load(g_beta, beta) - g_cost)
    store(g_beta, beta + 1, load(g_beta, beta + 1) + g_cost * mass * POSE)
    constant = mass * g_cost * (log_volume(fits, fit) * 0.5 + POSE * beta_u)
    for h in range(POSE):
        variance = load(fits, fit + POSE + h)
        g_v = load(slopes, slope + POSE + h) + mass * g_cost * 0.5 / variance
        store(slopes, slope + POSE + h, g_v)
        constant = constant - g_v * (variance - least)
        if 0 < damping < 1:
            move = load(fits, fit + h) - (load(fits, before + h) if before >= 0 else fill(fits, 0.0))
            gap = move * (damping / (1 - damping))  # m - mu
            g_mu = load(slopes, slope + h) - g_v * gap * 2.0
            store(slopes, slope + h, g_mu)
            constant = constant - g_mu * gap * (1 - damping)
    return constant


@part
def _pull(
    V: Any, C: int, fits: Any, fit: int, slopes: Any, slope: int, kept: float, w: Any, constant: Any, q: Any
) -> None:
    """q [c] = g_s = w (sum_h (g_m d + g_v d^2) + constant), with g_m = kept g_mu."""
    for row in range(0, POSE, 4):
        m0, m1, m2, m3 = load4(fits, fit + row)
        a0, a1, a2, a3 = load4(slopes, slope + row)
        a0 = a0 * kept
        a1 = a1 * kept
        a2 = a2 * kept
        a3 = a3 * kept
        b0, b1, b2, b3 = load4(slopes, slope + POSE + row)
        for c in range(C):
            v0, v1, v2, v3 = load4(V, c * POSE + row)
            d0 = v0 - m0
            d1 = v1 - m1
            d2 = v2 - m2
            d3 = v3 - m3
            some = (a0 + b0 * d0) * d0 + (a1 + b1 * d1) * d1
            some = some + ((a2 + b2 * d2) * d2 + (a3 + b3 * d3) * d3)
            store(q, c, some + (constant if row == 0 else load(q, c)))
    for c in range(C):
        store(q, c, load(q, c) * load(w, c))


@part
def _vote_back(
    V: Any,
    C: int,
    fits: Any,
    fit: int,
    slopes: Any,
    slope: int,
    kept: float,
    descent: bool,
    w: Any,
    g: Any,
    at: int,
    add: bool,
    G: Any,
) -> None:
    """G [c 16] (+)= w (g_m + 2 g_v d) - k g_l d / v; the last iteration has no g_l (at < 0)."""
    k = logistic(load(fits, fit + LOGIT)) if descent else fill(fits, 1.0)
    for h in range(0, POSE, 2):
        m0 = load(fits, fit + h)
        m1 = load(fits, fit + h + 1)
        r0 = k / load(fits, fit + POSE + h)
        r1 = k / load(fits, fit + POSE + h + 1)
        a0 = load(slopes, slope + h) * kept
        a1 = load(slopes, slope + h + 1) * kept
        b0 = load(slopes, slope + POSE + h) * 2.0
        b1 = load(slopes, slope + POSE + h + 1) * 2.0
        for c in range(C):
            v = c * POSE + h
            w_c = load(w, c)
            g_l = load(g, at + c) if at >= 0 else fill(g, 0.0)
            x0 = w_c * a0 + (load(V, v) - m0) * (w_c * b0 - g_l * r0)
            x1 = w_c * a1 + (load(V, v + 1) - m1) * (w_c * b1 - g_l * r1)
            store(G, v, load(G, v) + x0 if add else x0)
            store(G, v + 1, load(G, v + 1) + x1 if add else x1)


@part
def _product_back(X: Any, x: int, W: Any, j: int, who: Any, s: int, G: Any, g_X: Any, g_W: Any) -> None:
    """g_M += G W^T, and g_W += M^T G summed over the lanes."""
    w = 0
    for c in range(who.shape[1]):
        at = (x + who[s, c]) * POSE
        v = c * POSE
        for row in range(0, POSE, 4):
            g0, g1, g2, g3 = load4(G, v + row)
            for k in range(4):
                some = g0 * W[j, w, 4 * k] + load(g_X, at + row + k)
                some = g1 * W[j, w, 4 * k + 1] + some
                some = g2 * W[j, w, 4 * k + 2] + some
                store(g_X, at + row + k, g3 * W[j, w, 4 * k + 3] + some)
        for k in range(4):
            m0 = load(X, at + k)
            m1 = load(X, at + k + 4)
            m2 = load(X, at + k + 8)
            m3 = load(X, at + k + 12)
            for n in range(4):
                some = m0 * load(G, v + n) + m1 * load(G, v + n + 4)
                some = m2 * load(G, v + n + 8) + some
                g_W[j, w, 4 * k + n] += total(m3 * load(G, v + n + 12) + some)
        w = w + 1 if w + 1 < W.shape[1] else 0


@loop
def backward(
    start: int,
    stop: int,
    X: Any,
    A: Any,
    W: Any,
    offset: Any,
    beta_u: Any,
    who: Any,
    first: Any,
    lam: Any,
    least: float,
    damping: float,
    descent: bool,
    groups: int,
    shares: Any,
    fits: Any,
    g_mean: Any,
    g_logit: Any,
    g_X: Any,
    g_A: Any,
    g_W: Any,
    g_beta: Any,
) -> None:
    """The derivatives of the blocks start .. stop, from those of the mean [s j 16] and of the logit [s j].

    Adds to g_X [child 16] and g_A [child], to g_W [j m 16] summed over all blocks, and to g_beta [j 2] (beta_a and
    beta_u).
    """
    (S, C) = who.shape
    J = len(W)
    T = len(lam)
    children = len(first)
    L = X.shape[1]
    kept = 1 - damping
    V = np.empty((C * POSE, L), X.dtype)
    G = np.empty((C * POSE, L), X.dtype)
    w = np.empty((C, L), X.dtype)
    q = np.empty((C, L), X.dtype)
    g = np.empty(((T - 1) * S * J * C, L), X.dtype)
    slopes = np.empty((T * S * J * SLOPE, L), X.dtype)
    rivals = np.empty((children * groups, L), X.dtype)
    new_rivals = np.empty((children * groups, L), X.dtype)
    for block in range(start, stop):
        x = block * children
        for t in range(T - 1, -1, -1):
            rivals, new_rivals = new_rivals, rivals
            new_rivals[:] = 0
            for s in range(S):
                most = loudest(A, x, who, s)
                for j in range(J):
                    here = s * J + j
                    beta = (block * J + j) * 2
                    fit = ((block * T + t) * S * J + here) * FIT
                    slope = (t * S * J + here) * SLOPE
                    next_fit = S * J * FIT
                    next_slope = S * J * SLOPE
                    pairs = S * J * C
                    log_R = (block * (T - 1) + t) * pairs + here * C  # of iteration t + 1
                    cast_votes(X, x, W, offset, j, who, s, V)
                    if t + 1 == T:
                        g_z = load(g_logit, block * S * J + here)
                        for h in range(POSE):
                            store(slopes, slope + h, load(g_mean, (block * S * J + here) * POSE + h))
                            store(slopes, slope + POSE + h, 0.0)
                    else:
                        at = t * pairs + here * C
                        S0 = _choose(g, at, shares, log_R, rivals, who, s, j, groups)
                        _sums(V, g, at, C, fits, fit, slopes, slope)
                        g_z = _bid_back(fits, fit, slopes, slope, S0, beta_u[j], least, descent, g_beta, beta)
                        if damping > 0:
                            for h in range(POSE):
                                more = load(slopes, slope + next_slope + h) * damping
                                store(slopes, slope + h, load(slopes, slope + h) + more)
                    before = fit - next_fit if t > 0 else -1
                    constant = _fit_back(
                        fits, fit, before, slopes, slope, g_z, lam[t], beta_u[j], least, damping, g_beta, beta
                    )
                    lse = load(fits, fit + LSE)
                    _weights(A, x, who, s, most, first, shares, log_R - pairs if t > 0 else -1, lse, w)
                    _pull(V, C, fits, fit, slopes, slope, kept, w, constant, q)
                    for c in range(C):
                        child = who[s, c]
                        g_s = load(q, c)
                        store(g_A, x + child, load(g_A, x + child) + g_s)
                        if t > 0:
                            row = child * groups + j % groups
                            store(new_rivals, row, load(new_rivals, row) + g_s)
                            store(g, (t - 1) * pairs + here * C + c, g_s)
                    if t > 0:
                        continue
                    for u in range(T):
                        if u > 0:
                            lse = load(fits, fit + u * next_fit + LSE)
                            _weights(A, x, who, s, most, first, shares, log_R + (u - 1) * pairs, lse, w)
                        _vote_back(
                            V,
                            C,
                            fits,
                            fit + u * next_fit,
                            slopes,
                            slope + u * next_slope,
                            kept,
                            descent,
                            w,
                            g,
                            u * pairs + here * C if u + 1 < T else -1,
                            u > 0,
                            G,
                        )
                    _product_back(X, x, W, j, who, s, G, g_X, g_W)
