from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import pytest
import torch

from support.tiny_recipe import tiny
from torchcaps.cli.evaluate import Evaluate
from torchcaps.config import to_dict
from torchcaps.data import Dataset, GlyphsConfig, MnistConfig, Splits
from torchcaps.errors import RecipeError
from torchcaps.evaluate.results import Result
from torchcaps.evaluate.svm_probe import AFFNIST, ProbeData, build_probe_data, fit_svm
from torchcaps.models import MODELS, SmallSparseConfig, SparseConfig
from torchcaps.systems import SYSTEMS, evaluate_runs
from torchcaps.systems.papers import paper_tables
from torchcaps.systems.sparse.metrics import (
    CONTROLS,
    ImageCodes,
    ImageEncoder,
    capsule_encoder,
    count_in_band,
    encode_sets,
    measure,
)
from torchcaps.train import Recipe, create, load, load_recipe, total_steps, train
from torchcaps.types import ImageSpec

SPARSE: dict[str, Any] = {
    "name": "sparse", "capsules": 4, "dimension": 3, "channels": 4, "kernel": 5, "stride": 2, "types": 2,
    "type_dimension": 3, "primary_kernel": 5, "decoder": [8], "every": 2, "alpha": 0.5,
}  # fmt: skip
GLYPHS: dict[str, Any] = {"name": "glyphs", "train": 80, "test": 40, "size": 16}
READERS = ["knn", "linear_probe"]
PAPER = {"mnist_svm": 0.99, "affnist_svm_a": 0.9012, "affnist_svm_b": 0.1699}
GROUPS = ["argmax_nmi", "purity", "argmax_nmi_place"]


def recipe(name: str = "few", **over: Any) -> Recipe:
    model = {**SPARSE, **over.pop("model", {})}
    return tiny(**{"name": name, "model": model, "data": GLYPHS, "train": {"epochs": 0.5}, **over})


@pytest.fixture(scope="module")
def run_folders(tmp_path_factory):
    """Two seeds, and the dense control."""
    folder = tmp_path_factory.mktemp("sparse")
    for seed in (0, 1):
        train(recipe(seed=seed), folder / f"s{seed}", quiet=True)
    train(recipe("all", model={"sparse": False}), folder / "dense", quiet=True)
    return folder


@pytest.fixture(scope="module")
def result(run_folders):
    return evaluate_runs([run_folders / "s0", run_folders / "s1"], [run_folders / "dense"], images=60)


@pytest.fixture(scope="module")
def moved(tmp_path_factory):
    """A run on affNIST, whose digits are drawn, and its control, measured."""
    digits = GlyphsConfig(train=60, test=30, size=28).load()
    folder = tmp_path_factory.mktemp("moved")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MnistConfig, "load", lambda self: Splits(digits.train, digits.test))
        affnist = {"name": "affnist", "train": 60, "test": 30}
        train(recipe("moved", data=affnist, paper={"metrics": PAPER}), folder / "moved", quiet=True)
        train(recipe("dense", data=affnist, model={"sparse": False}), folder / "dense", quiet=True)
        yield folder, evaluate_runs([folder / "moved"], [folder / "dense"])


# --- The table ----------------------------------------------------------------------------------------------


def test_every_row_has_what_can_be_asked_of_it(result):
    assert list(result.metrics) == ["glyphs_svm", *READERS, *GROUPS, "capsules_in_band"]
    assert list(result.controls) == ["before the mask", "all", *(name for name in CONTROLS if "mask" not in name)]
    wanted = {
        "all": set(result.metrics), "untrained": set(result.metrics), "k-means": set(GROUPS),
        "before the mask": {"glyphs_svm", *READERS},
        "pixels": {"glyphs_svm", *READERS}, "PCA": {"glyphs_svm", *READERS},
    }  # fmt: skip
    assert {name: set(row) for name, row in result.controls.items()} == wanted
    lengths = {name: {len(values) for values in row.values()} for name, row in result.controls.items()}
    assert lengths == {"all": {1}, "before the mask": {2}, "untrained": {2}, "pixels": {1}, "PCA": {1}, "k-means": {1}}
    for row in (result.metrics, *result.controls.values()):
        for name, values in row.items():
            assert all(0 <= value <= (4 if name == "capsules_in_band" else 1) for value in values), name
    assert result.seeds == [0, 1] and result.budget["read_images"] == 60 and result.paper == {}
    assert result.budget["steps"] == 5


def test_a_row_is_what_the_read_out_says_of_the_masked_capsules(run_folders, result):
    model, m = load(run_folders / "s1"), build_probe_data(recipe(), 60)
    with torch.no_grad():
        codes = {name: model.encode(data.model_input()).pose for name, data in m.sets.items()}
        ranks = model(m.sets["test"].model_input()).ranks
    svm = fit_svm(codes["train"], m.sets["train"].labels)
    assert result.metrics["glyphs_svm"][1] == svm.accuracy(codes["test"], m.sets["test"].labels)
    winners = torch.tensor([row.index(0) for row in ranks.tolist()])
    assert torch.equal(capsule_encoder(model)(m.sets["test"].model_input()).groups, winners)
    assert result.metrics["purity"][1] == pytest.approx(purity_by_loops(winners, m.sets["test"].labels))


def purity_by_loops(groups: torch.Tensor, labels: torch.Tensor) -> float:
    right = 0
    for group in set(groups.tolist()):
        inside = [label for g, label in zip(groups.tolist(), labels.tolist(), strict=True) if g == group]
        right += max(inside.count(label) for label in inside)
    return right / len(groups)


def test_capsules_in_the_band_by_loops(run_folders):
    model, images = load(run_folders / "s0"), build_probe_data(recipe(), 60).augmented
    with torch.no_grad():
        firsts = [row.index(0) for row in model(images).ranks.tolist()]
    low, high = 0.64 / 4, 1.6 / 4
    wanted = sum(low <= firsts.count(j) / len(firsts) <= high for j in range(4))
    assert count_in_band(model, images) == wanted
    model.mask.low, model.mask.high = 0.0, 1.0
    assert count_in_band(model, images) == 4
    model.mask.low, model.mask.high = 1.1, 1.2
    assert count_in_band(model, images) == 0


def knows(m: ProbeData, told: dict[str, torch.Tensor]):
    """A look that finds an image among those of the sets, and says what it was told of it, below 16."""
    known = torch.cat([data.model_input().flatten(1) for data in m.sets.values()])
    said = torch.cat([told[name] for name in m.sets])

    def look(images: torch.Tensor) -> ImageCodes:
        which = torch.cdist(images.flatten(1), known).argmin(-1)
        return ImageCodes(torch.nn.functional.one_hot(said[which], 16).float(), said[which])

    return look


def told_of(look: ImageEncoder, m: ProbeData) -> dict[str, float]:
    return measure(encode_sets(look, m), m)


def test_who_knows_the_classes_has_known_numbers():
    m = build_probe_data(recipe(), 60)
    row = told_of(knows(m, {name: data.labels for name, data in m.sets.items()}), m)
    assert row.pop("argmax_nmi_place") < 0.8
    assert row == dict.fromkeys(["glyphs_svm", *READERS, "argmax_nmi", "purity", "accuracy"], pytest.approx(1.0))
    blind = told_of(lambda images: ImageCodes(images.new_ones(len(images), 2), torch.zeros(len(images)).long()), m)
    assert blind["argmax_nmi"] == 0 and blind["glyphs_svm"] < 0.3


def test_as_many_capsules_as_classes_are_matched_to_them_one_to_one():
    m = build_probe_data(recipe(), 60)
    classes = int(m.sets["test"].labels.max()) + 1
    # Capsule j stands for class j + 1; capsule 3 takes the images of class 5, too
    told = {name: (data.labels + classes - 1) % classes for name, data in m.sets.items()}
    wrong = (told["test"] == 5).nonzero().flatten()
    told["test"][wrong] = 3
    share = 1 - len(wrong) / len(told["test"])
    for capsules in (classes, classes + 1):
        found = {name: ImageCodes(torch.rand(len(groups), capsules, 2), groups) for name, groups in told.items()}
        assert measure(found, m).get("accuracy") == (pytest.approx(share) if capsules == classes else None)


def test_who_knows_the_places_has_a_known_number_too():
    """Sixteen fields by loops: the images of a quarter of the rows and of a quarter of the columns."""
    m = build_probe_data(recipe(), 60)
    quarters = []
    for name in ("y", "x"):
        order = sorted(range(40), key=m.sets["test"].factors[name].tolist().__getitem__)
        quarters.append([order.index(n) // 10 for n in range(40)])
    fields = torch.tensor([4 * row + column for row, column in zip(*quarters, strict=True)])
    told = {"train": torch.zeros(len(m.sets["train"])).long(), "test": fields}
    assert told_of(knows(m, told), m)["argmax_nmi_place"] == pytest.approx(1.0)
    nowhere = {name: replace(data, factors={}) for name, data in m.sets.items()}
    assert "argmax_nmi_place" not in told_of(knows(m, told), replace(m, sets=nowhere))


def test_an_untrained_network_that_is_ranked_relatively_knows_what_is_usual(tmp_path):
    relative = recipe("few", model={"relative": True})
    train(relative, tmp_path / "r", quiet=True)
    found = evaluate_runs([tmp_path / "r"], only=["untrained"], images=60).controls["untrained"]
    m, fresh = build_probe_data(relative, 60), create(relative).eval()
    with torch.no_grad():
        usual, psi = fresh(m.augmented).support.mean(0), fresh(m.sets["test"].model_input()).support
    assert found["purity"] == [pytest.approx(purity_by_loops((psi / usual).argmax(-1), m.sets["test"].labels))]


def test_before_the_mask_the_read_out_sees_all_capsules(run_folders, result):
    model, m = load(run_folders / "s1"), build_probe_data(recipe(), 60)
    with torch.no_grad():
        codes = {name: model(data.model_input()).latent.pose for name, data in m.sets.items()}
    svm = fit_svm(codes["train"], m.sets["train"].labels)
    row = result.controls["before the mask"]
    assert row["glyphs_svm"][1] == svm.accuracy(codes["test"], m.sets["test"].labels)
    assert any(row[name] != result.metrics[name] for name in ("glyphs_svm", *READERS)), "it reads another code"
    with torch.no_grad():
        seen = capsule_encoder(model)(m.sets["test"].model_input()).before_mask()
    assert torch.equal(seen.codes, codes["test"]) and (seen.codes != 0).any(-1).all() and seen.groups is None


def test_a_table_of_codes_before_the_mask_has_those_behind_it_as_rows(run_folders, result):
    runs = [run_folders / "s0", run_folders / "s1"]
    swapped = evaluate_runs(runs, [run_folders / "dense"], images=60, only=["behind the mask"], unmasked=True)
    assert list(swapped.controls) == ["behind the mask", "all"], "the dense control has no mask"
    for name in ("glyphs_svm", *READERS):
        assert swapped.metrics[name] == result.controls["before the mask"][name]
        assert swapped.controls["behind the mask"][name] == result.metrics[name]
    for name in (*GROUPS, "capsules_in_band"):
        assert swapped.metrics[name] == result.metrics[name] and name not in swapped.controls["behind the mask"]


def test_other_masked_networks_have_two_rows_in_such_a_table(run_folders, result):
    table = evaluate_runs(
        [run_folders / "dense"], [run_folders / "s0"], images=60, only=["behind the mask"], unmasked=True
    )
    assert list(table.controls) == ["few", "few, behind the mask"]
    for name in ("glyphs_svm", *READERS):
        assert table.controls["few"][name] == result.controls["before the mask"][name][:1]
        assert table.controls["few, behind the mask"][name] == result.metrics[name][:1]


@pytest.mark.parametrize(("unmasked", "name"), [(True, "before the mask"), (False, "behind the mask")])
def test_the_codes_of_the_table_are_no_control(run_folders, unmasked, name):
    with pytest.raises(RecipeError, match=f"already; leave '{name}' out"):
        evaluate_runs([run_folders / "s0"], images=60, only=[name], unmasked=unmasked)


def test_protocols_learn_and_are_tested_on_what_their_names_say():
    """Placed digits have right codes, moved ones those of the next class: only (b), from one to the other, fails."""
    digits = GlyphsConfig(train=120, test=40, size=16).load()
    sets: dict[str, Dataset] = {
        "mnist": replace(digits.train, factors={}), "mnist test": digits.test,
        "affnist": replace(digits.train, images=digits.train.images.flip(-1), factors={}),
        "affnist test": replace(digits.test, images=digits.test.images.flip(-1), factors={}),
    }  # fmt: skip
    m = ProbeData(sets, AFFNIST, "affnist_svm_a", torch.zeros(1, 1, 16, 16))
    told = {name: (data.labels + name.startswith("aff")) % 10 for name, data in sets.items()}
    row = told_of(knows(m, told), m)
    assert row["mnist_svm"] == row["affnist_svm_a"] == row["knn"] == row["purity"] == 1
    assert row["affnist_svm_b"] == 0


def test_an_untrained_network_is_the_recipe_s_own_before_its_first_step(run_folders, result):
    again = evaluate_runs([run_folders / "s1"], only=["untrained"], images=60)
    assert list(again.controls) == ["untrained"]
    assert again.controls["untrained"] == {name: row[1:] for name, row in result.controls["untrained"].items()}
    assert again.metrics.keys() == result.metrics.keys()


# --- affNIST and the paper ----------------------------------------------------------------------------------


def test_affnist_is_read_out_by_both_protocols(moved):
    _, found = moved
    assert list(found.metrics) == [*AFFNIST, *READERS, *GROUPS, "capsules_in_band"]
    assert found.paper == PAPER
    rest = [name for name in CONTROLS if "mask" not in name]
    assert list(found.controls) == ["before the mask", "dense", *rest] and found.budget["read_images"] == 60


def test_the_command_prints_tables_1_and_2_with_ours_below(moved, capsys):
    folder, found = moved
    assert Evaluate((folder / "moved",), (folder / "dense",), only=("pixels",)).run() == 0
    text = capsys.readouterr().out
    lines = [" ".join(line.split()) for line in text.splitlines()]
    for line in (
        "ConvNet (Sabour 2017) 99.22 66.00", "CapsNet (Sabour 2017) 99.23 79.00", "Asano 2018 99.25 yes 87.55",
        "sparse capsules + SVM (a) 99.00 90.12", "sparse capsules + SVM (b) 99.00 16.99",
        "dense capsules + SVM (a) 97.37 60.63", "dense capsules + SVM (b) 97.37 15.70",
        "sparse capsules 99.00 no 90.12",
    ):  # fmt: skip
        assert line in lines, line
    (mnist,), (a,), (b,) = (found.metrics[name] for name in AFFNIST)
    assert f"ours: moved + SVM (a) {100 * mnist:.2f} {100 * a:.2f}" in lines
    assert f"ours: moved + SVM (b) {100 * mnist:.2f} {100 * b:.2f}" in lines
    assert f"ours: moved {100 * mnist:.2f} no {100 * a:.2f}" in lines
    assert any(line.startswith("ours: dense + SVM (a)") for line in lines)
    assert any(line.startswith("ours: pixels + SVM (b)") for line in lines)
    assert "a smaller budget than the paper's: 4 steps of 8 images; the paper's is 30,000 of 128" in lines


def test_deviations_stand_in_the_tables_and_others_have_none(result):
    assert paper_tables(result) == []
    numbers = {"mnist_svm": [0.9, 0.92], "affnist_svm_a": [0.8, 0.8], "affnist_svm_b": [0.1, 0.3]}
    config = {"data": {"train_on": "affnist"}, "model": {"name": "sparse"}}
    first, second = paper_tables(Result("r", config, [0, 1], numbers, {"k-means": {"purity": [1.0]}}, {}, {}, {}))
    assert first[-2:] == [
        ["ours: r + SVM (a)", "91.00 ± 1.41", "80.00 ± 0.00"], ["ours: r + SVM (b)", "91.00 ± 1.41", "20.00 ± 14.14"],
    ]  # fmt: skip
    assert second[-1] == ["ours: r", "91.00 ± 1.41", "yes", "80.00 ± 0.00"]


# --- Recipes ------------------------------------------------------------------------------------------------


def test_paper_size_recipes_have_the_settings_of_the_authors():
    told = load_recipe("sparse-affnist-paper")
    assert told.model == SparseConfig() and total_steps(told, 60_000) == 29_952
    assert (told.optimizer.name, told.optimizer.lr, told.train.batch, told.train.max_shift) == ("Adam", 1e-3, 128, 6)
    assert told.schedule.name == "StepLR" and told.schedule.options == {"step_size": 2000, "gamma": 0.96}
    data = to_dict(told)["data"]
    assert (data["train_on"], data["size"], data["validation"]) == ("mnist", 40, 0)


def test_small_networks_have_the_paper_s_places_and_latent_capsules():
    assert MODELS["sparse-small"] is SmallSparseConfig
    for name, side in (("sparse-affnist-small", 40), ("sparse-mnist-small", 28)):
        model = load_recipe(name).model.build(ImageSpec(1, side, side, 10))
        assert (model.primary.grid.height, model.primary.grid.width, model.primary.count) == (6, 6, 576)
        assert (model.config.capsules, model.config.dimension, model.config.decoder) == (16, 16, (256, 512))


# --- Refusals -----------------------------------------------------------------------------------------------


def test_names_of_controls_are_checked_before_any_work(run_folders):
    select = SYSTEMS["sparse"].select_controls
    assert select(None) == CONTROLS and select(["PCA", "untrained"]) == ("untrained", "PCA") and select([]) == ()
    with pytest.raises(RecipeError, match="did you mean 'k-means'"):
        evaluate_runs([run_folders / "s0"], only=["kmeans"])


def test_what_cannot_be_compared_is_refused(run_folders, tmp_path, monkeypatch):
    with pytest.raises(RecipeError, match="0 images"):
        evaluate_runs([run_folders / "s0"], images=0)
    with pytest.raises(RecipeError, match="--reference is for products of expert capsules"):
        evaluate_runs([run_folders / "s0"], reference=tmp_path)
    train(tiny(train={"epochs": 0.2}), tmp_path / "classifier", quiet=True)
    with pytest.raises(RecipeError, match="another kind of model"):
        evaluate_runs([run_folders / "s0"], [tmp_path / "classifier"])
    monkeypatch.setitem(sys.modules, "sklearn.svm", None)
    with pytest.raises(RecipeError, match="scikit-learn"):
        evaluate_runs([run_folders / "s0"])
