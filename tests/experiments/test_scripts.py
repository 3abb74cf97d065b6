"""Every script in experiments/ explains itself, and does nothing else when it is asked to."""

from __future__ import annotations

import importlib

import pytest

from sweep import EXPERIMENTS, ROOT

LIBRARIES = {"lab_result", "likelihood"}
NAMES = sorted(path.stem for path in EXPERIMENTS.glob("*.py") if path.stem not in LIBRARIES)


@pytest.mark.parametrize("name", NAMES)
def test_help_prints_and_changes_nothing(name: str, capsys):
    if name == "screenshots":
        pytest.importorskip("playwright")
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "results").glob("*.json")]
    before = {page: page.stat().st_mtime_ns for page in pages}
    script = importlib.import_module(name)
    with pytest.raises(SystemExit) as stop:
        script.main(["--help"])
    shown = capsys.readouterr().out
    assert stop.value.code == 0 and f"python experiments/{name}.py" in shown
    assert {page: page.stat().st_mtime_ns for page in pages} == before
