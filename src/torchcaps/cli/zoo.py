"""torchcaps zoo"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from torchcaps.cli.next_steps import suggest_next

__all__ = ["Zoo"]

Task = Literal["list", "show", "check", "build"]


@dataclass(frozen=True)
class Zoo:
    """List the trained models that ship with torchcaps, show the card of one, check its score, or build one from a run.

    Example: torchcaps zoo list

    Example: torchcaps zoo show capsnet-digits

    Example: torchcaps zoo check capsnet-digits

    Example: torchcaps zoo build my-digits --run runs/capsnet-mnist-small-0 --commit 1a2b3c4 --about "Digits."

    Every command that takes a RUN also takes the name of a model: torchcaps predict capsnet-digits digit.png. `build`
    without --run trains a shipped model again by its own recipe first.
    """

    task: Annotated[tyro.conf.Positional[Task], tyro.conf.arg(metavar="{list,show,check,build}")] = "list"
    """list: names and results; show: the card;
    check: score the test images that ship with a model and compare with its card; build: make the folder of a model."""
    name: Annotated[tyro.conf.Positional[str | None], tyro.conf.arg(metavar="[NAME]")] = None
    """Of a model; for list and check a pattern such as "matrix*"."""
    run_folder: Annotated[Path | None, tyro.conf.arg(name="run", metavar="RUN")] = None
    """build: the finished run; trained by the model's recipe into runs/NAME if not given."""
    out: Path = Path("zoo")
    """build: folder in which the model's own folder is made."""
    about: str | None = None
    """build: one sentence about what the model does."""
    commit: str | None = None
    """build: commit of the repository by whose code the run was trained."""
    trained_by: Annotated[str | None, tyro.conf.arg(name="command")] = None
    """build: the command that trained it, if that was not torchcaps train with a recipe that ships."""
    note: str = ""
    """build: what else a user must know."""
    result: Path | None = None
    """build: what torchcaps evaluate wrote of these weights; measured now if not given."""
    only: tuple[str, ...] = ("all",)
    """build: controls to measure, as for torchcaps evaluate."""
    reference: Path | None = None
    """build: products of expert capsules, folder of the reference classifier."""
    images: int = 100
    """build: how many test images go along."""
    json: bool = False
    """Print as JSON."""

    def run(self) -> int:
        """Do the task; returns the exit code."""
        tasks = {"list": self._list, "show": self._show, "check": self._check, "build": self._build}
        return tasks[self.task]()

    def _list(self) -> int:
        import json

        from torchcaps.config import to_dict
        from torchcaps.systems.report import text_table
        from torchcaps.zoo import list_models, model_card

        cards = [model_card(name) for name in list_models(self.name or "*")]
        if self.json:
            print(json.dumps([to_dict(card) for card in cards], indent=2))
            return 0
        rows = [["model", "system", "data", "parameters", "result"]]
        rows += [[card.name, card.system, card.data, f"{card.parameters:,}", card.headline] for card in cards]
        print(text_table(rows))
        if cards:
            suggest_next("zoo", "show", cards[0].name)
        return 0

    def _show(self) -> int:
        import json

        from torchcaps.config import to_dict
        from torchcaps.train.run import shipped_models
        from torchcaps.zoo import model_card
        from torchcaps.zoo.card import README

        name = self._named()
        card = model_card(name)
        text = (shipped_models()[name] / README).read_text()
        print(json.dumps(to_dict(card), indent=2) if self.json else text, end="\n" if self.json else "")
        suggest_next("explore", name)
        return 0

    def _check(self) -> int:
        import json

        from torchcaps.errors import CheckpointError, suggestion
        from torchcaps.train import load_run
        from torchcaps.zoo import list_models, model_card, spot_check

        names = list_models(self.name or "*")
        if not names:
            known = suggestion(str(self.name), list_models())
            raise CheckpointError(f"no model '{self.name}' ships with torchcaps{known}")
        found = {name: spot_check(load_run(name)) for name in names}
        stated = {name: model_card(name).check for name in names}
        if self.json:
            print(json.dumps({name: {"found": found[name], "card": stated[name]} for name in names}, indent=2))
        else:
            for name in names:
                same = "as its card says" if _same(found[name], stated[name]) else f"its card says {stated[name]}"
                print(f"{name}: {', '.join(f'{key} {value:g}' for key, value in found[name].items())}, {same}")
            suggest_next("explore", names[0])
        return 0 if all(_same(found[name], stated[name]) for name in names) else 1

    def _build(self) -> int:
        from torchcaps.cli.evaluate import KEYWORDS
        from torchcaps.errors import RecipeError
        from torchcaps.train import load_run
        from torchcaps.train.loop import train
        from torchcaps.train.run import shipped_models
        from torchcaps.zoo import BuildSettings, build_model_folder, model_card

        name = self._named()
        # A model that ships may be built again without another sentence about it
        is_known = name in shipped_models()
        about = model_card(name).summary if self.about is None and is_known else self.about
        if about is None or self.commit is None:
            raise RecipeError("a model is built with --about SENTENCE and --commit HASH, which no run knows; give both")
        # Without a run: train the shipped model's own recipe again
        folder = self.run_folder
        if folder is None:
            if not is_known:
                raise RecipeError(f"'{name}' does not ship with torchcaps, so its recipe is not known; give --run RUN")
            folder = Path("runs") / name
            train(load_run(name).recipe, folder, resume="auto")
        settings = BuildSettings(
            summary=about,
            commit=self.commit,
            command=self.trained_by,
            note=self.note,
            images=self.images,
            result=self.result,
            only=KEYWORDS.get(self.only, self.only),
            reference=self.reference,
        )
        card = build_model_folder(folder, self.out / name, settings)
        print(f"{self.out / name}: {card.headline}")
        suggest_next("explore", self.out / name)
        return 0

    def _named(self) -> str:
        from torchcaps.errors import RecipeError

        if self.name is None:
            raise RecipeError(f"torchcaps zoo {self.task} needs the name of a model; torchcaps zoo lists them")
        return self.name


def _same(found: dict[str, float], stated: dict[str, float]) -> bool:
    """Tell whether scores are equal up to the rounding of another machine."""
    return found.keys() == stated.keys() and all(abs(found[key] - stated[key]) < 1e-4 for key in found)
