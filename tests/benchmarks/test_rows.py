"""Rows as a file, beside those of an earlier run, and as a table."""

from __future__ import annotations

import io
import json
from dataclasses import asdict, replace

import pytest
from benchmarks.machine import Machine, describe_machine, this_machine
from benchmarks.report import print_table, table_of
from benchmarks.rows import Row, as_json, compare, read_measurement, read_rows, update, write_rows
from rich.console import Console

from torchcaps.errors import DataError

ROW = Row("capsnet-28", "step", 128, 2, 8.0, 3.5, 2.25, 410.0, 0.4, 120.0, 1.1, 128)
MACHINE = Machine("AMD EPYC", 2, "2.13.0+cpu")
ISSUE = {
    "name", "batch", "threads", "plain_ratio", "memory_ratio", "peak_mb", "sgemm_fraction", "trunk_ratio",
    "ms_per_sample", "kind", "plain_batch",
}  # fmt: skip


def test_a_file_holds_the_machine_and_its_rows_and_comes_back(tmp_path):
    rows = [ROW, replace(ROW, name="cd-3x2-2x2", memory_ratio=None, peak_mb=None, trunk_ratio=None, then_ratio=2.0)]
    write_rows(tmp_path / "a.json", rows, MACHINE)
    stored = json.loads((tmp_path / "a.json").read_text())["rows"]
    assert all(entry.keys() >= ISSUE for entry in stored)
    assert stored[1]["trunk_ratio"] is None
    found = read_measurement(tmp_path / "a.json")
    assert found.rows == rows and found.machine == MACHINE


def test_a_file_of_rows_alone_has_no_machine(tmp_path):
    (tmp_path / "old.json").write_text(json.dumps([asdict(ROW)]))
    found = read_measurement(tmp_path / "old.json")
    assert found.rows == [ROW] and found.machine is None
    assert describe_machine(None) == "The machine was not recorded."


def test_the_machine_is_named_by_the_operating_system(tmp_path):
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nmodel name\t: Some CPU 9\nmodel name\t: Some CPU 9\n")
    named = this_machine(tmp_path / "cpuinfo")
    assert named.processor == "Some CPU 9" and named.cores >= 1
    assert "Some CPU 9" in describe_machine(named) and named.torch in describe_machine(named)
    assert "one core of" in describe_machine(replace(named, cores=1))
    assert this_machine(tmp_path / "none").processor


@pytest.mark.parametrize(
    "content",
    [
        "", "{", "[]", "3", "[3]", "[{}]", '{"name": "x"}', b"\xff\xfe",
        json.dumps([{**asdict(ROW), "batch": "128"}]), json.dumps([{**asdict(ROW), "extra": 1}]),
        json.dumps([{**asdict(ROW), "ms_per_sample": 0}]), json.dumps([{**asdict(ROW), "batch": True}]),
        json.dumps([{**asdict(ROW), "plain_ratio": None}]), json.dumps({"rows": [asdict(ROW)]}),
        as_json([ROW], MACHINE).replace('"cores": 2', '"cores": "2"'), as_json([], MACHINE),
    ],
)  # fmt: skip
def test_other_files_are_refused_in_one_line(tmp_path, content):
    path = tmp_path / "b.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError) as caught:
        read_rows(path)
    assert "b.json" in str(caught.value) and "--json FILE" in str(caught.value) and "\n" not in str(caught.value)


def test_an_absent_file_is_refused(tmp_path):
    with pytest.raises(DataError, match="No such file"):
        read_rows(tmp_path / "none.json")


def test_compare_pairs_rows_by_case_kind_batch_and_threads():
    then = [replace(ROW, ms_per_sample=16.0), replace(ROW, kind="forward", ms_per_sample=2.0)]
    now = [ROW, replace(ROW, kind="forward"), replace(ROW, batch=1), replace(ROW, threads=1), replace(ROW, name="x")]
    assert [row.then_ratio for row in compare(now, then)] == [2.0, 0.25, None, None, None]
    assert [replace(row, then_ratio=None) for row in compare(now, then)] == now


def test_update_replaces_rows_and_keeps_memory_that_was_not_measured_again():
    other = replace(ROW, name="sparse-40")
    again = replace(ROW, ms_per_sample=7.0, memory_ratio=None, peak_mb=None)
    assert update([again], [ROW, other]) == [replace(ROW, ms_per_sample=7.0), other]
    leaner = replace(ROW, peak_mb=300.0, memory_ratio=3.0)
    assert update([leaner], [ROW]) == [leaner]
    assert update([other], [ROW]) == [ROW, other]


def text_of(rows: list[Row]) -> str:
    console = Console(width=140, file=io.StringIO())
    console.print(table_of(rows))
    return console.file.getvalue()


def test_the_table_shows_each_row_and_what_is_not_there():
    bare = replace(ROW, name="dynamic-3x2-2x2", memory_ratio=None, peak_mb=None, trunk_ratio=None)
    text = text_of([ROW, bare])
    line = next(line for line in text.splitlines() if "capsnet-28" in line)
    cells = [cell.strip() for cell in line.split("│")[1:-1]]
    assert cells == ["capsnet-28", "step", "128", "2", "8", "3.50", "2.25", "410", "40.0", "1.10"]
    other = next(line for line in text.splitlines() if "dynamic-3x2" in line)
    assert [cell.strip() for cell in other.split("│")[7:-1]] == ["-", "-", "40.0", "-"]
    assert "120 with 2 threads" in text and "then" not in text and "*" not in text


def test_the_table_says_where_plain_was_scaled_and_compares():
    text = text_of([replace(ROW, plain_batch=16, then_ratio=1.75)])
    assert "3.50*" in text and "* plain measured at batch 16, and at half of it" in text
    assert "1.75" in text and "then" in text


def test_the_table_is_not_cut_where_there_is_no_terminal(capsys):
    print_table([replace(ROW, name="dynamic-4608x8-16x16", kind="forward")])
    out = capsys.readouterr().out
    assert "dynamic-4608x8-16x16" in out and "forward" in out and "…" not in out
