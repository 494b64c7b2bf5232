"""Collectives between hosts: one rank of each host, point to point over gloo.

Every host sends each other host its part and receives its own: (H-1)/H of the buffer out and in for a
reduce-scatter or an all-gather, as a ring, but summed in the order of the hosts. Long buffers go in
segments: while one segment is gathered, the next one is being scattered, so that the link never rests.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from paceline.backends.reduction import Reduction, Scratch, blocks
from paceline.backends.shm import span

__all__ = ["Between", "Unreachable"]

_TAG = 1 << 24
"""Our messages' tag: a program's own have small ones."""

_SEGMENT_NBYTES = 8 << 20


class Unreachable(Exception):
    """A message to or from `rank` (in the group) failed; the text is gloo's."""

    def __init__(self, rank: int, text: str) -> None:
        self.rank = rank
        super().__init__(text)


class Between:
    """The counterparts of this rank on the other hosts.

    Args:
        gloo: torch's ``ProcessGroupGloo`` (its stubs lack send and recv); carries the messages.
        ranks: the counterparts' ranks in the group, by host, this one included.
        host: number of this host. timeout: seconds that a message may take.
    """

    def __init__(self, gloo: Any, ranks: Sequence[int], host: int, timeout: float) -> None:
        self._gloo, self._ranks, self.host = gloo, list(ranks), host
        self.hosts = len(ranks)
        self._others = [(host + distance) % self.hosts for distance in range(1, self.hosts)]
        self._scratch = Scratch()
        self.timeout = timeout

    def all_reduce(self, flat: torch.Tensor, how: Reduction, ranks: int) -> None:
        """Reduce `flat` over the hosts, in place, in their order; a mean divides by `ranks`."""
        parts = flat.split(max(1, _SEGMENT_NBYTES // flat.element_size())) if flat.numel() else ()
        ahead = self._scatter(parts[0]) if parts else None
        gathering: list[_Transfer] = []
        for number, part in enumerate(parts):
            assert ahead is not None, "one per part"
            arriving, inbox = ahead
            ahead = self._scatter(parts[number + 1]) if number + 1 < len(parts) else None
            self._finish(arriving)
            self._combine(part, inbox, how, ranks)
            self._finish(gathering)
            gathering = self._gather(part)
        self._finish(gathering)

    def _scatter(self, part: torch.Tensor) -> tuple[list[_Transfer], torch.Tensor]:
        """Start sending every host its slice; return what arrives of the own one."""
        low, high = span(part.numel(), self.hosts, self.host)
        inbox = part.new_empty(self.hosts, high - low)
        transfers = [self._receive(inbox[host], host) for host in self._others]
        transfers += [
            self._send(part[slice(*span(part.numel(), self.hosts, host))], host) for host in self._others
        ]
        return transfers, inbox

    def _combine(self, part: torch.Tensor, inbox: torch.Tensor, how: Reduction, ranks: int) -> None:
        low, high = span(part.numel(), self.hosts, self.host)
        if low < high:
            own = part[low:high]
            rows = [own if host == self.host else inbox[host] for host in range(self.hosts)]
            self.combine(rows, own, how, ranks)

    def combine(self, rows: Sequence[torch.Tensor], out: torch.Tensor, how: Reduction, ranks: int) -> None:
        """Reduce one row per host into `out`, which may be this host's row."""
        for *inputs, result in blocks([*rows, out]):
            how(inputs, result, self.host, self._scratch, ranks)

    def abandon(self) -> None:
        """Close all connections, so that the other hosts notice at once."""
        with contextlib.suppress(RuntimeError):
            self._gloo.abort()

    def _gather(self, part: torch.Tensor) -> list[_Transfer]:
        own = part[slice(*span(part.numel(), self.hosts, self.host))]
        transfers = [
            self._receive(part[slice(*span(part.numel(), self.hosts, host))], host) for host in self._others
        ]
        return transfers + [self._send(own, host) for host in self._others]

    def exchange(self, outgoing: Sequence[torch.Tensor], incoming: Sequence[torch.Tensor]) -> None:
        """Send ``outgoing[h]`` to host h and receive ``incoming[h]`` from it, for all other hosts."""
        transfers = [self._receive(incoming[host], host) for host in self._others]
        transfers += [self._send(outgoing[host], host) for host in self._others]
        self._finish(transfers)

    def broadcast(self, flat: torch.Tensor, root: int) -> None:
        """Copy `flat` from host `root` to all: a binomial tree."""
        place = (self.host - root) % self.hosts
        reach = 1
        while reach < self.hosts:
            if place < reach and place + reach < self.hosts:
                self._finish([self._send(flat, (place + reach + root) % self.hosts)])
            elif reach <= place < 2 * reach:
                self._finish([self._receive(flat, (place - reach + root) % self.hosts)])
            reach *= 2

    def _send(self, tensor: torch.Tensor, host: int) -> _Transfer:
        return _Transfer(self._gloo, tensor, self._ranks[host], out=True)

    def _receive(self, tensor: torch.Tensor, host: int) -> _Transfer:
        return _Transfer(self._gloo, tensor, self._ranks[host], out=False)

    def _finish(self, transfers: Sequence[_Transfer]) -> None:
        for transfer in transfers:
            transfer.wait(self.timeout)


class _Transfer:
    """A message under way."""

    def __init__(self, gloo: Any, tensor: torch.Tensor, rank: int, *, out: bool) -> None:
        self._rank = rank
        self._work: dist.Work | None = None
        if tensor.numel():
            try:
                self._work = (gloo.send if out else gloo.recv)([tensor], rank, _TAG)
            except RuntimeError as error:
                raise Unreachable(rank, _first_line(error)) from error

    def wait(self, timeout: float) -> None:
        if self._work is None:
            return
        try:
            self._work.wait(timedelta(seconds=timeout))
        except RuntimeError as error:
            raise Unreachable(self._rank, _first_line(error)) from error


def _first_line(error: RuntimeError) -> str:
    return str(error).partition("\n")[0].rsplit("] ", 1)[-1]
