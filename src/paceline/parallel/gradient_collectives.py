"""The collectives that the engine needs, over any process group.

gloo's reduce-scatter clones its input and runs a whole all-reduce, and its all-gather copies twice. So on gloo both are
sent point to point: every rank sends each peer that peer's part, and receives its own. That moves (N-1)/N of the buffer
per rank, as a ring does, without a copy (large buffers gain: benchmarks/wire). Backends with in-place forms (paceline,
NCCL) use those, and so does gloo for GPU memory, which it can reduce and gather but not send.

[Note: abandoned messages] A model can be deleted with messages pending: after an exception between backward and step,
or a step given up half-way. gloo stops reading a connection for good when a message arrives whose receive was freed,
and a posted receive would take the next model's message of the same tag. So messages live until they are waited for or
their group ends, and each `Comm` has its own tags.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from array import array
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from paceline._core.step_state import step_state
from paceline.errors import PacelineError, SyncError, UsageError
from paceline.parallel.part_exchange import LOW_PRECISION, PartSum
from paceline.world.group_devices import backend_name, group_device, queues_on_streams
from paceline.world.value_collectives import broadcast_value, gather_values

__all__ = ["Comm", "PendingCollective", "broadcast_tensors"]

_FIRST_TAG = 71_000
"""First tag of the engine's messages, out of the way of a program's own send and recv."""

_GLOO_LANES = 2
"""Collectives that one gloo group runs at a time: it has two worker threads, each with its own connections."""

_SPLIT_NBYTES = 4 << 20
"""All-reduces of at least this many bytes are split over the lanes."""

# These have new names since torch 2.13, and the old ones warn.
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)

_pending_works: WeakKeyDictionary[dist.ProcessGroup, set[dist.Work]] = WeakKeyDictionary()
_next_tag: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()
_mesh_names: WeakKeyDictionary[dist.ProcessGroup, str] = WeakKeyDictionary()
_mesh_numbers = itertools.count()


@contextlib.contextmanager
def _peer_errors() -> Iterator[None]:
    """Turn a process group's error into a SyncError that says what it means: a peer is gone or silent."""
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
    """A collective in flight.

    Args:
        works: what to wait for, in order.
        finish: completes the result once all works are done.
        held: set of works to keep alive; these are removed from it after the wait.

    Attributes:
        ended: when it completed, in seconds of ``time.perf_counter()``: as the backend reports, or when `poll` saw it
            first; None while pending or if not known.
    """

    def __init__(
        self,
        works: list[dist.Work],
        finish: Callable[[], None] | None = None,
        held: set[dist.Work] | None = None,
    ) -> None:
        self._works, self._finish, self._held = works, finish, held
        self.ended: float | None = None

    def poll(self) -> None:
        """Set `ended` if the backend reports completion (gloo does so for collectives only).

        A callback would have the exact time, but it runs in a thread of the backend, which competes for the GIL.
        """
        if self.ended is None and all(work.is_completed() for work in self._works):
            self.ended = self._reported_end() or time.perf_counter()

    def _reported_end(self) -> float | None:
        """Return when the last work ended, None if a backend does not report it."""
        ends = [getattr(work, "ended", None) for work in self._works]
        known = [end for end in ends if end is not None]
        return max(known) if known and len(known) == len(ends) else None

    def wait(self) -> None:
        """Block until the result is in place (on CUDA: until it is ordered on the current stream).

        Raises:
            SyncError: another rank ended, or did not answer within the process group's time-out.
        """
        with _peer_errors():
            for work in self._works:
                work.wait()
        if self.ended is None:
            self.ended = self._reported_end()
        if self._held is not None:
            self._held.difference_update(self._works)
        if self._finish is not None:
            self._finish()
        self._works, self._finish = [], None


class Comm:
    """A process group as the engine uses it; of size 1 without one.

    All ranks of a group create their `Comm`s in the same order, so that they agree on tags.

    Args:
        group: the process group; None: the default group, or no communication if there is none.

    Attributes:
        pending: messages that are kept alive; see [Note: abandoned messages].

    Raises:
        UsageError: `group` is no process group, such as torch returns to ranks outside a new group.
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
        self.backend = "none" if alone else backend_name(self.group)
        self._in_place_parts = self.scatters_in_place(self.backend)
        self._queues = queues_on_streams(self.backend)
        self.pending: set[dist.Work] = set()
        if self.group is not None:  # see [Note: abandoned messages]
            self.pending = _pending_works.setdefault(self.group, set())
            self._tag_reduce_scatter = self.reserve_tags(2)
            self._tag_all_gather = self._tag_reduce_scatter + 1

    @staticmethod
    def scatters_in_place(backend: str) -> bool:
        """Return whether the backend's reduce-scatter and all-gather work in place."""
        return backend == "paceline" or queues_on_streams(backend)

    def _by_backend(self, flat: torch.Tensor) -> bool:
        """Return whether `flat` is scattered and gathered by the backend rather than point to point."""
        return self._in_place_parts or flat.device.type != "cpu"

    @property
    def shards(self) -> int:
        """The number of parts into which `reduce_scatter` cuts a buffer."""
        return self.size

    @property
    def shard(self) -> int:
        """This rank's part in `reduce_scatter` and `all_gather`."""
        return self.rank

    @property
    def replica(self) -> int:
        """Which of the copies of its part this rank holds; 0: there is only one, or it is the first."""
        return 0

    @property
    def shard_axis(self) -> Comm:
        """The ranks that hold the parts of one whole."""
        return self

    @property
    def scatter_share(self) -> float:
        """The share of a buffer that this rank sends in `reduce_scatter`."""
        return (self.size - 1) / self.size

    @property
    def layout(self) -> str:
        """How the ranks are arranged, for a message."""
        return f"{self.size} ranks"

    @property
    def ranks(self) -> frozenset[int]:
        """The members' ranks in the default group."""
        return frozenset([0] if self.group is None else dist.get_process_group_ranks(self.group))

    @property
    def stream_ordered(self) -> bool:
        """Whether calls run on a stream in the order in which they were made (NCCL, XCCL), for data of accelerators."""
        return self._queues

    def queues(self, tensor: torch.Tensor) -> bool:
        """Return whether calls with `tensor` run on a stream. A group may serve the CPU as well, by another backend."""
        return self._queues and tensor.device.type != "cpu"

    def divides_before_sum(self, tensor: torch.Tensor) -> bool:
        """Return whether a mean of `tensor` may divide each rank's numbers before they are added, as NCCL does."""
        return self.queues(tensor)

    @property
    def sums_along_tree(self) -> bool:
        """Whether the group adds along the tree of `paceline._core.summation_tree` over the ranks."""
        return self.size == 1 or getattr(self.group, "sums_along_tree", False)

    @property
    def peers(self) -> list[int]:
        """All other ranks, the next one first, so that no rank is everyone's first target."""
        return [(self.rank + distance) % self.size for distance in range(1, self.size)]

    def reserve_tags(self, count: int) -> int:
        """Return the first of `count` unused tags; all ranks reserve in the same order."""
        if self.group is None:
            return _FIRST_TAG
        first = _next_tag.get(self.group, _FIRST_TAG)
        _next_tag[self.group] = first + count
        return first

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return uninitialised 1-D memory, from the group where it has memory that it reduces in place."""
        offers = getattr(self.group, "supports_tensor_alloc", None)
        if self.group is not None and offers is not None and offers(device):
            return self.group.allocate_tensor(numel, dtype=dtype, device=device)  # type: ignore[attr-defined]
        return torch.empty(numel, dtype=dtype, device=device)

    def mesh(self, device: str) -> DeviceMesh:
        """Return the ranks as a one-dimensional mesh, which FSDP2 requires; `device` is a type.

        Its dimension has a name per group: torch caches meshes inside results of DTensor operations and takes meshes
        of the same ranks and names for equal, so a model would otherwise communicate over a group of an earlier model,
        or of an earlier world.
        """
        assert self.group is not None, "a world of one has no mesh"
        return DeviceMesh.from_group(self.group, device, mesh_dim_names=self._mesh_names())

    def _mesh_names(self) -> tuple[str]:
        assert self.group is not None, "a world of one has no mesh"
        return (_mesh_names.setdefault(self.group, f"data-{next(_mesh_numbers)}"),)

    def note_step(self, step: int) -> None:
        """Set the step that a rank's error messages name, where the group supports that."""
        note = getattr(self.group, "note_step", None)
        if note is not None:
            note(step)

    # ------------------------------------------------------------------ collectives on a whole buffer

    def all_reduce(self, flat: torch.Tensor, *, mean: bool = False) -> PendingCollective:
        """Start summing (or averaging) `flat` over all ranks, in place."""
        if self.size == 1:
            return PendingCollective([])
        op = self._operation(flat, mean)
        lanes = _GLOO_LANES if self.backend == "gloo" and flat.nbytes >= _SPLIT_NBYTES else 1
        with _peer_errors():
            works = [
                dist.all_reduce(part, op=op, group=self.group, async_op=True) for part in flat.chunk(lanes)
            ]
        return PendingCollective([work for work in works if work is not None])

    def _operation(self, flat: torch.Tensor, mean: bool) -> dist.ReduceOp.RedOpType:
        """Return the reduction of `flat`, which is divided already where the sum over ranks could overflow."""
        if mean and flat.dtype == torch.float16:
            flat.div_(self.size)
            return dist.ReduceOp.SUM
        return dist.ReduceOp.AVG if mean else dist.ReduceOp.SUM

    def reduce_scatter(
        self, flat: torch.Tensor, into: torch.Tensor | None = None, *, mean: bool = False
    ) -> PendingCollective:
        """Start summing (or averaging) `flat` over all ranks; each rank ends with its N-th of the result.

        Args:
            flat: the same size on all ranks, divisible by the number of ranks.
            into: where the result goes; None: this rank's N-th of `flat`.
            mean: divide by the number of ranks.
        """
        parts = flat.chunk(self.size)
        own = parts[self.rank]
        result = own if into is None else into
        if (
            self._queues and flat.dtype in LOW_PRECISION and self.size > 2
        ):  # which would round every partial sum
            rows = torch.empty_like(flat)
            work = dist.all_to_all_single(rows, flat, group=self.group, async_op=True)
            others = [row for rank, row in enumerate(rows.chunk(self.size)) if rank != self.rank]
            total = PartSum(own, result, received=others)
            works = [work] if work is not None else []
            return PendingCollective(works, lambda: total.add(self.size if mean else 1))
        if self._by_backend(flat):
            op = self._operation(flat, mean)
            work = _reduce_scatter(result, flat, op=op, group=self.group, async_op=True)
            return PendingCollective([work] if work is not None else [])
        peers, tag = self.peers, self._tag_reduce_scatter
        total = PartSum(own, result, len(peers))
        works = []
        for source, peer in enumerate(peers):
            works += total.receive(source, lambda piece, peer=peer: self.receive(piece, peer, tag))
        for peer in peers:
            works += total.send(parts[peer], lambda piece, peer=peer: self.send(piece, peer, tag))
        return PendingCollective(works, lambda: total.add(self.size if mean else 1), self.pending)

    def post_part_receives(self, flat: torch.Tensor) -> list[dist.Work]:
        """Post the receives of an `all_gather` of `flat` early, which saves its senders a round trip."""
        if self._by_backend(flat):
            return []
        return self.post_row_receives(flat.view(self.size, -1), self._tag_all_gather)

    def all_gather(self, flat: torch.Tensor, posted: list[dist.Work] | None = None) -> PendingCollective:
        """Start filling `flat` on all ranks with each rank's N-th of it, in place.

        Args:
            flat: the same size on all ranks, divisible by the number of ranks.
            posted: the receives, if `post_part_receives(flat)` was called.
        """
        rows = flat.view(self.size, -1)
        if self._by_backend(flat):
            work = _all_gather(flat, rows[self.rank], group=self.group, async_op=True)
            return PendingCollective([work] if work is not None else [])
        receives = self.post_part_receives(flat) if posted is None else posted
        return self.all_gather_rows(rows, receives, self._tag_all_gather)

    # ------------------------------------------------------------------ rows, one per rank, at any time

    def post_row_receives(self, rows: torch.Tensor, tag: int) -> list[dist.Work]:
        """Post the receives of every other rank's row of `rows` [ranks, …]; none if calls are stream-ordered."""
        return [] if self.queues(rows) else [self.receive(rows[peer], peer, tag) for peer in self.peers]

    def all_gather_rows(self, rows: torch.Tensor, posted: list[dist.Work], tag: int) -> PendingCollective:
        """Start sending this rank's row of `rows` to all others, whose rows arrive in the same tensor.

        Unlike a collective this may be called at any time, from any thread: messages are matched by `tag`.

        Args:
            rows: [ranks, …], the same shape on all ranks, contiguous.
            posted: the receives that `post_row_receives(rows, tag)` returned.
            tag: reserved for these rows.
        """
        own = rows[self.rank]
        if self.queues(rows):
            work = _all_gather(rows.view(-1), own.view(-1), group=self.group, async_op=True)
            return PendingCollective([work] if work is not None else [])
        works = [*posted, *(self.send(own, peer, tag) for peer in self.peers)]
        return PendingCollective(works, held=self.pending)

    def all_to_all_rows(
        self, rows: torch.Tensor, into: torch.Tensor, fill: Callable[[int], None], tag: int
    ) -> PendingCollective:
        """Start sending row r of `rows` to rank r; the row from rank r arrives in row r of `into`.

        Args:
            rows: [ranks, …], contiguous, the same shape on all ranks; this rank's row is not used.
            into: as `rows`.
            fill: writes a rank's row right before it is sent.
            tag: reserved for these rows; messages are matched by it, as in `all_gather_rows`.
        """
        if self.queues(rows):
            for peer in self.peers:
                fill(peer)
            work = dist.all_to_all_single(into, rows, group=self.group, async_op=True)
            return PendingCollective([work] if work is not None else [])
        works = self.post_row_receives(into, tag)
        for peer in self.peers:
            fill(peer)
            works.append(self.send(rows[peer], peer, tag))
        return PendingCollective(works, held=self.pending)

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> dist.Work:
        """Start sending `tensor` to rank `peer`; `pending` keeps the message alive."""
        with _peer_errors():
            return self._hold(dist.isend(tensor, group=self.group, tag=tag, group_dst=peer))

    def receive(self, tensor: torch.Tensor, peer: int, tag: int) -> dist.Work:
        """Start receiving `tensor` from rank `peer`; `pending` keeps the message alive."""
        with _peer_errors():
            return self._hold(dist.irecv(tensor, group=self.group, tag=tag, group_src=peer))

    def _hold(self, work: dist.Work | None) -> dist.Work:
        """Keep `work` alive; see [Note: abandoned messages]."""
        assert work is not None, "this rank belongs to the group"
        self.pending.add(work)
        return work

    # ------------------------------------------------------------------ blocking calls

    def combine_norms(self, norm: torch.Tensor, norm_type: float) -> torch.Tensor:
        """Return the p-norm over all ranks' parts in float64, from the p-norm `norm` of this rank's part."""
        total = norm.to(group_device(self.group, norm.device), torch.float64)
        op = dist.ReduceOp.MAX if norm_type == math.inf else dist.ReduceOp.SUM
        if norm_type != math.inf:
            total = total**norm_type
        with _peer_errors(), step_state.waiting_for_peers():
            dist.all_reduce(total, op=op, group=self.group)
        return (total if norm_type == math.inf else total ** (1 / norm_type)).to(norm.device)

    def broadcast(self, flat: torch.Tensor, source: int = 0) -> None:
        """Copy `flat` from the group's rank `source` to all ranks."""
        if self.size > 1:
            with step_state.waiting_for_peers():
                dist.broadcast(flat, group=self.group, group_src=source)

    def broadcast_ints(self, numbers: list[list[int]], device: torch.device) -> list[list[int]]:
        """Return rank 0's `numbers`, rows of equal length, on all ranks."""
        agreed = torch.tensor(numbers, dtype=torch.int64, device=group_device(self.group, device))
        self.broadcast(agreed)
        return agreed.tolist()

    def largest(self, number: int, device: torch.device) -> int:
        """Return the largest `number` of any rank."""
        if self.size == 1:
            return number
        agreed = torch.tensor(number, dtype=torch.int64, device=group_device(self.group, device))
        with _peer_errors(), step_state.waiting_for_peers():
            dist.all_reduce(agreed, op=dist.ReduceOp.MAX, group=self.group)
        return int(agreed)

    def gather_values(self, mine: Any) -> list[Any]:
        """Return every rank's `mine`, by rank: plain values and tensors."""
        return gather_values(mine, self.group)

    def broadcast_value(self, value: Any, source: int) -> Any:
        """Return the value of rank `source` on all ranks: plain values and tensors."""
        return broadcast_value(value, source, self.group)

    # ------------------------------------------------------------------ the round status

    def write_status(self, numbers: list[float], place: torch.Tensor, staging: torch.Tensor) -> None:
        """Write this rank's status vector to `place`; on an accelerator without waiting for it.

        Args:
            numbers: the vector.
            place: where the collective reads it.
            staging: memory of the host, like `place`, that no copy reads any more.
        """
        mine = torch.frombuffer(array("d", numbers), dtype=torch.float64)
        place.copy_(mine if place.device.type == "cpu" else staging.copy_(mine), non_blocking=True)

    def read_status(self, summed: torch.Tensor) -> list[float]:
        """Return the status vector, summed over ranks."""
        return summed.tolist()


def broadcast_tensors(
    comm: Comm, tensors: Iterable[torch.Tensor], *, source: int = 0, cap_nbytes: int = 64 << 20
) -> None:
    """Copy the values of rank `source` to all ranks, many tensors per message.

    Args:
        comm: the ranks.
        tensors: the same shapes and dtypes in the same order on all ranks; written in place.
        source: the rank to copy from.
        cap_nbytes: largest message, unless a single tensor is larger.
    """
    if comm.size == 1:
        return
    kinds: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor.detach())
    for same_kind in kinds.values():
        batch, nbytes = [], 0
        for tensor in same_kind:
            if batch and nbytes + tensor.nbytes > cap_nbytes:
                _broadcast_packed(comm, batch, source)
                batch, nbytes = [], 0
            batch.append(tensor)
            nbytes += tensor.nbytes
        _broadcast_packed(comm, batch, source)


def _broadcast_packed(comm: Comm, tensors: list[torch.Tensor], source: int) -> None:
    """Send the tensors as bytes, since gloo refuses some dtypes."""
    packed = torch.cat([tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in tensors])
    comm.broadcast(packed, source)
    if comm.rank == source:
        return
    for tensor, part in zip(tensors, packed.split([tensor.nbytes for tensor in tensors]), strict=True):
        # a copy starts at an aligned address
        tensor.copy_(part.clone().view(tensor.dtype).view(tensor.shape))
