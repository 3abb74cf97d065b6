"""What the switches of matrix capsules say once they are trained: nothing, if they are the same for every image.

    python experiments/switches.py NAME runs/one runs/other ...

For every layer, over the first test images: the 5th, 50th and 95th percentile of its activations; how many are shut or
open (below .01, above .99); and the deviation from image to image of the same capsule's activation. Written to
results/lab-NAME.json.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from lab import store
from torch import Tensor

from torchcaps.errors import RecipeError
from torchcaps.models import MatrixCaps
from torchcaps.train.run import load_run

IMAGES = 500
BATCH = 50
LAYERS = ("primary", "first", "second", "classes")


def activations(model: MatrixCaps, images: Tensor) -> dict[str, Tensor]:
    """Layer -> activations [n capsules]."""
    model.eval()
    with torch.inference_mode():
        outputs = [model(some) for some in images.split(BATCH)]
    layers = [[*out.below, out.classes] for out in outputs]
    return {name: torch.cat([layer[n].activation.flatten(1) for layer in layers]) for n, name in enumerate(LAYERS)}


def rows_of(folder: Path) -> Iterator[list[str]]:
    run = load_run(folder)
    if not isinstance(run.model, MatrixCaps):
        raise RecipeError(f"'{folder}' is no run of matrix capsules; name one that is")
    images = run.recipe.data.load().test.model_input(slice(IMAGES))
    for name, a in activations(run.model, images).items():
        low, middle, high = a.flatten().sort().values[[int(q * (a.numel() - 1)) for q in (0.05, 0.5, 0.95)]].tolist()
        decided = ((a < 0.01) | (a > 0.99)).float().mean()
        yield [
            folder.name,
            name,
            *(f"{v:.3f}" for v in (low, middle, high)),
            f"{100 * decided:.0f}",
            f"{a.std(0).mean():.3f}",
        ]


def main(arguments: list[str]) -> int:
    name, *folders = arguments
    rows = [["run", "layer", "5th percentile", "median", "95th", "shut or open (%)", "deviation over images"]]
    rows += [row for folder in folders for row in rows_of(Path(folder))]
    return store(name, rows, images=IMAGES)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
