"""What stands below a table of results: the paper's own tables, and in what our runs differ from the paper's."""

from __future__ import annotations

from torchcaps.evaluate.results import Result
from torchcaps.systems.base import Table
from torchcaps.systems.registry import system_of

__all__ = ["paper_notes", "paper_tables"]


def paper_tables(result: Result) -> list[Table]:
    """Return the tables of the paper that the result's model follows, with our rows below; empty if it has none."""
    return system_of(_model(result)).paper_tables(result)


def paper_notes(result: Result) -> list[str]:
    """Return one line for each thing that matters when a result is compared with its paper's numbers.

    Args:
        result: With the numbers of its paper in `result.paper`; without any, there is nothing to compare.

    Returns:
        Where in the paper the numbers stand, as the recipe says, and by how much our budget is smaller.
    """
    if not result.paper:
        return []
    source = result.config.get("paper", {}).get("note")
    lines = [f"in the paper: {source}"] if source else []
    budget = system_of(_model(result)).budget_note(result)
    return [*lines, budget] if budget else lines


def _model(result: Result) -> str:
    """The registered name of the result's model."""
    return str(result.config["model"]["name"])
