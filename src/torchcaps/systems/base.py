"""The adapter class of a capsule system: everything that commands and tables need to know about its models.

A system is a family of models from one paper. Its adapter, a subclass of `System`, declares which entries of the
`MODELS` table belong to it and answers for them. The defaults suit any classifier, so that a new system starts with
three lines: `name`, `paper` and `models`. `docs/develop/new_system.md` walks through an example.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from torch import Tensor

from torchcaps.config.constraints import Choice
from torchcaps.errors import RecipeError
from torchcaps.evaluate.results import Result
from torchcaps.models import MODELS, Model

if TYPE_CHECKING:
    from torchcaps.systems.explorer_view import ExplorerView

__all__ = ["PaperBudget", "System", "Table", "model_name"]

Table = list[list[str]]
"""Cells of a table as text; the first row is the header."""


class PaperBudget(NamedTuple):
    """How long the authors of a paper trained.

    Attributes:
        steps: Steps of the optimizer.
        batch: Images a step.
        text: The same as the end of a sentence that begins with our own budget.
    """

    steps: int
    batch: int
    text: str


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
        paper_budget: How long the paper's networks were trained, where that is known.
        explorer_view: Class that answers the explorer's questions, None if these models cannot be explored.
    """

    name: ClassVar[str]
    title: ClassVar[str] = ""
    paper: ClassVar[str] = ""
    models: ClassVar[tuple[str, ...]]
    paper_budget: ClassVar[PaperBudget | None] = None
    explorer_view: ClassVar[type[ExplorerView[Any]] | None] = None

    # --- The paper --------------------------------------------------------------------------------------------

    def paper_tables(self, result: Result) -> list[Table]:
        """Return the tables of this system's paper with the rows of a result below; empty if there are none."""
        return []

    def budget_note(self, result: Result) -> str | None:
        """Return one line if the runs of a result saw fewer images in training than the paper's, None otherwise."""
        budget = self.paper_budget
        steps = int(result.budget["steps"])
        batch = int(result.config["train"]["batch"])
        if budget is None or steps * batch >= budget.steps * budget.batch:
            return None
        return f"a smaller budget than the paper's: {steps:,} steps of {batch} images; {budget.text}"

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
