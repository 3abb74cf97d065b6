"""The adapter class of a capsule system: everything that commands and tables need to know about its models.

A system is a family of models from one paper. Its adapter, a subclass of `System`, declares which entries of the
`MODELS` table belong to it and answers for them. The defaults suit any classifier, so that a new system starts with
three lines: `name`, `paper` and `models`. `docs/develop/new_system.md` walks through an example.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor

from torchcaps.config.constraints import Choice
from torchcaps.errors import RecipeError
from torchcaps.models import MODELS, Model

if TYPE_CHECKING:
    from torchcaps.systems.explorer_view import ExplorerView

__all__ = ["System", "model_name"]


def model_name(config: object) -> str:
    """Return the name under which the class of a model configuration is registered in the `MODELS` table.

    Raises:
        RecipeError: If it is not registered.
    """
    name = Choice(MODELS).name_of(config)
    if name is None:
        kind = type(config).__name__
        raise RecipeError(f'{kind} is not in the MODELS table; register it first: MODELS["my-model"] = {kind}')
    return name


class System:
    """A family of models, and what is particular about it wherever runs are measured, drawn or explored.

    Attributes:
        name: Key in the `SYSTEMS` table, lower case.
        title: What messages call models of this system, in the plural ("sparse capsules").
        paper: Citation, "" if there is no paper.
        models: Names in the `MODELS` table that belong to this system; each name belongs to exactly one system.
        explorer_view: Class that answers the explorer's questions, None if these models cannot be explored.
    """

    name: ClassVar[str]
    title: ClassVar[str] = ""
    paper: ClassVar[str] = ""
    models: ClassVar[tuple[str, ...]]
    explorer_view: ClassVar[type[ExplorerView[Any]] | None] = None

    # --- The explorer -----------------------------------------------------------------------------------------

    def explore(self, model: Model, names: Sequence[str] = (), examples: Tensor | None = None) -> ExplorerView[Any]:
        """Build the explorer's view of a trained model.

        Args:
            model: A model of this system.
            names: Class names, for systems whose capsules stand for classes; empty for numbers.
            examples: Images [n c h w] in the model's input format, whose poses serve as samples where the model has no
                other.

        Returns:
            An `ExplorerView` of the model.

        Raises:
            RecipeError: If this system has no explorer view.
        """
        if self.explorer_view is None:
            raise RecipeError(f"a {type(model).__name__} cannot be explored; its system '{self.name}' has no view")
        return self.explorer_view(model, names, examples)
