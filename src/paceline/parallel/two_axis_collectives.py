"""The engine's collectives on a device mesh of two axes: sharded along the second, replicated along the first.

    reduce-scatter   inside the shard axis, then this rank's part is all-reduced along the replicate axis
    all-gather       inside the shard axis only: every replica has all parts
    everything else  over all ranks of the mesh: the round status, weights, broadcasts

With the shard axis inside a host and the replicate axis between hosts, the link between hosts carries 2(R-1)/R of one
part instead of most of the buffer.

[Note: the second stage] Backward does not wait for the first stage of a bucket. A thread waits for it and launches the
second, one bucket after the other (on a GPU with NCCL: a stream). So the order of calls on the replicate axis is that
of the buckets, on all ranks; models on one mesh share the thread. The program may use the mesh's own group at the same
time, from its own thread: the second stage therefore has a separate group of the same ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from paceline.errors import UsageError
from paceline.parallel.compression.exchange_thread import ExchangeThread
from paceline.parallel.gradient_collectives import Comm, PendingCollective
from paceline.parallel.strategy import Sync
from paceline.world.mesh_groups import check_mesh, group_of_mesh, separate_group

__all__ = ["TwoAxisComm", "comm_of"]

_threads: WeakKeyDictionary[dist.ProcessGroup, ExchangeThread] = WeakKeyDictionary()
"""What launches the second stages on a group."""


def comm_of(group: dist.ProcessGroup | DeviceMesh | Comm | None, plan: Sync | None) -> Comm:
    """Return the ranks of a group or a mesh, as a plan uses them.

    Args:
        group: the ranks. Of a mesh of two axes, plans that shard replicate along the first and shard along the second;
            for other plans all its ranks are replicas.
        plan: how gradients are synchronised; None: it may change.

    Raises:
        UsageError: `group` is no group or mesh of this process, or the plan compresses gradients on two axes.
    """
    if isinstance(group, Comm):
        return group
    if not isinstance(group, DeviceMesh):
        return Comm(group)
    check_mesh(group)
    if group.ndim == 1 or plan is None or plan.shard == "none" or group.shape[0] == 1:
        return Comm(group_of_mesh(group))
    if plan.compression is not None:
        shape = " × ".join(map(str, group.shape))
        raise UsageError(
            f"compression of sharded gradients on a device mesh of two axes ({shape}): {plan.compression}",
            remedy="leave out the compression, or pass one axis of the mesh or no group",
        )
    return TwoAxisComm(group)


class TwoAxisComm(Comm):
    """The ranks of a mesh [replicas, shards].

    Args:
        mesh: of two axes; all its ranks construct this.

    Attributes:
        shard_axis: the ranks that hold the parts of one replica.

    Raises:
        UsageError: a row of the mesh is not in ascending order, as torch's groups are.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        rows, place = mesh.mesh.tolist(), mesh.get_coordinate()
        assert place is not None, "this process is in the mesh"
        if any(row != sorted(row) for row in rows):
            raise UsageError(
                f"the rows of the device mesh {rows} are not in ascending order, in which torch numbers the ranks of a "
                "group: replicas would hold different parts",
                remedy=f"pass a mesh of {[sorted(row) for row in rows]}",
            )
        super().__init__(group_of_mesh(mesh))
        self._ranks = mesh.mesh.clone()
        self._replicate_group = mesh.get_group(0)
        self._shard_axis = Comm(mesh.get_group(1))
        self._replica = place[0]

    @cached_property
    def _replicas(self) -> Comm:
        """The ranks with the same part, for the second stage only; the first use is on all of them."""
        ordered = self.stream_ordered and self.shard_axis.stream_ordered
        return Comm(self._replicate_group if ordered else separate_group(self._replicate_group))

    # ------------------------------------------------------------------ the two axes

    @property
    def shards(self) -> int:
        """The number of parts: ranks along the shard axis."""
        return self._shard_axis.size

    @property
    def shard(self) -> int:
        """This rank's part: its place along the shard axis."""
        return self._shard_axis.rank

    @property
    def replica(self) -> int:
        """Which of the copies of its part this rank holds: its place along the replicate axis."""
        return self._replica

    @property
    def shard_axis(self) -> Comm:
        """The ranks along the shard axis."""
        return self._shard_axis

    @property
    def layout(self) -> str:
        """The mesh, for a message."""
        return f"mesh {self._ranks.tolist()}"

    @property
    def scatter_share(self) -> float:
        """The share of a buffer that this rank sends in `reduce_scatter`."""
        replicas = len(self._ranks)
        return (self.shards - 1) / self.shards + 2 * (replicas - 1) / (replicas * self.shards)

    def mesh(self, device: str) -> DeviceMesh:
        """Return the ranks as a mesh [replicas, shards], with names as in `Comm.mesh`; `device` is a type."""
        assert self.group is not None, "a mesh has groups"
        groups, (name,) = [self._replicate_group, self._shard_axis.group], self._mesh_names()
        names = (f"replicate-{name}", name)
        return DeviceMesh.from_group(groups, device, self._ranks, mesh_dim_names=names)

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return uninitialised 1-D memory, from the shard axis where it has memory that it reduces in place."""
        return self._shard_axis.allocate(numel, dtype, device)

    # ------------------------------------------------------------------ collectives

    def reduce_scatter(
        self, flat: torch.Tensor, into: torch.Tensor | None = None, *, mean: bool = False
    ) -> PendingCollective:
        """Start summing (or averaging) `flat` over all ranks; each rank ends with its part of the result.

        All replicas of a part end with the same bits. All ranks call this in the same order.

        Args:
            flat: the same size on all ranks, divisible by the number of shards.
            into: where the result goes; None: this rank's part of `flat`.
            mean: divide by the number of ranks.
        """
        first = self._shard_axis.reduce_scatter(flat, into, mean=mean)
        result = flat.chunk(self.shards)[self.shard] if into is None else into
        replicas = self._replicas
        assert replicas.group is not None, "a mesh has groups"
        thread = _threads.get(replicas.group)
        if thread is None:
            thread = _threads[replicas.group] = ExchangeThread(flat.device, on_stream=self.queues(flat))
        thread.keep(flat)
        return _TwoStages(thread, first, lambda: replicas.all_reduce(result, mean=mean))

    def post_part_receives(self, flat: torch.Tensor) -> list[dist.Work]:
        """Post the receives of an `all_gather` of `flat` early."""
        return self._shard_axis.post_part_receives(flat)

    def all_gather(self, flat: torch.Tensor, posted: list[dist.Work] | None = None) -> PendingCollective:
        """Start filling `flat` with the parts of this rank's replica, in place.

        Args:
            flat: the same size on all ranks, divisible by the number of shards.
            posted: the receives, if `post_part_receives(flat)` was called.
        """
        return self._shard_axis.all_gather(flat, posted)

    def combine_norms(self, norm: torch.Tensor, norm_type: float) -> torch.Tensor:
        """Return the p-norm over all parts in float64, each counted once, from that of this rank's part."""
        return self._shard_axis.combine_norms(norm, norm_type)


class _TwoStages(PendingCollective):
    """A collective whose second stage is launched when the first is done; see [Note: the second stage].

    Args:
        thread: launches it.
        first: the first stage.
        second: launches the second stage.
    """

    def __init__(
        self, thread: ExchangeThread, first: PendingCollective, second: Callable[[], PendingCollective]
    ) -> None:
        super().__init__([])
        self._second: list[PendingCollective] = []
        launched = self._second

        def launch() -> None:
            first.wait()
            launched.append(second())

        self._launched = thread.submit(launch)

    def poll(self) -> None:
        """Set `ended` if the backend reports completion of the second stage."""
        for second in self._second:
            second.poll()
            self.ended = second.ended

    def wait(self) -> None:
        """Block until the result is in place (on CUDA: until it is ordered on the current stream).

        Raises:
            SyncError: another rank ended, or did not answer within the process group's time-out.
        """
        self._launched.wait()
        for second in self._second:
            second.wait()
            self.ended = second.ended
