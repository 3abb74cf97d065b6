"""Capsule layers against a routing of plain dictionaries: who votes for whom is spelled out edge by edge."""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Callable, Hashable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import gradcheck

from torchcaps.errors import RecipeError, ShapeError, TorchcapsError
from torchcaps.layers import ClassCapsules, ConvCapsules, DenseCapsules, SharedCapsules
from torchcaps.math.grid import Grid
from torchcaps.routing import EM, Dynamic, route
from torchcaps.types import Capsules

Child = Hashable
Parent = tuple[Hashable, int]  # where it stands, and its type
Votes = dict[tuple[Child, Parent], list[float]]
Parents = dict[Parent, tuple[list[float], float]]  # pose and activation

SHARP = EM(iterations=3, final_inverse_temperature=1.0, min_variance=0.01)
ALONE = EM(iterations=3, final_inverse_temperature=1.0, min_variance=0.01, competition="positions")


# --- Routing, edge by edge ----------------------------------------------------------------------------------


def slow_shares(logits: dict[tuple[Child, Parent], float], across_parents: bool) -> dict[tuple[Child, Parent], float]:
    """Softmax over all the parents that a child votes for, or over those of one type."""
    groups = defaultdict(list)
    for child, parent in logits:
        groups[child if across_parents else (child, parent[1])].append((child, parent))
    share = {}
    for edges in groups.values():
        top = max(logits[e] for e in edges)
        total = math.fsum(math.exp(logits[e] - top) for e in edges)
        share.update({e: math.exp(logits[e] - top) / total for e in edges})
    return share


def by_parent(votes: Votes) -> dict[Parent, list[tuple[Child, Parent]]]:
    edges = defaultdict(list)
    for child, parent in votes:
        edges[parent].append((child, parent))
    return edges


def slow_em(votes: Votes, on: dict[Child, float], s: EM, beta_a: list[float], beta_u: list[float]) -> Parents:
    """Procedure 1 of Hinton 2018, one capsule at a time."""
    everyone = s.competition == "all"
    R = slow_shares(dict.fromkeys(votes, 0.0), everyone)
    parents: Parents = {}
    for t in range(s.iterations):
        lam = s.final_inverse_temperature * (1 - s.decay ** (t + 1))
        logits = {}
        for c, edges in by_parent(votes).items():
            weight = {e: R[e] * on[e[0]] for e in edges}
            mass = math.fsum(weight.values())
            H = range(len(votes[edges[0]]))
            mu = [math.fsum(weight[e] * votes[e][h] for e in edges) / mass for h in H]
            var = [math.fsum(weight[e] * (votes[e][h] - mu[h]) ** 2 for e in edges) / mass + s.min_variance for h in H]
            cost = sum((beta_u[c[1]] + math.log(math.sqrt(var[h]))) * mass for h in H)
            a = 1 / (1 + math.exp(-lam * (beta_a[c[1]] - cost)))
            parents[c] = mu, a
            for e in edges:
                fit = sum((votes[e][h] - mu[h]) ** 2 / (2 * var[h]) for h in H)
                logits[e] = math.log(a) - fit - 0.5 * sum(math.log(2 * math.pi * v) for v in var)
        R = slow_shares(logits, everyone)
    return parents


def slow_dynamic(votes: Votes, iterations: int) -> Parents:
    """Procedure 1 of Sabour 2017, one capsule at a time."""
    b = dict.fromkeys(votes, 0.0)
    parents: Parents = {}
    for _ in range(iterations):
        c = slow_shares(b, True)
        for parent, edges in by_parent(votes).items():
            s = [math.fsum(c[e] * votes[e][h] for e in edges) for h in range(len(votes[edges[0]]))]
            length = math.hypot(*s)
            v = [length / (1 + length**2) * x for x in s]
            parents[parent] = v, math.hypot(*v)
            for e in edges:
                b[e] += sum(x * y for x, y in zip(votes[e], v, strict=True))
    return parents


def cast(pose: Tensor, W: Tensor, kind: str) -> list[float]:
    """W x, or M W with the 16 numbers of the pose in four rows."""
    vote: list[float] = (W @ pose if kind == "vector" else (pose.view(4, 4) @ W).flatten()).tolist()
    return vote


def dense_votes(pose: Tensor, W: Tensor, kind: str) -> Votes:
    """Children [i d] of one sample, W [i j . .]."""
    i, j = W.shape[:2]
    return {(c, (0, p)): cast(pose[c], W[c, p], kind) for c in range(i) for p in range(j)}


def conv_votes(pose: Tensor, W: Tensor, kernel: int, stride: int, kind: str) -> Votes:
    """Children [h w i d] of one sample, W [(n i) j . .]: the child at (y, x) of a window uses block y * kernel + x."""
    height, width, types, _ = pose.shape
    votes: Votes = {}
    for row in range((height - kernel) // stride + 1):
        for column in range((width - kernel) // stride + 1):
            for y in range(kernel):
                for x in range(kernel):
                    for c in range(types):
                        place = row * stride + y, column * stride + x
                        for p in range(W.shape[1]):
                            M = W[(y * kernel + x) * types + c, p]
                            votes[(*place, c), ((row, column), p)] = cast(pose[place][c], M, kind)
    return votes


def slow_parents(votes: Votes, on: dict[Child, float], layer: Any) -> tuple[Tensor, Tensor]:
    """Poses [(parents) k] and activations [(parents)], places first, types last."""
    if isinstance(layer.routing, EM):
        learned = (layer.activation_bias[name].tolist() for name in ("beta_a", "beta_u"))
        parents = slow_em(votes, on, layer.routing, *learned)
    else:
        parents = slow_dynamic(votes, layer.routing.iterations)
    rows = [parents[p] for p in sorted(parents)]
    return torch.tensor([r[0] for r in rows]).double(), torch.tensor([r[1] for r in rows]).double()


# --- Children and layers ------------------------------------------------------------------------------------


def children(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Capsules:
    """Random children with poses [shape] and activations in [.05, .95]."""
    make = torch.Generator().manual_seed(seed)
    pose = torch.randn(*shape, generator=make, dtype=torch.float64)
    on = 0.05 + 0.9 * torch.rand(*shape[:-1], generator=make, dtype=torch.float64)
    return Capsules(pose.to(dtype), on.to(dtype))


def stirred(layer: Any, seed: int = 1) -> Any:
    """The layer in float64 with random parameters of size 1/2."""
    layer = layer.double()
    make = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in layer.parameters():
            p.copy_(0.5 * torch.randn(p.shape, generator=make, dtype=torch.float64))
    return layer


def flat_on(activation: Tensor) -> dict[Child, float]:
    return dict(enumerate(activation.tolist()))


def placed_on(activation: Tensor) -> dict[Child, float]:
    h, w, i = activation.shape
    return {(y, x, c): float(activation[y, x, c]) for y in range(h) for x in range(w) for c in range(i)}


# --- Dense --------------------------------------------------------------------------------------------------

DENSE: list[tuple[Any, str, int, int]] = [
    (Dynamic(), "vector", 3, 4), (Dynamic(iterations=1), "vector", 5, 2), (Dynamic(), "matrix", 16, 16),
    (SHARP, "vector", 3, 4), (SHARP, "matrix", 16, 16), (ALONE, "matrix", 16, 16),
]  # fmt: skip


@pytest.mark.parametrize(("routing", "pose", "d", "k"), DENSE)
def test_dense_capsules_edge_by_edge(routing: Any, pose: str, d: int, k: int) -> None:
    layer = stirred(DenseCapsules(6, 3, d, k, routing=routing, pose=pose))
    x = children(2, 6, d)
    parents, _ = layer(x)
    for s in range(2):
        votes = dense_votes(x.pose[s], layer.W.detach(), pose)
        wanted = slow_parents(votes, flat_on(x.activation[s]), layer)
        torch.testing.assert_close(
            (parents.pose[s].detach(), parents.activation[s].detach()), wanted, rtol=1e-6, atol=1e-8
        )


@pytest.mark.parametrize(("routing", "pose", "d", "k"), DENSE)
def test_dense_capsules_forget_the_places_of_their_children(routing: Any, pose: str, d: int, k: int) -> None:
    layer = stirred(DenseCapsules(12, 3, d, k, routing=routing, pose=pose))
    x = children(2, 2, 3, 2, d)
    flat = Capsules(x.pose.reshape(2, 12, d), x.activation.reshape(2, 12))
    learned = {name: p.detach() for name, p in layer.activation_bias.items()}
    wanted, _ = route(flat, layer.W.detach(), routing, pose=pose, **learned)
    for given in (x, flat):
        torch.testing.assert_close(layer(given)[0], wanted, rtol=0, atol=0)


def test_samples_are_routed_each_for_itself() -> None:
    layer = stirred(DenseCapsules(6, 3, 4, 5))
    x = children(3, 6, 4)
    whole = layer(x)[0].pose
    for s in range(3):
        alone = layer(Capsules(x.pose[s : s + 1], x.activation[s : s + 1]))[0].pose
        torch.testing.assert_close(whole[s : s + 1], alone)


def test_what_a_layer_defaults_to() -> None:
    grid = Grid.of_image(4, 4)
    assert DenseCapsules(2, 2, 2, 2).routing == Dynamic()
    assert ConvCapsules(grid, 1, 1).routing == ClassCapsules(grid, 1, 1).routing == EM()
    assert list(DenseCapsules(3, 4, 5, 6).W.shape) == [3, 4, 6, 5]
    assert list(ConvCapsules(grid, 3, 5, kernel=2).W.shape) == [12, 5, 4, 4]
    assert list(ClassCapsules(grid, 3, 5).W.shape) == [3, 5, 4, 4]


# --- Convolutional ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("height", [3, 4, 7, 14])
@pytest.mark.parametrize("width", [3, 5, 8])
@pytest.mark.parametrize(("kernel", "stride"), [(1, 1), (2, 1), (3, 1), (3, 2), (2, 3)])
def test_conv_shapes(height: int, width: int, kernel: int, stride: int) -> None:
    layer = ConvCapsules(Grid.of_image(height, width), 2, 3, kernel=kernel, stride=stride, routing=EM(iterations=2))
    parents, info = layer(children(2, height, width, 2, 16, dtype=torch.float32))
    out = torch.nn.functional.conv2d(torch.zeros(1, 1, height, width), torch.zeros(1, 1, kernel, kernel), stride=stride)
    assert parents.pose.shape == (2, *out.shape[2:], 3, 16)
    assert parents.activation.shape == (2, *out.shape[2:], 3)
    assert (layer.grid.height, layer.grid.width) == tuple(out.shape[2:])
    assert bool(parents.pose.isfinite().all() and parents.activation.isfinite().all())
    assert bool(info.coupling.isfinite().all())


@pytest.mark.parametrize(
    ("routing", "pose", "d", "k"),
    [(SHARP, "matrix", 16, 16), (ALONE, "matrix", 16, 16), (SHARP, "vector", 2, 3), (Dynamic(), "vector", 2, 3)],
)
@pytest.mark.parametrize(("h", "w", "kernel", "stride"), [(4, 3, 2, 1), (4, 4, 3, 1), (6, 5, 3, 2)])
def test_conv_capsules_edge_by_edge(
    routing: Any, pose: str, d: int, k: int, h: int, w: int, kernel: int, stride: int
) -> None:
    layer = stirred(
        ConvCapsules(
            Grid.of_image(h, w), 2, 2, kernel=kernel, stride=stride, routing=routing, pose=pose,
            child_dimension=d, parent_dimension=k,
        )
    )  # fmt: skip
    x = children(2, h, w, 2, d)
    parents, _ = layer(x)
    for s in range(2):
        votes = conv_votes(x.pose[s], layer.W.detach(), kernel, stride, pose)
        wanted = slow_parents(votes, placed_on(x.activation[s]), layer)
        found = parents.pose[s].detach().reshape(-1, k), parents.activation[s].detach().flatten()
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("routing", [SHARP, ALONE])
def test_a_kernel_over_the_whole_grid_is_a_dense_layer(routing: EM) -> None:
    conv = stirred(ConvCapsules(Grid.of_image(3, 3), 2, 3, kernel=3, routing=routing))
    dense = stirred(DenseCapsules(18, 3, 16, 16, routing=routing, pose="matrix"))
    dense.load_state_dict(conv.state_dict())
    x = children(2, 3, 3, 2, 16)
    a, b = conv(x)[0], dense(x)[0]
    assert a.pose.shape == (2, 1, 1, 3, 16)
    torch.testing.assert_close(a.pose.flatten(1, 3), b.pose)
    torch.testing.assert_close(a.activation.flatten(1), b.activation)


@pytest.mark.parametrize(("stride", "rows", "interior"), [(1, 14, slice(4, 7)), (2, 21, slice(2, 7))])
@pytest.mark.parametrize("routing", [EM(iterations=2, final_inverse_temperature=1.0), Dynamic(iterations=2)])
def test_a_shift_of_the_children_by_the_stride_shifts_the_parents(
    stride: int, rows: int, interior: slice, routing: Any
) -> None:
    """Away from the border, where a child has fewer windows; two iterations reach two windows far."""
    layer = stirred(ConvCapsules(Grid.of_image(rows, 5), 1, 2, stride=stride, routing=routing))
    x = children(1, rows + stride, 5, 1, 16)
    before = layer(Capsules(x.pose[:, :rows], x.activation[:, :rows]))[0]
    after = layer(Capsules(x.pose[:, stride:], x.activation[:, stride:]))[0]
    moved = slice(interior.start + 1, interior.stop + 1)
    torch.testing.assert_close(after.pose[:, interior], before.pose[:, moved])
    torch.testing.assert_close(after.activation[:, interior], before.activation[:, moved])
    assert not torch.allclose(after.pose[:, interior], before.pose[:, interior])


def test_children_that_no_window_sees_do_not_matter() -> None:
    layer = stirred(ConvCapsules(Grid.of_image(6, 6), 1, 2, stride=2))
    x = children(1, 6, 6, 1, 16)
    pose = x.pose.clone().requires_grad_()
    out = layer(Capsules(pose, x.activation))[0].pose
    out.sum().backward()
    assert pose.grad is not None
    assert not pose.grad[:, 5].any()
    assert not pose.grad[:, :, 5].any()
    assert bool(pose.grad[:, :5, :5].flatten(3).any(-1).all())
    other = x.pose.clone()
    other[:, 5], other[:, :, 5] = 7.0, -3.0
    torch.testing.assert_close(layer(Capsules(other, x.activation))[0].pose, out)


# --- Classes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("routing", "pose", "d", "k"),
    [(SHARP, "matrix", 16, 16), (ALONE, "matrix", 16, 16), (SHARP, "vector", 3, 4), (Dynamic(), "vector", 3, 2)],
)
@pytest.mark.parametrize("scale", [0.0, 0.01, 0.3])
def test_class_capsules_edge_by_edge(routing: Any, pose: str, d: int, k: int, scale: float) -> None:
    """W shared over places; row and column of the receptive field's center added to two elements of each vote."""
    grid = Grid.of_image(8, 7).window(3, 2).out  # 3 x 3 places, centers at 1.5, 3.5, 5.5 pixels
    layer = stirred(
        ClassCapsules(
            grid, 2, 3, routing=routing, pose=pose, child_dimension=d, parent_dimension=k, coordinate_scale=scale
        )
    )
    x = children(2, 3, 3, 2, d)
    parents, _ = layer(x)
    assert parents.pose.shape == (2, 3, k)
    first, second = (3, 7) if pose == "matrix" else (0, 1)
    for s in range(2):
        votes: Votes = {}
        for row in range(3):
            for column in range(3):
                for c in range(2):
                    for p in range(3):
                        vote = cast(x.pose[s, row, column, c], layer.W.detach()[c, p], pose)
                        vote[first] += scale * (1.5 + 2 * row)
                        vote[second] += scale * (1.5 + 2 * column)
                        votes[(row, column, c), (0, p)] = vote
        wanted = slow_parents(votes, placed_on(x.activation[s]), layer)
        torch.testing.assert_close(
            (parents.pose[s].detach(), parents.activation[s].detach()), wanted, rtol=1e-6, atol=1e-7
        )


def test_without_coordinates_class_capsules_are_dense_with_the_same_weights_everywhere() -> None:
    grid = Grid.of_image(2, 3)
    shared = stirred(ClassCapsules(grid, 2, 3, routing=SHARP, coordinate_scale=0.0))
    dense = stirred(DenseCapsules(12, 3, 16, 16, routing=SHARP, pose="matrix"))
    with torch.no_grad():
        for place in range(6):
            dense.W[2 * place : 2 * place + 2] = shared.W
        for name in shared.activation_bias:
            dense.activation_bias[name].copy_(shared.activation_bias[name])
    x = children(2, 2, 3, 2, 16)
    a, b = shared(x)[0], dense(x)[0]
    torch.testing.assert_close(a, b)
    for out in (a, b):
        (out.pose.square().sum() + out.activation.sum()).backward()
    torch.testing.assert_close(shared.W.grad, dense.W.grad.view(6, 2, 3, 4, 4).sum(0))


def test_without_coordinates_places_do_not_matter_and_with_them_they_do() -> None:
    x = children(1, 2, 3, 2, 16)
    turned = Capsules(x.pose.flip(1), x.activation.flip(1))
    for scale, same in ((0.0, True), (0.05, False)):
        layer = stirred(ClassCapsules(Grid.of_image(2, 3), 2, 3, routing=SHARP, coordinate_scale=scale))
        assert torch.allclose(layer(x)[0].pose, layer(turned)[0].pose, atol=1e-9) is same


def test_a_moved_image_moves_the_pose_of_a_class_by_as_much() -> None:
    """The same children 2 pixels lower and 2 to the right: two elements move by 2 times the scale, no other does."""
    top, low = Grid(2, 2, start=0.5), Grid(2, 2, start=2.5)
    x = children(1, 2, 2, 2, 16)
    poses = []
    for grid in (top, low):
        layer = stirred(ClassCapsules(grid, 2, 3, routing=SHARP, coordinate_scale=0.1))
        poses.append(layer(x)[0].pose.detach().view(3, 4, 4))
    wanted = torch.zeros(3, 4, 4, dtype=torch.float64)
    wanted[:, 0, 3] = wanted[:, 1, 3] = 0.2
    torch.testing.assert_close(poses[1] - poses[0], wanted, rtol=0, atol=1e-6)


# --- Shared W, and votes that say where they come from ------------------------------------------------------


@pytest.mark.parametrize(("routing", "d", "k"), [(Dynamic(), 3, 4), (Dynamic(), 8, 16), (SHARP, 3, 4)])
@pytest.mark.parametrize("scale", [0.0, 0.02, 0.3])
def test_shared_capsules_edge_by_edge(routing: Any, d: int, k: int, scale: float) -> None:
    """Pixels from the middle of all centers, times the child's activation, added to two elements of each vote."""
    grid = Grid.of_image(8, 7).window(3, 2).out  # 3 x 3 places, two pixels from one to the next
    layer = stirred(SharedCapsules(grid, 2, 3, d, k, routing=routing, coordinate_scale=scale))
    x = children(2, 3, 3, 2, d)
    parents, _ = layer(x)
    assert parents.pose.shape == (2, 3, k)
    first, second = (3, 7) if k == 16 else (0, 1)
    for s in range(2):
        on = placed_on(x.activation[s])
        votes: Votes = {}
        for row, column, c in on:
            for p in range(3):
                vote = cast(x.pose[s, row, column, c], layer.W.detach()[c, p], "vector")
                vote[first] += on[row, column, c] * scale * 2 * (row - 1)
                vote[second] += on[row, column, c] * scale * 2 * (column - 1)
                votes[(row, column, c), (0, p)] = vote
        wanted = slow_parents(votes, on, layer)
        torch.testing.assert_close(
            (parents.pose[s].detach(), parents.activation[s].detach()), wanted, rtol=1e-6, atol=1e-7
        )


def test_shared_capsules_without_coordinates_are_dense_with_the_same_weights_everywhere() -> None:
    one = stirred(SharedCapsules(Grid.of_image(2, 3), 2, 3, 4, 5, coordinate_scale=0.0))
    own = stirred(DenseCapsules(12, 3, 4, 5))
    with torch.no_grad():
        own.W.copy_(one.W.repeat(6, 1, 1, 1))
    x = children(2, 2, 3, 2, 4)
    a, b = one(x)[0], own(x)[0]
    torch.testing.assert_close(a, b)
    for out in (a, b):
        out.pose.square().sum().backward()
    torch.testing.assert_close(one.W.grad, own.W.grad.view(6, 2, 3, 5, 4).sum(0))


def test_a_child_that_is_off_does_not_vote_for_its_place() -> None:
    """One child is on: moved one place to the right, it is the column's element of each pose that differs."""
    layer = stirred(SharedCapsules(Grid.of_image(1, 3), 1, 2, 3, 4, routing=Dynamic(iterations=1)))
    left = Capsules(torch.zeros(1, 1, 3, 1, 3).double(), torch.zeros(1, 1, 3, 1).double())
    left.pose[0, 0, 0], left.activation[0, 0, 0] = 0.5, 0.8
    right = Capsules(left.pose.roll(1, 2), left.activation.roll(1, 2))
    votes = [
        torch.einsum("ijkd,bid->bjk", layer.expanded_weights(), layer.with_coordinates(x).pose) for x in (left, right)
    ]
    wanted = torch.zeros(1, 2, 4).double()
    wanted[..., 1] = 0.8 * 0.02
    torch.testing.assert_close(votes[1] - votes[0], wanted)


# --- What all layers share ----------------------------------------------------------------------------------


def dense(routing: Any = SHARP) -> tuple[nn.Module, tuple[int, ...]]:
    return DenseCapsules(8, 3, 16, 16, routing=routing, pose="matrix"), (2, 8, 16)


def conv(routing: Any = SHARP) -> tuple[nn.Module, tuple[int, ...]]:
    return ConvCapsules(Grid.of_image(4, 4), 1, 2, routing=routing, std=0.5), (2, 4, 4, 1, 16)


def classes(routing: Any = SHARP) -> tuple[nn.Module, tuple[int, ...]]:
    return ClassCapsules(Grid.of_image(3, 2), 2, 3, routing=routing, std=0.5), (2, 3, 2, 2, 16)


def shared(routing: Any = SHARP) -> tuple[nn.Module, tuple[int, ...]]:
    return SharedCapsules(Grid.of_image(3, 2), 2, 3, 4, 5, routing=routing), (2, 3, 2, 2, 4)


LAYERS = [dense, conv, classes, shared]
Build = Callable[..., tuple[nn.Module, tuple[int, ...]]]


@pytest.mark.parametrize("build", LAYERS)
@pytest.mark.parametrize("routing", [SHARP, ALONE, Dynamic(), Dynamic(gradient="last"), Dynamic(over="children")])
def test_gradients_reach_every_parameter_and_every_child(build: Build, routing: Any) -> None:
    layer, shape = build(routing)
    layer = stirred(layer)
    x = children(*shape)
    pose, on = x.pose.requires_grad_(), x.activation.requires_grad_()
    parents, _ = layer(Capsules(pose, on))
    (parents.pose.square().sum() + parents.activation.sum()).backward()
    for name, p in layer.named_parameters():
        assert p.grad is not None, name
        assert bool(p.grad.isfinite().all()), name
        assert bool((p.grad != 0).all()), name
    assert pose.grad is not None
    assert bool((pose.grad != 0).all())
    if isinstance(routing, EM):
        assert on.grad is not None
        assert bool((on.grad != 0).all())


@pytest.mark.parametrize("build", LAYERS)
@pytest.mark.parametrize("routing", [SHARP, Dynamic(iterations=2)])
def test_gradients_are_right(build: Build, routing: Any) -> None:
    layer, shape = build(routing)
    layer = stirred(layer)
    x = children(1, *shape[1:])
    pose, on = x.pose.requires_grad_(), x.activation.requires_grad_()
    assert gradcheck(lambda pose, on: tuple(layer(Capsules(pose, on))[0]), (pose, on), fast_mode=True, atol=1e-4)


def test_weights_of_version_0_1_still_load() -> None:
    routing = EM()
    layer = DenseCapsules(3, 2, 4, 4, routing=routing)
    old = {"W": torch.ones(3, 2, 4, 4), "learned.beta_a": torch.ones(2), "learned.beta_u": torch.zeros(2)}
    nn.Sequential(layer).load_state_dict({f"0.{name}": value for name, value in old.items()})
    assert bool((layer.activation_bias["beta_a"] == 1).all())


@pytest.mark.parametrize("build", LAYERS)
def test_the_state_is_the_parameters_and_comes_back(build: Build) -> None:
    one, shape = build()
    two, _ = build()
    assert set(one.state_dict()) == {"W", "activation_bias.beta_a", "activation_bias.beta_u"}
    x = children(*shape, dtype=torch.float32)
    assert not torch.allclose(one(x)[0].pose, two(x)[0].pose)
    two.load_state_dict(one.state_dict())
    torch.testing.assert_close(two(x)[0], one(x)[0], rtol=0, atol=0)
    torch.testing.assert_close(copy.deepcopy(one)(x)[0], one(x)[0], rtol=0, atol=0)
    plain, _ = build(Dynamic())
    assert set(plain.state_dict()) == {"W"}


@pytest.mark.parametrize("build", LAYERS)
@pytest.mark.parametrize("routing", [EM(), SHARP, ALONE, Dynamic(), Dynamic(agreement="cosine")])
@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e-12, 1e6, 1e12, 1e17])
@pytest.mark.parametrize("on", [0.0, 1.0])
def test_extreme_poses_and_activations_make_no_nan(build: Build, routing: Any, scale: float, on: float) -> None:
    torch.manual_seed(0)
    layer, shape = build(routing)
    x = children(*shape, dtype=torch.float32)
    pose, activation = (scale * x.pose).requires_grad_(), torch.full(shape[:-1], on, requires_grad=True)
    parents, _ = layer(Capsules(pose, activation))
    (parents.pose.sum() + parents.activation.sum()).backward()
    assert bool(parents.pose.isfinite().all())
    assert bool(((parents.activation >= 0) & (parents.activation <= 1 + 1e-6)).all())
    gradients = [p.grad for p in layer.parameters()] + [pose.grad]
    assert all(bool(g.isfinite().all()) for g in gradients)


@pytest.mark.parametrize("build", LAYERS)
@pytest.mark.parametrize("routing", [SHARP, Dynamic()])
def test_a_trace_records_every_iteration_and_changes_nothing(build: Build, routing: Any) -> None:
    layer, shape = build(routing)
    x = children(*shape, dtype=torch.float32)
    quiet, last = layer(x)
    traced, info = layer(x, trace=True)
    torch.testing.assert_close(quiet, traced, rtol=0, atol=0)
    assert len(info.coupling) == 3
    assert len(last.coupling) == 1
    torch.testing.assert_close(info.coupling[-1], last.coupling[0], rtol=0, atol=0)
    assert not info.coupling.requires_grad
    assert last.parents is None
    for recorded, returned in zip(info.parents, traced, strict=True):
        assert not recorded.requires_grad
        assert torch.equal(recorded[-1], returned.reshape(recorded[-1].shape))  # places are folded into the batch


def test_weights_start_within_two_standard_deviations() -> None:
    torch.manual_seed(0)
    W = DenseCapsules(20, 10, 8, 16, std=0.3).W.detach()
    assert float(W.abs().max()) <= 0.6 + 1e-6
    assert float(W.mean()) == pytest.approx(0, abs=0.01)
    assert float(W.std()) == pytest.approx(0.3 * 0.8796, rel=0.03)  # of a normal cut at two standard deviations


# --- Errors -------------------------------------------------------------------------------------------------

GRID = Grid.of_image(5, 5)
WRONG: list[tuple[Callable[[], Any], str]] = [
    (lambda: DenseCapsules(0, 3, 4, 4), "children = 0"),
    (lambda: DenseCapsules(3, 0, 4, 4), "parents = 0"),
    (lambda: DenseCapsules(3, 3, 0, 4), "child_dimension = 0"),
    (lambda: DenseCapsules(3, 3, 4, -1), "parent_dimension = -1"),
    (lambda: DenseCapsules(3, 3, 8, 16, pose="matrix"), "16 numbers; got 8"),
    (lambda: DenseCapsules(3, 3, 4, 4, pose="matrx"), "did you mean 'matrix'"),
    (lambda: DenseCapsules(3, 3, 4, 4, routing=Dynamic(iterations=0)), "iterations"),
    (lambda: DenseCapsules(3, 3, 4, 4, routing="em"), "known: dynamic"),
    (lambda: ConvCapsules(GRID, 0, 2), "child_types = 0"),
    (lambda: ConvCapsules(GRID, 2, 0), "parent_types = 0"),
    (lambda: ConvCapsules(GRID, 2, 2, kernel=6), "6x6"),
    (lambda: ConvCapsules(GRID, 2, 2, kernel=0), "got 0"),
    (lambda: ConvCapsules(GRID, 2, 2, stride=0), "got 3 and 0"),
    (lambda: ConvCapsules(GRID, 2, 2, child_dimension=9), "got 9"),
    (lambda: ConvCapsules(GRID, 2, 2, pose="vector", child_dimension=0), "child_dimension = 0"),
    (lambda: ConvCapsules(GRID, 2, 2, routing=EM(iterations=0)), "iterations"),
    (lambda: ClassCapsules(GRID, 0, 2), "child_types = 0"),
    (lambda: ClassCapsules(GRID, 2, 0), "classes = 0"),
    (lambda: ClassCapsules(GRID, 2, 2, parent_dimension=8), "8 above"),
    (lambda: ClassCapsules(GRID, 2, 2, pose="vector", parent_dimension=1), "a row and a column"),
    (lambda: ClassCapsules(GRID, 2, 2, routing=EM(iterations=0)), "iterations"),
    (lambda: SharedCapsules(GRID, 0, 2, 4, 4), "child_types = 0"),
    (lambda: SharedCapsules(GRID, 2, 0, 4, 4), "parents = 0"),
    (lambda: SharedCapsules(GRID, 2, 2, 4, 1), "a row and a column"),
]  # fmt: skip


@pytest.mark.parametrize(("build", "says"), WRONG)
def test_construction_fails_in_one_line(build: Callable[[], Any], says: str) -> None:
    with pytest.raises(TorchcapsError, match=says) as caught:
        build()
    assert isinstance(caught.value, ShapeError | RecipeError)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("build", "shape"),
    [
        (dense, (2, 7, 16)), (dense, (2, 8, 9)), (dense, (0, 8, 16)), (dense, (2, 3, 3, 1, 16)),
        (conv, (2, 4, 5, 1, 16)), (conv, (2, 4, 4, 2, 16)), (conv, (2, 16, 16)), (conv, (0, 4, 4, 1, 16)),
        (classes, (2, 2, 3, 2, 16)), (classes, (2, 3, 2, 1, 16)), (classes, (2, 12, 16)), (classes, (0, 3, 2, 2, 16)),
        (classes, (2, 3, 2, 16)), (shared, (2, 3, 2, 4)), (shared, (2, 2, 3, 2, 4)), (shared, (2, 3, 2, 1, 4)),
        (shared, (2, 3, 2, 2, 5)), (shared, (2, 12, 4)), (shared, (0, 3, 2, 2, 4)),
    ],
)  # fmt: skip
def test_children_that_do_not_fit_are_refused_in_one_line(build: Build, shape: tuple[int, ...]) -> None:
    layer, _ = build()
    with pytest.raises(ShapeError) as caught:
        layer(children(*shape, dtype=torch.float32))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("build", LAYERS)
def test_buffers_may_be_written_as_processes_of_a_team_do(build: Build) -> None:
    """In the precision they are made in; a buffer that is a view of itself could not."""
    layer, shape = build()
    before = layer(children(*shape, dtype=torch.float32))[0]
    for buffer in layer.buffers():
        buffer.copy_(buffer.clone())
    torch.testing.assert_close(layer(children(*shape, dtype=torch.float32))[0], before, rtol=0, atol=0)


def test_places_keep_their_digits_beside_poses_of_few() -> None:
    layer, x = shared()[0], children(2, 3, 2, 2, 4, dtype=torch.bfloat16)
    placed = layer.with_coordinates(x).pose
    exact = layer.centers.repeat_interleave(2, 0) * x.activation.flatten(1).unsqueeze(-1)
    assert placed.dtype == torch.float32
    assert torch.equal(placed[..., 4:], exact)


@pytest.mark.parametrize("build", LAYERS)
def test_activations_of_another_shape_are_refused(build: Build) -> None:
    layer, shape = build()
    x = children(*shape, dtype=torch.float32)
    with pytest.raises(ShapeError, match="activation"):
        layer(Capsules(x.pose, x.activation[..., :-1]))
