"""Ctrl-C, without losing a step."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

__all__ = ["StopFlag", "stop_signal"]


@dataclass
class StopFlag:
    """True once somebody has asked to stop."""

    is_set: bool = False


@contextmanager
def stop_signal() -> Iterator[StopFlag]:
    """Ctrl-C and SIGTERM set a flag that the loop reads between two steps; a second Ctrl-C does not wait."""
    flag = StopFlag()

    def ask(number: int, frame: object) -> None:
        if flag.is_set:
            raise KeyboardInterrupt
        flag.is_set = True

    try:
        # Handlers that were there are put back at the end
        old = {s: signal.signal(s, ask) for s in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # not the main thread: signals are somebody else's business
        yield flag
        return
    try:
        yield flag
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
