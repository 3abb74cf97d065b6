"""The trained models that ship: every card is true, and the name of a model serves wherever a run does."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from PIL import Image

import torchcaps
from support.cli import talk
from torchcaps.errors import CheckpointError, DataError
from torchcaps.evaluate.results import read_result
from torchcaps.systems.image_sources import load_test_images
from torchcaps.train.checkpoint import load as read_checkpoint
from torchcaps.train.recipe import load_recipe
from torchcaps.train.run import load_run, shipped_models, weights_path
from torchcaps.train.stored_examples import stored_examples
from torchcaps.zoo import BuildSettings, build_model_folder, list_models, model_card, read_card, spot_check
from torchcaps.zoo.build import training_command
from torchcaps.zoo.card import card_text

run, refused = talk("zoo")
NAMES = list_models()
MOST_BYTES = 15_000_000
"""All weights together."""


@pytest.mark.parametrize("name", NAMES)
def test_the_score_on_the_shipped_images_is_that_of_the_card(name):
    card = model_card(name)
    assert spot_check(load_run(name)) == pytest.approx(card.check, abs=1e-4)
    examples = stored_examples(load_run(name))
    assert examples is not None and len(examples) == card.check_images >= 80


@pytest.mark.parametrize("name", NAMES)
def test_a_card_agrees_with_the_files_beside_it(name):
    folder = shipped_models()[name]
    card, result = read_card(folder), read_result(folder / "result.json")
    checkpoint = read_checkpoint(folder / "model.safetensors")
    assert (card.name, card.recipe, card.steps) == (name, checkpoint.meta.recipe.name, checkpoint.meta.step)
    assert card.metrics == {metric: values[0] for metric, values in result.metrics.items()}
    assert result.seeds == [card.seed] and result.recipe == card.recipe
    assert (folder / "README.md").read_text() == card_text(card, result)
    assert re.fullmatch(r"[0-9a-f]{7,40}", card.origin.commit) and card.origin.command.startswith("torchcaps train ")
    floats = {tensor.dtype for tensor in checkpoint.tensors.values() if tensor.is_floating_point()}
    assert floats <= {torch.float16, torch.float64} and checkpoint.meta.weights_only


def test_a_headline_says_in_words_what_was_measured():
    said = {name: model_card(name).headline for name in NAMES}
    assert said["capsnet-digits"] == "test error 0.49 %" and said["poe-mnist"] == "96.9 % of samples recognized"
    assert not any("confident" in words or "svm" in words for words in said.values())


def test_the_weights_are_small_and_lie_in_the_repository_once():
    sizes = [path.stat().st_size for path in Path(torchcaps.__file__).parent.rglob("*.safetensors")]
    assert len(sizes) == len(NAMES) and sum(sizes) <= MOST_BYTES


def test_sums_that_only_training_reads_are_left_out_within_bounds(monkeypatch):
    checkpoint = read_checkpoint(shipped_models()["poe-mnist"] / "model.safetensors")
    model = load_run("poe-mnist").model
    assert model.training_sums
    for name in model.training_sums:
        assert not len(checkpoint.tensors[f"state.model.{name}"])
        loaded = model.get_buffer(name)
        assert loaded.numel() and not loaded.any()
    # What is left out counts as memory that the file does not explain
    monkeypatch.setattr("torchcaps.train.model_sizes._FREE_BYTES", 0)
    monkeypatch.setattr("torchcaps.train.model_sizes._MOST_COMPUTED", 1)
    with pytest.raises(CheckpointError, match="contradicts itself"):
        load_run("poe-mnist")


def test_models_are_listed_by_pattern_and_loaded_by_name():
    assert torchcaps.list_models("capsnet-dig*") == ["capsnet-digits"] and torchcaps.list_models("nothing*") == []
    assert not torchcaps.load("capsnet-digits").training
    with pytest.raises(CheckpointError, match=r"neither a run nor a model .* did you mean 'capsnet-digits'"):
        torchcaps.load("capsnet-digts")
    with pytest.raises(CheckpointError, match="did you mean"):
        model_card("capsnet-digts")


def test_a_folder_of_that_name_comes_before_a_shipped_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shipped = shipped_models()["capsnet-digits"] / "model.safetensors"
    here = Path("capsnet-digits")
    here.mkdir()
    assert weights_path(here) == shipped  # holds figures perhaps, but no weights
    (here / "model.safetensors").write_bytes(b"none")
    assert weights_path(here) == here / "model.safetensors"
    with pytest.raises(CheckpointError, match="no whole safetensors file"):
        torchcaps.load("capsnet-digits")
    (here / "checkpoint.safetensors").write_bytes(b"none")
    assert weights_path(here) == here / "checkpoint.safetensors"


def test_training_never_writes_to_a_shipped_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert torchcaps.train.run.checkpoint_path(Path("capsnet-digits")) == Path("capsnet-digits/checkpoint.safetensors")


@pytest.mark.parametrize("text", ["", "[]", "{", '{"name": 1}', "[" * 100_000])
def test_a_bad_card_is_one_line(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(DataError, match="cannot read the model card") as error:
        read_card(tmp_path)
    assert "\n" not in str(error.value) and len(str(error.value)) < 500


def test_a_model_is_built_from_weights_and_loads_as_the_first(tmp_path):
    first = shipped_models()["capsnet-digits"]
    settings = BuildSettings("Reads digits.", "1234567", result=first / "result.json")
    card = build_model_folder(first, tmp_path / "again", settings)
    old = model_card("capsnet-digits")
    assert (card.name, card.summary, card.check, card.metrics) == ("again", "Reads digits.", old.check, old.metrics)
    assert card == read_card(tmp_path / "again")
    for one, other in zip(
        torchcaps.load(tmp_path / "again").parameters(), torchcaps.load("capsnet-digits").parameters(), strict=True
    ):
        assert torch.equal(one, other)


def test_the_command_that_trains_a_recipe_names_what_differs():
    changed = load_recipe("capsnet-glyphs", {"seed": 3, "train": {"epochs": 2.0}})
    assert training_command(changed) == "torchcaps train capsnet-glyphs --seed 3 --train.epochs 2.0"


def test_without_the_data_set_the_stored_images_serve(monkeypatch):
    loaded = load_run("capsnet-digits")
    monkeypatch.setattr("torchcaps.systems.image_sources.is_here", lambda *_: False)
    assert len(load_test_images(loaded)) == 100


def test_the_command_lists_shows_and_checks(capsys):
    code, out, _ = run(capsys)
    assert code == 0 and all(name in out for name in NAMES)
    assert [card["name"] for card in json.loads(run(capsys, "list", "caps*", "--json")[1])] == list_models("caps*")
    code, out, _ = run(capsys, "show", "capsnet-digits")
    assert code == 0 and "license: CC BY-SA 3.0" in out and "torchcaps train capsnet-mnist-small" in out
    code, out, _ = run(capsys, "check", "capsnet-digits")
    assert code == 0 and "as its card says" in out


def test_the_command_s_refusals(capsys):
    assert "needs the name of a model" in refused(capsys, "show")
    assert "did you mean 'capsnet-digits'" in refused(capsys, "show", "capsnet-digit")
    assert "no model 'zzz'" in refused(capsys, "check", "zzz")
    assert "--about" in refused(capsys, "build", "mine", "--run", "runs/none")
    assert "give --run" in refused(capsys, "build", "mine", "--about", "Mine.", "--commit", "1234567")


def test_a_name_serves_wherever_a_run_does(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torchcaps.systems.image_sources.is_here", lambda *_: False)
    images = load_run("capsnet-digits").extra["examples.images"]
    Image.fromarray(images[0, 0].numpy()).save("digit.png")
    code, out, err = talk("predict")[0](capsys, "capsnet-digits", "digit.png")
    assert code == 0 and re.search(r"digit\.png +7 ", out), out + err
    code, out, err = talk("generate")[0](capsys, "capsnet-digits", "--what", "routing", "-n", "1")
    assert code == 0 and Path("capsnet-digits/pictures/routing.png").is_file(), out + err
    words = ("capsnet-digits", "--attacks", "fgsm", "--images", "4", "--epsilons", "0", "0.1")
    code, out, err = talk("attack")[0](capsys, *words)
    assert code == 0 and Path("capsnet-digits/attacks/attacks.json").is_file(), out + err
    code, out, err = talk("export")[0](capsys, "capsnet-digits", "model.safetensors")
    assert code == 0 and Path("model.safetensors").is_file(), out + err
