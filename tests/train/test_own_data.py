"""`torchcaps.fit`: tensors, torch Datasets and loaders; validation, callbacks, resumption; and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torch.utils.data import Dataset as TorchDataset

import torchcaps
from support.small_models import SMALL, SPEC
from support.tiny_recipe import tiny
from torchcaps.cli import main
from torchcaps.data import GlyphsConfig
from torchcaps.errors import DataError, RecipeError, ShapeError, TorchcapsError, TrainingError
from torchcaps.train import load_run, own_data, train, validation
from torchcaps.train.journal import read_journal
from torchcaps.train.own_data import as_dataset, fit
from torchcaps.train.validation import final_images, final_score
from torchcaps.utils.mapped import is_mapped, map_file

SPLITS = GlyphsConfig(train=80, test=40, size=16).load()
IMAGES = SPLITS.train.images
LABELS = SPLITS.train.labels


class Pictures(TorchDataset):
    """Items in a form that torchvision has: a picture with its channels last, and a number."""

    classes = tuple("abcdefghij")

    def __init__(self, noise: bool = False) -> None:
        self.noise = noise

    def __len__(self) -> int:
        return len(IMAGES)

    def __getitem__(self, n: int) -> tuple[np.ndarray | torch.Tensor, int]:
        if self.noise:
            return IMAGES[n].float() / 255 * torch.rand(()), int(LABELS[n])
        return IMAGES[n, 0].numpy()[..., None], int(LABELS[n])


class Items(TorchDataset):
    """Eight items that are all the same."""

    def __init__(self, label: object, image: object = IMAGES[0]) -> None:
        self.item = (image, label)

    def __len__(self) -> int:
        return 8

    def __getitem__(self, n: int) -> tuple[object, object]:
        return self.item


class Stream(IterableDataset):
    """Single images in turn; how many there are cannot be asked."""

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        return iter(list(zip(IMAGES, LABELS, strict=True)))


def weights(model: torch.nn.Module) -> list[torch.Tensor]:
    return [value.clone() for value in model.state_dict().values()]


def same(a: torch.nn.Module, b: torch.nn.Module) -> bool:
    return all(torch.equal(x, y) for x, y in zip(weights(a), weights(b), strict=True))


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> torch.nn.Module:
    """What the recipe itself learns from the same images."""
    return train(tiny(), tmp_path_factory.mktemp("own") / "run", quiet=True).model


def test_tensors_datasets_and_splits_train_as_the_recipe_s_own_data_do(expected):
    floats = IMAGES.float() / 255
    for data in (SPLITS.train, SPLITS, (IMAGES, LABELS), (floats, LABELS), (floats.numpy()[:, 0], LABELS.numpy())):
        assert same(fit(tiny(), data, quiet=True).model, expected)
    for items in (TensorDataset(floats, LABELS), Pictures()):
        assert same(fit(tiny(), items, quiet=True).model, expected)


def test_a_run_on_tensors_is_resumed_exactly_and_on_others_refused(expected, tmp_path):
    class EnoughError(Exception):
        pass

    def stop(model: torch.nn.Module, step: int) -> None:
        if step >= 10:
            raise EnoughError

    with pytest.raises(EnoughError):
        fit(tiny(), (IMAGES, LABELS), folder=tmp_path, quiet=True, callback=stop)
    with pytest.raises(TrainingError, match="was started on other data"):
        fit(tiny(), (255 - IMAGES, LABELS), folder=tmp_path, resume=True, quiet=True)
    again = fit(tiny(), (IMAGES, LABELS), folder=tmp_path, resume=True, quiet=True)
    assert again.finished and same(again.model, expected) and same(load_run(tmp_path).model, expected)


def test_validation_and_a_metric_are_written_down_after_every_epoch(tmp_path):
    seen = []

    def count(model: torch.nn.Module, step: int) -> dict[str, float]:
        seen.append((step, model.training))
        return {"norm": float(sum(p.norm() for p in model.parameters()))}

    held_out = (SPLITS.test.images, SPLITS.test.labels)
    fit(tiny(), (IMAGES, LABELS), folder=tmp_path, validation=held_out, callback=count, quiet=True)
    checked = [entry for entry in read_journal(tmp_path / "journal.jsonl") if "norm" in entry]
    assert seen == [(10, False), (20, False)] and [entry["step"] for entry in checked] == [10, 20]
    assert all(0 <= entry["validation_accuracy"] <= 1 for entry in checked)


def test_a_callback_changes_nothing(expected):
    quiet = fit(tiny(), (IMAGES, LABELS), quiet=True, callback=lambda model, step: None)
    assert same(quiet.model, expected)


@pytest.mark.parametrize("kind", ["loader", "list", "function", "random items"])
def test_batches_of_others_are_trained_on_and_cannot_be_resumed(kind, tmp_path, caplog):
    loader = DataLoader(TensorDataset(IMAGES.float() / 255, LABELS), batch_size=16)
    data = {
        "loader": loader,
        "list": list(loader),
        "function": lambda: (batch for batch in loader),
        "random items": Pictures(noise=True),
    }[kind]
    recipe = tiny(train={"batch": 16, "epochs": 2.0})
    outcome = fit(recipe, data, folder=tmp_path, classes=10, quiet=True)
    assert outcome.finished and outcome.step == 10 and load_run(tmp_path).recipe.train.batch == 16
    assert [entry["epoch"] for entry in read_journal(tmp_path / "journal.jsonl")] == [0, 0, 1, 1, 1]
    with pytest.raises(TrainingError, match="cannot be resumed on batches of a loader"):
        fit(recipe, data, folder=tmp_path, classes=10, resume=True, quiet=True)
    assert any("differ each time" in text for text in caplog.messages) == (kind == "random items")


def test_a_model_is_trained_in_place_from_the_weights_it_has(tmp_path):
    model = torchcaps.create(tiny())
    before = weights(model)
    outcome = fit(model, (IMAGES, LABELS), folder=tmp_path, epochs=1, batch=40, lr=0.01, quiet=True)
    assert outcome.model is model and outcome.step == 2 and not model.training
    assert any(not torch.equal(a, b) for a, b in zip(before, weights(model), strict=True))
    assert same(load_run(tmp_path).model, model)
    still = fit(model, (IMAGES, LABELS), epochs=1, batch=40, lr=1e-30, quiet=True)
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(weights(still.model), weights(model), strict=True))


def test_a_run_of_fit_predicts_but_has_no_data_to_evaluate(tmp_path, capsys):
    fit(tiny(), (IMAGES, LABELS), folder=tmp_path / "run", epochs=0.1, quiet=True)
    assert main(["evaluate", str(tmp_path / "run"), "--results", str(tmp_path)]) == 2
    text = capsys.readouterr().err
    assert "trained by torchcaps.fit on data of a Python program" in text and text.count("\n") == 1


@pytest.mark.parametrize(
    ("data", "text"),
    [
        ((IMAGES.float(), LABELS), r"floats in \[0, 1\], are wanted: divide by 255"),
        ((IMAGES.float() * float("nan"), LABELS), "from nan to nan"),
        ((IMAGES.float() / 255 - 0.5, LABELS), "leave out a normalization"),
        ((IMAGES.int(), LABELS), r"torch\.int32 came; bytes"),
        ((IMAGES.cfloat(), LABELS), r"torch\.complex64 came; bytes"),
        ((IMAGES.numpy().astype(np.uint16), LABELS), r"torch\.uint16 came; bytes"),
        ((IMAGES.float().to_sparse(), LABELS), "or a sparse one"),
        ((IMAGES.to("meta"), LABELS), "without values of its own"),
        ((IMAGES.numpy().astype(str), LABELS), "images: <U3 came; numbers are wanted"),
        (IMAGES, "without labels"),
        ((IMAGES, None), "without labels"),
        ((IMAGES, LABELS, LABELS), "without labels, or with something else"),
        ((IMAGES, ["cat"] * 80), "labels: list came; numbers are wanted"),
        ((IMAGES, LABELS * 10**6), "labels run from 0 to 9000000"),
        ("pictures", r"a str came; .*FolderConfig\('pictures'\)\.load\(\)"),
        ({"images": IMAGES}, "a dict came"),
        (Items("cat"), "item 0 of the Dataset has the label 'cat'; a whole class number"),
        (Items(None), "has the label None"),
        (Items(0.5), r"has the label 0\.5"),
        (Items(torch.eye(3)[0]), r"has the label tensor\(\[1\., 0\., 0\.\]\)"),
        (Items(0, image="a.png"), "item 0 of the Dataset: <U5 came"),
        (Stream(), r"an IterableDataset gives single images; .*DataLoader\(data"),
        ([(IMAGES[:8].float() - 99, LABELS[:8])], "the first batch: .* leave out a normalization"),
        ([(IMAGES[:8], ["cat"] * 8)], "labels of a batch: list came"),
        ((IMAGES.permute(0, 2, 3, 1), LABELS), r"channels last; use images\.permute\(0, 3, 1, 2\)"),
        ((IMAGES[:0], LABELS[:0]), "at least one image"),
        ((IMAGES, LABELS[:5]), r"whole class numbers \[80\], one for each image"),
        ((IMAGES, LABELS.float()), "labels are torch.float32"),
        ((IMAGES, LABELS - 1), "labels run from -1"),
        (TensorDataset(IMAGES), r"item 0 of the Dataset is a tuple; a pair"),
        ([], "the iterable gave no batch"),
        (iter([(IMAGES, LABELS)]), "an iterator ends after one pass"),
        (3, "a int came; tensors"),
        ([(IMAGES, LABELS, 0), 7], "a batch is a int; a pair"),
        ([(IMAGES[:8], LABELS[:8]), (IMAGES[:8, :, 1:], LABELS[:8])], r"\[b 1 16 16\] is wanted, as in the first"),
        ([(IMAGES[:8], LABELS[:8]), (IMAGES[:8], LABELS[:8] + 9)], "labels of a batch run from"),
        ([(IMAGES[:8], LABELS[:8].float())], "whole class numbers"),
    ],
)
def test_data_of_another_form_are_refused_in_one_line(data, text):
    with pytest.raises(DataError, match=text) as caught:
        fit(tiny(), data, classes=10, quiet=True)
    assert "\n" not in str(caught.value)


def test_what_else_does_not_fit_is_refused_in_one_line(tmp_path):
    with pytest.raises(DataError, match="how many classes a loader gives cannot be known"):
        fit(tiny(), [(IMAGES, LABELS)], quiet=True)
    with pytest.raises(RecipeError, match="fit got a Linear; a recipe, its name, or a model"):
        fit(torch.nn.Linear(2, 2), (IMAGES, LABELS))
    with pytest.raises(RecipeError, match="trained in stages"):
        fit("poe-quick", (IMAGES, LABELS), epochs=1)
    with pytest.raises(DataError, match=r"pass \d over the batches gave none"):
        used = iter([(IMAGES[:40], LABELS[:40]), (IMAGES[40:], LABELS[40:])] * 2)
        fit(tiny(), lambda: [batch for batch, _ in zip(used, range(2), strict=False)], classes=10, quiet=True)
    with pytest.raises(DataError, match="looks at all images before its first step"):
        fit("poe-quick", [(torch.zeros(8, 1, 20, 20), torch.zeros(8).long())], classes=2, quiet=True)
    assert as_dataset(Pictures()).names == Pictures.classes


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ({"classes": 0}, "classes = 0; a whole number from 1 to 10000"),
        ({"classes": 3.0}, r"classes = 3\.0; a whole number"),
        ({"classes": -1}, "classes = -1; a whole number"),
        ({"epochs": "three"}, "epochs = 'three'; a number above 0"),
        ({"lr": -1}, "lr = -1; a number above 0"),
        ({"resume": True}, "resume=True needs the folder of the run"),
        ({"resume": "yes"}, "resume = 'yes'; True, False or 'auto'"),
        ({"callback": 3}, "callback is a int; a function"),
        ({"callback": lambda model, step: 0.5}, r"the callback returned 0\.5; numbers by name, or None"),
        ({"callback": lambda model, step: {"x": "good"}}, "numbers by name"),
        ({"callback": lambda model, step: {"loss": 1}}, "returned 'loss', which the journal has already"),
        ({"callback": lambda model, step: {"step": 1}}, "returned 'step', which the journal has already"),
        (
            {"validation": (IMAGES[:2, :, 1:], LABELS[:2])},
            r"images to validate by are \[1, 15, 16\]",
        ),
        ({"validation": (IMAGES[:2], LABELS[:2] * 0 + 10)}, "labels to validate by go up to 10, and there are 10"),
        ({"model": torchcaps.create(tiny()), "data": (IMAGES[:, :, 1:], LABELS)}, r"this model takes \[1, 16, 16\]"),
    ],
)
def test_other_arguments_are_refused_in_one_line(words, text):
    given = {"model": tiny(), "data": (IMAGES, LABELS), "epochs": 1, "batch": 40, "quiet": True, **words}
    with pytest.raises(TorchcapsError, match=text) as caught:
        fit(**given)
    assert "\n" not in str(caught.value)


def test_labels_may_be_a_list_and_batches_of_a_stream_are_counted(expected):
    assert same(fit(tiny(), (IMAGES, LABELS.tolist()), quiet=True).model, expected)
    outcome = fit(tiny(), DataLoader(Stream(), batch_size=40), classes=10, epochs=2, quiet=True)
    assert outcome.finished and outcome.step == 4


@pytest.mark.parametrize("name", SMALL)
def test_every_model_has_a_loss_for_a_loop_of_one_s_own(name):
    model = SMALL[name].build(SPEC)
    images = torch.rand(3, *SPEC[:3])
    if len(model.stages()) > 1:
        with pytest.raises(RecipeError, match="trained in stages"):
            model.loss(images)
        return
    loss = model.loss(images, torch.tensor([0, 1, 0]))
    loss.backward()
    assert loss.ndim == 0 and any(p.grad is not None and bool(p.grad.any()) for p in model.parameters())
    with pytest.raises(ShapeError, match="one label each is wanted"):
        model.loss(images, torch.tensor([0, 1]))


def test_test_images_of_a_mapped_file_stay_there_and_few_are_floats_at_a_time(monkeypatch, tmp_path):
    (tmp_path / "images").write_bytes(SPLITS.test.images.numpy().tobytes())
    test = replace(SPLITS.test, images=map_file(tmp_path / "images", SPLITS.test.images.shape))
    monkeypatch.setattr(validation, "_MOST_TESTED", 15)
    assert len(final_images(SPLITS.test)) == 15 and is_mapped(final_images(test).images)
    # The same images are looked at, so many at a time that their floats take little memory
    model = torchcaps.create(tiny()).eval()
    scores = [final_score(model, final_images(data), torch.device("cpu")) for data in (SPLITS.test, test)]
    assert scores[0] == scores[1] and scores[0].images == 15
    sizes = []
    monkeypatch.setattr(validation, "_BATCH_BYTES", 4 * 4 * 16 * 16)
    monkeypatch.setattr(type(model), "scores", lambda _, images: sizes.append(len(images)) or images[:, 0, 0, :10])
    final_score(model, test, torch.device("cpu"))
    assert sizes == [4, 4, 4, 3]


def test_a_large_dataset_gives_its_pages_back_while_it_is_read(monkeypatch, tmp_path):
    released = []
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("torchcaps.train.own_data.IN_MEMORY", 0)
    monkeypatch.setattr("torchcaps.train.own_data.RELEASE", 4 * 64)
    monkeypatch.setattr("torchcaps.train.own_data.release", lambda images: released.append(len(images)))
    images = torch.randint(0, 256, (10, 1, 8, 8), dtype=torch.uint8)
    stored, _ = own_data._read_items(TensorDataset(images, torch.arange(10) % 2))
    assert stored.equal(images) and released == [10, 10]
