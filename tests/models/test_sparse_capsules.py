"""Sparse capsules: sizes, what the mask lets through, algorithm 1 in training, and the same in every process."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from support import model_checks as networks
from support.model_checks import assert_redraws_without_labels, assert_teaches_everything, batch, learned, refusal
from support.processes import run_group
from torchcaps.config import from_dict, to_dict
from torchcaps.errors import RecipeError, ShapeError
from torchcaps.layers import FrameDecoder, PrototypeDecoder, SharedCapsules
from torchcaps.models import MODELS, SparseCaps, SparseConfig, sparse
from torchcaps.models.sparse import reconstruction_support, support
from torchcaps.routing import Dynamic
from torchcaps.types import Batch, ImageSpec

SIZES: dict[str, Any] = {
    "capsules": 5, "dimension": 4, "channels": 4, "kernel": 3, "types": 2, "type_dimension": 3, "primary_kernel": 3,
    "primary_stride": 2, "gamma": 6.0, "alpha": 0.5, "every": 2, "decoder": (8, 6),
}  # fmt: skip
TINY = SparseConfig(**SIZES)
SHARED = SparseConfig(**SIZES, shared=True, routing=Dynamic(3, logits="replaced"))
FRAMES = SparseConfig(**SIZES, frames=True, side=8)
PROTOTYPES = SparseConfig(
    **SIZES | {"gamma": 200.0}, frames=True, side=8, prototypes=True, rank_by="reconstruction", frame_steps=3,
    restart=0.9, restart_until=100,
)  # fmt: skip
SPECS = [ImageSpec(1, 8, 8, 3), ImageSpec(3, 9, 12, 2), ImageSpec(2, 13, 7, 5)]


def build(config: SparseConfig = TINY, spec: ImageSpec = SPECS[0], seed: int = 0) -> SparseCaps:
    """A network whose routing is decided: with its own small start all support is nearly the same."""
    torch.manual_seed(seed)
    model = config.build(spec)
    with torch.no_grad():
        model.latent.W.mul_(20)
        model.primary.pose.weight.mul_(5)
    return model


# --- Sizes --------------------------------------------------------------------------------------------------


def test_it_is_registered_and_the_default_is_the_papers() -> None:
    assert MODELS["sparse"] is SparseConfig
    config = SparseConfig()
    assert (config.capsules, config.dimension, config.gamma, config.cut) == (16, 16, 12.0, 0.01)
    assert (config.alpha, config.boost, config.every, config.reconstruction) == (0.99, 0.1, 50, 0.005)
    assert config.routing == Dynamic(iterations=3, agreement="dot", over="parents")


@pytest.mark.parametrize(("side", "children"), [(40, 12 * 12 * 32), (28, 6 * 6 * 32)])
def test_parameters_by_hand(side: int, children: int) -> None:
    """40 -> 9x9 -> 32 -> 9x9/2 -> 12: 4,608 primary capsules of 8, and for each 16 matrices of 16x8."""
    with torch.device("meta"):
        model = SparseConfig().build(ImageSpec(1, side, side, 10))
    assert model.primary.count == children
    pixels = side * side
    wanted = {
        "conv": 9 * 9 * 256 + 256,
        "primary": 256 * 9 * 9 * 256 + 256,
        "latent": children * 16 * 16 * 8,
        "mask": 0,
        "decoder": 256 * 512 + 512 + 512 * 1024 + 1024 + 1024 * pixels + pixels,
    }
    assert {name: sum(p.numel() for p in part.parameters()) for name, part in model.named_children()} == wanted
    assert sum(wanted.values()) == {40: 17_063_744, 28: 9_149_456}[side]


@pytest.mark.parametrize("config", [TINY, SHARED, FRAMES])
@pytest.mark.parametrize("spec", SPECS)
def test_layer_by_layer_at_any_image_size(config: SparseConfig, spec: ImageSpec) -> None:
    model, images = build(config, spec), batch(spec).images
    assert isinstance(model.latent, SharedCapsules) is config.shared and model.latent.routing == config.routing
    out = model(images, trace=True)
    primary = model.primary(model.conv(images).clamp_min(0))
    latent, info = model.latent(primary)
    torch.testing.assert_close(out.primary, primary)
    torch.testing.assert_close(out.latent, latent)
    assert out.info.coupling.shape == (3, 4, model.primary.count, 5)
    mask, ranks = model.mask(support(info.coupling[-1], 2))
    assert torch.equal(out.ranks, ranks)
    torch.testing.assert_close(out.masked.pose, latent.pose * mask[..., None])
    torch.testing.assert_close(out.masked.activation, out.masked.pose.square().sum(-1).sqrt(), atol=1e-6, rtol=1e-4)
    torch.testing.assert_close(model.encode(images), out.masked)
    redrawn = model.reconstruct(images)
    assert redrawn.shape == images.shape
    torch.testing.assert_close(redrawn, model.decoder(out.masked.pose))


# --- The mask -----------------------------------------------------------------------------------------------


def test_support_is_the_largest_coupling_at_each_place_summed_over_places() -> None:
    make = torch.Generator().manual_seed(0)
    places, types = 6, 3
    c = torch.rand(2, places * types, 4, generator=make)
    found = support(c, types)
    for b in range(2):
        for j in range(4):
            wanted = sum(max(float(c[b, p * types + i, j]) for i in range(types)) for p in range(places))
            assert float(found[b, j]) == pytest.approx(wanted, rel=1e-6)


def test_children_of_one_place_lie_together_in_the_coupling() -> None:
    """`support` reads the coupling as [b (h w i) j]: routed one by one, the children say the same."""
    model, images = build(spec=SPECS[1]), batch(SPECS[1]).images
    out = model(images)
    c = out.info.coupling[-1].view(4, *out.primary.activation.shape[1:], 5)  # [b h w i j]
    torch.testing.assert_close(out.support, c.amax(3).sum((1, 2)))
    moved = out.primary._replace(pose=out.primary.pose.clone())
    moved.pose[:, 1, 2, 0] = 0  # a child that says nothing agrees with nobody: uniform coupling
    silent = model.latent(moved)[1].coupling[-1].view_as(c)
    torch.testing.assert_close(silent[:, 1, 2, 0], torch.full((4, 5), 0.2))
    assert not torch.allclose(silent[:, 1, 2, 1], torch.full((4, 5), 0.2))


def test_the_mask_is_the_exponential_of_the_rank() -> None:
    model, images = build(), batch(b=8).images
    out = model(images)
    for s in range(8):
        order = sorted(range(5), key=lambda j: -float(out.support[s, j]))
        for r, j in enumerate(order):
            m = math.exp(-6.0 * r / 4)
            wanted = out.latent.pose[s, j] * (m if m >= 0.01 else 0.0)
            torch.testing.assert_close(out.masked.pose[s, j], wanted)
    assert len(set(out.ranks.argmin(-1).tolist())) > 1  # not one capsule for all


def test_masked_capsules_do_not_reach_the_decoder() -> None:
    """gamma = 6 among 5: factors 1, .22, .05, .011 and, below the cut, 0."""
    model, data = build(), batch(b=8)
    out = model(data.images)
    last = out.ranks == 4  # [b j]
    assert int(last.sum()) == 8
    assert not out.masked.pose[last].any() and not out.masked.activation[last].any()
    assert bool(out.masked.pose[~last].any(-1).all())
    pose = out.latent.pose.detach().requires_grad_()
    mask, _ = model.mask(out.support)
    loss = (model.decode(pose * mask[..., None]) - data.images).square().sum()
    (grad,) = torch.autograd.grad(loss, pose)
    assert not grad[last].any()
    assert bool(grad[~last].any(-1).all())
    changed = torch.where(last[..., None], torch.ones_like(pose) * 9, pose)
    torch.testing.assert_close(model.decode(changed * mask[..., None]), model.decode(pose * mask[..., None]))


def test_the_dense_control_lets_everything_through_and_boosts_nobody() -> None:
    model, data = build(SparseConfig(**SIZES, sparse=False)), batch(b=8)
    for step in range(6):
        model.objective(data, step)
    out = model(data.images)
    torch.testing.assert_close(out.masked, out.latent)
    assert torch.equal(model.mask.boost, torch.ones(5))
    assert not torch.allclose(model.mask.frequency, torch.full((5,), 0.2))  # but it is known who would have won


# --- Algorithm 1 --------------------------------------------------------------------------------------------


def test_a_ramp_masks_nobody_at_first_and_a_state_knows_how_far_it_is() -> None:
    model, data = build(replace(TINY, ramp=3)), batch(b=8)
    shown = []
    for step in range(4):
        shown.append(int((model(data.images).masked.pose != 0).any(-1).sum(-1).max()))
        model.objective(data, step)
    assert shown[0] == 5 and shown[-1] < 5 and shown == sorted(shown, reverse=True)
    assert torch.equal(build(replace(TINY, ramp=0))(data.images).masked.pose, build()(data.images).masked.pose)
    other = build(replace(TINY, ramp=3))
    other.load_state_dict(model.state_dict())
    torch.testing.assert_close(other(data.images).masked, model(data.images).masked)


def test_training_moves_the_boosts_as_algorithm_1_says() -> None:
    model = build()
    low, high = 0.64 / 5, 1.6 / 5
    mu, g, moved = [0.2] * 5, [1.0] * 5, set()
    for n in range(1, 41):
        data = batch(b=8, seed=n % 3)
        if n == 11:  # those who were boosted take the winners' places, so that some must come down again
            model.latent.W.data = model.latent.W.data.flip(1)
        psi = model(data.images).support.tolist()
        model.objective(data, n)
        first = [max(range(5), key=lambda j: row[j] * g[j]) for row in psi]  # eqs. (1), (2)
        mu = [0.5 * mu[j] + 0.5 * first.count(j) / 8 for j in range(5)]  # eqs. (5)-(7)
        before = list(g)
        if n % 2 == 0:
            g = [g[j] + 0.1 if mu[j] < low else max(1.0, g[j] - 0.1) if mu[j] > high else g[j] for j in range(5)]
        moved |= {round(new - old, 6) for old, new in zip(before, g, strict=True)}
        assert model.mask.frequency.tolist() == pytest.approx(mu, abs=1e-6)
        assert model.mask.boost.tolist() == pytest.approx(g, abs=1e-5)
    assert int(model.mask.batches) == 40
    assert moved == {0.1, 0.0, -0.1}, moved
    assert min(g) == 1.0


def test_evaluation_leaves_the_statistics_alone_and_a_state_holds_them() -> None:
    model, data = build(), batch(b=8)
    for step in range(4):
        model.objective(data, step)
    before = {name: value.clone() for name, value in model.mask.state_dict().items()}
    assert set(before) == {"frequency", "boost", "batches"}
    assert int(before["batches"]) == 4 and not torch.equal(before["boost"], torch.ones(5))
    model.eval()
    model.objective(data, 4)
    model.encode(data.images)
    assert all(torch.equal(value, before[name]) for name, value in model.mask.state_dict().items())
    other = build(seed=1)
    other.load_state_dict(model.state_dict())
    assert torch.equal(other.encode(data.images).pose, model.encode(data.images).pose)
    assert torch.equal(other.mask.boost, before["boost"])


def test_the_objective_counts_the_capsules_inside_the_band() -> None:
    model, data = build(SparseConfig(**SIZES, band=(0.1, 0.3))), batch(b=8)
    found = model.objective(data, 0)
    wanted = sum(0.1 <= f <= 0.3 for f in model.mask.frequency.tolist())
    assert float(found["capsules_in_band"]) == wanted
    assert (model.mask.low, model.mask.high) == (0.1, 0.3)


RELATIVE = replace(TINY, relative=True)


def _one_of_two(folder: Path) -> None:
    """A process that sees its half of every batch; the halves are unlike, so alone it would learn other numbers."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = build(RELATIVE)
    for n in range(6):
        whole = batch(b=8, seed=n)
        model.objective(Batch(*(part[4 * rank : 4 * rank + 4] for part in whole[:3])), n)
    state = {name: value.tolist() for name, value in model.mask.state_dict().items()}
    (folder / f"{rank}.json").write_text(json.dumps(state))
    dist.destroy_process_group()


def test_two_processes_have_the_statistics_of_one_with_the_whole_batch(tmp_path: Path) -> None:
    run_group(_one_of_two, tmp_path)
    alone, half = build(RELATIVE), build(RELATIVE)
    for n in range(6):
        whole = batch(b=8, seed=n)
        alone.objective(whole, n)
        half.objective(Batch(*(part[:4] for part in whole[:3])), n)
    one, other = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    assert one == other
    for name, value in alone.mask.state_dict().items():
        assert one[name] == pytest.approx(value.tolist(), abs=1e-6), name
    assert not torch.allclose(half.mask.frequency, alone.mask.frequency)
    assert not torch.allclose(half.mask.usual, alone.mask.usual)


# --- What is trained ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", SPECS)
def test_the_objective_is_the_reconstruction_alone_and_ignores_labels(spec: ImageSpec) -> None:
    data = batch(spec)
    assert_redraws_without_labels(build(spec=spec).eval(), data, 0.005)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("config", [TINY, replace(TINY, sparse=False), SHARED, FRAMES, replace(FRAMES, sparse=False)])
def test_the_gradient_reaches_every_parameter(spec: ImageSpec, config: SparseConfig) -> None:
    assert_teaches_everything(build(config, spec), batch(spec, b=16))


def test_capsules_whose_places_share_a_matrix_support_the_same_capsules_wherever_a_thing_is() -> None:
    """Something moved by a step of the grid, away from the border."""
    config = replace(SHARED, coordinates=0.0)
    model = build(config, ImageSpec(1, 20, 20, 3))
    image = torch.zeros(1, 1, 20, 20)
    image[..., 8:12, 6:11] = batch(ImageSpec(1, 4, 5, 3), b=1).images
    here, there = model(image), model(image.roll(2, -1))
    torch.testing.assert_close(here.latent, there.latent)
    torch.testing.assert_close(here.support, there.support)
    own = build(TINY, ImageSpec(1, 20, 20, 3))
    assert not torch.allclose(own(image).support, own(image.roll(2, -1)).support)


@pytest.mark.parametrize("config", [TINY, FRAMES])
def test_some_steps_of_training_lower_the_loss(config: SparseConfig) -> None:
    torch.manual_seed(0)
    model, data = config.build(SPECS[0]), batch(b=8)
    data = data._replace(images=(data.images[:1] > 0.5).float().expand(8, 1, 8, 8))
    losses = learned(model, data, 0.03, 60)
    assert losses[-1] < 0.2 * losses[0]


def test_the_same_seed_makes_the_same_network_and_the_same_steps() -> None:
    found = []
    for _ in range(2):
        model = build(seed=5)
        for step in range(3):
            model.objective(batch(b=8, seed=step), step)["loss"].backward()
        found.append([*(p.grad for p in model.parameters()), *model.mask.buffers()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert not torch.equal(build(seed=5).conv.weight, build(seed=6).conv.weight)


@pytest.mark.parametrize("config", [TINY, FRAMES, PROTOTYPES])
@pytest.mark.parametrize("value", [0.0, 1.0, 1e6])
def test_flat_images_make_no_nan(config: SparseConfig, value: float) -> None:
    networks.assert_finite_on_flat_images(build(config), value)


def test_a_number_of_the_pose_can_move_what_a_capsule_draws() -> None:
    """Three pixels to the right, where a picture's half is 3 pixels and shifts count three times: t = -.6 * F / 3."""
    model = replace(FRAMES, capsules=1, side=6).build(ImageSpec(1, 20, 20, 3))
    assert isinstance(model.decoder, FrameDecoder) and not isinstance(build().decoder, FrameDecoder)
    with torch.no_grad():
        for parameter in (model.decoder.F, model.decoder.E):
            parameter.zero_()
        model.decoder.F[0, 0, 2] = -1 / 3 / 0.6
        model.decoder.e.uniform_()
        here, there = model.decode(torch.tensor([[[0.0, 1, 0, 0]], [[0.6, 0.8, 0, 0]]])).logit() - model.decoder.bias
    torch.testing.assert_close(there, here.roll(3, -1), atol=1e-4, rtol=1e-3)
    assert here[0, 7:13, 7:13].abs().min() > 1e-3


# --- Winners by reconstruction ---------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [replace(TINY, rank_by="reconstruction"), PROTOTYPES])
def test_the_capsule_that_redraws_the_image_best_wins(config: SparseConfig) -> None:
    """The support of a capsule is the reciprocal of the squared error of what it draws alone, by loops."""
    model, images = build(config), batch(b=6).images
    out = model(images)
    for b in range(6):
        errors = []
        for j in range(5):
            alone = torch.zeros(1, 5, 4)
            alone[0, j] = out.latent.pose[b, j]
            errors.append(float((model.decode(alone)[0] - images[b]).square().sum().detach()))
            assert float(out.support[b, j]) == pytest.approx(1 / errors[-1], rel=1e-4)
        assert int(out.ranks[b].argmin()) == min(range(5), key=lambda j: errors[j])
    assert not out.support.requires_grad


def test_support_is_finite_where_a_capsule_draws_the_image_itself() -> None:
    images = torch.rand(2, 1, 3, 3)
    found = reconstruction_support(lambda pose: images.repeat_interleave(4, 0), torch.ones(2, 4, 3), images)
    assert bool(found.isfinite().all()) and torch.equal(found, found[:1, :1].expand(2, 4))


def test_what_frames_may_do_is_switched_on_one_after_the_other() -> None:
    model = build(replace(PROTOTYPES, restart=0.0))
    assert isinstance(model.decoder, PrototypeDecoder)
    found = []
    for step in range(8):
        model.objective(batch(b=4, seed=step), step)
        found.append(model.decoder.allowed.tolist())
    assert found[:3] == [[0.0] * 6] * 3, "identity at first"
    assert found[3:6] == [[0.0, 0.0, 1.0, 0.0, 0.0, 1.0]] * 3, "then shifts"
    assert found[6:] == [[1.0] * 6] * 2, "then all of the affine frame"


def test_capsules_that_win_too_seldom_restart_as_copies_of_the_busiest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sparse, "_RESTART_EVERY", 4)
    monkeypatch.setattr(sparse, "_RESTART_NOISE", 0.0)
    model = build(PROTOTYPES)
    assert isinstance(model.decoder, PrototypeDecoder)
    model.mask.frequency.copy_(torch.tensor([0.2, 0.05, 0.5, 0.2, 0.05]))
    model.mask.batches.fill_(4)
    before = model.latent.W.detach().clone()
    model._before_batch()
    # 1 and 4 have less than .9 / 5: 1 shares the images of 2, then 4 those of whoever has most
    assert torch.equal(model.latent.W[:, 1], before[:, 2]) and torch.equal(model.latent.W[:, 4], before[:, 2])
    assert torch.equal(model.decoder.T[1], model.decoder.T[2]) and torch.equal(model.decoder.F[4], model.decoder.F[2])
    assert torch.equal(model.latent.W[:, [0, 2, 3]], before[:, [0, 2, 3]])
    torch.testing.assert_close(model.mask.frequency, torch.tensor([0.2, 0.125, 0.25, 0.2, 0.125]))
    # Not between, and not after the last batch that may
    for batches in (5, 104):
        model.mask.batches.fill_(batches)
        model.mask.frequency.copy_(torch.tensor([0.0, 0.1, 0.5, 0.2, 0.2]))
        kept = model.latent.W.detach().clone()
        model._before_batch()
        assert torch.equal(model.latent.W, kept)


def test_training_with_prototypes_changes_every_parameter_and_repeats() -> None:
    states = []
    for _ in range(2):
        model = build(replace(PROTOTYPES, frame_steps=0))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        before = {name: value.detach().clone() for name, value in model.named_parameters()}
        for step in range(60):
            loss = model.objective(batch(b=16, seed=step), step)["loss"]
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        assert all(not torch.equal(value, before[name]) for name, value in model.named_parameters())
        states.append(model.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(states[0].values(), states[1].values(), strict=True))


def test_frames_and_restarts_go_on_from_the_state_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is switched on, and who restarts, is decided by buffers: a model with the same state ends the same."""
    monkeypatch.setattr(sparse, "_RESTART_EVERY", 2)
    one = build(PROTOTYPES)
    train_steps(one, range(4))
    other = build(PROTOTYPES, seed=1)
    other.load_state_dict(one.state_dict())
    for model in (one, other):
        train_steps(model, range(4, 10))
    assert int(one.mask.batches) == 10
    assert all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True))


def train_steps(model: SparseCaps, steps: range) -> None:
    """Plain gradient descent, which has no state of its own."""
    for step in steps:
        loss = model.objective(batch(b=8, seed=step), step)["loss"]
        gradients = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                if gradient is not None:
                    parameter -= 0.01 * gradient


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"prototypes": True}, "frames = true"), ({"frames": True, "frame_steps": 3}, "prototypes = true"),
        ({"restart": 0.2}, "prototypes = true"), ({"rank_by": "size"}, "rank_by"),
    ],
)  # fmt: skip
def test_settings_of_prototypes_that_do_not_go_together_are_refused(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(RecipeError, match=named):
        SparseConfig(**settings)


# --- Errors -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "size", "smallest"),
    [
        (TINY, (4, 12), 5), (SparseConfig(channels=2, types=1, decoder=(2,)), (28, 16), 17),
        (SparseConfig(channels=2, types=1, decoder=(2,)), (1, 1), 17),
    ],
)  # fmt: skip
def test_images_too_small_are_refused_in_one_line_that_names_a_size_that_fits(
    config: SparseConfig, size: tuple[int, int], smallest: int
) -> None:
    networks.assert_names_a_size_that_fits(config, size, smallest)
    assert config.build(ImageSpec(1, smallest, smallest, 3)).primary.grid.places == 1


@pytest.mark.parametrize("spec", networks.NO_SPECS)
def test_images_without_channels_or_classes_are_refused(spec: ImageSpec) -> None:
    assert refusal(ShapeError, "at least 1", lambda: build(spec=spec))


@pytest.mark.parametrize("refused", networks.NO_IMAGES, ids=lambda refused: refused[2])
def test_images_that_cannot_be_meant_are_refused(refused: networks.Refused) -> None:
    model = build()
    networks.assert_refuses(model, refused, model.encode, model.reconstruct)


@pytest.mark.parametrize(
    "data",
    [
        {"capsules": 0}, {"types": -1}, {"decoder": [0]}, {"gamma": -1.0}, {"alpha": 1.5}, {"every": 0},
        {"band": [0.1]}, {"band": [0.2, 0.1]}, {"band": [-0.1, 0.1]}, {"reconstruction": 0.0},
        {"routing": {"iterations": 0}}, {"sparse": 1}, {"cutt": 0.1},
    ],
)  # fmt: skip
def test_values_out_of_range_are_refused_by_the_recipe(data: dict[str, Any]) -> None:
    networks.assert_recipe_refuses(SparseConfig, data)


def test_frames_without_a_hidden_layer_are_refused() -> None:
    assert replace(TINY, decoder=()).decoder == ()
    with pytest.raises(RecipeError, match=r"decoder = \[\]"):
        replace(FRAMES, decoder=())


def test_values_out_of_range_are_refused_in_python_and_the_others_survive_a_recipe() -> None:
    with pytest.raises(RecipeError, match="capsules"):
        SparseConfig(capsules=0)
    for config in (TINY, SparseConfig(), SparseConfig(band=(0.03, 0.12), sparse=False)):
        assert from_dict(SparseConfig, to_dict(config)) == config
