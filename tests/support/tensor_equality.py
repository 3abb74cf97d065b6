"""Bit-for-bit equality of tensors and nested states, and random ones to try it on."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor


def raw(tensor: Tensor) -> bytes:
    """The elements one by one, as bytes: what "bit for bit" means, without the code under test."""
    width = tensor.element_size()
    as_int = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[width]
    values = tensor.detach().clone(memory_format=torch.contiguous_format).view(-1).view(as_int).tolist()
    return b"".join((value % (1 << 8 * width)).to_bytes(width, "little") for value in values)


def assert_same_tensor(came: Tensor, wanted: Tensor) -> None:
    assert (came.dtype, came.shape) == (wanted.dtype, wanted.shape)
    assert raw(came) == raw(wanted)


def assert_same_state(came: Any, wanted: Any) -> None:
    """Equality that looks at types, order of keys and bits."""
    if isinstance(wanted, Tensor):
        assert_same_tensor(came, wanted)
        return
    assert type(came) is type(wanted)
    if isinstance(wanted, dict):
        assert [(type(key), key) for key in came] == [(type(key), key) for key in wanted]
        for key in wanted:
            assert_same_state(came[key], wanted[key])
    elif isinstance(wanted, list | tuple):
        assert len(came) == len(wanted)
        for a, b in zip(came, wanted, strict=True):
            assert_same_state(a, b)
    else:
        assert repr(came) == repr(wanted)  # nan equals itself here, and 0.0 is not -0.0


def one_line(error: pytest.ExceptionInfo[ValueError], *words: str) -> None:
    text = str(error.value)
    assert "\n" not in text
    for word in words:
        assert word in text


DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
DTYPES += [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool]


@st.composite
def any_tensor(draw: st.DrawFn) -> Tensor:
    """Random bits in every dtype, so that nan payloads, infinities and -0.0 all occur; 0 to 3 axes of 0 to 4."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    size = math.prod(shape) * dtype.itemsize
    data = bytearray(draw(st.binary(min_size=size, max_size=size)))
    if dtype == torch.bool:
        data = bytearray(byte % 2 for byte in data)
    tensor = torch.frombuffer(data, dtype=dtype).view(shape) if size else torch.empty(shape, dtype=dtype)
    return tensor.T if draw(st.booleans()) and tensor.ndim == 2 else tensor
