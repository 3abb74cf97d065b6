"""What can be measured, by names that say the sizes.

    dynamic-IxD-JxK   a layer of dynamic routing, I children of D numbers to J parents of K; its step is forward and
                      backward, to the children and to W
    cd-IxD-JxK        a step of contrastive divergence of expert capsules, cosine, normalized over children, as printed
    em-IxJ            a layer of EM routing, I children to J parents with 4x4 poses
    em-A-B-C-D        MatrixCaps of these sizes on 2 x 32 x 32 images of 5 classes
    NAME-A-B-C-D      the same with another router: vb, attention, uniform, or EM as em-mixing, em-vector
    em-composed-A-B-C-D, dynamic-composed-IxD-JxK
                      the same as without "composed", by the router's equations on `Votes` instead of its fused kernel
    dynamic-user-IxD-JxK
                      the same by `benchmarks.user_router`
    routers-DATA, routers-DATA-ROUTER
                      the network of a run of experiments/routers.toml, DATA mnist or smallnorb
    capsnet-SIDE      CapsNet on 1 x SIDE x SIDE images of 10 classes
    sparse-SIDE       SparseCaps on 1 x SIDE x SIDE images

with 3 iterations, or T with `-tT` behind the name of a layer. A network's step is its objective, backward and Adam.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn.functional import relu

from benchmarks.cost import Cost, contrast_cost, cost_of
from benchmarks.reference import MatmulVotes, couple, plain_contrast, plain_dynamic
from benchmarks.user_router import ROUTER as USER_ROUTER
from benchmarks.user_router import UserDynamic
from torchcaps.errors import RecipeError, suggestion
from torchcaps.kernels.threads import kernel_mode
from torchcaps.layers import DenseCapsules
from torchcaps.math.pose import MATRIX
from torchcaps.math.squash import norm, squash
from torchcaps.models import MODELS, Model
from torchcaps.models.poe.config import EnergyConfig
from torchcaps.models.poe.encoder import CapsuleEnergy, SampleDraws
from torchcaps.routing import EM, ROUTERS, VB, Attention, Dynamic, Uniform, dispatch
from torchcaps.train.recipe import OptimizerConfig, TrainConfig
from torchcaps.types import Batch, Capsules, ImageSpec

__all__ = ["NAMES", "ROUTER_RUNS", "Case", "Work", "case_of", "plainly"]

NAMES = (
    "dynamic-1152x8-10x16",
    "dynamic-4608x8-16x16",
    "cd-576x8-20x16",
    "em-64-8-16-16",
    "em-32-32-32-32",
    "capsnet-28",
    "sparse-40",
)


_ROUTER_DATA = {"mnist": ImageSpec(1, 28, 28, 10), "smallnorb": ImageSpec(2, 32, 32, 5)}
ROUTER_RUNS = tuple(
    f"routers-{data}{router}" for data in _ROUTER_DATA for router in ("", "-dynamic", "-em", "-vb", "-attention")
)
"""The runs of the router table, those without routing first."""


class Work(NamedTuple):
    """Two things to time, on weights and inputs that are there already."""

    forward: Callable[[], object]
    step: Callable[[], object]


@dataclass(frozen=True)
class Case:
    """Each of `ours`, `plain` and `trunk` makes its work for a batch; only networks have a trunk."""

    name: str
    ours: Callable[[int], Work]
    plain: Callable[[int], Work]
    trunk: Callable[[int], Work] | None
    cost: Callable[[], Cost]


def case_of(name: str) -> Case:
    """The case of that name, of any sizes."""
    for form, make in _FORMS.items():
        match = re.fullmatch(form, name)
        if match:
            numbers = [int(n) for n in match.groups() if n]
            if min(numbers, default=1) < 1:
                raise RecipeError(f"no case '{name}': its sizes are numbers from 1 on")
            return make(name, *numbers)
    raise RecipeError(f"no case '{name}'{suggestion(name, NAMES)}")


def plainly(work: Work) -> Work:
    """The same work without fast paths."""
    return Work(_switched("plain", work.forward), _switched("plain", work.step))


def _fastly(work: Work) -> Work:
    """The same work with fast paths, whatever the environment says."""
    return Work(_switched("fast", work.forward), _switched("fast", work.step))


def _composed(case: Case) -> Case:
    """The same case, but its router runs on `Votes`, without its fused kernel."""

    def unfused(act: Callable[[], object]) -> Callable[[], object]:
        def acts() -> object:
            with mock.patch.object(dispatch, "_route_fused", lambda *_: None):
                return act()

        return acts

    def ours(batch: int) -> Work:
        work = case.ours(batch)
        return Work(unfused(work.forward), unfused(work.step))

    return replace(case, ours=ours)


def _against_matmul(case: Case) -> Case:
    """The same case, but the plain path is `MatmulVotes` instead of the library's own stored votes."""
    stored = mock.patch.object(dispatch, "DenseVotes", MatmulVotes)

    def plain(batch: int) -> Work:
        work = case.plain(batch)
        return Work(stored(work.forward), stored(work.step))

    return replace(case, plain=plain)


def _by_user(name: str, i: int, d: int, j: int, k: int, iterations: int = 3) -> Case:
    """Dynamic routing by a user's router, which is known by name only here."""
    known = mock.patch.dict(ROUTERS, {"user": USER_ROUTER})
    routing = UserDynamic(iterations=iterations)
    with known:
        case = _layer(name, lambda: DenseCapsules(i, j, d, k, routing=routing), (i, d), (j, k))

    def ours(batch: int) -> Work:
        with known:
            work = case.ours(batch)
        return Work(known(work.forward), known(work.step))

    return replace(case, ours=ours)


def _switched(value: str, act: Callable[[], object]) -> Callable[[], object]:
    def acts() -> object:
        with kernel_mode(value):
            return act()

    return acts


@contextmanager
def _seeded() -> Iterator[None]:
    """The same weights and inputs each time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


# --- Layers -----------------------------------------------------------------------------------------------------------


def _dynamic(name: str, i: int, d: int, j: int, k: int, iterations: int = 3) -> Case:
    routing = Dynamic(iterations=iterations)
    case = _layer(name, lambda: DenseCapsules(i, j, d, k, routing=routing), (i, d), (j, k))

    def plain(batch: int) -> Work:
        with _seeded():
            W = DenseCapsules(i, j, d, k, routing=routing).W
            x = squash(torch.randn(batch, i, d)).requires_grad_()
            gradient = torch.randn(batch, j, k)

        @torch.no_grad()
        def forward() -> None:
            plain_dynamic(x, W, iterations)

        def step() -> None:
            x.grad = W.grad = None
            parents = plain_dynamic(x, W, iterations)
            torch.autograd.backward([parents, norm(parents)], [gradient, gradient[..., 0].contiguous()])

        return Work(forward, step)

    return replace(case, plain=plain)


def _em_layer(name: str, i: int, j: int, iterations: int = 3) -> Case:
    k = MATRIX**2
    routing = EM(iterations=iterations)
    return _layer(name, lambda: DenseCapsules(i, j, k, k, routing=routing, pose="matrix"), (i, k), (j, k))


def _layer(name: str, make: Callable[[], DenseCapsules], below: tuple[int, int], above: tuple[int, int]) -> Case:
    """A layer with children [b (below)] to parents [b (above)]."""

    def work(batch: int) -> Work:
        with _seeded():
            return _layer_work(make(), squash(torch.randn(batch, *below)), torch.randn(batch, *above))

    def cost() -> Cost:
        layer = make()
        return cost_of(layer, lambda: layer(Capsules(torch.ones(1, *below), torch.ones(1, below[0]))))

    return Case(name, lambda b: _fastly(work(b)), lambda b: plainly(work(b)), None, cost)


def _layer_work(layer: DenseCapsules, pose: Tensor, gradient: Tensor) -> Work:
    """Children that are to learn, too; what comes back from above is a gradient of the poses and the activations."""
    children = Capsules(pose.requires_grad_(), norm(pose.detach()).requires_grad_())
    above = [gradient, gradient[..., 0].contiguous()]

    @torch.no_grad()
    def forward() -> None:
        layer(children)

    def step() -> None:
        children.pose.grad = children.activation.grad = None
        layer.zero_grad()
        parents, _ = layer(children)
        torch.autograd.backward([parents.pose, parents.activation], above)

    return Work(forward, step)


def _contrast(name: str, i: int, d: int, j: int, k: int, iterations: int = 3) -> Case:
    routing = Dynamic(iterations=iterations, agreement="cosine", over="children")

    def parts(batch: int) -> tuple[CapsuleEnergy, Tensor]:
        with _seeded():
            return CapsuleEnergy(EnergyConfig(mode="paper", routing=routing), i, j, d, k), squash(
                torch.randn(batch, i, d)
            )

    def ours(batch: int) -> Work:
        energy, x = parts(batch)
        draws = SampleDraws(0, torch.arange(batch))

        def step() -> None:
            energy.zero_grad()
            torch.autograd.backward(energy.contrast(x, 0, draws)["gap"])

        return _fastly(Work(lambda: energy.infer(x), step))

    def plain(batch: int) -> Work:
        energy, x = parts(batch)
        W = energy.W.detach()
        return Work(lambda: couple(x, W, iterations), lambda: plain_contrast(x, W, iterations))

    return Case(name, ours, plain, None, lambda: contrast_cost(i * j, k, d, iterations))


# --- Networks ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Network:
    """A model by its name in a recipe, and the images it sees."""

    model: str
    spec: ImageSpec
    options: dict[str, Any] = field(default_factory=dict)

    def case(self, name: str) -> Case:
        """Refuses sizes that the model does not take, when it is built."""
        if self.model not in MODELS:
            raise RecipeError(f"case '{name}' needs the model '{self.model}'{suggestion(self.model, MODELS)}")
        return Case(name, lambda b: _fastly(self._work(b)), lambda b: plainly(self._work(b)), self._trunk, self._cost)

    def _build(self, batch: int) -> tuple[Model, Batch]:
        with _seeded():
            model: Model = MODELS[self.model](**self.options).build(self.spec)
            images = torch.rand(batch, *self.spec[:3])
            labels = torch.randint(self.spec.classes, (batch,))
        if TrainConfig().channels_last:
            images = images.contiguous(memory_format=torch.channels_last)
        return model.train(), Batch(images, labels, torch.arange(batch))

    def _work(self, batch: int) -> Work:
        model, data = self._build(batch)
        return _network_work(list(model.parameters()), lambda: [model.objective(data, 0)["loss"]], [None])

    def _trunk(self, batch: int) -> Work:
        """Its convolutions alone, as torch has them: the first on the images, ReLU, the others on what that gives."""
        model, data = self._build(batch)
        first, *others = [m for m in model.modules() if isinstance(m, nn.Conv2d)]

        def run() -> list[Tensor]:
            features = relu(first(data.images))
            return [conv(features) for conv in others] or [features]

        with _seeded(), torch.no_grad():
            gradients: list[Tensor | None] = [torch.randn_like(out) for out in run()]
        parameters = [p for conv in (first, *others) for p in conv.parameters()]
        return plainly(_network_work(parameters, run, gradients))

    def _cost(self) -> Cost:
        model, data = self._build(1)
        return cost_of(model, lambda: model.objective(data, 0))


def _network_work(
    parameters: list[nn.Parameter], run: Callable[[], list[Tensor]], gradients: list[Tensor | None]
) -> Work:
    """Return the forward pass `run`, and a step with it by the optimizer that recipes have by default."""
    optimizer = OptimizerConfig().build(parameters)

    @torch.no_grad()
    def forward() -> None:
        run()

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(run(), gradients)
        optimizer.step()

    return Work(forward, step)


def _matrix(name: str, *sizes: int, **options: object) -> Case:
    return _Network("matrix", ImageSpec(2, 32, 32, 5), {"sizes": sizes, **options}).case(name)


def _capsnet(name: str, side: int) -> Case:
    return _Network("capsnet", ImageSpec(1, side, side, 10)).case(name)


def _router_run(name: str) -> Case:
    """The network of a run of the router table, with the settings of its sweep file."""
    from experiments.sweep import EXPERIMENTS, run_recipe

    model = run_recipe(name, EXPERIMENTS / "routers.toml").model
    return _Network("capsnet", _ROUTER_DATA[name.split("-")[1]], vars(model)).case(name)


def _sparse(name: str, side: int) -> Case:
    return _Network("sparse", ImageSpec(1, side, side, 10)).case(name)


_SIZES = r"(\d+)x(\d+)-(\d+)x(\d+)(?:-t(\d+))?"

_FOUR = r"(\d+)-(\d+)-(\d+)-(\d+)"

_FORMS: dict[str, Callable[..., Case]] = {
    f"dynamic-{_SIZES}": _dynamic,
    f"cd-{_SIZES}": _contrast,
    r"em-(\d+)x(\d+)(?:-t(\d+))?": lambda *given: _against_matmul(_em_layer(*given)),
    rf"em-{_FOUR}": lambda *given: _against_matmul(_matrix(*given)),
    rf"em-composed-{_FOUR}": lambda *given: _composed(_matrix(*given)),
    f"dynamic-composed-{_SIZES}": lambda *given: _composed(_dynamic(*given)),
    rf"em-mixing-{_FOUR}": partial(_matrix, routing=EM(switch="mixing")),
    rf"em-vector-{_FOUR}": partial(_matrix, pose="vector"),
    rf"vb-{_FOUR}": partial(_matrix, routing=VB()),
    rf"attention-{_FOUR}": partial(_matrix, routing=Attention()),
    rf"uniform-{_FOUR}": partial(_matrix, routing=Uniform()),
    f"dynamic-user-{_SIZES}": _by_user,
    "|".join(ROUTER_RUNS): _router_run,
    r"capsnet-(\d+)": _capsnet,
    r"sparse-(\d+)": _sparse,
}
