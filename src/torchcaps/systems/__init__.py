"""The systems of the four papers: for each its metrics, controls, paper table, figures and explorer view."""

from torchcaps.systems.base import System, model_name
from torchcaps.systems.evaluation import evaluate_runs
from torchcaps.systems.registry import SYSTEMS, register, system_of

__all__ = ["SYSTEMS", "System", "evaluate_runs", "model_name", "register", "system_of"]
