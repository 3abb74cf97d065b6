"""Convolutions in bfloat16 by columns are convolutions: of small whole numbers, which bfloat16 holds, to the digit."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn.functional import conv2d

from support.hardware import multiplies_bfloat16
from torchcaps.kernels import columns
from torchcaps.kernels.columns import column_conv2d, is_faster
from torchcaps.kernels.threads import SWITCH
from torchcaps.layers import Convolution
from torchcaps.models.capsnet import CapsNetConfig, SmallCapsNetConfig
from torchcaps.types import ImageSpec


@pytest.fixture(autouse=True, scope="module")
def hardware() -> None:
    if not multiplies_bfloat16():
        pytest.skip("this CPU does not multiply bfloat16 matrices")


class Shape(NamedTuple):
    """Images, channels below and above, height and width, taps, stride."""

    b: int
    c: int
    o: int
    sides: tuple[int, int]
    taps: tuple[int, int]
    stride: int


SHAPES = [
    Shape(3, 4, 5, (9, 9), (5, 5), 1),
    Shape(5, 2, 3, (11, 8), (3, 4), 2),
    Shape(1, 1, 1, (7, 10), (2, 5), 3),
    Shape(4, 3, 2, (6, 5), (6, 5), 1),
    Shape(2, 2, 2, (5, 5), (1, 1), 2),
]


def whole(shape: tuple[int, ...], seed: int) -> Tensor:
    """Whole numbers from -1 to 1: sums of some hundred products of two are exact in bfloat16."""
    return torch.randint(-1, 2, shape, generator=torch.Generator().manual_seed(seed)).float()


@pytest.mark.parametrize("at_once", [1, 100, 10_000])
@pytest.mark.parametrize("shape", SHAPES)
def test_results_and_derivatives_are_those_of_a_convolution(
    shape: Shape, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the number of images that are worked on at a time."""
    monkeypatch.setattr(columns, "ROWS", at_once)
    x = whole((shape.b, shape.c, *shape.sides), 0).contiguous(memory_format=torch.channels_last).requires_grad_()
    w = whole((shape.o, shape.c, *shape.taps), 1).requires_grad_()
    wanted = conv2d(x, w, stride=shape.stride)
    found = column_conv2d(x, w, shape.stride)
    assert found.dtype == torch.bfloat16 and torch.equal(found.float(), wanted)
    g = whole(tuple(wanted.shape), 2)
    for ours, theirs in zip(
        torch.autograd.grad(found, (x, w), g.bfloat16()), torch.autograd.grad(wanted, (x, w), g), strict=True
    ):
        assert ours.dtype == torch.float32 and torch.equal(ours, theirs)


def test_any_layout_and_precision_of_the_images() -> None:
    x, w = whole((3, 4, 9, 8), 0), whole((5, 4, 3, 3), 1)
    wanted = conv2d(x, w)
    for images in (x, x.bfloat16(), x.double(), x.permute(0, 1, 3, 2).contiguous().permute(0, 1, 3, 2), x[:, :, ::1]):
        assert torch.equal(column_conv2d(images, w).float(), wanted)
    half = x.bfloat16().requires_grad_()
    column_conv2d(half, w).sum().backward()
    assert half.grad is not None and half.grad.dtype == torch.bfloat16


def test_rounding_is_that_of_bfloat16() -> None:
    """Against float64: the error of a result is below one in a hundred of the size of results, as torch's is."""
    make = torch.Generator().manual_seed(0)
    x = torch.randn(4, 16, 12, 12, generator=make, dtype=torch.float64, requires_grad=True)
    w = torch.randn(8, 16, 7, 7, generator=make, dtype=torch.float64, requires_grad=True)
    wanted = conv2d(x, w)
    found = column_conv2d(x, w).double()
    g = torch.randn(wanted.shape, generator=make, dtype=torch.float64)
    pairs = zip(torch.autograd.grad(found, (x, w), g), torch.autograd.grad(wanted, (x, w), g), strict=True)
    for ours, theirs in [(found.detach(), wanted.detach()), *pairs]:
        assert float((ours - theirs).norm() / theirs.norm()) < 0.01


def test_torch_checks_the_operator() -> None:
    x, w = whole((3, 4, 9, 8), 0).requires_grad_(), whole((5, 4, 3, 3), 1).requires_grad_()
    found = torch.library.opcheck(torch.ops.torchcaps.column_conv.default, (x, w, 2))
    assert set(found.values()) == {"SUCCESS"}


def test_the_layer_takes_columns_in_mixed_precision_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []

    def by_columns(x: Tensor, w: Tensor, stride: int) -> Tensor:
        taken.append(stride)
        return column_conv2d(x, w, stride)

    monkeypatch.setattr(columns, "column_conv2d", by_columns)
    torch.manual_seed(0)
    layer = Convolution(16, 24, 9, 2)
    x = torch.randn(4, 16, 20, 20)
    plain = layer(x)
    assert not taken
    with torch.autocast("cpu", torch.bfloat16):
        mixed = layer(x)
        assert taken == [2] and mixed.dtype == torch.bfloat16
        torch.testing.assert_close(mixed.float(), plain, atol=0.02, rtol=0.02)
        monkeypatch.setenv(SWITCH, "plain")
        layer(x)
    with torch.autocast("cpu", torch.float16):
        layer(x)
    assert taken == [2]


def test_sizes_that_are_worth_it() -> None:
    """The layers of the paper's CapsNet on 28x28, not those of the small one, nor more places or few channels."""
    spec = ImageSpec(1, 28, 28, 10)
    assert is_faster(torch.zeros(8, 256, 20, 20), CapsNetConfig().build(spec).primary.pose.weight, 2)
    small = SmallCapsNetConfig().build(spec)
    assert not is_faster(torch.zeros(8, 64, 10, 10), small.primary.pose.weight, 1)
    w = torch.zeros(32, 16, 9, 9)
    assert is_faster(torch.zeros(8, 16, 16, 16), w, 1) and not is_faster(torch.zeros(8, 16, 17, 17), w, 1)
    assert not is_faster(torch.zeros(8, 1, 16, 16), torch.zeros(32, 1, 9, 9), 1)
    for shape in ((0, 16, 16, 16), (16, 16, 16), (8, 15, 16, 16), (8, 16, 16, 8)):
        assert not is_faster(torch.zeros(shape), w, 1)
