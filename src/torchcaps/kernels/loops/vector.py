"""Arithmetic on lanes: the same number of several samples, side by side in a register.

Inside a loop a value of type `Lanes` is a vector of the processor; every operation works on all its lanes at once. A
full vector has 64 bytes, 16 numbers in float32 and 8 in float64, on any processor: LLVM splits it into registers of
the machine's own width. Such a value stays in registers, which no compiler promises of a small array.

    load(a, (m, n))      the lanes a[m, n, :]             spread(a, (m, n))    the number a[m, n] in every lane
    store(a, (m, n), v)  a[m, n, :] = v                   fill(a, x)           the number x in every lane, of a's type
    fma(a, b, c)         a b + c                          total(v)             the sum of the lanes, a number
    raise_by(a, (m,), v) a[m] += v, from there on         totals(a, b, c, d)   four such sums, a vector
    add, sub, mul, div (a, b); larger(a, b); root(a); exp(a); none(a)

An index is a tuple that leaves out the last axis, the lanes; `half` loads half as many of them, from a place on that
the index does name. No index is checked.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from importlib import import_module
from typing import Any, TypeVar, cast

from numba import njit, types
from numba.extending import intrinsic, register_model

__all__ = ["BYTES", "add", "div", "exp", "fill", "fma", "half", "larger", "load", "mul", "none"]
__all__ += ["part", "raise_by", "root", "spread", "store", "sub", "total", "totals"]

Function = TypeVar("Function", bound=Callable[..., Any])

ir: Any = import_module("llvmlite.ir")
cgutils: Any = import_module("numba.core.cgutils")
models: Any = import_module("numba.core.datamodel.models")

BYTES = 64
"""Of a full vector."""


class Lanes(types.Type):
    """The type of a vector of `count` numbers of a float type; only loops see its values."""

    def __init__(self, dtype: Any, count: int) -> None:
        self.dtype, self.count = dtype, count
        super().__init__(name=f"Lanes({dtype} x {count})")

    def of(self, element: Any) -> Any:
        """The LLVM type of as many elements of another type."""
        return ir.VectorType(element, self.count)

    @property
    def vector(self) -> Any:
        return self.of(ir.FloatType() if self.dtype.bitwidth == 32 else ir.DoubleType())

    def constant(self, x: float) -> Any:
        return ir.Constant(self.vector, [x] * self.count)


def part(function: Function) -> Function:
    """A part of loops, written into each that calls it: a call with many arrays would cost more than what it does."""
    return cast(Function, njit(inline="always")(function))


def code(typed: Callable[..., Any]) -> Any:
    """An operation inside loops: a function of its arguments' types that returns a signature and what writes LLVM."""
    return intrinsic(typed)


register_model(Lanes)(lambda manager, lanes: models.PrimitiveModel(manager, lanes, lanes.vector))


# --- Between memory and registers -----------------------------------------------------------------------------------


def _full(array: Any, share: int = 1) -> Lanes:
    return Lanes(array.dtype, BYTES * 8 // array.dtype.bitwidth // share)


def _address(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    """Where array[index] begins, for the first two arguments; axes that the index leaves out are 0."""
    (array, index), (array_value, index_value) = signature.args[:2], args[:2]
    values = zip(cgutils.unpack_tuple(builder, index_value), index, strict=True)
    places = [context.cast(builder, value, kind, types.intp) for value, kind in values]
    places += [context.get_constant(types.intp, 0)] * (array.ndim - len(places))
    struct = context.make_array(array)(context, builder, array_value)
    return cgutils.get_item_pointer(context, builder, array, struct, places, wraparound=False)


def _splat(builder: Any, number: Any, lanes: Lanes) -> Any:
    nothing, zeros = ir.Constant(lanes.vector, ir.Undefined), [0] * lanes.count
    first = builder.insert_element(nothing, number, ir.Constant(ir.IntType(32), 0))
    return builder.shuffle_vector(first, nothing, ir.Constant(lanes.of(ir.IntType(32)), zeros))


def _loader(share: int) -> Callable[..., Any]:
    def typed(typing: Any, array: Any, index: Any) -> Any:
        lanes = _full(array, share)

        def write(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            pointer = _address(context, builder, signature, args)
            pointer = builder.bitcast(pointer, lanes.vector.as_pointer())
            return builder.load(pointer, align=array.dtype.bitwidth // 8, typ=lanes.vector)

        return lanes(array, index), write

    return typed


@code
def load(typing: Any, array: Any, index: Any) -> Any:
    """The lanes array[index, :]."""
    return _loader(1)(typing, array, index)


@code
def half(typing: Any, array: Any, index: Any) -> Any:
    """Half as many lanes as `load` gives; the index names the first."""
    return _loader(2)(typing, array, index)


@code
def store(typing: Any, array: Any, index: Any, value: Any) -> Any:
    """array[index, :] = value."""

    def write(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = builder.bitcast(_address(context, builder, signature, args), value.vector.as_pointer())
        builder.store(args[2], pointer, align=array.dtype.bitwidth // 8)
        return context.get_dummy_value()

    return types.void(array, index, value), write


@code
def raise_by(typing: Any, array: Any, index: Any, value: Any) -> Any:
    """array[index] += value, for as many numbers as value has lanes."""

    def write(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = builder.bitcast(_address(context, builder, signature, args), value.vector.as_pointer())
        align = array.dtype.bitwidth // 8
        builder.store(builder.fadd(builder.load(pointer, align=align, typ=value.vector), args[2]), pointer, align=align)
        return context.get_dummy_value()

    return types.void(array, index, value), write


@code
def spread(typing: Any, array: Any, index: Any) -> Any:
    """The number array[index] in every lane."""
    lanes = _full(array)

    def write(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        number = builder.load(_address(context, builder, signature, args), typ=lanes.vector.element)
        return _splat(builder, number, lanes)

    return lanes(array, index), write


@code
def fill(typing: Any, array: Any, number: Any) -> Any:
    """A number in every lane of a vector as `load` makes it from this array."""
    lanes = _full(array)

    def write(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _splat(builder, context.cast(builder, args[1], number, lanes.dtype), lanes)

    return lanes(array, number), write


# --- In registers ---------------------------------------------------------------------------------------------------


def _call(builder: Any, name: str, lanes: Lanes, *args: Any) -> Any:
    """An intrinsic function of LLVM on vectors."""
    kind = f"v{lanes.count}f{lanes.dtype.bitwidth}"
    function = ir.FunctionType(lanes.vector, [lanes.vector] * len(args))
    return builder.call(cgutils.get_or_insert_function(builder.module, function, f"llvm.{name}.{kind}"), args)


def _lanewise(operation: Callable[..., Any]) -> Callable[..., Any]:
    """The typing of an operation (builder, lanes, *values) -> value on vectors of one type."""

    def typed(*values: Any) -> Any:
        def write(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return operation(builder, values[0], *args)

        return values[0](*values), write

    return typed


@code
def add(typing: Any, a: Any, b: Any) -> Any:
    """a + b."""
    return _lanewise(lambda builder, lanes, x, y: builder.fadd(x, y))(a, b)


@code
def sub(typing: Any, a: Any, b: Any) -> Any:
    """a - b."""
    return _lanewise(lambda builder, lanes, x, y: builder.fsub(x, y))(a, b)


@code
def mul(typing: Any, a: Any, b: Any) -> Any:
    """a b."""
    return _lanewise(lambda builder, lanes, x, y: builder.fmul(x, y))(a, b)


@code
def div(typing: Any, a: Any, b: Any) -> Any:
    """a / b."""
    return _lanewise(lambda builder, lanes, x, y: builder.fdiv(x, y))(a, b)


@code
def fma(typing: Any, a: Any, b: Any, c: Any) -> Any:
    """a b + c, rounded once where the processor can."""
    return _lanewise(lambda builder, lanes, *args: _call(builder, "fmuladd", lanes, *args))(a, b, c)


@code
def larger(typing: Any, a: Any, b: Any) -> Any:
    """The larger of a and b."""
    return _lanewise(lambda builder, lanes, x, y: builder.select(builder.fcmp_ordered(">", x, y), x, y))(a, b)


@code
def none(typing: Any, a: Any) -> Any:
    """0 in every lane, as many as a has."""
    return _lanewise(lambda builder, lanes, x: lanes.constant(0.0))(a)


@code
def root(typing: Any, a: Any) -> Any:
    """The square root of a."""
    return _lanewise(lambda builder, lanes, x: _call(builder, "sqrt", lanes, x))(a)


@code
def total(typing: Any, a: Any) -> Any:
    """The sum of the lanes of a, halved again and again."""

    def write(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        (value,), count = args, a.count
        while count > 1:
            count //= 2
            parts = [[*range(n, n + count)] for n in (0, count)]
            turn = [ir.Constant(ir.VectorType(ir.IntType(32), count), part) for part in parts]
            value = builder.fadd(*(builder.shuffle_vector(value, value, each) for each in turn))
        return builder.extract_element(value, ir.Constant(ir.IntType(32), 0))

    return a.dtype(a), write


@code
def totals(typing: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
    """The sums of the lanes of four vectors, a vector of four."""
    four = Lanes(a.dtype, 4)

    def write(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        def fold(x: Any, y: Any, count: int) -> Any:
            """Neighbours of x, then of y, added: as many lanes as `count`."""
            kind = ir.VectorType(ir.IntType(32), count)
            even, odd = (ir.Constant(kind, [*range(first, 2 * count, 2)]) for first in (0, 1))
            return builder.fadd(builder.shuffle_vector(x, y, even), builder.shuffle_vector(x, y, odd))

        sums, count = fold(fold(args[0], args[1], a.count), fold(args[2], args[3], a.count), a.count), a.count
        while count > 4:
            count //= 2
            sums = fold(sums, sums, count)
        return sums

    return four(a, b, c, d), write


def _exp(builder: Any, lanes: Lanes, x: Any) -> Any:
    """2^n e^r with n = round(x / log 2) and |r| <= log(2) / 2, e^r by its series; 0 where that is no normal number."""
    small = lanes.dtype.bitwidth == 32
    bits, shift, bias, terms = (32, 23, 127, 7) if small else (64, 52, 1023, 13)
    high, low = (0.693359375, -2.12194440e-4) if small else (0.6931471803691238, 1.9082149292705877e-10)
    least = lanes.constant((1 - bias) * math.log(2))
    below = builder.fcmp_ordered("<", x, least)
    y = builder.select(below, least, x)
    n = _call(builder, "rint", lanes, builder.fmul(y, lanes.constant(1 / math.log(2))))
    r = _call(builder, "fma", lanes, n, lanes.constant(-high), y)
    r = _call(builder, "fma", lanes, n, lanes.constant(-low), r)
    e = lanes.constant(1 / math.factorial(terms))
    for term in range(terms - 1, -1, -1):
        e = _call(builder, "fmuladd", lanes, e, r, lanes.constant(1 / math.factorial(term)))
    integer = lanes.of(ir.IntType(bits))
    power = builder.add(builder.fptosi(n, integer), ir.Constant(integer, [bias] * lanes.count))
    power = builder.shl(power, ir.Constant(integer, [shift] * lanes.count))
    return builder.select(below, lanes.constant(0.0), builder.fmul(e, builder.bitcast(power, lanes.vector)))


@code
def exp(typing: Any, a: Any) -> Any:
    """e^a to two units in the last place, for a <= 88 in float32 and 709 in float64; 0 for a below -87 and -708."""
    return _lanewise(_exp)(a)
