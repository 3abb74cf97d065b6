"""`torchcaps evaluate` as a person meets it: which runs it takes, and what it says of those that it does not."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from support.cli import talk
from support.tiny_recipe import tiny
from torchcaps.cli.demo import next_commands
from torchcaps.systems import evaluation
from torchcaps.systems.report import rows_of
from torchcaps.train import load_run, train

run, refused = talk("evaluate")
CNN = {"name": "cnn", "widths": [4], "hidden": [8]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Two seeds of a recipe, a run of another recipe, and a folder with a single run in it."""
    path = tmp_path_factory.mktemp("evaluate")
    short = tiny(train={"epochs": 0.5})
    train(short, path / "s3", quiet=True)
    train(replace(short, seed=4), path / "s4", quiet=True)
    train(tiny(name="other", model=CNN, train={"epochs": 0.5}), path / "cnn", quiet=True)
    train(short, path / "demo" / "tiny", quiet=True)
    train(short, path / "demo" / "reference-classifier-glyphs-0", quiet=True)
    return path


def test_runs_of_two_recipes_are_refused_by_name(capsys, folder):
    line = refused(capsys, folder / "s3", folder / "cnn")
    assert "'other', not of 'tiny'" in line and "--control" in line and "seeds" not in line
    assert "seeds [3, 3]" in refused(capsys, folder / "s3", folder / "demo" / "tiny")


def test_the_single_run_below_a_folder_is_found(capsys, folder):
    assert run(capsys, folder / "demo") == run(capsys, folder / "demo" / "tiny")
    line = refused(capsys, folder)
    assert "holds 3 runs; name one" in line and str(folder / "cnn") in line


def test_a_results_folder_that_cannot_be_made_is_refused_before_anything_is_measured(capsys, folder, monkeypatch):
    monkeypatch.setattr("torchcaps.systems.evaluate_runs", lambda *_, **__: pytest.fail("measured"))
    file = folder / "s3" / "recipe.json"
    line = refused(capsys, folder / "s3", "--results", file)
    assert f"'{file}' is a file; choose another --results" in line


@pytest.mark.parametrize("model", ["poe-mnist", "sparse-digits"])
def test_views_are_refused_where_none_is_averaged(capsys, model):
    assert "--views is for CapsNets and matrix capsules and" in refused(capsys, model, "--views", 3)


def test_no_message_suggests_what_fails(capsys):
    assert "runs/demo" not in refused(capsys)
    assert "runs/demo" not in run(capsys, "--help")[1]


def test_unfinished_runs_are_marked(capsys, folder, monkeypatch):
    monkeypatch.setattr(evaluation, "load_run", lambda path: load_run(path)._replace(finished=path.name == "s3"))
    found = json.loads(run(capsys, folder / "s3", folder / "s4", "--control", folder / "cnn", "--json")[1])
    assert found["budget"]["unfinished_runs"] == 1
    assert "other (unfinished)" in found["controls"] and "untrained" in found["controls"]
    assert "\ntiny (unfinished) " in run(capsys, folder / "s3", folder / "s4")[1]
    whole = evaluation.evaluate_runs([folder / "s3"])
    assert "unfinished_runs" not in whole.budget and rows_of(whole)[1][0] == "tiny"


def test_a_positional_is_no_option(capsys, folder):
    generate = talk("generate")[1]
    assert "--folder" not in generate(capsys, folder / "s3", "--foldr", "x")


@pytest.mark.parametrize(
    ("started", "on_path", "wanted"),
    [
        ("venv/bin/torchcaps", False, "venv/bin/torchcaps"),
        ("venv/bin/torchcaps", True, "torchcaps"),
        ("lib/torchcaps/__main__.py", False, "venv/bin/python -m torchcaps"),
    ],
)
def test_the_demo_names_commands_as_it_was_started(tmp_path, monkeypatch, started, on_path, wanted):
    monkeypatch.chdir(tmp_path)
    programs = tmp_path / "venv" / "bin"
    programs.mkdir(parents=True)
    for name in ("python", "torchcaps"):
        (programs / name).touch(mode=0o755)
    monkeypatch.setattr("sys.argv", [started, "demo"])
    monkeypatch.setattr("sys.executable", str(programs / "python"))
    monkeypatch.setenv("PATH", str(programs) if on_path else "")
    report, explore, evaluate = next_commands(Path("runs/demo/report.html"), Path("runs/demo/poe quick"))
    assert report.split()[:3] == ["venv/bin/python", "-m", "webbrowser"] and "file://" in report
    assert explore.strip().startswith(f"{wanted} explore 'runs/demo/poe quick'  ")
    assert evaluate.strip().startswith(f"{wanted} evaluate 'runs/demo/poe quick'  ")
