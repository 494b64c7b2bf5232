"""Running a schedule for real, over the send and recv of any process group.

Phases: agree with the other ranks on what is run; carry out the rounds (`carry`); tell the root what was delivered.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache, partial

import torch
import torch.distributed as dist

from paceline.collectives.chunk_memory import ChunkMemory, Region
from paceline.collectives.delivery_receipts import DeliveryReceipt, collect
from paceline.collectives.prove import prove
from paceline.collectives.schedule import Schedule
from paceline.collectives.transfers import Lockstep, Streaming
from paceline.errors import MismatchError, UsageError

__all__ = ["SEGMENT_NBYTES", "ScheduleRun", "run_schedule"]

SEGMENT_NBYTES = 4 << 20  # of a piece: less, and calls take longer than bytes; more, and less happens at once
_LOCKSTEP = frozenset({"nccl"})


@dataclass(frozen=True)
class ScheduleRun:
    """What a run gave this rank.

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
    """Carry out `schedule` as this rank; all ranks of the group call it alike.

    Args:
        schedule: what is sent; it is proven first (once).
        tensor: contiguous; the vector, changed in place. all-gather, gather: its share r is what rank r brings.
        output: for all-to-all and send-recv: where the result goes, of the same size.
        group: the process group; None: the default one.
        segment_nbytes: size of the pieces in which chunks travel.
        receipts: have every message checked at both ends, and the root given a receipt of every rank.
        check: make sure first that all ranks run the same, in the same way, on tensors alike; a small all-reduce.
        orderly: send to one rank after another, the next one when the last one has confirmed. A slow link then
            serves first who is first in the schedule; on a fast one it is a delay.
        lockstep: wait for every round as a whole; None: only where the backend needs it (NCCL).
        timeout: seconds that the root waits for each rank's notes.

    Raises:
        UsageError: the schedule is wrong, the group has another size, a tensor does not fit.
        MismatchError: the ranks called it with different schedules, settings or tensors.
        CollectiveError: with `receipts`, on the root: a message is missing or arrived as another, and which one.

    Example:
        >>> from paceline.collectives.catalogue import schedule
        >>> run_schedule(schedule("all-reduce", "ring", dist.get_world_size()), torch.ones(1000))  # doctest: +SKIP
    """
    rank = _check(schedule, tensor, group, segment_nbytes)
    memory = ChunkMemory(schedule, rank, tensor.detach(), None if output is None else output.detach())
    together = lockstep if lockstep is not None else _backend(group, tensor) in _LOCKSTEP
    if check and schedule.ranks > 1:
        _agree(schedule, tensor, group, (segment_nbytes, receipts, orderly, together))
    if schedule.op in ("all-to-all", "send-recv"):
        _keep_own(schedule, memory, rank)
    make = Lockstep if together else partial(Streaming, orderly=orderly)
    carrier = make(schedule, memory, group, segment_nbytes, receipts)
    told: list[DeliveryReceipt] | None = None
    try:
        with torch.inference_mode(tensor.is_inference()):
            carrier.carry()
    except Exception as error:
        if receipts:
            carrier.log.error = f"{type(error).__name__}: {error}".partition("\n")[0]
            collect(schedule, memory, carrier.finished_log(failed=True), group, timeout)
        raise
    if receipts:
        told = collect(schedule, memory, carrier.finished_log(), group, timeout)
    return ScheduleRun(memory.result(), told)


def _check(
    schedule: Schedule, tensor: torch.Tensor, group: dist.ProcessGroup | None, segment_nbytes: int
) -> int:
    """Return this rank, once it is clear that the schedule can be run here."""
    _prove_once(schedule)
    if segment_nbytes < 1:
        raise UsageError(f"segment_nbytes={segment_nbytes}: a piece has bytes", remedy="give 1 or more")
    if not dist.is_initialized():
        if schedule.ranks == 1:
            return 0
        raise UsageError("there is no process group to run on", remedy="call paceline.init() first")
    size = dist.get_world_size(group)
    if size != schedule.ranks:
        raise UsageError(
            f"{schedule}, but the group has {size}", remedy="make the schedule for the size of the group"
        )
    if tensor.dtype == torch.bool and any(send.add for sends in schedule.rounds for send in sends):
        raise UsageError("bool tensors can't be summed", remedy="convert to an integer type")
    return dist.get_rank(group)


_prove_once = lru_cache(maxsize=256)(prove)


def _backend(group: dist.ProcessGroup | None, tensor: torch.Tensor) -> str:
    if not dist.is_initialized():
        return "none"
    return "nccl" if tensor.is_cuda and "nccl" in dist.get_backend(group) else dist.get_backend(group)


def _agree(
    schedule: Schedule,
    tensor: torch.Tensor,
    group: dist.ProcessGroup | None,
    settings: tuple[int | bool, ...],
) -> None:
    """Raise on all ranks if one of them runs another schedule, on another kind of tensor, or in another way."""
    words = f"{schedule} {schedule.chunks} {schedule.root} {hash(schedule.rounds)} {tensor.dtype} {settings}"
    digest = int.from_bytes(hashlib.blake2b(words.encode(), digest_size=7).digest(), "little")
    mine = torch.tensor([digest, tensor.numel(), -digest, -tensor.numel()], device=tensor.device)
    most = mine.clone()
    dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
    largest, smallest = most[:2].tolist(), (-most[2:]).tolist()
    if largest != smallest:
        what = (
            "different schedules, dtypes or settings"
            if largest[0] != smallest[0]
            else "tensors of different sizes"
        )
        raise MismatchError(
            f"{schedule}: the ranks came with {what}; here {tensor.numel()} × {tensor.dtype}",
            rank=dist.get_rank(group),
            remedy="call run() with the same schedule, the same settings and alike tensors on all ranks",
        )


def _keep_own(schedule: Schedule, memory: ChunkMemory, rank: int) -> None:
    """Copy what a rank sends to itself; a schedule knows of other ranks only."""
    if schedule.op == "send-recv":
        if schedule.ranks == 1:
            memory.tensors[1].copy_(memory.tensors[0])
        return
    part = memory.numel // schedule.ranks
    own = Region(0, rank * part, (rank + 1) * part)
    memory.view(own._replace(place=1)).copy_(memory.view(own))
