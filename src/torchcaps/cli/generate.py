"""torchcaps generate"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

if TYPE_CHECKING:
    from torch import Tensor

    from torchcaps.data import Dataset
    from torchcaps.models import CapsNet, MatrixCaps, PoE
    from torchcaps.models.sparse import Competitors
    from torchcaps.train import Recipe

__all__ = ["Generate"]

MOST = 64
"""More images in a row are no picture any more."""

LOOKED_AT = 10_000
"""Of more test images a classifier, or a sparse network, is shown so many, picked by the seed."""

What = Literal[
    "all", "samples", "pairs", "sweeps", "wins", "reconstructions", "interpolation", "completion", "routing",
    "perturbations", "multimnist", "calibration", "votes", "parts", "ranked", "frequencies", "equivariances",
]  # fmt: skip


@dataclass(frozen=True)
class Generate:
    """Draw what the capsules of a trained product of experts, CapsNet, matrix or sparse network do, as PNG files.

    Example: torchcaps generate runs/poe-quick-0 --what samples --domain restricted --count 4

    Example: torchcaps generate runs/capsnet-mnist-0 --what perturbations --capsule 4 9

    Example: torchcaps generate runs/sparse-affnist-0 --beside runs/dense-affnist-0 runs/capsnet-affnist-0
    """

    folder: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]
    """Folder of the run."""
    out: Path | None = None
    """Folder to draw into; RUN/pictures if not given."""
    what: What = "all"
    """Of products of experts - samples: each capsule alone, a column each; pairs: two together; sweeps: each number of
    a capsule's pose moved; wins: the mean of the test images that a capsule wins, beside its samples; reconstructions,
    interpolation, completion, routing: of test images.
    Of a CapsNet - reconstructions: of test images, also the worst and those with a wrong answer; perturbations: each
    dimension of a class's capsule moved; routing: coupling by iteration; calibration: how often it is right when it is
    how sure; multimnist: two digits redrawn in two colours.
    Of matrix capsules - votes: how far the votes for each class capsule are from its pose, by iteration; routing;
    calibration.
    Of sparse capsules - parts: a test image redrawn from each capsule alone, and from all but each; ranked: the support
    of an image's capsules from the largest down; frequencies: how often each capsule has each rank; equivariances: each
    number of the first capsule's pose from -1 to 1."""
    domain: Literal["empirical", "complete", "restricted"] | None = None
    """Where samples of experts come from: the poses seen in training (empirical, if not given), a Gaussian, or its half
    that training visited."""
    capsule: tuple[int, ...] = ()
    """Only these capsules, counted from 0; all, or the most used ones, if not given."""
    count: Annotated[int, tyro.conf.arg(aliases=["-n"])] = 8
    """How many samples of a capsule, and how many test images."""
    seed: int = 0
    """Other samples and other test images."""
    beside: tuple[Path, ...] = ()
    """Folders of other runs, of sparse capsules or of a CapsNet: ranked has a curve of each, on its own test images."""

    def run(self) -> int:
        from torchcaps.errors import RecipeError
        from torchcaps.evaluate.figures import require_matplotlib
        from torchcaps.models import CapsNet, MatrixCaps, PoE
        from torchcaps.models.sparse import Competitors
        from torchcaps.train import load_run

        require_matplotlib()
        self._check()
        run = load_run(self.folder)
        if isinstance(run.model, Competitors):
            self._sparse(run.model, run.recipe)
        elif self.beside:
            raise RecipeError("--beside adds curves to those of sparse capsules, and this is another run; leave it out")
        elif isinstance(run.model, PoE):
            self._experts(run.model, run.recipe)
        elif isinstance(run.model, CapsNet | MatrixCaps):
            self._classes(run.model, run.recipe)
        else:
            raise RecipeError(
                f"'{self.folder}' is a run of {type(run.model).__name__}, of which there are no pictures; "
                "name one of a product of experts, of a CapsNet, of matrix or of sparse capsules"
            )
        return 0

    def _check(self) -> None:
        from torchcaps.errors import RecipeError

        if not 1 <= self.count <= MOST:
            raise RecipeError(f"--count {self.count} is asked for; 1 to {MOST} is wanted")
        if len(set(self.capsule)) < len(self.capsule):
            raise RecipeError(f"--capsule {' '.join(map(str, self.capsule))} names one twice; name each once")

    def _experts(self, model: PoE, recipe: Recipe) -> None:
        from torchcaps.evaluate.capsule_figures import FIGURES, FROM_IMAGES, Wish, picture

        single = len(self.capsule or range(model.capsules)) < 2
        skipped = ({"pairs"} if single else set()) | ({"interpolation"} if self.count < 2 else set())
        kinds = self._kinds(FIGURES, [kind for kind in FIGURES if kind not in skipped])
        test = _test_images(recipe) if set(kinds) & set(FROM_IMAGES) else None
        wish = Wish(self.capsule, self.count, self.domain or "empirical", self.seed)

        def draw(kind: str) -> dict[str, bytes]:
            images = None if test is None else test if kind == "wins" else _some(test, self.count, self.seed)
            return picture(kind, model, wish, images)

        self._draw(kinds, draw)

    def _classes(self, model: CapsNet | MatrixCaps, recipe: Recipe) -> None:
        from torchcaps.evaluate import capsnet_figures, matrix_figures
        from torchcaps.evaluate.capsule_figures import Wish
        from torchcaps.evaluate.factors import class_capsules
        from torchcaps.models import CapsNet

        self._refuse_domain()
        figures: Any = capsnet_figures if isinstance(model, CapsNet) else matrix_figures
        self._kinds(figures.FIGURES, [])  # a wrong one is refused before data are loaded
        data = _test_set(recipe, self.seed)
        kinds, wish = (
            self._kinds(figures.FIGURES, figures.kinds_of(data)),
            Wish(self.capsule, self.count, seed=self.seed),
        )
        seen = class_capsules(model, data) if set(kinds) & set(figures.FROM_ALL) else None
        self._draw(kinds, lambda kind: figures.picture(kind, model, wish, data, seen))

    def _sparse(self, model: Competitors, recipe: Recipe) -> None:
        from torchcaps.errors import RecipeError
        from torchcaps.evaluate.capsule_figures import Wish
        from torchcaps.evaluate.sparse_figures import FIGURES, Scene, picture

        self._refuse_domain()
        kinds = self._kinds(FIGURES, list(FIGURES))
        if self.beside and "ranked" not in kinds:
            raise RecipeError(f"--beside adds curves to the figure ranked, and {self.what} is drawn; leave it out")
        wish, beside = Wish(self.capsule, self.count, seed=self.seed), self._load_beside()
        scene = Scene(model, wish, _test_set(recipe, self.seed), self.folder.resolve().name, beside)
        self._draw(kinds, lambda kind: picture(kind, scene))

    def _load_beside(self) -> dict[str, tuple[CapsNet | Competitors, Dataset]]:
        """Folder's name -> model and test images of a run to compare with."""
        from torchcaps.errors import RecipeError
        from torchcaps.models import CapsNet
        from torchcaps.models.sparse import Competitors
        from torchcaps.train import load_run

        names = [folder.resolve().name for folder in (self.folder, *self.beside)]
        if len(set(names)) < len(names):
            raise RecipeError(f"the runs are called {', '.join(names)}; each needs a name of its own")
        found: dict[str, tuple[CapsNet | Competitors, Dataset]] = {}
        for folder, name in zip(self.beside, names[1:], strict=True):
            model, recipe, *_ = load_run(folder)
            if not isinstance(model, CapsNet | Competitors):
                kind = type(model).__name__
                raise RecipeError(f"'{folder}' is a run of {kind}; --beside wants sparse capsules or a CapsNet")
            found[name] = model, _test_set(recipe, self.seed)
        return found

    def _refuse_domain(self) -> None:
        from torchcaps.errors import RecipeError

        if self.domain is not None:
            raise RecipeError("--domain is where experts take samples from, and this model draws none; leave it out")

    def _kinds(self, known: Iterable[str], by_default: list[str]) -> list[str]:
        """The figures wanted: one of those known, or all that are drawn by default."""
        from torchcaps.errors import RecipeError

        if self.what not in ("all", *known):
            raise RecipeError(f"--what {self.what} is no picture of this kind of model; choose: {', '.join(known)}")
        return by_default if self.what == "all" else [self.what]

    def _draw(self, kinds: list[str], draw: Callable[[str], dict[str, bytes]]) -> None:
        """Write every figure as soon as it is drawn; print the paths when the progress bar is gone."""
        from torchcaps.train.display import progress
        from torchcaps.train.files import write_atomically

        folder = self.out or self.folder / "pictures"
        _make(folder)
        paths = []
        for kind in progress(kinds, "drawing"):
            for name, png in draw(kind).items():
                paths.append(folder / f"{name}.png")
                write_atomically(paths[-1], [png])
        print(*paths, sep="\n")


def _make(folder: Path) -> None:
    from torchcaps.errors import RecipeError

    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RecipeError(f"cannot make the folder '{folder}': {error.strerror}; choose another --out") from None


def _test_images(recipe: Recipe) -> Tensor:
    """[n c h w] as a model is shown them."""
    return recipe.data.load().test.shown()


def _test_set(recipe: Recipe, seed: int) -> Dataset:
    """The test images, or if there are many some of them."""
    from torchcaps.data import subset
    from torchcaps.math.random import permutation

    test = recipe.data.load().test
    return test if len(test) <= LOOKED_AT else subset(test, permutation(seed, 0, len(test))[:LOOKED_AT])


def _some(images: Tensor, count: int, seed: int) -> Tensor:
    """Images picked by the seed."""
    from torchcaps.math.random import permutation

    return images[permutation(seed, 0, len(images))[:count]]
