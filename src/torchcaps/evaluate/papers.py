"""The papers' own numbers, to stand beside ours; theirs are of full-size networks and longer training."""

from __future__ import annotations

from typing import Any

from torchcaps.config import to_dict
from torchcaps.evaluate.results import Result
from torchcaps.models import MODELS, CapsNetConfig, CNNConfig, MatrixConfig, SmallMatrixConfig
from torchcaps.train.recipe import Recipe

__all__ = ["budget_note", "paper_numbers"]

SABOUR = {
    "mnist": {"test_error": 0.0025},
    "affnist": {"affnist_accuracy": 0.79, "mnist_accuracy": 0.9923},
    "multimnist": {"multimnist_error": 0.052},
    "cifar10": {"test_error": 0.106},
    "smallnorb": {"test_error": 0.027},
}
"""Sabour, Frosst and Hinton 2017, sections 5 to 7, by data set."""

HINTON = {"mnist": {"test_error": 0.0044}, "cifar10": {"test_error": 0.119}}
"""Hinton, Sabour and Frosst 2018, section 5, by data set; smallNORB is in the tables below."""

ITERATIONS = {1: 0.097, 2: 0.022, 3: 0.018, 5: 0.039}
POSES = {("matrix", False): 0.026, ("vector", True): 0.029, ("vector", False): 0.032}
LOSSES = {"margin": 0.032, "cross-entropy": 0.058}
MIXING, SMALLER, CROPS, CONTROL = 0.045, 0.022, 0.014, 0.052
"""Table 1 and section 5: test errors on smallNORB of networks that differ from the best (3 iterations of routing,
matrices, coordinates, spread loss) in one thing; of the smaller network; of the best with several crops; of the CNN."""

NOVEL = {
    "azimuth": {
        "matrix": {"novel_error": 0.135, "familiar_error": 0.037},
        "cnn": {"novel_error": 0.2, "familiar_error": 0.037},
    },
    "elevation": {
        "matrix": {"novel_error": 0.123, "familiar_error": 0.043},
        "cnn": {"novel_error": 0.178, "familiar_error": 0.043},
    },
}
"""Table 2."""

AUTHORS_STEPS, AUTHORS_BATCH = 2_000_000, 64
"""What the code that the authors of Hinton 2018 released runs for unless it is stopped; the paper names no number."""


def paper_numbers(recipe: Recipe) -> dict[str, float]:
    """Metric -> the number in the paper that the recipe follows; nothing where it has none."""
    data, model = to_dict(recipe)["data"], recipe.model
    if isinstance(model, CapsNetConfig):
        return SABOUR.get(data["name"], {})
    if isinstance(model, MatrixConfig):
        return _toys(model, data) if data["name"] == "smallnorb" else HINTON.get(data["name"], {})
    if isinstance(model, CNNConfig) and data["name"] == "smallnorb" and model.hidden == (1024,):
        return NOVEL[data["novel"]]["cnn"] if data["novel"] != "none" else {"test_error": CONTROL}
    return {}


def _toys(model: MatrixConfig, data: dict[str, Any]) -> dict[str, float]:
    """smallNORB: the row of table 2 or of table 1 that the network is, whatever its size; nothing if it is none."""
    iterations, moved = model.routing.iterations, (model.pose, model.coordinates > 0)
    others = [
        *([ITERATIONS.get(iterations)] if iterations != 3 else []),
        *([POSES[moved]] if moved in POSES else []),
        *([LOSSES[model.loss]] if model.loss in LOSSES else []),
        *([MIXING] if model.routing.switch == "mixing" else []),
    ]
    if not others and data["novel"] != "none":
        return NOVEL[data["novel"]]["matrix"]
    if not others and isinstance(model, SmallMatrixConfig):
        return {"test_error": SMALLER}
    if not others:
        return {"test_error": ITERATIONS[3], "test_error_13crop": CROPS}
    one = others[0] if len(others) == 1 and data["novel"] == "none" else None
    return {} if one is None else {"test_error": one}


def budget_note(result: Result) -> str | None:
    """One line where runs saw fewer images than those that the paper's numbers are of; None where nobody says."""
    config = result.config
    if not result.paper or not issubclass(MODELS[config["model"]["name"]], MatrixConfig):
        return None
    steps, batch = int(result.budget["steps"]), int(config["train"]["batch"])
    if steps * batch >= AUTHORS_STEPS * AUTHORS_BATCH:
        return None
    return (
        f"a smaller budget than the paper's: {steps:,} steps of {batch} images; the authors' code runs for "
        f"{AUTHORS_STEPS:,} of {AUTHORS_BATCH} unless it is stopped, and the paper names no number"
    )
