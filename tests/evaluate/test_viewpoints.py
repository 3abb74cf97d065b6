"""Several views of an image, and viewpoints that were never trained on, counted one image at a time."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from support.tiny_recipe import tiny
from torchcaps.data import Dataset, Preprocess, Splits
from torchcaps.errors import DataError
from torchcaps.evaluate.classification import class_scores, classifier_metrics, nearest_mean_metrics
from torchcaps.evaluate.results import Result
from torchcaps.evaluate.viewpoints import has_views, novel_errors, view_scores, viewpoint_metrics
from torchcaps.math.pixels import standardize
from torchcaps.models import Model
from torchcaps.systems.report import rows_of
from torchcaps.types import ImageSpec

N, SIDE, VIEW, J = 30, 12, 8, 4


class Brightest(Model):
    """Scores the class whose quarter of the view is brightest."""

    spec = ImageSpec(2, VIEW, VIEW, J)

    def scores(self, images):
        half = VIEW // 2
        return torch.nn.functional.avg_pool2d(images.mean(1, keepdim=True), half).flatten(1).softmax(-1)


@pytest.fixture(scope="module")
def stereo() -> Dataset:
    make = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (N, 2, SIDE, SIDE), generator=make).byte()
    labels, familiar = torch.randint(0, J, (N,), generator=make), torch.arange(N) % 3 == 0
    return Dataset(images, labels, J, {"familiar": familiar.long()}, preprocess=Preprocess(VIEW, standardize=True))


def best(scores: list[float]) -> int:
    return max(range(len(scores)), key=lambda j: scores[j])


def test_view_scores_are_the_mean_over_thirteen_squares(stereo):
    room = SIDE - VIEW
    squares = ((0, -1), (1, -1), (1, -2))
    places = [(0, 0), *((y, x) for square in squares for y in square for x in square)]
    found = view_scores(Brightest(), stereo, batch=7)
    assert found.shape == (N, J)
    wrong = 0
    for n in range(N):
        total = torch.zeros(J)
        for y, x in places:
            top, left = (min(max(room // 2 + offset, 0), room) for offset in (y, x))
            square = stereo.images[n : n + 1, :, top : top + VIEW, left : left + VIEW].float() / 255
            total += Brightest().scores(standardize(square))[0]
        torch.testing.assert_close(found[n], total / 13)
        wrong += best(total.tolist()) != int(stereo.labels[n])
    metrics = viewpoint_metrics(Brightest(), stereo, class_scores(Brightest(), stereo))
    assert metrics["test_error_13crop"] == pytest.approx(wrong / N)
    assert "test_error_5crop" in viewpoint_metrics(Brightest(), stereo, class_scores(Brightest(), stereo), views=5)
    one = viewpoint_metrics(Brightest(), stereo, class_scores(Brightest(), stereo), views=1)
    assert not [name for name in one if name.startswith("test_error")]


def test_one_view_is_the_middle(stereo):
    assert torch.equal(view_scores(Brightest(), stereo, count=1), class_scores(Brightest(), stereo))


def test_novel_and_familiar_viewpoints_are_counted_apart(stereo):
    scores = class_scores(Brightest(), stereo)
    wrong, seen = {True: 0, False: 0}, {True: 0, False: 0}
    for n in range(N):
        familiar = n % 3 == 0
        seen[familiar] += 1
        wrong[familiar] += best(scores[n].tolist()) != int(stereo.labels[n])
    found = novel_errors(scores, stereo)
    assert found == {"novel_error": wrong[False] / seen[False], "familiar_error": wrong[True] / seen[True]}
    everything = replace(stereo, factors={"familiar": torch.ones(N).long()})
    assert set(novel_errors(scores, everything)) == {"familiar_error"}
    with pytest.raises(DataError, match=r"set data\.novel") as caught:
        novel_errors(scores, replace(stereo, factors={}))
    assert "\n" not in str(caught.value)


def test_what_is_asked_depends_on_the_view_and_the_split(stereo):
    splits = Splits(stereo, stereo)
    found = classifier_metrics(Brightest(), tiny(), splits)
    assert set(found) == {"test_error", "calibration_error", "test_error_13crop", "novel_error", "familiar_error"}
    total = found["novel_error"] * 20 + found["familiar_error"] * 10
    assert total == pytest.approx(found["test_error"] * N)
    assert {"novel_error", "familiar_error"} < set(nearest_mean_metrics(tiny(), splits))
    bare = replace(stereo, images=stereo.images[:, :, :VIEW, :VIEW], factors={})
    assert not has_views(bare) and not has_views(replace(bare, preprocess=Preprocess())) and has_views(stereo)
    assert set(classifier_metrics(Brightest(), tiny(), Splits(bare, bare))) == {"test_error", "calibration_error"}


def test_they_are_shown_in_percent():
    metrics = {"test_error_13crop": [0.02], "novel_error": [0.135], "familiar_error": [0.037]}
    head, row = rows_of(Result("r", {}, [0], metrics, {}, {}, {}, {}))
    assert head[1:] == ["test error 13crop (%)", "novel error (%)", "familiar error (%)"]
    assert row[1:] == ["2.00", "13.50", "3.70"]
