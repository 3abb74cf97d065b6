"""torchcaps train"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from torchcaps.cli.next_steps import suggest_next
from torchcaps.config import Table, flatten, merge, parse_overrides, to_dict
from torchcaps.config.formatting import value_text
from torchcaps.errors import RecipeError

if TYPE_CHECKING:
    from torchcaps.train import Recipe
    from torchcaps.train.validation import FinalScore

__all__ = ["TRAIN_FLAGS", "Train"]


@dataclass(frozen=True)
class Train:
    """Train a recipe into a folder, or go on with a run that was interrupted.

    Example: torchcaps train capsnet-glyphs --out runs/first --train.epochs 2 --model.routing.iterations 1

    Example: torchcaps train --resume runs/first

    Example: torchcaps train capsnet-glyphs --out runs/job-7 --resume auto

    Any key of the recipe can be set: `torchcaps list RECIPE` shows them. A model trained in several
    stages also takes settings for one of them: --stages.NAME.train.epochs 2. Under torchrun the batch is shared by
    the processes: torchrun --nproc-per-node 2 -m torchcaps train RECIPE.
    """

    recipe: Annotated[tyro.conf.Positional[str | None], tyro.conf.arg(metavar="[RECIPE]")] = None
    """Name of a recipe (`torchcaps list`) or path of a .toml file; not needed with --resume FOLDER."""
    out: Path | None = None
    """Folder of the run; runs/RECIPE-SEED if not given."""
    resume: Annotated[str | None, tyro.conf.arg(metavar="[FOLDER|auto]")] = None
    """Go on from the last checkpoint of a folder, by the recipe in it; without a value, of --out.
    train.save_every and train.log_every may be set anew, and train.epochs if no learning rate depends on them.
    "auto", for job queues, starts the run if there is none."""
    tensorboard: bool = False
    """Also write TensorBoard events into the folder."""
    quiet: bool = False
    """No progress bar."""
    dry_run: bool = False
    """Print the whole recipe as TOML, the number of parameters and the steps of each stage, and train nothing."""
    overrides: tyro.conf.Suppress[tuple[str, ...]] = ()

    def run(self) -> int:
        from torchcaps.train import Recipe, train
        from torchcaps.utils.distributed import restart_count

        recipe, folder = self._recipe_and_folder()
        if self.dry_run:
            _describe(recipe if isinstance(recipe, Recipe) else recipe())
            if self.recipe is None:
                suggest_next("train", "--resume", folder)
            else:
                suggest_next("train", self.recipe, *self.overrides, "--out", folder)
            return 0
        # "auto" starts or resumes; any other value, also the empty one, is the wish to resume
        resume: bool | Literal["auto"] = "auto" if self.resume == "auto" else self.resume is not None
        # After a process died, torchrun starts all of them again with the same words: go on from the last checkpoint
        if restart_count() > 0:
            resume = "auto"
        outcome = train(recipe, folder, resume=resume, quiet=self.quiet, tensorboard=self.tensorboard)
        # Of several processes, only the first prints
        if os.environ.get("RANK", "0") != "0":
            return 0 if outcome.finished else 1
        if not outcome.finished:
            command = f"torchcaps train --resume {shlex.quote(str(folder))}"
            print(f"stopped at step {outcome.step}; go on with: {command}", file=sys.stderr)
            return 1
        steps = "1 step" if outcome.step == 1 else f"{outcome.step} steps"
        print(f"{folder}: {steps} in {outcome.seconds:.0f} s{_tested(outcome.test)}")
        suggest_next("evaluate", folder)
        return 0

    def _recipe_and_folder(self) -> tuple[Recipe | Callable[[], Recipe], Path]:
        """The recipe by its name or how to read it out of the folder to go on with, and the folder of the run."""
        from torchcaps.train import load_recipe
        from torchcaps.train.recipe import recipe_of
        from torchcaps.train.run import recipe_in

        changes = parse_overrides(self.overrides)
        # The folder: of --resume, or else of --out; the two must agree
        given = Path(self.resume) if self.resume not in (None, "", "auto") else None
        if given is not None and self.out is not None and given != self.out:
            raise RecipeError(f"--resume {given} and --out {self.out} name two folders; leave --out away")
        folder = given or self.out
        # The recipe by its name; the folder has a default then
        if self.recipe is not None:
            recipe = load_recipe(self.recipe, changes)
            _check_effect(self.recipe, recipe, changes)
            return recipe, folder or Path("runs") / f"{recipe.name}-{recipe.seed}"
        # Without a name, the recipe must come out of a folder with a run
        if self.resume in (None, "auto") or folder is None:
            raise RecipeError(
                "no recipe is named; write torchcaps train RECIPE, or to go on: torchcaps train --resume FOLDER"
            )
        # Read when process 0 asks for it: the others may have no such folder
        return lambda: recipe_of(merge(to_dict(recipe_in(folder)), changes), where=str(folder)), folder


TRAIN_FLAGS = {"--help"} | {
    "--" + field.name.replace("_", "-") for field in fields(Train) if field.name not in ("recipe", "overrides")
}
"""The flags of the command itself; all others are settings of the recipe."""


def _check_effect(name: str, recipe: Recipe, changes: Table) -> None:
    """Refuse a setting of training that every stage of the recipe sets for itself, so that it would change nothing."""
    from torchcaps.train.recipe import stage_names, stages_that_set

    stages = stage_names(recipe.model)
    for key in flatten(changes):
        if len(stages) > 1 and stages_that_set(name, key) == set(stages):
            options = " or ".join(f"--stages.{stage}.{key}" for stage in stages)
            raise RecipeError(f"--{key} changes nothing, since every stage of '{name}' has its own; say {options}")


def _tested(score: FinalScore | None) -> str:
    """Return the test accuracy in words; one that is no better than chance is said aloud."""
    from torchcaps.utils.notices import notice

    if score is None:
        return ""
    if score.is_chance:
        notice(
            f"this run has learned nothing: the largest class alone is {score.chance:.0%} of the test images; try a "
            "lower --optimizer.lr, more --train.epochs, or more images"
        )
    return f", test accuracy {score.accuracy:.1%} of {score.images} images"


def _describe(recipe: Recipe) -> None:
    """Print what would be trained: every setting, and as comments the size of the model and the steps of each stage."""
    from torchcaps.train.model_sizes import model_outline
    from torchcaps.train.recipe import stage_names, stage_of
    from torchcaps.train.train_state import shrink_batches

    # The data is loaded, since the number of steps depends on the number of images
    train = recipe.data.load().train
    recipe = shrink_batches(recipe, len(train))
    model = model_outline(recipe, train.spec)
    for key, value in flatten(to_dict(recipe)).items():
        print(f"{key} = {value_text(value, bare=False)}")
    print(f"\n# {sum(parameter.numel() for parameter in model.parameters()):,} parameters, {len(train):,} images")
    for name in stage_names(recipe.model):
        print(f"# stage {name}: {stage_of(recipe, name).train.steps(len(train)):,} steps")
