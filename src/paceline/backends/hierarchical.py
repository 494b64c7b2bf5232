"""Collectives over several hosts: shared memory inside a host, the network between hosts.

An all-reduce over H hosts with L ranks each:

    1. inside every host, reduce-scatter: rank l of a host holds the host's sum of slice l
    2. between hosts, all-reduce of slice l among the ranks l of all hosts
    3. inside every host, all-gather

Per host 2(H-1)/H of the buffer goes out and in, however many ranks a host has; a ring over all N ranks
sends 2(N-1)/N. Where hosts have different numbers of ranks, the first rank of each carries everything.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace

import torch
import torch.distributed as dist

from paceline.backends.block_reduction import Reduction, reduction_of
from paceline.backends.inter_host import HostUnreachable, InterHostCollectives
from paceline.backends.op_signature import OpSignature
from paceline.backends.shm.control_block import SMALL_NBYTES, GroupFailure
from paceline.backends.shm.host_peers import PeerCard
from paceline.backends.shm.shm_collectives import ShmCollectives
from paceline.errors import CollectiveError

__all__ = ["HierarchicalCollectives"]

_ASK_SECONDS = 1.5
"""How long the word of a lost rank's own host is waited for, before the rank at the other end is blamed."""

_FAILURE_KEY = "failure"
_PART_NBYTES = 1 << 20
"""Bytes of a rank's slice that go over the network at a time, while the next ones are reduced inside the host."""

MAX = dist.ReduceOp.MAX


class HierarchicalCollectives:
    """The calls of a group over several hosts.

    Args:
        inside: the ranks of this host. between: the counterparts on other hosts.
        by_host: the cards of each host, in the order of the hosts. me: this rank's card.
        store: the group's: by it hosts tell each other of failures.
    """

    shares_memory = True

    def __init__(
        self,
        inside: ShmCollectives,
        between: InterHostCollectives,
        by_host: Sequence[Sequence[PeerCard]],
        me: PeerCard,
        store: dist.Store,
    ) -> None:
        self._inside, self._between, self._store, self._me = inside, between, store, me
        self._ranks = [[card.rank for card in cards] for cards in by_host]
        self._cards = {card.rank: card for cards in by_host for card in cards}
        self._even = len({len(cards) for cards in by_host}) == 1
        self._leads = inside.index == 0
        even_only = {"reduce_scatter", "all_gather"} if self._even else set()
        self.ops = frozenset({"barrier", "all_reduce", "broadcast"} | even_only)

    @property
    def timeout(self) -> float:
        """Seconds that a call waits for a rank."""
        return self._inside.timeout

    @timeout.setter
    def timeout(self, seconds: float) -> None:
        self._inside.timeout = self._between.timeout = seconds

    def barrier(self, call: OpSignature) -> None:
        """Return when all ranks have called."""
        with self._guarded():
            self._inside.barrier(call)
            if self._leads:
                self._reduce_between(torch.zeros(1, dtype=torch.uint8), reduction_of(MAX, torch.uint8), 1)
            self._inside.barrier(call)

    def all_reduce(self, call: OpSignature, tensor: torch.Tensor, how: Reduction, ranks: int) -> None:
        """Reduce `tensor` over all ranks, in place; a mean divides by `ranks`."""
        flat, rows = tensor.view(-1), self._inside.size
        body = flat.numel() // rows * rows if self._even and flat.nbytes > SMALL_NBYTES else 0
        with self._guarded():
            if body:
                self._all_reduce_slices(call, flat[:body], how, ranks)
            if body < flat.numel():
                self._all_reduce_by_leaders(replace(call, numel=flat.numel() - body), flat[body:], how, ranks)

    def _all_reduce_slices(self, call: OpSignature, flat: torch.Tensor, how: Reduction, ranks: int) -> None:
        """All-reduce a tensor that divides into one slice per rank of a host, part by part."""
        rows, mine, summing = self._inside.size, self._inside.index, how.as_sum()
        parts = [part.chunk(rows) for part in flat.split(_PART_NBYTES // flat.element_size() * rows)]

        def reduced() -> Iterator[torch.Tensor]:
            for slices in parts:
                told = replace(call, numel=slices[mine].numel())
                self._inside.reduce_scatter(told, slices[mine], slices, summing, ranks)
                yield slices[mine]

        for slices, own in zip(parts, self._between.all_reduce(reduced(), how, ranks), strict=True):
            told = replace(call, numel=own.numel()).moving("all_gather")
            self._inside.all_gather(told, slices, own)

    def _all_reduce_by_leaders(
        self, call: OpSignature, flat: torch.Tensor, how: Reduction, ranks: int
    ) -> None:
        """All-reduce through the first rank of every host: few bytes, or hosts of different size."""
        self._inside.reduce(call, flat, 0, how.as_sum(), ranks)
        if self._leads:
            self._reduce_between(flat, how, ranks)
        self._inside.broadcast(call.moving("broadcast", root=0), flat, 0)

    def _reduce_between(self, flat: torch.Tensor, how: Reduction, ranks: int) -> None:
        for _ in self._between.all_reduce(flat.split(_PART_NBYTES // flat.element_size()), how, ranks):
            pass

    def reduce_scatter(
        self,
        call: OpSignature,
        output: torch.Tensor,
        inputs: Sequence[torch.Tensor],
        how: Reduction,
        ranks: int,
    ) -> None:
        """Reduce ``inputs[r]`` over all ranks into the `output` of rank r."""
        host, summing = self._between.host, how.as_sum()
        sums = [torch.empty_like(output).view(-1) for _ in self._ranks]  # over this host, one per target host
        arrived = [torch.empty_like(each) for each in sums]
        with self._guarded():
            for mine, targets in zip(sums, self._ranks, strict=True):
                pieces = [inputs[rank].view(-1) for rank in targets]
                self._inside.reduce_scatter(call, mine, pieces, summing, ranks)
            self._between.exchange(sums, arrived)
            arrived[host] = sums[host]
            self._between.combine(arrived, output.view(-1), how, ranks)

    def all_gather(self, call: OpSignature, outputs: Sequence[torch.Tensor], tensor: torch.Tensor) -> None:
        """Copy the `tensor` of every rank r into ``outputs[r]`` on all ranks."""
        host, mine = self._between.host, self._inside.index
        column = [outputs[ranks[mine]].view(-1) for ranks in self._ranks]  # of the counterparts
        if column[host].data_ptr() != tensor.data_ptr():
            column[host].copy_(tensor.view(-1))
        with self._guarded():
            self._between.exchange([column[host]] * len(column), column)
            for ranks, piece in zip(self._ranks, column, strict=True):
                self._inside.all_gather(call, [outputs[rank] for rank in ranks], piece)

    def broadcast(self, call: OpSignature, tensor: torch.Tensor, root: int) -> None:
        """Copy `tensor` from rank `root` to all ranks."""
        source = next(host for host, ranks in enumerate(self._ranks) if root in ranks)
        here, mine = self._between.host == source, self._inside.index
        carriers = self._inside.size if self._even else 1
        flat = tensor.view(-1)
        length = -(-flat.numel() // carriers)
        slices = [flat[index * length : (index + 1) * length] for index in range(carriers)]
        with self._guarded():
            if here:
                at = self._ranks[source].index(root)
                self._inside.broadcast(replace(call, root=at), tensor, at)
            if mine < carriers:
                self._between.broadcast(slices[mine], source)
            if not here:
                for index, piece in enumerate(slices):
                    self._inside.broadcast(replace(call, numel=piece.numel(), root=index), piece, index)

    def give_up(self, error: BaseException) -> None:
        """Tell the others that this rank can't go on."""
        self._inside.give_up(error)
        failure = self._inside.board.failure()
        if failure is not None:
            self._tell(failure)

    def note_step(self, step: int) -> None:
        """Tell the other ranks which optimizer step this rank is in."""
        self._inside.note_step(step)

    def leave(self) -> None:
        """Have a call under way in another thread end soon, with an error."""
        self._inside.leave()
        self._between.abandon()

    def abandon(self, reason: CollectiveError) -> None:
        """Have a call under way in another thread raise `reason` once it waits inside this host, or gloo lets it go.

        gloo may not: of a send whose bytes are with a host that takes no more of them, it tells nobody that its
        connection has ended (``Pair::signalException``, April 2026).
        """
        self._inside.abandon(reason)

    def close(self) -> None:
        """Take leave."""
        self._inside.close()

    # Failures: seen inside this host, or told by another one.

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        """Have a failure inside this host known to the others, and one between hosts told with its cause."""
        try:
            yield
        except CollectiveError:
            failure = self._inside.board.failure()
            if failure is not None:
                self._tell(failure)
            self._between.abandon()
            raise
        except HostUnreachable as error:
            if self._inside.abandoned is not None:
                raise self._inside.abandoned from error
            failure = self._inside.board.failure() or self._hear() or self._blame(error)
            self._inside.board.fail(failure)
            self._between.abandon()
            raise self._inside.fail(failure) from error

    def _tell(self, failure: GroupFailure) -> None:
        with contextlib.suppress(RuntimeError):  # the store may have gone with the host that failed
            self._store.set(_FAILURE_KEY, json.dumps(asdict(failure)))

    def _hear(self) -> GroupFailure | None:
        """Return what another host tells of a failure, waiting a moment for it."""
        deadline = time.monotonic() + _ASK_SECONDS
        while time.monotonic() < deadline and self._inside.abandoned is None:
            try:
                if self._store.check([_FAILURE_KEY]):
                    return GroupFailure(**json.loads(self._store.get(_FAILURE_KEY)))
            except RuntimeError:
                return None
            if self._inside.someone_ended():
                return self._inside.board.failure()
            time.sleep(0.02)
        return None

    def _blame(self, error: HostUnreachable) -> GroupFailure:
        card = self._cards[error.rank]
        silent = "timed out" in str(error).lower() or "timeout" in str(error).lower()
        what = (
            f"did not answer within {self.timeout:g} s" if silent else f"can't be reached any more ({error})"
        )
        return GroupFailure(card.world_rank, card.name, -1, None, what, dead=not silent)
