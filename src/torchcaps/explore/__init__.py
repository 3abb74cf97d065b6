"""The explorer: a page that looks into capsule networks, served on one's own machine.

`subject_of(model)` puts a model under the glass; all that the page shows comes from that `Subject`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from torchcaps.errors import RecipeError
from torchcaps.models import CapsNet, MatrixCaps, Model, PoE, SparseCaps, SparseMatrixCaps
from torchcaps.systems.capsnet.explorer import CapsNetView
from torchcaps.systems.explorer_records import CapsuleReading, Histogram, RoutingReading, SampleGrid
from torchcaps.systems.explorer_view import ExplorerView
from torchcaps.systems.matrix.explorer import MatrixView
from torchcaps.systems.poe.explorer import PoEView
from torchcaps.systems.sparse.explorer import SparseMatrixView, SparseView

__all__ = [
    "EXPLORER_VIEWS",
    "CapsuleReading",
    "ExplorerView",
    "Histogram",
    "RoutingReading",
    "SampleGrid",
    "explorer_view",
]

EXPLORER_VIEWS: dict[type[Model], type[ExplorerView[Any]]] = {
    CapsNet: CapsNetView,
    MatrixCaps: MatrixView,
    PoE: PoEView,
    SparseCaps: SparseView,
    SparseMatrixCaps: SparseMatrixView,
}
"""Who answers for which model."""


def explorer_view(model: Model, names: Sequence[str] = (), examples: Tensor | None = None) -> ExplorerView[Any]:
    """Put a model under the glass.

    names     of the classes, for networks whose capsules are classes
    examples  images [n c h w] as the model is shown them, whose poses serve as samples where a model knows none itself
    """
    for kind, subject in EXPLORER_VIEWS.items():
        if isinstance(model, kind):
            return subject(model, names, examples)
    known = ", ".join(kind.__name__ for kind in EXPLORER_VIEWS)
    raise RecipeError(f"a {type(model).__name__} cannot be explored; these can: {known}")
