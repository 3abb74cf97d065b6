"""The explorer: a page that looks into capsule networks, served on one's own machine.

`subject_of(model)` puts a model under the glass; all that the page shows comes from that `Subject`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from torchcaps.errors import RecipeError
from torchcaps.models import CapsNet, MatrixCaps, Model, PoE, SparseCaps, SparseMatrixCaps
from torchcaps.systems.capsnet.explorer import ClassSubject
from torchcaps.systems.explorer_records import Histogram, Looked, Routed, Wall
from torchcaps.systems.explorer_view import Subject
from torchcaps.systems.matrix.explorer import MatrixSubject
from torchcaps.systems.poe.explorer import ExpertSubject
from torchcaps.systems.sparse.explorer import SparseMatrixSubject, SparseSubject

__all__ = ["SUBJECTS", "Histogram", "Looked", "Routed", "Subject", "Wall", "subject_of"]

SUBJECTS: dict[type[Model], type[Subject[Any]]] = {
    CapsNet: ClassSubject,
    MatrixCaps: MatrixSubject,
    PoE: ExpertSubject,
    SparseCaps: SparseSubject,
    SparseMatrixCaps: SparseMatrixSubject,
}
"""Who answers for which model."""


def subject_of(model: Model, names: Sequence[str] = (), examples: Tensor | None = None) -> Subject[Any]:
    """Put a model under the glass.

    names     of the classes, for networks whose capsules are classes
    examples  images [n c h w] as the model is shown them, whose poses serve as samples where a model knows none itself
    """
    for kind, subject in SUBJECTS.items():
        if isinstance(model, kind):
            return subject(model, names, examples)
    known = ", ".join(kind.__name__ for kind in SUBJECTS)
    raise RecipeError(f"a {type(model).__name__} cannot be explored; these can: {known}")
