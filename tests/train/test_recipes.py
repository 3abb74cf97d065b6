"""Every recipe that ships can be built, and is what its one sentence says."""

from __future__ import annotations

import re

import pytest
import torch

from support.image_specs import spec_of
from torchcaps.losses import spread_margin
from torchcaps.systems import system_of
from torchcaps.train import load_recipe, recipe_names, total_steps
from torchcaps.train.recipe import stage_names, stage_of

UNITS = {"K": 1e3, "M": 1e6}
SMALLNORB_IMAGES = 24_300
OTHER_NAMES = ("cnn", "attention")
"""What a recipe is named after if not its system: the kind of baseline, or the router that a network is known for."""


def parameters(name: str) -> int:
    """Parameters of a recipe's network for the images of its data; nothing is allocated."""
    recipe = load_recipe(name)
    with torch.device("meta"):
        return sum(p.numel() for p in recipe.model.build(spec_of(recipe)).parameters())


def test_there_are_few_enough_to_choose_from():
    assert len(recipe_names()) <= 24


@pytest.mark.parametrize("name", recipe_names())
def test_a_recipe_is_named_after_its_system_and_says_in_one_line_what_it_is(name):
    recipe = load_recipe(name)
    assert recipe.name == name and name.split("-")[0] in (system_of(recipe.model).name, *OTHER_NAMES)
    assert "\n" not in recipe.about and 40 < len(recipe.about) < 100


@pytest.mark.parametrize("name", recipe_names())
def test_a_recipe_has_the_parameters_that_it_says(name):
    found = re.search(r"([\d.]+) ([KM]) parameters", load_recipe(name).about)
    count = parameters(name)
    assert count > 0
    if found:
        assert count == pytest.approx(float(found[1]) * UNITS[found[2]], rel=0.05)


@pytest.mark.parametrize("name", recipe_names())
def test_every_stage_of_a_recipe_is_trained_or_fitted(name):
    recipe = load_recipe(name)
    stages = [stage_of(recipe, stage) for stage in stage_names(recipe.model)]
    assert all(stage.train.epochs > 0 and stage.optimizer.lr > 0 for stage in stages)


def test_matrix_capsules_at_the_paper_s_size_have_the_schedules_of_the_authors_code():
    """.96 every 20,000 steps, a margin of .2 + .79 sigmoid(step / 50,000 - 4) that grows to .9."""
    recipe = load_recipe("matrix-smallnorb-paper")
    assert recipe.schedule.options["gamma"] ** 20_000 == pytest.approx(0.96, abs=1e-4)
    steps = total_steps(recipe, SMALLNORB_IMAGES)
    assert spread_margin(steps, rule="sigmoid", ramp=50_000) >= 0.9


def test_the_convolutional_baseline_of_smallnorb_has_the_paper_s_parameters():
    """By hand: 5*5*2*32 + 32, 5*5*32*64 + 64, 8*8*64*1024 + 1024, 1024*5 + 5; 4.2 M in the paper."""
    assert parameters("cnn-smallnorb") == 1_632 + 51_264 + 4_195_328 + 5_125 == 4_253_349
