"""Collects a model's weights for a checkpoint, divided among ranks, and loads them.

Weights are stored whole, under the names of the bare module's ``state_dict()``, so that any program can load them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from paceline._core.units import MIB
from paceline.checkpoint.format.tensor_files import dtype_name
from paceline.checkpoint.named_objects import unwrap
from paceline.checkpoint.optimizer_state_pieces import partition_by_size
from paceline.errors import UsageError

__all__ = ["WeightsPart", "check_weights", "load_weights", "weight_files", "weights_part"]

_MIN_PART_NBYTES = 128 * MIB


@dataclass(frozen=True)
class WeightsPart:
    """A rank's part of a model's weights.

    Attributes:
        parts: number of parts, one for each of the first ranks.
        tensors: the weights in this rank's part.
        aliases: stored names of weights by their further names; the same on all ranks.
        extra: entries of the state_dict that are not tensors.
    """

    parts: int
    tensors: Mapping[str, Tensor]
    aliases: Mapping[str, str]
    extra: Mapping[str, Any]


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


def weights_part(model: nn.Module, rank: int, ranks: int, instead: Mapping[str, Tensor]) -> WeightsPart:
    """Return the part of `rank`; all ranks call this, since sharded weights are gathered.

    Parameters are divided into parts of about the same size, of at least 128 MiB. Buffers, which may differ between
    ranks (running statistics of BatchNorm), are rank 0's.

    Args:
        model: the model.
        rank, ranks: this rank, and the number of ranks.
        instead: values to save for some parameters: the shared ones where ranks train local ones.
    """
    tensors, aliases, extra = _split_state(model)
    buffers = {name for name, _ in unwrap(model).named_buffers()}
    sizes = [0 if name in buffers else tensor.nbytes for name, tensor in tensors.items()]
    parts = max(1, min(ranks, sum(sizes) // _MIN_PART_NBYTES))
    mine = {}
    for (name, tensor), owner in zip(tensors.items(), partition_by_size(sizes, parts), strict=True):
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if name in instead:
            whole = instead[name].to(tensor.dtype)
        if rank == (0 if name in buffers else owner):
            mine[name] = whole
    return WeightsPart(parts, mine, aliases, extra)


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
