"""Encodes a ``state_dict`` as JSON and separate tensors; never pickle.

    {"step": 7, "betas": (0.9, 0.95), "exp_avg": tensor}
        ⇄  {"step": 7, "betas": {"$tuple": [0.9, 0.95]}, "exp_avg": {"$tensor": "exp_avg"}}   and   {"exp_avg": tensor}

What JSON has stays as it is. Everything else is an object with one key that begins with ``$``; a dict with such keys,
or with keys that are not strings, is a ``$dict`` of pairs.
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
TensorLookup = Callable[[str], Tensor]


def pack(state: Any, name: str = "") -> tuple[Any, dict[str, Tensor]]:
    """Return `state` as plain JSON values, and its tensors by label.

    Args:
        state: None, numbers, strings, bytes, tensors, NumPy arrays; lists, tuples, sets, dicts, counters of them.
        name: of the object, a prefix of labels and of paths in messages.

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
        return {"$tensor": _add_tensor(value, path, tensors)}
    if isinstance(value, np.ndarray) and value.dtype.isnative and hasattr(torch, value.dtype.name):
        return {"$array": _add_tensor(torch.from_numpy(np.ascontiguousarray(value)), path, tensors)}
    if isinstance(value, bytes | bytearray):
        return {"$bytes": bytes(value).hex()}
    if isinstance(value, Mapping):
        plain = all(isinstance(key, str) and not key.startswith("$") for key in value)
        if plain and not isinstance(value, Counter):
            return {
                key: _pack(item, f"{path}.{key}" if path else key, tensors) for key, item in value.items()
            }
        pairs = [
            [_pack(key, f"a key of {path}", tensors), _pack(item, f"{path}[{key!r}]", tensors)]
            for key, item in value.items()
        ]
        return {"$counter" if isinstance(value, Counter) else "$dict": pairs}
    if isinstance(value, list | tuple | set | frozenset):
        items = [_pack(item, f"{path}[{index}]", tensors) for index, item in enumerate(value)]
        if isinstance(value, list):
            return items
        return {"$tuple" if isinstance(value, tuple) else "$set": items}
    raise UsageError(
        f"{path or 'the state'} is a {type(value).__module__}.{type(value).__qualname__}, which can't be saved",
        remedy="return numbers, strings, tensors, and lists and dicts of them from state_dict()",
    )


def _add_tensor(tensor: Tensor, path: str, tensors: dict[str, Tensor]) -> str:
    """Add `tensor` under a new label, and return that."""
    label = path or "tensor"
    while label in tensors:
        label += "'"
    tensors[label] = tensor.detach()
    return label


def unpack(packed: Any, tensor_of: TensorLookup) -> Any:
    """Return the state that `pack` turned into `packed`.

    Args:
        packed: the JSON values.
        tensor_of: returns the tensor with a label.

    Raises:
        ValueError: `pack` returns no such values.
    """
    if isinstance(packed, list):
        return [unpack(item, tensor_of) for item in packed]
    if not isinstance(packed, dict):
        return packed
    kind = next(iter(packed), "")
    if not kind.startswith("$"):
        return {key: unpack(item, tensor_of) for key, item in packed.items()}
    if len(packed) != 1 or kind not in _KINDS:
        raise ValueError(f"{kind!r} is not the kind of a value")
    expected, read = _KINDS[kind]
    if not isinstance(packed[kind], expected):
        raise ValueError(f"{type(packed[kind]).__name__} in {kind!r}")
    return read(packed[kind], tensor_of)


def _unpack_pairs(pairs: list[Any], tensor_of: TensorLookup) -> list[tuple[Any, Any]]:
    if any(not isinstance(pair, list) or len(pair) != 2 for pair in pairs):
        raise ValueError("a dict of something else than pairs")
    return [(unpack(key, tensor_of), unpack(item, tensor_of)) for key, item in pairs]


def _unpack_float(text: str, _: TensorLookup) -> float:
    if text not in _FLOATS:
        raise ValueError(f"{text!r} in '$float'")
    return float(text)


_KINDS: dict[str, tuple[type, Callable[[Any, TensorLookup], Any]]] = {
    "$tensor": (str, lambda label, tensor_of: tensor_of(label)),
    "$array": (str, lambda label, tensor_of: tensor_of(label).numpy()),
    "$float": (str, _unpack_float),
    "$bytes": (str, lambda text, _: bytes.fromhex(text)),
    "$tuple": (list, lambda items, tensor_of: tuple(unpack(items, tensor_of))),
    "$set": (list, lambda items, tensor_of: set(unpack(items, tensor_of))),
    "$counter": (list, lambda pairs, tensor_of: Counter(dict(_unpack_pairs(pairs, tensor_of)))),
    "$dict": (list, lambda pairs, tensor_of: dict(_unpack_pairs(pairs, tensor_of))),
}
