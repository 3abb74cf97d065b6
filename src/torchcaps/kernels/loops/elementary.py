"""Roots, exponentials and logarithms of SIMD vectors (`loops.simd`).

root(a)       the square root
exp(a)        e^a to two units in the last place, for a <= 88 in float32 and 709 in float64; 0 below -87 and -708
log(a)        the natural logarithm; one call for each lane, so not for inner loops
exponent(a)   n of a = 2^n m with 1 <= m < 2, for normal a > 0
mantissa(a)   m
"""

from __future__ import annotations

import math

from torchcaps.kernels.loops.simd import LLVMBuilder, LLVMValue, VectorType, call_llvm, unary

__all__ = ["exp", "exponent", "log", "mantissa", "root"]


def _layout(kind: VectorType) -> tuple[int, int]:
    """Return the number of bits of a mantissa, and what is added to an exponent."""
    return (23, 127) if kind.dtype.bitwidth == 32 else (52, 1023)


def _exp(builder: LLVMBuilder, kind: VectorType, x: LLVMValue) -> LLVMValue:
    """Write 2^n e^r with n = round(x / log 2) and |r| <= log(2) / 2, e^r by its series; 0 below normal numbers."""
    (shift, bias) = _layout(kind)
    # Terms of the series, and log 2 in two pieces, the first with few digits so that n times it is exact
    small = kind.dtype.bitwidth == 32
    terms = 7 if small else 13
    high, low = (0.693359375, -2.12194440e-4) if small else (0.6931471803691238, 1.9082149292705877e-10)
    # Below the smallest normal number the result is 0; the power of two there would not be one.
    least = kind.constant((1 - bias) * math.log(2))
    below = builder.fcmp_ordered("<", x, least)
    y = builder.select(below, least, x)
    # x = n log 2 + r, with log 2 in two pieces so that r keeps its digits.
    n = call_llvm(builder, "rint", kind, builder.fmul(y, kind.constant(1 / math.log(2))))
    r = call_llvm(builder, "fma", kind, n, kind.constant(-high), y)
    r = call_llvm(builder, "fma", kind, n, kind.constant(-low), r)
    # e^r by Horner's rule, then n into the exponent's bits.
    e = kind.constant(1 / math.factorial(terms))
    for term in range(terms - 1, -1, -1):
        e = call_llvm(builder, "fmuladd", kind, e, r, kind.constant(1 / math.factorial(term)))
    power = builder.shl(builder.add(builder.fptosi(n, kind.integers), kind.integer(bias)), kind.integer(shift))
    return builder.select(below, kind.constant(0.0), builder.fmul(e, builder.bitcast(power, kind.vector)))


def _exponent(builder: LLVMBuilder, kind: VectorType, x: LLVMValue) -> LLVMValue:
    """Write n of x = 2^n m: the bits above the mantissa, less the bias."""
    shift, bias = _layout(kind)
    bits = builder.lshr(builder.bitcast(x, kind.integers), kind.integer(shift))
    return builder.sitofp(builder.sub(bits, kind.integer(bias)), kind.vector)


def _mantissa(builder: LLVMBuilder, kind: VectorType, x: LLVMValue) -> LLVMValue:
    """Write m of x = 2^n m: the bits of x with the exponent of 1."""
    shift, bias = _layout(kind)
    bits = builder.and_(builder.bitcast(x, kind.integers), kind.integer((1 << shift) - 1))
    return builder.bitcast(builder.or_(bits, kind.integer(bias << shift)), kind.vector)


exp = unary(_exp)
exponent = unary(_exponent)
mantissa = unary(_mantissa)
log = unary(lambda builder, kind, x: call_llvm(builder, "log", kind, x))
root = unary(lambda builder, kind, x: call_llvm(builder, "sqrt", kind, x))
