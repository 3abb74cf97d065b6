"""A convolution by way of spectra is a convolution: the same values and gradients as torch's."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import conv2d

from torchcaps.kernels import fft_planes, fourier
from torchcaps.kernels.fourier import fourier_conv2d
from torchcaps.kernels.loops import fourier as loops
from torchcaps.kernels.loops import loop, simd
from torchcaps.kernels.records import VECTOR_BYTES, Waves
from torchcaps.kernels.simd_layout import block_size
from torchcaps.layers import Convolution
from torchcaps.testing import assert_finite

Pair = tuple[int, int]


class Shape(NamedTuple):
    """Samples, vectors of channels below and above, height and width, taps, stride."""

    b: int
    below: int
    above: int
    sides: Pair
    taps: Pair
    stride: int


@st.composite
def shapes(draw: Any) -> Shape:
    """Any sizes; kernels up to the image's."""
    sides = draw(st.tuples(st.integers(1, 11), st.integers(1, 11)))
    taps = draw(st.tuples(*(st.integers(1, side) for side in sides)))
    below, above = draw(st.tuples(st.integers(1, 2), st.integers(1, 2)))
    return Shape(draw(st.integers(1, 5)), below, above, sides, taps, draw(st.integers(1, 3)))


SHAPES = [
    Shape(3, 2, 1, (9, 9), (5, 5), 1),
    Shape(2, 1, 2, (11, 8), (3, 4), 2),
    Shape(1, 1, 1, (7, 10), (2, 5), 3),
    Shape(5, 1, 1, (6, 5), (6, 5), 1),
    Shape(4, 2, 2, (7, 7), (7, 7), 2),
    Shape(2, 1, 1, (1, 1), (1, 1), 3),
    Shape(2, 1, 2, (4, 9), (1, 1), 2),
]
"""Among them kernels as large as the image, and as small as can be."""


def normal(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def problem(shape: Shape, seed: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """x, w and weights of a sum over the results."""
    L, s = block_size(dtype), shape.stride
    x = normal(shape.b, shape.below * L, *shape.sides, seed=seed, dtype=dtype)
    w = normal(shape.above * L, shape.below * L, *shape.taps, seed=seed + 1, dtype=dtype)
    places = [(n - t) // s + 1 for n, t in zip(shape.sides, shape.taps, strict=True)]
    return x.requires_grad_(), w.requires_grad_(), normal(shape.b, len(w), *places, seed=seed + 2, dtype=dtype)


def ours(x: Tensor, w: Tensor, a: Tensor, stride: int) -> list[Tensor]:
    """The results, and the gradients by x and w."""
    y = fourier_conv2d(x, w, stride)
    return [y.detach(), *torch.autograd.grad(y, (x, w), a)]


def torchs(x: Tensor, w: Tensor, a: Tensor, stride: int) -> list[Tensor]:
    """The same in float64."""
    x, w = (t.detach().double().requires_grad_() for t in (x, w))
    y = conv2d(x, w, stride=stride)
    return [y.detach(), *torch.autograd.grad(y, (x, w), a.double())]


def near(came: list[Tensor], wanted: list[Tensor], tolerance: float) -> None:
    """Relative to the largest number of each tensor."""
    for one, two in zip(came, wanted, strict=True):
        assert one.shape == two.shape
        scale = max(1e-30, two.abs().max().item())
        torch.testing.assert_close(one.double(), two.double(), rtol=0, atol=tolerance * scale)


def same(came: list[Tensor], wanted: list[Tensor]) -> bool:
    """Bit for bit."""
    return all(torch.equal(one, two) for one, two in zip(came, wanted, strict=True))


# --- Equal to a convolution -----------------------------------------------------------------------------------------


def slow(x: Tensor, w: Tensor, a: Tensor, stride: int) -> list[Tensor]:
    """y[m, n] = sum_cuv x[c, s m + u, s n + v] w[c, u, v], and what each product of that sum says of its factors."""
    y, dx, dw = torch.zeros_like(a), torch.zeros_like(x), torch.zeros_like(w)
    for b, o, m, n in itertools.product(*map(range, a.shape)):
        for c, u, v in itertools.product(*map(range, w.shape[1:])):
            row, column = stride * m + u, stride * n + v
            y[b, o, m, n] += x[b, c, row, column] * w[o, c, u, v]
            dx[b, c, row, column] += a[b, o, m, n] * w[o, c, u, v]
            dw[o, c, u, v] += a[b, o, m, n] * x[b, c, row, column]
    return [y, dx, dw]


@pytest.mark.parametrize("shape", [Shape(2, 1, 1, (3, 4), (2, 2), 1), Shape(1, 1, 1, (5, 4), (3, 2), 2)], ids=str)
def test_against_loops(shape: Shape) -> None:
    x, w, a = problem(shape, 1)
    near(ours(x, w, a, shape.stride), slow(x.detach(), w.detach(), a, shape.stride), 1e-13)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(shapes(), st.integers(0, 10_000))
def test_any_shape_in_float64(shape: Shape, seed: int) -> None:
    x, w, a = problem(shape, seed)
    near(ours(x, w, a, shape.stride), torchs(x, w, a, shape.stride), 1e-10)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(shapes(), st.integers(0, 10_000))
def test_any_shape_in_float32(shape: Shape, seed: int) -> None:
    x, w, a = problem(shape, seed, torch.float32)
    near(ours(x, w, a, shape.stride), torchs(x, w, a, shape.stride), 1e-5)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 2e-6)], ids=str)
def test_chosen_shapes(shape: Shape, dtype: torch.dtype, tolerance: float) -> None:
    x, w, a = problem(shape, 3, dtype)
    came = ours(x, w, a, shape.stride)
    assert {t.dtype for t in came} == {dtype}
    near(came, torchs(x, w, a, shape.stride), tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_real_size(dtype: torch.dtype) -> None:
    """CapsNet's primary layer but for the number of channels."""
    shape = Shape(6, 64 // block_size(dtype), 32 // block_size(dtype), (20, 20), (9, 9), 2)
    x, w, a = problem(shape, 5, dtype)
    near(ours(x, w, a, 2), torchs(x, w, a, 2), 1e-5 if dtype == torch.float32 else 1e-10)


@pytest.mark.parametrize("stride", [1, 2])
def test_gradcheck(stride: int) -> None:
    x, w, _ = problem(Shape(2, 1, 1, (4, 5), (3, 2), stride), 7)
    assert torch.autograd.gradcheck(lambda *args: fourier_conv2d(*args, stride), (x, w), fast_mode=True)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_few_column_frequencies_at_a_time(shape: Shape, monkeypatch: pytest.MonkeyPatch) -> None:
    x, w, a = problem(shape, 9)
    at_once = fourier._Sizes.of(x, w, shape.stride)
    assert at_once.groups == [at_once.columns]
    wanted = ours(x, w, a, shape.stride)
    for few in (1, 2, 4):
        monkeypatch.setattr(fourier, "ROOM", few * at_once.N[0] * shape.stride**2 * w[..., 0, 0].numel())
        z = fourier._Sizes.of(x, w, shape.stride)
        assert len(z.groups) == -(-len(z.columns) // few)
        assert [k for ks in z.groups for k in ks] == [*z.columns]
        near(ours(x, w, a, shape.stride), wanted, 1e-13)


def test_no_more_room_than_there_are_frequencies() -> None:
    x, w, _ = problem(Shape(3, 1, 1, (10, 8), (3, 3), 1), 9)
    planes = fourier._planes(fourier._last(x), 1, fourier._Sizes.of(x, w, 1), (10, 8))
    assert planes.D.shape == (5, 10, 3, 1, 16)


# --- Any tensors ----------------------------------------------------------------------------------------------------


def test_any_strides_will_do() -> None:
    x, w, a = problem(Shape(3, 2, 1, (7, 6), (3, 2), 2), 11, torch.float32)
    wanted = ours(x, w, a, 2)
    last = [t.detach().contiguous(memory_format=torch.channels_last) for t in (x, w, a)]
    turned = [t.detach().permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0) for t in (x, w, a)]
    every_other = [torch.stack([t.detach(), -t.detach()], -1)[..., 0] for t in (x, w, a)]
    for one, two, slopes in (last, turned, every_other):
        assert not (one.is_contiguous() or two.is_contiguous() or slopes.is_contiguous())
        assert same(ours(one.requires_grad_(), two.requires_grad_(), slopes, 2), wanted)
    flat = torch.ones((), dtype=a.dtype).expand_as(a)
    assert same(ours(x, w, flat, 2), ours(x, w, flat.contiguous(), 2))


def test_one_sample_is_the_first_of_many() -> None:
    x, w, a = problem(Shape(5, 1, 2, (8, 7), (3, 3), 2), 13)
    many, one = ours(x, w, a, 2), ours(x[:1].detach().requires_grad_(), w, a[:1], 2)
    near(one[:2], [t[:1] for t in many[:2]], 1e-13)


def test_spectra_must_save_more_work_the_more_threads_there_are() -> None:
    x, w = torch.empty(32, 256, 20, 20), torch.empty(256, 256, 9, 9)
    before, taken = torch.get_num_threads(), []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            taken.append(fourier.is_faster(x, w, 2))
    finally:
        torch.set_num_threads(before)
    assert taken == [True, False]


def test_an_empty_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fourier, "FFT_COST", 0)
    layer, x = Convolution(16, 16, 5), torch.zeros(0, 16, 10, 10, requires_grad=True)
    y = layer(x)
    y.sum().backward()
    assert y.shape == (0, 16, 6, 6) and x.grad is not None and x.grad.shape == x.shape
    assert layer.weight.grad is not None and not layer.weight.grad.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_threads_change_no_more_than_rounding(dtype: torch.dtype) -> None:
    x, w, a = problem(Shape(5, 2, 1, (9, 8), (4, 3), 2), 15, dtype)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(ours(x, w, a, 2))
            assert same(ours(x, w, a, 2), found[-1])
    finally:
        torch.set_num_threads(before)
    for came in found[1:]:
        near(came, found[0], 8 * torch.finfo(dtype).eps)


def test_only_what_is_asked_for_has_a_gradient() -> None:
    fft_planes._waves.cache_clear()
    x, w, a = problem(Shape(3, 1, 1, (6, 7), (3, 3), 2), 17)
    with torch.inference_mode():
        y = fourier_conv2d(x, w, 2)
    wanted = ours(x, w, a, 2)
    assert not y.requires_grad and torch.equal(y, wanted[0])
    for n, (one, two) in enumerate(((x, w.detach()), (x.detach(), w))):
        (came,) = torch.autograd.grad(fourier_conv2d(one, two, 2), (one, two)[n], a)
        assert torch.equal(came, wanted[n + 1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_finite_at_every_scale(dtype: torch.dtype) -> None:
    x, w, a = problem(Shape(3, 1, 1, (7, 8), (4, 3), 1), 19, dtype)
    for below, above in itertools.product((1e-6, 1e-3, 1e3, 1e6), repeat=2):
        one, two = (below * x).detach().requires_grad_(), (above * w).detach().requires_grad_()
        came = ours(one, two, a, 1)
        assert_finite(tuple(came))
        near(came, torchs(one, two, a, 1), 1e-5 if dtype == torch.float32 else 1e-10)


def test_zeros() -> None:
    x, w, a = problem(Shape(3, 1, 1, (7, 8), (4, 3), 2), 21, torch.float32)
    with torch.no_grad():
        x[1], w[:, 3], a[2] = 0, 0, 0
    y, dx, dw = ours(x, w, a, 2)
    assert not y[1].any() and not dx[2].any() and not dx[:, 3].any()
    near([y, dx, dw], torchs(x, w, a, 2), 1e-5)


# --- Operators of torch's library -----------------------------------------------------------------------------------


def test_the_operators_keep_their_word() -> None:
    x, w, a = problem(Shape(3, 1, 2, (5, 4), (3, 2), 2), 23)
    told = torch.library.opcheck(torch.ops.torchcaps.fourier_conv.default, (x, w, 2))
    assert set(told.values()) == {"SUCCESS"}
    back = a, x.detach(), w.detach(), 2
    assert set(torch.library.opcheck(torch.ops.torchcaps.fourier_conv_backward.default, back).values()) == {"SUCCESS"}


def test_a_layer_compiles_as_one_graph_for_all_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fourier, "FFT_COST", 0)
    graphs: list[list[str]] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append([str(node.target) for node in graph.graph.nodes])
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    layer = Convolution(8, 16, 5).double()
    compiled = torch.compile(layer, backend=backend, fullgraph=True, dynamic=True)
    for b in (3, 5):
        x = normal(b, 8, 10, 10, seed=b).requires_grad_()
        came, wanted = compiled(x), layer(x)
        assert torch.equal(came, wanted)
        inputs = x, *layer.parameters()
        grads = [torch.autograd.grad(y.square().sum(), inputs) for y in (came, wanted)]
        assert same(*map(list, grads))
    assert ["torchcaps.fourier_conv.default" in graph for graph in graphs] == [True]


# --- Spectra and vectors ---------------------------------------------------------------------------------------------


def tables(N: int, frequencies: int, places: int, weights: Any = 1.0) -> Any:
    """[2 n a]: cosines and sines of so many frequencies, each times its weight."""
    angle = 2 * np.pi * np.outer(np.arange(frequencies), np.arange(places)) / N
    return np.stack([np.cos(angle), np.sin(angle)]) * np.reshape(weights, (-1, 1))


def phases(x: Tensor, s: int, N: Pair) -> Tensor:
    """Planes [o h w i] -> [o i (p q) N N'], number by number."""
    o, h, w, i = x.shape
    found = x.new_zeros(o, i, s * s, *N)
    for row, column in itertools.product(range(h), range(w)):
        found[:, :, row % s * s + column % s, row // s, column // s] = x[:, row, column]
    return found


@pytest.mark.parametrize("s", [1, 2, 3])
@pytest.mark.parametrize(("h", "w"), [(5, 6), (6, 5), (1, 2), (7, 7)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_spectra_are_those_of_torch_and_lead_back(s: int, h: int, w: int, dtype: torch.dtype) -> None:
    o, i, kind = 3, 2 * block_size(dtype), torch.empty(0, dtype=dtype).numpy().dtype
    places = -(-h // s), -(-w // s)
    N, K = (places[0] + 1, places[1] + 2), (places[1] + 2) // 2 + 1  # the grid is larger than the plane
    x, digits = normal(o, h, w, i, seed=25, dtype=dtype), 20 * torch.finfo(dtype).eps
    rows, D = tables(N[0], N[0] // 2 + 1, places[0]).astype(kind), torch.empty(K, N[0], o, s * s, 2 * i, dtype=dtype)
    loops.to_spectra(x.numpy(), D.numpy(), s, Waves(rows, tables(N[1], K, places[1]).astype(kind)), 0, 2 * o)
    wanted = torch.fft.rfft2(phases(x, s, N).double()).permute(4, 3, 0, 2, 1)  # [k n o (p q) i]
    near([D.view(*D.shape[:-1], i, 2)], [torch.view_as_real(wanted)], digits)
    weights = np.array([1 + (0 < k < N[1] - k) for k in range(K)]) / (N[0] * N[1])
    again = torch.ones_like(x)
    weighted = tables(N[1], K, places[1], weights).astype(kind)
    loops.from_spectra(D.numpy(), again.numpy(), s, Waves(rows, weighted), 0, 2 * o)
    near([again], [1 + x], digits)


def test_a_part_of_the_vectors_leaves_the_others_alone() -> None:
    x = normal(2, 3, 3, 16, seed=27)  # four vectors
    D, table = torch.full((2, 3, 2, 1, 32), 7.0, dtype=x.dtype), tables(3, 2, 3)
    loops.to_spectra(x.numpy(), D.numpy(), 1, Waves(table, table), 1, 3)
    touched = (D != 7).all(0).all(0)[:, 0]  # [o (i 2)]
    assert touched.unflatten(1, (2, 16)).all(-1).tolist() == [[False, True], [True, False]]
    assert touched.sum() == 32


@loop
def interleaved(a: Any, out: Any) -> None:
    """Rows by twos, interleaved; then the same deinterleaved again."""
    for n in range(0, a.shape[0], 2):
        pair = simd.interleave(simd.load(a, (n,)), simd.load(a, (n + 1,)))
        simd.store(out, (0, n), pair)
        simd.store(out, (1, n), simd.deinterleave(pair[0], pair[1]))


@pytest.mark.parametrize("kind", [np.float32, np.float64])
def test_interleave_and_deinterleave(kind: type) -> None:
    L = VECTOR_BYTES // kind().itemsize
    a = np.arange(6 * L, dtype=kind).reshape(6, L)
    out = np.zeros((2, 6, L), kind)
    interleaved(a, out)
    assert (out[0].reshape(3, L, 2) == a.reshape(3, 2, L).transpose(0, 2, 1)).all()
    assert (out[1] == a).all()
