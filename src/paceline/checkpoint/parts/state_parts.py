"""State of a training run as named tensors, of which each rank has parts, and plain values."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from paceline.checkpoint.parts.boxes import Box, box_of_shard, writes_replica
from paceline.world.plain_values import pack, unpack

__all__ = ["StateParts", "TensorPart", "dtype_name"]


def dtype_name(tensor: Tensor) -> str:
    """Return the name of a tensor's dtype, such as ``"float32"``."""
    return str(tensor.dtype).removeprefix("torch.")


@dataclass(frozen=True)
class TensorPart:
    """A box of a tensor.

    Attributes:
        name: of the tensor, unique in a checkpoint: ``"model.head.weight"``, ``"optimizer.state.head.weight.exp_avg"``.
        shape: of the whole tensor.
        box: the region.
        data: its elements, in the shape of the box; may have any strides, and lie on any device.
        steady: only steps of optimizers change them, unless the program itself writes to them.
    """

    name: str
    shape: tuple[int, ...]
    box: Box
    data: Tensor
    steady: bool = False

    @classmethod
    def whole(cls, name: str, tensor: Tensor, *, steady: bool = False) -> TensorPart:
        """Return a part that is the whole tensor."""
        shape = tuple(tensor.shape)
        return cls(name, shape, Box.whole(shape), tensor.detach(), steady)

    @classmethod
    def of_shard(
        cls, name: str, tensor: DTensor, number: int, rank: int, *, steady: bool = False
    ) -> TensorPart | None:
        """Return the part of a DTensor that a rank writes; None: it has none, or a replica writes it.

        Args:
            name: of the tensor.
            tensor: sharded in any way that gives every rank one box.
            number: of the tensor, see `writes_replica`.
            rank: the rank; the first one writes tensors without elements.
            steady: see `TensorPart`.

        Raises:
            UsageError: it is sharded in another way.
        """
        shape = tuple(tensor.shape)
        if not math.prod(shape):
            return cls.whole(name, torch.empty(shape, dtype=tensor.dtype)) if rank == 0 else None
        box = box_of_shard(name, tensor)
        if not box.numel or not writes_replica(tensor, number):
            return None
        return cls(name, shape, box, tensor.to_local().detach(), steady)

    @property
    def label(self) -> str:
        """Its name, with the offsets of a box that is not the whole tensor."""
        return self.name if self.is_whole else f"{self.name}@{','.join(map(str, self.box.offsets))}"

    @property
    def is_whole(self) -> bool:
        """Whether it is the whole tensor."""
        return self.box.sizes == self.shape


@dataclass
class StateParts:
    """What one rank writes.

    Attributes:
        rank: the rank.
        files: its files of tensors; in each, parts by a label that is unique in the file.
        values: plain values by name, of which only this rank has each; what `pack` returns.
        texts: further small files.
        frozen: files of weights that training does not change.
    """

    rank: int
    files: dict[str, dict[str, TensorPart]] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    texts: dict[str, bytes] = field(default_factory=dict)
    frozen: set[str] = field(default_factory=set)

    def add(self, part: TensorPart, *, file: str = "", label: str = "") -> None:
        """Add a part of a tensor.

        Args:
            part: the part.
            file: where it is written; empty: with the state of the rank.
            label: its name in the file; empty: its own, with the offsets of a box that is not the whole tensor.
        """
        self.files.setdefault(file or f"state-rank{self.rank}.safetensors", {})[label or part.label] = part

    def add_packed(self, name: str, value: Any) -> Any:
        """Add the tensors in a value under names that begin with `name`; return the rest, see `pack`.

        Raises:
            UsageError: it can't be saved; the message has the place.
        """
        packed, tensors = pack(value, name)
        for label, tensor in tensors.items():
            self.add(TensorPart.whole(label, tensor))
        return packed

    def unpacked(self) -> dict[str, Any]:
        """Return the plain values, with their tensors."""

        def lookup(label: str) -> Tensor:
            return next(parts[label].data for parts in self.files.values() if label in parts)

        return {name: unpack(packed, lookup) for name, packed in self.values.items()}

    def in_files(self, changing: str, frozen: str) -> StateParts:
        """Return it with all parts in two files at most, under labels that are unique in them.

        Args:
            changing: name of the file of what training changes.
            frozen: name of the file of weights that it does not change.
        """
        merged = StateParts(self.rank, values=self.values)
        for name, parts in self.files.items():
            file = frozen if name in self.frozen else changing
            for part in parts.values():
                merged.add(part, file=file)
        merged.files.setdefault(changing, {})
        merged.frozen = {frozen} & merged.files.keys()
        return merged

    def with_files(self, files: Mapping[str, Mapping[str, TensorPart]]) -> StateParts:
        """Return it with other files of tensors, such as copies."""
        return replace(self, files={name: dict(parts) for name, parts in files.items()})
