"""`python -m benchmarks` as a person meets it."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from benchmarks.__main__ import main
from benchmarks.machine import this_machine
from benchmarks.rows import Row, read_rows, write_rows
from benchmarks.runner import FULL, QUICK, Plan

ROW = Row("dynamic-3x2-2x2", "step", 2, 1, 8.0, 3.5, None, None, 0.4, 120.0, None, 2)


def run(capsys, *words: object) -> tuple[int, str, str]:
    """Exit code, output and errors of the command."""
    try:
        code = main([*map(str, words)])
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 1
    out, err = capsys.readouterr()
    return code, out, err


def refused(capsys, *words: object) -> str:
    """The one line that says why."""
    code, out, err = run(capsys, *words)
    assert code == 2 and not out, (code, out, err)
    assert err.startswith("benchmarks: ") and err.count("\n") == 1, err
    return err


@pytest.fixture
def asked(monkeypatch) -> list[Plan]:
    """Plans that were to be measured; each gives the same row, so that no test waits for a clock."""
    plans: list[Plan] = []

    def measure(plan, progress):
        plans.append(plan)
        return [replace(ROW, name=name) for name, _ in progress([(name, 2) for name in plan.names])]

    monkeypatch.setattr("benchmarks.__main__.measure", measure)
    monkeypatch.setattr("benchmarks.timing.busy", lambda: None)
    return plans


def test_it_really_measures(capsys, tmp_path):
    words = ("dynamic-3x2-2x2", "--batch", 2, "--threads", 1, "--quick", "--no-memory")
    code, out, err = run(capsys, *words, "--json", tmp_path / "a.json")
    assert code == 0, err
    assert "dynamic-3x2-2x2" in out and "a.json" in out
    rows = json.loads((tmp_path / "a.json").read_text())["rows"]
    assert [(row["kind"], row["batch"], row["threads"]) for row in rows] == [("forward", 2, 1), ("step", 2, 1)]
    assert all(row["plain_ratio"] > 0 and row["peak_mb"] is None for row in rows)


def test_flags_make_the_plan(capsys, asked):
    assert run(capsys)[0] == 0
    assert run(capsys, "--quick")[0] == 0
    assert run(capsys, "capsnet-28", "cd-3x2-2x2", "--batch", 1, 8, "--threads", 2, "--no-memory")[0] == 0
    assert asked[:2] == [FULL, QUICK]
    assert asked[2] == replace(FULL, names=("capsnet-28", "cd-3x2-2x2"), batches=(1, 8), threads=(2,), memory=False)


def test_json_goes_to_a_file_or_to_standard_output(capsys, asked, tmp_path):
    for words in (("sparse-40", "--json"), ("--json", "sparse-40"), ("--json", "-", "sparse-40")):
        code, out, err = run(capsys, *words)
        assert code == 0, err
        assert [row["name"] for row in json.loads(out)["rows"]] == ["sparse-40"]
    path = tmp_path / "rows.json"
    code, out, _ = run(capsys, "sparse-40", "--json", path, "--quick")
    assert code == 0 and f"written to {path}" in out
    assert json.loads(path.read_text())["rows"][0]["name"] == "sparse-40"
    assert "written to" not in run(capsys, "sparse-40")[1]


def test_against_an_earlier_run(capsys, asked, tmp_path):
    write_rows(tmp_path / "then.json", [replace(ROW, ms_per_sample=20.0)], this_machine())
    words = ("dynamic-3x2-2x2", "--batch", 2, "--threads", 1, "--against", tmp_path / "then.json")
    assert json.loads(run(capsys, *words, "--json")[1])["rows"][0]["then_ratio"] == 2.5
    assert "2.50" in run(capsys, *words)[1]


def test_an_update_keeps_the_other_rows_of_this_machine(capsys, asked, tmp_path):
    path = tmp_path / "rows.json"
    other = replace(ROW, name="dynamic-9x2-2x2")
    write_rows(path, [other], this_machine())
    assert run(capsys, ROW.name, "--json", path, "--update")[0] == 0
    assert read_rows(path) == [other, ROW]
    # Rows of another machine are not mixed with those of this one
    write_rows(path, [other], replace(this_machine(), processor="another"))
    assert "another machine" in refused(capsys, ROW.name, "--json", path, "--update")
    assert "--json FILE" in refused(capsys, ROW.name, "--update")


def test_wrong_input_is_refused_before_anything_is_measured(capsys, asked, tmp_path):
    assert "did you mean 'capsnet-28'" in refused(capsys, "capsnet-2x")
    assert "at least 1" in refused(capsys, "--batch", 0)
    assert "at least 0" in refused(capsys, "--threads", -1)
    assert "did you mean '--against'" in refused(capsys, "--agianst", "x")
    assert "none.json" in refused(capsys, "--against", tmp_path / "none.json")
    (tmp_path / "bad.json").write_text("[1]")
    assert "no list of measurements" in refused(capsys, "--against", tmp_path / "bad.json")
    write_rows(tmp_path / "then.json", [ROW], this_machine())
    assert "has none of the rows" in refused(capsys, "capsnet-28", "--against", tmp_path / "then.json")
    assert "a folder that exists" in refused(capsys, "--json", tmp_path / "no" / "a.json")
    assert "a folder that exists" in refused(capsys, "--json", tmp_path)
    assert "no case" in refused(capsys, "--json", tmp_path / "a.json", tmp_path / "b.json")
    assert not asked


def test_a_busy_machine_is_told_on_standard_error(capsys, asked, monkeypatch):
    monkeypatch.setattr("benchmarks.timing.busy", lambda: "the machine is busy")
    code, out, err = run(capsys, "sparse-40", "--json")
    assert code == 0 and "the machine is busy" in err and json.loads(out)


def test_help_has_an_example_and_the_cases(capsys):
    code, out, _ = run(capsys, "--help")
    assert code == 0 and "Example: python -m benchmarks" in out
    for word in ("capsnet-28", "--against", "--no-memory", "--quick", "--json"):
        assert word in out
