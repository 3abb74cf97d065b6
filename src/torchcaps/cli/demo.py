"""torchcaps demo"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

__all__ = ["Demo"]

_TEXT = (
    "A capsule is a small group of numbers that stands for one thing: how long the vector is says whether the thing "
    "is there, where it points says how it looks. The network you just trained has one capsule a digit. The capsules "
    "of the layer below each vote for every digit, and routing by agreement decides which votes count.",
    "The table shows how often it errs on images it has never seen, beside a plain convolutional network trained on "
    "the same images for as many steps, the very same capsule network before training, and the nearest mean image. "
    "Below, the images are redrawn from sixteen numbers of one capsule; then each number is changed in turn.",
)


@dataclass(frozen=True)
class Demo:
    """Train the smallest real capsule network on built-in digits, beside controls, and write a report.

    Takes a minute or two on two cores; run again, it goes on where it was cut off.

    Example: torchcaps demo --out runs/demo
    """

    out: Path = Path("runs/demo")
    """Folder for the two runs and report.html."""
    epochs: float | None = None
    """Train for this long instead of what the recipes say."""
    quiet: bool = False
    """No progress bars."""

    def run(self) -> int:
        from torchcaps.evaluate import evaluate_runs, write_result
        from torchcaps.evaluate.figures import require_matplotlib
        from torchcaps.evaluate.report import rows_of, text_table

        require_matplotlib()
        names = ("capsnet-glyphs", "cnn-glyphs")
        if not all(self._train(name) for name in names):
            print("stopped; torchcaps demo goes on from here")
            return 1
        result = evaluate_runs([self.out / names[0]], [self.out / names[1]])
        write_result(self.out, result)
        print(text_table(rows_of(result)))
        print(f"\nreport: {self._report(rows_of(result), names)}")
        return 0

    def _train(self, name: str) -> bool:
        from torchcaps.train import load_recipe, train

        over = {} if self.epochs is None else {"train": {"epochs": self.epochs}}
        return train(load_recipe(name, over), self.out / name, resume=True, quiet=self.quiet).finished

    def _report(self, rows: list[list[str]], names: tuple[str, ...]) -> Path:
        from torchcaps.evaluate import figures
        from torchcaps.evaluate.report import html_report
        from torchcaps.models import CapsNet
        from torchcaps.train import load_run
        from torchcaps.train.files import write_atomically
        from torchcaps.train.journal import read_journal

        loaded = load_run(self.out / names[0])
        assert isinstance(loaded.model, CapsNet)
        test = loaded.recipe.data.load().test
        curves = [(name, read_journal(self.out / name / "journal.jsonl")) for name in names]
        pictures = [
            ("Training accuracy over the steps.", figures.learning_curve(curves)),
            ("Test images, and each redrawn from its longest capsule.", figures.reconstructions(loaded.model, test)),
            ("Each of 16 numbers of one capsule, from -.25 to .25.", figures.perturbations(loaded.model, test)),
            ("Where the winning capsule's votes come from.", figures.coupling_maps(loaded.model, test)),
        ]
        path = self.out / "report.html"
        write_atomically(path, [html_report("torchcaps demo", _TEXT, rows, pictures).encode()])
        return path
