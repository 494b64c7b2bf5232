"""The collectives that the engine needs, over any process group.

gloo's reduce-scatter clones its input and runs a whole all-reduce, and its all-gather copies twice, so
over gloo both are sent point to point instead: every rank sends each peer that peer's part, and
receives its own. That moves (N-1)/N of the buffer per rank, as a ring does, without a copy
(large buffers gain: benchmarks/wire). Backends with in-place forms of their own (paceline, NCCL) use those, and so
does gloo for memory of a GPU, which it can reduce and gather but not send.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from paceline._core.step_state import step_state
from paceline.errors import PacelineError, SyncError, UsageError

__all__ = ["Comm", "PendingCollective"]

_FIRST_TAG = 71_000
"""Tags of our own messages start here, so that a program's own send and recv never meet them."""

_GLOO_LANES = 2
"""Collectives that one gloo group runs at a time: it has two worker threads with connections of their own."""

_SPLIT_NBYTES = 4 << 20
"""All-reduces of at least this many bytes are split over the lanes."""

# [Note: abandoned messages]
# A model can go away with messages under way: an exception between backward and step, a step given up
# half-way. gloo stops reading a connection for good when a message arrives whose receive was freed, and a
# receive left posted would take the next model's message of the same tag. So messages live until they are
# waited for or their group ends, and each Wire has tags of its own.

# These have new names since torch 2.13, and the old ones warn.
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)

_under_way: WeakKeyDictionary[dist.ProcessGroup, set[dist.Work]] = WeakKeyDictionary()
_next_tag: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()


@contextlib.contextmanager
def _named_loss() -> Iterator[None]:
    """Turn a process group's error into one that says what it means: some peer is gone or silent."""
    try:
        yield
    except PacelineError:
        raise  # it names the rank already
    except RuntimeError as error:
        reason = str(error).partition("\n")[0].rsplit("] ", 1)[-1]
        raise SyncError(
            f"another rank ended or stopped answering during this step ({reason})",
            remedy="look at the output of the other ranks: the first error there is the cause",
        ) from error


class PendingCollective:
    """A collective under way.

    Args:
        works: what to wait for, in order.
        finish: what completes the result once all have arrived.
        under_way: holds works that must live until they are waited for.

    Attributes:
        ended: when it ended, in seconds of ``time.perf_counter()``: as the backend tells, or when `poll` saw it first;
            None: under way, or nobody knows.
    """

    def __init__(
        self,
        works: list[dist.Work],
        finish: Callable[[], None] | None = None,
        under_way: set[dist.Work] | None = None,
    ) -> None:
        self._works, self._finish, self._under_way = works, finish, under_way
        self.ended: float | None = None

    def poll(self) -> None:
        """Take note of it if it has ended, as far as the backend tells: gloo does for collectives only.

        A callback would know the moment, but runs in a thread of the backend, which takes Python's lock, and time, from
        the one that computes.
        """
        if self.ended is None and all(work.is_completed() for work in self._works):
            self.ended = self._told() or time.perf_counter()

    def _told(self) -> float | None:
        """Return when the last of the works ended, None if some backend does not say."""
        ends = [getattr(work, "ended", None) for work in self._works]
        known = [end for end in ends if end is not None]
        return max(known) if known and len(known) == len(ends) else None

    def wait(self) -> None:
        """Block until the result is in place (on CUDA: until it is ordered on the current stream).

        Raises:
            SyncError: another rank ended, or did not answer within the process group's time-out.
        """
        with _named_loss():
            for work in self._works:
                work.wait()
        if self.ended is None:
            self.ended = self._told()
        if self._under_way is not None:
            self._under_way.difference_update(self._works)
        if self._finish is not None:
            self._finish()
        self._works, self._finish = [], None


class Comm:
    """A process group as the engine sees it; of size 1 without one.

    All ranks of a group make their wires in the same order: that is how they agree on tags.

    Args:
        group: the process group; None: the default group, or no communication where there is none.

    Raises:
        UsageError: it is no process group, as what torch gives to ranks that are not in one.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        if group is not None and not isinstance(group, dist.ProcessGroup):
            raise UsageError(
                f"group={group!r} is no process group that this process is in",
                remedy="pass one of torch.distributed, and only on its members",
            )
        alone = group is None and not (dist.is_available() and dist.is_initialized())
        self.group = None if alone else (group or dist.group.WORLD)
        self.rank = 0 if alone else dist.get_rank(self.group)
        self.size = 1 if alone else dist.get_world_size(self.group)
        self.backend = "none" if alone else str(dist.get_backend(self.group))
        self._in_place_parts = self.scatters_in_place(self.backend)
        self._under_way: set[dist.Work] = set()
        if self.group is not None:  # see [Note: abandoned messages]
            self._under_way = _under_way.setdefault(self.group, set())
            self._tag_reduce_scatter = self.reserve_tags(2)
            self._tag_all_gather = self._tag_reduce_scatter + 1

    @staticmethod
    def scatters_in_place(backend: str) -> bool:
        """Tell whether the backend's own reduce-scatter and all-gather work in place."""
        return backend == "paceline" or "nccl" in backend

    def _takes_parts(self, flat: torch.Tensor) -> bool:
        """Tell whether the backend's own reduce-scatter and all-gather are what is used for `flat`."""
        return self._in_place_parts or flat.device.type != "cpu"

    @property
    def ranks(self) -> frozenset[int]:
        """The ranks, as the world numbers them."""
        return frozenset([0] if self.group is None else dist.get_process_group_ranks(self.group))

    @property
    def stream_ordered(self) -> bool:
        """Whether calls run in the order in which they were made, on a stream: NCCL's."""
        return "nccl" in self.backend

    @property
    def peers(self) -> list[int]:
        """All other ranks, the next one first, so that no rank is everybody's first target."""
        return [(self.rank + distance) % self.size for distance in range(1, self.size)]

    def reserve_tags(self, count: int) -> int:
        """Return the first of `count` tags that nobody else uses; all ranks reserve in the same order."""
        if self.group is None:
            return _FIRST_TAG
        first = _next_tag.get(self.group, _FIRST_TAG)
        _next_tag[self.group] = first + count
        return first

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return uninitialised 1-D memory; where the group has some that it reduces in place, that."""
        offers = getattr(self.group, "supports_tensor_alloc", None)
        if self.group is not None and offers is not None and offers(device):
            return self.group.allocate_tensor(numel, dtype=dtype, device=device)  # type: ignore[attr-defined]
        return torch.empty(numel, dtype=dtype, device=device)

    def mesh(self, device: str) -> DeviceMesh:
        """Return the ranks as a mesh of one dimension, as FSDP2 asks for them; `device` is a type."""
        assert self.group is not None, "a world of one has no mesh"
        return DeviceMesh.from_group(self.group, device)

    def note_step(self, step: int) -> None:
        """Tell the other ranks, for their messages, which step this rank is in, where the group can."""
        note = getattr(self.group, "note_step", None)
        if note is not None:
            note(step)

    def all_reduce(self, flat: torch.Tensor, *, mean: bool = False) -> PendingCollective:
        """Start summing (or averaging) `flat` over all ranks, in place."""
        op = dist.ReduceOp.AVG if mean else dist.ReduceOp.SUM
        lanes = _GLOO_LANES if self.backend == "gloo" and flat.nbytes >= _SPLIT_NBYTES else 1
        with _named_loss():
            works = [
                dist.all_reduce(part, op=op, group=self.group, async_op=True) for part in flat.chunk(lanes)
            ]
        return PendingCollective([work for work in works if work is not None])

    def reduce_scatter(
        self, flat: torch.Tensor, into: torch.Tensor | None = None, *, mean: bool = False
    ) -> PendingCollective:
        """Start summing (or averaging) `flat` over all ranks; each rank ends with its own N-th of the result.

        Args:
            flat: the same size on all ranks, divisible by the number of ranks.
            into: where the result goes; None: this rank's own N-th of `flat`.
            mean: divide by the number of ranks.
        """
        parts = flat.chunk(self.size)
        own = parts[self.rank]
        result = own if into is None else into
        if self._takes_parts(flat):
            op = dist.ReduceOp.AVG if mean else dist.ReduceOp.SUM
            work = _reduce_scatter(result, flat, op=op, group=self.group, async_op=True)
            return PendingCollective([work] if work is not None else [])
        peers = self.peers
        inbox = own.new_empty(len(peers), own.numel())
        works = [self._receive(inbox[row], peer, self._tag_reduce_scatter) for row, peer in enumerate(peers)]
        works += [self._send(parts[peer], peer, self._tag_reduce_scatter) for peer in peers]

        def add_received() -> None:
            torch.add(own, inbox[0], out=result)
            for row in inbox[1:]:
                result.add_(row)
            if mean:
                result.div_(self.size)

        return PendingCollective(works, add_received, self._under_way)

    def post_part_receives(self, flat: torch.Tensor) -> list[dist.Work]:
        """Post the receives of an `all_gather` of `flat` ahead of time.

        A peer whose receive is posted already is sent to at once, without a round trip.
        """
        if self._takes_parts(flat):
            return []
        return self.post_row_receives(flat.view(self.size, -1), self._tag_all_gather)

    def all_gather(self, flat: torch.Tensor, expected: list[dist.Work] | None = None) -> PendingCollective:
        """Start filling `flat` on all ranks with each rank's own N-th of it, in place.

        Args:
            flat: the same size on all ranks, divisible by the number of ranks.
            expected: what `expect_parts(flat)` returned, where it was called.
        """
        rows = flat.view(self.size, -1)
        if self._takes_parts(flat):
            work = _all_gather(flat, rows[self.rank], group=self.group, async_op=True)
            return PendingCollective([work] if work is not None else [])
        return self.all_gather_rows(
            rows, self.post_part_receives(flat) if expected is None else expected, self._tag_all_gather
        )

    # ------------------------------------------------------------------ rows, one of each rank, at any time

    def post_row_receives(self, rows: torch.Tensor, tag: int) -> list[dist.Work]:
        """Post the receives of every other rank's row of `rows` [ranks, …]; none where calls order themselves."""
        return [] if self.stream_ordered else [self._receive(rows[peer], peer, tag) for peer in self.peers]

    def all_gather_rows(self, rows: torch.Tensor, expected: list[dist.Work], tag: int) -> PendingCollective:
        """Start sending this rank's row of `rows` to all others, whose rows come into the same place.

        Unlike a collective this may be called at any time, from any thread: messages are matched by `tag`.

        Args:
            rows: [ranks, …], the same shape on all ranks, contiguous.
            expected: what `expect_rows(rows, tag)` returned.
            tag: reserved for these rows.
        """
        own = rows[self.rank]
        if self.stream_ordered:
            work = _all_gather(rows.view(-1), own.view(-1), group=self.group, async_op=True)
            return PendingCollective([work] if work is not None else [])
        works = [*expected, *(self._send(own, peer, tag) for peer in self.peers)]
        return PendingCollective(works, under_way=self._under_way)

    def all_to_all_rows(
        self, rows: torch.Tensor, into: torch.Tensor, fill: Callable[[int], None], tag: int
    ) -> PendingCollective:
        """Start sending row r of `rows` to rank r; every other rank's row for this one comes into its row of `into`.

        Args:
            rows, into: [ranks, …], contiguous, the same shape on all ranks; this rank's own rows mean nothing.
            fill: makes a rank's row right before it is sent.
            tag: reserved for these rows; messages are matched by it, as in `all_gather_rows`.
        """
        if self.stream_ordered:
            for peer in self.peers:
                fill(peer)
            work = dist.all_to_all_single(into, rows, group=self.group, async_op=True)
            return PendingCollective([work] if work is not None else [])
        works = self.post_row_receives(into, tag)
        for peer in self.peers:
            fill(peer)
            works.append(self._send(rows[peer], peer, tag))
        return PendingCollective(works, under_way=self._under_way)

    def combine_norms(self, norm: torch.Tensor, norm_type: float) -> torch.Tensor:
        """Return the p-norm of everything from the p-norm `norm` of each rank's part, in float64; blocks."""
        total = norm.to(torch.float64)
        op = dist.ReduceOp.MAX if norm_type == math.inf else dist.ReduceOp.SUM
        if norm_type != math.inf:
            total = total**norm_type
        with _named_loss(), step_state.waiting_for_peers():
            dist.all_reduce(total, op=op, group=self.group)
        return total if norm_type == math.inf else total ** (1 / norm_type)

    def broadcast(self, flat: torch.Tensor, source: int = 0) -> None:
        """Copy `flat` from the group's rank `source` to all ranks; blocks."""
        if self.size > 1:
            with step_state.waiting_for_peers():
                dist.broadcast(flat, group=self.group, group_src=source)

    # ------------------------------------------------------------------ numbers by which the engine decides

    def broadcast_ints(self, numbers: list[list[int]], device: torch.device) -> list[list[int]]:
        """Return rank 0's `numbers`, rows of equal length, on all ranks; blocks for one broadcast."""
        agreed = torch.tensor(numbers, dtype=torch.int64, device=device)
        self.broadcast(agreed)
        return agreed.tolist()

    def gather_objects(self, mine: Any) -> list[Any]:
        """Return every rank's `mine`, by rank; blocks."""
        every: list[Any] = [None] * self.size
        dist.all_gather_object(every, mine, group=self.group)
        return every

    def write_status(self, numbers: list[float], place: torch.Tensor) -> None:
        """Put the numbers of this rank's ledger into `place`, from where they are summed over ranks.

        On a GPU without waiting for what it is doing: the copy is queued behind that.
        """
        mine = torch.tensor(numbers, dtype=place.dtype, pin_memory=place.is_cuda)
        place.copy_(mine, non_blocking=True)

    def read_status(self, summed: torch.Tensor) -> list[float]:
        """Return the numbers of the ledger, summed over ranks."""
        return summed.tolist()

    def _send(self, tensor: torch.Tensor, peer: int, tag: int) -> dist.Work:
        with _named_loss():
            return self._hold(dist.isend(tensor, group=self.group, tag=tag, group_dst=peer))

    def _receive(self, tensor: torch.Tensor, peer: int, tag: int) -> dist.Work:
        with _named_loss():
            return self._hold(dist.irecv(tensor, group=self.group, tag=tag, group_src=peer))

    def _hold(self, work: dist.Work | None) -> dist.Work:
        """Keep `work` alive; see [Note: abandoned messages]."""
        assert work is not None, "this rank belongs to the group"
        self._under_way.add(work)
        return work
