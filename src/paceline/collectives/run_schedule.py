"""Running a schedule over the send and receive of any process group.

Phases: check that all ranks run the same; execute the rounds (`schedule_send_recv`); report deliveries to the root
(`delivery_receipts`).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.distributed as dist

from paceline.collectives.chunk_buffers import ChunkBuffers, Region
from paceline.collectives.delivery_receipts import DeliveryReceipt, gather_receipts
from paceline.collectives.prove import prove
from paceline.collectives.schedule import Schedule
from paceline.collectives.schedule_send_recv import LockstepExecutor, StreamingExecutor
from paceline.errors import MismatchError, UsageError
from paceline.world.group_devices import queues_on_streams, served_backends

__all__ = ["SEGMENT_NBYTES", "ScheduleRun", "run_schedule"]

SEGMENT_NBYTES = 4 << 20  # of a piece: with less, calls cost more than bytes; with more, less overlaps


@dataclass(frozen=True)
class ScheduleRun:
    """Outcome of a run on this rank.

    Attributes:
        result: the vector, this rank's share of it, or `output`: a view, no copy.
        receipts: on the root with ``receipts=True``, one for each rank; else None.
    """

    result: torch.Tensor
    receipts: list[DeliveryReceipt] | None = None


def run_schedule(
    schedule: Schedule,
    tensor: torch.Tensor,
    output: torch.Tensor | None = None,
    *,
    group: dist.ProcessGroup | None = None,
    segment_nbytes: int = SEGMENT_NBYTES,
    receipts: bool = False,
    check: bool = True,
    orderly: bool = False,
    lockstep: bool | None = None,
    timeout: float = 60.0,
) -> ScheduleRun:
    """Execute `schedule` on this rank; all ranks of the group must call it with the same arguments.

    Args:
        schedule: the schedule; it is proven first (once).
        tensor: contiguous; the vector, changed in place. all-gather, gather: rank r contributes its share r.
        output: for all-to-all and send-recv: receives the result, of the same size.
        group: the process group; None: the default one.
        segment_nbytes: size of the pieces in which chunks travel.
        receipts: check every message at both ends, and give the root a receipt from every rank.
        check: first verify, by a small all-reduce, that all ranks run the same with the same settings and tensors.
        orderly: send to one rank after another, the next one when the last one has confirmed. A slow link then
            serves the messages in the order of the schedule; a fast one is delayed.
        lockstep: wait for every round as a whole; None: only where the backend needs it (NCCL).
        timeout: seconds that the root waits for each rank's records.

    Raises:
        UsageError: the schedule is wrong, the group has another size, or a tensor does not fit.
        MismatchError: the ranks passed different schedules, settings or tensors.
        CollectiveError: with `receipts`, on the root: a message is missing or arrived damaged; names it.

    Example:
        >>> from paceline.collectives.algorithms import make_schedule
        >>> schedule = make_schedule("all-reduce", "ring", dist.get_world_size())  # doctest: +SKIP
        >>> run_schedule(schedule, torch.ones(1000))  # doctest: +SKIP
    """
    rank = _check(schedule, tensor, group, segment_nbytes)
    buffers = ChunkBuffers(schedule, rank, tensor.detach(), None if output is None else output.detach())
    if lockstep is None:
        backends = served_backends(group) if dist.is_initialized() else {}
        lockstep = queues_on_streams(backends.get(tensor.device.type, ""))
    if check and schedule.ranks > 1:
        _agree(schedule, tensor, group, (segment_nbytes, receipts, orderly, lockstep))
    _copy_own_part(buffers)
    make = LockstepExecutor if lockstep else StreamingExecutor
    executor = make(buffers, group, segment_nbytes, checksums=receipts, orderly=orderly)
    try:
        with torch.inference_mode(tensor.is_inference()):
            executor.run()
    except Exception as error:
        if receipts:
            executor.log.error = f"{type(error).__name__}: {error}".partition("\n")[0]
            gather_receipts(buffers, executor.finish_log(failed=True), group, timeout)
        raise
    gathered = gather_receipts(buffers, executor.finish_log(), group, timeout) if receipts else None
    return ScheduleRun(buffers.result(), gathered)


def _check(
    schedule: Schedule, tensor: torch.Tensor, group: dist.ProcessGroup | None, segment_nbytes: int
) -> int:
    """Return this rank once it is known that the schedule can run here."""
    _prove_once(schedule)
    if segment_nbytes < 1:
        raise UsageError(f"segment_nbytes={segment_nbytes}: a piece has bytes", remedy="give 1 or more")
    if not dist.is_initialized():
        if schedule.ranks == 1:
            return 0
        raise UsageError("no process group is initialised", remedy="call paceline.init() first")
    size = dist.get_world_size(group)
    if size != schedule.ranks:
        raise UsageError(
            f"{schedule}, but the group has {size}", remedy="make the schedule for the size of the group"
        )
    if tensor.dtype == torch.bool and any(send.add for sends in schedule.rounds for send in sends):
        raise UsageError("bool tensors can't be summed", remedy="convert to an integer type")
    return dist.get_rank(group)


_prove_once = lru_cache(maxsize=256)(prove)


def _agree(
    schedule: Schedule,
    tensor: torch.Tensor,
    group: dist.ProcessGroup | None,
    settings: tuple[int | bool, ...],
) -> None:
    """Raise on all ranks if their schedules, settings or tensors differ."""
    text = f"{schedule} {schedule.chunks} {schedule.root} {hash(schedule.rounds)} {tensor.dtype} {settings}"
    digest = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "little")
    largest = torch.tensor([digest, tensor.numel(), -digest, -tensor.numel()], device=tensor.device)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    most_digest, most_numel, *negated = largest.tolist()
    if [-value for value in negated] != [most_digest, most_numel]:
        same_schedule = -negated[0] == most_digest
        differing = (
            "tensors of different sizes" if same_schedule else "different schedules, dtypes or settings"
        )
        raise MismatchError(
            f"{schedule}: the ranks passed {differing}; here {tensor.numel()} × {tensor.dtype}",
            rank=dist.get_rank(group),
            remedy="call run_schedule() with the same schedule, settings and kind of tensor on all ranks",
        )


def _copy_own_part(buffers: ChunkBuffers) -> None:
    """Copy the part that a rank sends to itself: schedules have messages between different ranks only."""
    op, ranks = buffers.schedule.op, buffers.schedule.ranks
    if op == "all-to-all":
        part = buffers.numel // ranks
        own = Region(0, buffers.rank * part, (buffers.rank + 1) * part)
        buffers.view(own._replace(tensor=1)).copy_(buffers.view(own))
    elif op == "send-recv" and ranks == 1:
        buffers.tensors[1].copy_(buffers.tensors[0])
