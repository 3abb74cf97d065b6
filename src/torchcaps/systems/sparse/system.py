"""The adapter of sparse unsupervised capsules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from torch import Tensor

from torchcaps.evaluate.results import Result
from torchcaps.models import Model
from torchcaps.models.sparse import SparseModel
from torchcaps.systems.base import System, Table, model_name
from torchcaps.systems.explorer_view import ExplorerView
from torchcaps.systems.sparse.explorer import SparseMatrixView, SparseView
from torchcaps.systems.sparse.paper import BUDGET, rawlinson_tables

__all__ = ["SparseSystem"]


class SparseSystem(System):
    """Latent capsules that compete by rank and learn without labels, by reconstruction."""

    name = "sparse"
    title = "sparse capsules"
    paper = "Rawlinson, Ahmed and Kowadlo 2018, Sparse Unsupervised Capsules Generalize Better"
    models = ("sparse", "sparse-small", "sparse-matrix")
    paper_budget = BUDGET
    explorer_view = SparseView

    def paper_tables(self, result: Result) -> list[Table]:
        return rawlinson_tables(result)

    def explore(self, model: Model, names: Sequence[str] = (), examples: Tensor | None = None) -> ExplorerView[Any]:
        """Build the view that suits the model's routing: dynamic or EM."""
        config = cast(SparseModel, model).config
        is_em = model_name(config) == "sparse-matrix"
        view: type[ExplorerView[Any]] = SparseMatrixView if is_em else SparseView
        return view(model, names, examples)
