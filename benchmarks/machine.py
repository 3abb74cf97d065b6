"""Name the machine that a measurement was taken on."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from pathlib import Path

import torch

__all__ = ["Machine", "describe_machine", "this_machine"]

CPU_INFO = Path("/proc/cpuinfo")
"""Where Linux names the processor."""


@dataclass(frozen=True)
class Machine:
    """The machine of a measurement.

    processor  its name, as the operating system gives it
    cores      how many of them there are
    torch      version of torch
    """

    processor: str
    cores: int
    torch: str


def this_machine(cpu_info: Path = CPU_INFO) -> Machine:
    """Describe the machine that this process runs on.

    Args:
        cpu_info: The file in which Linux names the processor; elsewhere, Python's own name is taken.
    """
    lines = cpu_info.read_text().splitlines() if cpu_info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    processor = names[0] if names else platform.processor() or platform.machine()
    return Machine(processor, os.cpu_count() or 1, str(torch.__version__))


def describe_machine(machine: Machine | None) -> str:
    """Return one sentence for a page."""
    if machine is None:
        return "The machine was not recorded."
    cores = "one core" if machine.cores == 1 else f"{machine.cores} cores"
    return f"Measured on {cores} of this processor: {machine.processor}; torch {machine.torch}."
