"""What evaluations of several systems share: which runs may stand in one table, and how much memory it took."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from torchcaps.config import to_dict
from torchcaps.errors import RecipeError
from torchcaps.systems.base import EvaluatedRun
from torchcaps.train.recipe import Recipe

__all__ = ["data_settings", "peak_memory", "require_comparable"]


def require_comparable(first: EvaluatedRun, others: Sequence[EvaluatedRun]) -> None:
    """Refuse runs of another system or on other data than the first.

    Raises:
        RecipeError: If there is one.
    """
    recipe = first.run.recipe
    for other in others:
        same_data = data_settings(other.run.recipe) == data_settings(recipe)
        if other.system is not first.system or not same_data:
            raise RecipeError(
                f"'{other.folder}' is a run of another kind of model or on other data; it cannot stand beside "
                f"'{recipe.name}'"
            )


def data_settings(recipe: Recipe) -> dict[str, object]:
    """Return the [data] table of a recipe, without the folder in which this machine stores the data."""
    return {key: value for key, value in to_dict(recipe)["data"].items() if key != "data_dir"}


def peak_memory() -> dict[str, float]:
    """Return {"memory": MB}, the most that this process has held so far; empty where the system does not tell."""
    try:
        import resource
    except ImportError:
        return {}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # Linux counts kilobytes, macOS bytes.
    return {"memory": round(peak / (2**20 if sys.platform == "darwin" else 2**10))}
