"""The command line. One file a command; a command is a frozen dataclass whose fields are its flags."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from typing import TextIO

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        arguments: Words behind `torchcaps`; those of this process if none are given, which then keeps freed memory.

    Returns:
        The exit code: 0 done, 1 interrupted or failed, 2 bad input (one line says what).
    """
    # --debug may stand anywhere, so it is taken out before a command parses its own flags
    args = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in args
    args = [a for a in args if a != "--debug"]
    # After each operation torch's threads spin for some milliseconds on the cores that our compiled loops want
    # (kernels/threads.py). This must be set before torch is loaded, so the library cannot set it for its users.
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    _show_notices()
    try:
        # Inside the try, so that an import that fails, or Ctrl-C during it, also ends in one line
        from torchcaps.cli.parse import parse
        from torchcaps.utils.memory import keep_freed_memory

        # A program that calls this function keeps its own choice: what is set holds for the whole process
        if arguments is None:
            keep_freed_memory()
        return parse(args).run()
    except BrokenPipeError:
        # The reader of a pipe, such as `head`, has left: nobody is there to be told
        return 1
    except KeyboardInterrupt:
        print("torchcaps: interrupted", file=sys.stderr)
        return 1
    except Exception as error:
        if debug:
            raise
        return _explain(error)


class _Notices(logging.StreamHandler[TextIO]):
    """Print notices as the commands print their errors, each of them once: data may be loaded several times."""

    def __init__(self) -> None:
        super().__init__()
        self._said: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if text not in self._said:
            self._said.add(text)
            # Standard error is looked up each time, since a program may have replaced it
            print(f"torchcaps: {text}", file=sys.stderr, flush=True)


def _show_notices() -> None:
    """Let notices of the library (`utils.notices`) appear in the form of the commands' own lines."""
    logger = logging.getLogger("torchcaps")
    # A new one for each command, which has said nothing yet
    for handler in [one for one in logger.handlers if isinstance(one, _Notices)]:
        logger.removeHandler(handler)
    logger.addHandler(_Notices())


def _explain(error: Exception) -> int:
    """One line on standard error, and the exit code."""
    from torchcaps.errors import TorchcapsError

    text = " ".join(str(error).split())
    expected = isinstance(error, TorchcapsError | OSError)
    if not expected:
        text = f"unexpected {type(error).__name__}: {text} (--debug shows where)"
    # Of the processes of a machine one says what all of them met; what nobody expected, each says
    if not expected or os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"torchcaps: {text}", file=sys.stderr)
    return 2 if expected else 1
