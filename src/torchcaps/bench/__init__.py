"""Speed and memory, always as ratios to a reference measured beside it: the plain path, the trunk, a matrix product."""

from torchcaps.bench.cases import NAMES, Case, Work, case_of
from torchcaps.bench.rows import Row, compare, read_rows, write_rows
from torchcaps.bench.sitting import FULL, QUICK, Plan, measure

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
