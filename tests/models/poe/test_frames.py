"""Frames and edges: what stands elsewhere is the same in its frame, and is drawn back to where it stood."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from torchcaps.errors import RecipeError
from torchcaps.math.warp import warp
from torchcaps.models.autoencoder import AutoencoderConfig
from torchcaps.models.poe import EnergyConfig, PoE, PoEConfig
from torchcaps.models.poe.edges import edge_children, edge_grid
from torchcaps.models.poe.encoder import CapsuleEnergy, SampleDraws
from torchcaps.models.poe.frames import NUMBERS, Frame, find_frame, from_frame, into_frame
from torchcaps.types import Batch, ImageSpec

SIDE = 28


def blobs(count: int = 3, side: int = SIDE) -> Tensor:
    """Smooth drawings [b 1 h w], higher than wide: four Gaussian spots each, well inside the image."""
    at = torch.arange(side, dtype=torch.float64) - (side - 1) / 2
    drawn = torch.rand(2, count, 4, 1, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64) - 0.5
    heights = torch.tensor([-6.0, -2.0, 2.0, 6.0], dtype=torch.float64).view(1, 4, 1, 1)
    x = at.view(1, 1, 1, -1) - 6 * drawn[0]
    y = at.view(1, 1, -1, 1) - 2 * drawn[1] - heights
    return (-(x.square() + y.square()) / 8).exp().mean(1, keepdim=True)


@pytest.mark.parametrize(
    ("matrix", "shift"),
    [
        (((1.0, 0.0), (0.0, 1.0)), (2.5, -1.5)),
        (((1.0, 0.4), (0.0, 1.0)), (0.0, 0.0)),
        (((1.2, 0.0), (0.0, 1.2)), (0.0, 0.0)),
        (((0.9, -0.2), (0.0, 0.9)), (-1.0, 2.0)),
    ],
    ids=["shift", "shear", "scale", "all"],
)
def test_an_image_in_its_frame_does_not_depend_on_where_and_how_it_stood(
    matrix: tuple[tuple[float, float], tuple[float, float]], shift: tuple[float, float]
) -> None:
    images = blobs()
    A = torch.tensor(matrix, dtype=torch.float64).expand(len(images), 2, 2)
    moved = warp(images, A, torch.tensor(shift, dtype=torch.float64).expand(len(images), 2), (SIDE, SIDE))
    assert float((moved - images).abs().max()) > 0.05
    ours, theirs = (into_frame(each, find_frame(each)) for each in (images, moved))
    assert float((ours - theirs).abs().max()) < 0.06  # two interpolations


def test_a_frame_centers_straightens_and_scales() -> None:
    framed = find_frame(into_frame(blobs(), find_frame(blobs())))
    torch.testing.assert_close(framed.center, torch.zeros_like(framed.center), atol=0.02, rtol=0)
    torch.testing.assert_close(framed.slant, torch.zeros_like(framed.slant), atol=0.02, rtol=0)
    torch.testing.assert_close(framed.scale, torch.ones_like(framed.scale), atol=0.02, rtol=0)


def test_drawing_back_is_the_inverse() -> None:
    images = blobs()
    frame = find_frame(images)
    torch.testing.assert_close(
        frame.matrices() @ frame.inverse_matrices(), torch.eye(2, dtype=torch.float64).expand(3, 2, 2)
    )
    assert float((from_frame(into_frame(images, frame), frame) - images).abs().max()) < 0.06
    again = Frame.of_numbers(frame.numbers)
    assert frame.numbers.shape == (3, NUMBERS)
    for one, other in zip(again, frame, strict=True):
        torch.testing.assert_close(one, other)


def test_images_without_height_have_a_frame() -> None:
    images = torch.zeros(2, 1, SIDE, SIDE)
    images[1, 0, 5, 3:9] = 1.0
    frame = find_frame(images)
    assert frame.scale.tolist() == [1, 1] and frame.slant.tolist() == [0, 0] and frame.center[0].tolist() == [0, 0]
    assert torch.equal(into_frame(images[:1], find_frame(images[:1])), images[:1])


# --- Edges ------------------------------------------------------------------------------------------------------------


def test_edges_equal_a_loop_over_pixels() -> None:
    image = torch.rand(1, 1, 8, 9, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    d = 6
    rows, columns = edge_grid(8, 9)
    wanted = torch.zeros(rows, columns, d, dtype=torch.float64)
    padded = torch.nn.functional.pad(image[0, 0], (1, 1, 1, 1))
    line = torch.exp(-torch.arange(-7.0, 8.0, dtype=torch.float64).square() / 8)
    for y in range(8):
        for x in range(9):
            gx = float(padded[y + 1, x + 2] - padded[y + 1, x])
            gy = float(padded[y + 2, x + 1] - padded[y, x + 1])
            angle = float(torch.atan2(torch.tensor(gy), torch.tensor(gx))) / (2 * torch.pi) * d % d
            for k in range(d):
                away = min((angle - k) % d, (k - angle) % d)
                for row in range(rows):
                    for column in range(columns):
                        dy, dx = y - (4 * row + 2), x - (4 * column + 2)
                        if max(abs(dx), abs(dy)) <= 7:
                            window = float(line[dy + 7] * line[dx + 7] / line.sum() ** 2)
                            wanted[row, column, k] += window * max(0.0, 1 - away) * (gx * gx + gy * gy) ** 0.5
    found = edge_children(image, d)
    assert found.shape == (1, rows * columns, d)
    torch.testing.assert_close(found[0], wanted.sqrt().flatten(0, 1), atol=1e-6, rtol=1e-5)


def test_a_quarter_turn_moves_edges_by_a_quarter_of_the_directions() -> None:
    image = blobs(1, side=29)  # places are in the middle of it
    upright, turned = (edge_children(each, 8).view(7, 7, 8) for each in (image, image.rot90(-1, (2, 3))))
    torch.testing.assert_close(turned, upright.rot90(-1, (0, 1)).roll(2, -1))


# --- The model --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["edges", "features"])
def model(request: pytest.FixtureRequest) -> Iterator[PoE]:
    """A framed model after a few steps of each stage."""
    torch.manual_seed(0)
    config = PoEConfig(
        capsules=3,
        dimension=4,
        child_dimension=4,
        children=request.param,
        frames="moments",
        autoencoder=AutoencoderConfig(channels=(4, 4), kernel=5),
        energy=EnergyConfig(gain=4.0, ramp=1, loosen=2, slab=2),
    )
    made = PoE(config, ImageSpec(1, SIDE, SIDE, 3))
    images = (blobs(24) * 255).to(torch.uint8)
    for stage in made.stages().values():
        stage.prepare(images)
        for step in range(3):
            batch = Batch(images.float() / 255, torch.zeros(24, dtype=torch.long), torch.arange(24))
            loss = stage.objective(batch, step)["loss"]
            assert loss.isfinite()
            if stage.by_gradient:
                loss.backward()
        stage.finish()
    yield made.eval()


@torch.no_grad()
def test_a_framed_model_infers_the_same_pose_wherever_an_image_stands(model: PoE) -> None:
    images = blobs(4).float()
    moved = images.roll((2, -3), (2, 3))  # whole pixels: the framed images are the same
    torch.testing.assert_close(model.encode(moved).pose, model.encode(images).pose, atol=1e-4, rtol=1e-3)
    inside = (..., slice(6, -6), slice(6, -6))  # what leaves the image on one side does not come back on the other
    rebuilt = model.reconstruct(images).roll((2, -3), (2, 3))
    torch.testing.assert_close(model.reconstruct(moved)[inside], rebuilt[inside], atol=0.05, rtol=0)


@torch.no_grad()
def test_samples_have_frames_and_are_functions_of_the_seed(model: PoE) -> None:
    used = int(model.decoder.kept.argmax())
    for domain in ("empirical", "mixture", "gaussian", "complete", "restricted"):
        made = model.sample(used, n=5, domain=domain, seed=1)
        assert made.shape == (5, 1, SIDE, SIDE) and made.isfinite().all() and made.min() >= 0 and made.max() <= 1
        assert torch.equal(made[:2], model.sample(used, n=2, domain=domain, seed=1))
        assert not torch.equal(made, model.sample(used, n=5, domain=domain, seed=2))


@torch.no_grad()
def test_edges_rank_the_capsules_and_are_not_drawn(model: PoE) -> None:
    images = blobs(5).float()
    f = model.features(images)
    edges = 49 if model.config.children == "edges" else 0
    assert f.shape[1] == model.decoder.U.shape[1] + edges and len(model.energy.W) == model.decoder.U.shape[1]
    frame = model.find_frame(images)
    drawn = model.draw_images(f, frame)
    assert drawn.shape == images.shape and not torch.equal(drawn, model.draw_images(f))
    assert torch.equal(drawn, model.draw_images(f[:, : len(f[0]) - edges], frame))
    assert model.reconstruct_tied(images).shape == images.shape
    # Only edges decide the ranks, where there are any
    x = model.energy.visible(f)
    other = x.clone()
    other[:, : len(f[0]) - edges] *= -0.5
    ranks, others = (model.energy.infer(each).ranks for each in (x, other))
    assert ranks is not None and others is not None and torch.equal(ranks, others) == bool(edges)


def test_a_restart_of_the_ranker_restarts_the_capsule() -> None:
    torch.manual_seed(0)
    config = EnergyConfig(ramp=1, loosen=200, boost=0.0, restart=0.2, gain=4.0)
    energy = CapsuleEnergy(config, 6, 3, child_dimension=2, dimension=3, ranking=4)
    assert energy.ranker is not None and energy.ranker.mask is not None and energy.mask is None
    energy.ranker.mask.frequency.copy_(torch.tensor([0.7, 0.01, 0.29]))
    before = [W.detach().clone() for W in (energy.W, energy.ranker.W)]
    loss = energy.contrast(energy.visible(torch.randn(8, 10, 2)), 100, SampleDraws(3, torch.arange(8)))["loss"]
    loss.backward()
    for W, old in zip((energy.W, energy.ranker.W), before, strict=True):
        assert torch.equal(W.detach()[:, [0, 2]], old[:, [0, 2]]) and not torch.equal(W.detach()[:, 1], old[:, 1])
        assert W.grad is not None and W.grad.any()


def test_edges_rank_images_and_no_chains() -> None:
    with pytest.raises(RecipeError, match="persistent"):
        PoEConfig(children="edges", energy=EnergyConfig(chain="persistent"))
