"""Which models ship with the package."""

from __future__ import annotations

from fnmatch import fnmatchcase

from torchcaps.errors import CheckpointError, suggestion
from torchcaps.train.run import shipped_models
from torchcaps.zoo.card import ModelCard, read_card

__all__ = ["list_models", "model_card"]


def list_models(pattern: str = "*") -> list[str]:
    """List the trained models that ship with the package.

    Args:
        pattern: Names to list; `*` stands for any text, as in "matrix*".

    Returns:
        Names, sorted, each of which `torchcaps.load` takes.
    """
    return [name for name in shipped_models() if fnmatchcase(name, pattern)]


def model_card(name: str) -> ModelCard:
    """Read the card of a shipped model.

    Args:
        name: Of a model that `list_models` lists.

    Returns:
        Its card.

    Raises:
        CheckpointError: There is no such model.
        DataError: Its card cannot be read.
    """
    models = shipped_models()
    if name not in models:
        raise CheckpointError(f"no model '{name}' ships with torchcaps{suggestion(name, models)}")
    return read_card(models[name])
