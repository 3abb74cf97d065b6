"""Efficient-CapsNet: its size, its layers read slowly, and the authors' start of CapsNet."""

from __future__ import annotations

import pytest
import torch

from support.small_models import SMALL, built, images
from torchcaps.errors import RecipeError, ShapeError
from torchcaps.layers import PrimaryCapsules
from torchcaps.math.grid import Grid
from torchcaps.models import CapsNetConfig, EfficientCapsNetConfig
from torchcaps.types import ImageSpec

DIGITS = ImageSpec(1, 28, 28, 10)


def test_it_has_the_paper_s_parameters_and_sixteen_capsules() -> None:
    with torch.device("meta"):
        model = EfficientCapsNetConfig().build(DIGITS)
    decoder = sum(p.numel() for p in model.decoder.parameters())
    assert sum(p.numel() for p in model.parameters()) - decoder == 161_824
    assert model.primary.count == 16 and model.classes.W.shape == (16, 10, 16, 8)


def test_depthwise_capsules_are_their_equation() -> None:
    """Number n of capsule i is channel i d + n, weighted by a kernel of its own over all places; then squashed."""
    torch.manual_seed(0)
    layer = PrimaryCapsules(Grid.of_image(3, 3), 6, 2, 3, kernel=3, activation="exponential", depthwise=True).double()
    x = torch.randn(2, 6, 3, 3, dtype=torch.float64)
    found = layer(x)
    assert found.pose.shape == (2, 1, 1, 2, 3)
    for b in range(2):
        for i in range(2):
            s = torch.stack(
                [
                    (x[b, 3 * i + n] * layer.pose.weight[3 * i + n, 0]).sum() + layer.pose.bias[3 * i + n]
                    for n in range(3)
                ]
            )
            length = s.norm()
            torch.testing.assert_close(found.pose[b, 0, 0, i], (1 - (-length).exp()) * s / length)
            torch.testing.assert_close(found.activation[b, 0, 0, i], 1 - (-length).exp())


def test_every_convolution_is_followed_by_relu_and_a_norm() -> None:
    model = built(SMALL["efficient-capsnet"])
    x = images(3)
    expected = x
    for conv, norm in ((model.conv[0], model.conv[2]), (model.conv[3], model.conv[5])):
        features = torch.nn.functional.conv2d(expected, conv.weight, conv.bias, conv.stride).clamp_min(0)
        scale = norm.scale / (norm.variance + norm.eps).sqrt()
        expected = (features - norm.mean[:, None, None]) * scale[:, None, None] + norm.shift[:, None, None]
    torch.testing.assert_close(model.features(x), expected)


def test_images_that_are_not_square_have_several_places() -> None:
    model = SMALL["efficient-capsnet"].build(ImageSpec(1, 12, 16, 3)).eval()
    assert model(torch.rand(2, 1, 12, 16)).primary.pose.shape[1:3] == (1, 3)


def test_wrong_sizes_get_one_clear_line() -> None:
    with pytest.raises(RecipeError, match="one of each"):
        EfficientCapsNetConfig(kernels=(5, 3))
    with pytest.raises(RecipeError, match="multiple of type_dimension = 7"):
        EfficientCapsNetConfig(type_dimension=7)
    with pytest.raises(ShapeError, match="11"):
        EfficientCapsNetConfig().build(ImageSpec(1, 10, 28, 10))
    with pytest.raises(ShapeError, match="6 are wanted"):
        PrimaryCapsules(Grid.of_image(3, 3), 8, 2, 3, kernel=3, depthwise=True)


def test_the_authors_start_divides_wide_weights_by_the_types() -> None:
    torch.manual_seed(0)
    model = CapsNetConfig(channels=64, types=8, start="authors", decoder=(8,)).build(DIGITS)
    assert float(model.primary.pose.weight.std().detach()) == pytest.approx(0.1, rel=0.02)
    assert bool((model.primary.pose.bias == 0.1).all()) and bool((model.conv.bias == 0.1).all())
    features = model.features(torch.rand(1, 1, 28, 28))
    weighted = (features[0, :, :9, :9] * model.primary.pose.weight[:8]).sum((1, 2, 3)) + 0.1
    s = weighted / 8
    expected = s * s.norm() / (1 + s.norm() ** 2)
    torch.testing.assert_close(model.primary(features).pose[0, 0, 0, 0], expected, rtol=1e-3, atol=1e-5)
