"""`torchcaps export` as a person meets it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from support.cli import is_suggestion, talk
from torchcaps.config import to_dict
from torchcaps.errors import CheckpointError
from torchcaps.train import export, load, load_run, train
from torchcaps.train.checkpoint import load as read_checkpoint
from torchcaps.train.recipe import recipe_of

onnxruntime = pytest.importorskip("onnxruntime")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("export") / "run"
    recipe = recipe_of(
        {
            "name": "small-cnn",
            "data": {"name": "glyphs", "train": 32, "test": 12, "size": 12},
            "model": {"name": "cnn", "widths": [2], "kernel": 3, "hidden": [4]},
            "train": {"epochs": 1.0, "batch": 16},
        }
    )
    train(recipe, path, quiet=True)
    return path


run, refused = talk("export")


def test_a_run_becomes_a_file_that_scores_as_the_run_does(capsys, tmp_path, folder):
    path = tmp_path / "model.onnx"
    code, out, err = run(capsys, folder, path)
    assert code == 0 and is_suggestion(err) and out.count("\n") == 1
    assert str(path) in out and "differs from torch by" in out
    x = torch.rand(3, 1, 12, 12)
    (scores,) = onnxruntime.InferenceSession(path).run(["scores"], {"images": x.numpy()})
    with torch.no_grad():
        torch.testing.assert_close(torch.from_numpy(scores), load(folder).scores(x), rtol=0, atol=1e-4)
    assert [p.name for p in tmp_path.iterdir()] == ["model.onnx"]
    found = onnxruntime.InferenceSession(path).get_modelmeta().custom_metadata_map
    assert json.loads(found["class_names"]) == [str(digit) for digit in range(10)]


def test_a_file_that_is_there_stays_unless_forced(capsys, tmp_path, folder, monkeypatch):
    path = tmp_path / "model.onnx"
    path.write_bytes(b"mine")
    assert "--force" in refused(capsys, folder, path) and path.read_bytes() == b"mine"
    monkeypatch.setattr(export, "_converted", lambda *_: (b"new", 2e-6))
    code, out, _ = run(capsys, folder, path, "--force")
    assert code == 0 and "2e-06" in out and path.read_bytes() == b"new"


def test_a_difference_is_one_line_and_leaves_nothing_behind(capsys, tmp_path, folder, monkeypatch):
    monkeypatch.setattr(export, "_traced", lambda *_: b"")
    monkeypatch.setattr(export, "_difference", lambda *_: 0.5)
    assert "differs from torch by 0.5" in refused(capsys, folder, tmp_path / "model.onnx")
    assert list(tmp_path.iterdir()) == []


def test_what_is_no_run_or_no_place_for_a_file_is_refused_by_name(capsys, tmp_path, folder):
    (tmp_path / "empty").mkdir()
    assert "empty" in refused(capsys, tmp_path / "empty", tmp_path / "model.onnx")
    assert "nowhere" in refused(capsys, tmp_path / "nowhere", tmp_path / "model.onnx")
    assert "folder that exists" in refused(capsys, folder, tmp_path / "none" / "model.onnx")
    assert "does not know '--forse'" in refused(capsys, folder, tmp_path / "model.onnx", "--forse")


@pytest.mark.parametrize("name", ["model.txt", "model", "model.ONNX2", "model.pt"])
def test_other_endings_are_refused(capsys, tmp_path, folder, name):
    assert "neither .onnx nor .safetensors" in refused(capsys, folder, tmp_path / name)
    assert list(tmp_path.iterdir()) == []


def test_a_missing_extra_is_named(capsys, tmp_path, folder, monkeypatch):
    monkeypatch.setattr(export, "find_spec", lambda name: None)
    assert "pip install 'torchcaps[onnx]'" in refused(capsys, folder, tmp_path / "model.onnx")
    assert list(tmp_path.iterdir()) == []


def test_help_has_an_example(capsys):
    code, out, _ = run(capsys, "--help")
    assert code == 0 and "Example: torchcaps export" in out


def test_weights_alone_load_as_a_run_and_name_no_folder(capsys, tmp_path, folder):
    path = tmp_path / "model.safetensors"
    code, out, err = run(capsys, folder, path, "--examples", "1")
    assert code == 0 and is_suggestion(err) and f"{path.stat().st_size:,} bytes" in out and "by 0 at most" in out
    x = torch.rand(3, 1, 12, 12)
    with torch.no_grad():
        assert torch.equal(load(path).scores(x), load(folder).scores(x))
    given = read_checkpoint(path)
    assert all(name.startswith(("state.model.", "examples.")) for name in given.tensors)
    assert given.tensors["examples.images"].dtype == torch.uint8
    test = load_run(folder).recipe.data.load().test
    for image, label in zip(given.tensors["examples.images"], given.tensors["examples.labels"], strict=True):
        assert any(torch.equal(image, other) for other in test.images[test.labels == label])
    assert to_dict(given.meta.recipe)["data"].get("data_dir") is None
    assert load_run(path).class_names == tuple(str(digit) for digit in range(10))
    assert path.stat().st_size < (folder / "checkpoint.safetensors").stat().st_size


def test_half_the_bytes_move_the_outputs_little(capsys, tmp_path, folder):
    run(capsys, folder, tmp_path / "whole.safetensors")
    code, _, _ = run(capsys, folder, tmp_path / "half.safetensors", "--half")
    whole, half = (read_checkpoint(tmp_path / f"{name}.safetensors").tensors for name in ("whole", "half"))
    assert code == 0 and sum(t.nbytes for t in half.values()) == sum(t.nbytes for t in whole.values()) // 2
    x = torch.rand(3, 1, 12, 12)
    with torch.no_grad():
        moved = load(tmp_path / "half.safetensors").scores(x) - load(folder).scores(x)
    assert moved.abs().max() < 1e-2


def test_weights_alone_cannot_be_resumed(tmp_path, folder, capsys):
    (tmp_path / "given").mkdir()
    run(capsys, folder, tmp_path / "given" / "checkpoint.safetensors")
    shutil.copy(folder / "recipe.json", tmp_path / "given")
    with pytest.raises(CheckpointError, match="weights alone"):
        train(load_run(folder).recipe, tmp_path / "given", resume=True, quiet=True)


def test_what_does_not_go_together_is_refused(capsys, tmp_path, folder):
    assert "weights" in refused(capsys, folder, tmp_path / "model.onnx", "--half")
    assert "0 to 1000" in refused(capsys, folder, tmp_path / "model.safetensors", "--examples", "-1")
    assert list(tmp_path.iterdir()) == []


def test_weights_do_not_say_where_own_pictures_were(capsys, tmp_path, monkeypatch):
    pictures = tmp_path / "private" / "pictures.npz"
    pictures.parent.mkdir()
    images = torch.randint(256, (20, 12, 12), dtype=torch.uint8).numpy()
    np.savez(pictures, images=images, labels=torch.arange(20).numpy() % 2)
    monkeypatch.chdir(pictures.parent)
    recipe = recipe_of(
        {
            "name": "own",
            "data": {"name": "npz", "path": "pictures.npz"},
            "model": {"name": "cnn", "widths": [2], "kernel": 3, "hidden": [4]},
            "train": {"epochs": 1.0, "batch": 8},
        }
    )
    train(recipe, tmp_path / "own", quiet=True)
    # The run works from any folder, the file that is given away names none
    monkeypatch.chdir(tmp_path)
    assert load_run(tmp_path / "own").recipe.data.path == str(pictures)
    path = tmp_path / "model.safetensors"
    assert run(capsys, tmp_path / "own", path)[0] == 0
    assert b"private" not in path.read_bytes()
    assert load_run(path).recipe.data.path == "pictures.npz"
