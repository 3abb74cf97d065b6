"""The adapter of matrix capsules."""

from __future__ import annotations

from torchcaps.systems.base import PaperBudget, System
from torchcaps.systems.matrix.explorer import MatrixView

__all__ = ["MatrixSystem"]


class MatrixSystem(System):
    """Class capsules with matrix poses by EM routing, trained with labels by the spread loss."""

    name = "matrix"
    title = "matrix capsules"
    paper = "Hinton, Sabour and Frosst 2018, Matrix Capsules with EM Routing"
    models = ("matrix", "matrix-small", "matrix-test")
    paper_budget = PaperBudget(
        steps=2_000_000,
        batch=64,
        text="the authors' code runs for 2,000,000 of 64 unless it is stopped, and the paper names no number",
    )
    explorer_view = MatrixView
