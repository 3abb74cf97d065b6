"""Tables 1 and 2 of Rawlinson 2018, with our rows below the paper's."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean, stdev
from typing import NamedTuple

from torchcaps.evaluate.results import Metrics, Result
from torchcaps.systems.base import PaperBudget, Table

__all__ = ["BUDGET", "rawlinson_tables"]

BUDGET = PaperBudget(steps=30_000, batch=128, text="the paper's is 30,000 of 128")

MAIN_METRIC = "affnist_svm_a"
"""Rows that were not measured by protocol (a) are in neither table."""


class Supervised(NamedTuple):
    """A row of table 1: accuracies of a network that was trained with labels, on MNIST alone."""

    name: str
    mnist: float
    affnist: float


class Benchmark(NamedTuple):
    """A row of table 2: accuracies of a method, and whether affNIST was trained on."""

    name: str
    mnist: float
    trained_on_affnist: str
    affnist: float


TABLE_1_SUPERVISED = (
    Supervised("ConvNet (Sabour 2017)", 0.9922, 0.66),
    Supervised("CapsNet (Sabour 2017)", 0.9923, 0.79),
)
TABLE_1_CAPSULES: dict[str, dict[str, float]] = {
    "sparse capsules": {"mnist_svm": 0.99, "affnist_svm_a": 0.9012, "affnist_svm_b": 0.1699},
    "dense capsules": {"mnist_svm": 0.9737, "affnist_svm_a": 0.6063, "affnist_svm_b": 0.157},
}
"""Table 1: the paper's sparse capsules and their dense control, both trained on MNIST alone."""

TABLE_2 = (
    Benchmark("Zhao 2017", 0.9782, "yes", 0.8679),
    Benchmark("Chang 2017", 0.975, "scaled, shifted", 0.916),
    Benchmark("Asano 2018", 0.9925, "yes", 0.8755),
    Benchmark("CNN in Sabour 2017", 0.9922, "no", 0.66),
    Benchmark("sparse capsules", 0.99, "no", 0.9012),
)


def rawlinson_tables(result: Result) -> list[Table]:
    """Build the paper's two tables with the rows of a result below.

    Args:
        result: Of runs of sparse capsules.

    Returns:
        Table 1, in which every row of the result that was read out by protocol (a) has two rows, one a protocol, and
        table 2, with the runs alone. Nothing if the runs were not read out by protocol (a).
    """
    if MAIN_METRIC not in result.metrics:
        return []
    return [_table_1(result), _table_2(result)]


def _table_1(result: Result) -> Table:
    rows = [["table 1, accuracy (%)", "MNIST", "affNIST"]]
    # The rows of the paper.
    for row in TABLE_1_SUPERVISED:
        rows.append([row.name, _percent([row.mnist]), _percent([row.affnist])])
    for name, numbers in TABLE_1_CAPSULES.items():
        rows += _rows_by_protocol(name, {metric: [value] for metric, value in numbers.items()})
    # Ours: the runs, and the controls that have the metric.
    for name, metrics in [(result.recipe, result.metrics), *result.controls.items()]:
        if MAIN_METRIC in metrics:
            rows += _rows_by_protocol(f"ours: {name}", metrics)
    return rows


def _table_2(result: Result) -> Table:
    rows = [["table 2, accuracy (%)", "MNIST", "trained on affNIST", "affNIST"]]
    # The rows of the paper, and one for our runs.
    for row in TABLE_2:
        rows.append([row.name, _percent([row.mnist]), row.trained_on_affnist, _percent([row.affnist])])
    trained_on_affnist = "yes" if result.config["data"]["train_on"] == "affnist" else "no"
    mnist = _percent(result.metrics["mnist_svm"])
    rows.append([f"ours: {result.recipe}", mnist, trained_on_affnist, _percent(result.metrics[MAIN_METRIC])])
    return rows


def _rows_by_protocol(name: str, metrics: Metrics) -> Table:
    """One row for each protocol, (a) and (b), in which the SVM was trained."""
    mnist = _percent(metrics["mnist_svm"])
    return [[f"{name} + SVM ({p})", mnist, _percent(metrics[f"affnist_svm_{p}"])] for p in "ab"]


def _percent(values: Sequence[float]) -> str:
    """Format mean and standard deviation over seeds."""
    scaled = [100 * value for value in values]
    text = f"{mean(scaled):.2f}"
    return f"{text} ± {stdev(scaled):.2f}" if len(scaled) > 1 else text
