"""The moving average of the weights: its rule, its place in a checkpoint, and who gets it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from support.easy_images import easy
from support.tiny_recipe import tiny
from torchcaps.config import from_dict
from torchcaps.errors import RecipeError
from torchcaps.models import CNN
from torchcaps.train import load_run, train
from torchcaps.train.checkpoint import load as read_checkpoint
from torchcaps.train.checkpoint import save
from torchcaps.train.journal import read_journal
from torchcaps.train.recipe import Recipe
from torchcaps.train.run import checkpoint_path
from torchcaps.train.running_statistics import measure_running_statistics, training_batches
from torchcaps.train.weights_export import strip_to_weights

CNN_TABLE = {"name": "cnn", "widths": [4], "hidden": [], "dropout": 0.0}
NORMED = {"name": "matrix-tiny", "norm": True, "loss": "cross-entropy"}
DECAY = 0.7


def recipe_of(model: dict[str, Any], data: dict[str, Any], **settings: Any) -> Recipe:
    table = {"epochs": 1.0, "batch": 8, "ema_decay": DECAY, "save_every": 3, "log_every": 2, **settings}
    return from_dict(Recipe, {"seed": 3, "data": data, "model": model, "train": table})


def states(folder) -> dict[str, Tensor]:
    return read_checkpoint(checkpoint_path(folder)).tensors


def test_the_average_follows_its_rule_and_is_what_a_run_loads(tmp_path, monkeypatch):
    data = easy(tmp_path)
    seen = []
    objective = CNN.objective

    def look(self, batch, step):
        seen.append([p.detach().clone() for p in self.parameters()])
        return objective(self, batch, step)

    monkeypatch.setattr(CNN, "objective", look)
    outcome = train(recipe_of(CNN_TABLE, data), tmp_path / "run", quiet=True)
    trained = states(tmp_path / "run")
    names = [name for name, _ in outcome.model.named_parameters()]
    seen.append([trained[f"state.model.{name}"] for name in names])
    assert len(seen) == 11
    average = seen[0]
    for n, weights in enumerate(seen[1:]):
        d = min(DECAY, (1 + n) / (10 + n))
        average = [d * a + (1 - d) * w for a, w in zip(average, weights, strict=True)]
    loaded = load_run(tmp_path / "run").model
    for name, wanted in zip(names, average, strict=True):
        torch.testing.assert_close(outcome.model.get_parameter(name), wanted, rtol=1e-4, atol=1e-6)
        assert torch.equal(loaded.get_parameter(name), outcome.model.get_parameter(name))
        assert not torch.equal(loaded.get_parameter(name), trained[f"state.model.{name}"])
    # Whoever is given the weights, or starts from them, gets the average.
    save(tmp_path / "given.safetensors", strip_to_weights(read_checkpoint(checkpoint_path(tmp_path / "run"))))
    given = load_run(tmp_path / "given.safetensors").model.state_dict()
    assert all(torch.equal(given[name], value) for name, value in loaded.state_dict().items())
    seen.clear()
    onward = replace(recipe_of(CNN_TABLE, data), start=str(tmp_path / "run"), seed=4)
    train(onward, tmp_path / "on", quiet=True)
    assert all(torch.equal(a, b) for a, b in zip(seen[0], loaded.parameters(), strict=True))


def test_a_run_without_an_average_stores_what_it_always_did(tmp_path):
    recipe = tiny(train={"epochs": 0.1})
    train(recipe, tmp_path, quiet=True)
    checkpoint = read_checkpoint(checkpoint_path(tmp_path))
    assert sorted(checkpoint.state) == ["model", "optimizer", "schedule"]  # type: ignore[call-overload]


@pytest.fixture(scope="module")
def normed(tmp_path_factory) -> tuple[Recipe, Any]:
    """A run with batch normalization, mixup and smoothed labels, never interrupted."""
    place = tmp_path_factory.mktemp("normed")
    options = {"mixup_alpha": 0.2, "label_smoothing": 0.1, "validate_every": 4}
    recipe = recipe_of(NORMED, easy(place), **options)
    train(recipe, place / "whole", quiet=True)
    return recipe, place / "whole"


def test_a_resumed_run_has_the_same_average_to_the_bit(normed, tmp_path):
    """Cut in the middle of an epoch and again at its end, where statistics had been measured for the average."""
    recipe, whole = normed
    for epochs in (0.4, 0.5, 1.0):
        train(replace(recipe, train=replace(recipe.train, epochs=epochs)), tmp_path, resume="auto", quiet=True)
    one, other = states(whole), states(tmp_path)
    assert one.keys() == other.keys() and any(name.startswith("state.average.") for name in one)
    assert all(torch.equal(one[name], other[name]) for name in one)
    found = [
        {entry["step"]: entry["validation_accuracy"] for entry in read_journal(folder / "journal.jsonl")
         if "validation_accuracy" in entry}
        for folder in (whole, tmp_path)
    ]  # fmt: skip
    assert found[0].keys() == {4, 8} and found[0] == found[1]


def test_running_statistics_of_the_average_are_measured_for_it(normed):
    recipe, whole = normed
    loaded = load_run(whole).model
    before = {name: value.clone() for name, value in loaded.state_dict().items()}
    stored = states(whole)
    assert not torch.equal(before["features_norm.mean"], stored["state.model.features_norm.mean"])
    measure_running_statistics(loaded, training_batches(recipe.data.load().train, recipe.train, recipe.seed))
    for name, value in loaded.state_dict().items():
        torch.testing.assert_close(value, before[name], rtol=1e-5, atol=1e-6)


def test_what_cannot_be_averaged_mixed_or_smoothed_is_refused_before_anything_is_written(tmp_path):
    for option in ({"mixup_alpha": 0.2}, {"label_smoothing": 0.1}):
        with pytest.raises(RecipeError, match="CapsNet here is none"):
            train(tiny(train=option), tmp_path / "run", quiet=True)
    several = recipe_of({**CNN_TABLE, "several": True}, easy(tmp_path), mixup_alpha=0.2)
    with pytest.raises(RecipeError, match="CNN here is none"):
        train(several, tmp_path / "run", quiet=True)
    staged = tiny(data={"size": 20}, model={"name": "poe"}, train={"ema_decay": 0.9})
    with pytest.raises(RecipeError, match="has the stages autoencoder"):
        train(staged, tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()
    with pytest.raises(RecipeError, match="ema_decay"):
        tiny(train={"ema_decay": 1.0})
