"""Builds the buckets once, in the order in which gradients become ready, alike on all ranks."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from paceline._core.format import format_bytes
from paceline.cost_model.bucket_assignment import deal_to_owners, join_uneven, plan_buckets
from paceline.parallel.buckets.bucket import ALIGN, Bucket
from paceline.parallel.buckets.grad_slot import GradSlot, storage_dtype, storage_numel
from paceline.parallel.compression.compressed_bucket import CompressedBucket
from paceline.parallel.compression.exchange_thread import ExchangeThread
from paceline.parallel.gradient_collectives import Comm
from paceline.parallel.strategy import Sync
from paceline.world.group_devices import group_device

__all__ = ["DEFAULT_LAYOUT", "Layout", "agree_order", "build_buckets", "return_freed_memory"]

log = logging.getLogger("paceline.parallel")

_CPU = torch.device("cpu")

_COMPRESSED_UNIT = 64
"""Each rank's part of a compressed bucket is a multiple of this many elements."""

_PADDING_NBYTES = 16 << 20
"""Padding that is worth a warning."""


@dataclass(frozen=True)
class Layout:
    """How gradients lie in buckets.

    Attributes:
        align: gradients and parts start at multiples of this many elements.
        in_parts: buckets divide into a part per rank, also where they are all-reduced.
    """

    align: int = ALIGN
    in_parts: bool = False


DEFAULT_LAYOUT = Layout()


def agree_order(comm: Comm, slots: Sequence[GradSlot], firings: Sequence[int]) -> list[int]:
    """Return the ready order for all ranks, and set every slot's `expected` firings; blocks for one broadcast.

    Both are rank 0's. A parameter is ready at its last firing; those that did not fire on rank 0 come last, in reverse
    registration order.

    Args:
        comm: the ranks.
        slots: the parameters.
        firings: the slots whose hooks fired in this rank's first backward, in order.
    """
    if not slots:
        return []
    last = {index: position for position, index in enumerate(firings)}
    seen = sorted(last, key=last.__getitem__)
    unseen = [slot.index for slot in reversed(slots) if slot.index not in last]
    device = slots[0].param.device
    order, expected = comm.broadcast_ints([seen + unseen, [slot.fired for slot in slots]], device)
    for slot, count in zip(slots, expected, strict=True):
        slot.expected = max(count, 1)
    return order


def return_freed_memory(device: torch.device) -> None:
    """Make glibc return freed memory of the CPU, so that what moves into a bucket does not count twice."""
    if device.type != "cpu":
        return
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _warn_of_padding(buckets: Sequence[Bucket], comm: Comm) -> None:
    """Warn on rank 0 where whole parameters among many ranks take more than twice their memory."""
    owned = [bucket for bucket in buckets if bucket.whole]
    held = sum(bucket.flat.nbytes for bucket in owned)
    needed = sum(slot.numel * bucket.flat.itemsize for bucket in owned for slot in bucket.slots)
    if comm.rank == 0 and held - needed > max(needed, _PADDING_NBYTES):
        log.warning(
            "%d ranks own %d whole parameters, too few to divide them evenly: on each rank their gradients take %s, of "
            "which %s are padding, and the parameters as much; shard among fewer ranks by a device mesh [replicas, "
            "shards]: DataParallel(..., group=mesh)",
            comm.shards,
            sum(len(bucket.slots) for bucket in owned),
            format_bytes(held),
            format_bytes(held - needed),
        )


def build_buckets(
    slots: Sequence[GradSlot],
    order: Sequence[int],
    plan: Sync,
    comm: Comm,
    *,
    status_length: int,
    status_device: torch.device = _CPU,
    sharded: bool,
    reduce_dtype: torch.dtype | None,
    hooked: bool = False,
    layout: Layout = DEFAULT_LAYOUT,
) -> list[Bucket]:
    """Build the buckets and move existing gradients (and, if sharded, the parameters) into them.

    The round status goes behind the gradients of the last bucket. It gets a bucket of its own if `sharded`, since every
    rank must see all of it, where the last bucket is compressed or its dtype can't count, and where a hook reduces.

    Args:
        slots: the parameters.
        order: their indices in ready order.
        plan: bucket size and compression.
        comm: the ranks.
        status_length: numbers of the round status.
        status_device: where it goes if there are no parameters and the group serves that.
        sharded: buckets are reduce-scattered.
        reduce_dtype: of gradients of bf16 and fp16 parameters; None: their own.
        hooked: a communication hook reduces them, and expects one gradient right behind the other.
        layout: of the buckets.

    Returns:
        The buckets in launch order; the last one holds the round status.
    """
    dtypes = [storage_dtype(slot.param, reduce_dtype) for slot in slots]
    sizes = [storage_numel(slot.param) * dtype.itemsize for slot, dtype in zip(slots, dtypes, strict=True)]
    costs = [slot.update_cost if sharded else None for slot in slots]
    compression = plan.compression_config
    sent_whole = [compression is None or compression.exempts(slot.name, slot.param) for slot in slots]
    kinds = [
        (slot.param.device, dtype, slot.param.dtype, whole, sharded and slot.consumer, cost is None)
        for slot, dtype, whole, cost in zip(slots, dtypes, sent_whole, costs, strict=True)
    ]
    grouped = plan_buckets(order, sizes, kinds, plan.bucket_caps(sum(sizes)))
    owned = [None if cost is None else kind for cost, kind in zip(costs, kinds, strict=True)]
    grouped = join_uneven(grouped, sizes, owned, comm.shards)
    loads = [0.0] * comm.shards
    countable = bool(grouped) and dtypes[grouped[-1][0]] in (torch.float32, torch.float64)
    in_parts = sharded or layout.in_parts
    inside = countable and not in_parts and not hooked and sent_whole[grouped[-1][0]]
    thread = None
    buckets = []
    for index, members in enumerate(grouped):
        device, compressed = slots[members[0]].param.device, not sent_whole[members[0]]
        here = [cost for cost in (costs[member] for member in members) if cost is not None]
        owners = deal_to_owners([sizes[member] for member in members], here, loads) if here else None
        bucket = Bucket(
            index,
            [slots[member] for member in members],
            dtypes[members[0]],
            device,
            tail=status_length if inside and index == len(grouped) - 1 else 0,
            shards=comm.shards if in_parts or compressed else 1,
            unit=_COMPRESSED_UNIT if compressed else layout.align,
            align=1 if hooked else layout.align,
            allocate=comm.allocate,
            owners=owners,
            own=(comm.shard, comm.shards) if sharded and plan.shard == "gradients" else None,
        )
        if compression is not None and compressed:
            thread = thread or ExchangeThread(device, on_stream=comm.queues(bucket.flat))
            bucket.compressed = CompressedBucket(bucket, compression, comm, thread, sharded=sharded)
        bucket.adopt_gradients()
        return_freed_memory(device)
        if sharded:
            bucket.adopt_parameters()
            return_freed_memory(device)
        buckets.append(bucket)
    _warn_of_padding(buckets, comm)
    if not inside:
        device = slots[0].param.device if slots else group_device(comm.group, status_device)
        buckets.append(Bucket.for_status(len(grouped), device, status_length, comm.allocate))
    return buckets
