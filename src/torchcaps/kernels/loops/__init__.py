"""Loops over numpy arrays that numba compiles for the processor they run on, at their first call.

numba is a plain wheel and needs no compiler on the machine; it is slow to import, so the module of a loop is imported
only when the loop is called. A loop adds up in the same order at every call, so that results do not change from one
call to the next.

Compiled code is cached on disk beside the source, or in the user's cache folder if that cannot be written. It belongs
to the content of all files that loops are made of, not to their dates: a new version of the package with the same loops
compiles nothing, and a change to any of these files compiles everything again.

Loops take records of arrays (`kernels.records`) and SIMD vectors (`loops.simd`), and never allocate inside their
iterations: the workspace is made once, at the top.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar, cast

import numba

from torchcaps.kernels import records
from torchcaps.kernels.compilation import announce

__all__ = ["inline", "loop"]

njit: Any = numba.njit  # takes more options than its types say
caching: Any = import_module("numba.core.caching")
event: Any = import_module("numba.core.event")
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
    made: Any = _compile(function)
    made._cache = _LoopCache(function)
    return cast(Function, made)


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


@cache
def source_stamp() -> bytes:
    """Return a digest of all files that loops are compiled from: this folder, and the records that loops take."""
    digest = hashlib.sha256()
    for path in [*sorted(Path(__file__).parent.glob("*.py")), Path(records.__file__)]:
        digest.update(path.name.encode() + path.read_bytes())
    return digest.digest()


class _LoopCache(caching.FunctionCache):  # type: ignore[misc]
    """numba's cache on disk, which by itself notices only changes to the file that a function is in."""

    def __init__(self, function: Callable[..., object]) -> None:
        super().__init__(function)
        self._cache_file = _IndexFile(self._cache_path, self._impl.filename_base, source_stamp())


class _IndexFile(caching.IndexDataCacheFile):  # type: ignore[misc]
    """numba's list of what is compiled. One that cannot be read, since it names a record that is gone, is empty."""

    def _load_index(self) -> dict[Any, str]:
        # numba stores its own list by pickle, and so raises what pickle raises
        try:
            index: dict[Any, str] = super()._load_index()
        except (AttributeError, ImportError, EOFError, caching.pickle.PickleError):
            return {}
        return index


class _Announcer(event.Listener):  # type: ignore[misc]
    """Announces that a loop, or what it calls, begins to be compiled."""

    def on_start(self, event: Any) -> None:
        if event.data["dispatcher"].py_func.__module__.startswith(__name__):
            announce()

    def on_end(self, event: Any) -> None:
        """Nothing: what is displayed next says that it is over."""


event.register("numba:compile", _Announcer())
