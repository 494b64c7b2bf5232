"""Where the chunks of a schedule lie in a rank's tensors."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import torch

from paceline.collectives.schedule import Schedule, Send
from paceline.errors import UsageError

__all__ = ["ChunkMemory", "Region"]


class Region(NamedTuple):
    """Adjacent elements of one of a rank's tensors.

    Attributes:
        place: number of the tensor.
        begin, end: elements.
    """

    place: int
    begin: int
    end: int

    def meets(self, other: Region) -> bool:
        """Return whether they have elements in common."""
        return self.place == other.place and self.begin < other.end and other.begin < self.end

    def pieces(self, most: int) -> Iterator[Region]:
        """Return it cut into pieces of at most `most` elements."""
        for begin in range(self.begin, self.end, most):
            yield Region(self.place, begin, min(begin + most, self.end))


class ChunkMemory:
    """A rank's tensors, and where each chunk is.

    In most operations all chunks lie one after another in one tensor, the k-th of c chunks of n elements from
    ⌊k·n/c⌋ on. In all-to-all and send-recv what goes out is in the first tensor and what comes in in the second.

    Args:
        schedule: whose chunks.
        rank: whose memory.
        tensor: 1-D.
        output: 1-D, for all-to-all and send-recv.

    Raises:
        UsageError: no `output` where one is needed, or one where none is, or sizes that don't fit.
    """

    def __init__(
        self, schedule: Schedule, rank: int, tensor: torch.Tensor, output: torch.Tensor | None
    ) -> None:
        self.schedule, self.rank = schedule, rank
        self.numel = tensor.numel()
        apart = schedule.op in ("all-to-all", "send-recv")
        if apart and (output is None or output.numel() != self.numel or output.dtype != tensor.dtype):
            raise UsageError(
                f"{schedule.op} gives its result in another tensor: output={_words(output)} for {_words(tensor)}",
                remedy="pass output=torch.empty_like(tensor)",
            )
        if output is not None and not apart:
            raise UsageError(f"{schedule.op} works in place: output= is for all-to-all and send-recv")
        if schedule.op == "all-to-all" and self.numel % schedule.ranks:
            raise UsageError(
                f"all-to-all of {self.numel} elements on {schedule.ranks} ranks",
                remedy="give a multiple of the number of ranks: every rank gets a part of the same size",
            )
        for one in (tensor, output):
            if one is not None and not one.is_contiguous():
                raise UsageError("a tensor that is not contiguous", remedy="pass tensor.contiguous()")
        self.tensors = [tensor.view(-1)] if output is None else [tensor.view(-1), output.view(-1)]

    def regions(self, send: Send) -> list[Region]:
        """Return where a run of chunks is on this rank; empty chunks are nowhere."""
        if len(self.tensors) == 1:
            runs = [Region(0, self._bound(send.chunk), self._bound(send.chunk + send.width))]
        else:
            runs = [self._apart(chunk) for chunk in send.range]
        return [region for region in runs if region.end > region.begin]

    def slices(self, send: Send, number: int, count: int) -> list[tuple[int, Region]]:
        """Return one of `count` slices of every chunk of a run: how far into the run it begins, and where it is."""
        if count == 1:
            wholes = self.regions(send)
        else:
            wholes = [
                region for chunk in send.range for region in self.regions(Send(send.src, send.dst, chunk))
            ]
        found, before = [], 0
        for whole in wholes:
            numel = whole.end - whole.begin
            begin, end = numel * number // count, numel * (number + 1) // count
            if end > begin:
                found.append((before + begin, Region(whole.place, whole.begin + begin, whole.begin + end)))
            before += numel
        return found

    def nbytes(self) -> list[int]:
        """Return the size of every chunk in bytes."""
        size = self.tensors[0].element_size()
        per_vector = self.schedule.parts
        bounds = [self.numel * k // per_vector for k in range(per_vector + 1)]
        of_vector = [(end - begin) * size for begin, end in pairwise(bounds)]
        return of_vector * (self.schedule.chunks // per_vector)

    def view(self, region: Region) -> torch.Tensor:
        """Return the elements of a region."""
        return self.tensors[region.place][region.begin : region.end]

    def result(self) -> torch.Tensor:
        """Return what the operation gives this rank: all of the tensor, its own share of it, or the output."""
        if self.schedule.op in ("reduce-scatter", "scatter"):
            share = self.schedule.chunks // self.schedule.ranks
            begin, end = self._bound(self.rank * share), self._bound((self.rank + 1) * share)
            return self.tensors[0][begin:end]
        return self.tensors[-1]

    def _bound(self, chunk: int) -> int:
        return self.numel * chunk // self.schedule.chunks

    def _apart(self, chunk: int) -> Region:
        """Return where a chunk of an all-to-all or send-recv is: in the first tensor if it goes out."""
        ranks, parts = self.schedule.ranks, self.schedule.parts
        source, part = divmod(chunk, parts)
        place = 0 if source == self.rank else 1
        if self.schedule.op == "all-to-all" and place == 1:
            part = source * (parts // ranks) + part % (parts // ranks)
        return Region(place, self.numel * part // parts, self.numel * (part + 1) // parts)


def _words(tensor: torch.Tensor | None) -> str:
    return "None" if tensor is None else f"{tensor.numel()} × {tensor.dtype}"
