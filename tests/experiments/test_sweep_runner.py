"""python experiments/sweep.py: trains what is not finished, measures what is, and can be stopped anywhere."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from subprocess import CompletedProcess

import pytest
import torch

from support.easy_images import easy
from support.processes import Forked, command
from support.tiny_recipe import tiny_toml
from sweep import load_sweep, main, sweep_files
from torchcaps.train import load_run
from torchcaps.train.validation import validation_accuracy

SWEEP = """
about = "two rows"

[[runs]]
name = "first"
base = "capsnet-glyphs"
seeds = [3, 4]
data = { train = 80, test = 40, size = 16 }
model = { channels = 4, kernel = 5, types = 2, type_dimension = 4, primary_kernel = 5, dimension = 4, decoder = [8] }
train.epochs = 0.1
train.batch = 8

[[runs]]
name = "second"
base = "first"
after = "first"
about = "one step more"
seeds = [5, 6]
optimizer.lr = 0.001

[[runs]]
name = "mean"
base = "second"
average = ["first", "second"]
seeds = [5]

[[runs]]
name = "control"
base = "first"
model.name = "cnn"
model.widths = [4]
model.hidden = [8]

[[results]]
run = "first"
controls = ["control"]
options = { views = 1 }

[[results]]
run = "mean"
weights = true
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("sweeps") / "rows.toml"
    path.write_text(SWEEP)
    return path


@pytest.fixture(scope="module")
def trained(file: Path, tmp_path_factory) -> Path:
    """The folder of all runs of the sweep, after it ran once; results are beside them."""
    out = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sweep.subprocess.run", forked)
        assert main([str(file), "--out", str(out), "--results", str(out / "results"), "--quiet"]) == 0
    return out


def forked(words: list[str]) -> CompletedProcess[str]:
    """Run `python -m torchcaps` in a process that is forked, which takes less time than one that imports torch."""
    assert words[:3] == [sys.executable, "-m", "torchcaps"]
    return CompletedProcess(words, Forked(command, *words[3:]).wait())


def test_one_command_trains_everything_and_writes_the_results(trained: Path):
    folders = {path.name for path in trained.iterdir()} - {"results"}
    assert folders == {"first-3", "first-4", "second-5", "second-6", "mean-5", "control-0"}
    result = json.loads((trained / "results" / "first.json").read_text())
    assert result["seeds"] == [3, 4] and "control" in result["controls"]
    assert (trained / "results" / "mean.json").exists()
    kept = load_run(trained / "results" / "weights" / "mean-5.safetensors").model.state_dict()
    for name, value in load_run(trained / "mean-5").model.state_dict().items():
        torch.testing.assert_close(kept[name], value, rtol=1e-3, atol=1e-4)
    assert [path.name for path in (trained / "results" / "weights").iterdir()] == ["mean-5.safetensors"]


def test_a_run_starts_from_the_one_it_names_with_the_seed_at_the_same_place(trained: Path):
    second = load_run(trained / "second-6")
    assert second.recipe.start == str(trained / "first-4") and second.recipe.seed == 6
    assert second.step == 2 * load_run(trained / "first-4").step
    assert second.recipe.optimizer.lr == 0.001 and second.recipe.about == "one step more"


def test_what_is_finished_is_left_alone(trained: Path, file: Path, capsys):
    before = {path: path.stat().st_mtime_ns for path in trained.rglob("checkpoint.safetensors")}
    assert main([str(file), "--out", str(trained), "--run", "first"]) == 0
    assert capsys.readouterr().out.count("finished") == 2
    assert {path: path.stat().st_mtime_ns for path in trained.rglob("checkpoint.safetensors")} == before


def test_list_and_dry_run_show_how_far_it_is_and_change_nothing(trained: Path, file: Path, tmp_path: Path, capsys):
    assert main([str(file), "--out", str(trained), "--list"]) == 0
    assert capsys.readouterr().out.count("finished") == 6
    assert main([str(file), "--out", str(tmp_path / "none"), "--list"]) == 0
    assert capsys.readouterr().out.count("not started") == 6
    assert main([str(file), "--out", str(tmp_path / "none"), "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "torchcaps evaluate" in shown and "--control" in shown and "--views 1" in shown
    assert not (tmp_path / "none").exists()


def test_a_run_may_stop_at_the_accuracy_of_another(tmp_path: Path, capsys):
    """The accuracy is measured, not written into the file; a finished run is recognized with it."""
    data = easy(tmp_path)
    path = tmp_path / "like.toml"
    path.write_text(
        '[[runs]]\nname = "one"\nbase = "capsnet-glyphs"\n'
        f'data = {{ name = "npz", path = "{data["path"]}", validation = 20 }}\n'
        'model = { name = "cnn", widths = [4], hidden = [], dropout = 0.0 }\ntrain = { epochs = 1, batch = 8 }\n'
        '[[runs]]\nname = "other"\nbase = "one"\nstop_like = "one"\nseeds = [1]\n'
        "train.epochs = 9\ntrain.validate_every = 2\n"
    )
    words = [str(path), "--out", str(tmp_path), "--quiet"]
    assert main([*words, "--run", "other"]) == 2
    assert "not finished" in capsys.readouterr().err
    assert main(words) == 0
    one, other = load_run(tmp_path / "one-0"), load_run(tmp_path / "other-1")
    images = one.recipe.data.load().validation
    accuracy = validation_accuracy(one.model, images, torch.device("cpu"))
    assert other.recipe.train.stop_at == accuracy > 0.25
    assert other.stopped_early and validation_accuracy(other.model, images, torch.device("cpu")) >= accuracy
    capsys.readouterr()
    assert main([*words, "--list"]) == 0 and capsys.readouterr().out.count("finished") == 2


def test_a_queue_runs_one_seed_at_a_time_and_evaluates_nothing(file: Path, tmp_path: Path, capsys):
    words = [str(file), "--out", str(tmp_path), "--results", str(tmp_path / "results"), "--quiet"]
    assert main([*words, "--run", "first", "--seed", "4"]) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"first-4"}
    assert main([*words, "--run", "second", "--seed", "5"]) == 2
    assert "first-3', which is not finished; train that run first" in capsys.readouterr().err


def test_only_some_runs_and_what_they_suffice_for(file: Path, tmp_path: Path, capsys):
    words = [str(file), "--out", str(tmp_path), "--results", str(tmp_path / "results"), "--quiet"]
    assert main([*words, "--only", "first"]) == 0
    shown = capsys.readouterr().out
    assert "not yet: torchcaps evaluate of first needs control" in shown and not (tmp_path / "results").exists()


def test_other_settings_are_seen_and_refused(trained: Path, file: Path, tmp_path: Path, capsys):
    other = tmp_path / "rows.toml"
    other.write_text(file.read_text().replace("train.batch = 8", "train.batch = 4"))
    assert main([str(other), "--out", str(trained), "--list"]) == 0
    assert "other settings" in capsys.readouterr().out
    assert main([str(other), "--out", str(trained), "--run", "first", "--seed", "3", "--quiet"]) == 2
    assert "train.batch = 8, now it is 4" in capsys.readouterr().err


def test_a_run_may_build_on_a_run_of_another_file(file: Path):
    other = file.with_name("other.toml")
    other.write_text('[[runs]]\nname = "third"\nbase = "second"\ntrain.epochs = 2\n')
    recipe = load_sweep(other).runs["third"].recipe
    assert (recipe.train.epochs, recipe.optimizer.lr, recipe.seed) == (2.0, 0.001, 0)
    other.unlink()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[[runs]]\nname = "a"\nbase = "capsnet-glyps"', "did you mean 'capsnet-glyphs'"),
        ('[[runs]]\nname = "a"\nbase = "b"\n[[runs]]\nname = "b"\nbase = "a"', "lead back to it"),
        ('[[runs]]\nname = "a"\nbase = "capsnet-glyphs"\nafter = "b"', "no run 'b' in this file so far"),
        ('[[runs]]\nname = "a"\nbase = "capsnet-glyphs"\ntrain.epoch = 2', "did you mean 'epochs'"),
        ('[[runs]]\nname = "a"\nbase = "capsnet-glyphs"\nseeds = []', "at least one seed"),
        ('[[runs]]\nname = "a"\nbase = "capsnet-glyphs"\n[[runs]]\nname = "a"', "'a' stands twice"),
        ('[[runs]]\nname = "capsnet-glyphs"\n[[results]]\nrun = "b"', "no run 'b'"),
        ("[[rows]]", "unknown key 'rows'"),
        ("[[runs]]\nseeds = [1]", "missing key 'name'"),
    ],
)
def test_a_sweep_that_cannot_be_meant_is_refused_in_one_line(tmp_path: Path, capsys, text: str, said: str):
    path = tmp_path / "bad.toml"
    path.write_text(text)
    assert main([str(path), "--list"]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


def test_names_and_seeds_that_are_not_in_the_sweep_are_refused(file: Path, tmp_path: Path, capsys):
    for words, said in (
        (["--run", "frist"], "no run 'frist' in rows.toml; did you mean 'first'"),
        (["--run", "first", "--seed", "9"], "'first' has no seed 9"),
        (["--seed", "3"], "name the run with --run"),
    ):
        assert main([str(file), "--out", str(tmp_path), *words]) == 2
        assert said in capsys.readouterr().err


def test_a_recipe_file_is_no_sweep(tmp_path: Path, capsys):
    assert main([str(tiny_toml(tmp_path)), "--list"]) == 2
    assert "unknown key" in capsys.readouterr().err


def test_without_a_file_the_sweeps_are_listed(capsys):
    assert main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [f"experiments/{path.name}" for path in sweep_files()]


def test_an_unfinished_run_goes_on_from_its_checkpoint(file: Path, tmp_path: Path):
    """A run that was stopped has trained for fewer steps than its recipe says."""
    shorter = tmp_path / "rows.toml"
    words = [str(shorter), "--out", str(tmp_path), "--run", "first", "--seed", "3", "--quiet"]
    shorter.write_text(file.read_text())
    assert main(words) == 0
    shorter.write_text(file.read_text().replace("train.epochs = 0.1", "train.epochs = 0.3"))
    assert main(words) == 0
    assert load_run(tmp_path / "first-3").step == 3
    journal = (tmp_path / "first-3" / "journal.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in journal] == sorted({json.loads(line)["step"] for line in journal})
