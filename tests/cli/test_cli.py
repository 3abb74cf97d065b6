"""The command line as a person meets it: exit codes, one-line errors, help with an example."""

from __future__ import annotations

import ast
import inspect
import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from typing import get_args, get_type_hints

import numpy as np
import pytest

from support.cli import is_suggestion
from support.easy_images import easy
from support.processes import Forked, command
from support.tiny_recipe import tiny, tiny_toml
from torchcaps.cli import main
from torchcaps.cli.data import Data
from torchcaps.cli.demo import Demo
from torchcaps.cli.parse import COMMANDS
from torchcaps.cli.zoo import Task
from torchcaps.errors import DataError
from torchcaps.train import load_recipe, load_run, recipe_names, train
from torchcaps.utils.notices import notice


def run(capsys, *words: str) -> tuple[int, str, str]:
    try:
        code = main(list(words))
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 1
    out, err = capsys.readouterr()
    return code, out, err


def refused(capsys, *words: str) -> str:
    """The one line that a wrong input gets."""
    code, out, err = run(capsys, *words)
    assert code == 2, (code, out, err)
    assert err.startswith("torchcaps: ") and err.count("\n") == 1, err
    assert "Traceback" not in err
    return err


def test_no_command_and_help_list_the_commands(capsys):
    for words in ([], ["--help"]):
        code, out, _ = run(capsys, *words)
        assert code == 0
        assert all(name in out for name in COMMANDS)


def test_version(capsys):
    import torchcaps

    assert run(capsys, "--version")[:2] == (0, f"torchcaps {torchcaps.__version__}\n")


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(capsys, name):
    code, out, _ = run(capsys, name, "--help")
    assert code == 0 and f"torchcaps {name}" in out


def test_the_overview_begins_with_an_example(capsys):
    shown = run(capsys, "--help")[1]
    assert shown.index("Example: torchcaps explore") < shown.index("  demo ")


@pytest.mark.parametrize("name", COMMANDS)
def test_help_begins_with_an_example(capsys, name):
    """The example comes first, below the usage and one sentence on what the command does."""
    shown = run(capsys, name, "--help")[1]
    example = shown.index(f"Example: torchcaps {name}")
    assert example < shown.index("options") and shown[:example].count("\n\n") == 2


def subcommands() -> list[tuple[str, str]]:
    """Every command whose first word chooses what it does, with each of those words."""
    words = {"zoo": get_args(Task), "data": get_args(get_type_hints(Data)["action"])}
    return [(name, word) for name, choices in words.items() for word in choices]


@pytest.mark.parametrize(("name", "word"), subcommands())
def test_help_of_every_subcommand_has_its_example(capsys, name, word):
    code, shown, _ = run(capsys, name, word, "--help")
    example = shown.index(f"Example: torchcaps {name} {word}")
    assert code == 0 and example < shown.index("options")


def test_unknown_words_get_the_nearest(capsys):
    assert "did you mean 'train'" in refused(capsys, "trian")
    assert "did you mean 'capsnet-glyphs'" in refused(capsys, "train", "capsnet-glyph")
    assert "did you mean '--json'" in refused(capsys, "list", "--jsn")
    assert "did you mean 'glyphs'" in refused(capsys, "data", "check", "glyps")


def test_list_shows_everything_and_a_recipe_s_keys(capsys):
    code, out, _ = run(capsys, "list")
    assert code == 0
    for word in ("capsnet-glyphs", "cnn-glyphs", "dynamic", "em", "glyphs", "capsnet"):
        assert word in out
    everything = json.loads(run(capsys, "list", "--json")[1])
    assert set(everything) == {"recipes", "models", "data", "routers"}
    assert everything["recipes"].keys() == set(recipe_names())
    for name in everything["recipes"]:
        assert re.search(rf"^  {name} ", out, re.MULTILINE), "every recipe stands under a system"
    assert max(map(len, out.splitlines())) <= 120
    keys = run(capsys, "list", "capsnet-glyphs")[1]
    assert re.search(r"^  --model.routing.iterations +3 +whole number, at least 1$", keys, re.MULTILINE)
    data = json.loads(run(capsys, "list", "capsnet-glyphs", "--json")[1])
    assert data["--train.batch"]["value"] == "100" and data["--train.batch"]["type"]
    assert "--stages.capsules.optimizer.lr" in run(capsys, "list", "poe-quick")[1]


def test_data_list_fetch_check(capsys):
    assert "built in" in run(capsys, "data", "list")[1]
    assert "nothing to fetch" in run(capsys, "data", "fetch", "glyphs")[1]
    assert "no image in two splits" in run(capsys, "data", "check", "glyphs")[1]
    assert "torchcaps data fetch NAME" in refused(capsys, "data", "fetch")


def test_train_evaluate_and_resume_a_file_of_one_s_own(capsys, tmp_path):
    recipe, out = str(tiny_toml(tmp_path)), str(tmp_path / "run")
    code, text, _ = run(capsys, "train", recipe, "--out", out, "--quiet", "--train.epochs", "1", "--seed=5")
    assert code == 0 and "10 steps" in text
    loaded = load_run(out)
    assert (loaded.recipe.seed, loaded.recipe.train.epochs, loaded.recipe.name) == (5, 1.0, "tiny")
    assert "--resume" in refused(capsys, "train", recipe, "--out", out, "--quiet", "--seed", "5")
    code, text, _ = run(capsys, "train", recipe, "--out", out, "--quiet", "--seed", "5", "--resume")
    assert code == 0 and "20 steps" in text
    code, text, _ = run(capsys, "evaluate", out, "--results", str(tmp_path / "results"))
    assert code == 0 and "untrained" in text and "nearest mean" in text
    stored = json.loads((tmp_path / "results" / "tiny.json").read_text())
    assert stored["seeds"] == [5] and len(stored["metrics"]["test_error"]) == 1
    assert json.loads(run(capsys, "evaluate", out, "--json")[1])["metrics"] == stored["metrics"]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--train.bach", "3"], "did you mean 'batch'"),
        (["--train.batch", "many"], "train.batch"),
        (["--train.batch", "0"], "at least 1"),
        (["--train.batch"], "--train.batch"),
        (["--model.routing.agreement", "dott"], "dot"),
        (["--reusme"], "reusme"),
        (["--model.kernel", "99"], "too small"),
        (["--optimizer.name", "Addam"], "Adam"),
    ],
)
def test_wrong_settings_are_refused_and_write_nothing(capsys, tmp_path, words, text):
    out = tmp_path / "run"
    assert text in refused(capsys, "train", str(tiny_toml(tmp_path)), "--quiet", "--out", str(out), *words)
    assert not (out / "checkpoint.safetensors").exists()


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("generate", "no RUN is given; write it as in: torchcaps generate runs/"),
        ("export runs/cg", "no FILE is given; write it as in: torchcaps export runs/capsnet-glyphs-0 model.onnx"),
        ("average A B", "no --out PATH is given; write it as in: torchcaps average "),
        ("data", "no {list,fetch,check,show,clean} is given"),
        ("evaluate R --images ten", "--images ten came; wanted: whole number\n"),
        ("generate R --capsule 1 x --seed 1", "--capsule 1 x came; wanted: whole numbers\n"),
        ("generate R -n=x", "--count x came; wanted: whole number\n"),
        ("predict R --threshold high", "--threshold high came; wanted: number\n"),
        ("generate R --domain foo", "--domain foo is unknown; known: complete, empirical"),
        ("attack R --attacks fgsm squar", "--attacks squar is unknown; did you mean 'square'?"),
        ("zoo lst", "task lst is unknown; did you mean 'list'?"),
        ("generate R --what --count 3", "--what has no value; write --what VALUE"),
    ],
)
@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_words_that_cannot_be_parsed_get_one_line(capsys, monkeypatch, words, text, encoding):
    """tyro draws boxes, in color on a terminal and without a frame where the output is not UTF-8."""
    monkeypatch.setattr("tyro._fmtlib._FORCE_ANSI", encoding == "utf-8", raising=False)
    monkeypatch.setattr("tyro._fmtlib._FORCE_UTF8_BOXES", encoding == "utf-8", raising=False)
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(io.BytesIO(), encoding))
    assert text in refused(capsys, *words.split())


def test_wrong_recipe_files_are_refused_by_name(capsys, tmp_path):
    assert "missing.toml" in refused(capsys, "train", str(tmp_path / "missing.toml"))
    bad = tmp_path / "bad.toml"
    bad.write_text("seed = = 3\n")
    assert "bad.toml" in refused(capsys, "train", str(bad))
    bad.write_bytes(b"\xff\xfe\x00")
    assert "bad.toml" in refused(capsys, "train", str(bad))
    unknown = tiny_toml(tmp_path, "sed = 4")
    assert f"recipe '{unknown}': unknown key 'sed'" in refused(capsys, "train", str(unknown))
    unknown.write_text('base = "nowhere"\n')
    assert f"recipe '{unknown}': base: unknown recipe 'nowhere'" in refused(capsys, "train", str(unknown))
    assert "recipe 'capsnet-glyphs.toml': seed" in refused(capsys, "train", "capsnet-glyphs", "--seed", "x")


def test_what_is_not_a_run_is_refused_by_name(capsys, tmp_path):
    assert "nowhere" in refused(capsys, "evaluate", str(tmp_path / "nowhere"))
    (tmp_path / "empty").mkdir()
    assert "empty" in refused(capsys, "evaluate", str(tmp_path / "empty"))
    (tmp_path / "empty" / "checkpoint.safetensors").write_bytes(b"not at all")
    assert "checkpoint.safetensors" in refused(capsys, "evaluate", str(tmp_path / "empty"))
    assert "name the folder" in refused(capsys, "evaluate")


def test_an_unwritable_folder_is_refused(capsys, tmp_path):
    (tmp_path / "file").write_text("x")
    assert "file" in refused(
        capsys, "train", str(tiny_toml(tmp_path)), "--quiet", "--out", str(tmp_path / "file" / "run")
    )


def test_unexpected_errors_are_one_line_unless_debug(capsys, monkeypatch):
    def explode(self):
        raise ZeroDivisionError("by design")

    monkeypatch.setattr(COMMANDS["list"], "run", explode)
    code, _, err = run(capsys, "list")
    assert code == 1 and "ZeroDivisionError" in err and err.count("\n") == 1
    with pytest.raises(ZeroDivisionError):
        main(["list", "--debug"])


def test_a_command_gives_each_notice_once_and_the_next_command_gives_it_again(capsys, monkeypatch):
    def load(self):
        for text in ("3 files cannot be read", "pictures differ", "3 files cannot be read"):
            notice(text)
        return 0

    monkeypatch.setattr(COMMANDS["list"], "run", load)
    for _ in range(2):
        assert run(capsys, "list") == (0, "", "torchcaps: 3 files cannot be read\ntorchcaps: pictures differ\n")


def test_ctrl_c_says_how_to_go_on_and_that_command_finishes(tmp_path):
    out, recipe = tmp_path / "run", str(tiny_toml(tmp_path))
    process = Forked(command, "train", recipe, "--out", str(out), "--train.epochs", "400")
    deadline = time.monotonic() + 240
    while not (out / "checkpoint.safetensors").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    assert process.wait() == 1
    line = process.errors.strip().splitlines()[-1]
    assert line.endswith(f"go on with: torchcaps train --resume {out}")
    advice = line.split("torchcaps ", 1)[1].split()
    step = load_run(out).step
    assert 0 < step < 4000
    assert main([*advice, "--quiet", "--train.epochs", str((step + 20) / 10)]) == 0
    assert load_run(out).step == step + 20


def test_a_folder_is_all_that_resume_needs(capsys, tmp_path):
    recipe, out = str(tiny_toml(tmp_path)), str(tmp_path / "run")
    assert run(capsys, "train", recipe, "--out", out, "--quiet", "--train.epochs", "0.5")[0] == 0
    code, text, _ = run(capsys, "train", "--resume", out, "--train.epochs", "1.0", "--quiet", "--train.log-every=5")
    assert code == 0 and "10 steps" in text
    assert load_run(out).recipe.train.log_every == 5
    code, text, _ = run(capsys, "train", recipe, "--resume", "--out", out, "--quiet")
    assert code == 0 and "20 steps" in text
    assert "optimizer.lr = 0.01, now it is 0.5" in refused(capsys, "train", "--resume", out, "--optimizer.lr", "0.5")
    assert "two folders" in refused(capsys, "train", "--resume", out, "--out", str(tmp_path / "other"))


def test_resume_refuses_a_folder_without_a_run_and_auto_starts_one(capsys, tmp_path):
    recipe, missing, empty = str(tiny_toml(tmp_path)), str(tmp_path / "missing"), tmp_path / "empty"
    empty.mkdir()
    for folder in (missing, str(empty)):
        assert f"'{folder}' holds no run" in refused(capsys, "train", "--resume", folder, "--quiet")
        assert f"'{folder}' holds no run" in refused(capsys, "train", recipe, "--out", folder, "--resume", "--quiet")
        assert f"'{folder}' holds no run" in refused(capsys, "train", recipe, "--resume", folder, "--quiet")
    assert list(empty.iterdir()) == [] and not (tmp_path / "missing").exists()
    assert "no recipe is named" in refused(capsys, "train", "--quiet")
    assert "no recipe is named" in refused(capsys, "train", "--resume", "auto", "--quiet")
    assert "no recipe is named" in refused(capsys, "train", "--resume")
    for steps in ("10 steps", "20 steps"):
        words = ["--quiet", "--train.epochs", str(int(steps[:2]) / 10)]
        code, text, _ = run(capsys, "train", recipe, "--out", str(empty), "--resume", "auto", *words)
        assert code == 0 and steps in text


def test_training_that_learned_nothing_says_so_beside_the_test_accuracy(capsys, caplog, tmp_path):
    data = easy(tmp_path, validation=0)
    words = ["train", str(tiny_toml(tmp_path)), "--quiet", "--data.name", "npz", "--data.path", data["path"], "--out"]
    assert main([*words, str(tmp_path / "learns"), "--train.epochs", "6"]) == 0
    told = re.search(r"test accuracy (\d+\.\d)% of 40 images", capsys.readouterr().out)
    assert told is not None and float(told[1]) > 50 and "learned nothing" not in caplog.text
    # Of blank images, every class looks the same
    with np.load(data["path"]) as arrays:
        content = dict(arrays)
    np.savez(data["path"], **{key: value * ("images" not in key) for key, value in content.items()})
    assert main([*words, str(tmp_path / "blank"), "--train.epochs", "0.5"]) == 0
    assert "test accuracy 25.0% of 40 images" in capsys.readouterr().out
    assert "learned nothing: the largest class alone is 25% of the test images; try a lower" in caplog.text


def test_dry_run_shows_what_would_be_trained_and_trains_nothing(capsys, tmp_path):
    out = tmp_path / "run"
    words = ["train", str(tiny_toml(tmp_path)), "--out", str(out), "--dry-run"]
    code, text, _ = run(capsys, *words, "--train.epochs", "3")
    assert code == 0 and not out.exists()
    for line in ("train.epochs = 3.0", 'optimizer.name = "Adam"', "parameters, 80 images", "# stage all: 30 steps"):
        assert line in text
    # What is printed is a recipe
    printed = tmp_path / "printed.toml"
    printed.write_text(text)
    assert load_recipe(str(printed)) == load_recipe(words[1], {"train": {"epochs": 3}})
    _, out, err = run(capsys, *words, "--train.batch", "99")
    assert "torchcaps: train.batch = 99 is more than the 80 training images; 80 is used" in err
    assert "train.batch = 80" in out


def test_help_is_quick_and_does_not_import_torch():
    """The goal is .6 s on an idle machine; torch alone takes longer than the rest together."""
    for words in (["--help"], ["train", "--help"], ["evaluate", "--help"]):
        code = f"import sys\nfrom torchcaps.cli import main\nsys.argv[1:] = {words}\n"
        code += "try: main()\nexcept SystemExit: pass"
        code += "\nassert not {'torch', 'numpy', 'numba'} & sys.modules.keys()"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", COMMANDS)
def test_help_breaks_no_line_inside_a_phrase(name):
    """tyro keeps the line breaks of the options' docstrings, so these stand where a phrase ends."""
    body = ast.parse(inspect.getsource(COMMANDS[name])).body[0].body
    texts = [node.value.value for node in body[1:] if isinstance(node, ast.Expr)]
    lines = [line for text in texts for line in text.splitlines()]
    assert lines and not [line for line in lines if line[-1] not in ".,;:)"]


@pytest.mark.parametrize("name", COMMANDS)
def test_help_shows_no_types_of_the_parser(capsys, name):
    out = run(capsys, name, "--help")[1]
    assert "{None}" not in out and "None|" not in out


def test_importing_the_library_changes_no_environment():
    code = "import os; before = dict(os.environ); import torchcaps; torchcaps.route; assert dict(os.environ) == before"
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("GOMP", "KMP"))}
    assert subprocess.run([sys.executable, "-c", code], env=clean).returncode == 0


def test_demo_trains_evaluates_and_reports(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("torchcaps.train.recipe._recipe_folder", lambda: _small_recipes(tmp_path))
    words = ["demo", "--out", str(tmp_path / "demo"), "--data", "glyphs", "--quiet"]
    code, out, _ = run(capsys, *words)
    assert code == 0
    for row in ("poe-glyphs", "paper", "offset only", "random W", "PCA", "k-means", "RBM"):
        assert f"\n{row} " in out
    page = (tmp_path / "demo" / "report.html").read_text()
    assert page.count("data:image/png;base64,") == 10
    assert "http" not in page
    *_, report, explore, evaluate = (shlex.split(line, comments=True) for line in out.splitlines())
    assert report[1:3] == ["-m", "webbrowser"] and report[3] == (tmp_path / "demo" / "report.html").as_uri()
    assert explore[-2:] == ["explore", str(tmp_path / "demo" / "poe-glyphs")]
    assert run(capsys, "evaluate", str(tmp_path / "demo"))[1].strip() in out and evaluate[-2] == "evaluate"
    again = run(capsys, *words)
    assert again[0] == 0 and again[1] == out


def test_demo_without_mnist_says_that_it_draws_digits(capsys, tmp_path, monkeypatch):
    def nothing(*words, **more):
        raise DataError("no such file")

    monkeypatch.setattr("torchcaps.data.cache.locate", nothing)
    monkeypatch.setattr("torchcaps.data.cache.fetch_set", nothing)
    demo = Demo(out=tmp_path)
    assert demo._data() == "glyphs"
    assert "drawn by code" in capsys.readouterr().err
    with pytest.raises(DataError):
        Demo(out=tmp_path, data="mnist")._data()


def _small_recipes(folder):
    (folder / "poe-glyphs.toml").write_text(TINY_POE)
    return folder


TINY_POE = """
[data]
name = "glyphs"
train = 80
test = 40
size = 16
[model]
name = "poe"
capsules = 4
dimension = 4
child_dimension = 4
[model.autoencoder]
channels = [8, 8]
kernel = 5
[model.energy]
ramp = 4
loosen = 8
[train]
epochs = 1.0
batch = 20
[stages.capsules.optimizer]
name = "SGD"
lr = 0.5
"""


@pytest.mark.parametrize(
    "words",
    [
        ("list",),
        ("list", "capsnet-glyphs"),
        ("data", "list"),
        ("data", "clean"),
        ("data", "check", "glyphs"),
        ("train", "capsnet-glyphs", "--data.train", "200", "--dry-run"),
        ("zoo", "list"),
        ("zoo", "show", "capsnet-digits"),
        ("zoo", "check", "sparse-digits"),
    ],
)
def test_the_end_of_a_command_says_what_to_do_next(capsys, monkeypatch, tmp_path, words):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    code, _, err = run(capsys, *words)
    assert code == 0 and is_suggestion(err)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_suggests_what_comes_next(name):
    """The other tests see the suggestion of one path each; here, a new command that has none is found."""
    source = inspect.getsource(inspect.getmodule(COMMANDS[name]))
    assert "suggest_next(" in source or "next_commands(" in source


def test_commands_on_a_run_say_what_to_do_next(capsys, tmp_path):
    folder = str(tmp_path / "run")
    recipe = str(tiny_toml(tmp_path))
    chain = {
        "evaluate": ("train", recipe, "--out", folder, "--train.epochs", "0.2", "--quiet"),
        "report": ("evaluate", folder),
        "explore": ("generate", folder, "--what", "curves"),
        "report ": ("attack", folder, "--attacks", "fgsm", "--images", "8"),
    }
    for following, words in chain.items():
        code, _, err = run(capsys, *words)
        assert code == 0 and f"next: torchcaps {following.strip()} {folder}" in err.splitlines()[-1], (words, err)


def test_a_setting_that_no_stage_reads_is_refused_with_the_keys_that_they_read(capsys):
    said = refused(capsys, "train", "poe-quick", "--train.epochs", "1", "--dry-run")
    assert "--train.epochs changes nothing" in said and "--stages.capsules.train.epochs" in said


@pytest.mark.parametrize("command", ["predict", "generate"])
def test_an_unfinished_run_is_named_before_anything_is_made_of_it(capsys, tmp_path, command):
    train(tiny(), tmp_path / "run", quiet=True, callback=lambda *_: signal.raise_signal(signal.SIGINT))
    assert not load_run(tmp_path / "run").finished
    words = {"predict": [str(tmp_path / "none.png")], "generate": ["--what", "curves", "--out", str(tmp_path / "out")]}
    _, _, err = run(capsys, command, str(tmp_path / "run"), *words[command])
    assert "is not trained to its end: it stands at step" in err and "--resume" in err
