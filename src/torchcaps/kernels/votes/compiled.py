"""Votes recomputed in compiled loops (`loops.votes`), as operators of torch's library with gradients.

The loops work on L samples at a time, which lie side by side in memory. The tensors that `CompiledVotes` takes and
returns are views of that memory with the usual order of axes; elementwise operations between them keep the layout, so
that nothing is copied on the way.

The way back from the votes to the children and to W costs more than all else, and it is linear: it need be gone once
for all operations of a router. So an operation does not take the children and W as what its result depends on, but a
handle of them. The gradient by a handle is a term of the gradient by the votes, which has few factors,

    g_V_ijk = w_ij (a_jk + b_jk (V_ijk - m_jk))

and the backward pass of all handles together sums the terms, tile by tile, and multiplies once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from torchcaps.kernels.operators import GradContext, OperatorInputs
from torchcaps.kernels.threads import in_threads
from torchcaps.kernels.votes.base import Moments, Votes, VotesInput

if TYPE_CHECKING:
    from torchcaps.kernels.loops.simd import Array
    from torchcaps.kernels.loops.votes import Gradients
    from torchcaps.kernels.loops.votes import Layer as LoopLayer

__all__ = ["CompiledVotes"]

BYTES = 64
"""Width of a vector, as in `loops.votes`."""
FACTORS = 4
"""Tensors of a handle, the factors w, a, b and m of its gradient."""
HANDLES = 8
"""Operations whose gradients are summed before they go back to the children."""


@cache
def _loops() -> ModuleType:
    """The compiled loops; numba is slow to import, so this happens at the first use."""
    from torchcaps.kernels.loops import votes

    return votes


class CompiledVotes(Votes):
    """Votes of CPU tensors in float32 or float64 that are computed where they are used.

    The batch is split into n blocks of L samples, so that leading axes are [n l p]; in memory the L samples lie side by
    side, [n p j i l] and [n p j k l].
    """

    def __init__(self, given: VotesInput) -> None:
        # The base class splits the batch already, so that the width of a vector comes first.
        self._lanes = BYTES // given.pose.dtype.itemsize
        super().__init__(given.activation, given.slots, given.weights.shape[1], given.dimension)
        # Samples side by side, parents first: the order in which the loops read.
        offset = given.pose.new_zeros(self.children, self.dimension) if given.offset is None else given.offset
        self._layer = _Layer(
            x=self._blocks(given.pose).permute(0, 2, 3, 1).contiguous(),
            W=_ordered(given.weights, matrix=given.matrix),
            offset=offset.to(given.pose.dtype).contiguous(),
            child=given.slots.child,
            matrix=given.matrix,
        )
        self._fixed = self._layer._replace(x=self._layer.x.detach(), W=self._layer.W.detach())
        self._free: list[list[Tensor]] = []  # handles that no operation has taken yet
        self._log_a = self._blocks(self._relative).permute(0, 2, 1).contiguous()  # [n c l]
        self._given = given

    def detach(self) -> CompiledVotes:
        return CompiledVotes(self._given.detach())

    def moments(self, log_weight: Tensor) -> Moments:
        slots = (self.slots.order, self.slots.ends)
        log_mass, mean, variance = _moments(*self._fixed, *slots, self._handle(), _pairs(log_weight), self._log_a)
        return Moments(_samples_first(log_mass), _samples_first(mean), _samples_first(variance))

    def log_likelihood(self, mean: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
        given = (_samples_last(mean), _samples_last(scale), _samples_last(bias))
        return _from_pairs(_log_likelihood(*self._fixed, self._handle(), *given))

    def total(self, weight: Tensor) -> Tensor:
        return _samples_first(_total(*self._fixed, self._handle(), _pairs(weight)))

    def dot(self, parent: Tensor) -> Tensor:
        return _from_pairs(_dot(*self._fixed, self._handle(), _samples_last(parent)))

    def squared_lengths(self) -> Tensor:
        return _from_pairs(_squared_lengths(*self._fixed, self._handle()))

    def _handle(self) -> list[Tensor]:
        """Take a handle of the children and W for one operation, or one without a gradient if none is wanted."""
        learns = self._layer.x.requires_grad or self._layer.W.requires_grad
        if not learns or not torch.is_grad_enabled():
            return _no_handle(self._fixed.x)
        if not self._free:
            made = _handles(*self._layer)
            self._free = [made[n : n + FACTORS] for n in range(0, len(made), FACTORS)]
        return self._free.pop()

    def compete(self, logits: Tensor, *, across_parents: bool = True, background: float | None = None) -> Tensor:
        slots = self.slots
        groups = 1 if across_parents else self.parents
        least = -float("inf") if background is None else background
        return _from_pairs(_compete(_pairs(logits), slots.order, slots.ends, groups, least))

    def split_batch(self, x: Tensor) -> Tensor:
        return self._blocks(x)

    def join_batch(self, x: Tensor) -> Tensor:
        return x.flatten(0, 1)[: self.batch]

    def _expand_pairs(self, values: Tensor) -> Tensor:
        blocks = -(-self.batch // self._lanes)
        return _from_pairs(values[None, :, None, :, None].expand(blocks, -1, self.parents, -1, self._lanes))

    def _blocks(self, x: Tensor) -> Tensor:
        """[b ...] -> [n l ...], padded by zeros."""
        # Samples that fill the last vector are 0; nothing of them comes back, and their gradients are dropped.
        missing = -len(x) % self._lanes
        full = torch.cat([x, x.new_zeros(missing, *x.shape[1:])]) if missing else x
        return torch.unflatten(full, 0, (-1, self._lanes))


def _pairs(x: Tensor) -> Tensor:
    """[n l p i j] -> [n p j i l]."""
    return x.permute(0, 2, 4, 3, 1).contiguous()


def _from_pairs(x: Tensor) -> Tensor:
    """[n p j i l] -> [n l p i j], a view."""
    return x.permute(0, 4, 1, 3, 2)


def _samples_last(x: Tensor) -> Tensor:
    """[n l p ...] -> [n p ... l]."""
    return x.movedim(1, -1).contiguous()


def _samples_first(x: Tensor) -> Tensor:
    """[n p ... l] -> [n l p ...], a view."""
    return x.movedim(-1, 1)


def _ordered(weights: Tensor, *, matrix: bool) -> Tensor:
    """W [m j k d] -> [j m (d k)] with k padded to a multiple of four, or [m j 4 4] -> [j m 16]."""
    turned = weights.transpose(0, 1)
    if not matrix:
        turned = pad(turned.transpose(2, 3), (0, -weights.shape[2] % 4))
    return turned.flatten(2).contiguous()


class _Layer(NamedTuple):
    """The arguments that all operators share: poses [n c d l], W [j m (d k)], offset [i k], children in slots [p i]."""

    x: Tensor
    W: Tensor
    offset: Tensor
    child: Tensor
    matrix: bool

    def record(self) -> LoopLayer:
        """The same for the compiled loops."""
        j, _, d, k = (*self.W.shape[:2], self.x.shape[2], self.offset.shape[1])
        offset = pad(self.offset.detach(), (0, -k % 4))
        arrays = (_rows(self.x), self.W.detach().flatten(0, 1).numpy(), offset.numpy(), self.child.numpy())
        record: LoopLayer = _loops().Layer(self.matrix, self.x.shape[1], j, d, k, *arrays)
        return record

    @property
    def lanes(self) -> int:
        """Samples in a vector."""
        return self.x.shape[-1]

    @property
    def blocks(self) -> int:
        """Blocks of samples."""
        return len(self.x)

    @property
    def gradient_rows(self) -> tuple[int, int]:
        """Shape in which the loops add up the gradient by W.

        Of matrices it is [(j m 16) l], a sum for each sample of a vector; of vectors [(j m k) d], with k padded to a
        multiple of four and d to whole vectors.
        """
        j, m, _ = self.W.shape
        if self.matrix:
            return j * m * 16, self.lanes
        return j * m * _up(self.offset.shape[1], 4), _up(self.x.shape[2], self.lanes)

    def gradient(self, rows: Tensor) -> Tensor:
        """The gradient by W [j m (d k)] from its sum in `gradient_rows`."""
        if self.matrix:
            return rows.sum(1).view_as(self.W)
        # Lanes that fill the last vector of a child's pose hold nothing
        j, m, _ = self.W.shape
        k_by_d = rows.view(j, m, -1, rows.shape[1])[..., : self.x.shape[2]]
        return k_by_d.transpose(2, 3).reshape_as(self.W)

    def handles(self) -> list[Tensor]:
        """The factors of HANDLES handles, without memory: w [n p j i l], then a, b and m [n p j k l]."""
        p, i = self.child.shape
        shape = (self.blocks, p, len(self.W))
        factors = ((*shape, i, self.lanes), *[(*shape, self.offset.shape[1], self.lanes)] * (FACTORS - 1))
        return [self.x.new_zeros(()).expand(each) for _ in range(HANDLES) for each in factors]

    def new_pairs(self) -> Tensor:
        """Memory for [n p j i l]."""
        p, i = self.child.shape
        return self.x.new_empty(self.blocks, p, len(self.W), i, self.lanes)

    def new_parents(self, *dimension: int) -> Tensor:
        """Memory for [n p j (k) l]."""
        return self.x.new_empty(self.blocks, len(self.child), len(self.W), *dimension, self.lanes)


def _up(n: int, step: int) -> int:
    """The next multiple of a step."""
    return -(-n // step) * step


def _rows(x: Tensor) -> Array:
    """A tensor [... b] as numpy's array [rows b], without a copy if it is contiguous."""
    return x.detach().contiguous().flatten(0, -2).numpy()


def _run(layer: _Layer, work: Callable[[int, int, LoopLayer], None]) -> None:
    """Run a forward loop, work(start, stop, layer), over all tasks (block of samples, place).

    Each task writes to memory of its own.
    """
    record = layer.record()
    in_threads(lambda _, start, stop: work(start, stop, record), layer.blocks * len(layer.child))


def _run_back(layer: _Layer, work: Callable[[int, int, LoopLayer, Gradients], None]) -> tuple[Tensor, Tensor]:
    """Run a loop that adds to gradients, work(start, stop, layer, gradients), over all tasks.

    Windows of one sample overlap, so that two places may add to the gradient of one child. Threads therefore take whole
    blocks of samples or, where there are too few of these, add up in memory of their own.

    Returns:
        Gradients by the children [n c d l] and by W.
    """
    # Whole blocks of samples where there are enough for all threads, else single places.
    threads = torch.get_num_threads()
    places = len(layer.child)
    by_block = layer.blocks >= threads
    tasks = layer.blocks if by_block else layer.blocks * places
    step = places if by_block else 1
    # Sums over places and parents: one copy for each thread that shares samples with another.
    copies = 1 if by_block else min(threads, tasks)
    g_x = layer.x.new_zeros(copies, *layer.x.shape)
    g_W = layer.x.new_zeros(min(threads, tasks), *layer.gradient_rows)
    record = layer.record()

    def in_thread(n: int, start: int, stop: int) -> None:
        own = 0 if by_block else n
        work(start * step, stop * step, record, _loops().Gradients(_rows(g_x[own]), g_W[n].numpy()))

    in_threads(in_thread, tasks)
    # Copies are added in the order of the threads: the same sum for the same number of threads.
    return _sum_copies(g_x), layer.gradient(_sum_copies(g_W))


def _sum_copies(x: Tensor) -> Tensor:
    """The sum over the first axis, for a single copy without another one."""
    return x.squeeze(0) if len(x) == 1 else x.sum(0)


# --- The operators --------------------------------------------------------------------------------------------------


@torch.library.custom_op("torchcaps::votes_handles", mutates_args=())
def _handles(x: Tensor, W: Tensor, offset: Tensor, child: Tensor, matrix: bool) -> list[Tensor]:
    """Handles of the children and W, FACTORS tensors each: one for every operation on the votes."""
    return _Layer(x, W, offset, child, matrix).handles()


@torch.library.custom_op("torchcaps::votes_collect", mutates_args=())
def _collect(
    x: Tensor, W: Tensor, offset: Tensor, child: Tensor, matrix: bool, sloped: bool, factors: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """Gradients by x and W from all terms of the gradient by the votes; their factors w, a, b, m term by term."""
    layer = _Layer(x, W, offset, child, matrix)
    held = [each.contiguous() for each in factors]  # kept alive while loops know nothing but addresses
    addresses = [np.array([each.data_ptr() for each in held[n::FACTORS]], np.int64) for n in range(FACTORS)]
    terms = _loops().Terms(sloped, *addresses)
    return _run_back(layer, lambda start, stop, *given: _loops().collect(start, stop, given[0], terms, given[1]))


@torch.library.custom_op("torchcaps::votes_moments", mutates_args=())
def _moments(
    x: Tensor,
    W: Tensor,
    offset: Tensor,
    child: Tensor,
    matrix: bool,
    order: Tensor,
    ends: Tensor,
    handle: Sequence[Tensor],
    log_weight: Tensor,
    log_a: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Log mass [p j b], mean and variance [p j k b] under log weights [p j i b] and log activations [n b]."""
    layer = _Layer(x, W, offset, child, matrix)
    found = (layer.new_parents(), layer.new_parents(offset.shape[1]), layer.new_parents(offset.shape[1]))
    loops = _loops()
    weights = loops.Weights(_rows(log_weight), _rows(log_a))
    out = loops.Moments(*map(_rows, found))
    _run(layer, lambda start, stop, record: loops.moments(start, stop, record, weights, out))
    return found


@torch.library.custom_op("torchcaps::votes_moments_backward", mutates_args=())
def _moments_backward(
    x: Tensor,
    W: Tensor,
    offset: Tensor,
    child: Tensor,
    matrix: bool,
    order: Tensor,
    ends: Tensor,
    log_weight: Tensor,
    log_a: Tensor,
    found: Sequence[Tensor],
    slopes: Sequence[Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """The votes' weights, and the gradients by log weights and log activations; `found` and `slopes` are Moments."""
    layer = _Layer(x, W, offset, child, matrix)
    loops = _loops()
    weights = loops.Weights(_rows(log_weight), _rows(log_a))
    weight = layer.new_pairs()
    g_log_weight = layer.new_pairs()
    records = (weights, loops.Moments(*map(_rows, found)), loops.Moments(*map(_rows, slopes)))
    arrays = (_rows(weight), _rows(g_log_weight))
    _run(layer, lambda start, stop, record: loops.moments_back(start, stop, record, *records, *arrays))
    # An activation enters all weights of its child.
    g_log_a = torch.empty_like(log_a)
    who = _competition(g_log_weight, order, ends, 1)
    sums = (arrays[1], _rows(g_log_a))
    in_threads(lambda _, start, stop: loops.child_sums(start, stop, who, *sums), (len(ends) - 1) * layer.blocks)
    return weight, g_log_weight, g_log_a


@torch.library.custom_op("torchcaps::votes_log_likelihood", mutates_args=())
def _log_likelihood(
    x: Tensor,
    W: Tensor,
    offset: Tensor,
    child: Tensor,
    matrix: bool,
    handle: Sequence[Tensor],
    mean: Tensor,
    scale: Tensor,
    bias: Tensor,
) -> Tensor:
    """bias - 1/2 sum_k (scale (V - mean))^2, [p j i b]."""
    layer = _Layer(x, W, offset, child, matrix)
    logits = layer.new_pairs()
    loops = _loops()
    gaussians = loops.Gaussians(*map(_rows, (mean, scale, bias)))
    out = _rows(logits)
    _run(layer, lambda start, stop, record: loops.likelihood(start, stop, record, gaussians, out))
    return logits


@torch.library.custom_op("torchcaps::votes_log_likelihood_backward", mutates_args=())
def _log_likelihood_backward(
    x: Tensor, W: Tensor, offset: Tensor, child: Tensor, matrix: bool, mean: Tensor, scale: Tensor, g: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients by mean, scale and bias."""
    layer = _Layer(x, W, offset, child, matrix)
    found = (_like(mean), _like(scale), layer.new_parents())
    loops = _loops()
    gaussians = loops.Gaussians(_rows(mean), _rows(scale), _rows(found[2]))
    by_gaussians = loops.Gaussians(*map(_rows, found))
    slope = _rows(g)
    _run(layer, lambda start, stop, record: loops.likelihood_back(start, stop, record, gaussians, slope, by_gaussians))
    return found


@torch.library.custom_op("torchcaps::votes_total", mutates_args=())
def _total(
    x: Tensor, W: Tensor, offset: Tensor, child: Tensor, matrix: bool, handle: Sequence[Tensor], weight: Tensor
) -> Tensor:
    """sum_i weight V, [p j k b]."""
    layer = _Layer(x, W, offset, child, matrix)
    total = layer.new_parents(offset.shape[1])
    arrays = (_rows(weight), _rows(total))
    _run(layer, lambda start, stop, record: _loops().total(start, stop, record, *arrays))
    return total


@torch.library.custom_op("torchcaps::votes_dot", mutates_args=())
def _dot(
    x: Tensor, W: Tensor, offset: Tensor, child: Tensor, matrix: bool, handle: Sequence[Tensor], parent: Tensor
) -> Tensor:
    """sum_k V parent, [p j i b]."""
    layer = _Layer(x, W, offset, child, matrix)
    found = layer.new_pairs()
    arrays = (_rows(parent), _rows(found))
    _run(layer, lambda start, stop, record: _loops().dot(start, stop, record, arrays[0], False, arrays[1]))
    return found


@torch.library.custom_op("torchcaps::votes_squared_lengths", mutates_args=())
def _squared_lengths(
    x: Tensor, W: Tensor, offset: Tensor, child: Tensor, matrix: bool, handle: Sequence[Tensor]
) -> Tensor:
    """sum_k V^2, [p j i b]."""
    layer = _Layer(x, W, offset, child, matrix)
    found = layer.new_pairs()
    out = _rows(found)
    _run(layer, lambda start, stop, record: _loops().dot(start, stop, record, out, True, out))
    return found


@torch.library.custom_op("torchcaps::votes_compete", mutates_args=())
def _compete(logits: Tensor, order: Tensor, ends: Tensor, groups: int, background: float) -> Tensor:
    """Log-softmax of logits [p j i b] over the parents of each child; `groups` of parent types compete apart."""
    found = torch.empty_like(logits)
    who = _competition(logits, order, ends, groups)
    arrays = (_rows(logits), _rows(found))
    # A task is one child of one block: all parents that compete for it are read and written by one thread.
    tasks = (len(ends) - 1) * len(logits)
    in_threads(lambda _, start, stop: _loops().compete(start, stop, who, background, *arrays), tasks)
    return found


def _competition(pairs: Tensor, order: Tensor, ends: Tensor, groups: int) -> object:
    """Who competes for each child, as the loops read it; pairs [n p j i l] give the sizes."""
    _, p, j, i, _ = pairs.shape
    return _loops().Competition(p, j, i, groups, order.numpy(), ends.numpy())


@torch.library.custom_op("torchcaps::votes_compete_backward", mutates_args=())
def _compete_backward(log_share: Tensor, order: Tensor, ends: Tensor, groups: int, g: Tensor) -> Tensor:
    """Gradient by the logits."""
    found = torch.empty_like(log_share)
    who = _competition(g, order, ends, groups)
    arrays = (_rows(log_share), _rows(g), _rows(found))
    tasks = (len(ends) - 1) * len(g)
    in_threads(lambda _, start, stop: _loops().compete_back(start, stop, who, *arrays), tasks)
    return found


# --- Shapes without values, for torch.compile and exports -----------------------------------------------------------


@_handles.register_fake
def _(x: Tensor, W: Tensor, offset: Tensor, child: Tensor, matrix: bool) -> list[Tensor]:
    return _Layer(x, W, offset, child, matrix).handles()


@_collect.register_fake
def _(
    x: Tensor, W: Tensor, offset: Tensor, child: Tensor, matrix: bool, sloped: bool, factors: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    return _like(x), _like(W)


@_moments.register_fake
def _(
    x: Tensor,
    W: Tensor,
    offset: Tensor,
    child: Tensor,
    matrix: bool,
    order: Tensor,
    ends: Tensor,
    handle: Sequence[Tensor],
    log_weight: Tensor,
    log_a: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    layer = _Layer(x, W, offset, child, matrix)
    return layer.new_parents(), layer.new_parents(offset.shape[1]), layer.new_parents(offset.shape[1])


@_moments_backward.register_fake
def _(
    x: Tensor,
    W: Tensor,
    offset: Tensor,
    child: Tensor,
    matrix: bool,
    order: Tensor,
    ends: Tensor,
    log_weight: Tensor,
    log_a: Tensor,
    found: Sequence[Tensor],
    slopes: Sequence[Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    return _like(log_weight), _like(log_weight), _like(log_a)


@_log_likelihood.register_fake
def _(
    x: Tensor,
    W: Tensor,
    offset: Tensor,
    child: Tensor,
    matrix: bool,
    handle: Sequence[Tensor],
    mean: Tensor,
    scale: Tensor,
    bias: Tensor,
) -> Tensor:
    return _Layer(x, W, offset, child, matrix).new_pairs()


@_log_likelihood_backward.register_fake
def _(
    x: Tensor, W: Tensor, offset: Tensor, child: Tensor, matrix: bool, mean: Tensor, scale: Tensor, g: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return _like(mean), _like(scale), _Layer(x, W, offset, child, matrix).new_parents()


@_total.register_fake
def _(
    x: Tensor, W: Tensor, offset: Tensor, child: Tensor, matrix: bool, handle: Sequence[Tensor], weight: Tensor
) -> Tensor:
    return _Layer(x, W, offset, child, matrix).new_parents(offset.shape[1])


@_dot.register_fake
def _(
    x: Tensor, W: Tensor, offset: Tensor, child: Tensor, matrix: bool, handle: Sequence[Tensor], parent: Tensor
) -> Tensor:
    return _Layer(x, W, offset, child, matrix).new_pairs()


@_squared_lengths.register_fake
def _(x: Tensor, W: Tensor, offset: Tensor, child: Tensor, matrix: bool, handle: Sequence[Tensor]) -> Tensor:
    return _Layer(x, W, offset, child, matrix).new_pairs()


@_compete.register_fake
def _(logits: Tensor, order: Tensor, ends: Tensor, groups: int, background: float) -> Tensor:
    return torch.empty_like(logits)


@_compete_backward.register_fake
def _(log_share: Tensor, order: Tensor, ends: Tensor, groups: int, g: Tensor) -> Tensor:
    return torch.empty_like(log_share)


def _like(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


# --- Gradients ------------------------------------------------------------------------------------------------------


def _save_handles(ctx: GradContext, inputs: OperatorInputs, output: list[Tensor]) -> None:
    *layer, matrix = inputs
    ctx.save_for_backward(*layer)
    ctx.settings = (matrix,)
    ctx.set_materialize_grads(False)  # a handle that no result depends on has no gradient


def _back_handles(ctx: GradContext, factors: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    layer = _Layer(*ctx.saved_tensors, *ctx.settings)
    terms = [factors[n : n + FACTORS] for n in range(0, len(factors), FACTORS) if factors[n] is not None]
    # A factor that a term does not have is 0.
    zero = torch.zeros_like(layer.new_parents(layer.offset.shape[1]))
    given = [zero if each is None else each for term in terms for each in term]
    sloped = any(term[2] is not None for term in terms)
    return *_collect(*layer, sloped, given), None, None, None


def _save_moments(ctx: GradContext, inputs: OperatorInputs, output: tuple[Tensor, ...]) -> None:
    *layer, matrix, order, ends, _, log_weight, log_a = inputs
    ctx.save_for_backward(*layer, order, ends, log_weight, log_a, *output)
    ctx.settings = (matrix,)


def _back_moments(ctx: GradContext, g_log_mass: Tensor, g_mean: Tensor, g_variance: Tensor) -> tuple[object, ...]:
    *layer, order, ends, log_weight, log_a, log_mass, mean, variance = ctx.saved_tensors
    given = (order, ends, log_weight, log_a, [log_mass, mean, variance], [g_log_mass, g_mean, g_variance])
    weight, g_log_weight, g_log_a = _moments_backward(*layer, *ctx.settings, *given)
    return *NO_LAYER, None, None, [weight, g_mean, 2 * g_variance, mean], g_log_weight, g_log_a


def _save_log_likelihood(ctx: GradContext, inputs: OperatorInputs, output: Tensor) -> None:
    *layer, matrix, _, mean, scale, _ = inputs
    ctx.save_for_backward(*layer, mean, scale)
    ctx.settings = (matrix,)


def _back_log_likelihood(ctx: GradContext, g: Tensor) -> tuple[object, ...]:
    *layer, mean, scale = ctx.saved_tensors
    found = _log_likelihood_backward(*layer, *ctx.settings, mean, scale, g)
    return *NO_LAYER, [g, None, -scale.square(), mean], *found


def _save_one(ctx: GradContext, inputs: OperatorInputs, output: Tensor) -> None:
    *layer, matrix, _, given = inputs
    ctx.save_for_backward(*layer, given)
    ctx.settings = (matrix,)


def _back_total(ctx: GradContext, g: Tensor) -> tuple[object, ...]:
    *layer, weight = ctx.saved_tensors
    # By the weights the total is linear: its derivative is the votes' dot product with g.
    return *NO_LAYER, [weight, g, None, None], _dot(*layer, *ctx.settings, _no_handle(g), g)


def _back_dot(ctx: GradContext, g: Tensor) -> tuple[object, ...]:
    *layer, parent = ctx.saved_tensors
    # By the parents the dot product is linear: its derivative is the votes' sum under g.
    return *NO_LAYER, [g, parent, None, None], _total(*layer, *ctx.settings, _no_handle(g), g)


def _save_squared_lengths(ctx: GradContext, inputs: OperatorInputs, output: Tensor) -> None:
    *layer, matrix, _ = inputs
    ctx.save_for_backward(*layer)
    ctx.settings = (matrix,)


def _back_squared_lengths(ctx: GradContext, g: Tensor) -> tuple[object, ...]:
    layer = _Layer(*ctx.saved_tensors, *ctx.settings)
    two = torch.full_like(layer.new_parents(layer.offset.shape[1]), 2.0)
    return *NO_LAYER, [g, None, two, None]


NO_LAYER = (None,) * len(_Layer._fields)
"""The gradients by the arguments that all operators share: what depends on them comes through handles."""


def _no_handle(like: Tensor) -> list[Tensor]:
    """A handle without a gradient."""
    return [like.new_zeros(0) for _ in range(FACTORS)]


def _save_compete(ctx: GradContext, inputs: OperatorInputs, output: Tensor) -> None:
    _, order, ends, groups, _ = inputs
    ctx.save_for_backward(output, order, ends)
    ctx.settings = (groups,)


def _back_compete(ctx: GradContext, g: Tensor) -> tuple[Tensor | None, ...]:
    log_share, order, ends = ctx.saved_tensors
    return _compete_backward(log_share, order, ends, *ctx.settings, g), None, None, None, None


_handles.register_autograd(_back_handles, setup_context=_save_handles)
_moments.register_autograd(_back_moments, setup_context=_save_moments)
_log_likelihood.register_autograd(_back_log_likelihood, setup_context=_save_log_likelihood)
_total.register_autograd(_back_total, setup_context=_save_one)
_dot.register_autograd(_back_dot, setup_context=_save_one)
_squared_lengths.register_autograd(_back_squared_lengths, setup_context=_save_squared_lengths)
_compete.register_autograd(_back_compete, setup_context=_save_compete)
