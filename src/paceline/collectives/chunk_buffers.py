"""Location of a schedule's chunks in a rank's tensors."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import torch

from paceline.collectives.schedule import Schedule, Send
from paceline.errors import UsageError

__all__ = ["ChunkBuffers", "Region"]


class Region(NamedTuple):
    """Adjacent elements of one of a rank's tensors.

    Attributes:
        tensor: index of the tensor.
        begin: first element.
        end: one past the last element.
    """

    tensor: int
    begin: int
    end: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.end - self.begin

    def overlaps(self, other: Region) -> bool:
        """Return whether they have elements in common."""
        return self.tensor == other.tensor and self.begin < other.end and other.begin < self.end

    def pieces(self, numel: int) -> Iterator[Region]:
        """Yield it cut into pieces of at most `numel` elements."""
        for begin in range(self.begin, self.end, numel):
            yield Region(self.tensor, begin, min(begin + numel, self.end))


class ChunkBuffers:
    """A rank's tensors, and where each chunk is.

    In most operations all chunks lie one after another in one tensor, the k-th of c chunks of n elements from
    ⌊k·n/c⌋ on. All-to-all and send-recv send from the first tensor and receive into the second.

    Args:
        schedule: defines the chunks.
        rank: rank that owns the tensors.
        tensor: 1-D.
        output: 1-D, for all-to-all and send-recv.

    Raises:
        UsageError: `output` is missing or superfluous, a tensor is not contiguous, or sizes do not fit.
    """

    def __init__(
        self, schedule: Schedule, rank: int, tensor: torch.Tensor, output: torch.Tensor | None
    ) -> None:
        self.schedule, self.rank = schedule, rank
        self.numel = tensor.numel()
        needs_output = schedule.op in ("all-to-all", "send-recv")
        if needs_output and (output is None or output.numel() != self.numel or output.dtype != tensor.dtype):
            raise UsageError(
                f"{schedule.op} needs an output like its input: output={_shape(output)} for {_shape(tensor)}",
                remedy="pass output=torch.empty_like(tensor)",
            )
        if output is not None and not needs_output:
            raise UsageError(f"{schedule.op} works in place: output= is for all-to-all and send-recv")
        if schedule.op == "all-to-all" and self.numel % schedule.ranks:
            raise UsageError(
                f"all-to-all of {self.numel} elements on {schedule.ranks} ranks",
                remedy="give a multiple of the number of ranks: every rank receives a part of the same size",
            )
        self.tensors = []
        for each in (tensor, output):
            if each is not None:
                if not each.is_contiguous():
                    raise UsageError("the tensor is not contiguous", remedy="pass tensor.contiguous()")
                self.tensors.append(each.view(-1))

    def regions(self, send: Send) -> list[Region]:
        """Return where a run of chunks lies on this rank, without empty chunks."""
        if len(self.tensors) == 1:
            runs = [Region(0, self._bound(send.chunk), self._bound(send.chunk + send.width))]
        else:
            runs = [self._exchanged(chunk) for chunk in send.range]
        return [region for region in runs if region.numel > 0]

    def slices(self, send: Send, number: int, count: int) -> list[tuple[int, Region]]:
        """Return one of `count` slices of every chunk of a run: the offset in the run, and where it lies."""
        if count == 1:
            wholes = self.regions(send)
        else:
            chunks = [Send(send.src, send.dst, chunk) for chunk in send.range]
            wholes = [region for chunk in chunks for region in self.regions(chunk)]
        found, before = [], 0
        for whole in wholes:
            begin, end = whole.numel * number // count, whole.numel * (number + 1) // count
            if end > begin:
                found.append((before + begin, Region(whole.tensor, whole.begin + begin, whole.begin + end)))
            before += whole.numel
        return found

    def nbytes(self) -> list[int]:
        """Return the size of every chunk in bytes."""
        itemsize, parts = self.tensors[0].element_size(), self.schedule.parts
        bounds = [self.numel * k // parts for k in range(parts + 1)]
        sizes = [(end - begin) * itemsize for begin, end in pairwise(bounds)]
        return sizes * (self.schedule.chunks // parts)

    def view(self, region: Region) -> torch.Tensor:
        """Return the elements of a region."""
        return self.tensors[region.tensor][region.begin : region.end]

    def result(self) -> torch.Tensor:
        """Return the result on this rank: the whole tensor, its own share of it, or the output."""
        if self.schedule.op in ("reduce-scatter", "scatter"):
            share = self.schedule.chunks // self.schedule.ranks
            return self.tensors[0][self._bound(self.rank * share) : self._bound((self.rank + 1) * share)]
        return self.tensors[-1]

    def _bound(self, chunk: int) -> int:
        return self.numel * chunk // self.schedule.chunks

    def _exchanged(self, chunk: int) -> Region:
        """Return where a chunk of an all-to-all or send-recv lies: in the first tensor if this rank sends it."""
        ranks, parts = self.schedule.ranks, self.schedule.parts
        source, part = divmod(chunk, parts)
        tensor = 0 if source == self.rank else 1
        if self.schedule.op == "all-to-all" and tensor == 1:
            part = source * (parts // ranks) + part % (parts // ranks)
        return Region(tensor, self.numel * part // parts, self.numel * (part + 1) // parts)


def _shape(tensor: torch.Tensor | None) -> str:
    return "None" if tensor is None else f"{tensor.numel()} × {tensor.dtype}"
