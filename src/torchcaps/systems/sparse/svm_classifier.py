"""A classifier with gradients, to attack: a network that learned without labels, and an SVM on its codes.

The SVM of `evaluate/svm_probe.py` has a function f_ij for each pair of classes, above 0 where i wins, and the class
with most wins is the answer. Counting has no gradient, so here a win is soft, and ties and close calls may fall
otherwise:

    f_ij(x) = sum_s w_ijs k(x_s, x) + b_ij        score_i = sum_j sigma(4 f_ij) / pairs

where k is the kernel, x a code, and the x_s are the support vectors. All scores sum to 1.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from torchcaps.evaluate.svm_probe import SVM, build_probe_data, fit_svm
from torchcaps.models import Model
from torchcaps.models.chunking import in_chunks
from torchcaps.models.sparse import SparseModel
from torchcaps.systems.sparse.metrics import capsule_encoder, encode_dataset, gamma_of
from torchcaps.train.run import TrainedRun

__all__ = ["SVMClassifier", "with_svm"]

STEEPNESS = 4.0
"""Slope of a soft win: at the SVM's margin, f = 1, a pair is as good as decided."""


class SVMClassifier(Model):
    """Images [b c h w] -> scores [b j] of classes, by an SVM on the masked capsules."""

    def __init__(self, network: SparseModel, svm: SVM) -> None:
        super().__init__()
        self.network = network
        self.spec = network.spec
        self.svm = svm

    @in_chunks
    def scores(self, images: Tensor) -> Tensor:
        return self.scores_of_codes(self.network.encode(images).pose.flatten(1))

    def scores_of_codes(self, codes: Tensor) -> Tensor:
        """Codes [b d] -> scores [b j]."""
        # Each pair gives both of its classes a soft win; a class adds up its own.
        f = self.svm.functions(codes)  # [b p]
        wins = torch.sigmoid(STEEPNESS * torch.stack([f, -f], -1)).flatten(1)  # [b (p 2)]
        scores = wins.new_zeros(len(wins), self.spec.classes).index_add(1, self.svm.pairs.flatten(), wins) / f.shape[1]
        return scores.to(codes.dtype)


def with_svm(run: TrainedRun) -> TrainedRun:
    """Return a run of sparse capsules with a classifier in place of its network.

    Args:
        run: A trained run; the SVM is fitted to the codes of its training images.

    Returns:
        The same run with an `SVMClassifier`, in evaluation mode.
    """
    # The same images and kernel as in an evaluation of the run by default.
    network = cast(SparseModel, run.model)
    probe_data = build_probe_data(run.recipe)
    train_images = probe_data.sets[probe_data.protocols[probe_data.main][0]]
    with torch.no_grad():
        codes = cast(Tensor, encode_dataset(capsule_encoder(network), train_images).codes)
    svm = fit_svm(codes, train_images.labels, gamma=gamma_of(run))
    return run._replace(model=SVMClassifier(network, svm).eval())
