"""Each recipe of matrix capsules has its own row of the paper beside it, and a line if its budget was smaller."""

from __future__ import annotations

from dataclasses import replace

import pytest

from torchcaps.config import to_dict
from torchcaps.evaluate.results import Result
from torchcaps.systems.papers import AUTHORS_STEPS, budget_note, paper_numbers
from torchcaps.train import load_recipe

TABLE_1 = {
    "matrix-iterations-1": 0.097, "matrix-iterations-3": 0.022, "matrix-iterations-5": 0.039, "matrix-vector": 0.029,
    "matrix-no-coordinates": 0.026, "matrix-vector-no-coordinates": 0.032, "matrix-margin": 0.032,
    "matrix-spread": 0.022, "matrix-mixing": 0.045, "matrix-smallnorb-small": 0.022,
    "matrix-smallnorb-brief": 0.022, "cnn-smallnorb": 0.052, "matrix-mnist-small": 0.0044, "matrix-cifar10": 0.119,
}  # fmt: skip
TABLE_2 = {
    "matrix-novel-azimuth-small": (0.135, 0.037), "cnn-novel-azimuth": (0.2, 0.037),
    "matrix-novel-elevation-small": (0.123, 0.043), "cnn-novel-elevation": (0.178, 0.043),
}  # fmt: skip


@pytest.mark.parametrize("name", TABLE_1)
def test_rows_of_table_1(name):
    assert paper_numbers(load_recipe(name)) == {"test_error": TABLE_1[name]}


def test_the_best_network_has_two_numbers():
    assert paper_numbers(load_recipe("matrix-smallnorb")) == {"test_error": 0.018, "test_error_13crop": 0.014}


@pytest.mark.parametrize("name", TABLE_2)
def test_rows_of_table_2(name):
    recipe, (novel, familiar) = load_recipe(name), TABLE_2[name]
    assert paper_numbers(recipe) == {"novel_error": novel, "familiar_error": familiar}


@pytest.mark.parametrize(
    "over",
    [
        {"model": {"routing": {"iterations": 4}}}, {"model": {"routing": {"iterations": 1}, "loss": "margin"}},
        {"model": {"pose": "vector", "routing": {"switch": "mixing"}}}, {"data": {"name": "glyphs"}},
        {"data": {"novel": "azimuth"}, "model": {"loss": "margin"}},
    ],
)  # fmt: skip
def test_what_the_paper_did_not_do_has_no_number(over):
    assert paper_numbers(load_recipe("matrix-smallnorb-small", over)) == {}


@pytest.mark.parametrize(("norm", "number"), [(False, 0.058), (True, 0.022)])
def test_cross_entropy_is_a_row_of_its_own_but_where_norms_make_it_the_usual_loss(norm, number):
    over = {"model": {"norm": norm, "loss": "cross-entropy"}}
    assert paper_numbers(load_recipe("matrix-smallnorb-small", over)) == {"test_error": number}


@pytest.mark.parametrize("kind", ["capsnet", "sparse", "soft", "dense"])
def test_networks_of_our_own_have_no_number(kind):
    assert paper_numbers(load_recipe(f"{kind}-affnist-shared")) == {}
    assert paper_numbers(load_recipe(f"{kind}-affnist-shared", {"model": {"shared": False}})) != {}


@pytest.mark.parametrize("own", [{"frames": True}, {"ramp": 100}])
@pytest.mark.parametrize("kind", ["sparse", "dense"])
def test_nor_have_capsules_that_draw_in_frames_or_compete_by_and_by(kind, own):
    assert paper_numbers(load_recipe(f"{kind}-affnist", {"model": own})) == {}


def result(name: str, steps: int, **train: int) -> Result:
    recipe = load_recipe(name, {"train": train})
    paper = paper_numbers(recipe)
    return Result(name, to_dict(recipe), [0], {"test_error": [0.1]}, {}, paper, {"steps": steps}, {})


def test_a_smaller_budget_is_one_line_that_names_both():
    note = budget_note(result("matrix-smallnorb-small", 30_320))
    assert note is not None and "\n" not in note
    assert "30,320 steps of 64 images" in note and "2,000,000 of 64" in note and "paper names no number" in note


def test_norms_are_said_to_be_ours_whatever_the_budget():
    whole, part = (budget_note(result("matrix-smallnorb-normed", steps)) for steps in (AUTHORS_STEPS, 10))
    assert whole == "batch norms, which the paper's network does not have"
    assert part.startswith(f"{whole}; a smaller budget") and "\n" not in part


def test_where_the_budget_is_not_smaller_or_not_known_nothing_is_said():
    assert budget_note(result("matrix-smallnorb-small", AUTHORS_STEPS)) is None
    assert budget_note(result("matrix-smallnorb-small", AUTHORS_STEPS // 2, batch=128)) is None
    assert budget_note(result("matrix-smallnorb-small", AUTHORS_STEPS // 2 - 1, batch=128)) is not None
    assert budget_note(result("capsnet-mnist-small", 10)) is None
    assert budget_note(result("cnn-smallnorb", 10)) is None
    assert budget_note(replace(result("matrix-smallnorb-small", 10), paper={})) is None
