"""Factors and capsule dimensions, against ranks and loops written out."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import pytest
import torch

from support.tiny_recipe import tiny
from torchcaps.data import Dataset
from torchcaps.errors import DataError
from torchcaps.evaluate import factors as f
from torchcaps.models import CapsNet
from torchcaps.train.train_state import build_model
from torchcaps.utils.random import permutation


@pytest.fixture(scope="module")
def model_and_test():
    recipe = tiny(data={"test": 240})
    test = recipe.data.load().test
    model = build_model(recipe, test.spec).eval()
    assert isinstance(model, CapsNet)
    return model, test


def ranks(x: list[float]) -> list[float]:
    """1 + how many are smaller, equals sharing their mean."""
    return [1 + sum(b < a for b in x) + (sum(b == a for b in x) - 1) / 2 for a in x]


def rank_correlation(x: list[float], y: list[float]) -> float:
    r, s = ranks(x), ranks(y)
    mean = (len(x) + 1) / 2
    both = sum((a - mean) * (b - mean) for a, b in zip(r, s, strict=True))
    scale = math.sqrt(sum((a - mean) ** 2 for a in r) * sum((b - mean) ** 2 for b in s))
    return both / scale if scale else 0.0


def test_equals_loops_over_classes_and_dimensions(model_and_test):
    model, test = model_and_test
    found = f.factor_correlation(model, test)
    assert list(found) == ["x", "y", "rotation", "scale", "shear", "thickness"]
    with torch.no_grad():
        pose = model(test.model_input()).classes.pose.tolist()
    for name in ("x", "thickness"):
        values, factor = test.factors[name].tolist(), found[name]
        for j, kept in factor.by_class.items():
            rows = [n for n, label in enumerate(test.labels.tolist()) if label == j]
            mixed = [rows[n] for n in permutation(0, 0, len(rows)).tolist()]
            first, second = mixed[: len(rows) // 2], mixed[len(rows) // 2 :]
            tried = [
                rank_correlation([pose[n][j][k] for n in first], [values[n] for n in first])
                for k in range(model.config.dimension)
            ]
            k = factor.dimensions[j]
            assert abs(tried[k]) == pytest.approx(max(map(abs, tried)))
            other = rank_correlation([pose[n][j][k] for n in second], [values[n] for n in second])
            assert kept == pytest.approx(math.copysign(1, tried[k]) * other)
        assert factor.rho == pytest.approx(sum(factor.by_class.values()) / len(factor.by_class))


def labeled(n: int, **factors: torch.Tensor) -> Dataset:
    """Black images of two classes in turn, whose factors are what matters."""
    return Dataset(torch.zeros(n, 1, 8, 8, dtype=torch.uint8), torch.arange(n) % 2, 3, factors)


def test_finds_the_dimension_and_the_sign_of_each_class():
    n, draw = 80, torch.Generator().manual_seed(0)
    data = labeled(n, size=torch.rand(n, generator=draw))
    codes = torch.randn(n, 16, generator=draw)
    codes[0::2, 5] = data.factors["size"][0::2].exp()  # rises with it
    codes[1::2, 11] = -(data.factors["size"][1::2] ** 3)  # falls with it
    found = f.factor_tracking(codes, data)["size"]
    assert found.dimensions == {0: 5, 1: 11}  # class 2 has no images
    assert found.by_class == {0: pytest.approx(1.0), 1: pytest.approx(1.0)} and found.rho == pytest.approx(1.0)


def test_the_best_of_many_codes_that_know_nothing_is_about_nothing():
    rhos = []
    for seed in range(30):
        draw = torch.Generator().manual_seed(seed)
        data = labeled(64, size=torch.rand(64, generator=draw))
        rhos.append(f.factor_tracking(torch.randn(64, 16, generator=draw), data)["size"].rho)
    assert abs(sum(rhos) / len(rhos)) < 0.08 and min(rhos) < 0 < max(rhos)


def test_an_angle_of_a_whole_turn_is_tracked_by_its_sine_or_cosine():
    n = 200
    azimuth = torch.arange(n) // 2 % 18 * 2  # smallNORB's, in tens of degrees
    codes = torch.stack([(azimuth.double() * math.pi / 18).cos().round(decimals=6), torch.rand(n).double()], dim=1)
    data = labeled(n, azimuth=azimuth, lighting=torch.arange(n) % 5)
    found = f.factor_tracking(codes, data)
    assert list(found) == ["azimuth"] and found["azimuth"].rho == pytest.approx(1.0)
    narrow = labeled(n, azimuth=azimuth % 17)  # at most half a turn: as it is
    assert f.factor_tracking(torch.stack([-(azimuth % 17).double()], 1), narrow)["azimuth"].rho == pytest.approx(1.0)


def test_controls_are_measured_alike_and_the_same_again(model_and_test):
    model, test = model_and_test
    torch.manual_seed(1)
    dimension = model.config.dimension
    controls = f.factor_controls(test, dimension, seed=4)
    assert tuple(controls) == f.PIXEL_CONTROLS and controls == f.factor_controls(test, dimension, seed=4)
    assert controls != f.factor_controls(test, dimension, seed=5)
    for factors in controls.values():
        numbers = f.factor_metrics(factors)
        each = [numbers[f"factor_correlation_{name}"] for name in test.factors]
        assert numbers["factor_correlation"] == pytest.approx(sum(each) / 6) and all(-1 <= rho <= 1 for rho in each)
        assert all(type(value) is float for value in numbers.values())
        assert all(0 <= k < model.config.dimension for one in factors.values() for k in one.dimensions.values())
    assert controls["pixel components"]["x"].rho > 0.5  # the place is the first thing that moves pixels


def test_components_are_those_of_the_class(model_and_test):
    _, test = model_and_test
    codes = f._components(test, 4)
    for j in range(10):
        rows = (test.labels == j).nonzero().flatten()
        chosen = rows[permutation(0, 0, len(rows))[: len(rows) // 2]]
        x = test.model_input(chosen).flatten(1).double()
        covariance = (x - x.mean(0)).T @ (x - x.mean(0))
        largest = torch.linalg.eigvalsh(covariance).flip(0)[:4]
        torch.testing.assert_close(codes[chosen].double().square().sum(0), largest, rtol=1e-4, atol=1e-4)


def test_data_that_cannot_be_measured_get_one_line(model_and_test):
    model, test = model_and_test
    for data, words in [
        (replace(test, labels=torch.stack([test.labels, test.labels], 1)), "one label an image"),
        (replace(test, factors={"instance": test.labels}), "no factors"),
        (labeled(6, x=torch.rand(6)), "no class has 8"),
    ]:
        for measure in (partial(f.factor_correlation, model), partial(f.factor_controls, dimension=4)):
            with pytest.raises(DataError, match=words) as caught:
                measure(data)
            assert "\n" not in str(caught.value)
