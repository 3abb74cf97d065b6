"""The table of systems, and the way from a model to its system.

Commands, tables and the explorer ask `system_of(...)` and never compare model classes. A system of one's own is added
at run time: put the configuration of its model into `MODELS`, then `register` its adapter.
"""

from __future__ import annotations

from torchcaps.errors import RecipeError
from torchcaps.models import MODELS, ModelConfig
from torchcaps.systems.base import System, model_name
from torchcaps.systems.baselines import BaselineSystem
from torchcaps.systems.capsnet.system import CapsNetSystem
from torchcaps.systems.matrix.system import MatrixSystem
from torchcaps.systems.poe.system import PoESystem
from torchcaps.systems.sparse.system import SparseSystem
from torchcaps.train.recipe import Recipe

__all__ = ["SYSTEMS", "register", "system_of"]

SYSTEMS: dict[str, System] = {
    system.name: system for system in (PoESystem(), CapsNetSystem(), MatrixSystem(), SparseSystem(), BaselineSystem())
}
"""Name -> adapter."""


def system_of(model: str | Recipe | ModelConfig) -> System:
    """Find the system that a model belongs to.

    Args:
        model: A name in the `MODELS` table, a model configuration, or a recipe that has one.

    Returns:
        The one entry of `SYSTEMS` that lists the model's registered name.

    Raises:
        RecipeError: If no system lists it.
    """
    config = model.model if isinstance(model, Recipe) else model
    name = config if isinstance(config, str) else model_name(config)
    for system in SYSTEMS.values():
        if name in system.models:
            return system
    raise RecipeError(f"model '{name}' belongs to no system; add one that lists it: torchcaps.systems.register(...)")


def register(system: System) -> None:
    """Add a system to the table.

    Args:
        system: The adapter. Its models must be in `MODELS`.

    Raises:
        RecipeError: If its name is taken, or one of its models is unknown or belongs to another system.
    """
    if system.name in SYSTEMS:
        raise RecipeError(f"a system '{system.name}' exists already; choose another name")
    # A model must belong to one system only, since `system_of` takes the first that lists it.
    for name in system.models:
        if name not in MODELS:
            raise RecipeError(f"system '{system.name}': model '{name}' is unknown; add it to the MODELS table first")
        for other in SYSTEMS.values():
            if name in other.models:
                raise RecipeError(f"system '{system.name}': model '{name}' belongs to system '{other.name}' already")
    SYSTEMS[system.name] = system
