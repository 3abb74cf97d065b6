"""The systems of the four papers: for each its metrics, controls, paper table, figures and explorer view."""

from torchcaps.systems.evaluation import evaluate_runs

__all__ = ["evaluate_runs"]
