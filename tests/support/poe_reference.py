"""Hauser 2019 as printed: plain floats, one loop per index, no tensor.

Written from the paper, not from the library. A child is x[i][d], a hidden capsule h[j][k], a coupling c[i][j], the
weights W[i][j][k][d], the decoder's U[j][i][d][k]; all of one image.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

__all__ = [
    "Pass",
    "algorithm_1",
    "cosine",
    "couple",
    "energy",
    "expect",
    "free_energy",
    "gates",
    "length",
    "log_slope",
    "phase",
    "ranks",
    "share_out",
    "slab_energy",
    "slab_phase",
    "squash",
    "states",
    "support",
    "uniform",
    "update_U",
    "weigh",
]

Vector = list[float]
Matrix = list[list[float]]
Cube = list[list[list[float]]]
Weights = list[list[list[list[float]]]]


def dot(x: Vector, y: Vector) -> float:
    return sum(a * b for a, b in zip(x, y, strict=True))


def length(x: Vector) -> float:
    return math.sqrt(dot(x, x))


def cosine(x: Vector, y: Vector) -> float:
    return dot(x, y) / length(x) / length(y) if length(x) > 0 and length(y) > 0 else 0.0


def times(A: Matrix, x: Vector) -> Vector:
    return [dot(row, x) for row in A]


def transposed(A: Matrix) -> Matrix:
    return [[row[n] for row in A] for n in range(len(A[0]))]


def squash(z: Vector) -> Vector:
    """Eq. 4: |z|² / (1 + |z|²) z / |z|."""
    size = length(z)
    return [size**2 / (1 + size**2) * e / size for e in z] if size > 0 else [0.0 for _ in z]


# --- Section 2.2: routing ---------------------------------------------------------------------------------------------


def uniform(I: int, J: int, over: str) -> Matrix:
    return [[1 / (I if over == "children" else J) for _ in range(J)] for _ in range(I)]


def normalized(logits: Matrix, over: str) -> Matrix:
    """exp(b_ij), divided by its sum over the children i of a parent or over the parents j of a child."""
    I, J = len(logits), len(logits[0])
    e = [[math.exp(logits[i][j]) for j in range(J)] for i in range(I)]
    c = [[0.0] * J for _ in range(I)]
    for i in range(I):
        for j in range(J):
            total = sum(e[n][j] for n in range(I)) if over == "children" else sum(e[i][n] for n in range(J))
            c[i][j] = e[i][j] / total
    return c


def couple(x: Matrix, W: Weights, iterations: int, over: str) -> Matrix:
    """RoutingByAgreement(x, W): the cosine between each vote and the collective prediction is added to its logit."""
    I, J = len(x), len(W[0])
    logits = [[0.0] * J for _ in range(I)]
    c = normalized(logits, over)
    for _ in range(iterations - 1):
        z = weigh(x, W, c)
        for i in range(I):
            for j in range(J):
                logits[i][j] += cosine(times(W[i][j], x[i]), squash(z[j]))
        c = normalized(logits, over)
    return c


def weigh(x: Matrix, W: Weights, c: Matrix, b: Matrix | None = None) -> Matrix:
    """Eq. 3: z_j = sum_i c_ij W_ij x_i, and b_j where there is one."""
    J, K, D = len(W[0]), len(W[0][0]), len(x[0])
    z = [[b[j][k] if b else 0.0 for k in range(K)] for j in range(J)]
    for i in range(len(x)):
        for j in range(J):
            for k in range(K):
                for d in range(D):
                    z[j][k] += c[i][j] * W[i][j][k][d] * x[i][d]
    return z


def expect(h: Matrix, W: Weights, c: Matrix, gain: float = 1.0) -> Matrix:
    """Routing in reverse: z_i = sum_j c_ij W_ijᵀ h_j, times a gain where there is one."""
    I, J, K, D = len(W), len(W[0]), len(W[0][0]), len(W[0][0][0])
    z = [[0.0] * D for _ in range(I)]
    for i in range(I):
        for j in range(J):
            for k in range(K):
                for d in range(D):
                    z[i][d] += gain * c[i][j] * W[i][j][k][d] * h[j][k]
    return z


# --- Section 3: energy ------------------------------------------------------------------------------------------------


def states(J: int) -> Iterator[tuple[int, ...]]:
    """Every way in which J capsules can be on or off."""
    return itertools.product((0, 1), repeat=J)


def energy(z: Matrix, h: tuple[int, ...]) -> float:
    """Eq. 7: E = -sum_j log(|z_j|²) h_j."""
    return -sum(math.log(dot(z[j], z[j])) * h[j] for j in range(len(z)))


def free_energy(z: Matrix, m: Vector | None = None) -> float:
    """-sum_j m_j log(1 + |z_j|²)."""
    return -sum((m[j] if m else 1.0) * math.log(1 + dot(z[j], z[j])) for j in range(len(z)))


def log_slope(z: Matrix, x: Matrix, c: Matrix) -> Weights:
    """d log |z_j|² / dW_ij = 2 c_ij z_j x_iᵀ / |z_j|², as under eq. 17; [i][j][k][d]."""
    return [
        [[[2 * c[i][j] / dot(z[j], z[j]) * z_k * x_d for x_d in x[i]] for z_k in z[j]] for j in range(len(z))]
        for i in range(len(x))
    ]


def phase(z: Matrix, x: Matrix, c: Matrix, m: Vector | None = None) -> Weights:
    """One of the two terms of eq. 18: 2 c_ij m_j z_j x_iᵀ / (1 + |z_j|²); [i][j][k][d]."""
    I, J, K, D = len(x), len(z), len(z[0]), len(x[0])
    term = [[[[0.0] * D for _ in range(K)] for _ in range(J)] for _ in range(I)]
    for i in range(I):
        for j in range(J):
            for k in range(K):
                for d in range(D):
                    gate = m[j] if m else 1.0
                    term[i][j][k][d] = 2 * c[i][j] * gate * z[j][k] * x[i][d] / (1 + dot(z[j], z[j]))
    return term


# --- Section 4.2: capsules on S^m x R^n x (0, 1) ----------------------------------------------------------------------


def slab_energy(s: Matrix, r: Matrix, h: tuple[int, ...], rho: Matrix) -> float:
    """E = 1/2 sum_j |rho_j|² - sum_j h_j (log |s_j|² + rho_j . r_j)."""
    total = 0.0
    for j in range(len(s)):
        total += dot(rho[j], rho[j]) / 2 - h[j] * (math.log(dot(s[j], s[j])) + dot(rho[j], r[j]))
    return total


def slab_phase(s: Matrix, r: Matrix, x: Matrix, c: Matrix) -> Weights:
    """P_j c_ij (2 s_j / |s_j|², r_j) x_iᵀ with P_j = sigmoid(log |s_j|² + |r_j|² / 2); [i][j][k][d]."""
    term: Weights = []
    for i in range(len(x)):
        term.append([])
        for j in range(len(s)):
            q = dot(s[j], s[j])
            P = 1 / (1 + math.exp(-math.log(q) - dot(r[j], r[j]) / 2))
            slope = [2 * P * e / q for e in s[j]] + [P * e for e in r[j]]
            term[i].append([[c[i][j] * e * x_d for x_d in x[i]] for e in slope])
    return term


class Pass(NamedTuple):
    """Every line of Algorithm 1 for one image."""

    c: Matrix
    z: Matrix
    x: Matrix
    model_z_i: Matrix
    model_x_i: Matrix
    model_z: Matrix
    model_x: Matrix
    delta: Weights


def algorithm_1(x_i: Matrix, W: Weights, iterations: int, over: str) -> Pass:
    """The body of the loop over epochs, up to the update of the weights."""
    c = couple(x_i, W, iterations, over)  # find routing coefficients
    z = weigh(x_i, W, c)  # route capsules forward
    x = [squash(z_j) for z_j in z]  # squash
    model_z_i = expect(x, W, c)  # reconstruct input capsules
    model_x_i = [squash(z_i) for z_i in model_z_i]  # squash
    model_z = weigh(model_x_i, W, c)  # reconstruct output capsules
    model_x = [squash(z_j) for z_j in model_z]  # squash
    up, down = phase(z, x_i, c), phase(model_z, model_x_i, c)
    delta = [
        [
            [[p - q for p, q in zip(*rows, strict=True)] for rows in zip(a, b, strict=True)]
            for a, b in zip(up[i], down[i], strict=True)
        ]
        for i in range(len(x_i))
    ]
    return Pass(c, z, x, model_z_i, model_x_i, model_z, model_x, delta)  # calculate gradient


# --- Competition (Rawlinson 2018) inside it ---------------------------------------------------------------------------


def support(x: Matrix, W: Weights, z: Matrix) -> Vector:
    """1 + the cosine, over all children and their numbers, between x and the picture W_jᵀ z_j of capsule j alone."""
    image = [e for x_i in x for e in x_i]
    result = []
    for j in range(len(z)):
        picture = [e for i in range(len(x)) for e in times(transposed(W[i][j]), z[j])]
        result.append(1 + cosine(image, picture))
    return result


def ranks(support: Vector) -> list[int]:
    """How many do better; of equals the first."""
    return [
        sum(s > support[j] or (s == support[j] and n < j) for n, s in enumerate(support)) for j in range(len(support))
    ]


def gates(ranks: list[int], gamma: float) -> Vector:
    """exp(-gamma rank / (J - 1)), and 0 below .01."""
    m = [math.exp(-gamma * r / (len(ranks) - 1)) for r in ranks]
    return [e if e >= 0.01 else 0.0 for e in m]


# --- Section 4.1: the decoder -----------------------------------------------------------------------------------------


def share_out(h: Matrix, U: Weights, iterations: int = 3) -> Matrix:
    """e[j][i]: routing by agreement from the capsules to the children; a capsule that is 0 is not there."""
    J, I = len(U), len(U[0])
    on = [j for j in range(J) if length(h[j]) > 0]
    votes = [[times(U[j][i], h[j]) for i in range(I)] for j in range(J)]
    logits = [[0.0] * I for _ in range(J)]
    e = [[1 / len(on) if j in on else 0.0 for _ in range(I)] for j in range(J)]
    for _ in range(iterations - 1):
        for i in range(I):
            total = [sum(e[j][i] * votes[j][i][d] for j in on) for d in range(len(votes[0][0]))]
            for j in on:
                logits[j][i] += cosine(votes[j][i], total)
            for j in on:
                e[j][i] = math.exp(logits[j][i]) / sum(math.exp(logits[n][i]) for n in on)
    return e


def update_U(U: Weights, h: Matrix, z: Matrix, e: Matrix) -> Weights:
    """dU_ji = 2 e_ji (z_i x_jᵀ / (1 + |z_i|²) - z~_i x~_jᵀ / (1 + |z~_i|²)); [j][i][d][k]."""
    J, I, D, K = len(U), len(U[0]), len(U[0][0]), len(U[0][0][0])
    model_z = [[sum(e[j][i] * dot(U[j][i][d], h[j]) for j in range(J)) for d in range(D)] for i in range(I)]
    back: Cube = [[times(transposed(U[j][i]), model_z[i]) for i in range(I)] for j in range(J)]
    model_h = [squash([sum(e[j][i] * back[j][i][k] for i in range(I)) for k in range(K)]) for j in range(J)]
    change = [[[[0.0] * K for _ in range(D)] for _ in range(I)] for _ in range(J)]
    for j in range(J):
        for i in range(I):
            for d in range(D):
                for k in range(K):
                    data = z[i][d] * h[j][k] / (1 + dot(z[i], z[i]))
                    model = model_z[i][d] * model_h[j][k] / (1 + dot(model_z[i], model_z[i]))
                    change[j][i][d][k] = 2 * e[j][i] * (data - model)
    return change
