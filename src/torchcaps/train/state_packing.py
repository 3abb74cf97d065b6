"""Nested states, such as an optimizer's, as flat tensors and a skeleton of JSON values, and back, exactly.

>>> import torch
>>> tensors, skeleton = pack_state({"step": 3, 0: (torch.ones(2), None)}, "optimizer")
>>> list(tensors), skeleton
(['optimizer.0.0'], {'$dict': [['step', 3], [0, {'$tuple': [{'$tensor': 'optimizer.0.0'}, None]}]]})
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from torchcaps.errors import CheckpointError

__all__ = ["is_plain", "pack_state", "unpack_state"]

MAPPINGS: dict[str, type[dict[Any, Any]]] = {"$dict": dict, "$ordered": OrderedDict, "$counter": Counter}
MAPPING_TAGS = {cls: tag for tag, cls in MAPPINGS.items()}


def pack_state(state: object, prefix: str) -> tuple[dict[str, Tensor], object]:
    """Split a nested state into flat tensors, named by their path below `prefix`, and a skeleton for `meta`.

    Lists, and dicts whose keys are text without a leading `$`, stand for themselves. What JSON lacks becomes
    a dict with one tag: {"$tensor": name}, {"$tuple": [...]} or, with int keys or for an OrderedDict or a
    Counter, {"$dict" | "$ordered" | "$counter": [[key, value], ...]}.
    """
    tensors: dict[str, Tensor] = {}
    try:
        return tensors, _pack(state, prefix, tensors)
    except RecursionError as error:
        raise CheckpointError(f"state {prefix!r} contains itself or nests too deep: flatten it") from error


def _pack(state: object, where: str, tensors: dict[str, Tensor]) -> object:
    # Exact types throughout: a subclass would come back as its base class, and so not be the same state.
    if is_plain(state):
        return state
    if isinstance(state, Tensor):
        return {"$tensor": _keep(state, where, tensors)}
    if isinstance(state, list | tuple) and type(state) in (list, tuple):  # not a NamedTuple
        items = [_pack(item, _join(where, index), tensors) for index, item in enumerate(state)]
        return items if type(state) is list else {"$tuple": items}
    if isinstance(state, dict) and type(state) in MAPPING_TAGS:
        return _pack_mapping(state, where, tensors)
    raise CheckpointError(
        f"state {where!r} is of type {type(state).__name__}; wanted a tensor, number, str, None, list, "
        "tuple or dict: leave it out or convert it"
    )


def _pack_mapping(state: dict[object, object], where: str, tensors: dict[str, Tensor]) -> dict[str, object]:
    # JSON turns the key 0 into "0"; an optimizer's state has both kinds, hence pairs where keys are not all text.
    for key in state:
        if type(key) not in (str, int):
            raise CheckpointError(f"key {key!r} of state {where!r} is a {type(key).__name__}; wanted str or int")
    pairs = [[key, _pack(value, _join(where, key), tensors)] for key, value in state.items()]
    if type(state) is dict and all(isinstance(key, str) and not key.startswith("$") for key in state):
        return {str(key): value for key, value in pairs}
    return {MAPPING_TAGS[type(state)]: pairs}


def _join(where: str, key: object) -> str:
    return f"{where}.{key}" if where else str(key)


def _keep(tensor: Tensor, name: str, tensors: dict[str, Tensor]) -> str:
    """Put the tensor under `name`, or under `name~` if another path reads the same (keys 0 and "0")."""
    while name in tensors:
        name += "~"
    tensors[name] = tensor.detach()
    return name


def unpack_state(skeleton: object, tensors: Mapping[str, Tensor]) -> object:
    """The inverse of `pack_state`; `tensors` may hold others besides, and is not copied."""
    try:
        return _unpack(skeleton, tensors)
    except RecursionError as error:
        raise CheckpointError("skeleton of a state nests too deep: it is not from pack_state") from error


def _unpack(node: object, tensors: Mapping[str, Tensor]) -> object:
    if is_plain(node):
        return node
    # Lists and tables stand for themselves.
    if type(node) is list:
        return [_unpack(item, tensors) for item in node]
    if type(node) is not dict or not all(type(key) is str for key in node):
        raise _malformed(node)
    if not any(key.startswith("$") for key in node):
        return {key: _unpack(item, tensors) for key, item in node.items()}
    # A tag stands alone in its table.
    if len(node) != 1:
        raise _malformed(node)
    [(tag, body)] = node.items()
    return _unpack_tag(tag, body, tensors)


def _unpack_tag(tag: str, body: object, tensors: Mapping[str, Tensor]) -> object:
    if tag == "$tensor" and type(body) is str:
        if body not in tensors:
            raise CheckpointError(f"tensor {body!r} of the state is missing: use a checkpoint of this very state")
        return tensors[body]
    if tag == "$tuple" and type(body) is list:
        return tuple(_unpack(item, tensors) for item in body)
    if tag in MAPPINGS and type(body) is list and all(_is_pair(pair) for pair in body):
        # Two equal keys would become one.
        state = MAPPINGS[tag]({key: _unpack(value, tensors) for key, value in body})
        if len(state) == len(body):
            return state
    raise _malformed({tag: body})


def _is_pair(pair: object) -> bool:
    return type(pair) is list and len(pair) == 2 and type(pair[0]) in (str, int)


def _malformed(node: object) -> CheckpointError:
    came = repr(list(node) if type(node) is dict else type(node).__name__)
    return CheckpointError(f"skeleton of a state has {came[:80]} where a value or one tag was wanted; use pack_state's")


def is_plain(value: object) -> bool:
    """A value that JSON keeps as it is."""
    return value is None or type(value) in (bool, int, float, str)
