"""Commands that are named in the design and not built yet: they say so."""

from __future__ import annotations

from dataclasses import dataclass

import tyro

from torchcaps.errors import RecipeError

__all__ = ["Explore"]


@dataclass(frozen=True)
class _Later:
    words: tyro.conf.Positional[tuple[str, ...]] = ()
    """What it will take."""

    def run(self) -> int:
        name = type(self).__name__.lower()
        raise RecipeError(f"'torchcaps {name}' is not in this release; CHANGELOG.md says what is, and what comes next")


@dataclass(frozen=True)
class Explore(_Later):
    """Look into a run in the browser (comes with the explorer)."""
