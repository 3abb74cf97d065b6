"""torchcaps predict"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import tyro

if TYPE_CHECKING:
    from torchcaps.data import Dataset
    from torchcaps.models import CapsNet, Model
    from torchcaps.systems.predict import Answer

__all__ = ["Predict"]


@dataclass(frozen=True)
class Predict:
    """Say what a trained classifier sees in pictures: PNG, JPEG, GIF or WebP files.

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
    """Print the answers as JSON."""

    def run(self) -> int:
        from torchcaps.evaluate.classification import load_classifier
        from torchcaps.systems.predict import pictures_of, predict

        self._check()
        run = load_classifier(self.folder)
        if self.out is not None:
            self._check_drawing(run.model)
        data = pictures_of(run, self.pictures, fit=self.fit, invert=self.invert)
        answers = predict(run, data, self.threshold)
        sheets = self._draw(cast("CapsNet", run.model), self.out, data, answers) if self.out is not None else []
        if self.json:
            self._print_json(data, answers, sheets)
        else:
            self._print_table(data, answers)
            print(*sheets, sep="\n", end="\n" if sheets else "")
        return 0

    def _check(self) -> None:
        from torchcaps.errors import RecipeError

        if not self.pictures:
            raise RecipeError(f"no picture to look at; name some, as in: torchcaps predict {self.folder} digit.png")
        if self.threshold is not None and not 0 <= self.threshold <= 1:
            raise RecipeError(f"--threshold {self.threshold:g} is asked for; 0 to 1 is wanted")

    def _check_drawing(self, model: Model) -> None:
        from torchcaps.errors import RecipeError
        from torchcaps.evaluate.figures import require_matplotlib
        from torchcaps.models import CapsNet

        require_matplotlib()
        if not isinstance(model, CapsNet):
            raise RecipeError(f"'{self.folder}' is a run of {type(model).__name__}, which redraws nothing; omit --out")

    def _draw(self, model: CapsNet, out: Path, data: Dataset, answers: Sequence[Answer]) -> list[Path]:
        """Write the sheets; their paths."""
        from torchcaps.errors import RecipeError
        from torchcaps.systems.predict import redrawn_sheet
        from torchcaps.utils.files import write_atomically
        from torchcaps.utils.progress import progress

        try:
            out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RecipeError(f"cannot make the folder '{out}': {error.strerror}; choose another --out") from None
        paths = _targets(out, self.pictures)
        for n, path in enumerate(progress(paths, "drawing")):
            write_atomically(path, [redrawn_sheet(model, data, n, answers[n])])
        return paths

    def _print_table(self, data: Dataset, answers: Sequence[Answer]) -> None:
        from torchcaps.systems.report import text_table

        names = data.names if self.all else ()
        rows = [["picture", "class", "score", *names]]
        for path, answer in zip(self.pictures, answers, strict=True):
            named = ", ".join(data.name_of(j) for j in answer.named) or "none"
            scores = ", ".join(f"{answer.scores[j]:.3f}" for j in answer.named) or "-"
            rows.append([str(path), named, scores, *(f"{s:.3f}" for s in answer.scores[: len(names)].tolist())])
        print(text_table(rows))

    def _print_json(self, data: Dataset, answers: Sequence[Answer], sheets: Sequence[Path]) -> None:
        """A list: picture, classes [{class, score}]; with --all scores {class: score}, with --out sheet."""
        import json

        entries: list[dict[str, Any]] = []
        for n, (path, answer) in enumerate(zip(self.pictures, answers, strict=True)):
            scores = [round(score, 6) for score in answer.scores.tolist()]
            named = [{"class": data.name_of(j), "score": scores[j]} for j in answer.named]
            every = {"scores": dict(zip(data.names, scores, strict=True))} if self.all else {}
            sheet = {"sheet": str(sheets[n])} if sheets else {}
            entries.append({"picture": str(path), "classes": named, **every, **sheet})
        print(json.dumps(entries, indent=2))


def _targets(out: Path, pictures: Sequence[Path]) -> list[Path]:
    """A file for each picture's sheet, numbered where two would have one name, or a picture has it."""
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
