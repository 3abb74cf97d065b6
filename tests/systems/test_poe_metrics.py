from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from support.tiny_recipe import tiny
from torchcaps.config import to_dict
from torchcaps.data import MnistConfig, NpzConfig
from torchcaps.errors import RecipeError, TrainingError
from torchcaps.evaluate.baselines import fit_kmeans, fit_local_pca
from torchcaps.evaluate.reference_classifier import reference_probabilities
from torchcaps.evaluate.sample_metrics import cross_capsule_cka, sample_confidence
from torchcaps.math.squash import squash
from torchcaps.models import CNN, CNNConfig
from torchcaps.systems import SYSTEMS, evaluate_runs, evaluation
from torchcaps.systems.poe import controls as poe_controls
from torchcaps.systems.poe import metrics as poe_metrics
from torchcaps.systems.poe import system as poe_system
from torchcaps.systems.poe.controls import CONTROLS
from torchcaps.systems.poe.encoders import BaselineEncoder, EncodedFeatures, PoEEncoder
from torchcaps.systems.poe.metrics import SAMPLES, build_evaluation_data, measure
from torchcaps.systems.report import rows_of, text_table
from torchcaps.train import Recipe, load, load_run, train
from torchcaps.train.recipe import OptimizerConfig, recipe_of, without_folders
from torchcaps.train.train_state import build_model
from torchcaps.types import ImageSpec

METRICS = [
    "confident_fraction", "classes_covered", "consistency", "mixture_confident", "mixture_consistency",
    "gaussian_confident", "gaussian_consistency", "restricted_confident", "complete_confident", "argmax_nmi", "purity",
    "cka", "bottleneck_mse", "tied_mse", "autoencoder_mse", "knn", "linear_probe", "frechet", "capsules_used",
]  # fmt: skip
CAPSULES_ONLY = {
    "tied_mse",
    "mixture_confident",
    "mixture_consistency",
    "gaussian_confident",
    "gaussian_consistency",
    "restricted_confident",
    "complete_confident",
}
TRAINED = ("paper", "offset only")


def experts(**over) -> Recipe:
    """Four capsules of four numbers on drawn digits of 16 x 16."""
    energy = {"ramp": 10, "loosen": 20, **over.pop("energy", {})}
    model = {
        "name": "poe", "capsules": 4, "dimension": 4, "child_dimension": 4,
        "autoencoder": {"channels": [8, 8], "kernel": 5}, "energy": energy,
    }  # fmt: skip
    base = {
        "name": "experts", "data": {"name": "glyphs", "train": 256, "test": 64, "size": 16}, "model": model,
        "train": {"epochs": 2.0, "batch": 32}, "optimizer": {"lr": 0.01},
        "stages": {"capsules": {"optimizer": {"name": "SGD", "lr": 0.2, "options": {"momentum": 0.9}}}},
    }  # fmt: skip
    return recipe_of({**base, **over})


@pytest.fixture(scope="module", autouse=True)
def _short_reference():
    """Train the reference classifier for a few steps: its answers do not matter here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(poe_system, "REFERENCE_STEPS", 20)
        yield


@pytest.fixture(scope="module")
def run_folders(tmp_path_factory) -> Path:
    """A folder with two seeds of the recipe, evaluated together once."""
    folder = tmp_path_factory.mktemp("experts")
    for seed in (0, 1):
        train(experts(seed=seed), folder / f"s{seed}", quiet=True)
    return folder


@pytest.fixture(scope="module")
def result(run_folders):
    return evaluate_runs([run_folders / "s0", run_folders / "s1"])


@pytest.fixture(scope="module")
def measured(run_folders):
    torch.manual_seed(0)
    model = load(run_folders / "s0")
    return build_evaluation_data(
        model, experts().data.load(), CNN(CNNConfig(widths=(4,), hidden=(6,)), model.spec).eval()
    )


def test_every_row_has_every_metric(result):
    assert list(result.metrics) == METRICS and list(result.controls) == [*CONTROLS, "real images"]
    (real,) = result.controls["real images"]["confident_fraction"]
    assert 0 <= real <= 1 and len(result.controls["real images"]) == 1
    for name, row in {"run": result.metrics, **{name: result.controls[name] for name in CONTROLS}}.items():
        lacks = set() if name in ("run", *TRAINED, "random W") else CAPSULES_ONLY
        assert set(row) == set(METRICS) - lacks, name
        for metric, values in row.items():
            assert len(values) == 2 and torch.tensor(values).isfinite().all(), (name, metric)
            assert row["autoencoder_mse"] == result.metrics["autoencoder_mse"]
    assert result.seeds == [0, 1] and result.recipe == "experts"
    assert result.config == to_dict(experts())
    assert (
        result.budget["steps"] == 48 and result.budget["memory"] > 50 and 0 <= result.budget["reference_accuracy"] <= 1
    )


def test_results_do_not_say_where_a_machine_keeps_its_data():
    recipe = replace(experts(), data=MnistConfig(data_dir="somewhere"))
    assert without_folders(recipe) == to_dict(replace(recipe, data=MnistConfig()))
    assert without_folders(experts()) == to_dict(experts())
    mine = replace(experts(), data=NpzConfig(path="/data/me/pictures.npz"), start="/data/me/runs/first")
    assert without_folders(mine) == to_dict(replace(mine, data=NpzConfig(path="pictures.npz"), start="first"))


def test_a_repetition_trains_nothing_and_finds_the_same(run_folders, result):
    kept = {path: path.stat().st_mtime_ns for path in run_folders.rglob("checkpoint.safetensors")}
    assert {str(path.parent.relative_to(run_folders)) for path in kept} >= {
        "s0", "s1", "s0/controls/paper", "s0/controls/offset", "s1/controls/paper", "s1/controls/offset",
    }  # fmt: skip
    assert len([path for path in kept if path.parent.name.startswith("reference-classifier-glyphs-")]) == 1
    again = evaluate_runs([run_folders / "s1"], only=[*TRAINED, "random W", "k-means"])
    assert {path: path.stat().st_mtime_ns for path in run_folders.rglob("checkpoint.safetensors")} == kept
    assert list(again.controls) == [*TRAINED, "random W", "k-means", "real images"]
    assert again.controls.pop("real images") == result.controls["real images"]
    assert again.metrics == {name: values[1:] for name, values in result.metrics.items()}
    for name, row in again.controls.items():
        assert row == {metric: values[1:] for metric, values in result.controls[name].items()}, name


def test_the_row_of_real_images_may_be_named_and_is_always_there(run_folders, result):
    for only in (["real images"], ["random W", "real images"], []):
        found = evaluate_runs([run_folders / "s1"], only=only)
        assert list(found.controls) == [*only[:-1], "real images"]
    with pytest.raises(RecipeError, match="unknown control 'real image'"):
        SYSTEMS["poe"].select_controls(["real image"])


def test_controls_stand_on_the_autoencoder_of_the_run_and_train_a_quarter_as_long(run_folders, result):
    own = load_run(run_folders / "s0")
    for name, mode in (("paper", "paper"), ("offset", "offset")):
        control = load_run(run_folders / "s0" / "controls" / name)
        assert control.recipe.name == f"experts-{mode}" and control.recipe.model.energy.mode == mode
        was, now = own.recipe.stages["capsules"], control.recipe.stages["capsules"]
        optimizer = OptimizerConfig("SGD", 2 / 4, {"momentum": 0.9}) if name == "paper" else was.optimizer
        quarter = replace(was.train, epochs=was.train.epochs / 4)
        assert now == replace(was, optimizer=optimizer, train=quarter)
        steps = round(was.train.epochs * 8)
        assert control.step == own.step - 16 - (steps - round(quarter.epochs * 8))  # without the autoencoder's
        states = own.model.autoencoder.state_dict(), control.model.autoencoder.state_dict()
        assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])
        assert not torch.equal(own.model.energy.W, control.model.energy.W)
    routing = load_run(run_folders / "s0" / "controls" / "paper").recipe.model.energy.routing
    assert (routing.iterations, routing.agreement, routing.over) == (3, "cosine", "children")


def test_a_control_of_another_autoencoder_is_refused(run_folders, result, measured):
    other = load(run_folders / "s1")
    with pytest.raises(TrainingError, match="another autoencoder"):
        poe_controls._train_control(
            poe_controls._variant(experts(), "paper", 256), run_folders / "s0" / "controls" / "paper", other
        )
    with pytest.raises(TrainingError, match=r"dimension = 4, now it is 2.*; for this control: delete"):
        changed = replace(experts(), model=replace(experts().model, dimension=2))
        poe_controls._train_control(
            poe_controls._variant(changed, "paper", 256), run_folders / "s0" / "controls" / "paper", measured.model
        )


def test_the_run_s_numbers_are_those_of_the_model_itself(measured):
    model, row = measured.model, measure(PoEEncoder(measured.model), measured)
    with torch.no_grad():
        pixels = measured.images
        capsules_, seen = model.encode(pixels), model.infer(pixels)
        samples = torch.stack([model.sample(j, SAMPLES, "empirical", 0) for j in range(4)])
        assert row["bottleneck_mse"] == pytest.approx(float((model.reconstruct(pixels) - pixels).square().mean()), 1e-5)
        assert row["tied_mse"] == pytest.approx(float((model.reconstruct_tied(pixels) - pixels).square().mean()), 1e-5)
        drawn = model.draw_images(model.features(pixels))
        assert row["autoencoder_mse"] == pytest.approx(float((drawn - pixels).square().mean()), 1e-5)
        assert row["cka"] == pytest.approx(cross_capsule_cka(squash(seen.z)), 1e-4)
        assert torch.allclose(PoEEncoder(model).codes(measured.features), capsules_.pose, atol=1e-6)
        verdicts = reference_probabilities(measured.reference, samples.flatten(0, 1)).view(4, SAMPLES, -1)
    assert verdicts.shape[:2] == (4, 50)
    assert {name: row[name] for name in METRICS[:3]} == sample_confidence(verdicts)


class Knows:
    """An encoder that knows the classes, and draws one test image of its own class for each."""

    def __init__(self, measured, labels=None):
        self.m, self.seen = measured, measured.labels if labels is None else labels
        self.asked = []

    def codes(self, f):
        labels = self.m.fitted_labels if f is self.m.fitted else self.m.labels
        return torch.nn.functional.one_hot(labels, 10).float()

    def encode(self, f):
        codes = self.codes(f)
        return EncodedFeatures(codes, poses=codes[:, :2, None], winners=self.seen, rebuilt=f, rebuilt_tied=None)

    def samples(self, n, seed):
        self.asked.append(n)
        first = [int((self.m.labels == j).nonzero()[0]) for j in range(10)]
        return self.m.images[first][:, None].repeat(1, n, 1, 1, 1)


class Sure(CNN):
    """A reference classifier that is sure of the class of known images, and unsure of all others."""

    def __init__(self, spec, images, labels):
        super().__init__(CNNConfig(widths=(4,), hidden=(6,)), spec)
        self.images, self.labels = images, labels

    def scores(self, images):
        same = (images[:, None] == self.images).flatten(2).all(-1)  # [n m]
        known = torch.nn.functional.one_hot(self.labels[same.int().argmax(-1)], 10).float()
        return torch.where(same.any(-1, keepdim=True), known, 0.1)


def test_an_encoder_that_knows_the_classes_has_known_numbers(measured):
    reference = Sure(ImageSpec(1, 16, 16, 10), measured.images, measured.labels)
    knows = Knows(measured)
    row = measure(knows, replace(measured, reference=reference))
    assert knows.asked == [SAMPLES]
    for name in ("confident_fraction", "consistency", "argmax_nmi", "purity", "knn", "linear_probe"):
        assert row[name] == pytest.approx(1.0), name
    assert row["classes_covered"] == 10 and row["capsules_used"] == len(measured.labels.unique())
    assert row["bottleneck_mse"] == pytest.approx(row["autoencoder_mse"]) and "tied_mse" not in row
    blind = measure(Knows(measured, torch.zeros_like(measured.labels)), replace(measured, reference=reference))
    assert blind["argmax_nmi"] == 0 and blind["capsules_used"] == 1


def test_random_weights_are_the_initial_ones_times_a_number(measured):
    recipe = experts()
    model = poe_controls._random_encoder(recipe, measured).model
    start = build_model(replace(recipe, model=model.config), measured.model.spec).energy.W
    ratio = model.energy.W / start
    assert torch.allclose(ratio, ratio.mean(), rtol=1e-4) and model.energy.mask is None
    z = model.energy.infer(model.energy.visible(measured.fitted)).z
    assert float(z.square().sum(-1).mean()) == pytest.approx(1, abs=1e-4)
    assert torch.allclose(model.energy.offset, measured.fitted.mean(0), atol=1e-4)
    again = poe_controls._random_encoder(recipe, measured).model
    assert torch.equal(model.energy.W, again.energy.W) and torch.equal(model.decoder.U, again.decoder.U)
    with torch.no_grad():  # least squares do better on what they were fitted to than the mean does
        rebuilt = model.decoder(model.energy.infer(model.energy.visible(measured.fitted)).hidden)
        spread = measured.fitted - measured.fitted.mean(0)
        assert (rebuilt - measured.fitted).square().mean() < 0.9 * spread.square().mean()


def test_poses_of_baselines_have_no_gate(measured):
    f = measured.features
    local = fit_local_pca(measured.fitted.flatten(1), 4, 4)
    views = BaselineEncoder(local, measured.model).encode(f).poses
    winners, codes = local.winners(f.flatten(1)), local.codes(f.flatten(1))
    rows = torch.arange(len(f))
    assert torch.allclose(views[rows, winners], codes[rows, winners], atol=1e-4)
    assert (views != 0).any(-1).all() and views.shape == codes.shape
    means = fit_kmeans(measured.fitted.flatten(1), 4, 4)
    assert BaselineEncoder(means, measured.model).encode(f).poses.shape == (len(f), 4, 1)


def test_images_bounds_what_is_measured_and_the_sample_is_fixed(run_folders, measured):
    few = build_evaluation_data(measured.model, experts().data.load(), measured.reference, images=10)
    assert few.features.shape[0] == 10 and torch.equal(few.images, measured.images[:10])
    assert len(few.real) == 64 and len(few.fitted) == 256
    assert evaluate_runs([run_folders / "s0"], images=10, only=()).controls.keys() == {"real images"}
    with pytest.raises(RecipeError, match="0 images"):
        evaluate_runs([run_folders / "s0"], images=0)


def test_baselines_that_group_images_are_fitted_to_more_of_them(measured, monkeypatch):
    monkeypatch.setattr(poe_metrics, "FITTED", 60)
    monkeypatch.setattr(poe_metrics, "GROUPED", 200)
    data = build_evaluation_data(measured.model, experts().data.load(), measured.reference)
    assert (len(data.fitted), len(data.grouped)) == (60, 200)
    assert torch.equal(data.grouped[:60], data.fitted)  # the same order of images
    rows = {}
    for name in ("PCA", "local PCA"):
        encoder = poe_controls._fit_baseline(name, data, 0)
        rows[name] = encoder.baseline
    torch.testing.assert_close(rows["PCA"].mean, data.fitted.flatten(1).mean(0))
    assert sum(len(own) for own in rows["local PCA"].scores) == 200


def test_the_printed_algorithm_keeps_its_linear_decoder_beside_a_run_with_a_quadratic_one():
    recipe = experts()
    curved = replace(recipe, model=replace(recipe.model, decoder=replace(recipe.model.decoder, curvature=2)))
    for name in TRAINED:
        assert poe_controls._variant(curved, name, 256).model.decoder.curvature == 0


def test_names_of_controls_are_checked_before_any_work(monkeypatch, run_folders):
    assert (
        SYSTEMS["poe"].select_controls(None) == CONTROLS
        and SYSTEMS["poe"].select_controls(["RBM", "paper"]) == ("paper", "RBM")
        and SYSTEMS["poe"].select_controls([]) == ()
    )
    with pytest.raises(RecipeError, match="did you mean 'local PCA'"):
        evaluate_runs([run_folders / "s0"], only=["locl PCA"])
    monkeypatch.setitem(sys.modules, "sklearn", None)
    assert SYSTEMS["poe"].select_controls(["PCA", "paper"]) == ("paper", "PCA")
    with pytest.raises(RecipeError, match="scikit-learn"):
        SYSTEMS["poe"].select_controls(None)


def test_a_run_of_another_recipe_is_a_row_and_the_run_itself_is_none(run_folders, tmp_path):
    own = experts(name="plain", energy={"mode": "offset"})
    train(own, tmp_path / "plain", quiet=True)
    reference = next(run_folders.glob("reference-classifier-*"), run_folders / "reference")
    result = evaluate_runs([tmp_path / "plain"], [run_folders / "s0"], only=["offset only", "PCA"], reference=reference)
    assert list(result.controls) == ["experts", "PCA", "real images"]  # "offset only" would be the run itself
    assert not (tmp_path / "plain" / "controls").exists() and not list(tmp_path.glob("reference-classifier-*"))


def test_what_cannot_be_compared_is_refused(run_folders, tmp_path):
    cut = experts(name="cut")
    data = {**to_dict(cut)["data"], "test": 32}
    train(experts(name="less", data=data), tmp_path / "less", quiet=True)
    with pytest.raises(RecipeError, match="on other data"):
        evaluate_runs([run_folders / "s0"], [tmp_path / "less"])
    train(tiny(train={"epochs": 0.2}), tmp_path / "classifier", quiet=True)
    with pytest.raises(RecipeError, match="another kind of model"):
        evaluate_runs([run_folders / "s0"], [tmp_path / "classifier"])
    with pytest.raises(RecipeError, match="--images is for products of expert capsules and sparse capsules"):
        evaluate_runs([tmp_path / "classifier"], images=5)
    assert {"untrained", "nearest mean"} <= evaluate_runs([tmp_path / "classifier"]).controls.keys()


def test_a_run_that_was_cut_off_is_refused(run_folders, monkeypatch):
    load_run = evaluation.load_run
    monkeypatch.setattr(evaluation, "load_run", lambda folder: load_run(folder)._replace(finished=False))
    with pytest.raises(TrainingError, match="not trained to its end"):
        evaluate_runs([run_folders / "s0"])


def test_the_reference_classifier_belongs_to_the_data_not_to_the_run(tmp_path):
    here = poe_system.reference_folder(experts(), tmp_path / "a")
    assert here.parent == tmp_path and here.name.startswith("reference-classifier-glyphs-")
    assert here == poe_system.reference_folder(experts(name="b", seed=4), tmp_path / "b")
    data = {**to_dict(experts())["data"], "test": 32}
    assert here != poe_system.reference_folder(experts(data=data), tmp_path / "a")


def test_a_wide_table_goes_on_below(result):
    rows = rows_of(result)
    text = text_table(rows, width=100)
    blocks = [block.splitlines() for block in text.split("\n\n")]
    assert len(blocks) > 1 and max(map(len, text.splitlines())) <= 100
    assert all(len(block) == len(rows) and block[1].startswith("experts ") for block in blocks)
    words = " ".join(block[0] for block in blocks).split()
    assert words == " ".join(rows[0]).split()
    used = rows[0].index("capsules used")
    assert rows[1][used].count(".") == 2 and len(rows[1][used].split(".")[-1]) == 1


def test_baselines_get_the_frames_and_group_by_what_ranks_the_capsules(run_folders, measured):
    """A framed model with edges, untrained: rows of baselines are measured on both kinds of features."""
    recipe = experts()
    framed = replace(recipe, model=replace(recipe.model, frames="moments", children="edges"))
    model = build_model(framed, measured.model.spec).eval()
    data = build_evaluation_data(model, framed.data.load(), measured.reference, images=64)
    assert data.frames is not None and data.fitted_frames.shape == (256, 4)
    drawn = model.decoder.U.shape[1]
    for name in ("PCA", "k-means", "local PCA"):
        encoder = poe_controls._fit_baseline(name, data, 0)
        encoded = encoder.encode(data.features)
        samples = encoder.samples(3, 0)
        assert samples.shape == (4, 3, 1, 16, 16) and encoded.rebuilt.shape[1] >= drawn
        if name != "PCA":
            # Features that are only drawn do not change the groups
            other = data.features.clone()
            other[:, :drawn] += 1
            assert torch.equal(encoder.encode(other).winners, encoded.winners)
    row = measure(PoEEncoder(model), data)
    assert row["tied_mse"] > 0 and row["bottleneck_mse"] > 0


def test_accuracy_matches_capsules_to_classes_where_there_are_as_many():
    winners, labels = torch.tensor([2, 2, 0, 0, 1, 1]), torch.tensor([0, 0, 1, 1, 2, 0])
    assert poe_metrics._matched(winners, labels, 3) == {"accuracy": 5 / 6}
    assert poe_metrics._matched(winners, labels, 4) == {}
