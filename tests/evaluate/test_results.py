from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest
import torch

from tiny import tiny
from torchcaps.errors import DataError, RecipeError
from torchcaps.evaluate import Result, class_scores, classification, evaluate_runs, read_result, write_result
from torchcaps.evaluate.classification import nearest_mean, untrained
from torchcaps.evaluate.report import html_report, rows_of, text_table
from torchcaps.evaluate.results import gather
from torchcaps.models import Model
from torchcaps.train import train
from torchcaps.types import ImageSpec


def some(**change) -> Result:
    base = Result(
        "r", {"seed": 0}, [0, 1], {"test_error": [0.1, 0.3], "knn": [0.5, 0.5]}, {"control": {"test_error": [0.9]}},
        {}, {"steps": 3, "seconds": 1.5, "threads": 1, "parameters": 7}, {"torch": "2"},
    )  # fmt: skip
    return replace(base, **change)


def test_a_result_comes_back_as_it_was_written(tmp_path):
    path = write_result(tmp_path / "new" / "folder", some())
    assert path.name == "r.json" and read_result(path) == some()
    assert set(json.loads(path.read_text())) == {
        "recipe", "config", "seeds", "metrics", "controls", "paper", "budget", "versions",
    }  # fmt: skip


def test_other_files_are_refused_by_name(tmp_path):
    path = tmp_path / "x.json"
    for text in ("", "[1]", "{}", json.dumps({**asdict(some()), "more": 1})):
        path.write_text(text)
        with pytest.raises(DataError, match=r"x\.json"):
            read_result(path)
    with pytest.raises(DataError, match="2 values for 1 seeds"):
        some(seeds=[0])


def test_gather_turns_rows_into_lists():
    assert gather([{"a": 1, "b": 2.5}, {"a": 3, "b": 4}]) == {"a": [1.0, 3.0], "b": [2.5, 4.0]}
    assert gather([]) == {}


def test_rows_are_means_with_deviations_and_percent():
    rows = rows_of(some())
    assert rows[0] == ["", "test error (%)", "knn"]
    assert rows[1] == ["r", "20.00 ± 14.14", "0.5000 ± 0.0000"]
    assert rows[2] == ["control", "90.00", "-"]
    lines = text_table(rows).splitlines()
    assert len({len(line) for line in lines}) == 1 and lines[1].startswith("r ")


def test_the_page_is_self_contained_and_escapes():
    page = html_report("<t>", ["a & b"], rows_of(some()), [("c <i>", b"png")])
    assert "&lt;t&gt;" in page and "a &amp; b" in page and "c &lt;i&gt;" in page
    assert "data:image/png;base64,cG5n" in page
    assert "<script" not in page and "http" not in page


class Knows(Model):
    """Scores the class that the brightness of the first pixel names."""

    spec = ImageSpec(1, 16, 16, 10)

    def scores(self, images):
        return torch.nn.functional.one_hot((images[:, 0, 0, 0] * 255).round().long(), 10).float()


def test_classification_counts_errors():
    data = tiny().data.load().test
    told = data.images.clone()
    told[:, 0, 0, 0] = data.labels.to(torch.uint8)
    assert classification(Knows(), replace(data, images=told))["test_error"] == 0
    told[:10, 0, 0, 0] = ((data.labels[:10] + 1) % 10).to(torch.uint8)
    wrong = classification(Knows(), replace(data, images=told))
    assert wrong["test_error"] == pytest.approx(0.25)
    assert wrong["calibration_error"] == pytest.approx(0.25)
    assert torch.equal(class_scores(Knows(), data, batch=7), class_scores(Knows(), data, batch=1000))


def test_nearest_mean_by_loops():
    splits = tiny().data.load()
    means = {
        c: splits.train.images[splits.train.labels == c].double().mean(0)
        for c in range(10)
        if (splits.train.labels == c).any()
    }
    wrong = 0
    for image, label in zip(splits.test.images, splits.test.labels, strict=True):
        distance = {c: float(((image.double() - mean) ** 2).sum()) for c, mean in means.items()}
        wrong += min(distance, key=lambda c: distance[c]) != int(label)
    assert nearest_mean(splits)["test_error"] == pytest.approx(wrong / len(splits.test))


def test_untrained_is_about_chance():
    data = tiny().data.load().test
    assert untrained(tiny(), data)["test_error"] > 0.6


def test_runs_of_several_seeds_beside_a_control(tmp_path):
    for seed in (0, 1):
        train(tiny(seed=seed, train={"epochs": 0.5}), tmp_path / f"s{seed}", quiet=True)
    other = tiny(name="other", model={"name": "cnn", "widths": [4], "hidden": 8}, train={"epochs": 0.5})
    train(other, tmp_path / "cnn", quiet=True)
    result = evaluate_runs([tmp_path / "s0", tmp_path / "s1"], [tmp_path / "cnn"])
    assert result.seeds == [0, 1] and result.budget["steps"] == 5
    assert set(result.controls) == {"other", "untrained", "nearest mean"}
    assert all(len(v) == 2 for v in result.metrics.values())
    assert result.config["model"]["name"] == "capsnet"
    with pytest.raises(RecipeError, match="as a control"):
        evaluate_runs([tmp_path / "s0", tmp_path / "cnn"])
