"""Train the runs of a sweep file, evaluate them and write results/*.json.

    python experiments/sweep.py                                                     which sweeps there are
    python experiments/sweep.py experiments/matrix-table1.toml                      everything, one run after another
    python experiments/sweep.py experiments/matrix-table1.toml --list               every run, and how far it is
    python experiments/sweep.py experiments/matrix-table1.toml --dry-run            what would be done now
    python experiments/sweep.py experiments/matrix-table1.toml --only matrix-margin
    python experiments/sweep.py experiments/matrix-table1.toml --run matrix-margin --seed 0     one run: a queue's job

A sweep can be stopped and started again at any time: finished runs are skipped, an unfinished one resumes. A run lies
in OUT/NAME-SEED, so sweeps that share --out share their controls. With --run, nothing is evaluated: after the last job
of a queue, start the sweep once without it.

A sweep file holds the rows of one table. `[[runs]]` is a recipe of its own:

    name      of the run in tables and folders
    base      a recipe of the package, or a run of a sweep file in the same folder (default: the recipe `name`)
    about     one sentence
    seeds     default [0]
    minutes   how long one seed takes on two cores, roughly
    after     a run above: start from its weights (of the same place in its list of seeds)
    average   runs above: not trained, but the mean of their weights
    stop_like a run above: training stops at its accuracy (of the same place in its list of seeds) on the validation
              images, so that two models can be compared where they are equally good
    the rest  tables and keys of a recipe, over those of `base`: `train.epochs = 3`

`[[results]]` evaluates the seeds of `run` beside `controls` (`torchcaps evaluate`); `[[attacks]]` attacks `run` and the
runs in `against` (`torchcaps attack`). Each may have a table `options`, the flags of the command. `weights = true` of a
result also keeps the weights of every seed, in half precision, in RESULTS/weights/NAME-SEED.safetensors.
`[[validations]]` compares `runs` on the images that they hold out (`validation_table.py`), those that are finished.
"""

from __future__ import annotations

import argparse
import functools
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from torchcaps.config import Options, PositiveFloat, flatten, from_dict, merge, read_toml, to_dict
from torchcaps.errors import RecipeError, TorchcapsError, suggestion
from torchcaps.train import Recipe, load, load_recipe, recipe_names, train
from torchcaps.train.average import average
from torchcaps.train.checkpoint import load as read_checkpoint
from torchcaps.train.recipe import NOT_INHERITED, recipe_of
from torchcaps.train.run import checkpoint_path
from torchcaps.train.validation import validation_accuracy
from torchcaps.utils.memory import keep_freed_memory

ROOT = Path(__file__).parents[1]
EXPERIMENTS = Path(__file__).parent


@dataclass(frozen=True)
class RunConfig:
    """The keys of `[[runs]]` that are not keys of a recipe; the module's docstring explains them."""

    name: str
    base: str | None = None
    about: str = ""
    seeds: tuple[int, ...] = (0,)
    minutes: PositiveFloat | None = None
    after: str | None = None
    average: tuple[str, ...] = ()
    stop_like: str | None = None


@dataclass(frozen=True)
class ResultConfig:
    """One `[[results]]`: which run is evaluated beside which controls."""

    run: str
    controls: tuple[str, ...] = ()
    options: Options = field(default_factory=dict)
    weights: bool = False


@dataclass(frozen=True)
class AttackConfig:
    """One `[[attacks]]`: which run is attacked beside which others; `source` makes the images of transfer attacks."""

    run: str
    against: tuple[str, ...] = ()
    source: str | None = None
    options: Options = field(default_factory=dict)


@dataclass(frozen=True)
class ValidationConfig:
    """One `[[validations]]`: which runs are compared on the images that they hold out, in results/lab-NAME.json."""

    name: str
    runs: tuple[str, ...]


@dataclass(frozen=True)
class SweepRun:
    """A run of a sweep file: its own keys, and the recipe that it trains (of the first seed)."""

    config: RunConfig
    recipe: Recipe


@dataclass(frozen=True)
class Sweep:
    """A sweep file with every name in it resolved.

    Attributes:
        about: One sentence on the table that it makes.
        runs: Name -> run, in the order of the file.
        results: What is evaluated.
        attacks: What is attacked.
        validations: What is compared on held-out training images.
    """

    about: str
    runs: dict[str, SweepRun]
    results: tuple[ResultConfig, ...]
    attacks: tuple[AttackConfig, ...]
    validations: tuple[ValidationConfig, ...] = ()


class Job(NamedTuple):
    """One run with one seed.

    Attributes:
        run: The run of the sweep file.
        recipe: Its recipe, with this job's seed and start.
        folder: Where it is trained.
        sources: Folders of the runs that it starts from, whose mean it is, or at whose accuracy it stops.
    """

    run: SweepRun
    recipe: Recipe
    folder: Path
    sources: tuple[Path, ...]

    @property
    def status(self) -> str:
        """How far it is: `finished`, `step N` or `not started`; `other settings` if the folder's run has others."""
        path = checkpoint_path(self.folder)
        if not path.exists():
            return "not started"
        meta = read_checkpoint(path).meta
        # The accuracy to stop at is known only once the other run is measured.
        recipe = self.recipe
        if self.run.config.stop_like:
            recipe = replace(recipe, train=replace(recipe.train, stop_at=meta.recipe.train.stop_at))
        if not self.run.config.average and _settings(meta.recipe) != _settings(recipe):
            return "other settings"
        return "finished" if meta.is_complete else f"step {meta.step}"


def _settings(recipe: Recipe) -> dict[str, object]:
    """Flatten a recipe, without what has no influence on training."""
    flat = flatten(to_dict(recipe))
    return {key: value for key, value in flat.items() if not re.match(r"about$|data\.data_dir$|paper\.", key)}


def load_sweep(path: Path) -> Sweep:
    """Read and check a sweep file.

    Args:
        path: a TOML file as described at the top of this module.

    Returns:
        The sweep, its runs in the order of the file, each with its whole recipe.

    Raises:
        RecipeError: if a key, a name or a value is wrong; one line says which.
    """
    tables = _read_tables(path)
    known = ("about", "runs", "results", "attacks", "validations")
    unknown = tables.keys() - set(known)
    if unknown:
        raise RecipeError(f"{path.name}: unknown key '{min(unknown)}'; wanted: {', '.join(known)}")
    # Runs in the order of the file, so that `after` and `average` can only name runs above.
    runs: dict[str, SweepRun] = {}
    for table in tables.get("runs", []):
        config = _run_config(table, path)
        if config.name in runs:
            raise RecipeError(f"{path.name}: the name '{config.name}' stands twice; a run needs one of its own")
        for above in (*config.average, *filter(None, [config.after, config.stop_like])):
            _check_name(above, runs, f"{path.name}: {config.name}")
        runs[config.name] = SweepRun(config, run_recipe(config.name, path))
    # What is measured may only name runs of this file.
    results = tuple(from_dict(ResultConfig, table, where=path.name) for table in tables.get("results", []))
    attacks = tuple(from_dict(AttackConfig, table, where=path.name) for table in tables.get("attacks", []))
    validations = tuple(from_dict(ValidationConfig, table, where=path.name) for table in tables.get("validations", []))
    for result in results:
        for name in (result.run, *result.controls):
            _check_name(name, runs, path.name)
    for validation in validations:
        for name in validation.runs:
            _check_name(name, runs, path.name)
    for attack in attacks:
        for name in (attack.run, *attack.against, *filter(None, [attack.source])):
            _check_name(name, runs, path.name)
    return Sweep(str(tables.get("about", "")), runs, results, attacks, validations)


def sweep_files(folder: Path = EXPERIMENTS) -> list[Path]:
    """List the sweep files of a folder; `overview.toml` holds the rows of a table."""
    return sorted(path for path in folder.glob("*.toml") if path.name != "overview.toml")


def find_recipe(name: str) -> Recipe:
    """Load a recipe of the package or, if there is none of that name, the run of a sweep file.

    Raises:
        RecipeError: if neither exists.
    """
    if name in recipe_names():
        return load_recipe(name)
    for path in sweep_files():
        if _defines(path, name):
            return run_recipe(name, path)
    known = [name for path in sweep_files() for name in load_sweep(path).runs]
    raise RecipeError(f"no recipe and no run of a sweep is called '{name}'{suggestion(name, known)}")


def run_recipe(name: str, path: Path) -> Recipe:
    """Build the recipe of a run: its own tables over those of its base.

    Args:
        name: a run of the file.
        path: the sweep file.

    Returns:
        The recipe with the run's name and its first seed, without `start`.
    """
    return recipe_of(_tables(name, path, ()), where=f"{path.name}: {name}")


def _tables(name: str, path: Path, below: tuple[tuple[str, Path], ...]) -> dict[str, Any]:
    """Merge the tables of a run over those of its base, which may be a run itself."""
    if (name, path) in below:
        raise RecipeError(f"{path.name}: the bases of '{name}' lead back to it; one must be a recipe of the package")
    table = next(table for table in _read_tables(path)["runs"] if table.get("name") == name)
    config = _run_config(table, path)
    base = config.base or name
    # A run that is named like its base is the recipe of the package, or the run of another file.
    files = [other for other in (path, *sweep_files(path.parent)) if base != name or other != path]
    file = next((other for other in files if _defines(other, base)), None)
    if file is not None and base not in recipe_names():
        start = _tables(base, file, (*below, (name, path)))
    else:
        start = to_dict(load_recipe(base))
    own = {key: value for key, value in table.items() if key not in RunConfig.__dataclass_fields__}
    # A run that changes nothing is the recipe itself, with its papers' numbers.
    kept = {key: value for key, value in start.items() if base == name or key not in NOT_INHERITED}
    about = config.about or str(kept.get("about", f"{base} with {_text(own)}."))
    return {**merge(kept, own), "name": name, "about": about, "seed": config.seeds[0]}


def _read_tables(path: Path) -> dict[str, Any]:
    """Read a sweep file, once as long as it does not change; the tables are shared, so nobody may write into them."""
    state = path.stat() if path.exists() else None
    return _read_unchanged(path, (state.st_mtime_ns, state.st_size) if state else (0, 0))


@functools.cache
def _read_unchanged(path: Path, state: tuple[int, int]) -> dict[str, Any]:
    return read_toml(path)


def _text(tables: dict[str, Any]) -> str:
    """Write settings as text: `train.epochs = 3, model.loss = margin`."""
    return ", ".join(f"{key} = {value}" for key, value in flatten(tables).items())


def _defines(path: Path, name: str) -> bool:
    """Return True if a sweep file has a run of that name."""
    return any(table.get("name") == name for table in _read_tables(path).get("runs", []))


def _run_config(table: dict[str, object], path: Path) -> RunConfig:
    """Take the keys of a run that are not a recipe's."""
    own = {key: value for key, value in table.items() if key in RunConfig.__dataclass_fields__}
    config = from_dict(RunConfig, own, where=path.name)
    if not config.seeds or sum(map(bool, (config.average, config.after, config.stop_like))) > 1:
        raise RecipeError(
            f"{path.name}: {config.name}: give at least one seed, and one of average, after and stop_like at most"
        )
    return config


def _check_name(name: str, runs: dict[str, SweepRun], where: str) -> None:
    """Raise RecipeError if a name is not among the runs read so far."""
    if name not in runs:
        raise RecipeError(f"{where}: no run '{name}' in this file so far{suggestion(name, runs)}")


def jobs_of(sweep: Sweep, out: Path) -> list[Job]:
    """List every run with every seed, in an order in which they can be trained."""
    jobs = []
    for run in sweep.runs.values():
        for place, seed in enumerate(run.config.seeds):
            names = run.config.average or tuple(filter(None, [run.config.after, run.config.stop_like]))
            sources = tuple(_folder(sweep.runs[name].config, place, out) for name in names)
            start = str(sources[0]) if run.config.after else None
            recipe = replace(run.recipe, seed=seed, start=start)
            jobs.append(Job(run, recipe, _folder(run.config, place, out), sources))
    return jobs


def _folder(config: RunConfig, place: int, out: Path) -> Path:
    """Name the folder of a run's seed by its place in the list; the last one if the list is shorter."""
    return out / f"{config.name}-{config.seeds[min(place, len(config.seeds) - 1)]}"


def train_job(job: Job, *, quiet: bool = False) -> bool:
    """Train or average one run, from where it was left.

    Args:
        job: the run and its seed.
        quiet: no progress bar.

    Returns:
        True if it is finished, False if it was interrupted.

    Raises:
        RecipeError: if a run that it builds on is not finished.
    """
    # The order of the file makes this hold, but --run may ask for a run before its time.
    for source in job.sources:
        path = checkpoint_path(source)
        if not path.exists() or not read_checkpoint(path).meta.is_complete:
            raise RecipeError(f"'{job.folder}' builds on '{source}', which is not finished; train that run first")
    if job.run.config.average:
        average(job.sources, job.folder, name=job.recipe.name)
        return True
    if job.run.config.stop_like:
        settings = replace(job.recipe.train, stop_at=_validation_accuracy(job))
        job = job._replace(recipe=replace(job.recipe, train=settings))
    return train(job.recipe, job.folder, resume="auto", quiet=quiet).finished


def _validation_accuracy(job: Job) -> float:
    """Measure how often the run that a job stops like is right on the job's validation images."""
    images = job.recipe.data.load().validation
    if images is None:
        raise RecipeError(f"'{job.folder}' holds out no images to stop by; set data.matched or data.validation")
    return validation_accuracy(load(job.sources[0]), images, torch.device("cpu"))


def commands(sweep: Sweep, out: Path, results: Path) -> Iterator[tuple[list[str], list[str]]]:
    """Yield what measures the runs.

    Returns:
        Pairs of the names of the runs that are needed, and the words of a `torchcaps` command.
    """

    def folders(name: str) -> list[str]:
        config = sweep.runs[name].config
        return [str(_folder(config, place, out)) for place in range(len(config.seeds))]

    # Evaluation takes every seed; an attack only the first.
    for result in sweep.results:
        words = ["evaluate", *folders(result.run)]
        if result.controls:
            words += ["--control", *(folder for name in result.controls for folder in folders(name))]
        yield [result.run, *result.controls], [*words, *_flags(result.options), "--results", str(results)]
        for folder in folders(result.run) if result.weights else ():
            file = results / "weights" / f"{Path(folder).name}.safetensors"
            yield [result.run], ["export", folder, str(file), "--half", "--force"]
    for attack in sweep.attacks:
        words = ["attack", folders(attack.run)[0]]
        if attack.against:
            words += ["--against", *(folders(name)[0] for name in attack.against)]
        if attack.source:
            words += ["--source", folders(attack.source)[0]]
        needed = [attack.run, *attack.against, *filter(None, [attack.source])]
        yield needed, [*words, *_flags(attack.options), "--results", str(results)]


def _flags(options: Options) -> list[str]:
    """Write a table of options as flags; a list is several words, and true is the flag alone."""
    words = []
    for key, value in options.items():
        several = value if isinstance(value, tuple) else (value,)
        words += [f"--{key.replace('_', '-')}", *(map(str, several) if value is not True else ())]
    return words


def print_files() -> None:
    """Print a line for every sweep file."""
    sweeps = {path: load_sweep(path) for path in sweep_files()}
    width = max(len(path.name) for path in sweeps)
    for path, sweep in sweeps.items():
        runs = len(jobs_of(sweep, Path("runs")))
        print(f"experiments/{path.name:{width}}  {runs:2} runs  {sweep.about}")


def print_list(jobs: Sequence[Job]) -> None:
    """Print a line for every run and seed."""
    width = max(len(job.folder.name) for job in jobs)
    for job in jobs:
        minutes = job.run.config.minutes
        length = "" if minutes is None else f"{minutes:g} min"
        print(f"{job.folder.name:{width}}  {job.status:12}  {length:>8}  {job.recipe.about}")


def run_sweep(sweep: Sweep, jobs: Sequence[Job], *, dry_run: bool, quiet: bool) -> bool:
    """Train what is not finished; False if it was interrupted."""
    for number, job in enumerate(jobs, 1):
        status = job.status
        what = "average" if job.run.config.average else "train"
        print(f"[{number}/{len(jobs)}] {what} {job.folder}: {status}", flush=True)
        if status != "finished" and not dry_run and not train_job(job, quiet=quiet):
            return False
    return True


def measure(sweep: Sweep, arguments: argparse.Namespace) -> int:
    """Run every command whose runs are all finished; 1 if one failed."""
    # A result needs every seed of its runs; in a dry run all of them are taken for finished.
    done = set(sweep.runs)
    for job in jobs_of(sweep, arguments.out):
        if job.status != "finished" and not arguments.dry_run:
            done.discard(job.run.config.name)
    failed = 0
    for needed, words in commands(sweep, arguments.out, arguments.results):
        waiting = sorted(set(needed) - done)
        if waiting:
            print(f"not yet: torchcaps {words[0]} of {needed[0]} needs {', '.join(waiting)}")
            continue
        print(shlex.join(["torchcaps", *words]), flush=True)
        if not arguments.dry_run:
            if words[0] == "export":
                (arguments.results / "weights").mkdir(parents=True, exist_ok=True)
            # A process of its own, so that the peak memory in the result is that of the evaluation alone.
            failed |= subprocess.run([sys.executable, "-m", "torchcaps", *words]).returncode
    # Validations take what is there: a choice is made run by run.
    for validation in sweep.validations:
        jobs = [job for job in jobs_of(sweep, arguments.out) if job.run.config.name in validation.runs]
        words = [str(EXPERIMENTS / "validation_table.py"), validation.name, *(str(job.folder) for job in jobs)]
        print(shlex.join(["python", *words]), flush=True)
        if not arguments.dry_run:
            failed |= subprocess.run([sys.executable, *words]).returncode
    return 1 if failed else 0


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, nargs="?", help="a sweep file; without one, list those of experiments/")
    parser.add_argument("--out", type=Path, default=Path("runs"), help="folder of the runs' folders (runs)")
    parser.add_argument("--results", type=Path, default=ROOT / "results", help="where results are written (results/)")
    parser.add_argument("--list", action="store_true", help="print every run and how far it is, and stop")
    parser.add_argument("--dry-run", action="store_true", help="print what would be trained and measured, and stop")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these runs, all seeds; then what they suffice for")
    parser.add_argument("--run", metavar="NAME", help="this run alone, nothing is evaluated")
    parser.add_argument("--seed", type=int, help="with --run: this seed alone")
    parser.add_argument("--quiet", action="store_true", help="no progress bars")
    return parser.parse_args(words)


def select(jobs: Sequence[Job], arguments: argparse.Namespace) -> list[Job]:
    """Take the jobs that --only, or --run and --seed, name.

    Raises:
        RecipeError: if a name or a seed is not in the sweep.
    """
    # Check what was asked for before anything is selected by it.
    names = [arguments.run] if arguments.run else arguments.only
    if arguments.seed is not None and not arguments.run:
        raise RecipeError("--seed picks one seed of a run; name the run with --run")
    known = {job.run.config.name: job.run for job in jobs}
    for name in names or []:
        if name not in known:
            raise RecipeError(f"no run '{name}' in {arguments.file.name}{suggestion(name, known)}; --list shows them")
    chosen = [job for job in jobs if names is None or job.run.config.name in names]
    if arguments.seed is not None:
        chosen = [job for job in chosen if job.recipe.seed == arguments.seed]
    if not chosen:
        raise RecipeError(f"'{arguments.run}' has no seed {arguments.seed}; --list shows the seeds")
    return chosen


def main(words: Sequence[str] | None = None) -> int:
    """Run the command; 0 done, 1 interrupted or failed, 2 bad input."""
    arguments = parse(words)
    try:
        if arguments.file is None:
            print_files()
            return 0
        sweep = load_sweep(arguments.file)
        jobs = select(jobs_of(sweep, arguments.out), arguments)
        if arguments.list:
            print_list(jobs)
            return 0
        if not run_sweep(sweep, jobs, dry_run=arguments.dry_run, quiet=arguments.quiet):
            print("interrupted; the same command goes on", file=sys.stderr)
            return 1
        return 0 if arguments.run else measure(sweep, arguments)
    except TorchcapsError as error:
        print(f"sweep: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    keep_freed_memory()
    sys.exit(main())
