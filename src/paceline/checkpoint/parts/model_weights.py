"""The weights of a model: what every rank writes of them, and how they come back into it.

Weights are stored whole, under the names of the bare module's ``state_dict()``, so that anybody can load them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from paceline._core.units import MIB
from paceline.checkpoint.format.safetensors_writer import dtype_name
from paceline.checkpoint.parts.named_objects import bare
from paceline.checkpoint.parts.optimizer_state import deal
from paceline.errors import UsageError

__all__ = [
    "PART_NBYTES",
    "WeightsPart",
    "check_weights",
    "load_weights",
    "part_names",
    "part_of",
    "weights_of",
]

PART_NBYTES = 128 * MIB
"""Smallest part of the weights that is worth a file of its own."""


@dataclass(frozen=True)
class WeightsPart:
    """A rank's part of a model's weights.

    Attributes:
        parts: how many ranks have one: the first ones.
        tensors: the weights in this rank's part.
        aliases: further names of weights that have several, by that name; the same on all ranks.
        rest: what else the state_dict holds.
    """

    parts: int
    tensors: Mapping[str, Tensor]
    aliases: Mapping[str, str]
    rest: Mapping[str, Any]


def weights_of(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str], dict[str, Any]]:
    """Return the tensors of a model's state_dict, each once; further names of some; and what is no tensor."""
    tensors: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    rest: dict[str, Any] = {}
    first: dict[int, str] = {}
    state = bare(model).state_dict()
    held = [
        *bare(model).named_parameters(remove_duplicate=False),
        *bare(model).named_buffers(remove_duplicate=False),
    ]
    object_of = {name: id(tensor) for name, tensor in held}
    for name, value in state.items():
        if not isinstance(value, Tensor):
            rest[name] = value
        elif (known := first.setdefault(object_of.get(name, id(value)), name)) != name:
            aliases[name] = known
        else:
            tensors[name] = value
    return tensors, aliases, rest


def part_of(
    model: nn.Module, rank: int, ranks: int, instead: Mapping[str, Tensor] | None = None
) -> WeightsPart:
    """Return the part of `rank`; gathers sharded weights, so all ranks must call.

    `instead` has what to save for some parameters, in their shapes: what all ranks share where they train apart.

    Parameters are dealt in runs of about the same size to as many ranks as there is enough for. Buffers, which may
    differ between ranks (running statistics of BatchNorm), are rank 0's.
    """
    tensors, aliases, rest = weights_of(model)
    buffers = {name for name, _ in bare(model).named_buffers()}
    sizes = [0 if name in buffers else tensor.nbytes for name, tensor in tensors.items()]
    parts = max(1, min(ranks, sum(sizes) // PART_NBYTES))
    mine = {}
    for (name, tensor), owner in zip(tensors.items(), deal(sizes, parts), strict=True):
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if instead is not None and name in instead:
            whole = instead[name].to(tensor.dtype)
        if rank == (0 if name in buffers else owner):
            mine[name] = whole
    return WeightsPart(parts, mine, aliases, rest)


def part_names(model: str, parts: int) -> list[str]:
    """Return the files of a model's weights, as Hugging Face names them.

    Example:
        >>> part_names("model", 2)
        ['model-00001-of-00002.safetensors', 'model-00002-of-00002.safetensors']
    """
    if parts == 1:
        return [f"{model}.safetensors"]
    return [f"{model}-{part + 1:05d}-of-{parts:05d}.safetensors" for part in range(parts)]


def check_weights(model: nn.Module, saved: Mapping[str, tuple[str, tuple[int, ...]]], what: str) -> None:
    """Raise unless `model` has the weights that were saved.

    Args:
        model: the model.
        saved: dtype and shape by name, of weights that have several names by each.
        what: where they come from, for the message.

    Raises:
        UsageError: naming the first that differs.
    """
    tensors, aliases, _ = weights_of(model)
    here = {name: (dtype_name(tensor), tuple(tensor.shape)) for name, tensor in tensors.items()}
    here |= {name: here[first] for name, first in aliases.items()}
    for name in [*here, *saved]:
        if here.get(name) != saved.get(name):
            raise UsageError(
                f"{what} is of another model: {name!r} is {_told(saved.get(name))}, here {_told(here.get(name))}",
                remedy="build the model that wrote it, or start anew in another folder",
            )


def _told(kind: tuple[str, tuple[int, ...]] | None) -> str:
    return "missing" if kind is None else f"{kind[0]} {list(kind[1])}"


@torch.no_grad()
def load_weights(model: nn.Module, whole: Callable[[str], Tensor]) -> None:
    """Fill the weights of `model` in place: of sharded ones what this rank holds.

    Args:
        model: the model, whose weights were checked to be those that `whole` has.
        whole: returns a weight by name.
    """
    for name, tensor in weights_of(model)[0].items():
        value = whole(name)
        if isinstance(tensor, DTensor):
            value = distribute_tensor(
                value.to(tensor.device), tensor.device_mesh, tensor.placements, src_data_rank=None
            )
            tensor.to_local().copy_(value.to_local())
        else:
            tensor.copy_(value)
