"""`ReplicaCheck`: compares parameters that must be equal on all ranks now and then, off the critical path.

    step k·every     hash all compared tensors; start gathering one digest of them all, 8 bytes per rank
    the next step    compare; where ranks differ, gather one digest per tensor, of the same moment
                     → an error on all ranks, or parameters copied from one rank

This finds, and names, a bit that flipped in memory, an optimizer step that only one rank made, or code that changes
parameters on one rank, before these are averaged into every rank's gradients for weeks.

[Note: compared tensors] Parameters, frozen ones too, that every rank holds whole: all of every strategy but
full-shard, whose shards have no replica. Buffers only on demand: BatchNorm's statistics, for instance, differ per rank.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from paceline.errors import ReplicasDiverged, UsageError
from paceline.parallel.data_parallel import DataParallel, check_optimizer_owned
from paceline.parallel.ddp import DistributedDataParallel
from paceline.parallel.gradient_collectives import broadcast_tensors
from paceline.parallel.replica_digests import Divergence, find_divergence, mixed_digest, tensor_digest
from paceline.world.control_collectives import PendingRows, gather_rows, gather_rows_async, verify_same
from paceline.world.group_devices import group_device, queues_on_streams, served_backends

__all__ = ["ReplicaCheck"]

log = logging.getLogger("paceline.health")


class ReplicaCheck:
    """Compares the parameters of all ranks every so many optimizer steps, and names what differs and where.

    It replaces the engine's own comparison (see `replica_digests`). It hooks onto the optimizer and wraps nothing, and
    pauses where ranks are meant to differ (inside `LocalSGD` and its subclasses). Digests taken at one step are
    compared at the next, so no rank waits for them.

    Args:
        model: the wrapped model.
        optimizer: its optimizer: one of torch's, or a `ShardedOptimizer`.
        every: optimizer steps between two comparisons.
        repair: the rank whose parameters are copied to all where some differ, with a warning; None: raise.
        buffers: compare (and repair) buffers too, for models that keep them equal.

    Attributes:
        steps: number of optimizer steps.
        comparisons: number of comparisons.
        repairs: number of repairs.

    Raises:
        UsageError: `every` is less than 1, `repair` is not a rank, the model is not wrapped, or the optimizer
            belongs to another model.
        MismatchError: ranks have different settings.
        ReplicasDiverged: from ``optimizer.step()`` or `check`, on all ranks alike.

    Example:
        >>> check = ReplicaCheck(model, optim, every=200)
    """

    def __init__(
        self,
        model: DataParallel | DistributedDataParallel,
        optimizer: torch.optim.Optimizer,
        every: int = 200,
        *,
        repair: int | None = None,
        buffers: bool = False,
    ) -> None:
        if not isinstance(every, int) or every < 1:
            raise UsageError(f"every={every!r} is not a number of steps", remedy="pass 1 or more")
        check_optimizer_owned("ReplicaCheck", model, optimizer)
        comm = model.comm
        if repair is not None and not (isinstance(repair, int) and 0 <= repair < comm.size):
            raise UsageError(f"repair={repair!r} is not a rank", remedy=f"pass 0 to {comm.size - 1}, or None")
        settings = [f"every={every}", f"repair={repair}", f"buffers={buffers}"]
        verify_same(settings, "ReplicaCheck", comm.group)
        self.steps = self.comparisons = self.repairs = 0
        self._comm, self._engine, self._optimizer = comm, model.engine, optimizer
        self._every, self._repair = every, repair
        self._default_every, model.engine.replica_check_every = model.engine.replica_check_every, 0
        named = [(f"parameter {name!r}", param) for name, param in model.module.named_parameters()]
        if buffers:
            named += [(f"buffer {name!r}", buffer) for name, buffer in model.module.named_buffers()]
        self._compared = [(name, tensor) for name, tensor in named if not isinstance(tensor, DTensor)]
        self._pending: tuple[int, torch.Tensor, PendingRows] | None = None
        self._hook = optimizer.register_step_post_hook(self._after_step)

    @property
    def compared(self) -> int:
        """Number of compared tensors."""
        return len(self._compared)

    def remove(self) -> None:
        """Stop comparing."""
        self._hook.remove()
        self._pending = None
        self._engine.replica_check_every = self._default_every

    def check(self) -> None:
        """Compare now and wait for the result, for instance before a checkpoint; all ranks call this.

        Raises:
            ReplicasDiverged: parameters differ, and are not to be repaired.
        """
        self._finish()
        self._start()
        self._finish()

    def _after_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self.steps += 1
        self._finish()
        if self.steps % self._every == 0 and not self._engine.local_only:
            self._start()

    @torch.no_grad()
    def _start(self) -> None:
        """Hash the compared tensors, and start gathering one digest of them all."""
        if self._comm.size == 1 or not self._compared:
            return
        group, device = self._comm.group, self._compared[0][1].device
        if not queues_on_streams(served_backends(group).get(device.type, "")):
            device = group_device(group)
        digests = torch.stack([tensor_digest(tensor).to(device) for _, tensor in self._compared])
        rows = gather_rows_async(mixed_digest(digests).reshape(1), self._comm.group)
        self._pending = self.steps, digests, rows

    def _finish(self) -> None:
        """Compare the gathered digests, if any."""
        if self._pending is None:
            return
        (step, digests, rows), self._pending = self._pending, None
        self.comparisons += 1
        if len({row.item() for row in rows.wait()}) == 1:
            return
        digests_of_rank = [row.tolist() for row in gather_rows(digests, self._comm.group)]
        divergence = find_divergence([name for name, _ in self._compared], digests_of_rank)
        assert divergence is not None, "digests of digests differ, so digests do"
        self._repair_or_raise(divergence, step)

    def _repair_or_raise(self, divergence: Divergence, step: int) -> None:
        found = f"after optimizer step {step}, {divergence}"
        source = self._repair
        if source is None or (divergence.majority and source in divergence.ranks):
            refused = f", and rank {source} was to repair it" if source is not None else ""
            raise ReplicasDiverged(
                f"{found}{refused}",
                rank=divergence.ranks[0],
                remedy="resume from the last checkpoint; if it happens again on that rank, suspect its memory, or "
                "code that changes parameters on one rank only",
            )
        broadcast_tensors(self._comm, [tensor for _, tensor in self._compared], source=source)
        self.repairs += 1
        if self._comm.rank == 0:
            stateful = bool(self._optimizer.state_dict().get("state"))
            suspect = "; its optimizer state may be wrong too" if stateful else ""
            log.warning("%s: all ranks now have rank %d's parameters%s", found, source, suspect)
