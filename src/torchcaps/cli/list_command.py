"""torchcaps list"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import tyro

from torchcaps.cli.next_steps import suggest_next

__all__ = ["List"]

WIDTH = 120
"""Longest line of a listing; longer texts go on below."""


class Setting(NamedTuple):
    """One key of a recipe."""

    type: str
    value: str


@dataclass(frozen=True)
class List:
    """List recipes, models, routers and data sets; or every key of one recipe, with its type and value.

    Example: torchcaps list capsnet-glyphs
    """

    recipe: tyro.conf.Positional[str | None] = None
    """Name of a recipe or path of a .toml file: show its keys, as `torchcaps train RECIPE --key value` sets them."""
    json: bool = False
    """Print as JSON."""

    def run(self) -> int:
        """Print the listing; returns the exit code."""
        # The same content twice: as tables for JSON, and as lines for people
        if self.recipe is None:
            tables = {"recipes": _recipes(), **_registries()}
            lines = list(_overview(tables))
        else:
            settings = _settings(self.recipe)
            tables = {flag: setting._asdict() for flag, setting in settings.items()}
            lines = list(_setting_lines(self.recipe, settings))
        print(json.dumps(tables, indent=2) if self.json else "\n".join(lines))
        words = ("list", "capsnet-glyphs") if self.recipe is None else ("train", self.recipe, "--dry-run")
        suggest_next(*words)
        return 0


def _recipes() -> dict[str, str]:
    """Collect the sentence of every recipe."""
    from torchcaps.train import load_recipe, recipe_names

    return {name: load_recipe(name).about for name in recipe_names()}


def _registries() -> dict[str, dict[str, str]]:
    """Collect the first line of documentation of every model, router and data set."""
    from torchcaps.data import DATASETS
    from torchcaps.models import MODELS
    from torchcaps.routing import ROUTERS

    routers = {name: router.settings for name, router in ROUTERS.items()}
    tables: dict[str, Mapping[str, type]] = {"models": MODELS, "routers": routers, "data": DATASETS}
    return {
        title: {name: (entry.__doc__ or "").splitlines()[0] for name, entry in table.items()}
        for title, table in tables.items()
    }


def _overview(tables: Mapping[str, Mapping[str, str]]) -> Iterator[str]:
    """Write the listing: recipes under the name of their system, then the other tables."""
    from torchcaps.systems import SYSTEMS, system_of
    from torchcaps.train import load_recipe

    recipes = tables["recipes"]
    # Recipes, one group for each system
    members = {name: system_of(load_recipe(name)).name for name in recipes}
    yield "RECIPES: torchcaps train NAME trains one, torchcaps list NAME shows its keys"
    for system in SYSTEMS.values():
        yield f"\n{system.title[:1].upper()}{system.title[1:]}{_citation(system.paper)}"
        yield from _entries((name, text) for name, text in recipes.items() if members[name] == system.name)
    # Models, routers and data sets, each with the key that selects one
    titles = {
        "models": "MODELS: [model] name in a recipe, --model.name on the command line",
        "routers": "ROUTERS: [model.routing] name, --model.routing.name",
        "data": "DATA SETS: [data] name, --data.name",
    }
    for key, title in titles.items():
        yield f"\n{title}"
        yield from _entries(tables[key].items())


def _citation(paper: str) -> str:
    """Shorten "Hauser 2019, Training ..." to " (Hauser 2019)"."""
    found = re.match(r".*?\b\d{4}\b", paper)
    return f" ({found[0]})" if found else ""


def _entries(entries: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Write names and texts in two columns; a long text goes on below itself."""
    rows = list(entries)
    indent = max((len(name) for name, _ in rows), default=0) + 4
    for name, text in rows:
        yield textwrap.fill(text, WIDTH, initial_indent=f"  {name}".ljust(indent), subsequent_indent=" " * indent)


def _settings(name: str) -> dict[str, Setting]:
    """Collect every key of a recipe as a flag, with the keys of each stage if its model has several."""
    from torchcaps.config import describe
    from torchcaps.train import load_recipe
    from torchcaps.train.recipe import stage_names, with_all_stages

    recipe = load_recipe(name)
    # Written out, the stages show settings that they otherwise inherit; with one stage that would repeat everything
    rows = describe(with_all_stages(recipe) if len(stage_names(recipe.model)) > 1 else recipe)
    return {f"--{key}": Setting(kind, value) for key, kind, value in rows if key != "stages"}


def _setting_lines(name: str, settings: Mapping[str, Setting]) -> Iterator[str]:
    """Write flag, value and type of every key in columns."""
    yield f"torchcaps train {name} takes these keys (flag, value in the recipe, type):\n"
    flags = max(len(flag) for flag in settings)
    # Values longer than 30 do not widen the column: one long list would push the types far to the right
    values = max(len(setting.value) for setting in settings.values() if len(setting.value) <= 30)
    for flag, setting in settings.items():
        yield f"  {flag:{flags}}  {setting.value:{values}}  {setting.type}"
