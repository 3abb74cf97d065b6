"""Find and load the run that a path on the command line means."""

from __future__ import annotations

from pathlib import Path

from torchcaps.errors import CheckpointError
from torchcaps.train.run import TrainedRun, load_run, weights_path
from torchcaps.utils.notices import notice

__all__ = ["REFERENCE_PREFIX", "find_run", "load_and_report", "output_folder"]

REFERENCE_PREFIX = "reference-classifier-"
"""How the folders of reference classifiers begin; they stand beside runs and are no runs to evaluate."""


def find_run(folder: Path) -> Path:
    """Return the folder of the run that a path means.

    Args:
        folder: A run's folder, an exported model, a folder with a single run in it, such as the demo's, or the name of
            a shipped model.

    Returns:
        The path itself, or that of the run in it. A path without any is returned as it is, to be refused when it is
        loaded.

    Raises:
        CheckpointError: If there are several runs in the folder.
    """
    if not folder.is_dir() or weights_path(folder).exists():
        return folder
    # A folder of runs also holds the reference classifiers that evaluations trained.
    children = sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith(REFERENCE_PREFIX))
    runs = [path for path in children if weights_path(path).exists()]
    if len(runs) > 1:
        raise CheckpointError(f"'{folder}' holds {len(runs)} runs; name one: {', '.join(map(str, runs))}")
    return runs[0] if runs else folder


def load_and_report(folder: Path) -> TrainedRun:
    """Load a run, and say so if it is not trained to its end: what it shows or answers may then mean nothing.

    Args:
        folder: What `find_run` returns.
    """
    run = load_run(folder)
    if not run.finished:
        where = "" if run.stage == "all" else f" of stage '{run.stage}'"
        notice(
            f"'{folder}' is not trained to its end: it stands at step {run.step:,}{where}; go on with: torchcaps train "
            f"--resume {folder}"
        )
    return run


def output_folder(run: Path) -> Path:
    """Return the folder for what commands make of a run: its own or, of a file of weights, one beside it of its name.

    >>> output_folder(Path("runs/first")).as_posix()
    'runs/first'
    """
    return run.with_suffix("") if run.is_file() else run
