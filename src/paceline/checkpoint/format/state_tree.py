"""Any ``state_dict`` as JSON, with its tensors set aside; never pickle.

    {"step": 7, "betas": (0.9, 0.95), "exp_avg": tensor}
        ⇄  {"step": 7, "betas": {"$tuple": [0.9, 0.95]}, "exp_avg": {"$tensor": "exp_avg"}}   and   {"exp_avg": tensor}

What JSON can say is said plainly. Everything else is an object of one key that begins with ``$``; a dict that has
such keys itself, or keys that are no strings, is a ``$dict`` of pairs.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.errors import UsageError

__all__ = ["pack", "unpack"]

_FLOATS = ("nan", "inf", "-inf")


def pack(state: Any, name: str = "") -> tuple[Any, dict[str, Tensor]]:
    """Return `state` as a value that JSON can say, and its tensors under labels.

    Args:
        state: None, numbers, strings, bytes, tensors, NumPy arrays; lists, tuples, sets, dicts, counters of them.
        name: what the state is of; begins the labels and the paths in messages.

    Raises:
        UsageError: it holds something else; the message says where.

    Example:
        >>> pack({"step": 7, "betas": (0.9, 0.95)})
        ({'step': 7, 'betas': {'$tuple': [0.9, 0.95]}}, {})
    """
    tensors: dict[str, Tensor] = {}
    return _pack(state, name, tensors), tensors


def _pack(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"$float": str(float(value))}
    if isinstance(value, Tensor):
        return {"$tensor": _aside(value, path, tensors)}
    if isinstance(value, np.ndarray) and value.dtype.isnative and hasattr(torch, value.dtype.name):
        return {"$array": _aside(torch.from_numpy(np.ascontiguousarray(value)), path, tensors)}
    if isinstance(value, bytes | bytearray):
        return {"$bytes": bytes(value).hex()}
    if isinstance(value, Mapping):
        return _pack_mapping(value, path, tensors)
    if isinstance(value, list | tuple | set | frozenset):
        items = [_pack(item, f"{path}[{index}]", tensors) for index, item in enumerate(value)]
        if isinstance(value, list):
            return items
        return {"$tuple" if isinstance(value, tuple) else "$set": items}
    raise UsageError(
        f"{path or 'the state'} is a {type(value).__module__}.{type(value).__qualname__}, which no checkpoint holds",
        remedy="give state_dict() of numbers, strings, tensors, and lists and dicts of them",
    )


def _pack_mapping(value: Mapping[Any, Any], path: str, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, Counter):
        return {"$counter": _pairs(value, path, tensors)}
    if all(isinstance(key, str) and not key.startswith("$") for key in value):
        return {key: _pack(item, f"{path}.{key}" if path else key, tensors) for key, item in value.items()}
    return {"$dict": _pairs(value, path, tensors)}


def _pairs(value: Mapping[Any, Any], path: str, tensors: dict[str, Tensor]) -> list[list[Any]]:
    return [
        [_pack(key, f"a key of {path}", tensors), _pack(item, f"{path}[{key!r}]", tensors)]
        for key, item in value.items()
    ]


def _aside(tensor: Tensor, path: str, tensors: dict[str, Tensor]) -> str:
    """Keep `tensor` under a label of its own, and return that."""
    label = path or "tensor"
    while label in tensors:
        label += "'"
    tensors[label] = tensor.detach()
    return label


def unpack(packed: Any, tensor_of: Callable[[str], Tensor]) -> Any:
    """Return the state that `pack` turned into `packed`.

    Args:
        packed: what JSON said.
        tensor_of: returns the tensor of a label.

    Raises:
        ValueError: it is nothing that `pack` returns.
    """
    if isinstance(packed, list):
        return [unpack(item, tensor_of) for item in packed]
    if not isinstance(packed, dict):
        return packed
    kind = next(iter(packed), "")
    if not kind.startswith("$"):
        return {key: unpack(item, tensor_of) for key, item in packed.items()}
    if len(packed) != 1 or kind not in _KINDS:
        raise ValueError(f"{kind!r} where a value is due")
    what, read = _KINDS[kind]
    if not isinstance(packed[kind], what):
        raise ValueError(f"{type(packed[kind]).__name__} in {kind!r}")
    return read(packed[kind], tensor_of)


def _unpack_pairs(pairs: list[Any], tensor_of: Callable[[str], Tensor]) -> list[tuple[Any, Any]]:
    if any(not isinstance(pair, list) or len(pair) != 2 for pair in pairs):
        raise ValueError("something else than pairs in a dict")
    return [(unpack(key, tensor_of), unpack(item, tensor_of)) for key, item in pairs]


def _unpack_float(text: str, _: Callable[[str], Tensor]) -> float:
    if text not in _FLOATS:
        raise ValueError(f"{text!r} in '$float'")
    return float(text)


_KINDS: dict[str, tuple[type, Callable[[Any, Callable[[str], Tensor]], Any]]] = {
    "$tensor": (str, lambda label, tensor_of: tensor_of(label)),
    "$array": (str, lambda label, tensor_of: tensor_of(label).numpy()),
    "$float": (str, _unpack_float),
    "$bytes": (str, lambda text, _: bytes.fromhex(text)),
    "$tuple": (list, lambda items, tensor_of: tuple(unpack(item, tensor_of) for item in items)),
    "$set": (list, lambda items, tensor_of: {unpack(item, tensor_of) for item in items}),
    "$counter": (list, lambda pairs, tensor_of: Counter(dict(_unpack_pairs(pairs, tensor_of)))),
    "$dict": (list, lambda pairs, tensor_of: dict(_unpack_pairs(pairs, tensor_of))),
}
