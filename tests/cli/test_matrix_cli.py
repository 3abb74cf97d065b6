"""Matrix capsules as a person meets them: trained, measured, drawn; and one line for what cannot be meant."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from support.cli import talk
from torchcaps.models import MatrixCaps
from torchcaps.train import load_recipe, train

SMALL = {
    "name": "small",
    "data": {"name": "glyphs", "train": 64, "test": 24, "size": 16},
    "model": {"name": "matrix-tiny"},
    "schedule": {"name": "constant"},
    "train": {"epochs": 1.0, "batch": 16},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("matrix") / "run"
    assert isinstance(train(load_recipe("matrix-mnist-small", SMALL), path, quiet=True).model, MatrixCaps)
    return path


draw, not_drawn = talk("generate")
evaluate, _ = talk("evaluate")
_, not_trained = talk("train")


def test_pictures_of_matrix_capsules(capsys, folder, tmp_path):
    code, out, err = draw(capsys, folder, "--count", 1, "--out", tmp_path)
    names = sorted(Path(line).stem for line in out.splitlines())
    assert code == 0, err
    assert names[:2] == ["calibration", "routing"] and len(names) == 4
    assert names[3] == f"{names[2]}-all" and names[2].startswith("votes-")
    code, out, _ = draw(
        capsys, folder, "--what", "votes", "--capsule", 3, "-n", 1, "--seed", 1, "--out", tmp_path / "b"
    )
    assert code == 0 and len(out.splitlines()) == 2 == len(list((tmp_path / "b").iterdir()))


def test_what_matrix_capsules_do_not_draw_is_refused(capsys, folder, tmp_path):
    assert "choose: votes, routing, calibration" in not_drawn(capsys, folder, "--what", "samples", "--out", tmp_path)
    assert "leave it out" in not_drawn(capsys, folder, "--domain", "complete", "--out", tmp_path)
    assert "0 to 9" in not_drawn(capsys, folder, "--capsule", 10, "--what", "votes", "--out", tmp_path)
    assert not list(tmp_path.glob("*.png"))


def test_a_result_without_a_number_of_the_paper_says_nothing_of_its_budget(capsys, folder, tmp_path):
    code, out, err = evaluate(capsys, folder)
    assert code == 0, err
    assert "test error (%)" in out and "in the paper" not in out and "budget" not in out
    following = load_recipe("matrix-mnist-small", {**SMALL, "paper": {"metrics": {"test_error": 0.018}}})
    train(following, tmp_path / "run", quiet=True)
    told = evaluate(capsys, tmp_path / "run")[1]
    assert "in the paper" in told and "a smaller budget than the paper's: 4 steps of 16 images" in told
    assert "budget than" not in evaluate(capsys, tmp_path / "run", "--json")[1]


def test_images_smaller_than_the_receptive_fields_are_refused(capsys, tmp_path):
    words = ("matrix-mnist-small", "--data.name", "glyphs", "--data.size", 16, "--out", tmp_path / "run")
    assert "images of 16x16 are too small for this network: it needs 17x17 or more" in not_trained(capsys, *words)
    assert not (tmp_path / "run").exists()


def test_one_eye_and_missing_viewpoints_are_refused(capsys, tmp_path, monkeypatch):
    n = np.arange(20)
    arrays = {"images": np.zeros((20, 1, 48, 48), np.uint8), "category": n % 5, "instance": n, "lighting": n}
    files = {f"smallnorb48_{part}.npz": tmp_path / "part.npz" for part in ("train", "test")}
    monkeypatch.setattr("torchcaps.data.smallnorb.locate", lambda name, folder: files)
    words = ("matrix-smallnorb", "--data.novel", "azimuth", "--data.matched", "true", "--out", tmp_path / "run")
    np.savez(tmp_path / "part.npz", **arrays)
    assert "azimuth, elevation missing" in not_trained(capsys, *words)
    np.savez(tmp_path / "part.npz", **arrays, azimuth=n, elevation=n)
    assert "[20, 1, 48, 48]; pairs [n 2 h w] are wanted" in not_trained(capsys, *words)
    assert "set novel" in not_trained(capsys, "matrix-smallnorb", "--data.matched", "true", "--out", tmp_path / "run")
    assert not (tmp_path / "run").exists()
