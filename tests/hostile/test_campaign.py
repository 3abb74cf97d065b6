"""A small share of the campaign against checkpoints, which `campaign.py` runs by hand in its full length."""

from __future__ import annotations

from pathlib import Path

import pytest

from hostile.campaign import run, run_npz


@pytest.mark.parametrize(
    ("mutants", "forgeries"), [(100, 150), pytest.param(70_000, 6_000, marks=pytest.mark.long)], ids=["share", "whole"]
)
def test_damaged_and_forged_checkpoints_cost_little(tmp_path: Path, mutants: int, forgeries: int) -> None:
    found = run(tmp_path, mutants=mutants, forgeries=forgeries)
    assert found.outcomes["forgery refused"] > forgeries / 4
    assert found.slowest < 10
    assert found.grown < 1000


@pytest.mark.parametrize("arrays", [200, pytest.param(2_000, marks=pytest.mark.long)], ids=["share", "whole"])
def test_arrays_of_any_contents_cost_little(tmp_path: Path, arrays: int) -> None:
    found = run_npz(tmp_path, arrays=arrays)
    assert found.outcomes["npz refused"] > arrays / 2 and found.outcomes["npz loaded"] > 0
    assert found.slowest < 10 and found.grown < 1000
