"""Pictures of a CapsNet, against loops over its own decoder and coupling."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from support.png import panels
from support.tiny_recipe import tiny
from torchcaps.data import Dataset, Preprocess
from torchcaps.data.multimnist import multimnist
from torchcaps.errors import DataError, RecipeError, ShapeError
from torchcaps.evaluate.factors import class_capsules
from torchcaps.models import CapsNet
from torchcaps.systems import SYSTEMS, figure_context
from torchcaps.systems.capsnet import figures as c
from torchcaps.systems.figure_context import ClassFigureContext, FigureOptions, draw_figure
from torchcaps.train.train_state import build_model
from torchcaps.types import Capsules

FIGURES = SYSTEMS["capsnet"].figures
FROM_ALL = ("reconstructions", "multimnist", "calibration")
"""Figures that encode all test images, some to find the wrong answers; the others encode a few."""


def context_of(model: CapsNet, options: FigureOptions, data: Dataset, classes: Capsules | None = None):
    return ClassFigureContext(model, options, lambda: data, known=classes)


def picture(kind: str, model: CapsNet, options: FigureOptions, data: Dataset, classes: Capsules | None = None):
    return draw_figure(FIGURES, kind, context_of(model, options, data, classes))


def kinds_of(data: Dataset) -> list[str]:
    context = context_of(made(data), FigureOptions(), data)
    return [kind for kind, figure in FIGURES.items() if not figure.obstacle(context)]


def made(data: Dataset) -> CapsNet:
    model = build_model(tiny(), data.spec).eval()
    assert isinstance(model, CapsNet)
    return model


@pytest.fixture(scope="module")
def single() -> tuple[CapsNet, Dataset]:
    test = tiny().data.load().test
    return made(test), test


@pytest.fixture(scope="module")
def pairs() -> tuple[CapsNet, Dataset]:
    """Two glyphs over each other."""
    digits = tiny().data.load().test
    images, labels, parts = multimnist(digits.images, digits.labels, 0, torch.arange(20), size=20, most_shift=2)
    data = Dataset(images, labels, 10, components=parts)
    return made(data), data


def sure(model: CapsNet, data: Dataset, answers: torch.Tensor) -> Capsules:
    """The model's capsules, as if the longest were those of the answers [n] or [n m]."""
    pose = class_capsules(model, data).pose
    return Capsules(pose, torch.full(pose.shape[:2], 0.1).scatter(1, answers.view(len(data), -1), 0.9))


@pytest.mark.parametrize("kind", FIGURES)
def test_every_figure_is_the_same_again_and_depends_on_the_model(single, pairs, kind):
    model, data = pairs if kind == "multimnist" else single
    wish = FigureOptions(capsules=(2, 0), count=3, seed=1)
    drawn = picture(kind, model, wish, data)
    assert drawn and all(png.startswith(b"\x89PNG") for png in drawn.values())
    assert drawn == picture(kind, model, wish, data)
    kept = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)
        other = picture(kind, model, wish, data)
    model.load_state_dict(kept)
    assert all(other[name] != png for name, png in drawn.items() if name in other)


def test_wrong_answers_have_a_picture_if_there_are_any(single):
    model, data = single
    right = picture("reconstructions", model, FigureOptions(count=4), data, sure(model, data, data.labels))
    assert list(right) == ["reconstructions", "reconstructions-worst"] and panels(right["reconstructions"]) == 12
    answers = data.labels.clone()
    answers[[3, 8]] = (answers[[3, 8]] + 1) % 10
    drawn = picture("reconstructions", model, FigureOptions(count=4), data, sure(model, data, answers))
    assert panels(drawn.pop("reconstructions-wrong")) == 6 and drawn.keys() == right.keys()


def test_the_worst_are_those_whose_pixels_are_furthest_from_the_label_s(single):
    model, data = single
    context = context_of(model, FigureOptions(), data, class_capsules(model, data))
    with torch.no_grad():
        for n, error in enumerate(c._errors(context).tolist()):
            alone = torch.zeros(1, 10, 4)
            alone[0, data.labels[n]] = context.classes.pose[n, data.labels[n]]
            drawn = model.decoder(alone)
            x = data.images[n : n + 1].float() / 255
            assert error == pytest.approx(float(((drawn - x) ** 2).sum()), rel=1e-5)


def test_perturbed_moves_one_number_at_a_time(single):
    model, data = single
    pose = class_capsules(model, data).pose[0, 7]
    with torch.no_grad():
        drawn = c.perturbed(model, pose, 7)
        assert drawn.shape == (4, 11, 1, 16, 16)
        for k in range(4):
            for n in range(11):
                moved = torch.zeros(1, 10, 4)
                moved[0, 7] = pose
                moved[0, 7, k] += -0.25 + 0.05 * n
                torch.testing.assert_close(drawn[k, n], model.decoder(moved)[0], rtol=1e-5, atol=1e-6)


def test_perturbations_have_a_sheet_a_class_and_one_of_all(single):
    model, data = single
    drawn = picture("perturbations", model, FigureOptions(capsules=(4, 1)), data)
    assert list(drawn) == ["perturbations", "perturbations-4", "perturbations-1"]
    assert [panels(png) for png in drawn.values()] == [2 * 11, 4 * 11, 4 * 11]
    present = sorted(set(data.labels.tolist()))
    everything = picture("perturbations", model, FigureOptions(), data)
    assert list(everything) == ["perturbations", *(f"perturbations-{j}" for j in present)]
    few = replace(data, images=data.images[:1], labels=data.labels[:1], factors={})
    absent = (int(data.labels[0]) + 1) % 10
    with pytest.raises(DataError, match=f"shows class {absent}"):
        picture("perturbations", model, FigureOptions(capsules=(absent,)), few)


def test_the_overview_takes_the_dimension_that_changes_most(single, monkeypatch):
    model, data = single
    strips = torch.rand(4, 11, 1, 16, 16) / 100
    strips[2, :, 0, :8] = torch.linspace(0, 1, 11).view(11, 1, 1)
    titles = []
    monkeypatch.setattr(c, "perturbed", lambda *_: strips)
    monkeypatch.setattr(c, "image_grid", lambda rows, *_: titles.append([title for title, _ in rows]) or b"")
    picture("perturbations", model, FigureOptions(capsules=(3,)), data)
    assert ["3\ndimension 2"] in titles


def test_coupling_maps_are_sums_over_the_children_of_a_place(single):
    model, data = single
    images = data.model_input(slice(0, 3))
    with torch.no_grad():
        maps, ranked = c.coupling_maps(model, images)
        out = model(images, trace=True)
    h, w, types = out.primary.activation.shape[1:]
    assert maps.shape == (3, 2, len(out.info.coupling), h, w)
    for b in range(3):
        lengths = out.classes.activation[b].tolist()
        order = sorted(range(10), key=lambda j: -lengths[j])
        assert ranked[b].tolist() == order[:2]
        by_hand = torch.zeros_like(maps[b])
        for n, j in enumerate(order[:2]):
            for t in range(maps.shape[2]):
                for y in range(h):
                    for x in range(w):
                        for i in range(types):
                            child = (y * w + x) * types + i
                            by_hand[n, t, y, x] += (
                                out.info.coupling[t, b, child, j] * out.primary.activation[b, y, x, i]
                            )
        torch.testing.assert_close(maps[b], by_hand / by_hand.max(), rtol=1e-5, atol=1e-6)


def test_the_first_is_red_the_second_green_and_both_are_yellow():
    first, second = torch.zeros(1, 1, 2, 2), torch.zeros(1, 1, 2, 2)
    first[0, 0, 0] = 1
    second[0, 0, :, 0] = 1
    assert c.overlay(first, second)[0].tolist() == [[[1, 1, 0], [1, 0, 0]], [[0, 1, 0], [0, 0, 0]]]


def test_pairs_are_drawn_apart_and_wrong_ones_beside_their_labels(pairs):
    model, data = pairs
    right = picture("multimnist", model, FigureOptions(count=3), data, sure(model, data, data.labels.flip(-1)))
    assert list(right) == ["multimnist"] and panels(right["multimnist"]) == 6 * 3
    without = picture("multimnist", model, FigureOptions(count=3), replace(data, components=None))
    assert panels(without["multimnist"]) == 5 * 3
    answers = data.labels.clone()
    answers[5, 0] = next(j for j in range(10) if j not in answers[5].tolist())
    wrong = picture("multimnist", model, FigureOptions(count=3), data, sure(model, data, answers))
    assert panels(wrong["multimnist-wrong"]) == 4


def test_answers_stand_where_their_labels_do():
    answers, labels = torch.tensor([[3, 1], [1, 4], [5, 6]]), torch.tensor([[1, 2], [1, 2], [1, 2]])
    assert c._aligned(answers, labels).tolist() == [[1, 3], [1, 4], [5, 6]]


def test_labels_decide_what_can_be_drawn(single, pairs):
    assert kinds_of(single[1]) == ["reconstructions", "perturbations", "routing", "calibration"]
    assert kinds_of(pairs[1]) == ["perturbations", "routing", "multimnist"]
    assert {"perturbations-3", "perturbations"} == set(
        picture("perturbations", pairs[0], FigureOptions((3,)), pairs[1])
    )
    with pytest.raises(
        RecipeError, match="needs a run on images of two digits, as MultiMNIST; ask for: reconstructions"
    ):
        picture("multimnist", *single[:1], FigureOptions(), single[1])
    with pytest.raises(RecipeError, match="needs a run on images that have one label each; ask for: perturbations"):
        picture("calibration", pairs[0], FigureOptions(), pairs[1])
    with pytest.raises(RecipeError, match="did you mean 'routing'"):
        picture("routin", single[0], FigureOptions(), single[1])
    with pytest.raises(ShapeError, match="0 to 9"):
        picture("perturbations", single[0], FigureOptions((10,)), single[1])


@pytest.mark.parametrize("kind", FIGURES)
def test_all_images_are_looked_at_only_where_it_is_said(single, pairs, kind, monkeypatch):
    model, data = pairs if kind == "multimnist" else single
    seen = []
    monkeypatch.setattr(figure_context, "class_capsules", lambda *given: seen.append(given) or class_capsules(*given))
    picture(kind, model, FigureOptions(count=1), data)
    assert len(seen) == (kind in FROM_ALL)


def test_color_and_crops_are_drawn(single):
    torch.manual_seed(0)
    images = torch.randint(0, 256, (6, 3, 20, 20), dtype=torch.uint8)
    data = Dataset(images, torch.arange(6), 10, names=tuple("abcdefghij"), preprocess=Preprocess(16, standardize=True))
    model = made(data)
    for kind in kinds_of(data):
        assert picture(kind, model, FigureOptions(count=2), data)
