"""Speed and memory, always as ratios to a reference measured beside it: the plain path, the trunk, a matrix product.

    python -m benchmarks            the cases, and how they compare with an earlier run
    python -m benchmarks.NAME       crossover, epochs, explore, growth, steps: one study each
    python -m benchmarks.compare_commits OLD_SRC NEW_SRC

Run from the root of the repository; the JSON files beside the code are what these wrote.
"""

import os

os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # before torch is loaded, as the command line does

from benchmarks.cases import NAMES, Case, Work, case_of
from benchmarks.rows import Row, compare, read_rows, write_rows
from benchmarks.runner import FULL, QUICK, Plan, measure

__all__ = [
    "FULL",
    "NAMES",
    "QUICK",
    "Case",
    "Plan",
    "Row",
    "Work",
    "case_of",
    "compare",
    "measure",
    "read_rows",
    "write_rows",
]
