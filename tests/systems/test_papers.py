"""A recipe carries its paper's numbers as data; what is printed below a table says how our runs differ."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from support.tiny_recipe import tiny
from torchcaps.config import from_dict, to_dict
from torchcaps.evaluate.results import Result
from torchcaps.systems import SYSTEMS
from torchcaps.systems.papers import paper_notes
from torchcaps.train import Recipe, load_recipe, recipe_names, train
from torchcaps.train.recipe import PaperNumbers

FOLLOWING = [name for name in recipe_names() if load_recipe(name).paper.metrics]
RESULTS = sorted((Path(__file__).parents[2] / "results").glob("*.json"))
SMALL = """
about = "small"
[data]
name = "glyphs"
[model]
name = "capsnet-small"
[paper]
metrics = { test_error = 0.5 }
note = "table 9"
"""
NUMBERS = PaperNumbers({"test_error": 0.5}, "table 9")


@pytest.fixture
def recipe_file(tmp_path) -> Path:
    path = tmp_path / "small.toml"
    path.write_text(SMALL)
    return path


def test_some_recipes_follow_a_paper():
    assert len(FOLLOWING) > 5


@pytest.mark.parametrize("name", FOLLOWING)
def test_numbers_are_shares_of_images_and_say_where_they_stand(name):
    paper = load_recipe(name).paper
    assert all(0 < value < 1 for value in paper.metrics.values())
    assert paper.note[0].isupper() and "20" in paper.note  # an author and a year


@pytest.mark.parametrize("path", RESULTS, ids=lambda p: p.stem)
def test_published_results_have_the_numbers_of_their_recipe(path):
    found = json.loads(path.read_text())
    if found.get("recipe") in FOLLOWING:
        assert found["paper"] == load_recipe(found["recipe"]).paper.metrics


def test_a_recipe_keeps_its_numbers_when_it_is_trained_otherwise(recipe_file):
    assert load_recipe(str(recipe_file)).paper == NUMBERS
    for over in ({"train": {"epochs": 2}}, {"seed": 3}):
        assert load_recipe(str(recipe_file), over).paper == NUMBERS


@pytest.mark.parametrize("over", [{"model": {"dimension": 4}}, {"data": {"name": "mnist"}}, {"data": {"size": 24}}])
def test_what_the_paper_did_not_do_has_no_number(recipe_file, over):
    assert load_recipe(str(recipe_file), over).paper == PaperNumbers()
    said = {"metrics": {"test_error": 0.1}}
    assert load_recipe(str(recipe_file), {**over, "paper": said}).paper.metrics == said["metrics"]


def test_the_place_of_the_data_is_no_other_data():
    name = next(name for name in FOLLOWING if hasattr(load_recipe(name).data, "data_dir"))
    assert load_recipe(name, {"data": {"data_dir": "elsewhere"}}).paper == load_recipe(name).paper


def test_numbers_are_not_inherited(recipe_file):
    child = recipe_file.with_name("child.toml")
    child.write_text('base = "small.toml"\n[train]\nepochs = 2\n')
    assert load_recipe(str(child)).paper == PaperNumbers()


def test_numbers_are_written_down_and_make_no_other_recipe():
    recipe = tiny()
    told = replace(recipe, paper=NUMBERS)
    assert told == recipe and from_dict(Recipe, to_dict(told)).paper == NUMBERS


def test_a_run_goes_on_when_only_the_numbers_changed(tmp_path):
    recipe = tiny(train={"epochs": 0.5})
    assert train(recipe, tmp_path / "run", quiet=True).finished
    assert train(replace(recipe, paper=NUMBERS), tmp_path / "run", resume=True, quiet=True).finished


# --- What is printed below a table ----------------------------------------------------------------------------

MATRIX = SYSTEMS["matrix"].paper_budget
SPARSE = SYSTEMS["sparse"].paper_budget


def result(model: str, steps: int, batch: int = 64, note: str = "", **paper: float) -> Result:
    config = {"model": {"name": model}, "train": {"batch": batch}, "paper": {"note": note}}
    numbers = paper or {"test_error": 0.02}
    return Result("one", config, [0], {"test_error": [0.1]}, {}, numbers, {"steps": steps}, {})


def test_a_smaller_budget_is_one_line_that_names_both():
    (line,) = paper_notes(result("matrix-small", 30_320))
    assert "30,320 steps of 64 images" in line and "2,000,000 of 64" in line and "paper names no number" in line
    (line,) = paper_notes(result("sparse", 29_952, batch=128))
    assert line == "a smaller budget than the paper's: 29,952 steps of 128 images; the paper's is 30,000 of 128"


def test_the_recipe_s_note_comes_first():
    first, second = paper_notes(result("matrix", 10, note="table 1, without batch normalization"))
    assert first == "in the paper: table 1, without batch normalization" and second.startswith("a smaller budget")


def test_where_the_budget_is_not_smaller_or_not_known_nothing_is_said():
    assert MATRIX is not None and SPARSE is not None
    assert paper_notes(result("matrix", MATRIX.steps)) == []
    assert paper_notes(result("matrix", MATRIX.steps // 2, batch=128)) == []
    assert len(paper_notes(result("matrix", MATRIX.steps // 2 - 1, batch=128))) == 1
    assert paper_notes(result("sparse", SPARSE.steps, batch=128)) == []
    assert paper_notes(result("capsnet", 10)) == paper_notes(result("cnn", 10)) == []
    assert paper_notes(replace(result("matrix", 10, note="table 1"), paper={})) == []
