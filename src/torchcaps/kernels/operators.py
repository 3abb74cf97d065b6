"""Types of what torch hands to the gradient of an operator of its library."""

from __future__ import annotations

from typing import Any, Protocol, TypeAlias

from torch import Tensor

__all__ = ["GradContext", "OperatorInputs"]

OperatorInputs: TypeAlias = tuple[Any, ...]
"""Arguments of an operator as `setup_context` gets them: tensors, numbers and words."""


class GradContext(Protocol):
    """What an operator saves in its forward pass for the backward one."""

    settings: OperatorInputs

    @property
    def saved_tensors(self) -> tuple[Any, ...]:
        """The tensors saved, None where None was."""

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        """Save tensors."""

    def mark_non_differentiable(self, *tensors: Tensor) -> None:
        """Say which results have no gradient."""

    def set_materialize_grads(self, value: bool) -> None:
        """Say whether missing gradients are tensors of zeros."""
