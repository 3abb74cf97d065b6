"""`route` takes what fits, by name or by settings, and answers everything else with one line that teaches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from torchcaps.errors import DataError, RecipeError, ShapeError, TorchcapsError
from torchcaps.layers import DenseCapsules
from torchcaps.math.grid import Grid
from torchcaps.routing import EM, ROUTERS, Dynamic, iterations_of, route, router_of, settings_of
from torchcaps.types import Capsules


def rand(*shape: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(sum(shape)))


def spoilt(x: Tensor, value: float) -> Tensor:
    """A copy whose last number is another one."""
    copy = x.clone()
    copy.view(-1)[-1] = value
    return copy


X, A, W = rand(2, 4, 3), rand(2, 4), rand(4, 5, 6, 3)  # [b i d], [b i], [i j k d]
FLAT = Capsules(X, A)
PLACED, W_WINDOW, WINDOW = Capsules(rand(2, 3, 3, 2, 3), rand(2, 3, 3, 2)), rand(8, 5, 6, 3), Grid(3, 3).window(2, 1)
MATRIX, W_MATRIX = Capsules(rand(2, 4, 16), A), rand(4, 5, 4, 4)


# --- What is taken --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ROUTERS)
def test_names_and_settings_objects_mean_the_same(name: str) -> None:
    options = {"iterations": 2} if hasattr(ROUTERS[name].settings, "iterations") else {}
    by_name, _ = route(FLAT, W, name, **options)
    by_object, _ = route(FLAT, W, settings_of(name, **options))
    assert all(map(torch.equal, by_name, by_object))
    assert router_of(settings_of(name)) is ROUTERS[name]


def test_dynamic_is_the_default() -> None:
    assert torch.equal(route(FLAT, W)[0].pose, route(FLAT, W, Dynamic())[0].pose)


@pytest.mark.parametrize("name", ROUTERS)
def test_matrix_poses_cast_matrix_votes(name: str) -> None:
    came, _ = route(MATRIX, W_MATRIX, name, pose="matrix")
    as_vectors = torch.zeros(4, 5, 16, 16)  # the same linear map, written as W_ij of a vector of 16
    for row in range(4):
        for column in range(4):
            for inner in range(4):
                as_vectors[:, :, 4 * row + column, 4 * row + inner] = W_MATRIX[:, :, inner, column]
    wanted, _ = route(MATRIX, as_vectors, name)
    torch.testing.assert_close(came, wanted)


@pytest.mark.parametrize("name", ROUTERS)
def test_an_offset_is_added_to_the_votes(name: str) -> None:
    """A further number in every child's pose that is always 1, and the offset as its column of W."""
    offset = rand(4, 6)
    came, _ = route(FLAT, W, name, offset=offset)
    pose = torch.cat([X, torch.ones(2, 4, 1)], -1)
    weights = torch.cat([W, offset[:, None, :, None].expand(4, 5, 6, 1)], -1)
    wanted, _ = route(Capsules(pose, A), weights, name)
    torch.testing.assert_close(came, wanted)


def test_learned_scalars_reach_the_router_and_have_initial_values() -> None:
    zero = torch.zeros(5)
    assert torch.equal(route(FLAT, W, "em")[0].activation, route(FLAT, W, EM(), beta_a=zero)[0].activation)
    more = route(FLAT, W, "em", beta_a=zero + 1000, beta_u=zero)[0].activation
    assert (more > route(FLAT, W, "em")[0].activation).all()


@pytest.mark.parametrize("name", ROUTERS)
def test_a_window_keeps_places(name: str) -> None:
    parents, info = route(PLACED, W_WINDOW, name, window=WINDOW, trace=True)
    assert parents.pose.shape == (2, 2, 2, 5, 6)
    assert parents.activation.shape == (2, 2, 2, 5)
    iterations = iterations_of(settings_of(name))
    assert info.coupling.shape == (iterations, 8, 8, 5)  # [t (b p) (n i) j]
    assert info.free_energy is None or info.free_energy.shape == (iterations, 2)
    assert info.parents is not None
    assert torch.equal(info.parents.pose[-1], parents.pose.flatten(0, 2))  # [t (b p) j k]
    assert torch.equal(info.parents.activation[-1], parents.activation.flatten(0, 2))
    for t in range(1, iterations):
        stopped, _ = route(PLACED, W_WINDOW, name, window=WINDOW, iterations=t)
        torch.testing.assert_close(info.parents.pose[t - 1], stopped.pose.flatten(0, 2))
        torch.testing.assert_close(info.parents.activation[t - 1], stopped.activation.flatten(0, 2))


@pytest.mark.parametrize("name", ROUTERS)
def test_windows_that_do_not_overlap_are_layers_of_their_own(name: str) -> None:
    placed, window = Capsules(rand(2, 4, 4, 2, 3), rand(2, 4, 4, 2)), Grid(4, 4).window(2, 2)
    parents, _ = route(placed, W_WINDOW, name, window=window)
    corner = Capsules(placed.pose[:, 2:, :2].flatten(1, 3), placed.activation[:, 2:, :2].flatten(1))
    alone, _ = route(corner, W_WINDOW, name)
    torch.testing.assert_close(Capsules(*(x[:, 1, 0] for x in parents)), alone)


# --- What is refused ------------------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[type[TorchcapsError], str, tuple[Any, ...], dict[str, Any]]] = {
    # children
    "pose of 2 axes": (ShapeError, r"\[4, 3\]; \[b i d\] is wanted", (Capsules(X[0], A), W), {}),
    "pose of 5 axes": (ShapeError, r"\[2, 3, 3, 2, 3\]; \[b i d\]", (PLACED, W_WINDOW), {}),
    "no places for a window": (ShapeError, r"\[b h w i d\] is wanted", (FLAT, W_WINDOW), {"window": WINDOW}),
    "fewer activations": (ShapeError, r"\[2, 3\]; pose \[2, 4, 3\] wants \[2, 4\]", (Capsules(X, A[:, :3]), W), {}),
    "activation of 3 axes": (ShapeError, r"\[2, 4, 1\]", (Capsules(X, A[..., None]), W), {}),
    "empty batch": (ShapeError, r"empty batch.*\[0, 4, 3\]", (Capsules(X[:0], A[:0]), W), {}),
    "no children": (ShapeError, r"no capsules.*\[2, 0, 3\]", (Capsules(X[:, :0], A[:, :0]), W[:0]), {}),
    "no dimensions": (ShapeError, r"\[2, 4, 0\]", (Capsules(X[..., :0], A), W[..., :0]), {}),
    "a pair, not capsules": (ShapeError, "tuple; Capsules", ((X, A), W), {}),
    "a tensor, not capsules": (ShapeError, "Tensor; Capsules", (X, W), {}),
    "another grid": (ShapeError, "3x3 places.*4x3", (PLACED, W_WINDOW), {"window": Grid(4, 3).window(2, 1)}),
    # values
    "NaN pose": (DataError, "pose has 1 NaN or infinite values of 24", (Capsules(spoilt(X, torch.nan), A), W), {}),
    "infinite pose": (DataError, "pose has 1 NaN", (Capsules(spoilt(X, -torch.inf), A), W, "em"), {}),
    "NaN activation": (DataError, "activation has 1 NaN", (Capsules(X, spoilt(A, torch.nan)), W), {}),
    "infinite activation": (DataError, "activation has 1 NaN", (Capsules(X, spoilt(A, torch.inf)), W), {}),
    "activation above 1": (DataError, r"to 1\.5; \[0, 1\] is wanted", (Capsules(X, spoilt(A, 1.5)), W), {}),
    "negative activation": (DataError, r"runs from -0\.01 to", (Capsules(X, spoilt(A, -0.01)), W, "em"), {}),
    "NaN pose in a window": (
        DataError,
        "pose has 1 NaN",
        (PLACED._replace(pose=spoilt(PLACED.pose, torch.nan)), W_WINDOW),
        {"window": WINDOW},
    ),
    # weights
    "weights for fewer children": (ShapeError, r"4 children want \[4, j, k, d\]", (FLAT, W[:3]), {}),
    "weights for a window, of one place": (ShapeError, "8 children", (PLACED, W_WINDOW[:2]), {"window": WINDOW}),
    "weights for other poses": (ShapeError, "poses of 2 numbers; these have 3", (FLAT, W[..., :2]), {}),
    "weights of 3 axes": (ShapeError, r"\[5, 6, 3\]", (FLAT, W[0]), {}),
    "weights of 3 axes, em": (ShapeError, r"\[5, 6, 3\]", (FLAT, W[0], "em"), {}),
    "a number for weights, em": (ShapeError, r"\[\]", (FLAT, torch.tensor(1.0), "em"), {}),
    "no parents": (ShapeError, r"\[4, 0, 6, 3\]", (FLAT, W[:, :0]), {}),
    "no parents, em": (ShapeError, r"\[4, 0, 6, 3\]", (FLAT, W[:, :0], "em"), {}),
    "parents without dimensions": (ShapeError, r"\[4, 5, 0, 3\]", (FLAT, W[:, :, :0]), {}),
    "a list for weights": (ShapeError, "weights came as list", (FLAT, [1.0]), {}),
    "matrix pose of 3 numbers": (ShapeError, "16 numbers.*got 3", (FLAT, W_MATRIX), {"pose": "matrix"}),
    "matrix pose, vector weights": (ShapeError, r"\[4, 5, 6, 3\]", (MATRIX, W), {"pose": "matrix"}),
    "unknown pose": (RecipeError, "'matrx' is neither 'vector' nor 'matrix'", (FLAT, W), {"pose": "matrx"}),
    # types
    "whole numbers": (ShapeError, "one floating type.*pose int64", (Capsules(X.long(), A), W.long()), {}),
    "activation of whole numbers": (ShapeError, "activation int64", (Capsules(X, A.long()), W, "em"), {}),
    "activation of truth values": (ShapeError, "activation bool", (Capsules(X, A > 0.5), W), {}),
    "complex poses": (ShapeError, "complex64", (Capsules(X.to(torch.complex64), A), W.to(torch.complex64)), {}),
    "weights of another type": (ShapeError, "weights float64", (FLAT, W.double()), {}),
    "activation of another type": (ShapeError, "activation float64", (Capsules(X, A.double()), W), {}),
    "offset of another type": (ShapeError, "offset float64", (FLAT, W), {"offset": torch.zeros(4, 6).double()}),
    "scalar of another type": (ShapeError, "beta_a float64", (FLAT, W, "em"), {"beta_a": torch.zeros(5).double()}),
    # offset and learned scalars
    "offset of another size": (ShapeError, r"\[4, 5\]; \[i k\] = \[4, 6\]", (FLAT, W), {"offset": torch.zeros(4, 5)}),
    "offset for all children": (ShapeError, r"offset has shape \[6\]", (FLAT, W), {"offset": torch.zeros(6)}),
    "a number for an offset": (ShapeError, "offset came as float", (FLAT, W), {"offset": 1.0}),
    "scalars for fewer parents": (ShapeError, r"beta_u.*\[4\].*\[5\]", (FLAT, W, "em"), {"beta_u": torch.zeros(4)}),
    "one scalar for all": (ShapeError, r"beta_a has shape \[\]", (FLAT, W, EM()), {"beta_a": torch.tensor(0.0)}),
    "a float for a scalar": (ShapeError, "beta_a came as float", (FLAT, W, "em"), {"beta_a": 0.0}),
    # methods and settings
    "no iterations": (RecipeError, "iterations = 0 must be at least 1", (FLAT, W), {"iterations": 0}),
    "negative iterations": (RecipeError, "iterations = -1 must be", (FLAT, W, EM(iterations=-1)), {}),
    "half an iteration": (RecipeError, "1.5 is not a whole number", (FLAT, W), {"iterations": 1.5}),
    "a temperature that stays infinite": (RecipeError, "decay = 1.0 must be", (FLAT, W, "em"), {"decay": 1.0}),
    "no variance": (RecipeError, "min_variance = 0", (FLAT, W, "em"), {"min_variance": 0.0}),
    "misspelt method": (RecipeError, "did you mean 'dynamic'", (FLAT, W, "dynamc"), {}),
    "unknown method": (RecipeError, "known: .*dynamic.*em", (FLAT, W, "zzz"), {}),
    "misspelt setting": (RecipeError, "did you mean 'iterations'", (FLAT, W, "em"), {"iteration": 2}),
    "misspelt choice": (RecipeError, "did you mean 'cosine'", (FLAT, W), {"agreement": "cosin"}),
    "a scalar of another router": (RecipeError, "no setting 'beta_a'", (FLAT, W), {"beta_a": torch.zeros(5)}),
    "settings twice": (RecipeError, "put it inside", (FLAT, W, EM()), {"iterations": 2}),
    "the class of settings": (RecipeError, "the class EM .* em .EM.", (FLAT, W, EM), {}),
    "a number for a method": (RecipeError, "int is no router's", (FLAT, W, 5), {}),
}


@pytest.mark.parametrize("what", REFUSED)
def test_wrong_input_gets_one_line_that_teaches(what: str) -> None:
    kind, part, arguments, keywords = REFUSED[what]
    with pytest.raises(kind, match=part) as caught:
        route(*arguments, **keywords)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 160


def test_the_input_that_is_refused_is_otherwise_right() -> None:
    betas = {"beta_a": torch.zeros(5), "beta_u": torch.zeros(5)}
    for parents, info in (
        route(FLAT, W, offset=torch.zeros(4, 6)),
        route(FLAT, W, "em", **betas),
        route(PLACED, W_WINDOW, window=WINDOW),
        route(MATRIX, W_MATRIX, pose="matrix"),
    ):
        assert bool(parents.pose.isfinite().all()) and bool(info.coupling.isfinite().all())


# --- Values at the edge of what is refused ----------------------------------------------------------------------------


def test_poses_whose_sum_overflows_are_taken() -> None:
    large = torch.full((2, 4, 3), 60_000.0, dtype=torch.float16)
    parents, _ = route(Capsules(large, A.half()), W.half() * 1e-4)
    assert bool(parents.pose.isfinite().all())


def test_lengths_that_exceed_1_by_rounding_are_taken() -> None:
    parents, _ = route(Capsules(X, torch.full((2, 4), 1.0078125)), W, "em")  # the next number after 1 in bfloat16
    assert bool(parents.activation.isfinite().all())


def test_without_validation_values_are_not_read() -> None:
    parents, _ = route(Capsules(spoilt(X, torch.nan), A), W, validate=False)
    assert bool(parents.pose.isnan().any())


def test_a_layer_checks_values_in_evaluation_and_leaves_training_to_the_loss() -> None:
    layer = DenseCapsules(4, 5, 3, 6)
    children = Capsules(spoilt(X, torch.nan), A)
    assert bool(layer(children)[0].pose.isnan().any())
    with pytest.raises(DataError, match="pose has 1 NaN"):
        layer.eval()(children)


def test_values_are_not_checked_inside_a_compiled_graph() -> None:
    compiled = torch.compile(lambda x: route(Capsules(x, A), W, EM())[0].pose, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(X), route(FLAT, W, EM())[0].pose)
