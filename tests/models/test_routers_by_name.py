"""Every model takes every router by name, from a recipe and from the command line, or says in one line why not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from support.cli import talk
from support.small_models import SMALL, SPEC, images
from support.tiny_recipe import tiny_toml
from torchcaps.config import PositiveFloat, describe, flatten, from_dict, merge, parse_overrides, to_dict
from torchcaps.errors import RecipeError
from torchcaps.kernels.votes import Votes
from torchcaps.math.squash import norm, squash
from torchcaps.models import MODELS, MatrixConfig
from torchcaps.models.base import Model
from torchcaps.routing import EM, ROUTERS, Dynamic, Router, stack_info
from torchcaps.train.recipe import Recipe, load_recipe
from torchcaps.types import Batch, Capsules, RoutingInfo

ROUTED = [name for name in MODELS if any("routing.name" in key for key, _, _ in describe(MODELS[name]()))]
REFUSED = {
    ("poe", "em"): "beta_a, beta_u would never learn",
    ("poe", "vb"): "beta would never learn",
    ("poe", "attention"): "prior would never learn",
    **{("matrix-small", router): "norm = true does not go with" for router in ("dynamic", "attention", "uniform")},
}


@dataclass(frozen=True)
class Mine:
    """Settings of a router that is registered at run time."""

    sharpness: PositiveFloat = 2.0


def route_mine(votes: Votes, settings: Mine, trace: bool, beta: Tensor | float) -> tuple[Capsules, RoutingInfo]:
    """One step of attention to the mean vote, with a learned bias for each parent."""
    mean = votes.total(votes.new_pairs(1 / votes.children))
    coupling = votes.compete(settings.sharpness * votes.dot(mean) + beta).exp()
    pose = votes.total(coupling * votes.log_activation.exp().unsqueeze(-1))
    parents = Capsules(pose, norm(squash(pose)))
    return parents, stack_info([RoutingInfo(coupling, parents=parents if trace else None)])


@pytest.fixture
def mine() -> Iterator[None]:
    ROUTERS["mine"] = Router(Mine, route_mine, learned={"beta": 0.0})
    yield
    del ROUTERS["mine"]


def recipe_by_flags(model: str, *flags: str) -> Recipe:
    """The recipe of a small model, without a router in it, and the flags of a command line."""
    table = {"name": model, **to_dict(SMALL[model])}
    holder = table["energy"] if model == "poe" else table
    del holder["routing"]
    return from_dict(Recipe, merge({"name": "small", "model": table}, parse_overrides(flags)))


def flag(model: str, key: str) -> str:
    return f"--model.energy.routing.{key}" if model == "poe" else f"--model.routing.{key}"


def settings(recipe: Recipe) -> Any:
    config: Any = recipe.model
    return config.energy.routing if hasattr(config, "energy") else config.routing


def assert_learns(model: Model) -> None:
    """One objective and its gradient: finite, and there for all that is trained."""
    batch = Batch(images(4), torch.arange(4) % SPEC.classes, torch.arange(4))
    for stage in model.stages().values():
        stage.train()
        with torch.no_grad():
            stage.eval().prepare((batch.images * 255).byte())
        loss = stage.objective(batch, 0)["loss"]
        assert bool(loss.isfinite())
        if stage.by_gradient:
            loss.backward()
            assert [n for n, p in stage.named_parameters() if p.requires_grad and p.grad is None] == []


def test_these_are_all_models_with_capsules() -> None:
    assert set(ROUTED) == set(MODELS) - {"autoencoder", "cnn", "convnet"}


@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("model", ROUTED)
def test_every_model_takes_every_router_by_name(model: str, router: str) -> None:
    iterates = hasattr(ROUTERS[router].settings, "iterations")
    flags = (flag(model, "name"), router, *((flag(model, "iterations"), "2") if iterates else ()))
    if (model, router) in REFUSED:
        with pytest.raises(RecipeError, match=REFUSED[model, router]) as caught:
            recipe_by_flags(model, *flags)
        assert "\n" not in str(caught.value)
        return
    recipe = recipe_by_flags(model, *flags)
    assert type(settings(recipe)) is ROUTERS[router].settings
    assert settings(recipe).iterations == 2 if iterates else True
    assert from_dict(Recipe, to_dict(recipe)) == recipe
    torch.manual_seed(0)
    assert_learns(recipe.model.build(SPEC))


@pytest.mark.parametrize("model", [name for name in ROUTED if name != "poe"])
def test_a_router_of_ones_own_works_by_name(model: str, mine: None) -> None:
    recipe = recipe_by_flags(model, flag(model, "name"), "mine", flag(model, "sharpness"), "1.5")
    assert settings(recipe) == Mine(1.5)
    torch.manual_seed(0)
    network = recipe.model.build(SPEC)
    assert any(name.endswith("activation_bias.beta") for name, _ in network.named_parameters())
    assert_learns(network)


def test_products_of_experts_take_a_router_that_learns_nothing(mine: None) -> None:
    with pytest.raises(RecipeError, match="beta would never learn"):
        recipe_by_flags("poe", flag("poe", "name"), "mine")
    ROUTERS["mine"] = Router(
        Mine,
        lambda votes, settings, trace: route_mine(votes, settings, trace, 0.0),
        activation_is_length=True,
    )
    recipe = recipe_by_flags("poe", flag("poe", "name"), "mine")
    torch.manual_seed(0)
    assert_learns(recipe.model.build(SPEC))


@pytest.mark.parametrize("model", ROUTED)
def test_a_table_without_a_name_keeps_the_models_own_router(model: str) -> None:
    default = settings(from_dict(Recipe, {"model": {"name": model}}))
    key = "iterations" if hasattr(default, "iterations") else "sharpness"  # attention has one pass
    recipe = recipe_by_flags(model, flag(model, key), "4")
    assert type(settings(recipe)) is type(default) and getattr(settings(recipe), key) == 4
    bare = {key: value for key, value in flatten(to_dict(recipe)).items() if not key.endswith("routing.name")}
    assert len(bare) == len(flatten(to_dict(recipe))) - 1
    assert from_dict(Recipe, _nested(bare)) == recipe  # as stored before routers had names in recipes


def _nested(flat: dict[str, Any]) -> dict[str, Any]:
    tables: dict[str, Any] = {}
    for key, value in flat.items():
        *path, last = key.split(".")
        node = tables
        for step in path:
            node = node.setdefault(step, {})
        node[last] = value
    return tables


def test_a_misspelt_router_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(RecipeError, match="did you mean 'dynamic'"):
        recipe_by_flags("capsnet", "--model.routing.name", "dynamc")


def test_settings_of_another_router_are_refused() -> None:
    with pytest.raises(RecipeError, match=r"unknown key 'model\.routing\.damping'"):
        recipe_by_flags("matrix", "--model.routing.name", "dynamic", "--model.routing.damping", "0.1")


def test_class_cooling_is_of_em_routing_alone() -> None:
    assert MatrixConfig(routing=Dynamic()).class_routing == Dynamic()
    cooled = MatrixConfig(routing=EM(final_inverse_temperature=0.4), class_cooling=4).class_routing
    assert cooled == EM(final_inverse_temperature=0.1)


def test_the_command_line_trains_with_a_router_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, refused = talk("train")
    recipe = tiny_toml(tmp_path)
    flags = ("--train.epochs", "0.2", "--model.routing.name", "em")
    code, _, error = run(capsys, recipe, "--out", tmp_path / "run", *flags)
    assert code == 0, error
    assert "did you mean 'em'" in refused(capsys, recipe, "--out", tmp_path / "other", "--model.routing.name", "emm")


def test_a_recipe_that_sets_its_router_can_be_given_another() -> None:
    recipe = load_recipe("matrix-mnist-small", parse_overrides(["--model.routing.name", "dynamic"]))
    assert settings(recipe) == Dynamic()
    assert isinstance(settings(load_recipe("matrix-mnist-small")), EM)
