from __future__ import annotations

import json

import pytest
from test_sets import real

from torchcaps.cli import main
from torchcaps.data.status import fetch, is_here, overview
from torchcaps.errors import DataError


@pytest.fixture(autouse=True)
def nothing_here(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("TORCHCAPS_DATA", raising=False)


def test_without_files_only_what_is_built_in_is_here():
    rows = {row.name: row for row in overview()}
    assert rows["glyphs"].state == "built in" and is_here("glyphs")
    assert rows["mnist"].state == "missing: fetch mnist" and not is_here("mnist")
    assert rows["multimnist"].state == "missing: fetch mnist"
    assert all(row.license and row.about for row in rows.values())


def test_a_wrong_file_is_said_by_list_and_fails_check(tmp_path, capsys):
    (tmp_path / "mnist").mkdir()
    (tmp_path / "mnist" / "t10k-labels-idx1-ubyte.gz").write_bytes(b"not it")
    with pytest.raises(DataError, match="t10k-labels"):
        is_here("mnist", tmp_path)
    assert main(["data", "check", "--data-dir", str(tmp_path)]) == 2
    assert "t10k-labels" in capsys.readouterr().err
    assert main(["data", "list", "--data-dir", str(tmp_path)]) == 0
    assert "remove or replace it" in capsys.readouterr().out


def test_fetch_of_what_needs_no_file():
    assert "built in" in next(fetch("glyphs"))
    assert "your own" in next(fetch("folder"))


def test_list_as_json(capsys):
    assert main(["data", "list", "--json"]) == 0
    assert {row["name"] for row in json.loads(capsys.readouterr().out)} >= {"glyphs", "mnist", "smallnorb", "npz"}


def test_own_data_asks_where_it_is(capsys):
    assert main(["data", "check", "folder"]) == 2
    assert "--data-dir" in capsys.readouterr().err


def test_show_draws_a_sheet(tmp_path, capsys):
    pytest.importorskip("matplotlib", reason="the plot extra is not installed")
    out = tmp_path / "sheet.png"
    assert main(["data", "show", "glyphs", "--out", str(out)]) == 0
    assert out.read_bytes().startswith(b"\x89PNG")


def test_check_passes_on_every_real_set(capsys):
    folder = real("mnist")
    assert main(["data", "check", "mnist", "--data-dir", folder]) == 0
    assert "60000 train + 10000 test" in capsys.readouterr().out
