"""Matches the names of a DCP checkpoint with the objects of a run.

Models and optimizers must be there as they are here. Other objects are matched by their names, schedulers also by what
their states look like.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.checkpoint.format.manifest import Manifest, PieceFile, RankPiece, StoredTensor, piece_name
from paceline.checkpoint.interop.dcp_models import bare_names, find_model
from paceline.checkpoint.interop.dcp_optimizers import (
    FoundOptimizer,
    Key,
    StoredOptimizer,
    find_optimizer,
    labelled_entries,
    nested,
    packed_value,
)
from paceline.checkpoint.interop.dcp_reader import DcpReader
from paceline.checkpoint.interop.matched_reader import MatchedReader
from paceline.checkpoint.parts.model_weights import weight_names, weights_of
from paceline.checkpoint.parts.named_objects import NamedObjects
from paceline.errors import UsageError

__all__ = ["DcpMatch", "step_of_dcp"]

_STEP_NAME = re.compile(r"(?:.*(?:step|iter|iteration|checkpoint|ckpt)[-_=]?)?(\d+)")
_STEP_VALUES = {"step", "global_step", "iteration"}
_USUAL_OPTIMIZERS = ("optimizer", "optim", "opt", "optimizers")
_VARIES = {"verbose", "_is_initial", "_get_lr_called_within_step", "_step_count", "_last_lr"}
"""Entries of schedulers that depend on the version of torch."""


class DcpMatch:
    """Which names of a checkpoint belong to which objects.

    Args:
        reader: of the checkpoint.
        objects: of the run.

    Raises:
        UsageError: a model or an optimizer is not in the checkpoint as it is here.
    """

    def __init__(self, reader: DcpReader, objects: NamedObjects) -> None:
        self._reader, self._objects = reader, objects
        self._location = reader.files.location
        tensors = bare_names(reader.index.tensors)
        self._groups = {name: weight_names(model) for name, model in objects.models.items()}
        self._models = {
            name: find_model(name, groups, tensors, self._location) for name, groups in self._groups.items()
        }
        self._optimizers, self._prefixes = self._find_optimizers()
        self._claimed = self._claim()
        self._check_further()
        self._places = {
            name: place
            for name, other in objects.others.items()
            if (place := self._place_of(name, other)) is not None
        }

    # ------------------------------------------------------------------ optimizers

    def _find_optimizers(self) -> tuple[dict[str, FoundOptimizer], set[str]]:
        objects, reader = self._objects, self._reader
        aliases = self._param_aliases()
        prefixes = reader.index.optimizers
        chosen = {name: self._optimizer_prefix(name, prefixes) for name in objects.optimizers}
        stored = {prefix: StoredOptimizer(reader, prefix) for prefix in set(chosen.values())}
        found = {
            name: find_optimizer(name, optimizer, objects.param_names, aliases, stored[chosen[name]])
            for name, optimizer in objects.optimizers.items()
        }
        for prefix, each in stored.items():
            used = {param for name in found if chosen[name] == prefix for param in found[name].params}
            unused = [param for param in map(str, each.params) if param not in used]
            if unused:
                raise UsageError(
                    f"parameter {unused[0]!r} of {prefix[:-1]!r} in the checkpoint {self._location!r} is in no "
                    "optimizer here",
                    remedy="build the optimizer as in the program that wrote the checkpoint",
                )
        return found, set(stored)

    def _param_aliases(self) -> dict[str, list[str]]:
        """Return, by name of a parameter, all names by which the checkpoint may know it."""
        several = len(self._groups) > 1
        found = {}
        for model, groups in self._groups.items():
            for names in groups.values():
                for name in names:
                    known = [name, *(each for each in names if each != name)]
                    known += [f"{model}.{each}" for each in known] + [f"module.{each}" for each in known]
                    found[f"{model}/{name}" if several else name] = known
        return found

    def _optimizer_prefix(self, name: str, prefixes: Sequence[str]) -> str:
        last = {prefix: prefix[:-1].rpartition(".")[2] for prefix in prefixes}
        for fits in (
            [prefix for prefix in prefixes if last[prefix] == name],
            [prefix for prefix in prefixes if last[prefix] in _USUAL_OPTIMIZERS],
            prefixes,
        ):
            if len(fits) == 1:
                return fits[0]
        if not prefixes:
            raise UsageError(
                f"the checkpoint {self._location!r} has no state of an optimizer for {name!r}",
                remedy="paceline.import_weights(model, path) takes the weights alone",
            )
        raise UsageError(
            f"it is unclear which optimizer of the checkpoint {self._location!r} is {name!r}: "
            + ", ".join(repr(prefix[:-1]) for prefix in prefixes),
            remedy="pass optimizers to paceline.Checkpoint by their names there: name=optimizer",
        )

    # ------------------------------------------------------------------ what else there is

    def _claim(self) -> set[str]:
        """Return the names that belong to models and optimizers."""
        every = [*self._reader.index.tensors, *self._reader.index.values]
        claimed = {stored for model in self._models.values() for stored in model.weights.values()}
        for prefix in self._prefixes:
            inside = (f"{prefix}state.", f"{prefix}param_groups.", f"{prefix}param_groups")
            claimed |= {name for name in every if name.startswith(inside[:2]) or name in inside}
        return claimed

    def _check_further(self) -> None:
        """Raise if the checkpoint has further weights of a model: it is then another model."""
        for name, model in self._models.items():
            tops = {each.partition(".")[0] for names in self._groups[name].values() for each in names}
            for other in model.others:
                inside = other[len(model.prefix) :].partition(".")[0] in tops
                if other not in self._claimed and (model.prefix or inside):
                    raise UsageError(
                        f"the checkpoint {self._location!r} is of another model: {other!r} is not in {name!r}",
                        remedy="build the model that wrote it",
                    )

    def _place_of(self, name: str, other: Any) -> Key | None:
        """Return the path of an object's state; None: it is not in the checkpoint."""
        paths = [path for each, path in self._reader.index.paths.items() if each not in self._claimed]
        named = {path[:at] for path in paths for at in (1, 2) if path[at - 1 : at] == (name,)}
        if not named and isinstance(other, torch.optim.lr_scheduler.LRScheduler):
            named = {path[:-1] for path in paths if path[-1] == "last_epoch" and len(path) <= 3}
        if len(named) > 1:
            raise UsageError(
                f"it is unclear which object of the checkpoint {self._location!r} is {name!r}: "
                + ", ".join(repr(".".join(map(str, path))) for path in sorted(named, key=str)),
                remedy="pass objects to paceline.Checkpoint by their names there: name=object",
            )
        return next(iter(named), None)

    def _under(self, place: Key) -> dict[str, Key]:
        """Return the names of what is under a path, with the rest of their paths."""
        size = len(place)
        return {
            name: path[size:]
            for name, path in self._reader.index.paths.items()
            if path[:size] == place and name not in self._claimed
        }

    def _load(self, name: str) -> Any:
        reader = self._reader
        return reader.tensor(name) if name in reader.index.tensors else reader.load_value(name)

    def _others(self) -> dict[str, Any]:
        """Return the states of the objects that are neither models nor optimizers, as far as they are there."""
        states = {}
        for name, place in self._places.items():
            states[name] = nested({rest: self._load(each) for each, rest in self._under(place).items()})
            if isinstance(other := self._objects.others[name], torch.optim.lr_scheduler.LRScheduler):
                _check_scheduler(name, other, states[name])
        return states

    def _extra(self, model: str) -> dict[str, Any]:
        """Return entries of a model's state_dict that are no tensors."""
        found = {}
        for each in weights_of(self._objects.models[model])[1]:
            start = f"{self._models[model].prefix}{each}"
            names = [
                name for name in self._reader.index.paths if name == start or name.startswith(f"{start}.")
            ]
            leaves: dict[Key, Any] = {
                tuple(name[len(start) + 1 :].split(".")) if name != start else (): self._load(name)
                for name in names
            }
            self._claimed |= set(names)
            if leaves:
                found[each] = nested(leaves)
        return found

    def _ignored(self) -> list[str]:
        """Return what of the checkpoint belongs to no object, by the first part of its path."""
        places = list(self._places.values())
        return sorted(
            {
                str(path[0])
                for name, path in self._reader.index.paths.items()
                if name not in self._claimed and not any(path[: len(place)] == place for place in places)
            }
        )

    # ------------------------------------------------------------------ the whole

    def reader(self) -> MatchedReader:
        """Return the checkpoint under the names of the objects."""
        info = self._reader.info
        tensors: dict[str, str] = {}
        stored: dict[str, StoredTensor] = {}
        aliases: dict[str, dict[str, str]] = {}
        for name, groups in self._groups.items():
            weights = self._models[name].weights
            for first, names in groups.items():
                label = f"{name}.{first}"
                tensors[label] = next(weights[each] for each in names if each in weights)
                kind = info(tensors[label])
                stored[label] = StoredTensor(str(kind.dtype).removeprefix("torch."), kind.shape, 0)
            aliases[name] = {
                each: first for first, names in groups.items() for each in names if each != first
            }
        extra = {name: self._extra(name) for name in self._models}
        made: dict[str, Tensor] = {}
        values: dict[str, Any] = {}
        for name, optimizer in self._optimizers.items():
            found, packed = labelled_entries(
                f"{name}.state.", optimizer.tensors, optimizer.values, self._load, made
            )
            tensors |= found
            values |= packed
        groups = {
            name: packed_value(each.groups, f"{name}.param_groups", made)
            for name, each in self._optimizers.items()
        }
        state = {
            "others": self._others(), "extra": extra, "engines": {}, "epoch": 0, "partial": True,
            "ignored": self._ignored(),
        }  # fmt: skip
        step = step_of_dcp(self._reader)
        if step is None:
            state["notes"] = ["neither its name nor a value shows its step: it counts as step 0"]
        manifest = Manifest(
            step=step or 0, facts={}, container="dcp", nbytes=0,
            pieces=[PieceFile(piece_name(0), "")], layouts=[()], tensors=stored, values={}, aliases=aliases,
            optimizers=groups, written={"ranks": self._reader.index.writers},
        )  # fmt: skip
        piece = RankPiece(
            {}, {}, {name: packed_value(each, f"rank.0.{name}", made) for name, each in state.items()}
        )
        return MatchedReader(self._reader, manifest, piece, tensors, values, made)

    def check_tied(self, rank: int, ranks: int) -> None:
        """Raise if weights that are one here differ in the checkpoint; each rank compares some.

        Raises:
            UsageError: names two that differ.
        """
        number = 0
        for name, groups in self._groups.items():
            weights = self._models[name].weights
            for names in groups.values():
                there = [each for each in names if each in weights]
                for other in there[1:]:
                    number += 1
                    if number % ranks == rank:
                        self._check_pair(name, there[0], other)

    def _check_pair(self, model: str, first: str, other: str) -> None:
        weights, reader = self._models[model].weights, self._reader
        one, two = (reader.tensor(weights[each]).reshape(-1).view(torch.uint8) for each in (first, other))
        if not torch.equal(one, two):
            raise UsageError(
                f"{first!r} and {other!r} are one weight of {model!r}, and differ in the checkpoint {self._location!r}",
                remedy="build the model that wrote it, in which they are two",
            )


def _check_scheduler(name: str, scheduler: torch.optim.lr_scheduler.LRScheduler, state: Any) -> None:
    """Raise if a scheduler's state is of another class: each has entries that the other lacks."""
    here = set(scheduler.state_dict()) - _VARIES
    there = set(state) - _VARIES if isinstance(state, Mapping) else {type(state).__name__}
    if here - there and there - here:
        raise UsageError(
            f"{name!r} has {min(here - there)!r}, in the checkpoint {min(there - here)!r} instead: it is of another "
            "scheduler",
            remedy="build the scheduler as in the program that wrote the checkpoint, or leave it out",
        )


def step_of_dcp(reader: DcpReader) -> int | None:
    """Return the number of optimizer steps: in the name of the checkpoint, in a value, or counted by an optimizer.

    Args:
        reader: of the checkpoint.

    Returns:
        The number; None: nothing shows it.
    """
    if (match := _STEP_NAME.fullmatch(reader.files.name)) is not None:
        return int(match[1])
    index = reader.index
    states = tuple(f"{prefix}state." for prefix in index.optimizers)
    inside = {name for name in index.paths if states and name.startswith(states)}
    found = [
        name
        for name, path in index.paths.items()
        if name not in inside and len(path) <= 3 and _STEP_VALUES.issuperset(path[-1:])
    ]
    if len(found) != 1:
        found = [name for name in inside if name.endswith(".step")]
    counts = [reader.tensor(name) if name in index.tensors else reader.load_value(name) for name in found]
    return int(max(counts, key=float)) if counts else None
