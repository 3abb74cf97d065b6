"""How much arithmetic a case needs, by formula; a multiplication and an addition are two operations.

One pass over the votes V_ij = W_ij x_i of a sample costs 2 I J K D, and counts wherever an algorithm that stores no
votes needs them:

    dynamic, T iterations    forward T passes; step 2 T + 2: forward T, backward T - 1 to the coupling, then the votes
                             once more, the children's gradient and that of W
    contrastive divergence   forward T; step T + 4: reverse, forward again, and the gradient of both phases
    EM                       each pair of child and parent, at each place, in each iteration: its vote (2 K D), and for
                             each of its K numbers 2 for the mean, 3 for the variance, 3 for the density; step 3 times
                             forward, as of any chain of products
    convolution, linear      2 a weight a place; step 3 times that, or 2 times where the input needs no gradient

Squashing, softmax and the like are not counted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchcaps.layers import ClassCapsules, ConvCapsules, DenseCapsules
from torchcaps.routing import EM, VB, iterations_of

__all__ = ["Cost", "contrast_cost", "cost_of", "dense_cost", "dynamic_cost", "em_cost"]

EM_PER_NUMBER = 8
"""Mean 2, variance 3, density 3."""


class Cost(NamedTuple):
    """Of one sample: operations forward, operations of a step, and how many numbers its votes are."""

    forward: float
    step: float
    votes: int = 0

    def __add__(self, other: object) -> Cost:
        """The cost of both."""
        assert isinstance(other, Cost)
        return Cost(self.forward + other.forward, self.step + other.step, self.votes + other.votes)


def dynamic_cost(pairs: int, k: int, d: int, iterations: int) -> Cost:
    """Dynamic routing of so many pairs (i, j) with votes of k numbers, d products each."""
    once = 2.0 * pairs * k * d
    return Cost(iterations * once, (2 * iterations + 2) * once, pairs * k)


def contrast_cost(pairs: int, k: int, d: int, iterations: int) -> Cost:
    """A step of contrastive divergence, routing included."""
    once = 2.0 * pairs * k * d
    return Cost(iterations * once, (iterations + 4) * once, pairs * k)


def em_cost(pairs: int, k: int, d: int, iterations: int) -> Cost:
    """EM routing; a child counts once for each window that it stands in."""
    forward = iterations * pairs * float(2 * k * d + EM_PER_NUMBER * k)
    return Cost(forward, 3 * forward, pairs * k)


def dense_cost(outputs: int, weights: int, *, first: bool) -> Cost:
    """A convolution or a linear map: so many weights go into each output; the first one has no input to teach."""
    forward = 2.0 * outputs * weights
    return Cost(forward, (2 if first else 3) * forward)


def cost_of(model: nn.Module, run: Callable[[], object]) -> Cost:
    """The cost of what `run`, given one sample, calls in the model: convolutions, linear maps, capsule layers."""
    found: list[Cost] = []

    def note(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        found.append(_layer_cost(module, inputs, output))

    hooks = [module.register_forward_hook(note) for module in model.modules() if isinstance(module, _COUNTED)]
    try:
        with torch.enable_grad():
            run()
    finally:
        for hook in hooks:
            hook.remove()
    return sum(found, Cost(0, 0))


_COUNTED = (nn.Conv2d, nn.Linear, DenseCapsules, ConvCapsules, ClassCapsules)


def _layer_cost(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> Cost:
    if isinstance(module, nn.Conv2d | nn.Linear):
        assert isinstance(output, Tensor)
        return dense_cost(output.numel(), module.weight[0].numel(), first=not inputs[0].requires_grad)
    assert isinstance(module, DenseCapsules | ConvCapsules | ClassCapsules)
    W, places = (module.expanded_weights(), 1) if isinstance(module, DenseCapsules) else (module.W, module.grid.places)
    children, parents, rows, d = W.shape
    k = rows * d if module.pose == "matrix" else rows
    formula = em_cost if isinstance(module.routing, EM | VB) else dynamic_cost
    return formula(places * children * parents, k, d, iterations_of(module.routing))
