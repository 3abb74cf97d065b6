"""Short Fourier transforms of planes, one vector of channels at a time, there and back.

A plane is x[a, b] for the places a < A and b < B of a grid of N x N' places that is 0 elsewhere, and its spectrum

    D[k, n] = sum_ab x[a, b] exp(-2 pi i (n a / N + k b / N'))        x[a, b] = sum_kn D[k, n] exp(+ ...) / (N N')

with k up to N' / 2: the other columns are conjugates. Sums over b come first, then those over a, for n and N - n at
once, whose cosines are the same and whose sines are opposite. The arrays, with phases p, q < s of a stride s:

    x [o h w i]    planes x[o, s a + p, s b + q, i]          C, S    tables [2 n a] of cos and sin for rows, up to
    D [k n o (p q) (i 2)]    real, then imaginary parts              n = N / 2, and [2 k b] for columns
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from torchcaps.kernels.loops import inline, loop
from torchcaps.kernels.loops.simd import Array, deinterleave, fill, interleave, load, store
from torchcaps.kernels.records import VECTOR_BYTES, Waves

__all__ = ["from_spectra", "to_spectra"]


class Plane(NamedTuple):
    """One plane: sample o, first channel i of a vector of channels, phase (p, q) of stride s."""

    o: int
    i: int
    p: int
    q: int
    s: int


@loop
def to_spectra(x: Array, D: Array, s: int, waves: Waves, start: int, stop: int) -> None:
    """Transform planes into spectra, for the column frequencies of the table.

    Args:
        x: [o h w i] planes.
        D: [k n o (p q) (i 2)] takes the spectra.
        s: Stride.
        waves: Cosines and sines.
        start: First vector of (o i).
        stop: Vector after the last one.
    """
    # Workspace of one plane: its values, and T between the two sums
    L = VECTOR_BYTES // x.itemsize
    per = x.shape[3] // L
    A = waves.rows.shape[2]
    B = waves.columns.shape[2]
    plane = np.empty((A, B, L), x.dtype)
    T = np.empty((A, 2, L), x.dtype)
    for job in range(start, stop):
        # All column frequencies of a plane while it is in the cache
        for p in range(s):
            for q in range(s):
                at = Plane(job // per, job % per * L, p, q, s)
                _read(x, at, plane)
                for k in range(D.shape[0]):
                    _along_columns(plane, waves.columns, k, T)
                    _along_rows(T, waves.rows, D, k, at)


@inline
def _read(x: Array, at: Plane, plane: Array) -> None:
    """Read the plane of a phase; places beyond the edge are 0."""
    for a in range(plane.shape[0]):
        for b in range(plane.shape[1]):
            row = at.s * a + at.p
            column = at.s * b + at.q
            inside = row < x.shape[1] and column < x.shape[2]
            store(plane, (a, b), load(x, (at.o, row, column, at.i)) if inside else fill(x, 0.0))


@inline
def _along_columns(plane: Array, columns: Array, k: int, T: Array) -> None:
    """Compute T[a] = sum_b x[a, b] exp(-2 pi i k b / N')."""
    zero = fill(plane, 0.0)
    for a in range(plane.shape[0]):
        re = im = zero
        for b in range(plane.shape[1]):
            x = load(plane, (a, b))
            re = re + columns[0, k, b] * x
            im = im - columns[1, k, b] * x
        store(T, (a, 0), re)
        store(T, (a, 1), im)


@inline
def _along_rows(T: Array, rows: Array, D: Array, k: int, at: Plane) -> None:
    """Compute D[k, n] = sum_a T[a] exp(-2 pi i n a / N) for all n."""
    N = D.shape[1]
    pq = at.p * at.s + at.q
    zero = fill(T, 0.0)
    for n in range(N // 2 + 1):
        # Sums with cosines and with sines, of real and imaginary parts: n and N - n differ in signs only
        cr = ci = sr = si = zero
        for a in range(T.shape[0]):
            re = load(T, (a, 0))
            im = load(T, (a, 1))
            cr = cr + rows[0, n, a] * re
            ci = ci + rows[0, n, a] * im
            sr = sr + rows[1, n, a] * re
            si = si + rows[1, n, a] * im
        store(D, (k, n, at.o, pq, 2 * at.i), interleave(cr + si, ci - sr))
        # n = 0 and, for even N, n = N / 2 are their own partners
        if 0 < n < N - n:
            store(D, (k, N - n, at.o, pq, 2 * at.i), interleave(cr - si, ci + sr))


@loop
def from_spectra(D: Array, x: Array, s: int, waves: Waves, start: int, stop: int) -> None:
    """Transform spectra back and add them to the planes, for the column frequencies of the table.

    Args:
        D: [k n o (p q) (i 2)] spectra.
        x: [o h w i] planes, added to.
        s: Stride.
        waves: Cosines and sines; those of the columns hold the weight of each frequency.
        start: First vector of (o i).
        stop: Vector after the last one.
    """
    # Workspace of one plane: its values, and Y with n and N - n folded together
    L = VECTOR_BYTES // x.itemsize
    per = x.shape[3] // L
    A = waves.rows.shape[2]
    B = waves.columns.shape[2]
    N = D.shape[1]
    plane = np.empty((A, B, L), x.dtype)
    Y = np.empty((N // 2 + 1, 4, L), x.dtype)
    for job in range(start, stop):
        for p in range(s):
            for q in range(s):
                at = Plane(job // per, job % per * L, p, q, s)
                # Read first: earlier groups of column frequencies have been added already
                _read(x, at, plane)
                for k in range(D.shape[0]):
                    _fold(D, k, at, Y)
                    _add_back(Y, waves, k, plane)
                _write(plane, at, x)


@inline
def _fold(D: Array, k: int, at: Plane, Y: Array) -> None:
    """Compute sums and differences of the frequencies n and N - n, which share their cosines and sines."""
    N = D.shape[1]
    pq = at.p * at.s + at.q
    low = 2 * at.i
    high = low + Y.shape[2]
    zero = fill(Y, 0.0)
    for n in range(N // 2 + 1):
        re, im = deinterleave(load(D, (k, n, at.o, pq, low)), load(D, (k, n, at.o, pq, high)))
        other_re = other_im = zero
        if 0 < n < N - n:
            m = N - n
            other_re, other_im = deinterleave(load(D, (k, m, at.o, pq, low)), load(D, (k, m, at.o, pq, high)))
        store(Y, (n, 0), re + other_re)
        store(Y, (n, 1), im + other_im)
        store(Y, (n, 2), re - other_re)
        store(Y, (n, 3), im - other_im)


@inline
def _add_back(Y: Array, waves: Waves, k: int, plane: Array) -> None:
    """Add Re(exp(2 pi i k b / N') sum_n Y[n] exp(2 pi i n a / N)) to x[a, b]."""
    rows = waves.rows
    columns = waves.columns
    for a in range(plane.shape[0]):
        re = im = fill(plane, 0.0)
        # Back along the rows, with half of the products
        for n in range(Y.shape[0]):
            c = rows[0, n, a]
            s = rows[1, n, a]
            re = re + c * load(Y, (n, 0)) - s * load(Y, (n, 3))
            im = im + c * load(Y, (n, 1)) + s * load(Y, (n, 2))
        # Back along the columns; only the real part is needed, as planes are real
        for b in range(plane.shape[1]):
            store(plane, (a, b), load(plane, (a, b)) + columns[0, k, b] * re - columns[1, k, b] * im)


@inline
def _write(plane: Array, at: Plane, x: Array) -> None:
    """Write the plane of a phase back to its places; what lies beyond the edge is dropped."""
    for a in range(plane.shape[0]):
        for b in range(plane.shape[1]):
            row = at.s * a + at.p
            column = at.s * b + at.q
            if row < x.shape[1] and column < x.shape[2]:
                store(x, (at.o, row, column, at.i), load(plane, (a, b)))
