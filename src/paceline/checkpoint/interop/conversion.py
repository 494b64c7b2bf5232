"""What a checkpoint in another format consists of: its parts of tensors, read one at a time, and its values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from paceline.checkpoint.format.checkpoint_reader import CheckpointReader
from paceline.checkpoint.format.manifest_index import OWN
from paceline.checkpoint.interop.dcp_match import step_of_dcp
from paceline.checkpoint.interop.dcp_models import bare_name, find_weights
from paceline.checkpoint.interop.dcp_optimizers import (
    Key,
    StoredOptimizer,
    labelled_entries,
    nested,
    packed_value,
)
from paceline.checkpoint.interop.dcp_reader import DcpReader
from paceline.checkpoint.interop.weights_source import WeightsSource
from paceline.checkpoint.parts.boxes import Box
from paceline.checkpoint.parts.state_parts import TensorPart
from paceline.errors import UsageError

__all__ = ["Conversion", "LazyPart", "RankContents", "of_checkpoint", "of_dcp", "of_weights"]


@dataclass(frozen=True)
class LazyPart:
    """A box of a tensor that is read when it is written.

    Attributes:
        part: the box, with data on the device "meta".
        read: returns the data.
    """

    part: TensorPart
    read: Callable[[], Tensor]

    @classmethod
    def of(
        cls, name: str, dtype: torch.dtype, shape: Sequence[int], box: Box, read: Callable[[], Tensor]
    ) -> LazyPart:
        """Return a part; `read` returns its data, in the shape of the box."""
        data = torch.empty(box.sizes, dtype=dtype, device="meta")
        return cls(TensorPart(name, tuple(shape), box, data), read)


@dataclass(frozen=True)
class RankContents:
    """What a rank has written.

    Attributes:
        parts: its parts of tensors.
        values: its plain values by name, as `plain_values.pack` returns them.
        state: its own state.
    """

    parts: Sequence[LazyPart]
    values: Mapping[str, Any]
    state: Mapping[str, Any]


@dataclass(frozen=True)
class Conversion:
    """A checkpoint to write.

    Attributes:
        step: number of optimizer steps.
        ranks: what each rank has written.
        aliases: per model, first names of weights by their other names.
        optimizers: options of the groups of each optimizer, packed.
        tensor: returns a tensor that values refer to, by its label.
        head: further entries of the manifest.
        notes: what the user should know.
    """

    step: int
    ranks: Sequence[RankContents]
    aliases: Mapping[str, Mapping[str, str]]
    optimizers: Mapping[str, Any]
    tensor: Callable[[str], Tensor]
    head: Mapping[str, Any] = field(default_factory=dict)
    notes: Sequence[str] = ()

    @property
    def nested(self) -> dict[str, Any]:
        """The packed states of other objects than models and optimizers, and what models have besides tensors."""
        state = self.ranks[0].state
        return {**state["others"], **{name: each for name, each in state["extra"].items() if each}}


def of_checkpoint(reader: CheckpointReader) -> Conversion:
    """Return the contents of a checkpoint of Paceline's: every rank's, unchanged."""
    manifest = reader.manifest
    ranks = []
    for rank in range(manifest.ranks):
        piece = reader.piece(rank)
        parts = []
        for file in piece.files.values():
            for chunk in file.chunks.values():
                box = Box(chunk.offsets, chunk.sizes)
                own = chunk.tensor.startswith(OWN)
                read = (
                    partial(reader.own, rank, chunk.tensor)
                    if own
                    else partial(reader.tensor, chunk.tensor, box)
                )
                parts.append(LazyPart.of(chunk.tensor, getattr(torch, chunk.dtype), chunk.shape, box, read))
        ranks.append(RankContents(parts, piece.values, piece.state))

    def tensor(label: str) -> Tensor:
        return reader.own(0, label) if label.startswith(OWN) else reader.tensor(label)

    head = {"facts": manifest.facts, "metric": manifest.metric, "written": manifest.written}
    return Conversion(manifest.step, ranks, manifest.aliases, manifest.optimizers, tensor, head)


def of_weights(weights: WeightsSource, model: str) -> Conversion:
    """Return a checkpoint that has the weights of a model, and nothing else."""
    parts = [_whole(f"{model}.{name}", weights.reader, stored) for name, stored in weights.names.items()]
    state = _state({model: {}}, {})
    note = "the result has weights only: paceline.import_weights takes them; there is no optimizer state to resume"
    return Conversion(
        0, [RankContents(parts, {}, state)], {model: weights.aliases}, {}, _no_tensor, {}, [note]
    )


def _whole(name: str, reader: Any, stored: str) -> LazyPart:
    info = reader.info(stored)
    return LazyPart.of(name, info.dtype, info.shape, Box.whole(info.shape), partial(reader.tensor, stored))


def _state(extra: Mapping[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of the only rank of a checkpoint that another program began."""
    return {
        "others": dict(others), "extra": dict(extra), "engines": {}, "epoch": 0, "partial": True, "compressed": {},
        "own": {},
    }  # fmt: skip


def _no_tensor(label: str) -> Tensor:
    raise KeyError(label)


# ------------------------------------------------------------------ DCP


def of_dcp(reader: DcpReader, model: str) -> Conversion:
    """Return the contents of a checkpoint of plain DCP.

    Args:
        reader: of the checkpoint.
        model: name of the model.

    Raises:
        UsageError: it is unclear which are the weights, or an optimizer numbers its parameters.
    """
    prefix, weights = find_weights(reader.index, model, reader.files.location)
    made: dict[str, Tensor] = {}
    stored_as = {f"{model}.{name}": stored for name, stored in weights.items()}
    extra, claimed = _extra(reader, prefix, f"{OWN}0.extra.{model}", made)
    claimed |= set(weights.values())
    optimizers, values = {}, {}
    for each in reader.index.optimizers:
        last = each[:-1].rpartition(".")[2]
        name = last if last and len(reader.index.optimizers) > 1 else "optimizer"
        groups, labels, packed, taken = _optimizer(reader, each, name, weights, made)
        optimizers[name] = packed_value(groups, f"{name}.param_groups", made)
        stored_as |= labels
        values |= packed
        claimed |= taken
    others, labels, notes = _others(reader, claimed, made)
    stored_as |= labels
    step = step_of_dcp(reader)
    if step is None:
        notes.append("neither its name nor a value shows its step: it counts as step 0")
    if not optimizers:
        notes.append("the checkpoint has no optimizer state: the result has weights only")

    def tensor(label: str) -> Tensor:
        return made[label] if label in made else reader.tensor(stored_as[label])

    parts = [_whole(label, reader, stored) for label, stored in stored_as.items()]
    parts += [
        LazyPart.of(label, each.dtype, each.shape, Box.whole(each.shape), partial(_copy, each))
        for label, each in made.items()
    ]
    ranks = [RankContents(parts, values, _state({model: extra}, others))]
    return Conversion(step or 0, ranks, {model: {}}, optimizers, tensor, {}, notes)


def _copy(tensor: Tensor) -> Tensor:
    return tensor.contiguous().clone()


def _extra(
    reader: DcpReader, prefix: str, label: str, made: dict[str, Tensor]
) -> tuple[dict[str, Any], set[str]]:
    """Return entries of a model's state_dict that are no tensors, and their names."""
    trees: dict[str, dict[Key, Any]] = {}
    claimed = set()
    for name in reader.index.values:
        parts = name[len(prefix) :].split(".")
        if prefix and name.startswith(prefix) and "_extra_state" in parts:
            at = parts.index("_extra_state") + 1
            entry = bare_name(".".join(parts[:at]).removeprefix("module."))
            packed = packed_value(reader.load_value(name), f"{label}.{entry}", made)
            trees.setdefault(entry, {})[tuple(parts[at:])] = packed
            claimed.add(name)
    return {entry: nested(leaves) for entry, leaves in trees.items()}, claimed


def _optimizer(
    reader: DcpReader, prefix: str, name: str, weights: Mapping[str, str], made: dict[str, Tensor]
) -> tuple[list[dict[str, Any]], dict[str, str], dict[str, Any], set[str]]:
    """Return groups, names of tensors by label, packed values by name, and names that belong to an optimizer."""
    stored = StoredOptimizer(reader, prefix)
    if stored.numbered:
        raise UsageError(
            f"{prefix[:-1]!r} in the checkpoint {reader.files.location!r} numbers its parameters: only the model shows "
            "which they are",
            remedy="load it with paceline.Checkpoint(folder, model, optimizer).load(path), and save it",
        )
    name_of = {str(param): _param_name(str(param), weights) for param in stored.params}
    groups = stored.groups if stored.groups is not None else _grouped(stored.options)
    groups = [{**group, "params": [name_of[str(each)] for each in group["params"]]} for group in groups]
    tensors: dict[str, dict[Key, str]] = {}
    values: dict[str, dict[Key, str]] = {}
    taken = {each for part in ("param_groups", "state") for each in stored.names(f"{prefix}{part}")}
    for param, key, entry in stored.entries():
        place = tensors if entry in reader.index.tensors else values
        place.setdefault(name_of[param], {})[key] = entry
    labels, packed = labelled_entries(f"{name}.state.", tensors, values, stored.load, made)
    return groups, labels, packed, taken


def _param_name(param: str, weights: Mapping[str, str]) -> str:
    """Return the name of a parameter in the model."""
    name = bare_name(param)
    while name not in weights and name.startswith("module."):
        name = name.removeprefix("module.")
    return name


def _grouped(options: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return groups of the parameters that have the same options, which were stored for each."""
    groups: dict[str, dict[str, Any]] = {}
    for param, each in options.items():
        key = repr(sorted(each.items(), key=lambda item: item[0]))
        groups.setdefault(key, {**each, "params": []})["params"].append(param)
    return list(groups.values())


def _others(
    reader: DcpReader, claimed: set[str], made: dict[str, Tensor]
) -> tuple[dict[str, Any], dict[str, str], list[str]]:
    """Return packed states by name, names of their tensors by label, and notes on what is left out."""
    trees: dict[str, dict[Key, str]] = {}
    outer = {prefix[:-1].rpartition(".")[0] for prefix in reader.index.optimizers} - {""}
    for name, path in reader.index.paths.items():
        if name not in claimed:
            at = 1 if str(path[0]) in outer and len(path) > 1 else 0  # inside of one object, such as "app"
            trees.setdefault(str(path[at]), {})[path[at + 1 :]] = name
    others: dict[str, Any] = {}
    tensors: dict[str, str] = {}
    notes = []
    for name, leaves in trees.items():
        packed: dict[Key, Any] = {}
        labels: dict[str, str] = {}
        try:
            for key, stored in leaves.items():
                label = f"{OWN}0.others.{'.'.join(map(str, (name, *key)))}"
                if stored in reader.index.tensors:
                    labels[label] = stored
                    packed[key] = {"$tensor": label}
                else:
                    packed[key] = packed_value(reader.load_value(stored), label, made)
        except UsageError as error:
            notes.append(f"left out {name!r}: {str(error).partition(chr(10))[0]}")
            continue
        others[name] = nested(packed)
        tensors |= labels
    schedulers = [name for name, state in others.items() if isinstance(state, dict) and "last_epoch" in state]
    if len(schedulers) == 1 and "scheduler" not in others:
        others["scheduler"] = others.pop(schedulers[0])
    return others, tensors, notes
