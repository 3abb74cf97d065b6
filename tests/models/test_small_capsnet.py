"""What is said of the small CapsNet and of the CNNs beside it, counted."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from sweep import find_recipe
from torchcaps.config import to_dict
from torchcaps.errors import RecipeError, ShapeError
from torchcaps.models import CapsNet, CapsNetConfig, SmallCapsNetConfig
from torchcaps.routing import VB, Uniform
from torchcaps.train import load_recipe
from torchcaps.types import ImageSpec

DIGITS = ImageSpec(1, 28, 28, 10)
SPECS = {"mnist": DIGITS, "multimnist": ImageSpec(1, 36, 36, 10), "affnist": ImageSpec(1, 40, 40, 10)}
CONTROLS = ["cnn-mnist-small", "cnn-affnist-small", "cnn-multimnist-small"]


def multiply_adds(model: CapsNet) -> dict[str, int]:
    """Of one image, as the layers are defined: a convolution uses its weights at every place, the others once."""
    below = model.conv(torch.zeros(1, *model.spec[:3]))  # [1 c h w]
    return {
        "conv": model.conv.weight.numel() * below[0, 0].numel(),
        "primary": model.primary.pose.weight.numel() * model.primary.grid.places,
        "votes": model.classes.W.numel(),
        "decoder": sum(p.numel() for p in model.decoder.parameters() if p.ndim == 2),
    }


def test_the_small_capsnet_has_the_share_of_multiply_adds_that_is_said() -> None:
    """By hand: places times kernel times channels, children times classes times 16x8, and the decoder's matrices."""
    paper, small = (multiply_adds(config.build(DIGITS)) for config in (CapsNetConfig(), SmallCapsNetConfig()))
    assert paper == {
        "conv": 20 * 20 * 9 * 9 * 256,
        "primary": 6 * 6 * 9 * 9 * 256 * 256,
        "votes": 6 * 6 * 32 * 10 * 16 * 8,
        "decoder": 160 * 512 + 512 * 1024 + 1024 * 784,
    }
    assert small == {
        "conv": 10 * 10 * 9 * 9 * 64,
        "primary": 6 * 6 * 5 * 5 * 64 * 128,
        "votes": 6 * 6 * 16 * 10 * 16 * 8,
        "decoder": 160 * 256 + 256 * 512 + 512 * 784,
    }
    times = sum(paper.values()) / sum(small.values())
    assert times == pytest.approx(22, abs=0.1)
    said = f"1/{round(times)} of "
    assert said in (SmallCapsNetConfig.__doc__ or "") and said in load_recipe("capsnet-mnist-small").about


@pytest.mark.parametrize("name", CONTROLS)
def test_a_cnn_has_as_many_parameters_as_the_capsnet_beside_it_and_the_same_training(name: str) -> None:
    control, capsules = find_recipe(name), find_recipe(name.replace("cnn", "capsnet"))
    spec = SPECS[to_dict(control)["data"]["name"]]
    with torch.device("meta"):
        ours, wanted = (sum(p.numel() for p in r.model.build(spec).parameters()) for r in (control, capsules))
    assert ours == pytest.approx(wanted, rel=0.002)
    for table in ("data", "optimizer", "schedule", "train"):
        assert getattr(control, table) == getattr(capsules, table)


def test_a_norm_brings_saturated_activations_back():
    """The log-odds of every class capsule have mean 0 and variance 1 over the batch; poses stay as they are."""
    torch.manual_seed(0)
    config = SmallCapsNetConfig(channels=4, types=2, decoder=(8,), routing=VB(), norm=True)
    model = config.build(ImageSpec(1, 28, 28, 3)).double()
    images = torch.rand(6, 1, 28, 28, dtype=torch.float64)
    out = model(images)
    odds = torch.logit(out.classes.activation)  # [b j]
    torch.testing.assert_close(odds.mean(0), torch.zeros(3).double(), atol=1e-6, rtol=0)
    torch.testing.assert_close(odds.square().mean(0), torch.ones(3).double(), atol=1e-3, rtol=0)
    raw, _ = model.classes(out.primary)
    assert out.classes.pose.equal(raw.pose)
    assert model.needs_whole_batch
    assert not SmallCapsNetConfig(channels=4, types=2, decoder=(8,)).build(ImageSpec(1, 28, 28, 3)).needs_whole_batch


def test_a_norm_is_refused_where_activations_are_lengths():
    with pytest.raises(RecipeError, match="norm = true does not go with the router Dynamic"):
        SmallCapsNetConfig(norm=True)


PADDED = SmallCapsNetConfig(
    channels=4, types=2, primary_stride=2, decoder=(8,), shared=True, coordinates=0.0, padding=16, routing=Uniform()
)
"""Uniform coupling of all places, which share one W and say nothing of themselves; every stroke is seen whole."""


def stroke(row: int, column: int) -> Tensor:
    """An image [1 1 h w] that is empty but for a stroke of four by four pixels."""
    image = torch.zeros(1, 1, 24, 24)
    image[0, 0, row : row + 4, column : column + 4] = torch.arange(1.0, 17.0).view(4, 4) / 16
    return image


@torch.no_grad()
def test_with_padding_a_stroke_at_the_border_counts_as_one_in_the_middle() -> None:
    """Moved by whole steps of the primary capsules; without padding the border is seen by fewer of them."""
    torch.manual_seed(0)
    model = PADDED.build(ImageSpec(1, 24, 24, 3)).double()
    middle, corner = (model.scores(stroke(*place).double()) for place in ((8, 8), (0, 20)))
    torch.testing.assert_close(corner, middle)
    plain = replace(PADDED, padding=0).build(ImageSpec(1, 24, 24, 3)).double()
    plain.load_state_dict(model.state_dict())
    middle, corner = (plain.scores(stroke(*place).double()) for place in ((8, 8), (0, 20)))
    assert not torch.allclose(corner, middle, rtol=1e-3)


def test_padding_lets_smaller_images_through() -> None:
    with pytest.raises(ShapeError, match="too small"):
        replace(PADDED, padding=0).build(ImageSpec(1, 12, 12, 3))
    model = PADDED.build(ImageSpec(1, 12, 12, 3))
    assert model.scores(torch.rand(2, 1, 12, 12)).shape == (2, 3)


def test_padding_beyond_what_a_primary_capsule_sees_is_refused() -> None:
    with pytest.raises(RecipeError, match="padding = 17 is not below 17"):
        replace(PADDED, padding=17)
