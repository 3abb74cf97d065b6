"""A barrier inside compiled loops: threads that share one problem wait for each other without going back to Python.

Waking a thread of a pool takes a twentieth of a millisecond, which is as long as a phase of EM routing of one block.
Threads that are at work anyway wait for less than a microsecond: each adds 1 to a number that all of them see, and then
reads it until everybody has. A thread that has read in vain for a while lets others have its core between two
looks, so that threads that have to share a core do not stop each other.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

from torchcaps.kernels.loops import inline, loop
from torchcaps.kernels.loops.simd import (
    LLVMBuilder,
    LLVMValue,
    Lowering,
    NumbaContext,
    NumbaType,
    Signature,
    cgutils,
    intrinsic,
    ir,
    types,
)
from torchcaps.kernels.records import IntArray

__all__ = ["await_start", "wait_for_all"]

INTEGER = ir.IntType(64)
BYTES = 8
SPINS = 1000
"""How often a thread just looks before it lets others have its core between two looks."""
YIELD = "SwitchToThread" if sys.platform == "win32" else "sched_yield"
"""The operating system's function for that, without arguments. A thread that sleeps instead wakes up too late."""


def _pointer(context: NumbaContext, builder: LLVMBuilder, array: NumbaType, value: LLVMValue) -> LLVMValue:
    return context.make_array(array)(context, builder, value).data


def _arrive(typing: NumbaContext, array: NumbaType) -> Lowering:
    def write(context: NumbaContext, builder: LLVMBuilder, signature: Signature, args: list[LLVMValue]) -> LLVMValue:
        place = _pointer(context, builder, array, args[0])
        return builder.atomic_rmw("add", place, INTEGER(1), "seq_cst")

    return types.int64(array), write


def _arrived(typing: NumbaContext, array: NumbaType) -> Lowering:
    def write(context: NumbaContext, builder: LLVMBuilder, signature: Signature, args: list[LLVMValue]) -> LLVMValue:
        place = _pointer(context, builder, array, args[0])
        return builder.load_atomic(place, "seq_cst", BYTES, typ=INTEGER)

    return types.int64(array), write


def _give_way(typing: NumbaContext) -> Lowering:
    def write(context: NumbaContext, builder: LLVMBuilder, signature: Signature, args: list[LLVMValue]) -> LLVMValue:
        kind = ir.FunctionType(ir.IntType(32), [])
        builder.call(cgutils.get_or_insert_function(builder.module, kind, YIELD), [])
        return context.get_dummy_value()

    return types.void(), write


arrive: Callable[[IntArray], int] = intrinsic(_arrive)
"""Add 1 to the first number of an array; return what it was. No two threads get the same."""
arrived: Callable[[IntArray], int] = intrinsic(_arrived)
"""The first number of an array, as the last thread left it."""
give_way: Callable[[], None] = intrinsic(_give_way)
"""Let another thread have this core, if one waits."""


@inline
def _wait_for(count: int, arrivals: IntArray) -> None:
    """Look until so many have arrived, or the work is cancelled."""
    looks = 0
    while 0 <= arrived(arrivals) < count:
        looks += 1
        if looks > SPINS:
            give_way()


@inline
def wait_for_all(arrivals: IntArray, threads: int) -> None:
    """Wait until so many threads have called this as often as this one.

    What any of them wrote before is then seen by all.

    Args:
        arrivals: [1], 0 before the first barrier; the same array for all threads. A negative number cancels the work.
        threads: How many share the work; one alone does not wait.
    """
    if threads > 1:
        before = arrive(arrivals)
        _wait_for((before // threads + 1) * threads, arrivals)


@loop
def await_start(started: IntArray) -> bool:
    """Wait until the number in `started` [1] is no longer 0; return whether it is positive, not cancelled."""
    _wait_for(1, started)
    return bool(started[0] > 0)
