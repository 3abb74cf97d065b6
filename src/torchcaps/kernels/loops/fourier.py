"""Short Fourier transforms of planes, one vector of channels at a time, there and back.

A plane is x[a, b] for the places a < A and b < B of a grid of N x N' places that is 0 elsewhere, and its spectrum

    D[k, n] = sum_ab x[a, b] exp(-2 pi i (n a / N + k b / N'))        x[a, b] = sum_kn D[k, n] exp(+ ...) / (N N')

with k up to N' / 2: the other columns are conjugates. Sums over b come first, then those over a, for n and N - n at
once, whose cosines are the same and whose sines are opposite. The arrays, with phases p, q < s of a stride s:

    x [o h w i]    planes x[o, s a + p, s b + q, i]          C, S    tables [2 n a] of cos and sin for rows, up to
    D [k n o (p q) (i 2)]    real, then imaginary parts              n = N / 2, and [2 k b] for columns
"""

from __future__ import annotations

from typing import Any

import numpy as np

from torchcaps.kernels.loops import loop, part
from torchcaps.kernels.loops.simd import BYTES, braid, fill, load, store, unbraid

__all__ = ["from_spectra", "to_spectra"]

Array = Any  # numpy arrays; inside a loop also vectors of lanes


@loop
def to_spectra(x: Array, D: Array, s: int, rows: Array, columns: Array, start: int, stop: int) -> None:
    """x -> D for the column frequencies of the table; the vectors of (o i) from start to stop."""
    L = BYTES // x.itemsize
    per = x.shape[3] // L
    A = rows.shape[2]
    B = columns.shape[2]
    plane = np.empty((A, B, L), x.dtype)
    T = np.empty((A, 2, L), x.dtype)
    for job in range(start, stop):
        o = job // per
        i = job % per * L
        for p in range(s):
            for q in range(s):
                _read(x, o, i, p, q, s, plane)
                for k in range(D.shape[0]):
                    _along_columns(plane, columns, k, T)
                    _along_rows(T, rows, D, k, o, p * s + q, i)


@part
def _read(x: Array, o: int, i: int, p: int, q: int, s: int, plane: Array) -> None:
    """The plane of a phase; places beyond the edge are 0."""
    for a in range(plane.shape[0]):
        for b in range(plane.shape[1]):
            inside = s * a + p < x.shape[1] and s * b + q < x.shape[2]
            store(plane, (a, b), load(x, (o, s * a + p, s * b + q, i)) if inside else fill(x, 0.0))


@part
def _along_columns(plane: Array, columns: Array, k: int, T: Array) -> None:
    """T[a] = sum_b x[a, b] exp(-2 pi i k b / N')."""
    zero = fill(plane, 0.0)
    for a in range(plane.shape[0]):
        re = im = zero
        for b in range(plane.shape[1]):
            x = load(plane, (a, b))
            re = re + columns[0, k, b] * x
            im = im - columns[1, k, b] * x
        store(T, (a, 0), re)
        store(T, (a, 1), im)


@part
def _along_rows(T: Array, rows: Array, D: Array, k: int, o: int, pq: int, i: int) -> None:
    """D[k, n] = sum_a T[a] exp(-2 pi i n a / N) for all n."""
    N = D.shape[1]
    zero = fill(T, 0.0)
    for n in range(N // 2 + 1):
        cr = ci = sr = si = zero
        for a in range(T.shape[0]):
            re = load(T, (a, 0))
            im = load(T, (a, 1))
            cr = cr + rows[0, n, a] * re
            ci = ci + rows[0, n, a] * im
            sr = sr + rows[1, n, a] * re
            si = si + rows[1, n, a] * im
        store(D, (k, n, o, pq, 2 * i), braid(cr + si, ci - sr))
        if 0 < n < N - n:
            store(D, (k, N - n, o, pq, 2 * i), braid(cr - si, ci + sr))


@loop
def from_spectra(D: Array, x: Array, s: int, rows: Array, columns: Array, start: int, stop: int) -> None:
    """x += what the column frequencies of the table, whose weights are in it, say of each place."""
    L = BYTES // x.itemsize
    per = x.shape[3] // L
    A = rows.shape[2]
    B = columns.shape[2]
    N = D.shape[1]
    plane = np.empty((A, B, L), x.dtype)
    Y = np.empty((N // 2 + 1, 4, L), x.dtype)
    for job in range(start, stop):
        o = job // per
        i = job % per * L
        for p in range(s):
            for q in range(s):
                _read(x, o, i, p, q, s, plane)
                for k in range(D.shape[0]):
                    _fold(D, k, o, p * s + q, i, Y)
                    _back(Y, rows, columns, k, plane)
                _write(plane, o, i, p, q, s, x)


@part
def _fold(D: Array, k: int, o: int, pq: int, i: int, Y: Array) -> None:
    """Sums and differences of the frequencies n and N - n, which share their cosines and sines."""
    N = D.shape[1]
    zero = fill(Y, 0.0)
    for n in range(N // 2 + 1):
        re, im = unbraid(load(D, (k, n, o, pq, 2 * i)), load(D, (k, n, o, pq, 2 * i + Y.shape[2])))
        other_re = other_im = zero
        if 0 < n < N - n:
            other_re, other_im = unbraid(
                load(D, (k, N - n, o, pq, 2 * i)), load(D, (k, N - n, o, pq, 2 * i + Y.shape[2]))
            )
        store(Y, (n, 0), re + other_re)
        store(Y, (n, 1), im + other_im)
        store(Y, (n, 2), re - other_re)
        store(Y, (n, 3), im - other_im)


@part
def _back(Y: Array, rows: Array, columns: Array, k: int, plane: Array) -> None:
    """x[a, b] += Re(exp(2 pi i k b / N') sum_n Y[n] exp(2 pi i n a / N))."""
    for a in range(plane.shape[0]):
        re = im = fill(plane, 0.0)
        for n in range(Y.shape[0]):
            c = rows[0, n, a]
            s = rows[1, n, a]
            re = re + c * load(Y, (n, 0)) - s * load(Y, (n, 3))
            im = im + c * load(Y, (n, 1)) + s * load(Y, (n, 2))
        for b in range(plane.shape[1]):
            store(plane, (a, b), load(plane, (a, b)) + columns[0, k, b] * re - columns[1, k, b] * im)


@part
def _write(plane: Array, o: int, i: int, p: int, q: int, s: int, x: Array) -> None:
    """The plane of a phase back to its places; what lies beyond the edge is dropped."""
    for a in range(plane.shape[0]):
        for b in range(plane.shape[1]):
            if s * a + p < x.shape[1] and s * b + q < x.shape[2]:
                store(x, (o, s * a + p, s * b + q, i), load(plane, (a, b)))
