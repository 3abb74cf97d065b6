"""The systems of the four papers: for each its metrics, controls, paper table, figures and explorer view.

`SYSTEMS` is the table of adapters, `system_of(recipe)` finds the one of a model, `register` adds one of your own.
"""

from torchcaps.systems.base import EvaluationOptions, Metric, System, model_name
from torchcaps.systems.evaluation import evaluate_runs
from torchcaps.systems.figure_context import Figure, FigureContext, FigureOptions
from torchcaps.systems.registry import SYSTEMS, register, system_of

__all__ = [
    "SYSTEMS",
    "EvaluationOptions",
    "Figure",
    "FigureContext",
    "FigureOptions",
    "Metric",
    "System",
    "evaluate_runs",
    "model_name",
    "register",
    "system_of",
]
