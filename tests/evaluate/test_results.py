from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest
import torch

from support.tiny_recipe import tiny
from torchcaps.data import AffnistConfig, Splits
from torchcaps.errors import DataError, RecipeError
from torchcaps.evaluate import Result, class_scores, classification, read_result, write_result
from torchcaps.evaluate.classification import classifier_metrics, nearest_mean_metrics
from torchcaps.evaluate.results import gather
from torchcaps.models import Model
from torchcaps.systems import SYSTEMS, evaluate_runs
from torchcaps.systems.base import EvaluationOptions
from torchcaps.systems.report import html_report, report_tables, rows_of, text_table
from torchcaps.train import TrainedRun, train
from torchcaps.train.train_state import build_model
from torchcaps.types import ImageSpec

CAPSNET = SYSTEMS["capsnet"]


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
    page = html_report("<t>", ["a & b"], report_tables(some()), [("c <i>", b"png")])
    assert "&lt;t&gt;" in page and "a &amp; b" in page and "c &lt;i&gt;" in page
    assert "data:image/png;base64,cG5n" in page
    assert "<script" not in page and "http" not in page


def test_tables_of_a_report_are_narrow_rounded_and_mark_the_best():
    names = ["test_error", "knn", "purity", "cka", "argmax_nmi", "linear_probe", "frechet", "capsules_used"]
    metrics = {name: [0.5 if name != "frechet" else 41.23456] for name in names}
    controls = {"better": {**metrics, "test_error": [0.25], "purity": [0.9]}, "real images": {"purity": [1.0]}}
    first, second = report_tables(some(seeds=[0], metrics=metrics, controls=controls, paper={"test_error": 0.01}))
    assert [len(row) for row in first.rows] == [7] * 5 and [row[0] for row in second.rows] == ["", "r", "better"]
    assert first.rows[2][1:4] == ["25.00", "0.500", "0.900"] and second.rows[1][1:] == ["41.2", "0"]
    # Lower errors, higher purity; neither the paper nor real images compete, and CKA only describes
    assert {(2, 1), (2, 3)} <= first.best and not {(1, 1), (4, 1), (3, 3), (1, 4)} & first.best
    assert "<td><b>25.00</b></td>" in html_report("t", [], [first, second], [])


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
    assert nearest_mean_metrics(tiny(), splits)["test_error"] == pytest.approx(wrong / len(splits.test))


def test_untrained_is_about_chance():
    recipe = tiny()
    splits = recipe.data.load()
    untrained = CAPSNET.measure(build_model(recipe, splits.train.spec), recipe, splits, EvaluationOptions())
    assert untrained["test_error"] > 0.6


def test_what_is_asked_depends_on_the_data():
    """Pairs of labels, moved digits, known factors: each has its own names."""
    splits = tiny(data={"train": 120, "test": 120}).data.load()
    model = build_model(tiny(), splits.train.spec)
    run = TrainedRun(model, tiny(), 0, 0.0)
    options = EvaluationOptions()
    names = {"test_error", "calibration_error"}
    assert names | {"factor_correlation"} < CAPSNET.measure(model, tiny(), splits, options).keys()
    assert set(CAPSNET.measure_controls([run], splits, options)) == set(CAPSNET.controls)
    few = tiny(data={"test": 7}).data.load()
    assert set(CAPSNET.measure(model, tiny(), few, options)) == names
    assert set(CAPSNET.measure_controls([run], few, options)) == {"untrained", "nearest mean"}


def test_pairs_of_labels_are_asked_for_both():
    splits = tiny().data.load()
    paired = [replace(data, labels=torch.stack([data.labels, (data.labels + 1) % 10], 1)) for data in splits[:2]]
    both = Splits(*paired, validation=paired[0])
    found = classifier_metrics(Knows(), tiny(), both)
    assert set(found) == {"multimnist_error", "digit_error", "threshold_error"}
    assert found["multimnist_error"] >= found["digit_error"] > 0
    assert set(nearest_mean_metrics(tiny(), both)) == set(found)


def test_moved_digits_have_an_accuracy_beside_that_of_validation():
    splits = tiny().data.load()
    recipe = replace(tiny(), data=AffnistConfig())
    found = classifier_metrics(Knows(), recipe, splits._replace(validation=splits.train))
    test, held = (classification(Knows(), data)["test_error"] for data in (splits.test, splits.train))
    assert found["affnist_accuracy"] == 1 - test and found["mnist_accuracy"] == pytest.approx(1 - held)
    assert "test_error" not in found and "affnist_accuracy" in nearest_mean_metrics(recipe, splits)


def test_the_papers_numbers_stand_below_ours():
    result = Result("one", {}, [0], {"test_error": [0.5]}, {}, {"test_error": 0.0025}, {}, {})
    assert rows_of(result)[-1] == ["in the paper", "0.25"]


def test_runs_of_several_seeds_beside_a_control(tmp_path):
    for seed in (0, 1):
        train(tiny(seed=seed, train={"epochs": 0.5}), tmp_path / f"s{seed}", quiet=True)
    other = tiny(name="other", model={"name": "cnn", "widths": [4], "hidden": [8]}, train={"epochs": 0.5})
    train(other, tmp_path / "cnn", quiet=True)
    result = evaluate_runs([tmp_path / "s0", tmp_path / "s1"], [tmp_path / "cnn"])
    assert result.seeds == [0, 1] and result.budget["steps"] == 5
    assert list(result.controls)[:3] == ["other", "untrained", "nearest mean"]
    assert all(len(v) == 2 for v in result.metrics.values())
    assert result.config["model"]["name"] == "capsnet"
    with pytest.raises(RecipeError, match="--control"):
        evaluate_runs([tmp_path / "s0", tmp_path / "cnn"])


def test_threads_are_those_of_training_not_of_evaluation(tmp_path):
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        train(tiny(train={"epochs": 0.5}), tmp_path / "run", quiet=True)
    finally:
        torch.set_num_threads(before)
    assert before != 2 and evaluate_runs([tmp_path / "run"]).budget["threads"] == 2


def test_a_row_of_the_table_is_of_one_setting(tmp_path):
    small = {"name": "cnn", "widths": [4], "hidden": [8]}
    train(tiny(train={"epochs": 0.5}), tmp_path / "run", quiet=True)
    train(tiny(model=small, train={"epochs": 0.5}), tmp_path / "same-name", quiet=True)
    with pytest.raises(RecipeError, match=r"both runs of .* train one of them under another \(--name\)"):
        evaluate_runs([tmp_path / "run"], [tmp_path / "same-name"])
    for name, epochs in (("one", 0.5), ("two", 1.0)):
        train(tiny(name="other", model=small, train={"epochs": epochs}), tmp_path / name, quiet=True)
    with pytest.raises(RecipeError, match="both runs of 'other'"):
        evaluate_runs([tmp_path / "run"], [tmp_path / "one", tmp_path / "two"])


def test_a_result_of_other_settings_is_not_replaced_without_a_word(tmp_path, caplog):
    first = some(config={"model": {"name": "cnn", "hidden": 4}, "seed": 0})
    write_result(tmp_path, first)
    write_result(tmp_path, replace(first, config={"model": {"name": "cnn", "hidden": 4}, "seed": 1}))
    assert caplog.messages == []
    write_result(tmp_path, replace(first, config={"model": {"name": "cnn", "hidden": 8}, "seed": 0}))
    (said,) = caplog.messages
    assert "model.hidden = 4, now 8" in said and "is replaced" in said
