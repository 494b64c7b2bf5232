"""Names in checkpoints of torch.distributed.checkpoint (DCP): paths of keys in a nested state, joined by dots.

    {"model": net.state_dict(), "optimizer": get_optimizer_state_dict(net, optimizer), "scheduler": …}

is what our names stand for, so that a program of torch's loads what it needs under the same keys.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

__all__ = ["dcp_aliases", "dcp_path", "dcp_values"]

Path = tuple[str | int, ...]


def dcp_values(
    groups: Mapping[str, Sequence[Mapping[str, Any]]], others: Mapping[str, Any], plain: Mapping[str, Any]
) -> dict[str, bytes]:
    """Return what is written that are no tensors, by name, as torch.save encodes it: training may change it.

    Args:
        groups: options of each group of each optimizer.
        others: states of the objects that are neither models nor optimizers; of models, what are no tensors.
        plain: further values by name.
    """
    values = dict(plain)
    for name, each in groups.items():
        values |= {_name(path): value for path, value in _leaves(list(each), (name, "param_groups"))}
    for name, other in others.items():
        values |= {_name(path): value for path, value in _leaves(other, (name,))}
    return {name: _encoded(value) for name, value in values.items()}


def _encoded(value: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def dcp_aliases(aliases: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    """Return the first names of tied weights by their other ones, both with their model's."""
    return {
        f"{model}.{other}": f"{model}.{first}"
        for model, names in aliases.items()
        for other, first in names.items()
    }


def _leaves(value: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    """Yield what DCP stores separately: of mappings each value, of lists that hold mappings or tensors each item."""
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from _leaves(item, (*path, key))
    elif isinstance(value, list | tuple) and any(
        isinstance(leaf, Tensor | Mapping)
        for leaf in pytree.tree_leaves(value, is_leaf=lambda each: isinstance(each, Mapping))
    ):
        for at, item in enumerate(value):
            yield from _leaves(item, (*path, at))
    else:
        yield path, value


def _name(path: Path) -> str:
    return ".".join(map(str, path))


def dcp_path(name: str, models: Sequence[str], groups: Mapping[str, Sequence[Mapping[str, Any]]]) -> Path:
    """Return the path that a name stands for.

    Args:
        name: of a tensor or value.
        models: names of the models.
        groups: options of each group of each optimizer, with the names of its parameters.
    """
    head, _, rest = name.partition(".")
    if head in models:
        return (head, rest)
    if head in groups and rest.startswith("state."):
        inner = rest.removeprefix("state.")
        for group in groups[head]:
            for param in group["params"]:
                if inner.startswith(f"{param}."):
                    return (head, "state", param, inner[len(param) + 1 :])
    return tuple(int(part) if part.isdecimal() else part for part in name.split("."))
