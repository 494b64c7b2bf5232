"""Collects a model's weights for a checkpoint, divided among ranks, and loads them.

They have the names of the bare module's ``state_dict()``. Where ranks hold them whole they are stored whole, so that
any program can load them; where they are sharded, every rank writes its shard.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from paceline._core.units import MIB
from paceline.checkpoint.parts.boxes import Box, box_of_shard
from paceline.checkpoint.parts.named_objects import unwrap
from paceline.checkpoint.parts.optimizer_state_pieces import partition_by_size
from paceline.checkpoint.parts.state_parts import StateParts, TensorPart, dtype_name
from paceline.checkpoint.parts.state_reader import Read, StateReader
from paceline.errors import UsageError

__all__ = [
    "check_weights",
    "collect_weights",
    "fill_weights",
    "index_text",
    "load_weights",
    "plan_weights",
    "weight_files",
    "weight_names",
    "weights_of",
]


_MIN_PART_NBYTES = 128 * MIB


def _split_state(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str], dict[str, Any]]:
    """Return each tensor of a model's state_dict once, the first names of the others by name, and the extra entries."""
    module = unwrap(model)
    tensors: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    extra: dict[str, Any] = {}
    first: dict[int, str] = {}
    held = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    object_of = {name: id(tensor) for name, tensor in held}
    for name, value in module.state_dict().items():
        if not isinstance(value, Tensor):
            extra[name] = value
        elif (known := first.setdefault(object_of.get(name, id(value)), name)) != name:
            aliases[name] = known
        else:
            tensors[name] = value
    return tensors, aliases, extra


def collect_weights(
    name: str, model: nn.Module, parts: StateParts, rank: int, ranks: int, instead: Mapping[str, Tensor]
) -> tuple[dict[str, str], dict[str, Any]]:
    """Add a rank's part of a model's weights to `parts`; nothing is gathered.

    Of sharded weights every rank writes its shard, once per shard. Whole ones are divided among files of about the same
    size, of at least 128 MiB, one for each of the first ranks. Buffers, which may differ between ranks (running
    statistics of BatchNorm), are rank 0's. Weights that are not trained have files of their own, which need not be
    written again.

    Args:
        name: of the model.
        model: the model.
        parts: of the rank.
        rank, ranks: the rank, and the number of ranks.
        instead: values to save for some parameters: the shared ones where ranks train local ones.

    Returns:
        The first names of weights that have several, by their other names; entries of the state_dict that are not
        tensors.
    """
    tensors, aliases, extra = _split_state(model)
    module = unwrap(model)
    buffers = {each for each, _ in module.named_buffers()}
    frozen = {each for each, param in module.named_parameters() if not param.requires_grad}
    whole = {each: tensor for each, tensor in tensors.items() if not isinstance(tensor, DTensor)}
    owners, files = _deal(whole, buffers, frozen, ranks)
    names = weight_files(name, len(files))
    for each, tensor in whole.items():
        rank_of_file, file = owners[each], names[files.index((owners[each], each in frozen))]
        if rank == rank_of_file:
            value = instead[each].to(tensor.dtype) if each in instead else tensor
            steady = each not in buffers and each not in instead
            parts.add(TensorPart.whole(f"{name}.{each}", value, steady=steady), file=file, label=each)
    parts.frozen |= {names[at] for at, (_, is_frozen) in enumerate(files) if is_frozen}
    for number, (each, tensor) in enumerate(tensors.items()):
        if not isinstance(tensor, DTensor):
            continue
        part = TensorPart.of_shard(f"{name}.{each}", tensor, number, rank, steady=each not in buffers)
        if part is not None:
            kind = "frozen-shard" if each in frozen else "shard"
            file = f"{name}-{kind}-{rank + 1:05d}-of-{ranks:05d}.safetensors"
            if each in frozen:
                parts.frozen.add(file)
            parts.add(part, file=file, label=each)
    if rank == 0 and len(files) > 1 and len(whole) == len(tensors):
        locations = {each: names[files.index((owners[each], each in frozen))] for each in whole}
        parts.texts[f"{name}.safetensors.index.json"] = index_text(
            locations, sum(tensor.nbytes for tensor in whole.values())
        )
    return aliases, extra


def _deal(
    whole: Mapping[str, Tensor], buffers: set[str], frozen: set[str], ranks: int
) -> tuple[dict[str, int], list[tuple[int, bool]]]:
    """Return the rank that writes each weight, and of each file its rank and whether it has frozen weights."""
    owners: dict[str, int] = {}
    files: list[tuple[int, bool]] = []
    for is_frozen in (False, True):
        held = [each for each in whole if (each in frozen) is is_frozen]
        sizes = [0 if each in buffers else whole[each].nbytes for each in held]
        count = max(1, min(ranks, sum(sizes) // _MIN_PART_NBYTES))
        for each, owner in zip(held, partition_by_size(sizes, count), strict=True):
            owners[each] = 0 if each in buffers else owner
        files += sorted({(owners[each], is_frozen) for each in held})
    return owners, files or [(0, False)]


def index_text(locations: Mapping[str, str], nbytes: int) -> bytes:
    """Return the content of an index of files, as Hugging Face writes it.

    Args:
        locations: the file of each weight.
        nbytes: of all weights.
    """
    found = {"metadata": {"total_size": nbytes}, "weight_map": dict(sorted(locations.items()))}
    return json.dumps(found, indent=2).encode() + b"\n"


def weights_of(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return each weight of a model once, by its first name, and the entries of its state_dict that are not tensors."""
    tensors, _, extra = _split_state(model)
    return tensors, extra


def weight_names(model: nn.Module) -> dict[str, list[str]]:
    """Return all names of each weight of a model, by its first one."""
    tensors, aliases, _ = _split_state(model)
    names = {name: [name] for name in tensors}
    for alias, first in aliases.items():
        names[first].append(alias)
    return names


def weight_files(model: str, parts: int) -> list[str]:
    """Return the files of a model's weights, named as by Hugging Face.

    Example:
        >>> weight_files("model", 2)
        ['model-00001-of-00002.safetensors', 'model-00002-of-00002.safetensors']
    """
    if parts == 1:
        return [f"{model}.safetensors"]
    return [f"{model}-{part + 1:05d}-of-{parts:05d}.safetensors" for part in range(parts)]


def check_weights(model: nn.Module, saved: Mapping[str, tuple[str, tuple[int, ...]]], source: str) -> None:
    """Raise unless `model` has the weights that were saved.

    Args:
        model: the model.
        saved: dtype and shape of weights, under all their names.
        source: of the weights, for the message.

    Raises:
        UsageError: names the first that differs.
    """
    tensors, aliases, _ = _split_state(model)
    here = {name: (dtype_name(tensor), tuple(tensor.shape)) for name, tensor in tensors.items()}
    here |= {name: here[first] for name, first in aliases.items()}
    for name in [*here, *saved]:
        if here.get(name) != saved.get(name):
            raise UsageError(
                f"{source} is of another model: {name!r} is {_describe(saved.get(name))}, "
                f"here {_describe(here.get(name))}",
                remedy="build the model that wrote it, or start anew in another folder",
            )


def _describe(kind: tuple[str, tuple[int, ...]] | None) -> str:
    return "missing" if kind is None else f"{kind[0]} {list(kind[1])}"


def plan_weights(name: str, model: nn.Module, rank: int, ranks: int) -> list[Read]:
    """Return what a rank verifies of a model's weights, before `fill_weights` reads them into place.

    Of sharded ones it is this rank's shard, of whole ones, which all ranks read later, a share.
    """
    tensors = _split_state(model)[0]
    sizes = [0 if isinstance(tensor, DTensor) else tensor.nbytes for tensor in tensors.values()]
    owners = partition_by_size(sizes, ranks)
    return [
        Read(f"{name}.{each}", box, None)
        for (each, tensor), owner in zip(tensors.items(), owners, strict=True)
        if (isinstance(tensor, DTensor) or owner == rank) and (box := _box(each, tensor)).numel
    ]


@torch.no_grad()
def fill_weights(name: str, model: nn.Module, reader: StateReader) -> None:
    """Read a model's weights into place, of sharded ones this rank's shard.

    Raises:
        DamagedCheckpoint: a file has changed since it was verified; the model may have some of the weights.
    """
    later: list[tuple[Tensor, Tensor]] = []
    reads = []
    for each, tensor in _split_state(model)[0].items():
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        local = local.detach()
        box = _box(each, tensor)
        if not box.numel:
            continue
        if local.device.type == "cpu" and local.is_contiguous():
            into = local
        else:
            into = torch.empty(box.sizes, dtype=local.dtype)
            later.append((local, into))
        reads.append(Read(f"{name}.{each}", box, into))
    reader.read(reads)
    for local, into in later:
        local.copy_(into)


def _box(name: str, tensor: Tensor) -> Box:
    return box_of_shard(name, tensor) if isinstance(tensor, DTensor) else Box.whole(tensor.shape)


@torch.no_grad()
def load_weights(model: nn.Module, whole: Callable[[str], Tensor]) -> None:
    """Copy weights into `model`; of sharded ones this rank's shard.

    Args:
        model: the model, whose weights were checked.
        whole: returns a whole weight by name.
    """
    for name, tensor in _split_state(model)[0].items():
        value = whole(name)
        if isinstance(tensor, DTensor):
            value = distribute_tensor(
                value.to(tensor.device), tensor.device_mesh, tensor.placements, src_data_rank=None
            )
            tensor.to_local().copy_(value.to_local())
        else:
            tensor.copy_(value)
