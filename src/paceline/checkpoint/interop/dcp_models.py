"""Finds the weights of models among the names of a DCP checkpoint.

Programs save weights under ``model.<name>``, ``app.model.<name>`` or the bare name, with ``module.`` where DDP wraps
the model, and with the components that torch.compile, FSDP1 and activation checkpointing insert.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from paceline.checkpoint.interop.dcp_index import DcpIndex
from paceline.errors import UsageError

__all__ = ["FoundModel", "bare_name", "bare_names", "find_model", "find_weights"]

_INSERTED = {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
_USUAL = ("model", "state_dict")
_REMEDY = "pass to paceline.Checkpoint what the program that wrote it saved, models by its name for them: name=model"


@dataclass(frozen=True)
class FoundModel:
    """Where the weights of a model are.

    Attributes:
        prefix: of their names in the checkpoint.
        weights: their names in the checkpoint, by each name in the model, as far as they are there.
        others: further names under the prefix.
    """

    prefix: str
    weights: Mapping[str, str]
    others: Sequence[str]


def bare_name(name: str) -> str:
    """Return a name without the components that wrappers insert.

    Example:
        >>> bare_name("model.layers.0._orig_mod.weight")
        'model.layers.0.weight'
    """
    return ".".join(part for part in name.split(".") if part not in _INSERTED)


def bare_names(names: Iterable[str]) -> dict[str, str]:
    """Return the stored names by their bare names."""
    return {bare_name(name): name for name in names}


def find_model(
    name: str, groups: Mapping[str, Sequence[str]], stored: Mapping[str, str], location: str
) -> FoundModel:
    """Return where the weights of a model are in a checkpoint.

    Args:
        name: of the model; weights under it are preferred to those under ``model``.
        groups: all names of each weight by its first one; tied weights have several.
        stored: names in the checkpoint by bare name.
        location: of the checkpoint, for messages.

    Raises:
        UsageError: not all weights are there, or it is unclear which are the model's.
    """
    first_of = {bare_name(each): first for first, names in groups.items() for each in names}
    found: dict[str, set[str]] = {}
    for each in stored:
        parts = each.split(".")
        for at in range(len(parts)):
            first = first_of.get(".".join(parts[at:]))
            if first is not None:
                found.setdefault("".join(f"{part}." for part in parts[:at]), set()).add(first)
    ranked = sorted(
        (
            (-len(firsts), tier, prefix)
            for prefix, firsts in found.items()
            if (tier := _tier(prefix, name)) < 3
        ),
    )
    if not ranked:
        raise _elsewhere(name, [prefix for prefix in found if len(found[prefix]) == len(groups)], location)
    complete = [(tier, prefix) for count, tier, prefix in ranked if -count == len(groups)]
    if not complete:
        prefix = ranked[0][2]
        missing = next(first for first in groups if first not in found[prefix])
        raise UsageError(
            f"the checkpoint {location!r} is of another model: {missing!r} of {name!r} is not in it"
            + (f" under {prefix!r}" if prefix else ""),
            remedy="build the model that wrote it",
        )
    best, prefix = min(complete)
    if [tier for tier, _ in complete].count(best) > 1:
        raise UsageError(
            f"the checkpoint {location!r} has weights of {name!r} under "
            + " and ".join(repr(prefix) for tier, prefix in complete if tier == best),
            remedy=_REMEDY,
        )
    bare = {each: bare_name(each) for names in groups.values() for each in names}
    weights = {each: stored[prefix + its] for each, its in bare.items() if prefix + its in stored}
    known = {prefix + its for its in bare.values()}
    others = [stored[each] for each in stored if each.startswith(prefix) and each not in known]
    return FoundModel(prefix, weights, others)


def _tier(prefix: str, name: str) -> int:
    """Return how well a prefix fits a model: 0 named after it, 1 a usual name, 2 none, or inside another, 3 not."""
    parts = [part for part in prefix.split(".") if part]
    while parts and parts[-1] == "module":
        parts.pop()
    if not parts:
        return 2
    if len(parts) > 2 or parts[-1] not in (name, *_USUAL):
        return 3
    return 2 if len(parts) == 2 else 0 if parts[-1] == name else 1


def _elsewhere(name: str, prefixes: Sequence[str], location: str) -> UsageError:
    where = f"; weights of its names are under {', '.join(map(repr, prefixes[:3]))}" if prefixes else ""
    return UsageError(
        f"the weights of {name!r} are not in the checkpoint {location!r}{where}", remedy=_REMEDY
    )


def find_weights(index: DcpIndex, model: str, location: str) -> tuple[str, dict[str, str]]:
    """Return the prefix, and the name in a checkpoint of each weight, of a model of which nothing else is known.

    Args:
        index: of the checkpoint.
        model: name of the model.
        location: of the checkpoint, for messages.

    Raises:
        UsageError: it is unclear which tensors are the model's weights.
    """
    optimizers = tuple(
        f"{prefix}{part}." for prefix in index.optimizers for part in ("state", "param_groups")
    )
    paths = {
        name: index.paths[name] for name in index.tensors if not optimizers or not name.startswith(optimizers)
    }
    heads = {path[:at] for path in paths.values() for at in (1, 2) if len(path) > at}
    choices = [
        sorted(head for head in heads if head[-1] != "module" and _tier(_text(head), model) == tier)
        for tier in (0, 1, 2)
    ]
    choices[2] += [()] if any(len(path) == 1 for path in paths.values()) else []
    found = next((heads for heads in choices if heads), [])
    if len(found) > 1:
        raise UsageError(
            f"the checkpoint {location!r} has weights under {' and '.join(map(repr, map(_text, found)))}",
            remedy="name the model as the program that wrote it",
        )
    if not found:
        keys = ", ".join(sorted({str(path[0]) for path in paths.values()})) or "nothing"
        raise UsageError(
            f"the checkpoint {location!r} has no weights of a model {model!r}",
            remedy=f"name the key that the program saved the model under; it has tensors under: {keys}",
        )
    at = len(found[0])
    weights = {
        bare_name(_text(path[at:])[:-1]): name
        for name, path in paths.items()
        if path[:at] == found[0] and (at or len(path) == 1)
    }
    return _text(found[0]), _without_module(weights)


def _text(path: Iterable[str | int]) -> str:
    return "".join(f"{part}." for part in path)


def _without_module(names: Mapping[str, str]) -> dict[str, str]:
    """Return names without the ``module.`` of DDP, if all begin with it."""
    while names and all(name.startswith("module.") for name in names):
        names = {name.removeprefix("module."): stored for name, stored in names.items()}
    return dict(names)
