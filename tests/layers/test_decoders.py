"""Decoders: every image size, values in [0, 1], and only the chosen capsule in the picture."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchcaps.errors import ShapeError, TorchcapsError
from torchcaps.layers import ConvDecoder, DenseDecoder, select

IMAGES = [(1, 1, 1), (1, 5, 7), (3, 9, 4), (1, 28, 28), (2, 13, 13), (3, 3, 17)]
DECODERS = [DenseDecoder, ConvDecoder]
SMALL: dict[type, dict[str, Any]] = {DenseDecoder: {"hidden": (6, 5)}, ConvDecoder: {"widths": (4, 3)}}


def build(kind: type, image: tuple[int, int, int], capsules: int = 3, dimension: int = 4) -> nn.Module:
    decoder: nn.Module = kind(capsules, dimension, image, **SMALL[kind])
    return decoder


def poses(b: int, j: int, k: int) -> Tensor:
    return torch.randn(b, j, k, generator=torch.Generator().manual_seed(0))


# --- The choice of a capsule --------------------------------------------------------------------------------


def test_select_keeps_exactly_one_capsule() -> None:
    pose, chosen = poses(4, 3, 5), torch.tensor([2, 0, 1, 2])
    found = select(pose, chosen)
    assert found.shape == pose.shape
    for s in range(4):
        for j in range(3):
            wanted = pose[s, j] if j == int(chosen[s]) else torch.zeros(5)
            assert torch.equal(found[s, j].abs(), wanted.abs())
            assert torch.equal(found[s, j], wanted) or not wanted.any()


def test_only_the_chosen_capsule_gets_a_gradient() -> None:
    pose = poses(2, 3, 4).requires_grad_()
    select(pose, torch.tensor([1, 2])).sum().backward()
    assert pose.grad is not None
    assert pose.grad[..., 0].tolist() == [[0, 1, 0], [0, 0, 1]]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_select_keeps_the_type(dtype: torch.dtype) -> None:
    assert select(poses(2, 3, 4).to(dtype), torch.tensor([0, 1])).dtype == dtype


@pytest.mark.parametrize("integers", [torch.int64, torch.int32, torch.uint8])
def test_select_takes_every_integer_type(integers: torch.dtype) -> None:
    pose = poses(2, 3, 4)
    assert torch.equal(select(pose, torch.tensor([2, 1], dtype=integers)), select(pose, torch.tensor([2, 1])))


@pytest.mark.parametrize(
    "chosen",
    [torch.tensor([0, 3]), torch.tensor([-1, 0]), torch.tensor([0.0, 1.0]), torch.tensor([1]), torch.eye(2).long()],
)
def test_a_choice_that_is_none_is_refused_in_one_line(chosen: Tensor) -> None:
    with pytest.raises(TorchcapsError, match="chosen") as caught:
        select(poses(2, 3, 4), chosen)
    assert "\n" not in str(caught.value)


# --- Pictures -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", DECODERS)
@pytest.mark.parametrize("image", IMAGES)
def test_images_of_any_size_and_number_of_channels(kind: type, image: tuple[int, int, int]) -> None:
    found = build(kind, image)(poses(2, 3, 4))
    assert found.shape == (2, *image)
    assert bool(((found >= 0) & (found <= 1)).all())


@pytest.mark.parametrize("kind", DECODERS)
@pytest.mark.parametrize("scale", [0.0, 1e4, 1e15])
def test_pixels_stay_in_range_whatever_the_poses(kind: type, scale: float) -> None:
    pose = (scale * poses(4, 3, 4)).requires_grad_()
    found = build(kind, (2, 5, 7))(pose)
    assert bool(((found >= 0) & (found <= 1)).all())
    found.sum().backward()
    assert pose.grad is not None
    assert bool(pose.grad.isfinite().all())


def test_the_dense_decoder_is_its_three_layers() -> None:
    decoder = build(DenseDecoder, (2, 3, 5))
    weights = [m for m in decoder.modules() if isinstance(m, nn.Linear)]
    assert [(m.in_features, m.out_features) for m in weights] == [(12, 6), (6, 5), (5, 30)]
    pose = poses(2, 3, 4)
    x = pose.reshape(2, 12)
    for n, m in enumerate(weights):
        x = x @ m.weight.T + m.bias
        x = x.clamp_min(0) if n < 2 else 1 / (1 + torch.exp(-x))
    torch.testing.assert_close(decoder(pose), x.reshape(2, 2, 3, 5))


def test_the_papers_decoder_has_1_411_344_parameters() -> None:
    decoder = DenseDecoder(10, 16, (1, 28, 28))
    assert sum(p.numel() for p in decoder.parameters()) == 160 * 512 + 512 + 512 * 1024 + 1024 + 1024 * 784 + 784


def test_a_conv_decoder_doubles_the_size_at_every_stage() -> None:
    for widths in ((4,), (4, 3), (4, 3, 2)):
        decoder = ConvDecoder(2, 3, (1, 21, 10), widths)
        stages = [m for m in decoder.modules() if isinstance(m, nn.ConvTranspose2d)]
        assert [m.in_channels for m in stages] == list(widths)
        assert [m.out_channels for m in stages] == [*widths[1:], 1]
        assert decoder(poses(1, 2, 3)).shape == (1, 1, 21, 10)


def test_a_conv_decoder_keeps_the_top_left_of_what_it_paints() -> None:
    decoder = build(ConvDecoder, (1, 5, 7))
    linear, *stages = (m for m in decoder.modules() if isinstance(m, nn.Linear | nn.ConvTranspose2d))
    x = linear(poses(2, 3, 4).flatten(1)).view(2, 4, 2, 2)  # 2 x 2 doubles twice to 8 x 8
    for stage in stages:
        x = stage(x.clamp_min(0))
    torch.testing.assert_close(decoder(poses(2, 3, 4)), x.sigmoid()[:, :, :5, :7])


@pytest.mark.parametrize("kind", DECODERS)
def test_samples_do_not_mix_and_every_capsule_can_draw(kind: type) -> None:
    torch.manual_seed(0)
    decoder = build(kind, (1, 6, 6)).double()
    pose = poses(3, 3, 4).double()
    whole = decoder(pose)
    for s in range(3):
        torch.testing.assert_close(whole[s : s + 1], decoder(pose[s : s + 1]))
    for j in range(3):
        other = pose.clone()
        other[:, j] += 1
        assert not torch.allclose(decoder(other), whole)


@pytest.mark.parametrize("kind", DECODERS)
def test_every_parameter_learns_and_the_state_comes_back(kind: type) -> None:
    torch.manual_seed(0)
    one, two = (build(kind, (2, 5, 4)) for _ in range(2))
    pose = poses(64, 3, 4)
    one(pose).square().sum().backward()
    assert all(p.grad is not None and bool(p.grad.any()) for p in one.parameters())
    assert not torch.equal(one(pose), two(pose))
    two.load_state_dict(one.state_dict())
    assert torch.equal(one(pose), two(pose))


# --- Errors -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", DECODERS)
@pytest.mark.parametrize(
    "wrong", [(0, 4, (1, 5, 5)), (3, 0, (1, 5, 5)), (3, 4, (0, 5, 5)), (3, 4, (1, 0, 5)), (3, 4, (1, 5, -1))]
)
def test_sizes_below_1_are_refused(kind: type, wrong: tuple[int, int, tuple[int, int, int]]) -> None:
    with pytest.raises(ShapeError, match="at least 1") as caught:
        kind(*wrong)
    assert "\n" not in str(caught.value)


def test_a_conv_decoder_without_stages_is_refused() -> None:
    with pytest.raises(ShapeError, match="stages"):
        ConvDecoder(3, 4, (1, 5, 5), ())


@pytest.mark.parametrize(("kind", "options"), [(DenseDecoder, {"hidden": (5, 0)}), (ConvDecoder, {"widths": (4, 0)})])
def test_a_hidden_layer_without_units_is_refused(kind: type, options: dict[str, Any]) -> None:
    with pytest.raises(ShapeError, match="at least 1"):
        kind(3, 4, (1, 5, 5), **options)


def test_a_dense_decoder_may_have_no_hidden_layer() -> None:
    assert DenseDecoder(3, 4, (1, 5, 5), ())(poses(2, 3, 4)).shape == (2, 1, 5, 5)


@pytest.mark.parametrize("kind", DECODERS)
@pytest.mark.parametrize("shape", [(2, 4, 4), (2, 3, 5), (2, 12), (3, 4)])
def test_poses_of_another_shape_are_refused(kind: type, shape: tuple[int, ...]) -> None:
    with pytest.raises(ShapeError, match=r"\[b 3 4\] is wanted") as caught:
        build(kind, (1, 5, 5))(torch.zeros(shape))
    assert "\n" not in str(caught.value)
