"""torchcaps.config: good and bad tables, and the laws of its docstrings on random input."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tomllib
from dataclasses import dataclass, field, replace
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
    NonNegativeInt,
    Options,
    Positive,
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

relaxed = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # no law is about time

KINDS: dict[str, type] = {}  # filled below, after Choice has taken hold of it


@dataclass(frozen=True)
class Schedule:
    steps: Count = 10
    gamma: Share = 0.5


@dataclass(frozen=True)
class Train:
    batch: Count = 128
    lr: PositiveFloat = 0.001
    loss: Literal["margin", "spread"] = "margin"
    clip: NonNegativeFloat | None = None
    amp: bool = False
    save_every: NonNegativeInt = 0
    schedule: Schedule = Schedule(steps=7)
    options: Options = field(default_factory=lambda: {"momentum": 0.9})


@dataclass(frozen=True)
class Longer(Train):
    more: int = 1


@dataclass(frozen=True)
class Recipe:
    title: str
    model: Annotated[object, Choice(KINDS)]
    train: Train = Train()
    sizes: tuple[Count, ...] = (4, 2)
    pair: tuple[float, str] = (0.5, "a")
    tag: str | None = None
    level: Literal[1, 2, "auto"] | None = None
    limit: float = 1.0
    mixed: str | float | int | bool = 1
    second: Annotated[object, Choice(KINDS)] | None = None
    layers: tuple[Annotated[object, Choice(KINDS)], ...] = ()
    extra: Options | None = None


@dataclass(frozen=True)
class Dense:
    width: Count = 16


@dataclass(frozen=True)
class Conv:
    width: Count = 32
    kernel: tuple[Count, Count] = (3, 3)


@dataclass(frozen=True)
class Named:
    name: str = "left"
    gain: float = 1.0


@dataclass(frozen=True)
class Even:
    """Its constructor has an opinion of its own, and asks `check` too."""

    n: Count = 2

    def __post_init__(self) -> None:
        check(self)
        if self.n % 2:
            raise ValueError(f"n = {self.n} is odd;\nwanted: even")


@dataclass(frozen=True)
class Remarked:
    """A class variable is a remark about the class, not a setting."""

    NAMES: ClassVar[tuple[str, ...]] = ("a", "b")
    size: Count = 1


@dataclass(frozen=True)
class Node:
    child: Node | None = None


@dataclass(frozen=True)
class Holder:
    model: Annotated[object, Choice(KINDS)] = Conv(width=9)
    even: Even = Even()


KINDS |= {"dense": Dense, "conv": Conv, "left": Named, "right": Named}
GOOD = {"title": "t", "model": {"name": "dense"}}


def recipe(**changes: Any) -> dict[str, Any]:
    return {**GOOD, **changes}


def message(data: Any, cls: type = Recipe, where: str = "") -> str:
    with pytest.raises(RecipeError) as caught:
        from_dict(cls, data, where=where)
    return str(caught.value)


# --- from_dict: what is accepted ----------------------------------------------------------------------------


def test_defaults_fill_what_is_left_out() -> None:
    assert from_dict(Recipe, GOOD) == Recipe("t", Dense())
    assert from_dict(Train, {}) == Train()


@pytest.mark.parametrize(
    ("data", "attribute", "expected"),
    [
        ({"sizes": [1, 2, 3]}, "sizes", (1, 2, 3)),
        ({"sizes": []}, "sizes", ()),
        ({"pair": [1, "x"]}, "pair", (1.0, "x")),
        ({"tag": "none"}, "tag", None),
        ({"tag": None}, "tag", None),
        ({"tag": "None"}, "tag", "None"),
        ({"level": 2}, "level", 2),
        ({"level": "auto"}, "level", "auto"),
        ({"limit": 3}, "limit", 3.0),
        ({"mixed": True}, "mixed", True),
        ({"mixed": 2}, "mixed", 2),
        ({"mixed": 2.0}, "mixed", 2.0),
        ({"mixed": "x"}, "mixed", "x"),
        ({"model": {"name": "conv", "kernel": [5, 1]}}, "model", Conv(kernel=(5, 1))),
        ({"model": {"name": "right", "gain": 2}}, "model", Named("right", 2.0)),
        ({"second": {"name": "dense", "width": 3}}, "second", Dense(3)),
        ({"second": "none"}, "second", None),
        ({"layers": [{"name": "dense"}, {"name": "conv"}]}, "layers", (Dense(), Conv())),
        ({"train": {"lr": 1, "clip": 0}}, "train", Train(lr=1.0, clip=0.0)),
        (
            {"train": {"options": {"any key": 5, "b": True}}},
            "train",
            Train(options={"any key": 5, "b": True}),
        ),
        ({"extra": {"a": "b"}}, "extra", {"a": "b"}),
    ],
)
def test_accepts(data: dict[str, Any], attribute: str, expected: Any) -> None:
    got = getattr(from_dict(Recipe, recipe(**data)), attribute)
    assert got == expected
    assert type(got) is type(expected)


def test_a_partial_table_starts_from_the_default_that_describe_shows() -> None:
    assert from_dict(Train, {"schedule": {"gamma": 0.1}}).schedule == Schedule(steps=7, gamma=0.1)
    assert from_dict(Holder, {"model": {"kernel": [1, 1]}}).model == Conv(width=9, kernel=(1, 1))
    assert from_dict(Holder, {"model": {"name": "conv"}}).model == Conv(width=9)
    assert from_dict(Holder, {"model": {"name": "dense"}}).model == Dense()


def test_choice_holds_the_mapping_not_a_copy() -> None:
    kinds: dict[str, type] = {}
    choice = Choice(kinds, key="kind")
    assert choice.name_of(Dense()) is None
    kinds["d"] = Dense
    assert choice.name_of(Dense()) == "d"


# --- from_dict: what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ({"train": {"bach": 1}}, "unknown key 'train.bach'; did you mean 'batch'?"),
        ({"train": {"save-every": 1}}, "unknown key 'train.save-every'; did you mean 'save_every'?"),
        ({"train": {"schedule": {"a b": 1}}}, "unknown key 'train.schedule.\"a b\"'; known: gamma, steps"),
        ({"train": {"batch": "many"}}, "train.batch = 'many' is not a whole number"),
        ({"train": {"batch": True}}, "train.batch = True is not a whole number"),
        ({"train": {"batch": 64.0}}, "train.batch = 64.0 is not a whole number"),
        ({"train": {"batch": 0}}, "train.batch = 0 must be at least 1"),
        ({"train": {"lr": True}}, "train.lr = True is not a number"),
        ({"train": {"lr": 0}}, "train.lr = 0.0 must be above 0"),
        ({"train": {"lr": math.nan}}, "train.lr = nan is not a finite number"),
        ({"train": {"lr": 10**400}}, "train.lr = 1000..."),
        (
            {"train": {"lr": 16**5000}},
            "train.lr = <int too large to show> is not a number that a float can hold",
        ),
        ({"train": {"clip": -1}}, "train.clip = -1.0 must be at least 0 or none"),
        ({"train": {"clip": "x"}}, "train.clip = 'x' is not a number or none"),
        ({"train": {"amp": 1}}, "train.amp = 1 is not true or false"),
        (
            {"train": {"loss": "sprad"}},
            "train.loss = 'sprad' is not one of margin, spread; did you mean 'spread'?",
        ),
        ({"train": {"loss": "zzz"}}, "train.loss = 'zzz' is not one of margin, spread"),
        ({"train": {"loss": ["margin"]}}, "train.loss = ['margin'] is not one of margin, spread"),
        ({"train": {"schedule": {"gamma": 1.5}}}, "train.schedule.gamma = 1.5 must be from 0 to 1"),
        (
            {"train": {"options": {"x\ny": {}}}},
            'train.options."x\\U0000000Ay" = {} is not true or false or...',
        ),
        ({"train": {"options": {3: 1}}}, "train.options has the key 3; wanted: text"),
        ({"train": {"options": 3}}, "train.options = 3 is not a table"),
        ({"train": 5}, "train = 5 is not a table"),
        ({"train": [{}]}, "train = [{}] is not a table"),
        ({"title": 5}, "title = 5 is not text in quotes"),
        ({"sizes": 3}, "sizes = 3 is not a list in [ ]"),
        ({"sizes": "12"}, "sizes = '12' is not a list in [ ]"),
        ({"sizes": [1, 0]}, "sizes[1] = 0 must be at least 1"),
        ({"pair": [1.0]}, "pair = [1.0] is not a list of 2"),
        ({"level": True}, "level = True is not one of 1, 2, auto or none"),
        ({"mixed": []}, "mixed = [] is not text or number or whole number or true or false"),
        ({"model": {}}, "missing key 'model.name'; known: conv, dense, left, right"),
        ({"model": "dense"}, "model = 'dense' is not a table with the key 'name'"),
        ({"model": {"name": "dens"}}, "model.name = 'dens' is unknown; did you mean 'dense'?"),
        (
            {"model": {"name": ["dense"]}},
            "model.name = ['dense'] is unknown; known: conv, dense, left, right",
        ),
        ({"model": {"name": "dense", "kernel": 3}}, "unknown key 'model.kernel'; known: name, width"),
        ({"second": {"name": "dense", "width": "x"}}, "second.width = 'x' is not a whole number"),
        ({"layers": [{"name": "conv", "widht": 3}]}, "unknown key 'layers[0].widht'; did you mean 'width'?"),
        ({5: 1}, "unknown key '5'; known: extra, layers..."),
    ],
)
def test_refuses_with_one_line_that_names_the_place(data: dict[Any, Any], expected: str) -> None:
    text = message({**GOOD, **data})
    assert text == expected or (expected.endswith("...") and text.startswith(expected.removesuffix("...")))
    assert message({**GOOD, **data}, where="x.toml") == f"recipe 'x.toml': {text}"


def test_missing_keys_are_named_with_what_they_want() -> None:
    assert message({"title": "t"}) == "missing key 'model'; wanted: table by name (dense | conv | left | right)"
    assert message({"model": {"name": "dense"}}) == "missing key 'title'; wanted: text"


def test_what_is_no_table_at_all() -> None:
    assert message([1], where="x") == "recipe 'x': [1] is not a table"


def test_a_long_or_odd_value_stays_one_short_line() -> None:
    for data in (
        recipe(train={"batch": "x\n" * 9999}),
        {"k\u2028\n" * 9999: 1},
        recipe(title=[[[]]] * 999),
        {16**5000: 1},
    ):
        assert len(message(data, where="a\nb").splitlines()) == 1
        assert len(message(data)) < 400


def test_the_constructors_own_objection_becomes_a_recipe_error() -> None:
    text = message({"even": {"n": 3}}, Holder, where="x")
    assert text == "recipe 'x': even: n = 3 is odd; wanted: even"


def test_endless_nesting() -> None:
    data: dict[str, Any] = {}
    for _ in range(100_000):
        data = {"child": data}
    assert "nested too deeply" in message(data, Node)
    assert "too large to show" in message({"title": data})


def test_annotations_that_are_no_settings_are_the_programmers_error() -> None:
    for hint in (set[int], Annotated[int | None, Range(1)], bytes, dict[int, int]):
        cls: Any = dataclass(frozen=True)(type("Odd", (), {"__annotations__": {"x": hint}}))
        with pytest.raises(TypeError):
            from_dict(cls, {"x": 1})
    with pytest.raises(TypeError, match="is not a dataclass"):
        from_dict(int, {})


# --- Range --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bounds", "inside", "outside", "text"),
    [
        (Range(1), [1, 5, 10**400], [0, -1, math.nan], "at least 1"),
        (Positive, [0.1], [0, -0.0, math.nan], "above 0"),
        (Range(high=2), [2, -5], [2.1, math.nan], "at most 2"),
        (Range(0, 1), [0, 1], [-0.1, 1.1], "from 0 to 1"),
        (Range(0, 1, open_low=True), [0.1, 1], [0, 2], "above 0 and at most 1"),
        (Range(), [0, math.inf], [], ""),
    ],
)
def test_range(bounds: Range, inside: list[float], outside: list[float], text: str) -> None:
    assert all(x in bounds for x in inside)
    assert not any(x in bounds for x in outside)
    assert str(bounds) == text


# --- check --------------------------------------------------------------------------------------------------


def test_check_passes_what_from_dict_builds() -> None:
    built = from_dict(Recipe, recipe(layers=[{"name": "conv"}], extra={"a": 1}, level="auto"))
    before = to_dict(built)
    check(built)  # raises if it finds fault
    assert to_dict(built) == before


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"train": Train(batch=0)}, "train.batch = 0 must be at least 1"),
        ({"train": Train(schedule=Schedule(gamma=2.0))}, "train.schedule.gamma = 2.0 must be from 0 to 1"),
        ({"train": {"batch": 5}}, "train = {'batch': 5} is not a Train"),
        ({"train": Longer()}, "train = Longer(batch=128"),
        ({"sizes": [1, 2]}, "sizes = [1, 2] is not a tuple"),
        ({"tag": "none"}, "tag = 'none' would be read back as no value; use None"),
        ({"model": None}, "model = None is not of a kind with a name; known: conv, dense, left, right"),
        ({"model": {"name": "dense"}}, "model = {'name': 'dense'} is not of a kind with a name; known:"),
        ({"model": Named("up")}, "model.name = 'up' is not left"),
        ({"layers": (Dense(0),)}, "layers[0].width = 0 must be at least 1"),
        ({"extra": {"a": None}}, "extra.a = None is not"),
    ],
)
def test_check_refuses(changes: dict[str, Any], expected: str) -> None:
    instance = replace(Recipe("t", Dense()), **changes)
    with pytest.raises(RecipeError) as caught:
        check(instance, where="x")
    assert str(caught.value).startswith(f"recipe 'x': {expected}")
    with pytest.raises(RecipeError):
        to_dict(instance)


def test_check_wants_a_dataclass() -> None:
    with pytest.raises(TypeError, match="is not a dataclass"):
        check(3)


# --- to_dict and the round trip -----------------------------------------------------------------------------


def test_to_dict_writes_plain_values_and_the_names_of_choices() -> None:
    instance = Recipe("t", Conv(), second=Named("right"), layers=(Dense(1),))
    assert to_dict(instance) == {
        "title": "t",
        "model": {"name": "conv", "width": 32, "kernel": [3, 3]},
        "train": {
            "batch": 128,
            "lr": 0.001,
            "loss": "margin",
            "clip": "none",
            "amp": False,
            "save_every": 0,
            "schedule": {"steps": 7, "gamma": 0.5},
            "options": {"momentum": 0.9},
        },
        "sizes": [4, 2],
        "pair": [0.5, "a"],
        "tag": "none",
        "level": "none",
        "limit": 1.0,
        "mixed": 1,
        "second": {"name": "right", "gain": 1.0},
        "layers": [{"name": "dense", "width": 1}],
        "extra": "none",
    }


finite = st.floats(allow_nan=False, allow_infinity=False)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
counts = st.integers(1, 10**6)
scalars = st.one_of(st.booleans(), st.integers(), finite, texts)
options = st.dictionaries(texts, scalars, max_size=3)
kinds = st.one_of(
    st.builds(Dense, counts),
    st.builds(Conv, counts, st.tuples(counts, counts)),
    st.builds(Named, st.sampled_from(["left", "right"]), finite),
)
trains = st.builds(
    Train,
    batch=counts,
    lr=st.floats(1e-9, 1e9),
    loss=st.sampled_from(["margin", "spread"]),
    clip=st.none() | st.floats(0, 1e9),
    amp=st.booleans(),
    save_every=st.integers(0, 9),
    schedule=st.builds(Schedule, counts, st.floats(0, 1)),
    options=options,
)
recipes = st.builds(
    Recipe,
    title=texts,
    model=kinds,
    train=trains,
    sizes=st.lists(counts, max_size=3).map(tuple),
    pair=st.tuples(finite, texts),
    tag=st.none() | texts.filter(lambda text: text != "none"),
    level=st.sampled_from([None, 1, 2, "auto"]),
    limit=finite,
    mixed=scalars,
    second=st.none() | kinds,
    layers=st.lists(kinds, max_size=2).map(tuple),
    extra=st.none() | options,
)


@relaxed
@given(recipes)
def test_round_trip_also_through_json(instance: Recipe) -> None:
    plain = to_dict(instance)
    assert from_dict(Recipe, plain) == instance
    assert from_dict(Recipe, json.loads(json.dumps(plain))) == instance
    check(instance)


@relaxed
@given(recipes)
def test_describe_lists_the_keys_of_flatten(instance: Recipe) -> None:
    flat, rows = flatten(to_dict(instance)), describe(instance)
    assert [key for key, _, _ in rows] == list(flat)
    assert all(len("".join(row).splitlines()) <= 1 for row in rows)


@relaxed
@given(recipes)
def test_what_describe_shows_can_be_typed_as_a_flag(instance: Recipe) -> None:
    flat = flatten(to_dict(instance))
    for key, _, text in describe(instance):
        if not isinstance(flat[key], dict) and key != "layers":
            assert parse_overrides(["--x", text]) == {"x": flat[key]}


soup = st.recursive(
    st.none() | scalars | st.floats() | st.binary(max_size=3) | st.sampled_from(["dense", "conv", "none", 1, 0]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["name", "width", "batch", "options", "schedule"]) | texts, inner)
        | st.dictionaries(scalars, inner, max_size=3)
    ),
    max_leaves=12,
)
keys = st.sampled_from([*Recipe.__dataclass_fields__]) | scalars


@relaxed
@given(soup | st.dictionaries(keys, soup, max_size=6) | st.dictionaries(keys, soup).map(lambda d: {**GOOD, **d}))
def test_soup_gives_a_recipe_or_one_line(data: Any) -> None:
    try:
        built = from_dict(Recipe, data, where="soup")
    except RecipeError as error:
        assert len(str(error).splitlines()) == 1
        assert str(error).startswith("recipe 'soup': ")
    else:
        assert from_dict(Recipe, to_dict(built)) == built


# --- describe and flatten -----------------------------------------------------------------------------------


def test_describe_speaks_as_a_person() -> None:
    rows = {key: (kind, value) for key, kind, value in describe(Recipe)}
    assert rows["title"] == ("text", "required")
    assert rows["model"] == ("table by name (dense | conv | left | right)", "required")
    assert rows["train.batch"] == ("whole number, at least 1", "128")
    assert rows["train.lr"] == ("number, above 0", "0.001")
    assert rows["train.loss"] == ("margin | spread", "margin")
    assert rows["train.clip"] == ("number, at least 0 or none", "none")
    assert rows["train.amp"] == ("true or false", "false")
    assert rows["train.schedule.steps"] == ("whole number, at least 1", "7")
    assert rows["train.options.momentum"][1] == "0.9"
    assert rows["sizes"] == ("list of whole numbers, at least 1", "[4, 2]")
    assert rows["pair"] == ("list of 2: number, text", '[0.5, "a"]')
    assert rows["level"] == ("1 | 2 | auto or none", "none")
    scalar = "true or false or whole number or number or text"
    assert rows["extra"][0] == f"table of free keys, each {scalar} or list of {scalar} or none"


def test_describe_of_choices_and_nested_classes() -> None:
    assert describe(Holder)[:2] == [
        ("model.name", "dense | conv | left | right", "conv"),
        ("model.width", "whole number, at least 1", "9"),
    ]
    assert describe(Holder(model=Named("right")))[0] == ("model.name", "text", "right")
    assert describe(Node) == [("child", "table of child or none", "none")]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        *[
            ("x", "x"),
            ("a b", "a b"),
            ("", '""'),
            ("--x", '"--x"'),
            ("1", '"1"'),
            ("true", '"true"'),
            ("é", "é"),
        ],
        *[('"', '"'), ('"a"', '"\\"a\\""'), ("a\nb", '"a\\U0000000Ab"'), ("-1", '"-1"'), (True, "true")],
        (1e-5, "1e-05"),
    ],
)
def test_a_value_is_shown_as_it_is_typed(value: Any, text: str) -> None:
    rows = {key: shown for key, _, shown in describe(Recipe("t", Dense(), mixed=value))}
    assert rows["mixed"] == text
    assert parse_overrides(["--mixed", text]) == {"mixed": value}


def test_flatten() -> None:
    data = {"a": {"b": 1, "c": {}}, "d.e": {"f g": [1]}, "h": "x"}
    assert flatten(data) == {"a.b": 1, "a.c": {}, '"d.e"."f g"': [1], "h": "x"}


# --- read_toml ----------------------------------------------------------------------------------------------


def refusal(path: Path) -> str:
    with pytest.raises(RecipeError) as caught:
        read_toml(path)
    assert len(str(caught.value).splitlines()) == 1
    prefix = f"recipe {str(path)!r}: "
    assert str(caught.value).startswith(prefix)
    return str(caught.value).removeprefix(prefix)


def test_read_toml(tmp_path: Path) -> None:
    path = tmp_path / "x.toml"
    path.write_bytes("\ufeff# title\r\na = 1\r\n[b]\r\nc = 'é'\r\n".encode())
    assert read_toml(path) == {"a": 1, "b": {"c": "é"}}
    path.write_bytes(b"#" * 1_000_000)
    assert read_toml(path) == {}


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"a = 1\nb = = 2\n", "not TOML: Invalid value (at line 2, column 5)"),
        (b"a = 1\nb = [1,\n", "not TOML: Invalid value (at line 2, the end of the file)"),
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
def test_read_toml_refuses(tmp_path: Path, content: bytes, expected: str) -> None:
    path = tmp_path / "x.toml"
    path.write_bytes(content)
    assert refusal(path).startswith(expected)


def test_read_toml_refuses_what_is_no_file(tmp_path: Path) -> None:
    assert refusal(tmp_path / "absent\n.toml") == "no such file; give the path of a .toml recipe"
    assert refusal(tmp_path).startswith("cannot be read: Is a directory")
    assert refusal(Path("a\0b")).startswith("cannot be read: embedded null byte")


def test_32_tables_inside_each_other_are_the_most(tmp_path: Path) -> None:
    path = tmp_path / "x.toml"
    path.write_text(".".join(["a"] * 33) + " = 1")
    assert list(flatten(read_toml(path)).values()) == [1]


# --- parse_overrides ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ([], {}),
        (["--train.batch", "64"], {"train": {"batch": 64}}),
        (["--train.batch=64", "--train.lr", "1e-3"], {"train": {"batch": 64, "lr": 0.001}}),
        (["--train.save-every", "2"], {"train": {"save_every": 2}}),
        (["--model.loss", "spread"], {"model": {"loss": "spread"}}),
        (["--x", "-1"], {"x": -1}),
        (["--x", "-inf"], {"x": -math.inf}),
        (["--x", "-y"], {"x": "-y"}),
        (["--x=--y"], {"x": "--y"}),
        (["--x=a=b"], {"x": "a=b"}),
        (["--x="], {"x": ""}),
        (["--x", ""], {"x": ""}),
        (["--x", "true"], {"x": True}),
        (["--x", "True"], {"x": "True"}),
        (["--x", "[1, 2]"], {"x": [1, 2]}),
        (["--x", '"1"'], {"x": "1"}),
        (["--x", "1", "--x", "2"], {"x": 2}),
        (["--x", "none"], {"x": "none"}),
        (["--x", "2020-01-01"], {"x": "2020-01-01"}),
        (["--x", "{a = 1}"], {"x": "{a = 1}"}),
        (["--x", "5 # five"], {"x": "5 # five"}),
        (["--x", "1, y = 2"], {"x": "1, y = 2"}),
        (["--x", "1}\ny = {z = 2"], {"x": "1}\ny = {z = 2"}),
        (["--x", "1\n"], {"x": "1\n"}),
        (["--x", "[" * 5000], {"x": "[" * 5000}),
        (["--x", "9" * 5000], {"x": "9" * 5000}),
    ],
)
def test_parse_overrides(args: list[str], expected: dict[str, Any]) -> None:
    assert parse_overrides(args) == expected


@pytest.mark.parametrize(
    ("args", "expected"),
    [
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
def test_parse_overrides_refuses(args: list[str], expected: str) -> None:
    with pytest.raises(RecipeError) as caught:
        parse_overrides(args)
    assert str(caught.value).startswith(expected)
    assert len(str(caught.value).splitlines()) == 1


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
        ({"a": 1}, {"b": 2}, {"a": 1, "b": 2}),
        ({"a": {"b": 1, "c": 2}}, {"a": {"c": 3}}, {"a": {"b": 1, "c": 3}}),
        ({"a": {"b": 1}}, {"c": 2}, {"a": {"b": 1}, "c": 2}),
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


def test_a_class_variable_is_no_setting() -> None:
    assert to_dict(Remarked()) == {"size": 1}
    assert [key for key, _, _ in describe(Remarked())] == ["size"]
    assert from_dict(Remarked, {"size": 2}).NAMES == ("a", "b")
    with pytest.raises(RecipeError, match="unknown key 'NAMES'"):
        from_dict(Remarked, {"NAMES": ["c"]})


# --- the whole way, and the weight of the import ------------------------------------------------------------


def test_recipe_and_flags_together() -> None:
    base = tomllib.loads('title = "t"\n[model]\nname = "conv"\nkernel = [5, 5]\n[train]\nbatch = 8\n')
    flags = parse_overrides(["--model.name", "dense", "--train.save-every=3", "--train.options.beta", "0.5"])
    built = from_dict(Recipe, merge(base, flags))
    assert built == Recipe("t", Dense(), Train(batch=8, save_every=3, options={"beta": 0.5}))


def test_config_itself_needs_neither_torch_nor_numpy() -> None:
    """Under an empty stand-in for the package, so that what `torchcaps/__init__.py` imports does not count."""
    code = (
        "import sys, types; package = types.ModuleType('torchcaps'); package.__path__ = [sys.argv[1]]; "
        "sys.modules['torchcaps'] = package; import torchcaps.config; "
        "print(*sorted(name for name in sys.modules if name.split('.')[0] in ('torch', 'numpy', 'torchcaps')))"
    )
    folder = str(Path(config.__file__).parents[1])
    done = subprocess.run([sys.executable, "-c", code, folder], capture_output=True, text=True, check=True)
    inner = [
        f"torchcaps.config.{name}"
        for name in ("constraints", "convert", "formatting", "loading", "schema", "serialize")
    ]
    assert done.stdout.split() == ["torchcaps", "torchcaps.config", *inner, "torchcaps.errors"]


# --- Old keys -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "text"),
    [
        ({"optimiser": {"name": "Adam"}}, "the key 'optimiser' is now called 'optimizer'"),
        ({"train": {"check_every": 3}}, "the key 'train.check_every' is now called 'validate_every'"),
    ],
)
def test_keys_of_an_earlier_version_are_refused_with_their_new_name(data: dict[str, Any], text: str) -> None:
    from torchcaps.train.recipe import recipe_of

    with pytest.raises(RecipeError, match=text) as error:
        recipe_of(data)
    assert "\n" not in str(error.value)
