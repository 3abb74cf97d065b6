"""torchcaps list"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import tyro

__all__ = ["List"]


@dataclass(frozen=True)
class List:
    """List recipes, models, routers and data sets; or every key of one recipe.

    Example: torchcaps list capsnet-glyphs
    """

    recipe: tyro.conf.Positional[str | None] = None
    """A recipe whose keys to show, as `--key value` would set them."""
    json: bool = False
    """Print as JSON."""

    def run(self) -> int:
        data = self._everything() if self.recipe is None else self._keys(self.recipe)
        print(json.dumps(data, indent=2) if self.json else "\n".join(_lines(data)))
        return 0

    def _everything(self) -> dict[str, Any]:
        from torchcaps.data import DATASETS
        from torchcaps.models import MODELS
        from torchcaps.routing import ROUTERS
        from torchcaps.train import load_recipe, recipe_names

        recipes = {name: load_recipe(name).about for name in recipe_names()}
        tables = {"models": MODELS, "data": DATASETS, "routers": {n: r.settings for n, r in ROUTERS.items()}}
        about = {kind: {n: (c.__doc__ or "").splitlines()[0] for n, c in t.items()} for kind, t in tables.items()}
        return {"recipes": recipes, **about}

    def _keys(self, name: str) -> dict[str, Any]:
        from torchcaps.config import describe
        from torchcaps.train import load_recipe
        from torchcaps.train.recipe import stage_names, with_all_stages

        recipe = load_recipe(name)
        rows = describe(with_all_stages(recipe) if len(stage_names(recipe.model)) > 1 else recipe)
        keys = {f"--{key}": f"{value}   ({kind})" for key, kind, value in rows if key != "stages"}
        return {f"recipe {name}": keys}


def _lines(data: dict[str, Any]) -> list[str]:
    lines = []
    for title, entries in data.items():
        width = max((len(key) for key in entries), default=0)
        lines += [title, *(f"  {key:{width}}  {text}" for key, text in entries.items()), ""]
    return lines[:-1]
