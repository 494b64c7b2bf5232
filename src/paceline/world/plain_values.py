"""Encodes values, such as a ``state_dict``, as JSON and separate tensors; never pickle.

    {"step": 7, "betas": (0.9, 0.95), "exp_avg": tensor}
        ⇄  {"step": 7, "betas": {"$tuple": [0.9, 0.95]}, "exp_avg": {"$tensor": "exp_avg"}}   and   {"exp_avg": tensor}

What JSON has stays as it is. Everything else is an object with one key that begins with ``$``; a dict with such keys,
or with keys that are not strings, is a ``$dict`` of pairs.

Between ranks, containers keep their classes: a named tuple, a dataclass, or a subclass of dict or UserDict is an
``$object``: the name of its class, its items and its attributes. It is made from a class that the receiver has imported
already, without calling any code of the class.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections import Counter, OrderedDict, UserDict
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.errors import UsageError

__all__ = ["pack", "unpack", "unpack_objects"]

_FLOATS = ("nan", "inf", "-inf")
TensorLookup = Callable[[str], Tensor]
Maker = Callable[[list[Any]], Any] | None


def pack(state: Any, name: str = "", *, classes: bool = False) -> tuple[Any, dict[str, Tensor]]:
    """Return `state` as plain JSON values, and its tensors by label.

    Args:
        state: None, numbers, strings, bytes, tensors, NumPy arrays; lists, tuples, sets, dicts, counters of them.
        name: of the object, a prefix of labels and of paths in messages.
        classes: keep the classes of containers, see the module; they become plain ones otherwise.

    Raises:
        UsageError: it holds something else; the message says where.

    Example:
        >>> pack({"step": 7, "betas": (0.9, 0.95)})
        ({'step': 7, 'betas': {'$tuple': [0.9, 0.95]}}, {})
    """
    tensors: dict[str, Tensor] = {}
    return _pack(state, name, tensors, classes), tensors


def _pack(value: Any, path: str, tensors: dict[str, Tensor], classes: bool) -> Any:
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str(value)
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
    if classes and _is_data_class(type(value)):
        items = dict(value) if isinstance(value, dict) else list(value) if isinstance(value, tuple) else None
        kind = f"{type(value).__module__}:{type(value).__qualname__}"
        parts = (items, _attributes(value))
        return {"$object": [kind, *(_pack(each, path, tensors, classes) for each in parts)]}
    if isinstance(value, Mapping):
        plain = all(isinstance(key, str) and not key.startswith("$") for key in value)
        if plain and not isinstance(value, Counter):
            return {
                key: _pack(item, f"{path}.{key}" if path else key, tensors, classes)
                for key, item in value.items()
            }
        pairs = [
            [
                _pack(key, f"a key of {path}", tensors, classes),
                _pack(item, f"{path}[{key!r}]", tensors, classes),
            ]
            for key, item in value.items()
        ]
        return {"$counter" if isinstance(value, Counter) else "$dict": pairs}
    if isinstance(value, list | tuple | set | frozenset):
        items = [_pack(item, f"{path}[{index}]", tensors, classes) for index, item in enumerate(value)]
        if isinstance(value, list):
            return items
        return {"$tuple" if isinstance(value, tuple) else "$set": items}
    raise UsageError(
        f"{path or 'the state'} is a {type(value).__module__}.{type(value).__qualname__}, which is not a plain value",
        remedy="return numbers, strings, tensors, and lists and dicts of them",
    )


def _add_tensor(tensor: Tensor, path: str, tensors: dict[str, Tensor]) -> str:
    """Add `tensor` under a new label, and return that."""
    label = path or "tensor"
    while label in tensors:
        label += "'"
    tensors[label] = tensor.detach()
    return label


def unpack(packed: Any, tensor_of: TensorLookup, make: Maker = None) -> Any:
    """Return the state that `pack` turned into `packed`.

    Args:
        packed: the JSON values.
        tensor_of: returns the tensor with a label.
        make: makes an object of a class; None: there is none.

    Raises:
        ValueError: `pack` returns no such values.
    """
    if isinstance(packed, list):
        return [unpack(item, tensor_of, make) for item in packed]
    if not isinstance(packed, dict):
        return packed
    kind = next(iter(packed), "")
    if not kind.startswith("$"):
        return {key: unpack(item, tensor_of, make) for key, item in packed.items()}
    if kind == "$object" and make is not None and isinstance(packed[kind], list) and len(packed[kind]) == 3:
        return make(unpack(packed[kind], tensor_of, make))
    if len(packed) != 1 or kind not in _KINDS:
        raise ValueError(f"{kind!r} is not the kind of a value")
    expected, read = _KINDS[kind]
    if not isinstance(packed[kind], expected):
        raise ValueError(f"{type(packed[kind]).__name__} in {kind!r}")
    return read(packed[kind], tensor_of, make)


def _unpack_pairs(pairs: list[Any], tensor_of: TensorLookup, make: Maker) -> list[tuple[Any, Any]]:
    if any(not isinstance(pair, list) or len(pair) != 2 for pair in pairs):
        raise ValueError("a dict of something else than pairs")
    return [(unpack(key, tensor_of, make), unpack(item, tensor_of, make)) for key, item in pairs]


def _unpack_float(text: str, *_: Any) -> float:
    if text not in _FLOATS:
        raise ValueError(f"{text!r} in '$float'")
    return float(text)


# ------------------------------------------------------------------ containers with classes of their own


def _is_data_class(kind: type) -> bool:
    """Return whether a class only holds data: a named tuple, a dataclass, a subclass of dict or UserDict."""
    if kind in (dict, Counter) or hasattr(kind, "__del__"):
        return False
    if issubclass(kind, tuple):
        return hasattr(kind, "_fields")
    return issubclass(kind, dict | UserDict) or dataclasses.is_dataclass(kind)


def _attributes(value: Any) -> dict[str, Any]:
    found = dict(getattr(value, "__dict__", {}))
    if dataclasses.is_dataclass(value):
        found |= {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
    return found


def unpack_objects(packed: Any, tensor_of: TensorLookup) -> Any:
    """Return what ``pack(…, classes=True)`` turned into `packed`; arguments as for `unpack`.

    Raises:
        ValueError: `pack` returns no such values, or a class was not imported here or holds more than data.
    """
    return unpack(packed, tensor_of, _unpack_object)


def _unpack_object(parts: list[Any]) -> Any:
    name, items, attributes = parts
    module, _, path = str(name).partition(":")
    kind: Any = sys.modules.get(module)
    for each in path.split("."):
        kind = getattr(kind, each, None)
    if not isinstance(kind, type) or not _is_data_class(kind):
        raise ValueError(f"{name} is not a class of data that this process has imported")
    if issubclass(kind, tuple):
        return tuple.__new__(kind, items)
    base = next((each for each in (OrderedDict, dict) if issubclass(kind, each)), object)
    made: Any = base.__new__(kind)
    for key, item in (items or {}).items():
        base.__setitem__(made, key, item)  # type: ignore[attr-defined] # there are items of dicts only
    for attribute, value in attributes.items():
        object.__setattr__(made, attribute, value)
    return made


_KINDS: dict[str, tuple[type, Callable[[Any, TensorLookup, Maker], Any]]] = {
    "$tensor": (str, lambda label, tensor_of, _: tensor_of(label)),
    "$array": (str, lambda label, tensor_of, _: tensor_of(label).numpy()),
    "$float": (str, _unpack_float),
    "$bytes": (str, lambda text, *_: bytes.fromhex(text)),
    "$tuple": (list, lambda items, *how: tuple(unpack(items, *how))),
    "$set": (list, lambda items, *how: set(unpack(items, *how))),
    "$counter": (list, lambda pairs, *how: Counter(dict(_unpack_pairs(pairs, *how)))),
    "$dict": (list, lambda pairs, *how: dict(_unpack_pairs(pairs, *how))),
}
