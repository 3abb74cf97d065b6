"""benchmarks/growth.py: slopes, sizes, the table and the plot."""

from __future__ import annotations

import importlib
import math

import pytest

from torchcaps.systems.report import text_table


@pytest.fixture
def growth():
    return importlib.import_module("benchmarks.growth")


@pytest.mark.parametrize("power", [0.0, 0.5, 1.0, 2.0])
def test_the_exponent_of_a_power_law_is_its_power(growth, power):
    points = [(n, 7 * n**power) for n in (1, 2, 5, 8, 20)]
    assert growth.exponent(points) == pytest.approx(power, abs=1e-6)
    assert growth.exponent(list(reversed(points))) == pytest.approx(power, abs=1e-6)


def test_fixed_costs_count_little_and_one_point_is_no_slope(growth):
    assert 0.95 < growth.exponent([(n, 10 + n) for n in (1, 2, 4, 1000, 2000, 4000)]) < 1
    assert math.isnan(growth.exponent([(3, 4)]))


def test_sizes_surround_the_base_and_name_cases(growth):
    base = growth.Base(batch=32)
    assert growth.sizes(base, "children") == [72, 144, 288, 576, 1152, 2304, 4608]
    assert growth.sizes(base, "batch") == [2, 4, 8, 16, 32, 64, 128]
    assert growth.sizes(growth.Base(parents=2), "parents") == [1, 2, 4, 8]
    assert base.name(parents=7, iterations=1) == "dynamic-1152x8-7x16-t1"
    assert growth.Base("em", 144, 16).name(children=72) == "em-72x16-t3"


def test_the_table_has_exponents_and_ratios(growth):
    points = [growth.Point("batch", n, n * 2.0, n * 10.0, 5.0, n * n * 1.0) for n in (1, 2, 4, 8)]
    lines = text_table(growth.rows_of(points)).splitlines()
    assert lines[0].split() == [
        "grows",
        "to",
        "ours",
        "ms",
        "plain",
        "ms",
        "ours",
        "MB",
        "plain",
        "MB",
        "plain",
        "/",
        "ours",
    ]
    assert lines[2].split() == ["batch", "2", "4", "20", "5", "4", "5.0"]
    assert lines[-1].split() == ["exponent", "1.00", "1.00", "0.00", "2.00"]
    bare = [point._replace(ours_mb=None, plain_mb=None) for point in points]
    assert "MB" not in text_table(growth.rows_of(bare))


@pytest.mark.parametrize("base", ["dynamic-16x2-2x3", "em-8x2"])
def test_it_measures_and_draws(growth, base, tmp_path, capsys):
    words = ["--base", base, "--batch", "2", "--seconds", "0.001", "--grows", "batch", "iterations"]
    assert growth.main([*words, "--out", str(tmp_path / "g.png")]) == 0
    out = capsys.readouterr().out
    assert out.count("exponent") == 2 and out.count("iterations") == 6
    assert (tmp_path / "g.png").read_bytes().startswith(b"\x89PNG")


def test_wrong_sizes_are_refused_in_one_line(growth, capsys):
    for words in (["--base", "3x4"], ["--batch", "0"], ["--base", "em-0x1"], ["--base", "cd-3x2-2x2"]):
        assert growth.main(words) == 2
        err = capsys.readouterr().err
        assert err.startswith("growth: ") and err.count("\n") == 1
