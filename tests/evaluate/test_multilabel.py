"""Errors on images that show several things, against loops over sets."""

from __future__ import annotations

import math

import pytest
import torch

from torchcaps.errors import ShapeError
from torchcaps.evaluate.multilabel import best_threshold, pair_error, single_error, threshold_error, top


def drawn(n: int, j: int, m: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores with many ties that favor the labels, and m different labels an image."""
    g = torch.Generator().manual_seed(seed)
    labels = torch.rand(n, j, generator=g).argsort(-1)[:, :m]
    scores = torch.randint(0, 8, (n, j), generator=g) / 10
    return scores.scatter_add(1, labels, torch.randint(0, 4, (n, m), generator=g) / 10), labels


def highest(row: list[float], m: int) -> list[int]:
    """The m highest, one after the other; of equals the first."""
    left, found = list(range(len(row))), []
    for _ in range(m):
        best = left[0]
        for c in left:
            if row[c] > row[best]:
                best = c
        left.remove(best)
        found.append(best)
    return found


def above(scores: torch.Tensor, labels: torch.Tensor, threshold: float) -> float:
    wrong = 0
    for row, wanted in zip(scores.tolist(), labels.tolist(), strict=True):
        wrong += {c for c, score in enumerate(row) if score > threshold} != set(wanted)
    return wrong / len(labels)


@pytest.mark.parametrize(("n", "j", "m", "seed"), [(60, 10, 2, 0), (40, 4, 3, 1), (25, 5, 1, 2), (9, 3, 3, 3)])
def test_errors_equal_loops_over_sets(n, j, m, seed):
    scores, labels = drawn(n, j, m, seed)
    wrong = missed = 0
    for row, wanted in zip(scores.tolist(), labels.tolist(), strict=True):
        answers = highest(row, m)
        wrong += set(answers) != set(wanted)
        missed += sum(label not in answers for label in wanted)
    assert pair_error(scores, labels) == pytest.approx(wrong / n)
    assert single_error(scores, labels) == pytest.approx(missed / (n * m))
    assert top(scores, m).tolist() == [highest(row, m) for row in scores.tolist()]
    for threshold in (-1.0, 0.3, 0.55, 2.0):
        assert threshold_error(scores, labels, threshold) == pytest.approx(above(scores, labels, threshold))


@pytest.mark.parametrize("seed", range(8))
def test_no_threshold_is_better_than_the_best(seed):
    scores, labels = drawn(30, 5, 2, seed)
    if seed % 2:
        scores = scores + torch.rand(30, 5, generator=torch.Generator().manual_seed(seed))  # no ties
    values = sorted({-1.0, *scores.double().flatten().tolist()})
    tried = [above(scores, labels, t) for t in values]  # all that differ: the set changes at scores only
    assert above(scores, labels, best_threshold(scores, labels)) == pytest.approx(min(tried))


def test_the_best_threshold_by_hand():
    labels = torch.tensor([[0, 1], [1, 2]])
    scores = torch.tensor([[0.9, 0.8, 0.2], [0.4, 0.7, 0.6]])  # right in [.2, .8) and in [.4, .6)
    assert best_threshold(scores, labels) == pytest.approx(0.5)
    assert best_threshold(1 - scores, labels) == 0.5 and threshold_error(1 - scores, labels, 0.5) == 1  # hopeless
    everything = torch.tensor([[0, 1, 2], [2, 1, 0]])
    assert threshold_error(scores, everything, best_threshold(scores, everything)) == 0


def test_a_nan_counts_as_wrong_and_order_does_not_count():
    scores, labels = torch.tensor([[0.9, 0.8, 0.1], [0.9, math.nan, 0.1]]), torch.tensor([[1, 0], [0, 1]])
    assert pair_error(scores, labels) == single_error(scores, labels) == threshold_error(scores, labels, 0.5) == 0.5
    assert threshold_error(scores, labels, best_threshold(scores, labels)) == 0.5


def test_wrong_input_gets_one_line():
    scores, labels = drawn(6, 4, 2, 0)
    for s, l, words in [
        (scores[0], labels, "wanted [n j]"), (scores, labels[:, 0], "m labels a row"),
        (scores, labels[:5], "m labels a row"), (scores, labels.float(), "wanted integers"),
        (scores, labels + 3, "4 scores a row"), (scores, labels - 1, "4 scores a row"),
        (scores, labels[:, :1].expand(6, 2), "twice"), (scores, labels.repeat(1, 3), "m at most 4"),
    ]:  # fmt: skip
        for measure in (pair_error, single_error, best_threshold, lambda a, b: threshold_error(a, b, 0.5)):
            with pytest.raises(ShapeError) as caught:
                measure(s, l)
            assert words in str(caught.value) and "\n" not in str(caught.value)
