"""Loops over numpy arrays that numba compiles for the processor they run on, at their first call.

numba is a plain wheel and needs no compiler on the machine; it is slow to import, so the module of a loop is imported
only when the loop is called. Compiled code is cached on disk beside the source. A loop adds up in the same order at
every call, so that results do not change from one call to the next.

Loops take records of arrays (`kernels.records`) and SIMD vectors (`loops.simd`), and never allocate inside their
iterations: the workspace is made once, at the top.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba

__all__ = ["inline", "loop"]

njit: Any = numba.njit  # takes more options than its types say
Function = TypeVar("Function", bound=Callable[..., object])

FASTMATH = {"contract", "reassoc", "nsz", "arcp"}
"""What a compiler may do to sums and products: fuse and reorder them. Not assume that nothing is infinite or NaN."""


def loop(function: Function) -> Function:
    """Compile a function at its first call, to run without the interpreter's lock. Loops may call loops.

    Args:
        function: Python code that numba can compile.

    Returns:
        The compiled function, cached on disk.
    """
    return _compile(function, cache=True)


def inline(function: Function) -> Function:
    """Compile a function into each loop that calls it.

    Args:
        function: Python code that numba can compile. Python cannot call the result, which saves compile time.

    Returns:
        The function as loops call it.
    """
    return _compile(function, forceinline=True, no_cpython_wrapper=True)


def _compile(function: Function, **options: bool) -> Function:
    made = njit(nogil=True, fastmath=FASTMATH, error_model="numpy", no_cfunc_wrapper=True, **options)(function)
    return cast(Function, made)
