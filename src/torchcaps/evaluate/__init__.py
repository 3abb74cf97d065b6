"""Evaluation: numbers beside their controls, pictures, reports."""

from torchcaps.evaluate.capsules import CONTROLS
from torchcaps.evaluate.classification import class_scores, classification
from torchcaps.evaluate.results import Result, read_result, write_result
from torchcaps.evaluate.runs import evaluate_runs

__all__ = ["CONTROLS", "Result", "class_scores", "classification", "evaluate_runs", "read_result", "write_result"]
