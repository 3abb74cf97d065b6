"""Tabulate the activations of every layer of trained matrix capsules: do they differ between images at all?

    python experiments/activation_statistics.py NAME runs/one runs/other ...

For each layer, over the first test images: the 5th, 50th and 95th percentile of its activations; the share that is
saturated (below .01 or above .99); and the mean standard deviation over the images of one capsule's activation, which
is 0 for a layer whose activations say nothing. Written to results/lab-NAME.json.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from lab_result import write_rows
from torchcaps.errors import RecipeError
from torchcaps.models import MatrixCaps
from torchcaps.systems import system_of
from torchcaps.train.run import load_run

IMAGES = 500
BATCH = 50
LAYERS = ("primary", "first", "second", "classes")
HEADER = ["run", "layer", "5th percentile", "median", "95th", "shut or open (%)", "deviation over images"]


def activations(model: MatrixCaps, images: Tensor) -> dict[str, Tensor]:
    """Compute the activations of every layer.

    Args:
        model: matrix capsules.
        images: [b c h w].

    Returns:
        Name of the layer -> activations [b i].
    """
    model.eval()
    with torch.inference_mode():
        outputs = [model(some) for some in images.split(BATCH)]
    layers = [[*out.below, out.classes] for out in outputs]
    return {name: torch.cat([layer[n].activation.flatten(1) for layer in layers]) for n, name in enumerate(LAYERS)}


def statistics_rows(folder: Path) -> Iterator[list[str]]:
    """Yield the row of each layer of a run."""
    run = load_run(folder)
    if system_of(run.recipe).name != "matrix":
        raise RecipeError(f"'{folder}' holds no matrix capsules; name the folder of a run that does")
    images = run.recipe.data.load().test.model_input(slice(IMAGES))
    for name, a in activations(cast(MatrixCaps, run.model), images).items():
        # By sorting: torch.quantile refuses tensors of this size.
        places = [int(q * (a.numel() - 1)) for q in (0.05, 0.5, 0.95)]
        percentiles = a.flatten().sort().values[places].tolist()
        saturated = ((a < 0.01) | (a > 0.99)).float().mean()
        cells = [f"{value:.3f}" for value in percentiles]
        yield [folder.name, name, *cells, f"{100 * saturated:.0f}", f"{a.std(0).mean():.3f}"]


def main(words: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", help="of the table")
    parser.add_argument("runs", nargs="+", type=Path, help="folders of runs of matrix capsules")
    arguments = parser.parse_args(words)
    rows = [HEADER, *(row for folder in arguments.runs for row in statistics_rows(folder))]
    write_rows(arguments.name, rows, images=IMAGES)


if __name__ == "__main__":
    main()
