"""Primary capsules: d channels at one place make a pose, whatever the size of the image."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

from torchcaps.errors import RecipeError, ShapeError
from torchcaps.layers import PrimaryCapsules
from torchcaps.layers.primary import group_channels
from torchcaps.math.grid import Grid
from torchcaps.math.squash import squash

SIZES = [(1, 1), (1, 5), (7, 4), (5, 5), (3, 8)]


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("h", "w"), SIZES)
@pytest.mark.parametrize(("types", "d"), [(1, 1), (1, 4), (4, 1), (3, 2)])
def test_a_capsule_is_d_channels_at_one_place(h: int, w: int, types: int, d: int) -> None:
    features = random(2, types * d, h, w)
    found = group_channels(features, types)
    assert found.shape == (2, h, w, types, d)
    for b in range(2):
        for row in range(h):
            for column in range(w):
                for i in range(types):
                    pose = [float(features[b, i * d + e, row, column]) for e in range(d)]
                    assert found[b, row, column, i].tolist() == pose


def test_a_plain_reshape_mixes_neighboring_pixels() -> None:
    features = random(2, 6, 4, 4)
    right, wrong = group_channels(features, 3), features.reshape(2, 4, 4, 3, 2)
    assert right.shape == wrong.shape
    assert not torch.allclose(right, wrong)
    touched = features.clone()
    touched[:, :, 1, 2] += 1
    changed = (group_channels(touched, 3) != right).flatten(3).any(-1)  # [b h w]
    assert changed[0].nonzero().tolist() == [[1, 2]]
    assert len((touched.reshape(wrong.shape) != wrong).flatten(3).any(-1)[0].nonzero()) > 1


def slow_convolution(image: Tensor, weight: Tensor, bias: Tensor, row: int, column: int, stride: int) -> list[float]:
    """All output channels of a convolution at one place of one image [c h w]."""
    kernel = weight.shape[-1]
    top, left = row * stride, column * stride
    patch = image[:, top : top + kernel, left : left + kernel]
    return [float((patch * weight[o]).sum() + bias[o]) for o in range(len(weight))]


@pytest.mark.parametrize(("h", "w", "kernel", "stride"), [(7, 5, 3, 2), (6, 9, 2, 1), (5, 5, 5, 1), (4, 3, 1, 1)])
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("activation", ["length", "logistic"])
def test_against_loops(h: int, w: int, kernel: int, stride: int, channels: int, activation: str) -> None:
    layer = PrimaryCapsules(
        Grid.of_image(h, w), channels, 2, 3, kernel=kernel, stride=stride, activation=activation
    ).double()  # fmt: skip
    features = random(2, channels, h, w).double()
    pose, on = layer(features)
    assert pose.shape == (2, layer.grid.height, layer.grid.width, 2, 3)
    assert on.shape == pose.shape[:-1]
    assert layer.count == pose[0, ..., 0].numel()
    filters, bias = layer.pose.weight.detach(), layer.pose.bias.detach()
    for row in range(layer.grid.height):
        for column in range(layer.grid.width):
            linear = torch.tensor(slow_convolution(features[1], filters, bias, row, column, stride)).view(2, 3)
            found, here = pose[1, row, column].detach().float(), on[1, row, column].detach().float()
            if activation == "length":
                torch.testing.assert_close(found, squash(linear))
                torch.testing.assert_close(here, found.square().sum(-1).sqrt())
            else:
                logit = slow_convolution(
                    features[1], layer.on.weight.detach(), layer.on.bias.detach(), row, column, stride
                )
                torch.testing.assert_close(found, linear)
                torch.testing.assert_close(here, torch.tensor(logit).sigmoid())


@pytest.mark.parametrize("activation", ["length", "logistic"])
@pytest.mark.parametrize("scale", [0.0, 1e-20, 1.0, 1e6, 1e15])
def test_activations_are_probabilities_and_nothing_is_nan(activation: str, scale: float) -> None:
    layer = PrimaryCapsules(Grid.of_image(6, 5), 2, 3, 4, kernel=3, activation=activation)
    features = (scale * random(2, 2, 6, 5)).requires_grad_()
    pose, on = layer(features)
    assert on.min().item() >= 0
    assert on.max().item() <= 1 + 1e-6
    (pose.sum() + on.sum()).backward()
    assert features.grad is not None
    for x in (pose, on, features.grad, *(p.grad for p in layer.parameters())):
        assert bool(x.isfinite().all())


def test_only_the_logistic_activation_has_parameters_of_its_own() -> None:
    by_length = PrimaryCapsules(Grid.of_image(5, 5), 3, 2, 4, kernel=3)
    by_unit = PrimaryCapsules(Grid.of_image(5, 5), 3, 2, 4, kernel=3, activation="logistic")
    count = {n: sum(p.numel() for p in m.parameters()) for n, m in (("length", by_length), ("unit", by_unit))}
    assert count == {"length": 8 * (27 + 1), "unit": 8 * (27 + 1) + 2 * (27 + 1)}


@pytest.mark.parametrize("activation", ["length", "logistic"])
def test_every_parameter_learns(activation: str) -> None:
    layer = PrimaryCapsules(Grid.of_image(5, 4), 2, 2, 3, kernel=2, activation=activation)
    pose, on = layer(random(2, 2, 5, 4))
    (pose.square().sum() + on.sum()).backward()
    assert all(p.grad is not None and bool(p.grad.any()) for p in layer.parameters())


def test_gradcheck() -> None:
    layer = PrimaryCapsules(Grid.of_image(3, 4), 2, 2, 2, kernel=2, activation="logistic").double()
    assert gradcheck(lambda x: tuple(layer(x)), (random(1, 2, 3, 4).double().requires_grad_(),))


def test_state_dict_round_trip() -> None:
    one, two = (PrimaryCapsules(Grid.of_image(5, 5), 2, 2, 3, kernel=3, activation="logistic") for _ in range(2))
    x = random(1, 2, 5, 5)
    assert not torch.equal(one(x).pose, two(x).pose)
    two.load_state_dict(one.state_dict())
    torch.testing.assert_close(two(x), one(x), rtol=0, atol=0)


@pytest.mark.parametrize(("channels", "types", "dimension"), [(0, 1, 1), (1, 0, 1), (1, 1, 0), (1, -2, 1)])
def test_sizes_below_1_are_refused(channels: int, types: int, dimension: int) -> None:
    with pytest.raises(ShapeError, match="at least 1") as caught:
        PrimaryCapsules(Grid.of_image(5, 5), channels, types, dimension)
    assert "\n" not in str(caught.value)


def test_an_unknown_activation_is_refused() -> None:
    with pytest.raises(RecipeError, match="logistic") as caught:
        PrimaryCapsules(Grid.of_image(5, 5), 1, 1, 1, activation="logistc")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("shape", [(2, 3, 5, 6), (2, 3, 6, 5, 1), (3, 6, 5), (2, 4, 6, 5)])
def test_features_of_another_shape_are_refused(shape: tuple[int, ...]) -> None:
    layer = PrimaryCapsules(Grid.of_image(6, 5), 3, 2, 4, kernel=3)
    with pytest.raises(ShapeError, match="6 5") as caught:
        layer(torch.zeros(shape))
    assert str(list(shape)) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_kernel_larger_than_the_image_fails_at_construction() -> None:
    with pytest.raises(ShapeError, match="7x7"):
        PrimaryCapsules(Grid.of_image(5, 9), 1, 1, 1, kernel=7)


def test_mixed_precision_keeps_switches_that_are_nearly_open_apart() -> None:
    """bfloat16 has no number between .996 and 1; a switch that is asked for its log-odds again needs them."""
    layer = PrimaryCapsules(Grid.of_image(1, 1), 1, 3, 4, activation="logistic")
    assert layer.on is not None and layer.on.bias is not None
    with torch.no_grad():
        layer.on.weight.zero_()
        layer.on.bias.copy_(torch.tensor([7.0, 8.0, 9.0]))
        with torch.autocast("cpu", torch.bfloat16):
            found = layer(torch.ones(1, 1, 1, 1)).activation
    torch.testing.assert_close(found.flatten().logit(), torch.tensor([7.0, 8.0, 9.0]), rtol=0, atol=0.05)
