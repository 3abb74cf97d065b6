"""`torchcaps predict` as a person meets it, and how pictures become images of a run."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from support.cli import is_suggestion, talk
from support.tiny_recipe import tiny
from torchcaps.data import DATASETS, Dataset, GlyphsConfig, MultiMnistConfig, Splits
from torchcaps.data.multimnist import multimnist
from torchcaps.errors import DataError
from torchcaps.systems.prediction import class_names, classify, read_pictures
from torchcaps.train import TrainedRun, load_run, train
from torchcaps.train.recipe import recipe_of
from torchcaps.types import ImageSpec

run, refused = talk("predict")

DIGITS = GlyphsConfig(train=80, test=40, size=16).load().test
"""The test images of the tiny recipe."""


def saved(path: Path, pixels: np.ndarray | torch.Tensor, **how: object) -> Path:
    """Bytes [h w] or [h w 3] as a picture file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.asarray(pixels, dtype=np.uint8)).save(path, **how)
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("predict") / "run"
    train(tiny(), path, quiet=True)
    return path


@pytest.fixture(scope="module")
def digits(tmp_path_factory) -> list[Path]:
    place = tmp_path_factory.mktemp("digits")
    return [saved(place / f"{n}.png", DIGITS.images[n, 0]) for n in range(3)]


def expected(folder: Path, count: int = 3) -> torch.Tensor:
    with torch.no_grad():
        return load_run(folder).model.scores(DIGITS.images[:count].float() / 255)


def answers(capsys, *words: object) -> list[dict]:
    code, out, err = run(capsys, *words, "--json")
    assert code == 0 and is_suggestion(err)
    return json.loads(out)


def test_each_picture_gets_the_class_and_the_score_that_the_model_gives(capsys, folder, digits):
    code, out, err = run(capsys, folder, *digits)
    assert code == 0 and is_suggestion(err)
    head, *lines = [line.split() for line in out.splitlines()]
    assert head == ["picture", "class", "score"]
    best = expected(folder).max(-1)
    wanted = [[str(p), str(int(j)), f"{s:.3f}"] for p, j, s in zip(digits, best.indices, best.values, strict=True)]
    assert lines == wanted


def test_all_scores_in_the_table_and_as_json(capsys, folder, digits, monkeypatch):
    monkeypatch.chdir(digits[0].parent)
    head, line = [row.split() for row in run(capsys, folder, digits[0].name, "--all")[1].splitlines()]
    assert head[3:] == list("0123456789") and line[3:] == [f"{s:.3f}" for s in expected(folder)[0].tolist()]
    plain, every = answers(capsys, folder, *digits), answers(capsys, folder, *digits, "--all")
    assert [set(entry) for entry in plain] == 3 * [{"picture", "classes"}]
    for entry, scores in zip(every, expected(folder).tolist(), strict=True):
        assert entry["scores"] == pytest.approx({str(j): s for j, s in enumerate(scores)}, abs=1e-6)
        [named] = entry["classes"]
        assert named["score"] == max(entry["scores"].values()) == entry["scores"][named["class"]]


def test_a_threshold_names_every_class_above_it_the_highest_first(capsys, folder, digits):
    scores = expected(folder)[0]
    middle = float(scores.sort().values[4:6].mean())
    [entry] = answers(capsys, folder, digits[0], "--threshold", middle)
    found = [float(c["score"]) for c in entry["classes"]]
    assert len(found) == 5 and found == sorted(found, reverse=True)
    assert {int(c["class"]) for c in entry["classes"]} == set((scores > middle).nonzero().flatten().tolist())
    assert answers(capsys, folder, digits[0], "--threshold", 1)[0]["classes"] == []
    assert run(capsys, folder, digits[0], "--threshold", 1)[1].splitlines()[1].split()[1:] == ["none", "-"]


def test_another_size_is_refused_with_both_sizes_and_fitted_on_demand(capsys, folder, tmp_path):
    wide = saved(tmp_path / "wide.png", np.full((32, 48), 9))
    line = refused(capsys, folder, wide)
    assert "48x32" in line and "16x16" in line and "--fit" in line and "wide.png" in line
    big = saved(tmp_path / "big.png", DIGITS.images[0, 0].repeat_interleave(3, 0).repeat_interleave(3, 1))
    [entry] = answers(capsys, folder, big, "--fit", "--all")
    assert list(entry["scores"].values()) == pytest.approx(expected(folder)[0].tolist(), abs=1e-6)


def test_color_is_made_gray_on_demand_only_and_jpeg_is_read(capsys, folder, tmp_path):
    pixels = DIGITS.images[0, 0]
    color = saved(tmp_path / "color.png", torch.stack([pixels] * 3, -1))
    assert "in color" in refused(capsys, folder, color)
    [entry] = answers(capsys, folder, color, "--fit", "--all")
    assert list(entry["scores"].values()) == pytest.approx(expected(folder)[0].tolist(), abs=1e-6)
    [near] = answers(capsys, folder, saved(tmp_path / "x.jpg", pixels, quality=95), "--all")
    assert list(near["scores"].values()) == pytest.approx(expected(folder)[0].tolist(), abs=0.1)


def test_dark_drawings_are_inverted_on_demand(capsys, folder, digits, tmp_path):
    dark = saved(tmp_path / "dark.png", 255 - DIGITS.images[0, 0])
    [entry], [light] = answers(capsys, folder, dark, "--invert", "--all"), answers(capsys, folder, digits[0], "--all")
    assert entry["scores"] == light["scores"] != answers(capsys, folder, dark, "--all")[0]["scores"]


def test_sheets_are_pictures_and_overwrite_none(capsys, folder, digits, tmp_path):
    first = saved(tmp_path / "in" / "a.png", DIGITS.images[0, 0])
    second = saved(tmp_path / "in" / "a-redrawn.png", DIGITS.images[1, 0])
    before = second.read_bytes()
    code, out, _ = run(capsys, folder, first, second, first, "--out", first.parent)
    paths = [Path(line) for line in out.splitlines()[-3:]]
    assert code == 0 and [p.stem for p in paths] == ["a-redrawn-2", "a-redrawn-redrawn", "a-redrawn-3"]
    assert all(Image.open(p).format == "PNG" for p in paths) and second.read_bytes() == before
    assert paths[0].read_bytes() == paths[2].read_bytes() != paths[1].read_bytes()
    [entry] = answers(capsys, folder, digits[0], "--out", tmp_path / "new" / "deep", "--threshold", 1)
    assert Path(entry["sheet"]).is_file() and entry["classes"] == []


def test_wrong_input_gets_one_line(capsys, folder, digits, tmp_path):
    assert "no picture" in refused(capsys, folder)
    assert "no such file" in refused(capsys, folder, tmp_path / "absent.png")
    assert "is a folder; give the paths of the files in it" in refused(capsys, folder, tmp_path)
    text = tmp_path / "text.png"
    text.write_text("not a picture")
    assert "PNG, JPEG, GIF, WebP and BMP pictures are read" in refused(capsys, folder, text)
    assert "0 to 1" in refused(capsys, folder, digits[0], "--threshold", 1.5)
    assert "checkpoint" in refused(capsys, tmp_path, digits[0])
    assert "choose another --out" in refused(capsys, folder, digits[0], "--out", text)
    assert "did you mean '--threshold'" in refused(capsys, folder, digits[0], "--treshold", ".5")
    assert "Example: torchcaps predict" in run(capsys, "--help")[1]


def test_one_unreadable_picture_does_not_stop_the_others(capsys, folder, digits, tmp_path):
    text = tmp_path / "text.png"
    text.write_text("not a picture")
    code, out, err = run(capsys, folder, digits[0], text, digits[1])
    assert code == 2 and [line.split()[0] for line in out.splitlines()[1:]] == [str(digits[0]), str(digits[1])]
    assert err.startswith("torchcaps: ") and err.count("\n") == 1 and "text.png" in err
    code, out, _ = run(capsys, folder, text, digits[1], "--json")
    first, second = json.loads(out)
    assert code == 2 and first["picture"] == str(digits[1]) and first["classes"] and "text.png" in second["error"]


def test_what_names_no_classes_or_redraws_nothing_is_refused(capsys, digits, tmp_path):
    cnn = {"name": "cnn", "widths": [2], "kernel": 3, "hidden": [4]}
    for name, model in (("cnn", cnn), ("autoencoder", {"name": "autoencoder", "channels": [2, 2], "kernel": 3})):
        data = {"name": "glyphs", "train": 16, "test": 8, "size": 16}
        recipe = recipe_of({"name": name, "data": data, "model": model, "train": {"epochs": 1.0, "batch": 8}})
        train(recipe, tmp_path / name, quiet=True)
    assert "run of Autoencoder, which is no classifier" in refused(capsys, tmp_path / "autoencoder", digits[0])
    assert "run of CNN, which redraws nothing" in refused(capsys, tmp_path / "cnn", digits[0], "--out", tmp_path)
    assert answers(capsys, tmp_path / "cnn", digits[0])[0]["classes"]


def test_your_own_classes_have_their_names_for_as_long_as_the_folder_is_there(capsys, tmp_path):
    for n, kind in enumerate(("cat", "dog")):
        for m in range(8):
            saved(tmp_path / "animals" / kind / f"{m}.png", np.full((16, 16, 3), (10 + m, 200 * n, 90)))
    animals = tmp_path / "animals"
    train(tiny(data={"name": "folder", "path": str(animals)}, train={"batch": 4}), tmp_path / "run", quiet=True)
    picture = saved(tmp_path / "x.png", np.full((16, 16, 3), 80))
    [entry] = answers(capsys, tmp_path / "run", picture, "--all")
    assert set(entry["scores"]) == {"cat", "dog"}
    gray = saved(tmp_path / "gray.png", np.full((16, 16), 80))
    assert answers(capsys, tmp_path / "run", gray, "--all")[0]["scores"] == entry["scores"]
    # Pictures of any size are treated as those of the folder were, without --fit
    large = saved(tmp_path / "large.png", np.full((40, 60, 3), 80))
    assert answers(capsys, tmp_path / "run", large, "--all")[0]["scores"] == entry["scores"]
    animals.rename(tmp_path / "elsewhere")
    assert set(answers(capsys, tmp_path / "run", picture, "--all")[0]["scores"]) == {"0", "1"}
    saved(animals / "cow" / "0.png", np.full((16, 16, 3), 1))
    assert set(answers(capsys, tmp_path / "run", picture, "--all")[0]["scores"]) == {"0", "1"}


def pairs(_: object = None) -> Splits:
    """MultiMNIST without MNIST: pairs of glyphs."""
    digits = GlyphsConfig(train=60, test=1, size=28).load().train
    images, labels, parts = multimnist(digits.images, digits.labels, 0, torch.arange(24))
    data = Dataset(images, labels, 10, components=parts)
    return Splits(data, data)


def test_of_pictures_that_show_two_things_both_are_named(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(MultiMnistConfig, "load", pairs)
    data = {"name": "multimnist", "train": 24, "test": 24}
    train(recipe_of(to_table(tiny(), data)), tmp_path / "run", quiet=True)
    monkeypatch.setattr(MultiMnistConfig, "load", lambda _: pytest.fail("loaded the data"))
    two = saved(tmp_path / "two.png", pairs().test.images[0, 0])
    [entry] = answers(capsys, tmp_path / "run", two, "--all")
    assert [c["class"] for c in entry["classes"]] == [j for j, s in entry["scores"].items() if s > 0.5]
    middle = sorted(entry["scores"].values())[-2:]
    [both] = answers(capsys, tmp_path / "run", two, "--threshold", middle[0] - 1e-4, "--out", tmp_path / "sheets")
    assert [c["score"] for c in both["classes"]][:2] == middle[::-1] and Path(both["sheet"]).is_file()


def to_table(recipe, data: dict) -> dict:
    from torchcaps.config import to_dict

    return {**to_dict(recipe), "data": data, "stages": {}}


@pytest.mark.parametrize("name", [name for name in DATASETS if name not in ("folder", "npz")])
def test_names_of_known_data_need_no_images(name, monkeypatch):
    config = DATASETS[name]()
    monkeypatch.setattr(DATASETS[name], "load", lambda _: pytest.fail("loaded the data"))
    classes = 5 if name == "smallnorb" else 10
    names = class_names(config, classes)
    first = {"fashion-mnist": "T-shirt", "cifar10": "airplane", "smallnorb": "animal"}.get(name, "0")
    assert len(set(names)) == classes and names[0] == first


def test_names_of_other_data_are_looked_up_or_numbers():
    class Other:
        def load(self) -> Splits:
            data = Dataset(DIGITS.images[:2], torch.tensor([0, 1]), 2, names=("no", "yes"))
            return Splits(data, data)

    class Gone:
        def load(self) -> Splits:
            raise DataError("not here")

    assert class_names(Other(), 2) == ("no", "yes")
    assert class_names(Other(), 3) == class_names(Gone(), 3) == ("0", "1", "2")


def as_data(run: TrainedRun, path: Path, **how: bool) -> Dataset:
    """One picture in the format of a run."""
    data, paths, failures = read_pictures(run, [path], **how)
    assert data is not None and paths == (path,) and not failures
    return data


def why_not(run: TrainedRun, path: Path) -> str:
    """Why a picture is not in the format of a run."""
    data, _, [(failed, reason)] = read_pictures(run, [path])
    assert data is None and failed == path
    return reason


def test_a_run_that_sees_a_view_is_shown_the_middle_and_standardized_if_it_was_trained_so(tmp_path):
    cnn = {"name": "cnn", "widths": [2], "kernel": 3, "hidden": [4]}

    def loaded(data: dict, spec: ImageSpec) -> TrainedRun:
        recipe = recipe_of({"name": "x", "data": data, "model": cnn})
        return TrainedRun(recipe.model.build(spec).eval(), recipe, 0, 0.0)

    noise = np.random.default_rng(0).integers(0, 256, (48, 48, 3), dtype=np.uint8)
    photo = loaded({"name": "cifar10", "view": 24}, ImageSpec(3, 24, 24, 10))
    seen = as_data(photo, saved(tmp_path / "a.png", noise[:32, :32])).model_input()
    assert np.array_equal((255 * seen[0]).round().permute(1, 2, 0).numpy(), noise[4:28, 4:28])
    assert "24x24" in why_not(photo, saved(tmp_path / "b.png", noise[:24, :24]))
    assert "32x32" in why_not(photo, tmp_path / "b.png")
    stereo = loaded({"name": "smallnorb", "view": 32, "standardize": True}, ImageSpec(2, 32, 32, 5))
    assert "of 2 channels" in why_not(stereo, saved(tmp_path / "c.png", noise[..., 0]))
    both = as_data(stereo, tmp_path / "c.png", fit=True)
    assert both.model_input().shape == (1, 2, 32, 32) and both.names[1] == "human"
    assert abs(float(both.model_input().mean())) < 1e-6 and len(classify(stereo, both)) == 1


def test_sparse_capsules_name_the_one_that_comes_first(capsys, tmp_path, digits):
    recipe = recipe_of(
        {
            "name": "sparse-tiny",
            "data": {"name": "glyphs", "train": 40, "test": 20, "size": 16},
            "model": {"name": "sparse-small", "channels": 4, "kernel": 3, "types": 2, "capsules": 5, "decoder": [8]},
            "train": {"epochs": 1.0, "batch": 20},
        }
    )
    train(recipe, tmp_path / "run", quiet=True)
    found = answers(capsys, tmp_path / "run", *digits, "--all")
    with torch.no_grad():
        ranks = load_run(tmp_path / "run").model(DIGITS.images[:3].float() / 255).ranks  # [n j]
    assert [one["capsules"] for one in found] == [[{"capsule": str(int(row.argmin())), "score": 1.0}] for row in ranks]
    assert [list(one["scores"].values()) for one in found] == (1 - ranks / 4).tolist()
