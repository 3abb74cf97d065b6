"""The adapter of matrix capsules."""

from __future__ import annotations

from torchcaps.systems.base import System
from torchcaps.systems.matrix.explorer import MatrixView

__all__ = ["MatrixSystem"]


class MatrixSystem(System):
    """Class capsules with matrix poses by EM routing, trained with labels by the spread loss."""

    name = "matrix"
    title = "matrix capsules"
    paper = "Hinton, Sabour and Frosst 2018, Matrix Capsules with EM Routing"
    models = ("matrix", "matrix-small", "matrix-test")
    explorer_view = MatrixView
