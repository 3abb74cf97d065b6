"""Does the adapter of a system declare and answer everything that commands ask of it?"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from torchcaps.data import Dataset, Splits
from torchcaps.models import MODELS, Model, ModelConfig
from torchcaps.systems import EvaluationOptions, FigureOptions, Metric, System, model_name
from torchcaps.systems.figure_context import draw_figure
from torchcaps.train.recipe import Recipe
from torchcaps.train.run import TrainedRun

__all__ = ["assert_system"]

OPTIONS = FigureOptions(count=2)
OPTION_NAMES = {"capsule", "domain", "beside"}
PNG = b"\x89PNG"
DIRECTIONS = ("lower", "higher", "neither")


def assert_system(system: System, config: ModelConfig, splits: Splits, more_data: Sequence[Dataset] = ()) -> None:
    """Check a system with a small model of it, untrained.

    Args:
        system: The adapter, registered or not.
        config: Of a model that belongs to it, registered in `MODELS`.
        splits: A few images, for which the model is built.
        more_data: Further test images, for figures that cannot be drawn of the first.

    Raises:
        AssertionError: Names the law that is broken. Names, models and metrics are declared; what is measured is
            declared; every figure has a caption and draws; the explorer's view answers; predictions are made.
    """
    # What is declared
    _check_declarations(system)
    name = model_name(config)
    assert name in system.models, f"system '{system.name}' does not list the model '{name}' in `models`"
    # What a model of it, untrained, can be asked
    model = config.build(splits.train.spec).eval()
    recipe = Recipe(name="contract", model=config)
    if model.is_classifier:
        _check_measurement(system, model, recipe, splits)
        _check_prediction(system, TrainedRun(model, recipe, 0, 0.0), splits.test)
    _check_figures(system, model, [splits.test, *more_data])
    if system.explorer_view is not None:
        _check_explorer(system, model, splits.test)


def _check_declarations(system: System) -> None:
    """Names, models, metrics and controls are there and unambiguous."""
    assert system.name and system.name == system.name.lower(), f"name = '{system.name}'; lower case is wanted"
    assert system.models, f"system '{system.name}' lists no model"
    for model in system.models:
        assert model in MODELS, f"system '{system.name}': model '{model}' is not in MODELS"
    assert system.metrics, f"system '{system.name}' declares no metric"
    for metric in system.metrics:
        assert isinstance(metric, Metric) and metric.name, f"system '{system.name}': {metric!r} has no name"
        better = f"metric '{metric.name}': better = '{metric.better}' is none of {DIRECTIONS}"
        assert metric.better in DIRECTIONS, better
    for what, names in (("metric", [metric.name for metric in system.metrics]), ("control", list(system.controls))):
        assert len(set(names)) == len(names), f"system '{system.name}' declares a {what} twice: {names}"


def _check_measurement(system: System, model: Model, recipe: Recipe, splits: Splits) -> None:
    """Every number that is measured is declared."""
    for name, value in system.measure(model, recipe, splits, EvaluationOptions(views=1)).items():
        assert isinstance(value, float), f"metric '{name}' is {value!r}; a float is wanted"
        declared = any(metric.covers(name) for metric in system.metrics)
        assert declared, f"metric '{name}' is measured, but not declared in `metrics` of system '{system.name}'"


def _check_prediction(system: System, run: TrainedRun, data: Dataset) -> None:
    """A prediction an image, with a drawing where the system redraws."""
    predictions = system.predict(run, data)
    assert len(predictions) == len(data), f"{len(predictions)} predictions came for {len(data)} images"
    if system.redraws:
        drawn = system.draw_prediction(run.model, data, 0, predictions[0])
        assert drawn.startswith(PNG), f"system '{system.name}': draw_prediction gave no PNG"


def _check_figures(system: System, model: Model, data: Sequence[Dataset]) -> None:
    """Every kind of figure has a caption, and draws from at least one of the data sets."""
    for kind, figure in system.figures.items():
        assert figure.caption.endswith("."), f"figure '{kind}': caption '{figure.caption}' is no sentence"
        unknown = set(figure.options) - OPTION_NAMES
        assert not unknown, f"figure '{kind}' has the unknown options {unknown}; known: {OPTION_NAMES}"
        contexts = [system.figure_context(model, OPTIONS, partial(_same, one)) for one in data]
        possible = [context for context in contexts if not figure.obstacle(context)]
        assert possible, f"figure '{kind}' {figure.obstacle(contexts[0])}; give data of which it can be drawn"
        files = draw_figure(system.figures, kind, possible[0])
        assert files, f"figure '{kind}' draws nothing"
        for name, content in files.items():
            assert content.startswith(PNG), f"figure '{kind}': '{name}' is no PNG"


def _same(data: Dataset) -> Dataset:
    return data


def _check_explorer(system: System, model: Model, data: Dataset) -> None:
    """The explorer's view says how active each capsule is, and how it was routed to."""
    images = data.model_input(slice(0, 4))
    view = system.explore(model, (), images)
    reading = view.infer(images[0])
    assert reading.activation.shape == (view.capsules,), f"the view has {list(reading.activation.shape)} activations"
    assert bool(torch.isfinite(reading.activation).all()), "the view's activations are not finite"
    assert view.routing(images[0], reading.winner) is not None, "the view says nothing about routing"
