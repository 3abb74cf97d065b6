"""torchcaps predict"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

if TYPE_CHECKING:
    from torchcaps.data import Dataset
    from torchcaps.models import Model
    from torchcaps.systems import System
    from torchcaps.systems.prediction import Prediction

__all__ = ["Predict"]


@dataclass(frozen=True)
class Predict:
    """Classify pictures, PNG, JPEG, GIF or WebP files, with a trained run.

    Example: torchcaps predict runs/capsnet-mnist-0 digit.png --fit --invert --out redrawn
    """

    folder: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]
    """Folder of the run."""
    pictures: Annotated[tyro.conf.Positional[tuple[Path, ...]], tyro.conf.arg(metavar="PICTURE ...")]
    """PNG, JPEG, GIF or WebP files."""
    all: bool = False
    """Print the scores of all classes: of capsules, their lengths."""
    threshold: float | None = None
    """Name every class whose score is above this, from 0 to 1, instead of the best one; 0.5 where images show several
    things (MultiMNIST)."""
    fit: bool = False
    """Scale pictures of another size to that of the run's, in proportion, and turn color into gray if need be."""
    invert: bool = False
    """Swap dark and light: for dark drawings on light ground."""
    out: Path | None = None
    """CapsNet: folder for a PNG file a picture, which shows it beside what the longest capsule redraws."""
    json: bool = False
    """Print the predictions as JSON."""

    def run(self) -> int:
        from torchcaps.evaluate.classification import load_classifier
        from torchcaps.systems import system_of
        from torchcaps.systems.prediction import read_pictures
        from torchcaps.systems.run_folders import find_run
        from torchcaps.utils.files import make_folder

        # Refuse what can be refused before pictures are read
        self._check()
        run = load_classifier(find_run(self.folder))
        system = system_of(run.recipe)
        if self.out is not None:
            self._check_drawing(run.model, system)
        # Read the pictures and classify them
        data = read_pictures(run, self.pictures, fit=self.fit, invert=self.invert)
        predictions = system.predict(run, data, self.threshold)
        # Draw first, so that what is printed can name the files
        sheets: list[Path] = []
        if self.out is not None:
            sheets = _targets(make_folder(self.out), self.pictures)
            self._draw(system, run.model, data, predictions, sheets)
        if self.json:
            self._print_json(data, predictions, sheets)
        else:
            self._print_table(data, predictions)
            print(*sheets, sep="\n", end="\n" if sheets else "")
        return 0

    def _check(self) -> None:
        from torchcaps.errors import RecipeError

        if not self.pictures:
            raise RecipeError(f"no picture to classify; name some, as in: torchcaps predict {self.folder} digit.png")
        if self.threshold is not None and not 0 <= self.threshold <= 1:
            raise RecipeError(f"--threshold {self.threshold:g} is asked for; 0 to 1 is wanted")

    def _check_drawing(self, model: Model, system: System) -> None:
        from torchcaps.errors import RecipeError
        from torchcaps.evaluate.figures import require_matplotlib

        require_matplotlib()
        if not system.redraws:
            raise RecipeError(f"'{self.folder}' is a run of {type(model).__name__}, which redraws nothing; omit --out")

    def _draw(
        self,
        system: System,
        model: Model,
        data: Dataset,
        predictions: Sequence[Prediction],
        sheets: Sequence[Path],
    ) -> None:
        """Write a sheet a picture."""
        from torchcaps.utils.files import write_atomically
        from torchcaps.utils.progress import progress

        for n, path in enumerate(progress(sheets, "drawing")):
            write_atomically(path, [system.draw_prediction(model, data, n, predictions[n])])

    def _print_table(self, data: Dataset, predictions: Sequence[Prediction]) -> None:
        from torchcaps.systems.report import text_table

        # Without --all the rows end after the score: `names` is empty, and so is the slice of scores below
        names = data.names if self.all else ()
        rows = [["picture", "class", "score", *names]]
        for path, one in zip(self.pictures, predictions, strict=True):
            named = ", ".join(data.name_of(j) for j in one.named) or "none"
            scores = ", ".join(f"{one.scores[j]:.3f}" for j in one.named) or "-"
            rows.append([str(path), named, scores, *(f"{s:.3f}" for s in one.scores[: len(names)].tolist())])
        print(text_table(rows))

    def _print_json(self, data: Dataset, predictions: Sequence[Prediction], sheets: Sequence[Path]) -> None:
        """Print a list: picture, classes [{class, score}]; with --all scores {class: score}, with --out sheet."""
        import json

        entries = []
        for n, (path, one) in enumerate(zip(self.pictures, predictions, strict=True)):
            scores = [round(score, 6) for score in one.scores.tolist()]
            named = [{"class": data.name_of(j), "score": scores[j]} for j in one.named]
            every = {"scores": dict(zip(data.names, scores, strict=True))} if self.all else {}
            sheet = {"sheet": str(sheets[n])} if sheets else {}
            entries.append({"picture": str(path), "classes": named, **every, **sheet})
        print(json.dumps(entries, indent=2))


def _targets(out: Path, pictures: Sequence[Path]) -> list[Path]:
    """Choose a file for each picture's sheet, numbered where two would have one name, or a picture has it."""
    # A picture itself is never overwritten, nor a sheet of this call
    taken = {path.resolve() for path in pictures}
    targets = []
    for picture in pictures:
        name = f"{picture.stem}-redrawn"
        n = 1
        while (target := out / f"{name}{f'-{n}' if n > 1 else ''}.png").resolve() in taken:
            n += 1
        taken.add(target.resolve())
        targets.append(target)
    return targets
