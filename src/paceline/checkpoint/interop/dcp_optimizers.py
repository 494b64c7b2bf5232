"""Finds the state of optimizers among the names of a DCP checkpoint, in each form in which programs of torch's save it.

optimizer.state.head.weight.exp_avg    optimizer.param_groups.0.lr    …0.params    get_optimizer_state_dict
optimizer.state.head.weight.exp_avg    optimizer.param_groups.head.weight.lr       … with flatten_optimizer_state_dict
optimizer.state.7.exp_avg              optimizer.param_groups.0.lr    …0.params    optimizer.state_dict()
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.checkpoint.interop.dcp_models import bare_name
from paceline.checkpoint.interop.dcp_reader import DcpReader
from paceline.errors import UsageError
from paceline.world.plain_values import pack

__all__ = [
    "FoundOptimizer",
    "Key",
    "StoredOptimizer",
    "find_optimizer",
    "labelled_entries",
    "nested",
    "packed_value",
]

Key = tuple[str | int, ...]

_GROUPS, _STATE = "param_groups", "state"
_HOW_TO_COMPUTE = {"foreach", "fused", "capturable", "differentiable"}
"""Options that say how an update is computed: a program keeps its own."""
_OF_SCHEDULERS = {"initial_lr", "swa_lr", "max_lr", "min_lr", "base_momentum", "max_momentum"}
_PER_ELEMENT = {
    "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "square_avg", "grad_avg", "acc_delta",
    "sum", "prev", "ax",
}  # fmt: skip
"""Entries of torch's optimizers with the shape of the parameter."""


@dataclass(frozen=True)
class FoundOptimizer:
    """The state of an optimizer.

    Attributes:
        groups: options of each of its groups, with the names of its parameters.
        tensors: per parameter, names of tensors in the checkpoint by key.
        values: per parameter, names of values in the checkpoint by key.
        params: their names, or numbers, of its parameters.
    """

    groups: list[dict[str, Any]]
    tensors: Mapping[str, Mapping[Key, str]]
    values: Mapping[str, Mapping[Key, str]]
    params: set[str]


class StoredOptimizer:
    """An optimizer in a checkpoint.

    Args:
        reader: of the checkpoint.
        prefix: of its names.

    Attributes:
        numbered: whether it has numbers for parameters, as ``optimizer.state_dict()``.
        groups: options of each group, with its parameters under ``"params"``; None: options are kept per parameter.
        options: in that case, by parameter.
    """

    def __init__(self, reader: DcpReader, prefix: str) -> None:
        self.reader, self.prefix = reader, prefix
        self.groups: list[dict[str, Any]] | None = None
        self.options: dict[str, dict[str, Any]] = {}
        whole = f"{prefix}{_GROUPS}"
        if whole in reader.index.values:  # torch 2.3 and earlier
            self.groups = reader.load_value(whole)
        elif f"{whole}.0.params" in reader.index.values:
            tree = nested(self.leaves(f"{whole}."))
            self.groups = (
                list(tree) if isinstance(tree, list) else [tree[key] for key in sorted(tree, key=int)]
            )
        else:
            for name in self.names(f"{whole}."):
                param, _, option = name[len(whole) + 1 :].rpartition(".")
                self.options.setdefault(param, {})[option] = self.load(name)
        self.params = (
            [each for group in self.groups for each in group["params"]] if self.groups else list(self.options)
        )
        self.numbered = bool(self.groups) and any(type(each) is int for each in self.params)

    def names(self, prefix: str) -> Iterator[str]:
        """Yield the names in the checkpoint with a prefix."""
        for names in (self.reader.index.tensors, self.reader.index.values):
            yield from (name for name in names if name.startswith(prefix))

    def load(self, name: str) -> Any:
        """Return a tensor or value."""
        return self.reader.tensor(name) if name in self.reader.index.tensors else self.reader.load_value(name)

    def leaves(self, prefix: str) -> dict[Key, Any]:
        """Return everything with a prefix, by what follows it."""
        return {self.key(name, prefix): self.load(name) for name in self.names(prefix)}

    def key(self, name: str, prefix: str) -> Key:
        """Return the keys that follow a prefix in the path of a name."""
        path = self.reader.index.paths[name]
        for at in range(len(path)):
            if "".join(f"{part}." for part in path[:at]) == prefix:
                return path[at:]
        return tuple(name[len(prefix) :].split("."))

    def entries(self) -> Iterator[tuple[str, Key, str]]:
        """Yield parameter, key and name of each entry of the state; parameters as texts."""
        prefix, known = f"{self.prefix}{_STATE}.", {str(each) for each in self.params}
        for name in self.names(prefix):
            param = name[len(prefix) :]
            while param and param not in known:
                param = param.rpartition(".")[0]
            if not param:
                raise UsageError(
                    f"{name!r} in the checkpoint {self.reader.files.location!r} belongs to no parameter of its groups",
                    remedy="save the optimizer with get_optimizer_state_dict",
                )
            yield param, self.key(name, f"{prefix}{param}."), name


def nested(leaves: Mapping[Key, Any]) -> Any:
    """Return the nested state whose leaves these are, by the keys that lead to them.

    Example:
        >>> nested({("a", 0, "x"): 1, ("a", 1, "x"): 2, ("b",): 3})
        {'a': [{'x': 1}, {'x': 2}], 'b': 3}
    """
    if () in leaves:
        return leaves[()]
    children: dict[str | int, dict[Key, Any]] = {}
    for key, leaf in leaves.items():
        children.setdefault(key[0], {})[key[1:]] = leaf
    if children and all(type(key) is int for key in children):
        return [nested(children[key]) for key in sorted(children)]
    return {key: nested(inner) for key, inner in children.items()}


def packed_value(value: Any, label: str, made: dict[str, Tensor]) -> Any:
    """Return a value as `plain_values.pack` does; its tensors are added to `made` by label."""
    packed, tensors = pack(value, label)
    made |= tensors
    return packed


def labelled_entries(
    prefix: str,
    tensors: Mapping[str, Mapping[Key, str]],
    values: Mapping[str, Mapping[Key, str]],
    load: Callable[[str], Any],
    made: dict[str, Tensor],
) -> tuple[dict[str, str], dict[str, Any]]:
    """Return the state of an optimizer under the names that Paceline gives it.

    Args:
        prefix: of the names, such as ``"optimizer.state."``.
        tensors, values: per parameter, names in the checkpoint by key.
        load: returns what has a name in the checkpoint.
        made: takes tensors that are part of values.

    Returns:
        Names in the checkpoint of tensors, and packed values; nested entries are values that refer to tensors.
    """
    labels: dict[str, str] = {}
    trees: dict[str, dict[Key, Any]] = {}
    for param, entries in tensors.items():
        for key, stored in entries.items():
            label = f"{prefix}{param}.{'.'.join(map(str, key))}"
            labels[label] = stored
            if len(key) > 1:
                trees.setdefault(f"{prefix}{param}.{key[0]}", {})[key[1:]] = {"$tensor": label}
    for param, entries in values.items():
        for key, stored in entries.items():
            packed = packed_value(load(stored), f"{prefix}{param}.{key[0]}", made)
            trees.setdefault(f"{prefix}{param}.{key[0]}", {})[key[1:]] = packed
    return labels, {label: nested(leaves) for label, leaves in trees.items()}


def find_optimizer(
    name: str,
    optimizer: torch.optim.Optimizer,
    param_names: Mapping[int, str],
    aliases: Mapping[str, Sequence[str]],
    stored: StoredOptimizer,
) -> FoundOptimizer:
    """Return the state of an optimizer in a checkpoint.

    Args:
        name: of the optimizer.
        optimizer: one of torch's, or a `ShardedOptimizer`.
        param_names: names of parameters by id.
        aliases: by name of a parameter, all names by which a checkpoint may know it.
        stored: where its state is.

    Raises:
        UsageError: a parameter is missing, the groups differ, or the state is of another class or of other shapes.
    """
    here = [[param_names[id(param)] for param in group["params"]] for group in optimizer.param_groups]
    theirs = _numbered(name, here, stored) if stored.numbered else _named(name, here, aliases, stored)
    groups = []
    for number, (group, names) in enumerate(zip(optimizer.param_groups, here, strict=True)):
        saved = _options(name, names, theirs, stored)
        _check_options(name, number, optimizer.defaults, group, saved)
        kept = {key: value for key, value in group.items() if key in _HOW_TO_COMPUTE}
        here_only = {key: value for key, value in group.items() if key != "params"}
        groups.append({**here_only, **saved, **kept, "params": names})
    ours = {their: our for our, their in theirs.items()}
    tensors: dict[str, dict[Key, str]] = {}
    values: dict[str, dict[Key, str]] = {}
    for param, key, entry in stored.entries():
        if param in ours:
            is_tensor = entry in stored.reader.index.tensors
            (tensors if is_tensor else values).setdefault(ours[param], {})[key] = entry
    shapes = {param_names[id(p)]: tuple(p.shape) for group in optimizer.param_groups for p in group["params"]}
    _check_shapes(name, shapes, tensors, stored)
    return FoundOptimizer(groups, tensors, values, set(ours))


def _numbered(name: str, here: Sequence[Sequence[str]], stored: StoredOptimizer) -> dict[str, str]:
    """Return their number of each parameter: those at the same place in the same group."""
    groups = stored.groups or []
    sizes = [len(group["params"]) for group in groups]
    if sizes != [len(names) for names in here]:
        raise UsageError(
            f"{name!r} has groups of {[len(names) for names in here]} parameters, in the checkpoint of {sizes}",
            remedy="build the optimizer as in the program that wrote the checkpoint, which numbers parameters",
        )
    return {
        our: str(their)
        for names, group in zip(here, groups, strict=True)
        for our, their in zip(names, group["params"], strict=True)
    }


def _named(
    name: str, here: Sequence[Sequence[str]], aliases: Mapping[str, Sequence[str]], stored: StoredOptimizer
) -> dict[str, str]:
    """Return their name of each parameter."""
    known = {bare_name(each): each for each in stored.params}
    found = {}
    for our in (our for names in here for our in names):
        their = next((known[each] for each in map(bare_name, aliases[our]) if each in known), None)
        if their is None:
            raise UsageError(
                f"parameter {our!r} of {name!r} is in no group of {stored.prefix[:-1]!r} in the checkpoint "
                f"{stored.reader.files.location!r}",
                remedy="build the optimizer as in the program that wrote the checkpoint",
            )
        found[our] = their
    return found


def _options(
    name: str, names: Sequence[str], theirs: Mapping[str, str], stored: StoredOptimizer
) -> dict[str, Any]:
    """Return the options that all parameters of a group have in the checkpoint."""
    if stored.groups is None:
        found = [stored.options[theirs[our]] for our in names]
    else:
        group_of = {str(param): group for group in stored.groups for param in group["params"]}
        found = [group_of[theirs[our]] for our in names]
    options = [{key: value for key, value in each.items() if key != "params"} for each in found]
    for our, each in zip(names, options, strict=True):
        different = [
            key for key in each.keys() | options[0].keys() if not _equal(each.get(key), options[0].get(key))
        ]
        if different:
            raise UsageError(
                f"{names[0]!r} and {our!r} are in one group of {name!r}, and in the checkpoint in two with different "
                f"{sorted(different)[0]!r}",
                remedy="build the optimizer as in the program that wrote the checkpoint",
            )
    return options[0] if options else {}


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    return type(one) is type(other) and one == other


def _check_options(
    name: str, number: int, defaults: Mapping[str, Any], group: Mapping[str, Any], saved: Mapping[str, Any]
) -> None:
    """Raise if saved options are of another class of optimizers: each has some that the other lacks."""
    if not group["params"]:
        return
    missing = sorted(defaults.keys() - saved.keys())
    unknown = sorted(saved.keys() - defaults.keys() - group.keys() - _OF_SCHEDULERS)
    if missing and unknown:
        raise UsageError(
            f"group {number} of {name!r} has {missing[0]!r}, in the checkpoint {unknown[0]!r} instead: it is of "
            "another optimizer",
            remedy="build the optimizer as in the program that wrote the checkpoint",
        )


def _check_shapes(
    name: str,
    shapes: Mapping[str, tuple[int, ...]],
    tensors: Mapping[str, Mapping[Key, str]],
    stored: StoredOptimizer,
) -> None:
    for param, entries in tensors.items():
        for key, entry in entries.items():
            shape = stored.reader.info(entry).shape
            if len(key) == 1 and key[0] in _PER_ELEMENT and shape != shapes[param]:
                raise UsageError(
                    f"{entry!r} of {name!r} has shape {list(shape)}, parameter {param!r} {list(shapes[param])}",
                    remedy="build model and optimizer as in the program that wrote the checkpoint",
                )
