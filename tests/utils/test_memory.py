"""Freed memory stays with the process if that is asked for, and the environment has the last word."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from typing import NamedTuple

import pytest

from torchcaps import cli
from torchcaps.utils import memory

PROGRAM = """
import json, resource
import torch
from torchcaps.utils.memory import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(8):
        torch.ones(16_000_000)  # 64 MB, freed at once
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

before = faults()
kept = keep_freed_memory()
faults()
print(json.dumps([kept, before, faults()]))
"""


class Outcome(NamedTuple):
    """What the program above printed: whether memory is kept, page faults before and after."""

    kept: bool
    before: int
    after: int


def outcome(**variables: str) -> Outcome:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MALLOC_") and k != "GLIBC_TUNABLES"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env={**environment, **variables}, capture_output=True, text=True, check=True
    )
    return Outcome(*json.loads(done.stdout))


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="this C library is not glibc")
def test_freed_memory_is_used_again() -> None:
    found = outcome()
    # 8 x 64 MB are 125,000 pages, or 250 large ones
    assert found.kept and found.before >= 8 * 16 and found.after <= found.before / 8


@pytest.mark.parametrize("name", ["MALLOC_ARENA_MAX", "GLIBC_TUNABLES"])
def test_the_environment_has_the_last_word(name: str) -> None:
    assert not outcome(**{name: "1"}).kept


def test_other_systems_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("MALLOC_") or name == "GLIBC_TUNABLES"]:
        monkeypatch.delenv(name)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "platform", "darwin")
        assert not memory.keep_freed_memory()
    monkeypatch.setattr(memory.ctypes, "CDLL", lambda name: object())
    assert not memory.keep_freed_memory()


def test_a_program_that_calls_a_command_keeps_its_own_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[bool] = []
    monkeypatch.setattr(memory, "keep_freed_memory", lambda: calls.append(True))
    assert cli.main(["list"]) == 0 and not calls
    monkeypatch.setattr(sys, "argv", ["torchcaps", "list"])
    assert cli.main() == 0 and len(calls) == 1
