"""Collectives between hosts: one rank of each host, point to point over gloo.

For a reduce-scatter or an all-gather every host sends each other host its part and receives its own: (H−1)/H of the
buffer out and in, as a ring, but summed along the tree over the hosts. Long buffers are pipelined in parts: while one
part is gathered the next one is scattered, so the link is never idle.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor

from paceline.backends.block_reduction import Reduction, Scratch, split_blocks
from paceline.backends.op_arguments import Tensors
from paceline.backends.shm.shm_all_reduce import slice_bounds

__all__ = ["HostUnreachable", "InterHostCollectives"]

_TAG = 1 << 24
"""Tag of these messages; those of user programs are small."""

_Transfer = tuple[int, dist.Work]  # the other rank, and a send or receive
_Scatter = tuple[Tensor, Tensor, list[_Transfer]]  # a part, and where this host's slice of all hosts arrives


class HostUnreachable(Exception):
    """A message to or from `rank` (in the group) failed; the text is gloo's."""

    def __init__(self, rank: int, text: str) -> None:
        self.rank = rank
        super().__init__(text)


class InterHostCollectives:
    """Collectives of this rank and its counterparts on the other hosts.

    Args:
        gloo: torch's ``ProcessGroupGloo`` (its stubs lack send and recv).
        ranks: ranks of the counterparts in the group, by host, this one included.
        host: index of this host.
        timeout: seconds that a message may take.
    """

    def __init__(self, gloo: Any, ranks: Sequence[int], host: int, timeout: float) -> None:
        self._gloo, self._ranks, self.host, self.timeout = gloo, list(ranks), host, timeout
        self._hosts = len(ranks)
        self._others = [(host + distance) % self._hosts for distance in range(1, self._hosts)]
        self._scratch = Scratch()

    def all_reduce(self, parts: Iterable[Tensor], reduction: Reduction) -> Iterator[Tensor]:
        """Reduce tensors over the hosts, in place, along the tree over them; yield each when it is done.

        Part k + 1 is taken from `parts`, and sent, before part k has arrived, so the caller's work on parts overlaps
        the transfer of others.
        """
        upcoming = iter(parts)
        scatter = self._start_scatter(next(upcoming, None))
        gather: tuple[Tensor, list[_Transfer]] | None = None
        while scatter is not None:
            (part, inbox, transfers), scatter = scatter, self._start_scatter(next(upcoming, None))
            self._wait(transfers)
            slices = self._slices(part)
            own = slices[self.host]
            if own.numel():
                rows = [own if host == self.host else inbox[host] for host in range(self._hosts)]
                self.combine(rows, own, reduction)
            previous, gather = gather, (part, self._start_exchange([own] * self._hosts, slices))
            if previous is not None:
                self._wait(previous[1])
                yield previous[0]
        if gather is not None:
            self._wait(gather[1])
            yield gather[0]

    def _start_scatter(self, part: Tensor | None) -> _Scatter | None:
        """Start sending every host its slice of `part`, and receiving this host's slice from all others."""
        if part is None:
            return None
        slices = self._slices(part)
        inbox = part.new_empty(self._hosts, slices[self.host].numel())
        return part, inbox, self._start_exchange(slices, inbox)

    def _slices(self, part: Tensor) -> list[Tensor]:
        return [part[slice(*slice_bounds(part.numel(), self._hosts, host))] for host in range(self._hosts)]

    def combine(self, rows: Tensors, out: Tensor, reduction: Reduction) -> None:
        """Reduce one row per host into `out`, which may be this host's row."""
        for *inputs, result in split_blocks([*rows, out]):
            reduction(inputs, result, self.host, self._scratch)

    def exchange(self, outgoing: Tensors, incoming: Tensors) -> None:
        """Send ``outgoing[h]`` to host h and receive ``incoming[h]`` from it, for all other hosts."""
        self._wait(self._start_exchange(outgoing, incoming))

    def broadcast(self, flat: Tensor, root: int) -> None:
        """Copy `flat` from host `root` to all, along a binomial tree."""
        place = (self.host - root) % self._hosts
        reach = 1
        while reach < self._hosts:
            if place < reach and place + reach < self._hosts:
                self._wait(self._start(self._gloo.send, flat, (place + reach + root) % self._hosts))
            elif reach <= place < 2 * reach:
                self._wait(self._start(self._gloo.recv, flat, (place - reach + root) % self._hosts))
            reach *= 2

    def abort(self) -> None:
        """Close all connections, so that the other hosts notice at once."""
        with contextlib.suppress(RuntimeError):
            self._gloo.abort()

    def _start_exchange(
        self, outgoing: Sequence[Tensor] | Tensor, incoming: Tensors | Tensor
    ) -> list[_Transfer]:
        transfers: list[_Transfer] = []
        for host in self._others:
            transfers += self._start(self._gloo.recv, incoming[host], host)
        for host in self._others:
            transfers += self._start(self._gloo.send, outgoing[host], host)
        return transfers

    def _start(self, call: Callable[..., dist.Work], tensor: Tensor, host: int) -> list[_Transfer]:
        """Start a send or receive; nothing for an empty tensor."""
        rank = self._ranks[host]
        with _unreachable(rank):
            return [(rank, call([tensor], rank, _TAG))] if tensor.numel() else []

    def _wait(self, transfers: list[_Transfer]) -> None:
        for rank, work in transfers:
            with _unreachable(rank):
                work.wait(timedelta(seconds=self.timeout))


@contextlib.contextmanager
def _unreachable(rank: int) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        text = str(error).partition("\n")[0].rsplit("] ", 1)[-1]
        raise HostUnreachable(rank, text) from error
