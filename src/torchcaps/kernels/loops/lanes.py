"""A number for each of LANES samples, as one value of a compiled loop.

Left to find vectors by itself, the compiler often does not, or spends its time proving that arrays do not overlap.
Here a row of an array [rows, LANES] is loaded as one vector, computed with by + - * / (a plain number counts for all
lanes) and stored:

    store(total, row, load(total, row) + load(a, row) * 0.5)
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from importlib import import_module
from typing import Any

from numba.core.types import Type
from numba.extending import intrinsic, register_model

__all__ = ["LANES", "exp", "exponent", "greater", "load", "log", "mantissa", "pick", "store", "total", "zero"]

LANES = 8
"""Samples in a vector: one register of AVX2 in float32, two in float64."""

# Parts of numba and llvmlite that come without types.
ir: Any = import_module("llvmlite.ir")
cgutils: Any = import_module("numba.core.cgutils")
extending: Any = import_module("numba.extending")
models: Any = import_module("numba.core.datamodel.models")
templates: Any = import_module("numba.core.typing.templates")
types: Any = import_module("numba.core.types")

FLAGS = ("contract", "nsz")
LN2 = math.log(2)


class Lanes(Type):
    """The type of LANES numbers of one dtype; only loops see its values."""

    def __init__(self, dtype: Any) -> None:
        self.dtype = dtype
        super().__init__(name=f"Lanes({dtype} x {LANES})")

    @property
    def vector(self) -> Any:
        return ir.VectorType(ir.FloatType() if self.dtype.bitwidth == 32 else ir.DoubleType(), LANES)


register_model(Lanes)(lambda manager, lanes: models.PrimitiveModel(manager, lanes, lanes.vector))


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """An intrinsic: its first argument is the compiler's, the others are types, and a loop calls it with values."""
    compiled: Callable[..., Any] = intrinsic(function)
    return compiled


def _integers(lanes: Lanes) -> Any:
    return ir.VectorType(ir.IntType(lanes.dtype.bitwidth), LANES)


def _constant(lanes: Lanes, value: float) -> Any:
    return ir.Constant(lanes.vector, [value] * LANES)


def _bits(lanes: Lanes, value: int) -> Any:
    return ir.Constant(_integers(lanes), [value] * LANES)


def _spread(builder: Any, number: Any) -> Any:
    """One number for all lanes."""
    first = ir.Constant(ir.IntType(32), 0)
    some = ir.Constant(ir.VectorType(number.type, LANES), ir.Undefined)
    mask = ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES)
    return builder.shuffle_vector(builder.insert_element(some, number, first), some, mask)


def _call(builder: Any, name: str, *args: Any) -> Any:
    """An intrinsic function of LLVM, such as llvm.fma, for a whole vector."""
    vector = args[0].type
    kind = "f32" if isinstance(vector.element, ir.FloatType) else "f64"
    signature = ir.FunctionType(vector, [vector] * len(args))
    return builder.call(cgutils.get_or_insert_function(builder.module, signature, f"{name}.v{LANES}{kind}"), args)


# --- Memory ---------------------------------------------------------------------------------------------------


def _rows(array: Any) -> Lanes:
    """What a row of an array type [rows, LANES] is; other than row after row it cannot be read."""
    if array.layout != "C" or array.ndim != 2:
        raise TypeError(f"lanes are rows of a contiguous array of two axes, not of {array}")
    return Lanes(array.dtype)


def _address(context: Any, builder: Any, array: Any, a: Any, row: Any, lanes: Lanes) -> Any:
    data = context.make_array(array)(context, builder, a).data
    first = builder.gep(data, [builder.mul(row, ir.Constant(row.type, LANES))])
    return builder.bitcast(first, context.get_value_type(lanes).as_pointer())


@_compiled
def load(typing: Any, a: Any, row: Any) -> Any:
    """Row `row` of a [rows, LANES]."""
    lanes = _rows(a)

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        place = _address(context, builder, a, args[0], args[1], lanes)
        return builder.load(place, align=a.dtype.bitwidth // 8)

    return lanes(a, types.intp), code


@_compiled
def store(typing: Any, a: Any, row: Any, value: Any) -> Any:
    """a[row] = value, which may be a plain number."""
    lanes = _rows(a)

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        vector = _as_lanes(context, builder, args[2], value, lanes)
        place = _address(context, builder, a, args[0], args[1], lanes)
        builder.store(vector, place, align=a.dtype.bitwidth // 8)
        return context.get_dummy_value()

    return types.none(a, types.intp, value), code


@_compiled
def zero(typing: Any, a: Any) -> Any:
    """0 in all lanes, of the dtype of array a."""
    lanes = Lanes(a.dtype)

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _constant(lanes, 0.0)

    return lanes(a), code


# --- Arithmetic -----------------------------------------------------------------------------------------------


def _as_lanes(context: Any, builder: Any, value: Any, kind: Any, lanes: Lanes) -> Any:
    if isinstance(kind, Lanes):
        return value
    return _spread(builder, context.cast(builder, value, kind, lanes.dtype))


def _binary(emit: Callable[[Any, Any, Any], Any]) -> Callable[..., Any]:
    """The intrinsic function of two values, of which at least one is lanes."""

    def both(typing: Any, a: Any, b: Any) -> Any:
        lanes = a if isinstance(a, Lanes) else b

        def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            x, y = (_as_lanes(context, builder, v, k, lanes) for v, k in zip(args, (a, b), strict=True))
            return emit(builder, x, y)

        return lanes(a, b), code

    return _compiled(both)


def _greater(builder: Any, x: Any, y: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">", x, y), x, y)


greater = _binary(_greater)


def _operator(symbol: Callable[..., Any], emit: Callable[[Any, Any, Any], Any]) -> None:
    """Teach the compiler `symbol` for lanes and lanes, or lanes and a plain number, in either order.

    As a single instruction: an `overload` would make each of them a function, and compiling three times as long.
    """

    def generic(self: Any, args: Any, kws: Any) -> Any:
        kinds = [kind for kind in args if isinstance(kind, Lanes)]
        plain = [kind for kind in args if isinstance(kind, types.Number)]
        return templates.signature(kinds[0], *args) if kinds and len(kinds) + len(plain) == 2 else None

    templates.infer_global(symbol)(type("OnLanes", (templates.AbstractTemplate,), {"generic": generic}))

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pairs = zip(args, signature.args, strict=True)
        return emit(builder, *(_as_lanes(context, builder, v, kind, signature.return_type) for v, kind in pairs))

    for kinds in ((Lanes, Lanes), (Lanes, types.Number), (types.Number, Lanes)):
        extending.lower_builtin(symbol, *kinds)(code)


_operator(operator.add, lambda builder, x, y: builder.fadd(x, y, flags=FLAGS))
_operator(operator.sub, lambda builder, x, y: builder.fsub(x, y, flags=FLAGS))
_operator(operator.mul, lambda builder, x, y: builder.fmul(x, y, flags=FLAGS))
_operator(operator.truediv, lambda builder, x, y: builder.fdiv(x, y))


@_compiled
def pick(typing: Any, sign: Any, a: Any, b: Any) -> Any:
    """a where sign < 0, b elsewhere."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.select(builder.fcmp_ordered("<", args[0], _constant(sign, 0.0)), args[1], args[2])

    return sign(sign, a, b), code


@_compiled
def total(typing: Any, a: Any) -> Any:
    """The sum over the lanes, a plain number, in a fixed order."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        (x,), width = args, LANES
        while width > 1:
            width //= 2
            halves = [
                builder.shuffle_vector(
                    x, x, ir.Constant(ir.VectorType(ir.IntType(32), width), list(range(s, s + width)))
                )
                for s in (0, width)
            ]
            x = builder.fadd(*halves)
        return builder.extract_element(x, ir.Constant(ir.IntType(32), 0))

    return a.dtype(a), code


# --- Exponentials and logarithms ------------------------------------------------------------------------------


def _exp(builder: Any, x: Any, lanes: Lanes) -> Any:
    """e^x = 2^n e^r with |r| <= ln 2 / 2 and e^r as a polynomial; 0 where it would not be a normal number."""
    single = lanes.dtype.bitwidth == 32
    bias, mantissa, degree, low = (127, 23, 7, -87.0) if single else (1023, 52, 13, -708.0)
    high, rest = (0.693359375, -2.12194440e-4) if single else (6.93145751953125e-1, 1.42860682030941723212e-6)
    bounded = _greater(builder, x, _constant(lanes, low))
    n = _call(builder, "llvm.rint", builder.fmul(bounded, _constant(lanes, 1 / LN2)))
    r = _call(builder, "llvm.fma", n, _constant(lanes, -high), bounded)
    r = _call(builder, "llvm.fma", n, _constant(lanes, -rest), r)
    sum_ = _constant(lanes, 1 / math.factorial(degree))
    for power in range(degree - 1, -1, -1):
        sum_ = _call(builder, "llvm.fma", sum_, r, _constant(lanes, 1 / math.factorial(power)))
    whole = builder.add(builder.fptosi(n, _integers(lanes)), _bits(lanes, bias))
    scale = builder.bitcast(builder.shl(whole, _bits(lanes, mantissa)), x.type)
    return builder.select(
        builder.fcmp_ordered("<", x, _constant(lanes, low)), _constant(lanes, 0.0), builder.fmul(sum_, scale)
    )


@_compiled
def exp(typing: Any, a: Any) -> Any:
    """e^a for a below 88 (float32) or 709 (float64); 0 for a below -87 or -708."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _exp(builder, args[0], a)

    return a(a), code


@_compiled
def log(typing: Any, a: Any) -> Any:
    """The natural logarithm; one call a lane, so not for inner loops."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _call(builder, "llvm.log", args[0])

    return a(a), code


@_compiled
def exponent(typing: Any, a: Any) -> Any:
    """n of a = 2^n m with 1 <= m < 2, for normal a > 0."""
    bias, mantissa = (127, 23) if a.dtype.bitwidth == 32 else (1023, 52)

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        bits = builder.lshr(builder.bitcast(args[0], _integers(a)), _bits(a, mantissa))
        return builder.sitofp(builder.sub(bits, _bits(a, bias)), args[0].type)

    return a(a), code


@_compiled
def mantissa(typing: Any, a: Any) -> Any:
    """m of a = 2^n m with 1 <= m < 2, for normal a > 0."""
    bias, mantissa = (127, 23) if a.dtype.bitwidth == 32 else (1023, 52)

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        bits = builder.and_(builder.bitcast(args[0], _integers(a)), _bits(a, (1 << mantissa) - 1))
        return builder.bitcast(builder.or_(bits, _bits(a, bias << mantissa)), args[0].type)

    return a(a), code
