"""What a small trained product of experts draws, against loops over its own encode and decode."""

from __future__ import annotations

import io
import itertools

import pytest
import torch

from torchcaps.data import Dataset
from torchcaps.errors import DataError, RecipeError, ShapeError
from torchcaps.evaluate.figures import pixels
from torchcaps.math.squash import squash
from torchcaps.models.poe import PoE, PoEConfig, pose_sampling
from torchcaps.systems import SYSTEMS
from torchcaps.systems.figure_context import FigureOptions, draw_figure
from torchcaps.systems.poe import generation as g
from torchcaps.systems.poe.figures import PoEFigureContext
from torchcaps.train import train
from torchcaps.train.recipe import recipe_of
from torchcaps.types import ImageSpec

SMALL = {
    "name": "poe", "capsules": 4, "dimension": 3, "child_dimension": 4,
    "autoencoder": {"channels": [8, 8], "kernel": 5}, "energy": {"ramp": 10, "loosen": 20},
}  # fmt: skip


FIGURES = SYSTEMS["poe"].figures
FROM_MODEL = ("samples", "pairs", "sweeps")
"""Figures that need no data."""


def picture(kind: str, model: PoE, options: FigureOptions, images: torch.Tensor | None = None) -> dict[str, bytes]:
    """Draw a figure from some images [b c h w] in [0, 1], each once, in a picked order."""

    def load() -> Dataset:
        assert images is not None, "this figure loads data"
        return Dataset((255 * images).round().byte(), torch.zeros(len(images)).long(), 10)

    return draw_figure(FIGURES, kind, PoEFigureContext(model, options, load))


def trained(folder, **energy) -> tuple[PoE, torch.Tensor]:
    """A model after some seconds of training, and eight test images."""
    recipe = recipe_of(
        {
            "name": "small-poe",
            "data": {"name": "glyphs", "train": 192, "test": 24, "size": 16},
            "model": {**SMALL, "energy": {**SMALL["energy"], **energy}},
            "train": {"epochs": 2.0, "batch": 32},
            "optimizer": {"lr": 0.01},
            "stages": {"capsules": {"optimizer": {"name": "SGD", "lr": 0.5}, "train": {"epochs": 4.0}}},
        }
    )
    model = train(recipe, folder, quiet=True).model.eval()
    assert isinstance(model, PoE)
    return model, recipe.data.load().test.images[:8].float() / 255


@pytest.fixture(scope="module")
def uniform(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("uniform") / "run")


@pytest.fixture(scope="module")
def routed(tmp_path_factory):
    routing = {"iterations": 3, "agreement": "cosine", "over": "children"}
    return trained(tmp_path_factory.mktemp("routed") / "run", routing=routing)


@pytest.mark.parametrize("domain", ["empirical", "mixture", "gaussian", "complete", "restricted"])
def test_samples_have_a_row_a_sample_and_a_column_a_capsule(uniform, domain):
    model, _ = uniform
    grid = g.capsule_samples(model, 3, domain, seed=5)
    assert grid.shape == (3, 4, 1, 16, 16)
    for j in range(4):
        assert torch.equal(grid[:, j], model.sample(j, 3, domain, seed=5))
    assert torch.equal(grid, g.capsule_samples(model, 3, domain, seed=5))
    assert not torch.equal(grid, g.capsule_samples(model, 3, domain, seed=6))
    assert all((grid[:, i] - grid[:, j]).abs().max() > 0.01 for i in range(4) for j in range(i))
    assert torch.equal(g.capsule_samples(model, 3, domain, 5, [2, 0]), grid[:, [2, 0]])


def pose_alone(model: PoE, capsule: int, n: int, seed: int) -> torch.Tensor:
    pose = torch.zeros(n, model.capsules, model.dimension)
    pose[:, capsule] = pose_sampling.sample_poses(model.decoder, capsule, n, "empirical", seed)
    return pose


def test_pairs_are_two_capsules_in_the_poses_they_have_alone(uniform):
    model, _ = uniform
    pairs = g.pair_samples(model, [3, 0, 1], n=2, seed=1)
    assert list(pairs) == [(3, 0), (3, 1), (0, 1)]
    for (i, j), images in pairs.items():
        assert images.shape == (2, 1, 16, 16)
        with torch.no_grad():  # both alone, added up: least squares shares nothing out
            both = sum(model.decoder(pose_alone(model, capsule, 2, 1)) for capsule in (i, j)) - model.decoder.intercept
            torch.testing.assert_close(images, model.draw_images(both), atol=1e-5, rtol=1e-4)
        assert (images - model.sample(i, 2, seed=1)).abs().max() > 0.01


def test_interpolation_ends_at_the_reconstructions_and_is_straight_between(uniform):
    model, images = uniform
    way = g.interpolation(model, images[0], images[1], steps=5)
    with torch.no_grad():
        ends, code = model.reconstruct(images[:2]), model.encode(images[:2]).pose
        middle = model.decode((code[:1] + code[1:]) / 2)
    assert way.shape == (5, 1, 16, 16)
    torch.testing.assert_close(way[[0, 4]], ends)
    torch.testing.assert_close(way[2:3], middle)


def test_sweeps_move_one_number_at_a_time_about_the_mean_pose(uniform):
    model, _ = uniform
    drawn = g.sweeps(model, 1, steps=3, reach=2.0)
    assert drawn.shape == (3, 3, 1, 16, 16)
    mean, covariance = model.decoder.pose_mean()[1], model.decoder.pose_covariance()[1]
    for k in range(3):
        for n, way in enumerate((-2.0, 0.0, 2.0)):
            z = mean.clone()
            z[k] += way * covariance[k, k].sqrt()
            pose = torch.zeros(1, 4, 3)
            pose[0, 1] = squash(z)
            torch.testing.assert_close(drawn[k, n], model.decode(pose)[0].detach())


@pytest.mark.parametrize("half", g.HALVES)
def test_completion_keeps_the_known_half_and_is_the_chain(uniform, half):
    model, images = uniform
    chain = g.completion(model, images, half, steps=3)
    known = torch.zeros(16, 16, dtype=torch.bool)
    rows, columns = {
        "left": (slice(None), slice(8, 16)),
        "right": (slice(None), slice(0, 8)),
        "top": (slice(8, 16), slice(None)),
        "bottom": (slice(0, 8), slice(None)),
    }[half]
    known[rows, columns] = True
    assert chain.shape == (4, 8, 1, 16, 16)
    assert all(torch.equal(step[..., known], images[..., known]) for step in chain)
    for before, after in itertools.pairwise(chain):
        with torch.no_grad():
            drawn = model.decode(model.encode(before).pose)
        torch.testing.assert_close(after[..., ~known], drawn[..., ~known])


def test_completion_knows_nothing_of_what_is_hidden(uniform):
    model, images = uniform
    other = images.clone()
    other[..., 8:] = other[..., 8:].flip(0)
    assert not torch.equal(other, images)
    assert torch.equal(g.completion(model, images, "right"), g.completion(model, other, "right"))


def test_the_halves_of_an_odd_image_meet_without_overlap():
    for one, two in (("left", "right"), ("top", "bottom")):
        assert torch.equal(g.hidden_half(5, 7, one), ~g.hidden_half(5, 7, two))
    assert g.hidden_half(5, 7, "left").sum() == 15 and g.hidden_half(5, 7, "top").sum() == 14


def test_redrawn_beside_the_images(uniform):
    model, images = uniform
    drawn = g.redraw(model, images)
    assert torch.equal(drawn.images, images)
    torch.testing.assert_close(drawn.bottleneck, model.reconstruct(images).detach())
    torch.testing.assert_close(drawn.tied, model.reconstruct_tied(images).detach())


def test_wins_are_means_of_what_each_capsule_wins(uniform, monkeypatch):
    model, images = uniform
    first = model.encode(images).activation.argmax(-1).tolist()  # the mask leaves the winner alone
    monkeypatch.setattr(g, "_CHUNK", 3)
    assert g.winners(model, images).tolist() == first
    counts, means = g.wins(model, images)
    assert counts.tolist() == [first.count(j) for j in range(4)]
    for j in range(4):
        mine = [image for image, won in zip(images, first, strict=True) if won == j]
        wanted = torch.stack(mine).mean(0) if mine else torch.zeros(1, 16, 16)
        torch.testing.assert_close(means[j], wanted)


def test_most_used_is_by_the_training_images(uniform):
    model, _ = uniform
    weight = model.decoder.weight.tolist()
    assert g.most_used(model, 4) == sorted(range(4), key=lambda j: (-weight[j], j))
    assert g.most_used(model, 2) == g.most_used(model, 4)[:2]


@pytest.mark.parametrize("name", ["uniform", "routed"])
def test_routing_maps_by_loops(name, request):
    model, images = request.getfixturevalue(name)
    maps = g.routing(model, images)
    seen, (h, w) = model.infer(images), model.autoencoder.grid
    assert maps.contribution.shape == (8, h, w)
    W = model.energy.W.detach()
    contribution, coupling = torch.zeros(8, h, w), torch.zeros(8, h, w)
    types = len(W) // (h * w)
    for b in range(8):
        j = int(maps.winner[b])
        for i in range(len(W)):
            c = seen.coupling if isinstance(seen.coupling, float) else seen.coupling[b, i, j]
            place = i // types
            contribution[b, place // w, place % w] += (c * (W[i, j] @ seen.x[b, i])).dot(seen.z[b, j]).abs()
            coupling[b, place // w, place % w] += c
    torch.testing.assert_close(maps.contribution, contribution)
    assert (maps.coupling is None) == (name == "uniform")
    if maps.coupling is not None:
        torch.testing.assert_close(maps.coupling, coupling)
        torch.testing.assert_close(maps.coupling.sum((1, 2)), torch.ones(8))  # normalized over the children


@pytest.mark.parametrize("name", ["uniform", "routed"])
def test_contributions_sum_to_the_winner_s_evidence(name, request):
    model, images = request.getfixturevalue(name)
    seen = model.infer(images)
    winner = model.energy.winners(seen)
    z, bias = seen.z[torch.arange(8), winner], model.energy.bias[winner]
    torch.testing.assert_close(g.contributions(model, seen, winner).sum(-1).detach(), ((z - bias) * z).sum(-1))


def test_a_model_in_training_draws_as_at_rest_and_stays_in_training(uniform):
    model, images = uniform
    calm = g.redraw(model, images), g.completion(model, images), g.sweeps(model, 0)
    model.train()
    try:
        again = g.redraw(model, images), g.completion(model, images), g.sweeps(model, 0)
        with pytest.raises(DataError):
            g.redraw(model, images * 2)
        assert model.training
    finally:
        model.eval()
    assert torch.equal(calm[0].bottleneck, again[0].bottleneck) and torch.equal(calm[0].tied, again[0].tied)
    assert torch.equal(calm[1], again[1]) and torch.equal(calm[2], again[2])
    assert not any(x.requires_grad for x in (*again[0], again[1], again[2]))


def test_errors_say_what_is_wanted(uniform):
    model, images = uniform
    with pytest.raises(ShapeError, match="0 to 3"):
        g.sweeps(model, 4)
    with pytest.raises(ShapeError, match="0 to 3"):
        g.capsule_samples(model, capsules=[-1])
    with pytest.raises(RecipeError, match="did you mean 'right'"):
        g.completion(model, images, "rigth")
    with pytest.raises(ShapeError):
        g.completion(model, images[..., :12])
    with pytest.raises(RecipeError, match="at least 2"):
        g.interpolation(model, images[0], images[1], steps=1)
    with pytest.raises(ShapeError, match=r"\[c h w\]"):
        g.interpolation(model, images[:2], images[:2])
    for draw in (lambda: g.sweeps(model, 0, steps=0), lambda: g.completion(model, images, steps=0)):
        with pytest.raises(RecipeError, match="at least 1"):
            draw()


def size_of(png: bytes) -> tuple[int, int]:
    """Of a PNG that has more than one shade."""
    from PIL import Image

    image = Image.open(io.BytesIO(png))
    low, high = image.convert("L").getextrema()
    assert image.format == "PNG" and low < high
    return image.size


@pytest.mark.parametrize("kind", FIGURES)
def test_every_figure_is_a_png_and_the_same_again(routed, kind):
    model, images = routed
    wish = FigureOptions(capsules=(2, 0), count=2, seed=3)
    drawn = picture(kind, model, wish, images[:2])
    assert drawn and all(min(size_of(png)) > 50 for png in drawn.values())
    assert drawn == picture(kind, model, wish, images[:2])


def test_figures_show_what_is_wished(uniform):
    model, images = uniform
    assert list(picture("sweeps", model, FigureOptions((3, 1)))) == [
        f"sweeps-{j}-{kind}" for j in (3, 1) for kind in ("axes", "numbers")
    ]
    used = g.most_used(model, 1)[0]
    assert list(picture("sweeps", model, FigureOptions())) == [f"sweeps-{used}-axes", f"sweeps-{used}-numbers"]
    samples = {d: picture("samples", model, FigureOptions(count=1, domain=d)) for d in ("complete", "restricted")}
    assert list(samples["complete"]) == ["samples-complete"] and list(samples["restricted"]) == ["samples-restricted"]
    wide = size_of(samples["complete"]["samples-complete"])
    narrow = size_of(picture("samples", model, FigureOptions((1,), count=1, domain="complete"))["samples-complete"])
    assert wide[0] > narrow[0] and wide[1] == narrow[1]
    assert set(picture("completion", model, FigureOptions(), images[:1])) == {"completion", "completion-steps"}


def test_figures_of_the_model_alone_load_no_data(uniform):
    model, _ = uniform
    for kind in FIGURES:
        if kind in FROM_MODEL:
            assert picture(kind, model, FigureOptions(count=2))
        else:
            with pytest.raises(AssertionError, match="loads data"):
                picture(kind, model, FigureOptions(count=2))


def test_what_cannot_be_drawn_is_one_line(uniform):
    model, images = uniform
    with pytest.raises(RecipeError, match=r"needs 2 images, 1 came.*ask for: samples"):
        picture("interpolation", model, FigureOptions(), images[:1])
    with pytest.raises(RecipeError, match="did you mean 'samples'"):
        picture("sample", model, FigureOptions())
    with pytest.raises(RecipeError, match="needs two capsules"):
        picture("pairs", model, FigureOptions((1,), count=2), images)
    with pytest.raises(RecipeError, match="domain"):
        picture("samples", model, FigureOptions(domain="nowhere"))
    with pytest.raises(ShapeError, match="capsule 9"):
        picture("routing", model, FigureOptions((9,)), images)


def test_images_are_inferred_once_for_all_figures(uniform, monkeypatch):
    model, images = uniform
    inferred = []
    infer = PoE.infer
    monkeypatch.setattr(PoE, "infer", lambda self, x: inferred.append(len(x)) or infer(self, x))
    data = Dataset((255 * images).round().byte(), torch.zeros(len(images)).long(), 10)
    context = PoEFigureContext(model, FigureOptions(count=4), lambda: data)
    for kind in ("reconstructions", "interpolation", "routing"):
        assert draw_figure(FIGURES, kind, context)
    assert inferred == [4]


def test_color_stays_color_and_two_channels_become_gray():
    x = torch.rand(2, 3, 4, 5)
    assert torch.equal(pixels(x)[1, 2, 3], x[1, :, 2, 3])
    torch.testing.assert_close(pixels(x[:, :2])[1, 2, 3], (x[1, 0, 2, 3] + x[1, 1, 2, 3]) / 2)


def test_a_color_model_draws_color():
    from torchcaps.config import from_dict

    torch.manual_seed(0)
    config = from_dict(PoEConfig, {key: value for key, value in SMALL.items() if key != "name"})
    model, images = config.build(ImageSpec(3, 16, 16, 10)).eval(), torch.rand(2, 3, 16, 16)
    assert g.capsule_samples(model, 2).shape == (2, 4, 3, 16, 16)
    for kind in ("samples", "completion", "routing", "reconstructions"):
        assert all(min(size_of(png)) > 50 for png in picture(kind, model, FigureOptions(count=1), images).values())


def test_reconstructions_show_images_in_their_frames() -> None:
    from torchcaps.config import from_dict

    heights = []
    for frames in ("none", "moments"):
        table = {key: value for key, value in SMALL.items() if key != "name"} | {"frames": frames}
        model = from_dict(PoEConfig, table).build(ImageSpec(1, 16, 16, 10)).eval()
        [drawn] = picture("reconstructions", model, FigureOptions(count=1), torch.rand(2, 1, 16, 16)).values()
        heights.append(max(size_of(drawn)))
    assert heights[1] > heights[0]
