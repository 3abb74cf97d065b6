"""The papers' own numbers, to stand beside ours; theirs are of full-size networks and longer training."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean, stdev
from typing import Any

from torchcaps.config import to_dict
from torchcaps.evaluate.results import Metrics, Result
from torchcaps.models import MODELS, CapsNetConfig, CNNConfig, MatrixConfig, SmallMatrixConfig, SparseConfig
from torchcaps.train.recipe import Recipe

__all__ = ["budget_note", "paper_numbers", "paper_tables"]

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
MIXING = 0.045
SMALLER = 0.022
CROPS = 0.014
CONTROL = 0.052
"""Table 1 and section 5: test errors on smallNORB of networks that differ from the best (3 iterations of routing,
matrices, coordinates, spread loss) in one thing; of the smaller network; of the best with several crops; of the CNN."""
USUAL = (2, 3)
"""Iterations of routing with which a network is still the one of the other rows: ours learn in little time with 2."""

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

AUTHORS_STEPS = 2_000_000
AUTHORS_BATCH = 64
"""What the code that the authors of Hinton 2018 released runs for unless it is stopped; the paper names no number."""

RAWLINSON = {
    True: {"mnist_svm": 0.99, "affnist_svm_a": 0.9012, "affnist_svm_b": 0.1699},
    False: {"mnist_svm": 0.9737, "affnist_svm_a": 0.6063, "affnist_svm_b": 0.157},
}
"""Rawlinson 2018, table 1: of sparse capsules, and of the dense control, both trained on MNIST alone."""
SPARSE_STEPS = 30_000
SPARSE_BATCH = 128

OTHERS = {"ConvNet (Sabour 2017)": (0.9922, 0.66), "CapsNet (Sabour 2017)": (0.9923, 0.79)}
"""Beside them in table 1: MNIST and affNIST of networks that were trained with labels, on MNIST alone."""
BENCHMARK = {
    "Zhao 2017": (0.9782, "yes", 0.8679),
    "Chang 2017": (0.975, "scaled, shifted", 0.916),
    "Asano 2018": (0.9925, "yes", 0.8755),
    "CNN in Sabour 2017": (0.9922, "no", 0.66),
    "sparse capsules": (0.99, "no", 0.9012),
}
"""Table 2: MNIST, whether affNIST was trained on, and affNIST."""


def paper_numbers(recipe: Recipe) -> dict[str, float]:
    """Metric -> the number in the paper that the recipe follows; nothing where it has none."""
    data = to_dict(recipe)["data"]
    model = recipe.model
    ours = isinstance(model, CapsNetConfig | SparseConfig) and model.shared
    if ours or (isinstance(model, SparseConfig) and (model.frames or model.ramp)):
        return {}
    if isinstance(model, CapsNetConfig):
        return SABOUR.get(data["name"], {})
    if isinstance(model, SparseConfig):
        return _placed_or_not(RAWLINSON[model.sparse], data)
    if isinstance(model, MatrixConfig):
        return _toys(model, data) if data["name"] == "smallnorb" else HINTON.get(data["name"], {})
    if isinstance(model, CNNConfig) and data["name"] == "smallnorb" and model.hidden == (1024,):
        return NOVEL[data["novel"]]["cnn"] if data["novel"] != "none" else {"test_error": CONTROL}
    return {}


def _placed_or_not(told: dict[str, float], data: dict[str, Any]) -> dict[str, float]:
    """All of them where the network learns from MNIST on affNIST's canvas; on MNIST itself one."""
    if data["name"] == "affnist" and data["train_on"] == "mnist":
        return told
    return {"mnist_svm": told["mnist_svm"]} if data["name"] == "mnist" else {}


def _toys(model: MatrixConfig, data: dict[str, Any]) -> dict[str, float]:
    """smallNORB: the row of table 2 or of table 1 that the network is, whatever its size; nothing if it is none."""
    iterations = model.routing.iterations
    moved = (model.pose, model.coordinates > 0)
    usual = "cross-entropy" if model.norm else "spread"  # what rows that are not about the loss have
    others = [
        *([ITERATIONS.get(iterations)] if iterations not in USUAL else []),
        *([POSES[moved]] if moved in POSES else []),
        *([LOSSES[model.loss]] if model.loss in LOSSES and model.loss != usual else []),
        *([MIXING] if model.routing.switch == "mixing" else []),
    ]
    if not others and data["novel"] != "none":
        return NOVEL[data["novel"]]["matrix"]
    if not others and isinstance(model, SmallMatrixConfig):
        return {"test_error": SMALLER}
    if not others:
        return {"test_error": ITERATIONS[iterations]} | ({"test_error_13crop": CROPS} if iterations == 3 else {})
    one = others[0] if len(others) == 1 and data["novel"] == "none" else None
    return {} if one is None else {"test_error": one}


def budget_note(result: Result) -> str | None:
    """One line where runs saw fewer images than those that the paper's numbers are of, or had what the paper's had not;
    None where nobody says."""
    if not result.paper:
        return None
    kind = MODELS[result.config["model"]["name"]]
    steps = int(result.budget["steps"])
    batch = int(result.config["train"]["batch"])
    ours = f"a smaller budget than the paper's: {steps:,} steps of {batch} images"
    if issubclass(kind, MatrixConfig):
        theirs = f"{AUTHORS_STEPS:,} of {AUTHORS_BATCH} unless it is stopped, and the paper names no number"
        own = result.config["model"].get("norm")
        fewer = steps * batch < AUTHORS_STEPS * AUTHORS_BATCH
        notes = ["batch norms, which the paper's network does not have"] if own else []
        notes += [f"{ours}; the authors' code runs for {theirs}"] if fewer else []
        return "; ".join(notes) or None
    if issubclass(kind, SparseConfig) and steps * batch < SPARSE_STEPS * SPARSE_BATCH:
        return f"{ours}; the paper's is {SPARSE_STEPS:,} of {SPARSE_BATCH}"
    return None


def paper_tables(result: Result) -> list[list[list[str]]]:
    """Tables 1 and 2 of Rawlinson 2018 with our rows below theirs; none of runs that were not read out by protocol (a).

    In table 1 all rows that were, by both protocols; in table 2 the run alone, by protocol (a).
    """
    if "affnist_svm_a" not in result.metrics:
        return []
    first = [["table 1, accuracy (%)", "MNIST", "affNIST"]]
    first += [[name, _percent([mnist]), _percent([moved])] for name, (mnist, moved) in OTHERS.items()]
    for sparse, name in ((True, "sparse capsules"), (False, "dense capsules")):
        first += _by_protocol(name, {metric: [value] for metric, value in RAWLINSON[sparse].items()})
    for name, metrics in [(result.recipe, result.metrics), *result.controls.items()]:
        first += _by_protocol(f"ours: {name}", metrics) if "affnist_svm_a" in metrics else []
    second = [["table 2, accuracy (%)", "MNIST", "trained on affNIST", "affNIST"]]
    second += [[name, _percent([mnist]), how, _percent([moved])] for name, (mnist, how, moved) in BENCHMARK.items()]
    mnist, moved = (_percent(result.metrics[metric]) for metric in ("mnist_svm", "affnist_svm_a"))
    second.append([f"ours: {result.recipe}", mnist, _trained_on(result), moved])
    return [first, second]


def _by_protocol(name: str, metrics: Metrics) -> list[list[str]]:
    mnist = _percent(metrics["mnist_svm"])
    return [[f"{name} + SVM ({p})", mnist, _percent(metrics[f"affnist_svm_{p}"])] for p in "ab"]


def _trained_on(result: Result) -> str:
    return "yes" if result.config["data"]["train_on"] == "affnist" else "no"


def _percent(values: Sequence[float]) -> str:
    """Mean and deviation over seeds."""
    scaled = [100 * value for value in values]
    return f"{mean(scaled):.2f}" + (f" ± {stdev(scaled):.2f}" if len(scaled) > 1 else "")
