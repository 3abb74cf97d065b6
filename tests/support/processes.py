"""Processes of their own that need not import torch: they are forked from one that has imported it, once a session.

A test that kills a process, or trains in several, starts it here and not by `subprocess`, which would import torch and
what an optimizer needs (four seconds of processor time) again in each. The process they are forked from runs no threads
and computes nothing, so that a fork is safe there; it would not be in the process of the tests.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed import TCPStore

from torchcaps.cli import main
from torchcaps.data import prepared

_PRELOADED = ["pytest", "numba", "torch._dynamo", "torch.distributed", "torchcaps.testing", "torchcaps.cli.train"]
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(_PRELOADED)


class _Place(NamedTuple):
    """What a process finds around it: variables, the folder of this session's prepared images, files to write to."""

    environment: dict[str, str]
    prepared_images: Path
    output: str
    errors: str


class Forked:
    """A running process that calls a function with one thread; of `subprocess.Popen`, the methods that tests use."""

    def __init__(self, function: Callable[..., object], *args: Any, environment: Mapping[str, str] = {}) -> None:
        """Start it.

        Args:
            function: What it calls, found by its name in its module; an int that it returns is the exit code.
            args: What the function is called with; they are pickled.
            environment: Variables beside those of this process.
        """
        # Both are deleted with this object
        self._output = tempfile.NamedTemporaryFile("r", suffix=".txt")  # noqa: SIM115
        self._errors = tempfile.NamedTemporaryFile("r", suffix=".txt")  # noqa: SIM115
        place = _Place({**os.environ, **environment}, prepared.cache_dir(), self._output.name, self._errors.name)
        self._process = _CONTEXT.Process(target=_call, args=(place, function, args), daemon=True)
        self._process.start()

    @property
    def returncode(self) -> int | None:
        """The exit code, minus the signal that ended it, or None while it runs."""
        return self._process.exitcode

    @property
    def output(self) -> str:
        """What it has written to standard output."""
        self._output.seek(0)
        return self._output.read()

    @property
    def errors(self) -> str:
        """What it has written to standard error."""
        self._errors.seek(0)
        return self._errors.read()

    def poll(self) -> int | None:
        """Return the exit code, or None while it runs."""
        return self.returncode

    def kill(self) -> None:
        """Send kill -9."""
        self._process.kill()

    def send_signal(self, signal: int) -> None:
        """Send a signal."""
        os.kill(self._process.pid or 0, signal)

    def wait(self, timeout: float = 240) -> int:
        """Return the exit code once it has ended."""
        self._process.join(timeout)
        assert self.returncode is not None, f"still running after {timeout} s: {self.errors[-2000:]}"
        return self.returncode

    def finish(self) -> None:
        """Wait until it has ended, and fail with what it wrote unless all went well."""
        assert self.wait() == 0, self.errors[-2000:]


def run_group(function: Callable[..., object], *args: Any, size: int = 2) -> None:
    """Call a function in several processes, in the environment that torchrun gives to those it starts."""
    # As under torchrun, whoever starts the group holds the store through which its processes find each other
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    shared["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    ranks = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(size)]
    group = [Forked(function, *args, environment=shared | rank) for rank in ranks]
    try:
        # One that fails is reported at once: the others would wait for it for minutes
        deadline = time.monotonic() + 240
        while any(process.poll() is None for process in group) and time.monotonic() < deadline:
            assert not any(process.poll() for process in group), [process.errors[-2000:] for process in group]
            time.sleep(0.01)
        for process in group:
            process.finish()
    finally:
        for process in group:
            process.kill()


def command(*words: str) -> int:
    """Run the command line of torchcaps, for `Forked` and `run_group`."""
    return main(list(words))


def _call(place: _Place, function: Callable[..., object], args: tuple[Any, ...]) -> None:
    """What a forked process does first of all."""
    os.environ.clear()
    os.environ.update(place.environment)
    for stream, path in enumerate((place.output, place.errors), 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND), stream)
    prepared.cache_dir = lambda: place.prepared_images
    torch.set_num_threads(1)
    code = function(*args)
    if isinstance(code, int) and code:
        raise SystemExit(code)
