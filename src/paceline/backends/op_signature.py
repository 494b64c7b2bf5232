"""Signature of a collective call, which ranks compare before they exchange data, and the interfaces that run calls."""

from __future__ import annotations

import struct
from dataclasses import KW_ONLY, dataclass, replace
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.backends.block_reduction import REDUCTION_NAMES, Reduction
from paceline.backends.call_steps import Steps
from paceline.backends.op_arguments import Tensors
from paceline.errors import CollectiveError, MismatchError

__all__ = [
    "ALL_OPS",
    "AllCollectiveOps",
    "CollectiveOps",
    "OpSignature",
    "PointToPointOps",
    "check_exchange_sizes",
]

ALL_OPS: tuple[str, ...] = (
    "barrier", "all_reduce", "reduce", "reduce_scatter", "all_gather", "gather", "broadcast", "scatter",
    "all_to_all",
)  # fmt: skip
_OPS = (*ALL_OPS, "sizes")
_REDUCTIONS = ("", *REDUCTION_NAMES)
_DTYPES = (None, *sorted({each for each in vars(torch).values() if isinstance(each, torch.dtype)}, key=str))
_OP_CODES, _REDUCTION_CODES, _DTYPE_CODES = (
    {each: code for code, each in enumerate(every)} for every in (_OPS, _REDUCTIONS, _DTYPES)
)
_PACKED = struct.Struct("<BBHiq")


@dataclass(frozen=True)
class OpSignature:
    """A collective as called by one rank.

    Attributes:
        op: the collective.
        numel: elements of the tensor, or of one piece of several.
        dtype: of the tensor.
        reduction: name of the reduction; empty: none.
        root: root rank on the host; −1: none.
        timeout: seconds to wait for the other ranks; None: the group's. Not compared.
    """

    op: str
    numel: int = 0
    dtype: torch.dtype | None = None
    reduction: str = ""
    _: KW_ONLY
    root: int = -1
    timeout: float | None = None

    def with_tensor(self, op: str, tensor: Tensor) -> OpSignature:
        """Return the signature of a preparatory exchange of `tensor`."""
        return replace(self, op=op, numel=tensor.numel(), dtype=tensor.dtype)

    def as_copy(self, op: str, root: int = -1) -> OpSignature:
        """Return the signature of a step that only copies the result."""
        return replace(self, op=op, reduction="", root=root)

    def pack(self) -> bytes:
        """Return the bytes that must be equal on all ranks, except that a mean matches its sum."""
        codes = _OP_CODES[self.op], _REDUCTION_CODES[self.reduction], _DTYPE_CODES[self.dtype]
        return _PACKED.pack(*codes, self.root, self.numel)

    def matches(self, packed: bytes) -> bool:
        """Return whether another rank's signature agrees; a mean is a sum that its rank divides."""
        other = OpSignature.unpack(packed)
        if {self.reduction, other.reduction} == {"SUM", "AVG"}:
            other = replace(other, reduction=self.reduction)
        return other.pack() == self.pack()

    @classmethod
    def unpack(cls, packed: bytes) -> OpSignature:
        """Return the signature that `pack` encoded."""
        op, reduction, dtype, root, numel = _PACKED.unpack(packed)
        return cls(_OPS[op], numel, _DTYPES[dtype], _REDUCTIONS[reduction], root=root)

    def mismatch(self, packed: bytes, *, me: int, other: int) -> MismatchError:
        """Return the error of rank `me`, given the signature of rank `other`; both ranks are the world's."""
        return MismatchError(
            f"this rank calls {self}, rank {other} calls {OpSignature.unpack(packed)}",
            rank=me,
            remedy="all ranks of a group must make the same calls in the same order",
        )

    def __str__(self) -> str:
        """Return it as text, such as ``all_reduce(float32[1024], SUM)``."""
        inside = []
        if self.dtype is not None:
            inside.append(f"{str(self.dtype).removeprefix('torch.')}[{self.numel}]")
        if self.reduction:
            inside.append(self.reduction)
        if self.root >= 0:
            inside.append(f"root {self.root}")
        return f"{self.op}({', '.join(inside)})"


def check_exchange_sizes(call: OpSignature, table: Tensor) -> None:
    """Raise unless every rank of an all-to-all sends as many bytes as its receiver expects.

    Args:
        call: the all-to-all, for messages.
        table: bytes: ``table[r, 0, q]`` that rank r sends to q, ``table[r, 1, q]`` that it expects from q.
    """
    sent, expected = table[:, 0], table[:, 1].T
    wrong = (sent != expected).nonzero().tolist()
    if wrong:
        source, target = wrong[0]
        raise MismatchError(
            f"{call}: rank {source} sends {sent[source, target]} bytes to rank {target}, which expects "
            f"{expected[source, target]} (ranks of this group)",
            remedy="give input splits of each rank that equal the output splits of the receivers",
        )


class CollectiveOps(Protocol):
    """Runs the collectives of a group, over one host or several.

    Calls block, or return their steps. Ranks are the group's, tensors contiguous and on the CPU.

    Attributes:
        shares_memory: tensors of the arena are reduced in place.
        ops: the collectives that it runs.
        along_tree: sums of all sizes are added along the tree of `summation_tree` over the ranks.
        timeout: seconds that a call waits for a rank.
    """

    shares_memory: bool
    ops: frozenset[str]
    along_tree: bool

    @property
    def timeout(self) -> float: ...
    @timeout.setter
    def timeout(self, seconds: float) -> None: ...

    def barrier(self, call: OpSignature) -> None:
        """Return when all ranks have called."""

    def all_reduce(self, call: OpSignature, tensor: Tensor, reduction: Reduction) -> Steps | None:
        """Reduce `tensor` over all ranks, in place."""

    def reduce_scatter(
        self, call: OpSignature, output: Tensor, inputs: Tensors, reduction: Reduction
    ) -> Steps | None:
        """Reduce ``inputs[r]`` over all ranks into the `output` of rank r."""

    def all_gather(self, call: OpSignature, outputs: Tensors, tensor: Tensor) -> Steps | None:
        """Copy the `tensor` of every rank r into ``outputs[r]`` on all ranks."""

    def broadcast(self, call: OpSignature, tensor: Tensor, root: int) -> None:
        """Copy `tensor` from `root` to all ranks."""

    def report_error(self, error: BaseException) -> None:
        """Report an error of this rank in the middle of a collective to the others."""

    def set_background(self, background: bool) -> None:
        """Set whether the calls from now on run beside the program, which computes on the same cores meanwhile."""

    def note_step(self, step: int) -> None:
        """Publish the optimizer step that this rank is in; the other ranks' errors name it."""

    def cancel(self) -> None:
        """Make a pending call of another thread fail soon."""

    def interrupt(self, reason: CollectiveError) -> None:
        """Make a pending call of another thread raise `reason` soon, and every later one at once."""

    def close(self) -> None:
        """Leave the group."""


class AllCollectiveOps(CollectiveOps, Protocol):
    """Runs the collectives that a group over several hosts lacks, too."""

    def reduce(self, call: OpSignature, tensor: Tensor, root: int, reduction: Reduction) -> None:
        """Reduce `tensor` over all ranks into that of `root`; the others' are unchanged."""

    def gather(self, call: OpSignature, outputs: Tensors, tensor: Tensor, root: int) -> None:
        """Copy the `tensor` of every rank r into ``outputs[r]`` on `root`; elsewhere `outputs` is empty."""

    def scatter(self, call: OpSignature, output: Tensor, inputs: Tensors, root: int) -> None:
        """Copy ``inputs[r]`` of `root` into the `output` of rank r; elsewhere `inputs` is empty."""

    def all_to_all(self, call: OpSignature, outputs: Tensors, inputs: Tensors) -> None:
        """Copy ``inputs[r]`` of every rank q into ``outputs[q]`` of rank r; sizes may differ.

        Raises:
            MismatchError: a rank sends another size than its receiver expects (raised by all ranks).
        """


class PointToPointOps(Protocol):
    """Carries messages from one rank to another."""

    def send(self, tensor: Tensor, target: int, tag: int) -> dist.Work: ...
    def receive(self, tensor: Tensor, source: int | None, tag: int) -> dist.Work: ...
    def close(self) -> None: ...
