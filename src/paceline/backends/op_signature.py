"""What a rank calls, small enough to compare with what the others call; and what makes such calls."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
import torch.distributed as dist

from paceline.backends.block_reduction import NAMES, Reduction
from paceline.errors import CollectiveError

__all__ = ["AllCollectiveOps", "CollectiveOps", "OpSignature", "PointToPointOps"]

_OPS = (
    "barrier", "all_reduce", "reduce", "reduce_scatter", "all_gather", "gather", "broadcast", "scatter",
    "all_to_all", "sizes",
)  # fmt: skip
_REDUCTIONS = ("", *NAMES)
_DTYPES = (None, *sorted({each for each in vars(torch).values() if isinstance(each, torch.dtype)}, key=str))
_OP_CODES, _REDUCTION_CODES, _DTYPE_CODES = (
    {each: code for code, each in enumerate(every)} for every in (_OPS, _REDUCTIONS, _DTYPES)
)
_PACKED = struct.Struct("<BBHiq")


@dataclass(frozen=True)
class OpSignature:
    """A collective as called by one rank.

    Attributes:
        op: the collective. numel: elements of the tensor; of one piece, where there are several.
        dtype: of the tensor. reduction: name of the reduction, empty if there is none.
        root: rank of the host that gives or takes, −1 if there is none.
        timeout: seconds to wait for the others, None: as the group waits. Not compared.
    """

    op: str
    numel: int = 0
    dtype: torch.dtype | None = None
    reduction: str = ""
    root: int = -1
    timeout: float | None = None

    def about(self, op: str, tensor: torch.Tensor) -> OpSignature:
        """Return the call that prepares this one by exchanging `tensor`."""
        return replace(self, op=op, numel=tensor.numel(), dtype=tensor.dtype)

    def moving(self, op: str, root: int = -1) -> OpSignature:
        """Return the call that moves this one's result, by copies alone."""
        return replace(self, op=op, reduction="", root=root)

    def packed(self) -> bytes:
        """Return what must agree on all ranks: equal, but that one may ask for a mean, another for a sum."""
        codes = _OP_CODES[self.op], _REDUCTION_CODES[self.reduction], _DTYPE_CODES[self.dtype]
        return _PACKED.pack(*codes, self.root, self.numel)

    def agrees(self, data: bytes) -> bool:
        """Return whether another rank's packed call is this one; a mean is a sum that its rank divides."""
        other = OpSignature.unpacked(data)
        if {self.reduction, other.reduction} == {"SUM", "AVG"}:
            other = replace(other, reduction=self.reduction)
        return other.packed() == self.packed()

    @classmethod
    def unpacked(cls, data: bytes) -> OpSignature:
        """Return the call that `packed` told."""
        op, reduction, dtype, root, numel = _PACKED.unpack(data)
        return cls(_OPS[op], numel, _DTYPES[dtype], _REDUCTIONS[reduction], root)

    def __str__(self) -> str:
        """Return the call as people write it, such as ``all_reduce(float32[1024], SUM)``."""
        inside = []
        if self.dtype is not None:
            inside.append(f"{str(self.dtype).removeprefix('torch.')}[{self.numel}]")
        if self.reduction:
            inside.append(self.reduction)
        if self.root >= 0:
            inside.append(f"root {self.root}")
        return f"{self.op}({', '.join(inside)})"


class CollectiveOps(Protocol):
    """What makes the calls: the ranks of one host, or of several. Calls block; ranks are the group's."""

    @property
    def shares_memory(self) -> bool: ...
    @property
    def ops(self) -> frozenset[str]: ...
    @property
    def timeout(self) -> float: ...
    @timeout.setter
    def timeout(self, seconds: float) -> None: ...

    def barrier(self, call: OpSignature) -> None: ...
    def all_reduce(self, call: OpSignature, tensor: torch.Tensor, how: Reduction, ranks: int) -> None: ...
    def reduce_scatter(
        self,
        call: OpSignature,
        output: torch.Tensor,
        inputs: Sequence[torch.Tensor],
        how: Reduction,
        ranks: int,
    ) -> None: ...
    def all_gather(
        self, call: OpSignature, outputs: Sequence[torch.Tensor], tensor: torch.Tensor
    ) -> None: ...
    def broadcast(self, call: OpSignature, tensor: torch.Tensor, root: int) -> None: ...
    def give_up(self, error: BaseException) -> None: ...
    def note_step(self, step: int) -> None: ...
    def leave(self) -> None: ...
    def abandon(self, reason: CollectiveError) -> None: ...
    def close(self) -> None: ...


class AllCollectiveOps(CollectiveOps, Protocol):
    """A route that makes all calls."""

    def reduce(
        self, call: OpSignature, tensor: torch.Tensor, root: int, how: Reduction, ranks: int
    ) -> None: ...
    def gather(
        self, call: OpSignature, outputs: Sequence[torch.Tensor], tensor: torch.Tensor, root: int
    ) -> None: ...
    def scatter(
        self, call: OpSignature, output: torch.Tensor, inputs: Sequence[torch.Tensor], root: int
    ) -> None: ...
    def all_to_all(
        self, call: OpSignature, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
    ) -> None: ...


class PointToPointOps(Protocol):
    """What carries messages from one rank to another."""

    def send(self, tensor: torch.Tensor, target: int, tag: int) -> dist.Work: ...
    def receive(self, tensor: torch.Tensor, source: int | None, tag: int) -> dist.Work: ...
    def close(self) -> None: ...
