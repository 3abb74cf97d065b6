from __future__ import annotations

import math
import sys
from typing import Any

import pytest
import torch

from support.tiny_recipe import tiny
from torchcaps.errors import RecipeError
from torchcaps.evaluate.svm_probe import build_probe_data, fit_svm
from torchcaps.systems import system_of
from torchcaps.systems.sparse.svm_classifier import STEEPNESS, SVMClassifier
from torchcaps.train import Recipe, load, load_run, train

SPARSE: dict[str, Any] = {
    "name": "sparse", "capsules": 4, "dimension": 3, "channels": 4, "kernel": 5, "stride": 2, "types": 2,
    "type_dimension": 3, "primary_kernel": 5, "decoder": [8],
}  # fmt: skip


def recipe(**over: Any) -> Recipe:
    data = {"name": "glyphs", "train": 80, "test": 40, "size": 16}
    return tiny(**{"name": "few", "model": SPARSE, "data": data, "train": {"epochs": 0.5}, **over})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("reader") / "few"
    train(recipe(), path, quiet=True)
    return path


def classifier_of(folder):
    run = load_run(folder)
    system = system_of(run.recipe)
    system.check_classifier(run, folder)
    return system.classifier(run)


def machine(classes: list[int], n: int = 90, seed: int = 0):
    """A machine for codes [n 12] of some classes around points of their own, and other codes."""
    g = torch.Generator().manual_seed(seed)
    labels = torch.tensor(classes)[torch.arange(n) % len(classes)]
    codes = torch.randn(10, 12, generator=g)[labels] + torch.randn(n, 12, generator=g)
    return fit_svm(codes, labels), torch.randn(25, 12, generator=g)


def test_scores_are_soft_counts_of_won_pairs(folder):
    svm, codes = machine([0, 1, 4, 9])
    reader = SVMClassifier(load(folder), svm)
    scores = reader.scores_of_codes(codes)
    assert scores.shape == (25, 10) and torch.allclose(scores.sum(1), torch.ones(25), atol=1e-5)
    assert (scores[:, [2, 3, 5, 6, 7, 8]] == 0).all()
    k = torch.exp(-svm.gamma * torch.cdist(codes.double(), svm.vectors).square())
    f = k @ svm.weights.T + svm.bias
    for row in range(25):
        told = [0.0] * 10
        for pair in range(6):
            share = 1 / (1 + math.exp(-STEEPNESS * float(f[row, pair])))
            told[int(svm.pairs[pair, 0])] += share / 6
            told[int(svm.pairs[pair, 1])] += (1 - share) / 6
        assert scores[row].tolist() == pytest.approx(told, abs=1e-4)
    alike = (scores.argmax(1) == svm.predict(codes)).float().mean()
    assert alike >= 0.9, "soft counts of classes that lie apart decide as hard ones do"


def test_scores_have_the_gradient_that_differences_say(folder):
    svm, codes = machine([0, 2, 5])
    reader = SVMClassifier(load(folder), svm).double()
    assert torch.autograd.gradcheck(reader.scores_of_codes, codes[:3].double().requires_grad_())


def test_a_run_without_labels_becomes_a_classifier(folder):
    run, m = classifier_of(folder), build_probe_data(recipe())
    assert run.recipe.name == "few" and run.model.is_classifier and not run.model.training
    images = m.sets["test"].model_input()
    network = load(folder)
    with torch.no_grad():
        codes = {name: network.encode(data.model_input()).pose for name, data in m.sets.items()}
        scores = run.model.scores(images)
    told = fit_svm(codes["train"], m.sets["train"].labels).predict(codes["test"])
    assert (scores.argmax(1) == told).float().mean() >= 0.8
    assert scores.dtype == images.dtype


def test_without_scikit_learn_nothing_is_read(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.svm", None)
    with pytest.raises(RecipeError, match="scikit-learn"):
        classifier_of(folder)
