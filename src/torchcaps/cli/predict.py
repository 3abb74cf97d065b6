"""torchcaps predict"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import tyro

from torchcaps.cli.next_steps import suggest_next

if TYPE_CHECKING:
    from torchcaps.data import Dataset
    from torchcaps.models import Model
    from torchcaps.systems import System
    from torchcaps.systems.prediction import Prediction
    from torchcaps.train.run import TrainedRun

__all__ = ["Predict"]


@dataclass(frozen=True)
class Predict:
    """Classify pictures with a trained run; of capsules learned without labels, say which one each picture is in.

    Example: torchcaps predict capsnet-digits digit.png --fit --invert --out redrawn

    A picture that cannot be read is named on standard error and does not stop the others (exit code 2).
    """

    folder: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]
    """Folder of the run, or the name of a shipped model (`torchcaps zoo`)."""
    pictures: Annotated[tyro.conf.Positional[tuple[Path, ...]], tyro.conf.arg(metavar="PICTURE ...")]
    """PNG, JPEG, GIF, WebP or BMP files."""
    all: bool = False
    """Print the scores of all classes: of capsules, their lengths, how active each is, or 1 to 0 by rank."""
    threshold: float | None = None
    """Name every class whose score is above this, from 0 to 1, instead of the best one;
    0.5 where images show several things (MultiMNIST)."""
    fit: bool = False
    """Scale pictures of another size to that of the run's, in proportion, and turn color into gray if need be;
    not needed for a run on a folder of pictures, which treats all pictures as those it was trained on."""
    invert: bool = False
    """Swap dark and light: for dark drawings on light ground."""
    out: Path | None = None
    """CapsNet: folder for a PNG file a picture, which shows it beside what the longest capsule redraws."""
    json: bool = False
    """Print the predictions as JSON."""

    def run(self) -> int:
        from torchcaps.evaluate.classification import require_classifier
        from torchcaps.systems import system_of
        from torchcaps.systems.prediction import read_pictures
        from torchcaps.systems.run_folders import find_run, load_and_report

        # Refuse what can be refused before pictures are read
        self._check()
        folder = find_run(self.folder)
        run = load_and_report(folder)
        system = system_of(run.recipe)
        if system.predicts == "class":
            require_classifier(run, folder)
        if self.out is not None:
            self._check_drawing(run.model, system)
        # Read the pictures; those that cannot be read are named at the end
        read = read_pictures(run, self.pictures, fit=self.fit, invert=self.invert)
        answers: list[_Answer] = []
        if read.data is not None:
            answers = self._answers(run, system, read.data, read.paths)
        if self.json:
            _print_json(answers, read.failures, system.predicts, every=self.all)
        elif answers:
            self._print_table(answers, system.predicts)
        for _, reason in read.failures:
            print(f"torchcaps: {reason}", file=sys.stderr)
        if not read.failures:
            suggest_next("explore", self.folder)
        return 2 if read.failures else 0

    def _answers(self, run: TrainedRun, system: System, data: Dataset, paths: Sequence[Path]) -> list[_Answer]:
        """Classify the pictures, and draw them if that is wanted."""
        from torchcaps.utils.files import make_folder

        predictions = system.predict(run, data, self.threshold)
        # Capsules that were learned without labels have numbers only
        count = len(predictions[0].scores)
        names = [data.name_of(j) if system.predicts == "class" else str(j) for j in range(count)]
        # Draw first, so that what is printed can name the files
        sheets: list[Path | None] = [None] * len(paths)
        if self.out is not None:
            drawn = _targets(make_folder(self.out), paths)
            self._draw(system, run.model, data, predictions, drawn)
            sheets = [*drawn]
        return [_Answer(path, names, one, sheet) for path, one, sheet in zip(paths, predictions, sheets, strict=True)]

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

    def _print_table(self, answers: Sequence[_Answer], what: str) -> None:
        from torchcaps.systems.report import text_table

        # Without --all the rows end after the score
        names = answers[0].names if self.all else []
        rows = [["picture", what, "score", *names]]
        for one in answers:
            named = ", ".join(one.names[j] for j in one.prediction.named) or "none"
            scores = one.prediction.scores.tolist()
            best = ", ".join(f"{scores[j]:.3f}" for j in one.prediction.named) or "-"
            rows.append([str(one.path), named, best, *(f"{score:.3f}" for score in scores[: len(names)])])
        print(text_table(rows))
        sheets = [one.sheet for one in answers if one.sheet is not None]
        print(*sheets, sep="\n", end="\n" if sheets else "")


class _Answer(NamedTuple):
    """What a run says about one picture: names of its classes or capsules, the prediction, and the drawing's file."""

    path: Path
    names: list[str]
    prediction: Prediction
    sheet: Path | None


def _print_json(answers: Sequence[_Answer], failures: Sequence[tuple[Path, str]], what: str, *, every: bool) -> None:
    """Print a list: picture, classes [{class, score}]; with --all scores {class: score}, with --out sheet.

    A picture that could not be read has the entry `error` instead; for capsules, read `capsule` for `class`.
    """
    import json

    entries: list[dict[str, object]] = []
    for one in answers:
        scores = [round(score, 6) for score in one.prediction.scores.tolist()]
        plural = "classes" if what == "class" else "capsules"
        entry: dict[str, object] = {"picture": str(one.path)}
        entry[plural] = [{what: one.names[j], "score": scores[j]} for j in one.prediction.named]
        if every:
            entry["scores"] = dict(zip(one.names, scores, strict=True))
        if one.sheet is not None:
            entry["sheet"] = str(one.sheet)
        entries.append(entry)
    entries += [{"picture": str(path), "error": reason} for path, reason in failures]
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
