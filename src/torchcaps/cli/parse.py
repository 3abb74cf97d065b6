"""From words to a command, by tyro; a recipe's own keys are left to `train`."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Sequence
from typing import Protocol

import tyro

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
from torchcaps.cli.predict import Predict
from torchcaps.cli.report import Report
from torchcaps.cli.train import Train
from torchcaps.errors import RecipeError, suggestion

__all__ = ["COMMANDS", "Command", "Overview", "parse"]


class Command(Protocol):
    """What every command is: flags, and `run`, which returns the exit code."""

    def run(self) -> int: ...


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
    "list": List,
}


def parse(args: Sequence[str]) -> Command:
    """The command that the words name; `--help` prints and exits, a wrong flag exits with code 2."""
    if not args or args[0] in ("-h", "--help", "--version"):
        return Overview(version="--version" in args)
    name, *words = args
    if name not in COMMANDS:
        raise RecipeError(f"no command '{name}'{suggestion(name, COMMANDS)}; torchcaps --help lists them")
    command, rest = tyro.cli(
        COMMANDS[name],
        prog=f"torchcaps {name}",
        args=words,
        return_unknown_args=True,
        config=(tyro.conf.FlagCreatePairsOff,),
    )
    if not rest:
        return command
    if not isinstance(command, Train):
        flags = [f"--{flag}" for flag in vars(command)]
        raise RecipeError(f"'torchcaps {name}' does not know '{rest[0]}'{suggestion(rest[0], flags)}")
    return dataclasses.replace(command, overrides=tuple(rest))


@dataclasses.dataclass(frozen=True)
class Overview:
    """The list of commands, each with the first line of its documentation."""

    version: bool = False

    def run(self) -> int:
        if self.version:
            print(f"torchcaps {__version__}")
            return 0
        print("torchcaps: capsule networks to train, look inside and compare\n\nusage: torchcaps COMMAND [...]\n")
        for name, command in COMMANDS.items():
            print(f"  {name:10} {(inspect.getdoc(command) or '').splitlines()[0]}")
        print("\ntorchcaps COMMAND --help explains one, with an example; --debug anywhere shows tracebacks.")
        return 0
