"""A convolution goes by way of spectra where these cost less, and nobody can tell but by the clock."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchcaps.kernels import fourier
from torchcaps.kernels.fourier import fourier_conv2d, is_faster
from torchcaps.kernels.threads import SWITCH
from torchcaps.layers import Convolution
from torchcaps.models.capsnet import CapsNetConfig, SmallCapsNetConfig
from torchcaps.types import ImageSpec

TAKEN: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "stride 1": ({}, (64, 128, 10, 10)),
    "no bias": ({"bias": False}, (64, 128, 10, 9)),
    "stride 2": ({"kernel_size": (7, 9), "stride": 2}, (64, 128, 16, 18)),
}
"""Changes to `LAYER`, and images; so many that spectra are worth it."""
LAYER = {"in_channels": 128, "out_channels": 128, "kernel_size": 5}
PLAIN: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "padding": ({"padding": 1}, (64, 128, 10, 10)),
    "the same size": ({"padding": "same"}, (64, 128, 10, 10)),
    "dilation": ({"dilation": 2}, (64, 128, 14, 14)),
    "groups": ({"groups": 2}, (64, 128, 10, 10)),
    "two strides": ({"stride": (1, 2)}, (64, 128, 12, 12)),
    "no whole vectors below": ({"in_channels": 120}, (64, 120, 10, 10)),
    "no whole vectors above": ({"out_channels": 120}, (64, 128, 10, 10)),
    "one sample": ({}, (1, 128, 10, 10)),
    "a sample by itself": ({}, (128, 20, 20)),
    "no sample": ({}, (0, 128, 10, 10)),
    "one tap": ({"kernel_size": 1}, (64, 128, 10, 10)),
}
TRUNKS = {"28": (28, CapsNetConfig()), "36": (36, CapsNetConfig()), "small": (28, SmallCapsNetConfig())}


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The strides of convolutions that went by way of spectra."""
    strides: list[int] = []

    def spectra(x: Tensor, w: Tensor, stride: int) -> Tensor:
        strides.append(stride)
        return fourier_conv2d(x, w, stride)

    monkeypatch.setattr(fourier, "fourier_conv2d", spectra)
    return strides


def both(change: dict[str, Any]) -> tuple[Convolution, nn.Conv2d]:
    """Ours and torch's, with the same weights."""
    torch.manual_seed(0)
    one, two = Convolution(**LAYER | change), nn.Conv2d(**LAYER | change)
    two.load_state_dict(one.state_dict())
    return one, two


def results(layer: nn.Conv2d, shape: tuple[int, ...]) -> list[Tensor]:
    """What comes out, and all gradients."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).requires_grad_()
    y = layer(x)
    return [y.detach(), *torch.autograd.grad(y.float().square().sum(), (x, *layer.parameters()))]


def same(change: dict[str, Any], shape: tuple[int, ...]) -> bool:
    """Whether ours is torch's, bit for bit."""
    one, two = both(change)
    return all(torch.equal(*pair) for pair in zip(results(one, shape), results(two, shape), strict=True))


def primary_of(name: str) -> tuple[Convolution, Callable[[int], Tensor]]:
    """A CapsNet's second convolution, and its input for a batch."""
    side, config = TRUNKS[name]
    primary = config.build(ImageSpec(1, side, side, 10)).primary
    below = primary.window.grid
    one = torch.zeros(1, config.channels, below.height, below.width)
    return primary.pose, lambda b: one.expand(b, -1, -1, -1)


# --- The same as torch's --------------------------------------------------------------------------------------------


def test_parameters_are_torchs() -> None:
    for change in ({}, {"bias": False}, {"groups": 2}):
        made = []
        for kind in (Convolution, nn.Conv2d):
            torch.manual_seed(3)
            made.append(kind(**LAYER | change))
        ours, theirs = (layer.state_dict() for layer in made)
        assert [*ours] == [*theirs]
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
        made[0].load_state_dict(theirs)
        made[1].load_state_dict(ours)


@pytest.mark.parametrize("name", TAKEN)
def test_spectra_give_what_torch_gives(name: str, taken: list[int]) -> None:
    change, shape = TAKEN[name]
    one, two = both(change)
    came, wanted = results(one, shape), results(two, shape)
    assert taken == [change.get("stride", 1)]
    for ours, theirs in zip(came, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5 * theirs.abs().max().item())


@pytest.mark.parametrize("name", PLAIN)
def test_all_else_is_torchs(name: str, taken: list[int]) -> None:
    assert same(*PLAIN[name])
    assert not taken


def test_the_switch(taken: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, "plain")
    assert same(*TAKEN["stride 1"])
    assert not taken
    monkeypatch.setenv(SWITCH, "fast")
    assert not same(*TAKEN["stride 1"])  # but for rounding
    assert taken == [1]


def test_whoever_wants_fewer_digits_has_torchs(taken: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fourier, "FFT_COST", 0)
    few = {"in_channels": 16, "out_channels": 16}, (2, 16, 10, 10)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert same(*few)
    x = torch.zeros(few[1], dtype=torch.bfloat16)
    assert both(few[0])[0].bfloat16()(x).dtype == torch.bfloat16
    assert not taken
    assert not same(*few) and taken == [1]


@pytest.mark.parametrize("shape", [(64, 112, 10, 10), (64, 128, 10, 4), (64, 128, 1, 1), (4, 64, 128, 10, 10)])
def test_what_does_not_fit_is_refused_in_torchs_words(shape: tuple[int, ...], taken: list[int]) -> None:
    said = []
    for layer in both({"kernel_size": 9 if shape[-1] == 1 else 5}):
        with pytest.raises(RuntimeError) as caught:
            layer(torch.zeros(shape))
        said.append(str(caught.value))
    assert said[0] == said[1]
    assert not taken


# --- What is worth it -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TRUNKS)
def test_once_worth_it_stays_worth_it(name: str) -> None:
    conv, images = primary_of(name)
    found = [is_faster(images(b), conv.weight, conv.stride[0]) for b in range(1, 300)]
    assert found == sorted(found)
    assert not found[0] and found[-1]


def test_numbers_that_cost_nothing_are_worth_it_sooner(monkeypatch: pytest.MonkeyPatch) -> None:
    conv, images = primary_of("28")
    found = []
    for dearness in (0, 50, 10**6):
        monkeypatch.setattr(fourier, "FFT_COST", dearness)
        found.append(sum(is_faster(images(b), conv.weight, 2) for b in range(1, 300)))
    assert found == sorted(found, reverse=True)
    assert found[0] == 299 and found[-1] == 0


def test_capsnets_primary_layer_takes_spectra(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, ...]] = []

    def spectra(x: Tensor, w: Tensor, stride: int) -> Tensor:
        seen.append((*x.shape, *w.shape, stride))
        return x.new_zeros(len(x), len(w), 6, 6)

    monkeypatch.setattr(fourier, "fourier_conv2d", spectra)
    net = CapsNetConfig().build(ImageSpec(1, 28, 28, 10))
    assert isinstance(net.conv, Convolution) and net.conv.in_channels == 1
    net.primary(torch.zeros(128, 256, 20, 20))
    assert seen == [(128, 256, 20, 20, 256, 256, 9, 9, 2)]
