"""The sweep files in experiments/: every run can be built, and every published result comes from one of them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch

from support.image_specs import spec_of
from sweep import EXPERIMENTS, Sweep, find_recipe, load_sweep, sweep_files
from torchcaps.config import flatten, to_dict
from torchcaps.errors import RecipeError
from torchcaps.train import Recipe, load_recipe, recipe_names

SWEEPS = {path.stem: load_sweep(path) for path in sweep_files()}
RUNS = [(file, name) for file, sweep in SWEEPS.items() for name in sweep.runs]
RESULTS = {path.stem: json.loads(path.read_text()) for path in sorted((EXPERIMENTS.parent / "results").glob("*.json"))}
SCRIPTS = {"em-free-energy", "poe-likelihood"}
"""Results of scripts that train no recipe."""
OLD = {
    "capsnet-mnist-small-before",
    "capsnet-mnist-small-twenty",
    "matrix-smallnorb-brief-before",
    "matrix-smallnorb-sixty",
    "poe-fashion-before",
    "poe-mnist-before",
}
"""Results of an earlier state of a recipe, which the lab notebook shows."""
EVALUATED = [name for name, found in RESULTS.items() if "recipe" in found and name not in SCRIPTS | OLD]
ATTACKED = [name for name in RESULTS if name.endswith("-attacks")]
CHANGED = {
    "matrix-smallnorb-normed-long": {"model.init.switch", "model.init.switch_classes"},
    "capsnet-mnist": {"train.precision"},
}
"""Settings that changed after a result was made, as docs/lab-notebook/matrix.md says, or that not every processor has:
docs/systems/capsnet.md says that its network was trained in bfloat16."""
OTHER = r"about|seed|start|data\.data_dir|paper\..*|.*\.total_steps"
"""Settings that are not compared: places on a machine, and what does not decide how a seed is trained."""


def decisive(config: Mapping[str, object]) -> dict[str, object]:
    """The settings of a recipe, as plain data, that decide what is trained."""
    return {key: value for key, value in flatten(config).items() if not re.fullmatch(OTHER, key)}


@pytest.mark.parametrize(("file", "name"), RUNS, ids=[f"{file}-{name}" for file, name in RUNS])
def test_every_run_can_be_built_for_its_images(file: str, name: str):
    recipe = SWEEPS[file].runs[name].recipe
    with torch.device("meta"):
        count = sum(p.numel() for p in recipe.model.build(spec_of(recipe)).parameters())
    assert count > 0 and recipe.name == name and recipe.about and "\n" not in recipe.about
    if recipe.paper.metrics:
        assert all(0 < value < 1 for value in recipe.paper.metrics.values())
        assert "20" in recipe.paper.note, "an author and a year"


def test_a_name_means_one_recipe_in_all_files_and_in_the_package():
    meant: dict[str, Recipe] = {name: load_recipe(name) for name in recipe_names()}
    for file, name in RUNS:
        recipe = SWEEPS[file].runs[name].recipe
        first = meant.setdefault(name, recipe)
        assert replace(recipe, seed=first.seed) == first, f"{file}: {name}"


@pytest.mark.parametrize("name", sorted({name for _, name in RUNS} - set(recipe_names()))[::9])
def test_a_run_is_found_by_its_name(name: str):
    assert find_recipe(name) == next(SWEEPS[file].runs[name].recipe for file, other in RUNS if other == name)


def test_a_name_that_does_not_exist_is_refused_with_the_nearest():
    with pytest.raises(RecipeError, match="'matrix-margn'; did you mean 'matrix-margin'"):
        find_recipe("matrix-margn")


@pytest.mark.parametrize("sweep", SWEEPS.values(), ids=SWEEPS)
def test_every_sweep_says_what_it_is_for_and_measures_something(sweep: Sweep):
    assert sweep.about and (sweep.results or sweep.validations)


@pytest.mark.parametrize("name", EVALUATED)
def test_a_published_result_names_the_run_that_made_it(name: str):
    found = RESULTS[name]
    entries = [(sweep, entry) for sweep in SWEEPS.values() for entry in sweep.results if entry.run == name]
    ((sweep, entry),) = entries  # a result comes from one file
    assert list(sweep.runs[name].config.seeds) == found["seeds"]
    assert set(entry.controls) == {control for control in found["controls"] if control in sweep.runs}


@pytest.mark.parametrize("name", EVALUATED)
def test_a_published_result_has_the_settings_of_its_run(name: str):
    """As far as both know a setting: later versions have some that the recorded recipe has not."""
    recipe = next(SWEEPS[file].runs[name].recipe for file, other in RUNS if other == name)
    recorded = decisive(RESULTS[name]["config"])
    today = decisive(to_dict(recipe))
    shared = (recorded.keys() & today.keys()) - CHANGED.get(name, set())
    assert len(shared) > 15
    assert {key: recorded[key] for key in shared} == {key: today[key] for key in shared}


@pytest.mark.parametrize("name", ATTACKED)
def test_published_attacks_name_their_runs(name: str):
    found = RESULTS[name]
    attacks = [attack for sweep in SWEEPS.values() for attack in sweep.attacks]
    entry = next(attack for attack in attacks if attack.run == found["runs"][0]["recipe"])
    assert [entry.run, *entry.against] == [run["recipe"] for run in found["runs"]]
    assert entry.source == found["source"]["recipe"]
    assert entry.options == {key: _plain(found[key]) for key in ("images", "queries", "epsilons")}


def _plain(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value
