"""The adapter of matrix capsules."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, cast

from torchcaps.data import Dataset
from torchcaps.models import MatrixCaps, Model
from torchcaps.systems.base import PaperBudget, System
from torchcaps.systems.capsnet.figures import needs_one_label
from torchcaps.systems.figure_context import ComparedRun, Figure, FigureOptions
from torchcaps.systems.matrix import figures as matrix_figures
from torchcaps.systems.matrix.explorer import MatrixView

__all__ = ["MatrixSystem"]


class MatrixSystem(System):
    """Class capsules with matrix poses by EM routing, trained with labels by the spread loss."""

    name = "matrix"
    title = "matrix capsules"
    paper = "Hinton, Sabour and Frosst 2018, Matrix Capsules with EM Routing"
    models = ("matrix", "matrix-small", "matrix-tiny")
    paper_budget = PaperBudget(
        steps=2_000_000,
        batch=64,
        text="the authors' code runs for 2,000,000 of 64 unless it is stopped, and the paper names no number",
    )
    figures: ClassVar[Mapping[str, Figure[Any]]] = {
        "votes": Figure(
            "How far votes lie from the mean of each class capsule. For the right class they should come near 0.",
            matrix_figures.draw_votes,
            options=("capsule",),
        ),
        "routing": Figure(
            "Where in the image the winning capsule gets its support from: bright squares send much.",
            matrix_figures.draw_routing,
        ),
        "calibration": Figure(
            "How often the answer is right, by how sure the network is. Bars on the diagonal are well calibrated.",
            matrix_figures.draw_calibration,
            obstacle=needs_one_label,
        ),
    }
    explorer_view = MatrixView

    def figure_context(
        self,
        model: Model,
        options: FigureOptions,
        load: Callable[[], Dataset],
        name: str = "this run",
        compared: Sequence[ComparedRun] = (),
    ) -> matrix_figures.MatrixFigureContext:
        """Build a context that traces the routing of the picked test images once for all figures."""
        return matrix_figures.MatrixFigureContext(cast(MatrixCaps, model), options, load, name, tuple(compared))
