"""Loops over numpy arrays that numba compiles for the processor they run on, at their first call.

numba is a plain wheel and needs no compiler on the machine; it is slow to import, so whoever calls a loop imports its
module only then. Compiled code is kept on disk beside the source. What is summed in one loop is summed in the same
order at every call, so that results do not change from one call to the next.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba

__all__ = ["loop", "part"]

njit: Any = numba.njit  # takes more options than its types say
Function = TypeVar("Function", bound=Callable[..., Any])

FASTMATH = {"contract", "reassoc", "nsz", "arcp"}
"""What a compiler may do to sums and products: fuse and reorder them. Not assume that nothing is infinite or NaN."""


def loop(function: Function) -> Function:
    """Compile at the first call, without the interpreter's lock. Loops may call loops."""
    return _compile(function, cache=True)


def part(function: Function) -> Function:
    """A part of loops, compiled into each that calls it. Not to be called from Python, which saves compiling for it."""
    return _compile(function, forceinline=True, no_cpython_wrapper=True)


def _compile(function: Function, **options: bool) -> Function:
    made = njit(nogil=True, fastmath=FASTMATH, error_model="numpy", no_cfunc_wrapper=True, **options)(function)
    return cast(Function, made)
