"""Loops over numpy arrays that numba compiles for the processor they run on, at their first call.

numba is a plain wheel and needs no compiler on the machine; it is slow to import, so whoever calls a loop imports its
module only then. Compiled code is kept on disk beside the source. What is summed in one loop is summed in the same
order at every call, so that results do not change from one call to the next.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba

__all__ = ["loop"]

Function = TypeVar("Function", bound=Callable[..., Any])

FASTMATH = {"contract", "reassoc", "nsz", "arcp"}
"""What a compiler may do to sums and products: fuse and reorder them. Not assume that nothing is infinite or NaN."""


def loop(function: Function) -> Function:
    """Compile at the first call, without the interpreter's lock. Loops may call loops."""
    return cast(Function, numba.njit(nogil=True, cache=True, fastmath=FASTMATH, error_model="numpy")(function))
