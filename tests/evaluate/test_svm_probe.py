from __future__ import annotations

import math
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from sklearn.svm import SVC

from support.tiny_recipe import tiny
from torchcaps.data import AffnistConfig, GlyphsConfig, MnistConfig, NpzConfig, Splits, epoch_order
from torchcaps.data.affnist import affnist
from torchcaps.data.augment import SampleKey, shift
from torchcaps.errors import DataError, RecipeError, ShapeError
from torchcaps.evaluate import svm_probe
from torchcaps.evaluate.svm_probe import AFFNIST, GAMMA, SVM, C, build_probe_data, fit_svm, require_sklearn
from torchcaps.train import Recipe

SPARSE: dict[str, Any] = {
    "name": "sparse", "capsules": 4, "dimension": 3, "channels": 4, "kernel": 5, "stride": 2, "types": 2,
    "type_dimension": 3, "primary_kernel": 5, "decoder": [8],
}  # fmt: skip


def problem(n: int = 60, classes: int = 2, seed: int = 0):
    """Codes [n 2 3] of classes that lie in rings, one around the other, and their labels."""
    g = torch.Generator().manual_seed(seed)
    labels = torch.randint(classes, (n,), generator=g)
    codes = torch.randn(n, 2, 3, generator=g)
    return codes / codes.flatten(1).norm(dim=1)[:, None, None] * (1 + labels.float())[:, None, None], labels


# --- The machine --------------------------------------------------------------------------------------------


def kernel(x: list[float], y: list[float], gamma: float) -> float:
    return math.exp(-gamma * sum((a - b) ** 2 for a, b in zip(x, y, strict=True)))


@pytest.mark.parametrize("gamma", [GAMMA, 0.7, None])
def test_two_classes_are_told_apart_by_the_sign_of_a_sum_over_kernels(gamma):
    """f(x) = sum_i w_i k(x_i, x) + b with |w_i| <= C and sum_i w_i = 0; above 0, the first class wins."""
    (train, labels), (test, _) = problem(), problem(seed=1)
    svm = fit_svm(train, labels, c=10.0, gamma=gamma)
    assert svm.pairs.tolist() == [[0, 1]] and svm.weights.any(0).all()
    vectors, new = svm.vectors.tolist(), test.flatten(1).tolist()
    assert all(vector in train.flatten(1).double().tolist() for vector in vectors)
    width = gamma or 1 / (6 * float(train.double().var(correction=0)))
    weights, b = svm.weights[0].tolist(), float(svm.bias[0])
    assert max(map(abs, weights)) <= 10.0 + 1e-9 and sum(weights) == pytest.approx(0, abs=1e-6)
    for x, found in zip(new, svm.predict(test).tolist(), strict=True):
        f = b + sum(w * kernel(vector, x, width) for w, vector in zip(weights, vectors, strict=True))
        assert found == int(f <= 0)


def test_the_default_is_the_authors():
    codes, labels = problem(300)
    svm = fit_svm(codes, labels[torch.randperm(300, generator=torch.Generator().manual_seed(0))])
    assert (float(svm.weights.abs().max()), svm.gamma) == (C, GAMMA) == (100.0, 0.1)


@pytest.mark.parametrize("gamma", [GAMMA, None])
@pytest.mark.parametrize("names", [[0, 1], [3, 7], [0, 1, 2], [1, 4, 5, 9], list(range(10))])
def test_it_is_the_machine_of_the_library(names, gamma, monkeypatch):
    """Functions, winners and ties; whether the kernel of two classes is one matrix, or the library's own."""
    (train, labels), (test, _) = problem(200, classes=len(names)), problem(100, classes=len(names), seed=1)
    labels = torch.tensor(names)[labels]
    rows, new = (codes.flatten(1).double().numpy() for codes in (train, test))
    width = gamma or 1 / (6 * float(train.double().var(correction=0)))
    library = SVC(C=C, gamma=width, decision_function_shape="ovo", tol=1e-8).fit(rows, labels.numpy())
    wanted = torch.from_numpy(library.decision_function(new)).reshape(100, -1) * (-1 if len(names) == 2 else 1)
    monkeypatch.setattr(svm_probe, "TEST_CHUNK", 7)
    two = sum(sorted(labels.bincount().tolist())[-2:])
    for most in (two, two - 1):
        monkeypatch.setattr(svm_probe, "MAX_GRAM_CODES", most)
        asked = spy(monkeypatch, "_joint_gram")
        found = fit_svm(train, labels, gamma=gamma)
        assert {known is None for known in asked} == {most < two}, "one matrix, as long as there is room"
        assert found.pairs.tolist() == [[i, j] for i in names for j in names if i < j]
        assert torch.allclose(found.functions(test.flatten(1)), wanted, atol=0.02)
        agree = found.predict(test) == torch.from_numpy(library.predict(new))
        assert agree[wanted.abs().amin(1) > 0.02].all() and agree.float().mean() > 0.9


def spy(monkeypatch: pytest.MonkeyPatch, name: str) -> list[Any]:
    """What a function of the module returns from now on."""
    real, returned = getattr(svm_probe, name), []

    def instead(*args: Any) -> Any:
        returned.append(real(*args))
        return returned[-1]

    monkeypatch.setattr(svm_probe, name, instead)
    return returned


def test_pairs_are_fitted_at_a_time_as_there_is_room(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    monkeypatch.setattr(svm_probe, "MAX_GRAM_BYTES", 8 * 1000**2 * 3)
    monkeypatch.setattr(svm_probe, "MAX_GRAM_CODES", 2000)
    assert [svm_probe._workers(most) for most in (10, 1000, 1700, 1800, 5000)] == [8, 3, 1, 1, 1]
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert svm_probe._workers(1000) == 2


def test_of_classes_that_win_as_often_the_lowest_is_taken():
    """Three classes that win once each, whatever the code: f of (2, 4), (2, 6), (4, 6) is 1, -1, 1."""
    svm = SVM(torch.zeros(1, 2).double(), torch.zeros(3, 1).double(), torch.tensor([1.0, -1.0, 1.0]).double(),
              torch.tensor([[2, 4], [2, 6], [4, 6]]), 0.1, (2,))  # fmt: skip
    assert svm.predict(torch.rand(3, 2)).tolist() == [2, 2, 2]
    other = replace(svm, bias=torch.tensor([-1.0, -1.0, 0.0]).double())
    assert other.predict(torch.rand(3, 2)).tolist() == [6, 6, 6], "at 0 the second wins"


def test_codes_that_are_all_alike_are_no_error():
    for gamma in (GAMMA, None):
        constant = fit_svm(torch.ones(4, 2), torch.tensor([1, 1, 1, 0]), gamma=gamma)
        assert constant.predict(torch.ones(2, 2)).tolist() == [1, 1]


def test_rings_are_no_matter_to_it():
    (train, labels), (test, test_labels) = problem(300, classes=3), problem(100, classes=3, seed=1)
    assert fit_svm(train, labels).accuracy(test, test_labels) > 0.95
    with torch.inference_mode():
        assert fit_svm(train + 0, labels + 0).accuracy(test + 0, test_labels) > 0.95


def test_without_gamma_the_size_of_the_codes_is_no_matter():
    (train, labels), (test, test_labels) = problem(300, classes=3), problem(100, classes=3, seed=1)
    for size in (1e-4, 1.0, 1e4):
        assert fit_svm(size * train, labels, gamma=None).accuracy(size * test, test_labels) > 0.95
    assert fit_svm(1e-4 * train, labels).accuracy(1e-4 * test, test_labels) < 0.7


def test_accuracy_is_the_share_of_right_classes_and_a_class_never_seen_is_wrong():
    train, labels = problem()
    svm = fit_svm(train, labels, gamma=None)
    found = svm.predict(train)
    wanted = sum(a == b for a, b in zip(found.tolist(), labels.tolist(), strict=True)) / 60
    assert svm.accuracy(train, labels) == pytest.approx(wanted)
    assert svm.accuracy(train, torch.full((60,), 7)) == 0


def test_what_does_not_fit_is_refused(monkeypatch):
    codes, labels = problem()
    svm = fit_svm(codes, labels)
    for wrong, kind, words in (
        (lambda: fit_svm(codes[0, 0], labels), ShapeError, "training codes are"),
        (lambda: fit_svm(codes, labels[1:]), ShapeError, "60 codes but labels"),
        (lambda: fit_svm(codes, labels.float()), ShapeError, "integers"),
        (lambda: fit_svm(codes, torch.ones_like(labels)), DataError, "of one class"),
        (lambda: fit_svm(codes * math.nan, labels), DataError, "training codes hold NaN"),
        (lambda: fit_svm(codes, labels, gamma=0.0), RecipeError, "gamma = 0.0"),
        (lambda: svm.predict(codes[:, :1]), ShapeError, "wanted .n 2 3."),
        (lambda: svm.predict(codes * math.inf), DataError, "test codes hold NaN"),
    ):
        with pytest.raises(kind, match=words) as told:
            wrong()
        assert "\n" not in str(told.value)
    monkeypatch.setitem(sys.modules, "sklearn.svm", None)
    with pytest.raises(RecipeError, match="pip install"):
        require_sklearn()


# --- The images ---------------------------------------------------------------------------------------------


def sparse(**data: Any) -> Recipe:
    return tiny(model=SPARSE, data=data)


@pytest.fixture
def drawn_digits(monkeypatch) -> Splits:
    """Drawn digits in the place of MNIST, which a test must not need."""
    digits = GlyphsConfig(train=50, test=30, size=28).load()
    monkeypatch.setattr(MnistConfig, "load", lambda self: Splits(digits.train, replace_test(digits, self.test)))
    return digits


def replace_test(digits: Splits, most: int):
    return replace(digits.test, images=digits.test.images[:most], labels=digits.test.labels[:most], factors={})


def test_one_set_of_images_has_one_protocol_whatever_the_seed():
    recipe = sparse(train=80)
    m, other = build_probe_data(recipe, 50), build_probe_data(replace(recipe, seed=8), 50)
    assert m.protocols == {"glyphs_svm": ("train", "test")} and m.main == "glyphs_svm" and m.train_count == 50
    splits = recipe.data.load()
    assert torch.equal(m.sets["test"].images, splits.test.images) and len(m.sets["train"]) == 50
    assert torch.equal(m.sets["train"].images, other.sets["train"].images)
    assert not torch.equal(m.augmented, other.augmented)
    assert build_probe_data(recipe).train_count == 80
    with pytest.raises(RecipeError, match="0 images"):
        build_probe_data(recipe, 0)


def test_images_are_shown_as_training_shows_them(monkeypatch):
    recipe = sparse(train=80)
    images = recipe.data.load().train.images
    order = epoch_order(3, 0, 80)[:50]
    wanted = torch.stack(
        [shift(images[i, None].float() / 255, 2, SampleKey(3, 0, torch.tensor([i])))[0] for i in order.tolist()]
    )
    assert torch.equal(build_probe_data(recipe, 50).augmented, wanted)
    assert not torch.equal(wanted, images[order].float() / 255)
    monkeypatch.setattr(svm_probe, "MAX_TRAIN_IMAGES", 30)
    m = build_probe_data(recipe, 50)
    assert torch.equal(m.augmented, wanted[:30]) and m.train_count == 50


def test_affnist_has_three_protocols(drawn_digits):
    recipe = sparse(name="affnist", train=40, test=20, validation=4)
    m = build_probe_data(recipe, 24)
    assert m.protocols == AFFNIST and m.main == "affnist_svm_a" and m.train_count == 24
    assert {name: len(data) for name, data in m.sets.items()} == {
        "mnist": 24, "affnist": 24, "mnist test": 20, "affnist test": 20,
    }  # fmt: skip
    train, test = drawn_digits.train, drawn_digits.test
    for n in range(24):
        for name in ("mnist", "affnist"):
            assert int(m.sets[name].labels[n]) == int(train.labels[n])
        placed = m.sets["mnist"].images[n, 0]
        assert torch.equal(placed[6:34, 6:34], train.images[n, 0]) and int(placed.sum()) == int(train.images[n].sum())
    for n in range(20):
        placed = m.sets["mnist test"].images[n, 0]
        assert placed.shape == (40, 40) and torch.equal(placed[6:34, 6:34], test.images[n, 0])
        assert int(m.sets["mnist test"].labels[n]) == int(m.sets["affnist test"].labels[n]) == int(test.labels[n])
    moved, moved_test = affnist(train.images, 0, torch.arange(24))[0], affnist(test.images, 1, torch.arange(20))[0]
    assert torch.equal(m.sets["affnist"].images, moved) and torch.equal(m.sets["affnist test"].images, moved_test)


def test_the_read_out_learns_from_no_image_that_was_held_out_and_has_both_protocols_of_moved_digits(drawn_digits):
    held = build_probe_data(sparse(name="affnist", train=40, test=20, validation=4))
    assert held.train_count == 36 and len(held.augmented) == 36
    recipe = sparse(name="affnist", train=40, test=20, train_on="affnist")
    m = build_probe_data(recipe, 24)
    plain = AffnistConfig(train=24, test=20).load()
    assert torch.equal(m.sets["mnist"].images, plain.train.images)
    assert torch.equal(m.sets["affnist"].images, recipe.data.load().train.images[:24])


def test_images_of_several_classes_are_refused(monkeypatch):
    splits = GlyphsConfig(train=20, test=10, size=16).load()
    pairs = replace(splits.train, labels=splits.train.labels[:, None].repeat(1, 2), factors={})
    monkeypatch.setattr(NpzConfig, "load", lambda self: Splits(pairs, pairs))
    with pytest.raises(DataError, match="one label an image"):
        build_probe_data(sparse(name="npz", path="pairs.npz"))
