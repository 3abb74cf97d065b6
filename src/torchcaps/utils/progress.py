"""What a person sees while training: a bar with loss, images a second and time left; plain lines into a file."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import TypeVar

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    track,
)

__all__ = ["TrainingProgress", "progress"]

T = TypeVar("T")

_LINE_SECONDS = 60.0
"""Where there is no terminal, a line at most this often, and one at the end."""


def progress(items: Iterable[T], what: str, total: int | None = None) -> Iterable[T]:
    """The items, with a bar on standard error while they are gone through, if that is a terminal.

    Args:
        items: What is gone through.
        what: The text before the bar.
        total: The number of items, if `items` has no length.
    """
    console = Console(stderr=True)
    return track(items, what, total=total, console=console, transient=True, disable=not console.is_terminal)


class TrainingProgress:
    """Counts steps on standard error. Silent if `quiet`."""

    def __init__(self, name: str, total: int, done: int, batch: int, *, quiet: bool = False) -> None:
        self._console = Console(stderr=True, quiet=quiet)
        self._name = name
        self._total = total
        self._done = done
        self._batch = batch
        # The bar is for terminals; into a file go plain lines (`update`)
        self._bar = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[told]}"),
            TextColumn("{task.fields[speed]:.0f} images/s"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self._console,
            disable=quiet or not self._console.is_terminal,
        )
        self._task = self._bar.add_task(name, total=total, completed=done, told="", speed=0.0)
        self._accuracy: float | None = None
        self._batch_accuracy: float | None = None
        self._lines = not quiet and not self._console.is_terminal
        self._compiled = False

    def __enter__(self) -> TrainingProgress:
        self.restart()
        self._bar.start()
        return self

    def restart(self) -> None:
        """Count the speed from now: what came before was preparation."""
        self._start = self._last_line = time.monotonic()

    def compiling(self) -> None:
        """Say why the first step takes long, until the next update; into a file only once."""
        text = "compiling loops, once on this machine"
        self._bar.update(self._task, told=text)
        if self._lines and not self._compiled:
            self._compiled = True
            print(f"{self._name}: {text}", file=sys.stderr, flush=True)

    def update(self, step: int, values: Mapping[str, float], *, is_last: bool) -> None:
        """The loss of a step, how often its classes were right, and the last validation accuracy, if there are any."""
        if "accuracy" in values:
            # One batch says little, so that the mean over about ten reports is shown
            before = values["accuracy"] if self._batch_accuracy is None else self._batch_accuracy
            self._batch_accuracy = 0.9 * before + 0.1 * values["accuracy"]
        self._accuracy = values.get("validation_accuracy", self._accuracy)
        # What both the bar and the lines say
        told = f"loss {values['loss']:.4f}"
        if self._batch_accuracy is not None:
            told += f", accuracy {self._batch_accuracy:.0%}"
        if self._accuracy is not None:
            told += f", validation {self._accuracy:.2%}"
        now = time.monotonic()
        # Steps of this session only: those before a resumption took no time here
        speed = (step - self._done) * self._batch / max(now - self._start, 1e-9)
        self._bar.update(self._task, completed=step, told=told, speed=speed)
        # A line now and then, and one at the end
        if self._lines and (now - self._last_line > _LINE_SECONDS or is_last):
            self._last_line = now
            left = 0.0 if is_last else (self._total - step) * self._batch / max(speed, 1e-9)
            line = f"{self._name}: step {step}/{self._total}, {told}, {speed:.0f} images/s, {left:.0f} s left"
            print(line, file=sys.stderr, flush=True)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()
