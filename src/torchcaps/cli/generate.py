"""torchcaps generate"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

if TYPE_CHECKING:
    from torch import Tensor

    from torchcaps.evaluate.capsule_figures import Wish
    from torchcaps.models.poe import PoE
    from torchcaps.train import Recipe

__all__ = ["Generate"]

MOST = 64
"""More images in a row are no picture any more."""

What = Literal["all", "samples", "pairs", "sweeps", "wins", "reconstructions", "interpolation", "completion", "routing"]


@dataclass(frozen=True)
class Generate:
    """Draw what the capsules of a trained product of experts have learned, as PNG files.

    Example: torchcaps generate runs/poe-quick-0 --what samples --domain restricted --count 4
    """

    folder: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]
    """Folder of the run."""
    out: Path | None = None
    """Folder to draw into; RUN/pictures if not given."""
    what: What = "all"
    """samples: each capsule alone, a column each; pairs: two together; sweeps: each number of a capsule's pose moved;
    wins: the mean of the test images that a capsule wins, beside its samples; reconstructions, interpolation,
    completion, routing: of test images."""
    domain: Literal["empirical", "complete", "restricted"] = "empirical"
    """Where samples come from: the poses seen in training, a Gaussian, or its half that training visited."""
    capsule: tuple[int, ...] = ()
    """Only these capsules, counted from 0; all, or the most used ones, if not given."""
    count: Annotated[int, tyro.conf.arg(aliases=["-n"])] = 8
    """How many samples of a capsule, and how many test images."""
    seed: int = 0
    """Other samples and other test images."""

    def run(self) -> int:
        from torchcaps.evaluate.capsule_figures import Wish
        from torchcaps.evaluate.figures import require_matplotlib

        require_matplotlib()
        self._check()
        model, recipe = self._load()
        wish = Wish(self.capsule, self.count, self.domain, self.seed)
        self._draw(model, recipe, wish)
        return 0

    def _check(self) -> None:
        from torchcaps.errors import RecipeError

        if not 1 <= self.count <= MOST:
            raise RecipeError(f"--count {self.count} is asked for; 1 to {MOST} is wanted")
        if len(set(self.capsule)) < len(self.capsule):
            raise RecipeError(f"--capsule {' '.join(map(str, self.capsule))} names one twice; name each once")

    def _load(self) -> tuple[PoE, Recipe]:
        from torchcaps.errors import RecipeError
        from torchcaps.models.poe import PoE
        from torchcaps.train import load_run

        run = load_run(self.folder)
        if not isinstance(run.model, PoE):
            raise RecipeError(
                f"'{self.folder}' is a run of {type(run.model).__name__}, which draws no samples; "
                "name one of a product of experts (model.name = 'poe')"
            )
        return run.model, run.recipe

    def _draw(self, model: PoE, recipe: Recipe, wish: Wish) -> None:
        """Write every figure as soon as it is drawn; print the paths when the progress bar is gone."""
        from torchcaps.evaluate.capsule_figures import FROM_IMAGES, picture
        from torchcaps.train.display import progress
        from torchcaps.train.files import write_atomically

        folder, kinds = self.out or self.folder / "pictures", self._kinds(model)
        test = _test_images(recipe) if set(kinds) & set(FROM_IMAGES) else None
        _make(folder)
        paths = []
        for kind in progress(kinds, "drawing"):
            images = None if test is None else test if kind == "wins" else _some(test, self.count, self.seed)
            for name, png in picture(kind, model, wish, images).items():
                paths.append(folder / f"{name}.png")
                write_atomically(paths[-1], [png])
        print(*paths, sep="\n")

    def _kinds(self, model: PoE) -> list[str]:
        """The figures wanted; of all, those that so many capsules and images allow."""
        from torchcaps.evaluate.capsule_figures import FIGURES

        if self.what != "all":
            return [self.what]
        single = len(self.capsule or range(model.capsules)) < 2
        skipped = {"pairs"} if single else set()
        return [kind for kind in FIGURES if kind not in skipped | ({"interpolation"} if self.count < 2 else set())]


def _make(folder: Path) -> None:
    from torchcaps.errors import RecipeError

    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RecipeError(f"cannot make the folder '{folder}': {error.strerror}; choose another --out") from None


def _test_images(recipe: Recipe) -> Tensor:
    """[n c h w] in [0, 1]."""
    return recipe.data.load().test.images.float() / 255


def _some(images: Tensor, count: int, seed: int) -> Tensor:
    """Images picked by the seed."""
    from torchcaps.math.random import permutation

    return images[permutation(seed, 0, len(images))[:count]]
