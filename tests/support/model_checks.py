"""What is asked of every capsule network in the same words: to learn, to stay finite, to refuse in one line."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from torchcaps.config import from_dict
from torchcaps.errors import DataError, RecipeError, ShapeError, TorchcapsError
from torchcaps.models import Model
from torchcaps.types import Batch, ImageSpec

SPEC = ImageSpec(1, 8, 8, 3)
NO_SPECS = [ImageSpec(0, 8, 8, 3), ImageSpec(1, 8, 8, 0)]
"""Without channels, without classes."""

Refused = tuple[Tensor, type[TorchcapsError], str]
NO_IMAGES: list[Refused] = [
    (torch.zeros(2, 2, 8, 8), ShapeError, r"\[b 1 8 8\]"),
    (torch.zeros(0, 1, 8, 8), ShapeError, "empty batch"),
    (torch.zeros(2, 1, 8, 8, dtype=torch.uint8), ShapeError, "255"),
    (torch.full((2, 1, 8, 8), math.nan), DataError, "NaN"),
]
"""What cannot be meant by images of `SPEC`, the error, and what it says."""


def batch(spec: ImageSpec = SPEC, b: int = 4, seed: int = 0) -> Batch:
    """Noise with labels."""
    make = torch.Generator().manual_seed(seed)
    images = torch.rand(b, *spec[:3], generator=make)
    return Batch(images, torch.randint(spec.classes, (b,), generator=make), torch.arange(b))


def learned(model: Model, data: Batch, lr: float, steps: int) -> list[float]:
    """The loss before each step of Adam on one batch."""
    optimizer = torch.optim.Adam(model.parameters(), lr)
    losses = []
    for step in range(steps):
        loss = model.objective(data, step)["loss"]
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return losses


def assert_finite_on_flat_images(model: Model, value: float) -> None:
    """Loss and gradient, of images of `SPEC` that are one value all over."""
    loss = model.objective(batch()._replace(images=torch.full((4, *SPEC[:3]), value)), 0)["loss"]
    loss.backward()
    assert bool(loss.isfinite())
    taught = [p for p in model.parameters() if p.requires_grad]
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in taught)


# --- Errors -------------------------------------------------------------------------------------------------


def refusal(error: type[TorchcapsError], says: str, act: Callable[[], Any]) -> str:
    """The one line in which something is refused."""
    with pytest.raises(error, match=says) as caught:
        act()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def assert_names_a_size_that_fits(config: Any, size: tuple[int, int], smallest: int) -> None:
    """Images of the size are refused, and the smallest that are not are named."""
    text = refusal(ShapeError, "too small", lambda: config.build(ImageSpec(1, *size, 3)))
    assert re.findall(r"(\d+)x\1 or more", text) == [str(smallest)]


def assert_refuses(model: Model, refused: Refused, *uses: Callable[[Tensor], Any]) -> None:
    """The model, its objective and all that is named refuse the images alike."""
    images, error, says = refused
    labels = torch.zeros(len(images), dtype=torch.int64)
    for use in (model, *uses, lambda x: model.objective(Batch(x, labels, labels), 0)):
        assert refusal(error, says, lambda use=use: use(images))


def assert_recipe_refuses(kind: type, data: dict[str, Any]) -> None:
    """A table whose first key is the wrong one is refused by that name."""
    assert refusal(RecipeError, next(iter(data)), lambda: from_dict(kind, data))


def assert_redraws_without_labels(model: Any, data: Batch, weight: float) -> None:
    """The objective is the reconstruction alone, by a loop over samples, whatever the labels are."""
    found, redrawn = model.objective(data, 0), model.reconstruct(data.images).detach()
    b = len(data.images)
    error = sum(float((redrawn[s] - data.images[s]).square().sum()) for s in range(b)) / b
    assert set(found) == {"loss", "reconstruction", "capsules_in_band"}
    assert found["reconstruction"].item() == pytest.approx(error, rel=1e-5)
    assert found["loss"].item() == pytest.approx(weight * error, rel=1e-5)
    for labels in (data.labels.roll(1), torch.full((b,), -7), torch.zeros(0)):
        assert torch.equal(model.objective(data._replace(labels=labels), 0)["loss"], found["loss"])
    with pytest.raises(TypeError, match="classifier"):
        model.scores(data.images)


def assert_teaches_everything(model: Any, data: Batch) -> None:
    """The gradient reaches every parameter, and is finite."""
    model.objective(data, 0)["loss"].backward()
    for name, p in model.named_parameters():
        assert p.grad is not None and bool(p.grad.isfinite().all()) and bool(p.grad.any()), name
