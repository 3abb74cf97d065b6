"""torchcaps.config: good and bad tables, and the laws of its docstrings on random input."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from torchcaps import config
from torchcaps.config import (
    Choice,
    Count,
    NonNegativeFloat,
    Options,
    PositiveFloat,
    Range,
    Share,
    check,
    describe,
    flatten,
    from_dict,
    merge,
    parse_overrides,
    read_toml,
    to_dict,
)
from torchcaps.errors import RecipeError
from torchcaps.train.recipe import recipe_of

relaxed = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # no law is about time

KINDS: dict[str, type] = {}  # filled below, after Choice has taken hold of it


@dataclass(frozen=True)
class Schedule:
    """Its constructor has an opinion of its own, and asks `check` too; a class variable is no setting."""

    NAMES: ClassVar[tuple[str, ...]] = ("a", "b")
    steps: Count = 10
    gamma: Share = 0.5

    def __post_init__(self) -> None:
        check(self)
        if self.steps == 13:
            raise ValueError("steps = 13 is unlucky;\nwanted: another")


@dataclass(frozen=True)
class Train:
    batch: Count = 128
    lr: PositiveFloat = 0.001
    loss: Literal["margin", "spread"] = "margin"
    clip: NonNegativeFloat | None = None
    amp: bool = False
    validate_every: Count | None = None
    schedule: Schedule = Schedule(steps=7)
    options: Options = field(default_factory=lambda: {"momentum": 0.9})


@dataclass(frozen=True)
class Longer(Train):
    more: int = 1


@dataclass(frozen=True)
class Dense:
    width: Count = 16


@dataclass(frozen=True)
class Conv:
    width: Count = 32
    kernel: tuple[Count, Count] = (3, 3)


@dataclass(frozen=True)
class Recipe:
    title: str
    model: Annotated[object, Choice(KINDS)] = Conv(width=9)
    train: Train = Train()
    sizes: tuple[Count, ...] = (4, 2)
    pair: tuple[float, str] = (0.5, "a")
    tag: str | None = None
    mixed: bool | int | float | str = 1
    second: Annotated[object, Choice(KINDS)] | None = None
    layers: tuple[Annotated[object, Choice(KINDS)], ...] = ()
    stages: dict[str, Schedule] = field(default_factory=dict)


KINDS |= {"dense": Dense, "conv": Conv}


def message(call: Any, *args: Any, **options: Any) -> str:
    """The text of the RecipeError that the call raises, which is one short line."""
    with pytest.raises(RecipeError) as caught:
        call(*args, **options)
    assert len(str(caught.value).splitlines()) == 1
    assert len(str(caught.value)) < 400
    return str(caught.value)


# --- from_dict and check ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ({}, {}),
        ({"sizes": [1, 2, 3], "pair": [1, "x"]}, {"sizes": (1, 2, 3), "pair": (1.0, "x")}),
        ({"tag": "none", "sizes": []}, {"tag": None, "sizes": ()}),
        ({"tag": None, "mixed": True}, {"tag": None, "mixed": True}),
        ({"tag": "None", "mixed": 2}, {"tag": "None", "mixed": 2}),
        ({"mixed": 2.0}, {"mixed": 2.0}),
        ({"train": {"lr": 1, "clip": 0}}, {"train": Train(lr=1.0, clip=0.0)}),
        ({"train": {"options": {"any key": 5, "b": True}}}, {"train": Train(options={"any key": 5, "b": True})}),
        ({"stages": {"a": {"steps": 3}}}, {"stages": {"a": Schedule(3)}}),
        ({"second": {"name": "dense", "width": 3}}, {"second": Dense(3)}),
        ({"layers": [{"name": "dense"}, {"name": "conv"}]}, {"layers": (Dense(), Conv())}),
        # A partial table starts from the default that describe shows, unless it picks another class.
        ({"train": {"schedule": {"gamma": 0.1}}}, {"train": Train(schedule=Schedule(7, 0.1))}),
        ({"model": {"kernel": [1, 1]}}, {"model": Conv(9, (1, 1))}),
        ({"model": {"name": "conv"}}, {"model": Conv(9)}),
        ({"model": {"name": "dense"}}, {"model": Dense()}),
    ],
)
def test_accepts(data: dict[str, Any], expected: dict[str, Any]) -> None:
    assert repr(from_dict(Recipe, {"title": "t", **data})) == repr(Recipe("t", **expected))  # repr: 1 is not True


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ({"train": {"bach": 1}}, "unknown key 'train.bach'; did you mean 'batch'?"),
        ({"train": {"validate-every": 1}}, "unknown key 'train.validate-every'; did you mean 'validate_every'?"),
        ({"train": {"check_every": 1}}, "the key 'train.check_every' is now called 'validate_every'; rename it"),
        ({"train": {"schedule": {"a b": 1}}}, "unknown key 'train.schedule.\"a b\"'; known: gamma, steps"),
        ({"train": {"schedule": {"NAMES": []}}}, "unknown key 'train.schedule.NAMES'; known: gamma, steps"),
        ({"train": {"batch": "many"}}, "train.batch = 'many' is not a whole number"),
        ({"train": {"batch": True}}, "train.batch = True is not a whole number"),
        ({"train": {"batch": 64.0}}, "train.batch = 64.0 is not a whole number"),
        ({"train": {"batch": 0}}, "train.batch = 0 must be at least 1"),
        ({"train": {"lr": True}}, "train.lr = True is not a number"),
        ({"train": {"lr": 0}}, "train.lr = 0.0 must be above 0"),
        ({"train": {"lr": math.nan}}, "train.lr = nan is not a finite number"),
        ({"train": {"lr": -math.inf}}, "train.lr = -inf is not a finite number"),
        ({"train": {"lr": 16**5000}}, "train.lr = <int too large to show> is not a finite number"),
        ({"train": {"clip": -1}}, "train.clip = -1.0 must be at least 0 or none"),
        ({"train": {"clip": "x"}}, "train.clip = 'x' is not a number or none"),
        ({"train": {"amp": 1}}, "train.amp = 1 is not true or false"),
        ({"train": {"loss": "sprad"}}, "train.loss = 'sprad' is not one of margin, spread; did you mean 'spread'?"),
        ({"train": {"loss": "zzz"}}, "train.loss = 'zzz' is not one of margin, spread"),
        ({"train": {"loss": ["margin"]}}, "train.loss = ['margin'] is not one of margin, spread"),
        ({"train": {"schedule": {"gamma": 1.5}}}, "train.schedule.gamma = 1.5 must be from 0 to 1"),
        ({"train": {"schedule": {"steps": 13}}}, "train.schedule: steps = 13 is unlucky; wanted: another"),
        ({"train": {"options": {"x\ny": {}}}}, 'train.options."x\\U0000000Ay" = {} is not true or false or...'),
        ({"train": {"options": {3: 1}}}, "train.options = {3: 1} is not a table"),
        ({"train": 5}, "train = 5 is not a table"),
        ({"title": 5}, "title = 5 is not text in quotes"),
        ({"title": [[]] * 999}, "title = [[], [], ..."),
        ({"sizes": "12"}, "sizes = '12' is not a list in [ ]"),
        ({"sizes": [1, 0]}, "sizes[1] = 0 must be at least 1"),
        ({"pair": [1.0]}, "pair = [1.0] is not a list of 2"),
        ({"mixed": []}, "mixed = [] is not true or false or a whole number or a number or text in quotes"),
        ({"model": "dense"}, "model = 'dense' is not a table with the key 'name'"),
        ({"model": {"name": "dens"}}, "model.name = 'dens' is unknown; did you mean 'dense'?"),
        ({"model": {"name": [7]}}, "model.name = [7] is unknown; known: conv, dense"),
        ({"model": {"name": "dense", "kernel": 3}}, "unknown key 'model.kernel'; known: name, width"),
        ({"second": {"name": "dense", "width": "x"}}, "second.width = 'x' is not a whole number"),
        ({"layers": [{"name": "conv", "widht": 3}]}, "unknown key 'layers[0].widht'; did you mean 'width'?"),
        ({"stages": {"a": {"steps": 0}}}, "stages.a.steps = 0 must be at least 1"),
        ({"k\u2028\n" * 9999: 1}, "unknown key '\"k..."),
    ],
)
def test_refuses_with_one_line_that_names_the_place(data: dict[str, Any], expected: str) -> None:
    text = message(from_dict, Recipe, {"title": "t", **data})
    assert text == expected or (expected.endswith("...") and text.startswith(expected.removesuffix("...")))
    assert message(from_dict, Recipe, {"title": "t", **data}, where="a\nb") == f"recipe 'a\\nb': {text}"


def test_refuses_what_is_missing_and_what_is_no_table() -> None:
    assert message(from_dict, Recipe, {}, where="x") == "recipe 'x': missing key 'title'; wanted: text"
    assert message(from_dict, Recipe, [1], where="x") == "recipe 'x': [1] is not a table"
    assert "the key 'optimiser' is now called 'optimizer'" in message(recipe_of, {"optimiser": {"name": "Adam"}})


@pytest.mark.parametrize("hint", [set[int], Annotated[int | None, Range(1)], bytes, dict[int, int]])
def test_annotations_that_are_no_settings_are_the_programmers_error(hint: Any) -> None:
    cls: Any = dataclass(frozen=True)(type("Odd", (), {"__annotations__": {"x": hint}}))
    with pytest.raises(TypeError):
        from_dict(cls, {"x": 1})
    with pytest.raises(TypeError, match="is not a dataclass"):
        check(3)


@pytest.mark.parametrize(
    ("bounds", "inside", "outside", "text"),
    [
        (Range(1), [1, 5, 10**400], [0, -1, math.nan], "at least 1"),
        (Range(0, open_low=True), [0.1], [0, -0.0, math.nan], "above 0"),
        (Range(0, 1), [0, 1], [-0.1, 1.1], "from 0 to 1"),
        (Range(0, 1, open_low=True), [0.1, 1], [0, 2], "above 0 and at most 1"),
    ],
)
def test_range(bounds: Range, inside: list[float], outside: list[float], text: str) -> None:
    assert all(x in bounds for x in inside)
    assert not any(x in bounds for x in outside)
    assert str(bounds) == text


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"train": Train(batch=0)}, "train.batch = 0 must be at least 1"),
        ({"train": {"batch": 5}}, "train = {'batch': 5} is not a Train"),
        ({"train": Longer()}, "train = Longer(batch=128"),
        ({"train": Train(options={"a": None})}, "train.options.a = None is not"),  # type: ignore[dict-item]
        ({"sizes": [1, 2]}, "sizes = [1, 2] is not a tuple"),
        ({"tag": "none"}, "tag = 'none' would be read back as no value; use None"),
        ({"model": None}, "model = None is not of a kind with a name; known: conv, dense"),
        ({"model": {"name": "dense"}}, "model = {'name': 'dense'} is not of a kind with a name; known:"),
        ({"layers": (Dense(0),)}, "layers[0].width = 0 must be at least 1"),
    ],
)
def test_what_was_built_in_python_is_checked(changes: dict[str, Any], expected: str) -> None:
    instance = replace(Recipe("t", Dense()), **changes)
    for call in (check, to_dict, describe):
        assert message(call, instance).startswith(expected)


# --- Laws on random recipes ---------------------------------------------------------------------------------

finite = st.floats(allow_nan=False, allow_infinity=False)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
counts = st.integers(1, 10**6)
scalars = st.one_of(st.booleans(), st.integers(), finite, texts)
kinds = st.builds(Dense, counts) | st.builds(Conv, counts, st.tuples(counts, counts))
schedules = st.builds(Schedule, st.integers(20, 10**6), st.floats(0, 1))
trains = st.builds(
    Train,
    batch=counts,
    lr=st.floats(1e-9, 1e9),
    loss=st.sampled_from(["margin", "spread"]),
    clip=st.none() | st.floats(0, 1e9),
    schedule=schedules,
    options=st.dictionaries(texts, scalars | st.lists(scalars, max_size=2).map(tuple), max_size=3),
)
recipes = st.builds(
    Recipe,
    title=texts,
    model=kinds,
    train=trains,
    sizes=st.lists(counts, max_size=3).map(tuple),
    pair=st.tuples(finite, texts),
    tag=st.none() | texts.filter(lambda text: text != "none"),
    mixed=scalars | st.sampled_from([".3", "-.5", "5.", "1_000", "true", "--x", "[1]", ""]),
    second=st.none() | kinds,
    layers=st.lists(kinds, max_size=2).map(tuple),
    stages=st.dictionaries(texts, schedules, max_size=2),
)
soup = st.recursive(
    st.none() | scalars | st.floats() | st.binary(max_size=3) | st.sampled_from(["dense", "conv", "none", 1, 0]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["name", "width", "batch", "options", "schedule"]) | texts, inner)
        | st.dictionaries(scalars, inner, max_size=3)
    ),
    max_leaves=12,
)


@relaxed
@given(recipes)
def test_round_trip_through_dicts_json_and_flags(instance: Recipe) -> None:
    plain = to_dict(instance)
    assert from_dict(Recipe, plain) == from_dict(Recipe, json.loads(json.dumps(plain))) == instance
    flat = flatten(plain)
    rows = describe(instance)
    assert [key for key, _, _ in rows] == list(flat)
    for key, kind, text in rows:
        assert len((key + kind + text).splitlines()) <= 1
        if flat[key] != {} and key != "layers":
            assert parse_overrides(["--x", text]) == {"x": flat[key]}


@relaxed
@given(st.data(), recipes, soup)
def test_a_mutated_recipe_is_accepted_or_refused_with_one_line(draw: Any, instance: Recipe, value: Any) -> None:
    data = node = to_dict(instance)
    while isinstance(node, dict):  # walk down to some key, there or not, and put the value there
        key = draw.draw(st.sampled_from([*node, *(f.name for f in fields(Recipe))]) | scalars)
        if not (isinstance(node.get(key), dict) and draw.draw(st.booleans())):
            node[key] = value
            break
        node = node[key]
    try:
        built = from_dict(Recipe, draw.draw(st.sampled_from([data, value])), where="soup")
    except RecipeError as error:
        assert len(str(error).splitlines()) == 1
        assert str(error).startswith("recipe 'soup': ")
    else:
        assert from_dict(Recipe, to_dict(built)) == built


# --- to_dict, describe and flatten --------------------------------------------------------------------------


def test_what_is_written_and_described() -> None:
    instance = Recipe("t", Dense(), second=Conv(1), stages={"a b": Schedule()})
    scalar = "true or false or whole number or number or text"
    count = "whole number, at least 1"
    plain = flatten(to_dict(instance))
    assert [(key, plain[key], kind, text) for key, kind, text in describe(instance)] == [
        ("title", "t", "text", "t"),
        ("model.name", "dense", "dense | conv", "dense"),
        ("model.width", 16, count, "16"),
        ("train.batch", 128, count, "128"),
        ("train.lr", 0.001, "number, above 0", "0.001"),
        ("train.loss", "margin", "margin | spread", "margin"),
        ("train.clip", "none", "number, at least 0 or none", "none"),
        ("train.amp", False, "true or false", "false"),
        ("train.validate_every", "none", f"{count} or none", "none"),
        ("train.schedule.steps", 7, count, "7"),
        ("train.schedule.gamma", 0.5, "number, from 0 to 1", "0.5"),
        ("train.options.momentum", 0.9, f"{scalar} or list of {scalar}", "0.9"),
        ("sizes", [4, 2], "list of whole numbers, at least 1", "[4, 2]"),
        ("pair", [0.5, "a"], "list of 2: number, text", '[0.5, "a"]'),
        ("tag", "none", "text or none", "none"),
        ("mixed", 1, scalar, "1"),
        ("second.name", "conv", "dense | conv", "conv"),
        ("second.width", 1, count, "1"),
        ("second.kernel", [3, 3], "list of 2 whole numbers, at least 1", "[3, 3]"),
        ("layers", [], "list of table by name (dense | conv)", "[]"),
        ('stages."a b".steps', 10, count, "10"),
        ('stages."a b".gamma', 0.5, "number, from 0 to 1", "0.5"),
    ]
    assert describe(Recipe("t"))[-1] == ("stages", "table of free keys, each table of steps, gamma", "{}")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        *[("x", "x"), ("a b", "a b"), ("", '""'), ("--x", '"--x"'), (".3", '".3"'), ("true", '"true"'), ("é", "é")],
        *[('"', '"'), ('"a"', '"\\"a\\""'), ("a\nb", '"a\\U0000000Ab"'), ("-1", '"-1"'), (True, "true")],
        (1e-5, "1e-05"),
    ],
)
def test_a_value_is_shown_as_it_is_typed(value: Any, text: str) -> None:
    rows = {key: shown for key, _, shown in describe(Recipe("t", mixed=value))}
    assert rows["mixed"] == text
    assert parse_overrides(["--mixed", text]) == {"mixed": value}


# --- read_toml ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("\ufeff# title\r\na = 1\r\n[b]\r\nc = 'é'\r\n".encode(), {"a": 1, "b.c": "é"}),
        (b"#" * 1_000_000, {}),
        (b".".join([b"a"] * 33) + b" = 1", {".".join(["a"] * 33): 1}),  # 32 tables inside each other are the most
        (b"a = 1\nb = = 2\n", "not TOML: Invalid value (at line 2, column 5)"),
        (b"a = 1\nb = [1,\n", "not TOML: Invalid value (at end of document)"),
        (b"a = 1\na = 2\n", "not TOML: Cannot overwrite a value (at line 2"),
        (b"a = 1\nb = '\xff'\n", "not UTF-8 text (at line 2); save it as UTF-8"),
        (b"#" * 1_000_001, "larger than 1000000 bytes"),
        (b"a = " + b"[" * 5000, "not TOML that can be read: values are nested too deeply"),
        (b"a = " + b"9" * 5000, "not TOML: Exceeds the limit"),
        (b"[a" + b".a" * 20 + b"]\na" + b".a" * 20 + b" = 1", "tables are nested more than 32 deep"),
        (b".".join([b"a"] * 34) + b" = 1", "a name has more than 32 dots"),
        (b"a." * 499_000 + b"a = 1", "a name has more than 32 dots"),
        (b"['a b' . " + b'"a\\" b" . ' * 33 + b"a]", "a name has more than 32 dots"),
        (b"a" * 999_999, "not TOML: Expected '='"),
        (b'"' * 999_999, "not TOML: "),
    ],
)
def test_read_toml_gives_tables_or_one_line(tmp_path: Path, content: bytes, expected: dict[str, Any] | str) -> None:
    path = tmp_path / "x.toml"
    path.write_bytes(content)
    if isinstance(expected, dict):
        assert flatten(read_toml(path)) == expected
    else:
        assert message(read_toml, path).startswith(f"recipe {str(path)!r}: {expected}")


def test_read_toml_refuses_what_is_no_file(tmp_path: Path) -> None:
    assert message(read_toml, tmp_path / "absent\n.toml").endswith("no such file; give the path of a .toml recipe")
    assert message(read_toml, tmp_path).endswith("cannot be read: Is a directory")
    assert message(read_toml, Path("a\0b")).endswith("cannot be read: embedded null byte")


# --- parse_overrides ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ([], {}),
        (["--train.batch=64", "--train.lr", "1e-3"], {"train": {"batch": 64, "lr": 0.001}}),
        (["--train.save-every", "2", "--loss", "spread"], {"train": {"save_every": 2}, "loss": "spread"}),
        (["--x", "1", "--x", "2"], {"x": 2}),
        (["--x", "-1", "--y", "true", "--z", "[1, 2]"], {"x": -1, "y": True, "z": [1, 2]}),
        (["--x", ".3", "--y", "-.5", "--z=5."], {"x": 0.3, "y": -0.5, "z": 5.0}),
        (["--x", "1_000", "--y", "1_0.", "--z", ".5e-3"], {"x": 1000, "y": 10.0, "z": 0.0005}),
        (["--x", ".", "--y", "1__0.", "--z", "1.2.3"], {"x": ".", "y": "1__0.", "z": "1.2.3"}),
        (["--x", "-inf", "--y", "Infinity", "--z", '"1"'], {"x": -math.inf, "y": "Infinity", "z": "1"}),
        (["--x", "-y", "--y=--y", "--z=a=b"], {"x": "-y", "y": "--y", "z": "a=b"}),
        (["--x=", "--y", "", "--z", "True"], {"x": "", "y": "", "z": "True"}),
        (["--x", "none", "--y", "2020-01-01", "--z", "{a = 1}"], {"x": "none", "y": "2020-01-01", "z": "{a = 1}"}),
        (["--x", "5 # five", "--y", "1, y = 2", "--z", "1\n"], {"x": "5 # five", "y": "1, y = 2", "z": "1\n"}),
        (["--x", "1}\ny = {z = 2"], {"x": "1}\ny = {z = 2"}),
        (["--x", "[" * 5000, "--y", "9" * 5000], {"x": "[" * 5000, "y": "9" * 5000}),
        (["--a"], "--a has no value; write --a VALUE"),
        (["--a", "--b", "1"], "--a has no value"),
        (["word"], "'word' stands alone; settings are given as --key value"),
        (["a.b=1"], "'a.b=1' stands alone"),
        (["--a", "1", "2"], "'2' stands alone"),
        (["-a", "1"], "'-a' stands alone"),
        (["--", "1"], "'--' names no setting"),
        (["--=1"], "'--' names no setting"),
        (["--a..b", "1"], "'--a..b' names no setting"),
        (["--a\nb", "1"], "'--a\\nb' names no setting"),
        (["--" + "a." * 40 + "a", "1"], "'--a.a"),
        (["--a", "1", "--a.b", "2"], '--a.b: "a" is given both a value and settings inside it'),
        (["--a.b", "1", "--a", "2"], '--a: "a" is given both a value and settings inside it'),
    ],
)
def test_parse_overrides_gives_tables_or_one_line(args: list[str], expected: dict[str, Any] | str) -> None:
    if isinstance(expected, dict):
        assert parse_overrides(args) == expected
    else:
        assert message(parse_overrides, args).startswith(expected)


@relaxed
@given(st.lists(st.sampled_from(["--a", "--a.b", "--c=1", "-1", "word", "--"]) | st.text(max_size=5), max_size=6))
def test_any_words_give_a_dict_or_one_line(args: list[str]) -> None:
    try:
        assert isinstance(parse_overrides(args), dict)
    except RecipeError as error:
        assert len(str(error).splitlines()) == 1


# --- merge --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("base", "over", "expected"),
    [
        ({"a": {"b": 1, "c": 2}}, {"a": {"c": 3}}, {"a": {"b": 1, "c": 3}}),
        ({"a": {"b": 1}}, {"a": 2}, {"a": 2}),
        ({"a": 2}, {"a": {"b": 1}}, {"a": {"b": 1}}),
        ({"a": [1, 2]}, {"a": [3]}, {"a": [3]}),
        ({"m": {"name": "x", "k": 1}}, {"m": {"name": "y"}}, {"m": {"name": "y"}}),
        ({"m": {"name": "x", "k": 1}}, {"m": {"name": "x", "j": 2}}, {"m": {"name": "x", "k": 1, "j": 2}}),
        ({"m": {"name": "x", "k": 1}}, {"m": {"j": 2}}, {"m": {"name": "x", "k": 1, "j": 2}}),
        ({"m": {"k": 1}}, {"m": {"name": "y"}}, {"m": {"name": "y", "k": 1}}),
        ({"name": "r", "k": 1}, {"name": "s"}, {"name": "s", "k": 1}),
        ({"a": {"m": {"name": "x", "k": 1}}}, {"a": {"m": {"name": "y"}}}, {"a": {"m": {"name": "y"}}}),
    ],
)
def test_merge(base: dict[str, Any], over: dict[str, Any], expected: dict[str, Any]) -> None:
    before = json.dumps([base, over])
    merged = merge(base, over)
    assert merged == expected
    for table in [merged, *(item for item in merged.values() if isinstance(item, dict))]:
        table["new"] = 1  # belongs to neither input
    assert json.dumps([base, over]) == before


trees = st.recursive(st.integers(), lambda t: st.dictionaries(st.sampled_from("abc"), t, max_size=3), max_leaves=8)
tables = st.dictionaries(st.sampled_from("abc"), trees, max_size=3)


@relaxed
@given(tables, tables)
def test_merge_laws(a: dict[str, Any], b: dict[str, Any]) -> None:
    assert merge(a, {}) == merge({}, a) == merge(a, a) == a
    once = merge(a, b)
    assert merge(once, b) == once
    assert all(once[key] == value for key, value in a.items() if key not in b)
    assert all(flatten(once).get(k) == v for k, v in flatten(b).items() if v != {})


def test_recipe_and_flags_together(tmp_path: Path) -> None:
    path = tmp_path / "x.toml"
    path.write_text('title = "t"\n[model]\nname = "conv"\nkernel = [5, 5]\n[train]\nbatch = 8\n')
    flags = parse_overrides(["--model.name", "dense", "--train.validate-every=3", "--train.lr", ".5"])
    train = Train(batch=8, validate_every=3, lr=0.5)
    assert from_dict(Recipe, merge(read_toml(path), flags)) == Recipe("t", Dense(), train)
    for number in ("nan", "inf", "-.5"):
        message(from_dict, Recipe, merge(read_toml(path), parse_overrides(["--train.lr", number])))


def test_config_itself_needs_neither_torch_nor_numpy() -> None:
    """Under an empty stand-in for the package, so that what `torchcaps/__init__.py` imports does not count."""
    code = (
        "import sys, types; package = types.ModuleType('torchcaps'); package.__path__ = [sys.argv[1]]; "
        "sys.modules['torchcaps'] = package; import torchcaps.config; "
        "print(*sorted(name for name in sys.modules if name.split('.')[0] in ('torch', 'numpy', 'torchcaps')))"
    )
    folder = str(Path(config.__file__).parents[1])
    done = subprocess.run([sys.executable, "-c", code, folder], capture_output=True, text=True, check=True)
    files = ["torchcaps.utils", "torchcaps.utils.files"]
    inner = [f"torchcaps.config.{name}" for name in ("convert", "formatting", "loading", "schema")]
    assert done.stdout.split() == ["torchcaps", "torchcaps.config", *inner, "torchcaps.errors", *files]
