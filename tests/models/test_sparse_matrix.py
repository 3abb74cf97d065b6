"""Sparse capsules with EM routing: what is assigned, what the mask lets through, what is learned and what refused."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from support import model_checks as networks
from support.model_checks import assert_redraws_without_labels, assert_teaches_everything, batch, learned, refusal
from support.tiny_recipe import tiny
from sweep import find_recipe
from torchcaps.config import from_dict, to_dict
from torchcaps.errors import RecipeError, ShapeError
from torchcaps.layers import DenseDecoder
from torchcaps.models import MODELS, MatrixConfig, MatrixInit, SparseMatrixCaps, SparseMatrixConfig
from torchcaps.models.sparse import SparseConfigBase
from torchcaps.routing import EM
from torchcaps.train import load_recipe, load_run, train
from torchcaps.types import ImageSpec

SIZES: dict[str, Any] = {
    "capsules": 5, "sizes": (4, 2, 3, 2), "kernel": 3, "stride": 1, "capsule_kernel": 2, "routing": EM(2, 0.1),
    "init": MatrixInit(on=0.5, capsules=0.6, classes=1.0, switch=(0.5, 0.0), switch_classes=(0.5, 0.0)),
    "gamma": 6.0, "alpha": 0.5, "every": 2, "decoder": (8, 6), "reconstruction": 0.01,
}  # fmt: skip
TINY = SparseMatrixConfig(**SIZES)
SPECS = [ImageSpec(1, 8, 8, 3), ImageSpec(3, 9, 12, 2), ImageSpec(2, 13, 7, 5)]
STEREO = ImageSpec(2, 32, 32, 5)


def build(config: SparseMatrixConfig = TINY, spec: ImageSpec = SPECS[0], seed: int = 0) -> SparseMatrixCaps:
    torch.manual_seed(seed)
    return config.build(spec)


# --- Sizes --------------------------------------------------------------------------------------------------


def test_it_is_registered_and_competes_as_the_paper_s_does() -> None:
    assert MODELS["sparse-matrix"] is SparseMatrixConfig
    config, paper = SparseMatrixConfig(), MODELS["sparse"]()
    for name in set(vars(SparseConfigBase())) - {"reconstruction", "routing"}:
        assert getattr(config, name) == getattr(paper, name), name
    assert config.routing == MatrixConfig().routing


def test_parameters_by_hand() -> None:
    """32 -> 5x5/2 -> 14 -> 3x3/2 -> 6 -> 3x3 -> 4: 4x4 places of 8 types, each with 16 matrices, one for all places."""
    model = build(SparseMatrixConfig(), STEREO)
    conv, primary = 5 * 5 * 2 * 32 + 32, 32 * 8 * 17 + 8 * 17
    capsules = 2 * (9 * 8 * 8 * 16 + 2 * 8) + 8 * 16 * 16 + 2 * 16
    assert {name: sum(p.numel() for p in part.parameters()) for name, part in model.named_children()} == {
        "matrix": conv + primary + capsules,
        "mask": 0,
        "decoder": 256 * 512 + 512 + 512 * 1024 + 1024 + 1024 * 2048 + 2048,
    }
    assert (model.matrix.second.grid.height, model.matrix.second.grid.width) == (4, 4)


@pytest.mark.parametrize("spec", SPECS)
def test_layer_by_layer_at_any_image_size(spec: ImageSpec) -> None:
    model, images = build(spec=spec), batch(spec).images
    out, below = model(images, trace=True), model.matrix(images)
    torch.testing.assert_close(out.latent, below.classes)
    torch.testing.assert_close(out.primary, below.below[-1])
    assert out.info.coupling.shape == (2, 4, model.matrix.second.grid.places * 2, 5)
    torch.testing.assert_close(model.encode(images), out.masked)
    redrawn = model.reconstruct(images)
    assert redrawn.shape == images.shape
    torch.testing.assert_close(redrawn, model.decoder(out.masked.pose))


# --- Competition --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", SPECS)
def test_support_is_the_largest_assignment_at_each_place_summed_over_places(spec: ImageSpec) -> None:
    """Eq. (1) with R_ij a_i for c_ij; R is that of the last iteration and sums to 1 over the latent capsules."""
    out = build(spec=spec)(batch(spec).images)
    R, a = out.info.coupling[-1].tolist(), out.primary.activation.tolist()
    h, w = out.primary.activation.shape[1:3]
    for b in range(4):
        for j in range(5):
            wanted = 0.0
            for row in range(h):
                for column in range(w):
                    first = 2 * (row * w + column)
                    wanted += max(R[b][first + i][j] * a[b][row][column][i] for i in range(2))
            assert float(out.support[b, j]) == pytest.approx(wanted, rel=1e-5)
        assert all(sum(row) == pytest.approx(1, abs=1e-5) for row in R[b])
    assert not out.support.requires_grad


def test_what_is_left_is_the_pose_times_its_switch_times_the_mask() -> None:
    with torch.no_grad():
        out = build()(batch(b=8).images)
    for s in range(8):
        order = sorted(range(5), key=lambda j: -float(out.support[s, j]))
        for r, j in enumerate(order):
            m = math.exp(-6.0 * r / 4)
            on = float(out.latent.activation[s, j]) * (m if m >= 0.01 else 0.0)
            assert int(out.ranks[s, j]) == r
            assert float(out.masked.activation[s, j]) == pytest.approx(on, rel=1e-5)
            torch.testing.assert_close(out.masked.pose[s, j], on * out.latent.pose[s, j])
    assert len(set(out.ranks.argmin(-1).tolist())) > 1  # not one capsule for all


def test_what_the_mask_holds_back_is_neither_drawn_nor_taught() -> None:
    model, images = build(), batch(b=8).images
    out = model(images)
    last = out.ranks == 4  # [b j]
    assert int(last.sum()) == 8 and not out.masked.pose[last].any() and not out.masked.activation[last].any()
    pose = out.latent.pose
    (grad,) = torch.autograd.grad((model.decode(out.masked.pose) - images).square().sum(), pose)
    assert not grad[last].any() and bool(grad[~last].any(-1).all())


def test_the_dense_control_lets_everything_through_and_boosts_nobody() -> None:
    model, data = build(SparseMatrixConfig(**SIZES, sparse=False)), batch(b=8)
    for step in range(6):
        model.objective(data, step)
    out = model(data.images)
    torch.testing.assert_close(out.masked.activation, out.latent.activation)
    torch.testing.assert_close(out.masked.pose, out.latent.pose * out.latent.activation[..., None])
    torch.testing.assert_close(out.masked, out.unmasked)
    assert torch.equal(model.mask.boost, torch.ones(5))
    assert not torch.allclose(model.mask.frequency, torch.full((5,), 0.2))


def test_training_moves_the_boosts_as_algorithm_1_says() -> None:
    model, low, high = build(), 0.64 / 5, 1.6 / 5
    mu, g = [0.2] * 5, [1.0] * 5
    for n in range(1, 13):
        data = batch(b=8, seed=n % 3)
        psi = model(data.images).support.tolist()
        found = model.objective(data, n)
        first = [max(range(5), key=lambda j: row[j] * g[j]) for row in psi]
        mu = [0.5 * mu[j] + 0.5 * first.count(j) / 8 for j in range(5)]
        if n % 2 == 0:
            g = [g[j] + 0.1 if mu[j] < low else max(1.0, g[j] - 0.1) if mu[j] > high else g[j] for j in range(5)]
        assert model.mask.frequency.tolist() == pytest.approx(mu, abs=1e-6)
        assert model.mask.boost.tolist() == pytest.approx(g, abs=1e-5)
        assert float(found["capsules_in_band"]) == sum(low <= f <= high for f in mu)
    assert max(g) > 1


def test_evaluation_leaves_the_statistics_alone() -> None:
    model, data = build(), batch(b=8)
    model.objective(data, 0)
    before = {name: value.clone() for name, value in model.mask.state_dict().items()}
    model.eval()
    model.objective(data, 1)
    model.encode(data.images)
    assert int(before["batches"]) == 1
    assert all(torch.equal(value, before[name]) for name, value in model.mask.state_dict().items())


def test_a_run_that_goes_on_knows_what_support_was_usual(tmp_path: Path) -> None:
    small = {key: value for key, value in to_dict(replace(TINY, relative=True)).items() if key != "name"}
    model, ends = {"name": "sparse-matrix", **small}, []
    for folder, parts in (("whole", [1.0]), ("parts", [0.4, 1.0])):
        for n, epochs in enumerate(parts):
            recipe = tiny(model=model, train={"epochs": epochs, "clip": None})
            trained = train(recipe, tmp_path / folder, resume=n > 0, quiet=True).model
        assert isinstance(trained, SparseMatrixCaps)
        ends.append(trained.state_dict())
    whole, parts_ = ends
    assert whole.keys() == parts_.keys() and all(torch.equal(whole[name], parts_[name]) for name in whole)
    assert not torch.allclose(whole["mask.usual"], torch.ones(5))


def test_a_checkpoint_keeps_the_boost(tmp_path: Path) -> None:
    small = {key: value for key, value in to_dict(TINY).items() if key != "name"}
    recipe = tiny(model={"name": "sparse-matrix", **small}, train={"epochs": 1.0, "clip": None})
    trained = train(recipe, tmp_path / "run", quiet=True).model
    loaded = load_run(tmp_path / "run").model
    assert isinstance(trained, SparseMatrixCaps) and isinstance(loaded, SparseMatrixCaps)
    assert int(loaded.mask.batches) == 10 and float(loaded.mask.boost.max()) > 1
    assert torch.equal(loaded.mask.boost, trained.mask.boost)
    assert torch.equal(loaded.mask.frequency, trained.mask.frequency)
    images = batch(loaded.spec).images
    torch.testing.assert_close(loaded.eval().encode(images), trained.eval().encode(images))


# --- What is trained ----------------------------------------------------------------------------------------


def test_standardized_images_are_drawn_by_a_linear_layer() -> None:
    decoder = DenseDecoder(3, 4, (2, 3, 5), (6,), output="linear")
    pose = 100 * torch.randn(8, 3, 4, generator=torch.Generator().manual_seed(0))
    one, two = (m for m in decoder.modules() if isinstance(m, torch.nn.Linear))
    x = (pose.reshape(8, 12) @ one.weight.T + one.bias).clamp_min(0) @ two.weight.T + two.bias
    found = decoder(pose).detach()
    torch.testing.assert_close(found, x.reshape(8, 2, 3, 5))
    assert float(found.min()) < 0 and float(found.max()) > 1
    assert refusal(RecipeError, "unknown output 'liner'; did you mean 'linear'", lambda: DenseDecoder(
        3, 4, (2, 3, 5), output="liner"
    ))  # fmt: skip


@pytest.mark.parametrize("spec", SPECS)
def test_the_objective_is_the_reconstruction_alone_and_ignores_labels(spec: ImageSpec) -> None:
    data = batch(spec)
    data = data._replace(images=3 * data.images - 2)
    assert_redraws_without_labels(build(spec=spec).eval(), data, 0.01)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("sparse", [True, False])
def test_the_gradient_reaches_every_parameter(spec: ImageSpec, sparse: bool) -> None:
    assert_teaches_everything(build(SparseMatrixConfig(**SIZES, sparse=sparse), spec), batch(spec, b=16))


def test_the_gradient_is_that_of_what_is_redrawn() -> None:
    """The ranks stand still under small changes, so that the mask is a constant."""
    model = build(spec=ImageSpec(1, 6, 6, 2)).double().eval()
    images = batch(ImageSpec(1, 6, 6, 2), b=2).images.double().requires_grad_()
    assert torch.autograd.gradcheck(model.reconstruct, (images,), fast_mode=True)


@pytest.mark.parametrize("sparse", [True, False])
def test_some_steps_of_training_lower_the_loss(sparse: bool) -> None:
    model, data = build(SparseMatrixConfig(**SIZES, sparse=sparse)), batch(b=8)
    data = data._replace(images=(data.images[:1] - 0.5).sign().expand(8, 1, 8, 8))
    losses = learned(model, data, 0.05, 30)
    assert all(map(math.isfinite, losses)) and losses[-1] < 0.5 * losses[0]
    assert all(bool(p.isfinite().all()) for p in model.parameters())


def test_the_same_seed_makes_the_same_network_and_the_same_steps() -> None:
    found = []
    for _ in range(2):
        model = build(seed=5)
        model.objective(batch(b=8), 0)["loss"].backward()
        found.append([*(p.grad for p in model.parameters()), *model.mask.buffers()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("value", [0.0, 1.0, 1e6])
def test_flat_images_make_no_nan(value: float) -> None:
    networks.assert_finite_on_flat_images(build(), value)


# --- Recipes ------------------------------------------------------------------------------------------------


def test_the_recipes_show_what_matrix_capsules_see() -> None:
    recipe = find_recipe("sparse-em-smallnorb-small")
    shown = to_dict(load_recipe("matrix-smallnorb-paper"))["data"]
    assert to_dict(recipe)["data"] == {**shown, "jitter": False}  # what is redrawn keeps its light
    assert recipe.schedule.depends_on_length
    assert isinstance(recipe.model.build(STEREO), SparseMatrixCaps)


# --- Errors -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "size", "smallest"), [(TINY, (5, 9), 6), (SparseMatrixConfig(), (32, 16), 17)]
)  # fmt: skip
def test_images_too_small_are_refused_in_one_line_that_names_a_size_that_fits(
    config: SparseMatrixConfig, size: tuple[int, int], smallest: int
) -> None:
    networks.assert_names_a_size_that_fits(config, size, smallest)
    assert config.build(ImageSpec(1, smallest, smallest, 3)).matrix.second.grid.places == 1


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
        {"capsules": 0}, {"sizes": [8, 2, 4]}, {"decoder": [0]}, {"gamma": -1.0}, {"band": [0.2, 0.1]},
        {"reconstruction": 0.0}, {"routing": {"iterations": 0}}, {"class_cooling": 0.0}, {"sparse": 1},
        {"init": {"classes": 0.0}}, {"loss": "spread"}, {"ramp": -1},
    ],
)  # fmt: skip
def test_values_out_of_range_are_refused_by_the_recipe(data: dict[str, Any]) -> None:
    networks.assert_recipe_refuses(SparseMatrixConfig, data)


def test_values_out_of_range_are_refused_in_python_and_the_others_survive_a_recipe() -> None:
    with pytest.raises(RecipeError, match="capsules"):
        SparseMatrixConfig(capsules=0)
    for config in (TINY, SparseMatrixConfig(), SparseMatrixConfig(band=(0.03, 0.12), sparse=False)):
        assert from_dict(SparseMatrixConfig, to_dict(config)) == config
