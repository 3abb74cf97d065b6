"""Tell whoever waits that loops are being compiled: at their first call on a machine, for some seconds.

Knows nothing of numba, which is imported only when a loop is called; `loops` calls `announce`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["announce", "when_compiling"]

_told: list[Callable[[], None]] = []
"""Whom to tell, in the order in which they asked."""


@contextmanager
def when_compiling(tell: Callable[[], None]) -> Iterator[None]:
    """Call a function whenever a loop begins to be compiled, until the context ends.

    Args:
        tell: Called from the thread that compiles, perhaps often. Code that is found on disk is not compiled.
    """
    _told.append(tell)
    try:
        yield
    finally:
        _told.remove(tell)


def announce() -> None:
    """Tell everybody that a loop begins to be compiled."""
    for tell in list(_told):
        tell()
