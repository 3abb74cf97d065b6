"""Decoders: every image size, values in [0, 1], and only the chosen capsule in the picture."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchcaps.errors import ShapeError, TorchcapsError
from torchcaps.layers import DenseDecoder, FrameDecoder, PrototypeDecoder, draw_each, mask_all_but

IMAGES = [(1, 1, 1), (1, 5, 7), (3, 9, 4), (1, 28, 28), (2, 13, 13), (3, 3, 17)]
DECODERS = [DenseDecoder, FrameDecoder, PrototypeDecoder]
SMALL: dict[type, dict[str, Any]] = {
    DenseDecoder: {"hidden": (6, 5)}, FrameDecoder: {"hidden": (6, 5), "side": 4}, PrototypeDecoder: {"side": 4},
}  # fmt: skip


def build(kind: type, image: tuple[int, int, int], capsules: int = 3, dimension: int = 4) -> nn.Module:
    decoder: nn.Module = kind(capsules, dimension, image, **SMALL[kind])
    return decoder


def poses(b: int, j: int, k: int) -> Tensor:
    return torch.randn(b, j, k, generator=torch.Generator().manual_seed(0))


# --- The choice of a capsule --------------------------------------------------------------------------------


def test_select_keeps_exactly_one_capsule() -> None:
    pose, chosen = poses(4, 3, 5), torch.tensor([2, 0, 1, 2])
    found = mask_all_but(pose, chosen)
    assert found.shape == pose.shape
    for s in range(4):
        for j in range(3):
            wanted = pose[s, j] if j == int(chosen[s]) else torch.zeros(5)
            assert torch.equal(found[s, j].abs(), wanted.abs())
            assert torch.equal(found[s, j], wanted) or not wanted.any()


def test_only_the_chosen_capsule_gets_a_gradient() -> None:
    pose = poses(2, 3, 4).requires_grad_()
    mask_all_but(pose, torch.tensor([1, 2])).sum().backward()
    assert pose.grad is not None
    assert pose.grad[..., 0].tolist() == [[0, 1, 0], [0, 0, 1]]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_select_keeps_the_type(dtype: torch.dtype) -> None:
    assert mask_all_but(poses(2, 3, 4).to(dtype), torch.tensor([0, 1])).dtype == dtype


@pytest.mark.parametrize("integers", [torch.int64, torch.int32, torch.uint8])
def test_select_takes_every_integer_type(integers: torch.dtype) -> None:
    pose = poses(2, 3, 4)
    assert torch.equal(
        mask_all_but(pose, torch.tensor([2, 1], dtype=integers)), mask_all_but(pose, torch.tensor([2, 1]))
    )


@pytest.mark.parametrize(
    "chosen",
    [torch.tensor([0, 3]), torch.tensor([-1, 0]), torch.tensor([0.0, 1.0]), torch.tensor([1]), torch.eye(2).long()],
)
def test_a_choice_that_is_none_is_refused_in_one_line(chosen: Tensor) -> None:
    with pytest.raises(TorchcapsError, match="chosen") as caught:
        mask_all_but(poses(2, 3, 4), chosen)
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


# --- Pictures in frames -------------------------------------------------------------------------------------


def framed(image: tuple[int, int, int] = (2, 5, 7), capsules: int = 3, dimension: int = 4) -> FrameDecoder:
    """Frames that lie across the image's edge, turned and stretched."""
    torch.manual_seed(0)
    return moved(FrameDecoder(capsules, dimension, image, (6, 5), side=4).double())


def with_prototypes(image: tuple[int, int, int] = (2, 5, 7)) -> PrototypeDecoder:
    """The same with a picture for each capsule."""
    torch.manual_seed(0)
    return moved(PrototypeDecoder(3, 4, image, side=4).double())


def moved(decoder: Any) -> Any:
    """The decoder with random changes of all its parameters."""
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return decoder


def ink(picture: Tensor, x: float, y: float) -> float:
    """A picture [s s] between its pixels, whose centers lie at -1 + (2 i + 1) / s; none outside."""
    s, total = len(picture), 0.0
    column, row = ((c + 1) * s / 2 - 0.5 for c in (x, y))
    for r in (math.floor(row), math.floor(row) + 1):
        for c in (math.floor(column), math.floor(column) + 1):
            if 0 <= r < s and 0 <= c < s:
                total += float(picture[r, c]) * (1 - abs(row - r)) * (1 - abs(column - c))
    return total


def picture_by_hand(decoder: FrameDecoder | PrototypeDecoder, j: int, n: Tensor) -> Tensor:
    """The picture [c s s] that capsule j draws from the direction n of its pose."""
    size = decoder.image[0], decoder.side, decoder.side
    if isinstance(decoder, PrototypeDecoder):
        return 10 * decoder.T[j].view(size)
    first, last = (m for m in decoder.net if isinstance(m, nn.Linear))
    inner = (n @ decoder.E[j] + decoder.e[j]).clamp_min(0)
    return ((first.weight @ inner + first.bias).clamp_min(0) @ last.weight.T + last.bias).view(size)


def drawn_by_hand(decoder: FrameDecoder | PrototypeDecoder, pose: Tensor) -> Tensor:
    """sigmoid(bias + sum_j |v_j| T_j(A_j x + t_j)), a pixel of a capsule at a time."""
    (c, h, w), side = decoder.image, decoder.side
    out = torch.zeros(len(pose), c, h, w, dtype=torch.float64)
    for b, j in product(range(len(pose)), range(decoder.capsules)):
        length = math.sqrt(sum(float(p) ** 2 for p in pose[b, j]))
        if length == 0:
            continue
        n = pose[b, j] / length
        picture = picture_by_hand(decoder, j, n).detach()
        a, s, tx, u, d, ty = (n @ decoder.F[j] + decoder.f[j]).tolist()
        for row, column, z in product(range(h), range(w), range(c)):
            x, y = (2 * column + 1) / w - 1, (2 * row + 1) / h - 1
            at = (w / side + a) * x + s * y + 3 * tx, u * x + (h / side + d) * y + 3 * ty
            out[b, z, row, column] += length * ink(picture[z], *at)
    return torch.sigmoid(decoder.bias.detach() + out)


@pytest.mark.parametrize("build", [framed, with_prototypes])
@pytest.mark.parametrize("image", [(2, 5, 7), (1, 6, 3)])
def test_each_capsule_draws_a_picture_into_its_frame_and_length_is_ink(image: tuple[int, int, int], build: Any) -> None:
    decoder, pose = build(image), poses(4, 3, 4).double()
    pose[0, 1], pose[1, :2], pose[2] = 0, 0, 0
    with torch.no_grad():
        found = decoder(pose)
        torch.testing.assert_close(found, drawn_by_hand(decoder, pose))
        blank = torch.sigmoid(decoder.bias).expand(image)
        torch.testing.assert_close(found[2], blank, atol=0, rtol=1e-12, msg="nobody is on: blank paper")
        torch.testing.assert_close(torch.logit(decoder(2 * pose)) - decoder.bias, 2 * (found.logit() - decoder.bias))


def test_frames_of_prototypes_are_held_back_as_a_whole_or_but_for_shifts() -> None:
    """With nothing allowed the frame is that of the start; with shifts alone, A is; the picture never changes."""
    decoder, pose = with_prototypes((1, 6, 5)), poses(2, 3, 4).double()
    free = decoder(pose).detach()
    decoder.allow(shift=False, affine=False)
    held = decoder(pose).detach()
    scaled = pose / pose.norm(dim=-1, keepdim=True)
    same = decoder(scaled.roll(1, -1)).detach()
    torch.testing.assert_close(decoder(scaled).detach(), same, msg="no direction moves a frame that is held back")
    F, f = decoder.F.detach().clone(), decoder.f.detach().clone()
    decoder.allow(shift=True, affine=False)
    shifted = decoder(pose).detach()
    with torch.no_grad():
        for number in (0, 1, 3, 4):
            decoder.F[..., number] = decoder.f[..., number] = 0
    decoder.allow(shift=True, affine=True)
    torch.testing.assert_close(shifted, drawn_by_hand(decoder, pose))
    with torch.no_grad():
        decoder.F.zero_()
        decoder.f.zero_()
    torch.testing.assert_close(held, drawn_by_hand(decoder, pose))
    with torch.no_grad():
        decoder.F.copy_(F)
        decoder.f.copy_(f)
    torch.testing.assert_close(free, drawn_by_hand(decoder, pose))
    assert "allowed" in decoder.state_dict(), "a trained decoder draws as it learned to"


def test_a_copied_prototype_draws_what_its_source_draws_but_for_noise() -> None:
    decoder = with_prototypes()
    noise = torch.randn(2 * 4 * 4, dtype=torch.float64)
    deviation = float(decoder.T[2].detach().std())
    decoder.copy_capsule(0, 2, noise)
    torch.testing.assert_close(decoder.T[0].detach(), decoder.T[2].detach() + deviation * noise)
    decoder.copy_capsule(0, 2, 0 * noise)
    pose = torch.zeros(2, 3, 4).double()
    pose[0, 0] = pose[1, 2] = torch.tensor([0.1, -0.4, 0.3, 0.2])
    drawn = decoder(pose)
    torch.testing.assert_close(drawn[0], drawn[1])


@pytest.mark.parametrize("kind", DECODERS)
def test_every_capsule_alone_by_loops(kind: type) -> None:
    decoder, pose = build(kind, (2, 5, 7)), poses(4, 3, 4)
    found = draw_each(decoder, pose)
    assert found.shape == (4, 3, 2, 5, 7)
    for b, j in product(range(4), range(3)):
        alone = torch.zeros(1, 3, 4)
        alone[0, j] = pose[b, j]
        torch.testing.assert_close(found[b, j], decoder(alone)[0])


def test_frames_start_in_the_middle_at_the_size_of_the_image() -> None:
    decoder = FrameDecoder(2, 3, (1, 10, 12), (4,), side=6)
    with torch.no_grad():
        decoder.F.zero_()
        picture = decoder.net(torch.einsum("k,jkh->jh", torch.tensor([1.0, 0, 0]), decoder.E)).view(2, 6, 6)
        pose = torch.zeros(2, 2, 3)
        pose[0, 0, 0] = pose[1, 1, 0] = 1
        logits = decoder(pose).logit() - decoder.bias
    torch.testing.assert_close(logits[:, 0, 2:8, 3:9], picture, atol=1e-4, rtol=1e-4)
    logits[:, 0, 2:8, 3:9] = 0
    assert logits.abs().max() < 1e-5


def test_a_fresh_decoder_draws_almost_nothing_in_frames_that_poses_move_a_little() -> None:
    torch.manual_seed(0)
    decoder, pose = FrameDecoder(3, 4, (1, 12, 12)), poses(2, 3, 4)
    assert float(decoder(0 * pose).detach().max()) < 0.02
    moved = torch.einsum("bjk,jkf->bjf", pose / pose.norm(dim=-1, keepdim=True), decoder.F.detach())
    assert 0.01 < float(moved.std()) < 0.1


def test_a_capsule_that_is_off_has_no_gradient_whoever_is_beside_it() -> None:
    decoder, pose = framed(), poses(2, 3, 4).double()
    pose[0, 1] = 0
    alone, beside = pose[:1].clone().requires_grad_(), pose.clone().requires_grad_()
    decoder(alone)[0].sum().backward()
    decoder(beside)[0].sum().backward()
    assert alone.grad is not None and beside.grad is not None
    torch.testing.assert_close(alone.grad, beside.grad[:1])
    assert not alone.grad[0, 1].any() and alone.grad[0, 0].any()


@pytest.mark.parametrize("kind", DECODERS)
def test_no_image_and_any_number_of_images(kind: type) -> None:
    decoder = build(kind, (2, 5, 7)).eval()
    assert decoder(torch.zeros(0, 3, 4)).shape == (0, 2, 5, 7)
    batch = torch.export.Dim("b", min=2)
    exported = torch.export.export(decoder, (poses(4, 3, 4),), dynamic_shapes=({0: batch},)).module()
    torch.testing.assert_close(exported(poses(6, 3, 4)), decoder(poses(6, 3, 4)))


def test_only_capsules_that_are_on_are_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder, pose = framed(), poses(3, 3, 4).double()
    pose[0, 0], pose[1, 1:], pose[2] = 0, 0, 0
    seen: list[int] = []
    decoder.net.register_forward_hook(lambda _, x, __: seen.append(x[0].shape[1]))
    few = decoder(pose)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    torch.testing.assert_close(decoder(pose), few)
    assert seen == [2, 3]


@pytest.mark.parametrize("build", [framed, with_prototypes])
def test_gradients_of_frames_are_those_of_differences(build: Any) -> None:
    decoder, pose = build((1, 4, 3)), poses(2, 3, 4).double()
    pose[0, 1] = 0
    on = pose.ne(0).any(-1, keepdim=True)
    names, values = zip(*decoder.named_parameters(), strict=True)
    inputs = (pose.requires_grad_(), *(value.detach().requires_grad_() for value in values))

    def draw(pose: Tensor, *values: Tensor) -> Tensor:
        drawn: Tensor = torch.func.functional_call(decoder, dict(zip(names, values, strict=True)), (pose * on,))
        return drawn

    assert torch.autograd.gradcheck(draw, inputs)


# --- Errors -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", DECODERS)
@pytest.mark.parametrize(
    "wrong", [(0, 4, (1, 5, 5)), (3, 0, (1, 5, 5)), (3, 4, (0, 5, 5)), (3, 4, (1, 0, 5)), (3, 4, (1, 5, -1))]
)
def test_sizes_below_1_are_refused(kind: type, wrong: tuple[int, int, tuple[int, int, int]]) -> None:
    with pytest.raises(ShapeError, match="at least 1") as caught:
        kind(*wrong)
    assert "\n" not in str(caught.value)


def test_frames_without_a_hidden_layer_are_refused() -> None:
    with pytest.raises(ShapeError, match="layers = 0"):
        FrameDecoder(3, 4, (1, 5, 5), ())


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (DenseDecoder, {"hidden": (5, 0)}), (FrameDecoder, {"hidden": (5, 0)}),
        (FrameDecoder, {"hidden": ()}), (FrameDecoder, {"side": 0}),
    ],
)  # fmt: skip
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
