"""A recipe that stands on another: what it says itself, over what the other says."""

from __future__ import annotations

from dataclasses import replace

import pytest

from support.tiny_recipe import tiny, tiny_toml
from torchcaps.cli import main
from torchcaps.errors import RecipeError
from torchcaps.train import load_recipe, load_run


@pytest.fixture
def write(tmp_path):
    """Writes NAME.toml beside tiny.toml and gives its path as text."""
    tiny_toml(tmp_path, 'about = "The smallest."')

    def file(name: str, text: str) -> str:
        path = tmp_path / f"{name}.toml"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        return str(path)

    return file


def refusal(path: str) -> str:
    with pytest.raises(RecipeError) as caught:
        load_recipe(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_what_a_recipe_leaves_out_is_as_in_its_base(write):
    recipe = load_recipe(write("mine", 'base = "tiny.toml"\n[train]\nbatch = 4\n[model.routing]\niterations = 1\n'))
    wanted = tiny(name="mine", train={"batch": 4}, model={"routing": {"iterations": 1}})
    assert recipe == wanted  # seed and all; but not `about`
    assert recipe.about == "" and load_recipe(write("b", 'name = "other"\nbase = "tiny.toml"')).name == "other"


def test_a_base_may_have_a_base_and_the_flags_come_last(write):
    write("second", 'base = "tiny.toml"\nname = "second"\nabout = "x"\nseed = 5\n[train]\nbatch = 4\nclip = 2.0\n')
    third = write("third", 'base = "second.toml"\n[train]\nclip = 3.0\n')
    recipe = load_recipe(third, {"train": {"epochs": 9}})
    assert recipe == tiny(name="third", seed=5, train={"batch": 4, "clip": 3.0, "epochs": 9.0})


def test_a_base_is_found_from_where_the_file_lies(write, tmp_path, monkeypatch):
    inner = write("folder/inner", 'base = "../tiny.toml"\n')
    monkeypatch.chdir(tmp_path / "folder")
    assert load_recipe(inner) == load_recipe("inner.toml") == tiny(name="inner")
    assert load_recipe(write("absolute", f'base = "{tmp_path}/tiny.toml"\n')) == tiny(name="absolute")


def test_a_table_of_another_name_is_not_mixed_with_the_base_s(write):
    text = """base = "tiny.toml"
        data = { name = "npz", path = "x.npz" }
        model = { name = "cnn" }
        optimizer = { name = "SGD", lr = 0.5 }
        schedule = { name = "constant" }
    """
    recipe = load_recipe(write("mine", text))
    plain = {"name": "mine", "data": {"name": "npz", "path": "x.npz"}, "model": {"name": "cnn"}}
    assert recipe == tiny(**plain, optimizer={"name": "SGD", "lr": 0.5}, schedule={"name": "constant"})
    assert recipe.schedule.options == {} and recipe.train == tiny().train
    same = load_recipe(write("same", 'base = "tiny.toml"\noptimizer = { name = "Adam", options = { eps = 1e-6 } }\n'))
    assert same.optimizer == replace(tiny().optimizer, options={"eps": 1e-6})


def test_a_base_of_the_package_goes_by_its_name(write):
    recipe, base = load_recipe(write("mine", 'base = "capsnet-glyphs"\nseed = 7\n')), load_recipe("capsnet-glyphs")
    assert recipe == replace(base, name="mine", about="", seed=7)


def test_stages_are_inherited_too(write):
    quick = load_recipe("poe-quick")
    routed = load_recipe(write("routed", 'base = "poe-quick"\n[model.energy.routing]\niterations = 3\n'))
    assert routed.stages == quick.stages and routed.model != quick.model
    slower = load_recipe(write("slower", 'base = "poe-quick"\n[stages.capsules.optimizer]\nlr = 0.01\n'))
    assert slower.stages["capsules"].optimizer == replace(quick.stages["capsules"].optimizer, lr=0.01)
    other = 'base = "poe-quick"\n[stages.capsules.optimizer]\nname = "SGD"\nlr = 0.01\n'
    assert load_recipe(write("other", other)).stages["capsules"].optimizer.options == {}


def test_a_circle_is_refused(write):
    assert "self.toml': the bases of this recipe lead back to it" in refusal(write("self", 'base = "self.toml"'))
    write("b", 'base = "folder/c.toml"')
    write("folder/c", 'base = "../b.toml"')
    assert "b.toml': the bases of this recipe lead back to it" in refusal(write("a", 'base = "b.toml"'))


@pytest.mark.parametrize(
    ("base", "text"),
    [
        ('"poe-quik"', "x.toml': base: unknown recipe 'poe-quik'; did you mean 'poe-quick'"),
        ('"tiny"', "a file must end in .toml"),
        ('"absent.toml"', "no such file"),
        ('"a\\nb"', "unknown recipe 'a b'"),
        ('"a\\u0000.toml"', "cannot be read"),
        ("3", "x.toml': base is int; the name or path of a recipe is wanted"),
        ("[]", "base is list"),
    ],
)
def test_a_base_that_is_none_is_refused_in_one_line(write, base, text):
    assert text in refusal(write("x", f"base = {base}"))


def test_the_command_line_trains_and_lists_it(write, tmp_path, capsys):
    path = write("mine", 'base = "tiny.toml"\n[train]\nepochs = 0.3\n')
    assert main(["train", path, "--out", str(tmp_path / "run"), "--quiet", "--train.batch", "4"]) == 0
    loaded = load_run(tmp_path / "run")
    assert loaded.step == 6 and loaded.recipe == tiny(name="mine", train={"epochs": 0.3, "batch": 4})
    capsys.readouterr()
    assert main(["list", path]) == 0
    assert "--train.epochs" in (shown := capsys.readouterr().out) and "--base" not in shown
    assert main(["list", write("bad", 'base = "cnn-glyph"')]) == 2
    assert "did you mean 'cnn-glyphs'" in capsys.readouterr().err
