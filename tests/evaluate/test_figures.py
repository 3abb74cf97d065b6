"""Pictures of a CapsNet are PNG files that show what they say."""

from __future__ import annotations

import pytest
import torch

from tiny import tiny
from torchcaps.evaluate import figures
from torchcaps.models import CapsNet
from torchcaps.train.training import set_up

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(scope="module")
def model_and_test():
    recipe = tiny()
    test = recipe.data.load().test
    model = set_up(recipe, test.spec).model.eval()
    assert isinstance(model, CapsNet)
    return model, test


@pytest.mark.parametrize("draw", [figures.reconstructions, figures.perturbations, figures.coupling_maps])
def test_every_picture_is_a_png_and_depends_on_the_model(model_and_test, draw):
    model, test = model_and_test
    first = draw(model, test)
    assert first.startswith(PNG) and first == draw(model, test)
    with torch.no_grad():
        kept = {name: value.clone() for name, value in model.state_dict().items()}
        for parameter in model.parameters():
            parameter.mul_(3)
        other = draw(model, test)
        model.load_state_dict(kept)
    assert other.startswith(PNG) and other != first


def test_learning_curves():
    entries = [{"step": n, "accuracy": n / 10} for n in range(5)]
    first = figures.learning_curve([("a", entries)])
    assert first.startswith(PNG) and first != figures.learning_curve([("a", entries[:3])])
