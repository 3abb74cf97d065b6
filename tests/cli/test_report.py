"""`torchcaps report` as a person meets it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from support.cli import is_suggestion, talk
from support.tiny_recipe import tiny
from torchcaps.evaluate import write_result
from torchcaps.evaluate.results import Result
from torchcaps.systems import evaluate_runs
from torchcaps.systems.report import report_tables
from torchcaps.train import train

run, refused = talk("report")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("report") / "run"
    train(tiny(train={"epochs": 0.5}), path, quiet=True)
    return path


def test_one_file_holds_everything(capsys, folder, tmp_path):
    result = write_result(tmp_path, evaluate_runs([folder]))
    code, out, err = run(capsys, folder, "--count", 2, "--result", result)
    assert code == 0 and is_suggestion(err) and Path(out.strip()) == folder / "report.html"
    page = (folder / "report.html").read_text()
    assert page.count("data:image/png;base64,") == page.count("<img") >= 6
    assert not re.search(r"(src|href)=.?(https?:|//)", page) and "<script" not in page
    for text in ("Recipe tiny, seed 3", "5 steps in", "test error (%)", "untrained", "Training, step by step."):
        assert text in page


def test_without_results_there_is_no_table_and_the_file_is_where_it_is_asked(capsys, folder, tmp_path):
    code, out, _ = run(capsys, folder, "-n", 1, "--out", tmp_path / "mine.html")
    assert code == 0 and out.strip() == str(tmp_path / "mine.html")
    assert "<table>" not in (tmp_path / "mine.html").read_text()


def test_a_shipped_model_brings_its_result_and_a_report_stays_short(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torchcaps.systems.image_sources.is_here", lambda *_: False)
    code, out, err = run(capsys, "capsnet-digits", "-n", 2)
    assert code == 0 and Path(out.strip()) == Path("capsnet-digits/report.html"), err
    page = Path("capsnet-digits/report.html").read_text()
    assert "<b>0.49</b>" in page and "One seed" in page and "mean over seeds" not in page
    # Ten classes have a sweep each, of which two are shown
    assert page.count("<img") <= 8
    assert re.search(r"All 1\d pictures: torchcaps generate capsnet-digits --what perturbations", page)


def test_large_numbers_have_one_decimal_and_the_best_is_bold():
    metrics = {"frechet": [30.5137], "knn": [0.97125]}
    controls = {"other": {"frechet": [41.44], "knn": [0.9]}}
    result = Result("mine", {}, [0], metrics, controls, paper={}, budget={}, versions={})
    (table,) = report_tables(result)
    assert table.rows[1:] == [["mine", "30.5", "0.971"], ["other", "41.4", "0.900"]]
    assert table.best == {(1, 1), (1, 2)}


def test_wrong_input_gets_one_line(capsys, folder, tmp_path):
    assert "1 to 64" in refused(capsys, folder, "--count", 0)
    assert "checkpoint" in refused(capsys, tmp_path)
    line = refused(capsys, folder, "--result", tmp_path / "none.json")
    assert f"cannot read results '{tmp_path / 'none.json'}': No such file or directory; name a file" in line
    assert "Errno" not in line and line.count("none.json") == 1
    assert list(tmp_path.iterdir()) == []
