"""Attacks equal a loop-only reading and foolbox, keep to their ball, and tell where gradients are masked."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from support.tiny_recipe import tiny
from torchcaps.data import Dataset, Preprocess
from torchcaps.errors import DataError, RecipeError, ShapeError
from torchcaps.evaluate.attacks import (
    GradientMasking,
    attack_curves,
    bim,
    cross_entropy,
    curve_plot,
    curves,
    fgsm,
    find_masking,
    gradient,
    logits_of,
    margin,
    pgd,
    square,
    training_loss,
)
from torchcaps.evaluate.attacks.gradients import ball, random_start
from torchcaps.evaluate.attacks.square import side_at
from torchcaps.evaluate.classification import classification
from torchcaps.losses import cross_entropy_loss, margin_loss
from torchcaps.math.pixels import standardize
from torchcaps.models import CNNConfig, MatrixConfig, MatrixInit, Model
from torchcaps.train.train_state import build_model
from torchcaps.types import ImageSpec

SPEC = ImageSpec(2, 3, 4, 3)


class Linear(Model):
    """Logits f = W x, so that the gradient of cross-entropy is Wᵀ (p - y)."""

    def __init__(self, spec: ImageSpec = SPEC, seed: int = 0) -> None:
        super().__init__()
        self.spec = spec
        generator = torch.Generator().manual_seed(seed)
        size = spec.channels * spec.height * spec.width
        self.W = nn.Parameter(torch.randn(spec.classes, size, generator=generator, dtype=torch.float64))

    def forward(self, images):
        return (images.flatten(1)[:, None].to(self.W) * self.W).sum(-1)  # no product that depends on the batch

    def scores(self, images):
        return self(images).softmax(-1)


class Bright(Model):
    """Two capsules that tell dark from bright images, surely: their margin loss is flat away from the border."""

    spec = ImageSpec(1, 6, 6, 2)

    def scores(self, images):
        on = (20 * (images.flatten(1).sum(-1) / 36 - 0.5)).sigmoid()
        return torch.stack([1 - on, on], -1)

    def objective(self, batch, step):
        return {"loss": margin_loss(self.scores(batch.images), batch.labels)}


def some(count: int = 5, spec: ImageSpec = SPEC, seed: int = 1):
    """Images with values from 0 to 1, both ends met, and labels."""
    generator = torch.Generator().manual_seed(seed)
    images = torch.rand(count, *spec[:3], generator=generator, dtype=torch.float64)
    images[:, 0, 0, 0], images[:, 0, 0, 1] = 0, 1
    return images, torch.randint(spec.classes, (count,), generator=generator)


def dark(count: int = 10, **more) -> Dataset:
    """Dark images of class 0, all different."""
    levels = torch.arange(count, dtype=torch.uint8) + 45
    return Dataset(levels.view(-1, 1, 1, 1).repeat(1, 1, 6, 6), torch.zeros(count, dtype=torch.long), 2, **more)


def read(W, images, labels, epsilon: float, steps: int, stride: float, sign: int):
    """FGSM and BIM as written, pixel by pixel."""
    made = images.clone()
    for n, (image, label) in enumerate(zip(images, labels, strict=True)):
        start = image.flatten().tolist()
        x = list(start)
        for _ in range(steps):
            f = [sum(float(w) * v for w, v in zip(row, x, strict=True)) for row in W]
            total = sum(math.exp(v) for v in f)
            away = [math.exp(v) / total - (j == int(label)) for j, v in enumerate(f)]
            for m in range(len(x)):
                slope = sum(a * float(row[m]) for a, row in zip(away, W, strict=True))
                moved = x[m] + sign * stride * epsilon * ((slope > 0) - (slope < 0))
                x[m] = min(1.0, max(0.0, min(start[m] + epsilon, max(start[m] - epsilon, moved))))
        made[n] = torch.tensor(x).view_as(image)
    return made


@pytest.mark.parametrize("targeted", [False, True])
def test_fgsm_and_bim_by_loops(targeted):
    model, (images, labels) = Linear(), some()
    loss, sign = cross_entropy(logits_of(model)), -1 if targeted else 1
    by_loops = read(model.W.detach(), images, labels, 0.2, 1, 1.0, sign)
    torch.testing.assert_close(fgsm(loss, images, labels, 0.2, targeted=targeted), by_loops, atol=1e-7, rtol=0)
    by_loops = read(model.W.detach(), images, labels, 0.3, 7, 0.25, sign)
    made = bim(loss, images, labels, 0.3, steps=7, stride=0.25, targeted=targeted)
    torch.testing.assert_close(made, by_loops, atol=1e-7, rtol=0)


class TestFoolbox:
    """The same images as foolbox's, to 1e-6."""

    EPSILON = 0.15

    @pytest.fixture
    def both(self):
        foolbox = pytest.importorskip("foolbox", reason="foolbox, of the extra dev, is not installed")
        torch.manual_seed(0)
        net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Tanh(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(100, 5))
        net.double().eval()
        images, labels = some(6, ImageSpec(1, 12, 12, 5))
        return foolbox, foolbox.PyTorchModel(net, bounds=(0, 1), device="cpu"), cross_entropy(net), images, labels

    def agree(self, ours, model, attack, images, criterion):
        theirs = attack.run(model, images, criterion, epsilon=self.EPSILON)
        assert 0.1 < (theirs - images).abs().max() <= self.EPSILON + 1e-9
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=0)

    def test_fgsm(self, both):
        foolbox, model, loss, images, labels = both
        attack = foolbox.attacks.LinfFastGradientAttack()
        self.agree(fgsm(loss, images, labels, self.EPSILON), model, attack, images, foolbox.Misclassification(labels))

    def test_targeted(self, both):
        """Their FGSM refuses targets, so it is their BIM with one whole step."""
        foolbox, model, loss, images, labels = both
        targets = (labels + 2) % 5
        attack = foolbox.attacks.LinfBasicIterativeAttack(rel_stepsize=1.0, steps=1)
        criterion = foolbox.criteria.TargetedMisclassification(targets)
        self.agree(fgsm(loss, images, targets, self.EPSILON, targeted=True), model, attack, images, criterion)
        attack = foolbox.attacks.LinfBasicIterativeAttack()
        self.agree(bim(loss, images, targets, self.EPSILON, targeted=True), model, attack, images, criterion)

    def test_bim(self, both):
        foolbox, model, loss, images, labels = both
        attack = foolbox.attacks.LinfBasicIterativeAttack()
        self.agree(bim(loss, images, labels, self.EPSILON), model, attack, images, foolbox.Misclassification(labels))

    def test_pgd_without_its_random_start(self, both):
        foolbox, model, loss, images, labels = both
        attack = foolbox.attacks.LinfProjectedGradientDescentAttack(random_start=False)
        ours = bim(loss, images, labels, self.EPSILON, steps=40, stride=1 / 30)
        self.agree(ours, model, attack, images, foolbox.Misclassification(labels))

    def test_pgd_from_a_random_start(self, both, monkeypatch):
        foolbox, model, loss, images, labels = both
        attack = foolbox.attacks.LinfProjectedGradientDescentAttack()
        start = random_start(images, self.EPSILON, seed=3)
        monkeypatch.setattr(attack, "get_random_start", lambda x0, epsilon: type(x0)(start))
        ours = pgd(loss, images, labels, self.EPSILON, seed=3)
        self.agree(ours, model, attack, images, foolbox.Misclassification(labels))


def made_by_all(model, images, labels, epsilon: float):
    loss, logits = cross_entropy(logits_of(model)), logits_of(model)
    return {
        "fgsm": fgsm(loss, images, labels, epsilon),
        "targeted": fgsm(loss, images, (labels + 1) % 3, epsilon, targeted=True),
        "bim": bim(loss, images, labels, epsilon),
        "pgd": pgd(loss, images, labels, epsilon, seed=5),
        "square": square(logits, images, labels, epsilon, queries=20),
        "start": random_start(images, epsilon, 2),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("epsilon", [0.1, 0.3, 1 / 3, 1.0, 1e-3])
def test_no_pixel_leaves_the_ball_nor_the_range(dtype, epsilon):
    images, labels = some(40)
    images = images.to(dtype)
    for name, made in made_by_all(Linear(), images, labels, epsilon).items():
        assert made.dtype == dtype and made.min() >= 0 and made.max() <= 1, name
        moved = (made.double() - images.double()).abs().max()
        assert 0 < moved <= epsilon, name


def test_an_epsilon_of_zero_changes_nothing():
    images, labels = some()
    for name, made in made_by_all(Linear(), images, labels, 0.0).items():
        assert torch.equal(made, images), name


def test_where_there_is_no_gradient_nothing_moves():
    images, labels = some()
    assert not gradient(lambda x, t: torch.ones(len(x)), images, labels).any()
    assert not gradient(lambda x, t: (x * 0).sqrt().flatten(1).sum(1), images, labels).any()  # NaN
    assert torch.equal(bim(cross_entropy(lambda x: torch.zeros(len(x), 3)), images, labels, 0.1), images)


def test_capsules_are_attacked_by_the_share_of_their_lengths():
    model, labels = Bright(), torch.tensor([0, 1, 1])
    images = torch.rand(3, 1, 6, 6, generator=torch.Generator().manual_seed(0))
    loss = cross_entropy(logits_of(model))(images, labels)
    expected = cross_entropy_loss(model.scores(images), labels, from_probabilities=True)
    torch.testing.assert_close(loss.mean(), expected, atol=0.01, rtol=0)
    shares = logits_of(model)(images).softmax(-1)
    torch.testing.assert_close(shares, model.scores(images), atol=1e-6, rtol=0)


def test_a_capsule_that_is_all_but_off_feels_which_way_is_on():
    class Off(Bright):
        def scores(self, images):
            return super().scores(images) * torch.tensor([1.0, 1e-12])

    images = dark().model_input()
    g = gradient(cross_entropy(logits_of(Off())), images, torch.ones(10, dtype=torch.long))
    assert bool((g < -0.1).all())  # d log a_1 / dx = -20 / 36 (1 - a_1)


def test_the_own_loss_is_flat_where_the_margin_is_kept():
    data = dark()
    images = data.model_input()
    own, usual = training_loss(Bright()), cross_entropy(logits_of(Bright()))
    torch.testing.assert_close(own(images, data.labels), torch.zeros(10))
    assert not gradient(own, images, data.labels).any()
    assert gradient(usual, images, data.labels).all()


@pytest.mark.parametrize("build", ["capsnet", "matrix"])
def test_capsule_networks_are_left_as_they_were(build):
    recipe = tiny()
    spec = ImageSpec(1, 20, 20, 4)
    if build == "capsnet":
        model = build_model(recipe, spec)
    else:
        torch.manual_seed(0)
        model = MatrixConfig(sizes=(4, 2, 2, 2), init=MatrixInit(classes=0.3)).build(spec)
    model.train()
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 7.0)
    images = torch.randint(256, (6, 1, 20, 20), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    data = Dataset(images, torch.tensor([0, 1, 2, 3, 0, 1]), 4)
    found = attack_curves(model, data, ["fgsm", "bim", "square", "targeted"], [0, 0.2], queries=5)
    assert model.training and all((p.grad == 7).all() for p in model.parameters())
    assert found.images == 6 and found.zero_gradients["fgsm"] < 1 and found.gradient_size["fgsm"] > 0
    loss = cross_entropy(logits_of(model.eval()))
    assert bool(gradient(training_loss(model), data.model_input(), data.labels).any())
    made = fgsm(loss, data.model_input(), data.labels, 0.1)
    assert loss(made, data.labels).sum() > loss(data.model_input(), data.labels).sum()


def test_square_never_raises_the_margin_and_asks_no_more_than_it_may():
    model, (images, labels) = Linear(), some(30)
    asked = []

    def logits(x):
        asked.append(len(x))
        assert not x.requires_grad and not torch.is_grad_enabled()
        return model(x)

    before = margin(model(images), labels)
    made = {q: square(logits, images, labels, 0.2, queries=q, seed=4) for q in (1, 5, 40)}
    assert len(asked) <= 3 + 1 + 5 + 40 and max(asked) <= 30
    margins = {q: margin(model(x), labels) for q, x in made.items()}
    assert all((after <= before).all() for after in margins.values())
    assert margins[40].mean() < margins[5].mean() < before.mean()
    assert torch.equal(made[40][before < 0], images[before < 0]) and bool((before < 0).any())
    fooled = (before >= 0) & (margins[40] < 0)
    assert bool(fooled.any())


def test_square_sets_pixels_to_the_edge_of_the_ball():
    images, labels = some(8)
    low, high = ball(images, 0.2)
    made = square(Linear(), images, labels, 0.2, queries=10)
    moved = (made != images).flatten(1).any(1)
    assert bool(moved.any()) and bool(((made == low) | (made == high))[moved].all())


def test_squares_shrink_as_the_authors_have_it():
    table = {0: 1, 10: 1, 11: 2, 50: 2, 51: 4, 201: 8, 501: 16, 1001: 32, 2001: 64, 4001: 128, 6001: 256, 8001: 512}
    for query, parts in table.items():
        assert side_at(query, 10_000, 0.8, (28, 28)) == max(1, round((0.8 / parts * 784) ** 0.5)), query
    assert side_at(1, 100, 0.8, (28, 28)) == side_at(100, 10_000, 0.8, (28, 28))
    assert side_at(0, 10, 1.0, (4, 40)) == 4


def test_margin_by_loops():
    logits, labels = torch.randn(6, 4, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 2, 3, 1, 1])
    expected = [row[t] - max(v for j, v in enumerate(row) if j != t) for row, t in zip(logits, labels, strict=True)]
    torch.testing.assert_close(margin(logits, labels), torch.stack(expected))


def test_random_attacks_depend_on_the_seed_and_the_row_alone():
    model, (images, labels) = Linear(), some(9)
    loss, rows, part = cross_entropy(model), torch.arange(9) + 100, [7, 2]
    for attack in (
        lambda *s, **k: pgd(loss, *s, 0.2, steps=3, **k),
        lambda *s, **k: square(model, *s, 0.2, queries=9, **k),
    ):
        whole = attack(images, labels, seed=1, rows=rows)
        assert torch.equal(whole, attack(images, labels, seed=1, rows=rows))
        assert torch.equal(whole[part], attack(images[part], labels[part], seed=1, rows=rows[part]))
        assert not torch.equal(whole, attack(images, labels, seed=2, rows=rows))


def test_wrong_input_is_refused():
    model, (images, labels) = Linear(), some()
    loss = cross_entropy(model)
    for epsilon in (-0.1, 1.5, math.nan):
        with pytest.raises(RecipeError, match="0 to 1 is wanted"):
            fgsm(loss, images, labels, epsilon)
    with pytest.raises(DataError, match=r"outside \[0, 1\]"):
        bim(loss, images * 2, labels, 0.1)
    with pytest.raises(ShapeError, match=r"torch.uint8 \[5, 2, 3, 4\]"):
        square(model, images.byte(), labels, 0.1)
    with pytest.raises(ShapeError, match="one number each"):
        pgd(loss, images, labels, 0.1, rows=torch.arange(3))


def linear_data(count: int = 25, **more) -> Dataset:
    images = torch.randint(256, (count, 2, 3, 4), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    labels = Linear()(images.double() / 255).argmax(1)
    labels[:3] = (labels[:3] + 1) % 3
    return Dataset(images, labels, 3, **more)


def test_curves_count_what_the_attacks_leave(monkeypatch):
    model, source, data = Linear(), Linear(seed=9), linear_data()
    epsilons = (0.3, 0.0, 0.1)
    found = attack_curves(model, data, epsilons=epsilons, source=source, queries=20, seed=3)
    assert found.images == 25 and list(found.attack_accuracy) == ["fgsm", "bim", "pgd", "square", "transfer"]
    assert all(list(curve) == ["0", "0.1", "0.3"] for curve in found.attack_accuracy.values())
    assert {curve["0"] for curve in found.attack_accuracy.values()} == {22 / 25}
    x, t = data.model_input(), data.labels
    for e in (0.1, 0.3):
        for name, maker in (("fgsm", model), ("transfer", source)):
            right = (model(fgsm(cross_entropy(maker), x, t, e)).argmax(1) == t).float().mean()
            assert found.attack_accuracy[name][f"{e:g}"] == pytest.approx(float(right))
    assert found.attack_accuracy["fgsm"]["0.3"] < found.attack_accuracy["transfer"]["0.3"]
    assert found.zero_gradients == found.zero_values == dict.fromkeys(["fgsm", "bim", "pgd", "targeted"], 0.0)
    monkeypatch.setattr(curves, "_BATCH", 4)
    again = attack_curves(model, data, epsilons=epsilons, source=source, queries=20, seed=3)
    assert {**vars(again), "gradient_size": 0, "seconds": 0} == {**vars(found), "gradient_size": 0, "seconds": 0}
    assert again.gradient_size == pytest.approx(found.gradient_size)


def test_success_towards_a_class_by_loops():
    model, data = Linear(), linear_data()
    found = attack_curves(model, data, ["targeted"], [0, 0.2]).attack_success["targeted"]
    for e, value in found.items():
        rates = []
        for j in range(3):
            others = [n for n in range(25) if data.labels[n] != j]
            taken = 0
            for n in others:
                made = fgsm(
                    cross_entropy(model), data.model_input(slice(n, n + 1)), torch.tensor([j]), float(e), targeted=True
                )
                taken += int(model(made).argmax()) == j
            rates.append(taken / len(others))
        assert value == pytest.approx(sum(rates) / 3)
    assert found["0.2"] > found["0"] > 0


def test_standardized_sets_are_attacked_in_pixels():
    spec = ImageSpec(2, 3, 3, 3)
    model, data = Linear(spec), replace(linear_data(), preprocess=Preprocess(3, standardize=True))
    found = attack_curves(model, data, ["fgsm"], [0, 0.1]).attack_accuracy["fgsm"]
    assert found["0"] == pytest.approx(1 - classification(model, data)["test_error"])
    pixels = data.cropped.float() / 255
    made = fgsm(cross_entropy(lambda x: model(standardize(x))), pixels, data.labels, 0.1)
    assert found["0.1"] == pytest.approx(float((model(standardize(made)).argmax(1) == data.labels).float().mean()))


def test_what_square_has_fooled_stays_fooled():
    model, data = Linear(), linear_data(60)
    curve = attack_curves(model, data, ["square"], [0.02, 0.05, 0.1, 0.2, 0.4], queries=3).attack_accuracy["square"]
    assert list(curve.values()) == sorted(curve.values(), reverse=True) and curve["0.4"] < curve["0.02"]


def test_the_seed_picks_images_that_exist():
    model, data = Linear(), linear_data()
    values = {
        attack_curves(model, data, ["fgsm"], [0], images=5, seed=s).attack_accuracy["fgsm"]["0"] for s in range(6)
    }
    assert len(values) > 1
    assert attack_curves(model, data, ["fgsm"], [0], images=10_000).images == 25


def test_masked_gradients_are_flagged():
    """The flat margin loss hides the gradient: FGSM moves nothing, while questions alone mislead the model."""
    data = dark()
    by_own = attack_curves(Bright(), data, ["fgsm", "pgd", "square"], [0, 0.6], loss="own", queries=60)
    assert by_own.attack_accuracy["fgsm"] == {"0": 1.0, "0.6": 1.0} and by_own.zero_gradients["fgsm"] == 1.0
    assert by_own.attack_accuracy["square"] == {"0": 1.0, "0.6": 0.0}
    assert list(find_masking(by_own.attack_accuracy)) == ["0.6"]
    usual = attack_curves(Bright(), data, ["fgsm", "square"], [0, 0.6], queries=60)
    assert usual.attack_accuracy["fgsm"]["0.6"] == 0 and usual.zero_gradients["fgsm"] == 0
    assert find_masking(usual.attack_accuracy) == {}


def test_masking_compares_with_the_best_gradient_attack_within_the_ball():
    accuracy = {
        "fgsm": {"0": 0.9, "0.1": 0.5, "0.2": 0.7, "0.3": 0.7},
        "bim": {"0": 0.9, "0.1": 0.6, "0.2": 0.6, "0.3": 0.6},
        "square": {"0": 0.9, "0.1": 0.8, "0.2": 0.55, "0.3": 0.4},
        "transfer": {"0": 0.9, "0.1": 0.8, "0.2": 0.6, "0.3": 0.1},
    }
    assert find_masking(accuracy) == {"0.3": GradientMasking("transfer", 0.1, "fgsm", 0.5)}
    assert find_masking({"square": accuracy["square"]}) == find_masking({"fgsm": accuracy["fgsm"]}) == {}


class Blind(Model):
    """No classifier."""

    spec = ImageSpec(2, 3, 4, 3)


def test_curves_of_the_wrong_things_are_refused():
    model, data = Linear(), linear_data()
    pairs = replace(data, labels=torch.stack([data.labels, (data.labels + 1) % 3], -1))
    wrong = [
        (lambda: attack_curves(Blind(), data), "Blind is not a classifier"),
        (lambda: attack_curves(model, data, source=Blind()), "Blind is not a classifier"),
        (lambda: attack_curves(model, dark()), "take those it knows"),
        (lambda: attack_curves(model, pairs), "one label an image"),
        (lambda: attack_curves(model, data, ["fgms"]), "did you mean 'fgsm'"),
        (lambda: attack_curves(model, data, ["bim", "bim"]), "each once"),
        (lambda: attack_curves(model, data, []), "at least one"),
        (lambda: attack_curves(model, data, ["transfer"]), "give that as the source"),
        (lambda: attack_curves(model, data, epsilons=[0.1, 2]), "epsilon = 2"),
        (lambda: attack_curves(model, data, epsilons=[]), "at least one"),
        (lambda: attack_curves(model, data, epsilons=[0.1, 0.1]), "each once"),
        (lambda: attack_curves(model, data, images=0), "0 images"),
    ]
    for call, text in wrong:
        with pytest.raises((RecipeError, DataError), match=text):
            call()


def test_networks_without_capsules_give_their_own_logits():
    torch.manual_seed(0)
    model = CNNConfig(widths=(2,), hidden=(4,)).build(ImageSpec(1, 8, 8, 3)).eval()
    images = torch.rand(2, 1, 8, 8)
    assert torch.equal(logits_of(model)(images), model(images))


def test_the_picture_shows_every_model_and_rings_what_is_masked():
    data = dark()
    rows = {"own": attack_curves(Bright(), data, ["fgsm", "square"], [0, 0.6], loss="own", queries=60)}
    first = curve_plot(rows)
    assert first.startswith(b"\x89PNG\r\n\x1a\n") and first == curve_plot(rows)
    usual = attack_curves(Bright(), data, ["fgsm", "square"], [0, 0.6], queries=60)
    assert len({first, curve_plot({"own": usual}), curve_plot({**rows, "usual": usual})}) == 3
