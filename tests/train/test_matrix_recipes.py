"""The recipes of matrix capsules: what each changes of the one it stands on, and that schedules fit their steps."""

from __future__ import annotations

from dataclasses import replace

import pytest

from torchcaps.config import flatten, to_dict
from torchcaps.losses import spread_margin
from torchcaps.models import MatrixConfig, SmallMatrixConfig
from torchcaps.train import load_recipe, recipe_names, total_steps
from torchcaps.train.recipe import PaperNumbers
from torchcaps.types import ImageSpec

BASE, NORMED, BRIEF = "matrix-smallnorb-small", "matrix-smallnorb-normed", "matrix-smallnorb-brief"
ROWS = {
    "matrix-iterations-1": {"model.routing.iterations": 1},
    "matrix-iterations-3": {"model.routing.iterations": 3},
    "matrix-iterations-5": {"model.routing.iterations": 5},
    "matrix-vector": {"model.pose": "vector"},
    "matrix-no-coordinates": {"model.coordinates": 0.0},
    "matrix-vector-no-coordinates": {"model.pose": "vector", "model.coordinates": 0.0},
    "matrix-margin": {"model.loss": "margin"},
    "matrix-spread": {"model.loss": "spread", "model.ramp": 100},
    "matrix-mixing": {"model.routing.switch": "mixing"},
}
TOYS = ImageSpec(2, 32, 32, 5)


def changed(name: str, base: str = BASE) -> dict[str, object]:
    """The settings in which a recipe differs from another."""
    one, other = (
        flatten(to_dict(replace(load_recipe(n), name="x", about="", paper=PaperNumbers()))) for n in (name, base)
    )
    return {key: value for key, value in one.items() if other.get(key) != value}


@pytest.mark.parametrize("name", ROWS)
def test_a_row_of_table_1_differs_in_what_its_name_says_and_nothing_else(name):
    assert changed(name, BRIEF) == ROWS[name]


def test_rows_of_table_1_have_three_epochs():
    assert changed(BRIEF, NORMED) == {"train.epochs": 3.0} and total_steps(load_recipe(BRIEF), 24_300) == 1137


def test_norms_come_with_another_loss_start_and_least_variance_and_no_change_of_light():
    change = changed(NORMED)
    start = {key for key in change if key.startswith(("model.init.", "schedule."))}
    assert {key: value for key, value in change.items() if key not in start} == {
        "data.jitter": False, "model.norm": True, "model.loss": "cross-entropy", "train.epochs": 20.0,
        "model.routing.final_inverse_temperature": 0.02, "model.routing.damping": 0.0,
        "model.routing.min_variance": 0.06,
    }  # fmt: skip
    longer = {"data.deform": 1.0, "data.mirror": True, "train.epochs": 40.0}
    assert changed(f"{NORMED}-long", NORMED) == longer


def test_the_base_has_the_settings_of_the_authors_code_but_for_iterations_temperature_and_start():
    recipe = load_recipe(BASE)
    usual = SmallMatrixConfig()
    routing = replace(usual.routing, iterations=2, final_inverse_temperature=0.5)
    assert recipe.model == replace(usual, ramp=1000, routing=routing, init=recipe.model.init)
    assert recipe.model.init.identity and not usual.init.identity
    # Where the switches' logits start at does not change with the temperature: lambda a is the same.
    hotter = routing.final_inverse_temperature / usual.routing.final_inverse_temperature
    for ours, theirs in (
        (recipe.model.init.switch, usual.init.switch),
        (recipe.model.init.switch_classes, usual.init.switch_classes),
    ):
        assert ours[0] == theirs[0] and ours[1] * hotter == pytest.approx(theirs[1])
    data = to_dict(recipe)["data"]
    assert (data["name"], data["view"], data["jitter"], data["standardize"]) == ("smallnorb", 32, True, True)
    assert recipe.train.batch == 64 and recipe.optimizer.options == {"weight_decay": 2e-7}


def test_schedules_are_those_of_the_authors_code():
    """.96 every 20,000 steps, a margin of .2 + .79 sigmoid(step / 50,000 - 4); both end where it matters."""
    recipe = load_recipe("matrix-smallnorb")
    assert recipe.schedule.name == "ExponentialLR"
    assert recipe.schedule.options["gamma"] ** 20_000 == pytest.approx(0.96, abs=1e-4)
    assert isinstance(recipe.model, MatrixConfig) and recipe.model.ramp == 50_000
    steps = total_steps(recipe, 24_300)
    assert steps == 303_200 and spread_margin(steps, rule="sigmoid", ramp=50_000) >= 0.9


def test_the_small_margin_grows_50_times_as_fast_and_is_whole_at_the_end():
    recipe = load_recipe(BASE)
    steps = total_steps(recipe, 24_300)
    assert recipe.schedule.depends_on_length and recipe.model.ramp * 50 == 50_000
    assert spread_margin(steps, rule="sigmoid", ramp=recipe.model.ramp) >= 0.98


@pytest.mark.parametrize(("name", "images"), [("matrix-smallnorb-long", 24_300), ("matrix-mnist-small", 60_000)])
def test_toys_and_digits_that_are_learned_for_longer_are_deformed(name, images):
    recipe = load_recipe(name)
    assert recipe.data.deform == 1.0
    assert spread_margin(total_steps(recipe, images), rule="sigmoid", ramp=recipe.model.ramp) >= 0.98


@pytest.mark.parametrize("by", ["azimuth", "elevation"])
def test_novel_viewpoints_are_asked_of_capsules_and_cnn_alike(by):
    change = changed(f"matrix-novel-{by}-small")
    assert change == {
        "data.novel": by, "data.matched": True, "train.epochs": 12.0, "model.ramp": 130,
    }  # fmt: skip
    other = changed(f"cnn-novel-{by}", f"matrix-novel-{by}-small")
    assert {key for key in other if not key.startswith("model.")} == {
        "optimizer.lr", "schedule.options.max_lr", "train.validate_every",
    }  # fmt: skip


def test_the_plain_cnn_sees_the_images_of_normed_capsules():
    assert to_dict(load_recipe("cnn-smallnorb-plain"))["data"] == to_dict(load_recipe(NORMED))["data"]
    assert changed("cnn-smallnorb-plain", "cnn-smallnorb") == {"data.jitter": False}


@pytest.mark.parametrize("name", ["cnn-smallnorb", "cnn-novel-azimuth", "cnn-novel-elevation"])
def test_the_cnn_has_the_paper_s_parameters(name):
    """By hand: 5*5*2*32 + 32, 5*5*32*64 + 64, 8*8*64*1024 + 1024, 1024*5 + 5; 4.2 M in the paper."""
    config = load_recipe(name).model
    model = config.build(TOYS)
    assert sum(p.numel() for p in model.parameters()) == 1_632 + 51_264 + 4_195_328 + 5_125 == 4_253_349
    assert config.dropout == 0.5 and config.pool == 2 and config.kernel == 5


def test_the_photographs_have_256_channels():
    recipe = load_recipe("matrix-cifar10")
    assert recipe.model.sizes == (256, 32, 32, 32) and total_steps(recipe, 50_000) == 303_028


def test_every_network_can_be_built_for_its_images():
    shapes = {"smallnorb": TOYS, "mnist": ImageSpec(1, 28, 28, 10), "cifar10": ImageSpec(3, 32, 32, 10)}
    names = [name for name in recipe_names() if name.startswith("matrix-")]
    assert len(names) == 20
    for name in names:
        recipe = load_recipe(name)
        assert recipe.model.build(shapes[to_dict(recipe)["data"]["name"]]).is_classifier
