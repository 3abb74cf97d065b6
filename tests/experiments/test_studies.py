"""The studies in experiments/ still do what their results say, on problems small enough for a test."""

from __future__ import annotations

import json
import math
from typing import Any, cast

import pytest
import torch

import activation_statistics
import affnist_held_out
import early_training_table
import em_free_energy
import held_out_instances
import poe_decoders
import poe_likelihood
import poe_refined_frames
import validation_table
from support.easy_images import easy
from support.tiny_recipe import tiny
from torchcaps.config import from_dict
from torchcaps.data import AffnistConfig, Dataset, Splits
from torchcaps.evaluate.reference_classifier import reference_features
from torchcaps.models import CNN, CNNConfig, PoE
from torchcaps.routing import EM
from torchcaps.train import load_run, train
from torchcaps.train.recipe import Recipe, recipe_of
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


@pytest.fixture
def stereo() -> Dataset:
    """Every combination of two classes, two instances and the views, each image of a brightness of its own."""
    values = torch.cartesian_prod(*(torch.arange(n) for n in (2, 2, 2, 3, 2)))  # [48 5]
    factors = dict(zip(("instance", *held_out_instances.VIEWS), values.T[1:], strict=True))
    images = torch.randint(0, 256, (48, 2, 6, 6), generator=torch.Generator().manual_seed(0)).byte()
    return Dataset(images, values[:, 0], 2, factors, ("car", "truck"))


def test_errors_are_counted_by_instance_and_by_viewpoint(stereo):
    """Instance 1 of the cars is wrong from elevation 0, and one image of a truck is."""
    predicted = stereo.labels.clone()
    predicted[(stereo.labels == 0) & (stereo.factors["instance"] == 1) & (stereo.factors["elevation"] == 0)] = 1
    predicted[stereo.labels == 1] = torch.tensor([0] + 23 * [1])
    rows = held_out_instances.instance_rows(stereo, predicted)
    assert rows[1:] == [["car", "0.0", "50.0, truck"], ["truck", "8.3, car", "0.0"]]
    worst = held_out_instances.worst_instances(stereo, predicted)
    assert worst == [(0, 1), (1, 0)]
    views = {row[0]: row[1:] for row in held_out_instances.view_rows(stereo, predicted, worst)}
    assert views["wrong (%)"] == ["all", "car 1", "truck 0"] and len(views) == 1 + 2 + 3 + 2
    assert views["elevation 0"] == ["29.2", "100.0", "16.7"] and views["elevation 1"] == ["0.0", "0.0", "0.0"]


def test_a_wrong_image_is_shown_above_the_training_image_of_its_view_that_looks_like_it(stereo):
    n = 30
    view = torch.stack([stereo.factors[factor][n] for factor in held_out_instances.VIEWS])
    assert torch.equal(held_out_instances.look_alike(stereo.pixels()[n], view, stereo, 1), stereo.pixels()[n])
    found = held_out_instances.look_alike(stereo.pixels()[n], view, stereo, 0)
    same = [m for m in range(24) if all(stereo.factors[f][m] == stereo.factors[f][n] for f in held_out_instances.VIEWS)]
    assert len(same) == 2 and any(torch.equal(found, stereo.pixels()[m]) for m in same)
    predicted = 1 - stereo.labels
    drawn = held_out_instances.draw(stereo, predicted, stereo, held_out_instances.worst_instances(stereo, predicted))
    assert drawn.startswith(b"\x89PNG")


def test_runs_are_compared_on_what_they_hold_out(tmp_path, monkeypatch):
    monkeypatch.setattr("lab_result.ROOT", tmp_path)
    (tmp_path / "results").mkdir()
    data = easy(tmp_path)
    model = {"name": "cnn", "widths": [4], "hidden": [], "dropout": 0.0}
    table: dict[str, Any] = {"name": "one", "data": data, "model": model, "train": {"epochs": 0.5, "batch": 8}}
    averaged = {"train": {**table["train"], "ema_decay": 0.5}}
    for name, over in {"a-0": {}, "a-1": {"seed": 1}, "b-0": averaged}.items():
        train(from_dict(Recipe, {**table, **over}), tmp_path / name, quiet=True)
    validation_table.main(["choice", *(str(tmp_path / name) for name in ("a-0", "a-1", "b-0", "never"))])
    rows = json.loads((tmp_path / "results" / "lab-choice.json").read_text())["rows"]
    assert [(row[0], row[-1]) for row in rows[1:]] == [
        ("as the first", "2"),
        ("train.ema_decay = 0.5", "1"),
        ("train.ema_decay = 0.5; weights of the last step", "1"),
    ]
    assert all(0 <= float(row[2]) <= 100 for row in rows[1:])
    # A table made again without a run's folder keeps its error; one with another reference does not
    validation_table.main(["choice", str(tmp_path / "a-1"), str(tmp_path / "a-0")])
    again = json.loads((tmp_path / "results" / "lab-choice.json").read_text())["rows"]
    assert sorted(again) == sorted(rows)
    validation_table.main(["choice", str(tmp_path / "b-0")])
    assert len(json.loads((tmp_path / "results" / "lab-choice.json").read_text())["rows"]) == 3


def framed_recipe(**prototypes: int) -> Recipe:
    """Expert capsules with frames and edges, trained in a second."""
    return recipe_of(
        {
            "name": "framed",
            "data": {"name": "glyphs", "train": 256, "test": 64, "size": 16},
            "model": {
                "name": "poe", "capsules": 4, "dimension": 4, "child_dimension": 4,
                "autoencoder": {"channels": [8, 8], "kernel": 5},
                "children": "edges", "frames": "moments", "energy": {"ramp": 10, "loosen": 20, **prototypes},
            },
            "train": {"epochs": 3.0, "batch": 32},
            "optimizer": {"lr": 0.01},
        }
    )  # fmt: skip


def test_decoders_are_compared_on_the_same_capsules_beside_local_pca(tmp_path, monkeypatch):
    monkeypatch.setattr(poe_decoders, "SAMPLES", 6)
    recipe = framed_recipe()
    splits = recipe.data.load()
    model = cast(PoE, train(recipe, tmp_path / "run", quiet=True).model)
    reference = CNN(CNNConfig(widths=(4,), hidden=(6,)), splits.train.spec).eval()
    images = splits.test.model_input()
    data = poe_decoders.HeldOut(
        model.eval(), splits.train, images, reference, reference_features(reference, images[:24])
    )
    rows = [poe_decoders.measure_capsules(data, curvature, 16) for curvature in (0, 4)]
    rows += [poe_decoders.measure_local_pca(data, curvature, 200) for curvature in (0, 4)]
    covered = [poe_decoders.measure_capsules(data, 4, 16, 0.7), poe_decoders.measure_local_pca(data, 0, 200, 0.7)]
    assert all(row.name.endswith("coverage 0.7") for row in covered)
    # What poses are stored of changes the samples, and the decoder by its axes alone
    assert covered[0].numbers["mse"] == pytest.approx(rows[1].numbers["mse"], rel=1e-2)
    assert covered[0].numbers["frechet"] != rows[1].numbers["frechet"]
    # Products explain more of the images than poses alone, for capsules and for local PCA
    errors = [row.numbers["mse"] for row in rows]
    assert errors[1] < errors[0] and all(math.isfinite(x) for row in rows for x in row.numbers.values())
    table = poe_decoders.table([rows, rows])
    assert table[0][:2] == ["row", "mse"] and len(table) == 5 and len({len(line) for line in table}) == 1
    assert table[1][1] == f"{errors[0]:.5f}" and table[3][-1] == "-"


def test_a_refined_frame_never_lowers_the_support_of_the_best_capsule(tmp_path):
    recipe = framed_recipe(prototypes=2)
    model = cast(PoE, train(recipe, tmp_path / "run", quiet=True).model.eval())
    images = recipe.data.load().test.model_input()[:24]
    before = poe_refined_frames.moments(model, images)
    # Capsules are ranked as the model itself ranks them
    state = model.infer(images)
    assert state.ranks is not None and torch.equal(before.argmax(1), state.ranks.argmin(1))
    after = poe_refined_frames.refined(model, images, 2)
    assert (after.amax(1) >= before.amax(1) - 1e-6).all() and (after.amax(1) > before.amax(1) + 1e-3).any()
    apart = poe_refined_frames.refined_apart(model, images, 1)
    assert apart.shape == before.shape and (apart >= before - 1e-6).all()


def test_the_search_finds_the_top_of_a_hill():
    top = torch.tensor([[0.1, -0.2, 1.5, 0.4], [0.0, 0.1, -1.0, 2.0]])
    found = poe_refined_frames.refine(lambda numbers: -(numbers - top).square().sum(1), torch.zeros(2, 4), rounds=6)
    assert (found - top).abs().max() < 0.1


class LeftHalf(CNN):
    """Says 1 of an image with more ink in its left half, else 0."""

    def scores(self, images: torch.Tensor) -> torch.Tensor:
        left, right = (half.sum((1, 2, 3)) for half in images.split(images.shape[-1] // 2, -1))
        return torch.stack((right, left), -1)


def test_held_out_digits_are_transformed_and_told_apart_by_their_shift(monkeypatch):
    """Dots instead of digits, and a model that says on which side of the canvas the ink lies."""
    images = torch.zeros(40, 1, 28, 28, dtype=torch.uint8)
    images[:, :, 12:16, 12:16] = 255
    digits = Dataset(images, torch.arange(40) % 2, 2)
    monkeypatch.setattr(affnist_held_out.MnistConfig, "load", lambda self: Splits(digits, digits))
    data = AffnistConfig(train=40, validation=10)
    found = affnist_held_out.transform_held_out(data, largest_shift=6, count=300)
    # The last ten digits, again and again
    assert found.data.images.shape == (300, 1, 40, 40) and found.data.labels.tolist() == [0, 1] * 150
    # A dot of four pixels may go anywhere on 40x40: most of that is further than six pixels from the middle
    place = found.data.images.float()[:, 0]
    columns = (place.sum(1) * torch.arange(40)).sum(-1) / place.sum((1, 2)) - 19.5
    rows = (place.sum(2) * torch.arange(40)).sum(-1) / place.sum((1, 2)) - 19.5
    far = torch.maximum(columns.abs(), rows.abs())
    assert (far[found.beyond] > 5.5).all() and (far[~found.beyond] < 6.5).all()
    # What is said of each part is its share of right answers
    model = LeftHalf(CNNConfig(), found.data.spec)
    right = ((columns < 0).long() == found.data.labels).double() * 100
    accuracies = affnist_held_out.measure(model, found.data, found)
    assert accuracies.transformed == accuracies.shifted == pytest.approx(float(right.mean()), abs=1)
    assert accuracies.within == pytest.approx(float(right[~found.beyond].mean()), abs=2)
    assert accuracies.beyond == pytest.approx(float(right[found.beyond].mean()), abs=2)
