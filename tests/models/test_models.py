"""CapsNet and the CNN beside it: sizes, objectives, and one line for every image that cannot be meant."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d, max_pool2d

from torchcaps.config import check, from_dict, to_dict
from torchcaps.errors import DataError, RecipeError, ShapeError, TorchcapsError
from torchcaps.losses import margin_loss, multi_hot, reconstruction_loss
from torchcaps.models import MODELS, CapsNet, CapsNetConfig, CNNConfig, ConvNetConfig, Model, SmallCapsNetConfig
from torchcaps.models.base import is_correct
from torchcaps.routing import Dynamic
from torchcaps.types import Batch, ImageSpec

CAPSNET = CapsNetConfig(
    channels=4, kernel=3, types=2, type_dimension=3, primary_kernel=3, primary_stride=2, dimension=4, decoder=(8, 6)
)
CNN = CNNConfig(widths=(3, 4), kernel=3, hidden=(5,))
CONFIGS: dict[str, Any] = {"capsnet": CAPSNET, "cnn": CNN}
CHECKED = ["capsnet", "cnn"]
SPECS = [ImageSpec(1, 8, 8, 3), ImageSpec(3, 9, 12, 2), ImageSpec(2, 13, 7, 5), ImageSpec(1, 10, 10, 2)]


def batch(spec: ImageSpec, b: int = 4, seed: int = 0) -> Batch:
    make = torch.Generator().manual_seed(seed)
    images = torch.rand(b, *spec[:3], generator=make)
    return Batch(images, torch.randint(spec.classes, (b,), generator=make), torch.arange(b))


def build(name: str, spec: ImageSpec, seed: int = 0) -> Model:
    torch.manual_seed(seed)
    model: Model = CONFIGS[name].build(spec)
    return model


def parameters(model: Model) -> int:
    return sum(p.numel() for p in model.parameters())


def test_every_model_has_a_small_one_here() -> None:
    assert set(CONFIGS) >= {"capsnet", "cnn"}
    for name, config in CONFIGS.items():
        assert type(config) is MODELS[name]


# --- The network of the paper -------------------------------------------------------------------------------


def test_capsnet_has_the_8_215_568_parameters_of_the_paper() -> None:
    model = CapsNetConfig().build(ImageSpec(1, 28, 28, 10))
    assert parameters(model) == 8_215_568
    assert model.primary.count == 1152
    assert (model.primary.grid.height, model.primary.grid.width) == (6, 6)
    assert list(model.classes.W.shape) == [1152, 10, 16, 8]
    count = {
        "conv": 9 * 9 * 256 + 256,
        "primary": 256 * 9 * 9 * 256 + 256,
        "classes": 1152 * 10 * 8 * 16,
        "norm": 0,  # none by default
        "decoder": 160 * 512 + 512 + 512 * 1024 + 1024 + 1024 * 784 + 784,
    }
    assert {name: sum(p.numel() for p in part.parameters()) for name, part in model.named_children()} == count
    assert model.config.routing == Dynamic(iterations=3, agreement="dot", over="parents")
    assert model.config.reconstruction == 0.0005


def test_the_small_capsnet_stands_where_the_large_one_does() -> None:
    """Of 28x28 images both have 6x6 places, two pixels apart, each of which sees 17x17 pixels."""
    for config in (CapsNetConfig(), SmallCapsNetConfig()):
        model = config.build(ImageSpec(1, 28, 28, 10))
        sees = config.kernel + config.stride * (config.primary_kernel - 1)
        assert (model.primary.grid.height, sees, config.stride * config.primary_stride) == (6, 17, 2)
    assert parameters(model) == 1_522_448
    with pytest.raises(ShapeError, match="16x16 are too small for this network: it needs 17x17"):
        SmallCapsNetConfig().build(ImageSpec(1, 16, 16, 10))


def test_capsnet_layer_by_layer() -> None:
    """Convolution, ReLU, primary capsules, and for each child a softmax over parents."""
    spec = SPECS[1]
    model = build("capsnet", spec)
    assert isinstance(model, CapsNet)
    images = batch(spec).images
    out = model(images, trace=True)
    primary = model.primary(model.conv(images).clamp_min(0))
    torch.testing.assert_close(out.primary, primary)
    classes, _ = model.classes(primary)
    torch.testing.assert_close(out.classes, classes)
    assert out.classes.pose.shape == (4, 2, 4)
    assert out.primary.pose.shape == (4, 3, 4, 2, 3)
    assert out.info.coupling.shape == (3, 4, 3 * 4 * 2, 2)
    torch.testing.assert_close(out.info.coupling.sum(-1), torch.ones(3, 4, 24))
    torch.testing.assert_close(out.info.coupling[0], torch.full((4, 24, 2), 0.5))
    torch.testing.assert_close(out.classes.activation, out.classes.pose.square().sum(-1).sqrt())
    torch.testing.assert_close(model.scores(images), out.classes.activation)


def test_capsnet_is_trained_by_margin_and_a_little_reconstruction() -> None:
    spec = SPECS[0]
    model, data = build("capsnet", spec), batch(spec)
    assert isinstance(model, CapsNet)
    found = model.objective(data, 0)
    classes = model(data.images).classes
    margin = margin_loss(classes.activation, data.labels)
    alone = torch.zeros_like(classes.pose)
    for s, label in enumerate(data.labels.tolist()):
        alone[s, label] = classes.pose[s, label]
    redrawn = reconstruction_loss(model.decoder(alone), data.images)
    torch.testing.assert_close(found["margin"], margin)
    torch.testing.assert_close(found["reconstruction"], redrawn)
    torch.testing.assert_close(found["loss"], margin + 0.0005 * redrawn)
    right = (classes.activation.argmax(-1) == data.labels).float().mean()
    assert float(found["accuracy"]) == pytest.approx(float(right))


def test_capsnet_draws_from_the_chosen_capsule_or_the_longest() -> None:
    spec = SPECS[0]
    model = build("capsnet", spec)
    assert isinstance(model, CapsNet)
    classes = model(batch(spec).images).classes
    longest = model.reconstruct(classes)
    assert longest.shape == (4, 1, 8, 8)
    torch.testing.assert_close(longest, model.reconstruct(classes, classes.activation.argmax(-1)))
    other = (classes.activation.argmax(-1) + 1) % 3
    assert not torch.allclose(longest, model.reconstruct(classes, other))


# --- Images that show several classes -------------------------------------------------------------------------


def pairs(spec: ImageSpec, b: int = 4) -> Batch:
    """Two things an image, each alone beside them."""
    make = torch.Generator().manual_seed(1)
    parts = torch.rand(b, 2, *spec[1:3], generator=make)
    labels = torch.stack([torch.randperm(spec.classes, generator=make)[:2] for _ in range(b)])
    return Batch(parts.sum(1, keepdim=True).clamp(max=1), labels, torch.arange(b), parts)


def test_hits_asks_for_all_that_an_image_shows() -> None:
    scores = torch.tensor([[0.9, 0.1, 0.8], [0.2, 0.7, 0.1]])
    assert is_correct(scores, torch.tensor([0, 0])).tolist() == [True, False]
    assert is_correct(scores, torch.tensor([[2, 0], [1, 2]])).tolist() == [True, False]
    assert is_correct(scores, torch.tensor([[0, 1], [0, 1]])).tolist() == [False, True]


def test_present_has_a_one_for_each_class() -> None:
    assert multi_hot(torch.tensor([[2, 0], [1, 1]]), 3).tolist() == [[1, 0, 1], [0, 1, 0]]
    assert multi_hot(torch.tensor([1]), 2).tolist() == [[0, 1]]


def test_capsnet_draws_each_part_from_its_own_capsule() -> None:
    spec = SPECS[0]
    model, data = build("capsnet", spec), pairs(spec)
    assert isinstance(model, CapsNet)
    found = model.objective(data, 0)
    classes = model(data.images).classes
    assert data.components is not None
    redrawn = 0.0
    for s, labels in enumerate(data.labels.tolist()):
        for m, label in enumerate(labels):
            alone = torch.zeros_like(classes.pose[:1])
            alone[0, label] = classes.pose[s, label]
            redrawn += (model.decoder(alone)[0, 0] - data.components[s, m]).square().sum().item() / len(data.labels)
    v, margin = classes.activation.tolist(), 0.0
    for lengths, labels in zip(v, data.labels.tolist(), strict=True):
        for j, length in enumerate(lengths):
            cost = max(0, 0.9 - length) ** 2 if j in labels else 0.5 * max(0, length - 0.1) ** 2
            margin += cost / len(v)
    assert float(found["margin"]) == pytest.approx(margin, rel=1e-5)
    assert float(found["reconstruction"]) == pytest.approx(redrawn, rel=1e-5)
    with pytest.raises(ShapeError, match="without their components"):
        model.objective(data._replace(components=None), 0)


def test_the_cnn_has_a_logistic_unit_for_each_class() -> None:
    spec = SPECS[0]
    torch.manual_seed(0)
    model, data = CNNConfig(widths=(3,), kernel=3, hidden=(5,), several=True).build(spec).eval(), pairs(spec)
    p = model.scores(data.images)
    torch.testing.assert_close(p, model(data.images).sigmoid())
    wanted = 0.0
    for row, labels in zip(p.tolist(), data.labels.tolist(), strict=True):
        wanted -= sum(math.log(q if j in labels else 1 - q) for j, q in enumerate(row)) / len(p)
    assert model.objective(data, 0)["loss"].item() == pytest.approx(wanted, rel=1e-5)


# --- The network beside it ----------------------------------------------------------------------------------


def test_the_convnet_of_the_paper_has_35_4_million_parameters() -> None:
    model = ConvNetConfig().build(ImageSpec(1, 28, 28, 10))
    convolutions = 25 * 256 + 256 + 256 * 25 * 256 + 256 + 256 * 25 * 128 + 128
    assert parameters(model) == convolutions + 28 * 28 * 128 * 328 + 328 + 328 * 192 + 192 + 192 * 10 + 10
    assert round(parameters(model) / 1e6, 1) == 35.4


def test_the_cnn_layer_by_layer() -> None:
    spec = ImageSpec(3, 9, 12, 2)
    model = build("cnn", spec).eval()
    stem = 3 * 3 * 9 + 3 + 4 * 3 * 9 + 4
    head = (9 // 4) * (12 // 4) * 4 * 5 + 5 + 5 * 2 + 2
    assert parameters(model) == stem + head
    images = batch(spec).images
    logits = model(images)
    x = images
    for m in (m for m in model.modules() if isinstance(m, nn.Conv2d)):
        x = max_pool2d(conv2d(x, m.weight, m.bias, padding=1).clamp_min(0), 2)
    x = x.flatten(1)
    hidden, last = (m for m in model.modules() if isinstance(m, nn.Linear))
    torch.testing.assert_close(logits, last(hidden(x).clamp_min(0)))
    torch.testing.assert_close(model.scores(images), logits.softmax(-1))
    found = model.objective(batch(spec), 0)
    labels = batch(spec).labels
    wanted = -sum(logits.log_softmax(-1)[s, label].item() for s, label in enumerate(labels.tolist())) / 4
    assert found["loss"].item() == pytest.approx(wanted, rel=1e-5)
    assert float(found["accuracy"]) == pytest.approx(float((logits.argmax(-1) == labels).float().mean()))


# --- What all models share ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("spec", SPECS)
def test_the_objective_is_finite_and_reaches_every_parameter(name: str, spec: ImageSpec) -> None:
    model = build(name, spec).eval()  # no dropout, so that no unit is left out by chance
    found = model.objective(batch(spec, b=16), 0)
    assert found["loss"].ndim == 0
    assert all(bool(value.isfinite().all()) for value in found.values())
    found["loss"].backward()
    for label, p in model.named_parameters():
        assert p.grad is not None, label
        assert bool(p.grad.isfinite().all()), label
    assert all(p.grad is not None and bool(p.grad.any()) for p in model.parameters())


@pytest.mark.parametrize("name", CONFIGS)
def test_a_single_class_is_refused(name: str) -> None:
    with pytest.raises(DataError, match="a single class; a classifier needs two or more"):
        build(name, ImageSpec(1, 10, 10, 1))


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("spec", SPECS)
def test_scores_are_one_number_for_each_class(name: str, spec: ImageSpec) -> None:
    model = build(name, spec).eval()
    scores = model.scores(batch(spec).images)
    assert scores.shape == (4, spec.classes)
    assert bool(((scores >= 0) & (scores <= 1 + 1e-6)).all())


@pytest.mark.parametrize("name", CONFIGS)
def test_some_steps_of_training_lower_the_loss(name: str) -> None:
    spec = SPECS[0]
    model, data = build(name, spec).eval(), batch(spec, b=8)
    optimizer = torch.optim.Adam(model.parameters(), 0.03)
    losses = []
    for step in range(60):
        loss = model.objective(data, step)["loss"]
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < 0.2 * losses[0]


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("value", [0.0, 1.0, 1e6])
def test_flat_images_make_no_nan(name: str, value: float) -> None:
    spec = SPECS[0]
    model = build(name, spec)
    loss = model.objective(batch(spec)._replace(images=torch.full((4, 1, 8, 8), value)), 0)["loss"]
    loss.backward()
    assert bool(loss.isfinite())
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.parameters())


@pytest.mark.parametrize("name", CONFIGS)
def test_one_image_is_a_batch_and_batches_do_not_mix(name: str) -> None:
    spec = SPECS[2]
    model = build(name, spec).eval()
    images = batch(spec).images
    whole = model.scores(images)
    for s in range(4):
        torch.testing.assert_close(whole[s : s + 1], model.scores(images[s : s + 1]))


@pytest.mark.parametrize("name", CONFIGS)
def test_the_state_comes_back(name: str) -> None:
    spec = SPECS[0]
    one, two = build(name, spec, 0).eval(), build(name, spec, 1).eval()
    images = batch(spec).images
    assert not torch.equal(one.scores(images), two.scores(images))
    two.load_state_dict(one.state_dict())
    assert torch.equal(one.scores(images), two.scores(images))


@pytest.mark.parametrize("name", CHECKED)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int16])
def test_labels_may_be_of_any_integer_type(name: str, dtype: torch.dtype) -> None:
    spec = SPECS[0]
    model, data = build(name, spec).eval(), batch(spec)
    same = data._replace(labels=data.labels.to(dtype))
    torch.testing.assert_close(model.objective(same, 0)["loss"], model.objective(data, 0)["loss"])


# --- Errors -------------------------------------------------------------------------------------------------

NAN, INFINITE = torch.zeros(2, 1, 8, 8), torch.zeros(2, 1, 8, 8)
NAN[1, 0, 3, 3], INFINITE[0, 0, 0, 0] = float("nan"), float("-inf")
WRONG: list[tuple[Tensor, type[TorchcapsError], str]] = [
    (NAN, DataError, "NaN"),
    (INFINITE, DataError, "infinite"),
    (torch.zeros(0, 1, 8, 8), ShapeError, "empty batch"),
    (torch.zeros(2, 1, 8, 9), ShapeError, r"\[b 1 8 8\]"),
    (torch.zeros(2, 3, 8, 8), ShapeError, r"\[b 1 8 8\]"),
    (torch.zeros(1, 8, 8), ShapeError, r"\[b 1 8 8\]"),
    (torch.zeros(2, 64), ShapeError, r"\[b 1 8 8\]"),
    (torch.zeros(2, 1, 8, 8, dtype=torch.uint8), ShapeError, "255"),
    (torch.zeros(2, 1, 8, 8, dtype=torch.int64), ShapeError, "floating"),
    (torch.zeros(2, 1, 8, 8, dtype=torch.bool), ShapeError, "floating"),
]


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize(("images", "error", "says"), WRONG)
def test_images_that_cannot_be_meant_are_refused_in_one_line(
    name: str, images: Tensor, error: type[TorchcapsError], says: str
) -> None:
    model = build(name, SPECS[0])
    labels = torch.zeros(len(images), dtype=torch.int64)
    for use in (model, model.scores, lambda x: model.objective(Batch(x, labels, labels), 0)):
        with pytest.raises(error, match=says) as caught:
            use(images)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", CHECKED)
@pytest.mark.parametrize("labels", [[0, 3], [-1, 0], [0]])
def test_labels_that_are_no_class_are_refused_in_one_line(name: str, labels: list[int]) -> None:
    model = build(name, SPECS[0])
    wrong = Batch(torch.zeros(2, 1, 8, 8), torch.tensor(labels), torch.arange(2))
    with pytest.raises(TorchcapsError, match="labels") as caught:
        model.objective(wrong, 0)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("config", "size"),
    [
        (CAPSNET, (4, 12)), (CapsNetConfig(channels=2, types=1), (12, 12)),
        (CapsNetConfig(channels=2, types=1), (28, 16)),
        (CAPSNET, (2, 2)),
        (CapsNetConfig(channels=2, types=1), (5, 5)),
        (CNN, (3, 9)), (CNN, (1, 1)), (CNNConfig(widths=(2, 2, 2)), (7, 28)),
    ],
)  # fmt: skip
def test_images_too_small_fail_at_construction_and_the_error_names_a_size_that_fits(
    config: Any, size: tuple[int, int]
) -> None:
    with pytest.raises(ShapeError) as caught:
        config.build(ImageSpec(1, *size, 3))
    text = str(caught.value)
    assert "\n" not in text
    named = [int(side) for side, other in re.findall(r"(\d+)x(\d+)", text) if side == other]
    assert builds(config, named[-1]), text
    assert not builds(config, named[-1] - 1), text


def builds(config: Any, side: int) -> bool:
    """Whether square images of that side can be meant, at every stage."""
    try:
        spec = ImageSpec(1, side, side, 3)
        config.build(spec).eval().scores(torch.zeros(1, 1, side, side))
    except TorchcapsError:
        return False
    return True


@pytest.mark.parametrize("spec", [ImageSpec(0, 8, 8, 3), ImageSpec(1, 8, 8, 0)])
@pytest.mark.parametrize("name", CHECKED)
@pytest.mark.filterwarnings("ignore:Initializing zero-element")
def test_images_without_channels_pixels_or_classes_are_refused(name: str, spec: ImageSpec) -> None:
    with pytest.raises(TorchcapsError) as caught:
        build(name, spec)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", CONFIGS)
def test_configurations_survive_a_recipe(name: str) -> None:
    config = CONFIGS[name]
    check(config)
    assert from_dict(type(config), to_dict(config)) == config


@pytest.mark.parametrize(
    ("kind", "data"),
    [
        (CapsNetConfig, {"channels": 0}), (CapsNetConfig, {"types": -1}), (CapsNetConfig, {"decoder": [0]}),
        (CapsNetConfig, {"reconstruction": -1.0}), (CapsNetConfig, {"routing": {"iterations": 0}}),
        (CNNConfig, {"widths": [8, 0]}), (CNNConfig, {"dropout": 1.5}), (CNNConfig, {"kernels": 3}),
    ],
)  # fmt: skip
def test_values_out_of_range_are_refused_by_the_recipe(kind: type, data: dict[str, Any]) -> None:
    with pytest.raises(RecipeError, match=next(iter(data))) as caught:
        from_dict(kind, data)
    assert "\n" not in str(caught.value)


def test_a_model_that_states_nothing_says_so() -> None:
    nothing = Model()
    with pytest.raises(TypeError, match="objective"):
        nothing.objective(batch(SPECS[0]), 0)
    with pytest.raises(TypeError, match="classifier"):
        nothing.scores(batch(SPECS[0]).images)
