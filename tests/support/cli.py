"""How the tests of a command talk to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torchcaps.cli import main


def talk(command: str) -> tuple[Callable[..., tuple[int, str, str]], Callable[..., str]]:
    """`run(capsys, *words)` -> exit code, output, errors; `refused(capsys, *words)` -> the one line that says why."""

    def run(capsys: Any, *words: object) -> tuple[int, str, str]:
        try:
            code = main([command, *map(str, words)])
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else 1
        out, err = capsys.readouterr()
        return code, out, err

    def refused(capsys: Any, *words: object) -> str:
        code, out, err = run(capsys, *words)
        assert code == 2 and not out, (code, out, err)
        assert err.startswith("torchcaps: ") and err.count("\n") == 1, err
        return err

    return run, refused


def is_suggestion(err: str) -> bool:
    """True if standard error has one line only, the command to run next."""
    return err.startswith("next: torchcaps ") and err.count("\n") == 1
