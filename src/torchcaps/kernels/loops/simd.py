"""SIMD vectors inside loops: the same number of several samples, one in each lane of a register.

Inside a loop a value of type `VectorType` is a vector of the processor; every operation works on all its lanes at once.
A full vector has 64 bytes, 16 numbers in float32 and 8 in float64, on any processor: LLVM splits it into registers of
the machine's own width. Such a value stays in registers, which no compiler promises of a small array. Loops that hold
many values at a time take `memory(bytes)`: load, load4, store and fill of narrower vectors.

    load(a, (m, n))       the vector a[m, n, :]           broadcast(a, (m, n))   the number a[m, n] in every lane
    load4(a, (m, n))      that and the next three rows    fill(a, x)             x in every lane; a: array or vector
    store(a, (m, n), v)   a[m, n, :] = v; rows, if v is   fma(a, b, c)           a b + c
                          a tuple, from there on          fma4(a, b, c)          the same of four b and c
    load_half(a, (m, l))  half as many, from lane l on    maximum(a, b)          the larger of a and b
    load_from(p, a, m)    row m of an array like a that begins at address p
    add_at(a, (m,), v)    a[m] += v, from there on        where_negative(s, a, b)   a where s < 0, else b
    interleave(a, b)      two vectors, a0 b0 a1 b1 ...    lane_sum(v)            the sum of the lanes, a number
    deinterleave(a, b)    the way back                    lane_sums(a, b, c, d)  four such sums, a vector
    a + b, a - b, a * b, a / b; one may be a number

An index is a tuple that leaves out the last axis, the lanes, or one number for a tuple of one. No index is checked, and
arrays are contiguous.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
from numba.core.types import Type
from numba.extending import register_model
from numpy.typing import NDArray

from torchcaps.kernels.records import VECTOR_BYTES

__all__ = [
    "Array",
    "LLVMBuilder",
    "LLVMValue",
    "Vector",
    "Vector4",
    "VectorType",
    "add_at",
    "broadcast",
    "call_llvm",
    "deinterleave",
    "fill",
    "fma",
    "fma4",
    "interleave",
    "lane_sum",
    "lane_sums",
    "load",
    "load4",
    "load_from",
    "load_half",
    "maximum",
    "memory",
    "store",
    "unary",
    "where_negative",
]

# Modules of numba and llvmlite that come without types, and the names that their values have here.
ir: Any = import_module("llvmlite.ir")
cgutils: Any = import_module("numba.core.cgutils")
extending: Any = import_module("numba.extending")
intrinsic: Any = extending.intrinsic
models: Any = import_module("numba.core.datamodel.models")
templates: Any = import_module("numba.core.typing.templates")
types: Any = import_module("numba.core.types")

NumbaType: TypeAlias = Any
NumbaContext: TypeAlias = Any
Signature: TypeAlias = Any
Operation: TypeAlias = Any  # what `intrinsic` makes; each is assigned to a name with its type
LLVMType: TypeAlias = Any
LLVMBuilder: TypeAlias = Any
LLVMValue: TypeAlias = Any
Lowering: TypeAlias = tuple[Signature, Callable[..., LLVMValue]]
"""What numba asks of an operation: its signature, and the function that writes its LLVM code."""

Array: TypeAlias = NDArray[np.floating[Any]]
Index: TypeAlias = int | tuple[int, ...]


class Vector(Protocol):
    """A SIMD vector as the source of a loop sees it: arithmetic with vectors and numbers, lane by lane."""

    def __add__(self, other: Vector | float) -> Vector: ...
    def __radd__(self, other: float) -> Vector: ...
    def __sub__(self, other: Vector | float) -> Vector: ...
    def __rsub__(self, other: float) -> Vector: ...
    def __mul__(self, other: Vector | float) -> Vector: ...
    def __rmul__(self, other: float) -> Vector: ...
    def __truediv__(self, other: Vector | float) -> Vector: ...
    def __rtruediv__(self, other: float) -> Vector: ...


Vector4: TypeAlias = tuple[Vector, Vector, Vector, Vector]

FLAGS = ("contract", "nsz")
INDEX = ir.IntType(32)


class VectorType(Type):
    """The numba type of a vector of `count` numbers of a float type; only loops see its values."""

    def __init__(self, dtype: NumbaType, count: int) -> None:
        self.dtype = dtype
        self.count = count
        super().__init__(name=f"Vector({dtype} x {count})")

    def of(self, element: LLVMType) -> LLVMType:
        """Return the LLVM type of as many elements of another type."""
        return ir.VectorType(element, self.count)

    @property
    def vector(self) -> LLVMType:
        """The LLVM type of the vector itself."""
        return self.of(ir.FloatType() if self.dtype.bitwidth == 32 else ir.DoubleType())

    @property
    def integers(self) -> LLVMType:
        """The LLVM type of as many integers of the same size."""
        return self.of(ir.IntType(self.dtype.bitwidth))

    def constant(self, x: float) -> LLVMValue:
        """Return the number x in every lane."""
        return ir.Constant(self.vector, [x] * self.count)

    def integer(self, n: int) -> LLVMValue:
        """Return the integer n in every lane."""
        return ir.Constant(self.integers, [n] * self.count)


register_model(VectorType)(lambda manager, kind: models.PrimitiveModel(manager, kind, kind.vector))


# --- Between memory and registers -----------------------------------------------------------------------------------


def _vector_type(a: NumbaType, size: int) -> VectorType:
    """Return the vector type that fills `size` bytes with numbers of the array type `a`; a vector type is its own."""
    return a if isinstance(a, VectorType) else VectorType(a.dtype, size * 8 // a.dtype.bitwidth)


def _address(
    context: NumbaContext, builder: LLVMBuilder, signature: Signature, args: list[LLVMValue], kind: LLVMType
) -> LLVMValue:
    """Return a pointer to array[index], for the first two arguments; axes that the index leaves out are 0."""
    (array, index) = signature.args[:2]
    (array_value, index_value) = args[:2]
    # The index as integers of the machine's size, filled up by zeros
    several = isinstance(index, types.BaseTuple)
    values = cgutils.unpack_tuple(builder, index_value) if several else [index_value]
    pairs = zip(values, index if several else [index], strict=True)
    places = [context.cast(builder, value, given, types.intp) for value, given in pairs]
    places += [context.get_constant(types.intp, 0)] * (array.ndim - len(places))
    struct = context.make_array(array)(context, builder, array_value)
    # No wraparound: negative indices would cost a comparison each
    pointer = cgutils.get_item_pointer(context, builder, array, struct, places, wraparound=False)
    return builder.bitcast(pointer, kind.as_pointer())


def _reader(size: int, rows: int) -> Operation:
    """Make the operation that loads a vector, or a tuple of them from as many rows."""

    def typed(typing: NumbaContext, array: NumbaType, index: NumbaType) -> Lowering:
        kind = _vector_type(array, size)
        # numpy promises the alignment of a number only, not that of a vector
        align = array.dtype.bitwidth // 8
        made = kind if rows == 1 else types.UniTuple(kind, rows)

        def write(
            context: NumbaContext, builder: LLVMBuilder, signature: Signature, args: list[LLVMValue]
        ) -> LLVMValue:
            first = _address(context, builder, signature, args, kind.vector)
            places = [builder.gep(first, [INDEX(r)], source_etype=kind.vector) for r in range(rows)]
            values = [builder.load(place, align=align, typ=kind.vector) for place in places]
            return values[0] if rows == 1 else context.make_tuple(builder, made, values)

        return made(array, index), write

    return intrinsic(typed)


def _load_from(typing: NumbaContext, address: NumbaType, like: NumbaType, row: NumbaType) -> Lowering:
    kind = _vector_type(like, VECTOR_BYTES)
    align = like.dtype.bitwidth // 8

    def write(context: NumbaContext, builder: LLVMBuilder, signature: Signature, args: list[LLVMValue]) -> LLVMValue:
        first = builder.inttoptr(context.cast(builder, args[0], address, types.intp), kind.vector.as_pointer())
        index = context.cast(builder, args[2], row, types.intp)
        return builder.load(builder.gep(first, [index], source_etype=kind.vector), align=align, typ=kind.vector)

    return kind(address, like, row), write


def _writer(size: int, *, adding: bool) -> Operation:
    """Make the operation that stores a vector, or a tuple of them in as many rows; adding, to what is there."""

    def typed(typing: NumbaContext, array: NumbaType, index: NumbaType, value: NumbaType) -> Lowering:
        several = isinstance(value, types.BaseTuple)
        align = array.dtype.bitwidth // 8
        kinds = list(value) if several else [value]
        made = _vector_type(kinds[0] if isinstance(kinds[0], VectorType) else array, size)

        def write(
            context: NumbaContext, builder: LLVMBuilder, signature: Signature, args: list[LLVMValue]
        ) -> LLVMValue:
            first = _address(context, builder, signature, args, made.vector)
            values = cgutils.unpack_tuple(builder, args[2]) if several else [args[2]]
            for r, (each, kind) in enumerate(zip(values, kinds, strict=True)):
                place = builder.gep(first, [INDEX(r)], source_etype=made.vector)
                new = _as_vector(context, builder, each, kind, made)
                if adding:
                    new = builder.fadd(builder.load(place, align=align, typ=made.vector), new)
                builder.store(new, place, align=align)
            return context.get_dummy_value()

        return types.void(array, index, value), write

    return intrinsic(typed)


def _splat(builder: LLVMBuilder, number: LLVMValue, kind: VectorType) -> LLVMValue:
    """Put a number in every lane."""
    # LLVM's idiom for a broadcast: one element, then a shuffle that repeats it
    nothing = ir.Constant(kind.vector, ir.Undefined)
    first = builder.insert_element(nothing, number, INDEX(0))
    return builder.shuffle_vector(first, nothing, ir.Constant(kind.of(INDEX), [0] * kind.count))


def _as_vector(
    context: NumbaContext, builder: LLVMBuilder, value: LLVMValue, kind: NumbaType, made: VectorType
) -> LLVMValue:
    """Put a number in every lane; a vector stays what it is."""
    if isinstance(kind, VectorType):
        return value
    return _splat(builder, context.cast(builder, value, kind, made.dtype), made)


def _broadcast(typing: NumbaContext, array: NumbaType, index: NumbaType) -> Lowering:
    kind = _vector_type(array, VECTOR_BYTES)

    def write(context: NumbaContext, builder: LLVMBuilder, signature: Signature, args: list[LLVMValue]) -> LLVMValue:
        place = _address(context, builder, signature, args, kind.vector.element)
        return _splat(builder, builder.load(place, typ=kind.vector.element), kind)

    return kind(array, index), write


def _filler(size: int) -> Operation:
    """Make the operation that puts a number in every lane of a vector like a, or as `load` makes it from an array."""

    def typed(typing: NumbaContext, a: NumbaType, number: NumbaType) -> Lowering:
        kind = _vector_type(a, size)

        def write(
            context: NumbaContext, builder: LLVMBuilder, signature: Signature, args: list[LLVMValue]
        ) -> LLVMValue:
            return _as_vector(context, builder, args[1], number, kind)

        return kind(a, number), write

    return intrinsic(typed)


class Memory(NamedTuple):
    """The operations between memory and vectors of one size."""

    load: Callable[[Array, Index], Vector]
    load4: Callable[[Array, Index], Vector4]
    store: Callable[[Array, Index, Vector | tuple[Vector, ...] | float], None]
    fill: Callable[[Array | Vector, float], Vector]


def memory(size: int) -> Memory:
    """Make load, load4, store and fill for vectors of `size` bytes."""
    return Memory(_reader(size, 1), _reader(size, 4), _writer(size, adding=False), _filler(size))


load, load4, store, fill = memory(VECTOR_BYTES)
load_half: Callable[[Array, Index], Vector] = _reader(VECTOR_BYTES // 2, 1)
load_from: Callable[[int, Array, int], Vector] = intrinsic(_load_from)
"""Row m of an array of which only the address is known: a loop may take any number of such arrays."""
add_at: Callable[[Array, Index, Vector], None] = _writer(VECTOR_BYTES, adding=True)
broadcast: Callable[[Array, Index], Vector] = intrinsic(_broadcast)


# --- In registers ---------------------------------------------------------------------------------------------------


def call_llvm(builder: LLVMBuilder, name: str, kind: VectorType, *args: LLVMValue) -> LLVMValue:
    """Call an intrinsic function of LLVM on vectors, such as "sqrt"."""
    suffix = f"v{kind.count}f{kind.dtype.bitwidth}"
    function = ir.FunctionType(kind.vector, [kind.vector] * len(args))
    return builder.call(cgutils.get_or_insert_function(builder.module, function, f"llvm.{name}.{suffix}"), args)


def _elementwise(operation: Callable[..., LLVMValue], *kinds: NumbaType) -> Lowering:
    """Return the typing of operation(builder, kind, *values) on vectors of one type."""

    def write(context: NumbaContext, builder: LLVMBuilder, signature: Signature, args: list[LLVMValue]) -> LLVMValue:
        return operation(builder, kinds[0], *args)

    return kinds[0](*kinds), write


def unary(operation: Callable[[LLVMBuilder, VectorType, LLVMValue], LLVMValue]) -> Callable[[Vector], Vector]:
    """Make an operation of one vector from the function that writes its LLVM code."""

    def typed(typing: NumbaContext, a: NumbaType) -> Lowering:
        return _elementwise(operation, a)

    made: Callable[[Vector], Vector] = intrinsic(typed)
    return made


def _fma(typing: NumbaContext, a: NumbaType, b: NumbaType, c: NumbaType) -> Lowering:
    return _elementwise(lambda builder, kind, *args: call_llvm(builder, "fmuladd", kind, *args), a, b, c)


def _fma4(typing: NumbaContext, a: NumbaType, b: NumbaType, c: NumbaType) -> Lowering:
    def write(context: NumbaContext, builder: LLVMBuilder, signature: Signature, args: list[LLVMValue]) -> LLVMValue:
        pairs = zip(*(cgutils.unpack_tuple(builder, each) for each in args[1:]), strict=True)
        return context.make_tuple(builder, c, [call_llvm(builder, "fmuladd", a, args[0], x, y) for x, y in pairs])

    return c(a, b, c), write


def _maximum(typing: NumbaContext, a: NumbaType, b: NumbaType) -> Lowering:
    return _elementwise(lambda builder, kind, x, y: builder.select(builder.fcmp_ordered(">", x, y), x, y), a, b)


def _where_negative(typing: NumbaContext, sign: NumbaType, a: NumbaType, b: NumbaType) -> Lowering:
    def select(builder: LLVMBuilder, kind: VectorType, s: LLVMValue, x: LLVMValue, y: LLVMValue) -> LLVMValue:
        return builder.select(builder.fcmp_ordered("<", s, kind.constant(0.0)), x, y)

    return _elementwise(select, sign, a, b)


fma: Callable[[Vector, Vector, Vector], Vector] = intrinsic(_fma)
"""a b + c, rounded once where the processor can."""
fma4: Callable[[Vector, Vector4, Vector4], Vector4] = intrinsic(_fma4)
"""a b + c for four b and c."""
maximum: Callable[[Vector, Vector], Vector] = intrinsic(_maximum)
where_negative: Callable[[Vector, Vector, Vector], Vector] = intrinsic(_where_negative)


def _operator(symbol: Callable[..., object], instruction: str) -> None:
    """Teach the compiler `symbol` for two vectors, or a vector and a number, in either order.

    As a single instruction: an `overload` would make each of them a function, and compiling three times as long.
    """

    def generic(self: object, args: tuple[NumbaType, ...], kws: dict[str, NumbaType]) -> Signature:
        kinds = [kind for kind in args if isinstance(kind, VectorType)]
        plain = [kind for kind in args if isinstance(kind, types.Number)]
        # None tells numba that this template does not apply
        return templates.signature(kinds[0], *args) if kinds and len(kinds) + len(plain) == 2 else None

    def write(context: NumbaContext, builder: LLVMBuilder, signature: Signature, args: list[LLVMValue]) -> LLVMValue:
        pairs = zip(args, signature.args, strict=True)
        values = (_as_vector(context, builder, v, kind, signature.return_type) for v, kind in pairs)
        return getattr(builder, instruction)(*values, flags=FLAGS)

    templates.infer_global(symbol)(type("OnVectors", (templates.AbstractTemplate,), {"generic": generic}))
    for kinds in ((VectorType, VectorType), (VectorType, types.Number), (types.Number, VectorType)):
        extending.lower_builtin(symbol, *kinds)(write)


_operator(operator.add, "fadd")
_operator(operator.sub, "fsub")
_operator(operator.mul, "fmul")
_operator(operator.truediv, "fdiv")


# --- Across lanes -----------------------------------------------------------------------------------------------------


def _lane_sum(typing: NumbaContext, a: NumbaType) -> Lowering:
    def write(context: NumbaContext, builder: LLVMBuilder, signature: Signature, args: list[LLVMValue]) -> LLVMValue:
        # Add the upper half of the lanes to the lower one until a single lane is left.
        (value,) = args
        count = a.count
        while count > 1:
            count //= 2
            turns = [ir.Constant(ir.VectorType(INDEX, count), [*range(n, n + count)]) for n in (0, count)]
            value = builder.fadd(*(builder.shuffle_vector(value, value, turn) for turn in turns))
        return builder.extract_element(value, INDEX(0))

    return a.dtype(a), write


def _lane_sums(typing: NumbaContext, a: NumbaType, b: NumbaType, c: NumbaType, d: NumbaType) -> Lowering:
    def write(context: NumbaContext, builder: LLVMBuilder, signature: Signature, args: list[LLVMValue]) -> LLVMValue:
        def fold(x: LLVMValue, y: LLVMValue, count: int) -> LLVMValue:
            """Add neighbors of x, then of y: as many lanes as `count`."""
            kind = ir.VectorType(INDEX, count)
            even, odd = (ir.Constant(kind, [*range(first, 2 * count, 2)]) for first in (0, 1))
            return builder.fadd(builder.shuffle_vector(x, y, even), builder.shuffle_vector(x, y, odd))

        # Neighbors of four vectors, folded together until each has one lane left
        sums = fold(fold(args[0], args[1], a.count), fold(args[2], args[3], a.count), a.count)
        count = a.count
        while count > 4:
            count //= 2
            sums = fold(sums, sums, count)
        return sums

    return VectorType(a.dtype, 4)(a, b, c, d), write


def _shuffled(order: Callable[[int], tuple[list[int], list[int]]]) -> Operation:
    """Make the operation that draws two vectors from the lanes of two others, numbered as if those were one."""

    def typed(typing: NumbaContext, a: NumbaType, b: NumbaType) -> Lowering:
        made = types.UniTuple(a, 2)

        def write(
            context: NumbaContext, builder: LLVMBuilder, signature: Signature, args: list[LLVMValue]
        ) -> LLVMValue:
            turns = [ir.Constant(a.of(INDEX), turn) for turn in order(a.count)]
            return context.make_tuple(builder, made, [builder.shuffle_vector(*args, turn) for turn in turns])

        return made(a, b), write

    return intrinsic(typed)


def _interleaved(count: int) -> tuple[list[int], list[int]]:
    lanes = [lane for n in range(count) for lane in (n, count + n)]
    return lanes[:count], lanes[count:]


def _deinterleaved(count: int) -> tuple[list[int], list[int]]:
    return [*range(0, 2 * count, 2)], [*range(1, 2 * count, 2)]


lane_sum: Callable[[Vector], float] = intrinsic(_lane_sum)
"""The sum of the lanes, halved again and again."""
lane_sums: Callable[[Vector, Vector, Vector, Vector], Vector] = intrinsic(_lane_sums)
"""The sums of the lanes of four vectors, a vector of four."""
interleave: Callable[[Vector, Vector], tuple[Vector, Vector]] = _shuffled(_interleaved)
deinterleave: Callable[[Vector, Vector], tuple[Vector, Vector]] = _shuffled(_deinterleaved)
