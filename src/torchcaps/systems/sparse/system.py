"""The adapter of sparse unsupervised capsules."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from torchcaps.data import Dataset
from torchcaps.errors import RecipeError
from torchcaps.evaluate.results import Result
from torchcaps.evaluate.svm_probe import MAX_TRAIN_IMAGES, build_probe_data, require_sklearn
from torchcaps.models import Model
from torchcaps.models.sparse import SparseModel, SparseOutput
from torchcaps.systems.base import (
    EvaluatedRun,
    EvaluationOptions,
    Measurements,
    Metric,
    System,
    Table,
    model_name,
)
from torchcaps.systems.comparison import peak_memory, require_comparable
from torchcaps.systems.explorer_view import ExplorerView
from torchcaps.systems.figure_context import ComparedRun, Figure, FigureOptions
from torchcaps.systems.prediction import Prediction, name_above
from torchcaps.systems.sparse import figures as sparse_figures
from torchcaps.systems.sparse.explorer import SparseMatrixView, SparseView
from torchcaps.systems.sparse.metrics import BEFORE_MASK, BEHIND_MASK, CONTROLS, rows_of_runs
from torchcaps.systems.sparse.paper import BUDGET, rawlinson_tables
from torchcaps.systems.sparse.svm_classifier import with_svm
from torchcaps.train.run import TrainedRun

__all__ = ["SparseSystem"]


class SparseSystem(System):
    """Latent capsules that compete by rank and learn without labels, by reconstruction."""

    name = "sparse"
    title = "sparse capsules"
    paper = "Rawlinson, Ahmed and Kowadlo 2018, Sparse Unsupervised Capsules Generalize Better"
    models = ("sparse", "sparse-small", "sparse-matrix")
    predicts = "capsule"
    metrics = (
        Metric("mnist_svm", "higher", "percent"),
        Metric("affnist_svm_a", "higher", "percent"),
        Metric("affnist_svm_b", "higher", "percent"),
        Metric("*_svm", "higher"),
        Metric("knn", "higher"),
        Metric("linear_probe", "higher"),
        Metric("argmax_nmi", "higher"),
        Metric("purity", "higher"),
        Metric("accuracy", "higher"),
        Metric("argmax_nmi_place", "neither"),
        Metric("capsules_in_band", "higher", "count"),
    )
    controls = CONTROLS
    evaluation_options = frozenset({"images", "only", "unmasked"})
    paper_budget = BUDGET
    figures: ClassVar[Mapping[str, Figure[Any]]] = {
        "parts": Figure(
            "A test image: what each capsule draws on its own, what the others draw without it, and the difference.",
            sparse_figures.draw_parts,
            options=("capsule",),
        ),
        "ranked": Figure(
            "Mean support of an image's capsules, from the strongest to the weakest: a steep fall is a clear winner.",
            sparse_figures.draw_ranked,
            options=("beside",),
        ),
        "frequencies": Figure(
            "How often each capsule takes each rank. In the gray band, all capsules come first about equally often.",
            sparse_figures.draw_frequencies,
            options=("capsule",),
        ),
        "equivariances": Figure(
            "In each row one number of a capsule's pose changes from -1 to 1: a good row changes one property.",
            sparse_figures.draw_equivariances,
            options=("capsule",),
        ),
        "winners": Figure(
            "In each column, test images in which a capsule comes first, each above what is redrawn of it.",
            sparse_figures.draw_winners,
            options=("capsule",),
        ),
    }
    explorer_view = SparseView
    attacked_by_own_loss = False

    def evaluate(
        self, runs: Sequence[EvaluatedRun], others: Sequence[EvaluatedRun], options: EvaluationOptions
    ) -> Measurements:
        """Measure codes by an SVM and simpler probes, and how capsules share the images.

        How many images the SVM learned from, the peak memory (MB), and that codes are of before the mask, if they are,
        stand in the budget.
        """
        # Refuse what cannot be measured before data are loaded.
        names = self.select_controls(options.only)
        own = BEFORE_MASK if options.unmasked else BEHIND_MASK
        if options.only and own in options.only:
            flag = "with --unmasked" if options.unmasked else "without --unmasked"
            raise RecipeError(f"{flag} every row is of codes {own} already; leave '{own}' out of --only")
        require_sklearn()
        require_comparable(runs[0], others)
        data = build_probe_data(runs[0].run.recipe, MAX_TRAIN_IMAGES if options.images is None else options.images)
        table = rows_of_runs(
            [one.run for one in runs],
            [one.run for one in others],
            data,
            names,
            unmasked=bool(options.unmasked),
        )
        side = {"before_mask": 1} if options.unmasked else {}
        return Measurements(table.runs, table.controls, {"read_images": data.train_count, **side, **peak_memory()})

    def paper_tables(self, result: Result) -> list[Table]:
        """Return tables 1 and 2 of Rawlinson 2018 with our rows below."""
        return rawlinson_tables(result)

    def figure_context(
        self,
        model: Model,
        options: FigureOptions,
        load: Callable[[], Dataset],
        name: str = "this run",
        compared: Sequence[ComparedRun] = (),
    ) -> sparse_figures.SparseFigureContext:
        """Build a context that ranks the capsules of all test images once for all figures."""
        return sparse_figures.SparseFigureContext(cast(SparseModel, model), options, load, name, tuple(compared))

    def check_classifier(self, run: TrainedRun, folder: Path) -> None:
        """Any run will do, with an SVM on its codes, which needs scikit-learn."""
        require_sklearn()

    def classifier(self, run: TrainedRun) -> TrainedRun:
        """Return the run with an SVM on its codes, which has scores of classes."""
        return with_svm(run)

    @torch.no_grad()
    def predict(self, run: TrainedRun, data: Dataset, threshold: float | None = None) -> list[Prediction]:
        """Say which capsule comes first in each image or, with a threshold, which come before the others.

        Args:
            run: A run of sparse capsules, or of their dense control.
            data: Images in the format of the run's own.
            threshold: From 0 to 1; None for the first capsule alone.

        Returns:
            One prediction an image; its scores [j] fall evenly with the rank, from 1 for the first capsule to 0.
        """
        out: SparseOutput = run.model.eval()(data.model_input())
        last = max(1, out.ranks.shape[1] - 1)
        return name_above(1 - out.ranks / last, threshold)

    def explore(
        self, model: Model, names: Sequence[str] = (), examples: Tensor | None = None
    ) -> ExplorerView[Any, Any]:
        """Build the view that suits the model's routing: dynamic or EM."""
        config = cast(SparseModel, model).config
        is_em = model_name(config) == "sparse-matrix"
        view: type[ExplorerView[Any, Any]] = SparseMatrixView if is_em else SparseView
        return view(model, names, examples)
