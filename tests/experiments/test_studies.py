"""The studies in experiments/ still do what their results say, on problems small enough for a test."""

from __future__ import annotations

import json
import math

import pytest
import torch

import activation_statistics
import early_training_table
import em_free_energy
import poe_likelihood
from support.tiny_recipe import tiny
from torchcaps.routing import EM
from torchcaps.train import load_run, train
from torchcaps.types import ImageSpec


def test_descent_never_raises_the_free_energy_and_the_paper_s_assignment_does(monkeypatch):
    monkeypatch.setattr(em_free_energy, "PROBLEMS", 50)
    shares = {
        kind: em_free_energy.rising_share(EM(final_inverse_temperature=1.0, decay=0.0, assignment=kind), seed=0)
        for kind in ("descent", "paper")
    }
    assert shares["descent"] == 0 < shares["paper"]


def test_contrastive_divergence_is_measured_by_the_exact_and_by_the_annealed_partition_function(monkeypatch):
    monkeypatch.setattr(poe_likelihood, "STEPS", 20)
    row = poe_likelihood.measure(poe_likelihood.train_energy(0), poe_likelihood.data(100, 50), seed=0)
    assert math.isfinite(row["log_likelihood"]) and row["ais_error"] < 0.2
    assert row["by_ais"] == pytest.approx(row["log_likelihood"], abs=0.2)


def test_activations_are_listed_layer_by_layer():
    from torchcaps.models import MODELS

    model = MODELS["matrix-tiny"]().build(ImageSpec(1, 16, 16, 4))
    found = activation_statistics.activations(model, torch.rand(3, 1, 16, 16))
    assert list(found) == list(activation_statistics.LAYERS)
    assert all(a.shape[0] == 3 and bool(((a >= 0) & (a <= 1)).all()) for a in found.values())
    assert found["classes"].shape == (3, 4)


def test_short_runs_are_compared_by_what_differs_and_what_they_learned(tmp_path, monkeypatch):
    monkeypatch.setattr("lab_result.ROOT", tmp_path)
    (tmp_path / "results").mkdir()
    monkeypatch.setattr(early_training_table, "STEPS", (4, 100))
    for name, over in {"one": {}, "other": {"model": {"dimension": 6}}}.items():
        train(tiny(train={"epochs": 0.6}, **over), tmp_path / name, quiet=True)
    early_training_table.main(["study", str(tmp_path / "one"), str(tmp_path / "other")])
    rows = json.loads((tmp_path / "results" / "lab-study.json").read_text())["rows"]
    assert rows[0] == ["setting", "right (%) at step 4", "test error (%)"]  # no run came to step 100
    assert [row[0] for row in rows[1:]] == ["as the first", "model.dimension = 6"]
    assert load_run(tmp_path / "one").finished and all(0 <= float(row[2]) <= 100 for row in rows[1:])
