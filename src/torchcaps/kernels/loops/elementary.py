"""Roots, exponentials and logarithms of lanes (`loops.vector`).

root(a)       the square root
exp(a)        e^a to two units in the last place, for a <= 88 in float32 and 709 in float64; 0 below -87 and -708
log(a)        the natural logarithm; one call a lane, so not for inner loops
exponent(a)   n of a = 2^n m with 1 <= m < 2, for normal a > 0
mantissa(a)   m
"""

from __future__ import annotations

import math
from typing import Any

from torchcaps.kernels.loops.simd import Lanes, call, unary

__all__ = ["exp", "exponent", "log", "mantissa", "root"]


def _layout(lanes: Lanes) -> tuple[int, int]:
    """The bits of a mantissa, and what is added to an exponent."""
    return (23, 127) if lanes.dtype.bitwidth == 32 else (52, 1023)


def _exp(builder: Any, lanes: Lanes, x: Any) -> Any:
    """2^n e^r with n = round(x / log 2) and |r| <= log(2) / 2, e^r by its series; 0 where that is no normal number."""
    (shift, bias) = _layout(lanes)
    small = lanes.dtype.bitwidth == 32
    terms = 7 if small else 13
    high, low = (0.693359375, -2.12194440e-4) if small else (0.6931471803691238, 1.9082149292705877e-10)
    least = lanes.constant((1 - bias) * math.log(2))
    below = builder.fcmp_ordered("<", x, least)
    y = builder.select(below, least, x)
    n = call(builder, "rint", lanes, builder.fmul(y, lanes.constant(1 / math.log(2))))
    r = call(builder, "fma", lanes, n, lanes.constant(-high), y)
    r = call(builder, "fma", lanes, n, lanes.constant(-low), r)
    e = lanes.constant(1 / math.factorial(terms))
    for term in range(terms - 1, -1, -1):
        e = call(builder, "fmuladd", lanes, e, r, lanes.constant(1 / math.factorial(term)))
    power = builder.shl(builder.add(builder.fptosi(n, lanes.integers), lanes.integer(bias)), lanes.integer(shift))
    return builder.select(below, lanes.constant(0.0), builder.fmul(e, builder.bitcast(power, lanes.vector)))


def _exponent(builder: Any, lanes: Lanes, x: Any) -> Any:
    shift, bias = _layout(lanes)
    bits = builder.lshr(builder.bitcast(x, lanes.integers), lanes.integer(shift))
    return builder.sitofp(builder.sub(bits, lanes.integer(bias)), lanes.vector)


def _mantissa(builder: Any, lanes: Lanes, x: Any) -> Any:
    shift, bias = _layout(lanes)
    bits = builder.and_(builder.bitcast(x, lanes.integers), lanes.integer((1 << shift) - 1))
    return builder.bitcast(builder.or_(bits, lanes.integer(bias << shift)), lanes.vector)


exp = unary(_exp)
exponent = unary(_exponent)
mantissa = unary(_mantissa)
log = unary(lambda builder, lanes, x: call(builder, "log", lanes, x))
root = unary(lambda builder, lanes, x: call(builder, "sqrt", lanes, x))
