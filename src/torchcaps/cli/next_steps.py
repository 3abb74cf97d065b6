"""What a command says at its end: the commands that a user is likely to want next."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

__all__ = ["suggest_next"]


def suggest_next(*words: str | Path) -> None:
    """Print a command to run next, on standard error, so that standard output stays what scripts read.

    Args:
        *words: The words after `torchcaps`; paths are quoted for a shell.
    """
    # Of several processes, one speaks
    if os.environ.get("RANK", "0") == "0":
        print(f"next: torchcaps {shlex.join(map(str, words))}", file=sys.stderr)
