"""Figure 2 of Hinton 2018 against loops over children, classes and iterations; and the other pictures."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from support.png import panels
from torchcaps.data import Dataset, Preprocess
from torchcaps.errors import RecipeError, ShapeError
from torchcaps.evaluate.factors import class_capsules
from torchcaps.evaluate.figures import image_grid
from torchcaps.models import MatrixCaps, MatrixConfig, TinyMatrixConfig
from torchcaps.routing import EM
from torchcaps.systems import SYSTEMS, figure_context
from torchcaps.systems.figure_context import FigureOptions, draw_figure
from torchcaps.systems.matrix import figures as m
from torchcaps.types import Capsules

FIGURES = SYSTEMS["matrix"].figures
FROM_ALL = ("calibration",)
"""Figures that encode all test images; the others encode a few."""
CONFIG = replace(TinyMatrixConfig(), sizes=(4, 2, 3, 2), routing=EM(3, 0.1, damping=0.1))
VARIANTS = {
    "matrix": CONFIG,
    "vector": replace(CONFIG, pose="vector"),
    "mixing": replace(CONFIG, routing=EM(2, switch="mixing"), coordinates=0.0),
}


@pytest.fixture(scope="module")
def data() -> Dataset:
    make = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (9, 2, 16, 16), generator=make).byte()
    return Dataset(
        images, torch.arange(9) % 3, 3, names=("car", "plane", "truck"), preprocess=Preprocess(13, standardize=True)
    )


def made(data: Dataset, config: MatrixConfig = CONFIG) -> MatrixCaps:
    torch.manual_seed(0)
    return config.build(data.spec).eval()


def context_of(model: MatrixCaps, options: FigureOptions, data: Dataset, classes: Capsules | None = None):
    return m.MatrixFigureContext(model, options, lambda: data, known=classes)


def picture(kind: str, model: MatrixCaps, options: FigureOptions, data: Dataset, classes: Capsules | None = None):
    return draw_figure(FIGURES, kind, context_of(model, options, data, classes))


def kinds_of(data: Dataset) -> list[str]:
    context = context_of(made(data), FigureOptions(), data)
    return [kind for kind, figure in FIGURES.items() if not figure.obstacle(context)]


@pytest.mark.parametrize("name", VARIANTS)
def test_distances_are_those_of_each_vote_to_the_weighted_mean(data, name):
    """Votes and means from the record of the routing, child by child; damping keeps a part of the mean before."""
    model = made(data, VARIANTS[name])
    images = data.model_input(slice(0, 2))
    with torch.no_grad():
        out = model(images, trace=True)
        distances, share = m.vote_distances(model, out)
    coupling, below, layer = out.infos[-1].coupling, out.below[-1], model.classes
    torch.testing.assert_close(share, coupling)
    t, b, i, j = distances.shape
    assert (t, b, j) == (layer.routing.iterations, 2, 3) and i == below.activation[0].numel()
    types, rate = below.pose.shape[3], layer.routing.damping
    for n in range(b):
        for parent in range(j):
            votes, on = [], below.activation[n].flatten().tolist()
            for child, pose in enumerate(below.pose[n].reshape(i, 16)):
                W = layer.W[child % types, parent].detach()
                moved = (pose.view(4, 4) @ W).flatten() if layer.pose == "matrix" else W @ pose
                votes.append(moved + layer.offset[child])
            mean = torch.zeros(16)
            for step in range(t):
                r = [float(coupling[step, n, child, parent]) * on[child] for child in range(i)]
                fresh = sum(w * v for w, v in zip(r, votes, strict=True)) / sum(r)
                mean = (1 - rate) * fresh + rate * mean
                wanted = torch.stack([(v - mean).square().sum().sqrt() for v in votes])
                torch.testing.assert_close(distances[step, n, :, parent], wanted, rtol=1e-3, atol=1e-5)
            torch.testing.assert_close(mean, out.classes.pose[n, parent], rtol=1e-3, atol=1e-5)


def test_histograms_sum_the_weights_in_each_bin():
    make = torch.Generator().manual_seed(1)
    distances, weights = torch.rand(2, 40, 3, generator=make), torch.rand(2, 40, 3, generator=make)
    distances[0, :3, 0] = torch.tensor([0.0, 0.5, 0.7])
    found = m.histogram(distances, weights, reach=0.5, bins=5)
    wanted = torch.zeros(2, 3, 5)
    for t in range(2):
        for i in range(40):
            for j in range(3):
                for n in range(5):
                    if n * 0.1 <= float(distances[t, i, j]) < (n + 1) * 0.1:
                        wanted[t, j, n] += weights[t, i, j]
    torch.testing.assert_close(found, wanted)
    assert float(found.sum()) < float(weights.sum())
    whole = m.histogram(distances, weights, reach=2.0, bins=7)
    torch.testing.assert_close(whole.sum(-1), weights.sum(1))


@pytest.mark.parametrize("scale", [1e-3, 1.0, 300.0])
def test_the_figures_look_as_far_as_the_votes_of_this_network_are(scale):
    distances = scale * torch.rand(2, 400, 3, generator=torch.Generator().manual_seed(1))
    near, far = m.reaches(distances)
    ones = torch.ones_like(distances)
    assert float(m.histogram(distances, ones, near, m.NEAR_BINS)[0].sum()) == pytest.approx(m.NEAR * 1200, abs=2)
    assert float(m.histogram(distances, ones, far, m.FAR_BINS).sum()) == 2400
    assert min(m.reaches(torch.zeros(2, 4, 3))) > 0


def test_at_the_first_iteration_every_class_gets_an_equal_share(data):
    model = made(data)
    _, share = m.vote_distances(model, model(data.model_input(slice(0, 3)), trace=True))
    torch.testing.assert_close(share[0], torch.full_like(share[0], 1 / 3))
    torch.testing.assert_close(share.sum(-1), torch.ones(share.shape[:3]))


@pytest.mark.parametrize("kind", FIGURES)
def test_every_figure_is_the_same_again_and_depends_on_the_model(data, kind):
    model, wish = made(data), FigureOptions(capsules=(2, 0), count=1, seed=1)
    drawn = picture(kind, model, wish, data)
    assert drawn and all(png.startswith(b"\x89PNG") for png in drawn.values())
    assert drawn == picture(kind, model, wish, data)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    other = picture(kind, model, wish, data)
    assert drawn.keys() == other.keys() and all(other[name] != png for name, png in drawn.items())


def test_votes_have_two_pictures_an_image_and_a_column_a_class(data, monkeypatch):
    shapes = []
    monkeypatch.setattr(m, "_sheet", lambda bars, reach, titles, label, log: shapes.append((*bars.shape, titles, log)))
    drawn = picture("votes", made(data), FigureOptions(capsules=(2, 0), count=3), data)
    rows = sorted({name.split("-")[1] for name in drawn})
    assert len(rows) == 3 and set(drawn) == {f"votes-{row}{end}" for row in rows for end in ("", "-all")}
    assert shapes[:2] == [
        (3, 2, m.NEAR_BINS, ["truck", "car"], False),
        (3, 2, m.FAR_BINS, ["truck", "car"], True),
    ]
    shapes.clear()
    picture("votes", made(data), FigureOptions(count=1), data)
    assert [shape[1] for shape in shapes] == [3, 3]


def test_routing_is_drawn_for_two_classes_by_iteration(data, monkeypatch):
    titles: list[str] = []

    def seen(rows, *more):
        titles.extend(title for title, _ in rows)
        return image_grid(rows, *more)

    monkeypatch.setattr(m, "image_grid", seen)
    [png] = picture("routing", made(data), FigureOptions(count=2), data).values()
    assert titles[0] == "image" and len(titles) == 1 + 2 * 3 and panels(png) > 0


def test_wrong_wishes_are_one_line(data):
    with pytest.raises(RecipeError, match="did you mean 'votes'"):
        picture("vote", made(data), FigureOptions(), data)
    with pytest.raises(ShapeError, match="0 to 2"):
        picture("votes", made(data), FigureOptions(capsules=(3,)), data)


def test_labels_decide_what_can_be_drawn(data, monkeypatch):
    assert kinds_of(data) == ["votes", "routing", "calibration"]
    pairs = replace(data, labels=torch.stack([data.labels, (data.labels + 1) % 3], 1))
    assert kinds_of(pairs) == ["votes", "routing"]
    with pytest.raises(RecipeError, match="images that have one label each; ask for: votes, routing"):
        picture("calibration", made(data), FigureOptions(), pairs)
    said = []
    monkeypatch.setattr(m, "_sheet", lambda bars, reach, titles, label, log: said.append(label))
    picture("votes", made(data), FigureOptions(count=9), pairs)
    assert set(said) == {"car, plane", "plane, truck", "truck, car"}


@pytest.mark.parametrize("kind", FIGURES)
def test_all_images_are_looked_at_only_where_it_is_said(data, kind, monkeypatch):
    seen = []
    monkeypatch.setattr(m, "_sheet", lambda *_, log: b"")
    monkeypatch.setattr(figure_context, "class_capsules", lambda *given: seen.append(given) or class_capsules(*given))
    picture(kind, made(data), FigureOptions(count=1), data)
    assert len(seen) == (kind in FROM_ALL)
    picture(kind, made(data), FigureOptions(count=1), data, class_capsules(made(data), data))
    assert len(seen) == (kind in FROM_ALL)
