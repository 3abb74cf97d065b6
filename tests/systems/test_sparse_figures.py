"""Figures 2 to 5 of Rawlinson 2018 against loops over capsules, images and ranks."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from support.png import panels
from support.tiny_recipe import tiny
from torchcaps.data import Dataset, Preprocess
from torchcaps.errors import DataError, RecipeError, ShapeError
from torchcaps.models import CapsNet, Model, SparseCaps, SparseConfig
from torchcaps.models.sparse import SparseModel
from torchcaps.models.sparse_matrix import SparseMatrixConfig
from torchcaps.systems import SYSTEMS
from torchcaps.systems.figure_context import ComparedRun, FigureOptions, draw_figure
from torchcaps.systems.sparse import figures as s
from torchcaps.train.train_state import build_model

FIGURES = SYSTEMS["sparse"].figures
SIZES: dict[str, Any] = {
    "capsules": 5, "dimension": 4, "channels": 4, "kernel": 5, "types": 2, "type_dimension": 4, "primary_kernel": 5,
    "decoder": (8,),
}  # fmt: skip


def made(data: Dataset, **more: Any) -> SparseCaps:
    """A network whose routing is decided: with its own small start all support is nearly the same."""
    torch.manual_seed(0)
    model = SparseConfig(**SIZES, **more).build(data.spec).eval()
    with torch.no_grad():
        model.latent.W.mul_(20)
        model.primary.pose.weight.mul_(5)
    return model


@pytest.fixture(scope="module")
def data() -> Dataset:
    return tiny().data.load().test


def context(data: Dataset, model: Any = None, **options: Any) -> s.SparseFigureContext:
    return s.SparseFigureContext(model or made(data), FigureOptions(**options), lambda: data)


def picture(kind: str, context: s.SparseFigureContext) -> dict[str, bytes]:
    return draw_figure(FIGURES, kind, context)


@pytest.fixture
def shown(monkeypatch) -> list[Any]:
    """What is plotted: the axes of each figure that becomes a PNG."""
    seen: list[Any] = []

    def keep(figure: Any) -> bytes:
        seen.append(figure.axes[0])
        return b""

    monkeypatch.setattr(s, "png", keep)
    return seen


@pytest.mark.parametrize("sparse", [True, False])
def test_parts_are_decoded_from_one_capsule_and_from_all_others(data, sparse):
    model = made(data, sparse=sparse)
    with torch.no_grad():
        pose = model.encode(data.model_input(slice(3, 4))).pose[0]
        drawn = s.draw_capsules(model, pose)
        torch.testing.assert_close(drawn.together, model.reconstruct(data.model_input(slice(3, 4))))
        torch.testing.assert_close(drawn.none, model.decode(torch.zeros(1, 5, 4)))
        for j in range(5):
            alone, without = torch.zeros(1, 5, 4), pose.clone().unsqueeze(0)
            alone[0, j], without[0, j] = pose[j], 0
            torch.testing.assert_close(drawn.alone[j], model.decode(alone)[0])
            torch.testing.assert_close(drawn.without[j], model.decode(without)[0])


def test_parts_have_a_picture_an_image_and_a_column_a_capsule(data):
    drawn = picture("parts", context(data, count=2))
    assert len(drawn) == 2 and all(panels(png) == 3 + 3 * 5 for png in drawn.values())
    [png] = picture("parts", context(data, count=1, capsules=(4, 1))).values()
    assert panels(png) == 3 + 3 * 2


def test_notes_say_each_capsule_s_rank_and_the_change_it_makes(data, monkeypatch):
    grids: list[Any] = []
    monkeypatch.setattr(s, "image_grid", lambda *given: grids.append(given) or b"")
    model = made(data)
    [name] = picture("parts", context(data, model, count=1, capsules=(2, 0)))
    row = int(name.removeprefix("parts-"))
    rows, _, notes = grids[0]
    out = model(data.model_input(slice(row, row + 1)))
    assert notes[1] == [f"capsule {j}\nrank {out.ranks[0, j]}" for j in (2, 0)]
    torch.testing.assert_close(rows[0][1][0], data.images[row, 0].float() / 255)
    for n, said in enumerate(notes[3]):
        change = rows[2][1][n] - rows[0][1][1]
        torch.testing.assert_close(rows[3][1][n], 0.5 + change / 2)
        assert said == f"{float(change.abs().max()):.2f}"


@pytest.mark.parametrize("batch", [7, 100])
def test_ranking_is_that_of_each_image_by_itself(data, batch):
    model = made(data)
    model.mask.boost.copy_(torch.tensor([1.0, 1.4, 1.0, 1.2, 1.0]))
    found = s.rank_sparse(model, data, batch)
    for n in range(len(data)):
        out = model(data.model_input(slice(n, n + 1)))
        torch.testing.assert_close(found.support[n], out.support[0])
        assert found.ranks[n].tolist() == out.ranks[0].tolist()
    assert not torch.equal(found.ranks.argmin(-1), found.support.argmax(-1))  # the mask ranks what is boosted


def test_the_support_of_a_supervised_capsnet_is_read_in_the_same_way(data):
    model = build_model(tiny(), data.spec).eval()
    assert isinstance(model, CapsNet)
    found, out = s.rank_classes(model, data), model(data.model_input(slice(0, 2)))
    coupling, (h, w, types) = out.info.coupling[-1], out.primary.activation.shape[1:]
    for b in range(2):
        for j in range(10):
            psi = sum(max(float(coupling[b, p * types + i, j]) for i in range(types)) for p in range(h * w))
            assert float(found.support[b, j]) == pytest.approx(psi, rel=1e-5)
        order = sorted(range(10), key=lambda j: -float(found.support[b, j]))
        assert [order.index(j) for j in range(10)] == found.ranks[b].tolist()


def test_ranked_support_is_in_units_of_the_largest_and_falls():
    psi = torch.rand(6, 4, generator=torch.Generator().manual_seed(0))
    wanted = [0.0] * 4
    for row in psi.tolist():
        for r, value in enumerate(sorted(row, reverse=True)):
            wanted[r] += value / max(row) / 6
    assert s.ranked_support(psi).tolist() == pytest.approx(wanted)
    assert s.ranked_support(torch.ones(3, 4)).tolist() == [1.0] * 4
    assert s.ranked_support(torch.zeros(3, 4)).tolist() == [0.0] * 4


def test_rank_frequency_counts_images(data):
    ranks = s.rank_sparse(made(data), data).ranks
    found = s.rank_frequency(ranks)
    for j in range(5):
        for r in range(5):
            assert float(found[j, r]) == pytest.approx(sum(int(row[j]) == r for row in ranks) / len(data))


def test_ranked_has_a_curve_a_run(data, shown):
    dense, capsnet = made(data, sparse=False), build_model(tiny(), data.spec)
    few = replace(data, images=data.images[:9], labels=data.labels[:9], factors={})
    compared = (ComparedRun("dense", "sparse", dense, data), ComparedRun("supervised", "capsnet", capsnet, few))
    picture("ranked", replace(context(data), name="sparse", compared=compared))
    lines = shown[0].get_lines()
    assert [line.get_label() for line in lines] == ["sparse, 40 images", "dense, 40 images", "supervised, 9 images"]
    for line, run in zip(lines[1:], compared, strict=True):
        ranking = s.RANKINGS[run.system](run.model, run.data)
        assert line.get_ydata().tolist() == pytest.approx(s.ranked_support(ranking.support).tolist())


def test_frequencies_have_a_curve_a_capsule_and_count_those_in_the_band(data, shown):
    model = made(data, band=(0.1, 0.3))
    share = s.rank_frequency(s.rank_sparse(model, data).ranks)
    picture("frequencies", context(data, model))
    picture("frequencies", context(data, model, capsules=(3, 1)))
    every, some = (axes.get_lines() for axes in shown)
    assert [line.get_label() for line in some] == ["capsule 3", "capsule 1"]
    for j, line in enumerate(every):
        assert line.get_ydata().tolist() == pytest.approx(share[j].tolist())
    inside = sum(0.1 <= first <= 0.3 for first in share[:, 0].tolist())
    assert shown[0].get_title() == f"{inside} of 5 capsules are first in 0.1 to 0.3 of 40 images"
    assert shown[1].get_title() == shown[0].get_title()


@pytest.mark.parametrize("frames", [False, True])
def test_swept_sets_one_number_at_a_time(data, frames):
    model = made(data, frames=frames)
    with torch.no_grad():
        pose = model.encode(data.model_input(slice(0, 1))).pose[0]
        pose[2] = torch.tensor([0.1, -0.2, 0.5, 0.3])
        drawn = s.swept(model, pose, 2)
        assert drawn.shape == (4, 11, 1, 16, 16)
        for k in range(4):
            for n in range(11):
                moved = pose.clone().unsqueeze(0)
                moved[0, 2, k] = -1 + 0.2 * n
                if frames:  # the same ink
                    moved[0, 2] *= math.sqrt(0.39) / math.sqrt(sum(x * x for x in moved[0, 2].tolist()))
                torch.testing.assert_close(drawn[k, n], model.decode(moved)[0], rtol=1e-5, atol=1e-6)


def test_equivariances_are_those_of_images_in_which_the_capsule_is_first(data):
    model = made(data)
    first = s.rank_sparse(model, data).ranks.argmin(-1)
    here = sorted(set(first.tolist()))
    assert 1 < len(here) < 5  # one is never first
    drawn = picture("equivariances", context(data, model))
    assert list(drawn) == ["equivariances", *(f"equivariances-{j}" for j in here)]
    assert [panels(png) for png in drawn.values()] == [11 * len(here), *([2 + 4 * 11] * len(here))]
    assert all(int(first[row]) == j for j, row in s._examples(context(data, model, seed=4)).items())
    absent = next(j for j in range(5) if j not in here)
    assert list(picture("equivariances", context(data, model, capsules=(absent, here[0])))) == [
        "equivariances", f"equivariances-{here[0]}",
    ]  # fmt: skip
    with pytest.raises(DataError, match=f"capsule {absent} is first in no test image"):
        picture("equivariances", context(data, model, capsules=(absent,)))


def test_winners_are_images_in_which_the_capsule_is_first_above_what_is_redrawn(data, monkeypatch):
    grids: list[Any] = []
    monkeypatch.setattr(s, "image_grid", lambda *given: grids.append(given) or b"")
    model = made(data)
    first = s.rank_sparse(model, data).ranks.argmin(-1)
    picture("winners", context(data, model, count=2))
    rows, _, notes = grids[-1]
    assert [title for title, _ in rows] == ["image", "redrawn"] * 2
    assert notes[0] == [f"capsule {j}" for j in range(5)]
    stored, redrawn = data.pixels(slice(None))[:, 0], model.reconstruct(data.model_input())[:, 0]
    for above, below in zip(rows[::2], rows[1::2], strict=True):
        for j in range(5):
            if not (first == j).any():
                assert not above[1][j].any() and not below[1][j].any()
                continue
            row = int((stored - above[1][j]).flatten(1).abs().sum(1).argmin())
            assert torch.equal(stored[row], above[1][j]) and int(first[row]) == j
            torch.testing.assert_close(below[1][j], redrawn[row])


def test_winners_are_as_many_images_as_are_asked_for(data, monkeypatch):
    grids: list[Any] = []
    monkeypatch.setattr(s, "image_grid", lambda *given: grids.append(given) or b"")
    most = int(s.rank_sparse(made(data), data).ranks.argmin(-1).bincount().max())
    assert most > 4
    for count in (1, 4, most):
        picture("winners", context(data, count=count))
        assert len(grids[-1][0]) == 2 * count


def test_the_overview_takes_the_number_that_changes_most(data, monkeypatch):
    strips = torch.rand(4, 11, 1, 16, 16) / 100
    strips[2, :, 0, :8] = torch.linspace(0, 1, 11).view(11, 1, 1)
    grids: list[Any] = []
    monkeypatch.setattr(s, "swept", lambda *_: strips)
    monkeypatch.setattr(s, "image_grid", lambda *given: grids.append(given) or b"")
    model = made(data)
    j = int(s.rank_sparse(model, data).ranks.argmin(-1)[0])
    picture("equivariances", context(data, model, capsules=(j,)))
    rows, _, notes = grids[-1]
    assert [title for title, _ in rows] == [f"capsule {j}\nnumber 2"]
    assert notes[0] == ["-1.0", "-0.8", "-0.6", "-0.4", "-0.2", "0.0", "0.2", "0.4", "0.6", "0.8", "1.0"]


def test_all_images_are_looked_at_once_and_only_where_it_is_needed(data, monkeypatch):
    seen: list[Any] = []
    ranking = s.rank_sparse
    monkeypatch.setattr(s, "rank_sparse", lambda model, data: seen.append(len(data)) or ranking(model, data))
    monkeypatch.setattr(s, "image_grid", lambda *_: b"")
    one = context(data, count=1)
    picture("parts", one)
    assert seen == [1]
    seen.clear()
    for kind in ("ranked", *FIGURES):
        picture(kind, one)
    assert seen == [len(data)]


def with_em(data: Dataset) -> Model:
    torch.manual_seed(0)
    config = SparseMatrixConfig(capsules=2, sizes=(4, 2, 2, 2), kernel=3, capsule_strides=(1, 1), decoder=(8,))
    return config.build(data.spec).eval()


@pytest.mark.parametrize("kind", FIGURES)
@pytest.mark.parametrize("build", [made, with_em])
def test_every_figure_is_the_same_again_and_depends_on_the_model(data, kind, build):
    """Stereo pairs that are cropped and standardized, whatever routes them."""
    make = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (20, 2, 18, 18), generator=make).byte()
    pairs = Dataset(images, torch.arange(20) % 3, 3, preprocess=Preprocess(16, standardize=True))
    model = build(pairs)
    assert isinstance(model, SparseModel)
    drawn = picture(kind, context(pairs, model, count=2, seed=1))
    assert drawn and all(png.startswith(b"\x89PNG") for png in drawn.values())
    assert drawn == picture(kind, context(pairs, model, count=2, seed=1))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(1.5 * parameter.flip(0))
    assert picture(kind, context(pairs, model, count=2, seed=1)) != drawn


def test_standardized_images_are_drawn_with_their_own_light(data):
    even = torch.cat([data.images[:5], torch.full_like(data.images[:1], 90)])
    level = Dataset(even, data.labels[:6], 10, preprocess=Preprocess(standardize=True))
    for row in range(6):
        found = context(level).to_pixels(level.model_input(slice(row, row + 1)), row)
        torch.testing.assert_close(found, even[row : row + 1].float() / 255, rtol=1e-4, atol=1e-5)
    assert context(data).to_pixels(torch.tensor([-1.0, 0.3, 2.0]), 0).tolist() == pytest.approx([0.0, 0.3, 1.0])


def test_wrong_wishes_are_one_line(data):
    with pytest.raises(RecipeError, match="did you mean 'ranked'"):
        picture("rankd", context(data))
    with pytest.raises(ShapeError, match="0 to 4"):
        picture("parts", context(data, capsules=(5,)))
    assert not isinstance(build_model(tiny(), data.spec), SparseModel)
