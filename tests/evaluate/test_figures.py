"""Pictures of any model are PNG files that show what they say."""

from __future__ import annotations

import io
import itertools
from typing import Any

import pytest
import torch
from PIL import Image

from support.png import panels
from torchcaps.evaluate import figures
from torchcaps.metrics import expected_calibration_error

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.mark.parametrize("shape", [(28, 28), (6, 6), (20, 30), (64, 64, 3)])
def test_a_grid_has_a_panel_an_image(shape):
    rows = [("one", torch.rand(5, *shape) / 2), ("two\nlines", torch.zeros(3, *shape)), ("", torch.rand(1, *shape) / 2)]
    png = figures.image_grid(rows)
    assert png.startswith(PNG) and panels(png) == 9 and png == figures.image_grid(rows)
    noted = figures.image_grid(rows, notes={0: ["a"] * 5, 2: ["b\nc"]})
    assert panels(noted) == 9 and Image.open(io.BytesIO(noted)).height > Image.open(io.BytesIO(png)).height


def test_a_grid_shows_colors_and_shades_where_they_belong():
    red, green = torch.zeros(1, 8, 8, 3), torch.zeros(1, 8, 8, 3)
    red[..., 0] = green[..., 1] = 1
    picture = Image.open(io.BytesIO(figures.image_grid([("", torch.cat([red, green])), ("", red / 2)], scale=1)))
    width, height = picture.size
    margin = width - 2 * 110  # an inch an image, 110 dots an inch
    assert picture.convert("RGB").getpixel((margin + 55, height // 4)) == (255, 0, 0)
    assert picture.convert("RGB").getpixel((margin + 165, height // 4)) == (0, 255, 0)
    assert picture.convert("RGB").getpixel((margin + 55, 3 * height // 4))[0] in (127, 128)
    assert picture.convert("RGB").getpixel((margin + 165, 3 * height // 4)) == (255, 255, 255)


@pytest.mark.parametrize("word", ["capsule 10", "number 12\ncapsule 100", "four-legged animal", "3"])
def test_notes_beside_each_other_do_not_touch_and_are_not_cut_off(monkeypatch, word):
    seen: list[Any] = []
    monkeypatch.setattr(figures, "png", lambda figure: seen.append(figure) or b"")
    figures.image_grid([("image", torch.rand(16, 8, 8))], 0.5, {0: [word] * 16})
    figure = seen[0]
    boxes = [text.get_window_extent(figure.canvas.get_renderer()) for text in figure.axes[0].texts[1:]]
    assert len(boxes) == 16 and boxes[-1].x1 <= figure.bbox.x1
    assert all(left.x1 + 2 < right.x0 for left, right in itertools.pairwise(boxes))
    figures.pyplot().close(figure)


def test_learning_curves():
    entries = [{"step": n, "accuracy": n / 10} for n in range(5)]
    first = figures.learning_curve([("a", entries)])
    assert first.startswith(PNG) and first != figures.learning_curve([("a", entries[:3])])


@pytest.mark.parametrize("bins", [1, 4, 15])
def test_reliability_equals_loops_over_bins(bins):
    confidence = torch.rand(200, generator=torch.Generator().manual_seed(0)).double()
    confidence[:3] = torch.tensor([0.0, 1.0, 0.5])
    correct = torch.rand(200, generator=torch.Generator().manual_seed(1)) < confidence
    found = figures.reliability(confidence, correct, bins)
    gap = 0.0
    for n in range(bins):
        held = [
            (p, hit)
            for p, hit in zip(confidence.tolist(), correct.tolist(), strict=True)
            if n / bins < p <= (n + 1) / bins or (n == 0 and p == 0)
        ]
        assert found.counts[n] == len(held)
        mean, right = (sum(x[i] for x in held) / max(1, len(held)) for i in (0, 1))
        assert float(found.confidence[n]) == pytest.approx(mean) and float(found.accuracy[n]) == pytest.approx(right)
        gap += abs(mean - right) * len(held) / 200
    assert expected_calibration_error(confidence, correct, bins) == pytest.approx(gap)
    png = figures.reliability_diagram(confidence, correct, bins)
    assert png.startswith(PNG) and png != figures.reliability_diagram(confidence, ~correct, bins)
