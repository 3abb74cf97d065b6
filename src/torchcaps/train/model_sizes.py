"""The sizes of a model before it is built: its tensors without memory, compared with a checkpoint or the machine.

A recipe may ask for more than any machine holds, by mistake or, inside of a checkpoint, on purpose. Its model is first
built on torch's meta device, where a tensor has a shape and no numbers, so that refusing it costs neither memory nor
time.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from torchcaps.errors import CheckpointError, RecipeError, TorchcapsError, TrainingError
from torchcaps.models import Model
from torchcaps.train.recipe import Recipe
from torchcaps.types import ImageSpec
from torchcaps.utils.memory import gigabytes, physical_memory

__all__ = ["check_memory", "check_stored", "model_outline", "refusing_lack_of_memory"]

_FREE_BYTES = 1 << 26
_MOST_COMPUTED = 4
"""Bytes of buffers that a model may have beside the tensors that its checkpoint stores, such as coordinates and sums
that only training reads; and how many times as many as these tensors."""


class _WithoutInitialValues(TorchFunctionMode):
    """Skip normal initial values: on the meta device they have no effect, and torch imports its compiler for them."""

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        return args[0] if func is torch.Tensor.normal_ else func(*args, **(kwargs or {}))


def model_outline(recipe: Recipe, spec: ImageSpec) -> Model:
    """Build the model of a recipe on the meta device: names, shapes and types of its tensors, no memory.

    Args:
        recipe: Which model.
        spec: Shape of the images and number of classes.

    Raises:
        RecipeError: The sizes overflow or do not go together.
        TorchcapsError: The model itself refuses them.
    """
    try:
        with torch.device("meta"), _WithoutInitialValues():
            return recipe.model.build(spec)
    except TorchcapsError:
        raise
    except (RuntimeError, ValueError, TypeError, OverflowError, ZeroDivisionError) as error:
        reason = " ".join(str(error).split())[:200]
        raise RecipeError(f"the sizes of this model do not go together: {reason}; change those of [model]") from None


def check_stored(outline: Model, stored: Mapping[str, object]) -> None:
    """Compare the tensors that a recipe asks for with those that a checkpoint stores.

    Args:
        outline: The model on the meta device.
        stored: Name -> tensor of the model's state in the checkpoint.

    Raises:
        CheckpointError: A tensor is missing, is one too many or has another shape, or the model needs more memory than
            its stored tensors explain.
    """
    # Names and shapes of the state.
    wanted = outline.state_dict()
    left_out = 0
    for name in wanted.keys() | stored.keys():
        here = stored.get(name)
        came = list(here.shape) if isinstance(here, Tensor) else "nothing"
        asked = list(wanted[name].shape) if name in wanted else "nothing"
        # What only training reads may come without its rows
        if name in outline.training_sums and name in wanted and came == [0, *wanted[name].shape[1:]]:
            left_out += wanted[name].nbytes
        elif came != asked:
            raise CheckpointError(
                f"the checkpoint belongs to another kind of run: '{name}' is {asked} in its recipe, {came} in the file"
            )
    # Buffers that are computed, such as coordinates, are not stored; only their sum is bounded.
    computed = left_out + sum(buffer.nbytes for name, buffer in outline.named_buffers() if name not in wanted)
    held = sum(tensor.nbytes for tensor in stored.values() if isinstance(tensor, Tensor))
    if computed > max(_FREE_BYTES, _MOST_COMPUTED * held):
        raise CheckpointError(
            f"the checkpoint contradicts itself: its recipe asks for {gigabytes(computed)} beside the "
            f"{gigabytes(held)} that it holds"
        )


def check_memory(outline: Model, device: torch.device) -> None:
    """Refuse to train a model whose weights and gradients alone exceed the memory of the device.

    Args:
        outline: The model on the meta device.
        device: Where it would be trained.

    Raises:
        RecipeError: They do; named are the number of parameters and the largest of them.
    """
    needed = 2 * sum(p.nbytes for p in outline.parameters()) + sum(b.nbytes for b in outline.buffers())
    memory = _memory_of(device)
    if needed > memory:
        name, largest = max(outline.named_parameters(), key=lambda item: item[1].numel())
        raise RecipeError(
            f"weights and gradients of this model need {gigabytes(needed)}, and there are {gigabytes(memory)}; "
            f"lower the sizes of [model], first of all those of '{name}' {list(largest.shape)}"
        )


@contextmanager
def refusing_lack_of_memory() -> Iterator[None]:
    """Turn what torch and Python raise where memory ends into one line that says what to lower.

    Raises:
        TrainingError: An allocation failed inside.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        # torch has a class for a full GPU, for a full CPU only a text.
        text = " ".join(str(error).split())
        if not isinstance(error, MemoryError | torch.OutOfMemoryError) and "allocate memory" not in text:
            raise
        found = re.search(r"tried to allocate ([0-9.]+ \w+)", text, re.IGNORECASE)
        asked = f" when {found[1]} more were asked for" if found else ""
        raise TrainingError(
            f"memory ran out{asked}; lower train.batch, the size of the images or the sizes of [model]"
        ) from None


def _memory_of(device: torch.device) -> int:
    """Return the bytes of memory of a device."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return physical_memory()
