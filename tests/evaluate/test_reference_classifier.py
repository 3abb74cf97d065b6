from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from torchcaps.data import GlyphsConfig
from torchcaps.errors import DataError, ShapeError, TrainingError
from torchcaps.evaluate import reference_classifier
from torchcaps.evaluate.reference_classifier import (
    reference_features,
    reference_probabilities,
    train_reference_classifier,
)
from torchcaps.models import CNN, CNNConfig
from torchcaps.train import load_run
from torchcaps.types import ImageSpec

SMALL = GlyphsConfig(train=40, test=10, size=12)


def images(n: int) -> torch.Tensor:
    return torch.rand(n, 1, 12, 12, generator=torch.Generator().manual_seed(0))


def cnn() -> CNN:
    torch.manual_seed(0)
    return CNN(CNNConfig(widths=(4,), hidden=(6,)), ImageSpec(1, 12, 12, 3))


def test_the_classifier_is_trained_once_and_then_taken_from_its_folder(tmp_path):
    first = train_reference_classifier(SMALL, tmp_path / "reference", epochs=2.0, quiet=True)
    written = (tmp_path / "reference" / "checkpoint.safetensors").stat().st_mtime_ns
    run = load_run(tmp_path / "reference")
    again = train_reference_classifier(SMALL, tmp_path / "reference", epochs=2.0, quiet=True)
    assert not first.training and not again.training
    assert run.step == 2 and run.recipe.seed == 1000 and isinstance(run.recipe.model, CNNConfig)
    assert torch.equal(first(images(3)), again(images(3)))
    assert (tmp_path / "reference" / "checkpoint.safetensors").stat().st_mtime_ns == written


def test_a_classifier_of_other_data_or_another_seed_is_refused(tmp_path):
    train_reference_classifier(SMALL, tmp_path, epochs=1.0, quiet=True)
    changes: dict[str, dict[str, Any]] = {
        "data.train = 40, now it is 48": {"data": replace(SMALL, train=48)},
        "seed = 1000, now it is 7": {"seed": 7},
        "train.epochs = 1.0, now it is 3.0": {"epochs": 3.0},
    }
    for difference, change in changes.items():
        settings = {"data": SMALL, "epochs": 1.0, **change}
        with pytest.raises(TrainingError, match="no reference classifier for glyphs, or one that was") as told:
            train_reference_classifier(folder=tmp_path, quiet=True, **settings)
        assert difference in str(told.value.__cause__)


def test_a_folder_of_something_else_is_refused_and_the_option_is_named(tmp_path):
    (tmp_path / "notes").write_text("mine")
    for folder in (tmp_path, tmp_path / "notes"):
        with pytest.raises(TrainingError, match=r"no reference classifier for glyphs.*another folder \(--reference\)"):
            train_reference_classifier(SMALL, folder, quiet=True)


def test_the_classifier_learns_the_labels(tmp_path):
    data = GlyphsConfig(train=640, test=200, size=12)
    classifier = train_reference_classifier(data, tmp_path, epochs=8.0, quiet=True)
    test = data.load().test
    verdicts = reference_probabilities(classifier, test.images.float() / 255).argmax(-1)
    assert (verdicts == test.labels).float().mean() > 0.5


def test_one_label_an_image_is_wanted(tmp_path):
    @dataclass(frozen=True)
    class Two:
        def load(self):
            train, test, _ = SMALL.load()
            return SMALL.load()._replace(train=replace(train, labels=train.labels[:, None].repeat(1, 2)), test=test)

    with pytest.raises(DataError, match=r"labels of shape \[40, 2\]"):
        train_reference_classifier(Two(), tmp_path / "reference")
    assert not (tmp_path / "reference").exists()


def test_an_interrupted_classifier_is_not_handed_out(tmp_path, monkeypatch):
    whole = reference_classifier.train
    monkeypatch.setattr(reference_classifier, "train", lambda *a, **k: replace(whole(*a, **k), finished=False))
    with pytest.raises(TrainingError, match="run the command again"):
        train_reference_classifier(SMALL, tmp_path, epochs=1.0, quiet=True)


def test_features_are_the_hidden_layer_by_loops_also_while_training():
    model = cnn().train()
    pixels = images(5)
    weight, bias = model.head[0].weight.detach(), model.head[0].bias.detach()
    wanted = torch.zeros(5, 6)
    for n in range(5):
        x = model.trunk(pixels[n : n + 1])[0].detach()
        for m in range(6):
            wanted[n, m] = max(0.0, float((weight[m] * x).sum() + bias[m]))
    assert model.training
    assert torch.allclose(reference_features(model, pixels, batch=2), wanted, atol=1e-6)


def test_probabilities_sum_to_one_and_do_not_depend_on_the_batch():
    model, pixels = cnn().train(), images(7)
    p = reference_probabilities(model, pixels, batch=3)
    assert p.shape == (7, 3) and torch.allclose(p.sum(-1), torch.ones(7))
    assert torch.allclose(p, reference_probabilities(model, pixels, batch=100), atol=1e-6)
    assert torch.allclose(p, (model.head[3](reference_features(model, pixels))).softmax(-1), atol=1e-6)
    with pytest.raises(ShapeError, match="this model wants"):
        reference_probabilities(model, pixels[..., :5])
