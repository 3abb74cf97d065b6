"""torchcaps attack"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from torchcaps.cli.next_steps import suggest_next

if TYPE_CHECKING:
    from torchcaps.evaluate.attacks import AttackCurves
    from torchcaps.systems.attack_runs import AttackSettings

__all__ = ["Attack"]

Name = Literal["fgsm", "bim", "pgd", "square", "transfer", "targeted"]


@dataclass(frozen=True)
class Attack:
    """Change test images as little as it takes to mislead a classifier, and say whether its gradients can be trusted.

    Example: torchcaps attack runs/capsnet-glyphs-0 --against runs/cnn-glyphs-0 --attacks fgsm square --images 200

    Sparse capsules, which know no classes, are attacked through an SVM on their codes as that of `torchcaps evaluate`,
    but with soft votes, so that it has gradients.
    """

    folder: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]
    """Folder of the run, or the name of a shipped model (`torchcaps zoo`)."""
    against: tuple[Path, ...] = ()
    """Folders of other runs, tested on the same images, to compare with."""
    attacks: tuple[Name, ...] = ()
    """fgsm, bim, pgd: along the gradient; square: by questions only; transfer: images made on --source;
    targeted: FGSM towards every other class, whose success counts. All of them if not given."""
    epsilons: tuple[float, ...] = (0.0, 0.025, 0.05, 0.1, 0.15, 0.2, 0.3)
    """The largest changes of a pixel, whose values lie in 0 to 1."""
    images: int = 500
    """How many test images; all, if there are fewer."""
    source: Path | None = None
    """Folder of the run on which the images of transfer are made (by FGSM)."""
    queries: int = 300
    """How often square may ask about an image."""
    loss: Literal["cross-entropy", "own"] = "cross-entropy"
    """What attacks along the gradient climb; own: what the model was trained by, flat wherever its margin is kept."""
    seed: int = 0
    """Other images and other random numbers."""
    out: Path | None = None
    """Folder for attacks.json and attacks.png; RUN/attacks if not given."""
    results: Path | None = None
    """Folder to write RECIPE-attacks.json into."""
    json: bool = False
    """Print what attacks.json holds."""

    def run(self) -> int:
        from torchcaps.evaluate.figures import require_matplotlib
        from torchcaps.systems.attack_runs import attack_runs, load_attack_runs, to_plain_data
        from torchcaps.systems.run_folders import find_run, output_folder
        from torchcaps.utils.files import make_folder

        # Refuse what can be refused before anything is loaded
        require_matplotlib()
        settings = self._settings()
        # Load the runs, and make the folders now: an attack takes minutes, too long to fail at the end
        folder = find_run(self.folder)
        attacked = load_attack_runs((folder, *self.against), self.source)
        outputs = [make_folder(self.out or output_folder(folder) / "attacks")]
        if self.results:
            outputs.append(make_folder(self.results, "--results"))
        # Attack, and write the same data to every folder
        curves = attack_runs(attacked, settings)
        recipe = next(iter(attacked.runs.values())).run.recipe.name
        paths = [outputs[0] / "attacks.json", *(path / f"{recipe}-attacks.json" for path in outputs[1:])]
        self._write(curves, to_plain_data(attacked, curves, settings), paths)
        return 0

    def _settings(self) -> AttackSettings:
        """Check the options before anything is loaded."""
        from torchcaps.errors import RecipeError
        from torchcaps.evaluate.attacks.curves import select_attacks, sorted_epsilons
        from torchcaps.systems.attack_runs import AttackSettings

        if self.seed < 0:
            raise RecipeError(f"--seed {self.seed} came; 0 or more is wanted")
        if self.images < 1 or self.queries < 1:
            raise RecipeError(f"--images {self.images} --queries {self.queries} came; at least 1 is wanted of each")
        if "transfer" in self.attacks and self.source is None:
            raise RecipeError("transfer attacks with images made on another run; name its folder with --source")
        if self.source is not None and self.attacks and "transfer" not in self.attacks:
            raise RecipeError("--source is where transfer makes its images; add transfer to --attacks, or leave it out")
        return AttackSettings(
            attacks=select_attacks(self.attacks or None, self.source is not None),
            epsilons=sorted_epsilons(self.epsilons),
            images=self.images,
            seed=self.seed,
            loss=self.loss,
            queries=self.queries,
        )

    def _write(self, curves: dict[str, AttackCurves], data: dict[str, object], paths: list[Path]) -> None:
        import json

        from torchcaps.evaluate.attacks import curve_plot
        from torchcaps.systems.attack_runs import attack_rows, verdicts
        from torchcaps.systems.report import text_table
        from torchcaps.utils.files import write_atomically

        # Files: the data into every folder, the figure only into the first
        text = json.dumps(data, indent=2)
        for path in paths:
            write_atomically(path, [text.encode(), b"\n"])
        picture = paths[0].with_suffix(".png")
        write_atomically(picture, [curve_plot(curves)])
        # Standard output: the data as it was written, or a table for people
        if self.json:
            print(text)
            return
        print(text_table(attack_rows(curves)), *verdicts(curves), sep="\n")
        print("\nwritten to", *paths, picture)
        suggest_next("report", self.folder)
