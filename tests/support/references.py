"""Routing as the papers print it: one loop per index, plain floats, no vectorization, no log space.

Written from Sabour 2017 (procedure 1), Hauser 2019 (section 2.2), Hinton 2018 (procedure 1), De Sousa Ribeiro 2020 (the
equations of its public code) and Mazzia 2021, not from the library.
Exponentials and shares of them, which a float may not hold (e^1000000), are Decimals.

Every function takes votes[p][n][j][k]: parent j at window position p gets this vote from the n-th child it sees.
who[p][n] names that child; a child that several positions see has the same name at each of them. A layer without
places is p = 0 alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from decimal import MAX_EMAX, MIN_EMIN, Context, Decimal, localcontext
from typing import Any, NamedTuple

import torch
from scipy.special import psi
from torch import Tensor

from torchcaps.kernels.votes import DenseVotes, Slots
from torchcaps.math.grid import Window
from torchcaps.routing import EM, ROUTERS, VB, Attention, Dynamic, RouterSettings
from torchcaps.routing.base import run_router
from torchcaps.types import Capsules, RoutingInfo

__all__ = [
    "REFERENCES",
    "Routed",
    "assert_equals_reference",
    "dynamic",
    "em",
    "everyone_once",
    "reference",
    "route_stored",
    "seen_by",
    "slots_of",
    "stored",
]

Votes = list[list[list[list[float]]]]  # [p][n][j][k]
Matrix = list[list[float]]
Cube = list[list[list[float]]]
Shares = list[list[list[Decimal]]]  # [p][n][j]
Who = list[list[Hashable]]  # [p][n]

WIDE = Context(prec=40, Emax=MAX_EMAX, Emin=MIN_EMIN)


class Routed(NamedTuple):
    """What a reference returns: pose[p][j][k], activation[p][j], coupling[p][n][j]."""

    pose: Cube
    activation: Matrix
    coupling: Cube


def everyone_once(children: int) -> Who:
    """The children of a layer without places."""
    return [list(range(children))]


def seen_by(window: Window, types: int) -> Who:
    """The children (row, column, type) that each position of a window sees, in the order of `Window.gather`."""
    who: Who = []
    for top in range(0, window.grid.height - window.kernel + 1, window.stride):
        for left in range(0, window.grid.width - window.kernel + 1, window.stride):
            seen: list[Hashable] = []
            for row in range(top, top + window.kernel):
                for column in range(left, left + window.kernel):
                    for kind in range(types):
                        seen.append((row, column, kind))
            who.append(seen)
    return who


# --- Who shares a child ---------------------------------------------------------------------------------------


def share_out(weight: Shares, who: Who, across_parents: bool) -> Shares:
    """R_ij = weight_ij / sum of the weights that the same child has with every parent that it can choose from."""
    total: dict[Hashable, Decimal] = {}
    for p in range(len(who)):
        for n in range(len(who[p])):
            for j in range(len(weight[p][n])):
                competing = who[p][n] if across_parents else (who[p][n], j)
                total[competing] = total.get(competing, Decimal(0)) + weight[p][n][j]
    share: Shares = []
    for p in range(len(who)):
        share.append([])
        for n in range(len(who[p])):
            share[p].append([])
            for j in range(len(weight[p][n])):
                competing = who[p][n] if across_parents else (who[p][n], j)
                share[p][n].append(weight[p][n][j] / total[competing])
    return share


def exponentials(logits: Cube) -> Shares:
    return [[[Decimal(x).exp() for x in row] for row in slots] for slots in logits]


def floats(shares: Shares) -> Cube:
    return [[[float(x) for x in row] for row in slots] for slots in shares]


def over_children(logits: Cube) -> Shares:
    """c_ij with sum_i c_ij = 1 for each parent at each position."""
    weight = exponentials(logits)
    share: Shares = []
    for p in range(len(logits)):
        share.append([])
        for n in range(len(logits[p])):
            share[p].append([])
            for j in range(len(logits[p][n])):
                total = sum((weight[p][m][j] for m in range(len(logits[p]))), Decimal(0))
                share[p][n].append(weight[p][n][j] / total)
    return share


# --- Dynamic routing ------------------------------------------------------------------------------------------


def length(x: list[float]) -> float:
    return math.sqrt(sum(e * e for e in x))


def squash(s: list[float]) -> list[float]:
    """|s|^2 / (1 + |s|^2)  s / |s|"""
    size = length(s)
    if size == 0:
        return [0.0 for _ in s]
    return [size**2 / (1 + size**2) * e / size for e in s]


def agree(vote: list[float], v: list[float], how: str) -> float:
    dot = sum(x * y for x, y in zip(vote, v, strict=True))
    if how == "dot":
        return dot
    if length(vote) == 0 or length(v) == 0:
        return 0.0
    return dot / length(vote) / length(v)


def dynamic(votes: Votes, who: Who, *, iterations: int, agreement: str, over: str, logits: str) -> Routed:
    """Procedure 1 of Sabour 2017, with the choices that Hauser 2019 makes."""
    P, J, K = len(votes), len(votes[0][0]), len(votes[0][0][0])
    b: Cube = [[[0.0 for _ in range(J)] for _ in votes[p]] for p in range(P)]  # line 2
    for _ in range(iterations):  # line 3
        c = floats(over_children(b) if over == "children" else share_out(exponentials(b), who, True))  # line 4
        v: Cube = []
        for p in range(P):
            v.append([])
            for j in range(J):
                s = [0.0] * K
                for n in range(len(votes[p])):
                    for k in range(K):
                        s[k] += c[p][n][j] * votes[p][n][j][k]  # line 5
                v[p].append(squash(s))  # line 6
        for p in range(P):
            for n in range(len(votes[p])):
                for j in range(J):
                    before = 0.0 if logits == "replaced" else b[p][n][j]
                    b[p][n][j] = before + agree(votes[p][n][j], v[p][j], agreement)  # line 7
    return Routed(v, [[length(v[p][j]) for j in range(J)] for p in range(P)], c)


# --- EM routing -----------------------------------------------------------------------------------------------


class Gaussian(NamedTuple):
    mu: list[float]
    variance: list[float]
    a: float


def logistic(x: float) -> float:
    return float(1 / (1 + Decimal(-x).exp()))


def assigned(R: list[Decimal], a: list[float]) -> list[Decimal]:
    """Line 2 of the M-STEP."""
    r = [R_i * Decimal(a_i) for R_i, a_i in zip(R, a, strict=True)]
    if sum(r) == 0:  # no child is active and line 3 reads 0 / 0: take children that are all equally faint
        r = [R_i * Decimal("1e-1000") for R_i in R]
    return r


def mixing(R: Shares, a: Matrix, J: int) -> Matrix:
    """Section 5: activations [p][j] proportional to the assigned sums of a capsule, with sum 1 over all the layer."""
    mass = [[sum(assigned([R_n[j] for R_n in R[p]], a[p]), Decimal(0)) for j in range(J)] for p in range(len(R))]
    total = sum((m for row in mass for m in row), Decimal(0))
    return [[float(m / total) for m in row] for row in mass]


def m_step(
    R: list[Decimal], a: list[float], V: Matrix, before: list[float], lam: float, beta_a: float, beta_u: float,
    settings: EM,
) -> Gaussian:  # fmt: skip
    """M-STEP for one parent: R[n] assignments, a[n] activations, V[n][h] votes."""
    r = assigned(R, a)
    mass = sum(r, Decimal(0))
    w = [float(r_i / mass) for r_i in r]
    mu, variance = [], []
    for h in range(len(V[0])):
        mean = sum(w[n] * V[n][h] for n in range(len(V)))  # line 3
        mean = (1 - settings.damping) * mean + settings.damping * before[h]
        mu.append(mean)
        variance.append(sum(w[n] * (V[n][h] - mean) ** 2 for n in range(len(V))) + settings.min_variance)  # line 4
    cost = sum((beta_u + math.log(math.sqrt(s2))) * float(mass) for s2 in variance)  # line 5
    return Gaussian(mu, variance, logistic(lam * (beta_a - cost)))  # line 6


def e_weight(vote: list[float], g: Gaussian, beta_u: float, settings: EM) -> Decimal:
    """What R_ij is proportional to: a_j p_j (E-STEP, lines 2 and 3), or what makes the free energy least."""
    if settings.assignment == "paper":
        quadratic = sum((x - m) ** 2 / (2 * s2) for x, m, s2 in zip(vote, g.mu, g.variance, strict=True))
        volume = Decimal(1)
        for s2 in g.variance:
            volume *= Decimal(2 * math.pi * s2)
        return Decimal(g.a) * Decimal(-quadratic).exp() / volume.sqrt()
    energy = 0.0
    for x, m, s2 in zip(vote, g.mu, g.variance, strict=True):
        energy += ((x - m) ** 2 + settings.min_variance) / (2 * s2) + math.log(s2) / 2 + beta_u - 0.5
    return Decimal(-g.a * energy).exp()


def em(votes: Votes, activation: Matrix, who: Who, beta_a: list[float], beta_u: list[float], settings: EM) -> Routed:
    """Procedure 1 of Hinton 2018; a child's first share is equal among the parents that see it."""
    P, J, K = len(votes), len(votes[0][0]), len(votes[0][0][0])
    across = settings.competition == "all"
    one: Shares = [[[Decimal(1)] * J for _ in votes[p]] for p in range(P)]
    R = share_out(one, who, across)  # line 2
    parents = [[Gaussian([0.0] * K, [1.0] * K, 0.5) for _ in range(J)] for _ in range(P)]
    for t in range(settings.iterations):  # line 3
        if t > 0:
            weight: Shares = []
            for p in range(P):
                weight.append([])
                for n in range(len(votes[p])):
                    row = [e_weight(votes[p][n][j], parents[p][j], beta_u[j], settings) for j in range(J)]
                    weight[p].append(row)
            R = share_out(weight, who, across)  # line 5
        lam = settings.final_inverse_temperature * (1 - settings.decay ** (t + 1))
        for p in range(P):
            for j in range(J):
                r = [R[p][n][j] for n in range(len(votes[p]))]
                V = [votes[p][n][j] for n in range(len(votes[p]))]
                before = parents[p][j].mu
                parents[p][j] = m_step(r, activation[p], V, before, lam, beta_a[j], beta_u[j], settings)  # line 4
        if settings.switch == "mixing":
            shares = mixing(R, activation, J)
            parents = [[parents[p][j]._replace(a=shares[p][j]) for j in range(J)] for p in range(P)]
    return Routed(
        [[parents[p][j].mu for j in range(J)] for p in range(P)],
        [[parents[p][j].a for j in range(J)] for p in range(P)],
        floats(R),
    )


# --- Variational Bayes routing --------------------------------------------------------------------------------


class Posterior(NamedTuple):
    """Of one parent: mean m, scale B, degrees of freedom nu, kappa, and the expectations L and P."""

    m: list[float]
    B: list[float]
    nu: float
    kappa: float
    L: float
    alpha: float


def vb_posterior(R: list[Decimal], a: list[float], V: Matrix, settings: VB) -> Posterior:
    """The M-step for one parent: R[n] assignments, a[n] activations, V[n][d] votes."""
    D = len(V[0])
    r = assigned(R, a)
    total = sum(r, Decimal(0))
    w = [float(r_i / total) for r_i in r]
    mass = float(total)
    kappa = settings.kappa + mass
    m, B = [], []
    for d in range(D):
        mean = sum(w[n] * V[n][d] for n in range(len(V)))
        scatter = mass * sum(w[n] * (V[n][d] - mean) ** 2 for n in range(len(V)))
        m.append(mass * mean / kappa)
        B.append(settings.scatter + scatter + settings.kappa * mass / kappa * mean**2)
    if settings.precision == "wishart":
        nu = D + 1 + mass
        digammas = sum(float(psi((nu - d) / 2)) for d in range(D))
    else:
        nu = 2 + mass
        digammas = sum(float(psi(nu / 2)) for _ in range(D))
    L = digammas + D * math.log(2) - sum(math.log(b) for b in B)
    return Posterior(m, B, nu, kappa, L, settings.alpha + mass)


def vb(votes: Votes, activation: Matrix, who: Who, beta: list[float], settings: VB) -> Routed:
    """Variational Bayes routing as its public code has it; the first shares are 1 / J at every place."""
    P, J, D = len(votes), len(votes[0][0]), len(votes[0][0][0])
    R: Shares = [[[Decimal(1) / Decimal(J)] * J for _ in votes[p]] for p in range(P)]
    parents: list[list[Posterior]] = []
    log_pi: Matrix = []
    for t in range(settings.iterations):
        if t > 0:
            rho: Shares = []
            for p in range(P):
                rho.append([])
                for n in range(len(votes[p])):
                    rho[p].append([])
                    for j in range(J):
                        q = parents[p][j]
                        far = sum((votes[p][n][j][d] - q.m[d]) ** 2 / q.B[d] for d in range(D))
                        Q = D / q.kappa + q.nu * far
                        log_rho = log_pi[p][j] + q.L / 2 - D / 2 * math.log(2 * math.pi) - Q / 2
                        rho[p][n].append(Decimal(log_rho).exp())
            R = share_with_background(rho, who, Decimal(settings.background).exp())
        parents = []
        for p in range(P):
            row = []
            for j in range(J):
                r = [R[p][n][j] for n in range(len(votes[p]))]
                row.append(vb_posterior(r, activation[p], [votes[p][n][j] for n in range(len(votes[p]))], settings))
            parents.append(row)
        log_pi = [[float(psi(q.alpha) - psi(sum(o.alpha for o in parents[p]))) for q in parents[p]] for p in range(P)]
    on: Matrix = []
    for p in range(P):
        H = [D / 2 * math.log(2 * math.pi * math.e) - q.L / 2 for q in parents[p]]
        on.append([logistic(beta[j] - math.exp(log_pi[p][j]) * H[j]) for j in range(J)])
    return Routed([[q.m for q in parents[p]] for p in range(P)], on, floats(R))


def share_with_background(weight: Shares, who: Who, background: Decimal) -> Shares:
    """R_ij = weight_ij / (background + the weights that the same child has with all parents at all places)."""
    total: dict[Hashable, Decimal] = {}
    for p in range(len(who)):
        for n in range(len(who[p])):
            total[who[p][n]] = total.get(who[p][n], background) + sum(weight[p][n], Decimal(0))
    return [[[x / total[who[p][n]] for x in weight[p][n]] for n in range(len(who[p]))] for p in range(len(who))]


# --- Attention routing ----------------------------------------------------------------------------------------


def attention(votes: Votes, who: Who, prior: Matrix, sharpness: float) -> Routed:
    """Agreement of all pairs of votes, softmax over parents, plus a prior; the coupling is the softmax alone."""
    P, J, K = len(votes), len(votes[0][0]), len(votes[0][0][0])
    logits: Cube = []
    for p in range(P):
        logits.append([])
        for n in range(len(votes[p])):
            logits[p].append([])
            for j in range(J):
                pairs = 0.0
                for m in range(len(votes[p])):
                    for k in range(K):
                        pairs += votes[p][n][j][k] * votes[p][m][j][k]
                logits[p][n].append(sharpness * pairs / math.sqrt(K))
    c = floats(share_out(exponentials(logits), who, True))
    pose: Cube = []
    for p in range(P):
        pose.append([])
        for j in range(J):
            s = [0.0] * K
            for n in range(len(votes[p])):
                for k in range(K):
                    s[k] += (c[p][n][j] + prior[n][j]) * votes[p][n][j][k]
            size = length(s)
            pose[p].append([-math.expm1(-size) * e / size if size else 0.0 for e in s])
    return Routed(pose, [[length(pose[p][j]) for j in range(J)] for p in range(P)], c)


# --- From tensors and back ------------------------------------------------------------------------------------


def _dynamic(votes: Votes, _: Matrix, who: Who, settings: Dynamic) -> Routed:
    return dynamic(
        votes,
        who,
        iterations=settings.iterations,
        agreement=settings.agreement,
        over=settings.over,
        logits=settings.logits,
    )


def _em(votes: Votes, a: Matrix, who: Who, settings: EM, beta_a: list[float], beta_u: list[float]) -> Routed:
    return em(votes, a, who, beta_a, beta_u, settings)


def _vb(votes: Votes, a: Matrix, who: Who, settings: VB, beta: list[float]) -> Routed:
    return vb(votes, a, who, beta, settings)


def _attention(votes: Votes, _: Matrix, who: Who, settings: Attention, prior: Matrix) -> Routed:
    return attention(votes, who, prior, settings.sharpness)


def _uniform(votes: Votes, _: Matrix, who: Who, settings: object) -> Routed:
    return dynamic(votes, who, iterations=1, agreement="dot", over="parents", logits="replaced")


REFERENCES: dict[str, Callable[..., Routed]] = {
    "dynamic": _dynamic,
    "em": _em,
    "vb": _vb,
    "attention": _attention,
    "uniform": _uniform,
}


def slots_of(votes: Tensor, window: Window | None, types: int = 1) -> Slots:
    """Who stands in which window, for votes [(b p) n j k]."""
    cpu = torch.device("cpu")
    return Slots.at_one_place(votes.shape[1], cpu) if window is None else Slots.of_window(window, types, cpu)


def stored(votes: Tensor, activation: Tensor, window: Window | None = None, types: int = 1) -> DenseVotes:
    """Votes [(b p) n j k] and the activations [b i] of all children, as a router takes them."""
    slots = slots_of(votes, window, types)
    return DenseVotes(torch.unflatten(votes, 0, (-1, slots.places)), activation.to(votes.dtype), slots)


def route_stored(
    name: str, votes: DenseVotes, settings: RouterSettings, trace: bool = False, **learned: Tensor
) -> tuple[Capsules, RoutingInfo]:
    """Call a router by name; parents [(b p) j k] and [(b p) j]."""
    parents, info = run_router(ROUTERS[name], votes, settings, learned, trace=trace)
    return Capsules(*(x.flatten(0, 1) for x in parents)), info


def reference(
    name: str, votes: Tensor, activation: Tensor, settings: Any, who: Who | None = None, **learned: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Votes [(b p) n j k] and activation [(b p) n] -> pose [(b p) j k], activation [(b p) j], coupling [(b p) n j].

    All in float64. Each image of the batch is routed by itself; without `who` there is one position an image.
    """
    who = who or everyone_once(votes.shape[1])
    scalars = {key: value.tolist() for key, value in learned.items()}
    images = []
    with localcontext(WIDE):
        for n in range(0, len(votes), len(who)):
            V, a = votes[n : n + len(who)], activation[n : n + len(who)]
            images.append(REFERENCES[name](V.tolist(), a.tolist(), who, settings, **scalars))
    pose, on, coupling = (
        torch.tensor([position for image in images for position in image[part]], dtype=torch.float64)
        for part in range(3)
    )
    return pose, on, coupling


def assert_equals_reference(
    name: str, votes: Tensor, activation: Tensor, settings: Any, tolerance: float, *,
    scale: float | None = None, window: Window | None = None, types: int = 1, **learned: Tensor,
) -> None:  # fmt: skip
    """The router and its reference agree, in numbers of [0, 1] to `tolerance`, in poses to `tolerance * scale`.

    Votes are [(b p) n j k], activations [b i] those of all children. Without `scale` it is the largest number of the
    pose.
    """
    given = stored(votes, activation, window, types)
    parents, info = route_stored(name, given, settings, **learned)
    seen = activation[:, given.slots.child].flatten(0, 1)  # [(b p) n]
    who = None if window is None else seen_by(window, types)
    pose, on, coupling = reference(name, votes, seen, settings, who, **learned)
    near = tolerance * (float(pose.abs().max()) if scale is None else scale)
    torch.testing.assert_close(parents.pose.double(), pose, rtol=0, atol=near)
    torch.testing.assert_close(parents.activation.double(), on, rtol=0, atol=tolerance)
    torch.testing.assert_close(info.coupling[-1].double(), coupling, rtol=0, atol=tolerance)
