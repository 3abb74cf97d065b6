"""`torchcaps attack` as a person meets it."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from support.cli import talk
from support.tiny_recipe import tiny
from torchcaps.data.builtin import GlyphsConfig
from torchcaps.evaluate.attacks import ATTACKS
from torchcaps.systems.attack_runs import attack_rows, curves_of
from torchcaps.systems.report import text_table
from torchcaps.train import train
from torchcaps.train.recipe import recipe_of

run, refused = talk("attack")

QUICK = ("--epsilons", 0, 0.1, "--images", 12, "--queries", 3)
CNN = {"name": "cnn", "widths": [4], "kernel": 3, "hidden": [8]}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> tuple[Path, Path]:
    """A run of capsules and one of a CNN, on the same images."""
    path = tmp_path_factory.mktemp("attack")
    train(tiny(train={"epochs": 0.3}), path / "capsules", quiet=True)
    cnn = {"name": "plain", "seed": 1, "data": {"name": "glyphs", "train": 80, "test": 40, "size": 16}, "model": CNN}
    train(recipe_of(cnn | {"train": {"epochs": 0.3, "batch": 8}}), path / "cnn", quiet=True)
    return path / "capsules", path / "cnn"


def test_two_models_side_by_side(capsys, folders, tmp_path):
    capsules, cnn = folders
    words = (capsules, "--against", cnn, "--source", cnn, *QUICK, "--results", tmp_path / "results")
    code, out, err = run(capsys, *words)
    assert code == 0, err
    lines = out.splitlines()
    assert lines[0].split()[-4:] == ["0.1", "zero", "gradients", "(%)"]
    for label in ("tiny", "plain"):
        names = [line.split()[1].rstrip(":") for line in lines if line.startswith(f"{label}, ")]
        assert names == [name for name in ATTACKS if (label, name) != ("plain", "transfer")], (
            "nothing comes from itself"
        )
        [verdict] = [line for line in lines if line.startswith(f"{label}: ")]
        assert "gradient masking at epsilon 0.1" in verdict or "no sign of gradient masking" in verdict
    written = capsules / "attacks" / "attacks.json"
    assert str(written) in lines[-1] and Image.open(capsules / "attacks" / "attacks.png").format == "PNG"
    data = json.loads(written.read_text())
    assert data == json.loads((tmp_path / "results" / "tiny-attacks.json").read_text())
    assert (data["seed"], data["loss"], data["source"]["recipe"]) == (0, "cross-entropy", "plain")
    assert {"torchcaps", "torch", "python"} <= data["versions"].keys()
    first, second = data["runs"]
    assert (first["recipe"], first["model"], first["seed"]) == ("tiny", "CapsNet", 3)
    assert (second["recipe"], second["model"], second["images"]) == ("plain", "CNN", 12)
    assert second["attack_accuracy"]["fgsm"]["0.1"] <= second["attack_accuracy"]["fgsm"]["0"]
    assert lines[: len(attack_rows(curves_of(data)))] == text_table(attack_rows(curves_of(data))).splitlines()
    assert set(first["attack_success"]) == {"targeted"} and set(first["zero_gradients"]) >= {"fgsm", "pgd"}


def test_a_network_without_labels_is_attacked_through_its_read_out(capsys, folders, tmp_path):
    model = {
        "name": "sparse", "capsules": 4, "dimension": 3, "channels": 4, "kernel": 5, "stride": 2, "types": 2,
        "type_dimension": 3, "primary_kernel": 5, "decoder": [8],
    }  # fmt: skip
    train(tiny(name="few", model=model, train={"epochs": 0.3}), tmp_path / "few", quiet=True)
    words = (tmp_path / "few", "--against", folders[1], *QUICK, "--attacks", "fgsm", "square", "--json")
    code, out, err = run(capsys, *words)
    assert code == 0, err
    few, plain = json.loads(out)["runs"]
    assert (few["recipe"], few["model"], plain["recipe"]) == ("few", "SVMClassifier", "plain")
    assert few["attack_accuracy"]["fgsm"].keys() == plain["attack_accuracy"]["fgsm"].keys() == {"0", "0.1"}
    assert few["zero_gradients"]["fgsm"] < 1
    assert "no loss" in refused(capsys, tmp_path / "few", *QUICK, "--loss", "own", "--out", tmp_path)


def test_the_same_words_give_the_same_numbers(capsys, folders, tmp_path):
    words = (folders[0], *QUICK, "--attacks", "pgd", "square", "--json", "--out", tmp_path)

    def numbers(*more: object) -> list[object]:
        code, out, err = run(capsys, *words, *more)
        assert code == 0, err
        assert json.loads(out) == json.loads((tmp_path / "attacks.json").read_text())
        [one] = json.loads(out)["runs"]
        return [one["attack_accuracy"], one["gradient_size"]]

    first = numbers()
    assert first == numbers() != numbers("--seed", 1)
    assert first != numbers("--loss", "own")


def test_one_attack_alone_says_nothing_of_masking(capsys, folders, tmp_path):
    code, out, _ = run(capsys, folders[1], *QUICK, "--attacks", "fgsm", "--out", tmp_path)
    assert code == 0 and "masking unknown" in out


def test_wrong_input_gets_one_line(capsys, folders, tmp_path):
    capsules, cnn = folders
    out = ("--out", tmp_path / "out")
    assert "--source" in refused(capsys, capsules, "--attacks", "transfer", *out)
    assert "add transfer" in refused(capsys, capsules, "--attacks", "fgsm", "--source", cnn, *out)
    assert "epsilon = 2" in refused(capsys, capsules, "--epsilons", 2, *out)
    assert "at least 1" in refused(capsys, capsules, "--images", 0, *out)
    assert "0 or more" in refused(capsys, capsules, "--seed", -1, *out)
    assert "each once" in refused(capsys, capsules, "--attacks", "bim", "bim", *out)
    assert "attacked once" in refused(capsys, capsules, "--against", capsules, *out)
    assert "checkpoint" in refused(capsys, tmp_path, *out)
    assert "did you mean '--images'" in refused(capsys, capsules, "--imagse", 3, *out)
    assert not (tmp_path / "out").exists()
    assert "is the source itself" in refused(capsys, cnn, "--attacks", "transfer", "--source", cnn, *out)
    (tmp_path / "file").write_text("x")
    assert "is a file; choose another --out" in refused(capsys, capsules, "--out", tmp_path / "file")
    assert "is a file; choose another --results" in refused(capsys, capsules, "--results", tmp_path / "file")


def test_runs_that_cannot_be_attacked_together_are_refused(capsys, folders, tmp_path):
    other = tiny(name="other", data={"size": 18}, train={"epochs": 0.1})
    train(other, tmp_path / "other", quiet=True)
    assert "other images" in refused(capsys, folders[0], "--against", tmp_path / "other")
    assert "other images" in refused(capsys, folders[0], "--source", tmp_path / "other")
    encoder = {
        "name": "encoder", "data": {"name": "glyphs", "train": 32, "test": 8, "size": 16},
        "model": {"name": "autoencoder", "channels": [4, 4], "kernel": 5}, "train": {"epochs": 1.0, "batch": 32},
    }  # fmt: skip
    train(recipe_of(encoder), tmp_path / "encoder", quiet=True)
    assert "no classifier" in refused(capsys, tmp_path / "encoder")
    assert "no classifier" in refused(capsys, folders[0], "--source", tmp_path / "encoder")
    assert not (tmp_path / "encoder" / "attacks").exists()


def test_labels_in_pairs_are_refused(capsys, folders, monkeypatch):
    load = GlyphsConfig.load

    def pairs(self):
        splits = load(self)
        return splits._replace(test=replace(splits.test, labels=splits.test.labels[:, None].repeat(1, 2)))

    monkeypatch.setattr(GlyphsConfig, "load", pairs)
    assert "one label an image" in refused(capsys, folders[0])


def test_without_matplotlib_it_says_what_to_install(capsys, folders, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "torchcaps[plot]" in refused(capsys, folders[0])


def test_help_has_an_example(capsys):
    assert "Example: torchcaps attack" in run(capsys, "--help")[1]
