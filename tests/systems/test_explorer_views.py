"""One contract for all networks that can be explored, against the models' own answers and loops over their children."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable
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
from torchcaps.explore import ExplorerView, explorer_view
from torchcaps.layers import SharedCapsules
from torchcaps.math.squash import squash
from torchcaps.routing import EM, Dynamic, route
from torchcaps.systems import routing_trace
from torchcaps.systems.capsnet.figures import maps_of, perturbed
from torchcaps.systems.matrix.figures import histogram, vote_distances
from torchcaps.systems.poe import generation
from torchcaps.systems.sparse.figures import draw_capsules, swept
from torchcaps.types import Batch, Capsules

CONFIGS: dict[str, Any] = {
    "capsnet": replace(SMALL["capsnet"], routing=Dynamic(3)),
    "matrix": replace(SMALL["matrix-test"], capsule_kernel=2, routing=EM(3, 0.1, damping=0.1), norm=True),
    "capsnet-shared": replace(SMALL["capsnet-small"], routing=Dynamic(3)),
    "sparse": SMALL["sparse"],
    "sparse-shared": SMALL["sparse-small"],
    "sparse-frames": replace(SMALL["sparse"], frames=True),
    "sparse-matrix": replace(SMALL["sparse-matrix"], capsule_kernel=2),
    "poe": SMALL["poe"],
    "poe-routed": ROUTED,
}
KINDS = list(CONFIGS)
DRAWING = [kind for kind in KINDS if kind != "matrix"]
IMAGE = images(1)[0]
EXAMPLES = images(12)


def model_of(kind: str) -> Any:
    """Fresh weights; products of experts have stronger ones, and know what the poses of a few images are like; norms of
    matrix capsules have seen a few images, too."""
    model = built(CONFIGS[kind])
    if kind == "matrix":
        for _ in range(30):
            model.train()(images(9))
        model.eval()
    if kind.startswith("poe"):
        shown = images(9)
        stage = model.stages()["decoder"]
        with torch.no_grad():
            model.energy.W.mul_(500)
            model.energy.offset.copy_(model.features(shown).mean(0))
            stage.prepare((shown * 255).byte())
            stage.objective(Batch(shown, torch.zeros(9).long(), torch.arange(9)), 0)
    return model


@pytest.fixture(params=KINDS)
def kind(request) -> str:
    return request.param


def subject_for(kind: str, examples: Tensor | None = EXAMPLES) -> ExplorerView[Any]:
    return explorer_view(model_of(kind), ("a", "b", "c"), examples)


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
        here = layer.places.repeat_interleave(len(W), 0) * below.activation[0, :, None]  # [i 2]
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


def answers(subject: ExplorerView[Any]) -> list[Any]:
    """All that the page asks of an image."""
    looked = subject.infer(IMAGE)
    asked = [looked, subject.routing(IMAGE, looked.winner, (0, 3)), subject.limits(1, looked.pose[1])]
    if not subject.draws:
        return asked
    pose = subject.sample(subject.sample_grid(1, "empirical", 4).capsules[0], "empirical", 4)
    return [*asked, subject.draw_each(IMAGE), subject.sweep(0, pose, 3), subject.sample_grid(2, "empirical", 5)]


# --- Facts and looks ----------------------------------------------------------------------------------------


def test_facts_are_those_of_the_model(kind):
    model = model_of(kind).train()
    subject = explorer_view(model, ("a", "b", "c"))
    assert not model.training and subject.spec == SPEC and subject.kind == kind.partition("-")[0]
    with torch.no_grad():
        pose = model.encode(IMAGE[None]).pose
    reading = read(model)
    assert (subject.capsules, subject.dimension) == pose.shape[1:]
    assert (subject.iterations, subject.children, subject.capsules) == reading.coupling.shape
    assert subject.children % math.prod(subject.places) == 0
    assert subject.draws == (kind != "matrix")
    by_class = kind in ("capsnet", "capsnet-shared", "matrix")
    assert subject.names == (("a", "b", "c") if by_class else tuple(f"capsule {j}" for j in range(4)))
    assert subject.domains == (("empirical", "complete", "restricted") if kind.startswith("poe") else ())
    assert subject.samples == bool(subject.domains)
    assert subject_for(kind).samples == subject.draws
    if by_class:
        assert explorer_view(model).names == ("0", "1", "2")


def test_look_is_the_models_own_answer(kind):
    subject = subject_for(kind)
    model, looked = subject.model, subject.infer(IMAGE)
    with torch.no_grad():
        code = model.encode(IMAGE[None])
    torch.testing.assert_close(looked.activation, code.activation[0])
    pose = squash(looked.pose) if kind.startswith("poe") else looked.pose
    torch.testing.assert_close(pose, code.pose[0])
    assert looked.pose.shape == (subject.capsules, subject.dimension) and 0 <= looked.winner < subject.capsules
    if kind in ("capsnet", "capsnet-shared", "matrix"):
        assert looked.winner == int(code.activation[0].argmax())
    elif kind.startswith("sparse"):
        assert int(model(IMAGE[None]).ranks[0, looked.winner]) == 0
    else:
        assert looked.winner == int(generation.winners(model, IMAGE[None]))
    if not subject.draws:
        assert looked.drawn is None and subject.draw_each(IMAGE) is None
        return
    with torch.no_grad():
        redrawn = model.reconstruct(code if kind.startswith("capsnet") else IMAGE[None])
    torch.testing.assert_close(looked.drawn, redrawn[0])


def test_answers_are_finite_and_the_same_again(kind):
    first, again = (tensors(answers(subject_for(kind))) for _ in range(2))
    assert len(first) == len(again) > 10
    for x, y in zip(first, again, strict=True):
        assert bool(x.isfinite().all()) and not x.requires_grad
        assert torch.equal(x, y)


def test_blank_images_are_looked_at_too(kind):
    subject = subject_for(kind, None)
    blank = torch.zeros(SPEC[:3])
    found = [subject.infer(blank), subject.routing(blank, 0)]
    assert all(bool(x.isfinite().all()) for x in tensors(found))


# --- Routing ------------------------------------------------------------------------------------------------


def test_maps_by_loops_over_children(kind):
    """What the children of a place send: coupling times activation, or what they add to |z|²."""
    subject = subject_for(kind)
    reading, (h, w) = read(subject.model), subject.places
    for parent in range(subject.capsules):
        found = subject.routing(IMAGE, parent)
        wanted = torch.zeros(subject.iterations, h, w)
        for t in range(subject.iterations):
            for i, value in enumerate(sent(subject.model, reading, t, parent)):
                place = i // (subject.children // (h * w))
                wanted[t, place // w, place % w] += value
        torch.testing.assert_close(found.maps * found.peak, wanted, rtol=1e-4, atol=1e-7)
        assert found.peak == pytest.approx(float(wanted.max()), rel=1e-4) and float(found.maps.max()) == 1


def sent(model: Any, reading: Reading, t: int, parent: int) -> list[float]:
    """By each child."""
    c = reading.coupling[t, :, parent].tolist()
    if not hasattr(model, "energy"):
        return [share * on for share, on in zip(c, reading.on.tolist(), strict=True)]
    votes = [reading.vote(i, parent) for i in range(len(c))]
    z = sum(share * vote for share, vote in zip(c, votes, strict=True)) + model.energy.bias[parent]
    return [abs(share * float(vote @ z)) for share, vote in zip(c, votes, strict=True)]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if not kind.startswith("sparse")])
def test_the_winners_maps_are_those_of_the_figures(kind):
    subject = subject_for(kind)
    found = subject.routing(IMAGE, subject.infer(IMAGE).winner).maps
    if kind.startswith("poe"):
        figure = generation.routing(subject.model, IMAGE[None]).contribution
        torch.testing.assert_close(found[-1] / found[-1].max(), figure[0] / figure.max())
        return
    with torch.no_grad():
        out = subject.model(IMAGE[None], trace=True)
    info, below = (out.info, out.primary) if kind.startswith("capsnet") else (out.infos[-1], out.below[-1])
    figure = maps_of(out.classes, below, info.coupling)[0][0, 0]  # [t h w]
    torch.testing.assert_close(found, figure / figure.max())


def test_activation_is_that_of_a_model_which_stops_there(kind):
    subject = subject_for(kind)
    found = subject.routing(IMAGE, 0).activation
    assert found.shape == (subject.iterations, subject.capsules)
    for t in range(subject.iterations):
        shorter = deepcopy(subject.model)
        if layer_of(shorter) is None:
            energy = shorter.energy
            energy.config = replace(energy.config, routing=replace(energy.config.routing, iterations=t + 1))
        else:
            layer_of(shorter).routing = replace(layer_of(shorter).routing, iterations=t + 1)
        with torch.no_grad():
            torch.testing.assert_close(found[t], shorter.encode(IMAGE[None]).activation[0], rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(found[-1], subject.infer(IMAGE).activation, rtol=1e-4, atol=1e-6)


def test_coupling_entropy_and_agreement_are_the_routers(kind):
    subject = subject_for(kind)
    c, parent = read(subject.model).coupling, subject.capsules - 1
    found = subject.routing(IMAGE, parent, (2, 0, 2))
    torch.testing.assert_close(found.coupling, c[..., parent].mean(-1))
    torch.testing.assert_close(found.weights, c[:, [2, 0, 2], parent])
    torch.testing.assert_close(found.shares, c[:, found.index, parent])
    assert found.agreement.shape == (subject.iterations, subject.capsules)
    for t in range(subject.iterations):
        shares = [(row / row.sum()).tolist() for row in c[t]]
        entropy = sum(-p * math.log(p) for row in shares for p in row if p > 0) / len(shares)
        assert float(found.entropy[t]) == pytest.approx(entropy, rel=1e-4, abs=1e-6)


def test_votes_are_shown_on_their_two_principal_axes(kind):
    """Projected by a singular value decomposition; the last mean with them."""
    subject = subject_for(kind)
    reading, parent = read(subject.model), 1
    found = subject.routing(IMAGE, parent, (0, 3))
    votes = torch.stack([reading.vote(i, parent) for i in range(subject.children)]).double()
    center = votes.mean(0)
    axes = torch.linalg.svd(votes - center).Vh[:2]
    axes = torch.stack([axis if axis[axis.abs().argmax()] > 0 else -axis for axis in axes])
    shown = [[float((vote - center) @ axis) for axis in axes] for vote in votes]
    close = {"rtol": 1e-3, "atol": 1e-5}
    torch.testing.assert_close(found.chosen, torch.tensor([shown[0], shown[3]]), **close)
    torch.testing.assert_close(found.cloud, torch.tensor([shown[i] for i in found.index.tolist()]), **close)
    if kind in ("matrix", "sparse-matrix"):
        with torch.no_grad():
            out = subject.model(IMAGE[None])
        mean = (out.classes if kind == "matrix" else out.latent).pose[0, parent].double()
    else:
        c = reading.coupling[-1, :, parent].double()
        mean = sum(c[i] * votes[i] for i in range(len(c))) / float(c.sum())
    torch.testing.assert_close(found.mean[-1].double(), axes @ (mean - center), **close)
    assert found.mean.shape == (subject.iterations, 2)


def test_the_cloud_is_of_those_who_send_most(kind, monkeypatch):
    subject = subject_for(kind)
    reading = read(subject.model)
    last = sent(subject.model, reading, -1, 0)
    monkeypatch.setattr(routing_trace, "CLOUD", 5)
    found = subject.routing(IMAGE, 0)
    values = [last[i] for i in found.index.tolist()]
    assert values == pytest.approx(sorted(last, reverse=True)[:5], rel=1e-4)
    assert found.cloud.shape == (5, 2) and found.shares.shape == (subject.iterations, 5)
    assert found.chosen.shape == (0, 2) and found.weights.shape == (subject.iterations, 0)


def test_histograms_are_of_em_routing_alone(kind):
    subject = subject_for(kind)
    found = subject.routing(IMAGE, 1).histogram
    if "matrix" not in kind:
        assert found is None
        return
    reading = read(subject.model)
    with torch.no_grad():
        mean = getattr(subject.model, "matrix", subject.model)(IMAGE[None]).classes.pose[0, 1]
    edges, wanted = found.edges.tolist(), torch.zeros(len(found.edges) - 1)
    for i in range(subject.children):
        distance = float((reading.vote(i, 1) - mean).norm())
        for n in range(len(wanted)):
            if edges[n] <= distance < edges[n + 1]:
                wanted[n] += reading.coupling[-1, i, 1]
    torch.testing.assert_close(found.counts[-1], wanted, rtol=1e-3, atol=1e-5)
    assert found.counts.shape == (subject.iterations, len(wanted)) and edges[0] == 0
    with torch.no_grad():
        own = vote_distances(getattr(subject.model, "matrix", subject.model), IMAGE[None])
    bars = histogram(*(x[:, 0] for x in own), edges[-1], len(wanted))  # [t j n]
    torch.testing.assert_close(found.counts, bars[:, 1], rtol=1e-3, atol=1e-5)
    everything = [subject.routing(IMAGE, j).histogram for j in range(subject.capsules)]
    assert all(torch.equal(other.edges, found.edges) for other in everything)
    total = sum(float(other.counts.sum()) for other in everything)
    assert 0.5 * float(reading.coupling.sum()) < total <= float(reading.coupling.sum()) * 1.001


def test_axes_have_one_sign_and_may_lack_a_second():
    points = torch.tensor([[3.0, 0.1], [-3.0, 0.1], [0.0, -0.4], [0.0, 0.2]])
    center, axes = routing_trace.plane(points)
    torch.testing.assert_close(center, torch.zeros(2).double())
    torch.testing.assert_close(axes, torch.eye(2).double())
    torch.testing.assert_close(routing_trace.plane(-points)[1], axes)
    assert routing_trace.plane(points[:, :1])[1].tolist() == [[1.0, 0.0]]
    assert bool(routing_trace.plane(torch.zeros(3, 4))[1].isfinite().all())
    assert routing_trace.most(torch.tensor([1.0, 2.0, 1.0, 2.0]), 3).tolist() == [1, 3, 0]


# --- Drawing ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", DRAWING)
def test_a_pose_draws_what_the_model_draws_of_that_capsule_alone(kind):
    subject = subject_for(kind)
    model, looked, each = subject.model, subject.infer(IMAGE), subject.draw_each(IMAGE)
    assert each.shape == (subject.capsules, *SPEC[:3])
    for j in range(subject.capsules):
        with torch.no_grad():
            code = model.encode(IMAGE[None])
            if kind.startswith("capsnet"):
                wanted = model.reconstruct(code, torch.tensor([j]))
            else:
                lone = torch.zeros_like(code.pose)
                lone[:, j] = code.pose[:, j]
                wanted = model.decode(lone)
        torch.testing.assert_close(subject.draw(j, looked.pose[j]), wanted[0])
        torch.testing.assert_close(each[j], wanted[0])
    if kind.startswith("sparse"):
        with torch.no_grad():
            torch.testing.assert_close(each, draw_capsules(model, model.encode(IMAGE[None]).pose[0]).alone)


@pytest.mark.parametrize("kind", DRAWING)
def test_a_sweep_moves_each_number_from_limit_to_limit(kind):
    subject = subject_for(kind)
    pose = subject.infer(IMAGE).pose[1]
    low, high = subject.limits(1, pose)
    found = subject.sweep(1, pose, steps=5)
    assert found.shape == (subject.dimension, 5, *SPEC[:3])
    assert bool((low <= pose).all()) and bool((pose <= high).all()) and bool((low < high).all())
    for k in range(subject.dimension):
        for n in range(5):
            moved = pose.clone()
            moved[k] = low[k] + (high[k] - low[k]) * n / 4
            torch.testing.assert_close(found[k, n], subject.draw(1, moved))


def test_sweeps_are_those_of_the_papers_figures():
    capsnet = subject_for("capsnet")
    pose = capsnet.infer(IMAGE).pose[2]
    torch.testing.assert_close(capsnet.sweep(2, pose, 11), perturbed(capsnet.model, pose, 2))
    torch.testing.assert_close(capsnet.sweep(2, pose)[:, 4], capsnet.draw(2, pose).expand(4, *SPEC[:3]))
    sparse = subject_for("sparse")
    pose = sparse.infer(IMAGE).pose
    lone = torch.zeros_like(pose)
    lone[1] = pose[1]
    torch.testing.assert_close(sparse.sweep(1, pose[1], 11), swept(sparse.model, lone, 1).detach())
    poe = subject_for("poe")
    used = int(poe.model.decoder.weight.argmax())
    mean = poe.model.decoder.pose_mean()[used].float()
    torch.testing.assert_close(poe.sweep(used, mean), generation.sweeps(poe.model, used), rtol=1e-4, atol=1e-5)


def test_a_capsule_that_no_image_taught_is_moved_over_a_standard_normal():
    subject = explorer_view(built(CONFIGS["poe"]))
    low, high = subject.limits(0, torch.zeros(4))
    assert low.tolist() == [-2.5] * 4 and high.tolist() == [2.5] * 4
    assert float(subject.limits(0, torch.full((4,), 3.0))[1].min()) == 3


# --- Samples ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["capsnet", "sparse", "sparse-matrix"])
def test_empirical_poses_are_those_of_examples_that_the_capsule_wins(kind):
    subject = subject_for(kind)
    looks = [subject.infer(image) for image in EXAMPLES]
    won = {j: [x.pose[j] for x in looks if x.winner == j] for j in range(subject.capsules)}
    wall = subject.sample_grid(8, "empirical", 3)
    assert wall.capsules == tuple(j for j, own in won.items() if own)
    assert wall.images.shape == (8, len(wall.capsules), *SPEC[:3])
    for column, j in enumerate(wall.capsules):
        rows = wall.poses[:, column]
        at = {n for row in rows for n, own in enumerate(won[j]) if torch.allclose(own, row, atol=1e-5)}
        assert len(at) == min(8, len(won[j]))
        torch.testing.assert_close(subject.sample(j, "empirical", 3), rows[0])
        torch.testing.assert_close(wall.images[2, column], subject.draw(j, rows[2]))
    for j in set(won) - set(wall.capsules):
        assert refusal(DataError, "wins none", lambda j=j: subject.sample(j, "empirical", 0))
    subject = explorer_view(subject.model, (), EXAMPLES[:1])
    loser = (subject.infer(EXAMPLES[0]).winner + 1) % subject.capsules
    assert refusal(DataError, "wins none", lambda: subject.sample(loser, "empirical", 0))


@pytest.mark.parametrize("domain", ["empirical", "complete", "restricted"])
def test_experts_sample_their_own_domains(domain):
    subject = subject_for("poe")
    wall = subject.sample_grid(3, domain, 7)
    assert wall.capsules == (0, 1, 2, 3) and wall.poses.shape == (3, 4, 4)
    own = generation.capsule_samples(subject.model, 3, domain, 7)
    torch.testing.assert_close(wall.images, own, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(subject.sample(2, domain, 7), wall.poses[0, 2])
    assert not torch.equal(subject.sample_grid(3, domain, 8).poses, wall.poses)


def test_a_wall_has_twenty_capsules_at_most():
    torch.manual_seed(0)
    subject = explorer_view(replace(CONFIGS["poe"], capsules=23).build(SPEC))
    subject.model.decoder.weight[:] = torch.arange(23)
    assert subject.sample_grid(1, "complete", 0).capsules == tuple(range(3, 23))


# --- Errors -------------------------------------------------------------------------------------------------


def test_what_there_is_not_is_refused_in_one_line(kind):
    subject = subject_for(kind)
    pose = torch.zeros(subject.dimension)
    last = f"0 to {subject.capsules - 1}"
    for wrong in (-1, subject.capsules):
        for ask in (subject.draw, subject.sweep, subject.limits):
            assert refusal(ShapeError, last, lambda ask=ask, wrong=wrong: ask(wrong, pose))
        assert refusal(ShapeError, last, lambda wrong=wrong: subject.routing(IMAGE, wrong))
        assert refusal(ShapeError, last, lambda wrong=wrong: subject.sample(wrong, "empirical", 0))
    for length in (subject.dimension - 1, subject.dimension + 1):
        for ask in (subject.draw, subject.sweep, subject.limits):
            wanted = rf"\[{subject.dimension}\] is wanted"
            assert refusal(ShapeError, wanted, lambda ask=ask, n=length: ask(0, torch.zeros(n)))
    for child in (-1, subject.children):
        assert refusal(ShapeError, f"child {child}", lambda c=child: subject.routing(IMAGE, 0, (0, c)))
    assert refusal(ShapeError, "this model wants", lambda: subject.infer(torch.zeros(1, 5, 5)))
    assert refusal(RecipeError, "at least 2", lambda: subject.sweep(0, pose, 1))
    assert refusal(RecipeError, "unknown domain", lambda: subject.sample(0, "complet", 0))
    assert refusal(RecipeError, "unknown domain", lambda: subject.sample_grid(2, "complet", 0))
    if subject.draws:
        assert refusal(RecipeError, "1 to 8", lambda: subject.sample_grid(9, "empirical", 0))
    else:
        assert refusal(ShapeError, "no decoder", lambda: subject.draw(0, pose))
        assert refusal(ShapeError, "no decoder", lambda: subject.sweep(0, pose))
        assert refusal(RecipeError, "none here", lambda: subject.sample(0, "empirical", 0))


def test_classes_have_one_name_each_or_none():
    assert refusal(ShapeError, "2 names came for 3", lambda: explorer_view(model_of("capsnet"), ("a", "b")))


def test_other_models_cannot_be_explored():
    text = refusal(RecipeError, "CNN cannot be explored", lambda: explorer_view(built(SMALL["cnn"])))
    assert all(name in text for name in ("CapsNet", "MatrixCaps", "SparseCaps", "SparseMatrixCaps", "PoE"))


def test_subjects_need_neither_server_nor_plots():
    code = "import sys, torchcaps.explore; print(*{'starlette', 'uvicorn', 'matplotlib'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not done.stdout.split()
