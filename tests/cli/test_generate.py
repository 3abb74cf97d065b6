"""`torchcaps generate` as a person meets it."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from support.cli import talk
from support.tiny_recipe import TINY, tiny
from torchcaps.models import CapsNet, PoE, SparseCaps
from torchcaps.systems import figure_registry
from torchcaps.systems.capsnet.system import CapsNetSystem
from torchcaps.systems.poe.system import PoESystem
from torchcaps.train import load_run, train
from torchcaps.train.export import export_weights
from torchcaps.train.recipe import recipe_of

ALL = {
    "samples-empirical", "wins-empirical", "reconstructions", "interpolation", "completion",
    "completion-steps", "routing",
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("generate") / "run"
    recipe = recipe_of(
        {
            "name": "small-poe",
            "data": {"name": "glyphs", "train": 96, "test": 12, "size": 16},
            "model": {
                "name": "poe", "capsules": 3, "dimension": 2, "child_dimension": 4,
                "autoencoder": {"channels": [4, 4], "kernel": 5}, "energy": {"ramp": 3, "loosen": 6},
            },
            "train": {"epochs": 2.0, "batch": 32},
        }
    )  # fmt: skip
    assert isinstance(train(recipe, path, quiet=True).model, PoE)
    return path


@pytest.fixture(scope="module")
def classes(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("generate") / "capsnet"
    assert isinstance(train(tiny(train={"epochs": 0.5}), path, quiet=True).model, CapsNet)
    return path


@pytest.fixture(scope="module")
def sparse(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("generate") / "sparse"
    recipe = tiny(model={**TINY["model"], "name": "sparse", "capsules": 5, "every": 1}, train={"epochs": 0.5})
    assert isinstance(train(recipe, path, quiet=True).model, SparseCaps)
    return path


run, refused = talk("generate")
predict, _ = talk("predict")


def test_predict_says_which_capsule_a_picture_is_in(capsys, folder, tmp_path):
    images = recipe_of({"data": {"name": "glyphs", "train": 96, "test": 12, "size": 16}}).data.load().test.images
    for n in range(2):
        Image.fromarray(images[n, 0].numpy()).save(tmp_path / f"{n}.png")
    code, out, err = predict(capsys, folder, tmp_path / "0.png", tmp_path / "1.png", "--all")
    head, *rows = [line.split() for line in out.splitlines()]
    assert (code, err) == (0, "") or "next:" in err
    assert head == ["picture", "capsule", "score", "0", "1", "2"] and len(rows) == 2
    on = load_run(folder).model.encode(images[:2].float() / 255).activation
    assert [row[1] for row in rows] == [str(int(j)) for j in on.argmax(1)]
    [entry] = json.loads(predict(capsys, folder, tmp_path / "0.png", "--json")[1])
    assert entry["capsules"][0]["capsule"] == rows[0][1]


def drawn(capsys, *words: object) -> dict[str, bytes]:
    """Name -> content of the files whose paths are printed; each a PNG."""
    code, out, err = run(capsys, *words)
    assert code == 0, err
    paths = [Path(line) for line in out.splitlines()]
    assert paths and all(Image.open(path).format == "PNG" for path in paths)
    return {path.stem: path.read_bytes() for path in paths}


def test_all_pictures_go_beside_the_run(capsys, folder):
    names = set(drawn(capsys, folder, "--count", 2))
    sweeps = {name for name in names if name.startswith("sweeps-")}
    assert names - sweeps == ALL and len(sweeps) == 2
    assert {path.name for path in (folder / "pictures").iterdir()} == {f"{name}.png" for name in names}


def test_what_commands_make_of_a_file_of_weights_goes_beside_it(capsys, classes, folder, tmp_path):
    weights = {}
    for name, run_folder in {"capsnet": classes, "experts": folder}.items():
        weights[name] = tmp_path / f"{name}.safetensors"
        export_weights(run_folder, weights[name])
    assert run(capsys, weights["capsnet"], "--what", "calibration")[0] == 0
    assert talk("report")[0](capsys, weights["capsnet"], "-n", 1)[0] == 0
    attack = ("--attacks", "fgsm", "--epsilons", 0.1, "--images", 4)
    assert talk("attack")[0](capsys, weights["capsnet"], *attack)[0] == 0
    made = {path.name for path in (tmp_path / "capsnet").iterdir()}
    assert made == {"pictures", "report.html", "attacks"}
    only = ("--only", "offset only", "--images", 12, "--reference", tmp_path / "judge")
    assert talk("evaluate")[0](capsys, weights["experts"], *only)[0] == 0
    assert [path.name for path in (tmp_path / "experts").iterdir()] == ["controls"]


def test_one_kind_into_a_folder_of_one_s_own(capsys, folder, tmp_path):
    words = (folder, "--what", "samples", "--domain", "complete", "-n", 2)
    first = drawn(capsys, *words, "--out", tmp_path / "a" / "b")
    assert list(first) == ["samples-complete"] and [p.name for p in (tmp_path / "a" / "b").iterdir()] == [
        "samples-complete.png"
    ]
    assert first == drawn(capsys, *words, "--out", tmp_path / "c")
    assert first != drawn(capsys, *words, "--seed", 1, "--out", tmp_path / "c")
    fewer = drawn(capsys, *words, "--capsule", 0, 2, "--out", tmp_path / "d")
    assert len(first["samples-complete"]) > len(fewer["samples-complete"]) > 0


def test_the_seed_picks_the_test_images(capsys, folder, tmp_path):
    words = (folder, "--what", "reconstructions", "--out", tmp_path, "-n", 3)
    assert drawn(capsys, *words, "--seed", 1) == drawn(capsys, *words, "--seed", 1)
    assert drawn(capsys, *words, "--seed", 1) != drawn(capsys, *words, "--seed", 2)


def test_sweeps_of_chosen_capsules_and_all_of_one(capsys, folder, tmp_path):
    sweeps = drawn(capsys, folder, "--what", "sweeps", "--capsule", 2, 0, "--out", tmp_path)
    assert list(sweeps) == [f"sweeps-{j}-{kind}" for j in (2, 0) for kind in ("axes", "numbers")]
    assert len(set(sweeps.values())) == 4
    single = set(drawn(capsys, folder, "--capsule", 1, "--count", 1, "--out", tmp_path))
    assert single == ALL - {"interpolation"} | {"sweeps-1-axes", "sweeps-1-numbers"}


def test_samples_need_no_data(capsys, folder, tmp_path, monkeypatch):
    monkeypatch.setattr(PoESystem, "figure_images", lambda *_: pytest.fail("loaded the data"))
    assert set(drawn(capsys, folder, "--what", "pairs", "-n", 1, "--out", tmp_path)) == {"pairs-empirical"}


def test_wrong_input_gets_one_line(capsys, folder, tmp_path):
    assert "0 to 2" in refused(capsys, folder, "--capsule", 3, "--out", tmp_path)
    assert "names one twice" in refused(capsys, folder, "--capsule", 1, 1)
    for count in (0, -1, 65):
        assert "1 to 64" in refused(capsys, folder, "--count", count)
    assert "seed = -1 must be at least 0" in refused(capsys, folder, "--seed", -1)
    assert "two capsules" in refused(capsys, folder, "--what", "pairs", "--capsule", 1, "--out", tmp_path)
    assert "needs 2 images" in refused(capsys, folder, "--what", "interpolation", "-n", 1, "--out", tmp_path)
    assert "did you mean '--domain'" in refused(capsys, folder, "--domian", "complete")
    (tmp_path / "file").write_text("x")
    assert "choose another --out" in refused(capsys, folder, "--out", tmp_path / "file")
    assert "checkpoint" in refused(capsys, tmp_path)
    assert not list(tmp_path.glob("*.png"))


def test_pictures_of_a_capsnet(capsys, classes, tmp_path):
    names = set(drawn(capsys, classes, "--count", 3))
    sheets = {name for name in names if name.startswith("perturbations-")}
    some = {"reconstructions", "reconstructions-worst", "reconstructions-wrong", "perturbations", "routing"}
    assert names - sheets == some | {"calibration"} and 8 <= len(sheets) <= 10
    assert {path.name for path in (classes / "pictures").iterdir()} == {f"{name}.png" for name in names}
    words = (classes, "--what", "perturbations", "--capsule", 4, "--out", tmp_path)
    first = drawn(capsys, *words)
    assert list(first) == ["perturbations", "perturbations-4"] and first == drawn(capsys, *words)
    assert first != drawn(capsys, *words, "--seed", 1)  # another 4


def test_of_very_many_test_images_some_are_looked_at(capsys, classes, tmp_path, monkeypatch):
    words = (classes, "--what", "calibration", "--out", tmp_path)
    whole = drawn(capsys, *words)
    monkeypatch.setattr(CapsNetSystem, "max_figure_images", 20)
    part = drawn(capsys, *words)
    assert part == drawn(capsys, *words) and part != whole and part != drawn(capsys, *words, "--seed", 1)


def test_what_a_capsnet_does_not_draw_is_refused(capsys, classes, folder, tmp_path):
    assert "leave it out" in refused(capsys, classes, "--domain", "complete", "--out", tmp_path)
    assert "choose: reconstructions, perturbations" in refused(capsys, classes, "--what", "samples", "--out", tmp_path)
    assert "choose: samples, pairs" in refused(capsys, folder, "--what", "calibration", "--out", tmp_path)
    assert "ask for: reconstructions" in refused(capsys, classes, "--what", "multimnist", "--out", tmp_path)
    assert "0 to 9" in refused(capsys, classes, "--capsule", 10, "--out", tmp_path)
    assert not list(tmp_path.glob("*.png"))


def test_pictures_of_sparse_capsules(capsys, sparse, classes, tmp_path):
    names = set(drawn(capsys, sparse, "--count", 3))
    images = {name for name in names if name.startswith("parts-")}
    sheets = {name for name in names if name.startswith("equivariances-")}
    assert names - images - sheets == {"ranked", "frequencies", "equivariances", "winners"}
    assert len(images) == 3 and sheets <= {f"equivariances-{j}" for j in range(5)} and sheets
    assert {path.name for path in (sparse / "pictures").iterdir()} == {f"{name}.png" for name in names}
    words = (sparse, "--what", "ranked", "--out", tmp_path)
    alone = drawn(capsys, *words)
    assert list(alone) == ["ranked"] and alone == drawn(capsys, *words)
    assert alone != drawn(capsys, *words, "--beside", classes)
    one = (sparse, "--what", "parts", "-n", 1, "--out", tmp_path)
    assert drawn(capsys, *one) != drawn(capsys, *one, "--seed", 1)
    assert drawn(capsys, *one) != drawn(capsys, *one, "--capsule", 2, 4)


def test_what_sparse_capsules_do_not_draw_is_refused(capsys, sparse, classes, folder, tmp_path):
    out = ("--out", tmp_path)
    assert "leave it out" in refused(capsys, sparse, "--domain", "complete", *out)
    assert "choose: parts, ranked, frequencies" in refused(capsys, sparse, "--what", "samples", *out)
    assert "choose: samples, pairs" in refused(capsys, folder, "--what", "ranked", *out)
    assert "0 to 4" in refused(capsys, sparse, "--capsule", 5, *out)
    assert "leave it out" in refused(capsys, sparse, "--what", "parts", "--beside", classes, *out)
    assert "leave it out" in refused(capsys, classes, "--beside", sparse, *out)
    assert "wants sparse capsules or CapsNets" in refused(capsys, sparse, "--beside", folder, *out)
    assert "a name of its own" in refused(capsys, sparse, "--beside", classes, sparse, *out)
    assert "checkpoint" in refused(capsys, sparse, "--beside", tmp_path, *out)
    assert not list(tmp_path.glob("*.png"))


@pytest.mark.parametrize(
    ("what", "option", "wanted"),
    [
        ("reconstructions", ("--domain", "mixture"), "--domain changes samples and pairs and wins, and"),
        ("sweeps", ("--domain", "complete"), "--domain changes samples and pairs and wins, and"),
        ("routing", ("--capsule", 1), "--capsule changes samples and pairs and sweeps and wins, and"),
        ("curves", ("--capsule", 1), "--capsule changes samples and pairs and sweeps and wins, and"),
        ("curves", ("--domain", "complete"), "--domain changes samples and pairs and wins, and"),
    ],
)
def test_an_option_that_changes_nothing_in_a_figure_is_refused(capsys, folder, tmp_path, what, option, wanted):
    line = refused(capsys, folder, "--what", what, *option, "--out", tmp_path / "out")
    assert f"{wanted} {what} is drawn; leave it out" in line
    assert not (tmp_path / "out").exists()


def test_an_unknown_kind_gets_the_list_of_all(capsys, folder, classes):
    for run_folder in (folder, classes):
        assert refused(capsys, run_folder, "--what", "foo").endswith(", curves, all\n")


def test_a_run_of_another_model_is_refused(capsys, tmp_path):
    recipe = recipe_of(
        {
            "name": "small-cnn",
            "data": {"name": "glyphs", "train": 16, "test": 4},
            "model": {"name": "cnn"},
            "train": {"epochs": 1.0, "batch": 8},
        }
    )
    train(recipe, tmp_path / "run", quiet=True)
    assert "products of expert capsules" in refused(capsys, tmp_path / "run")
    assert not (tmp_path / "run" / "pictures").exists()


def test_without_matplotlib_it_says_what_to_install(capsys, folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "torchcaps[plot]" in refused(capsys, folder)


def test_help_has_an_example(capsys):
    assert "Example: torchcaps generate" in run(capsys, "--help")[1]


def test_curves_are_drawn_of_any_run(capsys, folder, classes, tmp_path):
    assert set(drawn(capsys, classes, "--what", "curves", "--out", tmp_path)) == {"curve-loss", "curve-accuracy"}
    staged = drawn(capsys, folder, "--what", "curves", "--out", tmp_path)
    assert set(staged) == {"curve-loss"}
    bare = tmp_path / "bare"
    bare.mkdir()
    shutil.copy(classes / "checkpoint.safetensors", bare)
    assert "no journal" in refused(capsys, bare, "--what", "curves")


def test_curves_begin_with_those_of_the_runs_that_were_started_from(capsys, classes, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(
        figure_registry, "learning_curve", lambda curves, key: asked.append((dict(curves), key)) or b"png"
    )
    short = tiny(train={"epochs": 0.5})
    train(replace(short, start=str(classes), seed=4), tmp_path / "second", quiet=True)
    train(replace(short, start=str(tmp_path / "second"), seed=5), tmp_path / "third", quiet=True)
    run(capsys, tmp_path / "third", "--what", "curves", "--out", tmp_path)
    for curves, _ in asked:
        assert list(curves) == [classes.name, "second", "third"]
        steps = [entry["step"] for lines in curves.values() for entry in lines]
        assert steps == sorted(set(steps))
    assert [key for _, key in asked] == ["loss", "accuracy"]
