"""A network that learned without labels, and the machine that reads its codes: a classifier with gradients to attack.

The machine of `readout` has a function f_ij for each pair of classes, above 0 where i wins, and the class with most
wins is the answer. Counting has no gradient, so here a win is soft, and ties and close calls may fall otherwise:

    f_ij(x) = sum_s w_ijs k(x_s, x) + b_ij        score_i = sum_j sigma(4 f_ij) / pairs

where k is the kernel, x a code, and the x_s are those that carry the machine. All scores sum to 1.
"""

from __future__ import annotations

from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from torchcaps.evaluate.classification import check_classifier
from torchcaps.evaluate.svm_probe import SVM, build_probe_data, fit_svm, require_sklearn
from torchcaps.models import Model
from torchcaps.models.chunking import in_chunks
from torchcaps.models.sparse import SparseModel
from torchcaps.systems.sparse.metrics import capsules, encode_dataset, gamma_of
from torchcaps.train.run import TrainedRun, load_run

__all__ = ["SVMClassifier", "load_classifier_or_sparse", "with_svm"]

STEEP = 4.0
"""At the machine's margin, f = 1, a pair is as good as decided."""


class SVMClassifier(Model):
    """Images [b c h w] -> scores [b j] of classes, by what a machine reads of the masked capsules."""

    def __init__(self, network: SparseModel, svm: SVM) -> None:
        super().__init__()
        self.network = network
        self.spec = network.spec
        self.svm = svm

    @in_chunks
    def scores(self, images: Tensor) -> Tensor:
        return self.read(self.network.encode(images).pose.flatten(1))

    def read(self, codes: Tensor) -> Tensor:
        """Codes [b d] -> scores [b j]."""
        f = self.svm.functions(codes)  # [b p]
        wins = torch.sigmoid(STEEP * torch.stack([f, -f], -1)).flatten(1)  # [b (p 2)]
        scores = wins.new_zeros(len(wins), self.spec.classes).index_add(1, self.svm.pairs.flatten(), wins) / f.shape[1]
        return scores.to(codes.dtype)


def load_classifier_or_sparse(folder: Path) -> TrainedRun:
    """The run in a folder, if it is one of a classifier, or of sparse capsules, of which `with_reader` makes one."""
    run = load_run(folder)
    if not isinstance(run.model, SparseModel):
        return check_classifier(run, folder)
    require_sklearn()
    return run


def with_svm(run: TrainedRun) -> TrainedRun:
    """The run itself; of sparse capsules, with a read-out of training images."""
    if not isinstance(run.model, SparseModel):
        return run
    network = run.model
    material = build_probe_data(run.recipe)
    learned = material.sets[material.protocols[material.main][0]]
    with torch.no_grad():
        codes = cast(Tensor, encode_dataset(capsules(network), learned).codes)
    return run._replace(model=SVMClassifier(network, fit_svm(codes, learned.labels, gamma=gamma_of(run))).eval())
