"""The scripts in benchmarks/, as modules."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

FOLDER = Path(__file__).parents[2] / "benchmarks"


def script(name: str) -> ModuleType:
    """benchmarks/NAME.py, imported once; dataclasses want it among the modules."""
    label = f"benchmarks_{name}"
    if label not in sys.modules:
        spec = importlib.util.spec_from_file_location(label, FOLDER / f"{name}.py")
        assert spec is not None and spec.loader is not None
        sys.modules[label] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[label])
    return sys.modules[label]
