"""One contract for all networks that can be explored, against the models' own answers and loops over their children."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import fields, is_dataclass, replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

from support.model_checks import refusal
from support.small_models import ROUTED, SMALL, SPEC, built, images
from torchcaps.errors import DataError, RecipeError, ShapeError
from torchcaps.layers import SharedCapsules
from torchcaps.math.squash import squash
from torchcaps.routing import EM, Dynamic, route
from torchcaps.systems import routing_trace, system_of
from torchcaps.systems.capsnet.figures import maps_of, perturbed
from torchcaps.systems.explorer_view import ExplorerView
from torchcaps.systems.matrix.figures import histogram, vote_distances
from torchcaps.systems.poe import generation
from torchcaps.systems.sparse.figures import draw_capsules, swept
from torchcaps.types import Batch, Capsules

CONFIGS: dict[str, Any] = {
    "capsnet": replace(SMALL["capsnet"], routing=Dynamic(3)),
    "matrix": replace(SMALL["matrix-tiny"], capsule_kernel=2, routing=EM(3, 0.1, damping=0.1), norm=True),
    "capsnet-shared": replace(SMALL["capsnet-small"], routing=Dynamic(3)),
    "sparse": SMALL["sparse"],
    "sparse-shared": SMALL["sparse-small"],
    "sparse-frames": replace(SMALL["sparse"], frames=True),
    "sparse-prototypes": replace(SMALL["sparse"], frames=True, prototypes=True, rank_by="reconstruction"),
    "sparse-matrix": replace(SMALL["sparse-matrix"], capsule_kernel=2),
    "poe": SMALL["poe"],
    "poe-routed": ROUTED,
}
KINDS = list(CONFIGS)
DRAWING = [kind for kind in KINDS if kind != "matrix"]
IMAGE = images(1)[0]
EXAMPLES = images(12)


def model_of(kind: str) -> Any:
    """Fresh weights; those of products of experts are stronger, and they have pose statistics of a few images; batch
    normalization of matrix capsules has running statistics of a few images."""
    model = built(CONFIGS[kind])
    if kind == "matrix":
        for _ in range(30):
            model.train()(images(9))
        model.eval()
    if kind.startswith("poe"):
        batch = images(9)
        stage = model.stages()["decoder"]
        with torch.no_grad():
            model.energy.W.mul_(500)
            model.energy.offset.copy_(model.features(batch).mean(0))
            stage.prepare((batch * 255).byte())
            stage.objective(Batch(batch, torch.zeros(9).long(), torch.arange(9)), 0)
    return model


@pytest.fixture(params=KINDS)
def kind(request) -> str:
    return request.param


def explore(model: Any, names: Sequence[str] = (), examples: Tensor | None = None) -> ExplorerView[Any, Any]:
    """The view that the model's system builds."""
    return system_of(model.config).explore(model, names, examples)


def view_of(kind: str, examples: Tensor | None = EXAMPLES) -> ExplorerView[Any, Any]:
    return explore(model_of(kind), ("a", "b", "c"), examples)


def layer_of(model: Any) -> Any:
    """What holds the settings of the last routing, as `routing`."""
    if hasattr(model, "energy"):
        return None
    return getattr(model, "matrix", model).classes if not hasattr(model, "latent") else model.latent


class Reading(NamedTuple):
    """Read off a model: coupling [t i j], children [i d] and their activation [i], and the vote of i for j."""

    coupling: Tensor
    pose: Tensor
    on: Tensor
    vote: Callable[[int, int], Tensor]


def read(model: Any) -> Reading:
    """From the record of the model's own routing, or that of its W where it keeps none."""
    with torch.no_grad():
        if hasattr(model, "energy"):
            x, W = model.infer(IMAGE[None]).x, model.energy.W.detach()
            _, info = route(Capsules(x, x.norm(dim=-1)), W, model.energy.config.routing, trace=True)
            return Reading(info.coupling[:, 0], x[0], x[0].norm(dim=-1), lambda i, j: W[i, j] @ x[0, i])
        out = model(IMAGE[None], trace=True)
    assert getattr(model.config, "shared", False) is isinstance(layer_of(model), SharedCapsules)
    info = out.infos[-1] if hasattr(out, "infos") else out.info
    below, layer = (out.below[-1] if hasattr(out, "below") else out.primary).flat(), layer_of(model)
    pose, W = below.pose[0], layer.W.detach()
    if layer.pose == "matrix":
        return Reading(info.coupling[:, 0], pose, below.activation[0], lambda i, j: (
            (pose[i].view(4, 4) @ W[i % len(W), j]).flatten() + layer.offset[i]
        ))  # fmt: skip
    if isinstance(layer, SharedCapsules):
        here = layer.centers.repeat_interleave(len(W), 0) * below.activation[0, :, None]  # [i 2]
        return Reading(info.coupling[:, 0], torch.cat([pose, here], 1), below.activation[0], lambda i, j: (
            W[i % len(W), j] @ pose[i] + pad(here[i], (0, W.shape[2] - 2))
        ))  # fmt: skip
    return Reading(info.coupling[:, 0], pose, below.activation[0], lambda i, j: W[i, j] @ pose[i])


def tensors(value: Any) -> list[Tensor]:
    """All tensors of a record."""
    if is_dataclass(value):
        value = [getattr(value, f.name) for f in fields(value)]
    if isinstance(value, Tensor):
        return [value]
    return [x for part in value for x in tensors(part)] if isinstance(value, tuple | list) else []


def all_results(view: ExplorerView[Any, Any]) -> list[Any]:
    """All that the page asks of an image."""
    inferred = view.infer(IMAGE)
    asked = [inferred, view.routing(IMAGE, inferred.winner, (0, 3)), view.limits(1, inferred.pose[1])]
    if not view.has_decoder:
        return asked
    pose = view.sample(view.sample_grid(1, "empirical", 4).capsules[0], "empirical", 4)
    return [*asked, view.sweep(0, pose, 3), view.sample_grid(2, "empirical", 5)]


# --- Facts and inference ----------------------------------------------------------------------------------------


def test_facts_are_those_of_the_model(kind):
    model = model_of(kind).train()
    view = explore(model, ("a", "b", "c"))
    assert not model.training and view.spec == SPEC and view.kind == kind.partition("-")[0]
    with torch.no_grad():
        pose = model.encode(IMAGE[None]).pose
    reading = read(model)
    assert (view.capsules, view.dimension) == pose.shape[1:]
    assert (view.iterations, view.children, view.capsules) == reading.coupling.shape
    assert view.children % math.prod(view.places) == 0
    assert view.has_decoder == (kind != "matrix")
    by_class = kind in ("capsnet", "capsnet-shared", "matrix")
    assert view.names == (("a", "b", "c") if by_class else tuple(f"capsule {j}" for j in range(4)))
    assert view.domains == (
        ("empirical", "mixture", "gaussian", "complete", "restricted") if kind.startswith("poe") else ()
    )
    assert bool(view_of(kind).domains) == view.has_decoder
    if by_class:
        assert explore(model).names == ("0", "1", "2")


def test_inference_is_the_models_own(kind):
    view = view_of(kind)
    model, inferred = view.model, view.infer(IMAGE)
    with torch.no_grad():
        code = model.encode(IMAGE[None])
    torch.testing.assert_close(inferred.activation, code.activation[0])
    pose = squash(inferred.pose) if kind.startswith("poe") else inferred.pose
    torch.testing.assert_close(pose, code.pose[0])
    assert inferred.pose.shape == (view.capsules, view.dimension) and 0 <= inferred.winner < view.capsules
    if kind in ("capsnet", "capsnet-shared", "matrix"):
        assert inferred.winner == int(code.activation[0].argmax())
    elif kind.startswith("sparse"):
        assert int(model(IMAGE[None]).ranks[0, inferred.winner]) == 0
    else:
        assert inferred.winner == int(generation.winners(model, IMAGE[None]))
    if not view.has_decoder:
        assert inferred.reconstruction is None and view_of(kind, None).infer(IMAGE).capsule_images is None
        # Each capsule shows an example that it wins, or a blank
        for j, shown in enumerate(inferred.capsule_images):
            own = EXAMPLES[view.winners == j]
            assert any(torch.equal(shown, one) for one in own) or (not len(own) and not shown.any())
        return
    with torch.no_grad():
        redrawn = model.reconstruct(code if kind.startswith("capsnet") else IMAGE[None])
    torch.testing.assert_close(inferred.reconstruction, redrawn[0])


def test_results_are_finite_and_deterministic(kind):
    first, again = (tensors(all_results(view_of(kind))) for _ in range(2))
    assert len(first) == len(again) > 10
    for x, y in zip(first, again, strict=True):
        assert bool(x.isfinite().all()) and not x.requires_grad
        assert torch.equal(x, y)


def test_blank_images_are_inferred_at_too(kind):
    view = view_of(kind, None)
    blank = torch.zeros(SPEC[:3])
    found = [view.infer(blank), view.routing(blank, 0)]
    assert all(bool(x.isfinite().all()) for x in tensors(found))


# --- Routing ------------------------------------------------------------------------------------------------


def test_maps_by_loops_over_children(kind):
    """What the children of a place contribute: coupling times activation, or what they add to |z|²."""
    view = view_of(kind)
    reading, (h, w) = read(view.model), view.places
    for parent in range(view.capsules):
        found = view.routing(IMAGE, parent)
        expected = torch.zeros(view.iterations, h, w)
        for t in range(view.iterations):
            for i, value in enumerate(contribution(view.model, reading, t, parent)):
                place = i // (view.children // (h * w))
                expected[t, place // w, place % w] += value
        torch.testing.assert_close(found.maps * found.peak, expected, rtol=1e-4, atol=1e-7)
        assert found.peak == pytest.approx(float(expected.max()), rel=1e-4) and float(found.maps.max()) == 1


def contribution(model: Any, reading: Reading, t: int, parent: int) -> list[float]:
    """By each child."""
    c = reading.coupling[t, :, parent].tolist()
    if not hasattr(model, "energy"):
        return [share * on for share, on in zip(c, reading.on.tolist(), strict=True)]
    votes = [reading.vote(i, parent) for i in range(len(c))]
    z = sum(share * vote for share, vote in zip(c, votes, strict=True)) + model.energy.bias[parent]
    return [abs(share * float(vote @ z)) for share, vote in zip(c, votes, strict=True)]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if not kind.startswith("sparse")])
def test_the_winners_maps_are_those_of_the_figures(kind):
    view = view_of(kind)
    found = view.routing(IMAGE, view.infer(IMAGE).winner).maps
    if kind.startswith("poe"):
        figure = generation.routing(view.model, IMAGE[None]).contribution
        torch.testing.assert_close(found[-1] / found[-1].max(), figure[0] / figure.max())
        return
    with torch.no_grad():
        out = view.model(IMAGE[None], trace=True)
    info, below = (out.info, out.primary) if kind.startswith("capsnet") else (out.infos[-1], out.below[-1])
    figure = maps_of(out.classes, below, info.coupling)[0][0, 0]  # [t h w]
    torch.testing.assert_close(found, figure / figure.max())


def test_activation_is_that_of_a_model_which_stops_there(kind):
    view = view_of(kind)
    found = view.routing(IMAGE, 0).activation
    assert found.shape == (view.iterations, view.capsules)
    for t in range(view.iterations):
        shorter = deepcopy(view.model)
        if layer_of(shorter) is None:
            energy = shorter.energy
            energy.config = replace(energy.config, routing=replace(energy.config.routing, iterations=t + 1))
        else:
            layer_of(shorter).routing = replace(layer_of(shorter).routing, iterations=t + 1)
        with torch.no_grad():
            torch.testing.assert_close(found[t], shorter.encode(IMAGE[None]).activation[0], rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(found[-1], view.infer(IMAGE).activation, rtol=1e-4, atol=1e-6)


def test_coupling_entropy_and_agreement_are_the_routers(kind):
    view = view_of(kind)
    c, parent = read(view.model).coupling, view.capsules - 1
    found = view.routing(IMAGE, parent, (2, 0, 2))
    torch.testing.assert_close(found.coupling, c[..., parent].mean(-1))
    torch.testing.assert_close(found.chosen_coupling, c[:, [2, 0, 2], parent])
    torch.testing.assert_close(found.vote_coupling, c[:, found.vote_children, parent])
    assert found.agreement.shape == (view.iterations, view.capsules)
    for t in range(view.iterations):
        shares = [(row / row.sum()).tolist() for row in c[t]]
        entropy = sum(-p * math.log(p) for row in shares for p in row if p > 0) / len(shares)
        assert float(found.entropy[t]) == pytest.approx(entropy, rel=1e-4, abs=1e-6)


def test_votes_are_shown_on_their_two_principal_axes(kind):
    """Projected by a singular value decomposition; the last mean with them."""
    view = view_of(kind)
    reading, parent = read(view.model), 1
    found = view.routing(IMAGE, parent, (0, 3))
    votes = torch.stack([reading.vote(i, parent) for i in range(view.children)]).double()
    center = votes.mean(0)
    axes = torch.linalg.svd(votes - center).Vh[:2]
    axes = torch.stack([axis if axis[axis.abs().argmax()] > 0 else -axis for axis in axes])
    projected = [[float((vote - center) @ axis) for axis in axes] for vote in votes]
    close = {"rtol": 1e-3, "atol": 1e-5}
    torch.testing.assert_close(found.chosen_votes, torch.tensor([projected[0], projected[3]]), **close)
    torch.testing.assert_close(found.votes, torch.tensor([projected[i] for i in found.vote_children.tolist()]), **close)
    if kind in ("matrix", "sparse-matrix"):
        with torch.no_grad():
            out = view.model(IMAGE[None])
        mean = (out.classes if kind == "matrix" else out.latent).pose[0, parent].double()
    else:
        c = reading.coupling[-1, :, parent].double()
        mean = sum(c[i] * votes[i] for i in range(len(c))) / float(c.sum())
    torch.testing.assert_close(found.mean[-1].double(), axes @ (mean - center), **close)
    assert found.mean.shape == (view.iterations, 2)


def test_the_votes_are_of_the_children_that_contribute_most(kind, monkeypatch):
    view = view_of(kind)
    reading = read(view.model)
    last = contribution(view.model, reading, -1, 0)
    monkeypatch.setattr(routing_trace, "MAX_VOTES", 5)
    found = view.routing(IMAGE, 0)
    values = [last[i] for i in found.vote_children.tolist()]
    assert values == pytest.approx(sorted(last, reverse=True)[:5], rel=1e-4)
    assert found.votes.shape == (5, 2) and found.vote_coupling.shape == (view.iterations, 5)
    assert found.chosen_votes.shape == (0, 2) and found.chosen_coupling.shape == (view.iterations, 0)


def test_histograms_are_of_em_routing_alone(kind):
    view = view_of(kind)
    found = view.routing(IMAGE, 1).histogram
    if "matrix" not in kind:
        assert found is None
        return
    reading = read(view.model)
    with torch.no_grad():
        mean = getattr(view.model, "matrix", view.model)(IMAGE[None]).classes.pose[0, 1]
    edges, expected = found.edges.tolist(), torch.zeros(len(found.edges) - 1)
    for i in range(view.children):
        distance = float((reading.vote(i, 1) - mean).norm())
        for n in range(len(expected)):
            if edges[n] <= distance < edges[n + 1]:
                expected[n] += reading.coupling[-1, i, 1]
    torch.testing.assert_close(found.counts[-1], expected, rtol=1e-3, atol=1e-5)
    assert found.counts.shape == (view.iterations, len(expected)) and edges[0] == 0
    with torch.no_grad():
        network = getattr(view.model, "matrix", view.model)
        own = vote_distances(network, network(IMAGE[None], trace=True))
    bars = histogram(*(x[:, 0] for x in own), edges[-1], len(expected))  # [t j n]
    torch.testing.assert_close(found.counts, bars[:, 1], rtol=1e-3, atol=1e-5)
    everything = [view.routing(IMAGE, j).histogram for j in range(view.capsules)]
    assert all(torch.equal(other.edges, found.edges) for other in everything)
    total = sum(float(other.counts.sum()) for other in everything)
    assert 0.5 * float(reading.coupling.sum()) < total <= float(reading.coupling.sum()) * 1.001


def test_axes_have_one_sign_and_may_lack_a_second():
    points = torch.tensor([[3.0, 0.1], [-3.0, 0.1], [0.0, -0.4], [0.0, 0.2]])
    center, axes = routing_trace.principal_axes(points)
    torch.testing.assert_close(center, torch.zeros(2).double())
    torch.testing.assert_close(axes, torch.eye(2).double())
    torch.testing.assert_close(routing_trace.principal_axes(-points)[1], axes)
    assert routing_trace.principal_axes(points[:, :1])[1].tolist() == [[1.0, 0.0]]
    assert bool(routing_trace.principal_axes(torch.zeros(3, 4))[1].isfinite().all())
    assert routing_trace.largest(torch.tensor([1.0, 2.0, 1.0, 2.0]), 3).tolist() == [1, 3, 0]


def test_of_matrix_capsules_only_the_classes_are_recorded_and_they_are_those_of_the_model():
    view = view_of("matrix")
    with torch.no_grad():
        out = view._forward(IMAGE[None], trace=True)
        whole = view.model(IMAGE[None], trace=True)
    torch.testing.assert_close(out.classes, whole.classes)
    torch.testing.assert_close(out.infos[-1].coupling, whole.infos[-1].coupling)
    iterations = len(whole.infos[0].coupling)
    assert [len(info.coupling) for info in out.infos] == [1, 1, iterations] and iterations > 1


# --- Drawing ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", DRAWING)
def test_a_pose_draws_what_the_model_draws_of_that_capsule_alone(kind):
    view = view_of(kind)
    model, inferred = view.model, view.infer(IMAGE)
    each = inferred.capsule_images
    assert each.shape == (view.capsules, *SPEC[:3])
    for j in range(view.capsules):
        with torch.no_grad():
            code = model.encode(IMAGE[None])
            if kind.startswith("capsnet"):
                expected = model.reconstruct(code, torch.tensor([j]))
            else:
                lone = torch.zeros_like(code.pose)
                lone[:, j] = code.pose[:, j]
                expected = model.decode(lone)
        torch.testing.assert_close(view.draw(j, inferred.pose[j]), expected[0])
        # A capsule that lost the competition shows what it stands for
        shown = view.draw(j, view._typical_poses[j]) if inferred.silent[j] else expected[0]
        torch.testing.assert_close(each[j], shown)
    if kind.startswith("sparse"):
        with torch.no_grad():
            alone = draw_capsules(model, model.encode(IMAGE[None]).pose[0]).alone
            torch.testing.assert_close(each[~inferred.silent], alone[~inferred.silent])


def test_a_capsule_with_less_than_half_a_mask_shows_what_it_stands_for():
    inferred = view_of("sparse").infer(IMAGE)
    mask = inferred.competition.mask
    assert bool((mask[~inferred.silent] >= 0.5).all()) and bool(inferred.silent[mask < 0.5].all())
    assert bool(((mask > 0) & (mask < 0.5)).any()), "some reach the decoder and are weak"


@pytest.mark.parametrize("kind", DRAWING)
def test_a_sweep_moves_each_number_from_limit_to_limit(kind):
    view = view_of(kind)
    pose = view.infer(IMAGE).pose[1]
    low, high = view.limits(1, pose)
    found = view.sweep(1, pose, steps=5)
    assert found.shape == (view.dimension, 5, *SPEC[:3])
    assert bool((low <= pose).all()) and bool((pose <= high).all()) and bool((low < high).all())
    for k in range(view.dimension):
        for n in range(5):
            moved = pose.clone()
            moved[k] = low[k] + (high[k] - low[k]) * n / 4
            torch.testing.assert_close(found[k, n], view.draw(1, moved))


def test_sweeps_are_those_of_the_papers_figures():
    capsnet = view_of("capsnet")
    pose = capsnet.infer(IMAGE).pose[2]
    torch.testing.assert_close(capsnet.sweep(2, pose, 11), perturbed(capsnet.model, pose, 2))
    torch.testing.assert_close(capsnet.sweep(2, pose)[:, 4], capsnet.draw(2, pose).expand(4, *SPEC[:3]))
    sparse = view_of("sparse")
    pose = sparse.infer(IMAGE).pose
    lone = torch.zeros_like(pose)
    lone[1] = pose[1]
    torch.testing.assert_close(sparse.sweep(1, pose[1], 11), swept(sparse.model, lone, 1).detach())
    poe = view_of("poe")
    used = int(poe.model.decoder.weight.argmax())
    mean = poe.model.decoder.pose_mean()[used].float()
    torch.testing.assert_close(poe.sweep(used, mean), generation.sweeps(poe.model, used), rtol=1e-4, atol=1e-5)


def test_a_capsule_that_no_image_taught_is_moved_over_a_standard_normal():
    view = explore(built(CONFIGS["poe"]))
    low, high = view.limits(0, torch.zeros(4))
    assert low.tolist() == [-2.5] * 4 and high.tolist() == [2.5] * 4
    assert float(view.limits(0, torch.full((4,), 3.0))[1].min()) == 3


# --- Samples ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["capsnet", "sparse", "sparse-matrix"])
def test_empirical_poses_are_those_of_examples_that_the_capsule_wins(kind):
    view = view_of(kind)
    readings = [view.infer(image) for image in EXAMPLES]
    won = {j: [x.pose[j] for x in readings if x.winner == j] for j in range(view.capsules)}
    grid = view.sample_grid(8, "empirical", 3)
    assert grid.capsules == tuple(j for j, own in won.items() if own)
    assert grid.images.shape == (8, len(grid.capsules), *SPEC[:3])
    for column, j in enumerate(grid.capsules):
        rows = grid.poses[:, column]
        at = {n for row in rows for n, own in enumerate(won[j]) if torch.allclose(own, row, atol=1e-5)}
        assert len(at) == min(8, len(won[j]))
        torch.testing.assert_close(view.sample(j, "empirical", 3), rows[0])
        torch.testing.assert_close(grid.images[2, column], view.draw(j, rows[2]))
    for j in set(won) - set(grid.capsules):
        assert refusal(DataError, "wins none", lambda j=j: view.sample(j, "empirical", 0))
    view = explore(view.model, (), EXAMPLES[:1])
    loser = (view.infer(EXAMPLES[0]).winner + 1) % view.capsules
    assert refusal(DataError, "wins none", lambda: view.sample(loser, "empirical", 0))


@pytest.mark.parametrize("domain", ["empirical", "mixture", "gaussian", "complete", "restricted"])
def test_experts_sample_their_own_domains(domain):
    view = view_of("poe")
    grid = view.sample_grid(3, domain, 7)
    assert grid.capsules == (0, 1, 2, 3) and grid.poses.shape == (3, 4, 4)
    own = generation.capsule_samples(view.model, 3, domain, 7)
    torch.testing.assert_close(grid.images, own, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(view.sample(2, domain, 7), grid.poses[0, 2])
    assert not torch.equal(view.sample_grid(3, domain, 8).poses, grid.poses)


def test_a_grid_has_twenty_capsules_at_most():
    torch.manual_seed(0)
    view = explore(replace(CONFIGS["poe"], capsules=23).build(SPEC))
    view.model.decoder.weight[:] = torch.arange(23)
    assert view.sample_grid(1, "complete", 0).capsules == tuple(range(3, 23))


# --- Errors -------------------------------------------------------------------------------------------------


def test_what_there_is_not_is_refused_in_one_line(kind):
    view = view_of(kind)
    pose = torch.zeros(view.dimension)
    last = f"0 to {view.capsules - 1}"
    for wrong in (-1, view.capsules):
        for ask in (view.draw, view.sweep, view.limits):
            assert refusal(ShapeError, last, lambda ask=ask, wrong=wrong: ask(wrong, pose))
        assert refusal(ShapeError, last, lambda wrong=wrong: view.routing(IMAGE, wrong))
        assert refusal(ShapeError, last, lambda wrong=wrong: view.sample(wrong, "empirical", 0))
    for length in (view.dimension - 1, view.dimension + 1):
        for ask in (view.draw, view.sweep, view.limits):
            expected = rf"\[{view.dimension}\] is wanted"
            assert refusal(ShapeError, expected, lambda ask=ask, n=length: ask(0, torch.zeros(n)))
    for child in (-1, view.children):
        assert refusal(ShapeError, f"child {child}", lambda c=child: view.routing(IMAGE, 0, (0, c)))
    assert refusal(ShapeError, "this model wants", lambda: view.infer(torch.zeros(1, 5, 5)))
    assert refusal(RecipeError, "at least 2", lambda: view.sweep(0, pose, 1))
    assert refusal(RecipeError, "unknown domain", lambda: view.sample(0, "complet", 0))
    assert refusal(RecipeError, "unknown domain", lambda: view.sample_grid(2, "complet", 0))
    if view.has_decoder:
        assert refusal(RecipeError, "1 to 8", lambda: view.sample_grid(9, "empirical", 0))
    else:
        assert refusal(ShapeError, "no decoder", lambda: view.draw(0, pose))
        assert refusal(ShapeError, "no decoder", lambda: view.sweep(0, pose))
        assert refusal(RecipeError, "none here", lambda: view.sample(0, "empirical", 0))


def test_classes_have_one_name_each_or_none():
    assert refusal(ShapeError, "2 names came for 3", lambda: explore(model_of("capsnet"), ("a", "b")))


def test_other_models_cannot_be_explored():
    assert refusal(RecipeError, "CNN cannot be explored", lambda: explore(built(SMALL["cnn"])))


def test_views_need_neither_server_nor_plots():
    code = "import sys, torchcaps.systems; print(*{'starlette', 'uvicorn', 'matplotlib'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not done.stdout.split()


# --- What each system is about ------------------------------------------------------------------------------


def test_the_competition_is_the_masks_own(kind):
    view = view_of(kind)
    found = view.infer(IMAGE).competition
    if not kind.startswith("sparse"):
        assert found is None
        return
    with torch.no_grad():
        out = view.model(IMAGE[None])
        mask, ranks = view.model.mask(out.support)
    assert torch.equal(found.rank, ranks[0]) and torch.equal(found.mask, mask[0])
    assert torch.equal(found.support, out.support[0])
    # The order of the scores is that of the ranks
    assert torch.equal(found.score.argsort(descending=True, stable=True), ranks[0].argsort())


def test_another_router_routes_the_same_votes(kind):
    view = view_of(kind)
    if kind.startswith("poe"):
        assert view.routers == ()
        with pytest.raises(RecipeError, match="leave it out"):
            view.routing(IMAGE, 0, router="em")
        return
    own = view.routing(IMAGE, 1)
    again = view.routing(IMAGE, 1, router=view.router)
    assert torch.equal(own.activation, again.activation)
    # Uniform coupling, whatever the votes are
    flat = view.routing(IMAGE, 1, router="uniform")
    assert flat.activation.shape == (1, view.capsules)
    torch.testing.assert_close(flat.vote_coupling, torch.full_like(flat.vote_coupling, 1 / view.capsules))
    with pytest.raises(RecipeError, match="unknown router 'nobody'"):
        view.routing(IMAGE, 1, router="nobody")
    # The model's own answer is still there
    assert torch.equal(view.routing(IMAGE, 1).activation, own.activation)


def test_nearest_examples_come_in_the_order_of_their_poses():
    view = view_of("matrix")
    found = view.infer(IMAGE)
    known = view._encoded_examples.capsules.pose
    for j in range(view.capsules):
        own = (view.winners == j).nonzero().flatten()
        order = own[(known[own, j] - found.pose[j]).norm(dim=-1).argsort()]
        for n, example in enumerate(order[:4]):
            assert torch.equal(found.nearest[j, n], EXAMPLES[example])
        assert not found.nearest[j, len(own) :].any()


def test_a_drawing_stands_in_its_frame():
    model = model_of("poe")
    assert explore(model).frame is None
    with pytest.raises(ShapeError, match="without frames"):
        explore(model).draw(0, torch.zeros(model.dimension), (1.0, 0.0, 0.0, 0.0))
    model.framed = True
    view = explore(model)
    pose = view.sample(0, "empirical", 3)
    upright = view.draw(0, pose)
    torch.testing.assert_close(view.draw(0, pose, view.frame.rest), upright, atol=1e-5, rtol=0)
    right = view.draw(0, pose, (1.0, 0.0, 2.0, 0.0))
    torch.testing.assert_close(right[..., 2:], upright[..., :-2], atol=1e-4, rtol=0)
    for wrong in ((1.0, 0.0), (9.0, 0.0, 0.0, 0.0)):
        with pytest.raises(ShapeError, match="frame"):
            view.draw(0, pose, wrong)


def test_a_question_runs_the_network_once(kind):
    """Counted at the first convolution; all questions about one image share a pass."""
    view = view_of(kind)
    view.infer(1 - IMAGE)  # what is computed once for all questions
    (first, *_) = [module for module in view.model.modules() if isinstance(module, torch.nn.Conv2d)]
    runs: list[int] = []
    first.register_forward_hook(lambda *_: runs.append(1))
    view.infer(IMAGE)
    view.routing(IMAGE.clone(), 0)
    view.routing(IMAGE, 1)
    assert len(runs) == 1
    view.infer(1 - IMAGE)
    assert len(runs) == 2
