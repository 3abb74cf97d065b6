"""benchmarks/mapped_data.py: both sources are timed, and nothing is left behind."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from torchcaps.utils.mapped import is_mapped


def test_mapped_images_are_timed_beside_those_in_memory(tmp_path: Path, monkeypatch) -> None:
    benchmark = importlib.import_module("benchmarks.mapped_data")
    opened = []
    original = benchmark._opened
    monkeypatch.setattr(
        benchmark, "_opened", lambda data, request: opened.append(data.images) or original(data, request)
    )
    found = benchmark.measure(tmp_path, images=256, rounds=2, steps=1, recipe="cnn-glyphs")
    # One source in memory and one in a file, with the same values
    assert [is_mapped(images) for images in opened] == [False, True]
    assert opened[0].equal(opened[1])
    assert found.wall > 0 and found.cpu > 0 and found.milliseconds > 0
    assert not list(tmp_path.iterdir())


def test_the_command_prints_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    benchmark = importlib.import_module("benchmarks.mapped_data")
    benchmark.main(["--gigabytes", "0.004", "--rounds", "1", "--steps", "1", "--recipe", "cnn-glyphs"])
    assert "of the speed in memory" in capsys.readouterr().out
