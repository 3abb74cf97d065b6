"""Arithmetic on lanes: the same number of several samples, side by side in a register.

Inside a loop a value of type `Lanes` is a vector of the processor; every operation works on all its lanes at once. A
full vector has 64 bytes, 16 numbers in float32 and 8 in float64, on any processor: LLVM splits it into registers of
the machine's own width. Such a value stays in registers, which no compiler promises of a small array. Loops that hold
many values at a time take `memory(bytes)`: load, load4, store and fill of narrower vectors.

    load(a, (m, n))       the lanes a[m, n, :]            spread(a, (m, n))    the number a[m, n] in every lane
    load4(a, (m, n))      those and the next three rows   fill(a, x)           x in every lane; a is an array or lanes
    store(a, (m, n), v)   a[m, n, :] = v; rows, if v is   fma(a, b, c)         a b + c
                          a tuple, from there on          fma4(a, b, c)        the same of b and c by fours
    larger(a, b)          the larger of a and b
    half(a, (m, n, l))    half as many, from lane l on    pick(sign, a, b)     a where sign < 0, else b
    raise_by(a, (m,), v)  a[m] += v, from there on        total(v)             the sum of the lanes, a number
    a + b, a - b, a * b, a / b; one may be a number       totals(a, b, c, d)   four such sums, a vector
    braid(a, b)           two vectors, a0 b0 a1 b1 ...    unbraid(a, b)        the way back

An index is a tuple that leaves out the last axis, the lanes, or one number for a tuple of one. No index is checked, and
arrays are contiguous.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from importlib import import_module
from typing import Any

from numba.core.types import Type
from numba.extending import intrinsic, register_model

__all__ = ["BYTES", "Lanes", "call", "code", "fill", "fma", "fma4", "half", "larger", "load", "load4", "memory", "pick"]
__all__ += ["braid", "raise_by", "spread", "store", "total", "totals", "unary", "unbraid"]

# Parts of numba and llvmlite that come without types.
ir: Any = import_module("llvmlite.ir")
cgutils: Any = import_module("numba.core.cgutils")
extending: Any = import_module("numba.extending")
models: Any = import_module("numba.core.datamodel.models")
templates: Any = import_module("numba.core.typing.templates")
types: Any = import_module("numba.core.types")

BYTES = 64
"""Of a full vector."""
FLAGS = ("contract", "nsz")
INDEX = ir.IntType(32)


class Lanes(Type):
    """The type of a vector of `count` numbers of a float type; only loops see its values."""

    def __init__(self, dtype: Any, count: int) -> None:
        self.dtype = dtype
        self.count = count
        super().__init__(name=f"Lanes({dtype} x {count})")

    def of(self, element: Any) -> Any:
        """The LLVM type of as many elements of another type."""
        return ir.VectorType(element, self.count)

    @property
    def vector(self) -> Any:
        return self.of(ir.FloatType() if self.dtype.bitwidth == 32 else ir.DoubleType())

    @property
    def integers(self) -> Any:
        """As many integers of the same size."""
        return self.of(ir.IntType(self.dtype.bitwidth))

    def constant(self, x: float) -> Any:
        return ir.Constant(self.vector, [x] * self.count)

    def integer(self, n: int) -> Any:
        return ir.Constant(self.integers, [n] * self.count)


register_model(Lanes)(lambda manager, lanes: models.PrimitiveModel(manager, lanes, lanes.vector))


def code(typed: Callable[..., Any]) -> Any:
    """An operation inside loops: a function of its arguments' types that returns a signature and what writes LLVM."""
    return intrinsic(typed)


# --- Between memory and registers -----------------------------------------------------------------------------------


def _lanes(a: Any, size: int) -> Lanes:
    """The lanes that fill so many bytes, of an array's type; lanes are such themselves."""
    return a if isinstance(a, Lanes) else Lanes(a.dtype, size * 8 // a.dtype.bitwidth)


def _address(context: Any, builder: Any, signature: Any, args: Any, kind: Any) -> Any:
    """Where array[index] begins, for the first two arguments; axes that the index leaves out are 0."""
    (array, index) = signature.args[:2]
    (array_value, index_value) = args[:2]
    several = isinstance(index, types.BaseTuple)
    values = cgutils.unpack_tuple(builder, index_value) if several else [index_value]
    pairs = zip(values, index if several else [index], strict=True)
    places = [context.cast(builder, value, given, types.intp) for value, given in pairs]
    places += [context.get_constant(types.intp, 0)] * (array.ndim - len(places))
    struct = context.make_array(array)(context, builder, array_value)
    pointer = cgutils.get_item_pointer(context, builder, array, struct, places, wraparound=False)
    return builder.bitcast(pointer, kind.as_pointer())


def _reader(size: int, rows: int) -> Any:
    """The operation that loads lanes, or a tuple of them from as many rows."""

    def typed(typing: Any, array: Any, index: Any) -> Any:
        lanes = _lanes(array, size)
        align = array.dtype.bitwidth // 8
        made = lanes if rows == 1 else types.UniTuple(lanes, rows)

        def write(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            first = _address(context, builder, signature, args, lanes.vector)
            places = [builder.gep(first, [INDEX(r)], source_etype=lanes.vector) for r in range(rows)]
            values = [builder.load(place, align=align, typ=lanes.vector) for place in places]
            return values[0] if rows == 1 else context.make_tuple(builder, made, values)

        return made(array, index), write

    return code(typed)


def _writer(size: int, *, raising: bool) -> Any:
    """The operation that stores lanes, or a tuple of them in as many rows; raising, it adds to what is there."""

    def typed(typing: Any, array: Any, index: Any, value: Any) -> Any:
        several = isinstance(value, types.BaseTuple)
        align = array.dtype.bitwidth // 8
        kinds = list(value) if several else [value]
        lanes = _lanes(kinds[0] if isinstance(kinds[0], Lanes) else array, size)

        def write(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            first = _address(context, builder, signature, args, lanes.vector)
            values = cgutils.unpack_tuple(builder, args[2]) if several else [args[2]]
            for r, (each, kind) in enumerate(zip(values, kinds, strict=True)):
                place = builder.gep(first, [INDEX(r)], source_etype=lanes.vector)
                new = _as_lanes(context, builder, each, kind, lanes)
                new = builder.fadd(builder.load(place, align=align, typ=lanes.vector), new) if raising else new
                builder.store(new, place, align=align)
            return context.get_dummy_value()

        return types.void(array, index, value), write

    return code(typed)


def _splat(builder: Any, number: Any, lanes: Lanes) -> Any:
    nothing = ir.Constant(lanes.vector, ir.Undefined)
    first = builder.insert_element(nothing, number, INDEX(0))
    return builder.shuffle_vector(first, nothing, ir.Constant(lanes.of(INDEX), [0] * lanes.count))


def _as_lanes(context: Any, builder: Any, value: Any, kind: Any, lanes: Lanes) -> Any:
    """A number in every lane; lanes stay what they are."""
    if isinstance(kind, Lanes):
        return value
    return _splat(builder, context.cast(builder, value, kind, lanes.dtype), lanes)


@code
def spread(typing: Any, array: Any, index: Any) -> Any:
    """The number array[index] in every lane."""
    lanes = _lanes(array, BYTES)

    def write(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        place = _address(context, builder, signature, args, lanes.vector.element)
        return _splat(builder, builder.load(place, typ=lanes.vector.element), lanes)

    return lanes(array, index), write


def _filler(size: int) -> Any:
    """The operation that puts a number in every lane of a vector like a, or as `load` makes it from the array a."""

    def typed(typing: Any, a: Any, number: Any) -> Any:
        lanes = _lanes(a, size)

        def write(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return _as_lanes(context, builder, args[1], number, lanes)

        return lanes(a, number), write

    return code(typed)


def memory(size: int) -> tuple[Any, Any, Any, Any]:
    """load, load4, store and fill for vectors of so many bytes."""
    return _reader(size, 1), _reader(size, 4), _writer(size, raising=False), _filler(size)


load, load4, store, fill = memory(BYTES)
half = _reader(BYTES // 2, 1)
raise_by = _writer(BYTES, raising=True)


# --- In registers ---------------------------------------------------------------------------------------------------


def call(builder: Any, name: str, lanes: Lanes, *args: Any) -> Any:
    """An intrinsic function of LLVM on vectors."""
    kind = f"v{lanes.count}f{lanes.dtype.bitwidth}"
    function = ir.FunctionType(lanes.vector, [lanes.vector] * len(args))
    return builder.call(cgutils.get_or_insert_function(builder.module, function, f"llvm.{name}.{kind}"), args)


def _lanewise(operation: Callable[..., Any], *values: Any) -> Any:
    """The typing of operation(builder, lanes, *values) on vectors of one type."""

    def write(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return operation(builder, values[0], *args)

    return values[0](*values), write


def unary(operation: Callable[..., Any]) -> Any:
    """The operation of one value for operation(builder, lanes, value)."""

    def typed(typing: Any, a: Any) -> Any:
        return _lanewise(operation, a)

    return code(typed)


@code
def fma(typing: Any, a: Any, b: Any, c: Any) -> Any:
    """a b + c, rounded once where the processor can."""
    return _lanewise(lambda builder, lanes, *args: call(builder, "fmuladd", lanes, *args), a, b, c)


@code
def fma4(typing: Any, a: Any, b: Any, c: Any) -> Any:
    """a b + c for four b and c, tuples of lanes."""

    def write(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pairs = zip(*(cgutils.unpack_tuple(builder, each) for each in args[1:]), strict=True)
        return context.make_tuple(builder, c, [call(builder, "fmuladd", a, args[0], x, y) for x, y in pairs])

    return c(a, b, c), write


@code
def larger(typing: Any, a: Any, b: Any) -> Any:
    """The larger of a and b."""
    return _lanewise(lambda builder, lanes, x, y: builder.select(builder.fcmp_ordered(">", x, y), x, y), a, b)


def _pick(builder: Any, lanes: Lanes, sign: Any, x: Any, y: Any) -> Any:
    return builder.select(builder.fcmp_ordered("<", sign, lanes.constant(0.0)), x, y)


@code
def pick(typing: Any, sign: Any, a: Any, b: Any) -> Any:
    """a where sign < 0, b elsewhere."""
    return _lanewise(_pick, sign, a, b)


def _operator(symbol: Callable[..., Any], instruction: str) -> None:
    """Teach the compiler `symbol` for lanes and lanes, or lanes and a number, in either order.

    As a single instruction: an `overload` would make each of them a function, and compiling three times as long.
    """

    def generic(self: Any, args: Any, kws: Any) -> Any:
        kinds = [kind for kind in args if isinstance(kind, Lanes)]
        plain = [kind for kind in args if isinstance(kind, types.Number)]
        return templates.signature(kinds[0], *args) if kinds and len(kinds) + len(plain) == 2 else None

    def write(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pairs = zip(args, signature.args, strict=True)
        values = (_as_lanes(context, builder, v, kind, signature.return_type) for v, kind in pairs)
        return getattr(builder, instruction)(*values, flags=FLAGS)

    templates.infer_global(symbol)(type("OnLanes", (templates.AbstractTemplate,), {"generic": generic}))
    for kinds in ((Lanes, Lanes), (Lanes, types.Number), (types.Number, Lanes)):
        extending.lower_builtin(symbol, *kinds)(write)


_operator(operator.add, "fadd")
_operator(operator.sub, "fsub")
_operator(operator.mul, "fmul")
_operator(operator.truediv, "fdiv")


@code
def total(typing: Any, a: Any) -> Any:
    """The sum of the lanes of a, halved again and again."""

    def write(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        (value,) = args
        count = a.count
        while count > 1:
            count //= 2
            turns = [ir.Constant(ir.VectorType(INDEX, count), [*range(n, n + count)]) for n in (0, count)]
            value = builder.fadd(*(builder.shuffle_vector(value, value, turn) for turn in turns))
        return builder.extract_element(value, INDEX(0))

    return a.dtype(a), write


@code
def totals(typing: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
    """The sums of the lanes of four vectors, a vector of four."""

    def write(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        def fold(x: Any, y: Any, count: int) -> Any:
            """Neighbors of x, then of y, added: as many lanes as `count`."""
            kind = ir.VectorType(INDEX, count)
            even, odd = (ir.Constant(kind, [*range(first, 2 * count, 2)]) for first in (0, 1))
            return builder.fadd(builder.shuffle_vector(x, y, even), builder.shuffle_vector(x, y, odd))

        sums = fold(fold(args[0], args[1], a.count), fold(args[2], args[3], a.count), a.count)
        count = a.count
        while count > 4:
            count //= 2
            sums = fold(sums, sums, count)
        return sums

    return Lanes(a.dtype, 4)(a, b, c, d), write


def _shuffled(order: Callable[[int], tuple[list[int], list[int]]]) -> Any:
    """The operation that makes two vectors of the lanes of two others, numbered as if they lay one after the other."""

    def typed(typing: Any, a: Any, b: Any) -> Any:
        made = types.UniTuple(a, 2)

        def write(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            turns = [ir.Constant(a.of(INDEX), turn) for turn in order(a.count)]
            return context.make_tuple(builder, made, [builder.shuffle_vector(*args, turn) for turn in turns])

        return made(a, b), write

    return code(typed)


def _braided(count: int) -> tuple[list[int], list[int]]:
    lanes = [lane for n in range(count) for lane in (n, count + n)]
    return lanes[:count], lanes[count:]


def _unbraided(count: int) -> tuple[list[int], list[int]]:
    return [*range(0, 2 * count, 2)], [*range(1, 2 * count, 2)]


braid = _shuffled(_braided)
unbraid = _shuffled(_unbraided)
