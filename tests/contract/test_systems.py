"""Every model in MODELS belongs to one system of SYSTEMS, and every system answers all that commands ask of it.

The test walks both tables: a model that is registered without a system, a system that forgets a caption, a direction
or a view, fails here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from support.small_models import SMALL, SPEC
from torchcaps.data import Dataset, Splits
from torchcaps.errors import RecipeError
from torchcaps.models import MODELS, CNNConfig
from torchcaps.systems import SYSTEMS, Figure, Metric, System, register, system_of
from torchcaps.systems.report import metric_of
from torchcaps.testing import assert_system
from torchcaps.train import Recipe

RESULTS = [
    found
    for path in sorted((Path(__file__).parents[2] / "results").glob("*.json"))
    if {"metrics", "config", "paper"} <= (found := json.loads(path.read_text())).keys() and "model" in found["config"]
]


def labeled(count: int, things: int = 1) -> Dataset:
    """Random images of the small models' shape, each with one label or several."""
    make = torch.Generator().manual_seed(count)
    images = torch.randint(0, 256, (count, *SPEC[:3]), generator=make).byte()
    labels = torch.arange(count) % SPEC.classes
    several = torch.stack([(labels + n) % SPEC.classes for n in range(things)], 1)
    return Dataset(images, labels if things == 1 else several, SPEC.classes)


SPLITS = Splits(labeled(12), labeled(9))
PAIRED = [labeled(9, things=2)]


# --- Nothing is forgotten -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_every_model_belongs_to_exactly_one_system(name: str) -> None:
    owners = [system.name for system in SYSTEMS.values() if name in system.models]
    assert len(owners) == 1, f"model '{name}' belongs to the systems {owners}; one is wanted: add it to its `models`"
    assert system_of(name) is SYSTEMS[owners[0]] is system_of(SMALL[name]) is system_of(Recipe(model=SMALL[name]))


@pytest.mark.parametrize("key", SYSTEMS)
def test_systems_stand_under_their_own_name(key: str) -> None:
    assert SYSTEMS[key].name == key and SYSTEMS[key].title
    assert SYSTEMS[key].paper or not SYSTEMS[key].figures, f"system '{key}' cites no paper"


@pytest.mark.parametrize("name", MODELS)
def test_contract(name: str) -> None:
    torch.manual_seed(0)
    assert_system(system_of(name), SMALL[name], SPLITS, PAIRED)


@pytest.mark.parametrize("result", RESULTS, ids=lambda found: found["recipe"])
def test_published_metrics_are_declared(result: dict[str, Any]) -> None:
    system = system_of(result["config"]["model"]["name"])
    rows = [result["metrics"], result["paper"], *result["controls"].values()]
    for name in {name for row in rows for name in row}:
        assert any(metric.covers(name) for metric in system.metrics), f"'{name}' is no metric of '{system.name}'"


# --- The table ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OwnConfig(CNNConfig):
    """A configuration of somebody's own."""


class OwnSystem(System):
    """The least that a system can be."""

    name = "own"
    models = ("own",)


@pytest.fixture
def tables() -> Iterator[None]:
    """Both tables, given back as they were."""
    before = [(table, dict(table)) for table in (MODELS, SYSTEMS)]
    yield
    for table, content in before:
        table.clear()
        table.update(content)


def test_a_system_of_one_s_own_is_registered_at_run_time(tables: None) -> None:
    config = OwnConfig(widths=(4,), kernel=3, hidden=(8,))
    with pytest.raises(RecipeError, match="OwnConfig is not in the MODELS table"):
        system_of(config)
    with pytest.raises(RecipeError, match="model 'own' is unknown; add it to the MODELS table first"):
        register(OwnSystem())
    MODELS["own"] = OwnConfig
    with pytest.raises(RecipeError, match="belongs to no system"):
        system_of(config)
    register(OwnSystem())
    assert system_of("own") is SYSTEMS["own"] and system_of(Recipe(model=config)).name == "own"
    assert_system(SYSTEMS["own"], config, SPLITS)
    with pytest.raises(RecipeError, match="exists already"):
        register(OwnSystem())


def test_a_model_cannot_belong_to_two_systems() -> None:
    class Greedy(OwnSystem):
        name = "greedy"
        models = ("capsnet",)

    with pytest.raises(RecipeError, match="belongs to system 'capsnet' already"):
        register(Greedy())


# --- The instrument itself: each law must catch the system that breaks it ----------------------------------------


def drawn(context: object) -> dict[str, bytes]:
    return {"one": b"\x89PNG"}


@pytest.mark.parametrize(
    ("broken", "law"),
    [
        ({"name": ""}, "lower case"),
        ({"name": "Own"}, "lower case"),
        ({"models": ()}, "lists no model"),
        ({"models": ("capsnet",)}, "does not list the model 'cnn'"),
        ({"models": ("cnn", "nowhere")}, "model 'nowhere' is not in MODELS"),
        ({"metrics": ()}, "declares no metric"),
        ({"metrics": (Metric("", "lower"),)}, "has no name"),
        ({"metrics": (Metric("test_error", "down"),)}, "better = 'down'"),
        ({"metrics": (Metric("test_error", "lower"),)}, "'calibration_error' is measured, but not declared"),
        ({"metrics": (Metric("a", "lower"), Metric("a", "higher"))}, "declares a metric twice"),
        ({"controls": ("a", "a")}, "declares a control twice"),
        ({"figures": {"one": Figure("", drawn)}}, "is no sentence"),
        ({"figures": {"one": Figure("Nothing.", lambda context: {})}}, "draws nothing"),
        ({"figures": {"one": Figure("Text.", drawn, options=("capsules",))}}, "unknown options {'capsules'}"),
        ({"figures": {"one": Figure("Text.", lambda context: {"one": b"text"})}}, "is no PNG"),
        ({"figures": {"one": Figure("Never.", drawn, obstacle=lambda context: "is never drawn")}}, "is never drawn"),
        ({"redraws": True, "draw_prediction": lambda *_: b""}, "gave no PNG"),
        ({"predict": lambda *_: []}, "0 predictions came for 9 images"),
    ],
)
def test_a_broken_law_is_named(broken: dict[str, Any], law: str) -> None:
    system = type("Broken", (System,), {"name": "own", "models": ("cnn",), **broken})()
    with pytest.raises(AssertionError, match=law):
        assert_system(system, SMALL["cnn"], SPLITS)


def test_the_view_of_another_system_does_not_answer() -> None:
    system = type("Broken", (System,), {"name": "own", "models": ("cnn",)})()
    system.explorer_view = SYSTEMS["capsnet"].explorer_view
    with pytest.raises((AttributeError, AssertionError)):
        assert_system(system, SMALL["cnn"], SPLITS)


def test_names_with_a_star_cover_what_they_say() -> None:
    assert Metric("test_error_*crop", "lower").covers("test_error_13crop")
    assert not Metric("test_error_*crop", "lower").covers("test_error")
    assert metric_of("mnist_svm").form == "percent" and metric_of("glyphs_svm").form == "number"
    assert metric_of("something").better == "neither"
