"""Machines that train together, each a process with a folder of its own.

They are forked from the process of `support.processes`. Unlike its groups, these are machines of their own: each has
its own command, folder and, if wanted, network, and may end in any way.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NamedTuple

from support.processes import _CONTEXT


class Finished(NamedTuple):
    """How a process ended: its exit code (negative: by a signal) and what it printed."""

    code: int | None
    text: str


class Ranks:
    """Processes that run commands of torchcaps together, one command each."""

    def __init__(
        self,
        folder: Path,
        commands: Sequence[Sequence[object]],
        *,
        environment: Mapping[str, object] = {},
        function: Callable[[list[str]], int] | None = None,
    ) -> None:
        """Start one process for each command, in folders FOLDER/0, FOLDER/1 ... that share nothing.

        Args:
            folder: Where their folders are.
            commands: Words of each command.
            environment: Variables for all.
            function: What is called with the words and returns the exit code, instead of the command line.
        """
        port = free_port()
        self.outputs: list[Path] = []
        self.processes: list[BaseProcess] = []
        for rank, words in enumerate(commands):
            home = folder / str(rank)
            home.mkdir(parents=True, exist_ok=True)
            self.outputs.append(home / "output.txt")
            # Each is the only process of its machine
            group = {"RANK": rank, "WORLD_SIZE": len(commands), "LOCAL_RANK": 0, "MASTER_ADDR": "127.0.0.1"}
            variables = group | {"MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo", **environment}
            self.processes.append(start(function or _command, [str(word) for word in words], home, variables))

    def wait(self, seconds: float = 240) -> list[Finished]:
        """Wait for all processes; one that is still there after so many seconds is killed, and has no exit code."""
        end = time.monotonic() + seconds
        found = []
        for process, output in zip(self.processes, self.outputs, strict=True):
            process.join(max(0.0, end - time.monotonic()))
            code = process.exitcode
            if code is None:
                process.kill()
                process.join()
            found.append(Finished(code, output.read_text() if output.exists() else ""))
        return found


def start(
    function: Callable[..., object], words: Sequence[str], home: Path, variables: Mapping[str, object]
) -> BaseProcess:
    """Start `function(words)` in a process with these environment variables, whose output goes to HOME/output.txt."""
    given = {name: str(value) for name, value in variables.items()}
    process = _CONTEXT.Process(target=_enter, args=(function, list(words), home, given), daemon=False)
    process.start()
    return process


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _enter(function: Callable[..., object], words: list[str], home: Path, variables: dict[str, str]) -> None:
    # Output into a file, as a terminal of its own would show it
    file = (home / "output.txt").open("w", buffering=1)
    os.dup2(file.fileno(), 1)
    os.dup2(file.fileno(), 2)
    sys.stdout = sys.stderr = file
    os.chdir(home)
    namespace = variables.pop("NETWORK_NAMESPACE", None)
    if namespace is not None:
        enter_namespace(namespace)
    os.environ.update(variables)
    import torch

    torch.set_num_threads(1)
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(function(words))


def _command(words: list[str]) -> int:
    from torchcaps.cli import main

    return main(words)


def enter_namespace(name: str) -> None:
    """Move this process into a network namespace that `ip netns add` made."""
    libc = ctypes.CDLL(None, use_errno=True)
    with Path(f"/run/netns/{name}").open() as handle:
        if libc.setns(handle.fileno(), 0x40000000) != 0:
            raise OSError(ctypes.get_errno(), "setns")


def elastic_node(words: list[str]) -> int:
    """Be one machine under torchrun: an agent that starts a worker, and starts it again when it dies.

    Words: the address of the first machine, the most restarts, and then the words of the command.
    """
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=2, max_nodes=2, nproc_per_node=1, run_id="test", rdzv_backend="c10d", rdzv_endpoint=words[0],
        max_restarts=int(words[1]), monitor_interval=0.1, start_method="fork",
        local_addr=os.environ["OWN_ADDRESS"],
        rdzv_configs={"timeout": 60, "is_host": words[0].startswith(os.environ["OWN_ADDRESS"])},
    )  # fmt: skip
    codes = elastic_launch(config, _elastic_worker)(words[2:])
    return max(codes.values())


def _elastic_worker(words: list[str]) -> int:
    Path(f"worker-{os.environ['TORCHELASTIC_RESTART_COUNT']}.pid").write_text(str(os.getpid()))
    code = _command(words)
    if code:
        sys.exit(code)
    return code
