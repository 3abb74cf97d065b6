"""From words to a command, by tyro; a recipe's own keys are left to `train`."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Collection, Sequence
from types import NoneType
from typing import Literal, Protocol, get_args, get_type_hints

import tyro
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from torchcaps import __version__
from torchcaps.cli.attack import Attack
from torchcaps.cli.average import Average
from torchcaps.cli.data import Data
from torchcaps.cli.demo import Demo
from torchcaps.cli.evaluate import Evaluate
from torchcaps.cli.explore import Explore
from torchcaps.cli.export import Export
from torchcaps.cli.generate import Generate
from torchcaps.cli.list_command import List
from torchcaps.cli.parse_errors import one_line_errors
from torchcaps.cli.predict import Predict
from torchcaps.cli.report import Report
from torchcaps.cli.train import TRAIN_FLAGS, Train
from torchcaps.cli.zoo import Zoo
from torchcaps.errors import RecipeError, suggestion

__all__ = ["COMMANDS", "Command", "Overview", "parse", "split_overrides"]


class Command(Protocol):
    """What every command is: flags, and `run`, which returns the exit code."""

    def run(self) -> int: ...


# In the order in which a newcomer meets them. The commands import torch only in `run`, so that --help is quick.
COMMANDS: dict[str, type[Command]] = {
    "demo": Demo,
    "train": Train,
    "evaluate": Evaluate,
    "predict": Predict,
    "generate": Generate,
    "attack": Attack,
    "average": Average,
    "report": Report,
    "export": Export,
    "explore": Explore,
    "data": Data,
    "zoo": Zoo,
    "list": List,
}


SWITCHES = ("--data.strict",)
"""Settings of a recipe that are true when they are given without a value."""

OWN_FLAGS = {"train": TRAIN_FLAGS, "data": {"--help", "--data-dir", "--out", "--json"}}
"""The flags of the commands that also take settings of a recipe."""


OPTIONAL = ConstructorRegistry()
"""How tyro shows flags that may be left out: `--out PATH`, where it would write `--out {None}|PATH` by itself."""


@OPTIONAL.primitive_rule
def _optional(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[object] | None:
    """Read `X | None` as X is read; None is what a flag is that is not given."""
    # Only `X | None` is ours; for every other type tyro goes on with its own rules
    members = [member for member in get_args(info.type) if member is not NoneType]
    if NoneType not in get_args(info.type) or len(members) != 1:
        return None
    spec = ConstructorRegistry.get_primitive_spec(PrimitiveTypeInfo.make(members[0], info.markers))
    if not isinstance(spec, PrimitiveConstructorSpec):
        return None

    # Defaults pass through these two functions, so both must accept None
    def is_instance(value: object) -> bool | Literal["~"]:
        return True if value is None else spec.is_instance(value)

    def words_of(value: object) -> list[str]:
        return ["None"] if value is None else spec.str_from_instance(value)

    return dataclasses.replace(spec, is_instance=is_instance, str_from_instance=words_of)


def parse(args: Sequence[str]) -> Command:
    """Read a command from its words; `--help` prints and exits.

    Raises:
        RecipeError: There is no such command, it has no such flag, or a value is wrong or missing.
    """
    # Overview and version need no command
    if not args or args[0] in ("-h", "--help", "--version"):
        return Overview(version="--version" in args)
    name, *words = args
    if name not in COMMANDS:
        raise RecipeError(f"no command '{name}'{suggestion(name, COMMANDS)}; torchcaps --help lists them")
    # Keys of a recipe are not flags of `Train`: tyro would refuse them
    overrides: list[str] = []
    if name in ("train", "data"):
        words, overrides = split_overrides(words, OWN_FLAGS[name])
    # No --no-FLAG for booleans: every one is false unless given
    with OPTIONAL, one_line_errors(COMMANDS[name], name, words):
        command, rest = tyro.cli(
            COMMANDS[name],
            prog=f"torchcaps {name}",
            args=words,
            return_unknown_args=True,
            config=(tyro.conf.FlagCreatePairsOff,),
        )
    # Unknown flags are returned and refused here, with a suggestion, instead of by tyro's page of text
    if rest:
        advice = suggestion(rest[0], flags_of(COMMANDS[name]))
        if name == "train" and not rest[0].startswith("-"):
            advice = f"; a setting has a key, such as --data.path {rest[0]} (torchcaps list RECIPE names the keys)"
        raise RecipeError(f"'torchcaps {name}' does not know '{rest[0]}'{advice}")
    return dataclasses.replace(command, overrides=tuple(overrides)) if isinstance(command, Train | Data) else command


def flags_of(command: type[Command]) -> list[str]:
    """Return the options of a command as they are typed; what has no name on the command line is none.

    >>> flags_of(COMMANDS["report"])
    ['--out', '--result', '--count', '--seed']
    """
    # tyro marks a positional argument, and one that is not shown, inside the annotation
    markers = {get_args(tyro.conf.Positional[int])[1], get_args(tyro.conf.Suppress[int])[1]}
    hints = get_type_hints(command, include_extras=True)
    fields = dataclasses.fields(command)  # type: ignore[arg-type]  # every command is a dataclass
    named = [field.name for field in fields if markers.isdisjoint(get_args(hints[field.name]))]
    return [f"--{name.replace('_', '-')}" for name in named]


def split_overrides(words: Sequence[str], own_flags: Collection[str] = TRAIN_FLAGS) -> tuple[list[str], list[str]]:
    """Tell the flags of a command from the settings of its recipe, each of which takes one value.

    Args:
        words: What was typed after the name of the command.
        own_flags: The flags of the command itself.

    Returns:
        The words for the command, in which a `--resume` without a folder has the value "", and those of the recipe, in
        which a switch without a value has the value "true".

    >>> split_overrides(["mine.toml", "--train.epochs", "3", "--resume", "--quiet"])
    (['mine.toml', '--resume', '', '--quiet'], ['--train.epochs', '3'])
    """
    own: list[str] = []
    overrides: list[str] = []
    waiting = list(words)
    while waiting:
        word = waiting.pop(0)
        # A value may begin with one dash, as -1 does, but not with two
        has_value = bool(waiting) and not waiting[0].startswith("--")
        flag = word.partition("=")[0]
        # tyro wants a value after every such flag, hence an empty one
        if word == "--resume":
            own += [word, waiting.pop(0) if has_value else ""]
        elif not word.startswith("--") or flag in own_flags:
            own.append(word)
        else:
            overrides.append(word)
            if has_value and flag == word:
                overrides.append(waiting.pop(0))
            elif word in SWITCHES:
                overrides.append("true")
    return own, overrides


@dataclasses.dataclass(frozen=True)
class Overview:
    """Print the commands, each with the first line of its documentation."""

    version: bool = False

    def run(self) -> int:
        if self.version:
            print(f"torchcaps {__version__}")
            return 0
        print("torchcaps: capsule networks to train, look inside and compare\n\nusage: torchcaps COMMAND [...]\n")
        print("Example: torchcaps explore\n")
        for name, command in COMMANDS.items():
            print(f"  {name:10} {(inspect.getdoc(command) or '').splitlines()[0]}")
        print("\ntorchcaps COMMAND --help explains one, with an example; --debug anywhere shows tracebacks.")
        return 0
